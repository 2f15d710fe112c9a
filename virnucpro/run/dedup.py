"""Identical ORFs are embedded once: they are found while a run is planned.

Two ORFs are identical if all that the encoders of the run read of them is: the protein, the bases,
or both. ``SeenOrfs`` looks at a digest of every ORF before it goes into a shard. One that occurred
before becomes a copy: it names the original by its ordinal, its place among the embedded ORFs of
its generation. The workers pass copies over; the feature store gives each, bit for bit, the rows of
its original, or the reason why there are none.

What is found depends on the ORFs and their order alone. A table that is full forgets, and the ORF
is embedded once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2s

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import Reads
from virnucpro.ground.records import Orf

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
    ) -> None:
        self.n_embedded = 0
        self._max_slots = max_slots
        self._table = np.zeros((n_slots, 3), dtype=np.uint64)  # no digest is 0

    def originals(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ordinal of each ORF's original, in order; None if its digest is a new one."""
        distinct = list(dict.fromkeys(digests))
        tags = np.frombuffer(b"".join(distinct), dtype="<u8").reshape(-1, 2)
        ordinals = dict(zip(distinct, self._find_or_add(tags), strict=True))
        originals: list[int | None] = []
        for digest in digests:
            ordinal = ordinals[digest]
            if ordinal == self.n_embedded:  # ordinals are given in the order of first meetings
                self.n_embedded += 1
                originals.append(None)
            else:
                originals.append(ordinal)
        return originals

    def _find_or_add(self, tags: NDArray[np.uint64]) -> list[int]:
        """The ordinal of each digest; the next ones for those that are new. (n, 2) -> n"""
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


def digests_of(orfs: Sequence[Orf], reads: frozenset[Reads]) -> list[bytes]:
    """128 bits of what is read of each ORF: 10^12 share one with a chance of 10^-15."""
    columns = [[orf.text(what) for orf in orfs] for what in sorted(reads)]
    texts = columns[0] if len(columns) == 1 else map(" ".join, zip(*columns, strict=True))
    return [blake2s(text.encode()).digest()[:16] for text in texts]
