"""Count a run's records in one pass over its table, and choose the rows that a page shows.

Tasks count table blocks, in any process. Only the chosen rows and a few numbers per file are in
memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.helper_pool import TaskRunner
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.recipe import STATUSES
from virnucpro.results.table_blocks import (
    TableBlock,
    TableSpan,
    open_table_reader,
    split_table,
)

# Starts of length classes, in bases or residues.
LENGTHS = {
    "nucleotide": (0, 300, 500, 1_000, 3_000, 10_000, 100_000),
    "protein": (0, 50, 100, 300, 1_000),
}

T = TypeVar("T")


class ScoreGrid:
    """Bins of scored records by length and log-odds."""

    PER_DOUBLING = 4  # bins per doubling of the length
    N_DOUBLINGS = 40  # a record is shorter than 2^40 letters
    N_SCORES = 40  # bins of log-odds
    MAX_LOG_ODDS = 7.0  # a score of 0.9991

    @classmethod
    def empty(cls) -> IntArray:
        """Return zeros by length, score, and whether a record is called viral."""
        return np.zeros((cls.N_DOUBLINGS * cls.PER_DOUBLING, cls.N_SCORES, 2), np.int64)


Texts: TypeAlias = NDArray[np.object_]


class RecordRows(NamedTuple):
    """Records as the page shows them, in columns, (n,) each."""

    table_indices: IntArray  # index in the table, from 0
    records: Texts
    files: Texts
    lengths: IntArray
    statuses: Texts
    are_viral: BoolArray
    scores: FloatArray  # NaN: missing
    rates: FloatArray  # NaN: missing
    n_chunks: FloatArray  # NaN: missing
    notes: Texts

    @property
    def n_viral(self) -> int:
        return int(self.are_viral.sum())

    @classmethod
    def from_block(cls, block: TableBlock, rows: IntArray) -> RecordRows:
        """Read some rows from a block, by index.

        Raises:
            ValueError: a value is not a number, or a status is unknown.
        """
        lengths, scores, rates, is_viral, n_chunks = _numeric_columns(block)
        records, files, statuses, notes = (
            np.array(texts, np.object_)
            for texts in block.columns(("record", "file", "status", "note"), rows)
        )
        return cls(
            table_indices=rows,
            records=records,
            files=files,
            lengths=lengths[rows],
            statuses=statuses,
            are_viral=is_viral[rows],
            scores=scores[rows],
            rates=rates[rows],
            n_chunks=n_chunks[rows],
            notes=notes,
        )

    @classmethod
    def empty(cls) -> RecordRows:
        numbers = np.empty(0, np.int64)
        texts = np.empty(0, np.object_)
        values = np.empty(0)
        return cls(
            table_indices=numbers,
            records=texts,
            files=texts,
            lengths=numbers,
            statuses=texts,
            are_viral=np.empty(0, np.bool_),
            scores=values,
            rates=values,
            n_chunks=values,
            notes=texts,
        )

    @classmethod
    def concatenate(cls, blocks: Iterable[tuple[RecordRows, int]]) -> RecordRows:
        """Join rows from several blocks. Each block comes with the row count before it."""
        shifted = [
            rows._replace(table_indices=rows.table_indices + n_before) for rows, n_before in blocks
        ]
        columns: Iterable[Any] = zip(*(shifted or [cls.empty()]), strict=True)
        return cls._make(map(np.concatenate, columns))

    def best(self, max_rows: int) -> RecordRows:
        """Return the viral rows with the highest scores, at most ``max_rows``."""
        viral = np.flatnonzero(self.are_viral)
        ranked = np.array([self.table_indices[viral], self.lengths[viral], self.scores[viral]])
        rows = viral[_best(ranked, max_rows)]
        return RecordRows._make(column[rows] for column in self)


def _best(ranked: FloatArray, max_rows: int) -> IntArray:
    """Return indices for the rows with the highest scores. If tied, the longest come first.

    (3, n): table index, length and score -> at most (max_rows,)
    """
    table_indices, lengths, scores = ranked
    order: IntArray = np.lexsort((table_indices, -lengths, -scores))[:max_rows]
    return order


def _numeric_columns(
    block: TableBlock,
) -> tuple[IntArray, FloatArray, FloatArray, BoolArray, FloatArray]:
    """Return lengths, scores, rates, calls and chunk counts per record. (n,) each

    Raises:
        ValueError: a value is not a number or out of range, or a status is unknown.
    """
    lengths = block.integers("length")
    scores = block.numbers("virus_score")
    rates = block.numbers("fdr")
    n_chunks = block.numbers("n_chunks")
    if (lengths >= 2**ScoreGrid.N_DOUBLINGS).any() or (n_chunks < 0).any():
        raise ValueError("a length or a number of chunks is out of range")
    if any(((values < 0) | (values > 1)).any() for values in (scores, rates)):
        raise ValueError("virus_score and fdr must lie between 0 and 1")
    if unknown := set(block.codes("status")[0]) - set(STATUSES):
        raise ValueError(f"the status {min(unknown)}")
    return lengths, scores, rates, block.has_columns("call", b"virus"), n_chunks


@dataclass(slots=True, eq=False)
class RunCounts:
    """Record counts for a run, or for a block in its table."""

    MAX_ROWS = 100_000  # records in the table of the page

    starts: Sequence[int]  # of the length classes
    # (n_classes, 4): records, scored records, viral records, letters of viral records
    class_counts: IntArray
    # Per class: the lowest score of a viral record, and the share of false calls down to it.
    lowest: list[tuple[float, float]]
    n_records: int = 0
    n_letters: int = 0
    n_letters_viral: int = 0
    n_viral: int = 0
    # (3, n): table index, length and score of viral rows
    viral: FloatArray = field(default_factory=lambda: np.empty((3, 0)))
    statuses: Counter[str] = field(default_factory=Counter)
    # Notes of all records except those that are too short.
    notes: Counter[str] = field(default_factory=Counter)
    files: Counter[tuple[str, str]] = field(default_factory=Counter)  # (file, status or "viral")
    # (length, score, called viral) of scored records
    density: IntArray = field(default_factory=ScoreGrid.empty)
    # Each with its number of rows, and of rows that are not viral.
    blocks: list[tuple[TableSpan, int, int]] = field(default_factory=list)

    @classmethod
    def empty(cls, starts: Sequence[int]) -> RunCounts:
        """Return counts for zero records."""
        class_counts = np.zeros((len(starts), 4), np.int64)
        return cls(starts, class_counts, [(math.inf, math.nan)] * len(starts))

    @classmethod
    def from_block(cls, starts: Sequence[int], block: TableBlock) -> RunCounts:
        """Count a block.

        Raises:
            ValueError: a value is not a number, or a status is unknown.
        """
        counts = cls.empty(starts)
        lengths, scores, rates, is_viral, _ = _numeric_columns(block)
        viral = np.flatnonzero(is_viral)
        counts.viral = np.array([viral, lengths[viral], scores[viral]])
        counts.n_records = len(lengths)
        counts.n_letters = int(lengths.sum())
        counts.n_viral = len(viral)
        counts.n_letters_viral = int(lengths[viral].sum())
        counts._count_texts(block, is_viral)
        counts._count_lengths(lengths, scores, rates, is_viral)
        is_scored = np.isfinite(scores)
        length_bins = np.log2(np.maximum(1, lengths[is_scored])) * ScoreGrid.PER_DOUBLING
        cells = (
            length_bins.astype(np.int64),
            _score_bin(scores[is_scored]),
            is_viral[is_scored].astype(np.int64),
        )
        np.add.at(counts.density, cells, 1)
        return counts

    def add(self, span: TableSpan, other: RunCounts) -> None:
        """Add the next block's counts."""
        max_notes = 1_000  # different notes to count
        self.blocks.append((span, other.n_records, other.n_records - other.n_viral))
        shifted = other.viral + np.array([[self.n_records], [0], [0]])
        self.viral = np.concatenate([self.viral, shifted], axis=1)
        if self.viral.shape[1] > 2 * self.MAX_ROWS:
            self.viral = self.viral[:, _best(self.viral, self.MAX_ROWS)]
        for name in ("n_records", "n_letters", "n_letters_viral", "n_viral"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.class_counts += other.class_counts
        self.density += other.density
        pairs = zip(self.lowest, other.lowest, strict=True)
        self.lowest = [min(pair, key=itemgetter(0)) for pair in pairs]
        self.statuses.update(other.statuses)
        self.files.update(other.files)
        for note, n in other.notes.items():
            if note in self.notes or len(self.notes) < max_notes:
                self.notes[note] += n

    def rows(self, max_rows: int, helpers: TaskRunner[None]) -> RecordRows:
        """Choose the best viral rows and an even sample of the others, in table order.

        Choose at most ``max_rows`` rows, and no more than a page may show.

        Raises:
            InputError: the table changed in the meantime.
        """
        max_rows = min(max_rows, self.MAX_ROWS)
        viral = np.sort(self.viral[0, _best(self.viral, max_rows)].astype(np.int64))
        n_others = self.n_records - self.n_viral
        n_shown = min(n_others, max_rows - len(viral))
        others = np.arange(n_shown) * n_others // max(1, n_shown)
        tasks: list[CountTask[RecordRows]] = []
        n_rows_before: list[int] = []
        row = other = 0
        for span, n_rows, n_others in self.blocks:
            block_viral = viral[slice(*np.searchsorted(viral, (row, row + n_rows)))] - row
            bounds = np.searchsorted(others, (other, other + n_others))
            n_block_others = others[slice(*bounds)] - other
            if len(block_viral) + len(n_block_others):
                tasks.append(CountTask(span, partial(_rows_in, block_viral, n_block_others)))
                n_rows_before.append(row)
            row += n_rows
            other += n_others
        return RecordRows.concatenate(zip(helpers.map_in_order(tasks), n_rows_before, strict=True))

    def _count_texts(self, block: TableBlock, is_viral: BoolArray) -> None:
        """Count files, statuses and notes."""
        files, file_codes = block.codes("file")
        statuses, status_codes = block.codes("status")
        n_viral = np.bincount(file_codes[is_viral], minlength=len(files)).tolist()
        n_by_status = cross_table(file_codes, status_codes, (len(files), len(statuses)))
        for file, status_counts, viral in zip(files, n_by_status, n_viral, strict=True):
            for status, n in zip((*statuses, "viral"), (*status_counts, viral), strict=True):
                self.files[file, status] = n
        totals = np.bincount(status_codes, minlength=len(statuses)).tolist()
        self.statuses = Counter(dict(zip(statuses, totals, strict=True)))
        notes, note_codes = block.codes("note")
        is_long_enough = np.array([status != "too_short" for status in statuses], np.bool_)
        is_shown = is_long_enough[status_codes]
        n_by_note = np.bincount(note_codes[is_shown], minlength=len(notes)).tolist()
        pairs = zip(notes, n_by_note, strict=True)
        self.notes = Counter({note: n for note, n in pairs if note and n})

    def _count_lengths(
        self, lengths: IntArray, scores: FloatArray, rates: FloatArray, is_viral: BoolArray
    ) -> None:
        classes = np.searchsorted(self.starts, lengths, side="right") - 1
        for number in range(len(self.starts)):
            in_class = classes == number
            viral = np.flatnonzero(in_class & is_viral)
            n_scored = np.isfinite(scores[in_class]).sum()
            n_letters = lengths[viral].sum()
            self.class_counts[number] = in_class.sum(), n_scored, len(viral), n_letters
            if len(viral):
                weakest = viral[np.argmin(scores[viral])]
                self.lowest[number] = float(scores[weakest]), float(rates[weakest])


def cross_table(rows: IntArray, columns: IntArray, shape: tuple[int, int]) -> list[list[int]]:
    """Count each index pair."""
    counts = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return [row.tolist() for row in counts.reshape(shape)]


def _score_bin(scores: FloatArray) -> NDArray[np.int64]:
    """Return bins of log-odds in ``ScoreGrid``. (n,) -> (n,)"""
    limit = ScoreGrid.MAX_LOG_ODDS
    share = (bounded_log_odds(scores) + limit) / (2 * limit)
    return np.clip(share * ScoreGrid.N_SCORES, 0, ScoreGrid.N_SCORES - 1).astype(np.int64)


def bounded_log_odds(scores: FloatArray) -> FloatArray:
    """Return log(p / (1 - p)), clipped to the limits of ``ScoreGrid``. (n,) -> (n,)"""
    limit = ScoreGrid.MAX_LOG_ODDS
    clipped = np.clip(scores, 1e-9, 1 - 1e-9)
    return np.clip(np.log(clipped / (1 - clipped)), -limit, limit)


@dataclass(frozen=True, slots=True, eq=False)
class CountTask(Generic[T]):
    """Processes the lines in a table span."""

    span: TableSpan
    make: Callable[[TableBlock], T]

    @property
    def n_letters(self) -> int:
        return self.span.end - self.span.start

    def do(self, _: None) -> T:
        """Run the task.

        Raises:
            InputError: a value is not a number, or a line has too few or too many values.
            OSError: the table cannot be read.
        """
        with open_table_reader(self.span.path):
            return self.make(self.span.read())


def _rows_in(viral: IntArray, others: IntArray, block: TableBlock) -> RecordRows:
    """Read rows from a block: viral rows by index, others by their index among all others."""
    other_rows = np.flatnonzero(~block.has_columns("call", b"virus"))[others]
    return RecordRows.from_block(block, np.sort(np.append(viral, other_rows)))


def count_records(table: Path, input_type: str, helpers: TaskRunner[None]) -> RunCounts:
    """Count the rows in a table of records, and locate the rows that a page may show.

    Raises:
        InputError: it is not a table of records, or it is damaged.
        OSError: the table cannot be read.
    """
    starts = LENGTHS.get(input_type, LENGTHS["nucleotide"])
    counts = RunCounts.empty(starts)
    spans = list(split_table(table))
    count = partial(RunCounts.from_block, starts)
    block_counts = helpers.map_in_order(CountTask(span, count) for span in spans)
    for span, added in zip(spans, block_counts, strict=True):
        counts.add(span, added)
    return counts


def length_classes(starts: Sequence[int]) -> Iterator[tuple[int, int | None, str]]:
    """Yield start, end (exclusive; None: open) and name per length class."""
    for start, end in zip_longest(starts, starts[1:]):
        yield start, end, f"{start:,} to {end - 1:,}" if end else f"{start:,} or more"
