"""Read and write feature files: HDF5 followed by a label. Files appear atomically.

A file is laid out by HDF5 (``hdf5_layout``), written sequentially, synced and renamed. Two blocks
follow the HDF5 content, where HDF5 readers do not look. The table lists ids, lengths and sequence
digests, so that an index of many files needs only their ends. The label names the recipe and the
shard, so that files cannot be confused. It gives the length and checksum of the content and of the
table, and the byte offset of the vectors, which can be mapped into memory. The label's SHA-256 and
length come last. ``read_label`` therefore needs only the last bytes to identify a file and see that
it is complete. ``read_embeddings`` verifies every bit.

Vectors are float32 or, in half the space, bfloat16, a custom floating-point type that HDF5 converts
to float32 on reading. The readers here take the vectors from the verified bytes, without HDF5.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as tensors

from virnucpro._version import __version__
from virnucpro.core.atomic_io import disk_error, parse_json
from virnucpro.core.errors import FeatureFileError, VirnucproError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.numeric import from_bfloat16
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EncoderSpec, Store
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, Failure, OutputArray, check_counts
from virnucpro.sequences.orfs import Texts
from virnucpro.store.file_checksum import Checksum, checksum_of
from virnucpro.store.hdf5_layout import (
    ALIGNMENT,
    SparseFile,
    StoredVectors,
    is_bfloat16,
    new_hdf5_in,
    reserve_vectors,
    text_type,
)

if TYPE_CHECKING:
    import h5py

_SEAL = struct.Struct("<32sI")  # label's SHA-256 and length
_BLOCK = 1 << 18

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a feature file: its shard, its recipe, and its content's size and checksum."""

    attributes: Attributes
    failed_records: Sequence[str]
    n_bytes: int  # size of the content: HDF5 and table
    checksum: str  # of the content, with its algorithm
    table_bytes: int = 0  # size of the table at the end of the content
    table_checksum: str = ""
    offsets: Mapping[str, int] = field(default_factory=dict)  # dataset -> byte offset; 0: empty

    def __post_init__(self) -> None:
        if not isinstance(self.attributes, Mapping):
            raise TypeError("attributes have names")
        check_counts(self.n_bytes, self.table_bytes, *self.offsets.values())
        ids = self.failed_records
        is_sequence = isinstance(ids, (list, tuple))
        if not is_sequence or not all(isinstance(record_id, str) for record_id in ids):
            raise TypeError("failed records are named by their ids")

    @classmethod
    def from_json(cls, text: bytes) -> Label:
        """Parse a label. Earlier versions wrote only SHA-256, and named the entries so.

        Raises:
            ValueError, TypeError, AttributeError: it has other entries.
        """
        renamed = {"sha256": "checksum", "table_sha256": "table_checksum"}
        return cls(**{renamed.get(name, name): fact for name, fact in parse_json(text).items()})


class OrfTable(NamedTuple):
    """The ORFs with a vector in a feature file, in the order of its rows."""

    encoded_ids: Texts  # in UTF-8, which an id from a damaged header may violate
    lengths: NDArray[np.int32]  # (n,), residues
    sequence_sha256: NDArray[np.uint8]  # (n, 32)
    n_before: NDArray[np.int32]  # (n,) in a file of copies, else empty: see ``Embeddings``

    @property
    def ids(self) -> tuple[str, ...]:
        texts = self.encoded_ids.to_bytes()
        return tuple(text.decode("utf-8", "surrogateescape") for text in texts)


class Checksums(NamedTuple):
    """The SHA-256 of a file's label, and the checksum of the file, with the label's algorithm."""

    label: str
    file: str


