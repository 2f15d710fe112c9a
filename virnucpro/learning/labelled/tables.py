"""Tables that users write: columns told apart by tabs, with a header, plain or packed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from virnucpro.ground.errors import InputError
from virnucpro.ground.files import OnBlock, open_binary
from virnucpro.ground.log import printable
from virnucpro.sequences.fasta import unpacking


def read_cells(
    path: Path, needed: Sequence[str], hint: str, on_block: OnBlock | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of each line below the header, and its cells by column, without outer blanks.

    Blank lines are skipped. ``hint`` says what the table should be if a ``needed`` column is not
    there. ``on_block`` is given the bytes of the file, as they lie on the disk.

    Raises:
        InputError: it is not a table, or lacks a column; names file and line.
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
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise InputError(
                f"{label}:{number}: {len(cells)} cells for {len(columns)} columns",
                hint="there must be one tab between two cells, and none inside a cell",
            )
        yield number, {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}


def read_lines(path: Path, on_block: OnBlock | None) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    try:
        with (
            unpacking(path, printable(path)),
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
