"""Measure how far vectors from 8-bit products are from float32, with and without smoothing.

Smoothing (SmoothQuant: Xiao et al. 2023, arXiv:2211.10438) divides each input channel of a product
by a scale, and multiplies the weights by it: max |x| ** strength / max |w| ** (1 - strength) over
the channel. The largest |x| come from other random proteins than those that are measured.

Formats are emulated in float32 on the CPU: rows are scaled by their largest number and rounded, as
in ``virnucpro.models.eight_bits``. The last row is int8 as a run computes it, which smooths only
large channels (``virnucpro.models.smoothing``).

Weights are random. With ``outlier`` above 1, one channel in a hundred behind a LayerNorm is that
many times larger, and its weights are smaller by as much, so the model computes the same. Published
language models have such channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from timing import proteins_of
from torch import Tensor, nn
from variants import random_tensors

from virnucpro.models.attention import E4M3, choose_kernel
from virnucpro.models.eight_bits import quantise, restore
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import create_esm2
from virnucpro.models.esm2.model import ESM2, Layer
from virnucpro.models.packing import PackedBatch, segment_mean

_CPU = torch.device("cpu")
_STRENGTHS = (None, 0.5, 0.75, 1.0)
_MIN_SCALE = 1e-6  # replaces the maximum of an all-zero channel
Place = tuple[int, str]  # layer, and name of a product in it


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBitRow:
    """The largest relative L2 distance of a protein's mean vector from float32."""

    model: str
    number: str  # e4m3 or int8
    outlier: float
    strength: float | None  # None: no smoothing, or that of a run
    is_emulated: bool
    n_tokens: int
    largest_error: float


class EmulatedLinear(nn.Module):
    """A linear layer with 8-bit factors, one scale per row. Results are rounded to bf16."""

    def __init__(self, linear: nn.Linear, number: str, channel_scales: Tensor | None) -> None:
        super().__init__()
        self.number = number
        self.channel_scales = channel_scales
        weight = linear.weight.detach()
        if channel_scales is not None:
            weight = weight * channel_scales
        self.weight = round_rows(weight, number)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.channel_scales is not None:
            x = x / self.channel_scales
        product = round_rows(x, self.number) @ self.weight.t() + self.bias
        return product.bfloat16().float()


def round_rows(rows: Tensor, number: str) -> Tensor:
    """Round rows to 8 bits, with one scale per row, and restore them. (n_rows, dim) float32"""
    return restore(quantise(rows, E4M3 if number == "e4m3" else torch.int8))


def compare_smoothing(
    model: str, shape: ESM2Shape, n_tokens: int, outlier: float
) -> Iterator[EightBitRow]:
    """Yield a row for each format and smoothing strength."""
    encoder = _random_encoder(shape, torch.float32, outlier)
    proteins = proteins_of("six-frame-500", n_tokens, seed=3)
    exact = _embed(encoder, proteins)
    row = partial(
        EightBitRow,
        model=model,
        outlier=outlier,
        n_tokens=sum(len(protein) + 2 for protein in proteins),
    )
    linears = _linears(encoder)
    maxima = _largest_inputs(encoder, proteins_of("six-frame-500", n_tokens, seed=9))
    for number in ("e4m3", "int8"):
        for strength in _STRENGTHS:
            for place, linear in linears.items():
                scales = None
                if strength is not None:
                    scales = channel_scales(maxima[place], linear.weight, strength)
                _replace(encoder, place, EmulatedLinear(linear, number, scales))
            error = _largest_error(_embed(encoder, proteins), exact)
            yield row(number=number, strength=strength, is_emulated=True, largest_error=error)
    quantised = _random_encoder(shape, torch.bfloat16, outlier).quantise(_CPU, torch.int8)
    error = _largest_error(_embed(quantised, proteins), exact)
    yield row(number="int8", strength=None, is_emulated=False, largest_error=error)


def _largest_error(vectors: Tensor, exact: Tensor) -> float:
    return float(((vectors - exact).norm(dim=1) / exact.norm(dim=1)).max())


def _random_encoder(shape: ESM2Shape, dtype: torch.dtype, outlier: float) -> ESM2:
    """Make an encoder with random weights, the same ones in each ``dtype``, and outliers."""
    encoder = create_esm2(shape, random_tensors(shape, _CPU), shape.n_layers, dtype, _CPU)
    encoder.attend = choose_kernel(_CPU, dtype, shape.head_dim)
    _add_outliers(encoder, outlier)
    return encoder


def channel_scales(largest_inputs: Tensor, weight: Tensor, strength: float) -> Tensor:
    """Return the scale of each input channel. (n_in,), (n_out, n_in) -> (n_in,)"""
    largest_weights = weight.abs().amax(dim=0).clamp(min=_MIN_SCALE)
    return largest_inputs.clamp(min=_MIN_SCALE) ** strength / largest_weights ** (1 - strength)


def _layers(encoder: ESM2) -> list[Layer]:
    return [layer for layer in encoder.each_layer() if isinstance(layer, Layer)]


def _linears(encoder: ESM2) -> dict[Place, nn.Linear]:
    return {
        (index, name): getattr(layer, name)
        for index, layer in enumerate(_layers(encoder))
        for name in layer.products
    }


def _replace(encoder: ESM2, place: Place, module: nn.Module) -> None:
    index, name = place
    setattr(_layers(encoder)[index], name, module)


@torch.inference_mode()
def _embed(encoder: ESM2, proteins: Sequence[str]) -> Tensor:
    """Average the residues of each protein. -> (n_proteins, dim)"""
    batch = PackedBatch.from_sequences(sorted(proteins, key=len, reverse=True))
    return segment_mean(encoder(batch), batch.runs, n_ends=1)


def _largest_inputs(encoder: ESM2, proteins: Sequence[str]) -> Mapping[Place, Tensor]:
    """Return the largest |x| of each input channel of each product."""
    maxima: dict[Place, Tensor] = {}

    def watch(place: Place, linear: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            maxima[place] = inputs[0].abs().amax(dim=0)

        return linear.register_forward_pre_hook(keep)

    handles = [watch(place, linear) for place, linear in _linears(encoder).items()]
    _embed(encoder, proteins)
    for handle in handles:
        handle.remove()
    return maxima


def _add_outliers(encoder: ESM2, outlier: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in _layers(encoder):
        for norm, linear in ((layer.attention_norm, layer.qkv), (layer.mlp_norm, layer.up)):
            n_channels = linear.in_features
            channels = torch.randperm(n_channels, generator=generator)[: max(1, n_channels // 100)]
            norm.weight[channels] *= outlier
            norm.bias[channels] *= outlier
            linear.weight[:, channels] /= outlier
