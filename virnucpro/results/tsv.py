"""Write rows as text to files that appear when they are complete, and sort lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from gzip import GzipFile
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import storage_errors
from virnucpro.core.native import call
from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.core.safe_dir import SafeDir
from virnucpro.results.names import tsv_field

_BYTES_IN_MEMORY = 2**24  # bytes of lines to be sorted
_BLOCK = 2**18  # bytes merged at once from a run of sorted lines


@contextmanager
def open_table(
    tree: SafeDir, path: Path, columns: Sequence[str] = (), *, is_packed: bool = False
) -> Iterator[Callable[[], BinaryIO]]:
    """Yield a function that opens a text file at its first call.

    The file appears when it is complete. If it was not opened, an old file is deleted. A gzip
    header contains no name or time, so that equal tables have equal bytes.
    """
    with ExitStack() as stack:

        @cache
        def open_once() -> BinaryIO:
            out = stack.enter_context(tree.atomic_write(path))
            if is_packed:
                packed = stack.enter_context(GzipFile("", "wb", 4, out, mtime=0))
                out = cast("BinaryIO", packed)
            if columns:
                out.write("\t".join(columns).encode() + b"\n")
            return out

        yield open_once
    if not open_once.cache_info().currsize:
        tree.delete(path)


class SortedLines:
    """Merges sorted texts into one. Each has complete lines, ordered by the first column.

    Only some texts are in memory. Texts that do not overlap are passed on unchanged. Internally, a
    NUL replaces each tab: no text has a NUL, and it sorts before any letter of a name, so that
    lines sort by name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # on a disk with enough space
        self._tree = SafeDir(folder.parent)
        self._texts: list[bytes] = []  # texts in memory
        self._n_bytes = 0  # size of these texts
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self._runs: list[tuple[int, int]] = []  # first byte in the file, one after the last

    def __enter__(self) -> SortedLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, text: bytes | memoryview) -> None:
        """Add lines in ``sorted_lines`` order."""
        if text:
            self._texts.append(bytes(text).replace(b"\t", b"\0"))
            self._n_bytes += len(text)
        if self._n_bytes >= _BYTES_IN_MEMORY:
            self._write()

    def _write(self) -> None:
        if self._file is None:
            self._file = self._open.enter_context(self._tree.scratch_file(self._folder))
        first = self._file.tell()
        with storage_errors(self._folder):
            self._file.writelines(_merge_blocks([iter([text]) for text in self._texts]))
            self._file.flush()
        self._runs.append((first, self._file.tell()))
        self._texts = []
        self._n_bytes = 0

    def merged(self) -> Iterator[bytes]:
        """Yield all lines, in pieces."""
        runs = [self._read(*run) for run in self._runs]
        runs += [iter([text]) for text in self._texts]
        for text in _merge_blocks(runs):
            yield text.replace(b"\0", b"\t")

    def _read(self, first: int, end: int) -> Iterator[bytes]:
        """Yield file pieces with complete lines."""
        assert self._file is not None, "it has a run"
        size = _BLOCK
        while first < end:
            block = os.pread(self._file.fileno(), min(size, end - first), first)
            if n_bytes := block.rfind(b"\n") + 1:
                yield block[:n_bytes]
            size = _BLOCK if n_bytes else 2 * size  # the line is longer than the block
            first += n_bytes


def sorted_lines(text: bytes) -> bytes:
    """Sort a text's lines by their first column."""
    return _sorted_blocks(text.replace(b"\t", b"\0")).replace(b"\0", b"\t")


def _sorted_blocks(text: bytes) -> bytes:
    lines = text.split(b"\n")[:-1]
    lines.sort()  # fast, because the lines are mostly sorted runs
    return b"\n".join((*lines, b""))


