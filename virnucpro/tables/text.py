"""Text files that appear when they are whole, and lines that are sorted on their way into one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from gzip import GzipFile
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from virnucpro.ground.files import as_text, writing
from virnucpro.ground.tree import Tree

TableKind = Callable[[Tree, Path, Sequence[str]], AbstractContextManager[TextIO]]
_LINES_IN_MEMORY = 500_000
_FILES_AT_ONCE = 100  # that are open while lines are sorted
_BLOCK = 2**18  # characters of each that are merged at once, ...
_LINES_AT_ONCE = 10_000  # ... and lines of those in memory


@contextmanager
def table(tree: Tree, path: Path, columns: Sequence[str] = ()) -> Iterator[TextIO]:
    """A text file that appears when it is whole; headers may hold what is not UTF-8."""
    with tree.replacing(path) as content, as_text(content) as out:
        if columns:
            out.write("\t".join(columns) + "\n")
        yield out


@contextmanager
def packed_table(tree: Tree, path: Path, columns: Sequence[str]) -> Iterator[TextIO]:
    """The same, packed by gzip, without a name and a time: equal tables have equal bytes."""
    with (
        tree.replacing(path) as handle,
        GzipFile("", "wb", 6, handle, mtime=0) as packed,
        TextIOWrapper(packed, "utf-8", "surrogateescape", newline="\n") as out,
    ):
        if columns:
            out.write("\t".join(columns) + "\n")
        yield out


@contextmanager
def optional_table(
    tree: Tree, path: Path, columns: Sequence[str], kind: TableKind = table
) -> Iterator[Callable[[], TextIO]]:
    """A table that is made at its first use; without one, an old table is deleted."""
    tables: list[TextIO] = []
    with ExitStack() as stack:

        def open_once() -> TextIO:
            if not tables:
                tables.append(stack.enter_context(kind(tree, path, columns)))
            return tables[0]

        yield open_once
    if not tables:
        tree.delete(path)


class SortedLines:
    """Lines in any order in, sorted by their first column out; memory holds a part of them.

    Within, a NUL stands for a tab: no text has one, and it sorts before all that a name may hold,
    so that lines are sorted as their names are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # on a disk that is large enough
        self._tree = Tree(folder.parent)
        self._lines: list[str] = []
        self._runs = ExitStack()
        self._files: list[TextIO] = []

    def __enter__(self) -> SortedLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.close()

    def add(self, text: str) -> None:
        """Add whole lines."""
        self._lines += [f"{line}\n" for line in text.replace("\t", "\0").split("\n")[:-1]]
        if len(self._lines) >= _LINES_IN_MEMORY:
            self._write([sorted(self._lines)])
            self._lines = []
        if len(self._files) >= _FILES_AT_ONCE:
            files, self._files = self._files, []
            self._write(_merged(list(map(_blocks_of, files))))
            for file in files:
                file.close()

    def _write(self, blocks: Iterable[list[str]]) -> None:
        content = self._runs.enter_context(self._tree.scratch(self._folder))
        with writing(self._folder):
            run = self._runs.enter_context(TextIOWrapper(content, encoding="utf-8"))
            for block in blocks:
                run.writelines(block)
            run.seek(0)
        self._files.append(run)

    def merged(self) -> Iterator[str]:
        """The text of all lines, in pieces."""
        self._lines.sort()
        for block in _merged([*map(_blocks_of, self._files), _slices(self._lines)]):
            yield "".join(block).replace("\0", "\t")


def _blocks_of(file: TextIO) -> Iterator[list[str]]:
    while block := file.readlines(_BLOCK):
        yield block


def _slices(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(lines), _LINES_AT_ONCE):
        yield lines[first : first + _LINES_AT_ONCE]


def _merged(runs: Sequence[Iterator[Sequence[str]]]) -> Iterator[list[str]]:
    """The lines of sorted runs, in sorted blocks; a block has all up to the end of one of a run's.

    Sorting such blocks takes a quarter of the time of ``heapq.merge``.
    """
    heads = [next(run, ()) for run in runs]
    while any(heads):
        last = min(head[-1] for head in heads if head)
        block: list[str] = []
        for i, head in enumerate(heads):
            n_lines = bisect_right(head, last)
            block += head[:n_lines]
            heads[i] = head[n_lines:] or next(runs[i], ())
        block.sort()
        yield block
