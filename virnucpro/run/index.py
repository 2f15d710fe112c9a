"""One HDF5 file over all vectors of a run, and feature files in other formats."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import FeatureFormat, Reads
from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.log import announce, printable
from virnucpro.ground.numeric import Mask, runs_of
from virnucpro.ground.records import Embeddings
from virnucpro.ground.tree import Tree
from virnucpro.run.feature_file import (
    DAMAGE,
    new_hdf5,
    open_features,
    read_embeddings,
    read_label,
    refusal,
    text_type,
)
from virnucpro.run.features import FeatureStore

if TYPE_CHECKING:
    import h5py

# an index opens all its parts at once, and reads those over the limit of open files, which is
# usually 1,024, as NaN and empty ids; HDF5 says nothing
MAX_PARTS = 1000
_WRITE_ANEW = "run the command of the run again with --resume: what is missing is made again"
_OF_ONE_FILE = ("shard_sha256", "copies")  # attributes that a file over many does not have


@dataclass(frozen=True, slots=True, eq=False)
class IndexPart:
    """A feature file as an index needs to know it."""

    path: Path
    mask: Mask  # (n_orfs,) which ORFs to show
    lengths: NDArray[np.int64]  # (n_orfs,) rows of each
    dim: int  # numbers in a row
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, mask: Mask, *, per_residue: bool) -> IndexPart:
        """
        Raises:
            FeatureFileError: the file has come to harm since it was read.
        """
        try:
            with open_features(path) as h5:
                lengths = h5["lengths"][:] if per_residue else np.ones_like(mask, dtype=np.int64)
                return cls(path, mask, lengths, h5["embeddings"].shape[1], dict(h5.attrs))
        except DAMAGE as error:
            raise refusal(path, error) from error


class FeatureIndex:
    """One HDF5 file over the feature files of an encoder, unless they are too many for one."""

    def __init__(self, path: Path, tree: Tree) -> None:
        self.path, self.tree = path, tree
        self.n_parts = 0
        self.parts: list[IndexPart] = []

    def extend(self, parts: Sequence[IndexPart]) -> None:
        """Remember feature files, in any order."""
        self.n_parts += len(parts)
        self.parts += parts[: MAX_PARTS - len(self.parts)]

    def write(self, features: Path) -> None:
        """Write it; or delete an old one, and say why there is none over the files of a folder."""
        if self.n_parts <= MAX_PARTS:
            in_order = sorted(self.parts, key=lambda part: part.path.name)
            write_index(self.path, in_order, self.tree)
            return
        self.tree.delete(self.path)
        announce(
            f"no {self.path.name}: HDF5 cannot join {self.n_parts:,} files ({MAX_PARTS:,} at "
            f"most); read those in {printable(features)} one by one"
        )


class _Piece(NamedTuple):
    """Neighbouring rows of one part."""

    part: str  # relative path
    n_rows: int  # of the whole part
    rows: slice


def write_index(path: Path, parts: Sequence[IndexPart], tree: Tree) -> None:
    """Write one HDF5 file whose ``ids``, ``lengths`` and ``embeddings`` are those of many.

    The datasets are virtual and name the parts, ``MAX_PARTS`` at most, by relative paths, so that
    the folder can be moved.
    """
    assert len(parts) <= MAX_PARTS, "readers cannot open so many"
    pieces = _pieces(path.parent, parts)
    kinds: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
        "ids": ((), text_type()),
        "lengths": ((), np.dtype(np.int32)),
        "embeddings": ((parts[0].dim if parts else 0,), np.dtype(np.float32)),
    }
    attributes = dict(parts[0].attributes) if parts else {}
    for name in _OF_ONE_FILE:
        attributes.pop(name, None)
    shown = {piece.part for piece in pieces["ids"]}
    attributes["parts_sha256"] = _hash_of_labels(
        part.attributes for part in parts if part.path.relative_to(path.parent).as_posix() in shown
    )
    with new_hdf5() as h5:
        h5.attrs.update(attributes)
        for name, (row_shape, kind) in kinds.items():
            layout = _lay_out(name, pieces[name], row_shape, kind)
            # rows of a part that is gone must not read as zeros
            h5.create_virtual_dataset(name, layout, np.nan if name == "embeddings" else None)
        h5.flush()
        content = bytes(h5.id.get_file_image())
    tree.write_whole(path, content)


def _pieces(folder: Path, parts: Sequence[IndexPart]) -> dict[str, list[_Piece]]:
    """The pieces of each dataset."""
    pieces: dict[str, list[_Piece]] = {name: [] for name in ("ids", "lengths", "embeddings")}
    for part in parts:
        name_of_part = part.path.relative_to(folder).as_posix()
        bounds = np.arange(len(part.mask) + 1)
        rows = np.concatenate([[0], np.cumsum(part.lengths)])
        for name, of_dataset in pieces.items():
            where = rows if name == "embeddings" else bounds
            of_dataset += [
                _Piece(name_of_part, int(where[-1]), slice(int(where[a]), int(where[b])))
                for a, b in runs_of(part.mask)
            ]
    return pieces


def check_index(path: Path) -> None:
    """
    Raises:
        FeatureFileError: the parts of an index are not those that it was written for.
    """
    try:
        with open_features(path) as h5:
            ids, written_for = h5["ids"], h5.attrs["parts_sha256"]
            sources = ids.virtual_sources() if ids.is_virtual else []
            parts = list(dict.fromkeys(source.file_name for source in sources))
        if strangers := [part for part in parts if ".." in part or Path(part).is_absolute()]:
            raise FeatureFileError(
                f"{printable(path)} names {printable(strangers[0])}, which is not of this run",
                hint=_WRITE_ANEW,
            )
        absent_parts = [part for part in parts if not (path.parent / part).exists()]
        if absent_parts:
            raise FeatureFileError(
                f"{printable(path)} needs {printable(absent_parts[0])}, which is missing",
                hint=_WRITE_ANEW,
            )
        if _hash_of_parts(path.parent, parts) != written_for:
            raise FeatureFileError(
                f"{printable(path)} was written for other files", hint=_WRITE_ANEW
            )
    except DAMAGE as error:
        raise refusal(path, error) from error


def read_shown(store: FeatureStore) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each id that the index of a store shows, with its rows; without an index, every id.

    The files are read one by one: an index can open so many at once that HDF5 gives NaN instead.

    Raises:
        FeatureFileError: a file is not whole.
    """
    if store.index.exists():
        check_index(store.index)
        pieces_of = _shown_rows(store.index)
        for path, attributes in store.files():
            if pieces := pieces_of.get(path.name):
                rows = split_rows(embeddings := read_embeddings(path, attributes))
                for piece in pieces:
                    yield from zip(embeddings.ids[piece], rows[piece], strict=True)
        return
    for embeddings in store.read_files():
        yield from zip(embeddings.ids, split_rows(embeddings), strict=True)


