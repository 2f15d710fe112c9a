"""Write every output of a run in one pass over the inputs and the predictions.

The inputs are read again, and the frames of each record are looked up in the shards by the
record's id. Tasks (``blocks``) do all computing, up to the text of a row: in this process or in
helpers. Their results are taken in order, so the outputs do not depend on who computed them, and
only a few tasks are ahead, so memory is bounded.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from threading import Condition
from typing import Any, TypeAlias

from virnucpro.core.events import (
    SCORING,
    STAGES,
    Event,
    OnEvent,
    Progress,
    ShardDone,
    ShardFailed,
)
from virnucpro.core.helper_pool import AbandonedError, Helpers, Pool
from virnucpro.core.safe_dir import Tree
from virnucpro.core.types import FastaRecord, Records, Shard, shard_name
from virnucpro.results.counts import RecordCounts
from virnucpro.results.output_writer import open_outputs
from virnucpro.results.outputs import OUTPUTS
from virnucpro.results.report.run_report import write_run_page
from virnucpro.results.row_batches import RowBatch
from virnucpro.results.sample_tables import OutputDir
from virnucpro.sequences.fasta import Block, Streams, parsed
from virnucpro.store.checksums import Outputs
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, Slice, grouped
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.table_cache import RowStore, SliceRows
from virnucpro.workflows.table_tasks import (
    BlockTask,
    Maker,
    ScoredFrames,
    ScoredShard,
    ShardTask,
    input_changed,
)

# The frames of a record are neighbours in each shard: shard, the first, and one after the last.
# There are millions of these, so they are plain tuples, and few functions handle them.
FrameRun: TypeAlias = tuple[ScoredFrames, int, int]
FramedRecord: TypeAlias = tuple[FastaRecord, Sequence[FrameRun]]


class Backlog:
    """Shards that are still to be embedded: one thread settles them, another waits for them.

    ``reasons`` says, by the shard's index, why a settled shard has no feature file.
    """

    def __init__(self, pending: Iterable[Shard] = ()) -> None:
        self.reasons: dict[int, str] = {}
        self._owed = {shard.index for shard in pending}
        self._is_abandoned = False
        self._changed = Condition()

    @property
    def is_empty(self) -> bool:
        return not self._owed

    def owes(self, shard: Shard) -> bool:
        """True if a shard is still to be embedded, and somebody still embeds."""
        return shard.index in self._owed and not self._is_abandoned

    def take(self, event: Event) -> None:
        """Settle the shard that ends: it has a feature file, or a reason why it never will.

        Raises:
            OutputError, StorageError: as ``check_stored``.
        """
        with self._changed:
            match event:
                case ShardFailed(shard=shard, reason=reason):
                    check_stored(event)
                    self.reasons[shard.index] = reason
                    self._owed.discard(shard.index)
                case ShardDone(shard=shard):
                    self._owed.discard(shard.index)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Make all who wait, now and later, raise an error."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def wait_for(self, shard: Shard) -> None:
        """Wait until a shard is settled.

        Raises:
            AbandonedError: embedding has stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or shard.index not in self._owed)
            self.check()

    def check(self) -> None:
        """
        Raises:
            AbandonedError: embedding has stopped.
        """
        if self._is_abandoned:
            raise AbandonedError


