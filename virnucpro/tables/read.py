"""Read the rows of a run's tables again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from virnucpro.callers.calls import FRAMES_FAILED
from virnucpro.ground.records import Call, is_status
from virnucpro.tables.sinks import RecordTable, RegionTable


def read_calls(lines: Iterator[str]) -> Iterator[Call]:
    """The rows of a table of records.

    Raises:
        ValueError: it is not as it was written.
    """
    columns = tuple(next(lines, "").rstrip("\n").split("\t"))
    if columns != RecordTable.columns:
        raise ValueError("its columns have other names")
    for line in lines:
        values = line.rstrip("\n").split("\t", len(columns) - 1)
        row = dict(zip(columns, values, strict=True))
        if not is_status(status := row["status"]) or row["call"] not in ("virus", "other", ""):
            raise ValueError(f"{status} with the call {row['call']}")
        yield Call(
            row["record"],
            int(row["length"]),
            status,
            row["file"],
            virus_score=float(row["virus_score"]) if row["virus_score"] else None,
            base_score=float(row["base_score"]) if row["base_score"] else None,
            is_virus=row["call"] == "virus",
            false_discovery_rate=float(row["fdr"]) if row["fdr"] else None,
            n_chunks=int(row["n_chunks"]),
            n_chunks_scored=int(row["n_chunks_scored"]),
            n_frames_scored=int(row["n_frames_scored"]),
            note=row["note"],
        )


def read_regions(lines: TextIO) -> Iterator[tuple[str, tuple[int, int]]]:
    """The regions of a table of them: the id of the record in its file, start and end as inside.

    Raises:
        ValueError: it is not as it was written.
    """
    columns = tuple(next(lines, "").rstrip("\n").split("\t"))
    if columns != RegionTable.columns:
        raise ValueError("its columns have other names")
    for line in lines:
        row = dict(zip(columns, line.rstrip("\n").split("\t"), strict=True))
        yield row["record"], (int(row["start"]) - 1, int(row["end"]))


def read_mendable(lines: TextIO) -> Iterator[tuple[str, str]]:
    """Sample and id of each record that is invalid, or of which a frame failed."""
    for row in read_calls(lines):
        if row.status == "invalid" or FRAMES_FAILED in row.note:
            yield row.sample, row.record_id


def read_frame_scores(lines: TextIO) -> Iterator[tuple[str, float]]:
    """The frames of a table of frames, and their virus scores."""
    next(lines, None)
    for line in lines:
        frame_id, _, _, score = line.rstrip("\n").split("\t")
        yield frame_id, float(score)
