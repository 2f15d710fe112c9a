"""The results of a training: figures, the gain over the scorer, and the files for ``predict``.

All of it is made by the first rank, from log-odds that all ranks have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from virnucpro import __version__
from virnucpro.callers.calls import SURE, log_odds
from virnucpro.callers.join import Join
from virnucpro.encoders.base import Model
from virnucpro.encoders.catalogue import open_model
from virnucpro.encoders.esm2.model import ESM2
from virnucpro.encoders.esm2.weights import inspect_checkpoint, save_esm2
from virnucpro.encoders.families import EMBEDDED, PUBLISHED
from virnucpro.encoders.learned.file import Base, LearnedFacts, inspect_learned, save_learned
from virnucpro.encoders.learned.readers import MeanReader, NoReader, PaddedReader
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import LOGGER, announce, printable
from virnucpro.ground.numeric import Values
from virnucpro.learning.evaluation.metrics import CHANCE, NOT_DEFINED, auroc, auroc_interval
from virnucpro.learning.labelled.digests import TrainingDigests
from virnucpro.learning.labelled.frames import LabelledFrames
from virnucpro.learning.labelled.split import Split
from virnucpro.learning.labelled.store import FrameStore, Labels
from virnucpro.learning.training.calibration import Calibration, Units, calibrate, chunks_of
from virnucpro.learning.training.export import facts_of, find_trained, write_head
from virnucpro.learning.training.gain import Gain, measure_gain, write_gains
from virnucpro.learning.training.joining import ScoredFragments, fit_join, is_enough
from virnucpro.learning.training.networks import NETWORKS, FrameClassifier
from virnucpro.learning.training.request import EPOCHS, GAIN, HELD_OUT, Training
from virnucpro.learning.training.runs import Runs, read_runs
from virnucpro.scorer.nets import Scorer, embedded_scorer, load_scorer
from virnucpro.sequences.genetic_code import genetic_code

_SUREST = log_odds(1 - SURE)  # as far as the scores of a run tell

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Frames of held-out groups, and their log-odds by each network. (n_networks, n)"""

    split: Split
    frames: LabelledFrames
    odds: Values


@dataclass(slots=True)
class TrainingResults:
    """The results of a training, seed by seed; the files for ``predict`` are those of the first."""

    training: Training
    frames: FrameStore
    splits: Mapping[str, Split]
    scorer: Scorer = field(default_factory=lambda: load_scorer(embedded_scorer()))
    runs: Mapping[Split, list[Runs]] = field(default_factory=dict)
    gains: list[Gain] = field(default_factory=list)
    epochs: list[tuple[int, Figures]] = field(default_factory=list)

    def add(
        self,
        training: Training,
        module: FrameClassifier,
        scored: Sequence[Scored],
        history: Sequence[Figures],
    ) -> None:
        """Measure what was trained with one seed, and write what it leaves."""
        validation = scored[0]
        calibration = calibrate(validation.odds[0], validation.odds[-1], validation.frames)
        join = self._join(training, scored, calibration)
        self.epochs += [(training.settings.seed, row) for row in history]
        _write_epochs(training, self.epochs)
        write_gains(training.output / GAIN, self.gains)
        if not training.is_repeat:
            _write_figures(training, scored)
            labels = self.frames.labels.of_splits(self.splits, "train", "validation")
            _export(training, module, labels, calibration, join)

    def _join(
        self, training: Training, scored: Sequence[Scored], calibration: Calibration
    ) -> Join | None:
        """The join with the scorer, fitted to the validation groups; measured on all of these."""
        if not self.runs:
            options = training.options
            self.runs = read_runs(
                training.fasta,
                [self.splits[record.group] for record in self.frames.labels.records],
                options.chunk_size,
                self.scorer,
                genetic_code(options.genetic_code),
            )
        fragments = {
            part.split: self._unseen(part.split, self._fragments(part, calibration))
            for part in scored
        }
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

    def _unseen(self, split: Split, of_lengths: list[ScoredFragments]) -> list[ScoredFragments]:
        """The fragments of groups that the scorer was not trained on, if these are enough."""
        labels = self.frames.labels
        memory = TrainingDigests.of(self.scorer.trained_records, self.scorer.trained_groups)
        names = sorted({record.group for record in labels.records})  # as they are numbered
        trained = {
            record.group
            for record, digest in zip(labels.records, labels.digests, strict=True)
            if memory.has(digest, record.group)
        }
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

    def _fragments(self, scored: Scored, calibration: Calibration) -> list[ScoredFragments]:
        """Runs of chunks with what scorer and head say of them, by length."""
        frames, records = scored.frames, self.frames.labels.records
        even = np.ones(len(frames))
        units = chunks_of(scored.odds[-1], frames, even, calibration.frames)
        odds = (units.odds / calibration.temperature).clip(-_SUREST, _SUREST)
        is_virus = np.array([record.is_virus for record in records], dtype=np.bool_)
        group = np.unique([record.group for record in records], return_inverse=True)[1]
        chunk = np.unique(frames.chunk)
        return [run.with_head(chunk, odds, is_virus, group) for run in self.runs[scored.split]]


