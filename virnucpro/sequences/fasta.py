"""Read FASTA and FASTQ, and write FASTA. Records stream in blocks that any process can parse.

Memory contains one block, or one record that is longer. Record length is limited, so that a small
compressed file cannot fill the memory.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TextIO

import numpy as np

from virnucpro.core.atomic_io import OnBlock, open_binary, zstd
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import MASK_LETTER
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import InputType
from virnucpro.core.types import MASK_TEXT, FastaRecord, Records
from virnucpro.sequences import record_text
from virnucpro.sequences.record_text import (
    BLANKS,
    BOM,
    INNER_BLANKS,
    PEEK_BYTES,
    LineReader,
    LineTable,
    check_length,
    count_byte,
    decode_text,
    endless_header_error,
    find_letters,
    make_records,
    strip_letters,
)

READ_SUFFIXES = (".fastq", ".fq")
SUFFIXES = (".fa", ".fna", ".fasta", ".faa", ".ffn", ".fas", ".fsa", *READ_SUFFIXES)
PACKED = (".gz", ".bz2", ".xz", ".zst")
_ENDING = re.compile(
    rf"({'|'.join(map(re.escape, SUFFIXES))})?({'|'.join(map(re.escape, PACKED))})?\Z",
    re.IGNORECASE,
)
# the start of a file that is no FASTA, or FASTA as PIR writes it
_OTHER_THAN_FASTA = re.compile(rb"[^>]|>..;", re.DOTALL)


def list_fasta(path: Path) -> list[Path]:
    """Return the sequence files at ``path``: the file itself, or a folder's files sorted by name.

    Raises:
        InputMissingError: ``path`` is missing, or the folder is unreadable or has no such file.
    """
    with open_fasta(path):
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        files = [path / name for name in _files_in(path) if _fasta_suffix(name)]
    if not files:
        raise InputMissingError(
            f"{printable(path)}: no FASTA or FASTQ file in this folder",
            hint=f"names must end in {', '.join(SUFFIXES)}, with or without .gz, .bz2, .xz or "
            ".zst; sub-folders are not searched",
        )
    return files


def list_other_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that ``list_fasta`` skips."""
    return [name for name in _files_in(folder) if not _fasta_suffix(name)]


def list_folders(folder: Path) -> list[str]:
    """Return the sorted names of the visible sub-folders."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )


def _files_in(folder: Path) -> list[str]:
    """Return the sorted names of a folder's files, with dangling links but without hidden files."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and (entry.is_file() or not os.path.exists(entry))  # noqa: PTH110 - of many files
        )


def _fasta_suffix(name: str) -> str:
    """Return the format suffix of a file name, without a compression suffix, or ""."""
    match = _ENDING.search(name)
    return ((match and match[1]) or "").lower()


def has_fastq_suffix(name: str) -> bool:
    """Return True if a file name has a FASTQ suffix, compressed or not."""
    return _fasta_suffix(name) in READ_SUFFIXES


def stem_of(name: str) -> str:
    """Return a file name without its format and compression suffixes.

    >>> stem_of("contigs.fna.gz")
    'contigs'
    """
    return _ENDING.sub("", name, count=1)


def read_fasta(
    path: Path, name: str = "", on_block: OnBlock | None = None, sample: str = ""
) -> Iterator[FastaRecord]:
    """Yield the records of a FASTA or FASTQ file, plain or compressed, in file order.

    Errors name ``name`` or, if it is empty, the path. ``on_block`` gets the file's bytes as on
    disk.

    White space and gaps inside a sequence are dropped, and gaps are counted. Bytes that are not
    UTF-8 are kept in a header (``surrogateescape``) and rejected in an id. Read qualities are
    dropped. If the first two reads have the same id, the file is interleaved, and mates get the ids
    ``id/1`` and ``id/2``.

    Raises:
        InputError: the file is neither FASTA nor FASTQ, or is damaged. Names file and line.
        InputMissingError: the file cannot be opened.
    """
    for records in parse_block(read_blocks(path, name, on_block, sample)):
        yield from records.iter_records()


class Span(NamedTuple):
    """A range of complete records in a file, in bytes of its uncompressed content."""

    start: int = 0
    end: int | None = None  # None: the end of the file
    n_lines: int = 0  # lines before the start


WHOLE = Span()


