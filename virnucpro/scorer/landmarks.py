"""Landmarks of a sequence: its genes, those of hosts, ends of tRNA, edges, direct repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from virnucpro.ground.numeric import Counts, Values
from virnucpro.scorer.features import GENE_LIKE
from virnucpro.scorer.library import call
from virnucpro.scorer.nets import Scorer
from virnucpro.scorer.pieces import (
    UNKNOWN,
    Digits,
    Pieces,
    code_of,
    codon_codes,
    encode,
    find_stretches,
    opposite_strand,
)
from virnucpro.scorer.score import score_proteins
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.translate import reverse_complement

# of RpoB, RpoC, S19, L2, S11 and S12, aligned over bacteria of several phyla
HOST_PEPTIDES = re.compile(
    rb"GDK[FLM]A[GSN]RHG[QN]KG|NADFDGDQM|GH[KM][LI][GA]EF[AS][PL]TR|NP[VI]DHPHGGGEG"
    rb"|PHNGCRPPK[KR]R|KPNSA[LM]RK"
)
# of 16S and 23S rRNA, from E. coli 518, 1394, 1930, 2490 and 2655 on: sites of primers for all
# bacteria, and the loop that ricin cuts
RIBOSOMAL_RNA = (
    *("CAGCAGCCGCGGTAA", "CAGCCGCCGCGGTAA", "ACACACCGCCCGT"),
    *("AACTATAACGGTCCTAAGGTAGCGA", "TTTGGCACCTCGATGTCG", "TACGAGAGGACC"),
)
# the T arm of a tRNA: a stem of five pairs around a loop of seven (Sprinzl et al. 1998, Nucleic
# Acids Res. 26:148), eight bases before the end
_T_ARM = re.compile(r"(?=([ACGT]{4})GTTC[AG]A.[CT]C([ACGT]{4}))")
_PAIRS = {"AT", "TA", "CG", "GC", "GT", "TG"}
_FEWEST_PAIRS, _BEHIND_ARM = 4, 25  # bases from the first one of the arm to the end of the tRNA
_REACH = 1_000  # bases, from a place to an edge of an open stretch
SHORTEST_GENE = 60  # codons of a stretch whose protein is scored
NEAR = 3_000  # bases; a repeat that lies twice as far from an end is twice as suspect
SHORTEST_REPEAT, LONGEST_REPEAT = 12, 300  # bases
MOST_BY_CHANCE = 0.01  # expected number of repeats as good as one that is taken
_WORD = 6  # letters; codons and composition make some common
_PEPTIDE_REACH, _RNA_REACH = 10_000, 3_000  # bases around them that are taken for the host's
_BASES_AT_ONCE = 999_999  # that are translated; whole codons
_HAIRPIN = 2 / 3  # of the bases of a repeat that pair with each other: a terminator


def genes_of(
    sequence: str, scorer: Scorer, code: GeneticCode = STANDARD
) -> tuple[Counts, Counts, Values]:
    """The longest open stretches of a sequence in upper case, hardly overlapping, as proteins.

    Their starts and ends on the forward strand, and the log-odds of their proteins, NaN for one
    without a known residue. (n,), (n,), (n,)

    Raises:
        ValueError: the scorer has no nets for proteins.
    """
    n_bases = len(sequence)
    whole = Pieces(encode(sequence), np.array([0]), np.array([n_bases]))
    kept = find_stretches(whole, code, SHORTEST_GENE)
    frames = [_translations(sequence, strand, _letters(code)) for strand in range(2)]
    proteins = [
        frames[strand][start % 3][start // 3 : start // 3 + n_codons].decode("ascii")
        for strand, start, n_codons in zip(
            kept.strand.tolist(), kept.start.tolist(), kept.n_codons.tolist(), strict=True
        )
    ]
    first = np.where(kept.strand == 0, kept.start, n_bases - kept.start - 3 * kept.n_codons)
    return first, first + 3 * kept.n_codons, score_proteins(proteins, scorer)


def trna_ends(sequence: str) -> list[int]:
    """Where, in bases, genes of tRNA end in a sequence in upper case: their 3' ends, as bounds."""
    places = []
    for strand, bases in enumerate((sequence, reverse_complement(sequence))):
        for match in _T_ARM.finditer(bases):
            pairs = zip(match[1], reversed(match[2]), strict=True)
            if sum(a + b in _PAIRS for a, b in pairs) >= _FEWEST_PAIRS:
                end = match.start() + _BEHIND_ARM
                places.append(end if strand == 0 else len(sequence) - end)
    return sorted(places)


def host_genes(sequence: str, code: GeneticCode = STANDARD) -> list[tuple[int, int]]:
    """What is the host's around its genes in a sequence in upper case: first base and end."""
    found = [(place, _PEPTIDE_REACH) for place in host_peptides(sequence, code)]
    found += [(place, _RNA_REACH) for place in ribosomal_rna(sequence)]
    return [(place - reach, place + reach) for place, reach in found]


