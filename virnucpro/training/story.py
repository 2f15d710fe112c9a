"""``virnucpro train``: from labelled FASTA to an encoder, a head, and what they are worth.

Three modes on one loop: a head on vectors that the engine made (``head``), encoder and head
together (``finetune``), or an encoder alone, on masked residues (``pretrain``). ``learn`` is
what every rank does; the first one writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from virnucpro import __version__
from virnucpro.encoders.esm2.model import ESM2, ESM2Shape
from virnucpro.encoders.esm2.weights import inspect_checkpoint, load_esm2, save_esm2
from virnucpro.errors import InputError
from virnucpro.evaluation.metrics import CHANCE, auroc, auroc_interval
from virnucpro.files import atomic
from virnucpro.labelled.frames import LabelledFrames, balanced_weights, given_weights
from virnucpro.labelled.split import read_split
from virnucpro.labelled.store import VECTORS, Frames, Labels
from virnucpro.log import LOGGER, announce, printable
from virnucpro.training.board import board
from virnucpro.training.calibration import Units, calibrate, chunks_of
from virnucpro.training.clock import Clock, profile_lines, speed_lines
from virnucpro.training.export import HEAD_FILE, digests_of, facts_of, write_head
from virnucpro.training.loop import B, Objective, Trainer, effective_batch, precision_of
from virnucpro.training.networks import (
    NETWORKS,
    Classifier,
    FrameClassifier,
    MaskedLanguageModel,
    new_encoder,
    training_kernel,
)
from virnucpro.training.objectives import FrameLabels, MaskedResidues, score_frames
from virnucpro.training.ranks import Ranks
from virnucpro.training.readers import (
    Architecture,
    Encoding,
    NoReader,
    Reader,
    blosum62,
    new_reader,
    one_hot,
)
from virnucpro.training.settings import Settings

_MOST_FRAMES = 20_000  # that are scored after each epoch
SPLIT, _HELD_OUT = "split.tsv", "held_out.tsv"
FRAMES, FASTA = "frames", "records.fa"
_FEATURES, _BOARD = "features", "tensorboard"
OF_A_TRAINING = (
    SPLIT,
    HEAD_FILE,
    _HELD_OUT,
    FRAMES,
    FASTA,
    _FEATURES,
    _BOARD,
    "checkpoints",
)  # in its folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What ``virnucpro train`` was asked for, checked but for what the data tell."""

    data: Path
    output: Path
    settings: Settings
    encoder: Path | None  # to start from; None: a new one of ``shape``
    shape: ESM2Shape | None  # None: there is no ESM-2 in it
    encoding: Encoding
    architecture: Architecture
    chunk_sizes: tuple[int, ...]  # bases; a head is for the first
    hidden: int  # width of the classifier
    dropout: float
    name: str  # of the encoder that is written
    is_profiled: bool = False

    @property
    def split(self) -> Path:
        return self.output / SPLIT

    @property
    def trained_encoder(self) -> Path:
        return self.output / self.name

    @property
    def head(self) -> Path:
        return self.output / HEAD_FILE

    @property
    def frames(self) -> Path:
        """The frames of all records, which every process maps."""
        return self.output / FRAMES

    @property
    def vectors(self) -> Path:
        """The vectors of these, for a head on vectors of the engine."""
        return self.frames / VECTORS

    @property
    def features(self) -> Path:
        """The run folder of the vectors that a head is trained on."""
        return self.output / _FEATURES

    @property
    def fasta(self) -> Path:
        """What these are made of."""
        return self.output / FASTA

    @property
    def is_of_predict(self) -> bool:
        """Whether frames become vectors as ``predict`` makes them: ESM-2, and the mean."""
        return (self.encoding, self.architecture) == ("esm2", "mlp")

    @property
    def has_stored_vectors(self) -> bool:
        """Whether the engine makes the vectors, once, before the training."""
        return self.settings.mode == "head" and self.is_of_predict


