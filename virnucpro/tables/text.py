"""The text of rows, files of it that appear when they are whole, and lines sorted on their way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from gzip import GzipFile
from heapq import heappop, heappush
from io import StringIO
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from virnucpro.callers.head import DECIMALS
from virnucpro.ground.files import writing
from virnucpro.ground.numeric import Values
from virnucpro.ground.records import Call, Calls, FrameScores
from virnucpro.ground.tree import Tree
from virnucpro.sequences.fasta import write_record

_TableKind = Callable[[Tree, Path, Sequence[str]], AbstractContextManager[BinaryIO]]
_BYTES_IN_MEMORY = 2**24  # of lines that wait to be sorted
_BLOCK = 2**18  # bytes of a run of sorted lines that are merged at once


@contextmanager
def table(tree: Tree, path: Path, columns: Sequence[str] = ()) -> Iterator[BinaryIO]:
    """A file of text that appears when it is whole."""
    with tree.replacing(path) as out:
        out.write(_first_line(columns))
        yield out


@contextmanager
def packed_table(tree: Tree, path: Path, columns: Sequence[str]) -> Iterator[BinaryIO]:
    """The same, packed by gzip, without a name and a time: equal tables have equal bytes."""
    with tree.replacing(path) as out, GzipFile("", "wb", 6, out, mtime=0) as packed:
        packed.write(_first_line(columns))
        yield cast("BinaryIO", packed)


def _first_line(columns: Sequence[str]) -> bytes:
    return "\t".join(columns).encode() + b"\n" if columns else b""


@contextmanager
def optional_table(
    tree: Tree, path: Path, columns: Sequence[str], kind: _TableKind = table
) -> Iterator[Callable[[], BinaryIO]]:
    """A table that is made at its first use; without one, an old table is deleted."""
    tables: list[BinaryIO] = []
    with ExitStack() as stack:

        def open_once() -> BinaryIO:
            if not tables:
                tables.append(stack.enter_context(kind(tree, path, columns)))
            return tables[0]

        yield open_once
    if not tables:
        tree.delete(path)


class SortedLines:
    """Sorted texts in, one out, each of whole lines in the order of their first columns.

    Memory holds a part of them, and where texts do not overlap their lines are not looked at.
    Within, a NUL stands for a tab: no text has one, and it sorts before all that a name may hold,
    so that lines are sorted as their names are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # on a disk that is large enough
        self._tree = Tree(folder.parent)
        self._texts: list[bytes] = []  # that wait, ...
        self._n_bytes = 0  # ... with so many bytes
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self._runs: list[tuple[int, int]] = []  # of the file: the first byte, one after the last

    def __enter__(self) -> SortedLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, text: bytes | memoryview) -> None:
        """Add lines that are sorted as ``sorted_lines`` sorts them."""
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
        """Whole lines of the file, in pieces."""
        assert self._file is not None, "it has a run"
        size = _BLOCK
        while first < end:
            block = os.pread(self._file.fileno(), min(size, end - first), first)
            if n_bytes := block.rfind(b"\n") + 1:
                yield block[:n_bytes]
            size = _BLOCK if n_bytes else 2 * size  # of a longer line
            first += n_bytes


def sorted_lines(text: bytes) -> bytes:
    """The lines of a text in the order of their first columns."""
    return _in_order(text.replace(b"\t", b"\0")).replace(b"\0", b"\t")


def _in_order(text: bytes) -> bytes:
    lines = text.split(b"\n")[:-1]
    lines.sort()  # runs that are sorted already take little
    return b"\n".join((*lines, b""))


def _merged(runs: Sequence[Iterator[bytes]]) -> Iterator[bytes]:
    """The lines of sorted runs, which come in pieces of whole lines, in sorted pieces.

    A piece has all lines up to the first end of one of the pieces that overlap: so what does not
    overlap is passed on as it is.
    """
    heads: list[tuple[bytes, int, bytes, int]] = []  # the next line, its run, its piece and place

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
    """Where the lines end that are not behind this one, of sorted lines from a place on."""
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


def fasta_text(header: str, sequence: str) -> str:
    """A record of FASTA, 60 letters a line."""
    text = StringIO()
    write_record(text, header, sequence)
    return text.getvalue()


def call_words(call: Call) -> tuple[str, str]:
    """The label and the score of a call; both are empty without a score."""
    if call.virus_score is None:
        return "", ""
    return "virus" if call.is_virus else "other", f"{call.virus_score:.6f}"


def rate_text(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.4f}"


def six_decimals(shares: Sequence[float] | Values) -> list[str]:
    """The texts of numbers from 0 to 1 that have six decimals at most."""
    millionths = np.rint(np.asarray(shares, dtype=np.float64) * 10**DECIMALS).astype(np.int64)
    digits = millionths[:, None] // 10 ** np.arange(DECIMALS, -1, -1) % 10 + ord("0")
    text = np.insert(digits, 1, ord("."), axis=1).astype(np.uint8).tobytes().decode("ascii")
    width = DECIMALS + 2
    return [text[i : i + width] for i in range(0, len(text), width)]


def _score_texts(scores: Sequence[float | None]) -> list[str]:
    """The texts of scores; those of records without one are empty."""
    texts = six_decimals([0.0 if score is None else score for score in scores])
    return ["" if score is None else text for score, text in zip(scores, texts, strict=True)]


def record_rows(calls: Calls) -> str:
    """A row for each call."""
    virus_scores = _score_texts(calls.virus_scores)
    is_same = calls.base_scores is calls.virus_scores
    base_scores = virus_scores if is_same else _score_texts(calls.base_scores)
    pairs = zip(virus_scores, calls.are_viruses, strict=True)
    labels = ["virus" if is_virus else "other" if score else "" for score, is_virus in pairs]
    columns = (
        *(calls.record_ids, calls.samples, calls.lengths, calls.statuses, labels, virus_scores),
        list(map(rate_text, calls.rates)),
        *(calls.n_chunks, calls.n_chunks_scored, calls.n_frames_scored, base_scores, calls.notes),
    )
    row = "\t".join(["%s"] * len(columns)) + "\n"
    return "".join(map(row.__mod__, zip(*columns, strict=True)))


def frame_rows(frames: FrameScores) -> str:
    """A row for each scored frame; a tie is "others", as the first of two equals."""
    scores = np.array(frames.scores, dtype=np.float64)
    others = _of_others(scores)
    labels = ["\tvirus\t" if is_virus else "\tothers\t" for is_virus in (scores > others).tolist()]
    rows = zip(frames.ids, labels, six_decimals(others), six_decimals(scores), strict=True)
    return "".join([f"{name}{label}{other}\t{score}\n" for name, label, other, score in rows])


def _of_others(scores: Values) -> Values:
    """The scores of "others", with six decimals."""
    return np.asarray(np.rint((1 - scores) * 10**DECIMALS) / 10**DECIMALS)


def chunk_rows(frames: FrameScores) -> str:
    """A row for each chunk with a scored frame; frames of one chunk are neighbours.

    A chunk is a virus if its surest frame is, by VirNucPro's rule: the best virus score is at least
    the best score of "others".
    """
    if not frames.ids:
        return ""
    chunks = np.array(frames.chunk_ids, dtype=object)
    firsts = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]]))
    scores = np.array(frames.scores, dtype=np.float64)
    best, least = np.maximum.reduceat(scores, firsts), np.minimum.reduceat(scores, firsts)
    verdicts = (best >= _of_others(least)).tolist()
    rows = zip(chunks[firsts].tolist(), verdicts, strict=True)
    return "".join([f"{name}\t{verdict}\n" for name, verdict in rows])
