"""The format of a feature file: HDF5 with a label at its end; it exists only when it is whole.

A file is built in memory, written with plain writes, synced, read back and renamed: HDF5's
own writing is not safe on a full disk. Behind the HDF5 content, where its readers do not look,
stands a label, and behind it the label's own SHA-256 and length. Vectors are float32, or bfloat16:
half the bytes, in a floating-point type of the file's own, which HDF5 converts for who asks for
float32, and readers here convert faster. The label says what made the
file, so that one of another recipe or another shard is never taken for this one's, and gives
length and SHA-256 of the content. So ``read_label`` needs only a file's last bytes, whatever its
size, to see what it belongs to and that it is complete; ``read_embeddings`` verifies every bit.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from virnucpro import __version__
from virnucpro.ground.config import EncoderSpec, Store
from virnucpro.ground.errors import FeatureFileError, StorageError
from virnucpro.ground.files import disk_error, parse_json, sha256
from virnucpro.ground.log import printable
from virnucpro.ground.records import Embeddings, Failure, from_bfloat16
from virnucpro.ground.tree import Tree

if TYPE_CHECKING:
    import h5py

_SEAL = struct.Struct("<32sI")  # SHA-256 and length of the label
_BLOCK = 1 << 18
_MAX_LABEL = 1 << 28  # bytes: a bound on what is read before its hash is known

# what h5py raises on a file that is not as it should be
_DAMAGE = (OSError, LookupError, ValueError, TypeError, RuntimeError, AttributeError)
# numbers of the OSErrors that tell of the file; all others tell of the disk, or of who may read it
_NO_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# HDF5's fields of a number in bfloat16: sign and exponent, their bits, mantissa and its bits
_BFLOAT16 = (15, 7, 8, 0, 7)

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a feature file: which shard and recipe it is of."""

    attributes: Attributes
    failed_records: Sequence[str]
    n_bytes: int  # size of the HDF5 content
    sha256: str  # hash of the HDF5 content

    def __post_init__(self) -> None:
        if not isinstance(self.attributes, Mapping):
            raise TypeError("attributes have names")
        ids = self.failed_records
        if not isinstance(ids, (list, tuple)) or not all(isinstance(one, str) for one in ids):
            raise TypeError("failed records are named by their ids")


def write_embeddings(
    path: Path,
    embeddings: Embeddings,
    attributes: Attributes,
    tree: Tree,
    store: Store = "float32",
) -> None:
    """Write one file: ``ids``, ``lengths``, ``embeddings``, and what failed.

    One that is there with the same content, to the last bit, is left alone. Beside its attributes
    stands the version of the program, which no reader asks for: what counts for the numbers is the
    recipe.
    """
    failed_records = list(dict.fromkeys(failure.record_id for failure in embeddings.failures))
    content = _to_hdf5(embeddings, attributes, store)
    parts = content, sealed_label(content, attributes, failed_records)  # large, and not copied
    with suppress(OSError):  # what cannot be read is replaced
        if path.is_file() and sha256(path) == hash_of(parts):
            return
    with tree.replacing(path) as out:
        for part in parts:
            out.write(part)
        out.seek(0)
        if not _holds(out, parts):
            raise StorageError(
                f"{printable(path)} was written, but reads back differently",
                hint="the disk has a fault: see the system's log",
            )


def _holds(handle: BinaryIO, parts: Iterable[bytes]) -> bool:
    """True if a file has this content; it is read in blocks, which are in memory already."""
    for part in parts:
        for first in range(0, len(part), _BLOCK):
            block = part[first : first + _BLOCK]
            if handle.read(len(block)) != block:
                return False
    return not handle.read(1)


def sealed_label(
    content: bytes, attributes: Attributes, failed_records: Sequence[str] = ()
) -> bytes:
    """The end of a feature file: its label, and the length and hash of the label."""
    label = Label(attributes, failed_records, len(content), hash_of([content]))
    text = json.dumps(asdict(label)).encode()
    return text + _SEAL.pack(hashlib.sha256(text).digest(), len(text))


