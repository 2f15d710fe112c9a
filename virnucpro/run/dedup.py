"""Identical proteins are embedded once: found while a run is planned, shared out for its tables.

``SeenProteins`` looks at every ORF before it goes into a shard. An ORF whose protein was met
before becomes a copy: it names the original by its ordinal, its place among the embedded ORFs
of its generation. The workers pass copies over. ``Originals`` gives each copy, bit for bit, the
rows of its original, or the reason why there are none.

What is found depends on the ORFs and their order alone. A table that is full forgets, and the
protein is embedded once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2s
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.config import Reads
from virnucpro.errors import FeatureFileError
from virnucpro.log import printable
from virnucpro.records import Embeddings, Failure, Orf
from virnucpro.run.features import read_rows

N_SLOTS = 2**18  # at first: 6 MB
MAX_SLOTS = 2**22  # 100 MB
_SLOTS_PER_PROTEIN = 16  # with so many, 3 of 100 proteins lose their slot to another


class SeenProteins:
    """The proteins of a generation that were met lately. Memory is bounded.

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
        """The same ORFs, in order; those of which all that is read was met before are copies."""
        texts = [" ".join([orf.text(what) for what in self.reads]) for orf in orfs]
        distinct = list(dict.fromkeys(texts))
        ordinals = dict(zip(distinct, self._find_or_add(_digests(distinct)), strict=True))
        marked = []
        for orf, text in zip(orfs, texts, strict=True):
            ordinal = ordinals[text]
            if ordinal == self.n_embedded:  # ordinals are given in the order of first meetings
                self.n_embedded += 1
                marked.append(orf)
            else:
                marked.append(orf._replace(copy_of=ordinal))
        return marked

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


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """What became of the embedded ORFs of one shard."""

    first: int  # ordinal
    path: Path | None  # None: the shard was lost
    reasons: dict[int, str]  # ordinal -> why it failed
    loss: str = ""

    def reason(self, ordinal: int) -> str:
        return self.loss or self.reasons.get(ordinal, "")

    def place(self, ordinal: int) -> int:
        """In the feature file, which leaves out what failed."""
        return ordinal - self.first - sum(failed < ordinal for failed in self.reasons)


class Originals:
    """Where the rows of a generation's embedded ORFs are. Its shards are added in order."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []
        self._n_embedded = 0

    def add(self, path: Path, orfs: Sequence[Orf], embeddings: Embeddings) -> None:
        """Remember a shard by its feature file, which was just read.

        Raises:
            FeatureFileError: its rows are not those of the shard's ORFs, in their order.
        """
        reasons = {failure.orf_id: failure.reason for failure in embeddings.failures}
        if embeddings.ids != tuple(orf.id for orf in orfs if orf.id not in reasons):
            raise FeatureFileError(f"{printable(path)} does not hold its ORFs in their order")
        first = self._n_embedded
        failed = {first + i: reasons[orf.id] for i, orf in enumerate(orfs) if orf.id in reasons}
        self._add(_Source(first, path, failed), len(orfs))

    def add_lost(self, orfs: Sequence[Orf], reason: str) -> None:
        """Remember a shard that has no feature file."""
        self._add(_Source(self._n_embedded, None, {}, reason), len(orfs))

    def _add(self, source: _Source, n_embedded: int) -> None:
        if n_embedded:
            self._sources.append(source)
            self._n_embedded += n_embedded

    def copy_to(self, copies: Sequence[Orf], per_residue: bool) -> Embeddings:
        """The rows, or the failures, of copies whose originals were added."""
        rows: dict[int, NDArray[np.float32]] = {}
        reasons: dict[int, str] = {}
        ordinals = sorted({orf.copy_of for orf in copies if orf.copy_of is not None})
        for source, group in groupby(ordinals, key=self._source_of):
            wanted = []
            for ordinal in group:
                if reason := source.reason(ordinal):
                    reasons[ordinal] = reason
                else:
                    wanted.append(ordinal)
            if wanted and source.path:
                places = [source.place(ordinal) for ordinal in wanted]
                found = read_rows(source.path, places, per_residue)
                rows.update(zip(wanted, found, strict=True))
        given = [(orf, rows[orf.copy_of]) for orf in copies if orf.copy_of in rows]
        return Embeddings(
            ids=tuple(orf.id for orf, _ in given),
            lengths=np.array([len(orf.protein) for orf, _ in given], dtype=np.int32),
            vectors=np.concatenate([found for _, found in given] or [_NO_ROWS]),
            per_residue=per_residue,
            failures=tuple(
                Failure(orf.id, orf.record_id, reasons[orf.copy_of])
                for orf in copies
                if orf.copy_of in reasons
            ),
        )

    def _source_of(self, ordinal: int) -> _Source:
        return self._sources[bisect_right(self._sources, ordinal, key=lambda s: s.first) - 1]


_NO_ROWS = np.empty((0, 0), dtype=np.float32)
