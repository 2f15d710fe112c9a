"""The listed hashes of the built-in files, and the files that are hashed nevertheless."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
from hash_builtin_files import FILES, list_builtin_hashes

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, hash_file
from virnucpro.core.builtin_hashes import LIST, hash_sample, hash_tensor_file, load_builtin_hashes
from virnucpro.viral.networks import load_tensors


def map_file(path: Path) -> mmap:
    with path.open("rb") as handle:
        return mmap(handle.fileno(), 0, access=ACCESS_READ)


@pytest.mark.parametrize("name", FILES)
def test_listed_hash_is_that_of_the_file(name: str):
    assert LIST.read_text(encoding="utf-8") == list_builtin_hashes(), (
        "run scripts/weights/hash_builtin_files.py"
    )
    file = load_tensors(EMBEDDED_FOLDER / name)
    assert file.hash() == load_builtin_hashes()[name].sha256 == hash_file(file.path)


def test_file_elsewhere_is_hashed(tmp_path: Path):
    """Although its size, its header and its sample are those of the built-in file."""
    name = FILES[0]
    builtin = load_tensors(EMBEDDED_FOLDER / name)
    content = bytearray(builtin.content)
    content[builtin.n_header + 1] ^= 1
    path = tmp_path / name
    path.write_bytes(content)
    copy = load_tensors(path)
    assert hash_sample(copy.content, copy.n_header) == load_builtin_hashes()[name].sample
    assert copy.hash() == hash_file(path) != builtin.hash()


@pytest.mark.parametrize("is_in_header", [True, False])
def test_replaced_builtin_file_is_hashed(is_in_header: bool, tmp_path: Path):
    name = FILES[0]
    builtin = load_tensors(EMBEDDED_FOLDER / name)
    content = bytearray(builtin.content)
    content[builtin.n_header - is_in_header] ^= 1
    path = tmp_path / name
    path.write_bytes(content)
    digest = hash_tensor_file(builtin.path, map_file(path), builtin.n_header)
    assert digest == hash_file(path) != builtin.hash()


def test_file_of_another_size_is_hashed(tmp_path: Path):
    builtin = load_tensors(EMBEDDED_FOLDER / FILES[0])
    path = tmp_path / FILES[0]
    path.write_bytes(builtin.content[:] + b"\n")
    digest = hash_tensor_file(builtin.path, map_file(path), builtin.n_header)
    assert digest == hash_file(path) != builtin.hash()
