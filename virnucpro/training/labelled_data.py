"""Labelled data: FASTA files, the manifest that labels them, and the split of its groups.

A manifest is a tab-separated table with a header, plain or packed:

path     FASTA file, relative to the manifest. Required.
label    ``virus`` or ``other``. Required.
group    Split unit, for example a viral family or a host genus. Required.
id       Record in the file. Empty or no column: all records.
weight   Training weight, above 0, at most a million. Default: 1.
kingdom  Free text for reports, which measure each kingdom separately.

Other columns are ignored. Ids are unique in the manifest.

A split assigns groups to training, validation or test. Groups are never divided, because pieces
from one genome, or from close relatives, on both sides would inflate every figure. A split is a
table that may be edited and reused.

``virnucpro manifest`` builds a manifest from folders by label: a file's group is the first
folder below the named one, or else the file name without its extensions. Alternatively it uses a
table of accessions and taxonomy, with a row per record in the FASTA files.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from sys import intern
from typing import Literal, NamedTuple, get_args

from virnucpro.core.atomic_io import OnBlock, open_binary, open_regular_file
from virnucpro.core.errors import InputError, InputMissingError, OutputError, UsageError
from virnucpro.core.logging import LOGGER, format_count, printable
from virnucpro.core.paths import expand_path
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord
from virnucpro.results.names import read_tsv_field, tsv_line
from virnucpro.sequences.fasta import find_invalid, open_fasta, read_fasta
from virnucpro.sequences.inputs import InputFile
from virnucpro.training.options import ManifestOptions

_MAX_NAMED = 5  # in a message
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_Stratum = tuple[str, str]  # label and kingdom
_DOMAINS = ("superkingdom", "domain", "realm")


@dataclass(frozen=True, slots=True)
class LabelledRecord:
    """One FASTA record, with the facts from its manifest row."""

    id: str
    is_virus: bool
    group: str
    weight: float = 1.0
    kingdom: str = ""
    digest: int = field(default=0, compare=False)  # of its bases; 0 until they are read

    @property
    def label(self) -> str:
        return "virus" if self.is_virus else "other"


Labelled = tuple[LabelledRecord, FastaRecord]


def group_digest(name: str) -> int:
    """Return a hash of the exact group name. Fits into a uint64."""
    n_bytes = 8  # per digest
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=n_bytes).digest(), "little")


def record_digest(sequence: str) -> int:
    """Return a hash of the bases, regardless of case. Fits into a uint64.

    >>> record_digest("acgt") == record_digest("ACGT")
    True
    """
    return group_digest(sequence.upper())


# For one FASTA file: id -> manifest line and facts. "": all records of the file.
_Rows = dict[str, tuple[int, LabelledRecord]]


class DataManifest(NamedTuple):
    """A manifest by FASTA file, in its order. The FASTA files are not read yet."""

    path: Path
    sha256: str
    files: Mapping[Path, _Rows]

    @property
    def groups(self) -> set[str]:
        return {row.group for rows in self.files.values() for _, row in rows.values()}


def read_data_manifest(path: Path) -> DataManifest:
    """Read a manifest.

    Raises:
        InputError: the manifest contradicts itself. The message names the line.
        InputMissingError: the manifest or a FASTA file cannot be opened.
    """
    digest = hashlib.sha256()
    paths: dict[str, Path] = {}
    files: dict[Path, _Rows] = {}
    for line, cells in _read_manifest_cells(path, digest.update):
        where = f"{printable(path)}:{line}"
        cell = cells["path"]
        if cell not in paths:
            paths[cell] = _fasta_path(path, cell, where)
        row = _row(cells, where)
        rows = files.setdefault(paths[cell], {})
        if row.id in rows or (rows and not row.id) or "" in rows:
            what = f"the record {printable(row.id)} of " if row.id else ""
            earlier, _ = rows.get(row.id) or next(iter(rows.values()))
            raise InputError(
                f"{where}: {what}{printable(paths[cell])} is named twice (first in line {earlier})",
                hint="keep one of the lines; a line without an id means all records in the file",
            )
        rows[row.id] = line, row
    return DataManifest(path, digest.hexdigest(), files)


def check_data_manifest(path: Path) -> None:
    """Check that there is a manifest with its columns. ``read_data_manifest`` checks the rows.

    Raises:
        InputError: the file is not a manifest.
        InputMissingError: it cannot be opened.
    """
    next(_read_manifest_cells(path), None)


def _read_manifest_cells(
    path: Path, on_block: OnBlock | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    hint = (
        "a manifest is a table with tabs between its columns and a header: path, label, group, "
        "optionally id, weight, kingdom"
    )
    needed = ("path", "label", "group")
    if path.is_dir():
        raise InputMissingError(
            f"{printable(path)} is a folder, not a manifest",
            hint="make one: virnucpro manifest --virus DIR --other DIR -o manifest.tsv",
        )
    yield from read_cells(path, needed, hint, on_block)


def read_records(
    manifest: DataManifest,
    on_file: Callable[[str], None] = lambda _: None,
    on_block: OnBlock = lambda _: None,
) -> Iterator[Labelled]:
    """Yield the records that a manifest names, with their sequences, file by file, in FASTA order.

    Every file is read once. Only one sequence and the ids are in memory at a time.

    Args:
        on_file: called with each file's SHA-256 after it was read.
        on_block: called with its bytes.

    Raises:
        InputError: the files contradict the manifest or each other. The message names the line.
        InputMissingError: a file cannot be read.
    """
    id_paths: dict[str, Path] = {}
    for fasta, rows in manifest.files.items():
        digest = hashlib.sha256()
        n_before = len(id_paths)
        for record in read_fasta(fasta, on_block=_iter_files(digest.update, on_block)):
            if (entry := rows.get("") or rows.get(record.id)) is not None:
                _check(record, fasta, id_paths)
                id_paths[record.id] = fasta
                bases = record_digest(record.sequence)
                yield replace(entry[1], id=record.id, digest=bases), record
        if "" in rows and len(id_paths) == n_before:
            raise InputError(
                f"{printable(manifest.path)}:{rows[''][0]}: {printable(fasta)} contains no record",
                hint="give a FASTA file that is not empty, or leave the line out",
            )
        _check_complete(manifest.path, fasta, rows, id_paths)
        on_file(digest.hexdigest())


def _iter_files(*hearers: OnBlock) -> OnBlock:
    def hear(block: bytes | memoryview) -> None:
        for hearer in hearers:
            hearer(block)

    return hear


def _check_complete(manifest: Path, fasta: Path, rows: _Rows, id_paths: Mapping[str, Path]) -> None:
    """Check that a file contains every record that the manifest names.

    Raises:
        InputError: the file lacks a record.
    """
    absent = [name for name in rows if name and id_paths.get(name) != fasta]
    if absent:
        raise InputError(
            f"{printable(manifest)}:{rows[absent[0]][0]}: {printable(fasta)} contains no record "
            f"{printable(absent[0])} ({len(absent)} missing from this file)",
            hint="an id is the first word after the '>'; check the id and the path",
        )


def warn_of_mixed_groups(records: Iterable[LabelledRecord]) -> None:
    """Warn about groups with both labels: intended, as in a family of proviruses, or a typo."""
    labels: dict[str, set[str]] = {}
    for record in records:
        labels.setdefault(record.group, set()).add(record.label)
    if mixed := sorted(group for group, group_labels in labels.items() if len(group_labels) > 1):
        LOGGER.warning(
            "groups with both labels, virus and other: %s; check that this is intended",
            sample_records(mixed),
        )


def sample_records(names: Sequence[str]) -> str:
    """List the first names and count the rest, for a message."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(printable, names[:_MAX_NAMED])) + more


