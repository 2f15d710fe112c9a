"""Write and read ``features.h5``, one HDF5 file that links all vectors of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import printable
from virnucpro.core.numeric import runs_of
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import FeatureFormat
from virnucpro.core.safe_dir import Tree
from virnucpro.core.types import Embeddings, Shard, check_counts
from virnucpro.store.feature_export import export, split_rows
from virnucpro.store.feature_file import (
    Attributes,
    hash_of,
    new_hdf5,
    open_features,
    read_embeddings,
    read_label,
    reading,
    text_type,
)
from virnucpro.store.feature_store import FeatureStore, ShardFeatures, is_feature_file

if TYPE_CHECKING:
    import h5py

# a virtual dataset keeps every file open that it was read from; beyond the limit of open files,
# HDF5 silently reads NaN and empty ids
FILES_PER_GROUP = 200  # macOS lets a process open 256
MOST_AT_ROOT = 1000  # Linux: 1,024
_WRITE_ANEW = with_options("repeat the command of the run with {resume} to make what is missing")
_OF_ONE_FILE = ("shard_sha256", "copies")  # attributes that the index leaves out
_DATASETS = ("ids", "lengths", "embeddings")

Span: TypeAlias = tuple[int, int]  # the first, and one after the last
# neighbouring rows: relative path of a file (".": the index), dataset, its number of rows, the rows
_Piece: TypeAlias = tuple[str, str, int, Span]


@dataclass(frozen=True, slots=True)
class IndexPart:
    """What an index needs to know of a feature file; small, since there may be very many."""

    name: str
    label: str  # identifies its shard
    dim: int  # numbers in a row
    n_orfs: int
    n_rows: int  # of vectors
    orfs: tuple[Span, ...]  # ORFs that the index shows
    rows: tuple[Span, ...]  # rows of these ORFs

    def __post_init__(self) -> None:
        numbers = (self.dim, self.n_orfs, self.n_rows)
        check_counts(*numbers, *(number for span in (*self.orfs, *self.rows) for number in span))
        if not is_feature_file(self.name) or not isinstance(self.label, str):
            raise ValueError(f"{self.name!r} is no feature file of a shard with a label")

    @classmethod
    def of(
        cls, name: str, embeddings: Embeddings, attributes: Attributes, hidden: Collection[str] = ()
    ) -> IndexPart:
        """Describe the file of some ORFs; the index shows all except the hidden ones."""
        ids, n_rows = embeddings.ids, embeddings.lengths if embeddings.per_residue else 1
        bounds: list[int] = np.cumsum([0, *np.broadcast_to(n_rows, len(ids))]).tolist()
        mask = np.array([orf_id not in hidden for orf_id in ids], dtype=np.bool_)
        orfs = tuple(runs_of(mask))
        rows = tuple((bounds[first], bounds[end]) for first, end in orfs)
        dim, label = embeddings.vectors.shape[1], _label_of(attributes)
        return cls(name, label, dim, len(ids), bounds[-1], orfs, rows)

    @classmethod
    def of_shard(
        cls,
        store: FeatureStore,
        shard: Shard,
        features: ShardFeatures,
        hidden: Collection[str],
        layout: FeatureFormat,
    ) -> list[IndexPart]:
        """Also write the files of a shard in another format, and describe them for an index.

        Both leave out the hidden ORFs.
        """
        parts = []
        for path, embeddings in features.files:
            export(path, embeddings.without(hidden), layout, store.encoder, store.tree)
            if embeddings.vectors.shape[1]:  # else copies whose originals have no vector
                attributes = store.attributes(shard, copies=int(path != store.path(shard)))
                parts.append(cls.of(path.name, embeddings, attributes, hidden))
        return parts

    @staticmethod
    def write_index(path: Path, parts: Iterable[IndexPart], tree: Tree) -> None:
        """Write an HDF5 file over the feature files in the folder of the same name, in order.

        Its groups ``groups/000000``, ... have ``ids``, ``lengths`` and ``embeddings`` of up to
        ``FILES_PER_GROUP`` files each. Up to ``MOST_AT_ROOT`` files in all, the root has the same
        three datasets, over all groups. The datasets are virtual and name files by relative paths,
        so the folder can be moved.

        Raises:
            FeatureFileError: a file was damaged since it was read.
        """
        parts = sorted(parts, key=lambda part: part.place)
        shown = [part for part in parts if part.orfs]
        dim = parts[0].dim if parts else 0
        with new_hdf5() as h5:
            h5.attrs.update(_attributes_of(path, parts))
            h5.attrs["parts_sha256"] = hash_of(part.label.encode() for part in shown)
            groups = h5.create_group("groups")
            for number, first in enumerate(range(0, len(shown), FILES_PER_GROUP)):
                group = groups.create_group(f"{number:06}")
                some = shown[first : first + FILES_PER_GROUP]
                for name in _DATASETS:
                    _add_virtual(group, name, dim, list(_pieces(path.stem, some, name)))
            for name in _DATASETS if len(shown) <= MOST_AT_ROOT else ():
                sizes = [(group[name].name, len(group[name])) for group in groups.values()]
                _add_virtual(h5, name, dim, [(".", place, n, (0, n)) for place, n in sizes])
            h5.flush()
            content = bytes(h5.id.get_file_image())
        tree.write_whole(path, content)

    @property
    def place(self) -> tuple[int, str]:
        """Sort key: number of the shard, then its copies."""
        return int(self.name.split(".")[0].split("_")[0]), self.name


def _attributes_of(path: Path, parts: Sequence[IndexPart]) -> dict[str, Any]:
    """The attributes that all files share, taken from the first."""
    if not parts:
        return {}
    first = path.with_name(path.stem) / parts[0].name
    with reading(first), open_features(first) as h5:
        return {name: h5.attrs[name] for name in h5.attrs if name not in _OF_ONE_FILE}


def _pieces(folder: str, parts: Iterable[IndexPart], name: str) -> Iterator[_Piece]:
    """Yield the rows of a dataset that an index shows, file by file."""
    of_vectors = name == "embeddings"
    for part in parts:
        n_rows, spans = (part.n_rows, part.rows) if of_vectors else (part.n_orfs, part.orfs)
        for span in spans:
            yield f"{folder}/{part.name}", name, n_rows, span


def _add_virtual(group: h5py.Group, name: str, dim: int, pieces: Sequence[_Piece]) -> None:
    """Add a virtual dataset of these pieces. h5py's own classes take ten times as long."""
    from h5py import h5d, h5p, h5s, h5t

    of_vectors = name == "embeddings"
    kind = {"ids": text_type(), "lengths": np.dtype(np.int32), "embeddings": np.dtype(np.float32)}
    row = (dim,) if of_vectors else ()
    ends = [0, *accumulate(end - first for _, _, _, (first, end) in pieces)]
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_layout(h5d.VIRTUAL)
    layout.set_obj_track_times(False)  # the same content gives the same bytes

    def rows_of(n_rows: int, first: int, end: int) -> h5s.SpaceID:
        space = h5s.create_simple((n_rows, *row))
        space.select_hyperslab((first, *(0 for _ in row)), (end - first, *row))
        return space

    for (file, dataset, n_rows, span), (at, end) in zip(pieces, pairwise(ends), strict=True):
        target, source = rows_of(ends[-1], at, end), rows_of(n_rows, *span)
        layout.set_virtual(target, file.encode(), dataset.encode(), source)
    if of_vectors:  # rows of a missing file must not read as zeros
        layout.set_fill_value(np.array([np.nan]))
    space = h5s.create_simple((ends[-1], *row))
    h5d.create(group.id, name.encode(), h5t.py_create(kind[name], logical=True), space, layout)