def write_embeddings(
    path: Path,
    embeddings: Embeddings,
    attributes: Attributes,
    tree: SafeDir,
    store: Store = "float32",
) -> Checksums:
    """Write a feature file with ``ids``, ``lengths``, ``embeddings``, and the failures.

    With several outputs, each is a dataset with its name. The first one is ``embeddings`` too.

    An existing file with exactly the same content is left alone. The program version is stored too,
    but no reader checks it, because the recipe determines the numbers.

    Raises:
        OutputError, StorageError: the file cannot be written.
    """
    content = _Content.from_embeddings(embeddings, attributes, store)
    if path.is_file():  # compare first, because a file that is the same is not rewritten
        checksums = content.write(_NoFile())
        with suppress(VirnucproError):  # an unreadable file is replaced
            if verify(path, {}) == checksums:
                return checksums
    with tree.atomic_write(path) as out:
        return content.write(out)


class _Output(Protocol):
    """A file that is written sequentially."""

    def write(self, content: bytes | memoryview, /) -> object: ...


class _NoFile:
    """Takes what is only hashed."""

    def write(self, content: bytes | memoryview, /) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """The content of a feature file, and what its label says about it."""

    attributes: Attributes
    failed_records: Sequence[str]
    layout: SparseFile  # HDF5 without the vectors
    vectors: Mapping[str, StoredVectors]  # by dataset
    offsets: Mapping[str, int]  # by dataset
    table: bytes

    @classmethod
    def from_embeddings(
        cls, embeddings: Embeddings, attributes: Attributes, store: Store
    ) -> _Content:
        vectors = _stored_vectors(embeddings, store)
        layout, offsets = _lay_out(embeddings, attributes, vectors)
        return cls(
            attributes,
            list(dict.fromkeys(failure.record_id for failure in embeddings.failures)),
            layout,
            vectors,
            offsets,
            _to_table(embeddings),
        )

    def write(self, out: _Output) -> Checksums:
        """Write the content and its label. Each block is hashed, so that none is read again."""
        checksum = Checksum()
        n_bytes = 0
        for block in self._blocks():
            checksum.update(block)
            out.write(block)
            n_bytes += len(block)
        label = Label(
            self.attributes,
            self.failed_records,
            n_bytes=n_bytes,
            checksum=checksum.text,
            table_bytes=len(self.table),
            table_checksum=checksum_of([self.table]),
            offsets=self.offsets,
        )
        end = _seal(label)
        checksum.update(end)
        out.write(end)
        return Checksums(_label_digest(end), checksum.text)

    def _blocks(self) -> Iterator[bytes | memoryview]:
        filled = {
            self.offsets[name]: stored for name, stored in self.vectors.items() if stored.n_bytes
        }
        yield from self.layout.blocks(filled)
        yield self.table


def checksummed_label(
    content: bytes, attributes: Attributes, failed_records: Sequence[str] = ()
) -> bytes:
    """Return what follows this content: its label, and the label's hash and length."""
    return _seal(Label(attributes, failed_records, len(content), checksum_of([content])))


def _seal(label: Label) -> bytes:
    text = json.dumps(asdict(label)).encode()
    return text + _SEAL.pack(hashlib.sha256(text).digest(), len(text))


def _label_digest(end: bytes) -> str:
    """Return the label's SHA-256, as recorded in the last bytes of a file."""
    digest, _ = _SEAL.unpack(end[-_SEAL.size :])
    return bytes(digest).hex()


def read_label_digest(path: Path) -> str:
    """Read the SHA-256 of a file's label from its last bytes, without verification.

    Raises:
        FeatureFileError: the file is missing, or too short.
        OutputError, StorageError: the file cannot be read now.
    """
    with open_reader(path):
        _refuse_pipe(path)
        with path.open("rb") as handle:
            n_bytes = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, n_bytes - _SEAL.size))
            end = handle.read()
        if len(end) < _SEAL.size:
            raise ValueError("it is cut short")
    return _label_digest(end)


def write_checksummed(tree: SafeDir, path: Path, content: bytes, attributes: Attributes) -> None:
    """Write a file that ends like a feature file. See ``read_checksummed``."""
    tree.write_file(path, content + checksummed_label(content, attributes))


