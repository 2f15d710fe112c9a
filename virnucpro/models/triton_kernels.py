"""Our Triton kernels for NVIDIA GPUs. Each reads and writes every number once.

ESM-2 has kernels for the rotation of queries and keys, the sub-layer boundary, and rounding to 8
bits. DNABERT-S has attention with a distance penalty. Each kernel is a plain function, which
the tests compile for any GPU and run in Triton's interpreter. A second function launches it on
tensors. Triton comes with PyTorch's CUDA builds. This module is imported only for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor, nn

from virnucpro.core.logging import printable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Products are added without rounding. Triton's default varies.
OPTIONS: Mapping[str, int | bool] = {"num_warps": 4, "enable_fp_fusion": True}
TEXT_BLOCK = 32  # queries per ``attend_text`` program, and keys per step
OPTIONS_TO_ATTEND: Mapping[str, int | bool] = {**OPTIONS, "num_stages": 2}


class KernelName(StrEnum):
    """Kernel names for messages."""

    ROTATION = "rotation"
    BORDER = "residual + LayerNorm"
    TO_FP8 = "fp8 quantise"
    TO_INT8 = "int8 quantise"
    TEXTS = "DNABERT-S attention"


def unavailable_kernels(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Try each kernel for products in this dtype.

    The kernels for 8 bits are those for bf16 and those that round to 8 bits and restore. The kernel
    for float32 is DNABERT-S attention. The first call on a machine compiles the kernels, which
    needs a C compiler and a folder for Triton's cache.

    Returns:
        For each kernel name, the reason why it does not run. The reason is empty if it runs.
    """
    to_8_bits = {torch.float8_e4m3fn: KernelName.TO_FP8, torch.int8: KernelName.TO_INT8}
    if dtype == torch.float32:
        trials = {KernelName.TEXTS: lambda: _try_texts(device)}
    else:
        number = torch.bfloat16 if dtype in to_8_bits else dtype
        trials = {
            KernelName.ROTATION: lambda: _try_rotation(device, number),
            KernelName.BORDER: lambda: _try_border(device, number),
        }
    if dtype in to_8_bits:
        trials[to_8_bits[dtype]] = lambda: _try_8_bits(device, dtype)
    return {name.value: _find_unavailable(trial) for name, trial in trials.items()}


def _find_unavailable(trial: Callable[[], object]) -> str:
    if triton is None:
        return "Triton is not installed"
    # from compiling (no compiler, no writable folder), loading or launching
    failures = (ImportError, OSError, RuntimeError, SubprocessError, triton.TritonError)
    try:
        with torch.inference_mode():
            trial()
    except failures as error:
        return unavailable_reason(error)
    return ""


def _try_rotation(device: torch.device, number: torch.dtype) -> None:
    table = torch.zeros(1, 8, device=device)
    qkv = torch.zeros(1, 3, 1, 8, dtype=number, device=device)
    rotate_in_place(qkv, table, table[:, :4].contiguous())


def _try_border(device: torch.device, number: torch.dtype) -> None:
    x = torch.zeros(1, 8, device=device)
    norm = nn.LayerNorm(8, device=device)
    rows = [torch.zeros(1, 8, dtype=number, device=device) for _ in range(3)]
    add_and_norm(x, rows[:2], norm, rows[2], x)


def _try_8_bits(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 8, device=device)
    norm = nn.LayerNorm(8, device=device)
    values = torch.zeros(1, 8, dtype=dtype, device=device)
    scales = torch.zeros(1, 1, device=device)
    quantise(x.bfloat16(), values, scales, has_gelu=True)
    add_and_norm(x, [], norm, values, None, scales)
    if dtype == torch.int8:
        restore(values.int(), scales, x, norm.bias, x.bfloat16())


def _try_texts(device: torch.device) -> None:
    qkv = torch.zeros(1, 3, 12, 64, device=device)  # heads in the published model
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    attend_sequences(qkv, offsets, torch.ones(12, device=device), 1)


def unavailable_reason(error: Exception) -> str:
    """Return the first line of an error, without the kernel's source, which Triton prints first."""
    text = str(getattr(error, "error_message", None) or error).strip()
    first, _, _ = text.partition("\n")
    return printable(f"{type(error).__name__}: {first}")


