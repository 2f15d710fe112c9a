"""Find the input files of a run, copy those that can be read only once, hash and check them.

A run reads its inputs several times: to cut them, to write ``viral.fasta``, and on resume. So it
first copies pipes, and files inside the run folder, which it may replace itself. Every read checks
that the file is still the one that was hashed.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from virnucpro.core.atomic_io import (
    expand_path,
    hash_stream,
    is_compressed,
    open_binary,
    open_regular_file,
    storage_errors,
    temporary_path,
)
from virnucpro.core.errors import InputError, InputMissingError, ResumeError, UsageError
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord
from virnucpro.sequences.derived_names import DerivedNameScan
from virnucpro.sequences.fasta import (
    PACKED,
    WHOLE,
    Block,
    Span,
    StreamCache,
    detect_interleaved,
    find_spans,
    has_fastq_suffix,
    list_fasta,
    list_folders,
    list_other_files,
    open_fasta,
    parse_block,
    read_blocks,
)
from virnucpro.sequences.other_formats import PEEK_BYTES, find_other_format

_STDIN = Path("-")
_STDIN_NAME = "standard input"
RECORDS = ".records-"  # folders for records passed in Python; their path means nothing to users
RUN_FILE = "run.json"  # marks a run folder
_NAMED = 5  # maximum number of file names in a message
# fields that the run decides; all other fields describe the current file
_OF_RUN = ("generation", "sample", "n_renamed", "error", "mate")
# fields of a compressed file that are known only after decompression
_OF_TEXT = ("text_sha256", "n_text_bytes", "may_have_derived_names")


class _FileStamp(NamedTuple):
    """A file's identity in the file system. Equal stamps mean an unchanged file."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, handle: BinaryIO) -> _FileStamp:
        status = os.fstat(handle.fileno())
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


