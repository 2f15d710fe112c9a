"""Identical ORFs are embedded once: they are found while a run is planned.

Two ORFs are identical if all that the encoders of the run read of them is: the protein, the bases,
or both. ``SeenOrfs`` looks at every ORF before it goes into a shard. One that occurred before
becomes a copy: it names the original by its ordinal, its place among the embedded ORFs of its
generation. The workers pass copies over; the feature store gives each, bit for bit, the rows of its
original, or the reason why there are none.

What is found depends on the ORFs and their order alone. A table that is full forgets, and the ORF
is embedded once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2s

import numpy as np
from numpy.typing import NDArray

from virnucpro.config import Reads
from virnucpro.records import Orf

N_SLOTS = 2**18  # at first: 6 MB
MAX_SLOTS = 2**22  # 100 MB
_SLOTS_PER_PROTEIN = 16  # with so many, 3 of 100 proteins lose their slot to another


class SeenOrfs:
    """The latest ORFs of a generation. Memory is bounded.

    Each has one slot, chosen by its digest, which the newest takes: two words of the digest and
    the ordinal.
    """

    def __init__(
        self,
        n_slots: int = N_SLOTS,
        max_slots: int = MAX_SLOTS,
        reads: frozenset[Reads] = frozenset({"protein"}),
    ) -> None:
        self.reads = sorted(reads)
        self.n_embedded = 0
        self._max_slots = max_slots
        self._table = np.zeros((n_slots, 3), dtype=np.uint64)  # no digest is 0

    def mark(self, orfs: Sequence[Orf]) -> list[Orf]:
        """The same ORFs, in order; an ORF whose texts occurred before is a copy."""
        columns = [[orf.text(what) for orf in orfs] for what in self.reads]
        texts = columns[0] if len(columns) == 1 else list(map(" ".join, zip(*columns, strict=True)))
        distinct = list(dict.fromkeys(texts))
        ordinals = dict(zip(distinct, self._find_or_add(_digests(distinct)), strict=True))
        result = []
        for orf, text in zip(orfs, texts, strict=True):
            ordinal = ordinals[text]
            if ordinal == self.n_embedded:  # ordinals are given in the order of first meetings
                self.n_embedded += 1
                result.append(orf)
            else:
                result.append(orf._replace(copy_of=ordinal))
        return result

    def _find_or_add(self, tags: NDArray[np.uint64]) -> list[int]:
        """The ordinal of each protein; the next ones for those that are new. (n, 2) -> n"""
        entries = self._table.take(self._slots_of(tags), axis=0)
        is_new = (entries[:, :2] != tags).any(axis=1)
        n_new = int(is_new.sum())
        entries[:, :2] = tags
        entries[is_new, 2] = np.arange(self.n_embedded, self.n_embedded + n_new)
        self._grow(self.n_embedded + n_new)
        self._put(entries[is_new])
        ordinals: list[int] = entries[:, 2].tolist()
        return ordinals

    def _grow(self, n_proteins: int) -> None:
        while len(self._table) < min(self._max_slots, _SLOTS_PER_PROTEIN * n_proteins):
            entries = self._table[self._table[:, :2].any(axis=1)]
            self._table = np.zeros((2 * len(self._table), 3), dtype=np.uint64)
            self._put(entries)

    def _put(self, entries: NDArray[np.uint64]) -> None:
        self._table[self._slots_of(entries)] = entries  # of two for one slot, the last stays

    def _slots_of(self, tags: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of slots is a power of two, so entries that differed still differ."""
        slots: NDArray[np.int64] = (tags[:, 0] & np.uint64(len(self._table) - 1)).astype(np.int64)
        return slots


def _digests(proteins: Sequence[str]) -> NDArray[np.uint64]:
    """128 bits of each: 10^12 proteins share one with a chance of 10^-15. n -> (n, 2)"""
    digests = b"".join([blake2s(text.encode()).digest() for text in proteins])
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 4)[:, :2]
