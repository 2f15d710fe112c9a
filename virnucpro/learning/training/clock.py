"""The clock of a training: time per stage, and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

DATA, STEP, OPTIMIZER = "waiting for data", "forward and backward", "optimizer"
VALIDATION, CHECKPOINT = "validation", "checkpoint"
_TRAINING = (DATA, STEP, OPTIMIZER)


@dataclass(slots=True)
class Clock:
    """Seconds by what they went into.

    A GPU runs behind its host. With ``wait_for`` a lap first waits until this device is done, so
    that the parts are right, at the price of what overlaps otherwise; sums over epochs are right
    without it.
    """

    wait_for: torch.device | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        """Forget the time until now."""
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last lap went into ``part``."""
        if self.wait_for is not None and self.wait_for.type == "cuda":
            torch.cuda.synchronize(self.wait_for)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True, slots=True)
class Speed:
    """The times of one rank since its start."""

    device: str
    n_rows: int  # trained with, over all epochs
    seconds: dict[str, float]  # by part

    @property
    def training_seconds(self) -> float:
        return sum(self.seconds.get(part, 0.0) for part in _TRAINING)

    @property
    def rows_per_second(self) -> float:
        return self.n_rows / max(self.training_seconds, 1e-9)


def speed_lines(speeds: Sequence[Speed], unit: str) -> list[str]:
    """A table: how many rows each rank was trained with per second, and all of them together.

    All ranks take their steps together, so their rates add up.
    """
    rows = [
        (f"{rank} {speed.device}", speed.n_rows, speed.training_seconds, speed.rows_per_second)
        for rank, speed in enumerate(speeds)
    ]
    slowest = max(speed.training_seconds for speed in speeds)
    total = sum(speed.rows_per_second for speed in speeds)
    rows.append(("all", sum(speed.n_rows for speed in speeds), slowest, total))
    header = f"{'rank':<12}{unit:>12}{'seconds':>12}{f'{unit}/s':>14}"
    return [
        header,
        *(
            f"{name:<12}{n_rows:>12,}{seconds:>12,.1f}{rate:>14,.1f}"
            for name, n_rows, seconds, rate in rows
        ),
    ]


def profile_lines(speeds: Sequence[Speed]) -> list[str]:
    """A table: the seconds of each rank by what they went into, and their share."""
    parts = list(dict.fromkeys(part for speed in speeds for part in speed.seconds))
    names = [f"{rank} {speed.device}" for rank, speed in enumerate(speeds)]
    lines = [f"{'seconds':<22}" + "".join(f"{name:>18}" for name in names)]
    for part in parts:
        cells = []
        for speed in speeds:
            seconds, total = speed.seconds.get(part, 0.0), sum(speed.seconds.values())
            cells.append(f"{seconds:>11,.1f}{seconds / max(total, 1e-9):>7.1%}")
        lines.append(f"{part:<22}" + "".join(cells))
    return lines
