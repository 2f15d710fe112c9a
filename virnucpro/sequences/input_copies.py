"""Copy inputs that can be read only once: pipes, and files inside the run folder."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from virnucpro.core.atomic_io import (
    hash_stream,
    storage_errors,
    temporary_path,
)
from virnucpro.core.errors import InputMissingError
from virnucpro.core.logging import announce
from virnucpro.core.option_text import with_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.sequences.fasta import (
    open_fasta,
)
from virnucpro.sequences.inputs import RECORDS, STDIN, STDIN_NAME, InputFile


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
                shutil.copyfileobj(handle, out)
                out.flush()
                os.fsync(out.fileno())  # the content of a pipe exists nowhere else
                out.seek(0)
                path = copies / f"{hash_stream(out)[:16]}.fa"
            tree.move(unnamed, path)
    finally:
        with suppress(OSError):  # a later start removes it
            tree.delete(unnamed)
    return replace(file, path=str(path), name=name)


def _open_checked(source: Path) -> AbstractContextManager[BinaryIO]:
    if source != STDIN:
        with open_fasta(source):
            return source.open("rb")
    if sys.stdin is None:
        raise InputMissingError(
            "standard input is closed", hint=with_options("give a file with {input}")
        )
    return nullcontext(sys.stdin.buffer)
