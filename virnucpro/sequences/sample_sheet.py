"""Read sample sheets.

Sample sheets are .tsv or .csv files with the columns ``sample`` and ``path``, in any case and
order, and ``path_2`` for read pairs. The path columns may also be called ``fastq_1`` and
``fastq_2``. Other columns are ignored. A relative path starts in the sheet's folder. A manifest
with labelled sequences (``path``, ``label``, no ``sample``) is also a sheet, in which each file
counts once.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from virnucpro.core.errors import InputError, InputMissingError, UsageError
from virnucpro.core.logging import printable
from virnucpro.core.paths import expand_path

COLUMNS = ("sample", "path")
_MATE_COLUMN = "path_2"
_EXAMPLE = "the first line of a sample sheet names its columns, including sample and path"


class _Row(NamedTuple):
    """A sample and its file."""

    sample: str  # "": named after the file
    path: Path
    line: int
    mate: int = 0  # 1 or 2, if the sample has two files


def read_sheet(path: Path) -> list[_Row]:
    """Read a sample sheet or a manifest.

    Raises:
        InputError: columns are missing, a field is empty, or a sample is named twice.
        InputMissingError: a file does not exist.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            rows = list(_sheet_rows(path, handle))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{printable(path)} is not a sample sheet: {error}", _EXAMPLE) from error
    if not rows:
        raise InputError(f"{printable(path)}: this sample sheet names no file", _EXAMPLE)
    if not any(row.sample for row in rows):  # a manifest may have a row per record in a file
        rows = [*{row.path: row for row in rows}.values()]
    first: dict[str, int] = {}
    for row in rows:
        where = f"{printable(path)}:{row.line}"
        if row.sample and first.get(row.sample, row.line) != row.line:
            raise InputError(
                f"{where}: the sample '{printable(row.sample)}' is named twice "
                f"(first in line {first[row.sample]})",
                hint="give each file its own sample name; the second file of read pairs goes into "
                "the column path_2",
            )
        first[row.sample] = row.line
        if not row.path.is_file():
            problem = "not a file" if row.path.exists() else "there is no such file"
            raise InputMissingError(
                f"{where}: {printable(row.path)}: {problem}",
                hint="each line of a sheet names a file; a relative path starts in the folder of "
                "the sheet",
            )
    return rows


def _sheet_rows(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    separators = {".tsv": "\t", ".csv": ","}
    other_names = {"fastq_1": "path", "fastq_2": _MATE_COLUMN}
    manifest_columns = ("path", "label")
    separator = separators[path.suffix.lower()]
    hint = f"{_EXAMPLE}, separated by {'commas' if separator == ',' else 'tabs'}"
    reader = csv.DictReader(lines, delimiter=separator, strict=True, restval="")
    words = [word.strip().lower() for word in reader.fieldnames or ()]
    header = reader.fieldnames = [other_names.get(word, word) for word in words]
    if not any(set(header) >= set(columns) for columns in (COLUMNS, manifest_columns)):
        names = ", ".join(map(printable, header)) or "nothing"
        raise InputError(
            f"{printable(path)}:1: expected '>' or the columns of a sample sheet, not {names}", hint
        )
    if twice := [name for name in (*COLUMNS, _MATE_COLUMN) if header.count(name) > 1]:
        raise InputError(f"{printable(path)}:1: two columns {twice[0]}", hint)
    for fields in reader:
        cells = {name: fields[name].strip() for name in header}
        if any(cells.values()):
            yield from _parse_rows(path, reader.line_num, cells, hint)


def _parse_rows(path: Path, line: int, cells: Mapping[str, str], hint: str) -> Iterator[_Row]:
    if absent := [name for name in COLUMNS if name in cells and not cells[name]]:
        raise InputError(f"{printable(path)}:{line}: no {absent[0]} in this line", hint)
    names = [name for name in (cells["path"], cells.get(_MATE_COLUMN)) if name]
    for mate, name in enumerate(names, 1):
        file = _row_to_input(path, line, name)
        yield _Row(cells.get("sample", ""), file, line, mate * (len(names) - 1))


def _row_to_input(path: Path, line: int, cell: str) -> Path:
    """Return the file that a line names, relative to the sheet's folder."""
    try:
        return path.parent / expand_path(cell)
    except UsageError as error:
        raise InputMissingError(f"{printable(path)}:{line}: {error}", error.hint) from error
