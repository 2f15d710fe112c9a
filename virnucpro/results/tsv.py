"""Write rows as text to files that appear when whole, sort lines, and read tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from gzip import GzipFile
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import writing
from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import DECIMALS, Counts, Mask, Values
from virnucpro.core.safe_dir import Tree
from virnucpro.viral.types import Calls, FrameScores

_BYTES_AT_ONCE = 2**22  # bytes of a table read at once
_Rows: TypeAlias = Counts | list[int] | slice
_BYTES_IN_MEMORY = 2**24  # bytes of lines to be sorted
_BLOCK = 2**18  # bytes of a run of sorted lines merged at once


@contextmanager
def table(
    tree: Tree, path: Path, columns: Sequence[str] = (), *, is_packed: bool = False
) -> Iterator[Callable[[], BinaryIO]]:
    """Yield a function that opens a text file at its first call. The file appears when it is whole.

    If it was not opened, an old file is deleted. A gzip header has no name or time, so that equal
    tables have equal bytes.
    """
    with ExitStack() as stack:

        @cache
        def open_once() -> BinaryIO:
            out = stack.enter_context(tree.replacing(path))
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
    """Merge sorted texts into one; each has whole lines, ordered by the first column.

    Memory holds only a part of the texts. Texts that do not overlap are passed on whole.
    Internally, a NUL replaces each tab: no text has a NUL, and it sorts before any letter of a
    name, so that lines sort by name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # on a disk with enough space
        self._tree = Tree(folder.parent)
        self._texts: list[bytes] = []  # in memory
        self._n_bytes = 0  # size of these texts
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self._runs: list[tuple[int, int]] = []  # first byte in the file, one after the last

    def __enter__(self) -> SortedLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, text: bytes | memoryview) -> None:
        """Add lines in the order of ``sorted_lines``."""
        if text:
            self._texts.append(bytes(text).replace(b"\t", b"\0"))
            self._n_bytes += len(text)
        if self._n_bytes >= _BYTES_IN_MEMORY:
            self._write()

    def _write(self) -> None:
        if self._file is None:
            self._file = self._open.enter_context(self._tree.scratch(self._folder))
        first = self._file.tell()
        with writing(self._folder):
            self._file.writelines(_merged([iter([text]) for text in self._texts]))
            self._file.flush()
        self._runs.append((first, self._file.tell()))
        self._texts, self._n_bytes = [], 0

    def merged(self) -> Iterator[bytes]:
        """The text of all lines, in pieces."""
        runs = [*(self._read(*run) for run in self._runs), *(iter([one]) for one in self._texts)]
        for text in _merged(runs):
            yield text.replace(b"\0", b"\t")

    def _read(self, first: int, end: int) -> Iterator[bytes]:
        """Yield pieces of the file, which are whole lines."""
        assert self._file is not None, "it has a run"
        size = _BLOCK
        while first < end:
            block = os.pread(self._file.fileno(), min(size, end - first), first)
            if n_bytes := block.rfind(b"\n") + 1:
                yield block[:n_bytes]
            size = _BLOCK if n_bytes else 2 * size  # the line is longer than the block
            first += n_bytes


def sorted_lines(text: bytes) -> bytes:
    """The lines of a text in the order of their first columns."""
    return _in_order(text.replace(b"\t", b"\0")).replace(b"\0", b"\t")


def _in_order(text: bytes) -> bytes:
    lines = text.split(b"\n")[:-1]
    lines.sort()  # fast, because the lines are mostly sorted runs
    return b"\n".join((*lines, b""))


