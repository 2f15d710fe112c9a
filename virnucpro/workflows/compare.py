"""Compare two results: rows in only one of them, different labels, score differences.

A result is a run folder, an output folder from the original VirNucPro, or one table from either.
Rows are joined by id, in memory. If both results have one file each, its name may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TypeAlias

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.logging import printable
from virnucpro.results.outputs import OutputFile, RunOutput, open_run_dir
from virnucpro.results.table_readers import parse_call, parse_identity
from virnucpro.store.checksums import Outputs

_KINDS = "only in A", "only in B", "labels differ"
_DAMAGE_HINT = "copy it again from an intact folder, or write it again with this version"

# A row for a frame, chunk, record or virus: sample if the table has one, id, label and score.
_Row: TypeAlias = tuple[str, str, str, float | None]


@dataclass(frozen=True, slots=True)
class TableComparison:
    """Compares one table in two results."""

    table: str
    n_both: int
    kinds: Mapping[str, list[str]]  # kind of difference -> ids, with both labels if they differ
    differences: list[float]  # absolute score differences

    @property
    def largest(self) -> float:
        return max(self.differences, default=0.0)

    def agrees(self, tolerance: float | None) -> bool:
        """Return True if no row is missing, labels match, and scores agree within ``tolerance``."""
        rounding = 1e-9  # tolerance for score differences; scores have 6 decimals
        is_near = tolerance is None or self.largest <= tolerance + rounding
        return is_near and not any(self.kinds.values())


def compare(a: Path, b: Path) -> list[TableComparison]:
    """Compare every table that both results have: frames, chunks, records, viruses.

    Raises:
        InputMissingError: a result does not exist, or the two have no table in common.
        InputError: a table is damaged, missing, or from another version of VirNucPro.
    """
    tables_in_a = _find_tables(a)
    tables_in_b = _find_tables(b)
    names = [name for name in _READERS if name in tables_in_a and name in tables_in_b]
    if not names:
        raise InputMissingError(
            f"{printable(a)} has {' and '.join(tables_in_a)}, "
            f"{printable(b)} has {' and '.join(tables_in_b)}: no table in common",
            hint="name two folders, or two files of one kind",
        )
    for path in (a, b):
        _check(path)
    return [_compare_table(name, tables_in_a[name], tables_in_b[name]) for name in names]


def report_lines(comparisons: list[TableComparison]) -> Iterator[str]:
    """Format the comparison as a table, followed by a few example ids per difference."""
    line = "{:<8} {:>11}  {:>13}  {:>13}  {:>13}  {:>7}  {:>7}"
    yield line.format("table", "in both", *_KINDS, "largest", "median")
    for comparison in comparisons:
        sizes = [len(comparison.kinds[kind]) for kind in _KINDS]
        counts = [f"{n:,}" for n in (comparison.n_both, *sizes)]
        texts = ["", ""]
        if comparison.differences:
            scores = (comparison.largest, median(comparison.differences))
            texts = [f"{score:.2g}" for score in scores]
        yield line.format(comparison.table, *counts, *texts).rstrip()
    for comparison in comparisons:
        yield from _example_lines(comparison)


def _example_lines(comparison: TableComparison) -> Iterator[str]:
    n_examples = 3  # ids listed per kind of difference
    for kind, ids in comparison.kinds.items():
        if ids:
            examples = ", ".join(map(printable, ids[:n_examples]))
            more = ", ..." if len(ids) > n_examples else ""
            yield f"{comparison.table}, {kind}: {examples}{more}"


def _find_tables(path: Path) -> dict[str, Path]:
    """Find a result's comparable tables, by their kind."""
    if path.is_dir():
        files = {name: path / sink.file for name, (sink, _) in _READERS.items()}
        if tables := {name: file for name, file in files.items() if file.is_file()}:
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
    with open_regular_file(path) as lines:
        head = b"".join(islice(lines, 1)).decode(errors="replace").rstrip()
    for name, (sink, _) in _READERS.items():
        if sink.present_columns(head) is not None:
            return {name: path}
    raise InputError(
        f"{printable(path)} is not a table of results",
        hint=f"name a folder, or a file such as {RunOutput.FRAME_TABLE.file}",
    )


