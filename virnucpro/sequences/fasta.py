"""Read FASTA and FASTQ, and write FASTA. Records stream in blocks that any process can parse.

Memory contains one block, or one record that is longer. Record length is limited, so that a small
compressed file cannot fill the memory.
"""

from __future__ import annotations

import lzma
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import AnyStr, BinaryIO, Literal, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import OnBlock, open_binary, zstd
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.logging import format_count, printable
from virnucpro.core.numeric import BoolArray, IntArray
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import InputType
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.other_formats import PEEK_BYTES, find_other_format

SUFFIXES_OF_READS = (".fastq", ".fq")
SUFFIXES = (".fa", ".fna", ".fasta", ".faa", ".ffn", ".fas", ".fsa", *SUFFIXES_OF_READS)
PACKED = (".gz", ".bz2", ".xz", ".zst")
_FORMAT_PATTERN = "|".join(map(re.escape, SUFFIXES))
_PACKED_PATTERN = "|".join(map(re.escape, PACKED))
_ENDING = re.compile(rf"({_FORMAT_PATTERN})?({_PACKED_PATTERN})?\Z", re.IGNORECASE)

# the limit in public archives and BAM; a run needs 3 to 4 bytes of memory per letter
MAX_LETTERS = 2**31 - 1
MAX_HEADER = 2**24  # characters
_BLOCK = 2**19  # bytes per read call
_BOM = b"\xef\xbb\xbf"
_LINES = 4  # per FASTQ read

# IUPAC codes, RNA's U, the mask X, and the stop that some tools write
_NUCLEOTIDES = b"ACGTURYSWKMBDHVNXacgturyswkmbdhvnx*"
_RESIDUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*"
_GAPS = "-.~"  # alignment gaps
_ONLY_PROTEIN = b"EFIJLOPQZefijlopqz"
_PLAIN_BASES = b"ACGTUNacgtun"
_MIN_TYPED_LETTERS = 50  # letters in the shortest record that reveals its type
_SAMPLE = 1_000_000  # letters read to distinguish nucleotides from proteins
_MASKS = b"Xx"  # any base or residue, so ignored when guessing the type
_INNER_BLANKS = " \t\v\f"  # blanks between letters; str.split() also splits at control codes
_BLANK = _INNER_BLANKS + "\r\n"
_BLANK_BYTES = [blank.encode() for blank in _BLANK]
_WIDTH = 60
_WRITTEN = 4096 * _WIDTH  # letters per write; a complete record would need 3 times its size
_SHOWN = 100  # header characters in a message
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # ``surrogateescape`` decodes invalid bytes to these


def list_fasta(path: Path) -> list[Path]:
    """Return the sequence files at ``path``: the file itself, or a folder's files sorted by name.

    Raises:
        InputMissingError: ``path`` is missing, or the folder is unreadable or has no such file.
    """
    with open_fasta(path):
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        files = [entry for entry in _files_in(path) if _fasta_suffix(entry.name)]
    if not files:
        raise InputMissingError(
            f"{printable(path)}: no FASTA or FASTQ file in this folder",
            hint=f"names must end in {', '.join(SUFFIXES)}, with or without .gz, .bz2, .xz or "
            ".zst; sub-folders are not searched",
        )
    return files


def list_other_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that ``list_fasta`` skips."""
    return [entry.name for entry in _files_in(folder) if not _fasta_suffix(entry.name)]


def list_folders(folder: Path) -> list[str]:
    """Return the sorted names of the visible sub-folders."""
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
    )


def _files_in(folder: Path) -> list[Path]:
    """Return a folder's files sorted by name, with dangling links but without hidden files."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if not entry.name.startswith(".") and (entry.is_file() or not entry.exists())
    )


def _fasta_suffix(name: str) -> str:
    """Return the format suffix of a file name, without a compression suffix, or ""."""
    match = _ENDING.search(name)
    return ((match and match[1]) or "").lower()


