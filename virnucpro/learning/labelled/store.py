"""The frames of a training in a folder of their own: made once, mapped by every process.

``proteins.npy``, ``ids.npy``       letters, one frame after another
``protein_ends.npy``, ``id_ends.npy``  where each ends
``composition.npy``                 (n, N_FEATURES)
``chunk.npy``                       the number of each frame's chunk
``chunks.npy``                      record, start and size of each chunk, as the records were cut
``kmers.npy``                       record and hash of each sampled k-mer
``records.json``                    what the manifest says of each record, and its digest
``vectors.json``                    the feature files of ``extract``, for a head on vectors alone
``vector_rows.npy``                 the row of each frame's vector, all files one behind the other
``label.json``                      what all of it was made of, and the hash of each file; the last

The files hold every record, cut at every chunk size: the split chooses among them. Without a
label that fits they count as nothing, and are made again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.files import as_text, read_json, sha256, writing
from virnucpro.ground.log import printable
from virnucpro.ground.tree import Tree
from virnucpro.learning.labelled.frames import (
    ArrayRows,
    FeatureRows,
    LabelledFrames,
    Mapped,
    Rows,
    Texts,
    Values,
    growing,
    growing_texts,
)
from virnucpro.learning.labelled.records import Labelled, LabelledRecord, Split
from virnucpro.run.folder import RunDir
from virnucpro.sequences.composition import N_FEATURES, frame_bases, frame_composition
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.sketch import Sketch, join_sketches, sketch_of
from virnucpro.sequences.translate import chunk_record, translate_six_frames

_VECTORS, _VECTOR_ROWS = "vectors.json", "vector_rows.npy"
_LABEL, _RECORDS = "label.json", "records.json"
_COLUMNS = (
    "proteins.npy",
    "protein_ends.npy",
    "ids.npy",
    "id_ends.npy",
    "composition.npy",
    "chunk.npy",
    "chunks.npy",
    "kmers.npy",
)
_FORMAT = 3
_FRAMES_AT_ONCE = 4096
_MOST_RECORDS = 2**36  # bytes of the file of records, which is ours


Origin = Mapping[str, object]  # what frames are made of, and so what is in them


def origin_of(
    manifest_sha256: str,
    fasta_sha256: Sequence[str],  # in the order of the manifest
    chunk_sizes: Sequence[int],
    genetic_code: int = 11,
) -> Origin:
    return {
        "manifest_sha256": manifest_sha256,
        "fasta_sha256": list(fasta_sha256),
        "chunk_sizes": list(chunk_sizes),
        "genetic_code": genetic_code,
        "format": _FORMAT,
    }


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
        for name in (_LABEL, _VECTORS):
            tree.delete(folder / name)
    tree.sweep_folder(folder)
    records: list[LabelledRecord] = []
    proteins, protein_ends, ids, id_ends, composition, chunk, chunks, kmers = (
        folder / n for n in _COLUMNS
    )
    with (
        growing_texts(proteins, protein_ends) as add_proteins,
        growing_texts(ids, id_ends) as add_ids,
        growing(composition, "<f4", N_FEATURES) as add_composition,
        growing(chunk, "<i8") as add_chunk,
        growing(chunks, "<i8", 3) as add_chunks,
        growing(kmers, "<i8", 2) as add_kmers,
    ):
        frames = _translated(_sketched(pairs, add_kmers), chunk_sizes, code, records, add_chunks)
        while block := list(islice(frames, _FRAMES_AT_ONCE)):
            of_ids, of_proteins, of_bases, numbers = zip(*block, strict=True)
            add_proteins(of_proteins)
            add_ids(of_ids)
            add_composition(frame_composition(of_bases))
            add_chunk(np.array(numbers, dtype=np.int64))
    tree.write_whole(folder / _RECORDS, json.dumps(list(map(astuple, records))))


def _sketched(pairs: Iterable[Labelled], add: Callable[[Values], None]) -> Iterator[Labelled]:
    """The same records; number of the record and hash of each of its sampled k-mers are added."""
    for number, (labelled, record) in enumerate(pairs):
        hashes = sketch_of(record.sequence).astype(np.int64)
        add(np.column_stack([np.full_like(hashes, number), hashes]))
        yield labelled, record


def _translated(
    pairs: Iterable[Labelled],
    chunk_sizes: Sequence[int],
    code: GeneticCode,
    records: list[LabelledRecord],
    add_chunks: Callable[[Values], None],
) -> Iterator[tuple[str, str, str, int]]:
    """Id, protein, bases and number of the chunk of every frame, as ``predict`` translates them.

    Each record is cut here, at each of the chunk sizes, and nowhere else; its chunks are added,
    and the record itself is put into ``records``.
    """
    n_chunks = 0
    for labelled, record in pairs:
        for size in chunk_sizes:
            chunks = list(chunk_record(record, size))
            rows = [(len(records), chunk.start, size) for chunk in chunks]
            add_chunks(np.array(rows, dtype=np.int64).reshape(-1, 3))
            number = {chunk.id: n_chunks + i for i, chunk in enumerate(chunks)}
            n_chunks += len(chunks)
            for orf in translate_six_frames(chunks, code):
                bases = frame_bases(orf, record.sequence)
                yield orf.id, orf.protein, bases, number[orf.chunk_id]
        records.append(labelled)


def link_vectors(folder: Path, extracted: Path, ids: Sequence[str]) -> None:
    """Note where the vectors of these frames lie in a run folder of ``extract``; none is copied.

    All feature files are read once, to the last bit. Memory holds the ids, and one file.

    Raises:
        FeatureFileError: a vector is not there, or a file is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    place = {name: row for row, name in enumerate(ids)}
    rows = np.full(len(ids), -1, dtype=np.int64)
    files: list[tuple[str, int, int]] = []
    n_vectors, dim, numbers = 0, 0, "float32"
    rundir = RunDir(extracted)
    manifest = rundir.read_manifest()
    for store in rundir.stores_of(manifest.recipe) if manifest else ():
        dim, numbers = store.encoder.dim, store.encoder.store
        for path, begin, content in store.read_files():
            names = content.ids
            files.append((str(path.absolute()), begin, len(names)))
            for number, name in enumerate(names, start=n_vectors):
                if (row := place.get(name)) is not None:
                    rows[row] = number
            n_vectors += len(names)
    if (absent := np.flatnonzero(rows < 0)).size:
        raise FeatureFileError(
            f"{printable(extracted)} holds no vector of {printable(ids[absent[0]])} "
            f"({len(absent):,} missing of {len(ids):,})",
            hint="delete the folder: its vectors are made again; those that were given with "
            "--features must be of the same files and --chunk-size",
        )
    tree = Tree(folder.parent)
    with growing(folder / _VECTOR_ROWS, "<i8") as add:
        add(rows)
    tree.write_whole(folder / _VECTORS, json.dumps({"dim": dim, "store": numbers, "files": files}))