def read_checksummed(path: Path, attributes: Attributes) -> tuple[Label, bytes]:
    """Read the content of a file that ends like a feature file, and verify every bit.

    Raises:
        FeatureFileError, OutputError, StorageError: as ``read_label``.
    """
    label = read_label(path, attributes)
    with open_reader(path):
        content = path.read_bytes()[: label.n_bytes]
        if checksum_of([content], label.checksum) != label.checksum:
            raise ValueError("its content has another checksum")
    return label, content


def _to_table(embeddings: Embeddings) -> bytes:
    names = [orf_id.encode("utf-8", "surrogateescape") for orf_id in embeddings.ids]
    columns: dict[str, NDArray[Any]] = {
        "ids": np.frombuffer(b"".join(names), dtype=np.uint8),
        "id_bytes": np.fromiter(map(len, names), np.int32, len(names)),
        "lengths": embeddings.lengths,
        "sequence_sha256": embeddings.sequence_sha256,
        "n_before": embeddings.n_before,
    }
    return tensors.save(columns)


def read_table(path: Path, attributes: Attributes) -> OrfTable:
    """Read the ids, lengths and digests in a feature file from its end, and verify them.

    The vectors are neither read nor verified.

    Raises:
        FeatureFileError: the file is missing or corrupt, or belongs to another recipe or shard.
        OutputError, StorageError: it cannot be read now.
    """
    label = read_label(path, attributes)
    with open_reader(path):
        if not label.table_bytes:
            raise ValueError("it has no table: an earlier version wrote it")
        with path.open("rb") as handle:
            handle.seek(label.n_bytes - label.table_bytes)
            table = handle.read(label.table_bytes)
        if checksum_of([table], label.table_checksum) != label.table_checksum:
            raise ValueError("its table has another checksum")
        return _parse_table(table)


def _parse_table(table: bytes) -> OrfTable:
    columns = tensors.load(table)
    return OrfTable(
        encoded_ids=Texts.from_lengths(columns["ids"], columns["id_bytes"]),
        lengths=columns["lengths"],
        sequence_sha256=columns["sequence_sha256"],
        n_before=columns["n_before"],
    )


def _stored_vectors(embeddings: Embeddings, store: Store) -> dict[str, StoredVectors]:
    """Return the numbers of each dataset. The first output is ``embeddings``."""
    vectors = {"embeddings": StoredVectors(embeddings.vectors, store)}
    for output in embeddings.extra:
        spec = output.spec
        values = output.values if spec.has_vectors else output.values[:, 0]  # single numbers: 1-D
        vectors[spec.name] = StoredVectors(values, spec.dtype)
    return vectors


def _lay_out(
    embeddings: Embeddings, attributes: Attributes, vectors: Mapping[str, StoredVectors]
) -> tuple[SparseFile, dict[str, int]]:
    """Lay out an HDF5 file without its vectors, and return their byte offsets by dataset."""
    failures = embeddings.failures
    layout = SparseFile()
    with new_hdf5_in(layout, ALIGNMENT) as h5:
        h5.attrs.update({**attributes, "virnucpro_version": __version__})
        ids = np.array(embeddings.ids, dtype=object)
        h5.create_dataset("ids", data=ids, dtype=text_type())
        h5["lengths"] = embeddings.lengths
        offsets = {
            name: reserve_vectors(h5, name, stored.values.shape, stored.store)
            for name, stored in vectors.items()
        }
        if embeddings.extra:
            h5[str(attributes["output"])] = h5["embeddings"]
        for name in Failure._fields:
            texts = np.array([getattr(failure, name) for failure in failures], dtype=object)
            h5.create_dataset(f"failed/{name}", data=texts, dtype=text_type())
    return layout, offsets


