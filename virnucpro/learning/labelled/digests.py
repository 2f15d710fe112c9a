"""Digests by which a head recognises its training data, without a sequence or a name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_N_BYTES = 8


def record_digest(sequence: str) -> int:
    """A hash of the bases, whatever their case. Fits into a uint64.

    >>> record_digest("acgt") == record_digest("ACGT")
    True
    """
    return _digest(sequence.upper())


def group_digest(name: str) -> int:
    """A hash of a group's name, to the letter. Fits into a uint64."""
    return _digest(name)


@dataclass(frozen=True, slots=True)
class TrainingDigests:
    """Digests of the records that something was trained on, and of their groups."""

    records: frozenset[int]
    groups: frozenset[int]

    @classmethod
    def of(cls, records: NDArray[np.uint64], groups: NDArray[np.uint64]) -> TrainingDigests:
        return cls(frozenset(records.tolist()), frozenset(groups.tolist()))

    def __bool__(self) -> bool:
        return bool(self.records or self.groups)

    def has(self, record: int, group: str) -> bool:
        """Whether a record was trained on, by its digest, or others of its group were."""
        return record in self.records or group_digest(group) in self.groups


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_N_BYTES).digest(), "little")
