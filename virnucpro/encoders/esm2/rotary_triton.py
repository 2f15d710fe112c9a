"""The rotation of queries and keys as one Triton kernel, for NVIDIA GPUs.

It reads and writes each number once, where PyTorch takes five kernels with float32 between them.
Triton comes with PyTorch's builds for CUDA; only ``attention`` imports this module, for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def can_rotate(device: torch.device) -> bool:
    """True if the kernel runs on the device: its first call on a machine compiles it.

    That needs a C compiler and a place for Triton's cache.
    """
    if triton is None:
        return False
    qkv = torch.zeros(1, 3, 1, 8, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 8, device=device)
    try:
        rotate_in_place(qkv, table, table[:, :4].contiguous())
    except Exception:  # compilers fail in many ways, and there is another rotation
        return False
    return True


def rotate_in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn queries and keys where they lie, and leave the values as they are.

    (n_tokens, 3, n_heads, head_dim) contiguous; cosines (n_tokens, head_dim) and sines
    (n_tokens, head_dim / 2), float32. Computed in float32, as by ``attention.rotate``.
    """
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    n_tokens, _, n_heads, head_dim = qkv.shape
    n_pairs = n_heads * head_dim  # of numbers that turn together, in the queries and the keys
    block = triton.next_power_of_2(n_pairs)
    sizes = (n_pairs, head_dim // 2, 3 * n_pairs, block)
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _KERNEL[(n_tokens,)](qkv, cos, sin, *sizes, num_warps=4)


def _rotate(  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton compiles it
    qkv: Any,  # noqa: ANN401
    cos: Any,  # noqa: ANN401
    sin: Any,  # noqa: ANN401
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


_KERNEL: Any = None if triton is None else triton.jit(_rotate)
