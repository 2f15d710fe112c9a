"""The records of a run, counted in one pass over its table, and the rows that a page shows.

Blocks of the table are counted in tasks, by any process. Memory holds the rows that are shown, and
a few numbers per file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import STATUSES
from virnucpro.ground.records import Counts, Mask, Values
from virnucpro.ground.tasks import Helpers
from virnucpro.tables.sinks import LENGTH_CLASSES
from virnucpro.tables.text import TableBlock, TableSpan, damaged, spans_of

_N_TOP = 20
_NO_PLACES = np.empty(0, np.int64)
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

T = TypeVar("T")
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
    def of(cls, block: TableBlock, rows: Counts) -> RecordRows:
        """Some rows of a block, whose places count from its first.

        Raises:
            ValueError: a number is none, or a status is unknown.
        """
        figures = _Figures.of(block)
        files, statuses, notes = (
            np.array(texts, np.object_)[places[rows]]
            for texts, places in (figures.files, figures.statuses, figures.notes)
        )
        return cls(
            rows,
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

    @classmethod
    def none(cls) -> RecordRows:
        numbers, texts = np.empty(0, np.int64), np.empty(0, np.object_)
        values, are_viral = np.empty(0), np.empty(0, np.bool_)
        of_record = numbers, texts, texts, numbers, texts, are_viral
        return cls(*of_record, values, values, values, texts)

    @classmethod
    def joined(cls, each: Iterable[tuple[RecordRows, int]]) -> RecordRows:
        """The rows of several blocks, each beside the number of rows before it."""
        moved = [rows._replace(places=rows.places + place) for rows, place in each]
        columns: Iterable[Any] = zip(*(moved or [cls.none()]), strict=True)
        return cls._make(map(np.concatenate, columns))


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

    def include(self, other: _LengthClass) -> None:
        """Count the records of the same class of another block."""
        for name in ("n", "n_scored", "n_viral", "n_letters_viral"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.lowest < self.lowest:
            self.lowest, self.fdr = other.lowest, other.fdr


class _Ranked(NamedTuple):
    """Viral rows of the table, by what they are ranked by. (n,) each"""

    places: Counts  # in the table
    lengths: Counts
    scores: Values

    def best(self, most: int) -> _Ranked:
        """At most this many rows with the highest scores, the longest among equals."""
        order = np.lexsort((self.places, -self.lengths, -self.scores))[:most]
        return _Ranked._make(column[order] for column in self)

    def joined(self, other: _Ranked, place: int) -> _Ranked:
        """The rows of both; so many rows are before all of the other."""
        other = other._replace(places=other.places + place)
        return _Ranked._make(map(np.concatenate, zip(self, other, strict=True)))


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
    """The records of a run, or of a block of its table, in numbers."""

    classes: list[_LengthClass]
    most_rows: int  # of a page
    n_records: int = 0
    n_letters: int = 0
    n_letters_viral: int = 0
    n_viral: int = 0
    viral: _Ranked = field(default_factory=lambda: _Ranked(_NO_PLACES, _NO_PLACES, np.empty(0)))
    top: RecordRows = field(default_factory=RecordRows.none)  # the best viral records
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
    blocks: list[tuple[TableSpan, int, int]] = field(default_factory=list)  # rows, others in each

    def count(self, block: TableBlock) -> None:
        """Count the first block.

        Raises:
            ValueError: a number is none, or a status is unknown.
        """
        figures = _Figures.of(block)
        lengths, is_viral = figures.lengths, figures.is_viral
        viral = np.flatnonzero(is_viral)
        ranked = _Ranked(viral, lengths[viral], figures.scores[viral])
        self.viral, self.top = ranked, RecordRows.of(block, ranked.best(_N_TOP).places)
        self.n_records, self.n_letters = len(lengths), int(lengths.sum())
        self.n_viral, self.n_letters_viral = len(viral), int(lengths[viral].sum())
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

    def include(self, span: TableSpan, other: RunCounts) -> None:
        """Count the next block, which was counted by itself."""
        self.blocks.append((span, other.n_records, other.n_records - other.n_viral))
        self.viral = self.viral.joined(other.viral, self.n_records)
        if len(self.viral.places) > 2 * self.most_rows:
            self.viral = self.viral.best(self.most_rows)
        top = RecordRows.joined([(self.top, 0), (other.top, self.n_records)])
        best = np.lexsort((top.places, -top.lengths, -top.scores))[:_N_TOP]
        self.top = RecordRows._make(column[best] for column in top)
        for name in ("n_records", "n_letters", "n_letters_viral", "n_viral", "density"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.statuses.update(other.statuses)
        for file, counts in other.files.items():
            self.files.setdefault(file, Counter()).update(counts)
        for note, n in other.notes.items():
            if note in self.notes or len(self.notes) < _MOST_NOTES:
                self.notes[note] += n
        self.measured |= {key: one for key, one in other.measured.items() if one[0]}
        for mine, its in zip(self.classes, other.classes, strict=True):
            mine.include(its)

    def rows(self, most: int, helpers: Helpers[None]) -> RecordRows:
        """The best viral rows and an even sample of the others, in the order of the table.

        Raises:
            InputError: the table was damaged meanwhile.
        """
        viral = np.sort(self.viral.best(most).places)
        n_others, every = self.n_records - self.n_viral, 1
        while -(-n_others // every) > 2 * self.most_rows:
            every *= 2
        n_kept = -(-n_others // every)
        n_shown = min(n_kept, most - len(viral))
        others = np.arange(n_shown) * n_kept // max(1, n_shown) * every
        tasks, places = list[_SpanTask[RecordRows]](), list[int]()
        row = other = 0
        for span, n_rows, n_others in self.blocks:
            of_viral = viral[slice(*np.searchsorted(viral, (row, row + n_rows)))] - row
            of_others = others[slice(*np.searchsorted(others, (other, other + n_others)))] - other
            if len(of_viral) + len(of_others):
                tasks.append(_SpanTask(span, partial(_rows_in, of_viral, of_others)))
                places.append(row)
            row, other = row + n_rows, other + n_others
        return RecordRows.joined(zip(helpers.in_order(tasks), places, strict=True))

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
        self.notes = Counter({note: n for note, n in zip(notes, counts, strict=True) if note and n})

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
            one.n, one.n_viral = int(in_class.sum()), len(viral)
            one.n_scored = int(np.isfinite(scores[in_class]).sum())
            one.n_letters_viral = int(lengths[viral].sum())
            if len(viral):
                weakest = viral[np.argmin(scores[viral])]
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


@dataclass(frozen=True, slots=True)
class _SpanTask(Generic[T]):
    """Make something of the lines of a span."""

    span: TableSpan
    make: Callable[[TableBlock], T]

    @property
    def n_letters(self) -> int:
        return self.span.end - self.span.start

    def do(self, _: None) -> T:
        """
        Raises:
            InputError: a number is none, or lines have another number of values.
            OSError: it cannot be read.
        """
        try:
            return self.make(self.span.read())
        except ValueError as error:
            raise damaged(self.span.path, error) from error


def _counted(
    starts: Sequence[int], measured: Iterable[tuple[str, str]], block: TableBlock
) -> RunCounts:
    counts = _no_counts(starts, measured)
    counts.count(block)
    return counts


def _rows_in(viral: Counts, others: Counts, block: TableBlock) -> RecordRows:
    """Rows of a block: viral ones by their places, others by those among all others."""
    of_others = np.flatnonzero(~block.have("call", b"virus"))[others]
    return RecordRows.of(block, np.sort(np.append(viral, of_others)))


def _no_counts(
    starts: Sequence[int], measured: Iterable[tuple[str, str]], most_rows: int = 0
) -> RunCounts:
    classes = [_LengthClass(*one) for one in length_classes(starts)]
    return RunCounts(classes, most_rows, measured=dict.fromkeys(measured, (0, math.nan)))


def count_records(
    table: Path,
    input_type: str,
    most_rows: int,
    measured: Collection[tuple[str, str]],
    helpers: Helpers[None],
) -> RunCounts:
    """Count the rows of a table of records, and choose those that a page may show.

    ``measured``: files and ids of the records to return with length and score.

    Raises:
        InputError: it is not a table of records, or damaged.
        OSError: it cannot be read.
    """
    starts = LENGTHS.get(input_type, LENGTHS["nucleotide"])
    counts, spans = _no_counts(starts, measured, most_rows), list(spans_of(table))
    count = partial(_counted, starts, measured)
    each = helpers.in_order(_SpanTask(span, count) for span in spans)
    for span, of_block in zip(spans, each, strict=True):
        counts.include(span, of_block)
    return counts


def length_classes(starts: Sequence[int]) -> Iterator[tuple[int, int | None, str]]:
    """Start, end (one after the last; None: open) and name of each class of length."""
    for start, end in zip_longest(starts, starts[1:]):
        yield start, end, f"{start:,} to {end - 1:,}" if end else f"{start:,} and more"


def _kinds_in(wanted: Collection[tuple[str, str]], block: TableBlock) -> Identities:
    kinds = Counter[tuple[str, int]]()
    classes = np.digitize(block.whole_numbers("length"), LENGTH_CLASSES[1:])
    (names, of_kind), (kin, of_kin) = block.codes("virus_kind"), block.codes("kin")
    n_of = _cross_table(of_kind, classes, (len(names), len(LENGTH_CLASSES)))
    for name, counts in zip(names, n_of, strict=True):
        kinds.update({(name, start): n for start, n in zip(LENGTH_CLASSES, counts, strict=True)})
    families = Counter(dict(zip(kin, np.bincount(of_kin).tolist(), strict=True)))
    return kinds, families, dict(_identities_in(block, wanted))


def count_kinds(
    table: Path, wanted: Collection[tuple[str, str]], helpers: Helpers[None]
) -> Identities:
    """Count viruses by kind and by family, and look up those that are records, by file and id.

    Raises:
        InputError: it is damaged.
        OSError: it cannot be read.
    """
    kinds, families = Counter[tuple[str, int]](), Counter[str]()
    of_records: dict[tuple[str, str], tuple[str, str]] = {}
    make = partial(_kinds_in, wanted)
    for each in helpers.in_order(_SpanTask(span, make) for span in spans_of(table)):
        kinds.update(each[0])
        families.update(each[1])
        of_records.update(each[2])
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