def _check(path: Path) -> None:
    """Verify the tables of a run by their hashes. Other folders are not checked.

    Raises:
        InputError: a run table was changed or deleted.
    """
    rundir = open_run_dir(path if path.is_dir() else path.parent)
    if not rundir.manifest.is_file():
        return
    outputs = Outputs(rundir)
    names = [sink.file for sink, _ in _READERS.values()] if path.is_dir() else [path.name]
    hashes = outputs.read_hashes() or {}
    for _, error in outputs.find_damaged({name: hashes[name] for name in names if name in hashes}):
        raise error


def _compare_table(name: str, a: Path, b: Path) -> TableComparison:
    has_samples = not _are_renamed(_samples(name, a), _samples(name, b))
    rows_in_a = {
        _row_name(sample if has_samples else "", row_id): (label, score)
        for sample, row_id, label, score in _read(name, a)
    }
    n_both = 0
    only_in_b: list[str] = []
    relabelled: list[str] = []
    differences: list[float] = []
    for sample, row_id, label, score in _read(name, b):
        row_name = _row_name(sample if has_samples else "", row_id)
        if row_name not in rows_in_a:
            only_in_b.append(row_name)
            continue
        before, score_before = rows_in_a.pop(row_name)
        n_both += 1
        if label != before:
            relabelled.append(f"{row_name} ({before}, {label})")
        if score is not None and score_before is not None:
            differences.append(abs(score_before - score))
    kinds = dict(zip(_KINDS, (list(rows_in_a), only_in_b, relabelled), strict=True))
    return TableComparison(name, n_both, kinds, differences)


def _samples(name: str, path: Path) -> set[str]:
    """Return the samples in a table, or nothing if it has no such column."""
    column = "file"
    sink, _ = _READERS[name]
    if column not in sink.columns:
        return set()
    return set(sink.rows_at(path, itemgetter(column), _DAMAGE_HINT))


def _are_renamed(samples_in_a: set[str], samples_in_b: set[str]) -> bool:
    """Return True if both results have one file, under different names."""
    return len(samples_in_a) == len(samples_in_b) == 1 and samples_in_a != samples_in_b


def _row_name(sample: str, row_id: str) -> str:
    return f"{sample}: {row_id}" if sample else row_id


def _read(name: str, path: Path) -> Iterator[_Row]:
    """Yield table rows.

    Raises:
        InputError: the table is damaged, or an id occurs twice.
    """
    ids = set[str]()
    sink, parse = _READERS[name]

    def parsed(row: dict[str, str]) -> _Row:
        sample, row_id, _, score = parsed_row = parse(row)
        row_name = _row_name(sample, row_id)
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"{row_name} has the score {score}")
        if row_name in ids:
            raise ValueError(f"{row_name} occurs twice")
        ids.add(row_name)
        return parsed_row

    return sink.rows_at(path, parsed, _DAMAGE_HINT)


def _frame_differences(row: dict[str, str]) -> _Row:
    return "", row["Sequence_ID"], row["Prediction"], float(row["score2"])


def _chunk_differences(row: dict[str, str]) -> _Row:
    return "", row["Modified_ID"], row["Is_Virus"], None


def _record_differences(row: dict[str, str]) -> _Row:
    call = parse_call(row)
    return call.sample, call.record_id, row["call"] or call.status, call.virus_score


def _virus_differences(row: dict[str, str]) -> _Row:
    _, identity = parse_identity(row)
    label = f"{row['extent']} {identity.group} {identity.family}".rstrip()
    return row["file"], row["virus"], label, float(row["score"])


_READERS: dict[str, tuple[OutputFile, Callable[[dict[str, str]], _Row]]] = {
    "frames": (RunOutput.FRAME_TABLE, _frame_differences),
    "chunks": (RunOutput.CHUNK_TABLE, _chunk_differences),
    "records": (RunOutput.RECORD_TABLE, _record_differences),
    "viruses": (RunOutput.VIRUS_TABLE, _virus_differences),
}
