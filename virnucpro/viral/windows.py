"""Encode pieces of sequences as digits, which the scorer reads, and find their open stretches.

A, C, G and T, in either case, are 0 to 3; U is T; any other letter is 4.

A stretch lies between two stop codons of a frame, or between a stop and an end of the piece. A
codon with an unknown base is not a stop. Genes are among the longest stretches, so a stretch is
kept if longer ones hardly cover it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import Counts
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.translate import STANDARD, GeneticCode

UNKNOWN = 4
NOT_YET = 255  # in place of an owner: the word has not been looked up yet
N_CODES = 125  # of codons: 25 a + 5 b + c for three digits, unknown ones included
SHORTEST = 5  # codons of a stretch
# code -> stops of the bacterial code that it reads as residues; codes with fewer come first
_READ_ON = {4: ("TGA",), 15: ("TAG",), 6: ("TAA", "TAG")}
OPEN_CODONS = 100  # codons of the shortest open stretch that points to another code
_OPEN_RATIO = 2.5  # least ratio of the longest open stretches: another code to the bacterial one
_SAME_LENGTH = 0.8  # a code with fewer reassigned stops needs this share of the longest stretch
_SHORTEST_CODED = 2000  # bases
_MOST_GC = 0.45  # at higher GC, wrong frames of genes are open, too
MOST_BY_CHANCE = 1e-3  # expected number of such stretches in a random sequence of these bases
_CODES = (STANDARD.number, *_READ_ON)  # compared by their open stretches
# whether each kind of codon ends a stretch: not a stop, each stop, each stop on the other strand
_ENDS = np.array(
    [
        [False, *2 * [stop not in _READ_ON.get(number, ()) for stop in STANDARD.stops]]
        for number in _CODES
    ],
    dtype=np.uint8,
)
Digits = NDArray[np.uint8]

_ENCODED_AT_ONCE = 1_000_000  # letters


Read: TypeAlias = tuple[Digits, Digits, NDArray[np.int32], Counts]  # see `read_bases`


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of one row of digits, which may be many concatenated records.

    What is looked up along the row is kept, and ``at`` passes it on to other pieces.
    """

    digits: Digits  # (n_bases,)
    starts: Counts  # (n,)
    lengths: Counts  # (n,) bases
    _read: dict[GeneticCode, Read] = field(default_factory=dict)
    _owners: dict[tuple[GeneticCode, Sized], Digits] = field(default_factory=dict)

    @classmethod
    def of(cls, sequences: Sequence[str]) -> Pieces:
        """Each sequence as one piece."""
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        return cls.side_by_side(encode("".join(sequences)), lengths)

    @classmethod
    def side_by_side(cls, digits: Digits, lengths: Counts) -> Pieces:
        """Each of the concatenated sequences in a row as one piece."""
        return cls(digits, np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def at(self, starts: Counts, lengths: Counts) -> Pieces:
        """Other pieces of the same row. (n,), (n,)"""
        return replace(self, starts=starts, lengths=lengths)

    def arguments(self, code: GeneticCode) -> tuple[NDArray[Any] | int, ...]:
        """The arguments of library functions."""
        if code not in self._read:
            self._read[code] = _read(self.digits, code)
        row = self.digits, len(self.digits), *self._read[code]
        return *row, self.starts, self.lengths, len(self)

    def owners(self, code: GeneticCode, words: Sized) -> Digits:
        """The owner of the word that ends with the codon at each base, on each strand. (n_bases, 2)

        ``NOT_YET`` where no piece has needed it; empty without words.
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


def find_stretches(
    pieces: Pieces, code: GeneticCode = STANDARD, shortest: int = SHORTEST
) -> tuple[Counts, Counts, Counts, Counts]:
    """Find the stretches of all frames that longer ones hardly cover.

    Returns the piece, the strand (0 forward, 1 reverse), the first base on that strand, and the
    number of codons of each, by piece, the longest first. (n,), (n,), (n,), (n,)

    Stretches of fewer than ``shortest`` codons are left out, which does not change the others. Ties
    are in the order of strand (forward first), frame and position.
    """
    n_kept = np.empty(len(pieces), dtype=np.int64)
    # an upper bound for six frames, because a stop follows each stretch
    most = 6 * (pieces.lengths // (3 * (shortest + 1)) + 1)
    rows = np.empty((int(most.sum()), 3), dtype=np.int64)
    call("kept_stretches", *pieces.arguments(code), shortest, n_kept, rows)
    piece = np.repeat(np.arange(len(pieces)), n_kept)
    strand, start, n_codons = rows[: len(piece)].T.copy()
    return piece, strand, start, n_codons


@cache
def is_stop(code: GeneticCode) -> Digits:
    """Whether each codon code is a stop. (125,)"""
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
    """The code of the codon that starts at each base. (n_bases,) -> (n_bases - 2,)"""
    codes: Digits = 25 * digits[:-2] + 5 * digits[1:-1] + digits[2:]
    return codes


def encode(sequence: str) -> Digits:
    """A sequence as digits, encoded in parts to save memory. (n_bases,)"""
    digits = np.empty(len(sequence), dtype=np.uint8)
    for first in range(0, len(sequence), _ENCODED_AT_ONCE):
        part = sequence[first : first + _ENCODED_AT_ONCE].encode("ascii", "replace")
        call("encode_bases", np.frombuffer(part, np.uint8), len(part), digits[first:])
    return digits


def opposite_strand(digits: Digits) -> Digits:
    """Each row read on the other strand. (..., n_bases) -> (..., n_bases)"""
    return np.minimum(3 - digits[..., ::-1], UNKNOWN)  # 3 - 4 is 255


def cut(starts: Counts, lengths: Counts, size: int) -> tuple[Counts, Counts, Counts]:
    """Cut records of one row into pieces: the record, start and length of each.

    A record gets the fewest pieces that leave out at most a tenth of a piece. If together they are
    longer than the record, they overlap evenly, from its first base to its last.

    >>> starts, lengths = np.array([[0, 1050, 2101], [1050, 1051, 499]])
    >>> [values.tolist() for values in cut(starts, lengths, 500)]
    [[0, 0, 1, 1, 1, 2], [0, 500, 1050, 1325, 1601, 2101], [500, 500, 500, 500, 500, 499]]
    """
    n_pieces = np.maximum(1, -(-(10 * lengths - size) // (10 * size)))
    owner = np.repeat(np.arange(len(lengths)), n_pieces)
    number = np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner]
    n_bases = np.minimum(size, lengths)
    last = np.minimum(lengths, n_pieces * size) - n_bases
    place = number * last[owner] // np.maximum(1, n_pieces - 1)[owner]
    return owner, starts[owner] + place, n_bases[owner]


def find_open_codes(sequences: Sequence[str]) -> list[int | None]:
    """The code under which each sequence has a long open stretch that the bacterial code closes.

    The longest stretch of any frame must be unlikely in a random sequence of these bases, and 2.5
    times as long as the longest one under the bacterial code. None if no code has one; short
    sequences always get None.
    """
    found: list[int | None] = [None] * len(sequences)
    places = [place for place, one in enumerate(sequences) if len(one) >= _SHORTEST_CODED]
    counts, longest = _longest_open([sequences[place] for place in places])
    lengths = np.array([len(sequences[place]) for place in places], dtype=np.int64)
    shares = counts / lengths[:, None]
    least = np.maximum(OPEN_CODONS, _OPEN_RATIO * longest[:, :1])
    is_open = (shares[:, 1] + shares[:, 2] <= _MOST_GC) & (longest[:, 1:] >= least).any(axis=1)
    for row in np.flatnonzero(is_open).tolist():
        of_bases = dict(zip("ACGT", shares[row].tolist(), strict=True))
        codons = dict(zip(_CODES, longest[row].tolist(), strict=True))
        found[places[row]] = _open_code(codons, of_bases, int(lengths[row]))
    return found


def _longest_open(sequences: Sequence[str]) -> tuple[Counts, Counts]:
    """The counts of each base, and the codons of the longest open stretch under each code.

    The stretch may lie in any of the six frames; it is 0 if GC exceeds ``_MOST_GC``.
    n -> (n, 4), (n, n_codes)
    """
    lengths, n = np.array(list(map(len, sequences)), dtype=np.int64), len(sequences)
    counts, longest = np.empty((n, 4), dtype=np.int64), np.empty((n, len(_CODES)), dtype=np.int64)
    of_codes = _stop_of_code(), _ENDS, len(_CODES), _MOST_GC
    digits, starts = encode("".join(sequences)), np.cumsum(lengths) - lengths
    call("longest_open", digits, starts, lengths, n, *of_codes, counts, longest)
    return counts, longest


def _open_code(
    open_codons: Mapping[int, int], shares: Mapping[str, float], n_bases: int
) -> int | None:
    """The code of a sequence, by its longest open stretch under each code; None: bacterial."""
    closed = open_codons[STANDARD.number]
    lengths = {}
    for number, stops in _READ_ON.items():
        longest = open_codons[number]
        chance = _chance_of_stop(shares, read_on=stops)
        n_by_chance = 2 * n_bases * chance * exp(-longest * chance)
        if longest >= max(OPEN_CODONS, _OPEN_RATIO * closed) and n_by_chance < MOST_BY_CHANCE:
            lengths[number] = longest
    longest = max(lengths.values(), default=0)
    return next((number for number in lengths if lengths[number] >= _SAME_LENGTH * longest), None)


def _chance_of_stop(shares: Mapping[str, float], read_on: Container[str]) -> float:
    """The probability that a random codon closes a stretch; those in ``read_on`` do not."""
    closing = [stop for stop in STANDARD.stops if stop not in read_on]
    return sum(prod(shares[base] for base in stop) for stop in closing)


@cache
def _stop_of_code() -> Digits:
    """For each codon: 0: no stop; 1 to 3: a stop; 4 to 6: a stop on the other strand. (125,)"""
    stops = np.zeros(N_CODES, dtype=np.uint8)
    for number, stop in enumerate(STANDARD.stops, 1):
        stops[code_of(stop)] = number
        stops[code_of(reverse_complement(stop))] = 3 + number
    return stops
