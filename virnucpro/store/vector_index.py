"""Write and read the index of a store: where the vector of each id is, in input order.

``features/index.parquet`` has a row per vector: id, feature file, row in it, first residue row,
length, and the SHA-256 of the sequence. ``features/lookup.npy`` finds the position of an id by a
binary search, so that no reader needs all ids in memory. Both are built from the tables at the ends
of the feature files, one shard at a time.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, blake2s
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import FeatureFileError, InputMissingError, UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.sequences.orfs import Texts, digest_texts
from virnucpro.store.feature_file import OrfTable, id_text, open_reader, read_table
from virnucpro.store.feature_index import IndexPart, read_parts
from virnucpro.store.feature_store import FeatureStore

if TYPE_CHECKING:
    import pyarrow as pa

_LOOKUP = "lookup_sha256"  # in the metadata of the Parquet file: see ``LookupLabel``
_REWRITE = with_options("repeat the command of the run with {resume} to write it again")


@dataclass(frozen=True, slots=True, eq=False)
class IndexRows:
    """Vectors in input order. All columns have a value for each vector."""

    ids: pa.StringArray
    digests: NDArray[np.uint64]  # (n, 2), of the ids
    part: NDArray[np.int32]  # position in the list of feature files
    row: NDArray[np.int64]  # row of the ORF in the file
    residue: NDArray[np.int64]  # first row of the ORF in the file's vectors per residue
    length: NDArray[np.int32]  # residues
    sha256: NDArray[np.uint8]  # (n, 32), of the sequence


def write_index(store: FeatureStore, parts: Sequence[IndexPart]) -> None:
    """Write the index of a finished run's vectors.

    Memory contains one row group, and 40 bytes per vector while the lookup is sorted.

    Args:
        parts: the feature files, in order.

    Raises:
        FeatureFileError: the table of a feature file is missing or corrupt.
        OutputError, StorageError: the index cannot be written.
    """
    from pyarrow import parquet

    names = [part.name for part in parts]
    digests = bytearray()
    with store.tree.atomic_write(store.vector_index) as out:
        schema = _schema(store)
        with parquet.ParquetWriter(out, schema, **_writing_options()) as writer:
            for batch in _batches(_index_rows(store, parts)):
                writer.write_table(_to_table(batch, names, schema))
                digests += b"".join(rows.digests.tobytes() for rows in batch)
            sha256 = _write_lookup(store, np.frombuffer(digests, dtype="<u8").reshape(-1, 2))
            writer.add_key_value_metadata({_LOOKUP: f"blake2s:{sha256}"})


def _index_rows(store: FeatureStore, parts: Sequence[IndexPart]) -> Iterator[IndexRows]:
    """Yield the rows of each shard, copies included, in input order."""
    numbered = enumerate(parts)
    for _, shard_parts in groupby(numbered, key=lambda item: item[1].place[0]):
        yield _shard_rows(store, list(shard_parts))


def _shard_rows(store: FeatureStore, parts: Sequence[tuple[int, IndexPart]]) -> IndexRows:
    """Merge the ORFs in the files of a shard: originals, copies, or both."""
    import pyarrow as pa

    attributes = {"fingerprint": store.fingerprint}
    tables = [read_table(store.folder / part.name, attributes) for _, part in parts]
    for (_, part), table in zip(parts, tables, strict=True):
        if not len(table.encoded_ids) == len(table.sequence_sha256) == part.n_orfs:
            raise FeatureFileError(
                f"{printable(store.folder / part.name)} is not the file whose rows were counted"
            )
    order = np.argsort(np.concatenate([_sort_keys(table) for table in tables]), kind="stable")
    is_shown = np.concatenate([_shown_mask(part) for _, part in parts])
    order = order[is_shown[order]]
    ids = [_to_utf8(table.encoded_ids) for table in tables]
    number = [np.full(part.n_orfs, index, np.int32) for index, part in parts]
    row = [np.arange(part.n_orfs, dtype=np.int64) for _, part in parts]
    residue = [np.cumsum(table.lengths, dtype=np.int64) - table.lengths for table in tables]
    return IndexRows(
        ids=pa.concat_arrays(list(map(_to_text_array, ids))).take(_to_array(pa.int64(), order)),
        digests=np.concatenate(list(map(digest_texts, ids)))[order],
        part=np.concatenate(number)[order],
        row=np.concatenate(row)[order],
        residue=np.concatenate(residue)[order],
        length=np.concatenate([table.lengths for table in tables])[order],
        sha256=np.concatenate([table.sequence_sha256 for table in tables])[order],
    )


def _sort_keys(table: OrfTable) -> NDArray[np.int64]:
    """Return keys that sort a shard's copies between its originals."""
    if len(table.n_before):
        return 2 * table.n_before.astype(np.int64)
    return 2 * np.arange(len(table.encoded_ids), dtype=np.int64) + 1


def _shown_mask(part: IndexPart) -> NDArray[np.bool_]:
    mask = np.zeros(part.n_orfs, dtype=np.bool_)
    for first, end in part.orfs:
        mask[first:end] = True
    return mask


