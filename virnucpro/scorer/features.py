"""Features of pieces: how the stop-free stretches are spelled, and plain figures of the whole.

A piece has 1,229 features in seven blocks: codons of its longest stretch and of all long ones; the
junctions of codons of the long ones, which are the four bases around where one follows another;
pairs of neighbouring residues of the longest, all of them as square roots of their shares; its
palindromes; plain figures; how many of its words other groups have; and the codons again as log
ratios to what the GC of the piece lets expect. A long piece can be read as parts: it has the mean
of their features, and 12 more, of how the gene-like stretches lie in all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Counts, Values
from virnucpro.scorer.pieces import UNKNOWN, Digits, Pieces
from virnucpro.scorer.stretches import N_CODES, SixFrames, Stretches, code_of, find_stretches
from virnucpro.scorer.words import (
    N_WORD_FIGURES,
    NO_RESIDUE,
    WordTable,
    residues_of,
    word_figures,
    words_of,
)
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode, standard_synonyms

N_CODONS, N_PAIRS, N_FIGURES = 64, 400, 36
N_JUNCTION_WORDS = 4**4
N_JUNCTIONS = 2 * N_JUNCTION_WORDS
N_PALINDROMES = 4**2 + 3  # each of four bases, and all of two, four and six
N_LAYOUT = 12
N_FEATURES = 4 * N_CODONS + N_JUNCTIONS + N_PAIRS + N_PALINDROMES + N_FIGURES + N_WORD_FIGURES
SHARES = slice(0, -2 * N_CODONS)  # codons by shares, and all else
RATIOS = slice(2 * N_CODONS, None)  # all else, and codons by ratios
GC = 2 * N_CODONS + N_JUNCTIONS + N_PAIRS + N_PALINDROMES  # the column of the first figure
FIGURES = slice(GC, GC + N_FIGURES)
_PAIRED = 3  # the sum of a base's digit and its partner's; UNKNOWN has no partner
MOST_STRETCHES = 6  # of a piece, that codons are counted of
LONG = 20  # codons from which on a stretch counts beside the longest
GENE_LIKE, GENE = 30, 60  # codons
ABUTTING = 60  # bases, between genes that may be read together
FARTHEST_GAP = (-200, 2000)  # bases; what is beyond is taken for this
GC_LIMITS = (0.05, 0.95)
_PIECES_AT_ONCE = 512

Features = NDArray[np.float32]

_CODE_OF_CODON = np.array([code_of(codon) for codon in STANDARD.codons])
_NUMBER_OF_CODE = np.full(N_CODES, -1)  # of codons as words of base 4; -1 with an unknown base
_NUMBER_OF_CODE[[code_of("".join(codon)) for codon in product("ACGT", repeat=3)]] = range(N_CODONS)
_GC_OF_CODON = np.array([sum(base in "GC" for base in codon) for codon in STANDARD.codons])
# how often each code has each base at each position of the codon; unknown bases count nowhere
_BASES_OF_CODE = np.array(
    [
        [base == codon[position] for position in range(3) for base in "ACGT"]
        for codon in map("".join, product("ACGTN", repeat=3))
    ],
    dtype=np.float64,
)  # (125, 12)


def _canonical_words() -> tuple[NDArray[np.uint8], int]:
    """A number for each tetranucleotide and its reverse complement: 5 * code + digit -> number.

    Words with an unknown base have the last number.
    """
    words = ["".join(word) for word in product("ACGT", repeat=4)]
    pair = str.maketrans("ACGT", "TGCA")
    canonical = [min(word, word.translate(pair)[::-1]) for word in words]
    numbers = {word: i for i, word in enumerate(sorted(set(canonical)))}
    table = np.full(5 * N_CODES, len(numbers), dtype=np.uint8)
    for word, name in zip(words, canonical, strict=True):
        table[5 * code_of(word[:3]) + "ACGT".index(word[3])] = numbers[name]
    return table, len(numbers)


_WORDS, _N_WORDS = _canonical_words()


def piece_features(pieces: Pieces, words: WordTable, code: GeneticCode = STANDARD) -> Features:
    """The features of each piece. n -> (n, 1229)

    A codon that means something else than in the standard code counts as one that means it there.
    """
    frames = find_stretches(pieces, code)
    kept = frames.kept
    read = kept.where((kept.rank == 0) | ((kept.rank < MOST_STRETCHES) & (kept.n_codons >= LONG)))
    n = len(pieces)
    codes, stretch = codons_of(frames, read, code)
    piece, is_longest = read.piece[stretch], (read.rank == 0)[stretch]
    of_longest = _count(codes[is_longest], piece[is_longest], n, N_CODES)
    of_long = _count(codes, piece, n, N_CODES)
    bases = _count_bases(pieces)
    figures = _Figures(pieces, frames, bases, of_longest, code).all()
    places, numbers = words_of(codes, stretch)
    longest, long = of_longest[:, _CODE_OF_CODON], of_long[:, _CODE_OF_CODON]
    gc = figures[:, 0].astype(np.float32)
    return np.hstack(
        [
            _root_shares(longest),
            _root_shares(long),
            *map(_root_shares, _count_junctions(codes, stretch, piece, n)),
            _root_shares(_count_pairs(codes[is_longest], piece[is_longest], n)),
            _palindromes(pieces, bases).astype(np.float32),
            figures.astype(np.float32),
            word_figures(words.owners_of(numbers), piece[places], n).astype(np.float32),
            _log_ratios(longest, gc),
            _log_ratios(long, gc),
        ]
    )


def fragment_features(digits: Digits, words: WordTable) -> Features:
    """The features of fragments as single pieces. (n, n_bases) -> (n, 1229)"""
    return np.concatenate(list(_feature_blocks(digits, words)))


def whole_features(digits: Digits, words: WordTable, part: int) -> Features:
    """The features of fragments that are read as whole parts of so many bases.

    Of known bases, and without a rest: else ``score`` reads other parts. (n, n_bases) -> (n, 1241)
    """
    n, n_bases = digits.shape
    parts = digits[:, : n_bases // part * part].reshape(-1, part)
    of_parts = fragment_features(parts, words).reshape(n, -1, N_FEATURES)
    blocks = np.split(digits, range(_PIECES_AT_ONCE, n, _PIECES_AT_ONCE))
    layouts = [layout_features(_as_pieces(block)) for block in blocks]
    return with_layout(of_parts.mean(axis=1, dtype=np.float64), np.concatenate(layouts))


def _feature_blocks(digits: Digits, words: WordTable) -> Iterator[Features]:
    for first in range(0, len(digits), _PIECES_AT_ONCE):
        yield piece_features(_as_pieces(digits[first : first + _PIECES_AT_ONCE]), words)


def _as_pieces(digits: Digits) -> Pieces:
    lengths = np.full(len(digits), digits.shape[1])
    return Pieces.of(digits.reshape(-1), np.cumsum(lengths) - lengths, lengths)


def with_layout(of_parts: Values, layout: Values) -> Features:
    """The mean features of parts with those of the whole. (n, 1229), (n, 12) -> (n, 1241)"""
    before, behind = np.split(of_parts, [N_FEATURES - 2 * N_CODONS], axis=1)
    return np.hstack([before, layout, behind]).astype(np.float32)


def layout_features(pieces: Pieces, code: GeneticCode = STANDARD) -> Values:
    """How the gene-like stretches of each piece lie: -> (n, 12)

    How many there are per kilobase and what they cover; the logarithms of their median, mean and
    longest length and of the mean over what they cover; the first two again for those as long as
    a gene, with how often these change the strand and the share of the commoner one; and how many
    of the gaps between gene-like neighbours are short, and the mean gap in kilobases.
    """
    n, kept = len(pieces), find_stretches(pieces, code, GENE_LIKE).kept
    kilobases: Values = np.maximum(1, pieces.lengths) / 1000

    def share(rows: Counts, values: Values, of: Values) -> Values:
        """The sum of values of each piece over what is given."""
        return np.bincount(rows, values, minlength=n) / np.maximum(1e-9, of)

    count = np.bincount(kept.piece, minlength=n).astype(np.float64)
    n_codons = kept.n_codons.astype(np.float64)
    total = share(kept.piece, n_codons, np.ones(n))
    middle = kept.rank == (count.astype(np.int64)[kept.piece] - 1) // 2
    lengths = [
        share(kept.piece[middle], n_codons[middle], np.ones(n)),
        share(kept.piece, n_codons, count),
        share(kept.piece[kept.rank == 0], n_codons[kept.rank == 0], np.ones(n)),
        np.sqrt(share(kept.piece, n_codons**2, total)),
    ]
    order = np.lexsort((kept.first_bases(pieces.lengths), kept.piece))
    kept, n_codons = kept.where(order), n_codons[order]
    is_gene = kept.n_codons >= GENE
    genes = kept.where(is_gene)
    n_genes = np.bincount(genes.piece, minlength=n).astype(np.float64)
    is_pair = genes.piece[1:] == genes.piece[:-1]
    is_switch = (genes.strand[1:] != genes.strand[:-1])[is_pair].astype(np.float64)
    commoner = share(genes.piece, genes.strand.astype(np.float64), n_genes)
    place = kept.first_bases(pieces.lengths)
    is_next = kept.piece[1:] == kept.piece[:-1]
    gap = (place[1:] - place[:-1] - 3 * kept.n_codons[:-1])[is_next].clip(*FARTHEST_GAP)
    owner = kept.piece[1:][is_next]
    is_short = (abs(gap) < ABUTTING).astype(np.float64)
    return np.stack(
        [
            count / kilobases,
            3 * total / 1000 / kilobases,
            *(np.log(np.maximum(1, values)) for values in lengths),
            n_genes / kilobases,
            share(genes.piece, 3 * n_codons[is_gene] / 1000, kilobases),
            share(genes.piece[1:][is_pair], is_switch, n_genes - 1),
            np.where(n_genes > 1, np.maximum(commoner, 1 - commoner), 0),
            share(owner, is_short, count - 1),
            share(owner, gap / 1000, count - 1),
        ],
        axis=1,
    )


def codons_of(
    frames: SixFrames, stretches: Stretches, code: GeneticCode
) -> tuple[NDArray[np.uint8], Counts]:
    """The codes of all codons of these stretches, one behind the other, and their stretches."""
    width = frames.codes.shape[2]
    starts = (2 * stretches.piece + stretches.strand) * width + stretches.start
    n_before = np.cumsum(stretches.n_codons) - stretches.n_codons
    places = np.repeat(starts - 3 * n_before, stretches.n_codons)
    places += 3 * np.arange(len(places))
    codes = frames.codes.reshape(-1)[places]
    for codon, synonym in standard_synonyms(code).items():
        codes[codes == code_of(codon)] = code_of(synonym)
    return codes, np.repeat(np.arange(len(stretches)), stretches.n_codons)


def _count(words: NDArray[np.integer[Any]], rows: Counts, n_rows: int, n_words: int) -> Counts:
    """The counts of words in each row. -> (n_rows, n_words)"""
    keys = rows * n_words + words
    counts = np.bincount(keys.reshape(-1), minlength=n_rows * n_words)
    return counts.reshape(n_rows, n_words)


def _count_junctions(
    codes: NDArray[np.uint8], stretch: Counts, piece: Counts, n: int
) -> Iterator[Counts]:
    """Two bases of a codon with two of the next, and one with three. -> twice (n, 256)

    Which bases meet where one codon follows another is no chance (Gutman and Hatfield 1989,
    doi:10.1073/pnas.86.10.3699).
    """
    numbers = _NUMBER_OF_CODE[codes]
    is_inside = (stretch[1:] == stretch[:-1]) & (numbers[1:] >= 0) & (numbers[:-1] >= 0)
    left, right, piece = numbers[:-1][is_inside], numbers[1:][is_inside], piece[:-1][is_inside]
    for n_left in (2, 1):
        n_ends = 4**n_left  # of left codons, that many bases long
        words = left % n_ends * (N_JUNCTION_WORDS // n_ends) + right // (n_ends // 4)
        yield _count(words, piece, n, N_JUNCTION_WORDS)


def _count_pairs(codes: NDArray[np.uint8], piece: Counts, n: int) -> Counts:
    """Pairs of neighbouring residues of the longest stretches. -> (n, 400)"""
    residues = residues_of(codes)
    left, right = residues[:-1], residues[1:]
    is_pair = (left < NO_RESIDUE) & (right < NO_RESIDUE) & (piece[:-1] == piece[1:])
    keys = piece[:-1] * N_PAIRS + left * np.int64(NO_RESIDUE) + right
    return np.bincount(keys[is_pair], minlength=n * N_PAIRS).reshape(n, N_PAIRS)


def _palindromes(pieces: Pieces, bases: Values) -> Values:
    """Words that both strands spell alike, as log ratios to what single bases let expect. (n, 19)

    Those of four bases, each and together, then all of six and of two. Restriction enzymes cut
    at such words, and phages avoid them (Karlin, Burge and Campbell 1992,
    doi:10.1093/nar/20.6.1363).
    """
    digits = pieces.digits[:, 0]
    of_two = digits[:, :-1] + digits[:, 1:] == _PAIRED
    of_four = of_two[:, 1:-1] & (digits[:, :-3] + digits[:, 3:] == _PAIRED)
    of_six = of_four[:, 1:-1] & (digits[:, :-5] + digits[:, 5:] == _PAIRED)
    n_bases = bases.sum(axis=1, keepdims=True)
    a, c, g, t = bases.T / np.maximum(1, n_bases[:, 0])
    weak, strong = (a + t) / 2, (c + g) / 2  # shares of each base where both strands count
    pair = np.stack([weak, strong, strong, weak], axis=1) ** 2  # of a base and its partner
    n_words = len(pair), N_PALINDROMES - 3
    expected = (pair[:, :, None] * pair[:, None, :]).reshape(n_words) * (n_bases - 3)
    row, place = np.nonzero(of_four)
    words = 4 * digits[row, place] + digits[row, place + 1]
    counts = _count(words, row, *n_words)
    chance = pair.sum(axis=1, keepdims=True)
    together = [
        np.log((n_found[:, None] + 1) / (np.maximum(0, n_expected) + 1))
        for n_found, n_expected in (
            (counts.sum(axis=1), chance**2 * (n_bases - 3)),
            (of_six.sum(axis=1), chance**3 * (n_bases - 5)),
            (of_two.sum(axis=1), chance * (n_bases - 1)),
        )
    ]
    return np.hstack([np.log((counts + 0.5) / (np.maximum(0, expected) + 0.5)), *together])


def _count_bases(pieces: Pieces) -> Values:
    """A, C, G and T of the forward strand. -> (n, 4)"""
    forward = pieces.digits[:, 0]
    counts = [(forward == digit).sum(axis=1, dtype=np.uint32) for digit in range(UNKNOWN)]
    return np.stack(counts, axis=1).astype(np.float64)


def _root_shares(counts: Counts) -> Features:
    values = counts.astype(np.float32)
    values /= np.maximum(1, values.sum(axis=1, keepdims=True))
    return np.sqrt(values, out=values)


def _log_ratios(counts: Counts, gc: Features) -> Features:
    """Codons over what is expected if each base is drawn by itself, half a codon added to both."""
    share = gc.clip(*GC_LIMITS)[:, None].astype(np.float64)
    n_gc = np.arange(4)
    by_gc = (share / 2) ** n_gc * ((1 - share) / 2) ** (3 - n_gc)
    expected = by_gc[:, _GC_OF_CODON] * counts.sum(axis=1, keepdims=True)
    ratios: Features = np.log((counts + 0.5) / (expected + 0.5)).astype(np.float32)
    return ratios


class _Figures:
    """The 36 plain figures of each piece, in groups. Every group is (n, its number)."""

    def __init__(
        self,
        pieces: Pieces,
        frames: SixFrames,
        bases: Values,
        of_longest: Counts,
        code: GeneticCode,
    ) -> None:
        self.pieces = pieces
        self.frames = frames
        self.bases = bases
        self.of_longest = of_longest
        self.code = code
        self.n_bases = pieces.lengths.astype(np.float64)

    def all(self) -> Values:
        groups = (
            self._spelling(),
            self._longest(),
            self._gene_like(),
            self._by_frame(),
            self._beside_chance(),
            self._positions(),
            self._entropy(),
        )
        return np.hstack(groups)

    def _spelling(self) -> Values:
        """GC, and how unequal C and G, A and T are."""
        a, c, g, t = self.bases.T
        total = np.maximum(1, self.bases.sum(axis=1))
        skews = (abs(c - g) / np.maximum(1, c + g), abs(a - t) / np.maximum(1, a + t))
        return np.stack([(c + g) / total, *skews], axis=1)

    def _longest(self) -> Values:
        """Codons of the three longest kept stretches, and the share of the longest."""
        kept = self.frames.kept
        n_codons = np.zeros((len(self.pieces), 3))
        first = kept.where(kept.rank < 3)
        n_codons[first.piece, first.rank] = first.n_codons
        share = 3 * n_codons[:, 0] / np.maximum(1, self.n_bases)
        return np.column_stack([np.log1p(n_codons), share])

    def _gene_like(self) -> Values:
        """Long kept stretches per kilobase, covered share, strand switches, commoner strand."""
        n = len(self.pieces)
        kept = self.frames.kept
        long = kept.where(kept.n_codons >= GENE_LIKE)
        order = np.lexsort((long.first_bases(self.pieces.lengths), long.piece))
        piece, strand = long.piece[order], long.strand[order]
        is_switch = (piece[1:] == piece[:-1]) & (strand[1:] != strand[:-1])
        n_switches = np.bincount(piece[1:][is_switch], minlength=n)
        n_long = np.bincount(piece, minlength=n)
        n_reverse = np.bincount(piece[strand == 1], minlength=n)
        n_bases = np.maximum(1, self.n_bases)
        return np.stack(
            [
                1000 * n_long / n_bases,
                self.frames.n_covered / n_bases,
                n_switches / np.maximum(1, n_long - 1),
                np.maximum(n_reverse, n_long - n_reverse) / np.maximum(1, n_long),
            ],
            axis=1,
        )

    def _by_frame(self) -> Values:
        """Stop codons per codon of the six frames, rising; their longest stretches, falling."""
        stops = np.sort(3 * self.frames.n_stops / np.maximum(1, self.n_bases)[:, None], axis=1)
        longest = np.log1p(np.sort(self.frames.longest, axis=1)[:, ::-1])
        return np.hstack([stops, longest])

    def _beside_chance(self) -> Values:
        """Stops that single bases let expect, and what of stretches and stops is beyond that.

        With stop probability e the longest of m stretches has about ln(m e) / e codons.
        """
        shares = self.bases / np.maximum(1, self.bases.sum(axis=1, keepdims=True))
        digits = np.array([["ACGT".index(base) for base in stop] for stop in self.code.stops])
        forward = shares[:, digits].prod(axis=2).sum(axis=1)
        reverse = shares[:, 3 - digits].prod(axis=2).sum(axis=1)
        chance = (forward + reverse) / 2
        n_bases = np.maximum(1, self.n_bases)
        expected = np.log(np.maximum(2, 2 * n_bases * chance)) / np.maximum(chance, 1e-4)
        longest = self.frames.longest.max(axis=1)
        beyond = np.log1p(longest) - np.log1p(np.minimum(n_bases / 3, expected))
        stops = self.frames.n_stops.sum(axis=1) / (2 * n_bases)
        return np.stack([2 * chance, beyond, stops - chance], axis=1)

    def _positions(self) -> Values:
        """GC, purines and A at each codon position of the longest stretch."""
        counts = (self.of_longest @ _BASES_OF_CODE).reshape(-1, 3, 4)
        a, c, g, _ = np.moveaxis(counts / np.maximum(1, counts.sum(axis=2, keepdims=True)), 2, 0)
        return np.hstack([c + g, a + g, a])

    def _entropy(self) -> Values:
        """Entropy of tetranucleotides, each counted with its reverse complement."""
        digits = self.pieces.digits[:, 0]
        codes = self.frames.codes[:, 0]
        words = _WORDS.take(codes[:, :-3] * np.uint16(5) + digits[:, 3:])
        n, n_places = words.shape
        counts = _count(words, np.arange(n)[:, None], n, _N_WORDS + 1)[:, :_N_WORDS]
        total = np.maximum(1, counts.sum(axis=1))
        times_log = np.arange(n_places + 1) * np.log(np.maximum(1, np.arange(n_places + 1)))
        entropy: Values = np.log(total) - times_log.take(counts).sum(axis=1) / total
        return entropy[:, None]