def hash_of(parts: Iterable[bytes]) -> str:
    """The SHA-256 of these bytes, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _to_hdf5(embeddings: Embeddings, attributes: Attributes, store: Store) -> bytes:
    text = text_type()
    failures = embeddings.failures
    with new_hdf5() as h5:
        h5.attrs.update({**attributes, "virnucpro_version": __version__})
        h5.create_dataset("ids", data=np.array(embeddings.ids, dtype=object), dtype=text)
        h5["lengths"] = embeddings.lengths
        if store == "float32":
            h5["embeddings"] = embeddings.vectors
        else:
            _add_bfloat16(h5, _to_bfloat16(embeddings.vectors))
        for name in Failure._fields:
            values = np.array([getattr(failure, name) for failure in failures], dtype=object)
            h5.create_dataset(f"failed/{name}", data=values, dtype=text)
        h5.flush()
        return bytes(h5.id.get_file_image())


def _add_bfloat16(h5: h5py.File, bits: NDArray[np.uint16]) -> None:
    """Add the dataset of vectors in a type that HDF5 knows by its fields."""
    from h5py import h5d, h5p, h5s, h5t

    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(*_BFLOAT16)
    kind.set_size(bits.itemsize)
    kind.set_ebias(127)
    timeless = h5p.create(h5p.DATASET_CREATE)
    timeless.set_obj_track_times(False)  # the same content gives the same bytes
    space = h5s.create_simple(bits.shape)
    dataset = h5d.create(h5.id, b"embeddings", kind, space, timeless)
    dataset.write(h5s.ALL, h5s.ALL, bits, kind)  # without a conversion


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of finite numbers, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    halves: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return halves


def _vectors(dataset: h5py.Dataset) -> NDArray[np.float32]:
    """The vectors of a file. HDF5 takes 40 times as long to convert bfloat16."""
    from h5py import h5s

    kind = dataset.id.get_type()
    if kind.get_size() != 2 or kind.get_fields() != _BFLOAT16:
        rows: NDArray[np.float32] = dataset[:]
        return rows
    bits = np.empty(dataset.shape, dtype=np.uint16)
    dataset.id.read(h5s.ALL, h5s.ALL, bits, kind)
    return from_bfloat16(bits)


def text_type() -> np.dtype[Any]:
    """The type of a dataset of texts, in UTF-8."""
    import h5py

    kind: np.dtype[Any] = h5py.string_dtype("utf-8")
    return kind


def new_hdf5() -> h5py.File:
    """An empty file in memory. HDF5 knows it by a name that no other thread's has."""
    import h5py

    name = f"memory of thread {threading.get_ident()}"
    return h5py.File(name, "w", driver="core", backing_store=False, libver="v110")


def open_features(path: Path) -> h5py.File:
    """Open a file that is whole: it never changes, and not every file system has locks."""
    import h5py

    _refuse_pipe(path)
    return h5py.File(path, "r", locking=False)


