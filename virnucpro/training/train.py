"""``virnucpro train``: from labelled FASTA to an encoder, a head, and their figures.

One loop has three modes: a head on vectors from the engine (``head``), encoder and head together
(``finetune``), or an encoder alone, on masked residues (``pretrain``). ``train`` runs the complete
training. Every rank runs ``_learn``, and the first rank writes.

``train --check`` shows what a training would read and need. It reads and translates the labelled
sequences and writes nothing. Time and memory are measured on a few batches of real frames, on the
first device.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from virnucpro.core.atomic_io import disk_error
from virnucpro.core.errors import FeatureFileError, InputError, UsageError, VirnucproError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import LOGGER, announce, format_bytes, format_count, printable
from virnucpro.core.numeric import FloatArray
from virnucpro.core.option_schema import convert_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.engine.base import Executor
from virnucpro.engine.local import ProcessExecutor
from virnucpro.models.device_choice import DeviceChoice
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.models.packing import use_device
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.kmers import N_FEATURES, frame_composition
from virnucpro.training.distributed import Ranks, run_on, run_under_torchrun, started_by_torchrun
from virnucpro.training.evaluation.calibration import MIN_GROUPS
from virnucpro.training.evaluation.metrics import Samples
from virnucpro.training.export import Epochs, TrainingResults, save_pretrained, write_epochs
from virnucpro.training.frame_dataset import (
    WEIGHTS,
    FrameStore,
    LabelledFrames,
    link_vectors,
    truncate,
)
from virnucpro.training.labelled_data import (
    SPLITS,
    LabelledRecord,
    Split,
    read_data_manifest,
    read_records,
    read_split,
    sample_records,
)
from virnucpro.training.networks import (
    FrameLabels,
    build_module,
    build_objective,
    empty_module,
    frame_log_odds,
    frame_samples,
    trained_encoder,
)
from virnucpro.training.options import Mode, TrainOptions
from virnucpro.training.reports import write_training_page
from virnucpro.training.trainer import (
    Trainer,
    count_steps,
    make_optimizer,
    profile_lines,
    select_fitting,
    speed_lines,
    training_precision,
)
from virnucpro.training.training_config import (
    TrainingFile,
    TrainingRun,
    check_features,
    check_parts,
    describe_training,
    open_training,
    read_splits,
    resolve_training,
)
from virnucpro.workflows.extract import extract
from virnucpro.workflows.extract_options import ExtractOptions

if TYPE_CHECKING:
    from virnucpro.training.event_file import EventFile


def train(
    options: TrainOptions, on_event: EventHandler, environ: Mapping[str, str] | None = None
) -> TrainingRun:
    """Train on all devices, or as one torchrun process.

    Args:
        environ: environment variables, which torchrun sets.

    Raises:
        VirnucproError: see ``errors``. Finished epochs are kept.
        SystemExit: another torchrun process failed first. The exit code belongs to its error.
    """
    is_new = not options.output_dir.is_dir()
    started = started_by_torchrun(environ or {})
    if started and (options.gpus or options.workers or not options.multi_gpu):
        raise UsageError(
            "--gpus, --workers and --no-multi-gpu do not go with torchrun",
            hint="torchrun chooses the devices: see --nproc-per-node and CUDA_VISIBLE_DEVICES",
        )
    training, choice = resolve_training(options, on_event, started.world_size if started else None)
    prepared = _prepare_folder(options, training, choice, on_event, create=is_new)
    work = partial(_learn, training)
    if started:
        run_under_torchrun(started, choice.kind, prepared, work, on_event)
    else:
        with prepared:
            n_ranks = training.n_ranks
            unit = f"of {format_count(n_ranks, 'process', 'processes')} ready"
            on_event(Progress("starting the training", 0, 0, unit))
            run_on(choice.devices, work, on_event)
    return training


@contextmanager
def _prepare_folder(
    options: TrainOptions,
    training: TrainingRun,
    choice: DeviceChoice,
    on_event: EventHandler,
    *,
    create: bool,
) -> Iterator[None]:
    """Lock the folder, and fill it with everything that the training processes read.

    Args:
        create: create the folder if it is missing. False for a folder that existed at first, which
            may have been moved since.
    """
    with open_run_dir(training.output).locked_for_run(create=create):
        open_training(training, on_event)
        for line in describe_training(training, choice):
            announce(line)
        if _import_event_file() is None:
            LOGGER.warning(
                "%s/ is not written: TensorBoard is not installed (hint: `pip install "
                "'virnucpro[train]'`; all figures are also in %s)",
                TrainingFile.TENSORBOARD,
                TrainingFile.EPOCHS,
            )
        if training.has_stored_vectors:
            if options.features is None:
                _extract(options, training, on_event)
            with _option_source(options.features):
                link_vectors(training.frames, training.features)
        yield
        write_training_page(training.output)


@contextmanager
def _option_source(features: Path | None) -> Iterator[None]:
    """Report damaged --features vectors as an input error.

    Raises:
        InputError: the vectors are damaged, or belong to other sequences.
    """
    try:
        yield
    except FeatureFileError as error:
        if features is None:
            raise
        raise InputError(
            f"--features: {error}",
            hint="give the run folder of `virnucpro extract` on the same files with the same "
            "--chunk-size; if it is damaged, run that command again with --resume",
        ) from error


def _extract(options: TrainOptions, training: TrainingRun, on_event: EventHandler) -> None:
    """Compute, or complete, the vectors that a head is trained on, as ``extract`` does."""
    assert training.encoder is not None, "vectors of an encoder"
    extraction = convert_options(
        options,
        ExtractOptions,
        input=(training.fasta,),
        input_type="nucleotide",
        output_dir=training.features,
        report=False,
        chunk_size=options.chunk_size[0],
        model=str(training.encoder.path),
        resume=open_run_dir(training.features).read_manifest() is not None,
    )

    def executor_on(devices: Sequence[str]) -> Executor:
        return ProcessExecutor(devices if options.multi_gpu else devices[:1])

    open_run_dir(training.output).make_folder(training.features)
    if extract(extraction, on_event, executor_on, create=False).exit_code:
        raise VirnucproError(
            f"not every frame has a vector: see {training.features}",
            hint="run the same command again with --resume",
        )


def _learn(training: TrainingRun, ranks: Ranks) -> None:
    """Run the training on one rank.

    Raises:
        VirnucproError: see ``errors``. Finished epochs are kept.
    """
    if training.has_stored_vectors:
        torch.set_num_threads(1)  # matrices are so small that threads only wait for each other
    store = FrameStore.open(training.frames)
    splits = read_split(training.split)
    chunk_sizes = training.options.chunk_size
    train = store.select(splits, "train", chunk_sizes)
    held_out = store.select(splits, "validation", chunk_sizes[:1])
    if training.options.mode == "pretrain":
        trainer = _train(training, ranks, train, held_out, {})
        if ranks.is_first:
            _show_end(training, trainer, None)
            save_pretrained(training, _whole_module(training, trainer, train))
        return
    test = store.select(splits, "test", chunk_sizes[:1])
    parts: dict[Split, LabelledFrames] = {"validation": held_out}
    if 0 < test.is_virus.sum() < len(test):
        parts["test"] = test
    results = TrainingResults(training, store, splits, parts) if ranks.is_first else None
    epochs: Epochs = {}
    for number in range(training.options.seeds):
        repeated = training.repeat(number)
        n_more = (training.options.seeds - number - 1) * training.options.epochs
        trainer = _train(repeated, ranks, train, held_out, epochs, n_more)
        module = trainer.module.eval()
        with training_precision(training.options, ranks.device):
            odds: dict[Split, FloatArray] = {
                split: frame_log_odds(module, part, ranks).astype(np.float64)
                for split, part in parts.items()
            }
        if results is not None:
            weights = WEIGHTS[repeated.options.class_weights](held_out)
            log_odds = odds["validation"][-1].astype(np.float32)
            _show_end(repeated, trainer, frame_samples(log_odds, held_out, weights))
            results.add(repeated, _whole_module(repeated, trainer, train), odds)


def _train(
    training: TrainingRun,
    ranks: Ranks,
    train: LabelledFrames,
    held_out: LabelledFrames,
    epochs: Epochs,
    n_more_epochs: int = 0,
) -> Trainer:
    """Train a module, and write its epochs as they end. They are added to ``epochs``, by seed.

    Args:
        n_more_epochs: epochs in the trainings that follow, for the time left.
    """
    settings = training.options
    torch.manual_seed(settings.seed)
    # The first rank sends sharded weights to the other ranks, so only its own weights are used.
    is_empty = settings.fsdp and not ranks.is_first
    module = empty_module(training, train.dim) if is_empty else build_module(training, train)
    objective = build_objective(training, train, _sample_rows(held_out, settings.seed))
    if ranks.is_first:
        if isinstance(objective, FrameLabels):
            for line in _count_lines(train, objective.weights):
                announce(line)
        if training.is_repeat:
            announce(f"once more, with seed {settings.seed}")
        n = settings.effective_batch(ranks.world_size)
        announce(
            f"effective batch {n}: "
            f"{settings.batch_size} on each of {format_count(ranks.world_size, 'device')}, "
            f"over {format_count(settings.grad_accum_steps, 'step')}"
        )
    with closing(
        _Board(SafeDir(training.output), training.checkpoint_dir / TrainingFile.TENSORBOARD)
    ) as board:

        def on_epoch(row: dict[str, float]) -> None:
            board.on_epoch(row)
            write_epochs(training, epochs | {settings.seed: trainer.state.history})

        trainer = Trainer(
            module,
            objective,
            settings,
            ranks,
            training.checkpoint_dir,
            on_epoch,
            board.on_step,
            n_more_epochs=n_more_epochs,
        )
        state = trainer.run()
    epochs[settings.seed] = state.history
    clocks = ranks.gather(trainer.clock)
    if ranks.is_first:
        lines = [f"best epoch: {state.best_epoch}", *speed_lines(clocks)]
        for line in (*lines, *(profile_lines(clocks) if settings.profile else ())):
            announce(line)
        write_epochs(training, epochs)  # ``on_epoch`` does not run if all epochs were already done
    return trainer


def _show_end(training: TrainingRun, trainer: Trainer, samples: Samples | None) -> None:
    """Show the end of the training in TensorBoard, if this start trained an epoch."""
    state = trainer.state
    options = training.options
    if state.epoch > trainer.first and state.best_epoch:
        row = state.history[state.best_epoch - 1]
        tree = SafeDir(training.output)
        folder = training.checkpoint_dir / TrainingFile.TENSORBOARD
        _show_best(tree, folder, options.network_options | options.loop_options, row, samples)


def _show_best(
    tree: SafeDir,
    folder: Path,
    options: Mapping[str, object],
    row: Mapping[str, float],
    samples: Samples | None,
) -> None:
    """Show hyper-parameters with the best epoch's figures, and its curves.

    The x axis of the reliability curve is the mean bin score, in percent, instead of a step.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in options.items()
    }
    best = {f"best/{name}": value for name, value in row.items()}
    event_file = _import_event_file()
    if event_file is None:
        return
    with _writing_below(folder), event_file(tree, folder / "best", 0) as events:
        events.add_options(plain, best)
        if samples is not None:
            events.add_precision("precision and recall", samples)
            curve = samples.reliability()
            for score, share in zip(curve.mean_score, curve.virus_shares, strict=True):
                events.add_scalar("reliability", share, round(100 * score))


