"""Write ``features.h5``: all vectors of a store in one HDF5 file that needs no other file.

The file is written as a stream, so memory contains the ids of one feature file and a block of
vectors. HDF5 creates the layout, and writes ids, lengths and attributes. The vectors are copied
unconverted to the space that HDF5 reserved for them. The file appears atomically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import announce, format_bytes, printable
from virnucpro.core.recipe import EncoderSpec
from virnucpro.store.feature_file import (
    find_vectors,
    open_reader,
    read_table,
    verify,
)
from virnucpro.store.feature_index import IndexPart, shared_attributes
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.hdf5_layout import ALIGNMENT, new_hdf5_in, reserve_vectors, text_type

if TYPE_CHECKING:
    import h5py

# Maximum vector bytes in ``features.h5``: some 780,000 proteins at 1,280 dimensions. The file
# stores vectors a second time, and every resume rewrites it.
MAX_BYTES = 4 * 10**9


def write_merged(
    store: FeatureStore, parts: Sequence[IndexPart], max_bytes: int | None = None
) -> dict[str, str]:
    """Write ``features.h5``, or delete it if its vectors would exceed ``max_bytes``.

    Args:
        max_bytes: None: ``MAX_BYTES``.

    Returns:
        The checksum of each feature file that was read, by name.

    Raises:
        FeatureFileError: a feature file is missing or corrupt.
        OutputError, StorageError: the file cannot be written.
    """
    max_bytes = MAX_BYTES if max_bytes is None else max_bytes
    n_bytes = sum(part.n_shown_rows for part in parts) * _row_bytes(store.encoder)
    if n_bytes > max_bytes:
        store.tree.delete(store.index)
        announce(
            f"{printable(store.index.name)} is not written: the vectors have "
            f"{format_bytes(n_bytes)}, "
            f"and its limit is {format_bytes(max_bytes)}. Read {_reading_hint(store)}"
        )
        return {}
    merged = [part for part in parts if part.orfs]
    with store.tree.atomic_write(store.index) as out:
        return _write(out, store, parts, merged)


def _reading_hint(store: FeatureStore) -> str:
    """Say how to read the vectors without ``features.h5``. Python reads the first encoder's."""
    root = store.tree.root
    files = f"the files {printable(store.folder.relative_to(root))}/*.h5 one by one"
    if store.folder.parent != root:
        return files
    name = "read_features" if store.encoder.per_residue else "iter_features"
    return f"{files}, or use virnucpro.{name}({printable(root)!r})"


def _row_bytes(encoder: EncoderSpec) -> int:
    return encoder.dim * (2 if encoder.store == "bfloat16" else 4)


def _write(
    out: BinaryIO, store: FeatureStore, parts: Sequence[IndexPart], merged: Sequence[IndexPart]
) -> dict[str, str]:
    hashes: dict[str, str] = {}
    n_orfs = [sum(end - first for first, end in part.orfs) for part in merged]
    shape = (sum(part.n_shown_rows for part in merged), store.encoder.dim)
    with new_hdf5_in(out, ALIGNMENT) as h5:
        h5.attrs.update(shared_attributes(store, parts))
        h5.create_dataset("ids", (sum(n_orfs),), text_type())
        h5.create_dataset("lengths", (sum(n_orfs),), np.int32)
        position = reserve_vectors(h5, "embeddings", shape, store.encoder.store)
        for part, first in zip(merged, accumulate(n_orfs, initial=0), strict=False):
            hashes[part.name] = _copy_names(h5, store, part, first)
            out.seek(position)
            for block in _stored_rows(store, part):
                out.write(block)
                position += len(block)
    return hashes


def _copy_names(h5: h5py.File, store: FeatureStore, part: IndexPart, first: int) -> str:
    """Verify a file, and copy its ids and lengths from row ``first`` on.

    Returns:
        The file's checksum.
    """
    path = store.folder / part.name
    attributes = {"fingerprint": store.fingerprint}
    checksums = verify(path, attributes)
    table = read_table(path, attributes)
    ids = table.encoded_ids.to_bytes()
    if (len(ids), part.dim) != (part.n_orfs, store.encoder.dim):
        raise FeatureFileError(f"{printable(path)} is not the file whose rows were counted")
    for begin, end in part.orfs:
        rows = slice(first, first + end - begin)
        h5["ids"][rows] = ids[begin:end]
        h5["lengths"][rows] = table.lengths[begin:end]
        first = rows.stop
    return checksums.file


def _stored_rows(store: FeatureStore, part: IndexPart) -> Iterator[bytes]:
    """Yield the bytes of the vectors that count in a verified file, in blocks.

    Raises:
        FeatureFileError: the file is missing, or has changed.
    """
    path = store.folder / part.name
    row_bytes = _row_bytes(store.encoder)
    start = find_vectors(path)
    block_bytes = 1 << 22  # bytes per copy
    with open_reader(path), path.open("rb") as source:
        for first, end in part.rows:
            source.seek(start + first * row_bytes)
            n_left = (end - first) * row_bytes
            while n_left:
                block = source.read(min(n_left, block_bytes))
                if not block:
                    raise ValueError("it is cut short")
                n_left -= len(block)
                yield block