def id_text(orf_id: str) -> str:
    """Return an id as text for Parquet, which is UTF-8.

    Any other byte becomes four characters.

    >>> id_text("a\\udcffb")
    'a\\\\xffb'
    """
    if orf_id.isascii():
        return orf_id
    return orf_id.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def open_features(path: Path) -> h5py.File:
    """Open a complete file without a lock: it never changes, and some file systems have no locks.

    If the file is already open in this process, HDF5 requires the same choice of locks.
    """
    import h5py

    _refuse_pipe(path)
    try:
        return h5py.File(path, "r", locking=False)
    except OSError:
        with suppress(OSError):  # report the first error
            return h5py.File(path, "r")
        raise


def _refuse_pipe(path: Path) -> None:
    """Raise ValueError for a path that is not a plain file: reading a pipe would never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a plain file")


def read_label(path: Path, attributes: Attributes) -> Label:
    """Verify from a file's last bytes that it is complete and has the expected attributes.

    Raises:
        FeatureFileError: it is missing, truncated, or belongs to another recipe or shard.
        OutputError, StorageError: it cannot be read now.
    """
    return read_label_and_digest(path, attributes)[0]


def read_label_and_digest(path: Path, attributes: Attributes) -> tuple[Label, str]:
    """Read a label as ``read_label`` does, with its SHA-256."""
    max_label = 1 << 28  # bytes; bounds the read before the hash is checked
    with open_reader(path):
        _refuse_pipe(path)
        with path.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END) - _SEAL.size
            if end < 0:
                raise ValueError("it is cut short")
            handle.seek(end)
            digest, n_bytes = _SEAL.unpack(handle.read())
            if n_bytes > min(end, max_label):
                raise ValueError("it has no label at its end")
            start = handle.seek(end - n_bytes)
            text = handle.read(n_bytes)
        if hashlib.sha256(text).digest() != digest:
            raise ValueError("it has no label at its end")
        label = Label.from_json(text)
        if label.n_bytes != start:
            raise ValueError(f"its content has {start} bytes of {label.n_bytes}")
        for name, value in attributes.items():
            if (actual := label.attributes.get(name)) != value:
                raise FeatureFileError(
                    f"{printable(path)} has {name} {printable(actual)}, not {printable(value)}"
                )
    return label, bytes(digest).hex()


def read_embeddings(
    path: Path,
    attributes: Attributes,
    dim: int | None = None,
    extra: Sequence[OutputSpec] = (),
) -> Embeddings:
    """Read one file and verify every bit and the expected attributes.

    ``dim`` is the expected vector width. In a file without vectors, the width may be 0. ``extra``
    are the outputs to read besides the vectors.

    Raises:
        FeatureFileError: it is missing, corrupt, or belongs to another recipe, shard or width.
        OutputError, StorageError: it cannot be read now.
    """
    return read_verified(path, attributes, dim, extra)[0]


def read_verified(
    path: Path,
    attributes: Attributes,
    dim: int | None = None,
    extra: Sequence[OutputSpec] = (),
) -> tuple[Embeddings, Checksums]:
    """Read one file as ``read_embeddings`` does, with its checksums."""
    label = read_label(path, attributes)
    with open_reader(path):
        content, checksums = _read_content(path, label)
        with open_features(path) as h5:
            ids, lengths = _read_names(h5, label, content)
            embeddings = Embeddings(
                ids=ids,
                lengths=lengths,
                vectors=_read_vectors(h5, "embeddings", content),
                per_residue=label.attributes.get("pooling") == "none",
                failures=_failures(h5) if label.failed_records else (),
                extra=tuple(_read_output(h5, spec, content) for spec in extra),
            )
        width = embeddings.vectors.shape[1]
        if dim not in (None, width) and (width or embeddings.ids):
            raise ValueError(f"its vectors have {width} values of {dim}")
    return embeddings, checksums


def _read_names(
    h5: h5py.File, label: Label, content: NDArray[np.uint8]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return the ids and lengths in a verified file, from its table if it has one."""
    if not label.table_bytes:
        return _to_strings(_owned_copy(h5, "ids")), _owned_copy(h5, "lengths")[:]
    table = _parse_table(content[-label.table_bytes :].tobytes())
    return table.ids, table.lengths


