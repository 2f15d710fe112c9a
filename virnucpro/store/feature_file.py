"""Read and write feature files: HDF5 followed by a label. Files appear atomically.

A file is built in memory, written sequentially, synced, read back and renamed, because HDF5's own
writing is not safe on a full disk. Two blocks follow the HDF5 content, where HDF5 readers do not
look. The table lists ids, lengths and sequence digests, so that an index of many files needs only
their ends. The label names the recipe and the shard, so that files cannot be confused. It gives the
length and SHA-256 of the content and of the table, and the byte offset of the vectors, which can be
mapped into memory. The label's SHA-256 and length come last. ``read_label`` therefore needs only
the last bytes to identify a file and see that it is complete. ``read_embeddings`` verifies every
bit.

Vectors are float32 or, in half the space, bfloat16, a custom floating-point type that HDF5 converts
to float32 on reading. The readers here convert it faster.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as tensors

from virnucpro._version import __version__
from virnucpro.core.atomic_io import disk_error, hash_file, parse_json
from virnucpro.core.errors import FeatureFileError, StorageError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.numeric import from_bfloat16
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EncoderSpec, Store
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, Failure, OutputArray, check_counts

if TYPE_CHECKING:
    import h5py

_SEAL = struct.Struct("<32sI")  # label's SHA-256 and length
_BLOCK = 1 << 18
_MAX_LABEL = 1 << 28  # bytes; bounds the read before the hash is checked
# errors that h5py raises on a corrupt file
_DAMAGE = (
    *(OSError, LookupError, ValueError, TypeError, RuntimeError, AttributeError),
    SafetensorError,
)
# errno values that concern the file; all others concern the disk or permissions
_NO_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# HDF5 bit fields of bfloat16: sign position, exponent position and size, mantissa position and size
_BFLOAT16 = (15, 7, 8, 0, 7)

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a feature file: its shard, its recipe, and its content's size and hash."""

    attributes: Attributes
    failed_records: Sequence[str]
    n_bytes: int  # size of the content: HDF5 and table
    sha256: str  # hash of the content
    table_bytes: int = 0  # size of the table at the end of the content
    table_sha256: str = ""
    offsets: Mapping[str, int] = field(default_factory=dict)  # dataset -> byte offset; 0: empty

    def __post_init__(self) -> None:
        if not isinstance(self.attributes, Mapping):
            raise TypeError("attributes have names")
        check_counts(self.n_bytes, self.table_bytes, *self.offsets.values())
        ids = self.failed_records
        is_sequence = isinstance(ids, (list, tuple))
        if not is_sequence or not all(isinstance(record_id, str) for record_id in ids):
            raise TypeError("failed records are named by their ids")


class OrfTable(NamedTuple):
    """The ORFs with a vector in a feature file, in the order of its rows."""

    ids: tuple[str, ...]
    lengths: NDArray[np.int32]  # (n,), residues
    sequence_sha256: NDArray[np.uint8]  # (n, 32)
    n_before: NDArray[np.int32]  # (n,) in a file of copies, else empty: see ``Embeddings``


class Checksums(NamedTuple):
    """The SHA-256 of a file, and of its label, which includes the content's SHA-256."""

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
        OutputError, StorageError: the file cannot be written, or reads back differently.
    """
    failed_records = list(dict.fromkeys(failure.record_id for failure in embeddings.failures))
    content, offsets = _to_hdf5(embeddings, attributes, store)
    table = _to_table(embeddings)
    digest = hashlib.sha256(content)  # the content is large, so it is hashed once
    digest.update(table)
    label = Label(
        attributes,
        failed_records,
        n_bytes=len(content) + len(table),
        sha256=digest.hexdigest(),
        table_bytes=len(table),
        table_sha256=read_checksum([table]),
        offsets=offsets,
    )
    end = _seal(label)
    digest.update(end)
    checksums = Checksums(_label_digest(end), digest.hexdigest())
    parts = (content, table, end)  # not joined, which would copy the content
    with suppress(OSError):  # an unreadable file is replaced
        if path.is_file() and hash_file(path) == checksums.file:
            return checksums
    with tree.atomic_write(path) as out:
        for part in parts:
            out.write(part)
        out.seek(0)
        if not _has_layout(out, parts):
            raise StorageError(
                f"{printable(path)} was written, but reads back differently",
                hint="the disk has a fault: check the system log",
            )
    return checksums


def _has_layout(handle: BinaryIO, parts: Iterable[bytes]) -> bool:
    """Return True if a file consists of these parts. Compare in blocks."""
    for part in parts:
        for first in range(0, len(part), _BLOCK):
            block = part[first : first + _BLOCK]
            if handle.read(len(block)) != block:
                return False
    return not handle.read(1)


def checksummed_label(
    content: bytes, attributes: Attributes, failed_records: Sequence[str] = ()
) -> bytes:
    """Return what follows this content: its label, and the label's hash and length."""
    return _seal(Label(attributes, failed_records, len(content), read_checksum([content])))


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
        if read_checksum([content]) != label.sha256:
            raise ValueError("its content has another hash")
    return label, content


