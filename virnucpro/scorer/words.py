"""Words of nine residues in groups of the training data, and their owners.

Composition cannot see what a protein is; a word that proteins of several families share can. Of
strangers a word by chance is rare: there are 5e11 of them. Words of several groups are all kept;
of those that one group alone has, one in eight, chosen by hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Counts
from virnucpro.scorer.library import call
from virnucpro.scorer.pieces import N_CODES, code_of
from virnucpro.sequences.genetic_code import STANDARD, STOP

_STEP = 3  # residues; a word has so many times so many
LENGTH = _STEP**2  # residues of a word
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
NO_RESIDUE = len(AMINO_ACIDS)  # stops, and codons with an unknown base
# whose a word is: 0 of nobody here; several groups, all viral or all cellular; one group; both
VIRAL, ONE_VIRAL, CELLULAR, ONE_CELLULAR, RATHER_VIRAL, RATHER_CELLULAR = range(1, 7)
N_WORD_FIGURES = 6
RARITY = 8  # one in so many words is in the sample; a power of two
BUCKET_BITS, REST_BITS, OWNER_BITS = 20, 13, 3
_HINT_BITS = 2  # of the rest
_ENTRIES_AT_ONCE = 2**16  # that are checked: a processor keeps them at hand
N_BUCKETS = 2 << BUCKET_BITS
_OWNER = (1 << OWNER_BITS) - 1

Residues = NDArray[np.uint8]
Numbers = NDArray[np.int64]

RESIDUE_OF_CODE = np.full(N_CODES, NO_RESIDUE, dtype=np.uint8)
for _codon, _residue in zip(STANDARD.codons, STANDARD.letters, strict=True):
    if _residue != STOP:
        RESIDUE_OF_CODE[code_of(_codon)] = AMINO_ACIDS.index(_residue)


@dataclass(frozen=True, eq=False)
class WordTable:
    """Words and their owners, as 33 bits of a hash: the bucket, and the rest before the owner.

    Words in the sample have the second half of the buckets to themselves, so that the others pass
    by the many words of one group. By chance about one in 1e3 of the sample, and one in 1e4 of
    the others, is taken for a word of the table.
    """

    n_of_bucket: NDArray[np.uint8]  # (N_BUCKETS,)
    entries: NDArray[np.uint16]  # (n,) by bucket, rising

    def __post_init__(self) -> None:
        if self.n_of_bucket.shape != (N_BUCKETS,) or self.entries.ndim != 1:
            raise ValueError(f"words in {self.n_of_bucket.shape} buckets")
        if self.n_of_bucket.sum() != len(self):
            raise ValueError(f"{len(self)} words in buckets of {self.n_of_bucket.sum()}")
        for first in range(0, len(self), _ENTRIES_AT_ONCE):
            owners = self.entries[first : first + _ENTRIES_AT_ONCE] & _OWNER
            owners -= VIRAL  # 0 becomes the largest number
            if owners.max() > RATHER_CELLULAR - VIRAL:
                raise ValueError("words of owners that are not known")

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def arguments(self) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.uint16], int]:
        """What functions of the library take: hints, and the first entry of each bucket.

        A hint is a bit for each beginning of a hash that words outside the sample have. A processor
        keeps them at hand, and six of seven words that nobody has are not looked for among the
        entries. In the sample hardly a beginning is free.
        """
        hints = np.zeros(N_BUCKETS >> 1 << _HINT_BITS >> 3, dtype=np.uint8)
        first = np.zeros(N_BUCKETS + 1, dtype=np.int32)
        if len(self):
            call("open_words", self.n_of_bucket, self.entries, first, hints)
        return hints, first, self.entries, len(self)

    def owners_of(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Owner of each word; 0: none. (n,) -> (n,)"""
        owners = np.empty(len(numbers), dtype=np.uint8)
        call("owners_of", np.ascontiguousarray(numbers), len(numbers), *self.arguments, owners)
        return owners


NO_WORDS = WordTable(np.zeros(N_BUCKETS, dtype=np.uint8), np.empty(0, dtype=np.uint16))


def words_in(residues: Residues, owner: Counts) -> tuple[Counts, Numbers]:
    """The words of residues that lie side by side, none across two owners: places, numbers."""
    numbers, is_word = residues.astype(np.int64), residues < NO_RESIDUE
    for n in (1, _STEP):  # three residues, then three times three
        base = NO_RESIDUE**n
        numbers = (numbers[: -2 * n] * base + numbers[n:-n]) * base + numbers[2 * n :]
        is_word = is_word[: -2 * n] & is_word[n:-n] & is_word[2 * n :]
    is_word &= owner[: len(is_word)] == owner[len(owner) - len(is_word) :]
    places = np.flatnonzero(is_word)
    return places, numbers[places]
