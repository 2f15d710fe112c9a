"""Sort lines by their first column, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from heapq import heappop, heappush
from pathlib import Path
from typing import BinaryIO

from virnucpro.core.atomic_io import storage_errors
from virnucpro.core.safe_dir import SafeDir


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
        bytes_in_memory = 2**24  # bytes of lines to be sorted
        if text:
            self._texts.append(bytes(text).replace(b"\t", b"\0"))
            self._n_bytes += len(text)
        if self._n_bytes >= bytes_in_memory:
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
        block_size = 2**18  # bytes merged at once
        size = block_size
        while first < end:
            block = os.pread(self._file.fileno(), min(size, end - first), first)
            if n_bytes := block.rfind(b"\n") + 1:
                yield block[:n_bytes]
            size = block_size if n_bytes else 2 * size  # the line is longer than the block
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
