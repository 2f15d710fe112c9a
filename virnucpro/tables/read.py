"""Read the rows of a run's tables again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TextIO, TypeGuard

from virnucpro.callers.calls import FRAMES_FAILED
from virnucpro.ground.records import STATUSES, Call, Identity, Region, Status
from virnucpro.tables.sinks import OVER_ORIGIN, RecordTable, RegionTable, VirusTable

_KINDS: dict[str, Literal["provirus", "whole"]] = {"provirus": "provirus", "whole": "whole"}


def read_calls(lines: Iterator[str]) -> Iterator[Call]:
    """The rows of a table of records.

    Raises:
        ValueError: it is not as it was written.
    """
    for row in _rows(lines, RecordTable.columns):
        if not _is_status(status := row["status"]) or row["call"] not in ("virus", "other", ""):
            raise ValueError(f"{status} with the call {row['call']}")
        yield Call(
            row["record"],
            int(row["length"]),
            status,
            row["file"],
            virus_score=_number(row["virus_score"]),
            base_score=_number(row["base_score"]),
            is_virus=row["call"] == "virus",
            false_discovery_rate=_number(row["fdr"]),
            n_chunks=int(row["n_chunks"]),
            n_chunks_scored=int(row["n_chunks_scored"]),
            n_frames_scored=int(row["n_frames_scored"]),
            note=row["note"],
        )


def _is_status(text: str) -> TypeGuard[Status]:
    return text in STATUSES


def read_regions(lines: Iterator[str]) -> Iterator[tuple[tuple[str, str], Region]]:
    """The regions of a table of them, each after the sample and the id of its record.

    Raises:
        ValueError: it is not as it was written.
    """
    for row in _rows(lines, RegionTable.columns):
        start, end, posterior = int(row["start"]) - 1, int(row["end"]), float(row["posterior"])
        if not (0 <= start < end and 0 <= posterior <= 1):
            raise ValueError(f"{row['record']} has no region such as {row['region']}")
        if (kind := _KINDS.get(row["kind"])) is None:
            raise ValueError(f"{row['region']} is a {row['kind']}")
        is_part = row["note"] == OVER_ORIGIN
        is_virus = bool(row["virus"])
        region = Region(start, end, kind, posterior, row["att"], is_part, is_virus)
        yield (row["file"], row["record"]), region


def read_identities(lines: Iterator[str]) -> Iterator[tuple[tuple[str, str], Identity]]:
    """What the viruses of a table of them are, each after the sample and the id of its record.

    Raises:
        ValueError: it is not as it was written.
    """
    for row in _rows(lines, VirusTable.columns):
        yield (
            (row["file"], row["record"]),
            Identity(
                virus_kind=row["virus_kind"],
                kind_probability=_number(row["kind_probability"]),
                kin=row["kin"],
                kin_words=int(row["kin_words"] or 0),
                kin_share=_number(row["kin_share"]),
                topology=row["topology"],
                repeat_length=int(row["repeat_length"] or 0),
            ),
        )


def _number(text: str) -> float | None:
    return float(text) if text else None


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


def _rows(lines: Iterator[str], columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """
    Raises:
        ValueError: the table has other columns, or a line is cut short.
    """
    if tuple(next(lines, "").rstrip("\n").split("\t")) != columns:
        raise ValueError("its columns have other names")
    for line in lines:
        if not line.endswith("\n"):
            raise ValueError("its end is missing")
        values = line[:-1].split("\t", len(columns) - 1)
        yield dict(zip(columns, values, strict=True))
