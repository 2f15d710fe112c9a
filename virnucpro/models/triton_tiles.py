"""Attention for short proteins: a Triton kernel in tiles that several proteins may share.

FlashAttention has tiles of 128 queries and 128 keys, and pads heads to 32 dimensions. These tiles
are smaller, and heads with a power of two of dimensions are not padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from virnucpro.models.triton_kernels import OPTIONS_TO_ATTEND, launch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def attend_tiles(
    qkv: Tensor, bounds: Tensor, starts: Tensor, block: int, tables: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute attention within each sequence of a packed batch, in one launch.

    Args:
        qkv: (n_tokens, 3, n_heads, head_dim), float32 or 16 bits, contiguous.
        bounds: (n_tiles, 4) int32, as in ``Tiles``.
        starts: (n_tokens,) int32, as in ``Tiles``.
        block: the largest number of queries in a tile, and the keys per step, a power of two.
        tables: cosines, (max_seqlen, head_dim), and sines, (max_seqlen, head_dim / 2), by position
            in a sequence, float32. With them the kernel rotates queries and keys, otherwise they
            are rotated already.

    Returns:
        (n_tokens, n_heads, head_dim) in the dtype of ``qkv``.
    """
    assert qkv.is_contiguous() and bounds.is_contiguous()
    _, _, n_heads, head_dim = qkv.shape
    out = torch.empty_like(qkv[:, 0])
    sizes = sizes_to_attend_tiles(n_heads, head_dim, rotates=tables is not None, block=block)
    cos, sin = (qkv, qkv) if tables is None else tables  # unread pointers
    tensors = (qkv, bounds, starts, cos, sin, out)
    launch(attend_tile, (len(bounds) * n_heads,), tensors, sizes, OPTIONS_TO_ATTEND)
    return out


def sizes_to_attend_tiles(
    n_heads: int, head_dim: int, *, rotates: bool, block: int
) -> dict[str, int | float | bool]:
    """Return the compile-time constants for ``attend_tile``."""
    min_width = 16  # minimum width of a product factor in Triton
    half_width = max(min_width // 2, triton.next_power_of_2(head_dim // 2))
    return {
        "n_heads": n_heads,
        "head_dim": head_dim,
        "half_width": half_width,
        "scale": head_dim**-0.5 / math.log(2),
        "rotates": rotates,
        "block": block,
    }


def attend_tile(  # type: ignore[no-untyped-def]
    qkv,
    bounds,
    starts,
    cos,
    sin,
    out,
    n_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half_width: tl.constexpr,
    scale: tl.constexpr,
    rotates: tl.constexpr,
    block: tl.constexpr,
):
    """Attend with the queries of one tile in one head. The softmax is as in ``attend_sequence``.

    The heads of a tile run one after the other, because they share memory sectors.
    """
    head = tl.program_id(0) % n_heads
    bound = bounds + tl.program_id(0) // n_heads * 4
    row: tl.constexpr = n_heads * head_dim
    first_key = tl.load(bound + 2)
    end = tl.load(bound + 3)
    query = tl.load(bound) + tl.arange(0, block)
    is_query = query < tl.load(bound + 1)
    # A row without a query computes what is not stored, from the first sequence.
    own = tl.load(starts + query, mask=is_query, other=first_key)
    at = qkv + query.to(tl.int64)[:, None] * 3 * row + head * head_dim
    q = load_rows(at, is_query, query - own, cos, sin, head_dim, half_width, rotates)
    dim = tl.arange(0, 2 * half_width)[None, :]
    largest = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    mixed = tl.zeros([block, 2 * half_width], tl.float32)
    for first in range(first_key, end, block):
        key = first + tl.arange(0, block)
        is_key = key < end
        start = tl.load(starts + key, mask=is_key, other=-1)
        keys = qkv + key.to(tl.int64)[:, None] * 3 * row + head * head_dim
        k = load_rows(keys + row, is_key, key - start, cos, sin, head_dim, half_width, rotates)
        v = tl.load(keys + 2 * row + dim, mask=is_key[:, None] & (dim < head_dim), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(own[:, None] == start[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(largest - larger)
        total = total * fade + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        largest = larger
    to = out + query.to(tl.int64)[:, None] * row + head * head_dim + dim
    shares = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, shares, mask=is_query[:, None] & (dim < head_dim))


def load_rows(  # type: ignore[no-untyped-def]
    at,
    is_row,
    position,
    cos,
    sin,
    head_dim: tl.constexpr,
    half_width: tl.constexpr,
    rotates: tl.constexpr,
):
    """Load queries or keys in halves, and rotate them by position.

    The halves are interleaved, which leaves the products of queries and keys as they are.
    """
    half: tl.constexpr = head_dim // 2
    place = tl.arange(0, half_width)[None, :]
    is_place = place < half
    is_read = is_row[:, None] & is_place
    a = tl.load(at + place, mask=is_read, other=0.0)
    b = tl.load(at + half + place, mask=is_read, other=0.0)
    if rotates:
        turn = tl.where(is_row, position, 0)[:, None]
        c = tl.load(cos + turn * head_dim + place, mask=is_place, other=0.0)
        s = tl.load(sin + turn * half + place, mask=is_place, other=0.0)
        turned = (a * c - b * s).to(a.dtype)
        b = (b * c + a * s).to(a.dtype)
        a = turned
    return tl.interleave(a, b)


if triton is not None:
    load_rows = triton.jit(load_rows)  # called by a kernel
