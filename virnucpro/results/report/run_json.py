"""Read a run's facts from its folder: all files except its tables.

A fact that is missing, or has an unexpected type, is omitted.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import InputMissingError
from virnucpro.core.json_checksum import read_facts
from virnucpro.core.logging import escape_markup, printable
from virnucpro.core.numeric import FloatArray
from virnucpro.core.option_text import with_options
from virnucpro.results.outputs import REGION_TABLE, TRACKS
from virnucpro.results.table_blocks import TableBlock, open_table_reader, split_table

if TYPE_CHECKING:
    from virnucpro.viral.types import Region

_MOST_OF_LOG = 1 << 20  # bytes, from its end
_MESSAGE = re.compile(r"\S+ \S+ (INFO|WARNING|ERROR) +(.*)")
# First log line of a run, and of a command that adds regions to its tables.
_START = re.compile(r"virnucpro \S+: ")
_REGIONS_START = re.compile(r"virnucpro \S+ regions: ")
Key: TypeAlias = tuple[str, str]  # file and id of a record
ListedRegions: TypeAlias = (
    "dict[Key, tuple[str, list[Region]]]"  # file and id -> id in the run, regions
)
_MOST = 10**15  # largest number on the page
_MOST_LISTED = 5_000  # records whose regions a page lists
_BASES_PER_BIN = 1_000  # for the evidence along a record
_MOST_BINS = 10_000
_TRACK_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class RunJson:
    """Content from ``run.json`` or a similar file. Any value may be missing or wrong."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunJson:
        """Read facts about a run or a training from its JSON file.

        Raises:
            InputMissingError: the file does not exist.
            ResumeError: the file is damaged.
        """
        if not path.is_file():
            raise InputMissingError(
                f"{printable(path.parent)} contains no run",
                hint=with_options("give the {output_dir} of a run"),
            )
        return cls(read_facts(path))

    def _value_at(self, names: Sequence[str]) -> object:
        """Return the value at a name path."""
        value: object = self.content
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def section(self, *names: str) -> Mapping[str, Any]:
        """Return the object at a name path, empty if missing."""
        value = self._value_at(names)
        return value if isinstance(value, Mapping) else {}

    def text(self, *names: str) -> str:
        value = self._value_at(names)
        return escape_markup(value) if isinstance(value, str) else ""

    def number(self, *names: str) -> int:
        return _count(self._value_at(names))

    def decimal(self, *names: str) -> float | None:
        """Return the usable number at a name path, or None if it is missing."""
        value = self._value_at(names)
        return float(value) if is_number(value) else None

    def sequence(self, *names: str) -> Sequence[Any]:
        value = self._value_at(names)
        return value if isinstance(value, list) else ()

    def iter_section(self, *names: str) -> list[RunJson]:
        """Return the objects in a sequence."""
        return [RunJson(item) for item in self.sequence(*names) if isinstance(item, Mapping)]

    @property
    def inputs(self) -> list[RunJson]:
        """The input files, and the files that could not be read."""
        return [*self.iter_section("inputs"), *self.iter_section("refused")]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage, by name."""
        return {
            escape_markup(name): float(value)
            for name, value in self.section("counts", "seconds").items()
            if is_number(value)
        }

    @property
    def cut(self) -> list[tuple[float, float]]:
        """Length and threshold, at some lengths in ascending order."""
        pairs = [
            (float(pair[0]), float(pair[1]))
            for pair in self.sequence("counts", "cut_scores")
            if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
        ]
        return sorted((n, score) for n, score in pairs if n >= 1 and 0 <= score <= 1)

    @property
    def n_counted(self) -> int | None:
        """The record count when the run wrote its tables."""
        numbers = self.section("counts", "statuses").values()
        return sum(map(_count, numbers)) if numbers else None


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a usable number. JSON allows infinities, NaN and integers of any size."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_MOST <= value <= _MOST


def _count(value: object) -> int:
    return value if is_number(value) and isinstance(value, int) else 0


def read_complaints(log: Path) -> Counter[str]:
    """Count warnings and errors in the log, if there is one.

    They come from the run's last start, and from the last region search after it.
    """
    try:
        with open_regular_file(log) as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - _MOST_OF_LOG))
            text = handle.read().decode("utf-8", "backslashreplace")
    except OSError:
        return Counter()
    run_complaints: Counter[str] = Counter()
    region_complaints: Counter[str] = Counter()
    current = run_complaints
    for line in text.splitlines():
        match = _MESSAGE.fullmatch(line)
        if match is None:
            continue
        level, message = match.groups()
        if level != "INFO":
            current[printable(message)] += 1
        elif _START.match(message):
            run_complaints.clear()
            region_complaints.clear()
            current = run_complaints
        elif _REGIONS_START.match(message):
            region_complaints.clear()
            current = region_complaints
    return run_complaints + region_complaints


def read_page_regions(table: Path) -> tuple[Counter[Key], ListedRegions]:
    """Count each record's regions, and read those that a page lists, best records first.

    Regions that cover a complete record are not counted, and come after regions within a record.
    The table may be missing.

    Raises:
        InputError: the table is damaged.
    """
    # Not at the top of the file: the page of an extraction has no regions.
    from virnucpro.results.table_readers import parse_region

    n_regions = Counter[Key]()
    listed: ListedRegions = {}
    for span in split_table(table, REGION_TABLE.old_names):
        with open_table_reader(table):
            rows = zip(*span.read().columns(REGION_TABLE.columns), strict=True)
            for row in (dict(zip(REGION_TABLE.columns, values, strict=True)) for values in rows):
                key, region = parse_region(row)
                listed.setdefault(key, (row["region"].rpartition("|")[0], []))[1].append(region)
                if region.extent != "whole":  # the other part of a region over the origin counts
                    n_regions[key] += not (region.over_origin and region.start == 0)
        listed = dict(sorted(listed.items(), key=_sort_key, reverse=True)[:_MOST_LISTED])
    return n_regions, listed


def _sort_key(listed_record: tuple[Key, tuple[str, list[Region]]]) -> tuple[bool, int, Key]:
    """Return a record's sort key: has a region within it, viral letters, name."""
    key, (_, regions) = listed_record
    is_part = any(region.extent != "whole" for region in regions)
    return is_part, sum(region.end - region.start for region in regions), key