def _write_epochs(training: Training, epochs: Sequence[tuple[int, Figures]]) -> None:
    """A row for each epoch of each seed; not defined where it was not measured."""
    names = list(dict.fromkeys(name for _, row in epochs for name in row))
    names = [name for name in names if not name.endswith("_per_second")]  # never the same twice
    lines = ["\t".join(("seed", *names))]
    for seed, row in epochs:
        cells = (f"{row[name]:.6g}" if name in row else NOT_DEFINED for name in names)
        lines.append("\t".join((str(seed), *cells)))
    write_whole(training.output / EPOCHS, "\n".join([*lines, ""]))


def _write_figures(training: Training, scored: Sequence[Scored]) -> None:
    """AUROC of frames and of chunks (by their best frame), for each held-out split."""
    lines = ["split\tnetwork\tn_frames\tauroc_frames\tn_chunks\tauroc_chunks"]
    for part in scored:
        split, frames, odds = part.split, part.frames, part.odds
        for name, row in zip(NETWORKS[-len(odds) :], odds, strict=True):
            chunks = chunks_of(row, frames, np.ones(len(frames)), "max")
            of_frames, of_chunks = auroc(row, frames.is_virus, np.ones(len(frames))), chunks.auroc()
            cells = (split, name, len(frames), f"{of_frames:.4f}", len(chunks.odds))
            lines.append("\t".join(map(str, (*cells, f"{of_chunks:.4f}"))))
            if split == "validation":  # the test is not for choosing between trainings
                announce(f"{split}, {name}: AUROC of chunks {of_chunks:.3f}")
        if split == "validation":
            of_best = chunks_of(odds[-1], frames, np.ones(len(frames)), "max")
            _warn_of_chance(of_best, frames, training.settings.seed)
    write_whole(training.output / HELD_OUT, "\n".join([*lines, ""]))


def _warn_of_chance(chunks: Units, frames: LabelledFrames, seed: int) -> None:
    """Say of the network that knows most if it tells nothing: 0.5 is an AUROC of chance."""
    _, first = np.unique(frames.chunk, return_index=True)
    groups = frames.group[first]
    low, high = auroc_interval(chunks.odds, chunks.is_virus, groups, seed)
    if chunks.auroc() <= CHANCE or (low is not None and low <= CHANCE):
        interval = "" if low is None else f", 95 % interval {low:.3f} to {high:.3f}"
        LOGGER.warning(
            "the classifier is no better than chance on the validation groups (AUROC of chunks "
            "%.3f%s): "
            "label more groups, train for more --epochs, or start from another --model",
            chunks.auroc(),
            interval,
        )


def _export(
    training: Training,
    module: FrameClassifier,
    labels: Labels,
    calibration: Calibration,
    join: Join | None,
) -> None:
    """Write the encoder, if it was trained, and the calibrated head."""
    encoder = _export_encoder(training, module)
    if calibration.is_at_limit:
        LOGGER.warning(
            "the scores cannot be calibrated on the validation groups, which are told apart "
            "perfectly or not at all: label more groups"
        )
    chunk_size = training.options.chunk_size[0]
    facts = facts_of(encoder, calibration, chunk_size, _describe(training), join)
    is_trained = any(weight.requires_grad for weight in module.reader.parameters())
    trained_on = find_trained(labels, training.encoder, is_trained)
    write_head(training.head, module.classifier, facts, calibration, trained_on)
    announce(
        f"head: {printable(training.head)}, a chunk is the {calibration.frames} of its frames, "
        f"temperature {calibration.temperature:.2f}, exponent {calibration.exponent:.2f}, "
        f"threshold {calibration.threshold:.3f}"
    )


def _export_encoder(training: Training, module: FrameClassifier) -> Model:
    """Write what of the encoder was trained. -> what makes the vectors of frames"""
    folder, reader = training.encoder, module.reader
    if training.settings.mode == "finetune":
        folder = training.trained_encoder
        assert isinstance(reader.encoder, ESM2)
        save_esm2(folder, reader.encoder)
    if training.is_plain:
        assert folder is not None, "a head needs an encoder"
        return open_model(str(folder.absolute()), lambda _: None)
    assert isinstance(reader, MeanReader | PaddedReader | NoReader)
    base = None
    if folder is not None:
        base = Base(
            model=_name_of(training, folder), encoder_id=inspect_checkpoint(folder).encoder_id
        )
    network = reader.network.state_dict() if isinstance(reader, PaddedReader) else {}
    facts = LearnedFacts(
        encoding=training.options.encoding,
        architecture=training.options.architecture,
        dim=reader.width,
        base=base,
    )
    weights = {f"network.{name}": tensor.float().cpu().numpy() for name, tensor in network.items()}
    save_learned(training.learned_encoder, facts, weights)
    announce(f"encoder: {printable(training.learned_encoder)}")
    return inspect_learned(training.learned_encoder)


def _name_of(training: Training, folder: Path) -> str:
    """The name of the checkpoint for later runs; a trained one lies beside its reader."""
    if folder == training.trained_encoder:
        return folder.name
    model = training.options.model or EMBEDDED
    return model if model in (EMBEDDED, *PUBLISHED) else str(folder.absolute())


def _describe(training: Training) -> str:
    settings = training.settings
    return (
        f"{settings.mode}, {settings.epochs} epochs, seed {settings.seed}, chunks of "
        f"{' and '.join(map(str, training.options.chunk_size))} bases, by virnucpro {__version__}"
    )
