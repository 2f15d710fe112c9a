"""Pieces of sequences as digits, which is all that the scorer reads, and their open stretches.

A, C, G and T are 0 to 3, U is read as T, in either case. Any other letter is 4.

A stretch lies between two stop codons of a frame, or between one and an end of the piece. A codon
with an unknown base is no stop. Genes are among the longest stretches, so these are kept, longest
first, as far as they do not lie on others that are longer.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Counts, Mask
from virnucpro.scorer.library import call
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

UNKNOWN = 4
NOT_YET = 255  # instead of the owner of a word: it was not looked up
N_CODES = 125  # of three digits, unknown ones among them: 25 a + 5 b + c
SHORTEST = 5  # codons of a stretch
Digits = NDArray[np.uint8]

_DIGITS = bytearray([UNKNOWN]) * 256
for _digit, _letters in enumerate(("Aa", "Cc", "Gg", "TtUu")):
    for _letter in _letters:
        _DIGITS[ord(_letter)] = _digit


Read: TypeAlias = tuple[Digits, Digits, NDArray[np.int32], Counts]  # see `read_bases`


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of one row of digits, which may be many records side by side.

    What is looked up once for all pieces of the row, ``at`` hands on to others.
    """

    digits: Digits  # (n_bases,)
    starts: Counts  # (n,)
    lengths: Counts  # (n,) bases
    _read: dict[GeneticCode, Read] = field(default_factory=dict)
    _owners: dict[tuple[GeneticCode, Sized], Digits] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def at(self, starts: Counts, lengths: Counts) -> Pieces:
        """Other pieces of the same row. (n,), (n,)"""
        return replace(self, starts=starts, lengths=lengths)

    def arguments(self, code: GeneticCode) -> tuple[NDArray[Any] | int, ...]:
        """What functions of the library take."""
        if code not in self._read:
            self._read[code] = _read(self.digits, code)
        row = self.digits, len(self.digits), *self._read[code]
        return *row, self.starts, self.lengths, len(self)

    def owners(self, code: GeneticCode, words: Sized) -> Digits:
        """The owner of the word that ends with the codon at each base, on each strand. (n_bases, 2)

        As far as it was looked up for a piece before; nothing for no words.
        """
        if not len(words):
            return np.empty((0, 2), dtype=np.uint8)
        if (code, words) not in self._owners:
            n_bases = len(self.digits)
            self._owners[code, words] = np.full((n_bases, 2), NOT_YET, dtype=np.uint8)
        return self._owners[code, words]


def _read(digits: Digits, code: GeneticCode) -> Read:
    codes, tetra = np.empty((2, len(digits)), dtype=np.uint8)
    stops, n_stops = np.empty((2, len(digits)), dtype=np.int32), np.empty(2, dtype=np.int64)
    call("read_bases", digits, len(digits), is_stop(code), codes, tetra, stops, n_stops)
    return codes, tetra, stops, n_stops


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """The kept stretches of all pieces: by piece, longest first. Rows in step."""

    piece: Counts
    rank: Counts  # 0 for the longest of a piece, which every piece has that has any
    strand: Counts  # 0 forward, 1 reverse
    start: Counts  # bases, on its strand
    n_codons: Counts
    n_covered: Counts  # (n_pieces,) bases that they lie on

    def __len__(self) -> int:
        return len(self.piece)

    def where(self, chosen: Mask) -> Stretches:
        """The chosen ones; what is covered stays that of all."""
        return Stretches(
            self.piece[chosen],
            self.rank[chosen],
            self.strand[chosen],
            self.start[chosen],
            self.n_codons[chosen],
            self.n_covered,
        )


def find_stretches(
    pieces: Pieces, code: GeneticCode = STANDARD, shortest: int = SHORTEST
) -> Stretches:
    """Find the stretches of all frames, and keep what is hardly covered by longer ones.

    Those of fewer than ``shortest`` codons are left out, which changes nothing for the others.
    Of equally long ones the first is taken first: forward strand, first frame, first place.
    """
    n_kept, n_covered = np.empty((2, len(pieces)), dtype=np.int64)
    # six frames of a piece have at most so many, each with a stop behind it
    most = 6 * (pieces.lengths // (3 * (shortest + 1)) + 1)
    rows = np.empty((int(most.sum()), 3), dtype=np.int64)
    call("kept_stretches", *pieces.arguments(code), shortest, n_kept, n_covered, rows)
    piece = np.repeat(np.arange(len(pieces)), n_kept)
    rank = np.arange(len(piece)) - (np.cumsum(n_kept) - n_kept)[piece]
    strand, start, n_codons = rows[: len(piece)].T.copy()
    return Stretches(piece, rank, strand, start, n_codons, n_covered)


@cache
def is_stop(code: GeneticCode) -> Digits:
    """Whether the codon of each code is a stop. (125,)"""
    table = np.zeros(N_CODES, dtype=np.uint8)
    table[[code_of(codon) for codon in code.stops]] = 1
    return table


def code_of(codon: str) -> int:
    """
    >>> code_of("AAA"), code_of("TTT"), code_of("NNN")
    (0, 93, 124)
    """
    a, b, c = ("ACGTN".index(base) for base in codon)
    return 25 * a + 5 * b + c


def codon_codes(digits: Digits) -> Digits:
    """The code of the three digits from each place on. (n_bases,) -> (n_bases - 2,)"""
    codes: Digits = 25 * digits[:-2] + 5 * digits[1:-1] + digits[2:]
    return codes


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
    """The pieces of all records: their record, start and length.

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
