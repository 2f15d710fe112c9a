"""Training results: figures, the gain over the scorer, and the model for ``predict``.

The first rank computes all results, from log-odds gathered from all ranks. The gain is measured on
fragments of held-out groups, by length and seed. A fragment is a run of neighbouring chunks, which
the scorer reads as one sequence. Its bases come from the training's copy of all records, because
the frames do not cover every base. A model is one folder: an encoder or its name, and a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from virnucpro._version import __version__
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.numeric import FloatArray
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.base import Model
from virnucpro.models.esm2.loading import save_esm2
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.family import ModelFile
from virnucpro.models.lookup import has_model_name, open_model
from virnucpro.models.names import DEFAULT_MODEL
from virnucpro.models.trained_encoder import save_frame_network
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.kmers import Sketch
from virnucpro.training.evaluation.calibration import (
    N_CHUNKS,
    Calibration,
    ScoredFragments,
    calibrate,
    find_knot,
    fit_join,
    fold_log_odds,
    is_enough,
    select_chunks,
)
from virnucpro.training.evaluation.evaluate import with_known_groups
from virnucpro.training.evaluation.metrics import CHANCE, Samples, auroc, auroc_gain
from virnucpro.training.frame_dataset import FrameStore, LabelledFrames
from virnucpro.training.labelled_data import LabelledRecord, Split, group_digest
from virnucpro.training.networks import (
    NETWORKS,
    Classifier,
    FrameClassifier,
    MaskedLanguageModel,
    merge_adapters,
)
from virnucpro.training.reports import write_card, write_figures
from virnucpro.training.trained_data import read_trained
from virnucpro.training.training_config import TrainingFile, TrainingRun, load_known_groups
from virnucpro.viral.head import EncoderInfo, EnsembleWeights, Head, HeadInfo, Network
from virnucpro.viral.networks import Scorer
from virnucpro.viral.probability import SUREST
from virnucpro.viral.scoring import score_sequences

_TrainedOn = dict[str, Any]  # fields of ``Head``, by name; digests are ascending
Epochs = dict[int, list[dict[str, float]]]  # seed -> figures of each epoch
_Run = tuple[Split, int, int]  # part of the split, number of chunks, index of the first chunk
_HELD_OUT: tuple[Split, ...] = ("validation", "test")


@dataclass
class TrainingResults:
    """Training results, seed by seed. Files for ``predict`` come from the first seed."""

    training: TrainingRun
    store: FrameStore
    splits: Mapping[str, Split]
    parts: Mapping[Split, LabelledFrames]  # validation, then test if it has both labels
    scorer: Scorer = field(default_factory=Scorer.load_builtin)
    gains: list[_Gain] = field(default_factory=list)

    def add(
        self, training: TrainingRun, module: nn.Module, odds: Mapping[Split, FloatArray]
    ) -> None:
        """Measure the training with one seed, and write its results.

        Args:
            odds: (n_networks, n) log-odds per part, by each network, for the part's frames.
        """
        assert isinstance(module, FrameClassifier)
        validation_odds = odds["validation"]
        calibration = calibrate(validation_odds[0], validation_odds[-1], self.parts["validation"])
        join = self._join(training, odds, calibration)
        rows = (gain._asdict() for gain in self.gains)
        write_figures(training.output / TrainingFile.GAIN, _Gain._fields, rows, ".4f")
        if not training.is_repeat:
            self._write_figures(training, odds)
            learned = [r for r in self.store.records if self.splits[r.group] != "test"]
            kmers = self.store.sketch(self.splits, "train", "validation")
            _export(training, module, learned, kmers, calibration, join)
        write_card(training.output)

    def _join(
        self, training: TrainingRun, odds: Mapping[Split, FloatArray], calibration: Calibration
    ) -> EnsembleWeights | None:
        """Fit the ensemble to the validation groups, and measure its gain by part."""
        fragments = {}
        for split, network_odds in odds.items():
            frames = self.parts[split]
            chunks = select_chunks(
                network_odds[-1], frames, np.ones(len(frames)), calibration.frames
            )
            log_odds = (chunks.scores / calibration.temperature).clip(-SUREST, SUREST)
            chunk_numbers = np.unique(frames.chunk)
            scored_parts = [
                part.with_head(chunk_numbers, log_odds) for part in self.fragments[split]
            ]
            fragments[split] = self.unseen_groups(split, scored_parts)
        join = fit_join(fragments["validation"], self.scorer)
        if join is None:
            LOGGER.warning(
                "the head is not joined with the scorer, and calls by itself: each label needs two "
                "validation groups with records of a chunk or more"
            )
        for split, split_fragments in fragments.items():
            for length_fragments in split_fragments:
                gain = measure_gain(training.options.seed, split, length_fragments, join)
                if gain is not None:
                    self.gains.append(gain)
                    if (
                        split == "validation"
                    ):  # the test part must not guide the choice of a training
                        announce(gain.line)
        return join

    @cached_property
    def fragments(self) -> Mapping[Split, list[ScoredFragments]]:
        """Held-out fragments with scores from the scorer. Every seed is combined with them."""
        fasta = self.training.fasta
        options = self.training.options
        size = options.chunk_size[0]
        code = GeneticCode.from_number(options.genetic_code)
        return read_fragments(fasta, self.store, self.splits, size, self.scorer, code)

    @cached_property
    def trained_groups(self) -> Mapping[Split, set[int]]:
        """Numbers of held-out groups that the scorer was trained on, or close relatives of them."""
        memories = read_trained(None, self.scorer)
        trained: dict[Split, set[int]] = {split: set() for split in _HELD_OUT}
        sequences = read_fasta(self.training.fasta)
        store = self.store
        for labelled, group, record in zip(store.records, store.group, sequences, strict=True):
            split = self.splits[labelled.group]
            if split != "train" and with_known_groups(memories, labelled, record.sequence):
                trained[split].add(int(group))
        return trained

    def unseen_groups(
        self, split: Split, fragments_by_length: list[ScoredFragments]
    ) -> list[ScoredFragments]:
        """Drop groups that the scorer was trained on if enough groups remain. Otherwise warn."""
        trained = [*self.trained_groups[split]]
        unseen = [part.select(~np.isin(part.groups, trained)) for part in fragments_by_length]
        if not trained:
            return fragments_by_length
        if any(map(is_enough, unseen)):
            groups = format_count(len(trained), "group")
            announce(f"{split}: without {groups} that the scorer was trained on")
            return unseen
        LOGGER.warning(
            "the scorer was trained on %d of the %s groups: its AUROC is too good there, and the "
            "weight of the head too small",
            len(trained),
            split,
        )
        return fragments_by_length

    def _write_figures(self, training: TrainingRun, odds: Mapping[Split, FloatArray]) -> None:
        """Write the AUROC of frames and of chunks (by their best frame) for each part."""
        columns = ("split", "network", "n_frames", "auroc_frames", "n_chunks", "auroc_chunks")
        rows: list[dict[str, object]] = []
        for split, network_odds in odds.items():
            frames = self.parts[split]
            for name, row in zip(NETWORKS[-len(network_odds) :], network_odds, strict=True):
                chunks = select_chunks(row, frames, np.ones(len(frames)), "max")
                frame_auroc = auroc(row, frames.is_virus)
                chunk_auroc = chunks.auroc()
                figures = (split, name, len(frames), frame_auroc, len(chunks), chunk_auroc)
                rows.append(dict(zip(columns, figures, strict=True)))
                if split == "validation":  # the test part must not guide the choice of a training
                    announce(f"{split}, {name}: AUROC of chunks {chunk_auroc:.3f}")
            if split == "validation":
                _warn_of_chance(chunks, frames, training.options.seed)
        write_figures(training.output / TrainingFile.HELD_OUT, columns, rows, ".4f")


def write_epochs(training: TrainingRun, epochs: Epochs) -> None:
    """Write a row per epoch and seed. Figures that were not measured are not defined."""
    rows = [{"seed": seed, **row} for seed, history in epochs.items() for row in history]
    # Speeds are never the same twice.
    names = [name for name in chain(["seed"], *rows) if not name.endswith("_per_second")]
    write_figures(training.output / TrainingFile.EPOCHS, list(dict.fromkeys(names)), rows, ".6g")


def _warn_of_chance(chunks: Samples, frames: LabelledFrames, seed: int) -> None:
    """Warn if the last network is no better than chance, an AUROC of 0.5.

    Args:
        chunks: with scores from this network.
    """
    _, first = np.unique(frames.chunk, return_index=True)
    low, high = replace(chunks, groups=frames.group[first]).auroc_interval(seed)
    if chunks.auroc() <= CHANCE or (low is not None and low <= CHANCE):
        interval = "" if low is None else f", 95 % interval {low:.3f} to {high:.3f}"
        LOGGER.warning(
            "the classifier is no better than chance on the validation groups (AUROC of chunks "
            "%.3f%s): "
            "label more groups, train for more --epochs, or start from another --model",
            chunks.auroc(),
            interval,
        )


def read_fragments(
    fasta: Path,
    store: FrameStore,
    splits: Mapping[str, Split],
    size: int,
    scorer: Scorer,
    code: GeneticCode,
) -> dict[Split, list[ScoredFragments]]:
    """Score the fragments of the validation and test groups by the scorer.

    Args:
        fasta: all records, in number order.
        size: bases per chunk.

    Returns:
        Fragments by part, one item per length.
    """
    runs: list[_Run] = []

    def sequences() -> Iterator[str]:
        for run, bases in _cut_fragments(fasta, store, splits, size):
            runs.append(run)
            yield bases

    scores = score_sequences(sequences(), scorer, code)
    base = np.array(list(scores), dtype=np.float64)  # NaN for None
    fragments: dict[Split, list[ScoredFragments]] = {split: [] for split in _HELD_OUT}
    for split, n_chunks in product(_HELD_OUT, N_CHUNKS):
        indices = [index for index, run in enumerate(runs) if run[:2] == (split, n_chunks)]
        first = np.array([runs[index][2] for index in indices], dtype=np.int64)
        record = store.chunks[first, 0]
        fragments[split].append(
            ScoredFragments.from_scores(
                n_chunks * size,
                base[indices],
                store.is_virus[record],
                store.group[record],
                np.stack([first, first + n_chunks], axis=1),
            )
        )
    return fragments


def _cut_fragments(
    fasta: Path, store: FrameStore, splits: Mapping[str, Split], size: int
) -> Iterator[tuple[_Run, str]]:
    """Yield chunk runs from held-out records, each with its bases."""
    shortest = 0.9  # minimum length of a run, relative to its chunks end to end: they may overlap
    per_record = 4  # maximum number of runs per length, evenly spread
    rows = np.flatnonzero(store.chunks[:, 2] == size)
    begin = np.searchsorted(store.chunks[rows, 0], np.arange(len(store.records) + 1))
    records = zip(read_fasta(fasta), store.records, pairwise(begin.tolist()), strict=True)
    for record, labelled, (low, high) in records:
        split = splits[labelled.group]
        if split == "train":
            continue
        own = rows[low:high]
        for n_chunks in N_CHUNKS:
            n_runs = len(own) // n_chunks
            spread = np.linspace(0, n_runs - 1, min(n_runs, per_record)).astype(np.int64)
            for i in np.unique(spread) * n_chunks:
                start, last = store.chunks[own[[i, i + n_chunks - 1]], 1].tolist()
                bases = record.sequence[start : last + size]
                if len(bases) >= shortest * n_chunks * size:
                    yield (split, n_chunks, int(own[i])), bases


class _Gain(NamedTuple):
    """AUROC for fragments of one length, by the scorer, by the head, and by both.

    A fragment without a score counts as the lowest. Groups count nearly evenly.
    """

    seed: int
    split: Split
    n_bases: int
    n: int
    n_virus: int
    n_groups: int
    base: float
    head: float
    joined: float | None = None  # None: no ensemble
    gain: float | None = None  # of the ensemble over the scorer, with a 95 % interval over groups
    gain_low: float | None = None
    gain_high: float | None = None
    weight: float | None = None  # weight of the head's log-odds

    @property
    def line(self) -> str:
        """One line for the user."""
        alone = f"AUROC by the scorer {self.base:.3f}, by the head {self.head:.3f}"
        if self.joined is None or self.gain is None:
            return f"{self.split}, {self.n_bases:,} bases: {alone}, not joined"
        interval = ""
        if self.gain_low is not None and self.gain_high is not None:
            interval = f" ({self.gain_low:+.3f} to {self.gain_high:+.3f})"
        return (
            f"{self.split}, {self.n_bases:,} bases: {alone}, by both {self.joined:.3f}: gain "
            f"{self.gain:+.3f}{interval}, weight of the head {self.weight:.2f}"
        )


def measure_gain(
    seed: int, split: Split, fragments: ScoredFragments, join: EnsembleWeights | None
) -> _Gain | None:
    """Measure the gain of the ensemble over the scorer. None: a label is missing.

    On validation groups, to which the ensemble was fitted, the gain is cross-validated.
    """
    n_virus = int(fragments.is_virus.sum())
    n_groups = len(np.unique(fragments.groups))
    if not 0 < n_virus < len(fragments):
        return None
    base = fragments.group_by(fragments.scores)
    counts = (fragments.n_bases, len(fragments), n_virus, n_groups)
    gain = _Gain(seed, split, *counts, base.auroc(), fragments.group_by(fragments.head).auroc())
    if join is None:
        return gain
    knot = find_knot(join.knots, fragments.n_bases)
    log_odds = fragments.concatenate(knot)
    if split == "validation" and knot.head and is_enough(fragments):
        log_odds = fold_log_odds(fragments)
    joined = fragments.group_by(log_odds)
    difference, (low, high) = auroc_gain(base, joined, seed)
    return gain._replace(
        joined=joined.auroc(), gain=difference, gain_low=low, gain_high=high, weight=knot.head
    )


def _export(
    training: TrainingRun,
    module: FrameClassifier,
    records: Sequence[LabelledRecord],
    kmers: Sketch,
    calibration: Calibration,
    join: EnsembleWeights | None,
) -> None:
    """Write the encoder, or its name if it was not trained, and the calibrated head.

    Args:
        records: training records for the head.
        kmers: their sketch.
    """
    SafeDir(training.output).make_folder(training.model)
    encoder = _export_encoder(training, module)
    if calibration.is_at_limit:
        LOGGER.warning(
            "the scores cannot be calibrated on the validation groups, which are separated "
            "perfectly or not at all: label more groups"
        )
    options = training.options
    sizes = options.chunk_size
    facts = HeadInfo(
        encoders=(EncoderInfo.from_spec(encoder),),
        chunk_size=sizes[0],
        threshold=calibration.threshold,
        frame_rule=calibration.frames,
        exponent=calibration.exponent,
        training=f"{options.mode}, {options.epochs} epochs, seed {options.seed}, chunks of "
        f"{' and '.join(map(str, sizes))} bases, by virnucpro {__version__}",
        join=join,
    )
    is_trained = any(weight.requires_grad for weight in module.reader.parameters())
    trained_on = find_trained(records, kmers, load_known_groups(training.encoder), is_trained)
    write_head(training.head, module.classifier, facts, calibration, trained_on)
    announce(
        f"model: {printable(training.model)}, a chunk is the {calibration.frames} of its frames, "
        f"temperature {calibration.temperature:.2f}, exponent {calibration.exponent:.2f}, "
        f"threshold {calibration.threshold:.3f}"
    )


def _export_encoder(training: TrainingRun, module: FrameClassifier) -> Model:
    """Write the trained parts of the encoder, and return the model that computes frame vectors."""
    reader = module.reader
    options = training.options
    base: tuple[str | None, Model] | None = None
    if options.mode == "finetune":
        assert isinstance(reader.encoder, ESM2)
        merge_adapters(reader.encoder)
        save_esm2(training.model, reader.encoder)
        trained = open_model(str(training.model.absolute()), lambda _: None)
        if training.is_plain:
            return trained
        base = (None, trained)
    elif training.encoder is not None:
        name = options.model or DEFAULT_MODEL
        if Path(name).name != name or not has_model_name(name):
            name = str(training.encoder.path.absolute())
        base = (name, open_model(name, lambda _: None))
    path = training.model / ModelFile.LEARNED
    return save_frame_network(path, reader, options.encoding, options.architecture, base)


def save_pretrained(training: TrainingRun, module: nn.Module) -> None:
    """Write the pretrained encoder and its card."""
    assert isinstance(module, MaskedLanguageModel)
    SafeDir(training.output).make_folder(training.model)
    save_esm2(training.model, module.encoder, module.extra_tensors())
    write_card(training.output)
    announce(f"model: {printable(training.model)}")


def write_head(
    path: Path,
    classifier: Classifier,
    facts: HeadInfo,
    calibration: Calibration,
    trained_on: _TrainedOn,
) -> None:
    """Write the classifier with its calibration. Standardisation is folded into its weights."""
    zeros = torch.zeros(facts.dim)
    ones = torch.ones(facts.dim)
    protein = None
    if classifier.protein is not None:
        protein = _network(classifier.protein, zeros, ones, calibration.protein_temperature)
    shift = torch.cat([zeros, classifier.centre.cpu()])
    scale = torch.cat([ones, classifier.spread.cpu()])
    nucleotide = _network(classifier.nucleotide, shift, scale, calibration.temperature)
    Head(facts, protein, nucleotide, **trained_on).save(path)


def find_trained(
    records: Sequence[LabelledRecord], kmers: Sketch, encoder_head: Head | None, is_finetuned: bool
) -> _TrainedOn:
    """Collect the training data of the head and its encoder: digests and sketches.

    Args:
        known: the initial encoder's head.
        is_finetuned: the encoder was trained on ``records``, too.
    """
    own = np.unique(np.array([record.digest for record in records], dtype=np.uint64))
    groups = np.unique(
        np.array([group_digest(record.group) for record in records], dtype=np.uint64)
    )
    encoder_memories = [*read_trained(encoder_head, None).values()]
    if is_finetuned:
        encoder_memories.append((own, groups, kmers))
    encoder_records = [own[:0], *(memory[0] for memory in encoder_memories)]
    encoder_groups = [own[:0], *(memory[1] for memory in encoder_memories)]
    return {
        "trained_records": own,
        "trained_groups": groups,
        "trained_kmers": kmers,
        "encoder_records": np.unique(np.concatenate(encoder_records)),
        "encoder_groups": np.unique(np.concatenate(encoder_groups)),
        "encoder_kmers": Sketch.merge(memory[2] for memory in encoder_memories),
    }


def _network(network: nn.Sequential, shift: Tensor, scale: Tensor, temperature: float) -> Network:
    """Extract the linear layers. The first includes input standardisation, folded in float64."""
    linear = [module for module in network if isinstance(module, nn.Linear)]
    weights = [module.weight.detach().double().cpu() for module in linear]
    biases = [module.bias.detach().double().cpu() for module in linear]
    weights[0] = weights[0] / scale.double()
    biases[0] = biases[0] - weights[0] @ shift.double()
    layers = zip(weights, biases, strict=True)
    return Network(tuple((w.float().numpy(), b.float().numpy()) for w, b in layers), temperature)
