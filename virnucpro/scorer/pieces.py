"""Pieces of sequences as rows of digits, which is all that the scorer reads.

A, C, G and T are 0 to 3, U is read as T, in either case. Any other letter is 4, as is what lies
behind the end of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNKNOWN = 4
Digits = NDArray[np.uint8]
Counts = NDArray[np.int64]

_DIGITS = bytearray([UNKNOWN]) * 256
for _digit, _letters in enumerate(("Aa", "Cc", "Gg", "TtUu")):
    for _letter in _letters:
        _DIGITS[ord(_letter)] = _digit
_COMPLEMENT = np.array([3, 2, 1, 0, UNKNOWN], dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Both strands of each piece, from its first base on; at least three digits 4 behind each."""

    digits: Digits  # (n, 2, width): forward, reverse complement; the width is a multiple of 3
    lengths: Counts  # (n,) bases

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, sequence: Digits, starts: Counts, lengths: Counts) -> Pieces:
        """Pieces of one row of digits, which may be many records side by side."""
        longest = int(lengths.max(initial=0))
        width = 3 * (longest // 3 + 2)
        places = np.arange(width)
        is_inside = places < lengths[:, None]
        forward = starts[:, None] + places
        reverse = (starts + lengths - 1)[:, None] - places
        digits = np.full((len(starts), 2, width), UNKNOWN, dtype=np.uint8)
        padded = np.append(sequence, np.uint8(UNKNOWN))
        digits[:, 0] = padded[np.where(is_inside, forward, len(sequence))]
        digits[:, 1] = _COMPLEMENT[padded[np.where(is_inside, reverse, len(sequence))]]
        return cls(digits, lengths)


def encode(sequence: str) -> Digits:
    """A sequence as digits. (n_bases,)"""
    return np.frombuffer(sequence.encode("ascii", "replace").translate(bytes(_DIGITS)), np.uint8)


def reverse_complement(digits: Digits) -> Digits:
    """Each row read on the other strand. (..., n_bases) -> (..., n_bases)"""
    return _COMPLEMENT[digits[..., ::-1]]


def cut(lengths: Counts, size: int) -> tuple[Counts, Counts, Counts]:
    """The pieces of records side by side: whose they are, where they start, how long they are.

    A record is cut from its first base on. A rest of less than half a piece is left out, unless
    it is all there is.

    >>> [values.tolist() for values in cut(np.array([1249, 1250, 249]), 500)]
    [[0, 0, 1, 1, 1, 2], [0, 500, 1249, 1749, 2249, 2499], [500, 500, 500, 500, 250, 249]]
    """
    n_whole, rest = np.divmod(lengths, size)
    n_pieces = np.maximum(1, n_whole + (2 * rest >= size))
    owner = np.repeat(np.arange(len(lengths)), n_pieces)
    place = size * (np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner])
    first = np.cumsum(lengths) - lengths
    return owner, first[owner] + place, np.minimum(size, lengths[owner] - place)
