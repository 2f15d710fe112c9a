"""Genetic codes by NCBI's numbers, and how to notice that a sequence uses another one.

Codons are those of ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi. Codes 27, 28 and 31, in which a
codon means a residue here and a stop there, are left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, prod

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.errors import UsageError

STOP = "*"
_CODONS = tuple(a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT")
_STANDARD = "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF"  # a letter per codon
_DIFFERENCES = {  # NCBI's number -> codons with another meaning than in the standard code
    1: "",
    2: "AGA* AGG* ATAM TGAW",
    3: "ATAM CTAT CTCT CTGT CTTT TGAW",
    4: "TGAW",
    5: "AGAS AGGS ATAM TGAW",
    6: "TAAQ TAGQ",
    9: "AAAN AGAS AGGS TGAW",
    10: "TGAC",
    11: "",
    12: "CTGS",
    13: "AGAG AGGG ATAM TGAW",
    14: "AAAN AGAS AGGS TAAY TGAW",
    15: "TAGQ",
    16: "TAGL",
    21: "AAAN AGAS AGGS ATAM TGAW",
    22: "TAGL TCA*",
    23: "TTA*",
    24: "AGAS AGGK TGAW",
    25: "TGAG",
    26: "CTGA",
    29: "TAAY TAGY",
    30: "TAAE TAGE",
    32: "TAGW",
    33: "AGAS AGGK TAAY TGAW",
}
GENETIC_CODES = tuple(_DIFFERENCES)
# code -> stops of the bacterial code that are codons in it; codes with fewer come first
_READ_ON = {4: ("TGA",), 15: ("TAG",), 6: ("TAA", "TAG")}
OPEN_CODONS = 100  # least length of the longest open stretch
_OPEN_RATIO = 2.5  # least ratio of the longest open stretch to that in the bacterial code
_SAME_LENGTH = 0.8  # of the longest stretch of all codes: reading on more stops adds no more
SHORTEST = 2000  # bases
_MOST_GC = 0.45  # where bases C and G are common, wrong frames of genes are open too
MOST_BY_CHANCE = 1e-3  # stretches so long in a random sequence with these bases
_BASES_AT_ONCE = 2_000_000


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
    letters = dict(zip(_CODONS, _STANDARD, strict=True))
    letters |= {change[:3]: change[3] for change in _DIFFERENCES[number].split()}
    return GeneticCode(number, _CODONS, tuple(letters.values()))


STANDARD = genetic_code(1)  # the bacterial one, 11, differs in its starts only


@cache
def standard_synonyms(code: GeneticCode) -> dict[str, str]:
    """A standard codon of the same meaning for each codon with another meaning than the standard.

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
    shares = {base: n / n_bases for base, n in _count_bases(sequence).items()}
    if shares[ord("C")] + shares[ord("G")] > _MOST_GC:
        return None
    open_codons = _longest_open(sequence)
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


def _chance_of_stop(shares: Mapping[int, float], read_on: Container[str]) -> float:
    """Of a codon of random bases to close a stretch; the stops of ``read_on`` do not."""
    closing = [stop for stop in STANDARD.stops if stop not in read_on]
    return sum(prod(shares[base] for base in stop.encode()) for stop in closing)


# Kinds of codons, for ``bytes.translate``: 1, 2 and 3 are the stops, 4, 5 and 6 those of the
# reverse strand; 7 is any other codon. A codon is 25a + 5b + c of digits.
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
# whether each kind ends a stretch; 0 is none
_IS_OF_CODE = {
    number: np.array([False, *2 * [stop not in stops for stop in STANDARD.stops]])
    for number, stops in {STANDARD.number: (), **_READ_ON}.items()
}


def _windows(sequence: str, n_more: int = 0) -> Iterator[tuple[int, bytes]]:
    """Parts of a sequence as upper-case DNA, with the bases behind each, and their places."""
    for first in range(0, len(sequence), _BASES_AT_ONCE):
        part = sequence[first : first + _BASES_AT_ONCE + n_more]
        yield first, part.encode("ascii", "replace").translate(_BASES)


def _count_bases(sequence: str) -> dict[int, int]:
    counts = dict.fromkeys(b"ACGT", 0)
    for _, text in _windows(sequence):
        letters = np.frombuffer(text, dtype=np.uint8)
        for base in counts:
            counts[base] += int(np.count_nonzero(letters == base))
    return counts


def _longest_open(sequence: str) -> dict[int, int]:
    """Codons of the longest stretch of the six frames without a stop, for each code."""
    frames = np.arange(6)
    last = dict.fromkeys(_IS_OF_CODE, frames % 3 - 3)  # place of the last stop so far
    longest = dict.fromkeys(_IS_OF_CODE, 0)  # bases from a stop to the next
    for first, text in _windows(sequence, n_more=2):
        places, kinds = _stops(text)
        frame_of = (first + places) % 3 + 3 * (kinds > 3)
        for number, is_of_code in _IS_OF_CODE.items():
            is_end = is_of_code[kinds]
            place = np.concatenate([last[number], first + places[is_end]])
            frame = np.concatenate([frames, frame_of[is_end]]).astype(np.uint8)
            order = np.argsort(frame, kind="stable")  # places rise in each frame
            steps = np.diff(place[order])[np.diff(frame[order]) == 0]
            longest[number] = max(longest[number], int(steps.max(initial=0)))
            last[number] = place[order][np.searchsorted(frame[order], frames, "right") - 1]
    return {
        number: max(longest[number], int((len(sequence) - last[number]).max())) // 3 - 1
        for number in _IS_OF_CODE
    }


def _stops(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The places of all stops of both strands, and their kinds."""
    digits = np.frombuffer(text.translate(_DIGITS), dtype=np.uint8)
    codes = digits[:-2] * 25 + digits[1:-1] * 5 + digits[2:]
    kinds = np.frombuffer(codes.tobytes().translate(bytes(_KINDS)), dtype=np.uint8)
    places = np.flatnonzero(kinds < _OTHER)
    return places, kinds[places]
