"""The records of a run, counted in one pass over its table, and the rows that a page shows.

Memory holds the rows that are shown, and a few numbers per file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import STATUSES
from virnucpro.ground.records import Counts, Mask, Values
from virnucpro.tables.sinks import LENGTH_CLASSES
from virnucpro.tables.text import TableBlock, damaged, read_blocks

_N_TOP = 20
PER_DOUBLING = 4  # bins of length
_DOUBLINGS = 40  # a record is shorter than 2^40 letters
_N_LENGTHS = _DOUBLINGS * PER_DOUBLING
N_SCORES = 40  # bins of log-odds
MOST_LOG_ODDS = 7.0  # a score of 0.9991
_HIGH_FDR = 0.2  # share of false calls from which a class of length is called weak
_MOST_NOTES = 1_000  # different ones that are counted
# bases, or residues, from which the classes of length begin
LENGTHS = {
    "nucleotide": (0, 300, 500, 1_000, 3_000, 10_000, 100_000),
    "protein": (0, 50, 100, 300, 1_000),
}

# what viruses are: their number by kind and the start of a class of length, their number by family,
# and kind and family of records by file and id; viruses of an older run have the kind ""
Identities: TypeAlias = tuple[
    Counter[tuple[str, int]], Counter[str], dict[tuple[str, str], tuple[str, str]]
]


Texts: TypeAlias = NDArray[np.object_]


class RecordRows(NamedTuple):
    """Records as the page shows them, in columns in step. (n,) each"""

    places: Counts  # in the table, from 0
    records: Texts
    files: Texts
    lengths: Counts
    statuses: Texts
    are_viral: Mask
    scores: Values  # NaN: none
    rates: Values  # NaN: none
    n_chunks: Values  # NaN: none
    notes: Texts

    @property
    def n_viral(self) -> int:
        return int(self.are_viral.sum())

    @classmethod
    def none(cls) -> RecordRows:
        numbers, texts = np.empty(0, np.int64), np.empty(0, np.object_)
        values, are_viral = np.empty(0), np.empty(0, np.bool_)
        of_record = numbers, texts, texts, numbers, texts, are_viral
        return cls(*of_record, values, values, values, texts)

    def joined(self, other: RecordRows) -> RecordRows:
        """The rows of both."""
        pairs: Iterable[Any] = zip(self, other, strict=True)
        return RecordRows._make(np.concatenate(pair) for pair in pairs)

    def take(self, rows: Counts | slice) -> RecordRows:
        return RecordRows._make(column[rows] for column in self)

    def best(self, most: int) -> RecordRows:
        """At most this many viral records with the highest scores, the longest among equals."""
        return self.take(np.lexsort((self.places, -self.lengths, -self.scores))[:most])


@dataclass(slots=True)
class _LengthClass:
    """The records of one class of length."""

    start: int
    end: int | None  # one after the last; None: open
    name: str
    n: int = 0
    n_scored: int = 0
    n_viral: int = 0
    n_letters_viral: int = 0
    lowest: float = math.inf  # score of a record called viral
    fdr: float = math.nan  # false calls to expect among those called: of the lowest

    @property
    def is_weak(self) -> bool:
        return self.fdr >= _HIGH_FDR


@dataclass(slots=True)
class PageRows:
    """The rows that a page shows: all, or the best viral ones and every k-th of the others."""

    most: int
    viral: RecordRows = field(default_factory=RecordRows.none)
    others: RecordRows = field(default_factory=RecordRows.none)
    n_others: int = 0
    every: int = 1

    def choose(self, is_viral: Mask) -> tuple[Counts, Counts]:
        """Which rows to keep of those that come next: viral ones, and others."""
        others = np.flatnonzero(~is_viral)
        places = np.arange(self.n_others, self.n_others + len(others))
        self.n_others += len(others)
        return np.flatnonzero(is_viral), others[places % self.every == 0]

    def keep(self, viral: RecordRows, others: RecordRows) -> None:
        """Keep rows, of which some are left out again when they become too many."""
        self.viral, self.others = self.viral.joined(viral), self.others.joined(others)
        if len(self.viral.places) > 2 * self.most:
            self.viral = self.viral.best(self.most)
        while len(self.others.places) > 2 * self.most:
            self.others = self.others.take(slice(None, None, 2))
            self.every *= 2

    def rows(self, most: int) -> RecordRows:
        """At most this many rows, in the order of the table."""
        viral, n_all = self.viral, len(self.others.places)
        if len(viral.places) > most:
            viral = viral.best(most)
        n_others = min(n_all, most - len(viral.places))
        chosen = np.arange(n_others) * n_all // max(1, n_others)
        rows = viral.joined(self.others.take(chosen))
        return rows.take(np.argsort(rows.places))


class _Figures(NamedTuple):
    """The records of a block in numbers. (n,) each"""

    lengths: Counts
    scores: Values
    rates: Values
    is_viral: Mask
    n_chunks: Values
    files: tuple[list[str], Counts]  # see ``TableBlock.codes``
    statuses: tuple[list[str], Counts]
    notes: tuple[list[str], Counts]

    @classmethod
    def of(cls, block: TableBlock) -> _Figures:
        """
        Raises:
            ValueError: a number is none, or out of range, or a status is unknown.
        """
        lengths = block.whole_numbers("length")
        scores, rates = block.numbers("virus_score"), block.numbers("fdr")
        if (lengths >= 2**_DOUBLINGS).any():
            raise ValueError("a length is out of range")
        if (scores > 1).any() or (rates > 1).any():
            raise ValueError("virus_score and fdr must lie between 0 and 1")
        is_viral = block.have("call", b"virus")
        files, statuses, notes = map(block.codes, ("file", "status", "note"))
        if unknown := set(statuses[0]) - set(STATUSES):
            raise ValueError(f"the status {min(unknown)}")
        n_chunks = block.numbers("n_chunks")
        return cls(lengths, scores, rates, is_viral, n_chunks, files, statuses, notes)


@dataclass(slots=True)
class RunCounts:
    """The records of a run in numbers."""

    classes: list[_LengthClass]
    page_rows: PageRows
    n_records: int = 0
    n_letters: int = 0
    n_letters_viral: int = 0
    n_viral: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)  # but of records that are too short
    # file -> status or "viral" -> records
    files: dict[str, Counter[str]] = field(default_factory=dict)
    # file and id -> length and score, of records that somebody asks for; 0 until they are met
    measured: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    # (length, score, called viral) of scored records
    density: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((_N_LENGTHS, N_SCORES, 2), np.int64)
    )

    @property
    def top(self) -> RecordRows:
        """The viral records with the highest scores, the longest first among equals."""
        return self.page_rows.viral.best(_N_TOP)

    def add(self, block: TableBlock) -> None:
        """Count a block of the table.

        Raises:
            ValueError: a number is none, or a status is unknown.
        """
        figures = _Figures.of(block)
        lengths, is_viral = figures.lengths, figures.is_viral
        viral, others = self.page_rows.choose(is_viral)
        self.page_rows.keep(self._shown(block, figures, viral), self._shown(block, figures, others))
        self.n_records += len(lengths)
        self.n_letters += int(lengths.sum())
        self.n_viral += int(is_viral.sum())
        self.n_letters_viral += int(lengths[is_viral].sum())
        self._count_files(figures)
        self._count_notes(figures)
        self._count_lengths(figures)
        self._measure(block, figures)
        is_scored = np.isfinite(figures.scores)
        places = np.log2(np.maximum(1, lengths[is_scored])) * PER_DOUBLING
        np.add.at(
            self.density,
            (
                places.astype(np.int64),
                _score_bin(figures.scores[is_scored]),
                is_viral[is_scored].astype(np.int64),
            ),
            1,
        )

    def _shown(self, block: TableBlock, figures: _Figures, rows: Counts) -> RecordRows:
        """Some rows of a block, as the page has them."""
        files, statuses, notes = (
            np.array(texts, np.object_)[places[rows]]
            for texts, places in (figures.files, figures.statuses, figures.notes)
        )
        return RecordRows(
            self.n_records + rows,
            np.array(block.texts("record", rows), np.object_),
            files,
            figures.lengths[rows],
            statuses,
            figures.is_viral[rows],
            figures.scores[rows],
            figures.rates[rows],
            figures.n_chunks[rows],
            notes,
        )

    def _count_files(self, figures: _Figures) -> None:
        (files, of_file), (statuses, of_status) = figures.files, figures.statuses
        shape = len(files), len(statuses)
        n_viral: list[int] = np.bincount(of_file[figures.is_viral], minlength=shape[0]).tolist()
        n_of = _cross_table(of_file, of_status, shape)
        for file, counts, viral in zip(files, n_of, n_viral, strict=True):
            of_statuses = dict(zip(statuses, counts, strict=True))
            self.statuses.update(of_statuses)
            self.files.setdefault(file, Counter()).update({**of_statuses, "viral": viral})

    def _count_notes(self, figures: _Figures) -> None:
        (statuses, of_status), (notes, of_note) = figures.statuses, figures.notes
        is_told = np.array([status != "too_short" for status in statuses], np.bool_)[of_status]
        counts = np.bincount(of_note[is_told], minlength=len(notes)).tolist()
        for note, n in zip(notes, counts, strict=True):
            if note and n and (note in self.notes or len(self.notes) < _MOST_NOTES):
                self.notes[note] += n

    def _measure(self, block: TableBlock, figures: _Figures) -> None:
        if not self.measured:
            return
        files, of_file = figures.files
        names = {record for _, record in self.measured}
        for row, record in enumerate(block.texts("record")):
            if record in names and (key := (files[of_file[row]], record)) in self.measured:
                self.measured[key] = int(figures.lengths[row]), float(figures.scores[row])

    def _count_lengths(self, figures: _Figures) -> None:
        lengths, scores, rates, is_viral = figures[:4]
        starts = np.array([one.start for one in self.classes])
        places = np.searchsorted(starts, lengths, side="right") - 1
        for i, one in enumerate(self.classes):
            in_class = places == i
            viral = np.flatnonzero(in_class & is_viral)
            one.n += int(in_class.sum())
            one.n_scored += int(np.isfinite(scores[in_class]).sum())
            one.n_viral += len(viral)
            one.n_letters_viral += int(lengths[viral].sum())
            if len(viral):
                weakest = viral[np.argmin(scores[viral])]
                if scores[weakest] < one.lowest:
                    one.lowest, one.fdr = float(scores[weakest]), float(rates[weakest])


def _cross_table(rows: Counts, columns: Counts, shape: tuple[int, int]) -> list[list[int]]:
    """How often each pair of places occurs."""
    counts = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return [row.tolist() for row in counts.reshape(shape)]


def _score_bin(scores: Values) -> NDArray[np.int64]:
    """Bins of log-odds between -MOST_LOG_ODDS and +MOST_LOG_ODDS. (n,) -> (n,)"""
    share = (bounded_log_odds(scores) + MOST_LOG_ODDS) / (2 * MOST_LOG_ODDS)
    return np.clip(share * N_SCORES, 0, N_SCORES - 1).astype(np.int64)


def bounded_log_odds(scores: Values) -> Values:
    """log(p / (1 - p)), between -MOST_LOG_ODDS and +MOST_LOG_ODDS. (n,) -> (n,)"""
    inside = np.clip(scores, 1e-9, 1 - 1e-9)
    return np.clip(np.log(inside / (1 - inside)), -MOST_LOG_ODDS, MOST_LOG_ODDS)


def count_records(
    table: Path, input_type: str, most_rows: int, measured: Iterable[tuple[str, str]]
) -> RunCounts:
    """Count the rows of a table of records, and keep some of them.

    ``measured``: files and ids of the records to return with length and score.

    Raises:
        InputError: it is not a table of records, or damaged.
        OSError: it cannot be read.
    """
    starts = LENGTHS.get(input_type, LENGTHS["nucleotide"])
    classes = [_LengthClass(*one) for one in length_classes(starts)]
    counts = RunCounts(
        classes, PageRows(most_rows), measured=dict.fromkeys(measured, (0, math.nan))
    )
    for block in read_blocks(table):
        try:
            counts.add(block)
        except ValueError as error:
            raise damaged(table, error) from error
    return counts


def length_classes(starts: Sequence[int]) -> Iterator[tuple[int, int | None, str]]:
    """Start, end (one after the last; None: open) and name of each class of length."""
    for start, end in zip_longest(starts, starts[1:]):
        yield start, end, f"{start:,} to {end - 1:,}" if end else f"{start:,} and more"


def count_kinds(table: Path, wanted: Collection[tuple[str, str]]) -> Identities:
    """Count viruses by kind and by family, and look up those that are records, by file and id.

    Raises:
        InputError: it is damaged.
        OSError: it cannot be read.
    """
    kinds, families = Counter[tuple[str, int]](), Counter[str]()
    of_records: dict[tuple[str, str], tuple[str, str]] = {}
    for block in read_blocks(table):
        try:
            lengths = block.whole_numbers("length")
        except ValueError as error:
            raise damaged(table, error) from error
        classes = np.digitize(lengths, LENGTH_CLASSES[1:])
        (names, of_kind), (kin, of_kin) = block.codes("virus_kind"), block.codes("kin")
        n_of = _cross_table(of_kind, classes, (len(names), len(LENGTH_CLASSES)))
        for name, counts in zip(names, n_of, strict=True):
            kinds.update(
                {(name, start): n for start, n in zip(LENGTH_CLASSES, counts, strict=True)}
            )
        families.update(dict(zip(kin, np.bincount(of_kin).tolist(), strict=True)))
        of_records.update(_identities_in(block, wanted))
    del families[""]
    return kinds, families, of_records


def _identities_in(
    block: TableBlock, wanted: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Kind and family of the viruses that are wanted records as a whole, by file and id."""
    ids = {record for _, record in wanted}
    rows = [row for row, record in enumerate(block.texts("record")) if record in ids]
    columns = block.columns(("file", "record", "kind", "virus_kind", "kin"), rows)
    for file, record, kind, virus_kind, kin in zip(*columns, strict=True):
        if kind == "whole" and (file, record) in wanted:
            yield (file, record), (virus_kind, kin)