def host_peptides(sequence: str, code: GeneticCode = STANDARD) -> list[int]:
    """Where, in bases, translations of the six frames hold a peptide that is a host's."""
    if not sequence:
        return []
    length = len(sequence)
    places = []
    for strand in range(2):
        frames = _translations(sequence, strand, _letters(code))
        for frame, translation in enumerate(frames):
            for match in HOST_PEPTIDES.finditer(translation):
                place = frame + 3 * match.start()
                places.append(place if strand == 0 else length - place)
    return sorted(places)


def ribosomal_rna(sequence: str) -> list[int]:
    """Where, in bases, a sequence in upper case has what all 16S or 23S rRNA genes have."""
    places = []
    for word in (*RIBOSOMAL_RNA, *map(reverse_complement, RIBOSOMAL_RNA)):
        place = sequence.find(word)
        while place >= 0:
            places.append(place)
            place = sequence.find(word, place + 1)
    return sorted(places)


@cache
def _letters(code: GeneticCode) -> bytes:
    """The letter of each code of a codon, X where it names no residue. (256,)"""
    letters = bytearray(b"X" * 256)
    for codon, letter in zip(code.codons, code.letters, strict=True):
        letters[code_of(codon)] = ord(letter)
    return bytes(letters)


def _translations(sequence: str, strand: int, letters: bytes) -> list[bytearray]:
    """The three frames of a strand: a letter for each codon. Built in windows, to save memory."""
    frames = [bytearray() for _ in range(3)]
    for first in range(0, len(sequence), _BASES_AT_ONCE):
        end = first + _BASES_AT_ONCE + 2  # the last codon begins within the window
        low, high = (first, end) if strand == 0 else (len(sequence) - end, len(sequence) - first)
        digits = encode(sequence[max(0, low) : high])
        digits = digits if strand == 0 else opposite_strand(digits)
        window = codon_codes(digits).tobytes().translate(letters)
        for frame, translation in enumerate(frames):
            translation += window[frame::3]
    return frames


def open_edges(sequence: str, place: int, code: GeneticCode) -> list[int]:
    """Edges of gene-like open stretches at most 1,000 bases from a place; none that is cut off."""
    first = max(0, place - 2 * _REACH)
    part = sequence[first : place + 2 * _REACH]
    kept = find_stretches(Pieces(encode(part), np.array([0]), np.array([len(part)])), code)
    long = kept.where(kept.n_codons >= GENE_LIKE)
    left = np.where(long.strand == 0, long.start, len(part) - long.start - 3 * long.n_codons)
    edges = np.concatenate([left, left + 3 * long.n_codons])
    whole = first + edges[(edges > 2) & (edges < len(part) - 2)]
    near: list[int] = whole[abs(whole - place) <= _REACH].tolist()
    return near


class Repeat(NamedTuple):
    """The same bases at two places, as often on either side of an integrated element."""

    n_by_chance: float  # expected number of repeats as good, as near to both ends
    start: int  # of the left copy
    end: int  # of the right copy
    bases: str


def direct_repeats(
    sequence: str, ends: tuple[int, int], bounds: tuple[int, int], reach: int
) -> list[Repeat]:
    """The direct repeats around a region that are not to be expected by chance, best first.

    The left copy begins at most ``reach`` bases from the start, the right one ends as near to the
    end, within the bounds; neither is beyond the other end. With p for the probability of two
    bases of these windows to be equal, a repeat of n bases that lies a and b bases from the ends
    is expected w(a) w(b) p^n times; w(a) is 2 a + 1, and more beyond ``NEAR``. One that is found c
    times elsewhere in a record of N bases is expected w(max(a, b)) c / N times, if that is more.
    Hairpins are left out, as terminators of transcription are alike, and parts of copies that are
    longer than ``LONGEST_REPEAT``, as those of genes and of mobile elements are.
    """
    start, end = ends
    left = max(bounds[0], start - reach), min(end, start + reach)
    right = max(start, end - reach), min(bounds[1], end + reach)
    return _repeats(sequence, left, right, lambda i, j: (_places(i - start), _places(j - end)))


def inner_repeats(sequence: str, ends: tuple[int, int], shortest: int, reach: int) -> list[Repeat]:
    """The repeats of one end of a region and its inside, where one of several viruses ends.

    The copy inside leaves ``shortest`` bases to both ends, and may be at any of the places there.
    Else they are as ``direct_repeats``.
    """
    start, end = ends
    inside = start + shortest, end - shortest
    n_inside = float(inside[1] - inside[0])
    near_start = max(0, start - reach), min(inside[0], start + reach)
    near_end = max(inside[1], end - reach), min(len(sequence), end + reach)
    each = [
        *_repeats(sequence, near_start, inside, lambda i, _: (_places(i - start), n_inside)),
        *_repeats(sequence, inside, near_end, lambda _, j: (n_inside, _places(j - end))),
    ]
    return sorted(each)