def check_index(path: Path) -> None:
    """
    Raises:
        FeatureFileError: a file of the index is missing, or is not the one that it was written for.
    """
    with reading(path):
        with open_features(path) as h5:
            written_for = h5.attrs["parts_sha256"]
        files = [path.parent / name for name, _ in _shown_orfs(path)]
        folder = path.with_name(path.stem)
        labels = (_label_of(read_label(file, {}).attributes).encode() for file in files)
        if any(file.parent != folder for file in files) or hash_of(labels) != written_for:
            raise FeatureFileError(f"{printable(path)} belongs to other files", hint=_WRITE_ANEW)


def read_shown(store: FeatureStore) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each id in the index of a store, with its rows.

    The files are read one by one, and verified.

    Raises:
        FeatureFileError: the index or a file is missing, or not whole.
    """
    check_index(store.index)
    attributes = {"fingerprint": store.fingerprint}
    for name, spans in _shown_orfs(store.index):
        embeddings = read_embeddings(store.folder / Path(name).name, attributes)
        rows = split_rows(embeddings)
        for span in spans:
            yield from zip(embeddings.ids[slice(*span)], rows[slice(*span)], strict=True)


def _shown_orfs(index: Path) -> Iterator[tuple[str, list[Span]]]:
    """The files that an index names, in order, and which ORFs it shows of each."""
    with open_features(index) as h5:
        for group in h5["groups"].values():
            sources = group["ids"].virtual_sources()
            for name, of_file in groupby(sources, key=lambda source: source.file_name):
                bounds = [source.src_space.get_select_bounds() for source in of_file]
                yield name, [(first, last + 1) for (first,), (last,) in bounds]


def _label_of(attributes: Mapping[str, Any]) -> str:
    """The text that identifies a file among those of its run."""
    return repr([str(attributes.get(name)) for name in _OF_ONE_FILE])
