"""The tasks behind the outputs: one scores the frames of a shard, one makes the rows of a block.

``Maker`` holds all that they need, and both may be sent to helpers (``tasks``). The score of a
frame needs its vector and its bases. A shard has both, unless the frame has ambiguous letters: then
only the record has its bases, and the vector waits for the record. Scores do not depend on blocks.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError
from virnucpro.core.recipe import FeatureFormat, Recipe
from virnucpro.core.types import PROTEIN, FastaRecord, Orf, Records, Shard
from virnucpro.results.call_rows import make_batches
from virnucpro.results.outputs import OUTPUTS
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.fasta import Block, Span, Streams, parsed
from virnucpro.sequences.translate import GeneticCode
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.feature_store import FeatureReader, FeatureStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Selection
from virnucpro.store.shard_files import read_shard
from virnucpro.viral.calling import ScoredRecords, other_codes
from virnucpro.viral.classifier import Caller, ScorerAlone, asking
from virnucpro.viral.head import Head
from virnucpro.viral.provirus import SHORTEST_RECORD, RegionFinder
from virnucpro.viral.types import CalledRecords, Prediction
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.table_cache import SliceRows

FRAMES_AT_ONCE = 2048
_NO_VECTORS = np.empty((0, 0), dtype=np.float32)

# The frames of a shard with their scores, as JSON of [id, chunk, record, start, end, strand, score,
# failure, row among the waiting], which is parsed only where it is used; and the vectors of frames
# that wait for their bases, (n_waiting, dim).
ScoredFrames: TypeAlias = tuple[bytes, NDArray[np.float32]]
_SCORE, _FAILURE, _WAITING = 6, 7, 8  # their places in a row

# the number of a ``ScoredFrames``, its first frame, and the one after the last
FrameRange = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Everything that the rows of a run are made from."""

    manifest: Manifest
    stores: tuple[FeatureStore, ...]  # one for each encoder
    caller: Caller
    finder: RegionFinder | None  # None: no search for regions
    feature_format: FeatureFormat
    with_own_ids: bool = False  # every input has its own namespace of ids
    scores: ScoreStore | None = None  # None: scores are not stored
    slices: Mapping[int, tuple[Shard, ...]] = field(default_factory=dict)  # the shards of each
    readers: dict[int, list[FeatureReader]] = field(init=False, default_factory=dict)  # by slice

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    def readers_of(self, index: int) -> list[FeatureReader]:
        """The readers of all stores for a slice, with their caches."""
        if index not in self.readers:
            shards = self.slices[index]
            self.readers[index] = [FeatureReader(store, shards) for store in self.stores]
        return self.readers[index]

    def noted(self, results: CalledRecords) -> CalledRecords:
        """Add notes on the sequences to the results, regions last."""
        notes, statuses = results.calls.notes, results.calls.statuses
        places = [
            place
            for place, status in enumerate(statuses)
            if status in ("scored", "embedded", "no_orf")
            and not (notes[place] and (place in results.embedded or status != "scored"))
        ]
        for place, other_code in other_codes(results.records, places, self.recipe).items():
            notes[place] = "; ".join(filter(None, (notes[place], other_code)))
        if self.finder is not None:
            for place in long_enough(results.records):
                self.finder.add_to(results, place)
        return results

    def score(self, records: Records) -> ScoredRecords:
        """Score records, search them for regions, and add notes on their sequences."""
        scored = self.by_scorer.score(records, self.recipe)
        places: list[int] = np.flatnonzero(~np.isnan(scored.log_odds)).tolist()
        for place, note in other_codes(records, places, self.recipe).items():
            scored.notes[place] = note
        return self.searched(scored)

    def searched(self, scored: ScoredRecords) -> ScoredRecords:
        """Search the records for regions, if the run asks for it."""
        if self.finder is None:
            return scored
        has_score = ~np.isnan(scored.log_odds)
        places = [place for place in long_enough(scored.records) if has_score[place]]
        records = [scored.records.at(place) for place in places]
        each = self.finder.find(records, [(False, True)] * len(places))
        found = {place: (no, yes) for place, (no, yes) in zip(places, each, strict=True)}
        return replace(scored, found=found)

    def call(self, scored: ScoredRecords) -> CalledRecords:
        """Call scored records."""
        results = self.by_scorer.call_scored(scored, self.recipe)
        if self.finder is not None:
            for place, both in scored.found.items():
                found = both[results.calls.are_viruses[place]]
                self.finder.add_found(results, place, found)
        return results

    def portions(self, results: CalledRecords) -> list[RowBatch]:
        """The rows of neighbouring records, by sample."""
        recipe, code = self.recipe, GeneticCode.of(self.recipe.genetic_code)
        code_of_bases = None if recipe.input_type == "protein" else code
        sinks = OUTPUTS[recipe.command]
        return make_batches(results, sinks, code_of_bases, with_own=self.with_own_ids)

    @property
    def by_scorer(self) -> ScorerAlone:
        assert isinstance(self.caller, ScorerAlone), "scores are kept where the scorer calls"
        return self.caller