def _repeats(
    sequence: str,
    of_left: tuple[int, int],
    of_right: tuple[int, int],
    places: Callable[[int, int], tuple[float, float]],
) -> list[Repeat]:
    """The repeats of two parts of a sequence, see ``direct_repeats``.

    ``places`` has the number of places where each copy may as well be, by their outer ends.
    """
    first, second = of_left[0], of_right[0]
    left, right = encode(sequence[slice(*of_left)]), encode(sequence[slice(*of_right)])
    if min(len(left), len(right)) < SHORTEST_REPEAT:
        return []
    chance = _chance(left, right)
    words = _common_words(left, right)
    candidates = []
    for i, j, n in words.tolist():
        if first + i + n > second + j:
            continue
        at = places(first + i, second + j + n)
        expected = at[0] * at[1] * chance**n
        if expected >= MOST_BY_CHANCE or _is_hairpin(left[i : i + n]):
            continue
        if _n_alike(words, i, j) > LONGEST_REPEAT:
            continue
        bases = sequence[first + i : first + i + n]
        candidates.append((expected, max(at), Repeat(0, first + i, second + j + n, bases)))
    counts = _counts_of(sequence, [repeat.bases for _, _, repeat in candidates])
    repeats = []
    for (expected, n_places, repeat), count in zip(candidates, counts, strict=True):
        elsewhere = n_places * (count - 2) / len(sequence)
        n_by_chance = max(expected, elsewhere)
        if n_by_chance < MOST_BY_CHANCE:
            repeats.append(repeat._replace(n_by_chance=n_by_chance))
    return sorted(repeats)


def _counts_of(sequence: str, words: Sequence[str]) -> list[int]:
    """How often a sequence has each word, on both strands."""
    if not words:
        return []
    both = [*words, *map(reverse_complement, words)]
    text, of_words = (
        np.frombuffer(letters.encode("ascii", "replace"), np.uint8)
        for letters in (sequence, "".join(both))
    )
    lengths = np.array([len(word) for word in both], dtype=np.int64)
    counts = np.empty(len(both), dtype=np.int64)
    call("count_words", text, len(text), of_words, lengths, len(both), counts)
    total: list[int] = counts.reshape(2, -1).sum(axis=0).tolist()
    return total


def _places(n_bases: int) -> float:
    """The number of places that lie as near to an end, or nearer; far ones count for more."""
    n_bases = abs(n_bases)
    return (2 * n_bases + 1) * max(1.0, n_bases / NEAR)


def _chance(left: Digits, right: Digits) -> float:
    """The probability of two bases to be equal, from that of words of ``_WORD`` letters."""
    words = np.concatenate([_words(left, _WORD), _words(right, _WORD)])
    counts = np.bincount(words[words >= 0], minlength=4**_WORD).astype(np.float64)
    n_words = counts.sum()
    n_pairs = max(1.0, n_words * (n_words - 1))
    return float((max(1.0, (counts * (counts - 1)).sum()) / n_pairs) ** (1 / _WORD))


def _words(digits: Digits, size: int) -> Counts:
    """Each word of so many letters as a number; -1 for one with an unknown letter. (n,) -> (m,)"""
    n_words = max(0, len(digits) - size + 1)
    words, is_known = np.zeros(n_words, dtype=np.int64), np.ones(n_words, dtype=np.bool_)
    for i in range(size):
        letters = digits[i : i + n_words]
        words *= 4
        words += letters
        is_known &= letters != UNKNOWN
    words[~is_known] = -1
    return words


def _common_words(left: Digits, right: Digits) -> Counts:
    """Longest common words: where each begins in left and right, and its length. -> (n, 3)

    They begin with a word that the left has once or twice: it is no part of a tandem repeat. The
    length is cut behind ``LONGEST_REPEAT`` bases.
    """
    rows = np.empty((2 * len(right), 3), dtype=np.int64)
    n_rows = np.empty(1, dtype=np.int64)
    sizes = SHORTEST_REPEAT, LONGEST_REPEAT + 1
    call("common_words", left, len(left), right, len(right), *sizes, rows, n_rows)
    return rows[: int(n_rows[0])]


def _n_alike(words: Counts, i: int, j: int) -> int:
    """Bases of the common words around one, which is among them, but for a few lost or gained."""
    is_near = abs(words[:, 0] - i) <= NEAR
    is_beside = abs(words[:, 1] - words[:, 0] - (j - i)) <= LONGEST_REPEAT
    return int(words[is_near & is_beside, 2].sum())


def _is_hairpin(digits: Digits) -> bool:
    """Whether most bases pair with another, around one axis."""
    n_bases = len(digits)
    paired = np.equal.outer(digits, 3 - digits)  # known digits
    most = max(int(np.fliplr(paired).trace(offset)) for offset in range(1 - n_bases, n_bases))
    return most >= _HAIRPIN * n_bases