@contextmanager
def _writing_below(folder: Path) -> Iterator[None]:
    """Convert errors from writing files below a folder into ours.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, error.filename or folder) from error


def _whole_module(training: TrainingRun, trainer: Trainer, train: LabelledFrames) -> nn.Module:
    """Return the trained module. If it is sharded over ranks, return a complete copy."""
    if trainer.ranks.world_size == 1 or not training.options.fsdp:
        return trainer.module
    module = build_module(training, train)
    trainer.checkpoints.load_best(module)
    return module.eval()


@cache
def _import_event_file() -> type[EventFile] | None:
    """Import the TensorBoard file writer, or return None if TensorBoard is missing."""
    try:
        from virnucpro.training.event_file import EventFile
    except ModuleNotFoundError:
        return None
    return EventFile


class _Board:
    """The training figures in TensorBoard, for the first rank alone.

    The first epoch or step after a start replaces what an earlier start wrote from there on, so
    that a resumed training has every point once.

    Raises:
        OutputError, StorageError: from any method, as ``SafeDir.atomic_write``.
    """

    def __init__(self, tree: SafeDir, folder: Path) -> None:
        self._tree = tree
        self._folder = folder
        self._files: dict[str, EventFile] = {}
        self._told = 0.0  # time of the last step shown

    def on_epoch(self, row: Mapping[str, float]) -> None:
        """Show an epoch's figures."""
        figures = {name: value for name, value in row.items() if name != "epoch"}
        self._show("", int(row["epoch"]), figures)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show a step's figures, unless others were shown a moment ago."""
        seconds_between_steps = 0.2  # in TensorBoard; a step for a head alone takes a millisecond
        now = time.monotonic()
        if now - self._told >= seconds_between_steps:
            self._told = now
            self._show("steps", step, figures)

    def _show(self, part: str, step: int, figures: Mapping[str, float]) -> None:
        event_file = _import_event_file()
        if event_file is None:
            return
        with _writing_below(self._folder):
            if part not in self._files:
                self._files[part] = event_file(self._tree, self._folder / part, step)
            events = self._files[part]
            for name, value in figures.items():
                events.add_scalar(name, value, step)
            events.flush()

    def close(self) -> None:
        """Write buffered figures, and close the files."""
        with _writing_below(self._folder):
            for events in self._files.values():
                events.close()


