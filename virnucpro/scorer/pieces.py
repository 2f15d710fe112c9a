"""Pieces of sequences as rows of digits, which is all that the scorer reads.

A, C, G and T are 0 to 3, U is read as T, in either case. Any other letter is 4, as is what lies
behind the end of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from virnucpro.ground.numeric import Counts

UNKNOWN = 4
Digits = NDArray[np.uint8]

_DIGITS = bytearray([UNKNOWN]) * 256
for _digit, _letters in enumerate(("Aa", "Cc", "Gg", "TtUu")):
    for _letter in _letters:
        _DIGITS[ord(_letter)] = _digit


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
        width = 3 * (int(lengths.max(initial=0)) // 3 + 2)
        behind = np.full(width, UNKNOWN, dtype=np.uint8)
        forward = np.append(sequence, behind)
        reverse = np.append(opposite_strand(sequence), behind)
        digits = np.empty((len(starts), 2, width), dtype=np.uint8)
        digits[:, 0] = sliding_window_view(forward, width)[starts]
        digits[:, 1] = sliding_window_view(reverse, width)[len(sequence) - starts - lengths]
        shortest = int(lengths.min(initial=width))
        is_behind = np.arange(shortest, width) >= lengths[:, None]
        digits[:, :, shortest:].swapaxes(1, 2)[is_behind] = UNKNOWN
        return cls(digits, lengths)


def encode(sequence: str) -> Digits:
    """A sequence as digits. (n_bases,)"""
    return np.frombuffer(sequence.encode("ascii", "replace").translate(bytes(_DIGITS)), np.uint8)


def digits_of(sequence: str | Digits) -> Digits:
    """The digits of a sequence that may be digits already. (n_bases,)"""
    return encode(sequence) if isinstance(sequence, str) else sequence


def opposite_strand(digits: Digits) -> Digits:
    """Each row read on the other strand. (..., n_bases) -> (..., n_bases)"""
    return np.minimum(3 - digits[..., ::-1], UNKNOWN)  # 3 - 4 is 255


def cut(lengths: Counts, size: int) -> tuple[Counts, Counts, Counts]:
    """The pieces of records side by side: whose they are, where they start, how long they are.

    They are the fewest that leave no more of a record out than a tenth of a piece. Where that asks
    for it they overlap, evenly: the first begins with the record, and the last ends with it.

    >>> [values.tolist() for values in cut(np.array([1050, 1051, 499]), 500)]
    [[0, 0, 1, 1, 1, 2], [0, 500, 1050, 1325, 1601, 2101], [500, 500, 500, 500, 500, 499]]
    """
    n_pieces = np.maximum(1, -(-(10 * lengths - size) // (10 * size)))
    owner = np.repeat(np.arange(len(lengths)), n_pieces)
    number = np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner]
    n_bases = np.minimum(size, lengths)
    last = np.minimum(lengths, n_pieces * size) - n_bases
    first = np.cumsum(lengths) - lengths
    place = number * last[owner] // np.maximum(1, n_pieces - 1)[owner]
    return owner, first[owner] + place, n_bases[owner]
