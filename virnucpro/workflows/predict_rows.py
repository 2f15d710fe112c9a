"""Make the rows of a prediction: score, call, and search records for regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.core.types import Orf, Records, Shard
from virnucpro.results.call_rows import make_batches
from virnucpro.results.outputs import OUTPUTS
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.open_codes import find_alternative_codes
from virnucpro.store.feature_file import Checksums
from virnucpro.store.feature_store import ShardFeatures
from virnucpro.store.frame_scores import FrameScoreStore
from virnucpro.store.plan import Selection
from virnucpro.store.shard_store import ShardStore
from virnucpro.viral.calling import ScoredRecords
from virnucpro.viral.classifier import RecordClassifier, SequenceClassifier, select_for_embedding
from virnucpro.viral.provirus import SHORTEST_RECORD, ProvirusFinder
from virnucpro.viral.types import CalledRecords
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.shard_frames import Frame, FrameRange, ShardFrames
from virnucpro.workflows.table_tasks import BlockRows, RowBuilder, ScoredShard, ShardTask

if TYPE_CHECKING:
    from virnucpro.workflows.frame_scoring import FrameScoreReader

# Which records predict embeds, and which it searches for regions.
SELECTION = Selection(select=select_for_embedding, min_searched_length=SHORTEST_RECORD)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CallRowBuilder(RowBuilder):
    """Makes rows for records that a classifier calls."""

    classifier: RecordClassifier
    finder: ProvirusFinder | None = None  # None: no search for regions
    scores: ScoreStore | None = None  # None: scores are not stored
    frame_scores: FrameScoreStore | None = None  # None: the run keeps vectors, or has no model
    # scores of frames in a run that also keeps the vectors; None: no such run, or not used
    intermediate_scores: FrameScoreStore | None = None
    score_readers: dict[int, FrameScoreReader] = field(init=False, default_factory=dict)  # by slice
    finds_genes: bool = True  # of viruses

    @property
    def shard_stores(self) -> tuple[ShardStore, ...]:
        return self.stores if self.frame_scores is None else (self.frame_scores,)

    def read_frames(self, index: int, shard: Shard, lost: Mapping[int, str]) -> ShardFrames:
        return self._score_reader(index).read(shard, lost)

    def read_originals(
        self, index: int, shard: Shard, features: tuple[Checksums, ...]
    ) -> ShardFrames:
        return self._score_reader(index).read_originals(shard, features)

    def find_scored(self, task: ShardTask) -> ScoredShard | None:
        if self.intermediate_scores is None or self.feature_format != "h5" or task.hidden:
            return None
        from virnucpro.workflows.scored_shards import find_scored

        return find_scored(task, self, self._score_reader(task.slice_index))

    def _score_reader(self, index: int) -> FrameScoreReader:
        """Return the reader for the stored scores of a slice, with its cache."""
        if index not in self.score_readers:
            from virnucpro.workflows.frame_scoring import FrameScoreReader

            store = self.frame_scores or self.intermediate_scores
            assert store is not None, "only runs with a head store frame scores"
            self.score_readers[index] = FrameScoreReader(store, self.slices[index])
        return self.score_readers[index]

    def pack_frames(
        self, orfs: Sequence[Orf], features: Sequence[ShardFeatures], reasons: Mapping[str, str]
    ) -> ShardFrames:
        head = self.classifier.frame_head
        if head is None:
            return ShardFrames.pack(
                Frame.from_orf(orf, None, reasons.get(orf.id, ""), None) for orf in orfs
            )
        ids = [orf.id for orf in orfs if orf.id not in reasons]
        vectors = [shard_features.select_rows(ids) for shard_features in features]
        combined = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
        from virnucpro.workflows.frame_predictions import score_frames

        return score_frames(orfs, combined, reasons, head)

    def make_rows(
        self,
        index: int,
        records: Records,
        ranges: Sequence[Sequence[FrameRange]],
        frames: Sequence[ShardFrames],
    ) -> BlockRows:
        is_new = True
        if self.scores is None:
            from virnucpro.workflows.frame_predictions import predict_records

            head = self.classifier.frame_head
            predictions = predict_records(records, ranges, frames, head)
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
        """Make rows for neighbouring records."""
        is_protein = self.recipe.input_type == "protein"
        code = None if is_protein else GeneticCode.from_number(self.recipe.genetic_code)
        return make_batches(
            results,
            OUTPUTS["predict"],
            code,
            per_file=self.per_file,
            with_own=self.with_own_ids,
            taken=self.manifest.taken,
            finds_genes=self.finds_genes,
        )

    def call(self, scored: ScoredRecords) -> CalledRecords:
        """Call scored records."""
        results = self._scorer_alone.call_scored(scored, self.recipe)
        if self.finder is not None:
            for index, detected_pair in scored.found.items():
                detected = detected_pair[results.calls.are_viruses[index]]
                self.finder.add_detected(results, index, detected)
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
        """Read the records' scores, or compute and store them.

        Returns:
            The scores, and True if they were computed.

        Raises:
            OutputError, StorageError: the scores cannot be written.
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
        detected = self.finder.find(records, [(False, True)] * len(indices))
        regions = {
            index: (as_other, as_virus)
            for index, (as_other, as_virus) in zip(indices, detected, strict=True)
        }
        return replace(scored, found=regions)

    @property
    def _scorer_alone(self) -> SequenceClassifier:
        assert isinstance(self.classifier, SequenceClassifier), (
            "scores are kept where the scorer calls"
        )
        return self.classifier


def _find_long(records: Records) -> list[int]:
    """Return indices for records that are long enough to be searched for regions."""
    indices: list[int] = np.flatnonzero(records.lengths >= SHORTEST_RECORD).tolist()
    return indices


def count_work(records: Records, finder: ProvirusFinder | None) -> int:
    """Count the letters to read. Letters that are searched for regions count twice."""
    n_letters = int(records.lengths.sum())
    return n_letters + (SELECTION.count_searched(records.lengths) if finder else 0)
