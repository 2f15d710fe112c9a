"""Store frames from labelled records in a folder, once, and weight them for training.

``proteins.npy``, ``ids.npy``          letters, frame after frame
``protein_ends.npy``, ``id_ends.npy``  end of each protein and id
``composition.npy``                    (n, N_FEATURES)
``chunk.npy``                          chunk number of each frame
``chunks.npy``                         record, start and size of each chunk, as records were cut
``kmers.npy``                          record and hash of each sampled k-mer
``records.json``                       manifest facts and digest of each record
``vectors.json``                       feature files from ``extract``, for a head on vectors
``vector_rows.npy``                    vector row of each frame, counted over all files

The files contain every record, cut at every chunk size. The split chooses among them. Every start
of a training rewrites them piece by piece. Every process maps them, so that all processes on a
machine share one copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from virnucpro.core.atomic_io import read_json, storage_errors, text_writer
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import printable
from virnucpro.core.numeric import from_bfloat16
from virnucpro.core.recipe import Store
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord, Orf
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.derived_names import without_number
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.kmers import N_FEATURES, Sketch, frame_composition
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.training.labelled_data import Labelled, LabelledRecord, Split

Values = NDArray[Any]
Rows = NDArray[np.int64]
_Add = Callable[["Values | Sequence[object]"], None]
_MAX_WEIGHT = 10.0  # maximum weight of a frame, if the mean is 1
BASES_POWER = 0.25  # a group counts by its size to this power
GC_EDGES = np.linspace(0.25, 0.7, 10)  # edges of bins in which both labels weigh the same
MAX_BIN_FACTOR = 4.0  # maximum factor that a bin applies to a weight
_COMPOSITIONS_AT_ONCE = 8192  # frames
_MAX_RECORDS_BYTES = 2**36  # maximum bytes of the file of records, which we write ourselves


class _FrameFile(StrEnum):
    """Files besides the columns in a folder of frames."""

    VECTORS = "vectors.json"
    VECTOR_ROWS = "vector_rows.npy"
    RECORDS = "records.json"


class _FeatureRows:
    """Frame vectors in feature files, which are mapped when they are read.

    Trainings, seeds and ranks that read the same files share one copy in the page cache.
    """

    def __init__(
        self, files: Sequence[tuple[str, int, int]], rows: Rows, dim: int, store: Store
    ) -> None:
        """Describe the files.

        Args:
            files: path, byte offset of the vectors, and vector count, per file.
            rows: (n,) int64, row of each frame, counted over all files.
        """
        self.files = files
        self.rows = rows
        self.store = store
        self.shape = (len(rows), dim)
        self._firsts = np.cumsum([0, *(n for _, _, n in files)], dtype=np.int64)
        # Each mapped file stays open, and 1,024 is a usual limit per process.
        self._mapped = lru_cache(256)(self._map)

    def _map(self, number: int) -> Values:
        path, begin, n = self.files[number]
        kind = "<u2" if self.store == "bfloat16" else "<f4"
        return np.memmap(path, kind, "r", begin, (n, self.shape[1]))

    def __getitem__(self, frames: Rows) -> Values:
        """(k,) -> (k, dim)"""
        rows = self.rows[frames]
        file_numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        values = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        for number in np.unique(file_numbers).tolist():
            inside = file_numbers == number
            stored = self._mapped(number)[rows[inside] - self._firsts[number]]
            values[inside] = from_bfloat16(stored) if self.store == "bfloat16" else stored
        return values


def _memory_map(path: Path) -> Values:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _vectors(folder: Path, n_frames: int) -> Values | _FeatureRows:
    """Return all frame vectors if ``link_vectors`` has linked them, else (n, 0)."""
    if not (folder / _FrameFile.VECTORS).exists():
        return np.empty((n_frames, 0), dtype=np.float32)
    facts = read_json(folder / _FrameFile.VECTORS, max_bytes=_MAX_RECORDS_BYTES)
    rows = _memory_map(folder / _FrameFile.VECTOR_ROWS)
    files = [(path, begin, n) for path, begin, n in facts["files"]]
    return _FeatureRows(files, rows, facts["dim"], facts["store"])


def _concatenate(words: Iterable[str]) -> tuple[NDArray[np.uint8], Rows]:
    """Return all letters, (n_letters,), and 0 plus the word ends, (n + 1,)."""
    encoded = [word.encode() for word in words]
    letters = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    return letters, np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _kmer_rows(letters: Values, ends: Rows, rows: Rows) -> list[str]:
    """Return some of the words from ``_concatenate``, by their indices, (k,)."""
    spans = zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)
    return [letters[begin:end].tobytes().decode() for begin, end in spans]


@contextmanager
def open_growing(path: Path, dtype: str, width: int | None = None) -> Iterator[_Add]:
    """Yield a function that adds rows to an array. The file appears at the end of the block.

    A row is one value, or ``width`` values.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    row_shape = () if width is None else (width,)
    n_rows = 0
    with SafeDir(path.parents[1]).atomic_write(path) as out:
        _write_header(out, dtype, (n_rows, *row_shape))

        def add(rows: Values | Sequence[object]) -> None:
            nonlocal n_rows
            values = np.asarray(rows, dtype=dtype).reshape(-1, *row_shape)
            out.write(values.tobytes())
            n_rows += len(values)

        yield add
        out.seek(0)
        _write_header(out, dtype, (n_rows, *row_shape))


