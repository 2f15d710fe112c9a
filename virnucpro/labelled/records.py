"""Labelled data: FASTA files, and a manifest that says what is in them.

A manifest is a table of tab-separated columns with a header, plain or packed:

path     FASTA file, relative to the manifest. Needed.
label    ``virus`` or ``other``. Needed.
group    What must not be torn apart by a split: a viral family, a genus of hosts. Needed.
id       A record of the file; empty, or without this column, all its records.
weight   How much a record counts in training, above 0, at most a million; 1 if it is not said.
kingdom  Free text, for reports: what is measured apart.

Other columns are ignored. Ids are unique over the whole manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern

from virnucpro.errors import InputError, InputMissingError, UsageError
from virnucpro.files import expanded, open_plain
from virnucpro.labelled.tables import read_cells
from virnucpro.log import LOGGER, printable
from virnucpro.records import FastaRecord
from virnucpro.sequences.fasta import cannot_open, find_invalid, read_fasta

_NEEDED = ("path", "label", "group")
_HINT = (
    "a manifest is a table with tabs between its columns and a header: path, label, group, "
    "and if you like id, weight, kingdom"
)
_HEAVIEST = 1e6  # more than all others together, and losses are still numbers
_MOST_NAMED = 5  # groups, in a message
_LABELS = {"virus": True, "other": False}


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """One record of a FASTA file, and what is known of it."""

    id: str
    path: Path
    is_virus: bool
    group: str
    weight: float = 1.0
    kingdom: str = ""

    @property
    def label(self) -> str:
        return "virus" if self.is_virus else "other"


@dataclass(slots=True)
class _File:
    """What the manifest says of one FASTA file; the id "" stands for all its records."""

    rows: dict[str, LabelledRecord] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # of the manifest, by id


def read_manifest(path: Path) -> list[LabelledRecord]:
    """The records that a manifest names, file by file as it names them, each in FASTA order.

    Every FASTA file is read once, so that what is wrong is told before any work begins.

    Raises:
        InputError: the manifest contradicts itself or the files; names file and line.
        InputMissingError: the manifest or a FASTA file cannot be read.
    """
    known: dict[str, LabelledRecord] = {}
    for fasta, named in _read_files(path).items():
        of_all = named.rows.pop("", None)
        n_before = len(known)
        for record in read_fasta(fasta):
            row = replace(of_all, id=record.id) if of_all else named.rows.get(record.id)
            if row is not None:
                _check(record, fasta, known)
                known[record.id] = row
        if of_all and len(known) == n_before:
            raise InputError(
                f"{printable(path)}:{named.lines['']}: {printable(fasta)} holds no record",
                hint="give a FASTA file that is not empty, or leave the line out",
            )
        lost = [record_id for record_id, row in named.rows.items() if known.get(record_id) != row]
        if lost:
            raise InputError(
                f"{printable(path)}:{named.lines[lost[0]]}: {printable(fasta)} holds no record "
                f"{printable(lost[0])} ({len(lost)} missing of this file)",
                hint="an id is the first word behind the '>'; check the id and the path",
            )
    return list(known.values())


def warn_of_mixed_groups(records: Iterable[LabelledRecord]) -> None:
    """Name the groups with both labels: a family of proviruses may be one, a typing error too."""
    labels: dict[str, set[str]] = {}
    for record in records:
        labels.setdefault(record.group, set()).add(record.label)
    if mixed := sorted(group for group, own in labels.items() if len(own) > 1):
        more = f" and {len(mixed) - _MOST_NAMED} more" if len(mixed) > _MOST_NAMED else ""
        LOGGER.warning(
            "groups with both labels, virus and other: %s%s; check that this is meant",
            ", ".join(map(printable, mixed[:_MOST_NAMED])),
            more,
        )


def _check(record: FastaRecord, path: Path, known: Mapping[str, LabelledRecord]) -> None:
    """
    Raises:
        InputError: the id was met before, or the sequence is none of nucleotides.
    """
    where = f"{printable(path)}:{record.line}"
    if record.id in known:
        raise InputError(
            f"{where}: the id {printable(record.id)} occurs twice "
            f"(first in {printable(known[record.id].path)})",
            hint="ids must be unique over the manifest: rename one of the records",
        )
    if problem := find_invalid(record, "nucleotide"):
        raise InputError(
            f"{where}: the record {printable(record.id)} cannot be used: {problem}",
            hint="labelled records are nucleotides: mend the record or leave it out",
        )


def read_sequences(
    records: Iterable[LabelledRecord],
) -> Iterator[tuple[LabelledRecord, FastaRecord]]:
    """Each record with its sequence: files as they are first named, each in FASTA order.

    Every file is read once; memory holds one sequence.

    Raises:
        InputError: a file holds other records than when the manifest was read.
        InputMissingError: a file cannot be read any more.
    """
    wanted: dict[Path, dict[str, LabelledRecord]] = {}
    for labelled in records:
        wanted.setdefault(labelled.path, {})[labelled.id] = labelled
    for path, by_id in wanted.items():
        for record in read_fasta(path):
            if (found := by_id.pop(record.id, None)) is not None:
                yield found, record
        if by_id:
            raise InputError(
                f"{printable(path)} has lost the record {printable(next(iter(by_id)))} "
                "since the manifest was read",
                hint="let the file be written to its end, then start again",
            )


def _read_files(manifest: Path) -> dict[Path, _File]:
    """The FASTA files of a manifest, in its order."""
    paths: dict[str, Path] = {}
    files: dict[Path, _File] = {}
    for line, cells in read_cells(manifest, _NEEDED, _HINT):
        where = f"{printable(manifest)}:{line}"
        if cells["path"] not in paths:
            paths[cells["path"]] = _fasta_path(manifest, cells["path"], where)
        row = _row(cells, paths[cells["path"]], where)
        named = files.setdefault(row.path, _File())
        if row.id in named.rows or (named.rows and not row.id) or "" in named.rows:
            what = f"the record {printable(row.id)} of " if row.id else ""
            earlier = named.lines.get(row.id) or next(iter(named.lines.values()))
            raise InputError(
                f"{where}: {what}{printable(row.path)} is named twice (first in line {earlier})",
                hint="keep one of the lines; a line without an id stands for the whole file",
            )
        named.rows[row.id], named.lines[row.id] = row, line
    return files


def _row(cells: dict[str, str], path: Path, where: str) -> LabelledRecord:
    if cells["label"] not in _LABELS:
        raise InputError(
            f"{where}: the label is {printable(cells['label'])!r}",
            hint="a label is 'virus' or 'other'",
        )
    if not cells["group"]:
        raise InputError(
            f"{where}: the group is empty",
            hint="name what must not be torn apart by a split, for example the viral family",
        )
    return LabelledRecord(
        cells.get("id", ""),
        path,
        _LABELS[cells["label"]],
        intern(cells["group"]),
        _weight(cells.get("weight", ""), where),
        intern(cells.get("kingdom", "")),
    )


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text or 1)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= _HEAVIEST:
        raise InputError(
            f"{where}: the weight is {printable(text)!r}",
            hint="a weight is a number above 0, at most a million; without one it is 1",
        )
    return weight


def _fasta_path(manifest: Path, cell: str, where: str) -> Path:
    if not cell:
        raise InputError(
            f"{where}: the path is empty", hint="name a FASTA file, relative to the manifest"
        )
    try:
        path = (manifest.parent / expanded(cell)).resolve()
        open_plain(path).close()  # it is read several times, which a pipe cannot be
    except UsageError as error:
        raise InputMissingError(f"{where}: {error}", hint=error.hint) from error
    except OSError as error:
        missing = cannot_open(path, error)
        raise InputMissingError(f"{where}: {missing}", hint=missing.hint) from error
    return path
