"""Write every run output in one pass over the inputs and the predictions.

The plan divides the inputs and their frames into blocks. Tasks (``table_tasks``) read them again
and do all computing, up to the text of a row, in this process or in helpers. Results are consumed
in order, so the output is deterministic. Few tasks are in flight, so memory is bounded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter
from threading import Condition
from typing import TypeAlias

from virnucpro.core.errors import AbandonedError
from virnucpro.core.events import SCORING, STAGES, Progress, ShardDone, ShardFailed, WorkerEvent
from virnucpro.core.helper_pool import TaskRunner
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Shard, shard_name
from virnucpro.results.counts import RecordCounts
from virnucpro.results.output_writer import open_outputs
from virnucpro.results.row_batches import RowBatch
from virnucpro.results.sample_tables import OutputDir
from virnucpro.sequences.fasta import Block, StreamCache
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Slice, group_parts
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.run_context import RunContext
from virnucpro.workflows.table_cache import SliceRows
from virnucpro.workflows.table_tasks import (
    BlockTask,
    FrameSource,
    RowBuilder,
    ScoredShard,
    ShardRange,
    ShardTask,
    StoredFrames,
    input_changed,
)

Group: TypeAlias = Sequence[Slice]  # slices with the same records, one per step of --embed
_Files: TypeAlias = Sequence[list[IndexPart]]  # one list per store


class Backlog:
    """Shards that are not embedded yet. One thread settles them, another waits for them.

    ``reasons`` maps a shard index to the reason why the settled shard has no feature file.
    """

    def __init__(self, pending: Iterable[Shard] = ()) -> None:
        self.reasons: dict[int, str] = {}
        self._pending = {shard.index for shard in pending}
        self._new = set(self._pending)
        self._is_abandoned = False
        self._changed = Condition()

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def is_new(self, shard: Shard) -> bool:
        """Return True if this start embeds a shard, or has embedded it."""
        return shard.index in self._new

    def is_pending(self, shard: Shard) -> bool:
        """Return True if a shard is not embedded yet and embedding continues."""
        return shard.index in self._pending and not self._is_abandoned

    def add(self, shards: Iterable[Shard]) -> None:
        """Add shards that were planned.

        Raises:
            AbandonedError: embedding has stopped.
        """
        with self._changed:
            self.check()
            indices = [shard.index for shard in shards]
            self._new.update(indices)
            self._pending.update(indices)

    def on_event(self, event: WorkerEvent) -> None:
        """Settle the shard that ends: it has a feature file, or a reason why it never will.

        Raises:
            VirnucproError: as ``check_stored``.
        """
        with self._changed:
            match event:
                case ShardFailed(shard=shard, reason=reason):
                    check_stored(event)
                    self.reasons[shard.index] = reason
                    self._pending.discard(shard.index)
                case ShardDone(shard=shard):
                    self._pending.discard(shard.index)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Raise an error in every present and future waiter."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def wait_for(self, shard: Shard) -> None:
        """Wait until a shard is settled.

        Raises:
            AbandonedError: embedding has stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or shard.index not in self._pending)
            self.check()

    def check(self) -> None:
        """Check that embedding continues.

        Raises:
            AbandonedError: embedding has stopped.
        """
        if self._is_abandoned:
            raise AbandonedError


def check_stored(event: ShardDone | ShardFailed) -> None:
    """Raise the error behind a failed shard if other shards would fail, too.

    Raises:
        OutputError, StorageError, UnavailableError: the disk, the model or the device failed.
    """
    if isinstance(event, ShardFailed) and event.refusal is not None:
        raise event.refusal.to_error


