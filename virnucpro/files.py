"""Files on disk: written whole or not at all, read plain or compressed."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZstdError = zstd.ZstdError
TEMPORARY = ".tmp"  # ends the name of every temporary file
_BLOCK = 1 << 20
_BGZIP = b"BC\x02\0"  # in the header of each member that bgzip writes
_BGZIP_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling that replaces ``path``, synced to disk, if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Delete the temporary files that a killed run left in ``folder``."""
    for leftover in folder.glob(f".*{TEMPORARY}"):
        leftover.unlink(missing_ok=True)


def open_binary(path: Path) -> BinaryIO:
    """Open a plain, gzip, bzip2, xz or zstd file; the content decides, not the name.

    Raises:
        EOFError: a file of bgzip ends early, between two members, where gzip cannot tell.
    """
    with path.open("rb") as handle:
        magic = handle.read(16)
        if magic.startswith(b"\x1f\x8b\x08\x04") and magic.endswith(_BGZIP):
            handle.seek(-min(len(_BGZIP_END), path.stat().st_size), io.SEEK_END)
            if handle.read() != _BGZIP_END:
                raise EOFError("the end mark of bgzip is missing")
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.open(path))
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return cast(BinaryIO, io.BufferedReader(zstd.open(path)))
    return path.open("rb")


def sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """The hash of a file; ``on_bytes`` hears how many bytes were read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
            done += len(block)
            on_bytes(done)
    return digest.hexdigest()
