"""Tasks behind the outputs: one reads the frames of a shard, the other makes the rows of a block.

``RowBuilder`` is their shared context. Tasks may run in helper processes. Scoring a frame needs its
vector and its bases. A shard has both, unless the frame has ambiguous letters. Then only the record
has its bases, and the vector waits for the record. Scores do not depend on blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, groupby
from math import isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import FeatureFormat, Recipe
from virnucpro.core.types import Orf, Records, Shard
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.fasta import Block, Span, StreamCache, parse_block
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.feature_store import FeatureReader, FeatureStore, ShardFeatures
from virnucpro.store.manifest import Manifest
from virnucpro.store.shard_files import read_shard
from virnucpro.workflows.table_cache import SliceRows

NO_VECTORS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


class Frame(NamedTuple):
    """A frame in a shard: its location, and its score or what it lacks."""

    id: str
    chunk_id: str
    record_id: str
    start: int
    end: int
    strand: str
    score: float | None  # None: no vector, waiting for bases, or not scored
    failure: str = ""  # why it has no vector
    vector_row: int | None = None  # row in ``ShardFrames.vectors``, if it waits for its bases

    @classmethod
    def from_orf(cls, orf: Orf, score: float | None, failure: str, vector_row: int | None) -> Frame:
        location = (orf.id, orf.chunk_id, orf.record_id, orf.start, orf.end, orf.strand)
        return cls(*location, score, failure, vector_row)

    @property
    def orf(self) -> Orf:
        """The frame without its letters."""
        location = self[:6]
        return Orf(*location, protein="")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardFrames:
    """A shard's frames as columns, which a process can pass on without reading them."""

    ids: str  # one per line, as ids contain no white space
    chunk_ids: str
    record_ids: str
    starts: NDArray[np.int64]  # (n,)
    ends: NDArray[np.int64]  # (n,)
    strands: str  # one letter each
    scores: NDArray[np.float64]  # (n,), NaN: None
    failures: Mapping[int, str]  # by position in the shard
    vector_rows: NDArray[np.int64]  # (n,), -1: None
    vectors: NDArray[np.float32]  # (n_waiting, dim)

    @classmethod
    def pack(
        cls, frames: Iterable[Frame], vectors: NDArray[np.float32] = NO_VECTORS
    ) -> ShardFrames:
        columns = list(zip(*frames, strict=True)) or [()] * len(Frame._fields)
        ids, chunk_ids, record_ids, starts, ends, strands, scores, failures, rows = columns
        return cls(
            ids="\n".join(ids),
            chunk_ids="\n".join(chunk_ids),
            record_ids="\n".join(record_ids),
            starts=np.array(starts, dtype=np.int64),
            ends=np.array(ends, dtype=np.int64),
            strands="".join(strands),
            scores=np.array(scores, dtype=np.float64),
            failures={position: reason for position, reason in enumerate(failures) if reason},
            vector_rows=np.array([-1 if row is None else row for row in rows], dtype=np.int64),
            vectors=vectors,
        )

    @property
    def n_frames(self) -> int:
        return len(self.starts)

    def unpack(self) -> list[Frame]:
        if not self.n_frames:
            return []
        columns = (
            self.ids.split("\n"),
            self.chunk_ids.split("\n"),
            self.record_ids.split("\n"),
            self.starts.tolist(),
            self.ends.tolist(),
            self.strands,
            [None if isnan(score) else score for score in self.scores.tolist()],
            [self.failures.get(position, "") for position in range(self.n_frames)],
            [None if row < 0 else row for row in self.vector_rows.tolist()],
        )
        return list(map(Frame, *columns))

    def find_runs(self, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yield the record id, first and end of each run of frames in a range."""
        for record_id, run in groupby(self.record_ids.split("\n")[first:end]):
            n_frames = len(list(run))
            yield record_id, first, first + n_frames
            first += n_frames


class ShardRange(NamedTuple):
    """The frames of a block in one shard."""

    frames: ShardFrames
    first: int
    end: int


class FrameRange(NamedTuple):
    """A record's neighbouring frames in one shard of a block."""

    shard: int  # index among the block's shards
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """A block's record rows, and how they were made."""

    batches: list[RowBatch]
    n_letters: int
    work: int  # letters read; letters searched for regions count twice
    is_new: bool  # False: made from stored scores


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuilder(ABC):
    """Context that all table tasks of a run share. It is sent to each helper once.

    A subclass scores the frames of a shard and makes the rows of records.
    """

    manifest: Manifest
    stores: tuple[FeatureStore, ...]  # one per encoder
    slices: Mapping[int, tuple[Shard, ...]]  # slice index -> shards
    feature_format: FeatureFormat = "h5"
    per_file: bool = False  # each sample also gets tables of its own
    with_own_ids: bool = False  # every input has its own id namespace
    readers: dict[int, list[FeatureReader]] = field(init=False, default_factory=dict)  # by slice

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    def readers_of(self, index: int) -> list[FeatureReader]:
        """Return readers for all stores for a slice, with their caches."""
        if index not in self.readers:
            shards = self.slices[index]
            self.readers[index] = [FeatureReader(store, shards) for store in self.stores]
        return self.readers[index]

    @abstractmethod
    def pack_frames(
        self, orfs: Sequence[Orf], features: Sequence[ShardFeatures], reasons: Mapping[str, str]
    ) -> ShardFrames:
        """Score the frames in a shard, if a head does.

        Args:
            features: one per encoder.
            reasons: id -> why a frame has no vector.
        """

    @abstractmethod
    def make_rows(
        self,
        index: int,
        records: Records,
        ranges: Sequence[Sequence[FrameRange]],
        frames: Sequence[ShardFrames],
    ) -> BlockRows:
        """Make record rows for the block with this index.

        Args:
            ranges: frame ranges per record.

        Raises:
            OutputError, StorageError: scores cannot be written.
        """


class ScoredShard(NamedTuple):
    """The scored frames of a shard, and its feature files for the index of each store."""

    frames: ShardFrames
    files: list[list[IndexPart]]


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Read a shard and its vectors, verify them, and score the frames."""

    slice_index: int
    shard: Shard
    lost: Mapping[int, str]  # see ``FeatureReader.read``
    n_verified: int
    hidden: frozenset[str]  # replaced records, whose vectors do not count

    def do(self, builder: RowBuilder) -> ScoredShard:
        """Run the task.

        Raises:
            FeatureFileError: a feature file is incomplete.
            StorageError: the shard has changed since it was written.
        """
        orfs = read_shard(self.shard)
        unseen = {orf.id for orf in orfs if orf.record_id in self.hidden}
        features = [
            reader.read(self.shard, orfs, self.lost, self.n_verified)
            for reader in builder.readers_of(self.slice_index)
        ]
        files = [
            IndexPart.from_shard(store, shard_features, unseen, builder.feature_format)
            for store, shard_features in zip(builder.stores, features, strict=True)
        ]
        reasons: dict[str, str] = {}
        for shard_features in reversed(features):
            reasons |= shard_features.reasons
        return ScoredShard(builder.pack_frames(orfs, features, reasons), files)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockTask:
    """Makes a block's record rows."""

    index: int  # index of its slice, plus its position there
    n_letters: int  # approximate
    parts: tuple[Block, ...] = ()  # neighbouring records, one file each
    spans: tuple[tuple[int, Span], ...] = ()  # records that are not in ``parts``
    frames: Sequence[ShardRange] = ()
    hidden: frozenset[str] = frozenset()  # records that a later input replaces: they get no row
    files: Sequence[list[IndexPart]] = ()  # per store, from the shards since the last block

    def do(self, builder: RowBuilder) -> SliceRows:
        """Run the task.

        Raises:
            InputError: the records are not the planned ones.
        """
        blocks = chain(self.parts, builder.manifest.blocks(self.spans, StreamCache()))
        records = Records.concatenate(list(parse_block(blocks)))
        n_read = len(records.ids)
        ranges = self._ranges_by_record(records.ids)
        is_shown = [name not in self.hidden for name in records.ids]
        if not all(is_shown):
            records = records.select(is_shown)
            ranges = list(compress(ranges, is_shown))
        rows = builder.make_rows(self.index, records, ranges, [part.frames for part in self.frames])
        return SliceRows(
            files=self.files,
            batches=rows.batches,
            n_records=n_read,
            n_letters=rows.n_letters,
            work=rows.work,
            n_blocks=1,
            is_scored=rows.is_new,
            index=self.index,
        )

    def _ranges_by_record(self, ids: Sequence[str]) -> list[list[FrameRange]]:
        """Return the frames of each record of the block.

        Raises:
            InputError: there are frames of other records.
        """
        ranges: dict[str, list[FrameRange]] = {}
        for shard, (frames, first, end) in enumerate(self.frames):
            for record_id, run_first, run_end in frames.find_runs(first, end):
                ranges.setdefault(record_id, []).append(FrameRange(shard, run_first, run_end))
        ranges_by_record = [ranges.pop(record_id, []) for record_id in ids]
        if ranges:
            raise input_changed()
        return ranges_by_record


def input_changed() -> InputError:
    return InputError(
        "an input file changed during the run",
        hint=with_options("wait until it is written completely, then start again with {force}"),
    )
