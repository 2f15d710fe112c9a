"""The records of a run, counted in one pass over its table, and the rows that a page shows.

Tables are read by the names of their columns, so those of any version will do: what a table
lacks is empty. Memory holds the rows that are shown, and a few numbers per file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.errors import InputError
from virnucpro.ground.log import printable
from virnucpro.ground.numeric import Mask, Values
from virnucpro.ground.records import STATUSES
from virnucpro.tables.sinks import LENGTH_CLASSES, RecordTable

_N_TOP = 20
PER_DOUBLING = 4  # bins of length
_DOUBLINGS = 40  # a record is shorter than 2^40 letters
_N_LENGTHS = _DOUBLINGS * PER_DOUBLING
N_SCORES = 40  # bins of log-odds
MOST_LOG_ODDS = 7.0  # a score of 0.9991
_LINES_AT_ONCE = 20_000
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


class RecordRows(NamedTuple):
    """Records as the page shows them, in columns in step."""

    places: list[int]  # in the table, from 0
    records: list[str]
    files: list[str]
    lengths: list[int]
    statuses: list[str]
    are_viral: list[bool]
    scores: list[float]  # NaN: none
    rates: list[float]  # NaN: none
    n_chunks: list[str]
    notes: list[str]

    @property
    def n_viral(self) -> int:
        return sum(self.are_viral)

    @classmethod
    def none(cls) -> RecordRows:
        return cls._make([] for _ in cls._fields)

    def extend(self, columns: Iterable[Sequence[Any]], mask: Mask) -> None:
        """Add those rows of some columns that are in the mask."""
        rows = np.flatnonzero(mask).tolist()  # a few of a large table
        own: tuple[list[Any], ...] = self
        for column, values in zip(own, columns, strict=True):
            column.extend([values[row] for row in rows])

    def take(self, rows: Sequence[int]) -> RecordRows:
        return RecordRows._make([column[row] for row in rows] for column in self)

    def best(self, most: int) -> RecordRows:
        """At most this many viral records with the highest scores, the longest among equals."""
        if not self.places:
            return self
        lengths, scores = np.array(self.lengths), np.array(self.scores)
        order = np.lexsort((np.array(self.places), -lengths, -scores))
        return self.take(order[:most].tolist())


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

    def extend(self, columns: Sequence[Sequence[Any]], is_viral: Mask) -> None:
        """Keep rows, of which some are left out again when they become too many."""
        places = self.n_others + np.cumsum(~is_viral) - 1
        self.n_others += int((~is_viral).sum())
        self.viral.extend(columns, is_viral)
        self.others.extend(columns, ~is_viral & (places % self.every == 0))
        if len(self.viral.places) > 2 * self.most:
            self.viral = self.viral.best(self.most)
        while len(self.others.places) > 2 * self.most:
            self.others = RecordRows._make(column[::2] for column in self.others)
            self.every *= 2

    def rows(self, most: int) -> RecordRows:
        """At most this many rows, in the order of the table."""
        viral, n_all = self.viral, len(self.others.places)
        if len(viral.places) > most:
            viral = viral.best(most)
        n_others = min(n_all, most - len(viral.places))
        chosen = np.arange(n_others) * n_all // max(1, n_others)
        others = self.others if n_others == n_all else self.others.take(chosen.tolist())
        each: list[tuple[list[Any], list[Any]]] = list(zip(viral, others, strict=True))
        rows = RecordRows._make([*of_viral, *of_others] for of_viral, of_others in each)
        return rows.take(np.argsort(rows.places).tolist())


class _Figures(NamedTuple):
    """Numbers of the records of a block. (n,) each"""

    lengths: NDArray[np.int64]
    scores: Values
    rates: Values
    is_viral: Mask

    @classmethod
    def of(cls, block: Mapping[str, Sequence[str]]) -> _Figures:
        """
        Raises:
            ValueError: a number is none, or out of range.
        """
        numbers = list(map(int, block["length"]))
        scores, rates = _shares(block["virus_score"]), _shares(block["fdr"])
        if numbers and not 0 <= min(numbers) <= max(numbers) < 2**_DOUBLINGS:
            raise ValueError("a length is out of range")
        if any((shares < 0).any() or (shares > 1).any() for shares in (scores, rates)):
            raise ValueError("virus_score and fdr must lie between 0 and 1")
        is_viral = np.array([call == "virus" for call in block["call"]], np.bool_)
        return cls(np.array(numbers, np.int64), scores, rates, is_viral)


def _shares(texts: Sequence[str]) -> Values:
    return np.array([float(text) if text else math.nan for text in texts])


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

    def add(self, block: Mapping[str, Sequence[str]]) -> None:
        """Count a block of the table, given as its columns.

        Raises:
            ValueError: a number is none, or a status is unknown.
        """
        figures = _Figures.of(block)
        if unknown := set(block["status"]) - set(STATUSES):
            raise ValueError(f"the status {min(unknown)}")
        lengths, is_viral = figures.lengths, figures.is_viral
        self._show(block, figures)
        self.n_records += len(lengths)
        self.n_letters += int(lengths.sum())
        self.n_viral += int(is_viral.sum())
        self.n_letters_viral += int(lengths[is_viral].sum())
        self.statuses.update(block["status"])
        self._count_files(block, is_viral)
        self._count_notes(block)
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

    def _show(self, block: Mapping[str, Sequence[str]], figures: _Figures) -> None:
        lengths, scores, rates, is_viral = figures
        columns = (
            range(self.n_records, self.n_records + len(lengths)),
            block["record"],
            block["file"],
            lengths.tolist(),
            block["status"],
            is_viral.tolist(),
            scores.tolist(),
            rates.tolist(),
            block["n_chunks"],
            block["note"],
        )
        self.page_rows.extend(columns, is_viral)

    def _count_files(self, block: Mapping[str, Sequence[str]], is_viral: Mask) -> None:
        for (file, status), n in Counter(zip(block["file"], block["status"], strict=True)).items():
            self.files.setdefault(file, Counter())[status] += n
        for file, n in Counter(np.array(block["file"], object)[is_viral].tolist()).items():
            self.files[file]["viral"] += n

    def _count_notes(self, block: Mapping[str, Sequence[str]]) -> None:
        told = zip(block["note"], block["status"], strict=True)
        counts = Counter(note for note, status in told if note and status != "too_short")
        for note, n in counts.items():
            if note in self.notes or len(self.notes) < _MOST_NOTES:
                self.notes[note] += n

    def _measure(self, block: Mapping[str, Sequence[str]], figures: _Figures) -> None:
        if not self.measured:
            return
        for i, key in enumerate(zip(block["file"], block["record"], strict=True)):
            if key in self.measured:
                self.measured[key] = int(figures.lengths[i]), float(figures.scores[i])

    def _count_lengths(self, figures: _Figures) -> None:
        lengths, scores, rates, is_viral = figures
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
    for block in read_columns(table, RecordTable.columns):
        try:
            counts.add(block)
        except ValueError as error:
            raise damaged(table, error) from error
    return counts


def length_classes(starts: Sequence[int]) -> Iterator[tuple[int, int | None, str]]:
    """Start, end (one after the last; None: open) and name of each class of length."""
    for start, end in zip_longest(starts, starts[1:]):
        yield start, end, f"{start:,} to {end - 1:,}" if end else f"{start:,} and more"


def read_columns(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Sequence[str]]]:
    """These columns of a table of ours, some lines at a time; a column that it lacks is empty.

    Raises:
        InputError: lines have another number of values than there are names.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        names = next(lines, "").rstrip("\n").split("\t")
        while block := list(islice(lines, _LINES_AT_ONCE)):
            by_name = dict(zip(names, _columns_of(block, len(names), path), strict=True))
            empty = ("",) * len(block)
            yield {name: by_name.get(name, empty) for name in columns}


