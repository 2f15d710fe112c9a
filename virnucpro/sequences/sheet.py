"""Sample sheets: tables that name the files of a run.

A sheet is a ``.tsv`` or ``.csv`` file with the columns ``sample`` and ``path``, in any case and
order; other columns are passed over. A relative path is meant from the sheet's folder.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from virnucpro.ground.errors import InputError, InputMissingError
from virnucpro.ground.log import printable
from virnucpro.sequences.fasta import cannot_open

COLUMNS = ("sample", "path")
_SEPARATORS = {".tsv": "\t", ".csv": ","}
_EXAMPLE = "the first line of a sample sheet names its columns, sample and path among them"


class SheetRow(NamedTuple):
    """A sample and its file."""

    sample: str
    path: Path
    line: int


def is_sheet(path: Path) -> bool:
    """True for a file that has the name of a table, and does not begin as FASTA does.

    Raises:
        InputMissingError: it cannot be read.
    """
    if path.suffix.lower() not in _SEPARATORS or not path.is_file():
        return False
    try:
        with path.open("rb") as handle:
            start = handle.read(4096)
    except OSError as error:
        raise cannot_open(path, error) from error
    return not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b">")


def read_sheet(path: Path) -> list[SheetRow]:
    """
    Raises:
        InputError: columns are missing, a field is empty, or a sample is named twice.
        InputMissingError: a file is not there.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, delimiter=_SEPARATORS[path.suffix.lower()], strict=True)
            rows = list(_rows(path, reader))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{printable(path)} is not a sample sheet: {error}", _EXAMPLE) from error
    if not rows:
        raise InputError(f"{printable(path)}: this sample sheet names no file", _EXAMPLE)
    first: dict[str, int] = {}
    for row in rows:
        where = f"{printable(path)}:{row.line}"
        if row.sample in first:
            raise InputError(
                f"{where}: the sample '{printable(row.sample)}' is named twice "
                f"(first in line {first[row.sample]})",
                hint="give each file a sample name of its own",
            )
        first[row.sample] = row.line
        if not row.path.is_file():
            what = "is no file" if row.path.exists() else "there is no such file"
            raise InputMissingError(
                f"{where}: {printable(row.path)}: {what}",
                hint="a sheet names a FASTA file in each line; a relative path is meant from the "
                "folder of the sheet",
            )
    return rows


def _rows(path: Path, reader: Iterator[list[str]]) -> Iterator[SheetRow]:
    header = [name.strip().lower() for name in next(reader, [])]
    if not set(COLUMNS) <= set(header):
        names = ", ".join(map(printable, header)) or "nothing"
        raise InputError(
            f"{printable(path)}:1: expected '>' or the columns of a sample sheet, not {names}",
            hint=f"{_EXAMPLE}, separated by {_separator_name(path)}",
        )
    places = {name: header.index(name) for name in COLUMNS}
    for fields in reader:
        line: int = reader.line_num  # type: ignore[attr-defined]
        if not any(field.strip() for field in fields):
            continue
        cells = {name: fields[i].strip() for name, i in places.items() if i < len(fields)}
        for name in COLUMNS:
            if not cells.get(name):
                raise InputError(
                    f"{printable(path)}:{line}: no {name} in this line",
                    hint=f"columns are separated by {_separator_name(path)}",
                )
        yield SheetRow(cells["sample"], path.parent / cells["path"], line)


def _separator_name(path: Path) -> str:
    return "tabs" if path.suffix.lower() == ".tsv" else "commas"
