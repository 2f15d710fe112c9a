"""Output rows as text, which any process may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from virnucpro.results.counts import RecordCounts, sum_counts
from virnucpro.results.outputs import RunOutput

# Output file name -> text. Outputs without text may be missing.
Rows: TypeAlias = Mapping[str, bytes | memoryview]


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Rows for neighbouring records, for all outputs.

    They are of one sample if samples have outputs of their own.
    """

    counts: Mapping[str, RecordCounts]  # by sample, in order
    rows: Rows
    own_rows: Rows | None = None  # the same with ids from the input file

    @property
    def sample(self) -> str:
        """Return the only sample."""
        [sample] = self.counts
        return sample

    @property
    def total(self) -> RecordCounts:
        return sum_counts(self.counts.values())

    def joined(self, other: RowBatch) -> RowBatch:
        """Append later records from the same samples."""
        own_rows = None
        counts = {
            sample: sum_counts([self.counts[sample], other.counts[sample]])
            for sample in self.counts
        }
        if self.own_rows is not None:
            own_rows = _concatenate(self.own_rows, other.own_rows or {})
        return RowBatch(counts, _concatenate(self.rows, other.rows), own_rows)


def _concatenate(rows: Rows, later_rows: Rows) -> Rows:
    return {
        name: sort_rows(name, b"".join((rows.get(name, b""), later_rows.get(name, b""))))
        for name in {**rows, **later_rows}
    }


def sort_rows(name: str, text: bytes) -> bytes:
    if name != RunOutput.CHUNK_TABLE.file:
        return text
    from virnucpro.results.sorted_lines import sorted_lines  # an extraction has no such table

    return sorted_lines(text)
