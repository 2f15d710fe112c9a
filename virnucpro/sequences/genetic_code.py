"""Genetic codes by NCBI's numbers.

Codons are those of ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi. Codes 27, 28 and 31, in which a
codon means a residue here and a stop there, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
