"""Read the vectors of a finished run: any of them at once, or all in input order.

The index says where each vector is. Feature files are mapped into memory when they are first used.
A single vector is read without its neighbours, after a check that its file is the listed one.
Reading many in input order verifies every bit of each file.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index as to_index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import FeatureFileError, UnavailableError, UsageError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.numeric import from_bfloat16
from virnucpro.core.option_text import with_options
from virnucpro.store.feature_file import (
    Attributes,
    Label,
    open_reader,
    read_label_and_digest,
    read_table,
    verify,
)
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.resume_hint import explain_remedy
from virnucpro.store.vector_index import Lookup, VectorIndex

if TYPE_CHECKING:
    import anndata
    import pyarrow as pa

    from virnucpro.store.torch_dataset import VectorDataset

Vector: TypeAlias = NDArray[np.float32]


class StoredOutput(NamedTuple):
    """One output of a run, and where it is stored."""

    store: FeatureStore
    spec: OutputSpec
    dataset: str  # name in the feature files
    is_first: bool  # of its encoder


class VectorBatch(NamedTuple):
    """Neighbouring vectors in input order."""

    ids: tuple[str, ...]
    vectors: list[Vector] | Vector  # (n, dim), or n arrays of (residues, dim)
    lengths: NDArray[np.int32]  # (n,), residues


@dataclass(slots=True, eq=False)
class _MappedParts:
    """The feature files of a store, mapped into memory on first use."""

    output: StoredOutput
    parts: tuple[IndexPart, ...]
    mapped: OrderedDict[int, NDArray[Any]] = field(default_factory=OrderedDict)
    verified: set[int] = field(default_factory=set)
    bounds: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def rows(self, number: int) -> NDArray[Any]:
        """Return the rows of a file as they are stored: float32, or bfloat16 as uint16.

        Raises:
            FeatureFileError: the file is missing, cut short, or not the listed one.
            OutputError, StorageError: it cannot be read now.
        """
        max_mapped = 16_384  # files; Linux allows a process 65,530 mappings
        if (rows := self.mapped.get(number)) is not None:
            return rows
        with explain_remedy(self._root):
            rows = self._map(number)
        if len(self.mapped) >= max_mapped:
            self.mapped.popitem(last=False)
        self.mapped[number] = rows
        return rows

    def first_rows(self, number: int) -> NDArray[np.int64]:
        """Return the first row of each ORF in a file, and the end of the last."""
        if number not in self.bounds:
            with explain_remedy(self._root):
                lengths = read_table(self._path(number), self._attributes).lengths
            counts = self.output.spec.count_rows(lengths)
            self.bounds[number] = np.concatenate([[0], np.cumsum(counts)])
        return self.bounds[number]

    @property
    def _attributes(self) -> Attributes:
        return {"fingerprint": self.output.store.fingerprint}

    @property
    def _root(self) -> Path:
        return self.output.store.tree.root

    def _path(self, number: int) -> Path:
        return self.output.store.folder / self.parts[number].name

    def _map(self, number: int) -> NDArray[Any]:
        part = self.parts[number]
        path = self._path(number)
        label = self._read_label(path, part)
        spec = self.output.spec
        kind = np.dtype("<u2" if spec.dtype == "bfloat16" else "<f4")
        n_rows = part.n_rows if self.output.is_first else int(self.first_rows(number)[-1])
        with open_reader(path), path.open("rb") as handle:
            offset = label.offsets[self.output.dataset]
            if not n_rows:
                return np.empty((0, spec.width), kind)
            if offset + n_rows * spec.width * kind.itemsize > label.n_bytes:
                raise ValueError("its vectors are outside its content")
            content = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(content, kind, n_rows * spec.width, offset).reshape(n_rows, -1)

    def _read_label(self, path: Path, part: IndexPart) -> Label:
        label, digest = read_label_and_digest(path, self._attributes)
        if digest != part.label:
            parts = self.output.store.parts
            raise FeatureFileError(
                f"{printable(path)} is not the file that {printable(parts)} lists",
                hint=with_options(
                    "repeat the command of the run with {resume} to make what is missing"
                ),
            )
        return label

    def verify(self, number: int) -> None:
        """Verify every bit of a file, once.

        Raises:
            FeatureFileError: the file is corrupt.
        """
        if number in self.verified:
            return
        path = self._path(number)
        with explain_remedy(self._root):
            self._read_label(path, self.parts[number])
            verify(path, self._attributes)
        self.verified.add(number)


class VectorIds(Sequence[str]):
    """The ids of a run's vectors, in input order. They stay in Arrow's memory."""

    def __init__(self, values: pa.ChunkedArray, lookup: Lookup) -> None:
        self._values = values
        self._lookup = lookup

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, key: int) -> str: ...
    @overload
    def __getitem__(self, key: slice) -> list[str]: ...
    def __getitem__(self, key: int | slice) -> str | list[str]:
        if isinstance(key, slice):
            values: list[str] = self._values[key].to_pylist()
            return values
        return str(self._values[to_index(key)])

    def __iter__(self) -> Iterator[str]:
        for chunk in self._values.chunks:
            yield from chunk.to_pylist()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._lookup.find(name) is not None

    def __repr__(self) -> str:
        return f"<{len(self):,} ids>"


class Vectors:
    """The vectors of a finished run, in input order. ``virnucpro.open`` returns them.

    ``run["P12345"]`` and ``run[5]`` are float32 of the shape (dim,), or (residues, dim) for vectors
    per residue, (residues, residues) for contacts, and () for a perplexity. ``run[10:20]`` and
    ``run[[3, 1]]`` are several: an array (n, dim), or a list where shapes differ. Nothing is read
    before it is asked for, and a single vector is read without its neighbours.

    A missing, replaced or truncated feature file raises FeatureFileError, which names it and the
    command that makes it again.
    Everything that reads many vectors (``batches``, ``to_arrow``, ``to_anndata``,
    ``torch_dataset``, exports) also verifies every bit.
    """

    def __init__(self, outputs: Mapping[str, StoredOutput], name: str) -> None:
        output = outputs[name]
        self.folder = output.store.tree.root
        self.encoder = output.store.encoder
        self.spec = output.spec
        self.name = name
        self._store = output.store
        self._outputs = outputs
        self._index = VectorIndex.read(output.store)
        self._files = _MappedParts(output, self._index.parts)

    def __repr__(self) -> str:
        return f"<{len(self):,} vectors {self.name} of {self.dim} numbers in {str(self.folder)!r}>"

    def __len__(self) -> int:
        """Return the number of ids that have a vector."""
        return len(self._index.part)

    @property
    def dim(self) -> int:
        """Return the numbers per vector."""
        return self.spec.width

    @property
    def has_one_row(self) -> bool:
        """Return True if each sequence has one vector, whatever its length."""
        return self.spec.has_one_row

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the run's outputs, such as ``mean_layer33``."""
        return tuple(self._outputs)

    def output(self, name: str) -> Vectors:
        """Return another output of the same run.

        Raises:
            UsageError: the run has no such output.
        """
        if name not in self._outputs:
            raise UsageError(
                f"the run has no output {printable(name)}",
                hint=f"it has {', '.join(map(printable, self._outputs))}",
            )
        return Vectors(self._outputs, name)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return the number of residues (or bases) of each sequence. (n,)"""
        return self._index.length

    @cached_property
    def ids(self) -> VectorIds:
        """Return the ids in input order: a sequence of text, read on first use."""
        with explain_remedy(self.folder):
            return VectorIds(self._index.read_ids(), self._lookup)

    @cached_property
    def _lookup(self) -> Lookup:
        with explain_remedy(self.folder):
            return Lookup(self._store.lookup, len(self), self._index.lookup)

    def __contains__(self, name: object) -> bool:
        """Return True if an id has a vector."""
        return isinstance(name, str) and self._lookup.find(name) is not None

    @overload
    def __getitem__(self, key: str | int | np.integer[Any]) -> Vector: ...
    @overload
    def __getitem__(
        self, key: slice | Sequence[int] | NDArray[np.integer[Any]]
    ) -> Vector | list[Vector]: ...
    def __getitem__(
        self, key: str | int | np.integer[Any] | slice | Sequence[int] | NDArray[np.integer[Any]]
    ) -> Vector | list[Vector]:
        """Read one vector by id or position, or several by slice or positions.

        Raises:
            KeyError: the run has no vector with this id.
            IndexError: a position is out of range.
            FeatureFileError: a feature file is missing, or not the listed one.
        """
        if isinstance(key, str):
            return self._read_one(self.position(key))
        if isinstance(key, slice):
            return self._read(np.arange(*key.indices(len(self))))
        if isinstance(key, int | np.integer):
            return self._read_one(self._check_position(int(key)))
        positions = np.asarray(key)
        if positions.dtype == np.bool_:
            positions = np.flatnonzero(positions)
        return self._read(self._check_positions(positions))

    def position(self, name: str) -> int:
        """Return the position of an id in input order.

        Raises:
            KeyError: the run has no vector with this id.
            FeatureFileError: the lookup is corrupt.
        """
        lookup = self._lookup
        with explain_remedy(self.folder):
            position = lookup.find(name)
            if position is None:
                lookup.check()
        if position is None:
            raise KeyError(name)
        return position

    def _check_position(self, position: int) -> int:
        if not -len(self) <= position < len(self):
            raise IndexError(f"position {position} of {len(self)} vectors")
        return position % len(self)

    def _check_positions(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        if positions.ndim != 1 or (len(positions) and positions.dtype.kind not in "iu"):
            raise TypeError("a run takes an id, a position, a slice, or a list of positions")
        checked = positions.astype(np.int64)
        if len(checked) and not (-len(self) <= checked.min() and checked.max() < len(self)):
            raise IndexError(f"a position is outside the {len(self)} vectors")
        return np.where(checked < 0, checked + len(self), checked)

    def _read_one(self, position: int) -> Vector:
        index = self._index
        part = int(index.part[position])
        row = int(index.row[position])
        rows = self._files.rows(part)
        if self.has_one_row:
            return self._shaped(_to_float32(rows[row]))
        length = int(index.length[position])
        if self.spec.kind == "per_residue":
            first = int(index.residue[position])
            return _to_float32(rows[first : first + length])
        first = int(self._files.first_rows(part)[row])
        return _to_float32(rows[first : first + length * length]).reshape(length, length)

    def _read(self, positions: NDArray[np.int64]) -> Vector | list[Vector]:
        if not self.has_one_row:
            return [self._read_one(position) for position in positions.tolist()]
        vectors = np.empty((len(positions), self.dim), dtype=np.float32)
        part = self._index.part[positions]
        row = self._index.row[positions]
        order = np.argsort(part, kind="stable")
        bounds = np.flatnonzero(np.diff(part[order], prepend=-1, append=-1))
        for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            chosen = order[first:end]
            rows = self._files.rows(int(part[chosen[0]]))
            vectors[chosen] = _to_float32(rows[row[chosen]])
        return self._shaped(vectors)

    def _shaped(self, vectors: Vector) -> Vector:
        """Drop the last axis of single numbers, such as perplexities."""
        return vectors if self.spec.has_vectors else vectors[..., 0]

    def __iter__(self) -> Iterator[Vector]:
        """Yield each vector in input order, from verified files."""
        for batch in self.batches():
            yield from batch.vectors

    def items(self) -> Iterator[tuple[str, Vector]]:
        """Yield each id with its vector, in input order, from verified files."""
        for batch in self.batches():
            yield from zip(batch.ids, batch.vectors, strict=True)

    def batches(self, size: int = 0) -> Iterator[VectorBatch]:
        """Yield the vectors in input order, from verified files.

        Args:
            size: vectors per batch. 0: as many as have about 64 MB.

        Raises:
            FeatureFileError: a feature file is missing or corrupt.
        """
        for first, end in self._ranges(size):
            self._verify(first, end)
            yield VectorBatch(
                ids=tuple(self.ids[first:end]),
                vectors=self[first:end],
                lengths=self.lengths[first:end],
            )

    def _ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the end of each batch."""
        if size < 0:
            raise UsageError(f"size is {size}", hint="give a number of vectors, 1 or more")
        if not size:
            yield from self._ranges_by_bytes()
            return
        for first in range(0, len(self), size):
            yield first, min(first + size, len(self))

    def _ranges_by_bytes(self) -> Iterator[tuple[int, int]]:
        batch_bytes = 1 << 26  # of vectors that are read together
        max_rows = max(1, batch_bytes // (4 * self.dim))
        ends = np.cumsum(self.spec.count_rows(self.lengths))
        first = 0
        while first < len(self):
            n_before = int(ends[first - 1]) if first else 0
            end = int(np.searchsorted(ends, n_before + max_rows, side="right"))
            end = max(end, first + 1)
            yield first, end
            first = end

    def _verify(self, first: int, end: int) -> None:
        for number in np.unique(self._index.part[first:end]).tolist():
            self._files.verify(number)

    def parts_in_order(self) -> list[NDArray[np.int64]]:
        """Return the positions of the vectors in each feature file, file by file."""
        order = np.argsort(self._index.part, kind="stable")
        bounds = np.flatnonzero(np.diff(self._index.part[order]))
        return np.split(order, bounds + 1) if len(order) else []

    def read_verified(self, positions: NDArray[np.int64]) -> Vector | list[Vector]:
        """Read vectors by position, and verify every bit of their files."""
        for number in np.unique(self._index.part[positions]).tolist():
            self._files.verify(number)
        return self._read(positions)

    def torch_dataset(
        self,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> VectorDataset:
        """Return a torch IterableDataset of (id, tensor) pairs.

        Over all ranks and loader workers, each vector comes exactly once per epoch. The numbers of
        two ranks differ by at most one.

        Args:
            shuffle: in a random order that depends on ``seed`` and on ``set_epoch``. Feature files
                are read one after the other, and shuffled with their neighbours.
            rank: this process in 0 ... ``world_size`` - 1.

        Raises:
            UsageError: the rank is out of range.
        """
        from virnucpro.store.torch_dataset import VectorDataset

        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} of {world_size}", hint="ranks count from 0")
        return VectorDataset(self, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)

    def to_arrow(self) -> pa.Table:
        """Return all vectors as an Arrow table: ``id``, ``length``, ``sha256``, ``embedding``.

        An embedding is a list of ``dim`` float32, or a list of such lists with a row per residue.
        """
        import pyarrow as pa

        kind = embedding_type(self.spec)
        chunks = [embedding_column(batch, self.spec) for batch in self.batches()]
        return self._index.read_table().append_column("embedding", pa.chunked_array(chunks, kind))

    def to_anndata(self) -> anndata.AnnData:
        """Return all vectors as an AnnData: ``X`` (n, dim) float32, and lengths in ``obs``.

        Raises:
            UsageError: each residue has a vector.
            UnavailableError: the package anndata is missing.
        """
        self.require_one_each("AnnData")
        try:
            import anndata
            import pandas
        except ImportError as error:
            raise UnavailableError(
                f"to_anndata needs the package {error.name}", hint="install it: pip install anndata"
            ) from error
        table = self._index.read_table()
        columns = {"length": self.lengths, "sha256": [digest.hex() for digest in self.digests()]}
        index = pandas.Index(table["id"].to_pylist(), dtype="object")
        vectors = np.empty((len(self), self.dim), dtype=np.float32)
        first = 0
        for batch in self.batches():
            vectors[first : first + len(batch.ids)] = np.reshape(batch.vectors, (-1, self.dim))
            first += len(batch.ids)
        return anndata.AnnData(
            X=vectors, obs=pandas.DataFrame(columns, index=index), uns=dict(self.facts)
        )

    def require_one_each(self, layout: str) -> None:
        """Reject an output with several rows per sequence.

        Raises:
            UsageError: it has several.
        """
        if not self.has_one_row:
            raise UsageError(
                f"{layout} has one vector per sequence, and {printable(self.name)} has more",
                hint="use another format, or extract with mean pooling",
            )

    @property
    def facts(self) -> Mapping[str, str]:
        """Return what made the vectors: model, output, precision, and recipe."""
        return {
            "model_name": self.encoder.model,
            "output": self.spec.name,
            "precision": self.encoder.precision,
            "fingerprint": self._store.fingerprint,
        }

    def read_index(self) -> pa.Table:
        """Read id, length and SHA-256 of each sequence, as an Arrow table in input order."""
        return self._index.read_table()

    def digests(self) -> list[bytes]:
        """Return the SHA-256 of each sequence, in upper case and without a final stop."""
        digests: list[bytes] = self.read_index()["sha256"].to_pylist()
        return digests

    def __reduce__(self) -> tuple[Any, ...]:
        """Reopen the run in another process, because mapped files cannot be sent."""
        return Vectors, (self._outputs, self.name)


def _to_float32(rows: NDArray[Any]) -> Vector:
    """Copy rows out of a mapped file."""
    if rows.dtype == np.uint16:
        return from_bfloat16(rows)
    return np.array(rows, dtype=np.float32)


def embedding_type(spec: OutputSpec) -> pa.DataType:
    """Return the Arrow type of an embedding: a list of numbers, or a list of such lists."""
    import pyarrow as pa

    row = pa.list_(pa.float32(), spec.width)
    return row if spec.has_one_row else pa.list_(row)


def embedding_column(batch: VectorBatch, spec: OutputSpec) -> pa.Array:
    """Return the vectors of a batch as an Arrow array."""
    import pyarrow as pa

    values = np.concatenate([np.empty(0, np.float32), *map(np.ravel, batch.vectors)])
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values), spec.width)
    if spec.has_one_row:
        return rows
    bounds = np.concatenate([[0], np.cumsum(spec.count_rows(batch.lengths))])
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), rows)


def open_vectors(stores: Iterable[FeatureStore]) -> Vectors:
    """Open the vectors of a finished run. The first output of the first store is the default.

    Raises:
        InputMissingError, FeatureFileError: as ``VectorIndex.read``.
    """
    outputs: dict[str, StoredOutput] = {}
    for store in stores:
        for number, spec in enumerate(store.encoder.outputs):
            name = spec.name
            if name in outputs:  # two models with the same layer and pooling
                name = f"{store.encoder.model}/{name}"
            dataset = spec.name if number else "embeddings"
            outputs[name] = StoredOutput(store, spec, dataset, is_first=not number)
    return Vectors(outputs, next(iter(outputs)))