@dataclass(frozen=True, slots=True, eq=False)
class _RawRecords:
    """Unparsed bytes of neighbouring complete records, which any process can parse, once."""

    chunks: list[bytes]  # line ends are "\n"; a record longer than a block has several chunks
    n_lines: int  # lines in the file before these records
    label: str  # file name in messages
    sample: str
    is_reads: bool  # FASTQ
    mate: int = 0  # 1 or 2: appended to ids
    prefix: str = ""  # added to ids in the run ...
    unprefixed: frozenset[str] = frozenset()  # ... except these
    span: Span | None = None  # for other processes to read; None: only this process can

    @property
    def n_letters(self) -> int:
        """Return the approximate number of letters. Half of a read is its qualities."""
        n_bytes = sum(map(len, self.chunks))
        return n_bytes // 2 if self.is_reads else n_bytes

    def parse(self) -> tuple[Records, InputError | None]:
        """Return the records before the first fault, and the fault. Release the bytes."""
        if len(self.chunks) > 1:
            records, fault = self._parse_long()
        elif self.is_reads:
            from virnucpro.sequences.fastq import parse_reads

            lines = LineTable.of(self.chunks.pop())
            records, fault = parse_reads(lines, self.n_lines, self.label, self.sample)
        else:
            records, fault = _parse(self.chunks.pop(), self.n_lines, self.label, self.sample)
        if self.mate:
            records = records.with_mate(self.mate)
        return records.with_prefix(self.prefix, self.unprefixed) if self.prefix else records, fault

    def _parse_long(self) -> tuple[Records, InputError | None]:
        """Parse a record in several chunks. Memory contains at most twice its size."""
        header = decode_text(self.chunks.pop(0)[1:]).removesuffix("\n")
        data = b"".join(self.chunks)
        self.chunks.clear()
        letters = decode_text(data)
        del data
        sequence = strip_letters(find_letters(BLANKS, [letters]), letters)
        line = [self.n_lines + 1]
        return make_records([header], [sequence], line, self.label, self.sample, is_plain=False)

    def with_mate(self, mate: int) -> _RawRecords:
        return replace(self, mate=mate)

    def with_prefix(self, prefix: str, unprefixed: frozenset[str]) -> _RawRecords:
        return replace(self, prefix=prefix, unprefixed=unprefixed)


@dataclass(frozen=True, slots=True, eq=False)
class ParsedRecords:
    """All records of a small file, parsed in advance. Otherwise as ``_RawRecords``."""

    records: Records
    n_letters: int
    span: Span | None

    @property
    def n_bytes(self) -> int:
        """Return the approximate size in memory."""
        n_bytes_per_record = 1_000
        return self.n_letters + n_bytes_per_record * len(self.records.ids)

    def parse(self) -> tuple[Records, None]:
        return self.records, None

    def with_mate(self, mate: int) -> ParsedRecords:
        return replace(self, records=self.records.with_mate(mate))

    def with_prefix(self, prefix: str, unprefixed: frozenset[str]) -> ParsedRecords:
        return replace(self, records=self.records.with_prefix(prefix, unprefixed))


Block = _RawRecords | ParsedRecords | Records
# Cuts a text, given the file name in messages and the number of lines before it. Yields chunks, the
# number of lines before them, and the number of bytes read after them.
_Cut = Callable[[Iterable[bytes], str, int], Iterator[tuple[list[bytes], int, int]]]


def parse_block(blocks: Iterable[Block]) -> Iterator[Records]:
    """Yield the records of blocks, up to the first fault.

    Raises:
        InputError: a record is invalid.
    """
    for block in blocks:
        if isinstance(block, Records):
            yield block
            continue
        records, fault = block.parse()
        yield records
        if fault is not None:
            raise fault


def read_blocks(
    path: Path,
    name: str = "",
    on_block: OnBlock | None = None,
    sample: str = "",
    span: Span = WHOLE,
    streams: StreamCache | None = None,
) -> Iterator[Block]:
    """Yield the records of ``read_fasta`` in blocks, parsed only if ids depend on earlier records.

    The blocks of a ``span`` (from ``find_spans``) are the same in every process. To read several
    spans, pass ``streams``, so that a compressed file is decompressed only once.

    Raises:
        InputError, InputMissingError: as ``read_fasta``, except faults found while parsing.
    """
    label = name or printable(path)
    streams = streams or StreamCache()
    with (
        open_fasta(path, label),
        streams.open_at(str(path), label, on_block, span) as (handle, is_reads),
    ):
        yield from cut_blocks(handle, label, sample, span, is_reads=is_reads)[1]


