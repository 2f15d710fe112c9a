"""The listed hashes of the built-in files, and the files that are hashed nevertheless."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
from hash_builtin_files import FILES, list_builtin_hashes

from virnucpro.core import builtin_hashes
from virnucpro.core.atomic_io import EMBEDDED_FOLDER, hash_file
from virnucpro.core.builtin_hashes import LIST, hash_weights


def map_file(path: Path) -> mmap:
    with path.open("rb") as handle:
        return mmap(handle.fileno(), 0, access=ACCESS_READ)


def test_list_is_that_of_the_files():
    assert LIST.read_text(encoding="utf-8") == list_builtin_hashes(), (
        "run scripts/weights/hash_builtin_files.py"
    )


@pytest.mark.parametrize("name", FILES)
def test_listed_file_is_not_hashed_with_sha256(name: str, monkeypatch: pytest.MonkeyPatch):
    path = EMBEDDED_FOLDER / name
    expected = hash_file(path)
    monkeypatch.setattr(builtin_hashes, "sha256", None)
    assert hash_weights(name, map_file(path)) == expected


@pytest.mark.parametrize("position", [0, 10_000_001, -1])
def test_file_with_one_flipped_bit_is_hashed_with_sha256(position: int, tmp_path: Path):
    name = FILES[0]
    content = bytearray((EMBEDDED_FOLDER / name).read_bytes())
    content[position] ^= 1
    path = tmp_path / name
    path.write_bytes(content)
    assert hash_weights(name, map_file(path)) == hash_file(path)
    assert hash_file(path) != hash_file(EMBEDDED_FOLDER / name)
