"""The frames of a training in a folder of their own: made once, mapped by every process.

``proteins.npy``, ``ids.npy``       letters, one frame after another
``protein_ends.npy``, ``id_ends.npy``  where each ends
``composition.npy``                 (n, N_FEATURES)
``places.npy``                      chunk, record and chunk size of each frame
``records.json``                    what the manifest says of each record, and its digest
``vectors.npy``                     (n, dim), only for a head on vectors of the engine
``label.json``                      what all of it was made of, and the hash of each file; the last

The files hold every record, cut at every chunk size: the split chooses among them. Without a
label that fits they count as nothing, and are made again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.files import as_text, read_json, sha256, writing
from virnucpro.ground.records import FastaRecord
from virnucpro.ground.tree import Tree
from virnucpro.learning.labelled.arrays import (
    ArrayRows,
    Mapped,
    Rows,
    Texts,
    growing,
    growing_texts,
)
from virnucpro.learning.labelled.digests import record_digest
from virnucpro.learning.labelled.frames import LabelledFrames, translate_records
from virnucpro.learning.labelled.records import Labelled, LabelledRecord
from virnucpro.learning.labelled.split import Split
from virnucpro.sequences.composition import N_FEATURES, frame_composition
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

VECTORS = "vectors.npy"
_LABEL, _RECORDS = "label.json", "records.json"
_COLUMNS = (
    "proteins.npy",
    "protein_ends.npy",
    "ids.npy",
    "id_ends.npy",
    "composition.npy",
    "places.npy",
)
_FORMAT = 1
_MOST_RECORDS = 2**36  # bytes of the file of records, which is ours


@dataclass(frozen=True, slots=True)
class FrameOrigin:
    """The sources of frames, which determine their content."""

    manifest_sha256: str
    fasta_sha256: tuple[str, ...]  # in the order of the manifest
    chunk_sizes: tuple[int, ...]
    genetic_code: int = 11
    format: int = _FORMAT


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """All records of a training, in the order of their numbers, and the digests of their bases."""

    records: tuple[LabelledRecord, ...]
    digests: tuple[int, ...]

    def of_splits(self, splits: Mapping[str, Split], *parts: Split) -> Labels:
        places = [i for i, r in enumerate(self.records) if splits[r.group] in parts]
        return Labels(
            tuple(self.records[i] for i in places), tuple(self.digests[i] for i in places)
        )


def copying(pairs: Iterable[Labelled], path: Path) -> Iterator[Labelled]:
    """The same records; when all have passed, one FASTA file has them, with their ids."""
    with Tree(path.parent).replacing(path) as content, as_text(content) as out:
        for labelled, record in pairs:
            write_record(out, record.id, record.sequence)
            yield labelled, record


def write_frames(
    folder: Path,
    pairs: Iterable[Labelled],
    chunk_sizes: Sequence[int],
    code: GeneticCode = STANDARD,
) -> None:
    """Translate the records, and write all but the label. Memory holds some thousand frames.

    Raises:
        OutputError, StorageError: as ``files.writing``.
    """
    tree = Tree(folder.parent)
    with writing(folder):
        tree.make_folder(folder)
        for name in (_LABEL, VECTORS):
            tree.delete(folder / name)
    tree.sweep_folder(folder)
    noted: list[tuple[object, ...]] = []

    def noting() -> Iterator[FastaRecord]:
        for labelled, record in pairs:
            noted.append((*astuple(labelled), record_digest(record.sequence)))
            yield record

    proteins, protein_ends, ids, id_ends, composition, places = (folder / n for n in _COLUMNS)
    with (
        growing_texts(proteins, protein_ends) as add_proteins,
        growing_texts(ids, id_ends) as add_ids,
        growing(composition, "<f4", N_FEATURES) as add_composition,
        growing(places, "<i8", 3) as add_places,
    ):
        for block in translate_records(noting(), chunk_sizes, code):
            add_proteins(block.proteins)
            add_ids(block.ids)
            add_composition(frame_composition(block.bases))
            add_places(np.array(block.places, dtype=np.int64).reshape(-1, 3))
    tree.write_whole(folder / _RECORDS, json.dumps(noted))


def write_label(folder: Path, source: FrameOrigin, *beside: Path) -> None:
    """Say of the frames, and of files that were made with them, that they are whole."""
    hashes = {str(path): digest for path, digest in _hashes(folder, beside).items()}
    label = {"source": asdict(source), "files": hashes}
    Tree(folder.parent).write_whole(folder / _LABEL, json.dumps(label, indent=2))


def are_whole(folder: Path, source: FrameOrigin, *beside: Path) -> bool:
    """True if the folder holds just these frames, and all files are undamaged."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        label = read_json(folder / _LABEL)
        own = json.loads(json.dumps(asdict(source)))
        return bool(label == {"source": own, "files": _hashes(folder, beside)})
    return False


def _hashes(folder: Path, beside: Iterable[Path]) -> dict[str, str]:
    paths = [*(folder / name for name in (*_COLUMNS, _RECORDS)), *beside]
    return {path.name: sha256(path) for path in paths}


def delete_frames(folder: Path, *beside: Path) -> None:
    with suppress(OSError):  # it is told what went wrong before
        shutil.rmtree(folder)
    for path in beside:
        Tree(path.parent).delete(path)


def read_labels(folder: Path) -> Labels:
    """The records of frames that are whole."""
    rows = read_json(folder / _RECORDS, most_bytes=_MOST_RECORDS)
    records = tuple(LabelledRecord(*facts) for *facts, _ in rows)
    return Labels(records, tuple(digest for *_, digest in rows))


@dataclass(frozen=True, slots=True, eq=False)
class FrameStore:
    """All frames of a folder, with their labels."""

    labels: Labels
    all: LabelledFrames
    size: Rows  # of the chunks

    @classmethod
    def open(cls, folder: Path) -> FrameStore:
        """Map frames that are whole."""
        proteins, protein_ends, ids, id_ends, composition, places = (
            Mapped(folder / name) for name in _COLUMNS
        )
        labels = read_labels(folder)
        rows = np.arange(len(places))
        chunk, record, size = (places[:, column] for column in range(3))
        groups = np.unique([r.group for r in labels.records], return_inverse=True)[1]
        vectors = folder / VECTORS
        return cls(
            labels,
            LabelledFrames(
                Texts(ids, id_ends, rows),
                Texts(proteins, protein_ends, rows),
                ArrayRows(composition, rows),
                chunk,
                record,
                np.array([r.is_virus for r in labels.records], dtype=np.bool_)[record],
                np.array([r.weight for r in labels.records], dtype=np.float32)[record],
                groups[record],
                ArrayRows(Mapped(vectors) if vectors.exists() else _nothing(len(rows)), rows),
            ),
            size,
        )

    def select(
        self, splits: Mapping[str, Split], part: Split, chunk_sizes: Sequence[int]
    ) -> LabelledFrames:
        """The frames of one split, cut at these sizes."""
        is_chosen = np.array([splits[r.group] == part for r in self.labels.records], dtype=np.bool_)
        rows = np.flatnonzero(is_chosen[self.all.record] & np.isin(self.size, chunk_sizes))
        return self.all.take(rows)


def _nothing(n_rows: int) -> NDArray[np.float32]:
    return np.empty((n_rows, 0), dtype=np.float32)