def _sample_rows(frames: LabelledFrames, seed: int) -> LabelledFrames:
    """Choose the validation frames that are scored after each epoch."""
    max_frames = 20_000  # scored after each epoch
    order = np.random.default_rng([seed, len(frames)]).permutation(len(frames))
    return frames.select(np.sort(order[:max_frames]))


def _count_lines(frames: LabelledFrames, weight: NDArray[np.float32]) -> list[str]:
    """Return lines with frame count and weight per label."""
    names = (("virus", frames.is_virus), ("other", ~frames.is_virus))
    return [
        f"{name}: {int(rows.sum()):,} frames of {len(np.unique(frames.group[rows])):,} groups, "
        f"mean weight {weight[rows].mean():.3f}"
        for name, rows in names
    ]


def check_training(options: TrainOptions, on_event: EventHandler) -> Iterator[str]:
    """Yield lines about frames, groups, time, memory and disk.

    Only one record and the proteins in the timed batches are in memory at a time.

    Raises:
        VirnucproError: any error that a training would raise before its first step, such as missing
            data.
    """
    training, choice = resolve_training(options, on_event)
    yield from describe_training(training, choice)
    code = GeneticCode.from_number(options.genetic_code)
    n_batches = 3  # timed batches; one earlier batch is not timed, since it also sets up the device
    n_timed = options.batch_size * (n_batches + 1)
    hashes: list[str] = []
    proteins: list[str] = []
    n_frames: dict[LabelledRecord, int] = {}
    n_bases = 0
    n_residues = 0
    for labelled, record in read_records(read_data_manifest(options.data), hashes.append):
        on_event(Progress("reading the labelled sequences", n_bases, 0, "bases"))
        n_bases += len(record.sequence)
        frame_proteins: list[str] = []
        for size in options.chunk_size:
            _, orfs = truncate(record, size, code)
            frame_proteins += [orf.protein for orf in orfs]
        n_residues += sum(map(len, frame_proteins))
        proteins += frame_proteins[: n_timed - len(proteins)]
        n_frames[labelled] = len(frame_proteins)
    if options.features:
        check_features(training, hashes)
    splits = read_splits(training, [*n_frames])
    yield from _split_lines(n_frames, splits)
    check_parts(n_frames, splits, options.mode)
    _warn_of_groups(n_frames, splits, options.mode)
    n_train = sum(n for record, n in n_frames.items() if splits[record.group] == "train")
    if options.fsdp:
        yield _shared_memory_line(training)
        return
    on_event(Progress("timing some batches", 0, 0, "done"))
    counts = (n_train, sum(n_frames.values()), n_residues)
    yield from _cost_lines(training, torch.device(choice.devices[0]), proteins, counts)


