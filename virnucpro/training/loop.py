"""The training loop: one for every mode, on one device or on many.

A step takes one effective batch, which all ranks know: the rows of an epoch in the order that
the seed gives, cut into parts for each rank and each accumulated step. The loss is divided by
what the whole batch weighs, so that the gradients do not depend on how it was cut. All that is
random depends on the seed and the epoch alone; an epoch can be repeated from its checkpoint.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from virnucpro.engine.events import Progress, Telling
from virnucpro.errors import ResumeError, UsageError
from virnucpro.files import atomic
from virnucpro.log import announce, printable
from virnucpro.training.ranks import Ranks
from virnucpro.training.settings import Settings

Rows = NDArray[np.int64]
_MOST_GRADIENT = 1.0  # norm; beyond it the step is shortened
_CHECKPOINTS = "checkpoints"
_BEST = "best.pt"


B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class Objective(Protocol[B_co]):
    """What is learned, from which rows, and how well it is known. ``B_co`` is its kind of batch."""

    n_rows: int  # of an epoch
    unit: str
    best: str  # the name of the figure by which the best epoch is chosen; larger is better

    def batch(self, rows: Rows, epoch: int) -> B_co: ...

    def weight(self, rows: Rows) -> float:
        """What the losses of these rows are divided by."""

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]: ...


@dataclass(slots=True)
class Clock:
    """Seconds by what they went into."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


