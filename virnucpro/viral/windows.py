"""Find the open reading frames in sequence windows, which the scorer reads as digits.

An open reading frame (ORF) is here the interval between two stop codons in a frame, or between a
stop and a window end. A codon with an unknown base is not a stop. Genes are among the
longest ORFs, so an ORF is kept if longer ones hardly cover it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import IntArray
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import N_CODES, UNKNOWN, Digits, encode, genetic_code

Read: TypeAlias = tuple[Digits, Digits, NDArray[np.int32], IntArray]  # see `read_bases`


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows in one row of digits, which may contain many concatenated records.

    Lookups along the row are cached, and ``select`` passes them on to other windows.
    """

    digits: Digits  # (n_bases,)
    starts: IntArray  # (n,)
    lengths: IntArray  # (n,) bases
    _read: dict[GeneticCode, Read] = field(default_factory=dict)
    _classes: dict[tuple[GeneticCode, Sized], Digits] = field(default_factory=dict)

    @classmethod
    def from_sequences(cls, sequences: Sequence[str]) -> Windows:
        """Return each sequence as one window."""
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        return cls.concatenate(encode("".join(sequences)), lengths)

    @classmethod
    def concatenate(cls, digits: Digits, lengths: IntArray) -> Windows:
        """Return each concatenated sequence in a row as one window."""
        return cls(digits, np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, starts: IntArray, lengths: IntArray) -> Windows:
        """Return other windows in the same row. (n,), (n,)"""
        return replace(self, starts=starts, lengths=lengths)

    def arguments(self, code: GeneticCode) -> tuple[NDArray[Any] | int, ...]:
        """Return the arguments for library functions."""
        row = self.digits, len(self.digits), *self._lookups(code)
        return *row, self.starts, self.lengths, len(self)

    def _lookups(self, code: GeneticCode) -> Read:
        if code not in self._read:
            self._read[code] = _read(self.digits, code)
        return self._read[code]

    def codon_codes(self, code: GeneticCode) -> Digits:
        """Return the code for the codon that starts at each base in the row. (n_bases,)"""
        return self._lookups(code)[0]

    def classes(self, code: GeneticCode, kmers: Sized) -> Digits:
        """Return the class of the k-mer that ends at each base's codon, by strand. (n_bases, 2)

        255 where no window has needed it yet. Empty without k-mers.
        """
        if not len(kmers):
            return np.empty((0, 2), dtype=np.uint8)
        if (code, kmers) not in self._classes:
            not_looked_up = 255
            n_bases = len(self.digits)
            self._classes[code, kmers] = np.full((n_bases, 2), not_looked_up, dtype=np.uint8)
        return self._classes[code, kmers]


def _read(digits: Digits, code: GeneticCode) -> Read:
    codes, tetra = np.empty((2, len(digits)), dtype=np.uint8)
    stops = np.empty((2, len(digits)), dtype=np.int32)
    n_stops = np.empty(2, dtype=np.int64)
    call("read_bases", digits, len(digits), is_stop(code), codes, tetra, stops, n_stops)
    return codes, tetra, stops, n_stops