def _merged(runs: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    """Merge sorted runs, which come in pieces of whole lines, into sorted pieces.

    Each output piece has all lines up to the first end of the overlapping pieces, so pieces
    without overlap are passed on unchanged.
    """
    heads: list[tuple[bytes, int, bytes, int]] = []  # next line, its run, its piece and offset

    def push(number: int, piece: bytes, place: int) -> None:
        if place == len(piece):
            piece, place = next(runs[number], b""), 0
        if piece:
            line = piece[place : piece.index(b"\n", place) + 1]
            heappush(heads, (line, number, piece, place))

    for number in range(len(runs)):
        push(number, b"", 0)
    while heads:
        taken = [heappop(heads)]
        last = _last_line(taken[0][2])
        while heads and heads[0][0] <= last:
            taken.append(heappop(heads))
            last = min(last, _last_line(taken[-1][2]))
        ends = [_end_of(piece, place, last) for _, _, piece, place in taken]
        texts = [one[2][one[3] : end] for one, end in zip(taken, ends, strict=True)]
        yield texts[0] if len(texts) == 1 else _in_order(b"".join(texts))
        for (_, number, piece, _), end in zip(taken, ends, strict=True):
            push(number, piece, end)


def _last_line(text: bytes) -> bytes:
    return text[text.rfind(b"\n", 0, -1) + 1 :]


def _end_of(text: bytes, place: int, last: bytes) -> int:
    """The end of the sorted lines, from an offset on, that are at most ``last``."""
    end = len(text)
    while place < end:
        start = text.rfind(b"\n", place, (place + end) // 2) + 1 or place
        line = text[start : text.index(b"\n", start) + 1]
        if line <= last:
            place = start + len(line)
        else:
            end = start
    return place


# Rows

EMPTY = np.iinfo(np.int64).min  # written as an empty field
_LETTERS, _TEXTS, _WHOLE = -2, -1, 0  # kinds of columns; a positive kind counts decimals
_WIDTH = 60  # letters per line
_LARGEST = 1e9  # upper bound of numbers with decimals


class _Column(NamedTuple):
    """The fields of a column, as the library reads them."""

    n_rows: int
    kind: int
    content: NDArray[Any]
    n_bytes: int  # the largest size of its text


def texts(values: Sequence[str]) -> _Column:
    """A column of texts, written unchanged."""
    content = np.frombuffer(encoded("\0".join((*values, ""))), np.uint8)
    return _Column(len(values), _TEXTS, content, len(content))


def _letters(sequences: Sequence[str]) -> _Column:
    """A column of sequences, with a line end before every 60 letters."""
    n_rows, _, content, n_bytes = texts(sequences)
    return _Column(n_rows, _LETTERS, content, n_bytes + n_bytes // _WIDTH + n_rows)


def whole(values: Sequence[int] | Counts) -> _Column:
    """A column of whole numbers; ``EMPTY`` gives an empty field."""
    content = np.array(values, dtype=np.int64)
    return _Column(len(values), _WHOLE, content, 20 * len(values))


def decimals(values: Sequence[float | None] | Values, n_decimals: int) -> _Column:
    """A column of numbers below 1e9, rounded to decimals as in Python; NaN and None are empty."""
    content = np.array(values, dtype=np.float64)
    assert not (np.abs(content) >= _LARGEST).any(), "its digits would not be exact"
    return _Column(len(values), n_decimals, content, (12 + n_decimals) * len(values))


def rows_of(*columns: _Column) -> bytes:
    """A line per row, with tabs between the fields."""
    return _rows_of(columns, ("", *("\t",) * (len(columns) - 1))).tobytes()


def _rows_of(columns: Sequence[_Column], before: Sequence[str]) -> NDArray[np.uint8]:
    """A line per row; ``before`` has the text before the fields of each column."""
    [n_rows] = {column.n_rows for column in columns}
    for column in columns:
        is_text = column.kind in (_TEXTS, _LETTERS)
        assert not is_text or np.count_nonzero(column.content == 0) == n_rows, "no text has a NUL"
    between = np.frombuffer(encoded("\0".join((*before, ""))), np.uint8)
    n_bytes = sum(column.n_bytes for column in columns) + n_rows * len(between)
    out, n_written = np.empty(n_bytes, dtype=np.uint8), np.empty(1, dtype=np.int64)
    addresses = np.array([column.content.ctypes.data for column in columns], dtype=np.uintp)
    kinds = np.array([column.kind for column in columns], dtype=np.int64)
    call("write_rows", n_rows, len(columns), kinds, addresses, between, out, n_written)
    return out[: n_written[0]]


def encoded(text: str) -> bytes:
    """The bytes of a text. Headers may have bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def decimal_texts(values: Sequence[float | None] | Values, n_decimals: int) -> list[str]:
    """The text of each number; empty for NaN and None."""
    return rows_of(decimals(values, n_decimals)).decode("ascii").split("\n")[:-1]


def fasta(headers: Sequence[str], sequences: Sequence[str]) -> bytes:
    """FASTA records with 60 letters per line."""
    return _fasta(headers, sequences).tobytes()


def _fasta(headers: Sequence[str], sequences: Sequence[str]) -> NDArray[np.uint8]:
    """``fasta``, which releases its intermediate arrays here: a record may be very long."""
    return _rows_of((texts(headers), _letters(sequences)), (">", ""))


def call_words(calls: Calls, place: int) -> tuple[str, str]:
    """The label and the score of a call; both are empty without a score."""
    score = calls.virus_scores[place]
    if score is None:
        return "", ""
    return "virus" if calls.are_viruses[place] else "other", f"{score:.6f}"


def record_rows(calls: Calls) -> bytes:
    """A row for each call."""
    pairs = zip(calls.virus_scores, calls.are_viruses, strict=True)
    labels = [
        "virus" if is_virus else "other" if score is not None else "" for score, is_virus in pairs
    ]
    scores = decimals(calls.virus_scores, DECIMALS)
    is_same = calls.base_scores is calls.virus_scores
    return rows_of(
        *(texts(calls.record_ids), texts(calls.samples), whole(calls.lengths)),
        *(texts(calls.statuses), texts(labels), scores, decimals(calls.rates, 4)),
        *map(whole, (calls.n_chunks, calls.n_chunks_scored, calls.n_frames_scored)),
        *(scores if is_same else decimals(calls.base_scores, DECIMALS), texts(calls.notes)),
    )


def frame_rows(frames: FrameScores) -> bytes:
    """A row per scored frame; a tie counts as "others"."""
    scores = np.array(frames.scores, dtype=np.float64)
    others = _of_others(scores)
    labels = ["virus" if is_virus else "others" for is_virus in (scores > others).tolist()]
    of_both = decimals(others, DECIMALS), decimals(scores, DECIMALS)
    return rows_of(texts(frames.ids), texts(labels), *of_both)


def _of_others(scores: Values) -> Values:
    """The scores of "others", with six decimals."""
    return np.asarray(np.rint((1 - scores) * 10**DECIMALS) / 10**DECIMALS)


def chunk_rows(frames: FrameScores) -> bytes:
    """A row per chunk with a scored frame; frames of one chunk are neighbours.

    A chunk is a virus by VirNucPro's rule: its best virus score is at least its best score of
    "others".
    """
    if not frames.ids:
        return b""
    chunks = np.array(frames.chunk_ids, dtype=object)
    firsts = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]]))
    scores = np.array(frames.scores, dtype=np.float64)
    best, least = np.maximum.reduceat(scores, firsts), np.minimum.reduceat(scores, firsts)
    are_viruses = (best >= _of_others(least)).tolist()
    return rows_of(texts(chunks[firsts].tolist()), texts(list(map(str, are_viruses))))


# Tables are read again as blocks of rows


@dataclass(frozen=True, eq=False)
class TableBlock:
    """Neighbouring rows of a table, as bytes; a missing column reads as empty."""

    data: bytes  # whole lines
    names: Sequence[str]  # of the columns
    ends: Counts  # (n_rows, n_columns) of the fields

    @classmethod
    def of(cls, data: bytes, header: str) -> TableBlock:
        """Split lines into fields; ``header`` has the names of the columns and its line end.

        Raises:
            ValueError: a line does not have one value per column.
        """
        names = header.rstrip("\n").split("\t")
        data = data if data.endswith(b"\n") else data + b"\n"
        n_lines, n_read = data.count(b"\n"), np.empty(1, dtype=np.int64)
        ends = np.empty((n_lines, len(names)), dtype=np.int64)
        call("split_fields", np.frombuffer(data, np.uint8), len(data), len(names), ends, n_read)
        if n_read[0] < n_lines:
            raise ValueError("a line has too few values")
        return cls(data, names, ends)

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def _letters(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.data, np.uint8)

    @cached_property
    def _text(self) -> str | None:
        """The bytes as ASCII text; None if they are not ASCII."""
        return self.data.decode("ascii") if self.data.isascii() else None

    def _bounds(self, name: str) -> tuple[Counts, Counts]:
        """The starts and the ends of the fields of a column. (n_rows,) each"""
        if name not in self.names:
            nowhere = np.zeros(len(self), dtype=np.int64)
            return nowhere, nowhere
        place = self.names.index(name)
        before = self.ends[:, place - 1] if place else np.append(-1, self.ends[:-1, -1])
        return before + 1, np.ascontiguousarray(self.ends[:, place])

    def columns(self, names: Iterable[str], rows: _Rows = slice(None)) -> list[list[str]]:
        """The fields of some columns, in some rows."""
        return [self.texts(name, rows) for name in names]

    def texts(self, name: str, rows: _Rows = slice(None)) -> list[str]:
        """The fields of a column, in some rows."""
        some = np.array(rows, np.int64) if isinstance(rows, list) else rows
        starts, ends = (each[some].tolist() for each in self._bounds(name))
        pairs = zip(starts, ends, strict=True)
        if self._text is not None:
            text = self._text
            return [text[start:end] for start, end in pairs]
        return [self.data[start:end].decode("utf-8", "surrogateescape") for start, end in pairs]

    def codes(self, name: str) -> tuple[list[str], Counts]:
        """The distinct fields of a column, and for each row the index of its field."""
        starts, ends = self._bounds(name)
        is_new = np.empty(len(self), dtype=np.bool_)
        call("find_changes", self._letters, starts, ends, len(self), is_new.view(np.uint8))
        firsts = np.flatnonzero(is_new)
        texts = self.texts(name, firsts)
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        of_runs = np.array([places[text] for text in texts], dtype=np.int64)
        return list(places), np.repeat(of_runs, np.diff(firsts, append=len(self)))

    def have(self, name: str, text: bytes) -> Mask:
        """Whether each field of a column is this text. (n_rows,)"""
        starts, ends = self._bounds(name)
        rows = np.flatnonzero(ends - starts == len(text))
        for place, letter in enumerate(text):
            rows = rows[self._letters[starts[rows] + place] == letter]
        mask = np.zeros(len(self), dtype=np.bool_)
        mask[rows] = True
        return mask

    def numbers(self, name: str) -> Values:
        """The numbers of a column, without exponents; NaN for an empty field. (n_rows,)

        Raises:
            ValueError: a field is not such a number.
        """
        starts, ends = self._bounds(name)
        values, n_read = np.empty(len(self)), np.empty(1, dtype=np.int64)
        call("read_numbers", self._letters, starts, ends, len(self), values, n_read)
        if n_read[0] < len(self):
            raise ValueError(f"{name} {self.texts(name, n_read)[0]} is not a number")
        return values

    def whole_numbers(self, name: str) -> Counts:
        """The whole numbers of a column, from 0 on. (n_rows,)

        Raises:
            ValueError: a field is not such a number.
        """
        values = self.numbers(name)
        if not (np.array_equal(values, np.floor(values)) and (values >= 0).all()):
            raise ValueError(f"{name} has a value that is not a whole number")
        return values.astype(np.int64)


@dataclass(frozen=True, slots=True)
class TableSpan:
    """Neighbouring lines of a VirNucPro table, as a range of bytes."""

    path: Path
    header: str  # the first line of the table
    start: int
    end: int

    def read(self) -> TableBlock:
        """
        Raises:
            ValueError: a line does not have one value per column.
            OSError: it cannot be read.
        """
        with self.path.open("rb") as lines:
            lines.seek(self.start)
            data = lines.read(self.end - self.start)
        return TableBlock.of(data, self.header)


def spans_of(path: Path) -> Iterator[TableSpan]:
    """Split a VirNucPro table into spans of lines; none if the file does not exist.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        header = lines.readline().decode("utf-8", "surrogateescape")
        end, size = lines.tell(), os.fstat(lines.fileno()).st_size
        while end < size:
            start = end
            lines.seek(start + _BYTES_AT_ONCE)
            lines.readline()
            end = min(lines.tell(), size)
            yield TableSpan(path, header, start, end)


@contextmanager
def reading(table: Path, *others: type[Exception]) -> Iterator[None]:
    """Read a table: an error of its content is an ``InputError``.

    These are ValueError and the ``others``.
    """
    errors: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except errors as error:
        raise InputError(
            f"{printable(table)} is damaged: {printable(error)}",
            hint="run the command of the run again with --resume: it writes the tables anew",
        ) from error
