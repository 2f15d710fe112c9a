"""Keep the names that a run derives apart from the ids of its records.

A derived name gets a number if a record of the run has it as its id. Which names are taken depends
on all ids of the run and on nothing else, so every process of a run derives the same names. A later
``--resume`` with more records may take more names.
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
    """The ids of a run that are also derived names of other records, by their digests."""

    names: Digests = field(default_factory=_none)  # (n,), sorted
    owners: Digests = field(default_factory=_none)  # (n,), of these other records, sorted

    def __bool__(self) -> bool:
        return len(self.names) > 0

    @property
    def key(self) -> str:
        """A hash of the names; "" if there are none."""
        return sha256(self.names.tobytes()).hexdigest() if self else ""

    def concern(self, ids: Sequence[str]) -> BoolArray:
        """Whether a derived name of each of these records may be taken. (n,)"""
        mask: BoolArray = np.isin(id_digests(ids), self.owners)
        return mask

    def free_suffix(self, ids: Iterable[str], suffix: str, endings: Sequence[str] = ("",)) -> str:
        """The suffix, with the first number that makes no name taken.

        Args:
            ids: the ids of the record, in the run and in its file.
            suffix: what the derived name has behind the id.
            endings: what may follow.
        """
        own = tuple(ids)
        numbered = (suffix if number == 1 else f"{suffix}_{number}" for number in count(1))
        return next(
            free
            for free in numbered
            if not self._contains([f"{name}{free}{end}" for name in own for end in endings])
        )

    def _contains(self, names: Sequence[str]) -> bool:
        return bool(np.isin(id_digests(names), self.names).any())


NONE_TAKEN = TakenNames()


def find_taken_names(blocks: Iterable[Records]) -> TakenNames:
    """Find the taken names among the ids of all records of a run, and the ids in their files.

    Memory holds 8 bytes per id.
    """
    ids, names, owners = array("Q"), array("Q"), array("Q")
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
