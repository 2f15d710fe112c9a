"""Make rows for records that were embedded but not called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from virnucpro.core.recipe import Status
from virnucpro.core.types import FRAMES_FAILED, Records
from virnucpro.results.counts import RecordCounts, sample_ranges, sum_counts
from virnucpro.results.outputs import OutputFile, RunOutput
from virnucpro.results.row_batches import RowBatch, Rows
from virnucpro.results.tsv import format_fasta, format_integers, format_rows, quoted_texts


class FailedFrame(NamedTuple):
    """A frame without a vector, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedRecords:
    """Neighbouring records and their outcomes, in parallel columns."""

    records: Records
    statuses: list[Status]
    notes: list[str]
    n_chunks: list[int]
    n_frames: list[int]  # frames with a vector
    failures: Mapping[int, Sequence[FailedFrame]]  # by record index

    def by_sample(self) -> Iterator[EmbeddedRecords]:
        """Yield the records of each sample."""
        for _, first, end in sample_ranges(self.records.samples):
            yield self._rows(first, end)

    def _rows(self, first: int, end: int) -> EmbeddedRecords:
        rows = slice(first, end)
        failures = {
            index - first: frames for index, frames in self.failures.items() if first <= index < end
        }
        return EmbeddedRecords(
            records=self.records.slice_rows(rows),
            statuses=self.statuses[rows],
            notes=self.notes[rows],
            n_chunks=self.n_chunks[rows],
            n_frames=self.n_frames[rows],
            failures=failures,
        )

    def by_own_ids(self) -> EmbeddedRecords:
        """Return the same records with their ids from the file."""
        names = self.records.names
        records = self.records.with_ids(names)._replace(own_ids=[""] * len(names))
        return replace(self, records=records)


def count_embedded(results: EmbeddedRecords) -> dict[str, RecordCounts]:
    """Count these records by sample."""
    counts: dict[str, RecordCounts] = {}
    for sample, first, end in sample_ranges(results.records.samples):
        row_counts = _count_rows(results, range(first, end))
        counts[sample] = (
            sum_counts([counts[sample], row_counts]) if sample in counts else row_counts
        )
    return counts


def _count_rows(results: EmbeddedRecords, indices: range) -> RecordCounts:
    """Count the neighbouring records with these indices."""
    rows = slice(indices.start, indices.stop)
    failed_rows = [results.failures[index] for index in indices if index in results.failures]
    failed = [frame for frames in failed_rows for frame in frames]
    counts = RecordCounts()
    counts.statuses.update(Counter(results.statuses[rows]))
    counts.n_mendable = sum(FRAMES_FAILED in note for note in results.notes[rows])
    counts.n_frames = sum(results.n_frames[rows])
    counts.n_failed_records = len(failed_rows)
    counts.n_failed_frames = len(failed)
    if failed:
        counts.first_failure = f"{failed[0].id}: {failed[0].reason}"
    return counts


def make_batches(
    results: EmbeddedRecords, outputs: Sequence[OutputFile], *, per_file: bool, with_own: bool
) -> list[RowBatch]:
    """Make one batch, or one per sample.

    Args:
        per_file: make a batch per sample, for outputs per file.
        with_own: also make the rows of per-file outputs with ids from the input file.
    """
    own_outputs = [output for output in outputs if output.per_file]
    parts = results.by_sample() if per_file else iter([results] * bool(results.records.ids))
    return [
        RowBatch(
            count_embedded(part),
            _make_rows(part, outputs),
            _make_rows(part.by_own_ids(), own_outputs) if with_own else None,
        )
        for part in parts
    ]


def _make_rows(results: EmbeddedRecords, outputs: Iterable[OutputFile]) -> Rows:
    # Makes the rows of neighbouring records for an output, or None if they do not need the file.
    embedding_rows = {
        RunOutput.EMBEDDED_TABLE: _record_rows,
        RunOutput.FAILED_SEQUENCES: _failed_fasta,
    }
    rows = {}
    for output in outputs:
        make = embedding_rows.get(output)
        text = make(results) if make else None
        if text is not None:
            rows[output.file] = text
    return rows


def _record_rows(results: EmbeddedRecords) -> bytes:
    """Make a row per record."""
    records = results.records
    return format_rows(
        quoted_texts(records.names),
        quoted_texts(records.samples),
        format_integers(records.lengths),
        quoted_texts(results.statuses),
        format_integers(results.n_chunks),
        format_integers(results.n_frames),
        quoted_texts(results.notes),
    )


def _failed_fasta(results: EmbeddedRecords) -> bytes | None:
    headers = [results.records.headers[index] for index in results.failures]
    sequences = [results.records.sequences[index] for index in results.failures]
    return format_fasta(headers, sequences) or None


_MakeRows: TypeAlias = Callable[[EmbeddedRecords], bytes | None]
