"""Digests by which a head recognises its training data, without a sequence or a name."""

from __future__ import annotations

import hashlib

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


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_N_BYTES).digest(), "little")
