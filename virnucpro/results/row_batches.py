"""Output rows as text, which any process may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import CHUNK_TABLE

# Output file name -> text. Outputs without text may be missing.
Rows: TypeAlias = Mapping[str, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows for neighbouring records in one sample, for all outputs."""

    sample: str
    rows: Rows
    counts: RecordCounts
    own_rows: Rows | None = None  # the same with ids from the input file

    def joined(self, other: RowBatch) -> RowBatch:
        """Append later records from the same sample."""
        counts = RecordCounts()
        own_rows = None
        counts.include(self.counts)
        counts.include(other.counts)
        if self.own_rows is not None:
            own_rows = _concatenate(self.own_rows, other.own_rows or {})
        return RowBatch(self.sample, _concatenate(self.rows, other.rows), counts, own_rows)


def _concatenate(rows: Rows, later_rows: Rows) -> Rows:
    return {
        name: sort_rows(name, b"".join((rows.get(name, b""), later_rows.get(name, b""))))
        for name in {**rows, **later_rows}
    }


def sort_rows(name: str, text: bytes) -> bytes:
    if name != CHUNK_TABLE.file:
        return text
    from virnucpro.results.sorted_lines import sorted_lines  # an extraction has no such table

    return sorted_lines(text)
