"""Tasks behind the outputs: one reads the frames of a shard, the other makes the rows of a block.

``RowBuilder`` is their shared context. Tasks may run in helper processes. Scoring a frame needs its
vector and its bases. A shard has both, unless the frame has ambiguous letters. Then only the record
has its bases, and the vector waits for the record. Scores do not depend on blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import FeatureFormat, Recipe
from virnucpro.core.types import Orf, Records, Shard
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.fasta import Block, Span, StreamCache, parse_block
from virnucpro.store.feature_file import Checksums
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.feature_store import FeatureReader, FeatureStore, ShardFeatures
from virnucpro.store.manifest import Manifest
from virnucpro.store.shard_files import read_shard
from virnucpro.store.shard_store import ShardStore
from virnucpro.workflows.shard_frames import FrameRange, ShardFrames
from virnucpro.workflows.table_cache import SliceRows


class FrameSource(Protocol):
    """The frames of a shard, or where they are stored."""

    @property
    def n_frames(self) -> int: ...

    def load(self, builder: RowBuilder, /) -> ShardFrames:
        """Return the frames.

        Raises:
            FeatureFileError: their file is missing or corrupt.
        """


@dataclass(frozen=True, slots=True, eq=False)
class StoredFrames:
    """The frames of a shard whose worker has scored them. Only the task that needs them reads."""

    slice_index: int
    shard: Shard
    lost: Mapping[int, str]  # index of each shard without a file -> reason

    @property
    def n_frames(self) -> int:
        return self.shard.n_orfs

    def load(self, builder: RowBuilder, /) -> ShardFrames:
        return builder.read_frames(self.slice_index, self.shard, self.lost)


@dataclass(frozen=True, slots=True, eq=False)
class FilledFrames:
    """The frames of a shard whose worker has scored all but the copies."""

    slice_index: int
    shard: Shard
    features: tuple[Checksums, ...]  # of the feature files that the scores are made from
    copies: ShardFrames  # scored by the task that read their vectors
    positions: NDArray[np.int64]  # of the copies in the shard

    @property
    def n_frames(self) -> int:
        return self.shard.n_orfs

    def load(self, builder: RowBuilder, /) -> ShardFrames:
        frames = builder.read_originals(self.slice_index, self.shard, self.features)
        return frames.fill(self.positions, self.copies)


class ShardRange(NamedTuple):
    """The frames of a block in one shard."""

    frames: FrameSource
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """A block's record rows, and how they were made."""

    batches: list[RowBatch]
    n_letters: int
    work: int  # letters read; letters searched for regions count twice
    is_new: bool  # False: made from stored scores


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowBuilder(ABC):
    """Context that all table tasks of a run share. It is sent to each helper once.

    A subclass scores the frames of a shard and makes the rows of records.
    """

    manifest: Manifest
    stores: tuple[FeatureStore, ...]  # one per encoder; empty if the run keeps no vectors
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

    @property
    def shard_stores(self) -> tuple[ShardStore, ...]:
        """Return the stores in which a finished shard has a file each."""
        return self.stores

    def read_frames(self, index: int, shard: Shard, lost: Mapping[int, str]) -> ShardFrames:
        """Read the scored frames of a shard of a slice, in a run without vectors.

        Args:
            lost: see ``StoredFrames``.

        Raises:
            FeatureFileError: a file is missing or corrupt.
        """
        raise NotImplementedError

    def read_originals(
        self, index: int, shard: Shard, features: tuple[Checksums, ...]
    ) -> ShardFrames:
        """Read the stored frames of a shard of a slice. Copies have no score.

        Args:
            features: see ``FilledFrames``.

        Raises:
            FeatureFileError: their file is missing or corrupt.
        """
        raise NotImplementedError

    def find_scored(self, task: ShardTask) -> ScoredShard | None:
        """Return the frames of a shard, if its worker has stored all scores of their vectors."""
        return None

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

    frames: FrameSource
    files: list[list[IndexPart]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardTask:
    """Read a shard and its vectors, verify them, and score the frames.

    Vectors that a worker of this start has made and scored are not read again.
    """

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
        if scored := builder.find_scored(self):
            return scored
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
        frames = [part.frames.load(builder) for part in self.frames]
        ranges = self._ranges_by_record(records.ids, frames)
        is_shown = [name not in self.hidden for name in records.ids]
        if not all(is_shown):
            records = records.select(is_shown)
            ranges = list(compress(ranges, is_shown))
        rows = builder.make_rows(self.index, records, ranges, frames)
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

    def _ranges_by_record(
        self, ids: Sequence[str], frames: Sequence[ShardFrames]
    ) -> list[list[FrameRange]]:
        """Return the frames of each record of the block.

        Raises:
            InputError: there are frames of other records.
        """
        ranges: dict[str, list[FrameRange]] = {}
        for shard, (shard_frames, (_, first, end)) in enumerate(
            zip(frames, self.frames, strict=True)
        ):
            for record_id, run_first, run_end in shard_frames.find_runs(first, end):
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
