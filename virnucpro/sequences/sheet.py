"""Sample sheets: tables that name the files of a run.

A sheet is a ``.tsv`` or ``.csv`` file with the columns ``sample`` and ``path``, in any case and
order, and for read pairs ``path_2``; ``fastq_1`` and ``fastq_2`` are other names of the two. Other
columns are ignored. A relative path starts in the folder of the sheet. The manifest of labelled
sequences (``path``, ``label``, no ``sample``) is a sheet too: each of its files once, by file name.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from virnucpro.ground.errors import InputError, InputMissingError, UsageError
from virnucpro.ground.files import expanded
from virnucpro.ground.log import printable
from virnucpro.sequences.fasta import cannot_open

COLUMNS, _OF_MANIFEST = ("sample", "path"), ("path", "label")
_OF_MATE = "path_2"
_OTHER_NAMES = {"fastq_1": "path", "fastq_2": _OF_MATE}
_SEPARATORS = {".tsv": "\t", ".csv": ","}
_EXAMPLE = "the first line of a sample sheet names its columns, sample and path among them"


class _Row(NamedTuple):
    """A sample and its file."""

    sample: str  # "": the file's name
    path: Path
    line: int
    mate: int = 0  # 1 or 2, of a sample with two files


def is_sheet(path: Path) -> bool:
    """True for a file that has the name of a table, and does not begin as FASTA or FASTQ does.

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
    return not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b">", b"@"))


def read_sheet(path: Path) -> list[_Row]:
    """
    Raises:
        InputError: columns are missing, a field is empty, or a sample is named twice.
        InputMissingError: a file is not there.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, delimiter=_SEPARATORS[path.suffix.lower()], strict=True)
            rows = _once(list(_rows(path, reader)))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{printable(path)} is not a sample sheet: {error}", _EXAMPLE) from error
    if not rows:
        raise InputError(f"{printable(path)}: this sample sheet names no file", _EXAMPLE)
    first: dict[str, int] = {}
    for row in rows:
        where = f"{printable(path)}:{row.line}"
        if row.sample and first.get(row.sample, row.line) != row.line:
            raise InputError(
                f"{where}: the sample '{printable(row.sample)}' is named twice "
                f"(first in line {first[row.sample]})",
                hint="give each file a sample name of its own; the second file of read pairs "
                "goes into the column path_2",
            )
        first[row.sample] = row.line
        if not row.path.is_file():
            what = "is no file" if row.path.exists() else "there is no such file"
            raise InputMissingError(
                f"{where}: {printable(row.path)}: {what}",
                hint="a sheet names a file in each line; a relative path starts in the "
                "folder of the sheet",
            )
    return rows


def _once(rows: list[_Row]) -> list[_Row]:
    """The same rows; those of a manifest, which may have one for each record, once for a file."""
    if any(row.sample for row in rows):
        return rows
    return [*{row.path: row for row in rows}.values()]


def _rows(path: Path, reader: Iterator[list[str]]) -> Iterator[_Row]:
    places = _places(path, next(reader, []))
    for fields in reader:
        line: int = reader.line_num  # type: ignore[attr-defined]
        if not any(field.strip() for field in fields):
            continue
        cells = {name: fields[i].strip() for name, i in places.items() if i < len(fields)}
        if absent := [name for name in COLUMNS if name in places and not cells.get(name)]:
            raise InputError(
                f"{printable(path)}:{line}: no {absent[0]} in this line",
                hint=f"columns are separated by {_separator_name(path)}",
            )
        names = [name for name in (cells["path"], cells.get(_OF_MATE)) if name]
        for mate, name in enumerate(names, 1):
            file = _file_of(path, line, name)
            yield _Row(cells.get("sample", ""), file, line, mate * (len(names) - 1))


def _file_of(path: Path, line: int, cell: str) -> Path:
    """The file that a line names, from the folder of the sheet."""
    try:
        return path.parent / expanded(cell)
    except UsageError as error:
        raise InputMissingError(f"{printable(path)}:{line}: {error}", error.hint) from error


def _places(path: Path, fields: list[str]) -> dict[str, int]:
    """The places of the columns that are read, by their names."""
    words = [field.strip().lower() for field in fields]
    header = [_OTHER_NAMES.get(word, word) for word in words]
    if not (set(COLUMNS) <= set(header) or set(_OF_MANIFEST) <= set(header)):
        names = ", ".join(map(printable, header)) or "nothing"
        raise InputError(
            f"{printable(path)}:1: expected '>' or the columns of a sample sheet, not {names}",
            hint=f"{_EXAMPLE}, separated by {_separator_name(path)}",
        )
    return {name: header.index(name) for name in (*COLUMNS, _OF_MATE) if name in header}


def _separator_name(path: Path) -> str:
    return "tabs" if path.suffix.lower() == ".tsv" else "commas"