def cut_blocks(
    handle: BinaryIO, label: str, sample: str = "", span: Span = WHOLE, *, is_reads: bool
) -> tuple[bool, Iterator[Block]]:
    """Return whether an open text has interleaved mates, and its records in blocks."""
    text = LineReader(handle, (span.end or sys.maxsize) - span.start)
    is_ranged = handle.seekable()

    def raw_records(cut: _Cut) -> Iterator[_RawRecords]:
        groups = cut(text, label, span.n_lines)
        for (chunks, n_lines), own_span in _with_position(groups, text, span):
            own_span = own_span if is_ranged else None
            yield _RawRecords(chunks, n_lines, label, sample, is_reads, span=own_span)

    if not is_reads:
        return False, raw_records(_cut)
    from virnucpro.sequences.fastq import cut_reads, has_mates, number_mates

    blocks = raw_records(cut_reads)
    first = list(islice(blocks, 2)) if span == WHOLE else []
    if has_mates(chain.from_iterable(reads.chunks for reads in first)):
        return True, number_mates(parse_block(chain(first, blocks)))
    return False, chain(first, blocks)


def _with_position(
    cut: Iterable[tuple[list[bytes], int, int]], text: LineReader, span: Span
) -> Iterator[tuple[tuple[list[bytes], int], Span | None]]:
    """Yield each part of a text with its span in the file.

    The span is None if the bytes in the file differ from the text.
    """
    start = span.start
    for chunks, n_lines, n_unread in cut:
        end = span.start + text.n_bytes - n_unread
        # blank lines may precede the first record
        n_lines_before = n_lines if start > span.start else span.n_lines
        yield (chunks, n_lines), Span(start, end, n_lines_before) if text.is_as_in_file else None
        start = end


class StreamCache:
    """Compressed files that stay open at the end of a span, for the next span."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[io.BufferedReader, bool, int]] = {}

    @contextmanager
    def open_at(
        self, path: str, label: str, on_block: OnBlock | None, span: Span
    ) -> Iterator[tuple[BinaryIO, bool]]:
        """Yield a file at the start of a span, and whether it is FASTQ.

        The caller must read the complete span.
        """
        handle, is_reads, position = self._open.pop(path, (None, False, 0))
        if handle is not None and position > span.start:
            handle.close()
            handle = None
        with ExitStack() as stack:
            if handle is not None:
                stack.enter_context(handle)
            else:
                handle = stack.enter_context(open_sequences(path, label, on_block))
                position = 0
                is_reads = starts_as_reads(path, handle)
            if handle.seekable():
                handle.seek(span.start)
            else:
                _skip(handle, span.start - position)
            yield handle, is_reads
            if span.end is not None and not handle.seekable():
                self._open[path] = (handle, is_reads, span.end)
                stack.pop_all()


def _skip(handle: BinaryIO, n_bytes: int) -> None:
    """Read and discard this many bytes."""
    while n_bytes:
        n_bytes -= len(handle.read(min(n_bytes, record_text.READ_BYTES))) or n_bytes


def detect_interleaved(path: Path, name: str = "") -> Literal["", "single", "mates"]:
    """Detect from the content whether a file is FASTQ and whether it is interleaved.

    Returns:
        "" if the file is not FASTQ, "mates" if it is interleaved, else "single".

    Raises:
        InputError, InputMissingError: as ``read_fasta``.
    """
    label = name or printable(path)
    with open_fasta(path, label), open_sequences(path, label) as handle:
        if not starts_as_reads(path, handle):
            return ""
        are_mates, _ = cut_blocks(handle, label, is_reads=True)
        return "mates" if are_mates else "single"


@contextmanager
def open_fasta(path: Path | str, label: str = "") -> Iterator[None]:
    """Translate errors from reading a file, plain or compressed.

    Raises:
        InputError: the file is damaged.
        InputMissingError: the file cannot be opened.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputMissingError.cannot_open(Path(path), error, label) from error
        raise InputError(  # gzip and bz2 report damage as an OSError without a number
            f"{label or printable(path)}: cannot be decompressed: {error}",
            hint="the file is truncated or damaged: copy or download it again",
        ) from error


