"""Store the vectors of a run, one feature file per shard, and read them.

Each encoder in a run has its own store. A shard's file contains the ORFs that were embedded. When
the files are read, a shard with copies gets a second file with the vectors of their originals.
Together, the files contain every ORF, and a reader needs nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import printable
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import (
    SHARD_NAME,
    Embeddings,
    Failure,
    Orf,
    OutputArray,
    Shard,
    hash_texts,
)
from virnucpro.store.feature_file import (
    Attributes,
    Checksums,
    find_vectors,
    read_label,
    read_rows,
    read_table,
    read_vectors,
    read_verified,
    write_embeddings,
)
from virnucpro.store.shard_files import read_shard
from virnucpro.store.shard_store import ShardStore

_COPIES = "_copies"  # ends the stem of a file with copies
# compiled by ``re`` at the first use, since a run without vectors has none
_FILE = rf"({SHARD_NAME})({_COPIES})?\.h5"
_EXPORT = rf"{SHARD_NAME}(?:{_COPIES})?\.(?:npz|pt|parquet)"
_FOLDER = r"\w+-[0-9a-f]{16}"


@dataclass(frozen=True, slots=True, eq=False)
class FeatureStore(ShardStore):
    """The vectors that one encoder makes for the shards of a run."""

    tree: SafeDir  # the run folder
    folder: Path
    encoder: EncoderSpec
    fingerprint: str  # hash of the recipe

    # names of the file list, the index of vectors, and the lookup table
    parts_name: ClassVar = "parts.json"
    vector_index_name: ClassVar = "index.parquet"
    lookup_name: ClassVar = "lookup.npy"

    def path(self, shard: Shard, copies: int = 0) -> Path:
        """Return the file of a shard, or with ``copies=1``, the file of its copies."""
        return self.folder / f"{shard.name}{_COPIES * copies}.h5"

    def partial_path(self, shard: Shard, owner: str, output: str = "") -> Path:
        """Return a shard's partial file, kept for the owner's next attempt after a worker died.

        ``output`` names an output in ``EncoderSpec.extra``.
        """
        stem = f".{shard.name}.{output}" if output else f".{shard.name}"
        return self.folder / f"{stem}.{owner}.partial"

    @property
    def index(self) -> Path:
        """Return the path of ``features.h5``, next to the folder, with all vectors of the store."""
        return index_path(self.folder)

    @property
    def parts(self) -> Path:
        """Return the path of a finished run's file list."""
        return self.folder / self.parts_name

    @property
    def vector_index(self) -> Path:
        """Return the path of a finished run's index of vectors."""
        return self.folder / self.vector_index_name

    @property
    def lookup(self) -> Path:
        """Return the path of the lookup table from ids to positions in the index."""
        return self.folder / self.lookup_name

    def attributes(self, shard: Shard, copies: int = 0) -> Attributes:
        """Return the attributes of a shard's file, as selected in ``path``."""
        encoder = self.encoder
        names = {"output": encoder.outputs[0].name} if encoder.extra else {}
        return {
            **names,
            "model": encoder.model,
            "layer": encoder.layer,
            "pooling": encoder.pooling,
            "precision": encoder.precision,
            "fingerprint": self.fingerprint,
            "copies": copies,
            "shard_sha256": shard.sha256,
        }

    def expected(self, shard: Shard, copies: int = 0) -> Attributes:
        """Return the attributes that a shard's file must have, as selected in ``path``.

        The model name is omitted. The fingerprint identifies the model, and the model's folder or
        its name in this program may have changed since the file was written.
        """
        attributes = self.attributes(shard, copies)
        return {name: value for name, value in attributes.items() if name != "model"}

    def match(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(_FILE, name)

    def verify(self, path: Path, attributes: Attributes) -> Checksums:
        _, checksums = self.read(path, attributes)
        read_table(path, attributes)
        return checksums

    def may_need_failed(self, shard: Shard, replaced: frozenset[str]) -> bool:
        """Return True if a shard's file of copies is missing, or has failures of other records."""
        failed = self.failed_in(self.path(shard, copies=1), self.expected(shard, copies=1))
        return failed is None or not failed <= replaced

    def read(self, path: Path, attributes: Attributes) -> tuple[Embeddings, Checksums]:
        """Read and verify a file in the store.

        Raises:
            FeatureFileError: it is missing or corrupt, or has other attributes.
        """
        return read_verified(path, attributes, self.encoder.dim, self.encoder.extra)

    def write(self, shard: Shard, embeddings: Embeddings, copies: int = 0) -> Checksums:
        """Write a shard's file atomically, as selected in ``path``."""
        path = self.path(shard, copies)
        attributes = self.attributes(shard, copies)
        return write_embeddings(path, embeddings, attributes, self.tree, self.encoder.store)

    def delete_partials(self, owner: str) -> None:
        """Delete the partial files of a process."""
        self.tree.delete_files(self.folder, lambda name: name.endswith(f".{owner}.partial"))

    def read_files(self) -> Iterator[tuple[Path, int, Embeddings]]:
        """Verify and read each file.

        Yields:
            Path, byte offset of the vectors, and content.

        Raises:
            FeatureFileError: a file is incomplete, or has another recipe.
        """
        for path, attributes in self.files():
            yield path, find_vectors(path), self.read(path, attributes)[0]


@dataclass(frozen=True, slots=True, eq=False)
class ReadOnlyStore(FeatureStore):
    """The store of a finished run. Instead of writing a file, it compares the content."""

    @classmethod
    def from_folder(cls, store: FeatureStore) -> ReadOnlyStore:
        return cls(store.tree, store.folder, store.encoder, store.fingerprint)

    def write(self, shard: Shard, embeddings: Embeddings, copies: int = 0) -> Checksums:
        """Compare the vectors with those in the file.

        Raises:
            FeatureFileError: the file is missing or corrupt, or has other vectors.
        """
        path = self.path(shard, copies)
        stored, checksums = self.read(path, self.attributes(shard, copies))
        is_same = (
            stored.ids == embeddings.ids
            and stored.failures == embeddings.failures
            and np.array_equal(stored.lengths, embeddings.lengths)
            and stored.vectors.tobytes() == embeddings.vectors.tobytes()
            and [array.values.tobytes() for array in stored.extra]
            == [array.values.tobytes() for array in embeddings.extra]
        )
        if not is_same:
            raise FeatureFileError(f"{printable(path)} has other vectors than the originals")
        return checksums


def open_stores(
    features: Path, encoders: Sequence[EncoderSpec], fingerprint: str
) -> tuple[FeatureStore, ...]:
    """Open one store per encoder: the first in the folder itself, the others in subfolders."""
    tree = SafeDir(features.parent)
    return tuple(
        FeatureStore(
            tree, features / _encoder_folder_name(encoder) if i else features, encoder, fingerprint
        )
        for i, encoder in enumerate(encoders)
    )


def is_feature_file(name: str) -> bool:
    """Return True if a file with this name contains vectors of a shard or its copies."""
    return re.fullmatch(_FILE, name) is not None


def is_export(path: Path) -> bool:
    """Return True if a file in a store's folder is a shard exported to another format."""
    return re.fullmatch(_EXPORT, path.name) is not None


def index_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.h5")


def _encoder_folder_name(encoder: EncoderSpec) -> str:
    """Return a folder name that is unique among the encoders of a run."""
    digest = hashlib.sha256(json.dumps(encoder.facts, sort_keys=True).encode()).hexdigest()
    return f"{encoder.family}-{digest[:16]}"


def encoder_folder_names(features: Path) -> list[str]:
    """List the names in a features folder that belong to stores of further encoders."""
    if not features.is_dir():
        return []
    return [path.name for path in features.iterdir() if re.fullmatch(_FOLDER, path.name)]


class StoredFeatures(NamedTuple):
    """A verified feature file."""

    path: Path
    embeddings: Embeddings
    checksums: Checksums


@dataclass(frozen=True, slots=True, eq=False)
class ShardFeatures:
    """The vectors of a shard, copies included, and the reasons for missing vectors."""

    files: tuple[StoredFeatures, ...]
    reasons: Mapping[str, str]  # ORF without a vector -> reason

    def select_rows(self, orf_ids: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of ORFs that have one vector each. n -> (n, dim)"""
        contents = [file.embeddings for file in self.files]
        assert not any(content.per_residue for content in contents), "one row each"
        ids = [orf_id for content in contents for orf_id in content.ids]
        if not orf_ids:
            return _NO_ROWS
        filled = [content.vectors for content in contents if content.ids]
        vectors = filled[0] if len(filled) == 1 else np.concatenate(filled)
        if list(orf_ids) == ids:
            return vectors
        positions = {orf_id: i for i, orf_id in enumerate(ids)}
        return vectors[[positions[orf_id] for orf_id in orf_ids]]


class FeatureReader:
    """Read the shards of one generation in any order, and find the original of each copy."""

    def __init__(self, store: FeatureStore, shards: Sequence[Shard]) -> None:
        self._store = store
        self._shards = [shard for shard in shards if shard.n_embedded]
        self._firsts = [0, *accumulate(shard.n_embedded for shard in self._shards)]
        self._sources: dict[int, _OriginalRows] = {}  # by shard index

    def read(
        self, shard: Shard, orfs: Sequence[Orf], lost_shards: Mapping[int, str], n_verified: int
    ) -> ShardFeatures:
        """Read the features of a shard with these ORFs. A copy gets its original's vector.

        The file of copies is rebuilt from the originals each time, and replaces one that differs.

        Args:
            shard: the shard to read.
            orfs: its ORFs, in order.
            lost_shards: index of each shard without a file -> reason.
            n_verified: the files of this many first shards were verified before, or written by
                this start. Other files with originals are verified here.

        Raises:
            FeatureFileError: a file is missing or corrupt, or its rows are in another order.
        """
        files: list[StoredFeatures] = []
        reasons = {}
        embedded = [orf for orf in orfs if orf.copy_of is None]
        if loss := lost_shards.get(shard.index, ""):
            reasons = {orf.id: loss for orf in embedded}
        else:
            files.append(self._read_embedded(shard, embedded))
        if len(embedded) < len(orfs):
            delivered = files[0].embeddings.ids if files else ()
            files.append(self._write_copies(shard, orfs, delivered, lost_shards, n_verified))
        for file in files:
            reasons |= {failure.orf_id: failure.reason for failure in file.embeddings.failures}
        return ShardFeatures(tuple(files), reasons)

    def read_copies(
        self, shard: Shard, orfs: Sequence[Orf], lost_shards: Mapping[int, str], n_verified: int
    ) -> ShardFeatures:
        """Read only the features of copies, in a shard whose other ORFs all have vectors.

        Args and errors as in ``read``.
        """
        delivered = [orf.id for orf in orfs if orf.copy_of is None]
        file = self._write_copies(shard, orfs, delivered, lost_shards, n_verified)
        reasons = {failure.orf_id: failure.reason for failure in file.embeddings.failures}
        return ShardFeatures((file,), reasons)

    def _write_copies(
        self,
        shard: Shard,
        orfs: Sequence[Orf],
        delivered: Sequence[str],
        lost_shards: Mapping[int, str],
        n_verified: int,
    ) -> StoredFeatures:
        """Write the file of a shard's copies.

        Args:
            delivered: ids of the other ORFs that have a vector.
        """
        copies = [orf for orf in orfs if orf.copy_of is not None]
        n_before = _count_before(orfs, frozenset(delivered))
        embeddings = self._copy_to(copies, n_before, lost_shards, n_verified)
        checksums = self._store.write(shard, embeddings, copies=1)
        return StoredFeatures(self._store.path(shard, copies=1), embeddings, checksums)

    def _read_embedded(self, shard: Shard, orfs: Sequence[Orf]) -> StoredFeatures:
        store = self._store
        path = store.path(shard)
        embeddings, checksums = store.read(path, store.expected(shard))
        reasons = {failure.orf_id: failure.reason for failure in embeddings.failures}
        if embeddings.ids != tuple(orf.id for orf in orfs if orf.id not in reasons):
            raise FeatureFileError(
                f"{printable(path)} has other ORFs, or has them in another order"
            )
        failed = {i: reasons[orf.id] for i, orf in enumerate(orfs) if orf.id in reasons}
        self._sources[shard.index] = _OriginalRows(path, failed)
        return StoredFeatures(path, embeddings, checksums)

    def _copy_to(
        self,
        copies: Sequence[Orf],
        n_before: Sequence[int],
        lost_shards: Mapping[int, str],
        n_verified: int,
    ) -> Embeddings:
        """Collect the rows or failures of copies. ``n_before``: see ``Embeddings``."""
        rows: dict[int, tuple[NDArray[np.float32], ...]] = {}
        reasons: dict[int, str] = {}
        ordinals = sorted({orf.copy_of for orf in copies if orf.copy_of is not None})
        for number, group in groupby(
            ordinals, key=lambda ordinal: bisect_right(self._firsts, ordinal) - 1
        ):
            first = self._firsts[number]
            source = self._source(number, lost_shards, n_verified)
            positions = [ordinal - first for ordinal in group]
            source_rows = source.rows(positions, self._store.encoder)
            rows |= {first + position: own_rows for position, own_rows in source_rows.items()}
            reasons |= {first + i: source.reasons[i] for i in positions if i in source.reasons}
        encoder = self._store.encoder
        delivered = [i for i, orf in enumerate(copies) if orf.copy_of in rows]
        texts = [copies[i].text(encoder.reads) for i in delivered]
        copied = [rows[copies[i].copy_of or 0] for i in delivered]
        no_rows = [_NO_ROWS, *(np.empty((0, spec.width), np.float32) for spec in encoder.extra)]
        values = [
            np.concatenate([own_rows[i] for own_rows in copied] or [no_rows[i]])
            for i in range(len(encoder.outputs))
        ]
        return Embeddings(
            ids=tuple(copies[i].id for i in delivered),
            lengths=np.array(list(map(len, texts)), np.int32),
            vectors=values[0],
            extra=tuple(map(OutputArray, encoder.extra, values[1:])),
            per_residue=encoder.per_residue,
            sequence_sha256=hash_texts(texts),
            n_before=np.array([n_before[i] for i in delivered], np.int32),
            failures=tuple(
                Failure(orf.id, orf.record_id, reasons[orf.copy_of])
                for orf in copies
                if orf.copy_of in reasons
            ),
        )

    def _source(
        self, number: int, lost_shards: Mapping[int, str], n_verified: int
    ) -> _OriginalRows:
        """Return the file with a shard's originals, which another process may have verified."""
        shard = self._shards[number]
        path = self._store.path(shard)
        attributes = self._store.expected(shard)
        if loss := lost_shards.get(shard.index):
            return _OriginalRows(path, dict.fromkeys(range(shard.n_embedded), loss))
        if shard.index not in self._sources:
            is_verified = shard.index < n_verified
            if is_verified and not read_label(path, attributes).failed_records:
                self._sources[shard.index] = _OriginalRows(path, {})
            else:
                embedded = [orf for orf in read_shard(shard) if orf.copy_of is None]
                self._read_embedded(shard, embedded)
        return self._sources[shard.index]


def _count_before(orfs: Sequence[Orf], delivered: frozenset[str]) -> list[int]:
    """Return for each copy how many ORFs with an original vector precede it in the shard."""
    counts = []
    n_originals = 0
    for orf in orfs:
        if orf.copy_of is not None:
            counts.append(n_originals)
        elif orf.id in delivered:
            n_originals += 1
    return counts


@dataclass(frozen=True, eq=False)
class _OriginalRows:
    """A verified feature file with originals of copies."""

    path: Path
    reasons: dict[int, str]  # position in the shard -> failure reason

    @cached_property
    def start(self) -> int:
        """Return the byte offset of the vectors."""
        return find_vectors(self.path)

    def rows(
        self, positions: Sequence[int], encoder: EncoderSpec
    ) -> dict[int, tuple[NDArray[np.float32], ...]]:
        """Read the rows of ORFs in each output, by position in the shard.

        Failed ORFs are omitted.
        """
        positions = [position for position in positions if position not in self.reasons]
        # the file has no rows for failed ORFs
        rows = []
        for position in positions:
            n_failed_before = sum(failed < position for failed in self.reasons)
            rows.append(position - n_failed_before)
        if not rows:
            return {}
        extra = {spec.name: spec for spec in encoder.extra}
        if encoder.per_residue:
            outputs = read_rows(self.path, {"embeddings": encoder.outputs[0], **extra}, rows)
        else:
            vectors = read_vectors(self.path, self.start, encoder, rows)
            outputs = [vectors, *read_rows(self.path, extra, rows)]
        return dict(zip(positions, zip(*outputs, strict=True), strict=True))


_NO_ROWS = np.empty((0, 0), dtype=np.float32)