def _vectors(folder: Path, n_frames: int) -> ArrayRows:
    """The vectors of all frames where ``link_vectors`` left them, else (n, 0)."""
    if not (folder / _VECTORS).exists():
        return ArrayRows.of(np.empty((n_frames, 0), dtype=np.float32))
    facts = read_json(folder / _VECTORS, most_bytes=_MOST_RECORDS)
    rows = FeatureRows(facts["files"], facts["dim"], facts.get("store", "float32"))
    return ArrayRows(rows, Mapped(folder / _VECTOR_ROWS)[:])


def write_label(folder: Path, origin: Origin, *beside: Path) -> None:
    """Say of the frames, and of files that were made with them, that they are whole."""
    label = {"source": origin, "files": _hashes(folder, beside)}
    Tree(folder.parent).write_whole(folder / _LABEL, json.dumps(label, indent=2))


def are_whole(folder: Path, origin: Origin, *beside: Path) -> bool:
    """True if the folder holds just these frames, and all files are undamaged."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        label = read_json(folder / _LABEL)
        return bool(label == {"source": origin, "files": _hashes(folder, beside)})
    return False


def _hashes(folder: Path, beside: Iterable[Path]) -> dict[str, str]:
    paths = [*(folder / name for name in (*_COLUMNS, _RECORDS)), *beside]
    return {path.name: sha256(path) for path in paths}


def delete_frames(folder: Path, *beside: Path) -> None:
    with suppress(OSError):  # it is told what went wrong before
        shutil.rmtree(folder)
    for path in beside:
        Tree(path.parent).delete(path)


def read_labels(folder: Path) -> tuple[LabelledRecord, ...]:
    """The records of frames that are whole, in the order of their numbers."""
    rows = read_json(folder / _RECORDS, most_bytes=_MOST_RECORDS)
    return tuple(LabelledRecord(*facts) for facts in rows)


@dataclass(frozen=True, slots=True, eq=False)
class FrameStore:
    """All frames of a folder, with their records and chunks."""

    records: tuple[LabelledRecord, ...]
    chunks: Rows  # (n_chunks, 3): record, start and size
    all: LabelledFrames
    kmers: Rows  # (n, 2): record, and hash of one of its sampled k-mers

    @classmethod
    def open(cls, folder: Path) -> FrameStore:
        """Map frames that are whole."""
        proteins, protein_ends, ids, id_ends, composition, chunk_of, chunk_table, kmers = (
            Mapped(folder / name) for name in _COLUMNS
        )
        records, chunk, chunks = read_labels(folder), chunk_of[:], chunk_table[:]
        rows, record = np.arange(len(chunk)), chunks[chunk, 0]
        groups = np.unique([r.group for r in records], return_inverse=True)[1]
        frames = LabelledFrames(
            Texts(ids, id_ends, rows),
            Texts(proteins, protein_ends, rows),
            ArrayRows(composition, rows),
            chunk,
            record,
            np.array([r.is_virus for r in records], dtype=np.bool_)[record],
            np.array([r.weight for r in records], dtype=np.float32)[record],
            groups[record],
            _vectors(folder, len(rows)),
        )
        return cls(records, chunks, frames, kmers[:])

    def sketch(self, splits: Mapping[str, Split], *parts: Split) -> Sketch:
        """The sampled k-mers of all records of some splits."""
        is_chosen = np.array([splits[r.group] in parts for r in self.records], dtype=np.bool_)
        return join_sketches([self.kmers[is_chosen[self.kmers[:, 0]], 1].astype(np.uint32)])

    def select(
        self, splits: Mapping[str, Split], part: Split, chunk_sizes: Sequence[int]
    ) -> LabelledFrames:
        """The frames of one split, cut at these sizes."""
        is_chosen = np.array([splits[r.group] == part for r in self.records], dtype=np.bool_)
        size = self.chunks[self.all.chunk, 2]
        rows = np.flatnonzero(is_chosen[self.all.record] & np.isin(size, chunk_sizes))
        return self.all.take(rows)
