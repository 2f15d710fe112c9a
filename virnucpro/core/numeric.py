"""Array types and small array functions that several packages share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

DECIMALS = 6  # in scores


def sigmoid(log_odds: FloatArray) -> FloatArray:
    """Return the probabilities for log-odds, without overflow.

    Args:
        log_odds: (n,) natural log-odds.

    Returns:
        (n,) probabilities.
    """
    return np.asarray(0.5 * (1 + np.tanh(log_odds / 2)))


def find_runs(mask: BoolArray) -> list[tuple[int, int]]:
    """Return the runs of true values in a mask, as (first, last + 1)."""
    bounds = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def to_bfloat16(
    values: NDArray[np.float32], out: NDArray[np.uint16] | None = None
) -> NDArray[np.uint16]:
    """Return the bits of finite numbers as bfloat16, rounded to nearest, ties to even.

    Args:
        out: a contiguous array of the same shape for the result, so that memory is used again.
    """
    values = np.ascontiguousarray(values)
    bits = np.empty(values.shape, dtype=np.uint16) if out is None else out
    assert bits.shape == values.shape, "a number for each"
    call("to_bfloat16", values, values.size, bits)
    return bits


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert the bits of bfloat16 numbers to float32."""
    upper = bits.astype(np.uint32)
    upper <<= 16
    return upper.view(np.float32)


def mix_hashes(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix k-mer hashes with the SplitMix64 finaliser.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return hashes
