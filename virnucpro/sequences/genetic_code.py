"""Genetic codes by NCBI's numbers, and how to tell that a sequence uses another one.

Codons are those of ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi, as Biopython has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, prod

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
SHORTEST = 2000  # bases
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
    bases; it is closed if it is 2.5 times as long as the longest one in the bacterial code. Short
    sequences have none.
    """
    n_bases = len(sequence)
    if n_bases < SHORTEST:
        return None
    text = sequence.encode("ascii", "replace").translate(_BASES)
    shares = {base: text.count(base) / n_bases for base in b"ACGT"}
    if shares[ord("C")] + shares[ord("G")] > MOST_GC:
        return None
    keys, kinds = _stops_by_frame(text)
    closed = _longest(keys)
    lengths = {}
    for number, stops in READ_ON.items():
        closing = [stop for stop in STANDARD.stops if stop not in stops]
        is_end = _IS_OF_CODE[number][kinds]
        longest = _longest(keys[is_end])
        chance = sum(prod(shares[base] for base in stop.encode()) for stop in closing)
        n_by_chance = 2 * n_bases * chance * exp(-longest * chance)
        if longest >= max(OPEN_CODONS, OPEN_RATIO * closed) and n_by_chance < MOST_BY_CHANCE:
            lengths[number] = longest
    longest = max(lengths.values(), default=0)
    return next((number for number in lengths if lengths[number] >= SAME_LENGTH * longest), None)


# Kinds of codons, for ``bytes.translate``: 0 is an end of the sequence; 1, 2 and 3 are the stops,
# 4, 5 and 6 those of the reverse strand; 7 is any other codon. A codon is 25a + 5b + c of digits.
_BASES = bytes.maketrans(b"acgtuU", b"ACGTTT")
_DIGITS = bytes(
    {ord(base): digit for digit, base in enumerate("ACGT")}.get(i, 4) for i in range(256)
)
_OTHER = 7
_KINDS = bytearray([_OTHER]) * 256
for _place, _stop in enumerate(STANDARD.stops):
    _a, _b, _c = ("ACGT".index(base) for base in _stop)
    _KINDS[25 * _a + 5 * _b + _c] = 1 + _place
    _KINDS[25 * (3 - _c) + 5 * (3 - _b) + 3 - _a] = 4 + _place
_IS_OF_CODE = {
    number: np.array([True, *2 * [stop not in stops for stop in STANDARD.stops]])
    for number, stops in READ_ON.items()
}


def _stops_by_frame(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The places of all stops and of the ends of the six frames, frame by frame, and their kinds.

    Places in one frame are three apart for neighbouring codons.
    """
    digits = np.frombuffer(text.translate(_DIGITS), dtype=np.uint8)
    codes = digits[:-2] * 25 + digits[1:-1] * 5 + digits[2:]
    all_kinds = np.frombuffer(codes.tobytes().translate(bytes(_KINDS)), dtype=np.uint8)
    places = np.flatnonzero(all_kinds < _OTHER)
    kinds = all_kinds[places]
    stride = len(text) + 6  # so that the ends of two frames are no stretch
    frames = np.arange(6)
    keys = np.concatenate(
        [
            (places % 3 + 3 * (kinds > 3)) * stride + places,
            frames * stride + frames % 3 - 3,
            frames * stride + len(text),
        ]
    )
    order = np.argsort(keys)
    return keys[order], np.concatenate([kinds, np.zeros(12, dtype=np.uint8)])[order]


def _longest(keys: NDArray[np.int64]) -> int:
    """Codons of the longest stretch between two of these places."""
    return int(np.diff(keys).max()) // 3 - 1
