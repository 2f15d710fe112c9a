"""Download a file: resumable, bounded in size, verified, and visible only when complete.

Received bytes go to ``.NAME.part`` in the same folder, and the next attempt continues that file. It
is opened once, never through a link, and stays open until it is verified and renamed. So nobody
with write access to the folder can redirect the download to another file, or swap it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from virnucpro.core.atomic_io import open_regular_file, storage_errors
from virnucpro.core.errors import DownloadError, OutputError, StorageError, UnavailableError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import format_bytes, printable
from virnucpro.models.family import RemoteFile

_BLOCK = 1 << 20
_TIMEOUT = 30  # seconds without a byte


_OnBytes = Callable[[int, int], None]  # bytes so far, total bytes (0: unknown)


def _fetch(file: RemoteFile, path: Path, out: BinaryIO, on_bytes: _OnBytes) -> None:
    """Download to the open file at ``path``. If it has the first bytes already, fetch the rest.

    Raises:
        UnavailableError: the file exceeds its size limit.
        StorageError: the disk has too little space.
        OSError, HTTPException: the server sends another file, or the connection ended early or is
            too slow.
    """
    start = out.seek(0, os.SEEK_END)
    if start == file.n_bytes:
        return
    if start > (file.n_bytes or file.max_bytes):
        start = 0
    if file.n_bytes is not None:
        _check_free_space(path, file.n_bytes - start)
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(file.url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        place = answer.headers.get("Content-Range") or ""
        is_part = answer.status == http.client.PARTIAL_CONTENT
        if not is_part or not place.startswith(f"bytes {start}-"):
            start = 0  # the response contains the complete file
        _receive(answer, out, start, file, on_bytes)


@contextmanager
def _open_for_append(path: Path) -> Iterator[BinaryIO]:
    """Open a file for appending, by one process at a time.

    Raises:
        OutputError: another process downloads to this file, or it is a link or not a regular file.
    """
    with storage_errors(path), open(path, "ab+", opener=_open_plain) as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another process is downloading {printable(path)}", hint="wait until it is done"
            ) from error
        try:
            yield out
        finally:
            if not os.fstat(out.fileno()).st_size:
                path.unlink(missing_ok=True)


def _open_plain(path: str, flags: int) -> int:
    """Open or create a regular file that has no other name.

    Raises:
        OutputError: the path is a link, or not a regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _foreign_file_error(Path(path)) from error
        raise
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise _foreign_file_error(Path(path))


def _foreign_file_error(path: Path) -> OutputError:
    return OutputError(
        f"{printable(path)} is a link, or not a plain file: the download is not written to it",
        hint="inspect it, delete it, and run the command again",
    )


def _put_in_place(out: BinaryIO, partial: Path, path: Path) -> None:
    """Rename an open file after syncing it to disk.

    Raises:
        OutputError: another file has replaced it.
    """
    os.fsync(out.fileno())
    partial.replace(path)
    if not os.path.samestat(path.lstat(), os.fstat(out.fileno())):
        path.unlink()
        raise _foreign_file_error(partial)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _receive(
    answer: http.client.HTTPResponse,
    out: BinaryIO,
    start: int,
    file: RemoteFile,
    on_bytes: _OnBytes,
) -> None:
    """Write a server's response after the first ``start`` bytes of the file.

    Raises:
        UnavailableError: the file exceeds its size limit.
        OSError: the server sends another file, such as a login page. See also ``_fetch``.
    """
    slowest = 50_000  # minimum average bytes per second
    announced = start + answer.length if answer.length else 0  # 0: unknown
    total = file.n_bytes or announced
    if announced not in (0, total):
        raise OSError(f"it has {announced} bytes, not {total}")
    out.seek(start)
    out.truncate()  # existing bytes are dropped only for a file with the right length
    max_bytes = total or file.max_bytes
    began = time.monotonic()
    n_bytes = start
    while block := answer.read1(_BLOCK):
        out.write(block)
        n_bytes += len(block)
        if n_bytes > max_bytes:
            raise UnavailableError(f"it is longer than {max_bytes} bytes")
        seconds = time.monotonic() - began
        if seconds > 2 * _TIMEOUT + (n_bytes - start) / slowest:
            raise OSError(
                f"the connection is too slow: {n_bytes - start} bytes in {seconds:.0f} seconds"
            )
        on_bytes(n_bytes, total)
    if n_bytes < total:
        raise OSError(f"the connection ended after {n_bytes} of {total} bytes")


def _check_free_space(path: Path, n_bytes: int) -> None:
    """Check the free disk space for a download.

    Raises:
        StorageError: the disk has fewer free bytes.
    """
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise StorageError(
            f"{printable(path.parent)} has {format_bytes(free)} free; "
            f"the download needs {format_bytes(n_bytes)}",
            hint="make room there, or set TORCH_HOME to a folder on another disk",
        )


def fetch_file(file: RemoteFile, path: Path, on_event: EventHandler) -> None:
    """Download a published file. ``path`` appears only when it is complete.

    Raises:
        DownloadError: the file cannot be downloaded, or has other content.
        OutputError, StorageError: it cannot be written, or another process downloads it.
    """

    def on_bytes(n_bytes: int, total: int) -> None:
        on_event(Progress(f"fetching {path.name}", n_bytes, total, "bytes"))

    partial = path.with_name(f".{path.name}.part")
    hint = (
        f"run the command again to continue; or, on a machine without a network, fetch {file.url} "
        f"elsewhere, and bring it to {path.parent} with `virnucpro models import`"
    )
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _open_for_append(partial) as out:
            _fetch(file, partial, out, on_bytes)
            out.flush()
            check_content(file, out)
            with storage_errors(path, partial):
                _put_in_place(out, partial, path)
    except UnavailableError as error:
        partial.unlink(missing_ok=True)
        raise DownloadError(
            f"the file from {file.url} is not {path.name}: {error}", hint=hint
        ) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink(missing_ok=True)  # too long: no download could complete it
        reason = getattr(error, "reason", None) or error
        raise DownloadError(f"cannot fetch {file.url}: {printable(reason)}", hint=hint) from error


def check_file(file: RemoteFile, path: Path) -> None:
    """Read a complete file and reject it if it differs from the published one.

    Raises:
        UnavailableError: the file differs.
    """
    with open_regular_file(path) as handle:
        check_content(file, handle)


def check_content(file: RemoteFile, handle: BinaryIO) -> None:
    """Read an open file from its start and reject it if it differs from the published one.

    A git file id is the SHA-1 of the object type, the size and the content.

    Raises:
        UnavailableError: the file differs.
    """
    n_bytes = os.fstat(handle.fileno()).st_size
    if file.n_bytes not in (None, n_bytes):
        raise UnavailableError(f"it has {n_bytes} bytes, not {file.n_bytes}")
    git = hashlib.sha1(f"blob {n_bytes}\0".encode(), usedforsecurity=False)
    for kind, recorded, digest in (
        ("SHA-256", file.sha256, hashlib.sha256()),
        ("MD5", file.md5, hashlib.md5(usedforsecurity=False)),
        ("id in git", file.git_blob, git),
    ):
        if not recorded:
            continue
        handle.seek(0)
        while block := handle.read(_BLOCK):
            digest.update(block)
        if digest.hexdigest() != recorded:
            raise UnavailableError(f"its {kind} is {digest.hexdigest()}")
