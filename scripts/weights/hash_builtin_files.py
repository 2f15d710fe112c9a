"""List the hashes of the large built-in files: virnucpro/embedded/sha256.json.

    python scripts/weights/hash_builtin_files.py virnucpro/embedded/sha256.json

Run it after a scorer or an index of known viruses was replaced.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import xxhash

from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.core.builtin_hashes import BuiltinHash

FILES = ("known.safetensors", "scorer.safetensors")


def hash_builtin_file(path: Path) -> BuiltinHash:
    content = path.read_bytes()
    return BuiltinHash(xxhash.xxh3_128_hexdigest(content), sha256(content).hexdigest())


def list_builtin_hashes() -> str:
    """Return the list as JSON."""
    hashes = {name: hash_builtin_file(EMBEDDED_FOLDER / name)._asdict() for name in FILES}
    return json.dumps(hashes, indent=1) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    Path(sys.argv[1]).write_text(list_builtin_hashes(), encoding="utf-8")