def _shown_rows(index: Path) -> dict[str, list[slice]]:
    """The rows that an index shows of each file, by its name."""
    rows_of: dict[str, list[slice]] = {}
    with open_features(index) as h5:
        ids = h5["ids"]
        for source in ids.virtual_sources() if ids.is_virtual else []:
            (first,), (last,) = source.src_space.get_select_bounds()
            rows_of.setdefault(Path(source.file_name).name, []).append(slice(first, last + 1))
    return rows_of


def _hash_of_parts(folder: Path, parts: Sequence[str]) -> str:
    """The SHA-256 over the parts' shards, and over which parts hold copies."""
    return _hash_of_labels(read_label(folder / part, {}).attributes for part in parts)


def _hash_of_labels(labels: Iterable[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for attributes in labels:
        digest.update(repr([str(attributes.get(name)) for name in _OF_ONE_FILE]).encode())
    return digest.hexdigest()


def _lay_out(
    name: str, pieces: Sequence[_Piece], row_shape: tuple[int, ...], kind: np.dtype[np.generic]
) -> h5py.VirtualLayout:
    import h5py

    n_rows = sum(piece.rows.stop - piece.rows.start for piece in pieces)
    layout = h5py.VirtualLayout((n_rows, *row_shape), kind)
    layout.dcpl.set_obj_track_times(False)  # the same content gives the same bytes
    first = 0
    for piece in pieces:
        last = first + piece.rows.stop - piece.rows.start
        source = h5py.VirtualSource(piece.part, name, (piece.n_rows, *row_shape), kind)
        layout[first:last] = source[piece.rows]
        first = last
    return layout


def export(
    path: Path, embeddings: Embeddings, layout: FeatureFormat, reads: Reads, tree: Tree
) -> None:
    """Write the content of a feature file beside it, in another format."""
    match layout:
        case "npz":
            save_npz(path.with_suffix(".npz"), embeddings, tree)
        case "pt" if reads == "dna":
            save_pt_of_bases(path.with_suffix(".pt"), embeddings, tree)
        case "pt":
            save_pt(path.with_suffix(".pt"), embeddings, tree)


def save_npz(path: Path, embeddings: Embeddings, tree: Tree) -> None:
    """``ids``, ``lengths`` and ``embeddings``, for ``numpy.load`` without pickle."""
    with tree.replacing(path) as out:
        np.savez(
            out,
            ids=np.array(embeddings.ids, dtype=np.str_),
            lengths=embeddings.lengths,
            embeddings=embeddings.vectors,
        )


def save_pt(path: Path, embeddings: Embeddings, tree: Tree) -> None:
    """The layout of VirNucPro's ``_ESM.pt``: ``proteins`` (ids) and ``data`` (a tensor each)."""
    from torch import from_numpy

    data = [from_numpy(rows.copy()) for rows in split_rows(embeddings)]
    _save(path, {"proteins": list(embeddings.ids), "data": data}, tree)


def save_pt_of_bases(path: Path, embeddings: Embeddings, tree: Tree) -> None:
    """The layout of VirNucPro's ``_DNABERT_S.pt``: ``nucleotide`` (ids) and ``data``, of which each
    entry has an id and a list of numbers, which torch makes into the same float32 again."""
    data = [
        {"label": frame, "mean_representation": row.tolist()}
        for frame, row in zip(embeddings.ids, embeddings.vectors, strict=True)
    ]
    _save(path, {"nucleotide": list(embeddings.ids), "data": data}, tree)


def _save(path: Path, content: object, tree: Tree) -> None:
    import torch

    image = io.BytesIO()  # a path would be written into the archive
    torch.save(content, image)
    tree.write_whole(path, image.getbuffer())


def split_rows(embeddings: Embeddings) -> list[NDArray[np.float32]]:
    """The rows of each ORF: (dim,), or (length, dim) when there is one per residue."""
    if embeddings.per_residue:
        return np.split(embeddings.vectors, np.cumsum(embeddings.lengths))[:-1]
    return list(embeddings.vectors)
