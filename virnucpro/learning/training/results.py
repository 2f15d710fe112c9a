"""The results of a training: figures, the gain over the scorer, and the files for ``predict``.

All of it is made by the first rank, from log-odds that all ranks have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from virnucpro.callers.calls import SURE, log_odds
from virnucpro.callers.join import Join
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import LOGGER, announce
from virnucpro.ground.numeric import Values
from virnucpro.learning.evaluation.metrics import (
    CHANCE,
    NOT_DEFINED,
    Samples,
    auroc,
    auroc_interval,
)
from virnucpro.learning.labelled.frames import LabelledFrames, Rows
from virnucpro.learning.labelled.records import TrainingDigests
from virnucpro.learning.labelled.split import Split
from virnucpro.learning.labelled.store import FrameStore
from virnucpro.learning.training.calibration import Calibration, calibrate, chunks_of
from virnucpro.learning.training.export import export
from virnucpro.learning.training.gain import Gain, measure_gain, read_fragments, write_gains
from virnucpro.learning.training.joining import ScoredFragments, fit_join, is_enough
from virnucpro.learning.training.networks import NETWORKS, FrameClassifier
from virnucpro.learning.training.request import EPOCHS, GAIN, HELD_OUT, Training
from virnucpro.scorer.nets import Scorer, own_scorer
from virnucpro.sequences.genetic_code import genetic_code

_SUREST = log_odds(1 - SURE)  # as far as the scores of a run tell

Figures = dict[str, float]


@dataclass(slots=True)
class TrainingResults:
    """The results of a training, seed by seed; the files for ``predict`` are those of the first."""

    training: Training
    store: FrameStore
    splits: Mapping[str, Split]
    parts: Mapping[Split, LabelledFrames]  # validation first, and what else has both labels
    scorer: Scorer = field(default_factory=own_scorer)
    fragments: Mapping[Split, list[ScoredFragments]] = field(default_factory=dict)
    gains: list[Gain] = field(default_factory=list)
    epochs: list[tuple[int, Figures]] = field(default_factory=list)

    def add(
        self,
        training: Training,
        module: FrameClassifier,
        odds: Mapping[Split, Values],
        history: Sequence[Figures],
    ) -> None:
        """Measure what was trained with one seed, and write what it leaves.

        ``odds`` are the log-odds of the frames of each part by each network, (n_networks, n).
        """
        of_validation = odds["validation"]
        calibration = calibrate(of_validation[0], of_validation[-1], self.parts["validation"])
        join = self._join(training, odds, calibration)
        self.epochs += [(training.settings.seed, row) for row in history]
        _write_epochs(training, self.epochs)
        write_gains(training.output / GAIN, self.gains)
        if not training.is_repeat:
            self._write_figures(training, odds)
            learned = [r for r in self.store.records if self.splits[r.group] != "test"]
            kmers = self.store.sketch(self.splits, "train", "validation")
            export(training, module, learned, kmers, calibration, join)

    def _join(
        self, training: Training, odds: Mapping[Split, Values], calibration: Calibration
    ) -> Join | None:
        """The join with the scorer, fitted to the validation groups; measured on all of these."""
        if not self.fragments:
            options = training.options
            size, code = options.chunk_size[0], genetic_code(options.genetic_code)
            self.fragments = read_fragments(
                training.fasta, self.store, self.splits, size, self.scorer, code
            )
        fragments = {}
        for split, of_frames in odds.items():
            chunk, log_odds = self._chunk_odds(split, of_frames[-1], calibration)
            of_lengths = [one.with_head(chunk, log_odds) for one in self.fragments[split]]
            fragments[split] = self.unseen(split, of_lengths)
        join = fit_join(fragments["validation"], self.scorer)
        if join is None:
            LOGGER.warning(
                "the head is not joined with the scorer, and calls by itself: each label needs two "
                "validation groups with records of a chunk or more"
            )
        for split, of_lengths in fragments.items():
            for of_length in of_lengths:
                gain = measure_gain(training.settings.seed, split, of_length, join)
                if gain is not None:
                    self.gains.append(gain)
                    if split == "validation":  # the test is not for choosing between trainings
                        announce(gain.line)
        return join

    def _chunk_odds(
        self, split: Split, odds: Values, calibration: Calibration
    ) -> tuple[Rows, Values]:
        """Numbers and calibrated log-odds of the chunks of a part, from those of its frames."""
        frames = self.parts[split]
        chunks = chunks_of(odds, frames, np.ones(len(frames)), calibration.frames)
        log_odds = (chunks.scores / calibration.temperature).clip(-_SUREST, _SUREST)
        return np.unique(frames.chunk), log_odds

    def unseen(self, split: Split, of_lengths: list[ScoredFragments]) -> list[ScoredFragments]:
        """The fragments of groups that the scorer was not trained on, if these are enough."""
        memory = TrainingDigests.of(self.scorer.trained_records, self.scorer.trained_groups)
        names = sorted({record.group for record in self.store.records})  # as they are numbered
        trained = {record.group for record in self.store.records if memory.has(record)}
        numbers = [number for number, name in enumerate(names) if name in trained]
        unseen = [part.where(~np.isin(part.group, numbers)) for part in of_lengths]
        n_trained = len(trained & {name for name in names if self.splits[name] == split})
        if not n_trained:
            return of_lengths
        if any(map(is_enough, unseen)):
            announce(f"{split}: {n_trained} groups are left out, as the scorer was trained on them")
            return unseen
        LOGGER.warning(
            "the scorer was trained on %d of the %s groups: its AUROC is too good there, and the "
            "weight of the head too small",
            n_trained,
            split,
        )
        return of_lengths

    def _write_figures(self, training: Training, odds: Mapping[Split, Values]) -> None:
        """AUROC of frames and of chunks (by their best frame), for each held-out split."""
        lines = ["split\tnetwork\tn_frames\tauroc_frames\tn_chunks\tauroc_chunks"]
        for split, of_networks in odds.items():
            frames = self.parts[split]
            for name, row in zip(NETWORKS[-len(of_networks) :], of_networks, strict=True):
                chunks = chunks_of(row, frames, np.ones(len(frames)), "max")
                of_frames, of_chunks = auroc(row, frames.is_virus), chunks.auroc()
                cells = (split, name, len(frames), f"{of_frames:.4f}", len(chunks))
                lines.append("\t".join(map(str, (*cells, f"{of_chunks:.4f}"))))
                if split == "validation":  # the test is not for choosing between trainings
                    announce(f"{split}, {name}: AUROC of chunks {of_chunks:.3f}")
            if split == "validation":
                _warn_of_chance(chunks, frames, training.settings.seed)
        write_whole(training.output / HELD_OUT, "\n".join([*lines, ""]))


def _write_epochs(training: Training, epochs: Sequence[tuple[int, Figures]]) -> None:
    """A row for each epoch of each seed; not defined where it was not measured."""
    names = list(dict.fromkeys(name for _, row in epochs for name in row))
    names = [name for name in names if not name.endswith("_per_second")]  # never the same twice
    lines = ["\t".join(("seed", *names))]
    for seed, row in epochs:
        cells = (f"{row[name]:.6g}" if name in row else NOT_DEFINED for name in names)
        lines.append("\t".join((str(seed), *cells)))
    write_whole(training.output / EPOCHS, "\n".join([*lines, ""]))


def _warn_of_chance(chunks: Samples, frames: LabelledFrames, seed: int) -> None:
    """Say of the network that knows most if it tells nothing: 0.5 is an AUROC of chance."""
    _, first = np.unique(frames.chunk, return_index=True)
    low, high = auroc_interval(replace(chunks, groups=frames.group[first]), seed)
    if chunks.auroc() <= CHANCE or (low is not None and low <= CHANCE):
        interval = "" if low is None else f", 95 % interval {low:.3f} to {high:.3f}"
        LOGGER.warning(
            "the classifier is no better than chance on the validation groups (AUROC of chunks "
            "%.3f%s): "
            "label more groups, train for more --epochs, or start from another --model",
            chunks.auroc(),
            interval,
        )