def read_tracks(path: Path, lengths: Mapping[str, int]) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Read posterior and log-odds along some records, by their run ids. The file may be missing.

    Returns:
        Run id -> (n_bins,) each: largest posterior and mean log-odds. NaN: no piece is in the bin.

    Raises:
        InputError: the file is damaged.
    """
    pieces: dict[str, list[FloatArray]] = {}  # middles, log-odds and posteriors, block by block
    if not path.is_file():
        return {}
    with (
        open_table_reader(path, EOFError, zlib.error, gzip.BadGzipFile),
        gzip.open(path, "rb") as lines,
    ):
        header = lines.readline().decode("utf-8", "surrogateescape")
        if missing := set(TRACKS.columns) - set(header.split()):
            raise ValueError(f"it has no column {min(missing)}")
        while data := b"".join(lines.readlines(_TRACK_BYTES_AT_ONCE)):
            block = TableBlock.from_bytes(data, header)
            run_ids, code = block.codes("record")
            first = block.integers("start")
            last = block.integers("end")
            middle = np.where(first <= last, (first + last) // 2, first)  # over the origin
            posterior = block.numbers("posterior")
            if not ((posterior >= 0) & (posterior <= 1)).all():
                raise ValueError("a posterior must lie between 0 and 1")
            values = np.array([middle, block.numbers("log_odds"), posterior])
            for run_code, run_id in enumerate(run_ids):
                if run_id in lengths:
                    pieces.setdefault(run_id, []).append(values[:, code == run_code])
    return {
        run_id: _bin_values(lengths[run_id], *np.concatenate(blocks, axis=1))
        for run_id, blocks in pieces.items()
    }


def _bin_values(
    length: int, positions: FloatArray, odds: FloatArray, posterior: FloatArray
) -> tuple[FloatArray, FloatArray]:
    n_bins = count_bins(length)
    is_known = ~np.isnan(odds)
    bins = np.clip(positions * n_bins / max(1, length), 0, n_bins - 1).astype(np.int64)
    largest = np.full(n_bins, -1.0)
    np.maximum.at(largest, bins, posterior)
    n_known = np.bincount(bins[is_known], minlength=n_bins)
    sums = np.bincount(bins[is_known], odds[is_known], minlength=n_bins)
    means = np.divide(sums, n_known, out=np.full(n_bins, np.nan), where=n_known > 0)
    return np.where(largest < 0, np.nan, largest), means


def count_bins(length: int) -> int:
    """Count the bins for a record: one per piece length, up to a maximum."""
    return min(max(1, length // _BASES_PER_BIN), _MOST_BINS)
