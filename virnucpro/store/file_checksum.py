"""Checksums of files, which find damage on disk. Each is written with its algorithm.

New files have XXH3-128 (github.com/Cyan4973/xxHash), which reads more than 10 GB per second where
SHA-256 reads one or two. Both have so many bits that random damage passes unseen once in more than
10^38 times. Neither stops an attacker, who can replace a checksum with its file. SHA-256 of earlier
files has no prefix, and is verified as before.

>>> checksum_of([b"abc"])
'xxh3-128:06b05ab6733a618578af5f94892f3950'
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

import xxhash

ALGORITHM = "xxh3-128"


class Digest(Protocol):
    """A checksum of the bytes so far."""

    def update(self, content: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class Checksum:
    """A checksum that is computed block by block.

    Args:
        like: a checksum whose algorithm is used. By default, that of new files.

    Raises:
        ValueError: the algorithm of ``like`` is unknown.
    """

    def __init__(self, like: str = f"{ALGORITHM}:") -> None:
        algorithm, separator, _ = like.rpartition(":")
        if algorithm not in ("", ALGORITHM):
            raise ValueError(f"its checksum has the unknown algorithm {algorithm}")
        self._prefix = algorithm + separator
        self._digest: Digest = xxhash.xxh3_128() if algorithm else hashlib.sha256()

    def update(self, content: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._digest.update(content)

    @property
    def text(self) -> str:
        """Return the algorithm and the digits of the bytes so far."""
        return self._prefix + self._digest.hexdigest()


def checksum_of(parts: Iterable[bytes], like: str = f"{ALGORITHM}:") -> str:
    """Return the checksum of the concatenated parts. ``like``: see ``Checksum``."""
    checksum = Checksum(like)
    for part in parts:
        checksum.update(part)
    return checksum.text