def long_enough(records: Records) -> list[int]:
    """The indices of the records that may be searched for regions."""
    places: list[int] = np.flatnonzero(records.lengths >= SHORTEST_RECORD).tolist()
    return places


# which records predict embeds, and which it searches for regions
SELECTION = Selection(select=asking, min_searched_length=SHORTEST_RECORD)


class ScoredShard(NamedTuple):
    """The scored frames of a shard, and its feature files for the index of each store."""

    records: list[tuple[str, int]]  # record id and number of frames, for neighbouring frames
    frames: ScoredFrames
    files: list[list[IndexPart]]


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Read a shard and its vectors, verify them, and score the frames."""

    slice_index: int
    shard: Shard
    lost: Mapping[int, str]  # see ``FeatureReader.read``
    n_verified: int
    hidden: frozenset[str]  # replaced records, which the indexes leave out

    def do(self, maker: Maker) -> ScoredShard:
        """
        Raises:
            FeatureFileError: a feature file is incomplete.
            StorageError: the shard has changed since it was written.
        """
        orfs = read_shard(self.shard)
        unseen = {orf.id for orf in orfs if orf.record_id in self.hidden}
        of_encoders = [
            reader.read(self.shard, orfs, self.lost, self.n_verified)
            for reader in maker.readers_of(self.slice_index)
        ]
        files = [
            IndexPart.of_shard(store, self.shard, features, unseen, maker.feature_format)
            for store, features in zip(maker.stores, of_encoders, strict=True)
        ]
        reasons: dict[str, str] = {}
        for features in reversed(of_encoders):
            reasons |= features.reasons
        ids = [orf.id for orf in orfs if orf.id not in reasons]
        if head := maker.caller.frame_head:
            rows = [features.rows(ids) for features in of_encoders]
            vectors = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)
            frames = score_frames(orfs, vectors, reasons, head)
        else:
            frames = _packed(orfs, {}, reasons, {}), _NO_VECTORS
        groups = groupby(orfs, key=lambda orf: orf.record_id)
        return ScoredShard(
            [(record_id, len(list(group))) for record_id, group in groups],
            frames,
            files,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """Call the records of a block and make their rows."""

    n_letters: int  # about
    parts: tuple[Block, ...]  # neighbouring records of one file each
    runs: array[int]  # flat: index of a record, and one of its ``FrameRange``s
    frames: list[ScoredFrames]
    hidden: frozenset[str] = frozenset()  # records that a later input replaces: they get no row
    places: tuple[tuple[int, Span], ...] = ()  # of records that are not in ``parts``
    index: int = 0  # of its slice, plus its place there
    files: Sequence[list[IndexPart]] = ()  # of each store, of the shards since the last block

    def do(self, maker: Maker) -> SliceRows:
        """
        Raises:
            InputError: the records are not the planned ones.
        """
        blocks = chain(self.parts, maker.manifest.blocks(self.places, Streams()))
        records, is_new = Records.joined(list(parsed(blocks))), True
        n_read = len(records.ids)
        shown = [name not in self.hidden for name in records.ids]
        records = records if all(shown) else records.kept(shown)
        if maker.scores is None:
            results = maker.noted(self.results(records, shown, maker))
        else:
            scored, is_new = self.scores(records, maker, maker.scores)
            results = maker.call(scored)
        n_letters, work = int(records.lengths.sum()), work_of(records, maker.finder)
        portions = maker.portions(results)
        counts = (n_read, n_letters, work, 1)
        return SliceRows(self.files, portions, *counts, is_new, self.index)

    def scores(
        self, records: Records, maker: Maker, store: ScoreStore
    ) -> tuple[ScoredRecords, bool]:
        """Read the scores of the records, or compute and store them.

        -> the scores; True if they were computed

        Raises:
            OutputError, StorageError: they cannot be written.
        """
        scored, is_searched = store.read(store.path(self.index), records)
        if scored is None:
            scored, is_new = maker.score(records), True
        elif maker.finder is None or is_searched:
            return scored, False
        else:
            scored, is_new = maker.searched(scored), False
        store.write(self.index, scored, work_of(records, maker.finder))
        return scored, is_new

    def results(self, records: Records, shown: list[bool], maker: Maker) -> CalledRecords:
        """The records that get rows, with their predictions and calls."""
        runs: list[list[FrameRange]] = [[] for _ in shown]
        for place, *run in np.reshape(self.runs, (-1, 4)).tolist():
            runs[place].append(tuple(run))
        of_shown, each = list(compress(runs, shown)), list(records.each())
        frames = predict_records(each, of_shown, self.frames, maker.caller.frame_head)
        return maker.caller.call(records, frames, maker.recipe)


def work_of(records: Records, finder: RegionFinder | None) -> int:
    """The letters to read; those that are searched for regions count twice."""
    lengths = records.lengths
    searched = lengths[lengths >= SHORTEST_RECORD] if finder else lengths[:0]
    return int(lengths.sum() + searched.sum())


# The frames of a shard, and the predictions of a record


def score_frames(
    orfs: Sequence[Orf], vectors: NDArray[np.float32], reasons: Mapping[str, str], head: Head
) -> ScoredFrames:
    """Score the frames of a shard.

    ``reasons``: id -> why the frame has no vector. Each of the other n frames has a row of the
    vectors, (n, dim), in order.
    """
    embedded = [orf for orf in orfs if orf.id not in reasons]
    rows_waiting = [i for i, orf in enumerate(embedded) if _needs_record(orf, head)]
    waiting = {embedded[i].id: place for place, i in enumerate(rows_waiting)}
    rows = [i for i, orf in enumerate(embedded) if orf.id not in waiting]
    ready = [embedded[i] for i in rows]
    bases = [orf.bases[: orf.end - orf.start] for orf in ready]
    is_protein = bool(ready) and ready[0].strand == PROTEIN
    values = _classify(head, vectors[rows] if waiting else vectors, bases, is_protein)
    scores = dict(zip((orf.id for orf in ready), values, strict=True))
    return _packed(orfs, scores, reasons, waiting), vectors[rows_waiting]


def _packed(
    orfs: Sequence[Orf],
    scores: Mapping[str, float],
    reasons: Mapping[str, str],
    waiting: Mapping[str, int],
) -> bytes:
    rows = [
        [*orf[:_SCORE], scores.get(orf.id), reasons.get(orf.id, ""), waiting.get(orf.id)]
        for orf in orfs
    ]
    return json.dumps(rows).encode()


def _needs_record(orf: Orf, head: Head) -> bool:
    """True if the head reads bases, and the shard lacks some of this frame's."""
    is_whole = 3 * len(orf.protein) == orf.end - orf.start
    return head.nucleotide is not None and orf.strand != PROTEIN and not is_whole


