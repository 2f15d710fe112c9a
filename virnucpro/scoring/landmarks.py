"""Landmarks of a sequence: peptides of host genes, edges of open stretches, direct repeats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from virnucpro.scorer.features import GENE_LIKE
from virnucpro.scorer.pieces import Pieces, encode
from virnucpro.scorer.stretches import code_of, codon_codes, find_stretches
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

# of RpoB, RpoC, S19, L2, S11 and S12, aligned over bacteria of several phyla
HOST_PEPTIDES = re.compile(
    rb"GDK[FLM]A[GSN]RHG[QN]KG|NADFDGDQM|GH[KM][LI][GA]EF[AS][PL]TR|NP[VI]DHPHGGGEG"
    rb"|PHNGCRPPK[KR]R|KPNSA[LM]RK"
)
REACH = 1_000  # bases, from a place to an edge of an open stretch
REPEAT_REACH = 3_000  # bases, from an end to a repeat
SHORTEST_REPEAT = 12  # bases
MOST_BY_CHANCE = 0.01  # expected number of repeats as good as one that is named


def host_peptides(sequence: str, code: GeneticCode = STANDARD) -> list[int]:
    """Where, in bases, translations of the six frames hold a peptide that is a host's."""
    if not sequence:
        return []
    length = len(sequence)
    pieces = Pieces.of(encode(sequence), np.array([0]), np.array([length]))
    letters = bytearray(b"X" * 256)
    for codon, letter in zip(code.codons, code.letters, strict=True):
        letters[code_of(codon)] = ord(letter)
    places = []
    for strand, codes in enumerate(codon_codes(pieces.digits)[0]):
        translation = codes.tobytes().translate(bytes(letters))
        for frame in range(3):
            for match in HOST_PEPTIDES.finditer(translation[frame::3]):
                place = frame + 3 * match.start()
                places.append(place if strand == 0 else length - place)
    return sorted(places)


def open_edges(sequence: str, place: int, code: GeneticCode = STANDARD) -> list[int]:
    """Both edges of each gene-like open stretch near a place, but for those that are cut off."""
    first = max(0, place - 2 * REACH)
    part = sequence[first : place + 2 * REACH]
    kept = find_stretches(Pieces.of(encode(part), np.array([0]), np.array([len(part)])), code).kept
    long = kept.where(kept.n_codons >= GENE_LIKE)
    left = np.where(long.strand == 0, long.start, len(part) - long.start - 3 * long.n_codons)
    edges = np.concatenate([left, left + 3 * long.n_codons])
    whole: list[int] = (first + edges[(edges > 2) & (edges < len(part) - 2)]).tolist()
    return whole


class Repeat(NamedTuple):
    """The same bases at two places, as often on either side of an integrated element."""

    left: int
    right: int
    bases: str
    n_by_chance: float  # expected number of repeats of its length, or longer, as near to both ends


def direct_repeat(sequence: str, start: int, end: int) -> Repeat | None:
    """The direct repeat near both ends of a region that is least to be expected by chance.

    It has ``SHORTEST_REPEAT`` bases or more, in known letters. With p for the probability of two
    bases of these windows to be equal, a repeat of n bases that lies a and b bases from the ends
    is expected (2 a + 1) (2 b + 1) p^n times.
    """
    windows = [_window(sequence, place) for place in (start, min(end, len(sequence)))]
    (left, from_left), (right, from_right) = windows
    if from_left + len(left) > from_right:  # the region is shorter than a window
        return None
    both = np.frombuffer((left + right).encode("ascii", "replace"), np.uint8)
    shares = np.array([np.count_nonzero(both == ord(base)) for base in "ACGT"]) / max(1, len(both))
    chance = float((shares**2).sum())
    best = None
    for i, j, n in _repeats(left, right):
        a, b = abs(from_left + i - start), abs(from_right + j - end)
        expected = (2 * a + 1) * (2 * b + 1) * chance**n
        if expected < (best.n_by_chance if best else MOST_BY_CHANCE):
            best = Repeat(from_left + i, from_right + j, left[i : i + n], expected)
    return best


def _window(sequence: str, place: int) -> tuple[str, int]:
    """Upper-case bases around a place, and where they begin."""
    first = max(0, place - REPEAT_REACH)
    return sequence[first : place + REPEAT_REACH].upper(), first


def _repeats(left: str, right: str) -> Iterator[tuple[int, int, int]]:
    """Longest common words: where each begins in left and right, and its length.

    They begin with a word that the left has once or twice: it is no part of a tandem repeat.
    """
    places: dict[str, list[int]] = {}
    for i in range(len(left) - SHORTEST_REPEAT + 1):
        word = left[i : i + SHORTEST_REPEAT]
        if set(word) <= set("ACGT"):
            places.setdefault(word, []).append(i)
    for j in range(len(right) - SHORTEST_REPEAT + 1):
        of_word = places.get(right[j : j + SHORTEST_REPEAT], [])
        for i in of_word if len(of_word) <= 2 else ():
            if i and j and left[i - 1] == right[j - 1]:
                continue  # it is part of a longer one
            n = SHORTEST_REPEAT
            while i + n < len(left) and j + n < len(right) and left[i + n] == right[j + n]:
                n += 1
            yield i, j, n
