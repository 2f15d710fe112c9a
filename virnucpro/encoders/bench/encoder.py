"""An encoder under the clock: proteins in memory to one mean vector each, in their order.

Whatever the program, a pass is the same: plan batches, embed each, and copy the vectors out
while the next one is embedded, as a worker does. The time inside the model's forward is taken
by hooks; the rest is what the host adds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.encoders.esm2 import encoder as esm2
from virnucpro.encoders.esm2.attention import Kernel, attend_runs, choose_kernel
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.ground.config import EncoderSpec, Precision

OURS = "virnucpro"
Vectors = NDArray[np.float32]
Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Setting:
    """The model at hand, and the device it runs on. Picklable."""

    checkpoint: Path
    shape: ESM2Shape
    device: str
    tokens_per_batch: int  # what a run of ours would choose here

    def spec(self, precision: Precision, family: str = "esm2") -> EncoderSpec:
        return EncoderSpec(
            family=family,
            model=self.checkpoint.stem,
            sha256="",
            layer=self.shape.n_layers,
            pooling="mean",
            precision=precision,
            dim=self.shape.dim,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TimedEncoder:
    """A loaded model, and how it is fed."""

    model: nn.Module
    setting: Setting
    plan: Callable[[Sequence[str]], list[list[int]]]
    embed: Callable[[list[str]], Tensor]  # a batch -> (n_proteins, dim) float32


@dataclass(frozen=True, slots=True)
class Way:
    """A program with its settings. Picklable: ``load`` is a function of a module."""

    program: str
    precision: Precision
    how: str  # batches, kernel
    load: Callable[[Setting], TimedEncoder]

    @property
    def name(self) -> str:
        return f"{self.program} {self.precision}, {self.how}"


@dataclass(frozen=True, slots=True)
class Pass:
    """The figures of one pass over the proteins."""

    seconds: float
    cpu_seconds: float
    forward_seconds: float
    n_batches: int
    peak_bytes: int | None  # of the device: the weights and the most that came on top


def mean_pass(passes: Sequence[Pass]) -> Pass:
    """The mean of passes over the same proteins, and the most that one of them took."""
    n = len(passes)
    peaks = [one.peak_bytes for one in passes if one.peak_bytes is not None]
    return Pass(
        seconds=sum(one.seconds for one in passes) / n,
        cpu_seconds=sum(one.cpu_seconds for one in passes) / n,
        forward_seconds=sum(one.forward_seconds for one in passes) / n,
        n_batches=passes[0].n_batches,
        peak_bytes=max(peaks, default=None),
    )


def time_pass(encoder: TimedEncoder, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
    """Embed them all. Returns (n_proteins, dim) beside the times."""
    device = torch.device(encoder.setting.device)
    starts: list[Mark] = []
    ends: list[Mark] = []
    hooks = (
        encoder.model.register_forward_pre_hook(lambda *_: starts.append(_mark(device))),
        encoder.model.register_forward_hook(lambda *_: ends.append(_mark(device))),
    )
    vectors = np.full((len(proteins), encoder.setting.shape.dim), np.nan, dtype=np.float32)
    memory = _reset_memory(device)
    synchronize(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        batches = encoder.plan(proteins)
        arriving: deque[tuple[list[int], Tensor, Mark]] = deque()
        for rows in batches:  # a GPU does not wait for the host between two batches
            embedded = encoder.embed([proteins[i] for i in rows]).to("cpu", non_blocking=True)
            arriving.append((rows, embedded, _mark(device)))
            if len(arriving) > 1:
                _store(vectors, *arriving.popleft())
        for last in arriving:
            _store(vectors, *last)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    finally:
        for hook in hooks:
            hook.remove()
    peak = None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - memory + _n_bytes(encoder.model)
    forward = sum(map(_seconds_between, starts, ends))
    return Pass(seconds, cpu_seconds, forward, len(batches), peak), vectors


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _mark(device: torch.device) -> Mark:
    """This moment, on the clock of the device: a GPU is not made to wait for it."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def _store(vectors: Vectors, rows: list[int], embedded: Tensor, when: Mark) -> None:
    if not isinstance(when, float):
        when.synchronize()
    vectors[rows] = embedded.numpy()


def _seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


def _reset_memory(device: torch.device) -> int:
    """Bytes allocated now, by all that is loaded; the peak is counted from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _n_bytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_ours(setting: Setting, precision: Precision, kernel: Kernel) -> TimedEncoder:
    """The encoder of a worker, with this kernel."""
    ours = esm2.load(setting.spec(precision), setting.checkpoint, torch.device(setting.device))
    ours.model.attend = kernel

    def plan(proteins: Sequence[str]) -> list[list[int]]:
        return ours.plan([len(protein) for protein in proteins], setting.tokens_per_batch)

    return TimedEncoder(ours.model, setting, plan, ours.embed)


def our_ways(precisions: Sequence[Precision], setting: Setting) -> list[Way]:
    """Each precision with each kernel that the device has for it; what a run takes first."""
    device, ways = torch.device(setting.device), []
    for precision in precisions:
        chosen = choose_kernel(device, DTYPES[precision], setting.shape.head_dim)
        for kernel in dict.fromkeys((chosen, attend_runs)):
            load = partial(load_ours, precision=precision, kernel=kernel)
            how = f"{kernel.__name__}, {setting.tokens_per_batch} tokens"
            ways.append(Way(OURS, precision, how, load))
    return ways
