"""Copy inputs that can be read only once: pipes, and files inside the run folder."""

from __future__ import annotations

import io
import os
import shutil
import sys
import zlib
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from virnucpro.core.atomic_io import (
    hash_stream,
    is_compressed,
    storage_errors,
    temporary_path,
)
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.logging import announce
from virnucpro.core.option_text import with_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.sequences.fasta import (
    check_format,
    open_fasta,
)
from virnucpro.sequences.inputs import RECORDS, STDIN, STDIN_NAME, InputFile
from virnucpro.sequences.record_text import PEEK_BYTES


def copy_input(file: InputFile, copies: Path) -> InputFile:
    """Copy a file. The copy is named after its content hash, so no copy replaces another."""
    source = Path(file.path)
    name = STDIN_NAME if source == STDIN else file.display_name
    if source.parent.name.startswith(RECORDS):
        name = source.name
    waits = ", as soon as something writes to it" if source.is_fifo() else ""
    if source == STDIN and sys.stdin is not None and sys.stdin.isatty():
        waits = ": type it here, and end it with Ctrl-D"
    announce(f"copying {name} first{waits}")
    copies = copies.parent.resolve() / copies.name  # a link at this very path is not followed
    tree = SafeDir(copies.parent)
    unnamed = temporary_path(copies / "copy")
    try:
        with storage_errors(copies, unnamed), _open_checked(source) as handle:
            tree.make_folder(copies)
            with tree.open(unnamed, "x+") as out:
                _copy_content(handle, out)
                out.flush()
                os.fsync(out.fileno())  # the content of a pipe exists nowhere else
                out.seek(0)
                path = copies / f"{hash_stream(out)[:16]}.fa"
            tree.move(unnamed, path)
    finally:
        with suppress(OSError):  # a later start removes it
            tree.delete(unnamed)
    return replace(file, path=str(path), name=name)


def _copy_content(handle: BinaryIO, out: BinaryIO) -> None:
    """Copy a text. If it is neither FASTA nor FASTQ, copy only what its reader needs to name it.

    Otherwise a large BAM file, or a device without an end, would fill the disk first.
    """
    start = handle.read1(PEEK_BYTES)  # type: ignore[attr-defined]
    text = _decompress_start(start)
    try:
        check_format(io.BufferedReader(io.BytesIO(text)), "")
    except InputError:
        out.write(text)
        return
    out.write(start)
    shutil.copyfileobj(handle, out)


def _decompress_start(start: bytes) -> bytes:
    """Return the first bytes of a text that gzip or bgzip compressed, and other bytes as they are.

    Other compressed texts and damaged ones become empty. Their reader checks them.
    """
    if not is_compressed(start):
        return start
    with suppress(zlib.error):
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(start, PEEK_BYTES)
    return b""


def _open_checked(source: Path) -> AbstractContextManager[BinaryIO]:
    if source != STDIN:
        with open_fasta(source):
            return source.open("rb")
    if sys.stdin is None:
        raise InputMissingError(
            "standard input is closed", hint=with_options("give a file with {input}")
        )
    return nullcontext(sys.stdin.buffer)
