"""Every output of a run, written in one pass over the inputs beside the predictions.

The inputs are read again, in order; the frames of a record are met in the same order in the
shards. Both are joined by the record's id, so nothing is paired by its place. What is computed of
them, up to the text of a row, is done in tasks (``blocks``): here, or by helpers. Their results are
taken in order, so the outputs are the same, and few tasks are ahead, so memory is bounded.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import TypeAlias, TypeVar

from virnucpro.callers.batches import ScoredFrames, input_changed
from virnucpro.callers.caller import Caller
from virnucpro.callers.regions import RegionFinder
from virnucpro.ground.config import FeatureFormat
from virnucpro.ground.errors import InputError
from virnucpro.ground.events import STAGES, OnEvent, Progress
from virnucpro.ground.files import writing
from virnucpro.ground.log import counted
from virnucpro.ground.records import FastaRecord, Shard
from virnucpro.ground.tasks import Helpers, count_worth, helpers_for
from virnucpro.run.backlog import Backlog
from virnucpro.run.features import FeatureStore
from virnucpro.run.folder import RunDir
from virnucpro.run.index import FeatureIndex
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import Plan
from virnucpro.sequences.inputs import InputFile, generations
from virnucpro.stories.blocks import BlockTask, Maker, ScoredShard, ShardTask
from virnucpro.stories.summary import Summary
from virnucpro.tables.sinks import SINKS, Add, Place, Portion, Sink, Tally, open_sinks

LETTERS_AT_ONCE = 500_000  # of the records of a block
_RECORDS_AT_ONCE = 5_000

# The frames of a record lie in a row in each of some shards: the first, and one after the last.
# These are made by the million: plain tuples, and few functions on their way.
FrameRun: TypeAlias = tuple[ScoredFrames, int, int]
FramedRecord: TypeAlias = tuple[FastaRecord, Sequence[FrameRun]]


@dataclass(frozen=True, slots=True)
class Results:
    """The parts of a run that its outputs are made of."""

    rundir: RunDir
    manifest: Manifest
    plan: Plan
    stores: tuple[FeatureStore, ...]  # one for each encoder
    caller: Caller
    finder: RegionFinder | None  # None: regions are not looked for
    backlog: Backlog  # shards that are being embedded meanwhile
    feature_format: FeatureFormat
    per_file: bool
    on_event: OnEvent

    def helpers(self, most: int) -> AbstractContextManager[Helpers[Maker]]:
        """The helpers for the time of a block: as many as there is work for, ``most`` at most."""
        maker = Maker(
            recipe=self.manifest.recipe,
            sinks=SINKS[self.manifest.recipe.command],
            stores=self.stores,
            generations=self.plan.generations,
            caller=self.caller,
            finder=self.finder,
            feature_format=self.feature_format,
            with_own_ids=self.per_file and self.manifest.is_qualified,
        )
        return helpers_for(maker, count_worth(most, self.plan.counts.n_letters), "tables")

    def write(self, summary: Summary, helpers: Helpers[Maker]) -> None:
        """Write every output, and count what is in them.

        Shards in the backlog are waited for, so that it can be done while they are embedded.

        Raises:
            AbandonedError: they are embedded no more.
            InputError: an input changed while the run went on.
            FeatureFileError: a feature file is not whole.
        """
        summary.records = Tally()  # a pass that was not ended may have counted
        indexes = self.new_indexes()
        with ExitStack() as stack:
            adds = list(self.open_outputs(stack))
            for portion in self.portions(indexes, helpers):
                self.backlog.check()
                summary.records.include(portion.tally)
                for add in adds:
                    add(portion)
            for store, index in zip(self.stores, indexes, strict=True):
                index.write(store.folder)

    def new_indexes(self) -> list[FeatureIndex]:
        """An index, still empty, of each store."""
        return [FeatureIndex(store.index, store.tree) for store in self.stores]

    def open_outputs(self, stack: ExitStack) -> Iterator[Add]:
        """The functions that add a portion to the outputs of the run and, if asked, of its file."""
        rundir, sinks = self.rundir, SINKS[self.manifest.recipe.command]
        inputs = [file for file in self.manifest.inputs if not file.generation]
        files = (self.manifest.inputs, self.manifest.refused)
        place = Place(rundir.root, rundir, rundir.shards, *files)
        yield stack.enter_context(open_sinks(sinks, place))
        if self.per_file:
            samples = dict.fromkeys(file.sample for file in inputs)  # mates share one
            yield stack.enter_context(open_sinks_of_samples(rundir, sinks, samples))

    def portions(
        self, indexes: Sequence[FeatureIndex], helpers: Helpers[Maker]
    ) -> Iterator[Portion]:
        """The outputs of all records, in order."""
        ends: deque[int] = deque()  # letters up to the end of each block that was begun

        def tasks() -> Iterator[BlockTask]:
            n_letters = 0
            for task in block_tasks(self.records(indexes, helpers)):
                n_letters += task.n_letters
                ends.append(n_letters)
                yield task

        for portions in helpers.in_order(tasks()):
            yield from portions
            end, total = ends.popleft(), self.plan.counts.n_letters
            if not self.manifest.recipe.has_encoder:
                self.on_event(Progress("scoring", end, total, "letters"))

    def records(
        self, indexes: Sequence[FeatureIndex], helpers: Helpers[Maker]
    ) -> Iterator[FramedRecord]:
        """Each record once, in input order, with its frames.

        A failed record that a later input gives anew stands in its old place with the new
        sequence and its frames.

        Raises:
            InputError: there are not as many records as the plan was made of.
        """
        owners: dict[str, int] = {}  # replaced id -> its last generation
        replaced = frozenset(self.manifest.replaced)
        n_read = 0

        def every() -> Iterator[FramedRecord]:
            nonlocal n_read
            for number, files in enumerate(generations(self.manifest.inputs)):
                shards = self.scored(number, indexes, owners, helpers)
                n_read += yield from self.generation(files, shards)

        if replaced:
            later = self.later_records(replaced, owners, helpers)
            pairs = in_first_places(replaced, later, every(), itemgetter(0))
            for (record, frames), place in pairs:
                yield record if record is place else record.in_place_of(place), frames
        else:
            yield from every()
        if n_read != self.plan.counts.n_records:
            raise InputError(
                f"{counted(self.plan.counts.n_records, 'record')} at first, "
                f"{n_read} now: an input file changed while the run went on",
                hint="let it be written to its end, then start again with --force",
            )

    def later_records(
        self, replaced: frozenset[str], owners: dict[str, int], helpers: Helpers[Maker]
    ) -> Iterator[FramedRecord]:
        """The records of all generations but the first; ``owners`` gets who gives which anew."""
        for number, files in islice(enumerate(generations(self.manifest.inputs)), 1, None):
            shards = self.scored(number, self.new_indexes(), owners, helpers)
            for record, frames in self.generation(files, shards):
                if record.id in replaced:
                    owners[record.id] = number
                yield record, frames

    def generation(
        self, inputs: list[InputFile], shards: Iterable[ScoredShard]
    ) -> Generator[FramedRecord, None, int]:
        """The records of one generation, each beside its frames; returns their number."""
        with_frames = frames_by_record(shards)
        record_id, frames = next(with_frames, (None, []))
        n_read = 0
        for record in chain.from_iterable(map(self.manifest.ids.read, inputs)):
            n_read += 1
            if record.id == record_id:
                yield record, frames
                record_id, frames = next(with_frames, (None, []))
            else:
                yield record, ()
        if record_id is not None:
            raise input_changed()
        return n_read

    def scored(
        self,
        number: int,
        indexes: Sequence[FeatureIndex],
        owners: Mapping[str, int],
        helpers: Helpers[Maker],
    ) -> Iterator[ScoredShard]:
        """The shards of one generation, in their order, as soon as they are embedded.

        Vectors of records that a later generation replaces stay out of the indexes.
        """
        hidden = frozenset(record_id for record_id, last in owners.items() if last != number)
        tasks: deque[tuple[Shard, Future[ScoredShard]]] = deque()

        def take() -> ScoredShard:
            shard, future = tasks.popleft()
            scored = future.result()
            self.on_event(Progress(STAGES[2], shard.index + 1, len(self.plan.shards), "shards"))
            for index, files in zip(indexes, scored.files, strict=True):
                index.extend(files)
            return scored

        for shard in self.plan.generations[number]:
            while tasks and (len(tasks) > helpers.n_ahead or self.backlog.owes(shard)):
                yield take()
            self.backlog.wait_for(shard)
            n_verified = tasks[0][0].index if tasks else shard.index
            lost = dict(self.backlog.reasons)
            task = ShardTask(number, shard, lost, n_verified, hidden)
            tasks.append((shard, helpers.submit(task)))
        while tasks:
            yield take()


def frames_by_record(
    shards: Iterable[ScoredShard],
) -> Iterator[tuple[str, list[FrameRun]]]:
    """The id of each record with a frame, and where its frames are. Neighbours may share one."""
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


def block_tasks(framed: Iterable[FramedRecord]) -> Iterator[BlockTask]:
    """The tasks of blocks of bounded size, or of one longer record."""
    records: list[FastaRecord] = []
    runs, frames, numbers = array("q"), list[ScoredFrames](), dict[int, int]()
    n_letters = n_of_headers = 0
    for record, of_record in framed:
        for each, first, end in of_record:
            number = numbers.setdefault(id(each), len(frames))
            if number == len(frames):
                frames.append(each)
            runs.extend((len(records), number, first, end))
        records.append(record)
        n_of_headers += len(record.header)
        n_letters += len(record.sequence)
        if n_of_headers + n_letters >= LETTERS_AT_ONCE or len(records) == _RECORDS_AT_ONCE:
            yield BlockTask(n_letters, tuple(zip(*records, strict=True)), runs, frames)
            records, runs, frames, numbers = [], array("q"), [], {}
            n_letters = n_of_headers = 0
    if records:
        yield BlockTask(n_letters, tuple(zip(*records, strict=True)), runs, frames)


T = TypeVar("T")


def in_first_places(
    replaced: frozenset[str],
    later: Iterable[T],
    every: Iterable[T],
    record_of: Callable[[T], FastaRecord],
) -> Iterator[tuple[T, FastaRecord]]:
    """Each of ``every`` once, in order, and the record in whose place it stands.

    In the first place of a replaced id stands the last one of ``later``, which is read before,
    and only if an id is replaced.
    """
    latest = {}
    if replaced:
        latest = {record_of(one).id: one for one in later if record_of(one).id in replaced}
    read_ids: set[str] = set()
    for one in every:
        record = record_of(one)
        if record.id not in replaced:
            yield one, record
        elif record.id not in read_ids:
            read_ids.add(record.id)
            yield latest.get(record.id, one), record


_SYNCED_AT_ONCE = 4  # a disk takes a few syncs in the time of one


@contextmanager
def open_sinks_of_samples(
    rundir: RunDir, sinks: Iterable[type[Sink]], samples: Iterable[str]
) -> Iterator[Add]:
    """Yield a function that adds a portion to the outputs of its sample, in a folder of its name.

    Portions come in the order of their samples. Each of ``samples`` gets its outputs, with or
    without records, and so does every other that has any. One sample is written at a time, and a
    few are being synced to disk.
    """
    sinks = [sink for sink in sinks if sink.per_file]
    queue, closing = deque(samples), deque[Future[None]]()
    current: str | None = None
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool, ExitStack() as stack:
        add_to: Add | None = None

        def close() -> None:
            closing.append(pool.submit(stack.pop_all().close))
            while len(closing) > _SYNCED_AT_ONCE:
                closing.popleft().result()

        def begin(sample: str) -> None:
            nonlocal current, add_to
            close()
            folder = rundir.sample(sample)
            with writing(folder):
                rundir.make_folder(folder)
            place = Place(folder, rundir, rundir.shards)
            current, add_to = sample, stack.enter_context(open_sinks(sinks, place))

        def add(portion: Portion) -> None:
            while current != portion.sample:
                begin(queue.popleft() if portion.sample in queue else portion.sample)
            assert add_to is not None
            add_to(portion.of_file)

        yield add
        for sample in queue:
            begin(sample)
        close()
        for closed in closing:
            closed.result()
