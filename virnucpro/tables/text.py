"""The text of rows, files of it that appear when they are whole, and lines sorted on their way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from gzip import GzipFile
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TextIO

import numpy as np

from virnucpro.callers.head import DECIMALS
from virnucpro.ground.files import as_text, writing
from virnucpro.ground.numeric import Values
from virnucpro.ground.records import Call, Calls, FrameScores
from virnucpro.ground.tree import Tree
from virnucpro.sequences.fasta import write_record

_TableKind = Callable[[Tree, Path, Sequence[str]], AbstractContextManager[TextIO]]
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
    tree: Tree, path: Path, columns: Sequence[str], kind: _TableKind = table
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