def open_sequences(
    path: Path | str, label: str, on_block: OnBlock | None = None
) -> io.BufferedReader:
    """Open a plain or compressed file for reading its records.

    Raises:
        InputError: it has another format.
    """
    with ExitStack() as stack:
        handle = stack.enter_context(open_binary(path, on_block))
        check_format(handle, label)
        stack.pop_all()
        return handle


def check_format(handle: io.BufferedReader, label: str) -> None:
    """Check that an unread text may be FASTA or FASTQ.

    Raises:
        InputError: it has another format.
    """
    start = handle.peek(PEEK_BYTES)[:PEEK_BYTES]
    if _OTHER_THAN_FASTA.match(start) or b"\0" in start:
        from virnucpro.sequences.other_formats import find_other_format

        if other_format := find_other_format(start):
            raise InputError(
                f"{label}: this is {other_format.name}, not FASTA or FASTQ",
                hint=other_format.remedy,
            )


def _cut(
    blocks: Iterable[bytes], label: str, n_lines: int = 0
) -> Iterator[tuple[list[bytes], int, int]]:
    """Split a text into groups of complete FASTA records.

    Yields:
        Chunks, the number of lines before them, and the number of bytes read after them.
    """
    blocks = iter(blocks)
    unread, number = _skip_to_first_header(blocks, label, n_lines)
    for block in blocks:
        data = unread + block
        end = data.rfind(b"\n>") + 1
        if end:
            complete = data[:end]
            unread = data[end:]
            yield [complete], number, len(unread)
            number += count_byte(b"\n", complete)
        elif len(data) < 2 * record_text.READ_BYTES:
            unread = data
        else:
            chunks, n_lines, unread = _read_long(chain([data], blocks), number, label)
            del data, block  # keep the letters of a long record only once
            yield chunks, number, len(unread)
            number += n_lines
    if unread:
        yield [unread], number, 0


def _skip_to_first_header(blocks: Iterator[bytes], label: str, number: int) -> tuple[bytes, int]:
    """Return the block from the first header on, and the number of lines before the header."""
    is_line_start = True
    for block in blocks:
        first = _find_header(block, is_line_start)
        blank = block if first < 0 else block[:first]
        number += blank.count(b"\n")
        _check_blank(decode_text(blank), number + 1, label)
        if first >= 0:
            return block[first:], number
        is_line_start = block.endswith(b"\n")
    return b"", number


def _find_header(block: bytes, is_line_start: bool) -> int:
    """Return the position of the first header in a block, or -1."""
    if is_line_start and block.startswith(b">"):
        return 0
    return next_header(block, 0) or -1


def next_header(data: bytes, first: int) -> int:
    """Return the position of the first header at or after ``first`` and after a line end, or 0."""
    position = data.find(b">", first)  # finding one letter is many times faster than two
    return data.find(b"\n>", max(first, position - 1)) + 1 if position >= 0 else 0


def _read_long(blocks: Iterable[bytes], number: int, label: str) -> tuple[list[bytes], int, bytes]:
    """Read a record that is longer than a block, after ``number`` lines.

    Returns:
        The header line followed by letters, most without blanks; the number of lines; and the bytes
            after the record in its last block.

    Raises:
        InputError: the header or the sequence is too long.
    """
    chunks: list[bytes] = []
    n_lines = 0
    n_letters = 0
    is_line_start = False
    blanks = list(map(str.encode, BLANKS))
    for block in blocks:
        end = _find_header(block, is_line_start)
        piece = block if end < 0 else block[:end]
        if not n_lines:
            header, line_end, piece = b"".join((*chunks, piece)).partition(b"\n")
            chunks = [header + line_end]
            n_lines = len(line_end)
            if not line_end and len(decode_text(header)) > record_text.MAX_HEADER + 1:
                raise endless_header_error(number + 1, label)
        n_lines += count_byte(b"\n", piece)
        is_ascii = piece.isascii()  # other pieces may end within a character
        chunks.append(strip_letters(blanks, piece) if is_ascii else piece)
        n_letters += len(chunks[-1] if is_ascii else decode_text(piece))
        name = decode_text(chunks[0][1 : 1 + PEEK_BYTES].rstrip(b"\n"))
        check_length(n_letters, name, number + 1, label)
        if end >= 0:
            return chunks, n_lines, block[end:]
        is_line_start = block.endswith(b"\n")
    return chunks, n_lines, b""


