"""Tiles cover a batch: each query once, with all keys that it needs."""

from __future__ import annotations

import numpy as np
import pytest

from virnucpro.models.attention_tiles import plan_tiles, shared_tile_fill, tile_fill


def plan_one_by_one(seqlens: list[int], block: int) -> list[list[int]]:
    """Plan tiles in a plain loop."""
    bounds = []
    start = 0
    i = 0
    while i < len(seqlens):
        end = start + seqlens[i]
        i += 1
        while i < len(seqlens) and end + seqlens[i] <= start + block:
            end += seqlens[i]
            i += 1
        for query in range(start, end, block):
            bounds.append([query, min(query + block, end), start, end])
        start = end
    return bounds


@pytest.mark.parametrize(
    "seqlens",
    [
        [],
        [1],
        [64],
        [65],
        [1] * 200,
        [300, 50, 50, 14, 14, 50, 64, 63, 2],
        np.random.default_rng(3).integers(1, 200, 300).tolist(),
        np.sort(np.random.default_rng(4).integers(1, 90, 1000))[::-1].tolist(),
    ],
)
def test_tiles_equal_a_plain_loop(seqlens):
    cu_seqlens = np.concatenate([[0], np.cumsum(seqlens)]).astype(np.int32)
    tiles = plan_tiles(cu_seqlens, 64)
    assert tiles.bounds.tolist() == plan_one_by_one(seqlens, 64)
    assert tiles.bounds.dtype == tiles.starts.dtype == np.int32
    assert tiles.starts.tolist() == np.repeat(cu_seqlens[:-1], seqlens).tolist()


@pytest.mark.parametrize(
    ("seqlen", "tile", "fill"), [(168, 128, 0.43), (168, 64, 0.77), (52, 128, 0.17), (52, 64, 0.66)]
)
def test_fill_of_attention_tiles(seqlen, tile, fill):
    assert tile_fill([seqlen] * 9, tile, tile) == pytest.approx(fill, abs=0.005)
    assert shared_tile_fill([seqlen] * 8, 64) == pytest.approx(tile_fill([seqlen], 64, 64))


def test_sharing_fills_tiles_of_short_proteins():
    assert shared_tile_fill([20] * 9, 64) == pytest.approx(3 * 20**2 / 64**2)
    assert tile_fill([20] * 9, 64, 64) == pytest.approx(20**2 / 64**2)
