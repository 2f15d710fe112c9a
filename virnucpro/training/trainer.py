"""The training loop for every mode, on one device or on many, and its checkpoints.

A step takes one effective batch, which all ranks know: the rows of an epoch, in an order drawn from
the seed, are divided among ranks and accumulated steps. The loss is divided by the weight of the
complete batch, so gradients do not depend on the division. All random numbers depend only on seed,
epoch and rank, so an epoch can be repeated from its checkpoint.

The first rank writes checkpoints, and all ranks read them. They contain complete tensors, even for
weights that are sharded over the ranks, so another number of ranks can read them. The best epoch is
stored a second time, before its checkpoint. If killed at any moment, the best file is at least as
new as the last checkpoint says. Checkpoints of older epochs are deleted after the new one is
written.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import ResumeError, UnavailableError, UsageError, VirnucproError
from virnucpro.core.events import Memory, Progress
from virnucpro.core.logging import announce, printable
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.base import Pending
from virnucpro.models.packing import copy_to_host
from virnucpro.training.distributed import Ranks
from virnucpro.training.frame_dataset import Rows
from virnucpro.training.networks import Objective, make_batches
from virnucpro.training.options import TrainOptions

_OnStep = Callable[[int, dict[str, float]], None]  # number and figures of a step
_BEST = "best.pt"


class _TrainingPart(StrEnum):
    """Parts of a training step, as reports name them."""

    DATA = "waiting for data"
    STEP = "forward and backward"
    OPTIMIZER = "optimizer"


@dataclass(slots=True)
class _ProgressState:
    """Training progress."""

    epoch: int = 0  # finished epochs
    step: int = 0
    best: float = -math.inf
    best_epoch: int = 0  # 0: no epoch was measured
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Clock:
    """The seconds that one rank has spent since its start, by activity.

    A GPU runs behind its host. With ``waits``, a lap first waits for the device. Then the parts are
    right, but nothing overlaps. Sums over epochs are right without it.
    """

    device: torch.device
    waits: bool = False
    n_rows: int = 0  # rows trained on, over all epochs
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        """Discard the time until now."""
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to ``part``."""
        if self.waits and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    @property
    def elapsed(self) -> float:
        return sum(self.seconds.values())

    @property
    def training_seconds(self) -> float:
        return sum(self.seconds.get(part, 0.0) for part in _TrainingPart)