def _write_header(out: BinaryIO, dtype: str, shape: tuple[int, ...]) -> None:
    """Write numpy's header, which has space for any number of rows."""
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(out, facts)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFrames:
    """Stop-free frames with their labels and features.

    Sequences and features cover all frames in a folder. Only what is used is loaded into memory.
    The other columns are parallel, (n,) each. A frame has its record's label. ``chunk`` and
    ``record`` are chunk and record numbers. Groups are numbered in name order.
    """

    letters: Values  # uint8, all proteins end to end
    ends: Rows  # (n_all + 1,): protein i is ``letters[ends[i]:ends[i + 1]]``
    all_compositions: Values  # (n_all, N_FEATURES)
    all_vectors: Values | _FeatureRows  # (n_all, dim); (n_all, 0): no stored vectors
    rows: Rows  # indices into the frames of the folder
    chunk: Rows
    record: Rows
    is_virus: NDArray[np.bool_]
    weight: NDArray[np.float32]
    group: Rows

    @classmethod
    def from_store(cls, proteins: Sequence[str], composition: Values) -> LabelledFrames:
        """Make frames in memory, each its own chunk, record and group. Every other one is viral."""
        numbers = np.arange(len(proteins))
        letters, ends = _concatenate(proteins)
        no_vectors = np.empty((len(proteins), 0), dtype=np.float32)
        return cls(
            letters,
            ends,
            composition,
            no_vectors,
            rows=numbers,
            chunk=numbers,
            record=numbers,
            is_virus=numbers % 2 == 0,
            weight=np.ones(len(proteins), dtype=np.float32),
            group=numbers,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Number of dimensions of stored vectors, or 0 without them."""
        return int(self.all_vectors.shape[1])

    def proteins(self, rows: Rows) -> list[str]:
        return _kmer_rows(self.letters, self.ends, self.rows[rows])

    def n_residues(self, rows: Rows) -> Rows:
        """Return the protein lengths. (k,) rows -> (k,)"""
        indices = self.rows[rows]
        lengths: Rows = self.ends[indices + 1] - self.ends[indices]
        return lengths

    def composition(self, rows: Rows) -> Values:
        """(k,) -> (k, N_FEATURES)"""
        return self.all_compositions[self.rows[rows]]

    def compositions(self) -> Iterator[Values]:
        """Yield all compositions in blocks, in order. (n_block, N_FEATURES) each"""
        for first in range(0, len(self), _COMPOSITIONS_AT_ONCE):
            yield self.all_compositions[self.rows[first : first + _COMPOSITIONS_AT_ONCE]]

    def vectors(self, rows: Rows) -> Values:
        """(k,) -> (k, dim)"""
        return self.all_vectors[self.rows[rows]]

    def select(self, rows: Rows) -> LabelledFrames:
        """Select frames. (k,) rows"""
        columns = ("rows", "chunk", "record", "is_virus", "weight", "group")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})


def given_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Return the weights from the manifest. (n,)"""
    return frames.weight


def balanced_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weight a group by the square root of its frames, and both classes equally.

    Otherwise a few large genomes would dominate their class. Weights are limited to about
    ``_MAX_WEIGHT``, because a group with one frame carries little information.

    Returns:
        (n,) float32 with mean 1.
    """
    _, group, size = np.unique(frames.group, return_inverse=True, return_counts=True)
    weight = frames.weight / np.sqrt(size[group])
    for is_virus in (False, True):
        rows = frames.is_virus == is_virus
        if rows.any():
            weight[rows] = np.minimum(weight[rows] / weight[rows].mean(), _MAX_WEIGHT)
            weight[rows] *= len(frames) / 2 / weight[rows].sum()
    return weight.astype(np.float32)


def recipe_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Return weights with the effect of drawing frames as for the scorer.

    A group counts as a low power of its number of frames, times the manifest's weights. Both labels
    weigh the same, overall and in each GC bin, as far as ``MAX_BIN_FACTOR`` allows.

    Returns:
        (n,) float32 with mean 1.
    """
    side = 2 * frames.group + frames.is_virus
    _, group, size = np.unique(side, return_inverse=True, return_counts=True)
    weights = frames.weight * size[group] ** (BASES_POWER - 1)
    bins = np.digitize(_gc_content(frames), GC_EDGES)
    for label in (False, True):
        rows = frames.is_virus == label
        if rows.any():
            weights[rows] = np.minimum(weights[rows] / weights[rows].mean(), _MAX_WEIGHT)
            weights[rows] /= weights[rows].sum()
    for number in range(len(GC_EDGES) + 1):
        inside = bins == number
        total = weights[inside].sum()
        for label in (False, True):
            rows = inside & (frames.is_virus == label)
            if rows.any():
                weights[rows] *= min(MAX_BIN_FACTOR, total / 2 / weights[rows].sum())
    even: NDArray[np.float32] = (weights / weights.mean()).astype(np.float32)
    return even


WEIGHTS = {"auto": balanced_weights, "recipe": recipe_weights, "none": given_weights}


def _gc_content(frames: LabelledFrames) -> Values:
    """Return the GC share in each frame's codons. (n,)"""
    codons = np.arange(len(STANDARD.codons))
    n_gc = sum(
        np.isin(codons // 4**position % 4, (1, 2)).astype(np.float64) for position in range(3)
    )
    blocks = [block[:, : len(codons)] @ n_gc / 3 for block in frames.compositions()]
    return np.concatenate(blocks) if blocks else np.empty(0)


def write_frames(
    folder: Path,
    pairs: Iterable[Labelled],
    chunk_sizes: Sequence[int],
    code: GeneticCode = STANDARD,
    fasta: Path | None = None,
) -> None:
    """Cut and translate the records as ``predict`` does, and write all files except vectors.

    Records are cut only here, at each chunk size. Only one record's frames are in memory at a time.

    Args:
        fasta: also write all records to this file.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    tree = SafeDir(folder.parent)
    with storage_errors(folder):
        tree.make_folder(folder)
        tree.delete(folder / _FrameFile.VECTORS)
    tree.remove_temp_files(folder)
    records: list[LabelledRecord] = []
    with ExitStack() as files:
        columns = _Growing(folder, files)
        for labelled, record in _copy_rows(pairs, fasta) if fasta else pairs:
            columns.add_kmers(len(records), record.sequence)
            for size in chunk_sizes:
                columns.add_frames(len(records), record, size, code)
            records.append(labelled)
    tree.write_file(folder / _FrameFile.RECORDS, json.dumps(list(map(astuple, records))))


class _Growing:
    """A folder's columns while they are written. Closing ``files`` completes them."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        # Type of each column, and number of values per row if a row is an array.
        columns: dict[str, tuple[str, int | None]] = {
            "proteins.npy": ("|u1", None),
            "protein_ends.npy": ("<i8", None),
            "ids.npy": ("|u1", None),
            "id_ends.npy": ("<i8", None),
            "composition.npy": ("<f4", N_FEATURES),
            "chunk.npy": ("<i8", None),
            "chunks.npy": ("<i8", 3),
            "kmers.npy": ("<i8", 2),
        }
        add = {
            name: files.enter_context(open_growing(folder / name, dtype, width))
            for name, (dtype, width) in columns.items()
        }
        self._add = add
        self._n_chunks = 0
        self._n_letters = {"protein": 0, "id": 0}
        for name in self._n_letters:
            add[f"{name}_ends.npy"]([0])

    def add_kmers(self, number: int, sequence: str) -> None:
        """Add sampled k-mers for the record with this number."""
        hashes = Sketch.from_sequences(sequence).hashes
        self._add["kmers.npy"](np.column_stack([np.full(len(hashes), number), hashes]))

    def add_frames(self, number: int, record: FastaRecord, size: int, code: GeneticCode) -> None:
        """Add a record's chunks, cut at this size, and their frames."""
        chunks, orfs = truncate(record, size, code)
        self._add["chunks.npy"]([(number, chunk.start, size) for chunk in chunks])
        numbers = {chunk.id: n for n, chunk in enumerate(chunks, self._n_chunks)}
        self._n_chunks += len(chunks)
        self._add["chunk.npy"]([numbers[orf.chunk_id] for orf in orfs])
        self._add_words("protein", (orf.protein for orf in orfs))
        self._add_words("id", (orf.id for orf in orfs))
        for first in range(0, len(orfs), _COMPOSITIONS_AT_ONCE):
            block = orfs[first : first + _COMPOSITIONS_AT_ONCE]
            bases = [orf.coding_sequence(record.sequence) for orf in block]
            self._add["composition.npy"](frame_composition(bases))

    def _add_words(self, name: str, words: Iterable[str]) -> None:
        """Add words to the two columns that ``_kmer_rows`` reads."""
        letters, ends = _concatenate(words)
        self._add[f"{name}s.npy"](letters)
        self._add[f"{name}_ends.npy"](self._n_letters[name] + ends[1:])
        self._n_letters[name] += len(letters)


def _copy_rows(pairs: Iterable[Labelled], path: Path) -> Iterator[Labelled]:
    """Pass on the records, and write them to a FASTA file, which appears after the last one."""
    with SafeDir(path.parent).atomic_write(path) as content, text_writer(content) as out:
        for labelled, record in pairs:
            write_record(out, record.id, record.sequence)
            yield labelled, record


def truncate(record: FastaRecord, size: int, code: GeneticCode) -> tuple[list[Chunk], list[Orf]]:
    """Return a record's chunks and their stop-free frames, as ``predict`` computes them."""
    chunks = list(Chunk.from_record(record, size))
    return chunks, translate_six_frames(chunks, code)


def link_vectors(folder: Path, extracted: Path) -> None:
    """Record where the vectors of all frames are in a run folder of ``extract``, without copying.

    All feature files are read and verified once. Only the ids and one file are in memory at a time.

    Raises:
        FeatureFileError: a vector is missing, or a file is damaged.
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    ids = read_ids(folder)
    wanted = {*ids}
    row_by_id: dict[str, int] = {}
    files: list[tuple[str, int, int]] = []
    n_vectors = 0
    dim = 0
    numbers = "float32"
    rundir = open_run_dir(extracted)
    manifest = rundir.read_manifest()
    for store in rundir.feature_stores(manifest.recipe) if manifest else ():
        dim = store.encoder.dim
        numbers = store.encoder.store
        for path, begin, content in store.read_files():
            files.append((str(path.absolute()), begin, len(content.ids)))
            row_by_id |= _select_rows(content.ids, wanted, n_vectors)
            n_vectors += len(content.ids)
    if absent := [name for name in ids if name not in row_by_id]:
        raise FeatureFileError(
            f"{printable(extracted)} has no vector for {printable(absent[0])} "
            f"({len(absent):,} missing of {len(ids):,})",
            hint="delete the folder: its vectors are recomputed; vectors given with --features "
            "must be of the same files and --chunk-size",
        )
    tree = SafeDir(folder.parent)
    with open_growing(folder / _FrameFile.VECTOR_ROWS, "<i8") as add:
        add([row_by_id[name] for name in ids])
    tree.write_file(
        folder / _FrameFile.VECTORS, json.dumps({"dim": dim, "store": numbers, "files": files})
    )


def _select_rows(ids: Iterable[str], wanted: Set[str], first: int) -> dict[str, int]:
    """Return rows for wanted frames, counted from ``first``.

    In a run, a number may distinguish a frame name from a record id.
    """
    names = (name if name in wanted else without_number(name) for name in ids)
    return {name: row for row, name in enumerate(names, first) if name in wanted}


def read_ids(folder: Path) -> list[str]:
    """Read all frame ids. They are unique if records are cut at one chunk size."""
    letters = _memory_map(folder / "ids.npy")
    ends = _memory_map(folder / "id_ends.npy")
    return _kmer_rows(letters, ends, np.arange(len(ends) - 1))


def delete_frames(folder: Path, fasta: Path) -> None:
    with suppress(OSError):  # the first error is the one to report
        shutil.rmtree(folder)
    SafeDir(fasta.parent).delete(fasta)


@dataclass(frozen=True, slots=True, eq=False)
class FrameStore:
    """All frames in a folder, with their records and chunks."""

    records: tuple[LabelledRecord, ...]
    is_virus: NDArray[np.bool_]  # (n_records,)
    group: Rows  # (n_records,), numbered in name order
    chunks: Rows  # (n_chunks, 3): record, start and size
    all: LabelledFrames
    kmers: Rows  # (n, 2): record, and hash of one of its sampled k-mers

    @classmethod
    def open(cls, folder: Path) -> FrameStore:
        """Map the files in a complete folder."""
        rows = read_json(folder / _FrameFile.RECORDS, max_bytes=_MAX_RECORDS_BYTES)
        records = tuple(LabelledRecord(*facts) for facts in rows)
        letters = _memory_map(folder / "proteins.npy")
        ends = _memory_map(folder / "protein_ends.npy")
        composition = _memory_map(folder / "composition.npy")
        chunk = _memory_map(folder / "chunk.npy")
        chunks = _memory_map(folder / "chunks.npy")
        kmers = _memory_map(folder / "kmers.npy")
        record = chunks[chunk, 0]
        is_virus = np.array([r.is_virus for r in records], dtype=np.bool_)
        group = np.unique([r.group for r in records], return_inverse=True)[1]
        frames = LabelledFrames(
            letters,
            ends,
            composition,
            _vectors(folder, len(composition)),
            rows=np.arange(len(chunk)),
            chunk=chunk,
            record=record,
            is_virus=is_virus[record],
            weight=np.array([r.weight for r in records], dtype=np.float32)[record],
            group=group[record],
        )
        return cls(records, is_virus, group, chunks, frames, kmers)

    def count_frames(self, chunk_size: int) -> dict[LabelledRecord, int]:
        """Count each record's frames, cut at this size."""
        own = self.all.record[self.chunks[self.all.chunk, 2] == chunk_size]
        counts = np.bincount(own, minlength=len(self.records))
        return dict(zip(self.records, counts.tolist(), strict=True))

    def sketch(self, splits: Mapping[str, Split], *parts: Split) -> Sketch:
        """Return sampled k-mers for all records in these split parts."""
        is_chosen = self._is_in(splits, *parts)
        return Sketch(np.unique(self.kmers[is_chosen[self.kmers[:, 0]], 1].astype(np.uint32)))

    def select(
        self, splits: Mapping[str, Split], part: Split, chunk_sizes: Sequence[int]
    ) -> LabelledFrames:
        """Return the frames in one split part, cut at these sizes."""
        size = self.chunks[self.all.chunk, 2]
        is_chosen = self._is_in(splits, part)[self.all.record] & np.isin(size, chunk_sizes)
        return self.all.select(np.flatnonzero(is_chosen))

    def _is_in(self, splits: Mapping[str, Split], *parts: Split) -> NDArray[np.bool_]:
        """Return True for records in these split parts. (n_records,)"""
        return np.array([splits[r.group] in parts for r in self.records], dtype=np.bool_)
