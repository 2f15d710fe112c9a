"""Find records in a run that a corrected copy may replace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from virnucpro.core.recipe import STATUSES, Command
from virnucpro.core.types import FRAMES_FAILED
from virnucpro.results.outputs import OUTPUTS


class _Record(NamedTuple):
    sample: str
    id: str
    is_mendable: bool


def find_mendable(command: Command, table: Path, hint: str) -> Iterator[tuple[str, str]]:
    """Yield sample and id for each record that is invalid or has a failed frame.

    Raises:
        OSError: the table of records cannot be opened.
        InputError: the table is damaged. The hint says what to do.
    """
    for record in OUTPUTS[command][0].rows_at(table, _parse, hint):
        if record.is_mendable:
            yield record.sample, record.id


def _parse(row: dict[str, str]) -> _Record:
    status = row["status"]
    if status not in STATUSES:
        raise ValueError(f"a record has the status {status}")
    is_mendable = status == "invalid" or FRAMES_FAILED in row["note"]
    return _Record(row["file"], row["record"], is_mendable)