@dataclass(slots=True)
class Trainer:
    module: nn.Module
    objective: Objective
    settings: TrainOptions
    ranks: Ranks
    folder: Path
    on_epoch: Callable[[dict[str, float]], None] = lambda _: None  # called on the first rank
    on_step: _OnStep = lambda _step, _figures: None  # called on the first rank
    state: _ProgressState = field(default_factory=_ProgressState)
    clock: _Clock = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)  # scales losses in fp16, else does nothing
    n_more_epochs: int = 0  # epochs of the trainings with other seeds that follow
    first: int = 0  # epoch from which this start continues
    _wrapped: nn.Module = field(init=False)
    _optimizer: torch.optim.Optimizer = field(init=False)
    _schedule: _Schedule = field(init=False)
    _told: float = 0.0  # time of the last step report

    def __post_init__(self) -> None:
        device = self.ranks.device
        self.clock = _Clock(device, self.settings.profile)
        is_scaled = self.settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=is_scaled)

    @property
    def checkpoints(self) -> _Checkpoints:
        return _Checkpoints(self.folder / "checkpoints", self.settings.keep_checkpoints)

    def run(self) -> _ProgressState:
        """Train to the last epoch, or until early stopping. The best weights stay loaded.

        Raises:
            UsageError: there are fewer rows than ranks times accumulated steps.
            ResumeError: the folder contains checkpoints from another training, or a damaged one.
            UnavailableError: a batch does not fit into the device memory.
            VirnucproError: the loss is not finite.
        """
        checkpoint = "checkpoint"
        settings = self.settings
        ranks = self.ranks
        self._schedule = _Schedule(len(self.objective.frames), settings, ranks)
        self._wrapped = ranks.wrap(self.module, is_cut=settings.fsdp)
        lr = settings.scaled_lr(ranks.world_size)
        self._optimizer = make_optimizer(self.module, lr, settings)
        self._resume()
        for epoch in range(self.first, settings.epochs):
            if self._is_stopped():
                break
            parts = self._schedule.parts(epoch)
            self._epoch(make_batches(self.objective, parts, epoch, settings.num_workers))
            content = self._snapshot()
            if ranks.is_first:
                self.checkpoints.save(content, self.state)
            ranks.wait()
            self.clock.lap(checkpoint)
        if self.state.best_epoch:
            self.checkpoints.load_best(self.module)
        return self.state

    def _resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        checkpoints = self.checkpoints
        self.state = checkpoints.load_last(self.module, self._optimizer, self.scaler)
        self.first = self.state.epoch
        if len(set(self.ranks.gather(self.state.epoch))) > 1:
            raise ResumeError(
                f"not all processes see the same checkpoints in {printable(checkpoints.folder)}",
                hint="give an --output-dir on a file system that all nodes share",
            )
        if self.ranks.is_first:
            checkpoints.sweep()
            if self.state.epoch:
                announce(f"continuing after epoch {self.state.epoch}")

    def _snapshot(self) -> dict[str, object]:
        """Return a checkpoint's content on the first rank. All ranks must call this."""
        content = {
            "module": _trained_tensors(self.module),
            "optimizer": self._optimizer.state_dict(),
            "state": asdict(self.state),
        }
        if self.scaler.is_enabled():
            content["scaler"] = self.scaler.state_dict()

        def gather(value: object) -> object:
            """Gather a sharded tensor in host memory. Return anything else unchanged."""
            if not isinstance(value, DTensor):
                return value
            tensor = is_complete(value)
            return tensor.cpu() if self.ranks.is_first else None

        return tree_map(gather, content)  # type: ignore[no-any-return]

    def _epoch(self, batches: Iterator[Any]) -> None:
        """Train one epoch, validate it if it is due, and report its figures."""
        settings = self.settings
        state = self.state
        ranks = self.ranks
        schedule = self._schedule
        seeds = np.random.SeedSequence((settings.seed, state.epoch, ranks.rank))
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        self._wrapped.train()
        started = self._told = time.perf_counter()
        self.clock.restart()
        # A step is checked after the next one has begun, so that a GPU is never idle.
        steps = pairwise(chain(self._steps(batches), [None]))
        losses = [self._end_step(*step) for step, _ in steps if step is not None]
        self.clock.n_rows += sum(map(len, schedule.parts(state.epoch)))
        mean_loss = sum(ranks.gather(sum(losses))) / schedule.n_steps
        self.clock.lap(_TrainingPart.STEP)
        state.epoch += 1
        row = {
            "epoch": float(state.epoch),
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "loss": mean_loss,
            "frames_per_second": schedule.n_used / (time.perf_counter() - started),
        }
        if state.epoch % settings.eval_every == 0 or state.epoch == settings.epochs:
            row |= self._validate()
        state.history.append(row)
        if ranks.is_first:
            is_best = "; the best so far" if state.best_epoch == state.epoch else ""
            left = timedelta(seconds=round(self._seconds_left(state.epoch)))
            announce(f"{_describe_epoch(row)}{is_best}; about {left} left")
            self.on_epoch(row)

    def _validate(self) -> dict[str, float]:
        """Return the validation figures, and record whether the epoch is the best."""
        validation = "validation"
        state = self.state
        device = self.ranks.device
        self._wrapped.eval()
        with (
            torch.inference_mode(),
            training_precision(self.settings, device),
            select_fitting(device),
        ):
            figures = self.objective.validate(self.module, self.ranks)
        figure = figures[self.objective.best]
        value = -figure if "loss" in self.objective.best else figure
        if value > state.best:
            state.best = value
            state.best_epoch = state.epoch
        self.clock.lap(validation)
        return figures

    def _seconds_left(self, n_epochs: float) -> float:
        """Estimate the time left after this number of epochs, from earlier ones.

        It includes the trainings with other seeds that follow.
        """
        seconds = self.clock.elapsed / (n_epochs - self.first)
        return seconds * (self.settings.epochs - n_epochs + self.n_more_epochs)

    def _steps(self, batches: Iterator[Any]) -> Iterator[tuple[int, Rows, Pending]]:
        """Yield an epoch's started steps: number, rows, and ``_step`` result."""
        state = self.state
        settings = self.settings
        lr = settings.scaled_lr(self.ranks.world_size)
        for number, rows in enumerate(self._schedule.steps(state.epoch), 1):
            share = lr_factor(state.step, self._schedule.n_steps, settings)
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["of_lr"] * share
            pending = self._step(batches, self.objective.weight(rows))
            state.step += 1
            yield number, rows, pending

    def _step(self, batches: Iterator[Any], weight: float) -> Pending:
        """Train on one effective batch.

        Returns:
            This rank's part of the loss, and the gradient norm.
        """
        max_gradient_norm = 1.0  # norm to which a longer gradient is clipped
        n_parts = self.settings.grad_accum_steps
        ranks = self.ranks
        wrapped = self._wrapped
        loss = torch.zeros((), device=ranks.device)
        for part in range(n_parts):
            batch = next(batches)
            self.clock.lap(_TrainingPart.DATA)
            is_last = part == n_parts - 1
            with nullcontext() if is_last else ranks.no_sync(wrapped), select_fitting(ranks.device):
                with training_precision(self.settings, ranks.device):
                    part_loss = wrapped(batch) / weight
                # Gradients are averaged over ranks.
                self.scaler.scale(part_loss * ranks.world_size).backward()
            loss += part_loss.detach()
            self.clock.lap(_TrainingPart.STEP)
        self.scaler.unscale_(self._optimizer)
        norm = is_complete(nn.utils.clip_grad_norm_(wrapped.parameters(), max_gradient_norm))
        arriving = copy_to_host([torch.stack([loss, norm])])
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self.clock.lap(_TrainingPart.OPTIMIZER)
        return arriving

    def _end_step(self, number: int, rows: Rows, pending: Pending) -> float:
        """Check and report a step's figures, and return this rank's part of its loss.

        All ranks have the same norm. If the loss is finite but the norm is not, the fp16 scaler has
        skipped the step and scales the next losses by less.

        Raises:
            VirnucproError: loss or norm is not finite. No weights from this epoch have been stored.
        """
        loss, norm = pending.rows().tolist()
        is_skipped = not math.isfinite(norm) and self.scaler.get_scale() > 1
        if not (math.isfinite(loss) and (math.isfinite(norm) or is_skipped)):
            last = f"epoch {self.state.epoch}" if self.state.epoch else "no epoch"
            raise VirnucproError(
                f"epoch {self.state.epoch + 1}, step {number}: the loss or its gradient is "
                f"not finite ({last} is stored)",
                hint="train again, in another --output-dir, with a smaller --lr, more "
                "--warmup-epochs or --precision fp32",
            )
        if self.ranks.is_first:
            self._report_progress(number, rows, loss * self.ranks.world_size, norm)
        return float(loss)

    def _report_progress(self, number: int, rows: Rows, loss: float, norm: float) -> None:
        """Report a step as progress, and to ``on_step``."""
        state = self.state
        settings = self.settings
        n_used = self._schedule.n_used
        n_before = state.epoch * self._schedule.n_steps + number - 1
        share = lr_factor(n_before, self._schedule.n_steps, settings)
        lr = settings.scaled_lr(self.ranks.world_size) * share
        done = min(number * self._schedule.effective, n_used)
        memory = None
        if self.ranks.device.type == "cuda":
            memory = _peak_memory(self.ranks.device)
        best = f"best epoch {state.best_epoch}: {self.objective.best} {abs(state.best):.4g}"
        also = (
            f"loss {loss:.4g}",
            f"rate {lr:.3g}",
            *([best] if state.best_epoch else []),
        )
        name = f"epoch {state.epoch + 1} of {settings.epochs}"
        left = self._seconds_left(state.epoch + done / n_used)
        self.ranks.on_event(
            Progress(name, done, n_used, "frames", memory=memory, also=also, seconds_left=left)
        )
        now = time.perf_counter()
        seconds = now - self._told
        self._told = now
        figures = {
            "loss": loss,
            "lr": lr,
            "gradient_norm": norm,
            "frames_per_second": len(rows) / seconds,
        }
        if settings.mode != "head":  # tokens run through an encoder
            n_tokens = self.objective.frames.n_residues(rows) + 2  # <cls>, <eos>
            figures["tokens_per_second"] = int(n_tokens.sum()) / seconds
        if memory is not None:
            figures["gpu_gib"] = memory.used / (1 << 30)
        self.on_step(n_before + 1, figures)

    def _is_stopped(self) -> bool:
        patience = self.settings.early_stopping * self.settings.eval_every
        return patience > 0 and self.state.epoch - self.state.best_epoch >= patience


