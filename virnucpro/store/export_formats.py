"""Write the vectors of a finished run in the layouts of other programs.

``FORMATS`` lists them: one function each. An exporter streams batches of verified vectors, so
memory contains one batch, except where a format says otherwise. Ids are data: none becomes the
name of a file.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import storage_errors, temporary_path
from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import OutputKind
from virnucpro.core.recipe import ExportFormatName
from virnucpro.core.safe_dir import SafeDir
from virnucpro.store.feature_export import save_pt
from virnucpro.store.feature_file import id_text
from virnucpro.store.hdf5_layout import new_hdf5_in, text_type
from virnucpro.store.vectors import Vector, VectorBatch, Vectors, embedding_column, embedding_type

if TYPE_CHECKING:
    import h5py

RESTORE_INPUT = "put the input of the run back, or choose a format without sequences"
PART_NAME = "part-{:05}.safetensors"
INDEX_NAME = "index.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """What an exporter reads."""

    vectors: Vectors
    read_sequences: Callable[[], Iterator[tuple[str, str]]]  # id and letters, in input order
    on_vectors: Callable[[int], None]  # called with the number of vectors that were read

    def batches(self) -> Iterator[VectorBatch]:
        """Yield the vectors in input order, from verified files."""
        n_done = 0
        for batch in self.vectors.batches():
            yield batch
            n_done += len(batch.ids)
            self.on_vectors(n_done)

    def items(self) -> Iterator[tuple[str, Vector]]:
        """Yield each id with its vector: (dim,), or (residues, dim)."""
        for batch in self.batches():
            yield from zip(batch.ids, batch.vectors, strict=True)

    def sequences(self) -> Iterator[str]:
        """Yield the sequence of each vector, read again from the input and compared.

        Raises:
            UsageError: the vectors are not of proteins.
            InputError: an input has changed since the run.
        """
        vectors = self.vectors
        records = self.read_sequences()
        for orf_id, digest in zip(vectors.ids, vectors.digests(), strict=True):
            letters = next((text for name, text in records if id_text(name) == orf_id), None)
            if letters is None or sha256(letters.encode()).digest() != digest:
                raise InputError(
                    f"the input has another sequence for {printable(orf_id)} than the run",
                    hint=RESTORE_INPUT,
                )
            yield letters


Writer: TypeAlias = Callable[[ExportSource, SafeDir, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A layout of another program."""

    ending: str  # of the default output, after the name of the run folder
    kinds: tuple[OutputKind, ...]  # outputs that it can have
    write: Writer


@contextmanager
def _new_hdf5(tree: SafeDir, path: Path) -> Iterator[h5py.File]:
    with tree.atomic_write(path) as out, new_hdf5_in(out) as h5:
        yield h5


def write_uniprot_h5(source: ExportSource, tree: SafeDir, path: Path) -> None:
    """Write one dataset per id, as UniProt, bio_embeddings, biotrainer and protspace read.

    HDF5 would take a slash in a name for a group, so ``/`` and ``%`` are percent-encoded. The
    attribute ``original_id`` has the id unchanged.
    """
    with _new_hdf5(tree, path) as h5:
        h5.attrs.update(source.vectors.facts)
        for orf_id, vector in source.items():
            dataset = h5.create_dataset(hdf5_name(orf_id), data=vector)
            dataset.attrs["original_id"] = orf_id


def hdf5_name(orf_id: str) -> str:
    """Return a name for a dataset that no other id has.

    >>> hdf5_name("P12345"), hdf5_name("../a"), hdf5_name(".")
    ('P12345', '..%2Fa', '%2E')
    """
    name = orf_id.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return "%2E" if name == "." else name