def _merge_blocks(runs: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    """Merge sorted runs, which come in pieces with complete lines, into sorted pieces.

    Each output piece has all lines up to the first end of the overlapping pieces, so pieces without
    overlap are passed on unchanged.
    """
    heads: list[tuple[bytes, int, bytes, int]] = []  # next line, its run, its piece and offset

    def push(number: int, piece: bytes, offset: int) -> None:
        if offset == len(piece):
            piece = next(runs[number], b"")
            offset = 0
        if piece:
            line = piece[offset : piece.index(b"\n", offset) + 1]
            heappush(heads, (line, number, piece, offset))

    for number in range(len(runs)):
        push(number, b"", 0)
    while heads:
        popped = [heappop(heads)]
        last = _last_line(popped[0][2])
        while heads and heads[0][0] <= last:
            popped.append(heappop(heads))
            last = min(last, _last_line(popped[-1][2]))
        ends = [_find_end(piece, offset, last) for _, _, piece, offset in popped]
        texts = [piece[offset:end] for (_, _, piece, offset), end in zip(popped, ends, strict=True)]
        yield texts[0] if len(texts) == 1 else _sorted_blocks(b"".join(texts))
        for (_, number, piece, _), end in zip(popped, ends, strict=True):
            push(number, piece, end)


def _last_line(text: bytes) -> bytes:
    return text[text.rfind(b"\n", 0, -1) + 1 :]


def _find_end(text: bytes, offset: int, last: bytes) -> int:
    """Return the sorted lines' end, from an offset on, that are at most ``last``."""
    end = len(text)
    while offset < end:
        start = text.rfind(b"\n", offset, (offset + end) // 2) + 1 or offset
        line = text[start : text.index(b"\n", start) + 1]
        if line <= last:
            offset = start + len(line)
        else:
            end = start
    return offset


# Rows

EMPTY = np.iinfo(np.int64).min  # written as an empty field
# Column kinds. A positive kind counts decimals.
_LETTERS = -2
_TEXTS = -1
_WHOLE = 0
_WIDTH = 60  # letters per line
_LARGEST = 1e9  # upper bound for numbers with decimals


class Column(NamedTuple):
    """A column's fields, as the library reads them."""

    n_rows: int
    kind: int
    content: NDArray[Any]
    n_bytes: int  # maximum size of its text


def texts(values: Sequence[str]) -> Column:
    """Make a text column, written unchanged."""
    content = np.frombuffer(encode_texts("\0".join((*values, ""))), np.uint8)
    return Column(len(values), _TEXTS, content, len(content))


def quoted_texts(values: Sequence[str]) -> Column:
    """Make a text column as table fields, quoted where necessary."""
    return texts(values if '"' not in "".join(values) else list(map(tsv_field, values)))


def _letters(sequences: Sequence[str]) -> Column:
    """Make a sequence column, with a line end before every 60 letters."""
    n_rows, _, content, n_bytes = texts(sequences)
    return Column(n_rows, _LETTERS, content, n_bytes + n_bytes // _WIDTH + n_rows)


def format_integers(values: Sequence[int] | IntArray) -> Column:
    """Make an integer column. ``EMPTY`` gives an empty field."""
    content = np.array(values, dtype=np.int64)
    return Column(len(values), _WHOLE, content, 20 * len(values))


def format_decimals(values: Sequence[float | None] | FloatArray, n_decimals: int) -> Column:
    """Make a number column below 1e9, rounded to decimals as in Python. NaN, None: empty."""
    content = np.array(values, dtype=np.float64)
    assert not (np.abs(content) >= _LARGEST).any(), "its digits would not be exact"
    return Column(len(values), n_decimals, content, (12 + n_decimals) * len(values))


def format_rows(*columns: Column) -> bytes:
    """Format a line per row, with tabs between the fields."""
    return _format_row_bytes(columns, ("", *("\t",) * (len(columns) - 1))).tobytes()


def _format_row_bytes(columns: Sequence[Column], before: Sequence[str]) -> NDArray[np.uint8]:
    """Format a line per row. ``before`` is the text before each column's fields."""
    [n_rows] = {column.n_rows for column in columns}
    for column in columns:
        is_text = column.kind in (_TEXTS, _LETTERS)
        assert not is_text or np.count_nonzero(column.content == 0) == n_rows, "no text has a NUL"
    between = np.frombuffer(encode_texts("\0".join((*before, ""))), np.uint8)
    n_bytes = sum(column.n_bytes for column in columns) + n_rows * len(between)
    out = np.empty(n_bytes, dtype=np.uint8)
    n_written = np.empty(1, dtype=np.int64)
    addresses = np.array([column.content.ctypes.data for column in columns], dtype=np.uintp)
    kinds = np.array([column.kind for column in columns], dtype=np.int64)
    call("write_rows", n_rows, len(columns), kinds, addresses, between, out, n_written)
    return out[: n_written[0]]


def encode_texts(text: str) -> bytes:
    """Encode a text. Headers may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def decimal_texts(values: Sequence[float | None] | FloatArray, n_decimals: int) -> list[str]:
    """Return each number as text, empty for NaN and None."""
    return format_rows(format_decimals(values, n_decimals)).decode("ascii").split("\n")[:-1]


def format_fasta(headers: Sequence[str], sequences: Sequence[str]) -> bytes:
    """FASTA records with 60 letters per line."""
    return _fasta(headers, sequences).tobytes()


def _fasta(headers: Sequence[str], sequences: Sequence[str]) -> NDArray[np.uint8]:
    """Run ``format_fasta``, and release intermediate arrays here: a record may be very long."""
    return _format_row_bytes((texts(headers), _letters(sequences)), (">", ""))
