"""The limits of the device: a large matrix product and a copy of memory, on random data.

A limit is what was reached at best: the rate is that of the quickest repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from virnucpro.encoders.bench.comparison import FAILURES, reason_of
from virnucpro.encoders.bench.encoder import synchronize
from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.ground.config import Precision

_SIDE = {"cuda": 8192, "mps": 4096, "cpu": 2048}  # of the matrices
_COPIED = {"cuda": 4 << 30, "mps": 1 << 30, "cpu": 256 << 20}  # bytes, beyond any cache
Work = Callable[[], object]
_LEAST_SECONDS = 0.1  # of one repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow:
    what: str
    precision: str
    layout: str
    unit: str  # of the rate
    rate: float | None = None
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)  # by model
    seconds: tuple[float, ...] = ()  # of one product or copy, for each repeat
    reason: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The kind of measurement, the same in every run."""
        return (self.what, self.precision, self.layout)


def measure_limits(
    device: torch.device,
    precisions: Sequence[Precision],
    repeats: int,
    flop_per_token: Mapping[str, float],
    layout: str,
) -> Iterator[LimitRow]:
    """A row for the product in each precision, and one for the copy (read and written bytes)."""
    side, n_bytes = _SIDE[device.type], _COPIED[device.type]
    for precision in precisions:
        make = partial(_product, device, DTYPES[precision], side)
        what = f"matrix product, {side} x {side}"
        row = LimitRow(what=what, precision=precision, layout=layout, unit="FLOP/s")
        row = _measured(row, make, 2.0 * side**3, device, repeats)
        if row.rate is not None:
            allowed = {model: row.rate / flop for model, flop in flop_per_token.items()}
            row = replace(row, tokens_per_second=allowed)
        yield row
    what = f"memory copy, {n_bytes >> 20} MiB"
    row = LimitRow(what=what, precision="", layout=layout, unit="bytes/s")
    yield _measured(row, partial(_copy, device, n_bytes), 2.0 * n_bytes, device, repeats)


def _measured(
    row: LimitRow, make: Callable[[], Work], amount: float, device: torch.device, repeats: int
) -> LimitRow:
    try:
        seconds = _time(make(), partial(synchronize, device), repeats)
    except FAILURES as error:
        return replace(row, reason=reason_of(error))
    return replace(row, rate=amount / min(seconds), seconds=tuple(seconds))


def _time(work: Work, finish: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of one piece of work, for each repeat of as many as fill ``_LEAST_SECONDS``."""
    work()
    finish()
    started = time.perf_counter()
    work()
    finish()
    n = max(1, round(_LEAST_SECONDS / (time.perf_counter() - started)))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(n):
            work()
        finish()
        seconds.append((time.perf_counter() - started) / n)
    return seconds


def _product(device: torch.device, dtype: torch.dtype, side: int) -> Work:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy(device: torch.device, n_bytes: int) -> Work:
    source = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
