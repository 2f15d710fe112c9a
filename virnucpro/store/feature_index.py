"""List the feature files of a store, and read the vectors that belong to the finished run.

``features/parts.json`` names each file in order, with its checksums and the ORFs that count: a
record that a later input replaces is left out. Readers go through this list, file by file, so no
reader depends on the number of files that a process may open.
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
from virnucpro.core.numeric import find_runs
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import FeatureFormat
from virnucpro.core.types import Embeddings, check_counts
from virnucpro.store.feature_export import export, split_rows
from virnucpro.store.feature_file import (
    Attributes,
    Checksums,
    open_features,
    open_reader,
    read_checksummed,
    read_embeddings,
    read_label_digest,
    verify,
    write_checksummed,
)
from virnucpro.store.feature_store import FeatureStore, ShardFeatures, is_feature_file

_WRITE_ANEW = with_options("repeat the command of the run with {resume} to make what is missing")

Span: TypeAlias = tuple[int, int]  # the first, and one after the last


@dataclass(frozen=True, slots=True)
class IndexPart:
    """What the list of a store records of a feature file; small, since there may be very many."""

    name: str
    label: str  # SHA-256 of the label of the file, which includes that of the content
    sha256: str  # of the file
    dim: int  # numbers in a row
    n_orfs: int
    n_rows: int  # of vectors
    orfs: tuple[Span, ...]  # ORFs that count
    rows: tuple[Span, ...]  # rows of these ORFs

    def __post_init__(self) -> None:
        texts = (self.label, self.sha256)
        if not is_feature_file(self.name) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.name!r} is no feature file of a shard with a label")
        check_counts(self.dim, self.n_orfs, self.n_rows)
        object.__setattr__(self, "orfs", _check_part(self.orfs, self.n_orfs))
        object.__setattr__(self, "rows", _check_part(self.rows, self.n_rows))

    @classmethod
    def from_file(
        cls, name: str, embeddings: Embeddings, checksums: Checksums, hidden: Collection[str] = ()
    ) -> IndexPart:
        """Describe the file of some ORFs; all except the hidden ones count."""
        ids, n_rows = embeddings.ids, embeddings.lengths if embeddings.per_residue else 1
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
        """Also write the files of a shard in another format, and describe them for the list.

        Both leave out the hidden ORFs.
        """
        parts = []
        for path, embeddings, checksums in features.files:
            export(path, embeddings.without_ids(hidden), layout, store.encoder, store.tree)
            if embeddings.vectors.shape[1]:  # else copies whose originals have no vector
                parts.append(cls.from_file(path.name, embeddings, checksums, hidden))
        return parts

    @property
    def place(self) -> tuple[int, str]:
        """Sort key: number of the shard, then its copies."""
        return int(self.name.split(".")[0].split("_")[0]), self.name

    @property
    def n_shown_rows(self) -> int:
        return sum(end - first for first, end in self.rows)


def _check_part(spans: Sequence[Sequence[int]], n: int) -> tuple[Span, ...]:
    """Check that spans ascend within ``n``; those from JSON are lists.

    Raises:
        ValueError, TypeError: they do not.
    """
    pairs = tuple((first, end) for first, end in spans)
    bounds = [0, *(number for pair in pairs for number in pair), n]
    check_counts(*bounds)
    if bounds != sorted(bounds):
        raise ValueError(f"{pairs} are not spans within {n}")
    return pairs


def write_parts(store: FeatureStore, parts: Sequence[IndexPart]) -> None:
    """Write the list of the files of a store; the store's folder is made if it is missing."""
    content = json.dumps([asdict(part) for part in parts]).encode()
    store.make_folder()
    write_checksummed(store.tree, store.parts, content, _part_checksum(store))


def read_parts(store: FeatureStore) -> list[IndexPart]:
    """Read the list of the files of a store.

    Raises:
        FeatureFileError: it is missing or damaged, or of another recipe.
        OutputError, StorageError: it cannot be read now.
    """
    content = read_checksummed(store.parts, _part_checksum(store))[1]
    with open_reader(store.parts):
        return [IndexPart(**part) for part in parse_json(content)]


def _part_checksum(store: FeatureStore) -> Attributes:
    return {"fingerprint": store.fingerprint}


def hash_part(store: FeatureStore, part: IndexPart) -> str:
    """The SHA-256 of the file of a part; it is read only if it is not the one that was listed.

    Raises:
        FeatureFileError: the file is missing or damaged.
        OutputError, StorageError: it cannot be read now.
    """
    path = store.folder / part.name
    if read_label_digest(path) == part.label:
        return part.sha256
    return verify(path, _part_checksum(store)).file


def check_parts(store: FeatureStore) -> None:
    """
    Raises:
        FeatureFileError: the list is damaged, or a listed file is missing, or is another one.
    """
    for part in read_parts(store):
        path = store.folder / part.name
        if read_label_digest(path) != part.label:
            raise FeatureFileError(
                f"{printable(path)} is not the file that {printable(store.parts)} lists",
                hint=_WRITE_ANEW,
            )


def read_shown(store: FeatureStore) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each id of a finished run, with its rows.

    The files are read one by one, and verified.

    Raises:
        FeatureFileError: the list or a file is missing or damaged.
    """
    attributes = _part_checksum(store)
    for name, spans in _shown_orfs(store):
        embeddings = read_embeddings(store.folder / name, attributes, store.encoder.dim)
        rows = split_rows(embeddings)
        for span in spans:
            yield from zip(embeddings.ids[slice(*span)], rows[slice(*span)], strict=True)


def _shown_orfs(store: FeatureStore) -> list[tuple[str, Sequence[Span]]]:
    """The names of the files, in order, and which ORFs of each count."""
    if not store.parts.exists() and (linked := _linked_orfs(store.index)):
        return linked
    check_parts(store)
    return [(part.name, part.orfs) for part in read_parts(store)]


def _linked_orfs(index: Path) -> list[tuple[str, Sequence[Span]]]:
    """The same from a ``features.h5`` of an older run: virtual datasets over the feature files."""
    if not index.exists():
        return []
    with open_reader(index), open_features(index) as h5:
        groups = h5["groups"].values() if "groups" in h5 else ()
        sources = [source for group in groups for source in group["ids"].virtual_sources()]
        by_file = groupby(sources, key=lambda source: source.file_name)
        return [
            (Path(name).name, [_span(source) for source in of_file]) for name, of_file in by_file
        ]


def _span(source: Any) -> Span:  # noqa: ANN401 - h5py's tuple
    (first,), (last,) = source.src_space.get_select_bounds()
    return first, last + 1


def shared_attributes(store: FeatureStore, parts: Sequence[IndexPart]) -> Mapping[str, Any]:
    """The attributes that all files of a store share, taken from the first; none without files.

    Raises:
        FeatureFileError: the file is missing or damaged.
    """
    if not parts:
        return {}
    first = store.folder / parts[0].name
    with open_reader(first), open_features(first) as h5:
        return {name: h5.attrs[name] for name in h5.attrs if name not in ("shard_sha256", "copies")}