def _parse(data: bytes, number: int, label: str, sample: str) -> tuple[Records, InputError | None]:
    """Parse FASTA after ``number`` lines.

    Returns:
        The records before the first fault, and the fault.
    """
    small = 1 << 14  # bytes that are split faster into texts than into an array of lines
    if len(data) < small and data.startswith(b">") and data.isascii():
        headers, sequences, line_numbers, is_plain = _split_small(data.decode("ascii"), number)
    else:
        headers, sequences, line_numbers, is_plain = _split(LineTable.of(data), number)
    if blanks := find_letters("\n" + INNER_BLANKS, sequences):
        sequences = [strip_letters(blanks, letters) for letters in sequences]
    if find_letters("<", sequences):
        sequences = [letters.replace(MASK_TEXT, MASK_LETTER) for letters in sequences]
    return make_records(headers, sequences, line_numbers, label, sample, is_plain=is_plain)


# headers, sequences with line ends, line numbers, and whether all records are plain
_SplitText = tuple[list[str], list[str], list[int], bool]


def _split(lines: LineTable, number: int) -> _SplitText:
    """Split a text of any size, after ``number`` lines."""
    firsts = np.flatnonzero(lines.begin_with(">"))
    header_starts = lines.starts[firsts]
    header_ends = lines.ends[firsts]
    ends = np.append(header_starts[1:], len(lines.data)) - 1
    headers = lines.texts(header_starts + 1, header_ends)
    sequences = lines.texts(np.minimum(header_ends + 1, ends), ends)
    line_numbers = (firsts + number + 1).tolist()
    return headers, sequences, line_numbers, lines.are_plain(header_starts)


def _split_small(text: str, number: int) -> _SplitText:
    """Split an ASCII text that begins with a header, as ``_split`` does."""
    headers = list[str]()
    sequences = list[str]()
    line_numbers = list[int]()
    for record in text[1:].removesuffix("\n").split("\n>"):
        header, _, letters = record.partition("\n")
        headers.append(header)
        sequences.append(letters)
        line_numbers.append(number + 1)
        number += 1 + record.count("\n")
    is_plain = "\0" not in text and all(header[:1] > " " for header in headers)
    return headers, sequences, line_numbers, is_plain


def starts_as_reads(path: Path | str, handle: io.BufferedReader) -> bool:
    """Return True if an open, unread file begins like FASTQ, after any blank lines."""
    start = handle.peek(PEEK_BYTES)[:PEEK_BYTES].removeprefix(BOM)
    if start and not start.strip(b"\r\n"):
        with open_binary(path) as reopened:  # a compressed file cannot be rewound
            blocks = iter(partial(reopened.read, record_text.READ_BYTES), b"")
            texts = (block.removeprefix(BOM).lstrip(b"\r\n") for block in blocks)
            start = next(filter(None, texts), b"")
    return start.lstrip(b"\r\n").startswith(b"@")


def _check_blank(text: str, number: int, label: str) -> None:
    """Check that only white space precedes the first header.

    Raises:
        InputError: there is other text.
    """
    unexpected = text.lstrip(BLANKS)
    if unexpected:
        line = number - unexpected.count("\n")
        start = unexpected[:20].splitlines()[0].encode(errors="surrogateescape")
        raise InputError(
            f"{label}:{line}: expected '>', found {str(start).removeprefix('b')}",
            hint="a FASTA record begins with a line such as '>contig1'",
        )


def write_record(out: TextIO, header: str, sequence: str) -> None:
    """Write a record with 60 letters per line. Open ``out`` with ``surrogateescape``."""
    width = 60
    n_letters = 4096 * width  # per write; a complete record would need 3 times its size
    out.write(f">{header}\n")
    for start in range(0, len(sequence), n_letters):
        end = min(start + n_letters, len(sequence))
        lines = [sequence[i : i + width] for i in range(start, end, width)]
        out.write("\n".join([*lines, ""]))


