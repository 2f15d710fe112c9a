"""A file from the network: resumed where it broke off, bounded, checked, and there when whole.

What came so far lies beside the place of the file, as ``.NAME.part``, which the next attempt goes
on with.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from virnucpro.encoders.families import RemoteFile
from virnucpro.ground.devices import as_size
from virnucpro.ground.errors import OutputError, StorageError, UnavailableError
from virnucpro.ground.files import disk_error, put_in_place, sha256, writing
from virnucpro.ground.log import printable

_BLOCK = 1 << 20
_TIMEOUT = 30  # seconds without a byte
_SLOWEST = 50_000  # least bytes per second, on average
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)", re.ASCII)

OnBytes = Callable[[int, int], None]  # bytes so far, bytes in all (0: unknown)
Check = Callable[[Path], None]  # raises UnavailableError for another file


def _fetch(file: RemoteFile, path: Path, on_bytes: OnBytes) -> None:
    """Bring a file to ``path``, going on with what is there.

    Raises:
        UnavailableError: it goes on and on.
        OutputError: another process fetches it.
        StorageError: there is no room for it.
        OSError, HTTPException: the server has another file, the connection ended early, or is too
            slow to wait for.
    """
    with _appending(path) as out:
        if out.tell() > (file.n_bytes or file.most_bytes):
            out.seek(0)
            out.truncate()
        start = out.tell()
        if file.n_bytes is not None:
            if start == file.n_bytes:
                return
            _ask_for_room(path, file.n_bytes - start)
        request = urllib.request.Request(file.url)
        if start:
            request.add_header("Range", f"bytes={start}-")
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            goes_on = _goes_on(answer, start)
            total = _total(answer, start if goes_on else 0, file.n_bytes)
            if not goes_on:  # what is there is given up only for a file of the right length
                out.seek(0)
                out.truncate()
            _receive(answer, out, total, total or file.most_bytes, on_bytes)


@contextmanager
def _appending(path: Path) -> Iterator[BinaryIO]:
    """A file to append to, by one process at a time."""
    with writing(path), path.open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another process fetches {printable(path)}", hint="wait until it is done"
            ) from error
        out.seek(0, os.SEEK_END)
        try:
            yield out
        finally:
            if not out.tell():
                path.unlink(missing_ok=True)


def _goes_on(answer: http.client.HTTPResponse, start: int) -> bool:
    """True if the answer begins behind what is there, and not with the first byte."""
    match = _RANGE.fullmatch(answer.headers.get("Content-Range") or "")
    is_part = answer.status == http.client.PARTIAL_CONTENT
    return is_part and match is not None and match[1] == str(start)


def _total(answer: http.client.HTTPResponse, start: int, n_bytes: int | None) -> int:
    """Bytes of the whole file; 0 if nobody says how many.

    Raises:
        OSError: the server has another file, such as a page to log in.
    """
    announced = start + answer.length if answer.length else 0  # 0: not said, or not a number
    total = n_bytes or announced
    if announced not in (0, total):
        raise OSError(f"it has {announced} bytes, not {total}")
    return total


def _receive(
    answer: http.client.HTTPResponse, out: BinaryIO, total: int, most: int, on_bytes: OnBytes
) -> None:
    began, first = time.monotonic(), out.tell()
    n_bytes = first
    while block := answer.read1(_BLOCK):
        out.write(block)
        n_bytes += len(block)
        if n_bytes > most:
            raise UnavailableError(f"it goes on after {most} bytes")
        seconds = time.monotonic() - began
        if seconds > 2 * _TIMEOUT + (n_bytes - first) / _SLOWEST:
            raise OSError(
                f"the connection is too slow: {n_bytes - first} bytes in {seconds:.0f} seconds"
            )
        on_bytes(n_bytes, total)
    if n_bytes < total:
        raise OSError(f"the connection ended after {n_bytes} of {total} bytes")


def _ask_for_room(path: Path, n_bytes: int) -> None:
    """
    Raises:
        StorageError: the disk has not so many bytes left.
    """
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise StorageError(
            f"{printable(path.parent)} has room for {as_size(free)}, "
            f"and {as_size(n_bytes)} are to come",
            hint="make room there, or set TORCH_HOME to a folder on another disk",
        )


def download(file: RemoteFile, path: Path, check: Check, on_bytes: OnBytes) -> None:
    """Fetch a file; ``path`` appears only when it is whole and ``check`` has no objection.

    Raises:
        UnavailableError: it cannot be fetched, or is another file.
        OutputError, StorageError: it cannot be written, or another process fetches it.
    """
    partial = path.with_name(f".{path.name}.part")
    hint = (
        f"run the command again to go on; or, on a machine without network, fetch {file.url} "
        f"elsewhere, and bring it to {path.parent} with `virnucpro models import`"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path.parent) from error
    try:
        _fetch(file, partial, on_bytes)
        check(partial)
    except UnavailableError as error:
        partial.unlink(missing_ok=True)
        raise UnavailableError(
            f"what {file.url} gave is not {path.name}: {error}", hint=hint
        ) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink(missing_ok=True)  # there is nothing behind it
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(
            f"cannot fetch {file.url}: {printable(reason)}", hint=hint
        ) from error
    with writing(path, partial):
        put_in_place(partial, path)


def check_file(file: RemoteFile, path: Path) -> None:
    """Refuse another file than the published one; all of it is read.

    Raises:
        UnavailableError: it is another one.
    """
    n_bytes = path.stat().st_size
    if file.n_bytes not in (None, n_bytes):
        raise UnavailableError(f"it has {n_bytes} bytes, not {file.n_bytes}")
    if file.sha256 and (digest := sha256(path)) != file.sha256:
        raise UnavailableError(f"its SHA-256 is {digest}")
    md5 = hashlib.md5(usedforsecurity=False)
    if file.md5 and (digest := _read_into(md5, path)) != file.md5:
        raise UnavailableError(f"its MD5 is {digest}")
    if file.git_blob and (digest := git_blob(path)) != file.git_blob:
        raise UnavailableError(f"its id in git is {digest}")


def git_blob(path: Path) -> str:
    """The id that git gives a file: the SHA-1 of its kind, its size and its content."""
    header = f"blob {path.stat().st_size}\0".encode()
    return _read_into(hashlib.sha1(header, usedforsecurity=False), path)


def _read_into(digest: hashlib._Hash, path: Path) -> str:
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