class _Schedule:
    """The rows for each step, and this rank's parts."""

    def __init__(self, n_rows: int, settings: TrainOptions, ranks: Ranks) -> None:
        self.seed = settings.seed
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.effective = settings.effective_batch(ranks.world_size)
        self.n_parts = ranks.world_size * settings.grad_accum_steps
        self.n_rows = n_rows
        self.n_steps = count_steps(n_rows, self.effective)
        self.n_used = min(n_rows, self.n_steps * self.effective)  # rows used in one epoch
        if n_rows < self.n_parts:
            raise UsageError(
                f"{n_rows} rows to train on, for {self.n_parts} parts of a batch",
                hint="give more data, fewer GPUs or fewer --grad-accum-steps",
            )

    def steps(self, epoch: int) -> Iterator[Rows]:
        """Yield rows per effective batch, without an incomplete last one.

        With fewer rows than a batch needs, there is one batch with all rows.
        """
        order = np.random.default_rng([self.seed, epoch]).permutation(self.n_rows)
        for step in range(self.n_steps):
            yield order[step * self.effective : (step + 1) * self.effective]

    def parts(self, epoch: int) -> Iterator[Rows]:
        for rows in self.steps(epoch):
            yield from np.array_split(rows, self.n_parts)[self.rank :: self.world_size]