def check_stored(event: ShardFailed) -> None:
    """
    Raises:
        OutputError, StorageError: the disk failed, and would fail for other shards too.
    """
    if event.refusal is not None:
        raise event.refusal.error


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that the outputs of a run are made from."""

    outputs: Outputs
    maker: Maker  # makes the rows
    plan: Plan
    options: RunOptions
    facts: Mapping[str, Any]  # about this start, for ``run.json``
    pool: Pool  # of processes
    per_file: bool
    on_event: OnEvent
    made_by: str  # see ``RowStore``
    backlog: Backlog = field(default_factory=Backlog)  # shards that are still being embedded
    streams: Streams = field(default_factory=Streams)  # of packed inputs

    @property
    def rundir(self) -> RunDir:
        return self.plan.rundir

    def record(self, state: str, **more: object) -> None:
        """Write ``run.json``, with the state of the run and more facts."""
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "state": state}
        self.rundir.write_manifest(self.maker.manifest, {**self.facts, **now, **more})

    def close(self, summary: Summary, *, is_whole: bool = True) -> None:
        """Write the outcome to ``run.json``, delete intermediate files, and write the page."""
        hosts = [asdict(host) for host in self.rundir.hosts()]
        outcome = {"counts": summary.facts, "hosts": hosts, Outputs.field: self.outputs.hash()}
        self.record("complete" if is_whole and not summary.exit_code else "partial", **outcome)
        self.rundir.clear_parts()
        if not self.options.keep_intermediate and not summary.records.n_failed_frames:
            self.rundir.clear_shards()
        if self.options.report:
            write_run_page(self.rundir, self.pool)

    @property
    def rows(self) -> RowStore:
        """The rows of slices."""
        return RowStore(self.plan, self.made_by)

    def helpers(self) -> Helpers[Maker]:
        """The helpers for the tables: as many as the work is worth."""
        groups = self.plan.by_records()
        owed = chain.from_iterable(group for group in groups if not self.rows.has(group))
        n_letters = sum(self.plan.parts[one.index].counts.n_letters for one in owed)
        slices = {index: part.shards for index, part in self.plan.parts.items()}
        maker = replace(self.maker, slices=slices)
        return self.pool.helpers(maker, n_letters, "tables")

    def write(self, summary: Summary, helpers: Helpers[Maker]) -> None:
        """Write and count every output, while other shards are still being embedded.

        Raises:
            AbandonedError: embedding has stopped.
            InputError: an input changed during the run.
            FeatureFileError: a feature file is incomplete.
        """
        summary.records = RecordCounts()  # an interrupted pass may have counted
        if self.maker.scores is not None:
            self.rundir.make_folder(self.rundir.scores)
        indexes: list[list[IndexPart]] = [[] for _ in self.maker.stores]
        with self.opened() as add:
            for portion in self.portions(indexes, helpers):
                self.backlog.check()
                summary.records.include(portion.counts)
                add(portion)
            for store, index in zip(self.maker.stores, indexes, strict=True):
                IndexPart.write_index(store.index, index, store.tree)

    @contextmanager
    def opened(self) -> Iterator[Callable[[RowBatch], None]]:
        """Open all outputs, and yield the function that adds rows to them."""
        manifest = self.maker.manifest
        with self.outputs.writing() as tree:
            place = place_of(self.rundir, tree, manifest, per_file=self.per_file)
            with open_outputs(OUTPUTS[manifest.recipe.command], place) as add:
                yield add

    def portions(
        self, indexes: Sequence[list[IndexPart]], helpers: Helpers[Maker]
    ) -> Iterator[RowBatch]:
        """Yield the rows of all records, in order.

        Raises:
            InputError: the inputs have another number of records than the plan.
        """
        counts, n_done, n_worked, n_read = self.plan.counts, 0, 0, 0
        scores = self.maker.scores
        to_do = counts.n_letters + (counts.n_searched if self.maker.finder else 0)
        names = set[str]()
        for written in self.written(helpers):
            yield from written.portions
            for index, files in zip(indexes, written.files, strict=True):
                index.extend(files)
            names.update(shard_name(written.index + place) for place in range(written.n_blocks))
            n_read += written.n_records
            n_done, to_do = n_done + written.n_letters, to_do - written.work
            n_worked += written.work if written.is_scored else 0
            if scores is not None:
                at_end = (n_worked, max(0, to_do))
                letters = (n_done, counts.n_letters, "letters")
                self.on_event(Progress(SCORING, *letters, at_end))
        if n_read != counts.n_records:
            raise input_changed()
        if scores is not None:
            scores.keep(names)

    def write_rows(self, helpers: Helpers[Maker]) -> None:
        """Write the rows of slices for a later join, except slices with a failed frame.

        It waits for shards in the backlog.

        Raises:
            AbandonedError, InputError, FeatureFileError: as ``write``.
        """
        folders = [self.rundir.rows, *([self.rundir.scores] if self.maker.scores else ())]
        for folder in folders:
            self.rundir.make_folder(folder)
        groups = {group[0].index: group for group in self.plan.by_records()}
        firsts = sorted(groups)

        def first_of(block: SliceRows) -> int:
            return firsts[bisect_right(firsts, block.index) - 1]

        for first, blocks in groupby(self.written(helpers), key=first_of):
            group, rows = groups[first], SliceRows([[] for _ in self.maker.stores])
            for block in blocks:
                self.backlog.check()
                rows.include(block)
            n_records = sum(self.plan.parts[one.index].counts.n_records for one in group)
            if rows.n_records != n_records:
                raise input_changed()
            if not rows.n_failed:
                self.rows.write(group, rows)

    def rows_of(self, group: Sequence[Slice]) -> SliceRows | None:
        """The rows of these slices, which have the same records, if they exist and are intact.

        The scores that they were made from must be intact too, if the run keeps scores.
        """
        rows, scores = self.rows.read(group), self.maker.scores
        if rows is not None and scores is not None:
            blocks = range(group[0].index, group[0].index + rows.n_blocks)
            return rows if all(map(scores.is_whole, blocks)) else None
        return rows

    def joined(self, plan: Plan) -> set[int]:
        """The indices of the slices of a plan that have their rows and all their vectors."""
        done = [store.names_done() for store in self.maker.stores]
        of_plan = replace(self, plan=plan)
        groups = (group for group in plan.by_records() if of_plan.is_done(group, done))
        return {one.index for group in groups for one in group}

    def is_done(self, group: Sequence[Slice], done: Sequence[set[str]]) -> bool:
        """True if the rows of these slices exist, and their shards are in ``done``.

        Damaged rows are found at the join if the shards exist, from which they can be made again;
        otherwise the rows are read and verified here.
        """
        parts = [self.plan.parts[one.index] for one in group if one.index in self.plan.parts]
        shards = [shard for part in parts for shard in part.shards]
        names = {shard.name for shard in shards}
        if not self.rows.has(group) or any(names - there for there in done):
            return False
        return all(shard.path.is_file() for shard in shards) or self.rows_of(group) is not None

    def shards_without_rows(self) -> Iterator[Shard]:
        """The shards that the tables still need; rows without vectors do not count."""
        joined = self.joined(self.plan)
        for group in self.plan.by_records():
            if group[0].index not in joined:
                if self.rows.has(group):
                    self.rundir.delete(self.rows.path(group))
                for one in group:
                    yield from self.plan.parts[one.index].shards

    def written(self, helpers: Helpers[Maker]) -> Iterator[SliceRows]:
        """Yield the rows of each block, or of whole slices if they exist, in order."""
        each = ((group, self.rows_of(group)) for group in self.plan.by_records())
        for is_made, some in groupby(each, key=lambda one: one[1] is not None):
            if is_made:
                yield from (rows for _, rows in some if rows is not None)
            else:
                yield from helpers.in_order(self.tasks((group for group, _ in some), helpers))

    def tasks(
        self, groups: Iterable[Sequence[Slice]], helpers: Helpers[Maker]
    ) -> Iterator[BlockTask]:
        """Yield the blocks of slices.

        A failed record is left out if a later input has it again.
        """
        latest = self.maker.manifest.latest()
        for group in groups:
            number = group[0].generation
            hidden = frozenset(name for name, last in latest.items() if last != number)
            tasks = self.blocks(group, hidden, helpers)
            for index, task in enumerate(tasks, group[0].index):
                yield replace(task, index=index)

    def blocks(
        self, group: Sequence[Slice], hidden: frozenset[str], helpers: Helpers[Maker]
    ) -> Iterator[BlockTask]:
        """Yield the blocks of the records of slices, which have the same records."""
        if self.maker.stores:
            yield from self.framed_blocks(group, hidden, helpers)
        elif blocks := self.plan.parts[group[0].index].blocks:
            for places in blocks:
                n_bytes = sum((span.end or 0) - span.start for _, span in places)
                yield BlockTask(n_bytes, (), array("q"), [], hidden, places)
        else:  # packed inputs are unpacked in this process
            yield from raw_tasks(self.maker.manifest.blocks(group[0].spans, self.streams), hidden)

    def framed_blocks(
        self, group: Sequence[Slice], hidden: frozenset[str], helpers: Helpers[Maker]
    ) -> Iterator[BlockTask]:
        """Yield the blocks of records with frames, as soon as these are embedded."""
        files: list[list[IndexPart]] = [[] for _ in self.maker.stores]
        of_series = [self.scored(one, files, hidden, helpers) for one in group]
        for task in block_tasks(self.generation(group[0], of_series), hidden):
            yield replace(task, files=[list(of_store) for of_store in files])
            for of_store in files:
                of_store.clear()
        assert not any(files), "the last shard of a series has frames of the last block"

    def generation(
        self, one: Slice, of_series: Iterable[Iterable[ScoredShard]]
    ) -> Iterator[FramedRecord]:
        """Yield each record of a slice with its frames, which are neighbours in the shards."""
        streams = map(frames_by_record, of_series)
        firsts = ((next(stream, None), stream) for stream in streams)
        heads = {first[0]: (first[1], stream) for first, stream in firsts if first}
        records = parsed(self.maker.manifest.blocks(one.spans, self.streams))
        for record in chain.from_iterable(block.each() for block in records):
            if record.id not in heads:
                yield record, ()
                continue
            frames, stream = heads.pop(record.id)
            yield record, frames
            if following := next(stream, None):
                heads[following[0]] = (following[1], stream)
        if heads:
            raise input_changed()

    def scored(
        self,
        one: Slice,
        files: Sequence[list[IndexPart]],
        hidden: frozenset[str],
        helpers: Helpers[Maker],
    ) -> Iterator[ScoredShard]:
        """Yield the shards of a slice, in order, as soon as they are embedded.

        The ``files`` of each store are extended; indexes of them leave out vectors of ``hidden``
        records, which a later generation replaces.
        """
        tasks: deque[tuple[Shard, Future[ScoredShard]]] = deque()
        indices = self.plan.indices

        def take() -> ScoredShard:
            shard, future = tasks.popleft()
            scored = future.result()
            n_done = bisect_right(indices, shard.index)
            work = (n_done, len(indices) - n_done)
            self.on_event(Progress(STAGES[2], n_done, len(indices), "shards", work))
            for of_store, more in zip(files, scored.files, strict=True):
                of_store.extend(more)
            return scored

        for shard in self.plan.parts[one.index].shards:
            while tasks and (len(tasks) > helpers.n_ahead or self.backlog.owes(shard)):
                yield take()
            self.backlog.wait_for(shard)
            n_verified = tasks[0][0].index if tasks else shard.index
            lost = dict(self.backlog.reasons)
            task = ShardTask(one.index, shard, lost, n_verified, hidden)
            tasks.append((shard, helpers.submit(task)))
        while tasks:
            yield take()


def frames_by_record(
    shards: Iterable[ScoredShard],
) -> Iterator[tuple[str, list[FrameRun]]]:
    """Yield the id of each record with a frame, and where its frames are; ids may repeat."""
    record_id, runs = "", list[FrameRun]()
    for shard in shards:
        first = 0
        for next_id, n_frames in shard.records:
            if next_id != record_id and runs:
                yield record_id, runs
                runs = []
            record_id = next_id
            runs.append((shard.frames, first, first + n_frames))
            first += n_frames
    if runs:
        yield record_id, runs


def block_tasks(
    framed: Iterable[FramedRecord], hidden: frozenset[str] = frozenset()
) -> Iterator[BlockTask]:
    """Yield the tasks of blocks: of bounded size, or of one longer record."""
    for group in grouped(framed, lambda one: len(one[0].header) + len(one[0].sequence)):
        records = [record for record, _ in group]
        runs, frames, numbers = array("q"), list[ScoredFrames](), dict[int, int]()
        for place, each, first, end in _placed(group, hidden):
            number = numbers.setdefault(id(each), len(frames))
            if number == len(frames):
                frames.append(each)
            runs.extend((place, number, first, end))
        n_letters = sum(len(record.sequence) for record in records)
        yield BlockTask(n_letters, (Records.of(records),), runs, frames, hidden)


def _placed(
    group: Iterable[FramedRecord], hidden: frozenset[str]
) -> Iterator[tuple[int, ScoredFrames, int, int]]:
    """Yield the frames of records that get a row, with the index of their record."""
    for place, (record, runs) in enumerate(group):
        if record.id not in hidden:
            yield from ((place, *run) for run in runs)


def raw_tasks(blocks: Iterable[Block], hidden: frozenset[str]) -> Iterator[BlockTask]:
    """Yield the tasks of records without frames: neighbouring blocks, up to a bounded size."""
    for parts in grouped(blocks, lambda block: block.n_letters):
        n_letters = sum(part.n_letters for part in parts)
        yield BlockTask(n_letters, tuple(parts), array("q"), [], hidden)


def place_of(rundir: RunDir, tree: Tree, manifest: Manifest, *, per_file: bool) -> OutputDir:
    """Where a run writes its outputs; ``tree``, the run folder, writes them."""
    samples = rundir.samples if per_file else None
    return OutputDir(rundir.root, tree, rundir.shards, manifest.inputs, manifest.refused, samples)
