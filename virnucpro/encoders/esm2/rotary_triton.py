"""The rotation of queries and keys as one Triton kernel, for NVIDIA GPUs.

It reads and writes each number once, where PyTorch takes five kernels with float32 between them.
Triton comes with PyTorch's builds for CUDA; only ``attention`` imports this module, for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from virnucpro.ground.log import printable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# a product is not rounded before it is added, whatever Triton's default is
OPTIONS: Mapping[str, int | bool] = {"num_warps": 4, "enable_fp_fusion": True}
# no compiler, a compiler that fails, no place for its work, and what cannot be loaded or launched
_SYSTEM_FAILURES = (ImportError, OSError, RuntimeError, SubprocessError)
_FAILURES = _SYSTEM_FAILURES if triton is None else (*_SYSTEM_FAILURES, triton.TritonError)


def why_refused(device: torch.device) -> str:
    """The reason why the kernel does not run on the device; empty if it runs.

    Its first call on a machine compiles it. That needs a C compiler and a place for Triton's cache.
    """
    if triton is None:
        return "Triton is not installed"
    qkv = torch.zeros(1, 3, 1, 8, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 8, device=device)
    half = table[:, :4].contiguous()
    try:
        rotate_in_place(qkv, table, half)
    except _FAILURES as error:
        return reason_of(error)
    return ""


def reason_of(error: Exception) -> str:
    """The first line of an error; Triton shows the source of the kernel before its own."""
    text = str(getattr(error, "error_message", None) or error).strip()
    first, _, _ = text.partition("\n")
    return printable(f"{type(error).__name__}: {first}")


def rotate_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn queries and keys where they lie, and leave the values as they are.

    (n_tokens, 3, n_heads, head_dim) contiguous; cosines (n_tokens, head_dim) and sines
    (n_tokens, head_dim / 2), float32. Computed in float32, as by ``attention.rotate``.
    """
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    n_tokens, _, n_heads, head_dim = qkv.shape
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _KERNEL[(n_tokens,)](qkv, cos, sin, *sizes_of(n_heads, head_dim), **OPTIONS)


def sizes_of(n_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """What the kernel is compiled for: ``n_pairs``, ``half``, ``row`` and ``block``."""
    n_pairs = n_heads * head_dim  # of numbers that turn together, in the queries and the keys
    return n_pairs, head_dim // 2, 3 * n_pairs, triton.next_power_of_2(n_pairs)


def rotate_token(  # type: ignore[no-untyped-def]  # Triton refuses any other annotation
    qkv,
    cos,
    sin,
    n_pairs: tl.constexpr,
    half: tl.constexpr,
    row: tl.constexpr,
    block: tl.constexpr,
):
    """One token: all pairs of all heads, the queries' and the keys', which lie behind them."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, block)
    mask = pair < n_pairs
    head, place = pair // half, pair % half
    c = tl.load(cos + token * 2 * half + place, mask=mask, other=0.0)
    s = tl.load(sin + token * half + place, mask=mask, other=0.0)
    at = qkv + token * row + head * 2 * half + place
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (a * c - b * s).to(qkv.dtype.element_ty), mask=mask)
    tl.store(at + half, (b * c + a * s).to(qkv.dtype.element_ty), mask=mask)


_KERNEL: Any = None if triton is None else triton.jit(rotate_token)
