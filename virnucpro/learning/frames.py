"""The frames of labelled records, in a folder: made once, mapped by every process, and weighed.

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
label that fits they count as nothing, and are made again. They are written as they grow. What is
sent to another process is a file's path, never its content, so that all processes of a machine
share one copy of it.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from virnucpro.ground.config import Store
from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.files import as_text, read_json, sha256, writing
from virnucpro.ground.log import printable
from virnucpro.ground.records import FastaRecord, Orf, from_bfloat16
from virnucpro.ground.tree import Tree
from virnucpro.learning.records import Labelled, LabelledRecord, Split
from virnucpro.run.folder import RunDir
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.kmers import N_FEATURES, Sketch, frame_composition
from virnucpro.sequences.translate import STANDARD, Chunk, GeneticCode, translate_six_frames

Values = NDArray[Any]
Rows = NDArray[np.int64]
_Add = Callable[[Values], None]
_MOST_WEIGHT = 10.0  # largest weight of a frame, where the mean is 1
BASES_POWER = 0.25  # of what a group has, in how much it counts
GC_EDGES = np.linspace(0.25, 0.7, 10)  # of the bins in which both labels weigh the same
HEAVIEST = 4.0  # times as much as without bins
_MOST_MAPS = 256  # feature files of one process: each holds a file open, of usually 1,024
_VECTORS, _VECTOR_ROWS = "vectors.json", "vector_rows.npy"
_LABEL, _RECORDS = "label.json", "records.json"
# the type of each column, and the number of values in a row, if it is an array itself
_COLUMNS: dict[str, tuple[str, int | None]] = {
    "proteins.npy": ("|u1", None),
    "protein_ends.npy": ("<i8", None),
    "ids.npy": ("|u1", None),
    "id_ends.npy": ("<i8", None),
    "composition.npy": ("<f4", N_FEATURES),
    "chunk.npy": ("<i8", None),
    "chunks.npy": ("<i8", 3),
    "kmers.npy": ("<i8", 2),
}
_FORMAT = 3
_FRAMES_AT_ONCE = 4096
_MOST_RECORDS = 2**36  # bytes of the file of records, which is ours


class _Mapped:
    """An array in a file, of which memory holds what is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: Values = np.load(path, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type[_Mapped], tuple[Path]]:
        return _Mapped, (self.path,)

    def __getitem__(self, key: Any) -> Values:  # noqa: ANN401 - all that numpy takes
        return np.asarray(self._values[key])

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape


