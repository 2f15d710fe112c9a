"""List the feature files of a store, and read the vectors that belong to the finished run.

``features/parts.json`` names each file in order, with its checksums and the ORFs that count.
Records that a later input replaces do not count. Readers follow this list, file by file, so the
number of files does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import parse_json
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.numeric import find_runs
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import FeatureFormat
from virnucpro.core.types import Embeddings, check_counts
from virnucpro.store.feature_file import (
    Attributes,
    Checksums,
    open_features,
    open_reader,
    read_checksummed,
    read_label_digest,
    verify,
    write_checksummed,
)
from virnucpro.store.feature_store import FeatureStore, ShardFeatures, is_feature_file

Span: TypeAlias = tuple[int, int]  # (first, last + 1)


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The entry of one feature file in a store's list, kept small because there may be many."""

    name: str
    label: str  # SHA-256 of the file's label, which includes the content's checksum
    checksum: str  # of the file, with its algorithm
    dim: int  # numbers per row
    n_orfs: int
    n_rows: int  # vectors
    orfs: tuple[Span, ...]  # ORFs that count
    rows: tuple[Span, ...]  # rows of these ORFs

    def __post_init__(self) -> None:
        texts = (self.label, self.checksum)
        if not is_feature_file(self.name) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.name!r} is no feature file of a shard with a label")
        check_counts(self.dim, self.n_orfs, self.n_rows)
        object.__setattr__(self, "orfs", _check_part(self.orfs, self.n_orfs))
        object.__setattr__(self, "rows", _check_part(self.rows, self.n_rows))

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> IndexPart:
        """Make the part of a stored entry. Earlier versions named the checksum ``sha256``.

        Raises:
            ValueError, TypeError: the entry is damaged.
        """
        return cls(**{"checksum" if name == "sha256" else name: entry[name] for name in entry})

    @classmethod
    def from_file(
        cls, name: str, embeddings: Embeddings, checksums: Checksums, hidden: Collection[str] = ()
    ) -> IndexPart:
        """Describe a file with embeddings. All ORFs except the hidden ones count."""
        ids = embeddings.ids
        n_rows = embeddings.lengths if embeddings.per_residue else 1
        bounds: list[int] = np.cumsum([0, *np.broadcast_to(n_rows, len(ids))]).tolist()
        mask = np.array([orf_id not in hidden for orf_id in ids], dtype=np.bool_)
        orfs = tuple(find_runs(mask))
        rows = tuple((bounds[first], bounds[end]) for first, end in orfs)
        dim = embeddings.vectors.shape[1]
        return cls(name, *checksums, dim, len(ids), bounds[-1], orfs, rows)

    @classmethod
    def from_shard(
        cls,
        store: FeatureStore,
        features: ShardFeatures,
        hidden: Collection[str],
        layout: FeatureFormat,
    ) -> list[IndexPart]:
        """Export a shard's files to another format, and describe them for the list.

        Hidden ORFs are omitted from both.
        """
        parts = []
        for path, embeddings, checksums in features.files:
            if layout != "h5":
                from virnucpro.store.feature_export import export

                export(path, embeddings.without_ids(hidden), layout, store.encoder, store.tree)
            if embeddings.vectors.shape[1]:  # 0 for copies whose originals have no vector
                parts.append(cls.from_file(path.name, embeddings, checksums, hidden))
        return parts

    @classmethod
    def from_complete_file(
        cls, name: str, checksums: Checksums, dim: int, n_vectors: int
    ) -> IndexPart:
        """Describe a file with one vector for each of its ORFs, which all count."""
        spans = ((0, n_vectors),)
        return cls(name, *checksums, dim, n_vectors, n_vectors, spans, spans)

    @property
    def place(self) -> tuple[int, str]:
        """Return the sort key: shard number, then file name, so that copies follow."""
        return int(self.name.split(".")[0].split("_")[0]), self.name

    @property
    def n_shown_rows(self) -> int:
        return sum(end - first for first, end in self.rows)


def _check_part(spans: Sequence[Sequence[int]], n: int) -> tuple[Span, ...]:
    """Check that spans ascend within ``n``. Spans from JSON are lists.

    Raises:
        ValueError, TypeError: the spans do not ascend.
    """
    pairs = tuple((first, end) for first, end in spans)
    bounds = [0, *(number for pair in pairs for number in pair), n]
    check_counts(*bounds)
    if bounds != sorted(bounds):
        raise ValueError(f"{pairs} are not spans within {n}")
    return pairs


