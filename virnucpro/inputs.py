"""The input files of a run: found, copied if they cannot be read twice, hashed.

A run reads its inputs twice, to cut them and to write ``viral.fasta``, and again on resume. So
a pipe, and a file inside the run folder, which the run itself may replace, is copied first.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from virnucpro.errors import InputError, InputMissingError, ResumeError
from virnucpro.fasta import InputType, cannot_open, guess_input_type, list_fasta, read_fasta
from virnucpro.files import sha256, temporary_beside, writing
from virnucpro.log import announce, printable
from virnucpro.records import FastaRecord

STDIN = Path("-")


class Source(NamedTuple):
    """A file to read; a copy has a name, that of what was copied."""

    path: Path  # absolute
    name: str = ""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input as ``run.json`` remembers it; its content, not its name, is what counts."""

    path: str  # absolute
    sha256: str
    n_bytes: int
    generation: int = 0  # 0: of the first run; later ones were added with --resume
    name: str = ""  # as of a ``Source``

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.path, self.sha256, self.name)):
            raise TypeError("an input is named by its path and its hash")
        if not isinstance(self.n_bytes, int) or not isinstance(self.generation, int):
            raise TypeError("an input has a number of bytes and of its generation")

    @property
    def shown(self) -> str:
        """What the user calls it."""
        return self.name or printable(self.path)

    def read(self) -> Iterator[FastaRecord]:
        """As ``read_fasta``."""
        return read_fasta(Path(self.path), self.name)


def find_inputs(
    paths: Sequence[Path], run_folder: Path, copies: Path, own_names: Collection[str] = ()
) -> list[Source]:
    """All FASTA files that the user's ``paths`` stand for, in order.

    Raises:
        InputMissingError: one is missing or cannot be read.
        OutputError, StorageError: one cannot be copied.
    """
    found: list[Source] = []
    for path in paths:
        files = [path] if path == STDIN else list_fasta(path)
        for file in files:
            inside = run_folder.resolve() in file.resolve().parents
            if inside and path.is_dir() and file.name in own_names:
                continue  # what a run wrote is no input of it
            if file.is_file() and not inside:
                found.append(Source(file.resolve()))
            else:
                found.append(_copy(file, copies))
    return found


def _copy(source: Path, copies: Path) -> Source:
    """Copy what can be read only once; named by its content, so that no copy replaces another."""
    name = "standard input" if source == STDIN else printable(source)
    announce(f"copying {name} first")
    unnamed = temporary_beside(copies.resolve() / "copy")
    try:
        with writing(copies, unnamed), _opened(source) as handle:
            copies.mkdir(exist_ok=True)
            with unnamed.open("wb") as out:
                shutil.copyfileobj(handle, out)
                out.flush()
                os.fsync(out.fileno())  # it may be all that is left of a pipe
            path = unnamed.replace(unnamed.with_name(f"{sha256(unnamed)[:16]}.fa"))
    finally:
        unnamed.unlink(missing_ok=True)
    return Source(path, name)


def _opened(source: Path) -> AbstractContextManager[BinaryIO]:
    if source != STDIN:
        try:
            return source.open("rb")
        except OSError as error:
            raise cannot_open(source, error) from error
    if sys.stdin is None:
        raise InputMissingError("standard input is closed", hint="give a file with --input")
    return nullcontext(sys.stdin.buffer)


def hash_inputs(sources: Iterable[Source], on_bytes: Callable[[int], None]) -> list[InputFile]:
    """
    Raises:
        InputMissingError: a file cannot be read.
    """
    inputs, before = [], 0
    for path, name in sources:
        try:
            digest = sha256(path, lambda done, before=before: on_bytes(before + done))  # type: ignore[misc]
            n_bytes = path.stat().st_size
        except OSError as error:
            raise cannot_open(path, error) from error
        before += n_bytes
        inputs.append(InputFile(str(path), digest, n_bytes, name=name))
    return inputs


def join_inputs(recorded: Sequence[InputFile], given: Sequence[InputFile]) -> list[InputFile]:
    """The inputs of a resumed run: all recorded ones, then those that are new.

    Raises:
        ResumeError: a file changed since it was recorded.
    """
    by_hash = {known.sha256: known for known in recorded}
    by_path = {known.path: known for known in recorded}
    here = {known.sha256: known for known in given}
    added = []
    for new in given:
        if new.sha256 in by_hash:
            continue
        if new.path in by_path:
            raise ResumeError(
                f"the input {printable(new.path)} changed since this run began: "
                f"its sha256 was {by_path[new.path].sha256[:12]}, now {new.sha256[:12]}",
                hint="put the old file back, choose another --output-dir, or start again: --force",
            )
        added.append(new)
    generation = 1 + max((known.generation for known in recorded), default=-1)
    kept = [
        replace(here[known.sha256], generation=known.generation) if known.sha256 in here else known
        for known in recorded
    ]
    return kept + [replace(new, generation=generation) for new in added]


def check_unchanged(inputs: Iterable[InputFile]) -> None:
    """
    Raises:
        ResumeError: a file that was recorded, but not given again, changed or is gone.
    """
    for known in inputs:
        path = Path(known.path)
        if not path.is_file() or sha256(path) != known.sha256:
            raise ResumeError(
                f"{printable(path)}, an input of this run, is gone or has changed",
                hint="put it back, or say where it is now with --input",
            )


def check_unchanged_since(inputs: Iterable[InputFile], since_ns: int) -> None:
    """
    Raises:
        InputError: a file was touched after that time, and its content is another now.
    """
    for known in inputs:
        path = Path(known.path)
        try:
            touched = path.stat().st_ctime_ns >= since_ns
            changed = touched and sha256(path) != known.sha256
        except OSError as error:
            raise cannot_open(path, error) from error
        if changed:
            raise InputError(
                f"{printable(path)} changed while the run went on",
                hint="let it be written to its end, then start again with --force",
            )


def agree_on_type(inputs: Iterable[InputFile], asked: InputType | None) -> InputType:
    """What all inputs are: as asked, or as their letters tell.

    Raises:
        InputError: they cannot be told apart, or differ.
    """
    if asked is not None:
        return asked
    found: dict[InputType, str] = {}
    for known in inputs:
        guess = guess_input_type(Path(known.path), known.name)
        if guess is not None:
            found.setdefault(guess, known.shown)
    if len(found) > 1:
        raise InputError(
            f"{found['nucleotide']} holds nucleotides, {found['protein']} proteins",
            hint="run them apart, or say what all are with --input-type",
        )
    return next(iter(found), "nucleotide")


def generations(inputs: Sequence[InputFile]) -> Iterator[list[InputFile]]:
    """The inputs of each generation, in order."""
    for number in range(1 + max((known.generation for known in inputs), default=0)):
        yield [known for known in inputs if known.generation == number]