def _to_utf8(encoded_ids: Texts) -> Texts:
    """Return the ids as Parquet has them: see ``id_text``."""
    if encoded_ids.letters.tobytes().isascii():
        return encoded_ids
    texts = encoded_ids.to_bytes()
    return Texts.from_strings(text.decode("utf-8", "backslashreplace") for text in texts)


def _batches(rows: Iterator[IndexRows]) -> Iterator[list[IndexRows]]:
    """Collect the rows of shards for a row group. The last group may be smaller, or empty."""
    rows_per_group = 1 << 18  # of the Parquet file, which are in memory at once
    batch: list[IndexRows] = []
    n_rows = 0
    for shard_rows in rows:
        batch.append(shard_rows)
        n_rows += len(shard_rows.row)
        if n_rows >= rows_per_group:
            yield batch
            batch = []
            n_rows = 0
    if batch:
        yield batch


def _schema(store: FeatureStore) -> pa.Schema:
    import pyarrow as pa

    encoder = store.encoder
    facts = {
        "model": encoder.model,
        "layer": str(encoder.layer),
        "pooling": encoder.pooling,
        "precision": encoder.precision,
        "store": encoder.store,
        "dim": str(encoder.dim),
        "fingerprint": store.fingerprint,
    }
    fields = [
        pa.field("id", pa.string(), nullable=False),
        pa.field("part", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("residue", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),
    ]
    return pa.schema(fields, metadata=facts)


def _writing_options() -> dict[str, Any]:
    numbers = ("row", "residue", "length")
    return {
        "compression": "zstd",
        "use_dictionary": ["part"],
        "write_statistics": ["part", *numbers],  # ids and digests are in no order
        "column_encoding": dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
        "write_page_checksum": True,
    }


def _to_table(batch: Sequence[IndexRows], names: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Make a row group. Arrays come from buffers: ``pyarrow.array`` would import pandas, if it is
    installed, which takes most of a second.
    """
    import pyarrow as pa

    part = np.concatenate([rows.part for rows in batch])
    first = part.min(initial=len(names))
    part_names = _to_text_array(Texts.from_strings(names[first : part.max(initial=-1) + 1]))
    columns = [
        pa.chunked_array([rows.ids for rows in batch], pa.string()),
        pa.DictionaryArray.from_arrays(_to_array(pa.int32(), part - first), part_names),
        _to_array(pa.int64(), np.concatenate([rows.row for rows in batch])),
        _to_array(pa.int64(), np.concatenate([rows.residue for rows in batch])),
        _to_array(pa.int32(), np.concatenate([rows.length for rows in batch])),
        _to_array(pa.binary(32), np.concatenate([rows.sha256 for rows in batch])),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _to_array(kind: pa.DataType, values: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.tobytes())])


def _to_text_array(texts: Texts) -> pa.StringArray:
    """Return texts in UTF-8, of less than 2 GB in total, as an Arrow array."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(texts.bounds), pa.py_buffer(texts.letters)]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers).cast(pa.string())


# The lookup


def _write_lookup(store: FeatureStore, digests: NDArray[np.uint64]) -> str:
    """Write three rows: sorted first halves, their positions, and second halves by position.

    Returns:
        The SHA-256 of the file.
    """
    order = np.argsort(digests[:, 0], kind="stable")
    header = io.BytesIO()
    shape = {"descr": "<u8", "fortran_order": False, "shape": (3, len(digests))}
    np.lib.format.write_array_header_1_0(header, shape)
    sha256 = hashlib.sha256()
    with store.tree.atomic_write(store.lookup) as out:
        rows = (digests[order, 0], order, digests[:, 1])
        for block in (header.getvalue(), *(row.astype("<u8").tobytes() for row in rows)):
            sha256.update(block)
            out.write(block)
    return sha256.hexdigest()


def _blake2s(text: bytes) -> bytes:
    """Return the digest that ``digest_texts`` computes."""
    return blake2s(text).digest()[:16]


def _blake2b(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


_DIGESTS = {"blake2s": _blake2s, "blake2b": _blake2b}


class LookupLabel(NamedTuple):
    """What the index says of its lookup."""

    digest: str  # name of the digest of ids
    sha256: str  # of the file

    @classmethod
    def read(cls, index: Path) -> LookupLabel:
        """Read the label in an index.

        Raises:
            LookupError, ValueError: the index has no such label.
        """
        from pyarrow import parquet

        metadata = parquet.read_metadata(index).metadata or {}
        text = str(metadata[_LOOKUP.encode()], "ascii")
        match = re.fullmatch(rf"(?:({'|'.join(_DIGESTS)}):)?([0-9a-f]{{64}})", text)
        if match is None:
            raise ValueError(f"{text!r} is no label of a lookup")
        return cls(match[1] or "blake2b", match[2])  # an earlier version wrote no name


class Lookup:
    """Finds the position of an id. The file is mapped into memory, not read."""

    def __init__(self, path: Path, n_vectors: int, label: LookupLabel) -> None:
        self.path = path
        self.sha256 = label.sha256
        self._digest = _DIGESTS[label.digest]
        with open_reader(path):
            mode: Literal["r"] | None = "r" if n_vectors else None  # nothing cannot be mapped
            content: NDArray[np.uint64] = np.load(path, mmap_mode=mode, allow_pickle=False)
            if content.shape != (3, n_vectors) or content.dtype != np.uint64:
                raise ValueError(f"it has shape {content.shape}, not {(3, n_vectors)}")
        self._keys = content[0]
        self._positions = content[1]
        self._second_halves = content[2]

    def find(self, orf_id: str) -> int | None:
        """Return the position of an id, or None if the run has no such vector.

        Raises:
            FeatureFileError: the lookup is corrupt.
            UsageError: several ids have the same text.
        """
        first_half, second_half = np.frombuffer(self._digest(id_text(orf_id).encode()), dtype="<u8")
        found: list[int] = []
        index = int(np.searchsorted(self._keys, first_half))
        while index < len(self._keys) and self._keys[index] == first_half:
            position = int(self._positions[index])
            if position >= len(self._keys):
                raise self._damaged()
            if self._second_halves[position] == second_half:
                found.append(position)
            index += 1
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} ids read {printable(orf_id)}", hint="use their positions instead"
            )
        return found[0] if found else None

    def check(self) -> None:
        """Check every bit of the lookup, so that an id it does not find is not in the run.

        Raises:
            FeatureFileError: the lookup is corrupt.
        """
        with open_reader(self.path):
            if hash_file(self.path) != self.sha256:
                raise self._damaged()

    def _damaged(self) -> FeatureFileError:
        return FeatureFileError(f"{printable(self.path)} is damaged or truncated", hint=_REWRITE)


# Reading


@dataclass(frozen=True, slots=True, eq=False)
class VectorIndex:
    """The positions of a run's vectors. Ids and digests stay on disk until they are read."""

    path: Path
    parts: tuple[IndexPart, ...]
    part: NDArray[np.int32]  # (n,): see ``IndexRows``
    row: NDArray[np.int64]
    residue: NDArray[np.int64]
    length: NDArray[np.int32]
    lookup: LookupLabel

    @classmethod
    def read(cls, store: FeatureStore) -> VectorIndex:
        """Read the index of a finished run, and check it against the list of feature files.

        Raises:
            InputMissingError: the run has no index.
            FeatureFileError: the index or the list is corrupt, or they do not belong together.
        """
        path = store.vector_index
        if not path.exists():
            raise InputMissingError(f"{printable(path)} does not exist", hint=_REWRITE)
        parts = read_parts(store)
        with open_reader(path):
            table = read_columns(path, ["part", "row", "residue", "length"])
            names = [part.name for part in parts]
            index = cls(
                path=path,
                parts=tuple(parts),
                part=_part_numbers(table["part"], names),
                row=table["row"].to_numpy(),
                residue=table["residue"].to_numpy(),
                length=table["length"].to_numpy(),
                lookup=LookupLabel.read(path),
            )
            index._check()
            return index

    def _check(self) -> None:
        """Check that each row is in its part.

        Raises:
            ValueError: a row is not.
        """
        n_shown = sum(end - first for part in self.parts for first, end in part.orfs)
        if len(self.part) != n_shown:
            raise ValueError(f"it has {len(self.part)} rows for {n_shown} vectors")
        sizes = np.array([part.n_orfs for part in self.parts], dtype=np.int64)
        if len(self.part) and not ((self.row >= 0) & (self.row < sizes[self.part])).all():
            raise ValueError("a row is outside its part")
        if (self.length < 0).any() or (self.residue < 0).any():
            raise ValueError("a length is negative")

    def read_ids(self) -> pa.ChunkedArray:
        """Read all ids, as an Arrow array of text."""
        with open_reader(self.path):
            return read_columns(self.path, ["id"])["id"]

    def read_table(self) -> pa.Table:
        """Read ids, lengths and digests."""
        with open_reader(self.path):
            return read_columns(self.path, ["id", "length", "sha256"])


def read_columns(path: Path, names: list[str]) -> pa.Table:
    """Read columns of a Parquet file, and verify their checksums."""
    from pyarrow import parquet

    with path.open("rb") as handle:
        return parquet.read_table(handle, columns=names, page_checksum_verification=True)


def _part_numbers(column: pa.ChunkedArray, names: Sequence[str]) -> NDArray[np.int32]:
    """Return the position of each part in the list of names.

    Raises:
        ValueError: a part is not in the list.
    """
    positions = {name: number for number, name in enumerate(names)}
    arrays: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    for chunk in column.chunks:
        local = [positions.get(name, -1) for name in chunk.dictionary.to_pylist()]
        arrays.append(np.array(local, dtype=np.int32)[chunk.indices.to_numpy()])
    numbers = np.concatenate(arrays)
    if (numbers < 0).any():
        raise ValueError("it names a feature file that parts.json does not list")
    return numbers