class _FeatureRows:
    """The vectors of feature files, one file behind the other, mapped as they are looked at.

    Trainings, seeds and ranks that read the same files share the pages of one copy.
    """

    def __init__(
        self, files: Sequence[tuple[str, int, int]], dim: int, store: Store = "float32"
    ) -> None:
        """A file is its path, the byte at which its vectors begin, and their number."""
        self.files, self.dim, self.store = files, dim, store
        self._firsts = np.cumsum([0, *(n for _, _, n in files)], dtype=np.int64)
        self._maps: OrderedDict[int, Values] = OrderedDict()  # by use, the last used at the end

    def __reduce__(self) -> tuple[type[_FeatureRows], tuple[object, ...]]:
        return _FeatureRows, (self.files, self.dim, self.store)

    def __getitem__(self, rows: Rows) -> Values:
        """(k,) -> (k, dim)"""
        of_file = np.searchsorted(self._firsts, rows, side="right") - 1
        values = np.empty((len(rows), self.dim), dtype=np.float32)
        for number in np.unique(of_file).tolist():
            inside = of_file == number
            stored = self._map(number)[rows[inside] - self._firsts[number]]
            values[inside] = from_bfloat16(stored) if self.store == "bfloat16" else stored
        return values

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.dim

    def _map(self, number: int) -> Values:
        if number not in self._maps:
            path, begin, n = self.files[number]
            kind = "<u2" if self.store == "bfloat16" else "<f4"
            self._maps[number] = np.memmap(path, kind, "r", begin, (n, self.dim))
            if len(self._maps) > _MOST_MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(number)
        return self._maps[number]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """Some rows of an array. They are read when they are asked for."""

    column: Values | _Mapped | _FeatureRows  # (n_all, width)
    rows: Rows  # (n,)

    @classmethod
    def of(cls, values: Values) -> ArrayRows:
        return cls(values, np.arange(len(values)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return int(self.column.shape[1])

    def __getitem__(self, rows: Rows | slice) -> Values:
        """(k,) -> (k, width)"""
        values: Values = self.column[self.rows[rows]]
        return values

    def blocks(self, n_rows: int = 8192) -> Iterator[Values]:
        """Blocks of rows, in order."""
        for first in range(0, len(self), n_rows):
            yield self[first : first + n_rows]

    def take(self, rows: Rows) -> ArrayRows:
        return ArrayRows(self.column, self.rows[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Some of the words in a row of letters. They are read when they are asked for."""

    letters: Values | _Mapped  # uint8, UTF-8
    ends: Values | _Mapped  # (n_all + 1,): word i is ``letters[ends[i]:ends[i + 1]]``
    rows: Rows  # (n,)

    @classmethod
    def of(cls, words: Sequence[str]) -> Texts:
        encoded = [word.encode() for word in words]
        return cls(_letters(encoded), _ends(encoded), np.arange(len(words)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> str:
        row = self.rows[place]
        begin, end = self.ends[row : row + 2]
        word: bytes = self.letters[begin:end].tobytes()
        return word.decode()

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))

    @property
    def lengths(self) -> Rows:
        """The lengths of the words in bytes. (n,)"""
        lengths: Rows = self.ends[self.rows + 1] - self.ends[self.rows]
        return lengths

    def take(self, rows: Rows) -> Texts:
        return Texts(self.letters, self.ends, self.rows[rows])


def _letters(words: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(words), dtype=np.uint8)


def _ends(words: Sequence[bytes]) -> Rows:
    """The ends of the words among the letters of all, behind a 0. (n + 1,)"""
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


@contextmanager
def growing(path: Path, dtype: str, width: int | None = None) -> Iterator[_Add]:
    """A function that adds rows to an array, which appears in ``path`` at the end of the block.

    A row is one value, or ``width`` of them.

    Raises:
        OutputError, StorageError: as ``files.writing``.
    """
    row_shape = () if width is None else (width,)
    n_rows = 0
    with Tree(path.parents[1]).replacing(path) as out:
        _write_header(out, dtype, (n_rows, *row_shape))

        def add(values: Values) -> None:
            nonlocal n_rows
            assert values.shape[1:] == row_shape
            out.write(np.ascontiguousarray(values, dtype=dtype).tobytes())
            n_rows += len(values)

        yield add
        out.seek(0)
        _write_header(out, dtype, (n_rows, *row_shape))


def _adding_texts(add_letters: _Add, add_ends: _Add) -> Callable[[Sequence[str]], None]:
    """A function that adds words to the two columns that ``Texts`` reads."""
    n_letters = 0
    add_ends(np.zeros(1, dtype=np.int64))

    def add(words: Sequence[str]) -> None:
        nonlocal n_letters
        encoded = [word.encode() for word in words]
        letters, ends = _letters(encoded), _ends(encoded)
        add_letters(letters)
        add_ends(n_letters + ends[1:])
        n_letters += len(letters)

    return add


def _write_header(out: BinaryIO, dtype: str, shape: tuple[int, ...]) -> None:
    """Write numpy's header, which leaves room for any number of rows."""
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(out, facts)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFrames:
    """Stop-free frames with their labels and features; all rows are in step.

    A frame has its record's label. ``chunk`` and ``record`` number the chunks and the records.
    Ids are unique where there is one size of chunks. Groups are numbered in the order of their
    names.
    """

    ids: Texts
    proteins: Texts
    composition: ArrayRows  # (n, N_FEATURES)
    chunk: Rows
    record: Rows
    is_virus: NDArray[np.bool_]
    weight: NDArray[np.float32]
    group: Rows
    vectors: ArrayRows  # (n, dim) if they were made before, else (n, 0)

    def __len__(self) -> int:
        return len(self.chunk)

    @property
    def lengths(self) -> Rows:
        return self.proteins.lengths

    def take(self, rows: Rows) -> LabelledFrames:
        """Some of the frames: all columns can be taken from. (k,) rows"""
        return LabelledFrames(*(getattr(self, one.name).take(rows) for one in fields(self)))


def given_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """The weights of the manifest. (n,)"""
    return frames.weight


def balanced_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights that give a group the square root of its frames, and both classes the same.

    (n,) with mean 1. A few large genomes would otherwise stand for all of their
    class. None is over ``_MOST_WEIGHT`` by much: a group of one frame says little.
    """
    _, group, size = np.unique(frames.group, return_inverse=True, return_counts=True)
    weight = frames.weight / np.sqrt(size[group])
    for is_virus in (False, True):
        rows = frames.is_virus == is_virus
        if rows.any():
            weight[rows] = np.minimum(weight[rows] / weight[rows].mean(), _MOST_WEIGHT)
            weight[rows] *= len(frames) / 2 / weight[rows].sum()
    return weight.astype(np.float32)


def recipe_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights of frames that stand for drawing them by the scorer's recipe. (n,) with mean 1

    A group has a low power of its number of frames, times the manifest's weights; both labels have
    the same say, over all and in each bin of GC, as far as ``HEAVIEST`` allows.
    """
    side = 2 * frames.group + frames.is_virus
    _, group, size = np.unique(side, return_inverse=True, return_counts=True)
    weights = frames.weight * size[group] ** (BASES_POWER - 1)
    bins = np.digitize(_gc_of(frames), GC_EDGES)
    for label in (False, True):
        rows = frames.is_virus == label
        if rows.any():
            weights[rows] = np.minimum(weights[rows] / weights[rows].mean(), _MOST_WEIGHT)
            weights[rows] /= weights[rows].sum()
    for number in range(len(GC_EDGES) + 1):
        inside = bins == number
        total = weights[inside].sum()
        for label in (False, True):
            rows = inside & (frames.is_virus == label)
            if rows.any():
                weights[rows] *= min(HEAVIEST, total / 2 / weights[rows].sum())
    even: NDArray[np.float32] = (weights / weights.mean()).astype(np.float32)
    return even


WEIGHTS = {"auto": balanced_weights, "recipe": recipe_weights, "none": given_weights}


def _gc_of(frames: LabelledFrames) -> Values:
    """The share of G and C in the codons of each frame. (n,)"""
    codons = np.arange(len(STANDARD.codons))
    n_gc = sum(np.isin(codons // 4**place % 4, (1, 2)).astype(np.float64) for place in range(3))
    blocks = [block[:, : len(codons)] @ n_gc / 3 for block in frames.composition.blocks()]
    return np.concatenate(blocks) if blocks else np.empty(0)


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
    with ExitStack() as files:
        add = {
            name: files.enter_context(growing(folder / name, dtype, width))
            for name, (dtype, width) in _COLUMNS.items()
        }
        add_proteins = _adding_texts(add["proteins.npy"], add["protein_ends.npy"])
        add_ids = _adding_texts(add["ids.npy"], add["id_ends.npy"])
        sketched = _sketched(pairs, add["kmers.npy"])
        frames = _translated(sketched, chunk_sizes, code, records, add["chunks.npy"])
        while block := list(islice(frames, _FRAMES_AT_ONCE)):
            of_ids, of_proteins, of_bases, numbers = zip(*block, strict=True)
            add_proteins(of_proteins)
            add_ids(of_ids)
            add["composition.npy"](frame_composition(of_bases))
            add["chunk.npy"](np.array(numbers, dtype=np.int64))
    tree.write_whole(folder / _RECORDS, json.dumps(list(map(astuple, records))))


def _sketched(pairs: Iterable[Labelled], add: _Add) -> Iterator[Labelled]:
    """The same records; number of the record and hash of each of its sampled k-mers are added."""
    for number, (labelled, record) in enumerate(pairs):
        hashes = Sketch.of(record.sequence).hashes.astype(np.int64)
        add(np.column_stack([np.full_like(hashes, number), hashes]))
        yield labelled, record


def _translated(
    pairs: Iterable[Labelled],
    chunk_sizes: Sequence[int],
    code: GeneticCode,
    records: list[LabelledRecord],
    add_chunks: _Add,
) -> Iterator[tuple[str, str, str, int]]:
    """Id, protein, bases and number of the chunk of every frame, as ``predict`` translates them.

    Each record is cut here, at each of the chunk sizes, and nowhere else; its chunks are added,
    and the record itself is put into ``records``.
    """
    n_chunks = 0
    for labelled, record in pairs:
        for size in chunk_sizes:
            chunks, orfs = cut(record, size, code)
            rows = [(len(records), chunk.start, size) for chunk in chunks]
            add_chunks(np.array(rows, dtype=np.int64).reshape(-1, 3))
            number = {chunk.id: n_chunks + i for i, chunk in enumerate(chunks)}
            n_chunks += len(chunks)
            for orf in orfs:
                bases = orf.codons_in(record.sequence)
                yield orf.id, orf.protein, bases, number[orf.chunk_id]
        records.append(labelled)


def cut(record: FastaRecord, size: int, code: GeneticCode) -> tuple[list[Chunk], list[Orf]]:
    """The chunks of a record, and their stop-free frames, as ``predict`` makes them."""
    chunks = list(Chunk.cut(record, size))
    return chunks, translate_six_frames(chunks, code)


def link_vectors(folder: Path, extracted: Path, ids: Iterable[str]) -> None:
    """Note where the vectors of these frames lie in a run folder of ``extract``; none is copied.

    All feature files are read once, to the last bit. Memory holds the ids, and one file.

    Raises:
        FeatureFileError: a vector is not there, or a file is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    wanted = list(ids)
    place = {name: row for row, name in enumerate(wanted)}
    rows = np.full(len(wanted), -1, dtype=np.int64)
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
            f"{printable(extracted)} holds no vector of {printable(wanted[absent[0]])} "
            f"({len(absent):,} missing of {len(wanted):,})",
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
    rows = _FeatureRows(facts["files"], facts["dim"], facts.get("store", "float32"))
    return ArrayRows(rows, _Mapped(folder / _VECTOR_ROWS)[:])


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
            _Mapped(folder / name) for name in _COLUMNS
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
        return Sketch(np.unique(self.kmers[is_chosen[self.kmers[:, 0]], 1].astype(np.uint32)))

    def select(
        self, splits: Mapping[str, Split], part: Split, chunk_sizes: Sequence[int]
    ) -> LabelledFrames:
        """The frames of one split, cut at these sizes."""
        is_chosen = np.array([splits[r.group] == part for r in self.records], dtype=np.bool_)
        size = self.chunks[self.all.chunk, 2]
        rows = np.flatnonzero(is_chosen[self.all.record] & np.isin(size, chunk_sizes))
        return self.all.take(rows)