def write_parts(store: FeatureStore, parts: Sequence[IndexPart]) -> None:
    """Write the list of a store's files. Create the store's folder if it is missing."""
    content = json.dumps([asdict(part) for part in parts]).encode()
    store.make_folder()
    write_checksummed(store.tree, store.parts, content, _part_checksum(store))


def read_parts(store: FeatureStore) -> list[IndexPart]:
    """Read the list of a store's files.

    Raises:
        FeatureFileError: it is missing or corrupt, or has another recipe.
        OutputError, StorageError: it cannot be read now.
    """
    content = read_checksummed(store.parts, _part_checksum(store))[1]
    with open_reader(store.parts):
        return [IndexPart.from_json(entry) for entry in parse_json(content)]


def _part_checksum(store: FeatureStore) -> Attributes:
    return {"fingerprint": store.fingerprint}


def hash_part(store: FeatureStore, part: IndexPart) -> str:
    """Return the checksum of a listed file. Read the file only if it is not the listed one.

    Raises:
        FeatureFileError: the file is missing or corrupt.
        OutputError, StorageError: it cannot be read now.
    """
    path = store.folder / part.name
    if read_label_digest(path) == part.label:
        return part.checksum
    return verify(path, _part_checksum(store)).file


def check_parts(store: FeatureStore) -> None:
    """Check that all listed files are present.

    Raises:
        FeatureFileError: the list is corrupt, or a listed file is missing or was replaced.
    """
    write_anew = with_options("repeat the command of the run with {resume} to make what is missing")
    for part in read_parts(store):
        path = store.folder / part.name
        if read_label_digest(path) != part.label:
            raise FeatureFileError(
                f"{printable(path)} is not the file that {printable(store.parts)} lists",
                hint=write_anew,
            )


def read_shown(
    store: FeatureStore, output: OutputSpec | None = None
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each id of a finished run, with its rows of an output, by default the first one.

    Files are read one by one, and verified.

    Raises:
        FeatureFileError: the list or a file is missing or corrupt.
    """
    attributes = _part_checksum(store)
    for name, spans in _shown_orfs(store):
        embeddings = store.read(store.folder / name, attributes)[0]
        rows = _split(embeddings, output)
        for span in spans:
            yield from zip(embeddings.ids[slice(*span)], rows[slice(*span)], strict=True)


def _split(embeddings: Embeddings, output: OutputSpec | None) -> list[NDArray[np.float32]]:
    """Split an output in a file into the rows of each ORF."""
    from virnucpro.store.feature_export import split_output, split_rows

    for array in embeddings.extra:
        if array.spec == output:
            return split_output(array, embeddings.lengths)
    return split_rows(embeddings)


def _shown_orfs(store: FeatureStore) -> list[tuple[str, Sequence[Span]]]:
    """Return the file names, in order, and which ORFs in each file count."""
    if not store.parts.exists() and (linked := _linked_orfs(store.index)):
        return linked
    check_parts(store)
    return [(part.name, part.orfs) for part in read_parts(store)]


def _linked_orfs(index: Path) -> list[tuple[str, Sequence[Span]]]:
    """Return the same from an older run's ``features.h5``, which has virtual datasets."""
    if not index.exists():
        return []
    with open_reader(index), open_features(index) as h5:
        groups = h5["groups"].values() if "groups" in h5 else ()
        sources = [source for group in groups for source in group["ids"].virtual_sources()]
        linked: list[tuple[str, Sequence[Span]]] = []
        for name, file_sources in groupby(sources, key=lambda source: source.file_name):
            linked.append((Path(name).name, [_span(source) for source in file_sources]))
        return linked


def _span(source: Any) -> Span:  # noqa: ANN401 - h5py's tuple
    (first,), (last,) = source.src_space.get_select_bounds()
    return first, last + 1


def shared_attributes(store: FeatureStore, parts: Sequence[IndexPart]) -> Mapping[str, Any]:
    """Return the attributes that all files in a store share, read from the first file.

    Without files, there are no attributes.

    Raises:
        FeatureFileError: the file is missing or corrupt.
    """
    if not parts:
        return {}
    first = store.folder / parts[0].name
    with open_reader(first), open_features(first) as h5:
        return {name: h5.attrs[name] for name in h5.attrs if name not in ("shard_sha256", "copies")}