def read_checksum(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of the concatenated parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


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
        if read_checksum([table]) != label.table_sha256:
            raise ValueError("its table has another hash")
        columns = tensors.load(table)
        return OrfTable(
            ids=tuple(_split(columns["ids"].tobytes(), columns["id_bytes"])),
            lengths=columns["lengths"],
            sequence_sha256=columns["sequence_sha256"],
            n_before=columns["n_before"],
        )


def _split(text: bytes, sizes: NDArray[np.int32]) -> Iterator[str]:
    """Yield the ids in their concatenated UTF-8."""
    first = 0
    for end in np.cumsum(sizes).tolist():
        yield text[first:end].decode("utf-8", "surrogateescape")
        first = end


def _to_hdf5(
    embeddings: Embeddings, attributes: Attributes, store: Store
) -> tuple[bytes, dict[str, int]]:
    """Return an HDF5 file, and the byte offsets of its vectors by dataset."""
    text = text_type()
    failures = embeddings.failures
    with new_hdf5() as h5:
        h5.attrs.update({**attributes, "virnucpro_version": __version__})
        h5.create_dataset("ids", data=np.array(embeddings.ids, dtype=object), dtype=text)
        h5["lengths"] = embeddings.lengths
        if store == "float32":
            h5["embeddings"] = embeddings.vectors
        else:
            _add_bfloat16(h5, "embeddings", _to_bfloat16(embeddings.vectors))
        if embeddings.extra:
            h5[str(attributes["output"])] = h5["embeddings"]
        for array in embeddings.extra:
            _add_output(h5, array)
        for name in Failure._fields:
            values = np.array([getattr(failure, name) for failure in failures], dtype=object)
            h5.create_dataset(f"failed/{name}", data=values, dtype=text)
        h5.flush()
        names = ["embeddings", *(array.spec.name for array in embeddings.extra)]
        offsets = {name: h5[name].id.get_offset() or 0 for name in names}  # None: without rows
        return bytes(h5.id.get_file_image()), offsets


def _add_output(h5: h5py.File, array: OutputArray) -> None:
    """Add the dataset of an output. Single numbers have one dimension."""
    values = array.values if array.spec.has_vectors else array.values[:, 0]
    if array.spec.dtype == "float32":
        h5[array.spec.name] = values
    else:
        _add_bfloat16(h5, array.spec.name, _to_bfloat16(values))


def _add_bfloat16(h5: h5py.File, name: str, bits: NDArray[np.uint16]) -> None:
    """Add a dataset in a custom HDF5 type."""
    from h5py import h5d, h5p, h5s

    kind = vector_type("bfloat16")
    timeless = h5p.create(h5p.DATASET_CREATE)
    timeless.set_obj_track_times(False)  # the same content gives the same bytes
    space = h5s.create_simple(bits.shape)
    dataset = h5d.create(h5.id, name.encode(), kind, space, timeless)
    dataset.write(h5s.ALL, h5s.ALL, bits, kind)  # without a conversion


def vector_type(store: Store) -> h5py.h5t.TypeFloatID:
    """Return the HDF5 type for the numbers in a vector."""
    from h5py import h5t

    kind = h5t.IEEE_F32LE.copy()
    if store == "bfloat16":
        kind.set_fields(*_BFLOAT16)
        kind.set_size(2)
        kind.set_ebias(127)
    return kind


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves of finite numbers, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    halves: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return halves


def _vectors(dataset: h5py.Dataset) -> NDArray[np.float32]:
    """Read the vectors in a file. HDF5 would take 40 times as long to convert bfloat16."""
    from h5py import h5s

    kind = dataset.id.get_type()
    if kind.get_size() != 2 or kind.get_fields() != _BFLOAT16:
        rows: NDArray[np.float32] = dataset[:]
        return rows
    bits = np.empty(dataset.shape, dtype=np.uint16)
    dataset.id.read(h5s.ALL, h5s.ALL, bits, kind)
    return from_bfloat16(bits)


def id_text(orf_id: str) -> str:
    """Return an id as text for Parquet, which is UTF-8.

    Any other byte becomes four characters.

    >>> id_text("a\\udcffb")
    'a\\\\xffb'
    """
    if orf_id.isascii():
        return orf_id
    return orf_id.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def text_type() -> np.dtype[Any]:
    """Return the type for text datasets, in UTF-8."""
    import h5py

    kind: np.dtype[Any] = h5py.string_dtype("utf-8")
    return kind


def new_hdf5() -> h5py.File:
    """Create an empty file in memory, with a name unique to the thread."""
    import h5py

    name = f"memory of thread {threading.get_ident()}"
    return h5py.File(name, "w", driver="core", backing_store=False, libver="v110")


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
    with open_reader(path):
        _refuse_pipe(path)
        with path.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END) - _SEAL.size
            if end < 0:
                raise ValueError("it is cut short")
            handle.seek(end)
            digest, n_bytes = _SEAL.unpack(handle.read())
            if n_bytes > min(end, _MAX_LABEL):
                raise ValueError("it has no label at its end")
            start = handle.seek(end - n_bytes)
            text = handle.read(n_bytes)
        if hashlib.sha256(text).digest() != digest:
            raise ValueError("it has no label at its end")
        label = Label(**parse_json(text))
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
        checksums = _check_content(path, label)
        with open_features(path) as h5:
            embeddings = Embeddings(
                ids=_to_strings(_owned_copy(h5, "ids")),
                lengths=_owned_copy(h5, "lengths")[:],
                vectors=_vectors(_owned_copy(h5, "embeddings")),
                per_residue=label.attributes.get("pooling") == "none",
                failures=_failures(h5) if label.failed_records else (),
                extra=tuple(_read_output(h5, spec) for spec in extra),
            )
        width = embeddings.vectors.shape[1]
        if dim not in (None, width) and (width or embeddings.ids):
            raise ValueError(f"its vectors have {width} values of {dim}")
    return embeddings, checksums


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
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise disk_error(error, path) from error
        raise FeatureFileError(
            f"{printable(path)} is damaged or truncated: {printable(error)}",
            hint=with_options(
                "check the disk, and run the same command with {resume} to recompute it"
            ),
        ) from error