def write_safetensors(
    source: ExportSource, tree: SafeDir, path: Path, part_bytes: int = 1 << 28
) -> None:
    """Write parts of equal size that can be mapped into memory, and an index.

    ``part-00000.safetensors`` has the tensor ``embeddings``: float32 or bfloat16, as stored. Rows
    are in input order. ``index.parquet`` has id, part, first row, length and SHA-256 of the
    sequence. With a vector per residue, a part ends after the protein that fills it.
    """
    from pyarrow import parquet

    is_short = source.vectors.spec.dtype == "bfloat16"
    row_bytes = source.vectors.dim * (2 if is_short else 4)
    with new_folder(tree, path) as folder:
        rows_per_part = max(1, part_bytes // row_bytes)
        places = _write_parts(source, folder, rows_per_part, is_short=is_short)
        table = _part_index(source.vectors, places)
        with folder.atomic_write(folder.root / INDEX_NAME) as out:
            parquet.write_table(table, out, compression="zstd", use_dictionary=["part"])


def _write_parts(
    source: ExportSource, folder: SafeDir, rows_per_part: int, *, is_short: bool
) -> list[tuple[int, int]]:
    """Write the parts. Return the part and the first row of each vector."""
    places: list[tuple[int, int]] = []
    blocks: list[NDArray[np.float32]] = []
    n_rows = 0
    number = 0

    def write_part() -> None:
        path = folder.root / PART_NAME.format(number)
        rows = np.concatenate(blocks or [np.empty((0, source.vectors.dim), np.float32)])
        _add_safetensors(folder, path, rows, source.vectors.facts, is_short=is_short)

    for _, vector in source.items():
        if n_rows >= rows_per_part:
            write_part()
            blocks.clear()
            n_rows = 0
            number += 1
        places.append((number, n_rows))
        block = np.atleast_2d(vector)
        blocks.append(block)
        n_rows += len(block)
    write_part()
    return places


def _add_safetensors(
    folder: SafeDir,
    path: Path,
    rows: NDArray[np.float32],
    facts: Mapping[str, str],
    *,
    is_short: bool,
) -> None:
    """Write rows as a tensor. Numbers that were stored as bfloat16 lose nothing in it."""
    aligned = 8  # bytes, of the tensor in a part
    content: NDArray[Any] = rows
    if is_short:
        content = (rows.view(np.uint32) >> 16).astype("<u2")
    tensor = {
        "dtype": "BF16" if is_short else "F32",
        "shape": rows.shape,
        "data_offsets": [0, content.nbytes],
    }
    header = json.dumps({"__metadata__": facts, "embeddings": tensor}).encode()
    header += b" " * (-len(header) % aligned)
    with folder.atomic_write(path) as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        out.write(content.data)


def _part_index(vectors: Vectors, places: list[tuple[int, int]]) -> Any:  # noqa: ANN401 - Arrow
    import pyarrow as pa

    part, row = np.array(places, dtype=np.int64).reshape(-1, 2).T
    n_parts = int(part.max(initial=0)) + 1
    names = pa.array([PART_NAME.format(number) for number in range(n_parts)], pa.string())
    table = vectors.read_index()
    columns = {
        "id": table["id"],
        "part": pa.DictionaryArray.from_arrays(part.astype(np.int32), names),
        "row": pa.array(row),
        "length": table["length"],
        "sha256": table["sha256"],
    }
    return pa.table(columns, metadata=table.schema.metadata)


def write_parquet(source: ExportSource, tree: SafeDir, path: Path) -> None:
    """Write one row per id: ``id``, ``length``, ``sha256``, ``embedding``.

    An embedding is a list of ``dim`` float32, or a list of such lists with a row per residue.
    """
    import pyarrow as pa
    from pyarrow import parquet

    vectors = source.vectors
    table = vectors.read_index()
    kind = embedding_type(vectors.spec)
    schema = table.schema.append(pa.field("embedding", kind))
    numbers = "embedding" + ".list.element" * (1 if vectors.has_one_row else 2)
    split = {"use_dictionary": False, "use_byte_stream_split": [numbers]}
    first = 0
    with (
        tree.atomic_write(path) as out,
        parquet.ParquetWriter(out, schema, compression="zstd", **split) as writer,
    ):
        for batch in source.batches():
            rows = table.slice(first, len(batch.ids)).combine_chunks()
            rows = rows.append_column(
                schema.field("embedding"), embedding_column(batch, vectors.spec)
            )
            writer.write_table(rows)
            first += len(batch.ids)


def write_anndata(source: ExportSource, tree: SafeDir, path: Path) -> None:
    """Write an ``.h5ad`` file: ``X`` (n, dim), ids as names of observations, lengths in ``obs``.

    The layout is that of anndata's on-disk format 0.1.0.
    """
    vectors = source.vectors
    with _new_hdf5(tree, path) as h5:
        _mark(h5, "anndata", "0.1.0")
        matrix = h5.create_dataset("X", (len(vectors), vectors.dim), np.float32)
        _mark(matrix, "array", "0.2.0")
        first = 0
        for batch in source.batches():
            matrix[first : first + len(batch.ids)] = np.reshape(batch.vectors, (-1, vectors.dim))
            first += len(batch.ids)
        digests = [digest.hex() for digest in vectors.digests()]
        columns: dict[str, list[str] | NDArray[Any]] = {
            "length": vectors.lengths,
            "sha256": digests,
        }
        _add_frame(h5, "obs", list(vectors.ids), columns)
        _add_frame(h5, "var", list(map(str, range(vectors.dim))), {})
        for name in ("layers", "obsm", "obsp", "varm", "varp", "uns"):
            _mark(h5.create_group(name), "dict", "0.1.0")
        for name, value in vectors.facts.items():
            h5["uns"][name] = value
            kind = "string" if isinstance(value, str) else "numeric-scalar"
            _mark(h5["uns"][name], kind, "0.2.0")


def _mark(item: h5py.HLObject, encoding: str, version: str) -> None:
    """Name the encoding of a group or dataset for anndata."""
    item.attrs["encoding-type"] = encoding
    item.attrs["encoding-version"] = version


def _add_frame(
    h5: h5py.File, name: str, index: list[str], columns: Mapping[str, list[str] | NDArray[Any]]
) -> None:
    """Add a table of anndata: a group with a dataset for each column."""
    frame = h5.create_group(name)
    _mark(frame, "dataframe", "0.2.0")
    frame.attrs["_index"] = "_index"
    frame.attrs.create("column-order", list(columns), dtype=text_type())
    for column, values in chain([("_index", index)], columns.items()):
        if isinstance(values, list):
            frame.create_dataset(column, data=np.array(values, dtype=object), dtype=text_type())
            _mark(frame[column], "string-array", "0.2.0")
        else:
            frame[column] = values
            _mark(frame[column], "array", "0.2.0")


def write_skbio(source: ExportSource, tree: SafeDir, path: Path) -> None:
    """Write scikit-bio's ``embed`` format, which has the sequence of each vector and no id.

    ``skbio.read(path, into=...)`` gives ProteinVector objects, or ProteinEmbedding objects with a
    vector per residue. The sequences are read again from the input of the run.

    Raises:
        UsageError: the vectors are not of proteins.
        InputError: an input has changed since the run.
    """
    vectors = source.vectors
    lengths = vectors.lengths.astype(np.int64)
    row_counts = vectors.spec.count_rows(lengths)
    with _new_hdf5(tree, path) as h5:
        h5.attrs.update({"format": "embedding", "format-version": "1.0"})
        h5.attrs.update({"dtype": "float32", "dim": vectors.dim})
        h5["idptr"] = np.cumsum(lengths)
        h5["embedding_ptr"] = np.cumsum(row_counts)
        letters = h5.create_dataset("id", (int(lengths.sum()),), np.uint8)
        first = 0
        for sequence in source.sequences():
            letters[first : first + len(sequence)] = np.frombuffer(sequence.encode(), np.uint8)
            first += len(sequence)
        rows = h5.create_dataset("embedding", (int(row_counts.sum()), vectors.dim), np.float32)
        first = 0
        for batch in source.batches():
            block = np.concatenate([np.atleast_2d(vector) for vector in batch.vectors])
            rows[first : first + len(block)] = block
            first += len(block)


def write_npz(source: ExportSource, tree: SafeDir, path: Path) -> None:
    """Write ``ids``, ``lengths`` and ``embeddings``, for ``numpy.load`` without pickle."""
    vectors = source.vectors
    with tree.atomic_write(path) as out, zipfile.ZipFile(out, "w") as archive:
        for name, values in {
            "ids": np.array(list(vectors.ids), dtype=np.str_),
            "lengths": vectors.lengths,
        }.items():
            with _new_member(archive, name) as member:
                np.lib.format.write_array(member, values, allow_pickle=False)
        with _new_member(archive, "embeddings") as member:
            shape = (len(vectors), vectors.dim)
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for batch in source.batches():
                member.write(np.ascontiguousarray(batch.vectors, "<f4").tobytes())


def _new_member(archive: zipfile.ZipFile, name: str) -> Any:  # noqa: ANN401 - a file
    """Open an array in an archive. It has no date, so the same content gives the same bytes."""
    return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)