def find_invalid(record: FastaRecord, input_type: InputType) -> str:
    """Return the reason why a record is invalid, or "" if it is valid."""
    if not record.sequence:
        return "the record is empty"
    if matches_type(record.sequence, input_type):
        return ""
    invalid_letters = set(record.sequence) - set(_sequence_letters(input_type).decode())
    first = min(invalid_letters, key=record.sequence.index)
    shown = MASK_TEXT if first == MASK_LETTER else first
    return f"{shown!a} at position {record.sequence.index(first) + 1} is not a {input_type} letter"


def matches_type(letters: str, input_type: InputType) -> bool:
    """Return True if all letters are valid for this sequence type."""
    letters_of_type = _sequence_letters(input_type)
    return not any(
        letters[start : start + record_text.READ_BYTES]
        .encode("ascii", "replace")
        .translate(None, delete=letters_of_type)  # "?" is allowed nowhere
        for start in range(0, len(letters), record_text.READ_BYTES)
    )


def _sequence_letters(input_type: InputType) -> bytes:
    """Return IUPAC codes with RNA's U, the mask, and the stop that some tools write."""
    if input_type == "nucleotide":
        return b"ACGTURYSWKMBDHVNXacgturyswkmbdhvnx*"
    return b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*" + MASK_LETTER.encode()


def guess_input_type(path: Path, name: str = "") -> InputType | None:
    """Guess from the unmasked letters in the first records: nucleotides or proteins.

    Returns:
        The type, or None for a file without letters.

    Raises:
        InputError: the letters fit neither type, or the file mixes both.
    """
    first = FirstLetters()
    for records in parse_block(read_blocks(path, name)):
        if not first.add(records):
            break
    return first.guess_type(name or printable(path))


class FirstLetters:
    """The ids and the first letters of a file's first records."""

    _SAMPLE = 1_000_000  # letters read to distinguish nucleotides from proteins
    _MASKS = b"Xx" + MASK_LETTER.encode()  # any base or residue, so ignored when guessing the type

    def __init__(self) -> None:
        self.samples: list[tuple[str, str]] = []
        self.n_missing = self._SAMPLE

    def add(self, records: Records) -> bool:
        """Add the next records. Return True if more are needed."""
        for record_id, sequence in zip(records.ids, records.sequences, strict=True):
            if self.n_missing <= 0:
                break
            self.samples.append((record_id, sequence[: self._SAMPLE]))
            self.n_missing -= len(self.samples[-1][1])
        return self.n_missing > 0

    def guess_type(self, label: str) -> InputType | None:
        """Guess whether these are nucleotides or proteins, as ``guess_input_type`` does.

        Raises:
            InputError: as ``guess_input_type``.
        """
        plain_bases = b"ACGTUNacgtun"
        only_protein = b"EFIJLOPQZefijlopqz"
        letters = "".join(sample for _, sample in self.samples).encode("ascii", "replace")
        others = letters.translate(None, plain_bases)
        plain = len(letters) - len(others)
        protein, masks = (
            len(others) - len(others.translate(None, counted))
            for counted in (only_protein, self._MASKS)
        )
        total = len(letters) - masks
        if not letters:
            return None
        if protein > 0.05 * total:
            stranger = next((name for name, sample in self.samples if _is_nucleotide(sample)), None)
            if stranger is not None:
                raise InputError(
                    f"{label} contains proteins, but the record {printable(stranger)} contains "
                    "nucleotides",
                    hint=with_options(
                        "run them separately, or set the type of all records with {input_type}"
                    ),
                )
            return "protein"
        if plain > 0.8 * total and protein < 0.01 * total:
            return "nucleotide"
        raise InputError(
            f"{label}: cannot tell nucleotides from proteins "
            f"({plain / max(1, total):.0%} ACGTUN, {protein / max(1, total):.1%} letters that only "
            "proteins have)",
            hint=with_options("set it with {input_type:nucleotide} or {input_type:protein}"),
        )


def _is_nucleotide(sequence: str) -> bool:
    """Return True if a sequence has only the four bases, each of them often, unlike any protein."""
    min_typed_letters = 50  # letters in the shortest record that reveals its type
    counts = Counter(sequence.upper().replace("U", "T"))
    n_rarest = min(counts[base] for base in "ACGT")
    is_plain = counts.keys() <= set("ACGTNX")
    return is_plain and len(sequence) >= min_typed_letters and n_rarest >= 0.05 * len(sequence)
