"""Read an input file once, and keep what a run needs to know about it before it is planned.

One pass hashes the file as it is on disk. If it also reads the records, it hashes the decompressed
content, digests the ids, guesses the type of the letters, and detects interleaved reads. Small
files cost mainly their opens, and a compressed file its decompression.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader
from typing import Any, Literal

from virnucpro.core.atomic_io import decompressed, is_compressed
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.recipe import InputType
from virnucpro.core.types import Records
from virnucpro.sequences.derived_names import DerivedNameScan
from virnucpro.sequences.fasta import (
    Block,
    FirstLetters,
    ParsedRecords,
    check_format,
    cut_blocks,
    open_fasta,
    parse_block,
    starts_as_reads,
)
from virnucpro.sequences.inputs import FileStamp, InputFile
from virnucpro.sequences.record_text import BOM, PEEK_BYTES
from virnucpro.sequences.samples import id_digests


@dataclass(slots=True, eq=False)
class RecordScan:
    """What is known about the records of a file, up to its first fault."""

    digests: array[int] = field(default_factory=lambda: array("q"))  # of ids
    n_letters: int = 0
    reads: Literal["", "single", "mates"] = ""  # as ``detect_interleaved`` returns it
    fault: InputError | InputMissingError | None = None  # why the file cannot be read to its end
    input_type: InputType | InputError | None = None  # the guess, or why there is none
    parsed: ParsedRecords | None = None  # all records, if the file has only one block

    @contextmanager
    def keeping_fault(self) -> Iterator[None]:
        """Keep the error that ends the ``with`` block, for a later step."""
        try:
            yield
        except (InputError, InputMissingError) as error:
            self.fault = error

    def read(self, file: InputFile, content: BufferedReader) -> None:
        """Read the records of an open text.

        Raises:
            InputError: a record is invalid, or the text is neither FASTA nor FASTQ.
        """
        label = file.display_name
        check_format(content, label)
        is_reads = starts_as_reads(file.path, content)
        are_mates, blocks = cut_blocks(content, label, file.sample, is_reads=is_reads)
        if is_reads:
            self.reads = "mates" if are_mates else "single"
        letters = FirstLetters()
        for records in parse_block(self._keep_only_block(blocks)):
            if file.mate:
                records = records.with_mate(file.mate)
            self.digests.frombytes(id_digests(records.ids).tobytes())
            self.n_letters += records.n_letters
            letters.add(records)
        try:
            self.input_type = letters.guess_type(label)
        except InputError as error:
            self.input_type = error

    def _keep_only_block(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """Pass on the blocks of a file. A small block is kept parsed, if no other follows.

        Raises:
            InputError: a record in it is invalid.
        """
        max_letters = 1 << 16
        first = next(blocks, None)
        if first is None:
            return
        if isinstance(first, Records) or first.n_letters > max_letters:
            yield first
            yield from blocks
            return
        n_letters = first.n_letters
        records, fault = first.parse()
        yield records
        if fault is not None:
            raise fault
        second = next(blocks, None)
        if second is None:
            self.parsed = ParsedRecords(records, n_letters, first.span)
        else:
            yield second
            yield from blocks


@dataclass(frozen=True, slots=True, eq=False)
class FileScan:
    """A file with its hashes and its stamp, and its records if they were read."""

    file: InputFile
    is_packed: bool
    begins_as_fasta: bool  # judged without decompression
    records: RecordScan | None


class _Content:
    """Hash a content block by block, and search it for derived names unless it is compressed.

    A second block and all that follow are hashed by a thread, while the caller reads on.
    """

    def __init__(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        self.n_bytes = 0
        self.is_packed = False
        self._digest = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None  # hashes all blocks but the first
        self._pending: Future[None] | None = None  # the block that it hashes
        self._names = DerivedNameScan()
        self._on_bytes = on_bytes

    def add(self, block: bytes | memoryview) -> None:
        data = bytes(block)
        if not data:
            return
        if not self.n_bytes:
            self.is_packed = is_compressed(data)
            self._digest.update(data)
        else:
            self._wait()
            self._thread = self._thread or ThreadPoolExecutor(1, "hash")
            self._pending = self._thread.submit(self._digest.update, data)
        self.n_bytes += len(data)
        if not self.is_packed:
            self._names.scan(data)
        self._on_bytes(self.n_bytes)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    @property
    def sha256(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    @property
    def has_derived_names(self) -> bool:
        return self._names.has_found

    @property
    def text_facts(self) -> dict[str, Any]:
        """Return the fields that an input has for this decompressed content."""
        return {
            "text_sha256": self.sha256,
            "n_text_bytes": self.n_bytes,
            "may_have_derived_names": self.has_derived_names,
        }


def scan_file(
    file: InputFile,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    reads_records: bool = False,
    max_kept_bytes: int = 0,
) -> FileScan:
    """Hash a file as it is on disk, stamp it, and read its records if asked.

    If its content on disk has changed, the hash of its decompressed content is dropped.
    ``on_bytes`` gets the number of bytes so far. The records of a small file stay in memory if they
    take at most ``max_kept_bytes``.

    Raises:
        InputError: the file changed while it was read.
        InputMissingError: the file cannot be read.
    """
    disk = _Content(on_bytes)
    text = _Content()
    records = RecordScan() if reads_records else None
    with file.open_checked(disk.add) as handle:
        stamp = FileStamp.of(handle)
        start = handle.peek(PEEK_BYTES)[:PEEK_BYTES]
        content = handle  # referred to until the end, because closing it closes the file
        if records is not None:
            with records.keeping_fault(), open_fasta(file.path, file.display_name):
                content = decompressed(handle, text.add)
                records.read(file, content)
        while handle.read1():
            pass  # the records may end before the file
        is_same = FileStamp.of(handle) == stamp
    if not is_same:
        raise InputError(
            f"{file.display_name} changed while it was read",
            hint="wait until it is written completely, then run the same command again",
        )
    digest = disk.sha256
    facts: dict[str, Any] = {}
    if not disk.is_packed:
        facts["may_have_derived_names"] = disk.has_derived_names
    elif records is not None and records.fault is None:
        facts = text.text_facts
    elif digest != file.sha256:
        facts = {"text_sha256": "", "n_text_bytes": 0, "may_have_derived_names": True}
    if records is not None and records.parsed is not None:
        has_room = records.parsed.n_bytes <= max_kept_bytes
        facts["parsed"] = records.parsed if has_room else None
        records.parsed = None
    file = replace(
        file,
        sha256=digest,
        n_bytes=stamp.n_bytes,
        modified_ns=stamp.modified_ns,
        stamp=stamp,
        **facts,
    )
    begins_as_fasta = start.removeprefix(BOM).lstrip(b"\r\n").startswith(b">")
    return FileScan(file, disk.is_packed, begins_as_fasta, records)


def hash_inputs(file: InputFile) -> InputFile:
    """Hash a file as it is on disk, and stamp it.

    Raises:
        InputError, InputMissingError: as ``scan_file``.
    """
    return scan_file(file).file


def with_text_hash(file: InputFile, on_bytes: Callable[[int], None] = lambda _: None) -> InputFile:
    """Hash the decompressed content of a compressed file, unless it has such a hash.

    A file in another format is not hashed, because it may be large and will be rejected.
    ``on_bytes`` gets the number of decompressed bytes so far.

    Raises:
        InputError: the file is damaged, or changed after it was hashed.
        InputMissingError: the file cannot be read.
    """
    if file.text_sha256:
        return file
    text = _Content(on_bytes)
    with file.open_checked() as handle:
        if not is_compressed(handle.peek(PEEK_BYTES)):
            return file
        content = decompressed(handle)
        try:
            check_format(content, file.display_name)
        except InputError:
            return file  # rejected when it is read
        n_bytes = 1 << 20  # per read
        while block := content.read(n_bytes):
            text.add(block)
        file.check_open(handle)
    return replace(file, **text.text_facts)
