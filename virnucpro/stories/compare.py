"""Compare two results: rows in only one of them, different labels, differences of scores.

A result is a run folder, a folder of the original VirNucPro, or a ``prediction_results.txt`` of
either. Rows are joined by id. The rows of one, and the ids of both, are held in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TextIO, TypeAlias

from virnucpro.ground.errors import InputError, InputMissingError
from virnucpro.ground.files import open_plain
from virnucpro.ground.log import printable
from virnucpro.run.folder import RunDir
from virnucpro.run.hashes import Outputs
from virnucpro.tables.sinks import CHUNK_TABLE, FRAME_TABLE, RECORD_TABLE, Sink

_ROUNDING = 1e-9  # of differences between scores, which have 6 decimals
_N_EXAMPLES = 3  # ids of each kind of difference
_KINDS = _ONLY_IN_A, _ONLY_IN_B, _RELABELLED = "only in A", "only in B", "labels differ"
_HEADINGS = ("table", "in both", *_KINDS, "largest", "median")


# a frame, a chunk or a record, as a table has it: id, label, and score of the class virus
_Row: TypeAlias = tuple[str, str, float | None]


@dataclass(slots=True)
class TableComparison:
    """One table of two results."""

    table: str
    n_both: int = 0
    # the ids of each kind of difference; with their two labels if these differ
    kinds: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    differences: array[float] = field(default_factory=lambda: array("d"))  # of scores, absolute

    def agrees(self, tolerance: float | None) -> bool:
        """True if no row is missing, no label differs, and scores differ within the tolerance."""
        farthest = max(self.differences, default=0.0)
        is_near = tolerance is None or farthest <= tolerance + _ROUNDING
        return is_near and not any(self.kinds.values())

    @property
    def is_apart(self) -> bool:
        """True if both tables have rows, but share none."""
        return not self.n_both and all(self.kinds[kind] for kind in (_ONLY_IN_A, _ONLY_IN_B))

    def columns(self) -> tuple[str, ...]:
        """The texts of the comparison, as under ``_HEADINGS``."""
        scores = ("", "")
        if self.differences:
            scores = (f"{max(self.differences):.2g}", f"{median(self.differences):.2g}")
        counts = (self.n_both, *map(len, self.kinds.values()))
        return (self.table, *(f"{count:,}" for count in counts), *scores)

    def examples(self) -> Iterator[str]:
        """Lines with the first ids of each kind of difference."""
        for kind, ids in self.kinds.items():
            if ids:
                more = ", ..." if len(ids) > _N_EXAMPLES else ""
                examples = ", ".join(map(printable, ids[:_N_EXAMPLES]))
                yield f"{self.table}, {kind}: {examples}{more}"


def compare(a: Path, b: Path) -> list[TableComparison]:
    """Compare every table that both results have: frames, chunks, records.

    Raises:
        InputMissingError: a result does not exist, or the two have no table in common.
        InputError: a table is not as VirNucPro writes it.
    """
    tables_of_a, tables_of_b = _find_tables(a), _find_tables(b)
    names = [name for name in _READERS if name in tables_of_a and name in tables_of_b]
    if not names:
        raise InputMissingError(
            f"{printable(a)} has {' and '.join(tables_of_a)}, "
            f"{printable(b)} has {' and '.join(tables_of_b)}: no table in common",
            hint="name two folders, or two files of one kind",
        )
    for tables in (tables_of_a, tables_of_b):
        paths = [tables[name] for name in names]
        rundir = RunDir(paths[0].parent)
        if rundir.manifest.is_file():
            Outputs(rundir).check(only=[path.name for path in paths])
    return [_compare_table(name, tables_of_a[name], tables_of_b[name]) for name in names]


def report_lines(comparisons: list[TableComparison]) -> list[str]:
    """Format the comparison as a table, followed by a few examples of differences."""
    rows = [_HEADINGS, *(comparison.columns() for comparison in comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        name, *texts = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join([name.strip().ljust(widths[0]), *texts]).rstrip())
    for comparison in comparisons:
        lines += comparison.examples()
    if apart := [one.table for one in comparisons if one.is_apart]:
        lines.append(
            f"hint: no id of {', '.join(apart)} is in both: were they made from the same files? "
            "Ids of records begin with the name of their file, which a sample sheet can set. "
            "In a run that the scorer called, frames and chunks are pieces"
        )
    return lines


def _find_tables(path: Path) -> dict[str, Path]:
    """The tables of a result that can be compared, by their kind."""
    if path.is_dir():
        files = {name: path / sink.file for name, (sink, _) in _READERS.items()}
        tables = {name: file for name, file in files.items() if file.is_file()}
        if tables:
            return tables
        names = ", ".join(file.name for file in files.values())
        raise InputMissingError(
            f"{printable(path)} has none of {names}",
            hint="name a folder with the results of `virnucpro predict`, or of VirNucPro",
        )
    if not path.exists():
        raise InputMissingError(
            f"{printable(path)}: no such file or folder",
            hint="name a run folder of `virnucpro predict`, one of VirNucPro, or a table",
        )
    for name, (sink, _) in _READERS.items():
        with _open(path) as lines:
            if next(lines, "").rstrip("\r\n") == "\t".join(sink.columns):
                return {name: path}
    raise InputError(
        f"{printable(path)} is not a table of results",
        hint=f"name a folder, or a file such as {FRAME_TABLE.file}",
    )


def _compare_table(name: str, a: Path, b: Path) -> TableComparison:
    comparison = TableComparison(name)
    of_a = {row_id: (label, score) for row_id, label, score in _read(name, a)}
    for row_id, label, score in _read(name, b):
        if row_id not in of_a:
            comparison.kinds[_ONLY_IN_B].append(row_id)
            continue
        label_of_a, score_of_a = of_a.pop(row_id)
        comparison.n_both += 1
        if label_of_a != label:
            comparison.kinds[_RELABELLED].append(f"{row_id} ({label_of_a}, {label})")
        if score_of_a is not None and score is not None:
            comparison.differences.append(abs(score_of_a - score))
    comparison.kinds[_ONLY_IN_A] += of_a
    return comparison


def _read(name: str, path: Path) -> Iterator[_Row]:
    """The rows of a table.

    Raises:
        InputError: it is damaged, or an id occurs twice.
    """
    ids, (sink, parse) = set[str](), _READERS[name]
    with _open(path) as lines:
        try:
            for values in _split(lines, sink.columns):
                row_id, label, score = parse(values)
                if score is not None and not isfinite(score):
                    raise ValueError(f"{row_id} has the score {score}")
                if row_id in ids:
                    raise ValueError(f"{row_id} occurs twice")
                ids.add(row_id)
                yield row_id, label, score
        except (ValueError, LookupError) as error:
            raise InputError(
                f"{printable(path)} is not as VirNucPro writes it: {printable(error)}",
                hint="copy it again from an intact folder, or make it again with this version",
            ) from error


def _open(path: Path) -> TextIO:
    return TextIOWrapper(open_plain(path), "utf-8", "surrogateescape", newline="\n")


def _split(lines: Iterable[str], columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the values of each row below the header.

    Raises:
        ValueError: there is no line, the last one is cut short, or one has other columns.
    """
    line = ""
    for number, line in enumerate(lines):
        values = line.rstrip("\r\n").split("\t")
        if len(values) != len(columns) or (number == 0 and tuple(values) != columns):
            raise ValueError(f"line {number + 1} is not of the columns {', '.join(columns)}")
        if number:
            yield values
    if not line.endswith("\n"):
        raise ValueError("its end is missing")


def _frame_in(values: list[str]) -> _Row:
    frame_id, label, _, score = values
    return frame_id, label, float(score)


def _chunk_in(values: list[str]) -> _Row:
    chunk_id, label = values
    return chunk_id, label, None


def _record_in(values: list[str]) -> _Row:
    call = RECORD_TABLE.parse(dict(zip(RECORD_TABLE.columns, values, strict=True)))
    label: str = call.status
    if call.virus_score is not None:
        label = "virus" if call.is_virus else "other"
    record_id = f"{call.sample}: {call.record_id}" if call.sample else call.record_id
    return record_id, label, call.virus_score


_READERS: dict[str, tuple[Sink, Callable[[list[str]], _Row]]] = {
    "frames": (FRAME_TABLE, _frame_in),
    "chunks": (CHUNK_TABLE, _chunk_in),
    "records": (RECORD_TABLE, _record_in),
}
