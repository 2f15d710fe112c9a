"""HDF5 files whose vectors are written without HDF5, and numbers rounded to bfloat16."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

from virnucpro.core.numeric import from_bfloat16, to_bfloat16
from virnucpro.store.hdf5_layout import (
    ALIGNMENT,
    SparseFile,
    StoredVectors,
    new_hdf5_in,
    reserve_vectors,
)

PAGES = 1 << 17  # bytes: more than a page of a sparse file


def test_sparse_file_reads_as_zeros_where_nothing_was_written() -> None:
    file = SparseFile()
    file.seek(PAGES - 2)
    file.write(b"abcd")
    assert file.tell() == PAGES + 2
    assert file.seek(0, 2) == PAGES + 2
    file.seek(PAGES - 4)
    assert file.read() == b"\0\0abcd"


def test_sparse_file_takes_no_memory_for_its_gaps() -> None:
    file = SparseFile()
    file.seek(1 << 50)
    file.write(b"end")
    file.seek((1 << 50) - 2)
    assert file.read(4) == b"\0\0en"


def test_truncated_sparse_file_ends_in_zeros() -> None:
    file = SparseFile()
    file.write(b"head")
    file.truncate(7)
    file.seek(0)
    assert file.read() == b"head\0\0\0"


def test_vectors_stand_in_the_blocks_at_their_offsets() -> None:
    file = SparseFile()
    file.write(b"headtailEND")
    vectors = StoredVectors(np.frombuffer(b"TAIL", dtype=np.float32).reshape(1, 1), "float32")
    assert [bytes(block) for block in file.blocks({4: vectors})] == [b"head", b"TAIL", b"END"]


@pytest.mark.parametrize("store", ["float32", "bfloat16"])
def test_hdf5_reads_vectors_that_were_written_without_it(tmp_path, store) -> None:
    values = np.linspace(-3, 3, 6 * 700, dtype=np.float32).reshape(6, 700)
    layout = SparseFile()
    with new_hdf5_in(layout, ALIGNMENT) as h5:
        h5["before"] = [1, 2, 3]
        offset = reserve_vectors(h5, "vectors", values.shape, store)
        h5["after"] = [4.0]
    path = tmp_path / "file.h5"
    path.write_bytes(b"".join(layout.blocks({offset: StoredVectors(values, store)})))
    assert offset % ALIGNMENT == 0
    with h5py.File(path) as h5:
        expected = values if store == "float32" else from_bfloat16(to_bfloat16(values))
        assert np.array_equal(h5["vectors"][:], expected)
        assert h5["before"][:].tolist() == [1, 2, 3]
        assert h5["after"][:].tolist() == [4.0]


def test_bfloat16_is_rounded_to_nearest_even_as_torch_does() -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, 50_000, dtype=np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    numbers = np.concatenate([bits, ties, [0, 0x80000000, 1]]).astype(np.uint32).view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    rounded = torch.from_numpy(numbers.copy()).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(numbers), rounded)
    assert to_bfloat16(numbers[:0]).shape == (0,)
