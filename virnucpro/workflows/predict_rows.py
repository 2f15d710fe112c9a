"""Make the rows of a prediction: score, call, and search records for regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.types import PROTEIN, FastaRecord, Orf, Records
from virnucpro.results.call_rows import make_batches
from virnucpro.results.outputs import OUTPUTS
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.open_codes import find_alternative_codes
from virnucpro.sequences.translate import GeneticCode
from virnucpro.store.feature_store import ShardFeatures
from virnucpro.store.plan import Selection
from virnucpro.viral.calling import ScoredRecords
from virnucpro.viral.classifier import RecordClassifier, SequenceClassifier, select_for_embedding
from virnucpro.viral.head import Head
from virnucpro.viral.provirus import SHORTEST_RECORD, ProvirusFinder
from virnucpro.viral.types import CalledRecords, Prediction
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.table_tasks import BlockRows, Frame, FrameRange, RowBuilder, ShardFrames

FRAMES_AT_ONCE = 2048
# the records that predict embeds, and those that it searches for regions
SELECTION = Selection(select=select_for_embedding, min_searched_length=SHORTEST_RECORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRowBuilder(RowBuilder):
    """Makes the rows of records that a classifier calls."""

    classifier: RecordClassifier
    finder: ProvirusFinder | None = None  # None: no search for regions
    scores: ScoreStore | None = None  # None: scores are not stored

    def pack_frames(
        self, orfs: Sequence[Orf], features: Sequence[ShardFeatures], reasons: Mapping[str, str]
    ) -> ShardFrames:
        head = self.classifier.frame_head
        if head is None:
            return ShardFrames.pack(
                Frame.from_orf(orf, None, reasons.get(orf.id, ""), None) for orf in orfs
            )
        ids = [orf.id for orf in orfs if orf.id not in reasons]
        vectors = [of_encoder.select_rows(ids) for of_encoder in features]
        joined = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
        return score_frames(orfs, joined, reasons, head)

    def make_rows(
        self,
        index: int,
        records: Records,
        ranges: Sequence[Sequence[FrameRange]],
        frames: Sequence[ShardFrames],
    ) -> BlockRows:
        is_new = True
        if self.scores is None:
            predictions = predict_records(
                list(records.iter_records()), ranges, frames, self.classifier.frame_head
            )
            results = self._add_notes(self.classifier.call(records, predictions, self.recipe))
        else:
            scored, is_new = self._read_or_score(index, records, self.scores)
            results = self.call(scored)
        return BlockRows(
            batches=self.make_batches(results),
            n_letters=int(records.lengths.sum()),
            work=count_work(records, self.finder),
            is_new=is_new,
        )

    def make_batches(self, results: CalledRecords) -> list[RowBatch]:
        """The rows of neighbouring records, by sample."""
        is_protein = self.recipe.input_type == "protein"
        code = None if is_protein else GeneticCode.from_number(self.recipe.genetic_code)
        return make_batches(
            results,
            OUTPUTS["predict"],
            code,
            with_own=self.with_own_ids,
            taken=self.manifest.taken,
        )

    def call(self, scored: ScoredRecords) -> CalledRecords:
        """Call scored records."""
        results = self._scorer_alone.call_scored(scored, self.recipe)
        if self.finder is not None:
            for index, both in scored.found.items():
                found = both[results.calls.are_viruses[index]]
                self.finder.add_detected(results, index, found)
        return results

    def _add_notes(self, results: CalledRecords) -> CalledRecords:
        """Add notes on the sequences to the results, regions last."""
        notes = results.calls.notes
        indices = [
            index
            for index, status in enumerate(results.calls.statuses)
            if status in ("scored", "embedded", "no_orf")
            and not (notes[index] and (index in results.embedded or status != "scored"))
        ]
        for index, other_code in find_alternative_codes(
            results.records, indices, self.recipe
        ).items():
            notes[index] = "; ".join(filter(None, (notes[index], other_code)))
        if self.finder is not None:
            for index in _find_long(results.records):
                self.finder.add_regions(results, index)
        return results

    def _read_or_score(
        self, index: int, records: Records, store: ScoreStore
    ) -> tuple[ScoredRecords, bool]:
        """Read the scores of the records, or compute and store them.

        -> the scores; True if they were computed

        Raises:
            OutputError, StorageError: they cannot be written.
        """
        scored, is_searched = store.read(store.path(index), records)
        if scored is not None and (self.finder is None or is_searched):
            return scored, False
        is_new = scored is None
        scored = self._score(records) if scored is None else self._search(scored)
        store.write(index, scored, count_work(records, self.finder))
        return scored, is_new

    def _score(self, records: Records) -> ScoredRecords:
        """Score records, search them for regions, and add notes on their sequences."""
        scored = self._scorer_alone.score(records, self.recipe)
        indices: list[int] = np.flatnonzero(~np.isnan(scored.log_odds)).tolist()
        for index, note in find_alternative_codes(records, indices, self.recipe).items():
            scored.notes[index] = note
        return self._search(scored)

    def _search(self, scored: ScoredRecords) -> ScoredRecords:
        """Search the records for regions, if the run asks for it."""
        if self.finder is None:
            return scored
        has_score = ~np.isnan(scored.log_odds)
        indices = [index for index in _find_long(scored.records) if has_score[index]]
        records = [scored.records.record_at(index) for index in indices]
        found = self.finder.find(records, [(False, True)] * len(indices))
        regions = {
            index: (as_other, as_virus)
            for index, (as_other, as_virus) in zip(indices, found, strict=True)
        }
        return replace(scored, found=regions)

    @property
    def _scorer_alone(self) -> SequenceClassifier:
        assert isinstance(self.classifier, SequenceClassifier), (
            "scores are kept where the scorer calls"
        )
        return self.classifier


def _find_long(records: Records) -> list[int]:
    """The indices of the records that may be searched for regions."""
    indices: list[int] = np.flatnonzero(records.lengths >= SHORTEST_RECORD).tolist()
    return indices


def count_work(records: Records, finder: ProvirusFinder | None) -> int:
    """The letters to read. Those that are searched for regions count twice."""
    n_letters = int(records.lengths.sum())
    return n_letters + (SELECTION.count_searched(records.lengths) if finder else 0)


# The frames of a shard, and the predictions of a record


def score_frames(
    orfs: Sequence[Orf], vectors: NDArray[np.float32], reasons: Mapping[str, str], head: Head
) -> ShardFrames:
    """Score the frames of a shard.

    Args:
        vectors: (n, dim), a row for each of the n frames that have one, in order.
        reasons: id -> why a frame has no vector.
    """
    embedded = [orf for orf in orfs if orf.id not in reasons]
    rows_waiting = [row for row, orf in enumerate(embedded) if _needs_record(orf, head)]
    waiting = {embedded[row].id: position for position, row in enumerate(rows_waiting)}
    rows = [row for row, orf in enumerate(embedded) if orf.id not in waiting]
    ready = [embedded[row] for row in rows]
    bases = [orf.bases[: orf.end - orf.start] for orf in ready]
    is_protein = bool(ready) and ready[0].strand == PROTEIN
    values = _classify(head, vectors[rows] if waiting else vectors, bases, is_protein)
    scores = dict(zip((orf.id for orf in ready), values, strict=True))
    frames = (
        Frame.from_orf(orf, scores.get(orf.id), reasons.get(orf.id, ""), waiting.get(orf.id))
        for orf in orfs
    )
    return ShardFrames.pack(frames, vectors[rows_waiting])


def _needs_record(orf: Orf, head: Head) -> bool:
    """True if the head reads bases, and the shard lacks some of this frame's."""
    is_complete = 3 * len(orf.protein) == orf.end - orf.start
    return head.nucleotide is not None and orf.strand != PROTEIN and not is_complete


