"""Genetic codes by NCBI's numbers, and how to tell that a sequence uses another one.

Codons are those of ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi, as Biopython has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from Bio.Data.CodonTable import unambiguous_dna_by_id
from numpy.typing import NDArray

from virnucpro.errors import UsageError

STOP = "*"
# code -> stops of the bacterial code that are codons in it; codes with fewer come first
READ_ON = {4: ("TGA",), 15: ("TAG",), 6: ("TAA", "TAG")}
OPEN_CODONS = 100  # least length of the longest open stretch
OPEN_RATIO = 2.5  # least ratio of the longest open stretch to that in the bacterial code
SAME_LENGTH = 0.8  # of the longest stretch of all codes: reading on more stops adds no more
MOST_GC = 0.45  # where bases C and G are common, wrong frames of genes are open too
MOST_BY_CHANCE = 1e-3  # stretches so long in a random sequence with these bases


@dataclass(frozen=True, slots=True)
class GeneticCode:
    """A genetic code: a letter for each of the 64 codons, in the order AAA, AAC, AAG, AAT ..."""

    number: int
    codons: tuple[str, ...]
    letters: tuple[str, ...]  # * is a stop

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(
            codon for codon, letter in zip(self.codons, self.letters, strict=True) if letter == STOP
        )


GENETIC_CODES = tuple(
    number
    for number, table in sorted(unambiguous_dna_by_id.items())
    if not set(table.stop_codons) & set(table.forward_table)
)


@cache
def genetic_code(number: int) -> GeneticCode:
    """
    Raises:
        UsageError: there is no such code, or one of its codons has two meanings.
    """
    if number not in GENETIC_CODES:
        raise UsageError(
            f"--genetic-code is {number}, which is not one of NCBI's codes with one meaning for "
            "each codon",
            hint=f"choose one of {', '.join(map(str, GENETIC_CODES))}",
        )
    table = unambiguous_dna_by_id[number]
    codons = tuple(a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT")
    return GeneticCode(
        number, codons, tuple(table.forward_table.get(codon, STOP) for codon in codons)
    )


STANDARD = genetic_code(1)  # the bacterial one, 11, differs in its starts only


@cache
def standard_synonyms(code: GeneticCode) -> dict[str, str]:
    """A standard codon of the same meaning for each codon whose meaning differs from the standard.

    It is the codon with the fewest other bases. Stops have none.

    >>> standard_synonyms(genetic_code(4)), standard_synonyms(genetic_code(6))
    ({'TGA': 'TGG'}, {'TAA': 'CAA', 'TAG': 'CAG'})
    """
    synonyms = {}
    for codon, letter, usual in zip(code.codons, code.letters, STANDARD.letters, strict=True):
        if letter not in (usual, STOP):
            same = [
                c for c, x in zip(STANDARD.codons, STANDARD.letters, strict=True) if x == letter
            ]
            synonyms[codon] = min(same, key=lambda synonym: _n_changes(codon, synonym))
    return synonyms


def _n_changes(codon: str, synonym: str) -> int:
    return sum(a != b for a, b in zip(codon, synonym, strict=True))


def find_open_code(sequence: str) -> int | None:
    """The code in which a sequence has a long open stretch that is closed in the bacterial one.

    The longest stretch of any frame is long if it hardly occurs in random sequence with these
    bases; it is closed if it is 2.5 times as long as the longest one in the bacterial code.
    """
    digits = _DIGIT[np.frombuffer(sequence.encode("ascii", "replace").translate(_TEXT), np.uint8)]
    if not len(digits):
        return None
    shares = np.bincount(digits, minlength=5)[:4] / len(digits)
    if shares[1] + shares[2] > MOST_GC:
        return None
    stops = {stop: _places(digits, stop) for stop in STANDARD.stops}
    closed = _longest(list(stops.values()), len(digits))
    lengths = {}
    for number, read_on in READ_ON.items():
        closing = [stop for stop in stops if stop not in read_on]
        longest = _longest([stops[stop] for stop in closing], len(digits))
        chance = sum(shares[["ACGT".index(base) for base in stop]].prod() for stop in closing)
        n_by_chance = 2 * len(digits) * chance * np.exp(-longest * chance)
        if longest >= max(OPEN_CODONS, OPEN_RATIO * closed) and n_by_chance < MOST_BY_CHANCE:
            lengths[number] = longest
    longest = max(lengths.values(), default=0)
    return next((number for number in lengths if lengths[number] >= SAME_LENGTH * longest), None)


_TEXT = bytes.maketrans(b"acgtuU", b"ACGTTT")
_DIGIT = np.full(256, 4, dtype=np.uint8)
for _digit, _base in enumerate(b"ACGT"):
    _DIGIT[_base] = _digit


def _places(digits: NDArray[np.uint8], codon: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first bases, seen forward, of a codon on the forward and on the reverse strand."""
    codes = digits[:-2] * 25 + digits[1:-1] * 5 + digits[2:]
    a, b, c = ("ACGT".index(base) for base in codon)
    return (
        np.flatnonzero(codes == 25 * a + 5 * b + c),
        np.flatnonzero(codes == 25 * (3 - c) + 5 * (3 - b) + (3 - a)),
    )


def _longest(stops: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], n_bases: int) -> int:
    """Codons of the longest stretch of any frame without one of these stops."""
    longest = 0
    for strand in zip(*stops, strict=True):
        places = np.sort(np.concatenate(strand))
        for frame in range(3):
            ends = np.concatenate([[frame - 3], places[places % 3 == frame], [n_bases]])
            longest = max(longest, int(np.diff(ends).max()) // 3 - 1)
    return longest
