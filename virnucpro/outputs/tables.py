"""Text files that appear when they are whole, and lines that are sorted on their way into one."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from gzip import GzipFile
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from virnucpro.files import atomic, open_named, open_table, writing

TableKind = Callable[[Path, Sequence[str]], AbstractContextManager[TextIO]]
_LINES_IN_MEMORY = 500_000
_FILES_AT_ONCE = 100  # that are open while lines are sorted


@contextmanager
def table(path: Path, columns: Sequence[str] = ()) -> Iterator[TextIO]:
    """A text file that appears when it is whole; headers may hold what is not UTF-8."""
    with atomic(path) as temporary, open_table(temporary) as out:
        if columns:
            out.write("\t".join(columns) + "\n")
        yield out


@contextmanager
def packed_table(path: Path, columns: Sequence[str] = ()) -> Iterator[TextIO]:
    """The same, packed by gzip, without a name and a time: equal tables have equal bytes."""
    with (
        atomic(path) as temporary,
        closing(open_named(temporary)) as handle,
        GzipFile("", "wb", 6, handle, mtime=0) as packed,
        TextIOWrapper(packed, "utf-8", "surrogateescape", newline="\n") as out,
    ):
        if columns:
            out.write("\t".join(columns) + "\n")
        yield out


@contextmanager
def optional_table(
    path: Path, columns: Sequence[str] = (), kind: TableKind = table
) -> Iterator[Callable[[], TextIO]]:
    """A table that is made at its first use; without one, an old table is deleted."""
    tables: list[TextIO] = []
    with ExitStack() as stack:

        def open_once() -> TextIO:
            if not tables:
                tables.append(stack.enter_context(kind(path, columns)))
            return tables[0]

        yield open_once
    if not tables:
        path.unlink(missing_ok=True)


class SortedLines:
    """Lines in any order in, sorted by their first column out; memory holds a part of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # on a disk that is large enough
        self._lines: list[str] = []
        self._runs = ExitStack()
        self._files: list[TextIO] = []

    def __enter__(self) -> SortedLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.close()

    def extend(self, lines: Iterable[str]) -> None:
        self._lines.extend(lines)
        if len(self._lines) >= _LINES_IN_MEMORY:
            self._write(sorted(self._lines, key=_first_column))
            self._lines = []
        if len(self._files) >= _FILES_AT_ONCE:
            files, self._files = self._files, []
            self._write(heapq.merge(*files, key=_first_column))
            for file in files:
                file.close()

    def _write(self, ordered: Iterable[str]) -> None:
        with writing(self._folder):
            run = tempfile.TemporaryFile("w+", encoding="utf-8", dir=self._folder)  # noqa: SIM115
            self._runs.enter_context(run)
            run.writelines(ordered)
            run.seek(0)
        self._files.append(run)

    def merged(self) -> Iterator[str]:
        last = sorted(self._lines, key=_first_column)
        return heapq.merge(*self._files, last, key=_first_column)


def _first_column(line: str) -> str:
    return line.split("\t", 1)[0]