@lru_cache(maxsize=256)
def _hash_path(path: str, _: _FileStamp) -> str:
    """Hash a file with this stamp. The cache avoids hashing a touched file more than once.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular_file(Path(path)) as handle:
        return hash_stream(handle)


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file, as recorded in ``run.json``.

    Its decompressed content identifies it, not its name: a file may be moved, compressed or
    decompressed between two starts of a run.
    """

    path: str  # absolute
    sha256: str = ""  # of the file on disk; "": not hashed
    n_bytes: int = 0  # on disk
    generation: int = 0  # 0: given at first; n: added by the nth --resume with new files
    name: str = ""  # the user's name for it, if it differs: a link, or the original of a copy
    sample: str = ""  # name in a sample sheet, later the name in the tables; see ``samples``
    n_renamed: int = 0  # records with an id that occurs earlier in the file
    error: str = ""  # why the file could not be read
    mate: int = 0  # 1 or 2: the file contains this mate of read pairs
    text_sha256: str = ""  # of the decompressed content; "": not compressed, or not hashed
    n_text_bytes: int = 0  # decompressed; 0: not compressed, or not hashed
    may_have_derived_names: bool = True  # as ids; False: its text contains no such name
    modified_ns: int = field(default=0, compare=False)  # modification time at hashing
    stamp: _FileStamp | None = field(default=None, compare=False)  # set if hashed in this process

    def __post_init__(self) -> None:
        texts = (self.path, self.sha256, self.text_sha256, self.name, self.sample, self.error)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("path, hash and names of an input must be text")
        sizes = (self.n_bytes, self.n_text_bytes)
        numbers = (*sizes, self.generation, self.n_renamed, self.mate, self.modified_ns)
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("sizes and numbers of an input must be whole numbers")

    @property
    def identity(self) -> str:
        """Return the hash that identifies the file in a run: that of its decompressed content.

        A compressed file that an earlier version recorded is identified by its hash on disk.
        """
        return self.text_sha256 or self.sha256

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the file's hashes, on disk and decompressed."""
        return tuple(filter(None, (self.sha256, self.text_sha256)))

    def has_content_of(self, other: InputFile) -> bool:
        """Return True if both files have the same content, compressed or not."""
        return not set(self.digests).isdisjoint(other.digests)

    def with_text_hash_of(self, recorded: Iterable[InputFile]) -> InputFile:
        """Return the file with the recorded hash of its decompressed content, if unchanged."""
        for file in recorded:
            if file.sha256 == self.sha256 and file.text_sha256:
                return replace(self, **{name: getattr(file, name) for name in _OF_TEXT})
        return self

    @property
    def may_take_names(self) -> bool:
        """Return True if an id in the file may equal a name that a run derives from another id."""
        return self.may_have_derived_names or self.n_renamed > 0

    @property
    def is_empty_stdin(self) -> bool:
        """Return True for a copy of an empty standard input."""
        return self.name == _STDIN_NAME and not os.path.getsize(self.path)  # noqa: PTH202

    @staticmethod
    def complete(path: Path) -> list[InputFile]:
        """List the files of one ``--input``, which is a file, a folder or a sample sheet.

        Raises:
            InputError: a sample sheet is invalid.
            InputMissingError: a file or folder is missing.
        """
        if path == _STDIN:
            return [InputFile(str(_STDIN))]
        if is_sheet(path):
            return [_named(row.path, row.sample, row.mate) for row in read_sheet(path)]
        return [_named(file) for file in list_fasta(path)]

    @property
    def display_name(self) -> str:
        """Return the file's name for messages, as the user gave it."""
        return printable(self.name or self.path)

    def read(self) -> Iterator[FastaRecord]:
        """Yield the records, as ``read_fasta`` does.

        Raises:
            InputError: the file changed after it was hashed, or while it was read.
        """
        for records in parse_block(self.blocks()):
            yield from records.iter_records()

    def blocks(self, span: Span = WHOLE, streams: StreamCache | None = None) -> Iterator[Block]:
        """Yield the records of the file, or of a span, in blocks, as ``read_blocks`` does.

        Raises:
            InputError: the file changed after it was hashed, or while it was read.
        """
        self.check_unchanged()
        path = Path(self.path)
        for block in read_blocks(path, self.name, None, self.sample, span, streams):
            yield block.with_mate(self.mate) if self.mate else block
        self.check_unchanged()

    def spans(self, least: int) -> tuple[list[Span], int]:
        """Split the file by its content, as ``find_spans`` does, unless it is small.

        A file with numbered ids is not split, because a number depends on all earlier records.
        """
        is_measured = self.n_text_bytes > 0 or not self.path.lower().endswith(PACKED)
        n_text_bytes = self.n_text_bytes or self.n_bytes
        if is_measured and n_text_bytes <= least:
            return [WHOLE], n_text_bytes
        self.check_unchanged()
        spans, n_bytes = find_spans(Path(self.path), self.name, least)
        return [WHOLE] if self.n_renamed else spans, n_bytes

    @staticmethod
    def total_letters(files: Sequence[InputFile]) -> int:
        """Return the approximate number of letters in some files, or 0 if one is compressed."""
        if any(file.path.lower().endswith(PACKED) for file in files):
            return 0
        are_reads = [has_fastq_suffix(file.name or file.path) for file in files]
        # half of a FASTQ file consists of qualities
        return sum(file.n_bytes >> is_read for file, is_read in zip(files, are_reads, strict=True))

    @contextmanager
    def open_checked(self) -> Iterator[BinaryIO]:
        """Open the plain file.

        Raises:
            InputMissingError: the file cannot be read.
        """
        with (
            open_fasta(Path(self.path), self.display_name),
            open_regular_file(Path(self.path)) as handle,
        ):
            yield handle

    def with_stamp(self) -> InputFile:
        """Return the same file with its stamp, after another process hashed it.

        Raises:
            InputError: its content has changed.
            InputMissingError: the file cannot be read.
        """
        with self.open_checked() as handle:
            stamp = _FileStamp.of(handle)
        if (stamp.n_bytes, stamp.modified_ns) != (self.n_bytes, self.modified_ns):
            self.check_unchanged()
        return replace(self, stamp=stamp)

    def check_unchanged(self) -> None:
        """Check that the file still has the content that was hashed.

        Raises:
            InputError: its content has changed.
            InputMissingError: the file cannot be read.
        """
        with self.open_checked() as handle:
            stamp = _FileStamp.of(handle)
            has_changed = stamp != self.stamp and _hash_path(self.path, stamp) != self.sha256
        if has_changed:
            raise InputError(
                f"{self.display_name} changed during the run",
                hint=with_options(
                    "wait until it is written completely, then start again with {force}"
                ),
            )