def has_fastq_suffix(name: str) -> bool:
    """Return True if a file name has a FASTQ suffix, compressed or not."""
    return _fasta_suffix(name) in SUFFIXES_OF_READS


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
        else:
            parse = _parse_reads if self.is_reads else _parse
            lines = _LineTable.of(self.chunks.pop())
            records, fault = parse(lines, self.n_lines, self.label, self.sample)
        if self.mate:
            records = records.with_mate(self.mate)
        return records.with_prefix(self.prefix, self.unprefixed) if self.prefix else records, fault

    def _parse_long(self) -> tuple[Records, InputError | None]:
        """Parse a record in several chunks. Memory contains at most twice its size."""
        header = _text(self.chunks.pop(0)[1:]).removesuffix("\n")
        data = b"".join(self.chunks)
        self.chunks.clear()
        letters = _text(data)
        del data
        sequence = _strip_bytes(_found(_BLANK, [letters]), letters)
        line = [self.n_lines + 1]
        return _columns([header], [sequence], line, self.label, self.sample, is_plain=False)

    def with_mate(self, mate: int) -> _RawRecords:
        return replace(self, mate=mate)

    def with_prefix(self, prefix: str, unprefixed: frozenset[str]) -> _RawRecords:
        return replace(self, prefix=prefix, unprefixed=unprefixed)


Block = _RawRecords | Records


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
        streams.open_at(path, label, on_block, span) as (handle, is_reads),
    ):
        text = _LineReader(handle, (span.end or sys.maxsize) - span.start)
        chunk_groups = (_cut_reads if is_reads else _cut)(text, label, span.n_lines)
        is_ranged = handle.seekable()
        blocks = (
            _RawRecords(
                chunks, n_lines, label, sample, is_reads, span=own_span if is_ranged else None
            )
            for (chunks, n_lines), own_span in _with_position(chunk_groups, text, span)
        )
        first = list(islice(blocks, 2)) if is_reads and span == WHOLE else []
        if _alternate(chain.from_iterable(reads.chunks for reads in first)):
            yield from _alternates_mates(parse_block(chain(first, blocks)))
        else:
            yield from chain(first, blocks)