def row_options(dim: int) -> dict[str, int | bool]:
    """Return the launch options for a kernel with a row of ``dim`` numbers in registers."""
    return {**OPTIONS, "num_warps": _count_warps(triton.next_power_of_2(dim))}


def _count_warps(n_elements: int) -> int:
    """Return the warps that have these row elements in registers, 16 per thread."""
    elements_per_warp = 512
    max_warps = 16
    return max(1, min(max_warps, n_elements // elements_per_warp))


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    sizes: Mapping[str, object],
    options: Mapping[str, int | bool],
) -> None:
    """Run a kernel on its tensors' device. Triton itself launches on the current device."""
    if all(grid):
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            wrap_kernel(kernel)[grid](*tensors, **sizes, **options)


@cache
def wrap_kernel(function: Callable[..., None]) -> Any:  # noqa: ANN401 - Triton's
    """Make a kernel that Triton compiles, once per function."""
    return triton.jit(function)


# The rotation of queries and keys


def rotate_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate queries and keys in place. Values stay the same.

    The rotation is computed in float32, like ``attention.rotate``.

    Args:
        qkv: (n_tokens, 3, n_heads, head_dim), contiguous.
        cos: (n_tokens, head_dim) float32.
        sin: (n_tokens, head_dim / 2) float32.
    """
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32
    n_tokens, _, n_heads, head_dim = qkv.shape
    sizes = sizes_to_rotate(n_heads, head_dim)
    options = row_options(n_heads * head_dim)
    launch(rotate_token, (n_tokens,), (qkv, cos, sin), sizes, options)


def sizes_to_rotate(n_heads: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time constants for ``rotate_token``."""
    n_pairs = n_heads * head_dim  # pairs of numbers that rotate together, in queries and keys
    return {
        "n_pairs": n_pairs,
        "half": head_dim // 2,
        "row": 3 * n_pairs,
        "block": triton.next_power_of_2(n_pairs),
    }


def rotate_token(  # type: ignore[no-untyped-def]  # Triton refuses any other annotation
    qkv,
    cos,
    sin,
    n_pairs: tl.constexpr,
    half: tl.constexpr,
    row: tl.constexpr,
    block: tl.constexpr,
):
    """Rotate one token: all pairs in all heads, first its queries, then its keys."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, block)
    mask = pair < n_pairs
    head = pair // half
    place = pair % half
    c = tl.load(cos + token * 2 * half + place, mask=mask, other=0.0)
    s = tl.load(sin + token * half + place, mask=mask, other=0.0)
    at = qkv + token * row + head * 2 * half + place
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (a * c - b * s).to(qkv.dtype.element_ty), mask=mask)
    tl.store(at + half, (b * c + a * s).to(qkv.dtype.element_ty), mask=mask)


# The boundary between two sub-layers: residual, LayerNorm and cast


def add_and_norm(
    x: Tensor,
    added: Sequence[Tensor],
    norm: nn.LayerNorm,
    normed: Tensor,
    total: Tensor | None,
    scales: Tensor | None = None,
    *,
    branch_scale: float = 1.0,
) -> None:
    """Add ``added`` to ``x``, and write the LayerNorm and, if ``total`` is given, the sum.

    Each addend is multiplied by ``branch_scale``. A norm without a bias is not shifted. Sums (in
    the order of ``added``), mean and variance are float32, as in PyTorch. ``normed`` is rounded
    once.

    Args:
        x: (n_tokens, dim) float32.
        added: at most two tensors, (n_tokens, dim), any dtype.
        norm: the LayerNorm.
        normed: output, (n_tokens, dim), any dtype. With ``scales`` it is e4m3 or int8, as in
            ``eight_bits``.
        total: output, (n_tokens, dim) float32.
        scales: output, (n_tokens, 1) float32.
        branch_scale: the factor for each addend.
    """
    first, second = (*added, x, x)[:2]
    assert all(each.is_contiguous() for each in (x, first, second, normed))
    assert x.dtype == norm.weight.dtype == torch.float32, "sums are float32"
    n_tokens, dim = x.shape
    sizes = sizes_to_norm(
        dim,
        len(added),
        norm.eps,
        keeps_total=total is not None,
        limit=0.0 if scales is None else largest_number(normed.dtype),
        branch_scale=branch_scale,
        has_bias=norm.bias is not None,
    )
    bias = norm.weight if norm.bias is None else norm.bias  # an unread pointer
    targets = (normed, x if total is None else total, x if scales is None else scales)
    tensors = (x, first, second, norm.weight, bias, *targets)
    launch(add_and_norm_token, (n_tokens,), tensors, sizes, row_options(dim))


def sizes_to_norm(
    dim: int,
    n_added: int,
    eps: float,
    *,
    keeps_total: bool,
    limit: float = 0.0,
    branch_scale: float = 1.0,
    has_bias: bool = True,
) -> dict[str, int | float | bool]:
    """Return the compile-time constants for ``add_and_norm_token``.

    ``limit`` is the largest 8-bit number, or 0 for rows without a scale.
    """
    block = triton.next_power_of_2(dim)
    return {
        "dim": dim,
        "n_added": n_added,
        "eps": eps,
        "keeps_total": keeps_total,
        "limit": limit,
        "branch_scale": branch_scale,
        "has_bias": has_bias,
        "block": block,
    }


def add_and_norm_token(  # type: ignore[no-untyped-def]
    x,
    first,
    second,
    weight,
    bias,
    normed,
    total,
    scales,
    dim: tl.constexpr,
    n_added: tl.constexpr,
    eps: tl.constexpr,
    keeps_total: tl.constexpr,
    limit: tl.constexpr,
    branch_scale: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    """Add and norm one token, a row in the stream. The variance is computed after centring."""
    place = tl.arange(0, block)
    mask = place < dim
    at = tl.program_id(0).to(tl.int64) * dim + place
    row = tl.load(x + at, mask=mask, other=0.0)
    if n_added > 0:
        row += tl.load(first + at, mask=mask, other=0.0).to(tl.float32) * branch_scale
    if n_added > 1:
        row += tl.load(second + at, mask=mask, other=0.0).to(tl.float32) * branch_scale
    if keeps_total:
        tl.store(total + at, row, mask=mask)
    centred = tl.where(mask, row - tl.sum(row, 0) / dim, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / dim + eps)
    gain = tl.load(weight + place, mask=mask, other=0.0)
    row = centred * scale * gain
    if has_bias:
        row += tl.load(bias + place, mask=mask, other=0.0)
    if limit > 0:
        largest = tl.maximum(tl.max(tl.abs(row), 0), 1e-12)
        unscaled = row
        row *= tl.div_rn(limit, largest)
        if normed.dtype.element_ty == tl.int8:
            row = tl.floor(row + 0.5)
            largest += tl.sum(unscaled - unscaled, 0)  # 0, or NaN, which integers cannot hold
        tl.store(scales + tl.program_id(0), tl.div_rn(largest, limit))
    tl.store(normed + at, row.to(normed.dtype.element_ty), mask=mask)


# 8-bit rows with one scale each: see ``eight_bits``


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest number of an 8-bit type."""
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def quantise(x: Tensor, values: Tensor, scales: Tensor, *, has_gelu: bool) -> None:
    """Round rows to e4m3 or int8, with ``has_gelu`` after exact GELU in float32.

    (n_tokens, dim) in any dtype -> (n_tokens, dim) in 8 bits, (n_tokens, 1) float32
    """
    assert x.is_contiguous() and values.is_contiguous()
    n_tokens, dim = x.shape
    sizes = sizes_to_quantise(dim, has_gelu=has_gelu, limit=largest_number(values.dtype))
    options = {**OPTIONS, "num_warps": warps_to_quantise(dim)}
    launch(quantise_token, (n_tokens,), (x, values, scales), sizes, options)


def warps_to_quantise(dim: int) -> int:
    """Return the warps for ``quantise_token``, fewer than for other rows: measured on an H200."""
    return _count_warps(triton.next_power_of_2(dim) // 4)


def sizes_to_quantise(dim: int, *, has_gelu: bool, limit: float) -> dict[str, int | float]:
    """Return the compile-time constants for ``quantise_token``. ``limit``: the largest number.

    An ESM-2 row has 5 or 15 times a power of two elements. A single block would mask 3 in 8.
    """
    block = 2 ** (dim.bit_length() - 1)
    rest = triton.next_power_of_2(max(1, dim - block))
    return {"dim": dim, "has_gelu": has_gelu, "limit": limit, "block": block, "rest": rest}


def quantise_token(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    dim: tl.constexpr,
    has_gelu: tl.constexpr,
    limit: tl.constexpr,
    block: tl.constexpr,
    rest: tl.constexpr,
):
    """Round one token: its row, in two parts.

    The normal distribution in GELU uses formula 7.1.26 in Abramowitz and Stegun (1964), for erf of
    x / sqrt(2). The error in GELU is at most 4e-7, with half the instructions of ``tl.erf``.
    """
    start = tl.program_id(0).to(tl.int64) * dim
    first = 0.0
    second = 0.0
    largest = 1e-12
    fault = 0.0
    for part in tl.static_range(2):
        place = part * block + tl.arange(0, rest if part else block)
        row = tl.load(x + start + place, mask=place < dim, other=0.0).to(tl.float32)
        if has_gelu:
            size = tl.abs(row)
            t = 1.0 / (1.0 + 0.231641887 * size)
            tail = (0.5307027145 * t - 0.7265760135) * t + 0.7107068705
            tail = ((tail * t - 0.142248368) * t + 0.127414796) * t
            tail *= tl.exp2(row * row * -0.7213475204444817)
            row = tl.maximum(row, 0.0) - size * tail
        largest = tl.maximum(largest, tl.max(tl.abs(row), 0))
        if values.dtype.element_ty == tl.int8:
            fault += tl.sum(row - row, 0)  # 0, or NaN, which integers cannot hold
        if part:
            second = row
        else:
            first = row
    tl.store(scales + tl.program_id(0), tl.div_rn(largest + fault, limit))
    scale = tl.div_rn(limit, largest)
    for part in tl.static_range(2):
        place = part * block + tl.arange(0, rest if part else block)
        row = (second if part else first) * scale
        if values.dtype.element_ty == tl.int8:
            row = tl.floor(row + 0.5)
        tl.store(values + start + place, row.to(values.dtype.element_ty), mask=place < dim)


def restore(
    product: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Scale a product of int8 matrices, and add the bias.

    Args:
        product: (n_tokens, n_out) int32, contiguous.
        row_scales: (n_tokens, 1) float32.
        column_scales: (1, n_out) float32.
        bias: (n_out,) float32.
        out: output, (n_tokens, n_out), any dtype, contiguous.
    """
    n_tokens, n_out = product.shape
    sizes = sizes_to_restore(n_out, has_bias=bias is not None)
    grid = n_tokens, triton.cdiv(n_out, sizes["block"])
    factors = row_scales, column_scales, column_scales if bias is None else bias
    launch(restore_row, grid, (product, *factors, out), sizes, OPTIONS)


def sizes_to_restore(n_out: int, *, has_bias: bool) -> dict[str, int]:
    """Return the compile-time constants for ``restore_row``."""
    largest_block = 2048  # columns per program, four warps with 16 numbers per thread
    block = min(largest_block, triton.next_power_of_2(n_out))
    return {"n_out": n_out, "has_bias": has_bias, "block": block}


def restore_row(  # type: ignore[no-untyped-def]
    product,
    row_scales,
    column_scales,
    bias,
    out,
    n_out: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    """Restore a block of columns in one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < n_out
    numbers = tl.load(product + row * n_out + column, mask=mask, other=0).to(tl.float32)
    numbers *= tl.load(column_scales + column, mask=mask, other=0.0) * tl.load(row_scales + row)
    if has_bias:
        numbers += tl.load(bias + column, mask=mask, other=0.0)
    tl.store(out + row * n_out + column, numbers.to(out.dtype.element_ty), mask=mask)


# Attention within each sequence of a packed batch, with a distance penalty (ALiBi)


def attend_sequences(qkv: Tensor, offsets: Tensor, slopes: Tensor, longest: int) -> Tensor:
    """Compute attention within each sequence, in one launch.

    Args:
        qkv: (n_tokens, 3, n_heads, head_dim) float32.
        offsets: (n_sequences + 1,) int32, the start of each sequence, then the number of tokens.
        slopes: (n_heads,), the penalty per unit distance.
        longest: the maximum number of tokens in a sequence.

    Returns:
        (n_tokens, n_heads, head_dim) float32.
    """
    assert qkv.is_contiguous()
    _, _, n_heads, head_dim = qkv.shape
    out = torch.empty_like(qkv[:, 0])
    grid = (len(offsets) - 1, n_heads, -(-longest // TEXT_BLOCK))
    sizes = sizes_to_attend(n_heads, head_dim, has_tf32=has_tf32(qkv.device))
    launch(attend_sequence, grid, (qkv, offsets, slopes, out), sizes, OPTIONS_TO_ATTEND)
    return out


def has_tf32(device: torch.device) -> bool:
    """Return True if the GPU's tensor cores multiply TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def sizes_to_attend(n_heads: int, head_dim: int, *, has_tf32: bool) -> dict[str, int | float | str]:
    """Return the compile-time constants for ``attend_sequence``.

    On tensor cores a float32 product is computed as three products of TF32 parts, as in PyTorch's
    own float32 attention. They cover 22 of each factor's 24 bits.
    """
    min_width = 16  # minimum width of a product factor in Triton
    return {
        "n_heads": n_heads,
        "head_dim": head_dim,
        "width": max(min_width, triton.next_power_of_2(head_dim)),
        "scale": head_dim**-0.5 / math.log(2),
        "precision": "tf32x3" if has_tf32 else "ieee",
        "block": TEXT_BLOCK,
    }


def attend_sequence(  # type: ignore[no-untyped-def]
    qkv,
    offsets,
    slopes,
    out,
    n_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    scale: tl.constexpr,
    precision: tl.constexpr,
    block: tl.constexpr,
):
    """Attend with a block of queries in one sequence and head to all keys in the sequence.

    The softmax is computed online, with powers of two (Milakov and Gimelshein 2018,
    arXiv:1805.02867). ``scale`` and ``slope`` convert scores to base-2 logarithms.
    """
    head = tl.program_id(1)
    begin = tl.load(offsets + tl.program_id(0)).to(tl.int64)
    seqlen = (tl.load(offsets + tl.program_id(0) + 1) - begin).to(tl.int32)
    if tl.program_id(2) * block >= seqlen:
        return  # only longer sequences have this block
    row: tl.constexpr = n_heads * head_dim
    query = (tl.program_id(2) * block + tl.arange(0, block)).to(tl.int64)
    dim = tl.arange(0, width)
    is_dim = dim[None, :] < head_dim
    start = qkv + begin * 3 * row + head * head_dim + dim[None, :]
    slope = tl.load(slopes + head) * 1.4426950408889634  # to base 2, like the scale
    q = tl.load(
        start + query[:, None] * 3 * row, mask=(query[:, None] < seqlen) & is_dim, other=0.0
    )
    largest = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    mixed = tl.zeros([block, width], tl.float32)
    for first in range(0, seqlen, block):
        key = (first + tl.arange(0, block)).to(tl.int64)
        is_key = key < seqlen
        at = start + key[:, None] * 3 * row
        k = tl.load(at + row, mask=is_key[:, None] & is_dim, other=0.0)
        v = tl.load(at + 2 * row, mask=is_key[:, None] & is_dim, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        scores -= slope * tl.abs(query[:, None] - key[None, :]).to(tl.float32)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(largest - larger)
        total = total * fade + tl.sum(weights, 1)
        mixed = tl.dot(weights, v, mixed * fade[:, None], input_precision=precision)
        largest = larger
    to = out + (begin + query[:, None]) * row + head * head_dim + dim[None, :]
    tl.store(to, mixed / total[:, None], mask=(query[:, None] < seqlen) & is_dim)