def count_steps(n_rows: int, effective: int) -> int:
    """Count the steps per epoch, each with an effective batch."""
    return max(1, n_rows // effective)


def make_optimizer(module: nn.Module, lr: float, settings: TrainOptions) -> torch.optim.Optimizer:
    """Make AdamW (Loshchilov and Hutter 2019) without decay for biases and norms.

    A group's ``of_lr`` is its learning rate relative to ``lr``.
    """
    learned = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    rates = {False: 1.0}
    if settings.encoder_lr is not None:
        rates[True] = settings.encoder_lr / settings.lr
    groups = []
    encoder_prefix = "reader.encoder."  # prefix of the names of its weights
    for is_encoder, rate in rates.items():
        own = [p for n, p in learned if (len(rates) > 1 and encoder_prefix in n) == is_encoder]
        for is_matrix, decay in ((True, settings.weight_decay), (False, 0.0)):
            params = [p for p in own if (p.ndim > 1) == is_matrix]
            groups.append({"params": params, "weight_decay": decay, "of_lr": rate})
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def lr_factor(step: int, steps_per_epoch: int, settings: TrainOptions) -> float:
    """Return the learning-rate factor: linear warm-up, then half a cosine down to 0.

    Source: Loshchilov and Hutter 2017.
    """
    warmup = settings.warmup_epochs * steps_per_epoch
    total = settings.epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup)))