@dataclass(slots=True)
class Progressed:
    """How far a training is. It is stored with the weights."""

    epoch: int = 0  # done
    step: int = 0
    best: float = -math.inf
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class Trainer(Generic[B]):
    module: nn.Module
    objective: Objective[B]
    settings: Settings
    ranks: Ranks
    folder: Path
    on_event: Callable[[Telling], None]
    on_epoch: Callable[[dict[str, float]], None] = lambda _: None
    state: Progressed = field(default_factory=Progressed)
    clock: Clock = field(default_factory=Clock)

    def run(self) -> Progressed:
        """Train until the last epoch, or until nothing gets better. The best weights stay loaded.

        Raises:
            UsageError: there are fewer rows than ranks and accumulated steps.
        """
        settings, schedule = (
            self.settings,
            _Schedule(self.objective.n_rows, self.settings, self.ranks),
        )
        self.module.to(self.ranks.device)
        optimizer = new_optimizer(self.module, settings.scaled_lr(self.ranks.world_size), settings)
        self._load(optimizer)
        wrapped = self.ranks.wrap(self.module)
        loader = _loader(self.objective, schedule, settings, self.ranks)
        while self.state.epoch < settings.epochs and not self._is_stopped():
            self._epoch(wrapped, optimizer, schedule, loader)
            self._save(optimizer)
        best = self.folder / _CHECKPOINTS / _BEST
        self.ranks.wait()
        if best.exists():
            self.module.load_state_dict(_read_checkpoint(best)["module"])
        return self.state

    def _epoch(
        self,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: _Schedule,
        loader: DataLoader[B],
    ) -> None:
        settings, state, ranks = self.settings, self.state, self.ranks
        schedule.epoch = epoch = state.epoch
        torch.manual_seed(_seed_of(settings.seed, epoch, ranks.rank))
        wrapped.train()
        lr = settings.scaled_lr(ranks.world_size)
        n_steps = schedule.n_steps
        losses, started = torch.zeros((), device=ranks.device), time.perf_counter()
        batches = iter(loader)
        for number, rows in enumerate(schedule.steps(), 1):
            for group in optimizer.param_groups:
                group["lr"] = lr * _share_of_lr(state.step, n_steps, settings)
            losses += self._step(wrapped, optimizer, batches, self.objective.weight(rows))
            state.step += 1
            done = min(number * schedule.effective, schedule.n_rows)
            name = f"epoch {epoch + 1} of {settings.epochs}"
            self.on_event(Progress(name, done, schedule.n_rows, self.objective.unit))
        seconds = time.perf_counter() - started
        state.epoch += 1
        row = {
            "epoch": float(state.epoch),
            "lr": float(optimizer.param_groups[0]["lr"]),
            "loss": float(sum(ranks.gather(float(losses)))) / n_steps,
            f"{self.objective.unit}_per_second": n_steps * schedule.effective / seconds,
        }
        if state.epoch % settings.eval_every == 0 or state.epoch == settings.epochs:
            wrapped.eval()
            with torch.inference_mode():
                row |= self.objective.validate(self.module, ranks)
            self.clock.lap("validation")
        state.history.append(row)
        if ranks.is_first:
            announce(describe(row))
            self.on_epoch(row)

    def _step(
        self,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[B],
        weight: float,
    ) -> Tensor:
        """One effective batch. -> this rank's part of its loss"""
        n_parts, ranks = self.settings.grad_accum_steps, self.ranks
        loss = torch.zeros((), device=ranks.device)
        for part in range(n_parts):
            batch = next(batches)
            self.clock.lap("waiting for data")
            is_last = part == n_parts - 1
            alone = nullcontext() if is_last or ranks.world_size == 1 else wrapped.no_sync()  # type: ignore[operator]
            with alone:
                with _precision(self.settings, ranks.device):
                    part_loss = wrapped(batch) / weight
                (part_loss * ranks.world_size).backward()  # the ranks' gradients are averaged
            loss += part_loss.detach()
            self.clock.lap("forward and backward")
        nn.utils.clip_grad_norm_(wrapped.parameters(), _MOST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.clock.lap("optimizer")
        return loss

    def _is_stopped(self) -> bool:
        patience = self.settings.early_stopping
        tried = self.state.epoch - self.state.best_epoch
        return bool(patience) and tried >= patience * self.settings.eval_every

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        """Rank 0 alone writes, atomically."""
        state, figure = self.state, self.state.history[-1].get(self.objective.best)
        is_best = figure is not None and figure > state.best
        if is_best and figure is not None:
            state.best, state.best_epoch = figure, state.epoch
        if self.ranks.is_first:
            content = {
                "module": self.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "state": asdict(state),
                "settings": asdict(self.settings),
                "effective_batch": effective_batch(self.settings, self.ranks.world_size),
            }
            folder = self.folder / _CHECKPOINTS
            for name in (f"epoch_{state.epoch:04d}.pt", *([_BEST] if is_best else [])):
                with atomic(folder / name) as temporary:
                    torch.save(content, temporary)
        self.ranks.wait()
        self.clock.lap("checkpoint")

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on from the last checkpoint, if there is one."""
        found = sorted((self.folder / _CHECKPOINTS).glob("epoch_*.pt"))
        if not found:
            return
        content = _read_checkpoint(found[-1])
        differs = self.settings.agrees_with(content["settings"])
        if content["effective_batch"] != effective_batch(self.settings, self.ranks.world_size):
            differs.append("effective batch")
        if differs:
            raise ResumeError(
                f"{printable(found[-1])} was trained with other settings: {', '.join(differs)}",
                hint="give the settings of settings.json, or another --output-dir",
            )
        self.module.load_state_dict(content["module"])
        optimizer.load_state_dict(content["optimizer"])
        self.state = Progressed(**content["state"])
        if self.ranks.is_first:
            announce(f"going on after epoch {self.state.epoch}")


class _Schedule(Sampler[tuple[int, Rows]]):
    """The parts of this rank, in the order of an epoch's steps."""

    def __init__(self, n_rows: int, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.effective = effective_batch(settings, ranks.world_size)
        self.n_parts = ranks.world_size * settings.grad_accum_steps
        self.n_steps = max(1, n_rows // self.effective)
        self.n_rows, self.epoch = n_rows, 0
        if n_rows < self.n_parts:
            raise UsageError(
                f"{n_rows} rows to train on, for {self.n_parts} parts of a batch",
                hint="give more data, fewer GPUs or fewer --grad-accum-steps",
            )

    def steps(self) -> Iterator[Rows]:
        """The rows of each effective batch. Those of a last one that is not full wait."""
        order = np.random.default_rng([self.settings.seed, self.epoch]).permutation(self.n_rows)
        for step in range(self.n_steps):
            yield order[step * self.effective : (step + 1) * self.effective]

    def __iter__(self) -> Iterator[tuple[int, Rows]]:
        for rows in self.steps():
            parts = np.array_split(rows, self.n_parts)
            for part in parts[self.ranks.rank :: self.ranks.world_size]:
                yield self.epoch, part


class _Batches(Dataset[B]):
    """Makes batches of rows, here or in processes beside the training."""

    def __init__(self, objective: Objective[B]) -> None:
        self.objective = objective

    def __getitem__(self, part: tuple[int, Rows]) -> B:
        epoch, rows = part
        return self.objective.batch(rows, epoch)


def _loader(
    objective: Objective[B], schedule: _Schedule, settings: Settings, ranks: Ranks
) -> DataLoader[B]:
    n_workers = settings.num_workers
    return DataLoader(
        _Batches(objective),
        batch_size=None,
        sampler=schedule,
        num_workers=n_workers,
        persistent_workers=n_workers > 0,
        multiprocessing_context="spawn" if n_workers else None,
    )


def new_optimizer(module: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) that lets biases and norms be."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def effective_batch(settings: Settings, world_size: int) -> int:
    return settings.batch_size * world_size * settings.grad_accum_steps


def _share_of_lr(step: int, steps_per_epoch: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to nothing (Loshchilov and Hutter 2017)."""
    warmup, total = settings.warmup_epochs * steps_per_epoch, settings.epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup)))


def _precision(settings: Settings, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """
    Raises:
        ResumeError: the file is damaged.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ResumeError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint="delete it: the training goes on from the epoch before",
        ) from error
    assert isinstance(content, dict)
    return content


def describe(row: dict[str, float]) -> str:
    """One line of an epoch's figures."""
    figures = {name: value for name, value in row.items() if name != "epoch"}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"epoch {row['epoch']:.0f}: {shown}"
