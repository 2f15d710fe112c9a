"""Columns of frames in files: written as they grow, and mapped by every process that reads them.

A file is a plain array of numpy. What is sent to another process is its path, never its content,
so that all processes of a machine share one copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from virnucpro.ground.tree import Tree

Values = NDArray[Any]
Rows = NDArray[np.int64]


class Mapped:
    """An array in a file, of which memory holds what is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: Values = np.load(path, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path]]:
        return Mapped, (self.path,)

    def __getitem__(self, key: Any) -> Values:  # noqa: ANN401 - all that numpy takes
        return np.asarray(self._values[key])

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape


Column = Values | Mapped


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """Some rows of an array. They are read when they are asked for."""

    column: Column  # (n_all, width)
    rows: Rows  # (n,)

    @classmethod
    def of(cls, values: Values) -> ArrayRows:
        return cls(values, np.arange(len(values)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return int(self.column.shape[1])

    def __getitem__(self, rows: Rows | slice) -> Values:
        """(k,) -> (k, width)"""
        values: Values = self.column[self.rows[rows]]
        return values

    def blocks(self, n_rows: int = 8192) -> Iterator[Values]:
        """Blocks of rows, in order."""
        for first in range(0, len(self), n_rows):
            yield self[first : first + n_rows]

    def take(self, rows: Rows) -> ArrayRows:
        return ArrayRows(self.column, self.rows[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Texts(Sequence[str]):
    """Some of the words in a row of letters. They are read when they are asked for."""

    letters: Column  # uint8, UTF-8
    ends: Column  # (n_all + 1,): word i is ``letters[ends[i]:ends[i + 1]]``
    rows: Rows  # (n,)

    @classmethod
    def of(cls, words: Sequence[str]) -> Texts:
        encoded = [word.encode() for word in words]
        return cls(_letters(encoded), _ends(encoded), np.arange(len(words)))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        row = self.rows[place]
        begin, end = self.ends[row : row + 2]
        word: bytes = self.letters[begin:end].tobytes()
        return word.decode()

    @property
    def lengths(self) -> Rows:
        """The lengths of the words in bytes. (n,)"""
        lengths: Rows = self.ends[self.rows + 1] - self.ends[self.rows]
        return lengths

    def take(self, rows: Rows) -> Texts:
        return Texts(self.letters, self.ends, self.rows[rows])


def _letters(words: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(words), dtype=np.uint8)


def _ends(words: Sequence[bytes]) -> Rows:
    """The ends of the words among the letters of all, behind a 0. (n + 1,)"""
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


@contextmanager
def growing(path: Path, dtype: str, width: int | None = None) -> Iterator[Callable[[Values], None]]:
    """A function that adds rows to an array, which appears in ``path`` at the end of the block.

    A row is one value, or ``width`` of them.

    Raises:
        OutputError, StorageError: as ``files.writing``.
    """
    row_shape = () if width is None else (width,)
    n_rows = 0
    with Tree(path.parents[1]).replacing(path) as out:
        _write_header(out, dtype, (n_rows, *row_shape))

        def add(values: Values) -> None:
            nonlocal n_rows
            assert values.shape[1:] == row_shape
            out.write(np.ascontiguousarray(values, dtype=dtype).tobytes())
            n_rows += len(values)

        yield add
        out.seek(0)
        _write_header(out, dtype, (n_rows, *row_shape))


@contextmanager
def growing_texts(letters_file: Path, ends_file: Path) -> Iterator[Callable[[Sequence[str]], None]]:
    """A function that adds words to what ``Texts`` reads, as ``growing`` adds rows."""
    n_letters = 0
    with growing(letters_file, "|u1") as add_letters, growing(ends_file, "<i8") as add_ends:
        add_ends(np.zeros(1, dtype=np.int64))

        def add(words: Sequence[str]) -> None:
            nonlocal n_letters
            encoded = [word.encode() for word in words]
            letters, ends = _letters(encoded), _ends(encoded)
            add_letters(letters)
            add_ends(n_letters + ends[1:])
            n_letters += len(letters)

        yield add


def _write_header(out: BinaryIO, dtype: str, shape: tuple[int, ...]) -> None:
    """Write numpy's header, which leaves room for any number of rows."""
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(out, facts)