def read_rows(path: Path, positions: Sequence[int]) -> list[NDArray[np.float32]]:
    """Read the rows of ORFs at these positions from a verified file, each as (length, dim).

    Raises:
        FeatureFileError: the file no longer exists, or has changed.
    """
    with open_reader(path), open_features(path) as h5:
        rows = h5["embeddings"]
        bounds = np.concatenate([[0], np.cumsum(h5["lengths"][:])])
        return [rows[bounds[i] : bounds[i + 1]] for i in positions]


def _read_output(h5: h5py.File, spec: OutputSpec) -> OutputArray:
    return OutputArray(spec, _vectors(_owned_copy(h5, spec.name)).reshape(-1, spec.width))


def read_extra(
    path: Path, specs: Sequence[OutputSpec], positions: Sequence[int]
) -> list[list[NDArray[np.float32]]]:
    """Read the rows of ORFs at these positions from a verified file, for each of the outputs.

    Raises:
        FeatureFileError: the file no longer exists, or has changed.
    """
    if not specs:
        return []
    with open_reader(path), open_features(path) as h5:
        lengths = h5["lengths"][:]
        parts = []
        for spec in specs:
            bounds = np.concatenate([[0], np.cumsum(spec.count_rows(lengths))])
            values = _read_output(h5, spec).values
            parts.append([values[bounds[i] : bounds[i + 1]] for i in positions])
        return parts


def find_vectors(path: Path) -> int:
    """Find the byte offset of the vectors in a file, which stores them contiguously.

    Raises:
        FeatureFileError: the file no longer exists, or has changed.
    """
    with open_reader(path), open_features(path) as h5:
        rows = _owned_copy(h5, "embeddings")
        start = rows.id.get_offset()  # None: empty or chunked
        if start is None and rows.size > 0:
            raise ValueError("its vectors are not stored one after the other")
        return start or 0


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
    digest = hashlib.sha256()
    n_left = label.n_bytes
    with path.open("rb") as handle:
        while n_left > 0 and (block := handle.read(min(n_left, _BLOCK))):
            digest.update(block)
            n_left -= len(block)
        if n_left or digest.hexdigest() != label.sha256:
            raise ValueError("its content has another hash")
        end = handle.read()
    digest.update(end)
    return Checksums(_label_digest(end), digest.hexdigest())
