"""How a head remembers what it was trained on, without holding a sequence or a name of it."""

from __future__ import annotations

import hashlib

_N_BYTES = 8


def record_digest(sequence: str) -> int:
    """Of the bases, whatever their case. Fits into a uint64.

    >>> record_digest("acgt") == record_digest("ACGT")
    True
    """
    return _digest(sequence.upper())


def group_digest(name: str) -> int:
    """Of a group's name, to the letter. Fits into a uint64."""
    return _digest(name)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_N_BYTES).digest(), "little")