def _classify(
    head: Head, vectors: NDArray[np.float32], bases: Sequence[str], is_protein: bool = False
) -> list[float]:
    """Score frames that have their vectors and bases, block by block."""
    values: list[float] = []
    for first in range(0, len(bases), FRAMES_AT_ONCE):
        rows = slice(first, first + FRAMES_AT_ONCE)
        if is_protein:
            values += head.classify(vectors[rows]).tolist()
        else:
            values += head.classify_frames(vectors[rows], bases[rows]).tolist()
    return values


def predict_records(
    records: Sequence[FastaRecord],
    ranges: Sequence[Sequence[FrameRange]],
    frames: Sequence[ShardFrames],
    head: Head | None,
) -> list[list[Prediction]]:
    """The predictions of each record, one for each of its frames."""
    unpacked = [of_shard.unpack() for of_shard in frames]
    by_record = [
        [(r.shard, frame) for r in of_record for frame in unpacked[r.shard][r.first : r.end]]
        for of_record in ranges
    ]
    waiting = list(_pending_records(records, by_record))
    scores = _score_pending(waiting, frames, head) if waiting else {}
    return [
        [_to_prediction(shard, frame, scores) for shard, frame in of_record]
        for of_record in by_record
    ]


def _score_pending(
    waiting: Sequence[tuple[int, int, str]], frames: Sequence[ShardFrames], head: Head | None
) -> dict[tuple[int, int], float]:
    """Score vectors that waited for their bases. -> shard and row of the vector -> score"""
    assert head, "frames wait only for a head that reads bases"
    vectors = np.stack([frames[shard].vectors[row] for shard, row, _ in waiting])
    values = _classify(head, vectors, [bases for _, _, bases in waiting])
    keys = ((shard, row) for shard, row, _ in waiting)
    return dict(zip(keys, values, strict=True))


def _to_prediction(shard: int, frame: Frame, scores: Mapping[tuple[int, int], float]) -> Prediction:
    score = frame.score if frame.vector_row is None else scores[shard, frame.vector_row]
    return Prediction(frame.orf, score, frame.failure)


def _pending_records(
    records: Sequence[FastaRecord], frames: Sequence[Sequence[tuple[int, Frame]]]
) -> Iterator[tuple[int, int, str]]:
    """Yield the shard and the row of each vector that waits for bases, and these."""
    for record, of_record in zip(records, frames, strict=True):
        for shard, frame in of_record:
            if frame.vector_row is not None:
                yield shard, frame.vector_row, frame.orf.coding_sequence(record.sequence)