def training_precision(settings: TrainOptions, device: torch.device) -> torch.autocast:
    """Return the autocast context. It keeps no 16-bit copies of sharded weights."""
    is_coarse = settings.precision != "fp32"
    dtype = torch.float16 if settings.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, is_coarse, cache_enabled=not settings.fsdp)


def _peak_memory(device: torch.device) -> Memory:
    """Return the peak GPU memory that torch has allocated."""
    return Memory(torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1])


@contextmanager
def select_fitting(device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error in the block.

    Raises:
        UnavailableError: the block needs more memory than the device has.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UnavailableError(
            f"{device} has too little memory for a batch of this size",
            hint="give a smaller --batch-size, and more --grad-accum-steps for the same training",
        ) from error


def _describe_epoch(row: dict[str, float]) -> str:
    """Format an epoch's figures on one line."""
    figures = {name: value for name, value in row.items() if name != "epoch"}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"epoch {row['epoch']:.0f}: {shown}"


def speed_lines(clocks: Sequence[_Clock]) -> list[str]:
    """Tabulate frames per second, per rank and in total.

    All ranks take their steps together, so their rates add up.
    """
    rows = [
        (
            name,
            clock.n_rows,
            clock.training_seconds,
            clock.n_rows / max(clock.training_seconds, 1e-9),
        )
        for name, clock in zip(_tensor_names(clocks), clocks, strict=True)
    ]
    _, n_rows, seconds, rates = zip(*rows, strict=True)
    rows.append(("all", sum(n_rows), max(seconds), sum(rates)))
    return [
        f"{'rank':<12}{'frames':>12}{'seconds':>12}{'frames/s':>14}",
        *(f"{name:<12}{n:>12,}{taken:>12,.1f}{rate:>14,.1f}" for name, n, taken, rate in rows),
    ]


def profile_lines(clocks: Sequence[_Clock]) -> list[str]:
    """Tabulate seconds and their shares, by activity and rank."""
    parts = dict.fromkeys(part for clock in clocks for part in clock.seconds)
    lines = [f"{'seconds':<22}" + "".join(f"{name:>18}" for name in _tensor_names(clocks))]
    for part in parts:
        taken = [(clock.seconds.get(part, 0.0), max(clock.elapsed, 1e-9)) for clock in clocks]
        cells = (f"{seconds:>11,.1f}{seconds / total:>7.1%}" for seconds, total in taken)
        lines.append(f"{part:<22}" + "".join(cells))
    return lines


def _tensor_names(clocks: Sequence[_Clock]) -> list[str]:
    return [f"{rank} {clock.device}" for rank, clock in enumerate(clocks)]


@dataclass(frozen=True, slots=True)
class _Checkpoints:
    """One training's checkpoints, in their own folder."""

    folder: Path
    n_kept: int  # checkpoints kept for the last epochs, in addition to the best

    def save(self, content: Mapping[str, object], state: _ProgressState) -> None:
        """Write a ``_snapshot`` atomically, and once more if this epoch is the best.

        Raises:
            OutputError, StorageError: as ``SafeDir.atomic_write``.
        """
        best = [_BEST] if state.best_epoch == state.epoch else []
        tree = SafeDir(self.folder.parent)
        tree.make_folder(self.folder)
        for name in (*best, f"epoch_{state.epoch:04d}.pt"):
            with tree.atomic_write(self.folder / name) as out:
                _write(content, out)
        for outdated in list(self._epochs())[: -self.n_kept]:
            tree.delete(outdated)

    def load_last(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
    ) -> _ProgressState:
        """Load the last checkpoint, if any, and return its state.

        Raises:
            ResumeError: the last checkpoint is damaged, or belongs to another training.
        """
        last = next(reversed(self._epochs()), self.folder / _BEST)
        if not last.exists():
            return _ProgressState()
        with _open_checkpoint(last) as content:
            state = _ProgressState(**content["state"])
            _load_weights(module, content["module"])
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            adamw_moments = ("exp_avg", "exp_avg_sq")  # AdamW moments, in the shape of their weight
            for number, moments in content["optimizer"]["state"].items():
                for name, value in moments.items():
                    cut = _truncate_like(weights[number], value) if name in adamw_moments else value
                    moments[name] = cut.clone()  # a copy, because the mapped file is deleted later
            optimizer.load_state_dict(content["optimizer"])
            if "scaler" in content:
                scaler.load_state_dict(content["scaler"])
            number = state.best_epoch if last.name == _BEST else self._epochs()[last]
            if not 0 <= state.best_epoch <= state.epoch == number > 0:
                raise ValueError(f"epoch {state.epoch}, the best of them {state.best_epoch}")
        return state

    def load_best(self, module: nn.Module) -> None:
        """Load the best epoch's weights.

        Raises:
            ResumeError: the file is missing or damaged.
        """
        with _open_checkpoint(self.folder / _BEST) as content:
            _load_weights(module, content["module"])

    def _epochs(self) -> dict[Path, int]:
        """Return epoch checkpoints in order, and their numbers. Other names are ignored."""
        names = {
            path: re.fullmatch(r"epoch_(\d{4,})\.pt", path.name)
            for path in self.folder.glob("epoch_*.pt")
        }
        numbers = [(int(match[1]), path) for path, match in names.items() if match]
        return {path: number for number, path in sorted(numbers)}

    def sweep(self) -> None:
        """Delete unfinished files from a killed start."""
        SafeDir(self.folder.parent).remove_temp_files(self.folder)


def is_complete(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded over the ranks. All ranks must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def _truncate_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of a complete tensor if ``like`` is sharded, else the tensor."""
    if not isinstance(like, DTensor):
        return tensor
    moved = tensor.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def _trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state without frozen weights, which come from ``--model``."""
    frozen = {name for name, weight in module.named_parameters() if not weight.requires_grad}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def _write(content: Mapping[str, object], out: BinaryIO) -> None:
    """Save into an open Python file, and raise the disk error if there is one.

    Files that torch opens itself hide such errors, and so does torch's own error afterwards.
    """
    try:
        torch.save(content, out)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


@contextmanager
def _open_checkpoint(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a checkpoint's content. Its tensors are mapped, so that ranks share one copy.

    Raises:
        ResumeError: the file is missing or damaged, or lacks what the block reads.
    """
    wrong = (AttributeError, LookupError, TypeError, ValueError)  # errors from unexpected content
    hint = "delete it: training continues from the previous checkpoint, or else from the best"
    if path.name == _BEST:
        hint = "no other file has these weights: train again, in another --output-dir"
    try:
        open_regular_file(path).close()
        with ZipFile(path) as archive:  # check its CRCs, which torch does not
            if name := archive.testzip():
                raise ValueError(f"{name} has another CRC")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, *wrong, RuntimeError, EOFError, BadZipFile, pickle.UnpicklingError) as error:
        why = "it is damaged, or contains more than tensors"
        if isinstance(error, OSError):
            why = printable(error)
        raise ResumeError(f"{printable(path)} cannot be read: {why}", hint=hint) from error
    try:
        yield content
    except wrong as error:
        raise ResumeError(
            f"{printable(path)} is not a checkpoint of this training: {printable(error)}",
            hint="give the settings that it was started with, or another --output-dir",
        ) from error


def _load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a module with the same network.

    Raises:
        ValueError: the weights belong to another network.
    """
    own = _trained_tensors(module)
    theirs = {name: tensor.shape for name, tensor in weights.items()}
    ours = {name: tensor.shape for name, tensor in own.items()}
    if differ := sorted(name for name, _ in theirs.items() ^ ours.items()):
        raise ValueError(f"it contains another network: {differ[0]} differs")
    loaded = {name: _truncate_like(own[name], tensor) for name, tensor in weights.items()}
    module.load_state_dict(loaded, strict=False)  # frozen weights are already loaded
