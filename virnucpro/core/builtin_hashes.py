"""SHA-256 of the large built-in files, without reading them to their ends.

Every run records these hashes, but hashing 50 MB takes longer than scoring a few contigs. The
package lists the hashes, and a run recognises the files by a sample of their bytes. Files that it
does not recognise, such as a scorer that was trained again, are hashed.

``scripts/weights/hash_builtin_files.py`` writes the list. A test compares it with the files.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, read_json

LIST = EMBEDDED_FOLDER / "sha256.json"


class BuiltinHash(NamedTuple):
    """The hashes of a built-in file."""

    sample: str  # SHA-256 of a sample of its bytes
    sha256: str


def hash_tensor_file(path: Path, content: mmap, n_header: int) -> str:
    """Return the SHA-256 of a safetensors file.

    Args:
        path: the file.
        content: its bytes.
        n_header: bytes before the tensors.

    Raises:
        OSError, LookupError, ValueError, TypeError: the list of hashes is missing or damaged.
    """
    listed = load_builtin_hashes().get(path.name) if path.parent == EMBEDDED_FOLDER else None
    if listed is not None and listed.sample == hash_sample(content, n_header):
        return listed.sha256
    return sha256(content).hexdigest()


def hash_sample(content: mmap, n_header: int) -> str:
    """Return the SHA-256 of a file's size, of its header, and of one in 2^18 of its other bytes.

    The header has calibrations and measurements, which are those of one training.
    """
    sample = content[n_header :: 1 << 18]
    return sha256(b"%d\n%b%b" % (len(content), content[:n_header], sample)).hexdigest()


@cache
def load_builtin_hashes() -> dict[str, BuiltinHash]:
    """Return the listed hashes, by file name.

    Raises:
        OSError, LookupError, ValueError, TypeError: the list is missing or damaged.
    """
    return {name: BuiltinHash(**hashes) for name, hashes in read_json(LIST).items()}
