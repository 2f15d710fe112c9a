"""Write files atomically, read plain or compressed files, and explain disk errors.

Python's errors from ``write`` name no file, and their numbers mean little to a user. This module
adds the file name, an exit code and a remedy.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from virnucpro.core.errors import OutputError, StorageError
from virnucpro.core.logging import open_nonblocking, printable

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

OnBlock = Callable[[bytes | memoryview], object]
Opener = Callable[[str, int], int]  # for ``open``: path and flags -> descriptor
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"  # built-in models
TEMPORARY = ".tmp"  # suffix of every temporary file
MAX_JSON_BYTES = 2**28  # bytes in a JSON file; run.json has 400 per input
_N_DIGITS = 8  # hexadecimal digits before the suffix
_TEMPORARY = re.compile(rf"\..*\.[0-9a-f]{{{_N_DIGITS}}}{re.escape(TEMPORARY)}", re.DOTALL)
_BLOCK = 1 << 20

# by error number: the kind of error, and what the user can do
_REMEDIES: dict[int, tuple[type[OutputError | StorageError], str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), (StorageError, "make room there")),
    errno.EFBIG: (StorageError, "files may not grow so large here: see `ulimit -f`"),
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE), (StorageError, "too many files are open: see `ulimit -n`")
    ),
    errno.ENOMEM: (
        StorageError,
        "free memory, or ask for more: see `ulimit -v`, or the limits of the job",
    ),
    errno.EIO: (StorageError, "the disk, or the connection to it, has a fault: see the system log"),
    **dict.fromkeys(
        (errno.ENOENT, errno.ESTALE),
        (
            OutputError,
            "it, or its folder, is missing: create it, or put back what was moved or deleted",
        ),
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        (OutputError, "check the permissions there, or choose another folder"),
    ),
    **dict.fromkeys(
        # ENXIO: a pipe, a socket or a device
        (errno.EEXIST, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY),
        (OutputError, "something else has this name: move it away, or choose another path"),
    ),
    **dict.fromkeys(
        (errno.ENAMETOOLONG, errno.ELOOP),
        (OutputError, "choose another path: this one is too long, or a broken link"),
    ),
}


def disk_error(error: OSError, path: object = "") -> OutputError | StorageError:
    """Translate an OSError. Exit code 73 if the file cannot be created there, else 74."""
    unknown = "check the path, its disk and its permissions, or choose another folder"
    where = path or error.filename
    message = error.strerror or str(error)
    kind, hint = _REMEDIES.get(error.errno or 0, (StorageError, unknown))
    return kind(f"{printable(where)}: {message}" if where else message, hint)


@contextmanager
def storage_errors(path: Path, *also: Path) -> Iterator[None]:
    """Translate errors from writing a file or folder, also under its other names (``also``).

    Raises:
        OutputError: it cannot be created there.
        StorageError: the disk is full or faulty.
    """
    try:
        yield
    except OSError as error:
        own_names = (None, *map(str, (path, *also)))
        if error.errno not in _REMEDIES or error.filename not in own_names:
            raise
        raise disk_error(error, path) from error


def open_regular_file(path: Path | str, on_block: OnBlock | None = None) -> io.BufferedReader:
    """Open a file for reading. Reject pipes, devices and sockets, because opening them could block.

    ``on_block`` gets each byte of the file once, as it is read.

    Raises:
        OSError: the file cannot be opened, or is not a plain file.
    """
    if on_block is None:
        handle = open(path, "rb", opener=open_nonblocking)  # noqa: SIM115 - the caller closes it
        status = os.fstat(handle.fileno())
    else:
        observed = _ObservedFile(path, on_block)
        status = os.fstat(observed.fileno())
        # A large buffer takes longer to allocate than a small file to read.
        n_bytes = min(_BLOCK, max(io.DEFAULT_BUFFER_SIZE, status.st_size))
        handle = io.BufferedReader(observed, n_bytes)
    if stat.S_ISREG(status.st_mode):
        return handle
    handle.close()
    raise OSError(errno.ENXIO, "it is not a plain file", str(path))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling that replaces ``path``, synced to disk, if the block succeeds.

    The folder must exist: a deleted folder is not recreated.

    Raises:
        OutputError, StorageError: as ``storage_errors``.
    """
    temporary = temporary_path(path)
    try:
        with storage_errors(path, temporary, path.parent):
            yield temporary
            move_into_place(temporary, path)
    finally:
        with suppress(OSError):  # a later start removes it
            temporary.unlink()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:  # noqa: ANN401 - as it comes
    """Read a plain JSON file in UTF-8.

    Raises:
        OSError: the file cannot be opened, or is not a plain file.
        ValueError: the file is too large, too deep, or not JSON.
    """
    return parse_json(read_bounded(path, max_bytes))


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a plain file of at most ``max_bytes`` bytes.

    Raises:
        OSError: the file cannot be opened, or is not a plain file.
        ValueError: the file is too large.
    """
    with open_regular_file(path) as handle:
        if os.fstat(handle.fileno()).st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes:,} bytes")
        return handle.read()


def parse_json(text: bytes | str) -> Any:  # noqa: ANN401 - as it comes
    """Parse JSON in UTF-8.

    Raises:
        ValueError: the text is nested too deeply, or not JSON.
    """
    deepest = 64  # levels of JSON; our files have a handful
    too_deep = ValueError(f"it is nested more than {deepest} levels deep")
    try:
        content = json.loads(
            text if isinstance(text, str) else text.decode(), parse_int=_parse_number
        )
    except RecursionError as error:
        raise too_deep from error
    containers = [content] if isinstance(content, (dict, list)) else []
    for _ in range(deepest):
        containers = list(_iter_inner_containers(containers))
    if containers:
        raise too_deep
    return content


def _iter_inner_containers(containers: list[Any]) -> Iterator[Any]:
    """Yield the objects and lists directly inside these objects and lists."""
    for container in containers:
        values = container.values() if type(container) is dict else container
        for value in values:
            if type(value) is dict or type(value) is list:  # JSON has no subclasses of them
                yield value


def _parse_number(digits: str) -> int | float:
    """Parse an integer. An integer that does not fit into 64 bits becomes a float."""
    max_digits = 21  # in a 64-bit number, with its sign
    if len(digits) < max_digits - 1:  # nearly always: any such number fits
        return int(digits)
    is_short = len(digits) <= max_digits and abs(int(digits)) < 2**64
    return int(digits) if is_short else float(digits)


def move_into_place(temporary: Path, path: Path) -> None:
    """Replace ``path`` by its complete temporary sibling, synced to disk."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a temporary name in the same folder, unique even if other machines write there."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_N_DIGITS // 2)}{TEMPORARY}")


