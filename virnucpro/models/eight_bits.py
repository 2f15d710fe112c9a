"""Matrix products of 8-bit numbers, which some devices run twice as fast as bf16 or faster.

Each row of a factor has its own scale, which maps its largest number to the largest 8-bit number.
Weight rows are scaled once, activations token by token. Products are returned as bf16, with the
bias.

**fp8 (e4m3), on GPUs.** Products are summed in float32. Within an instruction, tensor cores keep
about 14 bits (DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2). Requirements:

- compute capability 8.9 (``_scaled_mm_allowed_device`` in PyTorch's ScaledBlas.cpp)
- contiguous rows in the first factor, contiguous columns in the second
- weights with multiples of 16 in both dimensions (any number of tokens)

Other devices compute the same product of the same 8-bit numbers in float32, slowly.

**int8, on CPUs and GPUs.** oneDNN and cuBLAS sum products in 32-bit integers, exactly. CPUs with
VNNI or AMX and GPUs from compute capability 8.0 have instructions for that. On CPUs our C code
rounds rows and restores products, on GPUs our Triton kernels, or PyTorch if these do not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.option_text import with_options
from virnucpro.models.attention import E4M3, triton_kernels

# The type of the numbers that are multiplied, by precision.
EIGHT_BITS: Mapping[str, torch.dtype] = {"fp8": E4M3, "int8": torch.int8}
FP8_WIDTH = 16  # both dimensions of an e4m3 weight matrix are multiples of this


class Rows8(NamedTuple):
    """Rows of 8-bit numbers. Each row has a scale that multiplies its numbers."""

    values: Tensor  # (n_rows, dim) e4m3 or int8
    scales: Tensor  # (n_rows, 1) float32


def quantise(rows: Tensor, dtype: torch.dtype, *, has_gelu: bool = False) -> Rows8:
    """Scale rows, (n_rows, dim), and round them to 8 bits, with ``has_gelu`` after exact GELU."""
    is_int8 = dtype == torch.int8
    if is_int8 and rows.device.type == "cpu":
        return _round_to_int8(rows, has_gelu=has_gelu)
    least = 1e-12  # replaces the maximum of an all-zero row
    limit = torch.iinfo(dtype).max if is_int8 else torch.finfo(dtype).max
    rows = rows.float()
    rows = F.gelu(rows) if has_gelu else rows
    largest = rows.abs().amax(dim=-1, keepdim=True).clamp(min=least)
    scaled = rows * (limit / largest)
    return Rows8((scaled.round() if is_int8 else scaled).to(dtype), largest / limit)


def _round_to_int8(rows: Tensor, *, has_gelu: bool) -> Rows8:
    rows = rows.contiguous()
    assert rows.dtype in (torch.float32, torch.bfloat16), "the types that our C code reads"
    rounded = Rows8(
        torch.empty_like(rows, dtype=torch.int8),
        torch.empty(len(rows), 1, dtype=torch.float32),
    )
    is_bf16 = rows.dtype == torch.bfloat16
    results = (part.data_ptr() for part in rounded)
    call("round_to_int8", rows.data_ptr(), is_bf16, has_gelu, *rows.shape, *results)
    return rounded


def restore(rows: Rows8) -> Tensor:
    """Return the rows in float32. (n_rows, dim)"""
    return rows.values.float() * rows.scales


class Linear8(nn.Module):
    """A linear layer with quantised weights: ``Rows8`` -> (n_rows, n_out) bf16."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, *, has_triton: bool = False) -> None:
        super().__init__()
        self.has_triton = has_triton  # our Triton kernels run on the device
        values, scales = quantise(linear.weight.detach(), dtype)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales.t().contiguous(), requires_grad=False)  # (1, n_out)
        self.bias = linear.bias
        if dtype == torch.int8 and self.bias is not None:  # it is added in float32
            self.bias = nn.Parameter(self.bias.detach().float(), requires_grad=False)

    def forward(self, rows: Rows8) -> Tensor:
        if rows.values.dtype == torch.int8:
            return self._restore(_multiply_int8(rows.values, self.weight.t()), rows.scales)
        if rows.values.device.type == "cpu":
            return self._scale(rows.values.float() @ self.weight.float().t(), rows.scales)
        return torch._scaled_mm(
            rows.values,
            self.weight.t(),
            scale_a=rows.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,  # fast accumulation would sum in fewer bits than float32
        )

    def _restore(self, product: Tensor, row_scales: Tensor) -> Tensor:
        """Scale a product of int8 numbers, and add the bias. (n_rows, n_out) int32 -> bf16"""
        on_cpu = product.device.type == "cpu"
        if not on_cpu and not self.has_triton:
            return self._scale(product.float(), row_scales)
        out = torch.empty_like(product, dtype=torch.bfloat16)
        if on_cpu:
            bias = 0 if self.bias is None else self.bias.data_ptr()
            scales = row_scales.data_ptr(), self.scales.data_ptr()
            call("restore_int8", product.data_ptr(), *scales, bias, *product.shape, out.data_ptr())
        else:
            triton_kernels().restore(product, row_scales, self.scales, self.bias, out)
        return out

    def _scale(self, product: Tensor, row_scales: Tensor) -> Tensor:
        """Scale a product, and add the bias, in PyTorch. (n_rows, n_out) float32 -> bf16"""
        product = product * row_scales * self.scales
        if self.bias is not None:
            product = product + self.bias.float()
        return product.to(torch.bfloat16)


def _multiply_int8(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply int8 matrices, (n_rows, n_in) by (n_in, n_out). -> int32"""
    min_rows = 17  # ``torch._int_mm`` refuses fewer on a GPU
    n_missing = min_rows - len(rows)
    if rows.device.type == "cpu" or n_missing <= 0:
        return torch._int_mm(rows, weight)
    return torch._int_mm(F.pad(rows, (0, 0, 0, n_missing)), weight)[: len(rows)].contiguous()


def check_device(device: torch.device, precision: str) -> None:
    """Try an 8-bit product on a GPU, because a PyTorch build may lack it even for a new GPU.

    Raises:
        UnavailableError: the product does not run.
    """
    if device.type == "cpu":
        return
    dtype = EIGHT_BITS[precision]
    try:
        linear = nn.Linear(FP8_WIDTH, FP8_WIDTH, dtype=torch.bfloat16, device=device)
        rows = torch.ones(1, FP8_WIDTH, device=device)
        Linear8(linear, dtype)(quantise(rows, dtype))
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"this build of torch ({torch.__version__}) has no products in {precision} for "
            f"{device}: {printable(error)}",
            hint=with_options("use {precision:bf16}"),
        ) from error