def find_inputs(
    paths: Sequence[Path], run_folder: Path, copies: Path, own_names: Collection[str] = ()
) -> list[InputFile]:
    """List the input files at the user's ``paths``, in order.

    In a run folder, files named in ``own_names`` are results of that run, and are skipped.

    Raises:
        InputError: a sample sheet is invalid, or a file is named twice.
        InputMissingError: a file is missing, or a pipe cannot be read.
        OutputError, StorageError: a file cannot be copied.
    """
    inputs: dict[str, InputFile] = {}
    for path in paths:
        files = InputFile.complete(path)
        if path.is_dir():
            is_run = run_folder.resolve() == path.resolve() or (path / RUN_FILE).exists()
            files = _folder_inputs(path, files, own_names if is_run else ())
            if not is_run:
                _announce_folders(path, run_folder)
        for file in files:
            if file.path in inputs:
                raise InputError(
                    f"the input {file.display_name} is named twice"
                    + (f": it is {printable(file.path)}" if file.name else ""),
                    hint=with_options(
                        "name it once: {input} takes files, folders and sample sheets"
                    ),
                )
            inputs[file.path] = _spool_stream(file, run_folder, copies)
    return list(inputs.values())


def _folder_inputs(
    folder: Path, files: Iterable[InputFile], skipped: Collection[str]
) -> list[InputFile]:
    """Return the input files in a folder, each once. Announce the other files.

    Raises:
        InputMissingError: all of them are skipped.
    """
    inputs = _unique(file for file in files if Path(file.path).name not in skipped)
    if unread := [printable(name) for name in list_other_files(folder) if name not in skipped]:
        announce(
            f"skipped {format_count(len(unread), 'file')} without a FASTA or FASTQ suffix in "
            f"{printable(folder)}: {list_inputs(unread, _NAMED)}"
        )
    if not inputs:
        raise InputMissingError(
            f"{printable(folder)}: no FASTA or FASTQ file in this folder except results of a run",
            hint="name the input files of that run; to read a result, name that file itself",
        )
    return inputs


def _announce_folders(folder: Path, run_folder: Path) -> None:
    """Announce the sub-folders, which are not searched, except run folders."""
    names = [
        printable(name)
        for name in list_folders(folder)
        if (folder / name).resolve() != run_folder.resolve()
        and not os.path.exists(folder / name / RUN_FILE)  # noqa: PTH110 - False without permission
    ]
    if names:
        announce(
            f"{printable(folder)}: sub-folders are not searched ({list_inputs(names, _NAMED)}); "
            "name each with --input"
        )


def _unique(files: Iterable[InputFile]) -> list[InputFile]:
    """Return the files in a folder, keeping one of a file and its links."""
    unique_files: dict[str, InputFile] = {}
    for file in files:
        if same_file := unique_files.get(file.path):
            file, link = sorted((same_file, file), key=lambda candidate: bool(candidate.name))
            announce(f"skipped: {link.display_name} is the same file as {file.display_name}")
        unique_files[file.path] = file
    return list(unique_files.values())


def _named(path: Path, sample: str = "", mate: int = 0) -> InputFile:
    """Make the input file at a path, with the user's name for it."""
    own = os.path.abspath(path)  # noqa: PTH100 - keeps the links that the user named
    if path.exists() and not path.is_file():
        return InputFile(own, sample=sample, mate=mate)  # a pipe may have no other name
    real = os.path.realpath(path)  # ``resolve`` raises if links form a circle
    return InputFile(real, name="" if real == own else printable(own), sample=sample, mate=mate)


