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

import esm
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.encoders import fair_esm
from virnucpro.encoders.esm2 import encoder as esm2
from virnucpro.encoders.esm2.attention import Kernel, attend_runs, choose_kernel
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.ground.config import EncoderSpec, Precision

OURS = "virnucpro"
PUBLISHED_TOKENS = 4096  # per batch, in fair-esm's scripts/extract.py
Vectors = NDArray[np.float32]
Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Setting:
    """The model at hand, and the device it runs on. Picklable."""

    checkpoint: Path
    shape: ESM2Shape
    device: str
    tokens_per_batch: int  # what a run of ours would choose here

    @property
    def model(self) -> str:
        return self.checkpoint.stem

    def spec(self, precision: Precision, family: str = "esm2") -> EncoderSpec:
        return EncoderSpec(
            family=family,
            model=self.model,
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


def fair_esm_ways(setting: Setting, *, has_bf16: bool) -> list[Way]:
    """fair-esm as published first, then as fast as it honestly gets."""
    ways = [Way("fair-esm", "fp32", f"as published, {PUBLISHED_TOKENS} tokens", fair_esm_published)]
    if has_bf16:
        how = f"{padded_tokens(setting)} tokens"
        ways.append(Way("fair-esm", "bf16", how, fair_esm_bf16))
    return ways


def fair_esm_published(setting: Setting) -> TimedEncoder:
    """The loop of scripts/extract.py, but for the file per protein and the cut at 1,022 residues.

    Logits and whole representations are copied to the CPU and averaged there, as it does.
    """
    device = torch.device(setting.device)
    model = fair_esm.load_model(setting.checkpoint, setting.shape, torch.float32, device)
    convert = model.alphabet.get_batch_converter()
    layer = setting.shape.n_layers

    def plan(proteins: Sequence[str]) -> list[list[int]]:
        data = esm.FastaBatchedDataset([str(i) for i in range(len(proteins))], proteins)
        batches: list[list[int]] = data.get_batch_indices(PUBLISHED_TOKENS, extra_toks_per_seq=1)
        return batches

    @torch.no_grad()
    def embed(proteins: list[str]) -> Tensor:
        _, texts, tokens = convert([("", protein) for protein in proteins])
        out = model(tokens.to(setting.device), repr_layers=[layer], return_contacts=False)
        out["logits"].cpu()
        hidden = out["representations"][layer].cpu()
        return torch.stack(
            [hidden[row, 1 : len(text) + 1].mean(0).clone() for row, text in enumerate(texts)]
        )

    return TimedEncoder(model, setting, plan, embed)


def fair_esm_bf16(setting: Setting) -> TimedEncoder:
    """fair-esm's model in bf16, in batches that fill the device, pooled there."""
    spec = setting.spec("bf16", family="fair-esm")
    encoder = fair_esm.load(spec, setting.checkpoint, torch.device(setting.device))
    return TimedEncoder(encoder.model, setting, partial(plan_padded, setting), encoder.embed)


def padded_tokens(setting: Setting) -> int:
    return max(PUBLISHED_TOKENS, setting.tokens_per_batch)


def plan_padded(setting: Setting, proteins: Sequence[str]) -> list[list[int]]:
    """Sorted, in padded batches that fill the device."""
    return fair_esm.plan_padded([len(protein) for protein in proteins], padded_tokens(setting))
