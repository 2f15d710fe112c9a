"""Stop-free stretches of pieces in all six frames, and the choice of those that matter.

A stretch lies between two stop codons of a frame, or between one and an end of the piece. A codon
with an unknown base is no stop. Genes are among the longest stretches, so these are kept, longest
first, as far as they do not lie on others that are longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Counts, Mask
from virnucpro.scorer.pieces import Digits, Pieces
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

N_CODES = 125  # of three digits, unknown ones among them: 25 a + 5 b + c
SHORTEST = 5  # codons
MOST_COVERED = 0.3 * 3  # bases of a codon that longer stretches may cover, on average


def code_of(codon: str) -> int:
    """
    >>> code_of("AAA"), code_of("TTT"), code_of("NNN")
    (0, 93, 124)
    """
    a, b, c = ("ACGTN".index(base) for base in codon)
    return 25 * a + 5 * b + c


@cache
def _is_stop(code: GeneticCode) -> bytes:
    """A table for ``bytes.translate``: 1 for the codes of stops."""
    table = bytearray(256)
    for codon in code.stops:
        table[code_of(codon)] = 1
    return bytes(table)


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """The kept stretches of all pieces: by piece, longest first. Rows in step."""

    piece: Counts
    rank: Counts  # 0 for the longest of a piece, which every piece has that has any
    strand: Counts  # 0 forward, 1 reverse
    start: Counts  # bases, on its strand
    n_codons: Counts

    def __len__(self) -> int:
        return len(self.piece)

    def where(self, chosen: Mask | Counts) -> Stretches:
        return Stretches(
            self.piece[chosen],
            self.rank[chosen],
            self.strand[chosen],
            self.start[chosen],
            self.n_codons[chosen],
        )

    def first_bases(self, lengths: Counts) -> Counts:
        """The first base of each on the forward strand of pieces of these lengths."""
        reverse = lengths[self.piece] - self.start - 3 * self.n_codons
        return np.where(self.strand == 0, self.start, reverse)


@dataclass(frozen=True, slots=True, eq=False)
class SixFrames:
    """The stretches of the six frames of each piece."""

    codes: Digits  # (n, 2, width): the codon that starts at each base
    n_stops: Counts  # (n, 6)
    longest: Counts  # (n, 6) codons of the longest stretch of each frame
    kept: Stretches
    n_covered: Counts  # (n,) bases that the kept stretches lie on


def find_stretches(
    pieces: Pieces, code: GeneticCode = STANDARD, shortest: int = SHORTEST
) -> SixFrames:
    """Find the stretches of all frames, and keep what is hardly covered by longer ones.

    Those of fewer than ``shortest`` codons are left out, which changes nothing for the others.
    Of equally long ones the first is taken first: forward strand, first frame, first place.
    """
    n, _, width = pieces.digits.shape
    codes = codon_codes(pieces.digits)
    n_places = width // 3
    is_end = np.frombuffer(codes.tobytes().translate(_is_stop(code)), dtype=np.bool_)
    is_end = is_end.reshape(n, 2, n_places, 3).swapaxes(2, 3).copy()
    n_whole = (pieces.lengths[:, None] - np.arange(3)) // 3  # codons of each frame
    frame = np.arange(3)
    rows = np.arange(n)[:, None]
    is_end[rows, :, frame, np.maximum(n_whole, 0)] = True
    ends = np.flatnonzero(is_end)
    row, place = np.divmod(ends, n_places)  # a row is a frame of a piece
    is_first = np.diff(row, prepend=-1) > 0
    first = np.flatnonzero(is_first)
    start = np.where(is_first, 0, np.roll(place, 1) + 1)
    n_codons = place - start
    n_stops = np.diff(first, append=len(ends)) - 1
    longest = np.maximum.reduceat(n_codons, first) if n else n_codons
    long = np.flatnonzero(n_codons >= shortest)
    row, start, n_codons = row[long], start[long], n_codons[long]
    piece, row = np.divmod(row, 6)
    strand, frame_of = np.divmod(row, 3)
    found = _longest_first(piece, strand, frame_of + 3 * start, n_codons)
    is_kept, n_covered = _choose(found, pieces.lengths)
    kept = found.where(is_kept)
    kept = Stretches(kept.piece, _ranks(kept.piece, n), kept.strand, kept.start, kept.n_codons)
    return SixFrames(codes, n_stops.reshape(n, 6), longest.reshape(n, 6), kept, n_covered)


def codon_codes(digits: Digits) -> Digits:
    """The code of the three digits from each place on; the last two places of a row have none.

    (n, 2, width) -> (n, 2, width)
    """
    flat = digits.reshape(-1)
    codes = np.full(flat.shape, N_CODES - 1, dtype=np.uint8)
    np.multiply(flat[:-2], 25, out=codes[:-2])
    codes[:-2] += 5 * flat[1:-1]
    codes[:-2] += flat[2:]
    return codes.reshape(digits.shape)


def _longest_first(piece: Counts, strand: Counts, start: Counts, n_codons: Counts) -> Stretches:
    """Sort stretches by piece, then by falling length, then in their old order."""
    n_bits = max(1, len(piece).bit_length())
    longest = int(n_codons.max(initial=0))
    keys = ((piece * (longest + 1) + longest - n_codons) << n_bits) + np.arange(len(piece))
    order = np.sort(keys) & ((1 << n_bits) - 1)
    piece = piece[order]
    n_pieces = int(piece[-1]) + 1 if len(piece) else 0
    rank = _ranks(piece, n_pieces)
    return Stretches(piece, rank, strand[order], start[order], n_codons[order])


def _ranks(piece: Counts, n_pieces: int) -> Counts:
    """The place of each row among those of its piece; rows are sorted by piece."""
    n_rows = np.bincount(piece, minlength=n_pieces)
    ranks: Counts = np.arange(len(piece)) - (np.cumsum(n_rows) - n_rows)[piece]
    return ranks


def _choose(found: Stretches, lengths: Counts) -> tuple[Mask, Counts]:
    """Choose stretches, and count the bases of each piece that they cover.

    The covered bases of a piece are bits of words of 64; rank by rank, all pieces at once. Pieces
    with many stretches come first, so that those with one of a rank lie side by side.
    """
    n_words = int(lengths.max(initial=0)) // 64 + 1
    below = _bits_below(n_words)
    n_of_rank = np.bincount(found.rank)
    place_of_piece = np.argsort(np.argsort(-np.bincount(found.piece, minlength=len(lengths))))
    place = (np.cumsum(n_of_rank) - n_of_rank)[found.rank] + place_of_piece[found.piece]
    order = np.empty_like(place)
    order[place] = np.arange(len(place))
    start, n_codons = found.first_bases(lengths)[order], found.n_codons[order]
    end, most = start + 3 * n_codons, MOST_COVERED * n_codons
    is_kept = np.empty(len(found), dtype=np.bool_)
    covered = np.zeros((len(lengths), n_words), dtype=np.uint64)
    high = 0
    for n_pieces in n_of_rank.tolist():
        rows = slice(high, high := high + n_pieces)
        bits = below.take(end[rows], axis=0) ^ below.take(start[rows], axis=0)
        n_of_word = np.bitwise_count(covered[:n_pieces] & bits)
        # Words first, since a sum along rows is slow; a product with ones is not much faster, and
        # may set the flag of an invalid value in OpenBLAS where all are finite.
        n_before = np.ascontiguousarray(n_of_word.T).sum(axis=0, dtype=np.int32)
        is_kept[rows] = n_before <= most[rows]
        bits[~is_kept[rows]] = 0
        covered[:n_pieces] |= bits
    n_covered = np.bitwise_count(covered).sum(axis=1, dtype=np.int64)
    return is_kept[place], n_covered[place_of_piece]


@lru_cache(maxsize=4)
def _bits_below(n_words: int) -> NDArray[np.uint64]:
    """Words with all bits below each place set. (64 n_words + 1, n_words)"""
    n_bits = np.arange(64 * n_words + 1)[:, None] - 64 * np.arange(n_words)
    n_bits = n_bits.clip(0, 64)
    some = (np.uint64(1) << np.minimum(n_bits, 63).astype(np.uint64)) - np.uint64(1)
    bits: NDArray[np.uint64] = np.where(n_bits == 64, np.uint64(2**64 - 1), some)
    return bits
