"""The work behind the outputs, in tasks: a shard's frames get their scores, a block its rows.

``Maker`` has all that they need; it and they may cross to helpers (``tasks``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.batches import FrameRange, ScoredFrames, predict_records, score_frames
from virnucpro.callers.caller import ByScorer, Caller
from virnucpro.callers.pieces import ScoredRecord
from virnucpro.callers.regions import SHORTEST_RECORD, RegionFinder
from virnucpro.ground.config import FeatureFormat, Recipe
from virnucpro.ground.records import FastaRecord, RecordResult, Shard
from virnucpro.run.features import FeatureReader, FeatureStore, ShardFeatures
from virnucpro.run.index import IndexPart, export
from virnucpro.run.scores import ScoreStore
from virnucpro.run.shards import read_shard
from virnucpro.sequences.genetic_code import find_open_code
from virnucpro.tables.sinks import Portion, Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The parts of a run that rows are made of."""

    recipe: Recipe
    sinks: tuple[type[Sink], ...]
    stores: tuple[FeatureStore, ...]  # one for each encoder
    generations: tuple[tuple[Shard, ...], ...]
    caller: Caller
    finder: RegionFinder | None  # None: regions are not looked for
    feature_format: FeatureFormat
    with_own_ids: bool = False  # the files of each input have ids of their own
    scores: ScoreStore | None = None  # None: scores are not kept
    readers: dict[int, list[FeatureReader]] = field(default_factory=dict)  # of each generation

    def readers_of(self, generation: int) -> list[FeatureReader]:
        """The readers of all stores, which remember what they read."""
        if generation not in self.readers:
            shards = self.generations[generation]
            self.readers[generation] = [store.reader(shards) for store in self.stores]
        return self.readers[generation]

    def noted(self, result: RecordResult) -> RecordResult:
        """The same result; its note says what else was seen in the sequence, regions last."""
        if other_code := self.other_code(result):
            result = result._replace(call=replace(result.call, note=other_code))
        return self.finder.add_to(result) if self.finder else result

    def score(self, records: Sequence[FastaRecord]) -> list[ScoredRecord]:
        """Score records, look for regions in them, and note what else is seen."""
        scored = self.by_scorer.score(records, self.recipe)
        results = self.by_scorer.call_scored(scored, self.recipe)
        notes = [result.call.note or self.other_code(result) for result in results]
        return self.searched(
            [one._replace(note=note) for one, note in zip(scored, notes, strict=True)]
        )

    def searched(self, scored: list[ScoredRecord]) -> list[ScoredRecord]:
        """The same records, searched for regions if they are to be found."""
        if self.finder is None:
            return scored
        find = self.finder.find_both
        is_scored = [one.score is not None and one.score.log_odds is not None for one in scored]
        return [
            one._replace(found=find(one.record) if may_have else None)
            for one, may_have in zip(scored, is_scored, strict=True)
        ]

    def call(self, scored: Sequence[ScoredRecord]) -> Iterator[RecordResult]:
        """Call records whose scores are there, in order."""
        results = self.by_scorer.call_scored(scored, self.recipe)
        for result, one in zip(results, scored, strict=True):
            if self.finder is None or one.found is None:
                yield result
            else:
                yield self.finder.with_regions(result, one.found[result.call.is_virus])

    def portions(self, results: Iterable[RecordResult]) -> list[Portion]:
        """The rows of neighbouring records, for each sample apart."""
        groups = groupby(results, key=lambda result: result.record.sample)
        return [
            Portion.of(sample, group, self.sinks, with_own=self.with_own_ids)
            for sample, group in groups
        ]

    @property
    def by_scorer(self) -> ByScorer:
        assert isinstance(self.caller, ByScorer), "scores are kept where the scorer calls"
        return self.caller

    def other_code(self, result: RecordResult) -> str:
        """That the record looks as if it used another genetic code, if it does."""
        recipe, call = self.recipe, result.call
        is_standard = recipe.input_type == "nucleotide" and recipe.genetic_code in (1, 11)
        if not is_standard or call.note or call.status not in ("scored", "embedded", "no_orf"):
            return ""
        number = find_open_code(result.record.sequence)
        return f"open in genetic code {number}, not in {recipe.genetic_code}" if number else ""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredShard:
    """The frames of a shard, and its feature files for the index of each store."""

    records: list[tuple[str, int]]  # ids of neighbouring frames' records, and numbers of frames
    frames: ScoredFrames
    files: list[list[IndexPart]]


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Read a shard and its vectors, verify all of it, and score its frames."""

    generation: int
    shard: Shard
    lost: Mapping[int, str]  # see ``FeatureReader.read``
    n_verified: int
    hidden: frozenset[str]  # records that were replaced: the indexes leave them out

    def do(self, maker: Maker) -> ScoredShard:
        """
        Raises:
            FeatureFileError: a feature file is not whole.
            StorageError: the shard is not the one that was written.
        """
        orfs = read_shard(self.shard)
        unseen = {orf.id for orf in orfs if orf.record_id in self.hidden}
        of_encoders = [
            reader.read(self.shard, orfs, self.lost, self.n_verified)
            for reader in maker.readers_of(self.generation)
        ]
        files = []
        for store, features in zip(maker.stores, of_encoders, strict=True):
            for path, embeddings in features.files:
                export(path, embeddings, maker.feature_format, store.encoder.reads, store.tree)
            files.append(shown_files(features, unseen, per_residue=store.encoder.per_residue))
        reasons: dict[str, str] = {}
        for features in reversed(of_encoders):
            reasons |= features.reasons
        ids = [orf.id for orf in orfs if orf.id not in reasons]
        head = maker.caller.frame_head
        rows = [features.rows(ids) for features in of_encoders] if head else []
        groups = groupby(orfs, key=lambda orf: orf.record_id)
        return ScoredShard(
            [(record_id, len(list(group))) for record_id, group in groups],
            score_frames(orfs, _side_by_side(rows), reasons, head),
            files,
        )


def _side_by_side(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    if len(rows) == 1:
        return rows[0]  # the usual case is not copied
    return np.concatenate(rows, axis=1) if rows else np.empty((0, 0), dtype=np.float32)


def shown_files(features: ShardFeatures, hidden: set[str], *, per_residue: bool) -> list[IndexPart]:
    """The files of a shard for an index, which shows their ORFs but for some."""
    return [
        IndexPart.of(
            path,
            np.array([orf_id not in hidden for orf_id in embeddings.ids], dtype=np.bool_),
            per_residue=per_residue,
        )
        for path, embeddings in features.files
        if embeddings.vectors.shape[1]  # else these are copies, and no original has a vector
    ]


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """Call a block of records, and write their rows."""

    n_letters: int
    columns: tuple[tuple[Any, ...], ...]  # fields of the records: packed in a quarter of the time
    runs: array[int]  # flat: place of a record, and a ``FrameRange`` of it
    frames: list[ScoredFrames]
    index: int = 0  # its place among the blocks of the run

    def do(self, maker: Maker) -> list[Portion]:
        """
        Raises:
            InputError: the records are not those that the frames were found in.
        """
        if maker.scores is not None:
            return maker.portions(maker.call(self.scores(maker, maker.scores)))
        return maker.portions(map(maker.noted, self.results(maker)))

    def scores(self, maker: Maker, store: ScoreStore) -> list[ScoredRecord]:
        """The scores of the records; made, and kept, if they are not there.

        Raises:
            OutputError, StorageError: the disk refuses them.
        """
        records = self.records
        scored, is_searched = store.read(self.index, records)
        if not scored:
            scored = maker.score(records)
        elif maker.finder is None or is_searched:
            return scored
        else:
            scored = maker.searched(scored)
        store.write(self.index, scored, self.work(maker.finder))
        return scored

    def work(self, finder: RegionFinder | None) -> int:
        """The letters that are read: those that are searched for regions, twice."""
        lengths = list(map(len, self.columns[FastaRecord._fields.index("sequence")]))
        searched = [length for length in lengths if finder and length >= SHORTEST_RECORD]
        return sum(lengths) + sum(searched)

    @property
    def records(self) -> list[FastaRecord]:
        return list(map(FastaRecord._make, zip(*self.columns, strict=True)))

    def results(self, maker: Maker) -> Iterator[RecordResult]:
        """Each record, in order, with its predictions and its call."""
        records = self.records
        runs: list[list[FrameRange]] = [[] for _ in records]
        for place, *run in np.reshape(self.runs, (-1, 4)).tolist():
            runs[place].append(tuple(run))
        frames = predict_records(records, runs, self.frames, maker.caller.frame_head)
        return maker.caller.call(records, frames, maker.recipe)
