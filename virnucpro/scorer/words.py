"""Words of nine residues that several groups of the training share, and whose they are.

Composition cannot see what a protein is; a word that proteins of several families share can. Of
strangers a word by chance is rare: there are 5e11 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from virnucpro.scorer.pieces import Counts, Digits
from virnucpro.scorer.stretches import code_of
from virnucpro.sequences.genetic_code import STANDARD, STOP

LENGTH = 9  # residues of a word
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
NO_RESIDUE = len(AMINO_ACIDS)  # stops, and codons with an unknown base
# whose a word is: 0 of nobody here; then the numbers of viral and of cellular groups that have it
VIRAL, VIRAL_OFTEN, CELLULAR, CELLULAR_OFTEN, RATHER_VIRAL, RATHER_CELLULAR = range(1, 7)
N_WORD_FIGURES = 6
_FILTER_BITS = 23
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: Knuth's hashing

Residues = NDArray[np.uint8]
Values = NDArray[np.float64]
Numbers = NDArray[np.int64]

_RESIDUE_OF_CODE = bytearray([NO_RESIDUE]) * 256
for _codon, _residue in zip(STANDARD.codons, STANDARD.letters, strict=True):
    if _residue != STOP:
        _RESIDUE_OF_CODE[code_of(_codon)] = AMINO_ACIDS.index(_residue)


@dataclass(frozen=True, eq=False)
class WordTable:
    """Words that several groups share, rising, and whose each is."""

    numbers: Numbers  # (n,)
    owners: NDArray[np.uint8]  # (n,) 1 to 6

    def __post_init__(self) -> None:
        if self.numbers.shape != self.owners.shape or (np.diff(self.numbers) <= 0).any():
            raise ValueError(
                f"{len(self.numbers)} words out of order, of {len(self.owners)} owners"
            )
        if ((self.owners < VIRAL) | (self.owners > RATHER_CELLULAR)).any():
            raise ValueError("words of owners that are not known")

    @cached_property
    def _filter(self) -> NDArray[np.bool_]:
        """Which hashes there are; most words of a sequence have none of them."""
        is_there = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        is_there[_hashes(self.numbers)] = True
        return is_there

    def owners_of(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Whose each of these words is, 0 for nobody's. (n,) -> (n,)"""
        owners = np.zeros(len(numbers), dtype=np.uint8)
        rows = np.flatnonzero(self._filter[_hashes(numbers)])
        if len(rows):
            places = np.searchsorted(self.numbers, numbers[rows]).clip(max=len(self.numbers) - 1)
            is_same = self.numbers[places] == numbers[rows]
            owners[rows[is_same]] = self.owners[places[is_same]]
        return owners


NO_WORDS = WordTable(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8))


def _hashes(numbers: Numbers) -> NDArray[np.uint64]:
    hashes: NDArray[np.uint64] = numbers.astype(np.uint64) * _MULTIPLIER
    hashes >>= np.uint64(64 - _FILTER_BITS)
    return hashes


def residues_of(codes: Digits) -> Residues:
    """The residue of each codon as a number; ``NO_RESIDUE`` where there is none."""
    return np.frombuffer(codes.tobytes().translate(bytes(_RESIDUE_OF_CODE)), np.uint8)


def words_of(codes: Digits, stretch: Counts) -> tuple[Counts, Numbers]:
    """The words inside the stretches that codons belong to: places of their first codons, numbers.

    Codons lie one behind the other, stretch by stretch: (n_codons,), (n_codons,)
    """
    residues = residues_of(codes)
    n = max(0, len(residues) - LENGTH + 1)
    numbers = np.zeros(n, dtype=np.int64)
    is_word = stretch[:n] == stretch[len(stretch) - n :]
    for i in range(LENGTH):
        of_place = residues[i : i + n]
        numbers *= NO_RESIDUE
        numbers += of_place
        is_word &= of_place < NO_RESIDUE
    places = np.flatnonzero(is_word)
    return places, numbers[places]


def word_figures(owners: NDArray[np.uint8], piece: Counts, n: int) -> Values:
    """Roots of the shares of words that others have too, of n pieces, by their owners. (n, 6)

    Viruses alone, several of them; cells alone, several of them; rather viruses; rather cells.
    """
    counts = np.bincount(piece * (N_WORD_FIGURES + 1) + owners, minlength=n * (N_WORD_FIGURES + 1))
    counts = counts.reshape(n, N_WORD_FIGURES + 1)
    n_words = counts.sum(axis=1, keepdims=True)
    counts[:, VIRAL] += counts[:, VIRAL_OFTEN]
    counts[:, CELLULAR] += counts[:, CELLULAR_OFTEN]
    figures: Values = np.sqrt(counts[:, 1:] / np.maximum(1, n_words))
    return figures
