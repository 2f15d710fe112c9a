"""Describe the input files of a run, and check that they do not change.

A run reads its inputs several times: to cut them, to write ``viral.fasta``, and on resume. So it
first copies pipes, and files inside the run folder, which it may replace itself. Every read checks
that the file is still the one that was hashed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from virnucpro.core.atomic_io import OnBlock, hash_stream, open_regular_file
from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.types import FastaRecord
from virnucpro.sequences.fasta import (
    PACKED,
    WHOLE,
    Block,
    ParsedRecords,
    Span,
    StreamCache,
    cut_blocks,
    has_fastq_suffix,
    list_fasta,
    open_fasta,
    parse_block,
)

STDIN = Path("-")
STDIN_NAME = "standard input"
RECORDS = ".records-"  # folders for records passed in Python; their path means nothing to users
RUN_FILE = "run.json"  # marks a run folder
# fields that the run decides; all other fields describe the current file
RUN_FIELDS = ("generation", "sample", "n_renamed", "error", "mate")


class FileStamp(NamedTuple):
    """A file's identity in the file system. Equal stamps mean an unchanged file."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, handle: BinaryIO) -> FileStamp:
        return cls.from_status(os.fstat(handle.fileno()))

    @classmethod
    def from_status(cls, status: os.stat_result) -> FileStamp:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