@contextmanager
def text_writer(content: BinaryIO) -> Iterator[TextIO]:
    """Write text, including undecodable bytes, to a binary file. The file stays open."""
    out = io.TextIOWrapper(content, "utf-8", "surrogateescape", newline="\n")
    yield out
    out.detach()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Return True for a name that ``temporary_path`` generates."""
    return _TEMPORARY.fullmatch(name) is not None


def open_binary(path: Path | str, on_block: OnBlock | None = None) -> io.BufferedReader:
    """Open a plain, gzip, bzip2, xz or zstd file, recognised by its content, not its name.

    ``on_block`` gets each byte of the file once, still compressed, as it is read.

    Raises:
        OSError: the file cannot be opened, or is a pipe or a device, which can be read only once.
        EOFError: a bgzip file ends between two members, which gzip does not notice.
    """
    with ExitStack() as stack:
        content = decompressed(stack.enter_context(open_regular_file(path, on_block)))
        stack.pop_all()
        return content


def is_compressed(start: bytes) -> bool:
    """Return True if ``decompressed`` decompresses a file with these first bytes."""
    return _find_compression(start) != ""


def _find_compression(start: bytes) -> Literal["gzip", "bzip2", "xz", "zstd", ""]:
    """Return the compression of a file with these first bytes, or "" for a plain file."""
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    if start.startswith(b"BZh"):
        return "bzip2"
    if start.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    return "zstd" if start.startswith(b"\x28\xb5\x2f\xfd") else ""


def decompressed(
    handle: io.BufferedReader, on_piece: OnBlock = lambda _: None
) -> io.BufferedReader:
    """Return the content of an unread plain or compressed file. Closing it closes the file.

    It has the descriptor of the file. ``on_piece`` gets each decompressed byte once.

    Raises:
        EOFError: a bgzip file ends between two members, which gzip does not notice.
    """
    first_bytes = handle.peek(16)[:16]
    match _find_compression(first_bytes):
        case "gzip":
            _check_bgzip_end(handle, first_bytes)
            pieces = _read_through(gzip.GzipFile(fileobj=handle))
        case "bzip2":
            pieces = _decompress(handle, bz2.BZ2Decompressor)
        case "xz":
            start = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)
            pieces = _decompress(handle, start, padding=bytes(4))
        case "zstd":
            pieces = _read_through(zstd.ZstdFile(handle))
        case _:
            return handle
    return io.BufferedReader(_DecompressedFile(handle, pieces, on_piece))


def _check_bgzip_end(handle: BinaryIO, magic: bytes) -> None:
    """Check that a bgzip file has its end mark."""
    mark = b"BC\x02\0"  # in the header of each bgzip member
    if not (magic.startswith(b"\x1f\x8b\x08\x04") and magic.endswith(mark)):
        return
    descriptor = handle.fileno()
    end_mark = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
    end = max(0, os.fstat(descriptor).st_size - len(end_mark))
    if os.pread(descriptor, len(end_mark), end) != end_mark:  # the position stays
        raise EOFError("the end mark of bgzip is missing")


class _ObservedFile(io.FileIO):
    """A file that passes each block to ``on_block`` as it is read."""

    def __init__(self, path: Path | str, on_block: OnBlock) -> None:
        super().__init__(path, opener=open_nonblocking)
        self._on_block = on_block

    def readinto(self, buffer: Any) -> int | None:  # noqa: ANN401 - any buffer
        n_bytes = super().readinto(buffer)
        self._on_block(memoryview(buffer)[:n_bytes])
        return n_bytes


def _read_through(content: gzip.GzipFile | zstd.ZstdFile) -> Generator[bytes]:
    """Yield the content of a compressed file in blocks, decompressed by Python's own reader."""
    with content:
        while block := content.read(_BLOCK):
            yield block