class _Numbers(NamedTuple):
    """Where a file has the numbers of a dataset."""

    start: int  # byte offset
    shape: tuple[int, ...]
    store: Store

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.store == "bfloat16" else "<f4")

    def convert(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Return stored numbers as float32."""
        if self.store == "bfloat16":
            return from_bfloat16(stored)
        return stored if stored.flags.aligned else stored.copy()


def _find_numbers(h5: h5py.File, name: str) -> _Numbers:
    """Find the numbers of a dataset, which are stored contiguously.

    Raises:
        ValueError: they are stored in another way.
    """
    dataset = _owned_copy(h5, name)
    kind = dataset.id.get_type()
    is_short = is_bfloat16(kind)
    if not is_short and dataset.dtype != np.dtype("<f4"):
        raise ValueError(f"{name} has numbers of another type")
    start = dataset.id.get_offset()  # None: empty or chunked
    if start is None and dataset.size > 0:
        raise ValueError("its vectors are not stored one after the other")
    return _Numbers(start or 0, dataset.shape, "bfloat16" if is_short else "float32")


def _read_vectors(h5: h5py.File, name: str, content: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the vectors of a dataset from the verified bytes of its file."""
    numbers = _find_numbers(h5, name)
    n_bytes = math.prod(numbers.shape) * numbers.dtype.itemsize
    stored = content[numbers.start : numbers.start + n_bytes].view(numbers.dtype)
    return numbers.convert(stored.reshape(numbers.shape))


def verify(path: Path, attributes: Attributes) -> Checksums:
    """Verify every bit of a file and the expected attributes, without loading its content.

    Raises:
        FeatureFileError: it is missing, corrupt, or belongs to another recipe or shard.
        OutputError, StorageError: it cannot be read now.
    """
    label = read_label(path, attributes)
    with open_reader(path):
        return _check_content(path, label)


def _failures(h5: h5py.File) -> tuple[Failure, ...]:
    columns = [_to_strings(_owned_copy(h5, f"failed/{name}")) for name in Failure._fields]
    return tuple(Failure(*values) for values in zip(*columns, strict=True))


@contextmanager
def open_reader(path: Path) -> Iterator[None]:
    """Translate errors from reading a feature file or an index into ``VirnucproError``.

    A file that cannot be read now is not corrupt, and must not be deleted.

    Raises:
        FeatureFileError: it is missing or corrupt.
        OutputError, StorageError: it cannot be read now.
    """
    # errno values that concern the file; all others concern the disk or permissions
    no_file = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    # errors that h5py raises on a corrupt file
    damage = (
        *(OSError, LookupError, ValueError, TypeError, RuntimeError, AttributeError),
        SafetensorError,
    )
    try:
        yield
    except damage as error:
        if isinstance(error, OSError) and error.errno not in no_file:
            raise disk_error(error, path) from error
        fault = f"is damaged or truncated: {printable(error)}"
        if isinstance(error, FileNotFoundError):
            fault = "is missing"
        raise FeatureFileError(
            f"{printable(path)} {fault}",
            hint=with_options(
                "check the disk, and run the same command with {resume} to recompute it"
            ),
        ) from error


def _read_output(h5: h5py.File, spec: OutputSpec, content: NDArray[np.uint8]) -> OutputArray:
    return OutputArray(spec, _read_vectors(h5, spec.name, content).reshape(-1, spec.width))


def read_rows(
    path: Path, outputs: Mapping[str, OutputSpec], positions: Sequence[int]
) -> list[list[NDArray[np.float32]]]:
    """Read the rows of ORFs at these positions from a verified file.

    Args:
        outputs: dataset -> what it has.

    Returns:
        For each output, and for each position, an array of shape (rows of the ORF, width).

    Raises:
        FeatureFileError: the file no longer exists, or has changed.
    """
    if not outputs:
        return []
    with open_reader(path), open_features(path) as h5, path.open("rb", buffering=0) as handle:
        lengths = h5["lengths"][:]
        arrays = []
        for name, spec in outputs.items():
            numbers = _find_numbers(h5, name)
            row_bytes = spec.width * numbers.dtype.itemsize
            bounds = np.concatenate([[0], np.cumsum(spec.count_rows(lengths))]).tolist()
            rows = []
            for i in positions:
                n_bytes = (bounds[i + 1] - bounds[i]) * row_bytes
                stored = os.pread(handle.fileno(), n_bytes, numbers.start + bounds[i] * row_bytes)
                values = np.frombuffer(stored, numbers.dtype).reshape(-1, spec.width)
                if values.nbytes != n_bytes:
                    raise ValueError("it is cut short")
                rows.append(numbers.convert(values))
            arrays.append(rows)
        return arrays


def find_vectors(path: Path) -> int:
    """Find the byte offset of the vectors in a file, which stores them contiguously.

    Raises:
        FeatureFileError: the file no longer exists, or has changed.
    """
    with open_reader(path), open_features(path) as h5:
        return _find_numbers(h5, "embeddings").start


def read_vectors(
    path: Path, start: int, encoder: EncoderSpec, positions: Sequence[int]
) -> list[NDArray[np.float32]]:
    """Read the vectors at these positions of a verified file, each as (1, dim).

    ``start`` comes from ``find_vectors``, because opening the file with HDF5 takes a millisecond.

    Raises:
        FeatureFileError: the file no longer exists, or has changed.
    """
    dim = encoder.dim
    is_short = encoder.store == "bfloat16"
    n_bytes = dim * (2 if is_short else 4)
    with open_reader(path), path.open("rb", buffering=0) as handle:
        rows = [os.pread(handle.fileno(), n_bytes, start + i * n_bytes) for i in positions]
        vectors = [np.frombuffer(row, dtype="<u2" if is_short else "<f4") for row in rows]
        if is_short:
            vectors = [from_bfloat16(vector) for vector in vectors]
        return [vector.reshape(1, dim) for vector in vectors]


def _owned_copy(h5: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset stored in the file itself. HDF5 would follow links to other files.

    Raises:
        ValueError: the dataset is in another file.
    """
    import h5py

    *groups, _ = name.split("/")
    for member in (*groups, name):
        if not isinstance(h5.get(member, getlink=True), h5py.HardLink):
            raise ValueError(f"{member} is a link")
    dataset = h5[name]
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{name} is kept in another file")
    return dataset


def _to_strings(dataset: h5py.Dataset) -> tuple[str, ...]:
    return tuple(dataset.asstr()[:])


def _check_content(path: Path, label: Label) -> Checksums:
    """Verify the content of a file against its label.

    HDF5 must not read a corrupt file: on some flipped bits it never returns.

    Raises:
        ValueError: the content is corrupt.
    """
    checksum = Checksum(label.checksum)
    n_left = label.n_bytes
    with path.open("rb") as handle:
        while n_left > 0 and (block := handle.read(min(n_left, _BLOCK))):
            checksum.update(block)
            n_left -= len(block)
        return _compare(checksum, label, handle.read())


def _read_content(path: Path, label: Label) -> tuple[NDArray[np.uint8], Checksums]:
    """Read the content of a file, and verify it as ``_check_content`` does."""
    content = np.empty(label.n_bytes, dtype=np.uint8)
    checksum = Checksum(label.checksum)
    with path.open("rb") as handle:
        for first in range(0, len(content), _BLOCK):
            block = content[first : first + _BLOCK].data
            if handle.readinto(block) != len(block):
                raise ValueError("it is cut short")
            checksum.update(block)
        return content, _compare(checksum, label, handle.read())


def _compare(checksum: Checksum, label: Label, end: bytes) -> Checksums:
    """Compare a content's checksum with its label, which is in the end of the file."""
    if checksum.text != label.checksum:
        raise ValueError("its content has another checksum")
    checksum.update(end)
    return Checksums(_label_digest(end), checksum.text)