def _check(record: FastaRecord, path: Path, id_paths: Mapping[str, Path]) -> None:
    """Check that a record is new and contains nucleotides.

    Raises:
        InputError: the id occurred before, or the sequence does not consist of nucleotides.
    """
    where = f"{printable(path)}:{record.line}"
    if record.id in id_paths:
        raise InputError(
            f"{where}: the id {printable(record.id)} occurs twice "
            f"(first in {printable(id_paths[record.id])})",
            hint="ids must be unique over the manifest: rename one of the records",
        )
    if problem := find_invalid(record, "nucleotide"):
        raise InputError(
            f"{where}: the record {printable(record.id)} cannot be used: {problem}",
            hint="labelled records are nucleotides: fix the record or leave it out",
        )


def _row(cells: dict[str, str], where: str) -> LabelledRecord:
    if not cells["group"]:
        raise InputError(
            f"{where}: the group is empty",
            hint="name what a split must keep together, for example the viral family",
        )
    return LabelledRecord(
        cells.get("id", ""),
        _check_record(cells["label"], where) == "virus",
        intern(cells["group"]),
        _weight(cells.get("weight", ""), where),
        intern(cells.get("kingdom", "")),
    )


def _check_record(label: str, where: str) -> str:
    """Check a label.

    Raises:
        InputError: it is not a label.
    """
    if label not in ("virus", "other"):
        raise InputError(
            f"{where}: the label is {printable(label)!r}", hint="a label is 'virus' or 'other'"
        )
    return label


