"""Read run tables that VirNucPro itself needs: calls, regions, viruses and frames."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Literal, cast

from virnucpro.core.recipe import STATUSES, Command, Status
from virnucpro.results.outputs import ORIGIN, RunOutput
from virnucpro.viral.types import Call, Identity, Region

RecordKey = tuple[str, str]  # sample and id of a record


def read_calls(path: Path, hint: str) -> Iterator[Call]:
    """Open a table of records now, and yield its calls later: see ``OutputFile.rows_at``."""
    return RunOutput.RECORD_TABLE.rows_at(path, parse_call, hint)


def read_records(command: Command, path: Path, hint: str) -> Iterator[Call]:
    """Open a command's table of records, as ``read_calls`` does.

    Records from ``extract`` have no score. Their ``n_frames_scored`` counts vectors.
    """
    if command == "predict":
        return read_calls(path, hint)
    return RunOutput.EMBEDDED_TABLE.rows_at(path, _parse_embedded, hint)


def read_regions(path: Path, hint: str) -> Iterator[tuple[RecordKey, Region]]:
    """Open a table of regions now, and yield them later, each with its record."""
    return RunOutput.REGION_TABLE.rows_at(path, parse_region, hint)


def read_identities(path: Path, hint: str) -> Iterator[tuple[RecordKey, Identity]]:
    """Open a table of viruses now, and yield their identities later, each with its record."""
    return RunOutput.VIRUS_TABLE.rows_at(path, parse_identity, hint)


def read_frame_scores(path: Path, hint: str) -> Iterator[tuple[str, float]]:
    """Open a table of frames now, and yield their ids and virus scores later."""
    return RunOutput.FRAME_TABLE.rows_at(path, _parse_frame, hint)


def _parse_frame(row: dict[str, str]) -> tuple[str, float]:
    return row["Sequence_ID"], float(row["score2"])


def _float(text: str) -> float | None:
    return float(text) if text else None


def parse_call(row: dict[str, str]) -> Call:
    status = cast(Status, row["status"])
    if status not in STATUSES or row["call"] not in ("virus", "other", ""):
        raise ValueError(f"a record has the status {status} and the call {row['call']}")
    return Call(
        row["record"],
        int(row["length"]),
        status,
        row["file"],
        virus_score=_float(row["virus_score"]),
        base_score=_float(row["base_score"]),
        is_virus=row["call"] == "virus",
        false_discovery_rate=_float(row["fdr"]),
        n_chunks=int(row["n_chunks"]),
        n_chunks_scored=int(row["n_chunks_scored"]),
        n_frames_scored=int(row["n_frames_scored"]),
        note=row["note"],
        evidence=_parse_evidence(row),
        known_family=row.get("known_family", ""),
        n_known_kmers=int(row["n_known_kmers"]) if row.get("n_known_kmers") else None,
    )


def _parse_evidence(row: dict[str, str]) -> Literal["score", "known", "both", ""]:
    """Parse the evidence for a call. Tables from earlier versions have none."""
    evidence = row.get("evidence", "")
    if evidence not in ("score", "known", "both", ""):
        raise ValueError(f"a record has the evidence {evidence}")
    return cast(Literal["score", "known", "both", ""], evidence)


def _parse_embedded(row: dict[str, str]) -> Call:
    status = cast(Status, row["status"])
    if status not in STATUSES:
        raise ValueError(f"a record has the status {status}")
    return Call(
        row["record"],
        int(row["length"]),
        status,
        row["file"],
        n_chunks=int(row["n_chunks"]),
        n_frames_scored=int(row["n_embedded"]),
        note=row["note"],
    )


def parse_identity(row: dict[str, str]) -> tuple[RecordKey, Identity]:
    """Parse a record's sample and id, and its virus identity."""
    identity = Identity(
        group=row["group"],
        group_probability=_float(row["group_probability"]),
        family=row["family"],
        family_kmers=int(row["family_kmers"] or 0),
        family_share=_float(row["family_share"]),
        topology=row["topology"],
        repeat_length=int(row["repeat_length"] or 0),
        taxonomy=row.get("taxonomy", ""),
        genus=row.get("genus", ""),
        genome_type=row.get("genome_type", ""),
        host_source=row.get("host_source", ""),
        host_genus=row.get("host_genus", ""),
        completeness=_float(row.get("completeness", "")),
        completeness_method=row.get("completeness_method", ""),
    )
    return (row["file"], row["record"]), identity


def parse_region(row: dict[str, str]) -> tuple[RecordKey, Region]:
    """Parse a record's sample and id, and its region, from a table of any version."""
    extents = ("provirus", "whole")
    max_bases = 10**15
    start = int(row["start"]) - 1
    end = int(row["end"])
    posterior = float(row["posterior"] or "nan")
    if not (0 <= start < end <= max_bases and (isnan(posterior) or 0 <= posterior <= 1)):
        raise ValueError(f"{row['record']} has no region such as {row['region']}")
    if row["extent"] not in extents:
        raise ValueError(f"{row['region']} is a {row['extent']}")
    if row["class"] not in ("prophage", "uncertain", ""):
        raise ValueError(f"{row['region']} is of the class {row['class']}")
    extent = cast(Literal["provirus", "whole"], row["extent"])
    region_class = cast(Literal["prophage", "uncertain", ""], row["class"])
    region = Region(
        start,
        end,
        extent,
        posterior,
        row["att"],
        ORIGIN in row["note"],
        bool(row["virus"]),
        row["evidence"],
        region_class,
    )
    return (row["file"], row["record"]), region