def _spool_stream(file: InputFile, run_folder: Path, copies: Path) -> InputFile:
    """Return the file itself, or a copy if it can be read only once."""
    path = Path(file.path)
    is_plain = path.is_file() or not (path == _STDIN or path.exists())
    return file if is_plain and run_folder.resolve() not in path.parents else _copy(file, copies)


def _copy(file: InputFile, copies: Path) -> InputFile:
    """Copy a file. The copy is named after its content hash, so no copy replaces another."""
    source = Path(file.path)
    name = _STDIN_NAME if source == _STDIN else file.display_name
    if source.parent.name.startswith(RECORDS):
        name = source.name
    waits = ", as soon as something writes to it" if source.is_fifo() else ""
    if source == _STDIN and sys.stdin is not None and sys.stdin.isatty():
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
    if source != _STDIN:
        with open_fasta(source):
            return source.open("rb")
    if sys.stdin is None:
        raise InputMissingError(
            "standard input is closed", hint=with_options("give a file with {input}")
        )
    return nullcontext(sys.stdin.buffer)


def hash_inputs(file: InputFile, on_bytes: Callable[[int], None] = lambda _: None) -> InputFile:
    """Hash a file as it is on disk, and stamp it.

    If its content on disk has changed, the hash of its decompressed content is dropped.

    Raises:
        InputError: the file changed while it was read.
        InputMissingError: the file cannot be read.
    """
    scan = DerivedNameScan()
    with file.open_checked() as handle:
        is_plain = not is_compressed(Path(file.path))
        stamp = _FileStamp.of(handle)
        digest = hash_stream(handle, on_bytes, scan.scan if is_plain else lambda _: None)
        is_same = _FileStamp.of(handle) == stamp
    if not is_same:
        raise InputError(
            f"{file.display_name} changed while it was read",
            hint="wait until it is written completely, then run the same command again",
        )
    if is_plain:
        file = replace(file, may_have_derived_names=scan.has_found)
    elif digest != file.sha256:
        file = replace(file, text_sha256="", n_text_bytes=0, may_have_derived_names=True)
    modified = stamp.modified_ns
    return replace(file, sha256=digest, n_bytes=stamp.n_bytes, modified_ns=modified, stamp=stamp)


def with_text_hash(file: InputFile, on_bytes: Callable[[int], None] = lambda _: None) -> InputFile:
    """Hash the decompressed content of a compressed file, unless it has such a hash.

    A file in another format is not hashed, because it may be large and will be rejected.
    ``on_bytes`` gets the number of decompressed bytes so far.

    Raises:
        InputError: the file is damaged, or changed after it was hashed.
        InputMissingError: the file cannot be read.
    """
    path = Path(file.path)
    n_bytes = 0
    scan = DerivedNameScan()

    def count(n_more: int) -> None:
        nonlocal n_bytes
        n_bytes = n_more
        on_bytes(n_bytes)

    with open_fasta(path, file.display_name):
        if file.text_sha256 or not is_compressed(path):
            return file
        with open_binary(path) as content:
            if find_other_format(content.peek(PEEK_BYTES)[:PEEK_BYTES]):  # type: ignore[attr-defined]
                return file  # rejected when it is read
            digest = hash_stream(content, count, scan.scan)
    file.check_unchanged()
    return replace(
        file,
        text_sha256=digest,
        n_text_bytes=n_bytes,
        may_have_derived_names=scan.has_found,
    )