@dataclass(frozen=True, slots=True, eq=False)
class TableWriter:
    """Writes a planned run's tables, while its shards may still be embedded."""

    context: RunContext
    backlog: Backlog
    streams: StreamCache = field(default_factory=StreamCache)  # for packed inputs

    def count_helpers(self, groups: Iterable[Group] | None = None) -> TaskRunner[RowBuilder]:
        """Return as many helpers as the tables of these slices (None: all) are worth."""
        context = self.context
        has_rows = context.finished_rows.cache.has
        groups = context.plan.group_by_records() if groups is None else groups
        missing = chain.from_iterable(group for group in groups if not has_rows(group))
        n_letters = sum(
            context.plan.slice_plans[slice_.index].counts.n_letters for slice_ in missing
        )
        return context.pool.helpers(context.row_builder, n_letters, "tables")

    def write(self, helpers: TaskRunner[RowBuilder]) -> RecordCounts:
        """Write every output, and return the total counts.

        Raises:
            AbandonedError: embedding has stopped.
            InputError: an input changed during the run.
            FeatureFileError: a feature file is incomplete.
        """
        context = self.context
        counts = RecordCounts()
        if context.scores is not None:
            context.run_dir.make_folder(context.scores.folder)
        indexes: list[list[IndexPart]] = [[] for _ in context.stores]
        with open_tables(context) as add:
            for batch in self._batches(indexes, helpers):
                self.backlog.check()
                counts.include(batch.total)
                add(batch)
            for store, parts in zip(context.stores, indexes, strict=True):
                self._write_features(store, sorted(parts, key=attrgetter("place")))
        return counts

    def _write_features(self, store: FeatureStore, parts: Sequence[IndexPart]) -> None:
        """Write ``features.h5`` of a store, its file list and its index, and record their hashes.

        Raises:
            FeatureFileError: a feature file is missing or damaged.
            OutputError, StorageError: as ``SafeDir.atomic_write``.
        """
        # Only runs with vectors use these.
        from virnucpro.store.feature_index import hash_part, write_parts
        from virnucpro.store.merged_features import write_merged
        from virnucpro.store.vector_index import write_index

        hashes = write_merged(store, parts, self.context.max_merged_bytes)
        write_parts(store, parts)
        write_index(store, parts)
        for part in parts:
            digest = hashes.get(part.name) or hash_part(store, part)
            self.context.hashes[store.folder / part.name] = digest

    def make_rows(self, group: Group, helpers: TaskRunner[RowBuilder]) -> SliceRows:
        """Make rows for slices with the same records.

        Raises:
            AbandonedError, InputError, FeatureFileError: as ``write``.
        """
        rows = SliceRows([[] for _ in self.context.stores])
        for block in self._iter_rows([group], helpers):
            self.backlog.check()
            rows.include(block)
        return rows

    def write_rows(self, groups: Sequence[Group], helpers: TaskRunner[RowBuilder]) -> None:
        """Write slice rows for a later join, except slices with a failed frame.

        It waits for shards in the backlog.

        Raises:
            AbandonedError, InputError, FeatureFileError: as ``write``.
        """
        context = self.context
        context.run_dir.make_folder(context.run_dir.rows)
        if context.scores is not None:
            context.run_dir.make_folder(context.scores.folder)
        groups_by_first = {group[0].index: group for group in groups}
        firsts = sorted(groups_by_first)

        def first_of(block: SliceRows) -> int:
            return firsts[bisect_right(firsts, block.index) - 1]

        for first, blocks in groupby(self._iter_rows(groups, helpers), key=first_of):
            group = groups_by_first[first]
            rows = SliceRows([[] for _ in context.stores])
            for block in blocks:
                self.backlog.check()
                rows.include(block)
            n_records = sum(
                context.plan.slice_plans[slice_.index].counts.n_records for slice_ in group
            )
            if rows.n_records != n_records:
                raise input_changed()
            if not rows.n_failed:
                context.finished_rows.cache.write(group, rows)

    def _batches(self, indexes: _Files, helpers: TaskRunner[RowBuilder]) -> Iterator[RowBatch]:
        """Yield rows for all records, in order, and report the progress.

        Raises:
            InputError: the record count of the inputs differs from the plan.
        """
        context = self.context
        counts = context.plan.counts
        n_done = 0
        n_worked = 0
        n_read = 0
        to_do = counts.n_letters + (counts.n_searched if context.searches_regions else 0)
        names = set[str]()

        def report() -> None:
            if context.scores is not None:
                work = (n_worked, max(0, to_do))
                context.on_event(Progress(SCORING, n_done, counts.n_letters, "letters", work))

        report()  # the first block may be a chromosome
        for rows in self._iter_rows(list(context.plan.group_by_records()), helpers):
            yield from rows.batches
            for index, files in zip(indexes, rows.files, strict=True):
                index.extend(files)
            names.update(shard_name(rows.index + position) for position in range(rows.n_blocks))
            n_read += rows.n_records
            n_done += rows.n_letters
            to_do -= rows.work
            n_worked += rows.work if rows.is_scored else 0
            report()
        if n_read != counts.n_records:
            raise input_changed()
        if context.scores is not None:
            context.scores.keep(names)

    def _iter_rows(
        self, groups: Sequence[Group], helpers: TaskRunner[RowBuilder]
    ) -> Iterator[SliceRows]:
        """Yield each block's rows in order, or of a complete slice if they exist."""
        finished = self.context.finished_rows
        rows_by_group = ((group, finished.read(group)) for group in groups)
        for is_finished, pairs in groupby(rows_by_group, key=lambda pair: pair[1] is not None):
            if is_finished:
                yield from (rows for _, rows in pairs if rows is not None)
            else:
                yield from helpers.map_in_order(self._tasks((group for group, _ in pairs), helpers))

    def _tasks(
        self, groups: Iterable[Group], helpers: TaskRunner[RowBuilder]
    ) -> Iterator[BlockTask]:
        """Yield blocks from slices. A failed record that a later input repeats is hidden."""
        latest = self.context.manifest.latest()
        for group in groups:
            generation = group[0].generation
            hidden = frozenset(name for name, last in latest.items() if last != generation)
            if self.context.shard_stores:
                yield from self._framed_blocks(group, hidden, helpers)
            else:
                yield from self._blocks(group[0], hidden)

    def _blocks(self, slice_: Slice, hidden: frozenset[str]) -> Iterator[BlockTask]:
        """Yield the blocks of a slice, as they were planned, without frames."""
        blocks = self.context.plan.slice_plans[slice_.index].blocks
        inputs = self.context.manifest.inputs
        # Each block of a compressed file would be unpacked from the start of the file.
        if not blocks or any(inputs[position].text_sha256 for position, _ in slice_.spans):
            records = self.context.manifest.blocks(slice_.spans, self.streams)
            yield from group_blocks(records, slice_.index, hidden)
            return
        for index, spans in enumerate(blocks, slice_.index):
            n_bytes = sum((span.end or 0) - span.start for _, span in spans)
            yield BlockTask(index=index, n_letters=n_bytes, spans=spans, hidden=hidden)

    def _framed_blocks(
        self, group: Group, hidden: frozenset[str], helpers: TaskRunner[RowBuilder]
    ) -> Iterator[BlockTask]:
        """Yield blocks with their frames, as soon as the frames are embedded."""
        files: list[list[IndexPart]] = [[] for _ in self.context.stores]

        def take_files() -> list[list[IndexPart]]:
            taken = [list(store_files) for store_files in files]
            for store_files in files:
                store_files.clear()
            return taken

        series = []
        for slice_ in group:
            if self.context.stores:
                shards = self._score_shards(slice_, files, hidden, helpers)
            else:
                shards = self._find_scored(slice_)
            n_orfs = self.context.plan.slice_plans[slice_.index].n_orfs
            series.append(frames_by_block(shards, n_orfs))
        for task, *frames in zip(self._blocks(group[0], hidden), *series, strict=True):
            yield replace(task, frames=list(chain.from_iterable(frames)), files=take_files())
        assert not any(files), "the last shard of a series has frames of the last block"

    def _find_scored(self, slice_: Slice) -> Iterator[ScoredShard]:
        """Yield a slice's shards, in order, as soon as their workers have scored them."""
        for shard in self.context.plan.slice_plans[slice_.index].shards:
            self.backlog.wait_for(shard)
            self._report_shard(shard)
            yield ScoredShard(StoredFrames(slice_.index, shard, dict(self.backlog.reasons)), [])

    def _report_shard(self, shard: Shard) -> None:
        """Report the progress up to this shard."""
        indices = self.context.plan.indices
        n_done = bisect_right(indices, shard.index)
        work = (n_done, len(indices) - n_done)
        self.context.on_event(Progress(STAGES[2], n_done, len(indices), "shards", work))

    def _score_shards(
        self,
        slice_: Slice,
        files: _Files,
        hidden: frozenset[str],
        helpers: TaskRunner[RowBuilder],
    ) -> Iterator[ScoredShard]:
        """Yield a slice's shards, in order, as soon as they are embedded.

        Args:
            files: file lists per store, which are extended.
            hidden: records that a later generation replaces. Their vectors do not count.
        """
        tasks: deque[tuple[Shard, Future[ScoredShard]]] = deque()

        def take() -> ScoredShard:
            shard, future = tasks.popleft()
            scored = future.result()
            self._report_shard(shard)
            for store_files, more_files in zip(files, scored.files, strict=True):
                store_files.extend(more_files)
            return scored

        shards = self.context.plan.slice_plans[slice_.index].shards
        old_indices = [shard.index for shard in shards if not self.backlog.is_new(shard)]
        for shard in shards:
            while tasks and (len(tasks) > helpers.n_ahead or self.backlog.is_pending(shard)):
                yield take()
            self.backlog.wait_for(shard)
            first_unread = tasks[0][0].index if tasks else shard.index
            unverified = old_indices[bisect_left(old_indices, first_unread) :]
            n_verified = unverified[0] if unverified else shard.index + 1
            reasons = dict(self.backlog.reasons)
            task = ShardTask(slice_.index, shard, reasons, n_verified, hidden)
            tasks.append((shard, helpers.submit(task)))
        while tasks:
            yield take()


