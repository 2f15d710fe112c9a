"""Measure where a batch spends its time on one GPU, and what changes to the encoder would gain.

The ways are runs in bf16, fp8 and int8, and some that no run uses: all in float32 by PyTorch, as
the reference for distances; rotation and LayerNorm in PyTorch; GELU by tanh in the epilogue of a
product; attention in tiles of 64 queries that short proteins share. A way that does not run here
gets a row with the reason.

Weights are random and are made on the device; they are neither on disk nor sent to the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from timing import (
    FAILURES,
    OURS,
    Comparison,
    EncoderRow,
    Setting,
    TimedEncoder,
    Way,
    compare_ways,
    layouts,
    plan_by,
    proteins_of,
    reason_of,
    synchronize,
    time_pass,
)
from torch import Tensor, nn

from virnucpro.core.recipe import Precision
from virnucpro.models.attention import (
    Kernel,
    attend_tiles,
    attend_tiles_rotating,
    attend_varlen,
    choose_kernel,
)
from virnucpro.models.eight_bits import EIGHT_BITS
from virnucpro.models.esm2.config import HEADS_FAIR_ESM, ESM2Shape, ESM2Tensors
from virnucpro.models.esm2.loading import FAIR_ESM, ROTARY, create_esm2, empty_model, split_tensors
from virnucpro.models.esm2.model import ESM2, Layer
from virnucpro.models.packing import use_device
from virnucpro.models.transformer import DTYPES
from virnucpro.models.transformer_encoder import TransformerEncoder
from virnucpro.models.validation.random_weights import random_numbers

_N_KERNELS = 25
_ALWAYS = ("eager", "as in a run")
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """The kernels of a pass, with their times on the device in milliseconds."""

    model: str
    profile: str
    precision: Precision
    milliseconds: dict[str, float]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """The speed with batches of one size, and whether the size changes bits of vectors."""

    model: str
    tokens_per_batch: int
    tokens_per_second: float | None = None
    n_other_bits: int | None = None  # vectors that differ from those of the first row
    largest_distance: float | None = None  # relative L2, from the vectors of the first row
    reason: str = ""


def compare_variants(
    setting: Setting,
    profile: str,
    proteins: Sequence[str],
    seconds: float,
    names: Sequence[str] = (),
) -> Iterator[EncoderRow]:
    """Yield a row for each way in ``choose_ways``. The first is the reference for distances."""
    names = choose_ways(names)
    comparison = Comparison(
        profile=profile,
        proteins=proteins,
        repeats=3,
        min_seconds=seconds / 3,
        one_by_one=True,
    )
    with layouts(setting, 1, len(names)) as places:
        yield from compare_ways(comparison, list(map(way_of, names)), places[:1])


def choose_ways(names: Sequence[str]) -> list[str]:
    """Return the ways with these names, after float32 and that of a run. All without a name."""
    return [name for name in WAYS if not names or name in (*_ALWAYS, *names)]


def random_tensors(shape: ESM2Shape, device: torch.device) -> ESM2Tensors:
    """The tensors of a random ESM-2, drawn on a device whenever they are read."""
    parts = dict(split_tensors(empty_model(shape, shape.n_layers), FAIR_ESM))
    return ESM2Tensors(
        path=Path("random weights"),
        names=frozenset(parts.keys() - {ROTARY}),
        scheme=FAIR_ESM,
        heads=HEADS_FAIR_ESM,
        n_heads=shape.n_heads,
        token_dropout=shape.token_dropout,
        read=lambda name, n: random_numbers(name, parts[name].shape, _SEED, device)[:n],
    )


def load_made(setting: Setting, precision: Precision, kernel: Kernel) -> TimedEncoder:
    """Make the encoder of a worker, with weights made on the device, the same in every way."""
    device = torch.device(setting.device)
    shape = setting.shape
    use_device(device)
    model = create_esm2(
        shape, random_tensors(shape, device), shape.n_layers, DTYPES[precision], device
    )
    if precision in EIGHT_BITS:
        model.quantise(device, EIGHT_BITS[precision])
    model.attend = kernel
    encoder = TransformerEncoder(setting.spec(precision), model, device)
    plan = plan_by(encoder, setting.tokens_per_batch)
    return TimedEncoder(model, setting, plan, encoder.embed)


def load_plain(setting: Setting, precision: Precision = "bf16") -> TimedEncoder:
    number = EIGHT_BITS.get(precision, DTYPES[precision])
    kernel = choose_kernel(torch.device(setting.device), number, setting.shape.head_dim)
    return load_made(setting, precision, kernel)


def load_fp32(setting: Setting) -> TimedEncoder:
    return load_plain(setting, "fp32")


def load_fp8(setting: Setting) -> TimedEncoder:
    return load_plain(setting, "fp8")


def load_int8(setting: Setting) -> TimedEncoder:
    return load_plain(setting, "int8")


def load_without_triton(setting: Setting) -> TimedEncoder:
    return load_made(setting, "bf16", attend_varlen)


def load_tanh(setting: Setting) -> TimedEncoder:
    encoder = load_plain(setting)
    assert isinstance(encoder.model, ESM2)
    for layer in encoder.model.layers:
        assert isinstance(layer, Layer)
        layer.linear = _linear_tanh_gelu  # type: ignore[method-assign, assignment]
    return encoder


def load_tiles(setting: Setting) -> TimedEncoder:
    return load_made(setting, "bf16", attend_tiles)


def load_rotating_tiles(setting: Setting) -> TimedEncoder:
    return load_made(setting, "bf16", attend_tiles_rotating)


WAYS = {
    "eager": load_fp32,
    "as in a run": load_plain,
    "rotation and LayerNorm by PyTorch": load_without_triton,
    "GELU by tanh": load_tanh,
    "attention in shared tiles": load_tiles,
    "attention in shared tiles that rotate": load_rotating_tiles,
    "fp8": load_fp8,
    "int8": load_int8,
}


def way_of(name: str) -> Way:
    load = WAYS[name]
    precisions: dict[object, Precision] = {
        load_fp32: "fp32",
        load_fp8: "fp8",
        load_int8: "int8",
    }
    return Way(OURS, precisions.get(load, "bf16"), name, load)


def _linear_tanh_gelu(linear: nn.Linear, x: Tensor, *, has_gelu: bool = False) -> Tensor:
    """Apply a linear layer, with its GELU (by tanh) in the epilogue of the product."""
    if not has_gelu:
        return cast(Tensor, linear(x))
    return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)


def profile_kernels(
    setting: Setting, model: str, profile: str, proteins: Sequence[str], precision: Precision
) -> KernelRow:
    """Profile the kernels in a pass of a run's encoder."""
    row = KernelRow(model=model, profile=profile, precision=precision, milliseconds={})
    device = torch.device(setting.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        encoder = load_plain(setting, precision)
        encoder.embed(["M" * 100])
        with torch.profiler.profile(activities=activities) as recorded:
            time_pass(encoder, proteins)
            synchronize(device)
    except FAILURES as error:
        return replace(row, reason=reason_of(error))
    is_cuda = device.type == "cuda"
    times = {
        event.key: (event.self_device_time_total if is_cuda else event.self_cpu_time_total) / 1e3
        for event in recorded.key_averages()
    }
    largest = sorted(times.items(), key=lambda item: -item[1])[:_N_KERNELS]
    return replace(row, milliseconds=dict(largest))


def try_budgets(setting: Setting, model: str, budgets: Sequence[int]) -> Iterator[BudgetRow]:
    """Yield a row for each batch size, for the same proteins."""
    proteins = proteins_of("six-frame-500", 2 * max(budgets), seed=3)
    first = None
    for tokens in budgets:
        row = BudgetRow(model=model, tokens_per_batch=tokens)
        encoder = None
        try:
            encoder = load_plain(replace(setting, tokens_per_batch=tokens))
            time_pass(encoder, proteins)
            timed, vectors = time_pass(encoder, proteins)
        except FAILURES as error:
            yield replace(row, reason=reason_of(error))
            continue
        first = vectors if first is None else first
        distance = np.linalg.norm(vectors - first, axis=1) / np.linalg.norm(first, axis=1)
        yield replace(
            row,
            tokens_per_second=sum(len(protein) + 2 for protein in proteins) / timed.seconds,
            n_other_bits=int((vectors != first).any(axis=1).sum()),
            largest_distance=float(distance.max()),
        )