def _split_lines(
    n_frames: Mapping[LabelledRecord, int], splits: Mapping[str, Split]
) -> Iterator[str]:
    """Yield a table with groups, records and frames by split part and label."""
    yield f"{'split':<12}{'label':<8}{'groups':>10}{'records':>12}{'frames':>14}"
    for split, label in product(SPLITS, ("virus", "other")):
        own = [r for r in n_frames if (splits[r.group], r.label) == (split, label)]
        n_groups = len({record.group for record in own})
        total = sum(n_frames[record] for record in own)
        yield f"{split:<12}{label:<8}{n_groups:>10,}{len(own):>12,}{total:>14,}"


def _warn_of_groups(
    n_frames: Mapping[LabelledRecord, int], splits: Mapping[str, Split], mode: Mode
) -> None:
    """Warn about groups without a frame, and about too few to fit and measure the ensemble."""
    with_frames = {(record.group, record.label) for record, n in n_frames.items() if n}
    if empty := sorted({record.group for record in n_frames} - {group for group, _ in with_frames}):
        LOGGER.warning(
            "groups without a frame, which the training does not use: %s; all their frames "
            "have a stop: give other records, or a smaller --chunk-size",
            sample_records(empty),
        )
    validated = [label for group, label in with_frames if splits[group] == "validation"]
    n_groups = {label: validated.count(label) for label in ("virus", "other")}
    if mode != "pretrain" and min(n_groups.values()) < MIN_GROUPS:
        LOGGER.warning(
            "validation has frames of %s of virus and %d of other: the head will not be joined "
            "with the scorer, and perhaps not be calibrated; each label needs %d groups there",
            format_count(n_groups["virus"], "group"),
            n_groups["other"],
            MIN_GROUPS,
        )


