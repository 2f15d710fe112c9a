"""Genetic codes by NCBI's numbers, from ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi.

Codes 27, 28 and 31 are excluded, because context decides whether one of their codons is a residue
or a stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from virnucpro.core.errors import UsageError
from virnucpro.core.option_text import with_options

_DIFFERENCES = {  # NCBI's number -> codons that differ from the standard code
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
    """A genetic code with one letter per codon, in the order AAA, AAC, AAG, AAT ..."""

    STOP = "*"

    number: int
    codons: tuple[str, ...]
    letters: tuple[str, ...]  # * is a stop

    @property
    def meanings(self) -> dict[str, str]:
        """Return the letter of each codon."""
        return dict(zip(self.codons, self.letters, strict=True))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(codon for codon, letter in self.meanings.items() if letter == self.STOP)

    @staticmethod
    @cache
    def from_number(number: int) -> GeneticCode:
        """Return the code with an NCBI number.

        Raises:
            UsageError: there is no such code, or one of its codons has two meanings.
        """
        if number not in GENETIC_CODES:
            raise UsageError(
                with_options(
                    "{genetic_code} is {number}, which is not an NCBI code with one meaning per "
                    "codon",
                    number=number,
                ),
                hint=f"choose one of {', '.join(map(str, GENETIC_CODES))}",
                option="genetic_code",
            )
        codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
        standard = "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF"
        meanings = dict(zip(codons, standard, strict=True))
        meanings |= {change[:3]: change[3] for change in _DIFFERENCES[number].split()}
        return GeneticCode(number, tuple(meanings), tuple(meanings.values()))

    @property
    def standard_synonyms(self) -> dict[str, str]:
        """Map each codon with a non-standard residue to the most similar standard codon for it.

        Stops have no synonym.

        >>> GeneticCode.from_number(6).standard_synonyms
        {'TAA': 'CAA', 'TAG': 'CAG'}
        """
        synonyms = {}
        usual = STANDARD.meanings
        for codon, letter in self.meanings.items():
            if letter not in (usual[codon], self.STOP):
                same = [synonym for synonym in usual if usual[synonym] == letter]
                synonyms[codon] = min(same, key=lambda synonym: _n_changes(codon, synonym))
        return synonyms


def _n_changes(codon: str, synonym: str) -> int:
    return sum(a != b for a, b in zip(codon, synonym, strict=True))


STANDARD = GeneticCode.from_number(1)  # the bacterial code, 11, differs only in its start codons