def learn(training: Training, ranks: Ranks) -> None:
    """
    Raises:
        VirnucproError: see ``errors``; finished epochs are kept.
    """
    frames, splits = Frames.open(training.frames), read_split(training.split)
    train = frames.select(splits, "train", training.chunk_sizes)
    held_out = frames.select(splits, "validation", training.chunk_sizes[:1])
    torch.manual_seed(training.settings.seed)
    if training.settings.mode == "pretrain":
        for split, part in (("train", train), ("validation", held_out)):
            _check_any(split, part)
        _pretrain(training, ranks, train, held_out)
        return
    test = frames.select(splits, "test", training.chunk_sizes[:1])
    for split, part in (("train", train), ("validation", held_out)):
        _check_labels(split, part)
    module = _classify(training, ranks, train, held_out)
    figures = []
    for split, part in (("validation", held_out), ("test", test)):
        if _has_both(part):
            with precision_of(training.settings, ranks.device):
                odds = score_frames(module, part, ranks).astype(np.float64)
            figures.append((split, part, odds))
    if ranks.is_first:
        _write_figures(training, figures)
        if training.is_of_predict:
            labels = frames.labels.of_splits(splits, "train", "validation")
            _export(training, module, labels, figures[0][1:])
        else:
            announce("predict cannot use this network; what was trained is in checkpoints/best.pt")


def _pretrain(
    training: Training,
    ranks: Ranks,
    train: LabelledFrames,
    held_out: LabelledFrames,
) -> None:
    settings = training.settings
    module = MaskedLanguageModel(_encoder(training, ranks.device))
    some = _some(held_out, settings.seed)
    objective = MaskedResidues(train.proteins, some.proteins, settings.seed)
    _train(training, ranks, module, objective)
    if ranks.is_first:
        save_esm2(training.trained_encoder, module.encoder, module.extra_tensors())
        announce(f"encoder: {printable(training.trained_encoder)}")


def _classify(
    training: Training,
    ranks: Ranks,
    train: LabelledFrames,
    held_out: LabelledFrames,
) -> FrameClassifier:
    settings = training.settings
    reader = _reader(training, ranks.device)
    dim = reader.width + train.vectors.width
    classifier = Classifier(dim, training.hidden, training.dropout)
    classifier.standardise(train.composition)
    weigh = balanced_weights if settings.class_weights == "auto" else given_weights
    objective = FrameLabels(train, _some(held_out, settings.seed), weigh)
    if ranks.is_first:
        for line in _count_lines(train, objective.weights):
            announce(line)
    module = FrameClassifier(reader, classifier)
    _train(training, ranks, module, objective)
    return module.eval()


def _train(
    training: Training,
    ranks: Ranks,
    module: nn.Module,
    objective: Objective[B],
) -> None:
    settings = training.settings
    if ranks.is_first:
        n = effective_batch(settings, ranks.world_size)
        announce(
            f"{objective.n_rows:,} {objective.unit} in an epoch; effective batch {n}: "
            f"{settings.batch_size} on each of {ranks.world_size} devices, "
            f"{settings.grad_accum_steps} steps added up"
        )
    clock = Clock(ranks.device if training.is_profiled else None)
    with board(training.output / _BOARD) as on_epoch:
        trainer = Trainer(
            module, objective, settings, ranks, training.output, ranks.tell, on_epoch, clock=clock
        )
        state = trainer.run()
    speeds = trainer.speeds()
    if ranks.is_first:
        lines = [f"best epoch: {state.best_epoch}", *speed_lines(speeds, objective.unit)]
        for line in (*lines, *(profile_lines(speeds) if training.is_profiled else ())):
            announce(line)


def _encoder(training: Training, device: torch.device) -> ESM2:
    """The one to start from, or a new one; in float32, and asking for gradients."""
    assert training.shape is not None, "an encoding without an encoder"
    kernel = training_kernel(device)
    if training.encoder is None:
        return new_encoder(training.shape, kernel)
    cpu = torch.device("cpu")  # moved to its device with what is trained beside it
    encoder = load_esm2(training.encoder, training.shape.n_layers, torch.float32, cpu)
    encoder.attend = kernel
    return encoder.requires_grad_(training.settings.mode != "head")


def _reader(training: Training, device: torch.device) -> Reader:
    if training.has_stored_vectors or training.encoding == "composition":
        return NoReader()
    match training.encoding:
        case "onehot":
            table = one_hot()
        case "blosum62":
            table = blosum62()
        case "esm2":
            encoder = _encoder(training, device)
            return new_reader(encoder, encoder.shape.dim, training.architecture)
    return new_reader(table, table.rows.shape[1], training.architecture)


