"""Read the regions of a prediction, and the evidence along its records, for the page."""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, compress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from virnucpro.core.logging import escape_markup, printable
from virnucpro.core.numeric import FloatArray
from virnucpro.results.outputs import RunOutput
from virnucpro.results.report.page_data import join_lines, scale
from virnucpro.results.report.run_json import Key
from virnucpro.results.table_blocks import TableBlock, open_table_reader, split_table
from virnucpro.results.table_readers import parse_region
from virnucpro.viral.types import Region

# file and id -> id in the run, regions
ListedRegions: TypeAlias = dict[Key, tuple[str, list[Region]]]


class ListedRecord(NamedTuple):
    """A record with regions that the page lists."""

    file: str
    record: str
    run_id: str
    length: int
    score: float
    regions: Sequence[Region]


def read_page_regions(table: Path) -> tuple[Counter[Key], ListedRegions]:
    """Count each record's regions, and read those that a page lists, best records first.

    Regions that cover a complete record are not counted, and come after regions within a record.
    The table may be missing.

    Raises:
        InputError: the table is damaged.
    """
    max_listed = 5_000  # records whose regions a page lists
    n_regions = Counter[Key]()
    listed: ListedRegions = {}
    for span in split_table(table, RunOutput.REGION_TABLE.old_names):
        with open_table_reader(table):
            rows = zip(*span.read().columns(RunOutput.REGION_TABLE.columns), strict=True)
            for row in (
                dict(zip(RunOutput.REGION_TABLE.columns, values, strict=True)) for values in rows
            ):
                key, region = parse_region(row)
                listed.setdefault(key, (row["region"].rpartition("|")[0], []))[1].append(region)
                if region.extent != "whole":  # the other part of a region over the origin counts
                    n_regions[key] += not (region.over_origin and region.start == 0)
        listed = dict(sorted(listed.items(), key=_sort_key, reverse=True)[:max_listed])
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
    track_bytes_at_once = 1 << 20
    pieces: dict[str, list[FloatArray]] = {}  # middles, log-odds and posteriors, block by block
    if not path.is_file():
        return {}
    with (
        open_table_reader(path, EOFError, zlib.error, gzip.BadGzipFile),
        gzip.open(path, "rb") as lines,
    ):
        header = lines.readline().decode("utf-8", "surrogateescape")
        if missing := set(RunOutput.TRACKS.columns) - set(header.split()):
            raise ValueError(f"it has no column {min(missing)}")
        while data := lines.read(track_bytes_at_once) + lines.readline():
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
    bases_per_bin = 1_000  # for the evidence along a record
    max_bins = 10_000  # per record
    return min(max(1, length // bases_per_bin), max_bins)


def select_listed(
    regions: ListedRegions, sizes: Mapping[Key, tuple[str, ...]]
) -> Iterator[ListedRecord]:
    """Yield the records with regions that the page lists.

    The region in a record that is viral throughout is omitted, because it adds nothing to the call.
    """
    for (file, record), (run_id, record_regions) in regions.items():
        n_letters, score = sizes.get((file, record), ("", ""))
        length = max(int(float(n_letters or 0)), *(region.end for region in record_regions))
        is_part = [
            region.extent != "whole" or (region.start, region.end) != (0, length)
            for region in record_regions
        ]
        if parts := list(compress(record_regions, is_part)):
            yield ListedRecord(file, record, run_id, length, float(score or math.nan), parts)


def first_regions(listed: Sequence[ListedRecord]) -> dict[str, object]:
    """Count regions and their records, and list the first regions, for a printed page."""
    max_listed_regions = 20  # regions in the list without JavaScript
    rows = [(record, region) for record in listed for region in record.regions]
    first = [
        (printable(record.record), printable(record.file), region)
        for record, region in rows[:max_listed_regions]
    ]
    return {"n": len(rows), "first": first}


def region_data(listed: Sequence[ListedRecord], tracks: Path) -> dict[str, object]:
    """Return columns for the region list, and the evidence along the best records.

    Args:
        tracks: the file with the evidence.
    """
    if not listed:
        return {}
    rows = [(record, region) for record in listed for region in record.regions]
    file_names = dict.fromkeys(record.file for record in listed)
    files = {file: i for i, file in enumerate(file_names)}
    columns = {
        "record": join_lines([record.record for record, _ in rows]),
        "file": [files[record.file] for record, _ in rows],
        "start": [region.start + 1 for _, region in rows],
        "end": [region.end for _, region in rows],
        "posterior": scale([region.posterior for _, region in rows], 10_000),
        "verdict": [int(region.is_virus) for _, region in rows],
        "judged": [region.region_class for _, region in rows],
        "score": scale([record.score for record, _ in rows], 10**6),
        "evidence": join_lines([region.evidence for _, region in rows]),
    }
    return {
        "regions": {"files": list(map(printable, files)), "columns": columns},
        "tracks": list(_evidence_maps(listed, tracks)),
    }


def _evidence_maps(listed: Sequence[ListedRecord], path: Path) -> Iterator[dict[str, object]]:
    """Yield the evidence along the best records, as many as fit."""
    max_tracks = 200  # records with a map
    max_page_bins = 150_000  # over all maps
    ends = accumulate(count_bins(record.length) for record in listed)
    drawn = [record for record, end in zip(listed, ends, strict=True) if end <= max_page_bins]
    drawn = drawn[:max_tracks]
    no_values = np.full(1, np.nan)
    lengths = {record.run_id: record.length for record in drawn}
    tracks = read_tracks(path, lengths)
    for record in drawn:
        posterior, log_odds = tracks.get(record.run_id, (no_values, no_values))
        yield {
            "record": printable(record.record),
            "file": printable(record.file),
            "length": record.length,
            "posterior": scale(posterior, 100),
            "odds": scale(log_odds, 2),
            "regions": [
                {
                    "extent": escape_markup(region.extent),
                    "start": region.start + 1,
                    "end": region.end,
                    "posterior": 0.0 if math.isnan(region.posterior) else region.posterior,
                    "verdict": int(region.is_virus),
                }
                for region in sorted(record.regions)
            ],
        }
