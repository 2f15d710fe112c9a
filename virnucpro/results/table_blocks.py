"""Read tables again as blocks of rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.option_text import with_options
from virnucpro.results.names import read_tsv_field

_BYTES_AT_ONCE = 2**22  # bytes of a table read at once
_Rows: TypeAlias = IntArray | list[int] | slice


@dataclass(frozen=True, eq=False)
class TableBlock:
    """Neighbouring rows of a table, as bytes; a missing column reads as empty."""

    data: bytes  # whole lines
    names: Sequence[str]  # of the columns
    ends: IntArray  # (n_rows, n_columns) of the fields

    @classmethod
    def from_bytes(cls, data: bytes, header: str) -> TableBlock:
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

    @cached_property
    def _has_quotes(self) -> bool:
        return b'"' in self.data

    def _bounds(self, name: str) -> tuple[IntArray, IntArray]:
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
            values = [text[start:end] for start, end in pairs]
        else:
            data = self.data
            values = [data[start:end].decode("utf-8", "surrogateescape") for start, end in pairs]
        return list(map(read_tsv_field, values)) if self._has_quotes else values

    def codes(self, name: str) -> tuple[list[str], IntArray]:
        """The distinct fields of a column, and for each row the index of its field."""
        starts, ends = self._bounds(name)
        is_new = np.empty(len(self), dtype=np.bool_)
        call("find_changes", self._letters, starts, ends, len(self), is_new.view(np.uint8))
        firsts = np.flatnonzero(is_new)
        texts = self.texts(name, firsts)
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        of_runs = np.array([places[text] for text in texts], dtype=np.int64)
        return list(places), np.repeat(of_runs, np.diff(firsts, append=len(self)))

    def has_columns(self, name: str, text: bytes) -> BoolArray:
        """Whether each field of a column is this text. (n_rows,)"""
        starts, ends = self._bounds(name)
        rows = np.flatnonzero(ends - starts == len(text))
        for place, letter in enumerate(text):
            rows = rows[self._letters[starts[rows] + place] == letter]
        mask = np.zeros(len(self), dtype=np.bool_)
        mask[rows] = True
        return mask

    def numbers(self, name: str) -> FloatArray:
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

    def integers(self, name: str) -> IntArray:
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
        return TableBlock.from_bytes(data, self.header)


def split_table(path: Path) -> Iterator[TableSpan]:
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
def open_table_reader(table: Path, *others: type[Exception]) -> Iterator[None]:
    """Read a table: an error of its content is an ``InputError``.

    These are ValueError and the ``others``.
    """
    errors: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except errors as error:
        raise InputError(
            f"{printable(table)} is damaged: {printable(error)}",
            hint=with_options(
                "run the command of the run again with {resume}: it writes the tables anew"
            ),
        ) from error