def _classify(
    head: Head, vectors: NDArray[np.float32], bases: Sequence[str], is_protein: bool = False
) -> list[float]:
    """Score frames that have their vectors and bases, block by block."""
    values: list[float] = []
    for first in range(0, len(bases), FRAMES_AT_ONCE):
        some = slice(first, first + FRAMES_AT_ONCE)
        if is_protein:
            values += head.classify(vectors[some]).tolist()
        else:
            values += head.classify_frames(vectors[some], bases[some]).tolist()
    return values


def predict_records(
    records: Sequence[FastaRecord],
    runs: Sequence[Sequence[FrameRange]],
    frames: Sequence[ScoredFrames],
    head: Head | None,
) -> list[list[Prediction]]:
    """The predictions of each record, one for each of its frames."""
    rows_of = [json.loads(packed) for packed, _ in frames]
    of_records = [
        [(number, row) for number, first, end in run for row in rows_of[number][first:end]]
        for run in runs
    ]
    if waiting := list(_waiting_frames(records, of_records)):
        assert head, "frames wait only for a head that reads bases"
        _score_waiting(waiting, frames, head)
    return [
        [Prediction(_orf_in(row), row[_SCORE], row[_FAILURE]) for _, row in of_record]
        for of_record in of_records
    ]


def _score_waiting(
    waiting: Sequence[tuple[int, list[Any], str]], frames: Sequence[ScoredFrames], head: Head
) -> None:
    vectors = np.stack([frames[number][1][row[_WAITING]] for number, row, _ in waiting])
    scores = _classify(head, vectors, [bases for *_, bases in waiting])
    for (_, row, _), score in zip(waiting, scores, strict=True):
        row[_SCORE] = score


def _waiting_frames(
    records: Sequence[FastaRecord], of_records: Sequence[Sequence[tuple[int, list[Any]]]]
) -> Iterator[tuple[int, list[Any], str]]:
    """Yield the frames that wait for bases of their record, and these."""
    for record, of_record in zip(records, of_records, strict=True):
        for number, row in of_record:
            if row[_WAITING] is not None:
                yield number, row, _orf_in(row).codons_in(record.sequence)


def _orf_in(row: Sequence[Any]) -> Orf:
    return Orf._make((*row[:_SCORE], "", "", None))


def input_changed() -> InputError:
    return InputError(
        "an input file changed during the run",
        hint="wait until it is written completely, then start again with --force",
    )