@lru_cache(maxsize=256)
def _hash_path(path: str, _: FileStamp) -> str:
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
    stamp: FileStamp | None = field(default=None, compare=False)  # set if hashed in this process
    # all records of a small file, if this process keeps them
    parsed: ParsedRecords | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        texts = (self.path, self.sha256, self.text_sha256, self.name, self.sample, self.error)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("path, hash and names of an input must be text")
        sizes = (self.n_bytes, self.n_text_bytes)
        numbers = (*sizes, self.generation, self.n_renamed, self.mate, self.modified_ns)
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("sizes and numbers of an input must be whole numbers")

    def __reduce__(self) -> tuple[Callable[..., InputFile], tuple[Any, ...]]:
        """Pickle the file without its records, which another process reads again."""
        return InputFile, tuple(
            getattr(self, name) for name in self.__dataclass_fields__ if name != "parsed"
        )

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
        # fields of a compressed file that are known only after decompression
        text_fields = ("text_sha256", "n_text_bytes", "may_have_derived_names")
        for file in recorded:
            if file.sha256 == self.sha256 and file.text_sha256:
                return replace(self, **{name: getattr(file, name) for name in text_fields})
        return self

    @property
    def may_take_names(self) -> bool:
        """Return True if an id in the file may equal a name that a run derives from another id."""
        return self.may_have_derived_names or self.n_renamed > 0

    @property
    def is_empty_stdin(self) -> bool:
        """Return True for a copy of an empty standard input."""
        return self.name == STDIN_NAME and not os.path.getsize(self.path)  # noqa: PTH202

    @staticmethod
    def check(path: Path) -> None:
        """Check that one ``--input`` exists, before a run folder is made.

        Raises:
            InputError, InputMissingError: as ``complete``.
        """
        if path == STDIN:
            return
        if is_sheet(path):
            from virnucpro.sequences.sample_sheet import read_sheet

            read_sheet(path)
        else:
            list_fasta(path)

    @staticmethod
    def complete(path: Path) -> list[InputFile]:
        """List the files of one ``--input``, which is a file, a folder or a sample sheet.

        Raises:
            InputError: a sample sheet is invalid.
            InputMissingError: a file or folder is missing.
        """
        if path == STDIN:
            return [InputFile(str(STDIN))]
        real_folders: dict[str, str] = {}
        if is_sheet(path):
            from virnucpro.sequences.sample_sheet import read_sheet

            rows = read_sheet(path)
            return [_named(row.path, real_folders, row.sample, row.mate) for row in rows]
        return [_named(file, real_folders) for file in list_fasta(path)]

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
        if self.parsed is not None and span in (WHOLE, self.parsed.span) and self._is_unchanged():
            yield self.parsed.with_mate(self.mate) if self.mate else self.parsed
            return
        label = self.name or printable(self.path)
        streams = streams or StreamCache()
        with (
            open_fasta(self.path, label),
            streams.open_at(self.path, label, None, span) as (handle, is_reads),
        ):
            self.check_open(handle)
            _, blocks = cut_blocks(handle, label, self.sample, span, is_reads=is_reads)
            for block in blocks:
                yield block.with_mate(self.mate) if self.mate else block
            self.check_open(handle)

    def spans(self, min_bytes: int) -> tuple[list[Span], int]:
        """Split the file by its content, as ``find_spans`` does, unless it is small.

        A file with numbered ids is not split, because a number depends on all earlier records.
        """
        is_measured = self.n_text_bytes > 0 or not self.path.lower().endswith(PACKED)
        n_text_bytes = self.n_text_bytes or self.n_bytes
        if is_measured and n_text_bytes <= min_bytes:
            return [WHOLE], n_text_bytes
        from virnucpro.sequences.spans import find_spans  # only for files that are worth it

        self.check_unchanged()
        spans, n_bytes = find_spans(Path(self.path), self.name, min_bytes)
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
    def open_checked(self, on_block: OnBlock | None = None) -> Iterator[BufferedReader]:
        """Open the plain file. ``on_block`` gets each byte once, as it is read.

        Raises:
            InputMissingError: the file cannot be read.
        """
        with (
            open_fasta(self.path, self.display_name),
            open_regular_file(self.path, on_block) as handle,
        ):
            yield handle

    def with_stamp(self) -> InputFile:
        """Return the same file with its stamp, after another process hashed it.

        Raises:
            InputError: its content has changed.
            InputMissingError: the file cannot be read.
        """
        with self.open_checked() as handle:
            stamp = FileStamp.of(handle)
        if (stamp.n_bytes, stamp.modified_ns) != (self.n_bytes, self.modified_ns):
            self.check_unchanged()
        return replace(self, stamp=stamp)

    def _is_unchanged(self) -> bool:
        """Return True if the path leads to the file that was hashed, with the same stamp."""
        try:
            return FileStamp.from_status(os.stat(self.path)) == self.stamp  # noqa: PTH116 - fast
        except OSError:
            return False

    def check_open(self, handle: BinaryIO) -> None:
        """Check that an open file has the content that was hashed.

        Raises:
            InputError, InputMissingError: as ``check_unchanged``.
        """
        if FileStamp.of(handle) != self.stamp:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check that the file still has the content that was hashed.

        Raises:
            InputError: its content has changed.
            InputMissingError: the file cannot be read.
        """
        with self.open_checked() as handle:
            stamp = FileStamp.of(handle)
            has_changed = stamp != self.stamp and _hash_path(self.path, stamp) != self.sha256
        if has_changed:
            raise InputError(
                f"{self.display_name} changed during the run",
                hint=with_options(
                    "wait until it is written completely, then start again with {force}"
                ),
            )


def _named(path: Path, real_folders: dict[str, str], sample: str = "", mate: int = 0) -> InputFile:
    """Make the input file at a path, with the user's name for it.

    ``real_folders`` gets the folder without links, which many files share.
    """
    full_path = os.path.abspath(path)  # noqa: PTH100 - keeps the links that the user named
    if not os.path.isfile(full_path) and os.path.exists(full_path):  # noqa: PTH110, PTH113 - of many files
        return InputFile(full_path, sample=sample, mate=mate)  # a pipe may have no other name
    folder, name = os.path.split(full_path)
    if folder not in real_folders:
        real_folders[folder] = os.path.realpath(folder)
    real = os.path.join(real_folders[folder], name)  # noqa: PTH118 - of many files
    if os.path.islink(full_path):  # noqa: PTH114 - of many files
        real = os.path.realpath(full_path)  # ``resolve`` raises if links form a circle
    return InputFile(
        real, name="" if real == full_path else printable(full_path), sample=sample, mate=mate
    )


def list_inputs(names: Sequence[str], max_names: int) -> str:
    """List the first names, and how many more there are.

    >>> list_inputs(["a", "b", "c"], 2)
    'a, b + 1 more'
    """
    more = f" + {len(names) - max_names:,} more" if len(names) > max_names else ""
    return f"{', '.join(names[:max_names])}{more}"


def is_sheet(path: Path) -> bool:
    """Return True if a file has a table suffix and does not begin like FASTA or FASTQ.

    Raises:
        InputMissingError: the file cannot be read.
    """
    sheet_suffixes = (".tsv", ".csv")
    if path.suffix.lower() not in sheet_suffixes or not path.is_file():
        return False
    with open_fasta(path), path.open("rb") as handle:
        start = handle.read(4096)
    return not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b">", b"@"))