def list_inputs(names: Sequence[str], most: int) -> str:
    """List the first names, and how many more there are.

    >>> list_inputs(["a", "b", "c"], 2)
    'a, b + 1 more'
    """
    more = f" + {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def join_inputs(recorded: Sequence[InputFile], files: Sequence[InputFile]) -> list[InputFile]:
    """Return the inputs of a resumed run: all recorded ones, then the new ones.

    Raises:
        ResumeError: a file changed since it was recorded.
    """
    recorded_by_path = {file.path: file for file in recorded}
    digests = {digest for file in recorded for digest in file.digests}
    new = []
    for file in files:
        if not digests.isdisjoint(file.digests):
            if file.path not in recorded_by_path:
                LOGGER.warning(
                    "%s has the same content as an input of this run: not added", file.display_name
                )
            continue
        if file.path in recorded_by_path:
            raise ResumeError(
                f"the input {printable(file.path)} changed since this run began: "
                f"its sha256 was {recorded_by_path[file.path].sha256[:12]}, now {file.sha256[:12]}",
                hint=with_options(
                    "put the old file back, choose another {output_dir}, or start again: {force}"
                ),
            )
        new.append(file)
    generation = 1 + max((file.generation for file in recorded), default=-1)
    return find_present(recorded, files) + [replace(file, generation=generation) for file in new]


def find_present(recorded: Sequence[InputFile], files: Sequence[InputFile]) -> list[InputFile]:
    """Return the recorded inputs, each with the path of a hashed file with its content, if any."""
    path_to_file = {file.path: file for file in files}
    digest_to_file = {digest: file for file in files for digest in file.digests}
    joined = []
    for file in recorded:
        present = path_to_file.get(file.path)
        if present is None or not present.has_content_of(file):
            same = (digest_to_file[digest] for digest in file.digests if digest in digest_to_file)
            present = next(same, file)
        run_fields = {name: getattr(file, name) for name in _OF_RUN}
        joined.append(replace(present, **run_fields))
    return joined


def check_recorded(
    recorded: Sequence[InputFile], files: Sequence[InputFile] = ()
) -> list[InputFile]:
    """Return the recorded inputs of a run, then the new ones among ``files``.

    A recorded input that is not among ``files`` is hashed at its recorded path.

    Raises:
        InputError: an input is damaged.
        ResumeError: an input changed or is gone.
    """
    checked = []
    for file in join_inputs(recorded, files):
        is_there = file.stamp is not None or Path(file.path).is_file()
        now = file if file.stamp is not None or not is_there else hash_inputs(file)
        if is_there and not now.has_content_of(file):
            now = with_text_hash(now)
        if not is_there or not now.has_content_of(file):
            raise ResumeError(
                f"{printable(file.path)}, an input of this run, is gone or has changed",
                hint=with_options(
                    "put it back; if it was moved, compressed or decompressed, repeat the "
                    "command of this run with {resume} and the new path as {input}"
                ),
            )
        checked.append(now)
    return checked


def announce_reads(inputs: Iterable[InputFile]) -> None:
    """Announce once how FASTQ reads are treated."""
    n_files = 0
    interleaved: list[str] = []
    for file in inputs:
        with suppress(InputError, InputMissingError):  # reported when the file is read
            kind = detect_interleaved(Path(file.path))
            n_files += bool(kind)
            if kind == "mates" and not file.mate:
                interleaved.append(file.display_name)
    if n_files:
        announce(f"{format_count(n_files, 'FASTQ file')}: qualities are ignored")
    if interleaved:
        announce(f"{list_inputs(interleaved, 1)}: interleaved read pairs; ids end in /1 and /2")


# Sample sheets are .tsv or .csv files with the columns ``sample`` and ``path``, in any case and
# order, and ``path_2`` for read pairs. The path columns may also be called ``fastq_1`` and
# ``fastq_2``. Other columns are ignored. A relative path starts in the sheet's folder. A manifest
# with labelled sequences (``path``, ``label``, no ``sample``) is also a sheet, in which each file
# counts once.

COLUMNS = ("sample", "path")
_OF_MANIFEST = ("path", "label")
_OF_MATE = "path_2"
_OTHER_NAMES = {"fastq_1": "path", "fastq_2": _OF_MATE}
_SEPARATORS = {".tsv": "\t", ".csv": ","}
_EXAMPLE = "the first line of a sample sheet names its columns, including sample and path"


