"""SHA-256 of the large built-in files, for a fraction of its cost.

Every run records these hashes, but hashing 50 MB with SHA-256 takes longer than scoring a few
contigs. The package lists the SHA-256 of each file with its XXH3-128, which also reads every byte,
but several times as fast. A file with another XXH3-128, such as a scorer that was trained again, is
hashed with SHA-256.

``scripts/weights/hash_builtin_files.py`` writes the list. A test compares it with the files.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from mmap import mmap
from typing import NamedTuple

import xxhash

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, read_json

LIST = EMBEDDED_FOLDER / "sha256.json"


class BuiltinHash(NamedTuple):
    """The hashes of a built-in file, in hexadecimal digits."""

    xxh3_128: str
    sha256: str


def hash_weights(name: str, content: mmap) -> str:
    """Return the SHA-256 of a file of weights.

    Args:
        name: the name of the file, by which the package may list it.
        content: its bytes.

    Raises:
        OSError, LookupError, ValueError, TypeError: the list of hashes is missing or damaged.
    """
    listed = load_builtin_hashes().get(name)
    if listed is not None and listed.xxh3_128 == xxhash.xxh3_128_hexdigest(content):
        return listed.sha256
    return sha256(content).hexdigest()


@cache
def load_builtin_hashes() -> dict[str, BuiltinHash]:
    """Return the listed hashes, by file name.

    Raises:
        OSError, LookupError, ValueError, TypeError: the list is missing or damaged.
    """
    return {name: BuiltinHash(**hashes) for name, hashes in read_json(LIST).items()}
