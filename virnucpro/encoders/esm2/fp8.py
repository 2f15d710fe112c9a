"""Matrix products of 8 bit numbers (e4m3), for GPUs that multiply them twice as fast as bf16.

Every row of a factor has a scale of its own, by which its largest number is the largest of e4m3:
so have the weights, once, and the activations, token by token. Products are summed in float32 and
leave as bf16, with the bias. A GPU needs compute capability 8.9 (``_scaled_mm_allowed_device`` of
PyTorch's ScaledBlas.cpp), rows of the first factor and columns of the second that lie together,
and multiples of 16 of both dimensions of the weights; the number of tokens is free. Any other
device computes the same product of the same 8 bit numbers in float32, which is slow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnucpro.encoders.esm2.checkpoint import FP8_WIDTH
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.log import printable

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # taken for the largest number of a row of zeros


class Rows8(NamedTuple):
    """Rows in e4m3: a number stands for itself times the scale of its row."""

    values: Tensor  # (n_rows, dim) e4m3
    scales: Tensor  # (n_rows, 1) float32


def quantise(rows: Tensor) -> Rows8:
    """(n_rows, dim) of any type, to the nearest of e4m3."""
    rows = rows.float()
    largest = rows.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST)
    return Rows8((rows * (LARGEST / largest)).to(E4M3), largest / LARGEST)


def restore(rows: Rows8) -> Tensor:
    """The numbers that the rows stand for, float32."""
    return rows.values.float() * rows.scales


def gelu8(rows: Tensor) -> Rows8:
    """GELU (exact, in float32) of the rows."""
    return quantise(F.gelu(rows.float()))


class _Linear8(nn.Module):
    """A linear layer of quantised weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scales = quantise(linear.weight.detach())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales.t().contiguous(), requires_grad=False)  # (1, n_out)
        self.bias = linear.bias

    def forward(self, rows: Rows8) -> Tensor:
        if rows.values.device.type == "cpu":
            product = rows.values.float() @ self.weight.float().t()
            return (product * rows.scales * self.scales + self.bias.float()).to(torch.bfloat16)
        return torch._scaled_mm(
            rows.values,
            self.weight.t(),
            scale_a=rows.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,  # it would sum in fewer bits than float32 has
        )


def product_in_8_bits(linear: nn.Linear) -> nn.Module:
    """The layer with its weights quantised: ``Rows8`` -> (n_rows, n_out) bf16."""
    return _Linear8(linear)


def check_device(device: torch.device) -> None:
    """Try a product on a GPU: a build of PyTorch may lack it for one that is new enough.

    Raises:
        UnavailableError: it does not do.
    """
    if device.type == "cpu":
        return
    try:
        linear = nn.Linear(FP8_WIDTH, FP8_WIDTH, dtype=torch.bfloat16, device=device)
        product_in_8_bits(linear)(quantise(torch.ones(1, FP8_WIDTH, device=device)))
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"this build of torch ({torch.__version__}) has no products in fp8 for {device}: "
            f"{printable(error)}",
            hint="use --precision bf16",
        ) from error
