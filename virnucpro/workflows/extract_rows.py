"""Make extraction rows: status and embedded frames per record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from virnucpro.core.recipe import Status
from virnucpro.core.types import FRAMES_FAILED, Orf, Records
from virnucpro.results.embedding_rows import EmbeddedRecords, FailedFrame, make_batches
from virnucpro.results.outputs import OUTPUTS
from virnucpro.sequences.screen import reject_reasons
from virnucpro.store.feature_store import ShardFeatures
from virnucpro.workflows.shard_frames import Frame, FrameRange, ShardFrames
from virnucpro.workflows.table_tasks import BlockRows, RowBuilder


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EmbeddingRowBuilder(RowBuilder):
    """Makes rows for records that are embedded but not called."""

    def pack_frames(
        self, orfs: Sequence[Orf], features: Sequence[ShardFeatures], reasons: Mapping[str, str]
    ) -> ShardFrames:
        return ShardFrames.pack(
            Frame.from_orf(orf, None, reasons.get(orf.id, ""), None) for orf in orfs
        )

    def make_rows(
        self,
        index: int,
        records: Records,
        ranges: Sequence[Sequence[FrameRange]],
        frames: Sequence[ShardFrames],
    ) -> BlockRows:
        shard_frames = [packed.unpack() for packed in frames]
        frames_by_record: list[list[Frame]] = []
        for record_ranges in ranges:
            record_frames: list[Frame] = []
            for frame_range in record_ranges:
                record_frames += shard_frames[frame_range.shard][
                    frame_range.first : frame_range.end
                ]
            frames_by_record.append(record_frames)
        results = self._describe(records, frames_by_record)
        n_letters = int(records.lengths.sum())
        return BlockRows(
            batches=make_batches(
                results,
                OUTPUTS["extract"],
                per_file=self.per_file,
                with_own=self.with_own_ids,
            ),
            n_letters=n_letters,
            work=n_letters,
            is_new=True,
        )

    def _describe(self, records: Records, frames: Sequence[Sequence[Frame]]) -> EmbeddedRecords:
        """Derive the status, the note and the counts for each record from its frames."""
        screened = reject_reasons(records, self.recipe)
        statuses: list[Status] = []
        notes: list[str] = []
        n_chunks: list[int] = []
        failures: dict[int, list[FailedFrame]] = {}
        for index, length in enumerate(records.lengths.tolist()):
            failed = [
                FailedFrame(frame.id, frame.failure) for frame in frames[index] if frame.failure
            ]
            if failed:
                failures[index] = failed
            outcome = screened.get(index) or self._row_status(len(frames[index]), failed)
            statuses.append(outcome[0])
            notes.append(outcome[1])
            n_chunks.append(0 if index in screened else self.recipe.count_chunks(length))
        self._note_other_codes(records, statuses, notes)
        n_frames = [
            len(record_frames) - len(failures.get(index, ()))
            for index, record_frames in enumerate(frames)
        ]
        return EmbeddedRecords(records, statuses, notes, n_chunks, n_frames, failures)

    def _row_status(self, n_frames: int, failed: Sequence[FailedFrame]) -> tuple[Status, str]:
        """Return status and note for a record that passed the screen."""
        if not n_frames:
            return "no_orf", ""
        if not failed:
            return "embedded", ""
        note = f"{len(failed)} of {n_frames} {FRAMES_FAILED}: {failed[0].reason}"
        return "failed" if len(failed) == n_frames else "embedded", note

    def _note_other_codes(
        self, records: Records, statuses: Sequence[Status], notes: list[str]
    ) -> None:
        """Add notes to records that seem to use another genetic code."""
        if self.recipe.input_type != "nucleotide":
            return
        from virnucpro.sequences.open_codes import find_alternative_codes

        indices = [
            index
            for index, status in enumerate(statuses)
            if status in ("embedded", "no_orf") and not notes[index]
        ]
        for index, note in find_alternative_codes(records, indices, self.recipe).items():
            notes[index] = note
