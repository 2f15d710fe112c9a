"""``virnucpro train``: from labelled FASTA to an encoder, a head, and what they are worth.

Three modes on one loop: a head on vectors that the engine made (``head``), encoder and head
together (``finetune``), or an encoder alone, on masked residues (``pretrain``). ``train`` is the
whole of it; ``learn`` is what every rank does; the first one writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from virnucpro.encoders.esm2.attention import attend_to_train
from virnucpro.encoders.esm2.model import ESM2
from virnucpro.encoders.esm2.weights import load_esm2, save_esm2
from virnucpro.encoders.readers import Reader, new_reader
from virnucpro.engine.executor import Executor
from virnucpro.engine.local import ProcessExecutor
from virnucpro.ground.devices import Choice
from virnucpro.ground.errors import InputError, UsageError, VirnucproError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import writing
from virnucpro.ground.log import announce, counted, printable
from virnucpro.ground.numeric import Values
from virnucpro.ground.option_fields import carry
from virnucpro.ground.tree import Tree
from virnucpro.learning.evaluation.metrics import Samples, reliability
from virnucpro.learning.labelled.frames import (
    LabelledFrames,
    balanced_weights,
    given_weights,
    recipe_weights,
)
from virnucpro.learning.labelled.records import Split, read_split
from virnucpro.learning.labelled.store import FrameStore, link_vectors
from virnucpro.learning.options import NetworkOptions, TrainOptions
from virnucpro.learning.pages import write_training_page
from virnucpro.learning.status import write_card
from virnucpro.learning.training.checkpoints import Checkpoints
from virnucpro.learning.training.loop import (
    Trainer,
    precision_of,
    profile_lines,
    speed_lines,
)
from virnucpro.learning.training.networks import (
    Classifier,
    FrameBatch,
    FrameClassifier,
    MaskedLanguageModel,
    adapt,
    forget_activations,
    new_encoder,
)
from virnucpro.learning.training.objectives import (
    B,
    FrameLabels,
    MaskedResidues,
    Objective,
    frame_log_odds,
    samples_of,
)
from virnucpro.learning.training.ranks import Ranks, Started, run_on, run_under_torchrun
from virnucpro.learning.training.request import (
    BOARD,
    Training,
    describe_training,
    open_training,
    resolve_training,
)
from virnucpro.learning.training.results import Epoch, TrainingResults, write_epochs
from virnucpro.run.folder import RunDir
from virnucpro.stories.options import ExtractOptions
from virnucpro.stories.pipeline import extract

M = TypeVar("M", bound=nn.Module)
_MOST_FRAMES = 20_000  # that are scored after each epoch
_SECONDS_BETWEEN_STEPS = 0.2  # in TensorBoard; a step of a head alone takes a millisecond
_WEIGHTS = {"auto": balanced_weights, "recipe": recipe_weights, "none": given_weights}


def train(options: TrainOptions, on_event: OnEvent, started: Started | None = None) -> Training:
    """Train, as the options say, on all devices, or as one of the processes of torchrun.

    Raises:
        VirnucproError: see ``errors``; finished epochs are kept.
        SystemExit: another process of torchrun failed first; with the exit code of its error.
    """
    if started and (options.gpus or options.workers or options.no_multi_gpu):
        raise UsageError(
            "--gpus, --workers and --no-multi-gpu do not go with torchrun",
            hint="torchrun chooses the devices: see --nproc-per-node and CUDA_VISIBLE_DEVICES",
        )
    training, choice = resolve_training(options, on_event, started.world_size if started else None)
    prepared, work = _prepared(training, choice, on_event), partial(learn, training)
    if started:
        run_under_torchrun(started, choice.kind, prepared, work, on_event)
    else:
        with prepared:
            run_on(choice.devices, work, on_event)
    return training


@contextmanager
def _prepared(training: Training, choice: Choice, on_event: OnEvent) -> Iterator[None]:
    """The folder is ours, and holds all that every process of the training reads."""
    with RunDir(training.output).in_use():
        open_training(training, on_event)
        for line in describe_training(training, choice):
            announce(line)
        if training.has_stored_vectors:
            if training.options.features is None:
                _extract(training, on_event)
            ids = FrameStore.open(training.frames).all.ids
            link_vectors(training.frames, training.features, ids)
        yield
        write_training_page(training.output)


def _extract(training: Training, on_event: OnEvent) -> None:
    """Make the vectors that a head is trained on, as ``extract`` makes them; or go on with it."""
    options = training.options
    extraction = carry(
        options,
        ExtractOptions,
        input=(training.fasta,),
        input_type="nucleotide",
        output_dir=training.features,
        report=False,
        chunk_size=options.chunk_size[0],
        model=str(training.encoder),
        resume=RunDir(training.features).read_manifest() is not None,
    )

    def executor_on(devices: Sequence[str]) -> Executor:
        return ProcessExecutor(devices[:1] if options.no_multi_gpu else devices)

    if extract(extraction, on_event, executor_on).exit_code:
        raise VirnucproError(
            f"not every frame has a vector: see {training.features}",
            hint="run the same command again with --resume",
        )


def learn(training: Training, ranks: Ranks) -> None:
    """
    Raises:
        VirnucproError: see ``errors``; finished epochs are kept.
    """
    store, splits = FrameStore.open(training.frames), read_split(training.split)
    chunk_sizes = training.options.chunk_size
    train = store.select(splits, "train", chunk_sizes)
    held_out = store.select(splits, "validation", chunk_sizes[:1])
    torch.manual_seed(training.settings.seed)
    if training.settings.mode == "pretrain":
        for split, part in (("train", train), ("validation", held_out)):
            _check_any(split, part)
        _pretrain(training, ranks, train, held_out)
        return
    test = store.select(splits, "test", chunk_sizes[:1])
    for split, part in (("train", train), ("validation", held_out)):
        _check_labels(split, part)
    parts: dict[Split, LabelledFrames] = {"validation": held_out}
    if _has_both(test):
        parts["test"] = test
    results = TrainingResults(training, store, splits, parts) if ranks.is_first else None
    epochs: list[Epoch] = []
    for number in range(training.options.seeds):
        repeated = training.repeat(number)
        torch.manual_seed(repeated.settings.seed)
        trainer = _classify(repeated, ranks, train, held_out, epochs)
        module = trainer.module.eval()
        assert isinstance(module, FrameClassifier)
        with precision_of(training.settings, ranks.device):
            odds: dict[Split, Values] = {
                split: frame_log_odds(module, part, ranks).astype(np.float64)
                for split, part in parts.items()
            }
        if results is not None:
            weights = _WEIGHTS[repeated.settings.class_weights](held_out)
            log_odds = odds["validation"][-1].astype(np.float32)
            _show_end(repeated, trainer, samples_of(log_odds, held_out, weights))
            whole = _to_export(repeated, ranks, module, partial(_network, repeated, train))
            results.add(repeated, whole, odds)


def _pretrain(
    training: Training,
    ranks: Ranks,
    train: LabelledFrames,
    held_out: LabelledFrames,
) -> None:
    settings = training.settings

    def build() -> MaskedLanguageModel:
        return MaskedLanguageModel(encoder_of(training))

    module = build()
    some = _some(held_out, settings.seed)
    objective = MaskedResidues(train.proteins, some.proteins, settings.seed)
    trainer = _train(training, ranks, module, objective, [])
    if ranks.is_first:
        _show_end(training, trainer, None)
        module = _to_export(training, ranks, module, build)
        Tree(training.output).make_folder(training.model)
        save_esm2(training.model, module.encoder, module.extra_tensors())
        write_card(training.output)
        announce(f"model: {printable(training.model)}")


def _classify(
    training: Training,
    ranks: Ranks,
    train: LabelledFrames,
    held_out: LabelledFrames,
    epochs: list[Epoch],
) -> Trainer[FrameBatch]:
    """Train a network; its epochs are added to those of other seeds."""
    settings = training.settings
    module = _network(training, train)
    weigh = _WEIGHTS[settings.class_weights]
    best = "validation_loss" if settings.best_by == "loss" else settings.best_by
    objective = FrameLabels(train, _some(held_out, settings.seed), weigh, best)
    if ranks.is_first:
        for line in _count_lines(train, objective.weights):
            announce(line)
    return _train(training, ranks, module, objective, epochs)


def _network(training: Training, train: LabelledFrames) -> FrameClassifier:
    """The network to train, standardised by the frames that it is trained on."""
    reader = new_reader_of(training)
    dim = reader.width + train.vectors.width
    classifier = Classifier(dim, training.options.hidden, training.options.dropout)
    classifier.standardise(train.composition)
    return FrameClassifier(reader, classifier)


def _train(
    training: Training,
    ranks: Ranks,
    module: nn.Module,
    objective: Objective[B],
    epochs: list[Epoch],
) -> Trainer[B]:
    """Train the module; its epochs are added to those of other seeds, and written as they end."""
    settings = training.settings
    if ranks.is_first:
        if training.is_repeat:
            announce(f"once more, with seed {settings.seed}")
        n = settings.effective_batch(ranks.world_size)
        announce(
            f"{objective.n_rows:,} {objective.unit} in an epoch; effective batch {n}: "
            f"{settings.batch_size} on each of {counted(ranks.world_size, 'device')}, "
            f"{counted(settings.grad_accum_steps, 'step')} added up"
        )
    is_profiled = training.options.profile

    def of_seed(history: Sequence[dict[str, float]]) -> list[Epoch]:
        return [(settings.seed, row) for row in history]

    with closing(_Board(training.place / BOARD)) as board:

        def on_epoch(row: dict[str, float]) -> None:
            board.on_epoch(row)
            write_epochs(training, [*epochs, *of_seed(trainer.state.history)])

        trainer = Trainer(
            module=module,
            objective=objective,
            settings=settings,
            ranks=ranks,
            folder=training.place,
            on_event=ranks.tell,
            on_epoch=on_epoch,
            on_step=board.on_step,
            is_profiled=is_profiled,
        )
        state = trainer.run()
    epochs += of_seed(state.history)
    clocks = ranks.gather(trainer.clock)
    if ranks.is_first:
        lines = [f"best epoch: {state.best_epoch}", *speed_lines(clocks, objective.unit)]
        for line in (*lines, *(profile_lines(clocks) if is_profiled else ())):
            announce(line)
        write_epochs(training, epochs)  # a training that was finished before has none to show
    return trainer


def _show_end(training: Training, trainer: Trainer[B], samples: Samples | None) -> None:
    """Show in TensorBoard how the training ended, if it went on in this start."""
    state = trainer.state
    if state.epoch == trainer.first or not state.best_epoch:
        return
    options = {**asdict(carry(training.options, NetworkOptions)), **asdict(training.settings)}
    with closing(_Board(training.place / BOARD)) as board:
        board.end(options, state.history[state.best_epoch - 1], samples)


def _to_export(training: Training, ranks: Ranks, module: M, build: Callable[[], M]) -> M:
    """The trained module; if it is cut over the ranks, a whole one with the same weights."""
    if ranks.world_size == 1 or not training.settings.fsdp:
        return module
    joined = build()
    Checkpoints(training.place / "checkpoints", 1).load_best(joined)
    return joined.eval()


class _Board:
    """The figures of a training in TensorBoard, for the first rank alone.

    The first epoch or step that is told after a start takes the place of what an earlier start
    wrote from there on, so that a training that goes on has every point once.

    Raises:
        OutputError, StorageError: of all methods, as ``files.writing``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}
        self._told = 0.0  # when the last step was

    def on_epoch(self, row: Mapping[str, float]) -> None:
        """Show the figures of an epoch."""
        figures = {name: value for name, value in row.items() if name != "epoch"}
        self._show("", int(row["epoch"]), figures)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show those of a step, if the last ones were shown some time ago."""
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN_STEPS:
            self._told = now
            self._show("steps", step, figures)

    def _show(self, part: str, place: int, figures: Mapping[str, float]) -> None:
        with writing(self._folder):
            writer = self._writer(part, place)
            for name, value in figures.items():
                writer.add_scalar(name, value, place)
            writer.flush()

    def _writer(self, part: str, place: int) -> SummaryWriter:
        if part not in self._writers:
            self._writers[part] = SummaryWriter(str(self._folder / part), purge_step=place)
        return self._writers[part]

    def end(
        self, options: Mapping[str, object], row: Mapping[str, float], samples: Samples | None
    ) -> None:
        """Show hyper-parameters beside the figures of the best epoch, and its curves.

        The reliability curve has the mean score of a bin, in percent, in the place of a step.
        """
        with writing(self._folder):
            writer = self._writer("best", 0)
            plain = {
                name: value if isinstance(value, (bool, int, float, str)) else str(value)
                for name, value in options.items()
            }
            writer.add_hparams(plain, {f"best/{name}": row[name] for name in row}, run_name=".")
            if samples is not None:
                labels, scores, weights = samples.is_virus, samples.scores, samples.weights
                writer.add_pr_curve("precision and recall", labels, scores, 0, weights=weights)
                curve = reliability(samples)
                for score, share in zip(curve.mean_score, curve.share_of_viruses, strict=True):
                    writer.add_scalar("reliability", share, round(100 * score))

    def close(self) -> None:
        """Write what waits."""
        with writing(self._folder):
            for writer in self._writers.values():
                writer.close()


def encoder_of(training: Training) -> ESM2:
    """The one to start from, or a new one; in float32, and asking for gradients."""
    assert training.shape is not None, "an encoding without an encoder"
    options = training.options
    if training.encoder is None:
        encoder = new_encoder(training.shape)
    else:
        cpu = torch.device("cpu")  # moved to its device with what is trained beside it
        encoder = load_esm2(training.encoder, training.shape.n_layers, torch.float32, cpu)
        encoder.attend = attend_to_train
        encoder.requires_grad_(training.settings.mode != "head")
    adapt(encoder, options.lora, options.lora_alpha, options.train_layers)
    if options.gradient_checkpointing or options.fsdp:
        forget_activations(encoder)
    return encoder


def new_reader_of(training: Training) -> Reader:
    if training.has_stored_vectors:
        return new_reader("composition", "mlp", None)
    encoding = training.options.encoding
    esm2 = encoder_of(training) if encoding == "esm2" else None
    return new_reader(encoding, training.options.architecture, esm2)


def _some(frames: LabelledFrames, seed: int) -> LabelledFrames:
    """The validation frames that are scored after each epoch."""
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
    """Lines with the number and the weight of the frames of each label."""
    names = (("virus", frames.is_virus), ("other", ~frames.is_virus))
    return [
        f"{name}: {int(rows.sum()):,} frames of {len(np.unique(frames.group[rows])):,} groups, "
        f"mean weight {weight[rows].mean():.3f}"
        for name, rows in names
    ]
