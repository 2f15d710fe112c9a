"""Smoothing: move large numbers from activations to weights before both are rounded to int8.

A token's activations share one scale, so a channel with large numbers costs the others their
exactness. SmoothQuant (Xiao et al. 2023, arXiv:2211.10438, eq. 4, with equal shares) divides the
activations of each channel by a factor, and multiplies its weights by the same factor:

    factor = sqrt(max |activation| / max |weight|)

As in the paper, only inputs from a LayerNorm are smoothed: the weight and bias of the norm are
divided, so a batch takes no longer. Two rules are our own. A channel at most twice as large as the
median one keeps the factor 1, and others have theirs relative to the median factor. Smoothing every
channel made the demonstration model, which has no large ones, less exact. Factors are rounded to
powers of two, so that bf16 weights stay exact, and small differences between processors seldom
change one.

Smoothing does not help fp8, whose numbers are rounded by their own size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from virnucpro.models.sample_proteins import SAMPLE_PROTEINS


class NormedProducts(NamedTuple):
    """A norm, and all linear layers that take its output."""

    norm: nn.LayerNorm
    linears: tuple[nn.Linear, ...]


def measure_channels(
    products: Iterable[NormedProducts], embed: Callable[[str], object]
) -> Mapping[nn.LayerNorm, Tensor]:
    """Return the largest size of each channel behind each norm, (dim,).

    ``embed`` runs the model on one protein.
    """
    maxima: dict[nn.LayerNorm, Tensor] = {}

    def keep(norm: nn.LayerNorm, _: object, out: Tensor) -> None:
        largest = out.abs().flatten(end_dim=-2).amax(dim=0)
        maxima[norm] = torch.maximum(maxima[norm], largest) if norm in maxima else largest

    handles = [each.norm.register_forward_hook(keep) for each in products]
    try:
        with torch.inference_mode():
            for protein in SAMPLE_PROTEINS.values():
                embed(protein)
    finally:
        for handle in handles:
            handle.remove()
    return maxima


def smooth(products: NormedProducts, largest: Tensor) -> None:
    """Divide the norm's output channels by their factors, and multiply the weights by them.

    The parameters are replaced, because workers may share the memory of the loaded ones.
    ``largest`` is the largest size of each channel, (dim,).
    """
    norm, linears = products
    factors = _choose_factors(largest, torch.cat([linear.weight for linear in linears]))
    norm.weight = _constant(norm.weight / factors)
    if norm.bias is not None:
        norm.bias = _constant(norm.bias / factors)
    for linear in linears:
        linear.weight = _constant(linear.weight * factors.to(linear.weight.dtype))


def _choose_factors(largest: Tensor, weight: Tensor) -> Tensor:
    """Return a power of two for each channel. (dim,), (n_out, dim) -> (dim,) float32"""
    largest = _positive(largest)
    factors = (largest / _positive(weight.detach().abs().amax(dim=0))).sqrt()
    factors = (factors / factors.median()).clamp(min=1)
    factors[largest <= 2 * largest.median()] = 1
    return factors.log2().round().exp2()


def _positive(maxima: Tensor) -> Tensor:
    """Replace the maximum of an unused channel by a small number."""
    return maxima.float().clamp(min=2.0**-20)


def _constant(numbers: Tensor) -> nn.Parameter:
    return nn.Parameter(numbers.detach(), requires_grad=False)
