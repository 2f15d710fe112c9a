"""Every output of a run, written in one pass over the inputs beside the predictions.

The inputs are read again, in order; the frames of a record are met in the same order in the
shards. Both are joined by the record's id, so nothing is paired by its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import TypeVar

import numpy as np

from virnucpro.config import FeatureFormat
from virnucpro.errors import InputError
from virnucpro.events import Progress, Telling
from virnucpro.files import writing
from virnucpro.log import counted
from virnucpro.options import CutOptions
from virnucpro.outputs.features import FeatureIndex, export
from virnucpro.outputs.sinks import SINKS, Add, Place, Sink, open_sinks
from virnucpro.outputs.summary import STAGES, Summary
from virnucpro.records import Call, FastaRecord, Prediction, RecordResult, Shard
from virnucpro.run.backlog import Backlog
from virnucpro.run.features import FeatureStore, ShardFeatures
from virnucpro.run.folder import RunDir
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import Plan, count_chunks
from virnucpro.run.shards import read_shard
from virnucpro.scorer.nets import Scorer
from virnucpro.scoring.batches import Frame, input_changed, predict_records
from virnucpro.scoring.calls import call_record
from virnucpro.scoring.head import Head
from virnucpro.scoring.pieces import call_by_scorer, join_calls
from virnucpro.scoring.regions import RegionFinder
from virnucpro.sequences.genetic_code import find_open_code, genetic_code
from virnucpro.sequences.inputs import InputFile, generations
from virnucpro.sequences.screen import screen


@dataclass(frozen=True, slots=True)
class Results:
    """The parts of a run that its outputs are made of."""

    rundir: RunDir
    manifest: Manifest
    plan: Plan
    stores: tuple[FeatureStore, ...]  # one for each encoder
    head: Head | None
    scorer: Scorer | None  # of nucleotides, by itself or joined with the head
    cut: CutOptions
    finder: RegionFinder | None  # None: regions are not looked for
    backlog: Backlog  # shards that are being embedded meanwhile
    feature_format: FeatureFormat
    per_file: bool
    on_event: Callable[[Telling], None]

    def write(self, summary: Summary) -> None:
        """Write every output, and count what is in them.

        Shards in the backlog are waited for, so that it can be done while they are embedded.

        Raises:
            AbandonedError: they are embedded no more.
            InputError: an input changed while the run went on.
            FeatureFileError: a feature file is not whole.
        """
        summary.start_counting()
        indexes = self.new_indexes()
        with ExitStack() as stack:
            adds = [summary.add, *self.open_outputs(stack)]
            for result in self.results(indexes):
                self.backlog.check()
                for add in adds:
                    add(result)
            for store, index in zip(self.stores, indexes, strict=True):
                index.write(store.folder, store.encoder.per_residue)

    def new_indexes(self) -> list[FeatureIndex]:
        """An index, still empty, of each store."""
        return [FeatureIndex(store.index) for store in self.stores]

    def open_outputs(self, stack: ExitStack) -> Iterator[Add]:
        """The functions that add a record to the outputs of the run and, if asked, of its file."""
        rundir, sinks = self.rundir, SINKS[self.manifest.recipe.command]
        inputs = [file for file in self.manifest.inputs if not file.generation]
        place = Place(rundir.root, rundir.shards, self.manifest.inputs, self.manifest.refused)
        yield stack.enter_context(open_sinks(sinks, place))
        if self.per_file:
            samples = [file.sample for file in inputs]
            yield stack.enter_context(open_sinks_of_samples(rundir, sinks, samples))

    def called(
        self, records: Iterable[tuple[FastaRecord, Iterable[Frame]]]
    ) -> Iterator[RecordResult]:
        """Each record, in order, with its predictions and its call."""
        recipe = self.manifest.recipe
        if self.scorer is not None and not recipe.has_encoder:
            yield from call_by_scorer(
                (record for record, _ in records),
                recipe,
                self.scorer,
                self.cut,
                lambda done: self.tell("scoring", done, self.plan.counts.n_letters, "letters"),
            )
            return
        results: Iterator[RecordResult] = (
            RecordResult(record, predictions, self.call(record, predictions))
            for record, predictions in predict_records(records, self.head)
        )
        if self.scorer is not None and self.head is not None:
            code = genetic_code(recipe.genetic_code)
            results = join_calls(results, self.head.facts, self.scorer, self.cut, code)
        yield from results

    def noted(self, result: RecordResult) -> RecordResult:
        """The same result; its note says what else was seen in the sequence, regions last."""
        if other_code := self.other_code(result):
            result = result._replace(call=replace(result.call, note=other_code))
        return self.finder.add_to(result) if self.finder else result

    def other_code(self, result: RecordResult) -> str:
        """That the record looks as if it used another genetic code, if it does."""
        recipe, call = self.manifest.recipe, result.call
        is_standard = recipe.input_type == "nucleotide" and recipe.genetic_code in (1, 11)
        if not is_standard or call.note or call.status not in ("scored", "embedded", "no_orf"):
            return ""
        number = find_open_code(result.record.sequence)
        return f"open in genetic code {number}, not in {recipe.genetic_code}" if number else ""

    def tell(self, stage: str, done: int, total: int, unit: str) -> None:
        self.on_event(Progress(stage, done, total, unit))

    def call(self, record: FastaRecord, predictions: list[Prediction]) -> Call:
        recipe, length = self.manifest.recipe, len(record.sequence)
        status, note = screen(record, recipe)
        if status is not None:
            return Call(record.name, length, status, record.sample, note=note)
        facts = self.head.facts if self.head else None
        return call_record(record, count_chunks(length, recipe), predictions, facts)

    def results(self, indexes: Sequence[FeatureIndex]) -> Iterator[RecordResult]:
        """Each record once, in input order, with its predictions and its call.

        A failed record that a later input gives anew stands in its old place with the new
        sequence and its predictions.

        Raises:
            InputError: there are not as many records as the plan was made of.
        """
        inputs = list(generations(self.manifest.inputs))
        owners: dict[str, int] = {}  # replaced id -> its last generation
        replaced = frozenset(self.manifest.replaced)
        n_read = 0

        def later() -> Iterator[RecordResult]:
            for number in range(1, len(inputs)):
                records = self.generation(number, inputs[number], self.new_indexes(), owners)
                for result in map(self.noted, self.called(records)):
                    if result.record.id in replaced:
                        owners[result.record.id] = number
                    yield result

        def every() -> Iterator[RecordResult]:
            nonlocal n_read
            for number, files in enumerate(inputs):
                records = self.generation(number, files, indexes, owners)
                for result in map(self.noted, self.called(records)):
                    n_read += 1
                    yield result

        placed = in_first_places(replaced, later(), every(), attrgetter("record"))
        for result, place in placed:
            yield result if result.record is place else result.in_place_of(place)
        if n_read != self.plan.counts.n_records:
            raise InputError(
                f"{counted(self.plan.counts.n_records, 'record')} at first, "
                f"{n_read} now: an input file changed while the run went on",
                hint="let it be written to its end, then start again with --force",
            )

    def generation(
        self,
        number: int,
        inputs: list[InputFile],
        indexes: Sequence[FeatureIndex],
        owners: Mapping[str, int],
    ) -> Iterator[tuple[FastaRecord, Iterable[Frame]]]:
        """The records of one generation, each beside its frames, which are to be taken first."""
        hidden = frozenset(record_id for record_id, last in owners.items() if last != number)
        frames = self.frames(self.plan.generations[number], indexes, hidden)
        groups = groupby(frames, key=lambda frame: frame.orf.record_id)
        record_id, group = next(groups, (None, iter(())))
        for record in chain.from_iterable(map(self.manifest.ids.read, inputs)):
            if record.id == record_id:
                yield record, group
                record_id, group = next(groups, (None, iter(())))
            else:
                yield record, ()
        if record_id is not None:
            raise input_changed()

    def frames(
        self,
        shards: Sequence[Shard],
        indexes: Sequence[FeatureIndex],
        hidden: frozenset[str],
    ) -> Iterator[Frame]:
        """One per ORF of the shards, in their order; vectors are found by id.

        Vectors of ``hidden`` records were replaced and stay out of the indexes.
        """
        readers = [store.reader(self.backlog.reasons) for store in self.stores]
        for shard in shards:
            self.backlog.wait_for(shard)
            self.tell(STAGES[2], shard.index + 1, len(self.plan.shards), "shards")
            orfs = read_shard(shard)
            unseen = {orf.id for orf in orfs if orf.record_id in hidden}
            of_encoders = [reader.read(shard, orfs) for reader in readers]
            for store, index, features in zip(self.stores, indexes, of_encoders, strict=True):
                for path, embeddings in features.files:
                    export(path, embeddings, self.feature_format, store.encoder.reads)
                show(features, index, unseen)
            rows = [features.vectors for features in of_encoders] if self.head else []
            for orf in orfs:
                reason = next(filter(None, (f.reasons.get(orf.id) for f in of_encoders)), "")
                is_scored = rows and not reason
                vector = np.concatenate([row[orf.id] for row in rows]) if is_scored else None
                yield Frame(orf, vector, reason)


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


def show(features: ShardFeatures, index: FeatureIndex, hidden: Set[str]) -> None:
    """Add what is in the files of a shard to the index, but for some ORFs."""
    for path, embeddings in features.files:
        if embeddings.vectors.shape[1]:  # else these are copies, and no original has a vector
            mask = np.array([orf_id not in hidden for orf_id in embeddings.ids], dtype=np.bool_)
            index.add(path, mask)


_SYNCED_AT_ONCE = 4  # a disk takes a few syncs in the time of one


@contextmanager
def open_sinks_of_samples(
    rundir: RunDir, sinks: Iterable[type[Sink]], samples: Iterable[str]
) -> Iterator[Add]:
    """Yield a function that adds a record to the outputs of its sample, in a folder of its name.

    Records come in the order of their samples. Each of ``samples`` gets its outputs, with or
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
                folder.mkdir(parents=True, exist_ok=True)
            place = Place(folder, rundir.shards)
            current, add_to = sample, stack.enter_context(open_sinks(sinks, place))

        def add(result: RecordResult) -> None:
            sample = result.record.sample
            while current != sample:
                begin(queue.popleft() if sample in queue else sample)
            assert add_to is not None
            add_to(result)

        yield add
        for sample in queue:
            begin(sample)
        close()
        for closed in closing:
            closed.result()
