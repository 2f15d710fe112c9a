"""8-bit (e4m3) matrix products, for GPUs that run them twice as fast as bf16.

Each row of a factor has its own scale, which maps its largest number to the largest e4m3 number.
Weight rows are scaled once, activations token by token. Products are summed in float32 and returned
as bf16, with the bias. Within an instruction, tensor cores keep about 14 bits (DeepSeek-AI 2024,
arXiv:2412.19437, 3.3.2).

Requirements on a GPU:

- compute capability 8.9 (``_scaled_mm_allowed_device`` in PyTorch's ScaledBlas.cpp)
- contiguous rows in the first factor, contiguous columns in the second
- weights with multiples of 16 in both dimensions (any number of tokens)

Other devices compute the same product of the same 8-bit numbers in float32, slowly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.models.attention import E4M3

LARGEST = 448.0  # largest e4m3 number
FP8_WIDTH = 16  # both dimensions of an 8-bit weight matrix are multiples of this


class Rows8(NamedTuple):
    """Rows in e4m3. Each row has a scale that multiplies its numbers."""

    values: Tensor  # (n_rows, dim) e4m3
    scales: Tensor  # (n_rows, 1) float32


def quantise(rows: Tensor) -> Rows8:
    """Scale rows, (n_rows, dim), and round them to e4m3."""
    least = 1e-12  # replaces the maximum of an all-zero row
    rows = rows.float()
    largest = rows.abs().amax(dim=-1, keepdim=True).clamp(min=least)
    return Rows8((rows * (LARGEST / largest)).to(E4M3), largest / LARGEST)


def restore(rows: Rows8) -> Tensor:
    """Return the rows in float32. (n_rows, dim)"""
    return rows.values.float() * rows.scales


class Linear8(nn.Module):
    """A linear layer with quantised weights: ``Rows8`` -> (n_rows, n_out) bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scales = quantise(linear.weight.detach())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales.t().contiguous(), requires_grad=False)  # (1, n_out)
        self.bias = linear.bias

    def forward(self, rows: Rows8) -> Tensor:
        if rows.values.device.type == "cpu":
            product = rows.values.float() @ self.weight.float().t()
            product = product * rows.scales * self.scales
            if self.bias is not None:
                product = product + self.bias.float()
            return product.to(torch.bfloat16)
        return torch._scaled_mm(
            rows.values,
            self.weight.t(),
            scale_a=rows.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,  # fast accumulation would sum in fewer bits than float32
        )


def check_device(device: torch.device) -> None:
    """Try a product on a GPU, because a PyTorch build may lack it even for a new GPU.

    Raises:
        UnavailableError: the product does not run.
    """
    if device.type == "cpu":
        return
    try:
        linear = nn.Linear(FP8_WIDTH, FP8_WIDTH, dtype=torch.bfloat16, device=device)
        Linear8(linear)(quantise(torch.ones(1, FP8_WIDTH, device=device)))
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"this build of torch ({torch.__version__}) has no products in fp8 for {device}: "
            f"{printable(error)}",
            hint=with_options("use {precision:bf16}"),
        ) from error