def _weight(text: str, where: str) -> float:
    max_weight = 1e6  # outweighs everything else, and losses stay finite
    try:
        weight = float(text or 1)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= max_weight:
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
        path = manifest.parent / expand_path(cell)
        open_regular_file(path).close()  # a pipe could not be read a second time
    except UsageError as error:
        raise InputMissingError(f"{where}: {error}", hint=error.hint) from error
    except OSError as error:
        problem = InputMissingError.cannot_open(path, error)
        raise InputMissingError(f"{where}: {problem}", hint=problem.hint) from error
    return path.resolve()


def read_cells(
    path: Path, needed: Sequence[str], hint: str, on_block: OnBlock | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each line number below the header, and its cells by column, stripped.

    Blank lines are skipped.

    Args:
        hint: describes the table, for the error about a missing column.
        on_block: called with the bytes on disk.

    Raises:
        InputError: the file is not a table, or lacks a column. The message names file and line.
        InputMissingError: the file cannot be opened.
    """
    label = printable(path)
    lines = read_lines(path, on_block)
    _, header = next(lines, (1, ""))
    columns = [name.strip() for name in header.split("\t")]
    for name in needed:
        if columns.count(name) != 1:
            how_many = "no column" if name not in columns else "more than one column"
            raise InputError(f"{label}:1: {how_many} {name!r}", hint=hint)
    if not header:
        raise InputError(f"{label} is empty", hint=hint)
    for number, line in lines:
        cells = list(map(read_tsv_field, line.split("\t")))
        if len(cells) != len(columns):
            raise InputError(
                f"{label}:{number}: {len(cells)} cells for {len(columns)} columns",
                hint="there must be one tab between two cells, and none inside a cell",
            )
        yield number, {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}


def read_lines(path: Path, on_block: OnBlock | None) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines, with their numbers."""
    try:
        with (
            open_fasta(path),
            io.TextIOWrapper(open_binary(path, on_block), encoding="utf-8-sig") as lines,
        ):
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(path)} is not UTF-8 text: {error.reason} at byte {error.start}",
            hint="give a table of tab-separated columns",
        ) from error


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Write a tab-separated table: a header, and a line for each row.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    SafeDir(path.parent).write_file(path, "".join(map(tsv_line, (columns, *rows))))


def split_groups(records: Iterable[LabelledRecord], seed: int) -> dict[str, Split]:
    """Assign every group to one split.

    Each stratum (a label in a kingdom) is split independently. With three groups or more, every
    part gets at least one. With two, the test part is empty. A single group is used for training. A
    group in several strata belongs to the one with most of its records. Groups are ranked by a hash
    of name and seed, so record order does not matter, and a new group changes nothing in other
    strata.
    """
    strata: dict[_Stratum, list[str]] = {}
    for group, stratum in _main_strata(records).items():
        strata.setdefault(stratum, []).append(group)
    splits: dict[str, Split] = {}
    for groups in strata.values():
        n_validation, n_test = _allot(len(groups))
        n_held_out = n_test + n_validation
        for rank, group in enumerate(sorted(groups, key=lambda name: _rank(name, seed))):
            if rank < n_test:
                splits[group] = "test"
            elif rank < n_held_out:
                splits[group] = "validation"
            else:
                splits[group] = "train"
    return splits


def _main_strata(records: Iterable[LabelledRecord]) -> dict[str, _Stratum]:
    counts: dict[str, Counter[_Stratum]] = {}
    for record in records:
        counts.setdefault(record.group, Counter())[(record.label, record.kingdom)] += 1
    return {
        group: min(strata, key=lambda stratum: (-strata[stratum], stratum))
        for group, strata in counts.items()
    }