def _refuse_pipe(path: Path) -> None:
    """Raise ValueError for what is there but no plain file: a pipe would never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a plain file")


def read_label(path: Path, attributes: Attributes) -> Label:
    """Verify, by its last bytes, that a file is complete and has the attributes it must have.

    Raises:
        FeatureFileError: it is missing, cut short, or of another recipe or shard.
        OutputError, StorageError: it cannot be read now.
    """
    with reading(path):
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
    return label


def read_embeddings(path: Path, attributes: Attributes, dim: int | None = None) -> Embeddings:
    """Read one file and verify it, to the last bit, against the attributes it must have.

    With ``dim``, its vectors must be of that width; without any vector, the width may be 0.

    Raises:
        FeatureFileError: it is missing, damaged, or of another recipe, shard or width.
        OutputError, StorageError: it cannot be read now.
    """
    label = read_label(path, attributes)
    with reading(path):
        _check_content(path, label)
        with open_features(path) as h5:
            embeddings = Embeddings(
                ids=_strings(_own(h5, "ids")),
                lengths=_own(h5, "lengths")[:],
                vectors=_vectors(_own(h5, "embeddings")),
                per_residue=label.attributes.get("pooling") == "none",
                failures=_failures(h5) if label.failed_records else (),
            )
        width = embeddings.vectors.shape[1]
        if dim not in (None, width) and (width or embeddings.ids):
            raise ValueError(f"its vectors have {width} values of {dim}")
    return embeddings


def _failures(h5: h5py.File) -> tuple[Failure, ...]:
    columns = [_strings(_own(h5, f"failed/{name}")) for name in Failure._fields]
    return tuple(Failure(*values) for values in zip(*columns, strict=True))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a feature file, or an index, is read into an error of ours.

    A file that cannot be read now is not damaged: nobody may delete it for that.

    Raises:
        FeatureFileError: it is missing, or not as it was written.
        OutputError, StorageError: it cannot be read now.
    """
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise disk_error(error, path) from error
        raise FeatureFileError(
            f"{printable(path)} is not whole: {printable(error)}",
            hint="check the disk, and run the same command with --resume: it is made again",
        ) from error


def read_rows(path: Path, places: Sequence[int]) -> list[NDArray[np.float32]]:
    """The rows of some ORFs, by their places, of a file that was verified before: (length, dim).

    Raises:
        FeatureFileError: it is not there any more, or not as it was.
    """
    with reading(path), open_features(path) as h5:
        rows = h5["embeddings"]
        bounds = np.concatenate([[0], np.cumsum(h5["lengths"][:])])
        return [rows[bounds[i] : bounds[i + 1]] for i in places]


def find_vectors(path: Path) -> int:
    """The byte at which the vectors of a file begin: they are stored one after the other.

    Raises:
        FeatureFileError: it is not there any more, or not as it was.
    """
    with reading(path), open_features(path) as h5:
        rows = _own(h5, "embeddings")
        start = rows.id.get_offset()  # None: without a byte, or in chunks
        if start is None and rows.size > 0:
            raise ValueError("its vectors are not stored one after the other")
        return start or 0


def read_vectors(
    path: Path, start: int, encoder: EncoderSpec, places: Sequence[int]
) -> list[NDArray[np.float32]]:
    """The vectors at some places of a file that was verified before, each as (1, dim).

    ``start`` is what ``find_vectors`` gave: HDF5 takes a millisecond to open a file.

    Raises:
        FeatureFileError: it is not there any more, or not as it was.
    """
    dim, is_short = encoder.dim, encoder.store == "bfloat16"
    n_bytes = dim * (2 if is_short else 4)
    with reading(path), path.open("rb", buffering=0) as handle:
        rows = [os.pread(handle.fileno(), n_bytes, start + i * n_bytes) for i in places]
        numbers = [np.frombuffer(row, dtype="<u2" if is_short else "<f4") for row in rows]
        return [(from_bfloat16(one) if is_short else one).reshape(1, dim) for one in numbers]


def _own(h5: h5py.File, name: str) -> h5py.Dataset:
    """A dataset of the file itself: HDF5 would read any other file that one names."""
    import h5py

    *groups, _ = name.split("/")
    for place in (*groups, name):
        if not isinstance(h5.get(place, getlink=True), h5py.HardLink):
            raise ValueError(f"{place} is a link")
    dataset = h5[name]
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{name} is kept in another file")
    return dataset


def _strings(dataset: h5py.Dataset) -> tuple[str, ...]:
    return tuple(dataset.asstr()[:])


def _check_content(path: Path, label: Label) -> None:
    """Raise ValueError for a file that is not as it was written.

    HDF5 must not see a damaged file: on some flipped bits it loops for ever.
    """
    digest, n_left = hashlib.sha256(), label.n_bytes
    with path.open("rb") as handle:
        while n_left > 0 and (block := handle.read(min(n_left, _BLOCK))):
            digest.update(block)
            n_left -= len(block)
    if n_left or digest.hexdigest() != label.sha256:
        raise ValueError("its content has another hash")
