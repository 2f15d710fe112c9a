"""Find markers in a sequence: genes, host genes, tRNA ends, edges of reading frames, repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import N_CODES, Digits, encode
from virnucpro.viral.features import GENE_LIKE
from virnucpro.viral.networks import Scorer
from virnucpro.viral.scoring import score_proteins
from virnucpro.viral.windows import (
    Windows,
    codon_codes,
    find_stretches,
    opposite_strand,
    residue_letters,
)

# in 16S and 23S rRNA, at positions 518, 1394, 1930, 2490 and 2655 of E. coli: sites of universal
# bacterial primers, and the loop that ricin cuts
RIBOSOMAL_RNA = (
    *("CAGCAGCCGCGGTAA", "CAGCCGCCGCGGTAA", "ACACACCGCCCGT"),
    *("AACTATAACGGTCCTAAGGTAGCGA", "TTTGGCACCTCGATGTCG", "TACGAGAGGACC"),
)
# the T arm of a tRNA: a stem of five pairs and a loop of seven bases (Sprinzl et al. 1998, Nucleic
# Acids Res. 26:148). It ends eight bases before the end of the tRNA
_T_ARM = r"(?=([ACGT]{4})GTTC[AG]A.[CT]C([ACGT]{4}))"
_PAIRS = {"AT", "TA", "CG", "GC", "GT", "TG"}
_MIN_PAIRS = 4  # of bases in the stem of an arm
_BEHIND_ARM = 25  # bases from the arm's first base to the tRNA's end
SHORTEST_GENE = 60  # codons in the shortest open reading frame that counts as a gene
NEAR = 3_000  # bases from an end. Beyond, chance counts in proportion to the distance
SHORTEST_REPEAT = 12  # bases
LONGEST_REPEAT = 300  # bases
MAX_BY_CHANCE = 0.01  # accept at most this many equally good repeats by chance
_WORD = 6  # bases. Codons and composition make some k-mers common
# bases on either side of a match that are host
_PEPTIDE_REACH = 10_000
_RNA_REACH = 3_000
_BASES_AT_ONCE = 1_000_000  # read at once
_EVERY_STRETCH = slice(None)
_SEARCHED_BASES = 2**24  # bases in which repeats of a region are counted: usually the genome


def find_host_genes(
    sequence: str,
    scorer: Scorer,
    code: GeneticCode = STANDARD,
    known: dict[str, float] | None = None,
) -> tuple[IntArray, IntArray, FloatArray, IntArray]:
    """Score proteins from the longest open reading frames, which hardly overlap.

    Expects upper case. Returns each reading frame's start and end on the forward strand, the
    log-odds of its protein (NaN without a known residue), and its strand, 0 or 1.
    (n,), (n,), (n,), (n,). Proteins in ``known`` are not scored again. The scores of new proteins
    are added to it.

    Raises:
        ValueError: the scorer has no networks for proteins.
    """
    known = {} if known is None else known
    whole = Windows.from_sequences([sequence])
    _, strand, start, n_codons = find_stretches(whole, code, SHORTEST_GENE)
    digits = whole.digits
    codons = [codon_codes(one).tobytes() for one in (digits, opposite_strand(digits))]
    columns = (strand.tolist(), start.tolist(), n_codons.tolist())
    proteins = [
        codons[side][place : place + 3 * n : 3].translate(residue_letters(code)).decode("ascii")
        for side, place, n in zip(*columns, strict=True)
    ]
    new = [protein for protein in dict.fromkeys(proteins) if protein not in known]
    known |= zip(new, score_proteins(new, scorer).tolist(), strict=True)
    log_odds = np.array([known[protein] for protein in proteins], dtype=np.float64)
    first = np.where(strand == 0, start, len(digits) - start - 3 * n_codons)
    return first, first + 3 * n_codons, log_odds, strand


def find_trna_ends(sequence: str) -> list[int]:
    """Return tRNA genes' 3' ends in an upper-case sequence, as positions between bases."""
    places = []
    for strand, bases in enumerate((sequence, reverse_complement(sequence))):
        for match in re.finditer(_T_ARM, bases):
            pairs = zip(match[1], reversed(match[2]), strict=True)
            if sum(a + b in _PAIRS for a, b in pairs) >= _MIN_PAIRS:
                end = match.start() + _BEHIND_ARM
                places.append(end if strand == 0 else len(sequence) - end)
    return sorted(places)


def host_genes(
    sequence: str, code: GeneticCode = STANDARD, part: slice = _EVERY_STRETCH
) -> list[tuple[int, int]]:
    """Return the intervals around host genes in part of an upper-case sequence.

    They belong to the host. The genes are completely in the part.
    """
    found = [(place, _PEPTIDE_REACH) for place in host_peptides(sequence, code, part)]
    found += [(place, _RNA_REACH) for place in ribosomal_rna(sequence, part)]
    return [(place - reach, place + reach) for place, reach in found]


def host_peptides(
    sequence: str, code: GeneticCode = STANDARD, part: slice = _EVERY_STRETCH
) -> list[int]:
    """Return host peptide positions, in bases, from the six-frame translation of a part."""
    shortest = 8  # residues in the shortest host peptide
    table = _peptides(code)
    longest = len(table)
    places = set[int]()
    for first, bases_at_once in _overlapping(sequence, part, 3 * longest):
        digits = encode(bases_at_once)
        for strand, bases in enumerate((digits, opposite_strand(digits))):
            room = np.empty(len(bases) // 4 + 1, np.int64)
            n_found = np.empty(1, np.int64)
            call("find_peptides", bases, len(bases), table, longest, shortest, room, n_found)
            found = room[: n_found[0]]
            places |= {*(first + (len(bases) - found if strand else found)).tolist()}
    return sorted(places)


def _overlapping(sequence: str, part: slice, n_shared: int) -> Iterator[tuple[int, str]]:
    """Yield the positions and the bases of neighbouring blocks, which share some bases."""
    start, end, _ = part.indices(len(sequence))
    for first in range(start, end, _BASES_AT_ONCE):
        yield first, sequence[first : min(end, first + _BASES_AT_ONCE + n_shared)]


@cache
def _peptides(code: GeneticCode) -> Digits:
    """Return, by position and codon, a bit for each peptide that allows this codon or has ended.

    (longest, 125)
    """
    # conserved in RpoB, RpoC, S19, L2, S11 and S12 of bacteria of several phyla
    host_peptides = (
        *("GDK[FLM]A[GSN]RHG[QN]KG", "NADFDGDQM", "GH[KM][LI][GA]EF[AS][PL]TR"),
        *("NP[VI]DHPHGGGEG", "PHNGCRPPK[KR]R", "KPNSA[LM]RK"),
    )
    residues = [re.findall(r"\[([A-Z]+)\]|([A-Z])", peptide) for peptide in host_peptides]
    table = np.zeros((max(map(len, residues)), N_CODES), dtype=np.uint8)
    for number, encoded in enumerate(residues):
        table[len(encoded) :] |= 1 << number
        for place, letters in enumerate(encoded):
            has_it = [chr(letter) in "".join(letters) for letter in residue_letters(code)[:N_CODES]]
            table[place, has_it] |= 1 << number
    return table


def ribosomal_rna(sequence: str, part: slice = _EVERY_STRETCH) -> list[int]:
    """Return positions, in bases, of conserved 16S and 23S rRNA k-mers in a part. Upper case."""
    words = [*RIBOSOMAL_RNA, *map(reverse_complement, RIBOSOMAL_RNA)]
    places = list[int]()
    for first, bases in _overlapping(sequence, part, max(map(len, words)) - 1):
        counts = _count(words, _encode_bases(bases)).tolist()
        found = [word for word, n in zip(words, counts, strict=True) if n]
        in_block = chain.from_iterable(_find_all(word, bases) for word in found)
        places += [first + place for place in in_block if place < _BASES_AT_ONCE]
    return sorted(places)


def _find_all(word: str, sequence: str) -> Iterator[int]:
    """Yield the positions of a word, which may overlap."""
    place = sequence.find(word)
    while place >= 0:
        yield place
        place = sequence.find(word, place + 1)


def open_edges(sequence: str, place: int, code: GeneticCode) -> list[int]:
    """Return the edges of complete gene-like reading frames at most 1,000 bases from ``place``."""
    reach = 1_000  # largest distance to the edge of an open reading frame, in bases
    first = max(0, place - 2 * reach)
    part = sequence[first : place + 2 * reach]
    _, strand, start, n_codons = find_stretches(Windows.from_sequences([part]), code, GENE_LIKE)
    left = np.where(strand == 0, start, len(part) - start - 3 * n_codons)
    edges = np.concatenate([left, left + 3 * n_codons])
    whole = first + edges[(edges > 2) & (edges < len(part) - 2)]
    near: list[int] = whole[abs(whole - place) <= reach].tolist()
    return near


class _TextIndex(NamedTuple):
    """Every fifth position of a text by the hash of the eight letters there."""

    firsts: NDArray[np.int32]  # (2**16 + 1,) first place of each hash
    places: NDArray[np.int32]  # (n_letters / 5 + 1,)

    @classmethod
    def from_text(cls, text: Digits) -> _TextIndex:
        index = cls(
            np.empty((1 << 16) + 1, dtype=np.int32), np.empty(len(text) // 5 + 1, dtype=np.int32)
        )
        call("index_text", text, len(text), *index)
        return index


@dataclass(slots=True, eq=False)
class _LetterBlock:
    """Neighbouring letters of a record, which are indexed if they are read often."""

    letters: Digits  # ASCII
    n_expected: float = 0.0  # times that they will probably be read
    n_read: int = 0  # times that they were read without an index
    index: _TextIndex | None = None

    def count(self, words: Sequence[str], first: int, end: int) -> IntArray:
        """Count non-overlapping occurrences in the letters from first to end. -> (n_words,)"""
        reads_as_index = 32  # reading letters so many times takes as long as indexing them
        if self.index is None and max(self.n_expected, self.n_read) < reads_as_index:
            self.n_read += 1
            return _count(words, self.letters[first:end])
        if self.index is None:
            self.index = _TextIndex.from_text(self.letters)
        counts = np.zeros(len(words), dtype=np.int64)
        call(
            "count_indexed",
            *(self.letters, first, min(end, len(self.letters)), *self.index),
            *(*_concatenate(words), len(words), counts),
        )
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class RecordText:
    """The bases of a record, in which words are counted.

    Two blocks of ``_SEARCHED_BASES`` bases are encoded at a time. Candidates come in order, so each
    base is encoded twice per pass over them, however many there are.
    """

    bases: str  # upper case
    n_regions: int = 0  # around which words will be counted, if known
    _blocks: dict[int, _LetterBlock] = field(default_factory=dict)  # by their first base
    _counts: dict[tuple[int, str], int] = field(default_factory=dict)  # of start and word

    def count_around(self, words: Sequence[str], middle: int) -> tuple[IntArray, int]:
        """Count each word on the given strand, in the ``_SEARCHED_BASES`` bases around a base.

        Equal words in the same bases are counted once. -> (n_words,), bases
        """
        n_bases = len(self.bases)
        first = max(0, min(middle - _SEARCHED_BASES // 2, n_bases - _SEARCHED_BASES))
        new = [word for word in dict.fromkeys(words) if (first, word) not in self._counts]
        if new:
            keys = [(first, word) for word in new]
            block = first - first % _SEARCHED_BASES
            start = first - block
            counts = self._block(block).count(new, start, start + _SEARCHED_BASES).tolist()
            self._counts.update(zip(keys, counts, strict=True))
        n_around = min(n_bases - first, _SEARCHED_BASES)
        return np.array([self._counts[first, word] for word in words]), n_around

    def _block(self, first: int) -> _LetterBlock:
        """Return up to two times ``_SEARCHED_BASES`` letters from ``first`` on."""
        if first not in self._blocks:
            self._blocks.clear()
            letters = _encode_bases(self.bases[first : first + 2 * _SEARCHED_BASES])
            n_expected = self.n_regions * len(letters) / len(self.bases)
            self._blocks[first] = _LetterBlock(letters, n_expected)
        return self._blocks[first]


class Repeat(NamedTuple):
    """The same bases at two positions, as often found around an integrated element."""

    n_by_chance: float  # expected repeats that are as good and as near to both ends
    start: int  # of the left copy
    end: int  # of the right copy
    bases: str

    @staticmethod
    def from_ends(
        record: RecordText, ends: tuple[int, int], bounds: tuple[int, int], reach: int
    ) -> list[Repeat]:
        """Return the direct repeats around a region that are unlikely by chance, best first.

        The left copy begins at most ``reach`` bases from the start, and the right copy ends at most
        ``reach`` bases from the end. Both are within the bounds, and neither is beyond the other
        end. Let p be the probability that two bases in these windows are equal. A repeat with n
        bases, a and b bases from the ends, is expected w(a) w(b) p^n times. Here w(a) is 2 a + 1,
        and more beyond ``NEAR``. If it occurs c more times in the N bases around the region,
        usually the complete record, it is expected w(max(a, b)) c / N times, if that is more. The
        search excludes hairpins, because transcription terminators resemble each other. It also
        excludes parts of copies longer than ``LONGEST_REPEAT``, such as genes and mobile elements.
        """
        start, end = ends
        left = max(bounds[0], start - reach), min(end, start + reach)
        right = max(start, end - reach), min(bounds[1], end + reach)

        def places(i: IntArray, j: IntArray) -> tuple[FloatArray, FloatArray]:
            return _find_kmers(i - start), _find_kmers(j - end)

        repeats = _repeats(record.bases, left, right, places, MAX_BY_CHANCE)
        return _is_unique_repeat(record, ends, repeats, MAX_BY_CHANCE)

    @staticmethod
    def at_one_end(
        record: RecordText, ends: tuple[int, int], shortest: int, reach: int
    ) -> list[Repeat]:
        """Return repeats between an end and the inside of a region, where a neighbour ends.

        The inner copy may be anywhere at least ``shortest`` bases from both ends. A repeat is
        returned if fewer than one is expected by chance. The other rules are as in
        ``from_ends``.
        """
        start, end = ends
        sequence = record.bases
        inside = start + shortest, end - shortest
        n_inside = np.array(inside[1] - inside[0], dtype=np.float64)
        near_start = max(0, start - reach), min(inside[0], start + reach)
        near_end = max(inside[1], end - reach), min(len(sequence), end + reach)
        each = [
            *_repeats(
                sequence, near_start, inside, lambda i, _: (_find_kmers(i - start), n_inside), 1.0
            ),
            *_repeats(
                sequence, inside, near_end, lambda _, j: (n_inside, _find_kmers(j - end)), 1.0
            ),
        ]
        return _is_unique_repeat(record, ends, each, 1.0)


def _repeats(
    sequence: str,
    left_span: tuple[int, int],
    right_span: tuple[int, int],
    places: Callable[[IntArray, IntArray], tuple[FloatArray, FloatArray]],
    max_by_chance: float,
) -> list[tuple[Repeat, float]]:
    """Return the repeats between two parts, if fewer than ``max_by_chance`` are expected.

    ``places`` gives, from the outer ends of both copies, the number of alternative positions for
    each copy. Each repeat is returned with the larger number.
    """
    first = left_span[0]
    second = right_span[0]
    left = encode(sequence[slice(*left_span)])
    right = encode(sequence[slice(*right_span)])
    if min(len(left), len(right)) < SHORTEST_REPEAT:
        return []
    chance = _random_match_probability(left, right)
    words = _common_words(left, right)
    start = first + words[:, 0]
    end = second + words[:, 1] + words[:, 2]
    at_start, at_end = places(start, end)
    by_length = np.zeros(LONGEST_REPEAT + 2)
    for n in np.flatnonzero(np.bincount(words[:, 2])).tolist():
        by_length[n] = chance**n
    by_chance = at_start * at_end * by_length[words[:, 2]]
    is_rare = (start + 2 * words[:, 2] <= end) & (by_chance < max_by_chance)
    most = np.maximum(at_start, at_end)
    candidates = []
    for row in np.flatnonzero(is_rare).tolist():
        i, j, n = words[row].tolist()
        if _is_hairpin(left[i : i + n]) or _count_matches(words, i, j) > LONGEST_REPEAT:
            continue
        bases = sequence[first + i : first + i + n]
        repeat = Repeat(float(by_chance[row]), first + i, second + j + n, bases)
        candidates.append((repeat, float(most[row])))
    return candidates


def _is_unique_repeat(
    record: RecordText,
    ends: tuple[int, int],
    repeats: Sequence[tuple[Repeat, float]],
    max_by_chance: float,
) -> list[Repeat]:
    """Return the repeats that stay unlikely given their nearby occurrences, best first."""
    if not repeats:
        return []
    words = [repeat.bases for repeat, _ in repeats]
    both = [*words, *map(reverse_complement, words)]
    on_both, n_bases = record.count_around(both, sum(ends) // 2)
    counts = on_both.reshape(2, -1).sum(axis=0).tolist()
    expected = [
        repeat._replace(n_by_chance=max(repeat.n_by_chance, n_places * (count - 2) / n_bases))
        for (repeat, n_places), count in zip(repeats, counts, strict=True)
    ]
    return sorted(repeat for repeat in expected if repeat.n_by_chance < max_by_chance)


def _count(words: Sequence[str], text: Digits) -> IntArray:
    """Count the non-overlapping occurrences of each word in ASCII letters. -> (n_words,)"""
    counts = np.zeros(len(words), dtype=np.int64)
    call("count_words", text, len(text), *_concatenate(words), len(words), counts)
    return counts


def _concatenate(words: Sequence[str]) -> tuple[Digits, IntArray]:
    """Return the letters of all words, and the length of each. (n_letters,), (n_words,)"""
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    return _encode_bases("".join(words)), lengths


def _encode_bases(text: str) -> Digits:
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8)


def _find_kmers(n_bases: IntArray) -> FloatArray:
    """Count the positions at most this far from an end, and more beyond ``NEAR``."""
    n_bases = abs(n_bases)
    return np.asarray((2 * n_bases + 1) * np.maximum(1.0, n_bases / NEAR))


def _random_match_probability(left: Digits, right: Digits) -> float:
    """Estimate the probability that two bases are equal, from k-mers with ``_WORD`` bases."""
    counts = np.empty(2, dtype=np.int64)
    call("equal_words", left, len(left), right, len(right), _WORD, counts)
    n_words, n_equal = map(float, counts)
    return float((max(1.0, n_equal) / max(1.0, n_words * (n_words - 1))) ** (1 / _WORD))


def _common_words(left: Digits, right: Digits) -> IntArray:
    """Return maximal common substrings: start in left, start in right, and length. -> (n, 3)

    Each begins with a k-mer that occurs once or twice in ``left``, which excludes tandem repeats.
    The length is at most ``LONGEST_REPEAT`` + 1.
    """
    rows = np.empty((2 * len(right), 3), dtype=np.int64)
    n_rows = np.empty(1, dtype=np.int64)
    sizes = SHORTEST_REPEAT, LONGEST_REPEAT + 1
    call("common_words", left, len(left), right, len(right), *sizes, rows, n_rows)
    return rows[: int(n_rows[0])]


def _count_matches(words: IntArray, i: int, j: int) -> int:
    """Count bases in common substrings near this one and near its diagonal, itself included."""
    is_near = abs(words[:, 0] - i) <= NEAR
    is_beside = abs(words[:, 1] - words[:, 0] - (j - i)) <= LONGEST_REPEAT
    return int(words[is_near & is_beside, 2].sum())


def _is_hairpin(digits: Digits) -> bool:
    """Return whether most bases pair with each other around one axis."""
    hairpin = 2 / 3  # share of bases in a repeat that pair with each other in a terminator
    n_paired = np.empty(1, dtype=np.int64)
    call("paired_digits", digits, len(digits), n_paired)
    return bool(n_paired[0] >= hairpin * len(digits))