def _allot(n_groups: int) -> tuple[int, int]:
    """Return the number of validation and test groups. At least one remains for training."""
    for_test = 0.15  # share of the groups
    for_validation = 0.15  # share of the groups
    n_test = min(max(1, round(n_groups * for_test)), max(0, n_groups - 2))
    n_validation = min(max(1, round(n_groups * for_validation)), n_groups - n_test - 1)
    return n_validation, n_test


def _rank(group: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\t{group}".encode(), digest_size=16).digest()


def write_split(path: Path, records: Iterable[LabelledRecord], splits: Mapping[str, Split]) -> None:
    """Write a row per group, label and kingdom, sorted. Equal data gives equal bytes."""
    columns = ("group", "label", "kingdom", "split", "n_records")
    counts = Counter((record.group, record.label, record.kingdom) for record in records)
    rows = ((*key, splits[key[0]], n_records) for key, n_records in sorted(counts.items()))
    write_table(path, columns, rows)


def read_split(path: Path) -> dict[str, Split]:
    """Read each group's part from a table with at least the columns ``group`` and ``split``.

    Raises:
        InputError: it is another table, or a group is in two parts. The message names the line.
        InputMissingError: it cannot be read.
    """
    splits: dict[str, Split] = {}
    hint = "give a table of groups and splits, such as the split.tsv of a training"
    for line, cells in read_cells(path, needed=("group", "split"), hint=hint):
        where = f"{printable(path)}:{line}"
        group = cells["group"]
        split = cells["split"]
        if split not in SPLITS:
            raise InputError(
                f"{where}: the split is {printable(split)!r}",
                hint=f"a split is one of {', '.join(SPLITS)}",
            )
        if splits.setdefault(group, split) != split:
            raise InputError(
                f"{where}: the group {printable(group)} is in {splits[group]} and in {split}",
                hint="a group cannot be divided: give all its lines the same split",
            )
    return splits


def check_groups(groups: Set[str], splits: Mapping[str, Split]) -> None:
    """Check that a split covers these groups.

    Raises:
        InputError: a group is in no split part.
    """
    if unknown := groups - splits.keys():
        raise InputError(
            f"the split lacks {len(unknown)} groups of the data, "
            f"for example {printable(min(unknown))}",
            hint="add them to the table, or give the split that was made from this data",
        )


def write_manifest(options: ManifestOptions) -> list[str]:
    """Write a manifest, and return lines about its content.

    Raises:
        OutputError: the file exists, and the options do not force an overwrite.
        InputError: the table is invalid, a label is missing, or something is named twice.
        InputMissingError: a file cannot be read.
    """
    manifest_columns = ("path", "id", "label", "group", "kingdom")
    if options.output.exists() and not options.force:
        raise OutputError(
            f"{printable(options.output)} already exists", hint="replace it with --force"
        )
    labelled = (
        _records_by_folder(options)
        if options.table is None
        else _records_by_table(options, options.table)
    )
    rows = list(_unique_records(labelled))
    for label in ("virus", "other"):
        if not any(record.label == label for _, record in rows):
            raise InputError(f"no sequence has the label {label}", hint="give records of both")
    cells = ((path, record.id, record.label, record.group, record.kingdom) for path, record in rows)
    write_table(options.output, manifest_columns, cells)
    named = f"manifest: {printable(options.output)}; see `virnucpro train --check`"
    return [*_counts([record for _, record in rows]), named]


def _unique_records(
    rows: Iterable[tuple[str, LabelledRecord]],
) -> Iterator[tuple[str, LabelledRecord]]:
    """Yield the rows, after checking that they are unique.

    Raises:
        InputError: a file, or a record in it, occurs twice.
    """
    labels: dict[tuple[str, str], str] = {}
    for path, record in rows:
        if earlier := labels.get((path, record.id)):
            what = f"the record {printable(record.id)} of " if record.id else ""
            twice = "twice" if earlier == record.label else f"as {earlier} and as {record.label}"
            raise InputError(
                f"{what}{printable(path)} is named {twice}",
                hint="name every file once, under one label",
            )
        labels[path, record.id] = record.label
        yield path, record


def _counts(records: Sequence[LabelledRecord]) -> Iterator[str]:
    """Yield a line per label with its number of rows and groups."""
    for label in ("virus", "other"):
        groups = Counter(record.group for record in records if record.label == label)
        what = "record" if records[0].id else "file"
        n_records = format_count(groups.total(), what)
        yield f"{label}: {n_records} in {format_count(len(groups), 'group')}"


def _relative(path: Path, options: ManifestOptions) -> str:
    """Return a FASTA path as the manifest names it.

    Raises:
        InputError: a table cannot represent the path.
    """
    name = os.path.relpath(path, options.output.absolute().parent)
    if name != name.strip() or {"\t", "\n", "\r"} & {*name}:
        raise InputError(
            f"{printable(path)} has a blank at its end, a tab or a line break in its name",
            hint="rename it",
        )
    return name


def _records_by_folder(options: ManifestOptions) -> Iterator[tuple[str, LabelledRecord]]:
    """Yield each file path, and one row for all its records."""
    for is_virus, sources in ((True, options.virus), (False, options.other)):
        for source in sources:
            for file in _files_in(source):
                path = Path(file.path)
                parts = path.relative_to(source.resolve()).parts if source.is_dir() else ()
                group = parts[0] if len(parts) > 1 else path.name.partition(".")[0]
                yield _relative(path, options), LabelledRecord("", is_virus, group)


def _files_in(source: Path) -> Iterator[InputFile]:
    """Yield a file, or the FASTA files in a folder and all folders below it."""
    if not source.is_dir():
        yield from InputFile.complete(source)
        return
    for folder in (source, *sorted(path for path in source.rglob("*") if path.is_dir())):
        if any(path.is_file() for path in folder.iterdir()):
            yield from InputFile.complete(folder)


def _records_by_table(
    options: ManifestOptions, table: Path
) -> Iterator[tuple[str, LabelledRecord]]:
    """Yield FASTA records that the table names. Warn about all others.

    Raises:
        InputError: a row has no label or no group. The message names the line.
    """
    facts = _read_taxonomy(table, options.group_by)
    missing = {*facts}
    n_others = 0
    for source in chain.from_iterable(map(InputFile.complete, options.fasta)):
        for record in read_fasta(Path(source.path), source.name):
            # NCBI's tables name an accession with or without its version.
            key = record.id if record.id in facts else record.id.rpartition(".")[0]
            if key not in facts:
                n_others += 1
                continue
            missing.discard(key)
            yield _relative(Path(source.path), options), replace(facts[key], id=record.id)
    if n_others:
        LOGGER.warning("not in the table: %s of the FASTA files", format_count(n_others, "record"))
    if missing:
        LOGGER.warning(
            "in no FASTA file: %s of the table, for example %s",
            format_count(len(missing), "accession"),
            ", ".join(map(printable, sorted(missing)[:_MAX_NAMED])),
        )


def _read_taxonomy(table: Path, group_by: str | None) -> dict[str, LabelledRecord]:
    """Read label, group and kingdom per accession."""
    kingdoms = ("kingdom", *_DOMAINS)
    expected = (
        "a table with tabs and a header: accession; label (virus, other) or superkingdom; "
        "and the group"
    )
    ids = ("accession", "id")
    ranks = ("family", "genus", "species")  # the first non-empty column is the group
    facts: dict[str, LabelledRecord] = {}
    for line, cells in read_cells(table, (), expected):
        where = f"{printable(table)}:{line}"
        name = _first_record(cells, ids)
        group = _first_record(cells, (group_by,) if group_by else ranks)
        label = _label(cells, where)
        for what, value in (("accession", name), ("group", group), ("label", label)):
            if not value:
                raise InputError(
                    f"{where}: there is no {what}", hint=f"{expected}, by --group-by or rank"
                )
        record = LabelledRecord("", label == "virus", group, kingdom=_first_record(cells, kingdoms))
        if facts.setdefault(name, record) != record:
            raise InputError(
                f"{where}: {printable(name)} has another row already", hint="keep one of them"
            )
    return facts


def _first_record(cells: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first non-empty cell among these, or "" if all are empty."""
    return next((cells[name] for name in names if cells.get(name)), "")


def _label(cells: Mapping[str, str], where: str) -> str:
    """Return the label, from its column or the domain of life, or "" if both are empty.

    Raises:
        InputError: the label is neither virus nor other.
    """
    viruses = ("viruses", "virus")  # a domain, and a label
    if label := cells.get("label", "").lower():
        return _check_record("virus" if label in viruses else label, where)
    domain = _first_record(cells, _DOMAINS).lower()
    return "" if not domain else "virus" if domain in viruses else "other"