def _some(frames: LabelledFrames, seed: int) -> LabelledFrames:
    """As many as are worth the time after each epoch."""
    order = np.random.default_rng([seed, len(frames)]).permutation(len(frames))
    return frames.take(np.sort(order[:_MOST_FRAMES]))


def _check_any(split: str, frames: LabelledFrames) -> None:
    """
    Raises:
        InputError: there are none.
    """
    if not len(frames):
        raise InputError(
            f"the {split} groups have no frame without a stop",
            hint="give more data, or a smaller --chunk-size",
        )


def _check_labels(split: str, frames: LabelledFrames) -> None:
    """
    Raises:
        InputError: the frames are of one label only.
    """
    n_virus = int(frames.is_virus.sum())
    if not _has_both(frames):
        raise InputError(
            f"the {split} groups have {n_virus:,} viral frames, {len(frames) - n_virus:,} others",
            hint="both are needed: label more groups, or edit split.tsv and give it with --split",
        )


def _has_both(frames: LabelledFrames) -> bool:
    return 0 < int(frames.is_virus.sum()) < len(frames)


def _count_lines(frames: LabelledFrames, weight: NDArray[np.float32]) -> list[str]:
    """What there is of each class, and how much it counts."""
    names = (("virus", frames.is_virus), ("other", ~frames.is_virus))
    return [
        f"{name}: {int(rows.sum()):,} frames of {len(np.unique(frames.group[rows])):,} groups, "
        f"mean weight {weight[rows].mean():.3f}"
        for name, rows in names
    ]


def _write_figures(
    training: Training, figures: Sequence[tuple[str, LabelledFrames, NDArray[np.float64]]]
) -> None:
    """AUROC of frames and of chunks (by their best frame), for each held-out split."""
    with atomic(training.output / _HELD_OUT) as temporary, temporary.open("w") as out:
        out.write("split\tnetwork\tn_frames\tauroc_frames\tn_chunks\tauroc_chunks\n")
        for split, frames, odds in figures:
            for name, row in zip(NETWORKS[-len(odds) :], odds, strict=True):
                chunks = chunks_of(row, frames, np.ones(len(frames)), "max")
                of_frames = auroc(row, frames.is_virus, np.ones(len(frames)))
                out.write(
                    f"{split}\t{name}\t{len(frames)}\t{of_frames:.4f}\t{len(chunks.odds)}\t"
                    f"{chunks.auroc():.4f}\n"
                )
                if split == "validation":  # the test is not for choosing between trainings
                    announce(f"{split}, {name}: AUROC of chunks {chunks.auroc():.3f}")
            if split == "validation":
                _warn_of_chance(chunks, frames, training.settings.seed)


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
    validation: tuple[LabelledFrames, NDArray[np.float64]],
) -> None:
    """Write the encoder, if it was trained, and the calibrated head."""
    folder, is_finetuned = training.encoder, training.settings.mode == "finetune"
    if is_finetuned:
        folder = training.trained_encoder
        encoder = module.reader.encoder
        assert isinstance(encoder, ESM2)
        save_esm2(folder, encoder)
    assert folder is not None, "a head needs an encoder"
    frames, (protein, nucleotide) = validation
    calibration = calibrate(protein, nucleotide, frames)
    if calibration.is_at_limit:
        LOGGER.warning(
            "the scores cannot be calibrated on the validation groups, which are told apart "
            "perfectly or not at all: label more groups"
        )
    facts = facts_of(
        inspect_checkpoint(folder), calibration, training.chunk_sizes[0], _describe(training)
    )
    trained_on = digests_of(labels, training.encoder, is_finetuned)
    write_head(training.head, module.classifier, facts, calibration, trained_on)
    announce(
        f"head: {printable(training.head)}, a chunk is the {calibration.frames} of its frames, "
        f"temperature {calibration.temperature:.2f}, exponent {calibration.exponent:.2f}, "
        f"threshold {calibration.threshold:.3f}"
    )


def _describe(training: Training) -> str:
    settings = training.settings
    return (
        f"{settings.mode}, {settings.epochs} epochs, seed {settings.seed}, chunks of "
        f"{' and '.join(map(str, training.chunk_sizes))} bases, by virnucpro {__version__}"
    )