def _with_position(
    cut: Iterable[tuple[list[bytes], int, int]], text: _LineReader, span: Span
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
        self._open: dict[Path, tuple[BinaryIO, bool, int]] = {}

    @contextmanager
    def open_at(
        self, path: Path, label: str, on_block: OnBlock | None, span: Span
    ) -> Iterator[tuple[BinaryIO, bool]]:
        """Yield a file at the start of a span, and whether it is FASTQ.

        The caller must read the complete span.
        """
        handle, is_reads, position = self._open.pop(path, (None, False, 0))
        if handle is None or position > span.start:
            handle = _open(path, label, on_block)
            position = 0
            is_reads = _starts_as_reads(path, handle)
        with ExitStack() as stack:
            stack.callback(handle.close)
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
        n_bytes -= len(handle.read(min(n_bytes, _BLOCK))) or n_bytes


def find_spans(path: Path, name: str, least: int) -> tuple[list[Span], int]:
    """Split a file into spans of complete records, each at least ``least`` bytes long.

    Sizes are in uncompressed bytes. An interleaved file is not split, because its ids depend on
    earlier records. Nor is a file with old Mac line ends (CR), because the splitter counts line
    feeds.

    Returns:
        The spans, and the size of the file.

    Raises:
        InputError, InputMissingError: as ``read_fasta``, except faults found while parsing.
    """
    label = name or printable(path)
    kind = detect_interleaved(path, name)
    n_blank = _count_blank(path) if kind else 0
    spans = [WHOLE]
    is_cut = kind != "mates"
    start = n_lines = 0  # position of the data, which begins with the previous block's last byte
    last = b""
    with open_fasta(path, label), _open(path, label, None) as handle:
        while block := handle.read(_BLOCK):
            data = last + block
            while offset := _find_record(
                data, spans[-1].start + least - start, n_lines - n_blank if kind else None
            ):
                spans[-1] = spans[-1]._replace(end=start + offset)
                spans.append(Span(start + offset, None, n_lines + data.count(b"\n", 0, offset)))
            is_cut &= b"\r" not in data or data.count(b"\r", 0, -1) == data.count(b"\r\n")
            start += len(data) - 1
            last = data[-1:]
            n_lines += _count(b"\n", data) - last.count(b"\n")
    return spans if is_cut else [WHOLE], start + len(last)


def _find_record(data: bytes, first: int, n_lines: int | None) -> int:
    """Return the start of the first record at ``first`` or later, but after 0, or else 0.

    In FASTQ, ``n_lines`` lines of reads precede the data.
    """
    behind = max(0, first - 1)
    start = _next_header(data, behind) if n_lines is None else data.find(b"\n", behind) + 1
    if n_lines is not None:
        n_lines += data.count(b"\n", 0, start)
        while start and n_lines % _LINES:
            start = data.find(b"\n", start) + 1
            n_lines += 1
    return start if start < len(data) else 0


def _count_blank(path: Path) -> int:
    """Count the blank lines before the first read."""
    with open_binary(path) as handle:
        lines = iter(partial(handle.readline, _BLOCK), b"")
        blank = takewhile(lambda line: not line.removeprefix(_BOM).strip(b"\r\n"), lines)
        return sum(1 for _ in blank)


def detect_interleaved(path: Path, name: str = "") -> Literal["", "single", "mates"]:
    """Detect from the content whether a file is FASTQ and whether it is interleaved.

    Returns:
        "" if the file is not FASTQ, "mates" if it is interleaved, else "single".

    Raises:
        InputError, InputMissingError: as ``read_fasta``.
    """
    label = name or printable(path)
    with open_fasta(path, label), _open(path, label, None) as handle:
        if not _starts_as_reads(path, handle):
            return ""
        first = islice(_cut_reads(_LineReader(handle), label), 2)
        is_of_pairs = _alternate(chain.from_iterable(chunks for chunks, _, _ in first))
        return "mates" if is_of_pairs else "single"


def _alternate(chunks: Iterable[bytes]) -> bool:
    """Return True if the first two reads in these chunks are mates."""
    lines = b"".join(chunks).split(b"\n", 2 * _LINES)[: 2 * _LINES]
    ids = _parse_reads(_LineTable.of(b"\n".join((*lines, b""))), 0, "", "")[0].ids
    return len(ids) > 1 and ids[0] == ids[1]


def _alternates_mates(blocks: Iterable[Records]) -> Iterator[Records]:
    first_mate = ""
    for records in blocks:
        ids = []
        for name in records.ids:
            is_second = name == first_mate
            first_mate = "" if is_second else name
            ids.append(f"{name}/{2 if is_second else 1}")
        yield records.with_ids(ids)


@contextmanager
def open_fasta(path: Path, label: str = "") -> Iterator[None]:
    """Translate errors from reading a file, plain or compressed.

    Raises:
        InputError: the file is damaged.
        InputMissingError: the file cannot be opened.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputMissingError.cannot_open(path, error, label) from error
        raise InputError(  # gzip and bz2 report damage as an OSError without a number
            f"{label or printable(path)}: cannot be decompressed: {error}",
            hint="the file is truncated or damaged: copy or download it again",
        ) from error


def _open(path: Path, label: str, on_block: OnBlock | None) -> BinaryIO:
    handle = open_binary(path, on_block)
    other_format = find_other_format(handle.peek(PEEK_BYTES)[:PEEK_BYTES])  # type: ignore[attr-defined]
    if other_format is not None:
        handle.close()
        raise InputError(
            f"{label}: this is {other_format.name}, not FASTA or FASTQ", hint=other_format.remedy
        )
    return handle


@dataclass(slots=True, eq=False)
class _LineReader:
    """Text in blocks, without a byte order mark, with a line feed at every line end."""

    handle: BinaryIO
    n_left: int = sys.maxsize  # bytes still to read
    n_bytes: int = 0  # in the blocks so far
    is_as_in_file: bool = True  # False: the blocks differ from the bytes in the file

    def __iter__(self) -> Iterator[bytes]:
        handle = self.handle
        if handle.peek(len(_BOM)).startswith(_BOM):  # type: ignore[attr-defined]
            self.n_left -= len(handle.read(len(_BOM)))
            self.is_as_in_file = False
        pending = b""  # a CR that may be the first half of a line end
        while block := handle.read(min(self.n_left, _BLOCK)):
            self.n_left -= len(block)
            block = pending + block
            pending = b"\r" if block.endswith(b"\r") else b""
            block = block[: len(block) - len(pending)]
            if pending or b"\r" in block:
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                self.is_as_in_file = False
            if block:
                self.n_bytes += len(block)
                yield block
        if pending:
            yield b"\n"


def _count(letter: bytes, data: bytes) -> int:
    """Count a letter, fast even in long texts."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord(letter)))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


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
            number += _count(b"\n", complete)
        elif len(data) < 2 * _BLOCK:
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
        _check_blank(_text(blank), number + 1, label)
        if first >= 0:
            return block[first:], number
        is_line_start = block.endswith(b"\n")
    return b"", number


def _find_header(block: bytes, is_line_start: bool) -> int:
    """Return the position of the first header in a block, or -1."""
    if is_line_start and block.startswith(b">"):
        return 0
    return _next_header(block, 0) or -1


def _next_header(data: bytes, first: int) -> int:
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
    for block in blocks:
        end = _find_header(block, is_line_start)
        piece = block if end < 0 else block[:end]
        if not n_lines:
            header, line_end, piece = b"".join((*chunks, piece)).partition(b"\n")
            chunks = [header + line_end]
            n_lines = len(line_end)
            if not line_end and len(_text(header)) > MAX_HEADER + 1:
                raise _endless_header(number + 1, label)
        n_lines += _count(b"\n", piece)
        is_ascii = piece.isascii()  # other pieces may end within a character
        chunks.append(_strip_bytes(_BLANK_BYTES, piece) if is_ascii else piece)
        n_letters += len(chunks[-1] if is_ascii else _text(piece))
        name = _text(chunks[0][1 : 1 + PEEK_BYTES].rstrip(b"\n"))
        _check_length(n_letters, name, number + 1, label)
        if end >= 0:
            return chunks, n_lines, block[end:]
        is_line_start = block.endswith(b"\n")
    return chunks, n_lines, b""


@dataclass(frozen=True, slots=True, eq=False)
class _LineTable:
    """A text and the byte positions of its lines."""

    data: bytes
    letters: NDArray[np.uint8]  # ``data`` as an array
    starts: IntArray  # (n_lines,)
    ends: IntArray  # (n_lines,) positions of the line feeds

    @classmethod
    def of(cls, data: bytes) -> _LineTable:
        data = data if data.endswith(b"\n") else data + b"\n"
        letters = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(letters == ord("\n"))
        return cls(data, letters, np.append(0, ends[:-1] + 1), ends)

    def begin_with(self, letter: str, lines: slice = slice(None)) -> BoolArray:
        """Return a mask of the lines that begin with an ASCII letter."""
        return np.asarray(self.letters[self.starts[lines]] == ord(letter))

    def texts(self, starts: IntArray, ends: IntArray) -> list[str]:
        """Return the texts between these byte positions."""
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        if not self.data.isascii():
            return [_text(self.data[start:end]) for start, end in pairs]
        text = self.data.decode("ascii")
        return [text[start:end] for start, end in pairs]

    def are_plain(self, headers: IntArray) -> bool:
        """Return True if the records at these header positions are valid without further checks."""
        is_short = int(np.diff(self.starts, append=len(self.data)).max(initial=0)) <= MAX_HEADER
        is_text = self.data.isascii() and b"\0" not in self.data
        return is_text and is_short and bool((self.letters[headers + 1] > ord(" ")).all())


def _parse(
    lines: _LineTable, number: int, label: str, sample: str
) -> tuple[Records, InputError | None]:
    """Parse FASTA after ``number`` lines.

    Returns:
        The records before the first fault, and the fault.
    """
    firsts = np.flatnonzero(lines.begin_with(">"))
    header_starts = lines.starts[firsts]
    header_ends = lines.ends[firsts]
    ends = np.append(header_starts[1:], len(lines.data)) - 1
    headers = lines.texts(header_starts + 1, header_ends)
    sequences = lines.texts(np.minimum(header_ends + 1, ends), ends)
    if np.diff(firsts, append=len(lines.starts)).max() > 2:  # a sequence has several lines
        sequences = [letters.replace("\n", "") for letters in sequences]
    if blanks := _found(_INNER_BLANKS, sequences):
        sequences = [_strip_bytes(blanks, letters) for letters in sequences]
    line_numbers = (firsts + number + 1).tolist()
    is_plain = lines.are_plain(header_starts)
    return _columns(headers, sequences, line_numbers, label, sample, is_plain=is_plain)


def _columns(
    headers: list[str],
    sequences: list[str],
    lines: list[int],
    label: str,
    sample: str,
    *,
    is_plain: bool,
) -> tuple[Records, InputError | None]:
    """Return the records before the first fault, and the fault. Plain records need no check."""
    fault = None
    if not is_plain:
        n_good = 0
        try:
            for record in zip(headers, sequences, lines, strict=True):
                _check_record(*record, label)
                n_good += 1
        except InputError as error:
            fault = error
            headers = headers[:n_good]
            sequences = sequences[:n_good]
            lines = lines[:n_good]
    n_gaps = [0] * len(headers)
    if gaps := _found(_GAPS, sequences):
        letters = [_strip_bytes(gaps, sequence) for sequence in sequences]
        n_gaps = [len(a) - len(b) for a, b in zip(sequences, letters, strict=True)]
        sequences = letters
    ids = [header.split(None, 1)[0] for header in headers]
    samples = [sample] * len(ids)
    own_ids = [""] * len(ids)
    return Records(ids, headers, sequences, lines, n_gaps, samples, own_ids), fault


def _found(letters: str, sequences: Sequence[str]) -> list[str]:
    """Return the letters that occur in any of the sequences."""
    joined = "".join(sequences)
    return [letter for letter in letters if letter in joined]


def _starts_as_reads(path: Path, handle: BinaryIO) -> bool:
    """Return True if an open, unread file begins like FASTQ, after any blank lines."""
    start: bytes = handle.peek(PEEK_BYTES)[:PEEK_BYTES].removeprefix(_BOM)  # type: ignore[attr-defined]
    if start and not start.strip(b"\r\n"):
        with open_binary(path) as reopened:  # a compressed file cannot be rewound
            blocks = iter(partial(reopened.read, _BLOCK), b"")
            texts = (block.removeprefix(_BOM).lstrip(b"\r\n") for block in blocks)
            start = next(filter(None, texts), b"")
    return start.lstrip(b"\r\n").startswith(b"@")


def _cut_reads(
    blocks: Iterable[bytes], label: str, number: int = 0
) -> Iterator[tuple[list[bytes], int, int]]:
    """Yield complete reads, in the format of ``_cut``. The last part is the remainder of the file.

    Blank lines may precede the first read.
    """
    pending: list[bytes] = []
    n_bytes = n_ends = 0  # bytes and line ends in ``pending``; ``number`` lines precede it
    is_before = True  # the first read has not begun
    for block in blocks:
        if is_before:
            text = block.lstrip(b"\n")
            number += len(block) - len(text)
            block = text
            is_before = not text
        pending.append(block)
        n_bytes += len(block)
        n_ends += _count(b"\n", block)
        if n_ends >= _LINES:
            data = b"".join(pending)
            end = len(data)
            for _ in range(n_ends % _LINES + 1):
                end = data.rfind(b"\n", 0, end)
            complete = data[: end + 1]
            unread = data[end + 1 :]
            yield [complete], number, len(unread)
            number += n_ends - n_ends % _LINES
            n_ends %= _LINES
            pending = [unread]
            n_bytes = len(unread)
        if not n_ends and n_bytes > MAX_HEADER + 1:
            raise _endless_header(number + 1, label)
        if n_bytes > 2 * MAX_LETTERS + MAX_HEADER:
            header = _text(pending[0][1:].partition(b"\n")[0])
            _check_length(n_bytes, header, number + 1, label)
    if n_bytes:
        yield [b"".join(pending)], number, 0


def _parse_reads(
    lines: _LineTable, number: int, label: str, sample: str
) -> tuple[Records, InputError | None]:
    """Parse FASTQ after ``number`` lines. A read has four lines. Four blank lines are skipped.

    Returns:
        The reads before the first fault, and the fault.
    """
    n_lines = len(lines.starts) - len(lines.starts) % _LINES
    fault = None
    extra_lines = lines.texts(lines.starts[n_lines:], lines.ends[n_lines:])
    if any(extra_lines):
        fault = _bad_read_error(extra_lines, number + 1 + n_lines, label)
    is_read = _are_reads(lines, n_lines)
    doubtful = np.flatnonzero(~is_read)
    rows = [_LINES * doubtful + i for i in range(_LINES)]
    columns = [lines.texts(lines.starts[row], lines.ends[row]) for row in rows]
    for index, *read_lines in zip(doubtful.tolist(), *columns, strict=True):
        is_read[index] = _is_read(*read_lines)
        if any(read_lines) and not is_read[index]:
            fault = _bad_read_error(read_lines, number + 1 + _LINES * index, label)
            is_read = is_read[:index]
            break
    firsts = _LINES * np.flatnonzero(is_read)
    headers = lines.texts(lines.starts[firsts] + 1, lines.ends[firsts])
    sequences = lines.texts(lines.starts[firsts + 1], lines.ends[firsts + 1])
    if _found(".", sequences):
        sequences = [letters.replace(".", "N") for letters in sequences]  # an unknown base
    line_numbers = (firsts + number + 1).tolist()
    is_plain = lines.are_plain(lines.starts[firsts])
    records, earlier = _columns(headers, sequences, line_numbers, label, sample, is_plain=is_plain)
    return records, earlier or fault


def _are_reads(lines: _LineTable, n_lines: int) -> BoolArray:
    """Return a mask of the groups of four lines that are certainly reads. Others need a check."""
    header, letters, plus, qualities = (slice(i, n_lines, _LINES) for i in range(_LINES))
    lengths = lines.ends - lines.starts
    is_same = lengths[letters] == lengths[qualities]
    is_plus = lines.begin_with("+", plus) & (lengths[plus] == 1)
    are_reads = lines.begin_with("@", header) & is_plus & is_same
    return are_reads if lines.data.isascii() else np.zeros_like(are_reads)


def _is_read(header: str, letters: str, plus: str, qualities: str) -> bool:
    is_named = plus == "+" or (plus[:1] == "+" and plus[1:] == header[1:])
    return is_named and len(letters) == len(qualities) and header[:1] == "@"


def _bad_read_error(lines: Sequence[str], number: int, label: str) -> InputError:
    """Return the error for the first invalid read, which begins at line ``number``."""
    fields: list[str | None] = [*lines, *[None] * (_LINES - len(lines))]
    header, letters, plus, qualities = fields
    shown = [ascii((line or "")[:20].encode(errors="surrogateescape"))[1:] for line in lines]
    name = printable((header or "")[1:].split(maxsplit=1)[0] if (header or "")[1:].split() else "")
    unwrap = "for example with `seqkit seq -w 0`"
    if not (header or "").startswith("@"):
        offset = 0
        problem = f"expected '@', found {shown[0]}"
        hint = (
            "a FASTQ read has four lines, the first such as '@read1'; unwrap wrapped lines, "
            f"{unwrap}"
        )
    elif plus is not None and not plus.startswith("+"):
        offset = 2
        problem = f"expected '+', found {shown[2]}, in the read {name}"
        hint = f"a FASTQ read has four lines; unwrap wrapped lines, {unwrap}"
    elif letters is None or plus is None or qualities is None:
        offset = len(lines) - 1
        problem = f"the file ends within the read {name}"
        hint = "the file is truncated: copy or download it again"
    elif plus not in ("+", f"+{(header or '')[1:]}"):
        offset = 2
        problem = f"the line {shown[2]} names another read than {name}"
        hint = "the file is damaged: copy or download it again"
    else:
        n_letters = format_count(len(letters), "letter")
        n_qualities = format_count(len(qualities), "quality", "qualities")
        offset = 3
        problem = f"the read {name} has {n_letters} and {n_qualities}"
        hint = (
            "the file is truncated or damaged, or its lines are wrapped: copy it again, or unwrap "
            f"it, {unwrap}"
        )
    return InputError(f"{label}:{number + offset}: {problem}", hint=hint)


def _strip_bytes(blanks: Iterable[AnyStr], letters: AnyStr) -> AnyStr:
    for blank in blanks:  # faster than ``translate``, which checks each letter
        if blank in letters:
            letters = letters.replace(blank, letters[:0])
    return letters


def _check_blank(text: str, number: int, label: str) -> None:
    """Check that only white space precedes the first header.

    Raises:
        InputError: there is other text.
    """
    unexpected = text.lstrip(_BLANK)
    if unexpected:
        line = number - unexpected.count("\n")
        start = unexpected[:20].splitlines()[0].encode(errors="surrogateescape")
        raise InputError(
            f"{label}:{line}: expected '>', found {str(start).removeprefix('b')}",
            hint="a FASTA record begins with a line such as '>contig1'",
        )


def _check_record(header: str, sequence: str, line: int, label: str) -> None:
    """Check a record's header and letters.

    Raises:
        InputError: the header is too long or has no valid id, or the record has a NUL byte.
    """
    if len(header) > MAX_HEADER:
        raise _endless_header(line, label)
    words = header.split(maxsplit=1)
    if not words:
        raise InputError(
            f"{label}:{line}: the header has no id", hint="write an id after the '>' or '@'"
        )
    if _NOT_UTF8.search(words[0]):
        raise InputError(
            f"{label}:{line}: the id {printable(words[0])} is not UTF-8",
            hint="convert the file, for example with `iconv -f LATIN1 -t UTF-8`",
        )
    if "\0" in header or "\0" in sequence:
        raise InputError(
            f"{label}:{line}: the record {printable(words[0])} has a NUL byte",
            hint="the file is damaged, or is not text",
        )


def _check_length(n_letters: int, header: str, line: int, label: str) -> None:
    if n_letters > MAX_LETTERS:
        name = printable(header[:_SHOWN])
        raise InputError(
            f"{label}:{line}: the record {name} has more than {MAX_LETTERS:,} letters",
            hint="cut it into several, for example with `seqkit sliding`",
        )


def _endless_header(line: int, label: str) -> InputError:
    return InputError(
        f"{label}:{line}: the header is longer than {MAX_HEADER:,} characters",
        hint="shorten it; if the file has lost its line ends, copy or download it again",
    )


def write_record(out: TextIO, header: str, sequence: str) -> None:
    """Write a record with 60 letters per line. Open ``out`` with ``surrogateescape``."""
    out.write(f">{header}\n")
    for start in range(0, len(sequence), _WRITTEN):
        end = min(start + _WRITTEN, len(sequence))
        lines = [sequence[i : i + _WIDTH] for i in range(start, end, _WIDTH)]
        out.write("\n".join([*lines, ""]))


def find_invalid(record: FastaRecord, input_type: InputType) -> str:
    """Return the reason why a record is invalid, or "" if it is valid."""
    if not record.sequence:
        return "the record is empty"
    if matches_type(record.sequence, input_type):
        return ""
    strange = set(record.sequence) - set(_sequence_letters(input_type).decode())
    first = min(strange, key=record.sequence.index)
    return f"{first!a} at position {record.sequence.index(first) + 1} is not a {input_type} letter"


def matches_type(letters: str, input_type: InputType) -> bool:
    """Return True if all letters are valid for this sequence type."""
    letters_of_type = _sequence_letters(input_type)
    return not any(
        letters[start : start + _BLOCK]
        .encode("ascii", "replace")
        .translate(None, delete=letters_of_type)  # "?" is allowed nowhere
        for start in range(0, len(letters), _BLOCK)
    )


def _sequence_letters(input_type: InputType) -> bytes:
    return _NUCLEOTIDES if input_type == "nucleotide" else _RESIDUES


def guess_input_type(path: Path, name: str = "") -> InputType | None:
    """Guess from the unmasked letters in the first records: nucleotides or proteins.

    Returns:
        The type, or None for a file without letters.

    Raises:
        InputError: the letters fit neither type, or the file mixes both.
    """
    samples = list(_first_letters(path, name))
    letters = "".join(sample for _, sample in samples).encode("ascii", "replace")
    plain, protein, masks = (
        len(letters) - len(letters.translate(None, counted))
        for counted in (_PLAIN_BASES, _ONLY_PROTEIN, _MASKS)
    )
    total = len(letters) - masks
    if not letters:
        return None
    if protein > 0.05 * total:
        stranger = next((name for name, sample in samples if _is_nucleotide(sample)), None)
        if stranger is not None:
            raise InputError(
                f"{name or printable(path)} holds proteins, but the record {printable(stranger)} "
                "holds nucleotides",
                hint=with_options(
                    "run them separately, or set the type of all records with {input_type}"
                ),
            )
        return "protein"
    if plain > 0.8 * total and protein < 0.01 * total:
        return "nucleotide"
    raise InputError(
        f"{name or printable(path)}: cannot tell nucleotides from proteins "
        f"({plain / max(1, total):.0%} ACGTUN, {protein / max(1, total):.1%} letters that only "
        "proteins have)",
        hint=with_options("set it with {input_type:nucleotide} or {input_type:protein}"),
    )


def _first_letters(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the ids of a file's first records, each with its first letters."""
    n_letters = 0
    for records in parse_block(read_blocks(path, name)):
        for record_id, sequence in zip(records.ids, records.sequences, strict=True):
            sample = sequence[:_SAMPLE]
            n_letters += len(sample)
            yield record_id, sample
            if n_letters >= _SAMPLE:
                return


def _is_nucleotide(sequence: str) -> bool:
    """Return True if a sequence has only the four bases, each of them often, unlike any protein."""
    counts = Counter(sequence.upper().replace("U", "T"))
    n_rarest = min(counts[base] for base in "ACGT")
    is_plain = counts.keys() <= set("ACGTNX")
    return is_plain and len(sequence) >= _MIN_TYPED_LETTERS and n_rarest >= 0.05 * len(sequence)