def _decompress(
    handle: BinaryIO,
    start: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor],
    padding: bytes = b"",
) -> Generator[bytes]:
    """Yield the decompressed streams of a bzip2 or xz file. Padding may follow each stream.

    Python's own readers stop without an error at a damaged stream.

    Raises:
        EOFError: the file ends within a stream.
        OSError, LZMAError: the data cannot be decompressed.
    """
    packed_block = 1 << 16  # small, because its remainder is copied at the end of each stream
    packed = handle.read(packed_block)
    while packed:
        stream = start()
        while not stream.eof:
            if stream.needs_input and not packed:
                raise EOFError("the file ends within a stream")
            yield stream.decompress(packed, _BLOCK)
            packed = handle.read(packed_block) if stream.needs_input else b""
        packed = stream.unused_data or handle.read(packed_block)
        # stream and block sizes are multiples of the padding, so no block ends within it
        while padding and packed.startswith(padding):
            n_zeros = len(packed) - len(packed.lstrip(padding))
            packed = packed[n_zeros - n_zeros % len(padding) :]
            packed = packed or handle.read(packed_block)


class _DecompressedFile(io.RawIOBase):
    """A readable file made of the pieces that a generator decompresses from another file."""

    def __init__(self, packed: BinaryIO, pieces: Generator[bytes], on_piece: OnBlock) -> None:
        self._packed = packed
        self._pieces = pieces
        self._on_piece = on_piece
        self._unread = memoryview(b"")  # of the current piece

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._packed.fileno()

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as in the base class
        while not self._unread and (piece := next(self._pieces, None)) is not None:
            self._on_piece(piece)
            self._unread = memoryview(piece)
        n_bytes = min(len(buffer), len(self._unread))
        buffer[:n_bytes] = self._unread[:n_bytes]
        self._unread = self._unread[n_bytes:]
        return n_bytes

    def close(self) -> None:
        self._pieces.close()
        self._packed.close()
        super().close()


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a plain file. Pass the number of bytes read so far to ``on_bytes``."""
    with open_regular_file(path) as handle:
        return hash_stream(handle, on_bytes)


def hash_stream(
    handle: BinaryIO,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_block: Callable[[bytes], None] = lambda _: None,
) -> str:
    """Return the SHA-256 of an open file, from its current position to its end.

    ``on_bytes`` gets the number of bytes so far, ``on_block`` each block.
    """
    digest = hashlib.sha256()
    done = 0
    while block := handle.read(_BLOCK):
        digest.update(block)
        on_block(block)
        done += len(block)
        on_bytes(done)
    return digest.hexdigest()
