"""Prevent collisions between the names that a run derives and the ids of its records.

A derived name gets a number if a record in the run has it as its id. Which names are taken depends
only on all ids in the run, so every process derives the same names. A later ``--resume`` with more
records may take more names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.numeric import BoolArray
from virnucpro.core.types import Records
from virnucpro.sequences.derived_names import original_name
from virnucpro.sequences.samples import id_digests

Digests = NDArray[np.uint64]


def _none() -> Digests:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class TakenNames:
    """Digests of the run's ids that are also derived names of other records."""

    names: Digests = field(default_factory=_none)  # (n,), sorted
    owners: Digests = field(default_factory=_none)  # (n,), ids of those other records, sorted

    def __bool__(self) -> bool:
        return len(self.names) > 0

    @property
    def key(self) -> str:
        """Return a hash of the names, or "" without names."""
        return sha256(self.names.tobytes()).hexdigest() if self else ""

    def concern(self, ids: Sequence[str]) -> BoolArray:
        """Return a mask of the records for which a derived name may be taken. (n,)"""
        mask: BoolArray = np.isin(id_digests(ids), self.owners)
        return mask

    def free_suffix(self, ids: Iterable[str], suffix: str, endings: Sequence[str] = ("",)) -> str:
        """Return the suffix, with the first number for which no derived name is taken.

        Args:
            ids: the record's ids, in the run and in its file.
            suffix: the part of the derived name after the id.
            endings: parts that may follow the suffix.
        """
        own_ids = tuple(ids)
        candidate = suffix
        for number in count(2):
            names = [f"{own_id}{candidate}{end}" for own_id in own_ids for end in endings]
            if not self._contains(names):
                break
            candidate = f"{suffix}_{number}"
        return candidate

    def _contains(self, names: Sequence[str]) -> bool:
        return bool(np.isin(id_digests(names), self.names).any())


NO_TAKEN_NAMES = TakenNames()


def find_taken_names(blocks: Iterable[Records]) -> TakenNames:
    """Find the taken names among all ids of a run, including ids in the files.

    Memory contains 8 bytes per id.
    """
    ids = array("Q")
    names = array("Q")
    owners = array("Q")
    for records in blocks:
        for column in (records.ids, records.names) if any(records.own_ids) else (records.ids,):
            ids.frombytes(id_digests(column).tobytes())
            derived = {name: owner for name in column if (owner := original_name(name))}
            if derived:
                names.frombytes(id_digests([*derived]).tobytes())
                owners.frombytes(id_digests([*derived.values()]).tobytes())
    all_owners = np.frombuffer(owners, dtype=np.uint64)
    is_taken = np.isin(all_owners, np.frombuffer(ids, dtype=np.uint64))
    all_names = np.frombuffer(names, dtype=np.uint64)
    return TakenNames(np.unique(all_names[is_taken]), np.unique(all_owners[is_taken]))