def write_pt(source: ExportSource, tree: SafeDir, path: Path) -> None:
    """Write the original VirNucPro's layout of ``_ESM.pt``: ``proteins`` and ``data``.

    See ``save_pt``. Memory contains all vectors.
    """
    vectors = (vector for _, vector in source.items())
    save_pt(path, source.vectors.ids, vectors, source.vectors.encoder.reads, tree)


@contextmanager
def new_folder(tree: SafeDir, path: Path) -> Iterator[SafeDir]:
    """Yield a new folder, which gets its name when the block succeeds.

    Raises:
        OutputError, StorageError: the folder cannot be created, or its name is taken.
    """
    temporary = temporary_path(path)
    with storage_errors(path, temporary):
        tree.make_folder(temporary)
        try:
            yield SafeDir(temporary)
            tree.move(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


_ONE_EACH: tuple[OutputKind, ...] = ("per_sequence", "scalar")
_VECTORS: tuple[OutputKind, ...] = (*_ONE_EACH, "per_residue")
_ANY_OUTPUT: tuple[OutputKind, ...] = (*_VECTORS, "pairwise")
FORMATS: Mapping[ExportFormatName, ExportFormat] = {
    "uniprot-h5": ExportFormat(ending=".uniprot.h5", kinds=_ANY_OUTPUT, write=write_uniprot_h5),
    "safetensors": ExportFormat(ending="-safetensors", kinds=_VECTORS, write=write_safetensors),
    "parquet": ExportFormat(ending=".parquet", kinds=_VECTORS, write=write_parquet),
    "anndata": ExportFormat(ending=".h5ad", kinds=_ONE_EACH, write=write_anndata),
    "skbio": ExportFormat(ending=".skbio.h5", kinds=_VECTORS, write=write_skbio),
    "npz": ExportFormat(ending=".npz", kinds=_ONE_EACH, write=write_npz),
    "pt": ExportFormat(ending=".pt", kinds=_ANY_OUTPUT, write=write_pt),
}
