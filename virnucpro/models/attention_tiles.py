"""Tiles for attention in a packed batch, planned on the host once per batch.

A tile has up to ``block`` queries, which are consecutive tokens, and reads the keys of their
sequences. Consecutive short sequences share a tile. A longer sequence has tiles of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Tiles(NamedTuple):
    """The tiles of a batch, each a row of token indices."""

    bounds: NDArray[np.int32]  # (n_tiles, 4): first query, end of queries, first key, end of keys
    starts: NDArray[np.int32]  # (n_tokens,), the first token of each token's sequence


def plan_tiles(cu_seqlens: NDArray[np.int32], block: int) -> Tiles:
    """Divide a batch into tiles.

    Args:
        cu_seqlens: (n_sequences + 1,), from 0 to the number of tokens.
        block: the largest number of queries in a tile.
    """
    starts = cu_seqlens[:-1]
    ends = cu_seqlens[1:]
    # The first sequence behind a tile that begins with a sequence, for each sequence.
    following = np.searchsorted(ends, starts + block, side="right")
    following = np.maximum(following, np.arange(len(starts)) + 1)
    groups = _follow(following)
    first = starts[groups]
    end = np.append(first[1:], ends[-1:])  # also without any sequence
    n_tiles = -(-(end - first) // block)
    n_before = np.cumsum(n_tiles) - n_tiles
    index = np.arange(n_tiles.sum()) - np.repeat(n_before, n_tiles)
    first = np.repeat(first, n_tiles)
    end = np.repeat(end, n_tiles)
    query = first + index * block
    bounds = np.stack([query, np.minimum(query + block, end), first, end], axis=1)
    return Tiles(bounds.astype(np.int32), np.repeat(starts, np.diff(cu_seqlens)))


def _follow(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 and each index that follows an index in the result, in order.

    Each round doubles the steps that are covered, so the number of rounds is a logarithm.

    Args:
        following: (n,), a larger index for each index. An end is n or more.
    """
    n = len(following)
    is_reached = np.zeros(n + 1, dtype=np.bool_)
    is_reached[0] = True
    jump = np.append(following, n)
    while jump[0] < n:
        is_reached[jump[is_reached]] = True
        jump = jump[jump]
    is_reached[jump[is_reached]] = True
    return np.flatnonzero(is_reached[:n])


def tile_fill(seqlens: Sequence[int] | NDArray[np.int64], n_queries: int, n_keys: int) -> float:
    """Return the share of query-key pairs in tiles that attention needs. Sequences share no tile.

    Args:
        seqlens: tokens per sequence.
        n_queries: queries per tile.
        n_keys: keys per step.
    """
    lengths: NDArray[np.int64] = np.asarray(seqlens, dtype=np.int64)
    queries = -(-lengths // n_queries) * n_queries
    keys = -(-lengths // n_keys) * n_keys
    return float((lengths**2).sum() / (queries * keys).sum())


def shared_tile_fill(seqlens: Sequence[int] | NDArray[np.int64], block: int) -> float:
    """Return the same for tiles by ``plan_tiles``, with ``block`` keys per step."""
    lengths: NDArray[np.int64] = np.asarray(seqlens, dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    bounds = plan_tiles(cu_seqlens, block).bounds.astype(np.int64)
    keys = -(-(bounds[:, 3] - bounds[:, 2]) // block) * block
    return float((lengths**2).sum() / (block * keys).sum())
