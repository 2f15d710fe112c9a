"""``virnucpro manifest``: folders by label, or a table of accessions and taxonomy, to a manifest.

By folder, a file is of one label, and its group is the first folder below the one that was given,
or else the name of the file without its endings. By table, a row is a record of the FASTA files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from virnucpro.ground.errors import InputError, OutputError
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import LOGGER, counted, printable
from virnucpro.learning.labelled.records import read_cells
from virnucpro.learning.options import ManifestOptions
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.inputs import Source, list_sources

_COLUMNS = ("path", "id", "label", "group", "kingdom")
_RANKS = ("family", "genus", "species")  # the first that is there and not empty is the group
_IDS = ("accession", "id")
_VIRUSES = ("viruses", "virus")  # a domain, and a label
_DOMAINS = ("superkingdom", "domain", "realm")
_KINGDOMS = ("kingdom", *_DOMAINS)
_HINT = (
    "a table with tabs and a header: accession; label (virus, other) or superkingdom; and the group"
)
_MOST_NAMED = 5
Row = dict[str, str]  # by ``_COLUMNS``


def write_manifest(options: ManifestOptions) -> list[str]:
    """Write a manifest, and return lines on what it holds.

    Raises:
        OutputError: the file is there already, and this is not to be forced.
        InputError: the table makes no sense, or a label is missing.
        InputMissingError: a file cannot be read.
    """
    path = options.output
    if path.exists() and not options.force:
        raise OutputError(f"{printable(path)} is there already", hint="replace it with --force")
    rows = list(_by_folder(options) if options.table is None else _by_table(options, options.table))
    for label in ("virus", "other"):
        if not any(row["label"] == label for row in rows):
            raise InputError(f"no sequence has the label {label}", hint="give some of both labels")
    lines = ["\t".join(_COLUMNS), *("\t".join(map(row.__getitem__, _COLUMNS)) for row in rows)]
    write_whole(path, "\n".join([*lines, ""]))
    return [*_counts(rows), f"manifest: {printable(path)}; see `virnucpro train --check`"]


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each label: its rows, and its groups."""
    for label in ("virus", "other"):
        groups = Counter(row["group"] for row in rows if row["label"] == label)
        what = "record" if rows[0]["id"] else "file"
        yield f"{label}: {counted(groups.total(), what)} in {counted(len(groups), 'group')}"


def _relative(path: Path, options: ManifestOptions) -> str:
    """The path of a FASTA file as the manifest names it.

    Raises:
        InputError: it cannot stand in a table.
    """
    name = os.path.relpath(path, options.output.absolute().parent)
    if name != name.strip() or {"\t", "\n", "\r"} & {*name}:
        raise InputError(
            f"{printable(path)} has a blank at its end, a tab or a line break in its name",
            hint="rename it",
        )
    return name


def _by_folder(options: ManifestOptions) -> Iterator[Row]:
    for label, places in (("virus", options.virus), ("other", options.other)):
        for place in places:
            for source in _files_in(place):
                inside = source.path.relative_to(place.resolve()).parts if place.is_dir() else ()
                group = inside[0] if len(inside) > 1 else source.path.name.partition(".")[0]
                yield {
                    "path": _relative(source.path, options),
                    "id": "",
                    "label": label,
                    "group": group,
                    "kingdom": "",
                }


def _files_in(place: Path) -> Iterator[Source]:
    """A file, or the FASTA files of a folder and of all folders below it that hold files."""
    if not place.is_dir():
        yield from list_sources(place)
        return
    for folder in (place, *sorted(path for path in place.rglob("*") if path.is_dir())):
        if any(path.is_file() for path in folder.iterdir()):
            yield from list_sources(folder)


def _by_table(options: ManifestOptions, table: Path) -> Iterator[Row]:
    """The records of the FASTA files that the table names; the others are counted.

    Raises:
        InputError: a row has no label or no group; names its line.
    """
    facts = _read_taxonomy(table, options.group_by)
    missing = {*facts}
    n_others = 0
    for source in chain.from_iterable(map(list_sources, options.fasta)):
        for record in read_fasta(source.path, source.name):
            # NCBI's tables name an accession with its version or without
            key = record.id if record.id in facts else record.id.rpartition(".")[0]
            if key not in facts:
                n_others += 1
                continue
            missing.discard(key)
            yield {"path": _relative(source.path, options), "id": record.id, **facts[key]}
    if n_others:
        LOGGER.warning("%s of the FASTA files: in no row", counted(n_others, "record"))
    if missing:
        LOGGER.warning(
            "%s of the table: in no FASTA file, for example %s",
            counted(len(missing), "accession"),
            ", ".join(map(printable, sorted(missing)[:_MOST_NAMED])),
        )


def _read_taxonomy(table: Path, group_by: str | None) -> dict[str, Row]:
    """Label, group and kingdom of each accession."""
    facts: dict[str, Row] = {}
    for line, cells in read_cells(table, (), _HINT):
        where = f"{printable(table)}:{line}"
        name = _first(cells, _IDS)
        group = _first(cells, (group_by,) if group_by else _RANKS)
        label = _label(cells)
        if not (name and group and label):
            lack = "accession" if not name else "group" if not group else "label"
            raise InputError(f"{where}: there is no {lack}", hint=f"{_HINT}, by --group-by or rank")
        row = {"label": label, "group": group, "kingdom": _first(cells, _KINGDOMS)}
        if facts.setdefault(name, row) != row:
            raise InputError(
                f"{where}: {printable(name)} has another row already", hint="keep one of them"
            )
    return facts


def _first(cells: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of these columns that is there and not empty."""
    return next((cells[name] for name in names if cells.get(name)), "")


def _label(cells: Mapping[str, str]) -> str:
    """By the column of labels, or by the domain of life."""
    value = _first(cells, ("label", *_DOMAINS)).lower()
    return "" if not value else "virus" if value in _VIRUSES else "other"