def find_stretches(
    pieces: Windows, code: GeneticCode = STANDARD, shortest: int = 5
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Find the open reading frames (ORFs) in all frames that longer ones hardly cover.

    Returns the window, the strand (0 forward, 1 reverse), the first base on that strand, and the
    number of codons for each ORF, by window, the longest first. (n,), (n,), (n,), (n,)

    ORFs with fewer than ``shortest`` codons are excluded, which hardly changes the others. An ORF
    that is one codon shorter than the longest may be kept instead of it, if its codons are more
    like those in genes, and the limit can affect this choice. Ties are in the order of strand,
    frame and position. The strand that comes first in lexical order is first. So the reverse
    complement of a window has the same ORFs.
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
    """Return whether each codon code is a stop. (125,)"""
    table = np.zeros(N_CODES, dtype=np.uint8)
    table[[genetic_code(codon) for codon in code.stops]] = 1
    return table


@cache
def residue_letters(code: GeneticCode) -> bytes:
    """Return each codon code's residue letter, or X without one. (256,)"""
    letters = bytearray(b"X" * 256)
    for codon, letter in code.meanings.items():
        letters[genetic_code(codon)] = ord(letter)
    return bytes(letters)


def codon_codes(digits: Digits) -> Digits:
    """Return the code for the codon that starts at each base. (n_bases,) -> (n_bases - 2,)"""
    codes: Digits = 25 * digits[:-2] + 5 * digits[1:-1] + digits[2:]
    return codes


def opposite_strand(digits: Digits) -> Digits:
    """Return each row read on the other strand. (..., n_bases) -> (..., n_bases)"""
    return np.minimum(3 - digits[..., ::-1], UNKNOWN)  # 3 - 4 is 255


def is_reverse_first(sequence: str) -> bool:
    """Return whether the reverse complement of a sequence comes first, in the order of digits.

    >>> is_reverse_first("GATTACA"), is_reverse_first("UGUAAUC"), is_reverse_first("ACGT")
    (False, True, False)
    """
    n_bases_of_ends = 1_000  # strands nearly always differ in them
    forward = sequence[:n_bases_of_ends]
    reverse = reverse_complement(sequence[-n_bases_of_ends:])
    if encode(forward).tobytes() == encode(reverse).tobytes():
        forward = sequence
        reverse = reverse_complement(sequence)
    return precedes(reverse, forward)


def find_reversed(pieces: Windows) -> list[bool]:
    """Return whether the reverse complement of each window comes first, in the order of digits.

    >>> find_reversed(Windows.from_sequences(["GATTACA", "UGUAAUC", "ACGT", ""]))
    [False, True, False, False]
    """
    is_reverse = np.empty(len(pieces), dtype=np.uint8)
    call("reverse_first", pieces.digits, pieces.starts, pieces.lengths, len(pieces), is_reverse)
    return list(map(bool, is_reverse.tolist()))


def precedes(sequence: str, other: str) -> bool:
    """Return whether a sequence comes before another one, in the order of digits."""
    return encode(sequence).tobytes() < encode(other).tobytes()


def canonical_rotation(sequence: str) -> int:
    """Return the start base that makes a circle first, in the order of digits.

    >>> canonical_rotation("TTACTTAA"), canonical_rotation("GATGATGAT")
    (6, 1)
    """
    first = np.zeros(1, dtype=np.int64)
    call("first_rotation", encode(sequence), len(sequence), first)
    return int(first[0])


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalView:
    """The canonical view of a record: the strand that comes first in lexical order.

    A circle starts at the base that makes its sequence first in lexical order, on either strand.
    """

    sequence: str  # upper case, without U
    is_reverse: bool
    is_circle: bool
    first: int = 0  # base on this strand of the record at which the sequence begins

    @classmethod
    def from_record(cls, sequence: str, *, is_circle: bool) -> CanonicalView:
        if not is_circle:
            return cls.from_linear(sequence, is_reverse=is_reverse_first(sequence))
        sequence = _upper_dna(sequence)
        strands = [sequence, reverse_complement(sequence)]
        firsts = [canonical_rotation(strand) for strand in strands]
        forward, reverse = (
            strand[first:] + strand[:first] for strand, first in zip(strands, firsts, strict=True)
        )
        is_reverse = precedes(reverse, forward)
        return cls(reverse if is_reverse else forward, is_reverse, True, firsts[is_reverse])

    @classmethod
    def from_linear(cls, sequence: str, *, is_reverse: bool) -> CanonicalView:
        """Return the view of a linear record, whose reverse complement may come first."""
        sequence = _upper_dna(sequence)
        return cls(reverse_complement(sequence) if is_reverse else sequence, is_reverse, False)

    def text(self, size: int) -> str:
        """Return the bases for windows of ``size`` bases. In a circle, windows cross the origin."""
        return self.sequence + self.sequence[: size - 1] if self.is_circle else self.sequence


def _upper_dna(sequence: str) -> str:
    """Return a sequence in upper case, with T for U: the sequence itself if it is like this."""
    upper = sequence.upper()
    return (sequence if upper == sequence else upper).replace("U", "T")


def split_windows(
    starts: IntArray, lengths: IntArray, size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Split records in one row into windows. Return record, start and length of each.

    A record gets the fewest windows that leave out at most a tenth of a window. They are spread
    evenly from its first base to its last. A single window is in its middle. If they are longer
    together than the record, they overlap.

    The reverse complement of a record has the same windows: rounding is symmetric, and a window in
    the middle has one base less where it could not be centred otherwise.

    >>> starts, lengths = np.array([[0, 1050, 2101], [1050, 1051, 499]])
    >>> [values.tolist() for values in split_windows(starts, lengths, 500)]
    [[0, 0, 1, 1, 1, 2], [0, 550, 1050, 1326, 1601, 2101], [500, 500, 500, 499, 500, 499]]
    """
    n_pieces = np.maximum(1, -(-(10 * lengths - size) // (10 * size)))
    owner = np.repeat(np.arange(len(lengths)), n_pieces)
    number = np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner]
    n_bases = np.minimum(size, lengths)[owner]
    last = lengths[owner] - n_bases  # last window start
    n_before = number
    n_behind = n_pieces[owner] - 1 - number
    n_steps = np.maximum(1, n_pieces - 1)[owner]
    # rounded towards the middle, so that overlapping windows leave no base uncovered
    from_start, from_end = (-(-n * last // n_steps) for n in (n_before, n_behind))
    is_middle = n_before == n_behind
    offset = np.where(n_before < n_behind, from_start, last - from_end)
    offset[is_middle] = (last[is_middle] + 1) // 2
    n_bases[is_middle] -= last[is_middle] % 2
    return owner, starts[owner] + offset, n_bases