class _Row(NamedTuple):
    """A sample and its file."""

    sample: str  # "": named after the file
    path: Path
    line: int
    mate: int = 0  # 1 or 2, if the sample has two files


def is_sheet(path: Path) -> bool:
    """Return True if a file has a table suffix and does not begin like FASTA or FASTQ.

    Raises:
        InputMissingError: the file cannot be read.
    """
    if path.suffix.lower() not in _SEPARATORS or not path.is_file():
        return False
    with open_fasta(path), path.open("rb") as handle:
        start = handle.read(4096)
    return not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b">", b"@"))


def read_sheet(path: Path) -> list[_Row]:
    """Read a sample sheet or a manifest.

    Raises:
        InputError: columns are missing, a field is empty, or a sample is named twice.
        InputMissingError: a file does not exist.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            rows = list(_sheet_rows(path, handle))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{printable(path)} is not a sample sheet: {error}", _EXAMPLE) from error
    if not rows:
        raise InputError(f"{printable(path)}: this sample sheet names no file", _EXAMPLE)
    if not any(row.sample for row in rows):  # a manifest may have a row per record in a file
        rows = [*{row.path: row for row in rows}.values()]
    first: dict[str, int] = {}
    for row in rows:
        where = f"{printable(path)}:{row.line}"
        if row.sample and first.get(row.sample, row.line) != row.line:
            raise InputError(
                f"{where}: the sample '{printable(row.sample)}' is named twice "
                f"(first in line {first[row.sample]})",
                hint="give each file its own sample name; the second file of read pairs goes into "
                "the column path_2",
            )
        first[row.sample] = row.line
        if not row.path.is_file():
            problem = "not a file" if row.path.exists() else "there is no such file"
            raise InputMissingError(
                f"{where}: {printable(row.path)}: {problem}",
                hint="each line of a sheet names a file; a relative path starts in the folder of "
                "the sheet",
            )
    return rows


def _sheet_rows(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    separator = _SEPARATORS[path.suffix.lower()]
    hint = f"{_EXAMPLE}, separated by {'commas' if separator == ',' else 'tabs'}"
    reader = csv.DictReader(lines, delimiter=separator, strict=True, restval="")
    words = [word.strip().lower() for word in reader.fieldnames or ()]
    header = reader.fieldnames = [_OTHER_NAMES.get(word, word) for word in words]
    if not any(set(header) >= set(columns) for columns in (COLUMNS, _OF_MANIFEST)):
        names = ", ".join(map(printable, header)) or "nothing"
        raise InputError(
            f"{printable(path)}:1: expected '>' or the columns of a sample sheet, not {names}", hint
        )
    if twice := [name for name in (*COLUMNS, _OF_MATE) if header.count(name) > 1]:
        raise InputError(f"{printable(path)}:1: two columns {twice[0]}", hint)
    for fields in reader:
        cells = {name: fields[name].strip() for name in header}
        if any(cells.values()):
            yield from _parse_rows(path, reader.line_num, cells, hint)


def _parse_rows(path: Path, line: int, cells: Mapping[str, str], hint: str) -> Iterator[_Row]:
    if absent := [name for name in COLUMNS if name in cells and not cells[name]]:
        raise InputError(f"{printable(path)}:{line}: no {absent[0]} in this line", hint)
    names = [name for name in (cells["path"], cells.get(_OF_MATE)) if name]
    for mate, name in enumerate(names, 1):
        file = _row_to_input(path, line, name)
        yield _Row(cells.get("sample", ""), file, line, mate * (len(names) - 1))


def _row_to_input(path: Path, line: int, cell: str) -> Path:
    """Return the file that a line names, relative to the sheet's folder."""
    try:
        return path.parent / expand_path(cell)
    except UsageError as error:
        raise InputMissingError(f"{printable(path)}:{line}: {error}", error.hint) from error
