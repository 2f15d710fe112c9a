"""Read tables back as row blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.option_text import with_options
from virnucpro.results.names import read_tsv_field

NO_OLD_NAMES: Mapping[str, str] = MappingProxyType({})
_Rows: TypeAlias = IntArray | list[int] | slice


@dataclass(frozen=True, eq=False)
class TableBlock:
    """Neighbouring table rows, as bytes. A missing column reads as empty."""

    data: bytes  # complete lines
    names: Sequence[str]  # column names
    ends: IntArray  # (n_rows, n_columns) field ends

    @classmethod
    def from_bytes(cls, data: bytes, header: str) -> TableBlock:
        """Split lines into fields.

        Args:
            header: column names, with the line end.

        Raises:
            ValueError: a line does not have one value per column.
        """
        names = header.rstrip("\n").split("\t")
        data = data if data.endswith(b"\n") else data + b"\n"
        n_lines = data.count(b"\n")
        n_read = np.empty(1, dtype=np.int64)
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
        """The bytes as ASCII text, or None if they are not ASCII."""
        return self.data.decode("ascii") if self.data.isascii() else None

    @cached_property
    def _has_quotes(self) -> bool:
        return b'"' in self.data

    def _bounds(self, name: str) -> tuple[IntArray, IntArray]:
        """Return field starts and ends in a column. (n_rows,) each"""
        if name not in self.names:
            nowhere = np.zeros(len(self), dtype=np.int64)
            return nowhere, nowhere
        column = self.names.index(name)
        before = self.ends[:, column - 1] if column else np.append(-1, self.ends[:-1, -1])
        return before + 1, np.ascontiguousarray(self.ends[:, column])

    def columns(self, names: Iterable[str], rows: _Rows = slice(None)) -> list[list[str]]:
        """Return fields from some columns, in some rows."""
        return [self.texts(name, rows) for name in names]

    def texts(self, name: str, rows: _Rows = slice(None)) -> list[str]:
        """Return fields from a column, in some rows."""
        selected = np.array(rows, np.int64) if isinstance(rows, list) else rows
        starts, ends = self._bounds(name)
        pairs = zip(starts[selected].tolist(), ends[selected].tolist(), strict=True)
        if self._text is not None:
            text = self._text
            values = [text[start:end] for start, end in pairs]
        else:
            data = self.data
            values = [data[start:end].decode("utf-8", "surrogateescape") for start, end in pairs]
        return list(map(read_tsv_field, values)) if self._has_quotes else values

    def codes(self, name: str) -> tuple[list[str], IntArray]:
        """Return a column's distinct fields, and each row's field index."""
        starts, ends = self._bounds(name)
        is_new = np.empty(len(self), dtype=np.bool_)
        call("find_changes", self._letters, starts, ends, len(self), is_new.view(np.uint8))
        firsts = np.flatnonzero(is_new)
        texts = self.texts(name, firsts)
        index_by_text = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        run_codes = np.array([index_by_text[text] for text in texts], dtype=np.int64)
        return list(index_by_text), np.repeat(run_codes, np.diff(firsts, append=len(self)))

    def has_columns(self, name: str, text: bytes) -> BoolArray:
        """Return whether each field in a column is this text. (n_rows,)"""
        starts, ends = self._bounds(name)
        rows = np.flatnonzero(ends - starts == len(text))
        for offset, letter in enumerate(text):
            rows = rows[self._letters[starts[rows] + offset] == letter]
        mask = np.zeros(len(self), dtype=np.bool_)
        mask[rows] = True
        return mask

    def numbers(self, name: str) -> FloatArray:
        """Return the numbers in a column, without exponents. NaN for an empty field. (n_rows,)

        Raises:
            ValueError: a field is not such a number.
        """
        starts, ends = self._bounds(name)
        values = np.empty(len(self))
        n_read = np.empty(1, dtype=np.int64)
        call("read_numbers", self._letters, starts, ends, len(self), values, n_read)
        if n_read[0] < len(self):
            raise ValueError(f"{name} {self.texts(name, n_read)[0]} is not a number")
        return values

    def integers(self, name: str) -> IntArray:
        """Return the non-negative integers in a column. (n_rows,)

        Raises:
            ValueError: a field is not such a number.
        """
        values = self.numbers(name)
        if not (np.array_equal(values, np.floor(values)) and (values >= 0).all()):
            raise ValueError(f"{name} has a value that is not a whole number")
        return values.astype(np.int64)


@dataclass(frozen=True, slots=True)
class TableSpan:
    """Neighbouring lines in a VirNucPro table, as a byte range."""

    path: Path
    header: str  # the first line of the table, with present column names
    start: int
    end: int

    def read(self) -> TableBlock:
        """Read the lines.

        Raises:
            ValueError: a line does not have one value per column.
            OSError: the table cannot be read.
        """
        with self.path.open("rb") as lines:
            lines.seek(self.start)
            data = lines.read(self.end - self.start)
        return TableBlock.from_bytes(data, self.header)


def split_table(path: Path, old_names: Mapping[str, str] = NO_OLD_NAMES) -> Iterator[TableSpan]:
    """Split a VirNucPro table into line spans. A missing table has no spans.

    Args:
        old_names: earlier name of a column -> its present name, which the spans have.

    Raises:
        OSError: the table cannot be read.
    """
    bytes_at_once = 2**22  # table bytes read at once
    if not path.is_file():
        return
    with path.open("rb") as lines:
        names = lines.readline().decode("utf-8", "surrogateescape").rstrip("\n").split("\t")
        header = "\t".join(old_names.get(name, name) for name in names) + "\n"
        end = lines.tell()
        size = os.fstat(lines.fileno()).st_size
        while end < size:
            start = end
            lines.seek(start + bytes_at_once)
            lines.readline()
            end = min(lines.tell(), size)
            yield TableSpan(path, header, start, end)


@contextmanager
def open_table_reader(table: Path, *more_errors: type[Exception]) -> Iterator[None]:
    """Report errors in table content as ``InputError``.

    Args:
        more_errors: errors to convert in addition to ValueError.
    """
    errors: tuple[type[Exception], ...] = (ValueError, *more_errors)
    try:
        yield
    except errors as error:
        raise InputError(
            f"{printable(table)} is damaged: {printable(error)}",
            hint=with_options(
                "run the command of the run again with {resume}: it rewrites the tables"
            ),
        ) from error
