"""Lay out HDF5 files whose vectors are written without HDF5.

HDF5 writes ids, lengths and attributes, and reserves the space of the vectors, which it never
touches. Its own writing is not safe on a full disk, and copies the vectors twice. ``new_hdf5_in``
lays out a file on disk, for vectors that come as a stream. With a ``SparseFile``, it lays out a
file whose vectors are in memory already.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.numeric import to_bfloat16
from virnucpro.core.recipe import Store

if TYPE_CHECKING:
    import h5py

ALIGNMENT = 4096  # bytes: vectors begin at a multiple, so that they can be mapped into memory
# HDF5 bit fields of bfloat16: sign position, exponent position and size, mantissa position and size
_BFLOAT16 = (15, 7, 8, 0, 7)
_PAGE = 1 << 16  # bytes


class _File(Protocol):
    """What HDF5 needs from an open file."""

    def write(self, content: bytes | memoryview, /) -> int: ...
    def read(self, n_bytes: int = -1, /) -> bytes: ...
    def truncate(self, n_bytes: int, /) -> int: ...
    def seek(self, position: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...


def text_type() -> np.dtype[Any]:
    """Return the type for text datasets, in UTF-8."""
    import h5py

    kind: np.dtype[Any] = h5py.string_dtype("utf-8")
    return kind


def vector_type(store: Store) -> h5py.h5t.TypeFloatID:
    """Return the HDF5 type for the numbers in a vector."""
    from h5py import h5t

    kind = h5t.IEEE_F32LE.copy()
    if store == "bfloat16":
        kind.set_fields(*_BFLOAT16)
        kind.set_size(2)
        kind.set_ebias(127)
    return kind


def is_bfloat16(kind: h5py.h5t.TypeID) -> bool:
    """Return True if a dataset has the type ``vector_type("bfloat16")``."""
    return bool(kind.get_size() == 2 and kind.get_fields() == _BFLOAT16)


def reserve_vectors(h5: h5py.File, name: str, shape: tuple[int, ...], store: Store) -> int:
    """Add a dataset without its numbers.

    Returns:
        The byte offset of the numbers in the file, or 0 for a dataset without any.
    """
    from h5py import h5d, h5p, h5s

    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)  # the same content gives the same bytes
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    space = h5s.create_simple(shape)
    dataset = h5d.create(h5.id, name.encode(), vector_type(store), space, layout)
    return dataset.get_offset() or 0


@contextmanager
def new_hdf5_in(out: _File, alignment: int = 1) -> Iterator[h5py.File]:
    """Create an HDF5 file in an open file.

    Args:
        out: the file, which is empty.
        alignment: large objects begin at a multiple of this many bytes.

    Raises:
        OSError: the disk rejected a write by HDF5.
    """
    import h5py

    shielded = _LoggedFile(out)
    aligned = {"alignment_threshold": alignment, "alignment_interval": alignment}
    with h5py.File(shielded, "w", libver="v110", **aligned) as h5:
        yield h5
    if shielded.error is not None:
        raise shielded.error


class _LoggedFile:
    """A file that hides disk errors from HDF5, which cannot close a file after one.

    The first error is recorded. Anything written after it is invalid.
    """

    def __init__(self, out: _File) -> None:
        self.error: OSError | None = None
        self._out = out

    def write(self, content: bytes | memoryview) -> int:
        with self._keep_error():
            self._out.write(content)
        return len(content)

    def truncate(self, n_bytes: int) -> int:
        with self._keep_error():
            self._out.truncate(n_bytes)
        return n_bytes

    def flush(self) -> None:
        with self._keep_error():
            self._out.flush()

    def read(self, n_bytes: int = -1) -> bytes:
        """Read bytes. h5py accepts an object as a file only if it has this method."""
        return self._out.read(n_bytes)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any buffer
        content = b""
        with self._keep_error():
            content = self._out.read(len(buffer))
        buffer[:] = content + bytes(len(buffer) - len(content))
        return len(buffer)

    def seek(self, position: int, whence: int = 0) -> int:
        with self._keep_error():
            return self._out.seek(position, whence)
        return position

    def tell(self) -> int:
        return self._out.tell()

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


@dataclass(frozen=True, slots=True, eq=False)
class StoredVectors:
    """Finite numbers that are converted for a file while it is written, without a whole copy."""

    values: NDArray[np.float32]
    store: Store

    @property
    def n_bytes(self) -> int:
        return self.values.size * (2 if self.store == "bfloat16" else 4)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the numbers as they are stored, little-endian. A block is valid until the next one.

        Blocks fit into a cache, so that a block that was hashed is not read from memory again when
        it is written. Memory for rounded numbers is taken once, because new memory costs as much
        time as the rounding.
        """
        n_numbers = 1 << 18  # per block
        numbers = np.ascontiguousarray(self.values, dtype="<f4").reshape(-1)
        rounded = np.empty(min(n_numbers, numbers.size), dtype="<u2")
        for first in range(0, numbers.size, n_numbers):
            block = numbers[first : first + n_numbers]
            if self.store == "bfloat16":
                yield to_bfloat16(block, rounded[: block.size]).data.cast("B")
            else:
                yield block.data.cast("B")


class SparseFile:
    """A file in memory. Space that is never written takes no memory, and reads as zeros."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}  # by page number
        self._n_bytes = 0
        self._position = 0

    def write(self, content: bytes | memoryview, /) -> int:
        view = memoryview(content)
        n_written = 0
        while n_written < len(view):
            number, start = divmod(self._position, _PAGE)
            block = view[n_written : n_written + _PAGE - start]
            if number not in self._pages:
                self._pages[number] = bytearray(_PAGE)
            self._pages[number][start : start + len(block)] = block
            n_written += len(block)
            self._position += len(block)
        self._n_bytes = max(self._n_bytes, self._position)
        return n_written

    def read(self, n_bytes: int = -1, /) -> bytes:
        end = self._n_bytes if n_bytes < 0 else min(self._n_bytes, self._position + n_bytes)
        blocks = []
        while self._position < end:
            number, start = divmod(self._position, _PAGE)
            n_here = min(_PAGE - start, end - self._position)
            page = self._pages.get(number)
            blocks.append(bytes(n_here) if page is None else bytes(page[start : start + n_here]))
            self._position += n_here
        return b"".join(blocks)

    def truncate(self, n_bytes: int, /) -> int:
        """Set the size. HDF5 calls this once, when it closes the file."""
        self._n_bytes = n_bytes
        return n_bytes

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._n_bytes}[whence]
        self._position = start + position
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Do nothing: there is no disk."""

    def blocks(self, vectors: Mapping[int, StoredVectors]) -> Iterator[bytes | memoryview]:
        """Yield the content, with vectors at these byte offsets in place of what is there."""
        self.seek(0)
        for offset, stored in sorted(vectors.items(), key=itemgetter(0)):
            yield self.read(offset - self._position)
            yield from stored.blocks()
            self.seek(offset + stored.n_bytes)
        yield self.read()