@contextmanager
def open_tables(context: RunContext) -> Iterator[Callable[[RowBatch], None]]:
    """Open all run outputs, and yield the function that adds rows to them."""
    with context.checksums.writing() as tree:
        folder = locate_outputs(context.run_dir, tree, context.manifest, per_file=context.per_file)
        with open_outputs(context.outputs, folder) as add:
            yield add


def locate_outputs(
    run_dir: RunDir, tree: SafeDir, manifest: Manifest, *, per_file: bool
) -> OutputDir:
    """Return where a run writes its outputs, through the run folder ``tree``."""
    samples = run_dir.samples if per_file else None
    return OutputDir(run_dir.root, tree, run_dir.shards, manifest.inputs, manifest.refused, samples)


def frames_by_block(
    shards: Iterable[ScoredShard], n_orfs: Iterable[int]
) -> Iterator[list[ShardRange]]:
    """Yield the frames of each block. They are neighbours in the shards of a slice.

    Args:
        n_orfs: number of frames of each block.
    """
    scored = iter(shards)
    frames: FrameSource | None = None
    first = 0  # frame of the shard that comes next
    for n_missing in n_orfs:
        ranges = list[ShardRange]()
        while n_missing:
            if frames is None:
                frames = next(scored).frames
                first = 0
            n_taken = min(n_missing, frames.n_frames - first)
            ranges.append(ShardRange(frames, first, first + n_taken))
            n_missing -= n_taken
            first += n_taken
            if first == frames.n_frames:
                frames = None
        yield ranges


def group_blocks(
    blocks: Iterable[Block], first_index: int, hidden: frozenset[str]
) -> Iterator[BlockTask]:
    """Yield tasks for neighbouring blocks, up to a bounded size, as ``Plan`` groups them."""
    groups = group_parts(blocks, lambda block: block.n_letters)
    for index, parts in enumerate(groups, first_index):
        n_letters = sum(part.n_letters for part in parts)
        yield BlockTask(index=index, n_letters=n_letters, parts=tuple(parts), hidden=hidden)