def _columns_of(lines: list[str], n_columns: int, path: Path) -> list[Sequence[str]]:
    """The columns of lines; the last one has what tabs are left.

    Raises:
        InputError: a line has too few values.
    """
    n_tabs = [line.count("\t") + 1 for line in lines]
    if min(n_tabs) < n_columns:
        raise damaged(path, "a line has too few values")
    if max(n_tabs) == n_columns:  # a list for each line would take twice the time
        values = "".join(lines).removesuffix("\n").replace("\n", "\t").split("\t")
        return [values[i::n_columns] for i in range(n_columns)]
    fields = [line.rstrip("\n").split("\t", n_columns - 1) for line in lines]
    return list(zip(*fields, strict=True))


def count_kinds(table: Path, wanted: Collection[tuple[str, str]]) -> Identities:
    """Count viruses by kind and by family, and look up those that are records, by file and id.

    Raises:
        InputError: it is damaged.
        OSError: it cannot be read.
    """
    kinds, families = Counter[tuple[str, int]](), Counter[str]()
    of_records: dict[tuple[str, str], tuple[str, str]] = {}
    columns = ("file", "record", "kind", "length", "virus_kind", "kin")
    for block in read_columns(table, columns):
        try:
            lengths = np.array(list(map(int, block["length"])))
        except ValueError as error:
            raise damaged(table, error) from error
        starts = np.array(LENGTH_CLASSES)[np.digitize(lengths, LENGTH_CLASSES[1:])].tolist()
        kinds.update(zip(block["virus_kind"], starts, strict=True))
        families.update(block["kin"])
        for file, record, kind, _, virus_kind, kin in zip(*block.values(), strict=True):
            if kind == "whole" and (file, record) in wanted:
                of_records[file, record] = (virus_kind, kin)
    del families[""]
    return kinds, families, of_records


def damaged(table: Path, why: object) -> InputError:
    return InputError(
        f"{printable(table)} is damaged: {printable(why)}",
        hint="run the command of the run again with --resume: it writes the tables anew",
    )