def _cost_lines(
    training: TrainingRun, device: torch.device, proteins: list[str], counts: tuple[int, int, int]
) -> Iterator[str]:
    """Yield lines about time, memory and disk.

    Args:
        counts: frames to train on, frames in all parts, and residues in all frames.
    """
    options = training.options
    is_stored = training.has_stored_vectors
    n_train, n_frames, n_residues = counts
    n_ranks = training.n_ranks
    if device.type == "cpu":  # as many threads as a process will have
        torch.set_num_threads(1 if is_stored else max(1, torch.get_num_threads() // n_ranks))
    use_device(device)
    with select_fitting(device):
        seconds, n_trained = _time_batches(training, device, proteins)
    steps_per_epoch = count_steps(n_train, options.effective_batch(n_ranks))
    n_steps = options.epochs * steps_per_epoch * options.seeds
    composition_bytes = 4 * N_FEATURES + 24  # per frame in ``frames/``, without its letters
    n_bytes = n_frames * composition_bytes + n_residues + 4 * n_trained
    n_bytes += (options.keep_checkpoints + 1) * 12 * n_trained * options.seeds
    if not is_stored:
        total = _duration(seconds * n_steps * options.grad_accum_steps)
        yield f"time        {total}: {format_count(n_steps, 'step')} of {seconds:.3g} s each"
    elif options.features:
        yield "time        minutes for the head"
    else:
        assert training.shape is not None, "vectors of an encoder"
        n_bytes += 4 * training.shape.dim * n_frames
        total = _duration(seconds * -(-n_frames // options.batch_size) / n_ranks)
        yield f"time        {total} for the vectors, then minutes for the head"
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        where = "of the GPU"
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        where = "of RAM"
    batch = f"with --batch-size {options.batch_size}"
    yield f"memory      {format_bytes(peak)} {where} for each process, {batch}"
    output = training.output.absolute()
    existing = next(folder for folder in (output, *output.parents) if folder.is_dir())
    free = format_bytes(shutil.disk_usage(existing).free)
    yield f"disk        {format_bytes(n_bytes)} in {printable(training.output)}; {free} free"


def _shared_memory_line(training: TrainingRun) -> str:
    """Return a line on the memory for sharded weights. Computed, since one device may lack it."""
    module = empty_module(training, 0)  # no stored vectors
    n_bytes = sum(
        (16 if weight.requires_grad else 4) * weight.numel() for weight in module.parameters()
    )
    n_ranks = training.n_ranks
    return (
        f"memory      {format_bytes(n_bytes // n_ranks)} for weights, gradients and moments "
        f"on each of "
        f"{format_count(n_ranks, 'device')}, derived, without activations"
    )


def _duration(seconds: float) -> str:
    return f"about {timedelta(seconds=round(seconds))}"


def _time_batches(
    training: TrainingRun, device: torch.device, proteins: list[str]
) -> tuple[float, int]:
    """Time batches, in training or only embedded. The changed weights are discarded.

    Returns:
        Seconds per batch, and the trained weight count.
    """
    options = training.options
    frames = _sample(proteins)
    reader = None
    if training.has_stored_vectors:  # only the encoder takes time
        reader = FrameNetwork.create("esm2", "mlp", trained_encoder(training))
    module = build_module(training, frames, reader=reader).to(device)
    objective = build_objective(training, frames, frames)
    n_trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    optimizer = make_optimizer(module, options.lr, options)
    n_batches = max(2, len(frames) // options.batch_size)
    begun = time.perf_counter()
    for number, rows in enumerate(np.array_split(np.arange(len(frames)), n_batches)):
        if number == 1:
            begun = time.perf_counter()
        with training_precision(options, device):
            loss = module(objective.batch(rows, 0)) / objective.weight(rows)
        if not training.has_stored_vectors:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.detach().cpu()  # waits for the device
    return (time.perf_counter() - begun) / (n_batches - 1), n_trained


def _sample(proteins: list[str]) -> LabelledFrames:
    """Make frames with these proteins. Their other features do not affect time and memory."""
    composition = frame_composition(["ACG" * 100])
    return LabelledFrames.from_store(proteins, np.repeat(composition, len(proteins), axis=0))
