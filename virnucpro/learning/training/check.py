"""``virnucpro train --check``: what a training would read and need, before anything starts.

The labelled sequences are read and translated, and nothing is written. Time and memory are those of
a few batches of real frames on the first device, which is the only honest way to know them.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn

from virnucpro.encoders.readers import new_reader
from virnucpro.encoders.transfer import use_device
from virnucpro.ground.devices import Choice, as_size
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.log import counted, printable
from virnucpro.learning.labelled.frames import (
    ArrayRows,
    LabelledFrames,
    Texts,
    given_weights,
)
from virnucpro.learning.labelled.records import (
    SPLITS,
    Labelled,
    LabelledRecord,
    Split,
    check_groups,
    read_data_manifest,
    read_records,
    read_split,
    split_groups,
    warn_of_mixed_groups,
)
from virnucpro.learning.options import TrainOptions
from virnucpro.learning.training.loop import fitting, new_optimizer, precision_of
from virnucpro.learning.training.networks import Classifier, FrameClassifier, MaskedLanguageModel
from virnucpro.learning.training.objectives import FrameLabels, MaskedResidues, Objective
from virnucpro.learning.training.ranks import Ranks
from virnucpro.learning.training.request import (
    Training,
    check_split,
    describe_training,
    resolve_training,
)
from virnucpro.learning.training.train import encoder_of, new_reader_of
from virnucpro.sequences.composition import N_FEATURES, frame_composition
from virnucpro.sequences.genetic_code import genetic_code
from virnucpro.sequences.translate import chunk_record, translate_six_frames

_N_BATCHES = 3  # timed, after one that is not: the first loads what a device needs
_COMPOSITION_BYTES = 4 * N_FEATURES + 24  # of a frame in ``frames/``, beside its letters


@dataclass(slots=True)
class _Counts:
    """The frames of each record, and the first proteins for a sample."""

    records: list[LabelledRecord] = field(default_factory=list)
    n_frames: list[int] = field(default_factory=list)  # of each record, at all chunk sizes
    n_residues: int = 0
    proteins: list[str] = field(default_factory=list)


def check_training(options: TrainOptions, on_event: OnEvent) -> Iterator[str]:
    """Lines on frames, groups, time, memory and disk; at the end, what is missing.

    Raises:
        VirnucproError: as a training would raise it before its first step.
    """
    training, choice = resolve_training(options, on_event)
    yield from describe_training(training, choice)
    counts = _count(training, on_event)
    warn_of_mixed_groups(counts.records)
    splits = read_split(options.split) if options.split else None
    if splits is None:
        splits = split_groups(counts.records, options.seed)
    check_groups({record.group for record in counts.records}, splits)
    yield from _split_lines(counts, splits)
    check_split(counts.records, splits, training.settings.mode)
    n_train = sum(
        n
        for record, n in zip(counts.records, counts.n_frames, strict=True)
        if splits[record.group] == "train"
    )
    if counts.proteins and training.settings.fsdp:
        yield _shared_memory_line(training)
    elif counts.proteins:
        yield from _cost_lines(training, choice, counts, n_train)


def _count(training: Training, on_event: OnEvent) -> _Counts:
    """Read and translate everything. Memory holds the records, and one batch of proteins."""
    options, counts = training.options, _Counts()
    code, n_sample = genetic_code(options.genetic_code), options.batch_size * (_N_BATCHES + 1)
    for labelled, record in _told(read_records(read_data_manifest(options.data)), on_event):
        n_frames = 0
        for size in options.chunk_size:
            for orf in translate_six_frames(list(chunk_record(record, size)), code):
                n_frames += 1
                counts.n_residues += len(orf.protein)
                if len(counts.proteins) < n_sample:
                    counts.proteins.append(orf.protein)
        counts.records.append(labelled)
        counts.n_frames.append(n_frames)
    return counts


def _told(pairs: Iterable[Labelled], on_event: OnEvent) -> Iterator[Labelled]:
    n_bases = 0
    for labelled, record in pairs:
        on_event(Progress("reading the labelled sequences", n_bases, 0, "bases"))
        n_bases += len(record.sequence)
        yield labelled, record


def _split_lines(counts: _Counts, splits: Mapping[str, Split]) -> Iterator[str]:
    """A table: groups, records and frames by split and label."""
    groups: dict[tuple[Split, str], set[str]] = {}
    n_records: Counter[tuple[Split, str]] = Counter()
    n_frames: Counter[tuple[Split, str]] = Counter()
    for record, n in zip(counts.records, counts.n_frames, strict=True):
        key = splits[record.group], record.label
        groups.setdefault(key, set()).add(record.group)
        n_records[key] += 1
        n_frames[key] += n
    yield f"{'split':<12}{'label':<8}{'groups':>10}{'records':>12}{'frames':>14}"
    for split in SPLITS:
        for label in ("virus", "other"):
            key = split, label
            n_groups = len(groups.get(key, ()))
            yield (f"{split:<12}{label:<8}{n_groups:>10,}{n_records[key]:>12,}{n_frames[key]:>14,}")


def _cost_lines(training: Training, choice: Choice, counts: _Counts, n_train: int) -> Iterator[str]:
    device, settings = torch.device(choice.devices[0]), training.settings
    n_frames, n_ranks = sum(counts.n_frames), training.n_ranks
    use_device(device)
    with fitting(device):
        seconds, n_trained = _time_batches(training, device, counts.proteins)
    n_runs = training.options.seeds
    n_steps = settings.epochs * max(1, n_train // settings.effective_batch(n_ranks)) * n_runs
    if training.has_stored_vectors:
        n_batches = -(-n_frames // settings.batch_size)
        total = 0.0 if training.options.features else seconds * n_batches / n_ranks
        yield f"time        {_duration(total)} for the vectors, then minutes for the head"
    else:
        total = seconds * n_steps * settings.grad_accum_steps
        yield f"time        {_duration(total)}: {counted(n_steps, 'step')} of {seconds:.3g} s each"
    if device.type == "cuda":
        peak, where = torch.cuda.max_memory_allocated(device), "GPU memory of a process"
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        where = "memory of a process"
    yield f"memory      {as_size(peak)}, {where} with --batch-size {settings.batch_size}"
    n_bytes = n_frames * _COMPOSITION_BYTES + counts.n_residues
    if training.has_stored_vectors and not training.options.features:
        assert training.shape is not None, "vectors of an encoder"
        n_bytes += 4 * training.shape.dim * n_frames
    n_bytes += (settings.keep_checkpoints + 1) * 12 * n_trained * n_runs + 4 * n_trained
    free = shutil.disk_usage(_existing(training.output)).free
    yield f"disk        {as_size(n_bytes)} in {printable(training.output)}; {as_size(free)} free"


def _shared_memory_line(training: Training) -> str:
    """The memory of weights that are cut over the devices; one alone could not be measured."""
    module, _ = _module(training, _sample(["M"]))
    n_bytes = sum(
        (16 if weight.requires_grad else 4) * weight.numel() for weight in module.parameters()
    )
    n_ranks = training.n_ranks
    return (
        f"memory      {as_size(n_bytes // n_ranks)} for weights, gradients and moments on each of "
        f"{counted(n_ranks, 'device')}, derived; activations come on top"
    )


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _duration(seconds: float) -> str:
    return f"about {timedelta(seconds=round(seconds))}"


def _time_batches(
    training: Training, device: torch.device, proteins: list[str]
) -> tuple[float, int]:
    """Seconds of one batch, as it is learned or only embedded, and the number of weights learned.

    The weights of this process change, and are forgotten with it.
    """
    settings, frames = training.settings, _sample(proteins)
    module, objective = _module(training, frames)
    module.to(device)
    n_trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    optimizer = new_optimizer(module, settings.lr, settings)
    ranks, n_batches = Ranks(0, 1, device), max(2, len(frames) // settings.batch_size)
    begun = time.perf_counter()
    for number, rows in enumerate(np.array_split(np.arange(len(frames)), n_batches)):
        if number == 1:
            begun = time.perf_counter()
        with precision_of(settings, ranks.device):
            loss = module(objective.batch(rows, 0)) / objective.weight(rows)
        if not training.has_stored_vectors:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.detach().cpu()  # waits for the device
    return (time.perf_counter() - begun) / (n_batches - 1), n_trained


def _module(training: Training, frames: LabelledFrames) -> tuple[nn.Module, Objective[object]]:
    """What is trained, or for a head on stored vectors what makes them."""
    settings = training.settings
    if settings.mode == "pretrain":
        masked = MaskedResidues(frames.proteins, frames.proteins, settings.seed)
        return MaskedLanguageModel(encoder_of(training)), masked
    reader = new_reader_of(training)
    if training.has_stored_vectors:
        reader = new_reader("esm2", "mlp", encoder_of(training))
    classifier = Classifier(reader.width, training.options.hidden, training.options.dropout)
    return FrameClassifier(reader, classifier), FrameLabels(frames, frames, given_weights)


def _sample(proteins: list[str]) -> LabelledFrames:
    """Frames with these proteins; what else they have does not matter for time and memory."""
    n = len(proteins)
    numbers = np.arange(n)
    composition = np.repeat(frame_composition(["ACG" * 100]), n, axis=0)
    return LabelledFrames(
        Texts.of([str(number) for number in numbers]),
        Texts.of(proteins),
        ArrayRows.of(composition),
        numbers,
        numbers,
        numbers % 2 == 0,
        np.ones(n, dtype=np.float32),
        numbers,
        ArrayRows.of(np.empty((n, 0), dtype=np.float32)),
    )
