"""Compute the distances that a precision's roundings explain, with given weights.

``add_roundings`` measures how a precision's roundings change a vector, with given weights. The
model rounds its products as that precision does, and everything else stays float32. So errors grow
from layer to layer as these weights make them grow, without assumptions about the weights.

One rounding: the error is uniform in half a spacing to either side. The spacing is 2u for
significands in [1, 2), and significands are log-uniform. Relative to the number, the root mean
square error is therefore 2u sqrt(1/12 * 3 / (8 ln 2)) = 0.42 u, where u = 2^-8 for bf16, 2^-11 for
fp16, and 2^-24 for float32.

bf16, fp16: weights, factors and product results are rounded to the precision. Sums are float32,
which adds no notable error. fp8, int8: weights and the factors multiplied by them are rounded
row by row, as in ``eight_bits``, and the rest as in bf16. int8 is smoothed before, as in a run.

float32: a sum over n terms with random signs is rounded at each step, on average at 1 / sqrt(2) of
its final size. Its relative error is 0.42 u sqrt(n / 2), as if each term had this error. Both
programs make such errors, independently: together 0.42 u sqrt(n). n is the number of terms in the
longest sum, over the wider layer or over the keys. Libraries sum in blocks, with smaller errors.
The factors and results of products get normal noise of this size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from virnucpro.core.model_outputs import Pooling
from virnucpro.core.recipe import Precision
from virnucpro.models.base import Encoder, Rows
from virnucpro.models.eight_bits import EIGHT_BITS, quantise, restore
from virnucpro.models.smoothing import NormedProducts, measure_channels, smooth
from virnucpro.models.transformer import DTYPES

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """Another program that computes a model's outputs in float32."""

    name: str
    encoder: Encoder
    # make it as inexact as in a precision, for sequences with at most this number of tokens
    add_roundings: Callable[[Precision, int], None]


def add_roundings(layers: nn.Module, precision: Precision, n_tokens: int) -> Loss:
    """Make a float32 model's linear layers as inexact as in ``precision``.

    ``n_tokens`` is the number of tokens in the longest sequence to embed. The caller rounds other
    factors and product results. -> what a rounding does to them
    """
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    if precision == "fp32":
        n_terms = max(n_tokens, *(linear.in_features for linear in linears))
        lose = _noise(linears[0].weight.device, n_terms)
    else:
        lose = _rounding(DTYPES[precision])
    factors = EIGHT_BITS.get(precision)
    lose_factors = _rounding_to_8_bits(factors) if factors else lose
    for linear in linears:
        if precision != "fp32":
            linear.weight.copy_(lose_factors(lose(linear.weight)))
            if linear.bias is not None:
                linear.bias.copy_(lose(linear.bias))
        linear.register_forward_pre_hook(lambda _, inputs: tuple(map(lose_factors, inputs)))
        linear.register_forward_hook(lambda *call: lose(call[-1]))
    return lose


def add_smoothing(products: Sequence[NormedProducts], embed: Callable[[str], object]) -> None:
    """Smooth a float32 model as our encoder before int8. ``embed`` runs it on one protein."""
    maxima = measure_channels(products, embed)
    for each in products:
        smooth(each, maxima[each.norm])


def _rounding(dtype: torch.dtype) -> Loss:
    return lambda exact: exact.to(dtype).to(exact.dtype)


def _rounding_to_8_bits(dtype: torch.dtype) -> Loss:
    return _round_to_int8 if dtype == torch.int8 else lambda exact: restore(quantise(exact, dtype))


def _round_to_int8(exact: Tensor) -> Tensor:
    """Round rows as our C code does, but in PyTorch."""
    largest = exact.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    return (exact * (127 / largest)).round() * (largest / 127)


def _noise(device: torch.device, n_terms: int) -> Loss:
    """Return noise that is the same in every check on one kind of device."""
    one_rounding = 0.42  # u, in the root mean square
    generator = torch.Generator(device).manual_seed(0)
    size = one_rounding * torch.finfo(torch.float32).eps / 2 * math.sqrt(n_terms)

    def lose(exact: Tensor) -> Tensor:
        noise = torch.randn(exact.shape, generator=generator, device=device)
        return torch.addcmul(exact, exact, noise, value=size)

    return lose


def pool_alone(hidden: Tensor, pooling: Pooling) -> Tensor:
    """Pool one protein with its ``<cls>`` and ``<eos>``, without our own code.

    (n_residues + 2, dim) -> (1, dim), or (n_residues, dim) without pooling
    """
    residues = hidden[1:-1]
    match pooling:
        case "mean":
            return residues.mean(dim=0, keepdim=True)
        case "max":
            return residues.amax(dim=0, keepdim=True)
        case "std":
            return residues.std(dim=0, correction=0, keepdim=True)
        case "bos":
            return hidden[:1]
        case "none":
            return residues


def largest_distance(vectors: Rows, exact: Rows) -> float:
    """Return the largest relative L2 distance between a row and the exact one, infinite if NaN."""
    a = vectors.astype(np.float64)
    b = exact.astype(np.float64)
    largest = float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())
    return largest if math.isfinite(largest) else math.inf
