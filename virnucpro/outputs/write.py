"""Every output of a run, written in one pass over the inputs beside the predictions.

The inputs are read again, in order; the frames of a record are met in the same order in the
shards. Both are joined by the record's id, so nothing is paired by its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.config import FeatureFormat
from virnucpro.engine.events import Progress, Telling
from virnucpro.engine.worker import Job
from virnucpro.errors import InputError
from virnucpro.files import writing
from virnucpro.log import announce, printable
from virnucpro.outputs.sinks import SINKS, Add, Place, Sink, open_sinks
from virnucpro.outputs.summary import Summary
from virnucpro.records import Call, Embeddings, FastaRecord, Orf, Prediction, RecordResult, Shard
from virnucpro.run.dedup import Originals
from virnucpro.run.features import (
    MAX_PARTS,
    Attributes,
    read_embeddings,
    save_npz,
    save_pt,
    update_embeddings,
    write_index,
)
from virnucpro.run.folder import COPIES, RunDir
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import Plan, count_chunks
from virnucpro.run.shards import read_shard
from virnucpro.scorer.nets import Scorer
from virnucpro.scoring.batches import Frame, input_changed, predict_records
from virnucpro.scoring.calls import call_record
from virnucpro.scoring.head import Head
from virnucpro.scoring.pieces import call_by_scorer
from virnucpro.sequences.inputs import InputFile, generations
from virnucpro.sequences.screen import screen


@dataclass(slots=True)
class Parts:
    """The feature files that an index joins, each with a mask of the ORFs to show."""

    n_parts: int = 0
    parts: list[tuple[Path, NDArray[np.bool_]]] = field(default_factory=list)

    def add(self, path: Path, shown: NDArray[np.bool_]) -> None:
        """Remember a feature file, if there may be an index over so many."""
        self.n_parts += 1
        if self.n_parts <= MAX_PARTS:
            self.parts.append((path, shown))


@dataclass(frozen=True, slots=True)
class Results:
    """All that the tables are made of."""

    rundir: RunDir
    manifest: Manifest
    plan: Plan
    job: Job
    head: Head | None
    scorer: Scorer | None  # in place of an encoder and its head
    lost: Mapping[int, str]  # shards without a feature file -> why
    feature_format: FeatureFormat
    per_file: bool
    on_event: Callable[[Telling], None]

    def write(self, summary: Summary) -> None:
        """Write every output, and count what is in them.

        Raises:
            InputError: an input changed while the run went on.
            FeatureFileError: a feature file is not whole.
        """
        summary.start_counting()
        parts = Parts()
        with ExitStack() as stack:
            adds = [summary.add, *self.open_outputs(stack)]
            for result in self.results(parts):
                for add in adds:
                    add(result)
        if self.manifest.recipe.has_encoder:
            self.write_index(parts)

    def open_outputs(self, stack: ExitStack) -> Iterator[Add]:
        """What adds a record to the outputs of the run and, if so asked, to those of its file."""
        rundir, sinks = self.rundir, SINKS[self.manifest.recipe.command]
        inputs = [file for file in self.manifest.inputs if not file.generation]
        place = Place(rundir.root, rundir.shards, self.manifest.inputs, self.manifest.refused)
        yield stack.enter_context(open_sinks(sinks, place))
        if self.per_file:
            samples = [file.sample for file in inputs]
            yield stack.enter_context(open_sinks_of_samples(rundir, sinks, samples))

    def write_index(self, parts: Parts) -> None:
        """``features.h5``, unless it would hold more than its readers can open."""
        index = self.rundir.feature_index
        if parts.n_parts <= MAX_PARTS:
            write_index(index, parts.parts, self.manifest.recipe.per_residue)
            return
        index.unlink(missing_ok=True)
        announce(
            f"no {index.name}: HDF5 cannot join {parts.n_parts:,} files ({MAX_PARTS:,} at most); "
            f"read those in {printable(self.rundir.features)} one by one"
        )

    def called(
        self, records: Iterable[tuple[FastaRecord, Iterable[Frame]]]
    ) -> Iterator[RecordResult]:
        """Each record, in order, with its predictions and its call."""
        if self.scorer is not None:
            yield from call_by_scorer(
                (record for record, _ in records),
                self.manifest.recipe,
                self.scorer,
                lambda done: self.tell("scoring", done, self.plan.counts.n_letters, "letters"),
            )
            return
        for record, predictions in predict_records(records, self.head):
            yield RecordResult(record, predictions, self.call(record, predictions))

    def tell(self, stage: str, done: int, total: int, unit: str) -> None:
        self.on_event(Progress(stage, done, total, unit))

    def call(self, record: FastaRecord, predictions: list[Prediction]) -> Call:
        recipe, length = self.manifest.recipe, len(record.sequence)
        status, note = screen(record, recipe)
        if status is not None:
            return Call(record.name, length, status, record.sample, note=note)
        facts = self.head.facts if self.head else None
        return call_record(record, count_chunks(length, recipe), predictions, facts)

    def results(self, parts: Parts) -> Iterator[RecordResult]:
        """Each record once, in input order, with its predictions and its call.

        A failed record that a later input gives anew stands in its old place with the new
        sequence and its predictions.

        Raises:
            InputError: there are not as many records as the plan was made of.
        """
        replaced = frozenset(self.manifest.replaced)
        inputs = list(generations(self.manifest.inputs))
        latest: dict[str, RecordResult] = {}
        owners: dict[str, int] = {}  # replaced id -> its last generation
        given: set[str] = set()
        for number in range(1, len(inputs) if replaced else 1):
            records = self.generation(number, inputs[number], Parts(), owners)
            for result in self.called(records):
                if result.record.id in replaced:
                    latest[result.record.id] = result
                    owners[result.record.id] = number
        n_read = 0
        for number, files in enumerate(inputs):
            records = self.generation(number, files, parts, owners)
            for result in self.called(records):
                record = result.record
                n_read += 1
                if record.id not in replaced:
                    yield result
                elif record.id not in given:
                    given.add(record.id)
                    yield latest.get(record.id, result).in_place_of(record)
        if n_read != self.plan.counts.n_records:
            raise InputError(
                f"{self.plan.counts.n_records} records were read at first, "
                f"{n_read} now: an input file changed while the run went on",
                hint="let it be written to its end, then start again with --force",
            )

    def generation(
        self, number: int, inputs: list[InputFile], parts: Parts, owners: Mapping[str, int]
    ) -> Iterator[tuple[FastaRecord, Iterable[Frame]]]:
        """The records of one generation, each beside its frames, which are to be taken first."""
        shards, originals = self.plan.generations[number], Originals()
        hidden = frozenset(record_id for record_id, last in owners.items() if last != number)
        frames = chain.from_iterable(
            self.frames(shard, originals, parts, hidden) for shard in shards
        )
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
        self, shard: Shard, originals: Originals, parts: Parts, hidden: frozenset[str]
    ) -> Iterator[Frame]:
        """One per ORF of the shard, in its order; vectors are found by id.

        Vectors of ``hidden`` records were replaced and stay out of the index.
        """
        orfs = read_shard(shard)
        self.tell("writing tables", shard.index + 1, len(self.plan.shards), "shards")
        unseen = {orf.id for orf in orfs if orf.record_id in hidden}
        loss = self.lost.get(shard.index, "")
        reasons = {orf.id: loss for orf in orfs if loss and orf.copy_of is None}
        vectors: dict[str, NDArray[np.float32]] = {}
        for path, embeddings in self.feature_files(shard, orfs, originals):
            reasons |= {failure.orf_id: failure.reason for failure in embeddings.failures}
            self.export(path, embeddings)
            if not embeddings.vectors.shape[1]:
                continue  # no copy of this shard has an original with a vector
            if self.head is not None:
                vectors |= zip(embeddings.ids, embeddings.vectors, strict=True)
            shown = np.array([orf_id not in unseen for orf_id in embeddings.ids], dtype=np.bool_)
            parts.add(path, shown)
        for orf in orfs:
            yield Frame(orf, vectors.get(orf.id), reasons.get(orf.id, ""))

    def feature_files(
        self, shard: Shard, orfs: Sequence[Orf], originals: Originals
    ) -> Iterator[tuple[Path, Embeddings]]:
        """Of the ORFs that were embedded, and of the copies, whose file is made here.

        It is made of its sources every time, so an old one that does not agree is replaced.
        """
        embedded = [orf for orf in orfs if orf.copy_of is None]
        if shard.index in self.lost:
            originals.add_lost(embedded, self.lost[shard.index])
        else:
            path = self.job.feature_file(shard)
            embeddings = read_embeddings(
                path, self.job.attributes_of(shard), self.job.encoders[0].dim
            )
            originals.add(path, embedded, embeddings)
            yield path, embeddings
        if copies := [orf for orf in orfs if orf.copy_of is not None]:
            path, attributes = copies_file(self.job, shard)
            embeddings = originals.copy_to(copies, self.manifest.recipe.per_residue)
            update_embeddings(path, embeddings, attributes)
            yield path, embeddings

    def export(self, path: Path, embeddings: Embeddings) -> None:
        match self.feature_format:
            case "npz":
                save_npz(path.with_suffix(".npz"), embeddings)
            case "pt":
                save_pt(path.with_suffix(".pt"), embeddings)


def copies_file(job: Job, shard: Shard) -> tuple[Path, Attributes]:
    """Where the vectors of a shard's copies are, and what the file must say of itself."""
    path = job.feature_file(shard)
    return path.with_stem(path.stem + COPIES), {**job.attributes_of(shard), "copies": 1}


_SYNCED_AT_ONCE = 4  # a disk takes a few syncs in the time of one


@contextmanager
def open_sinks_of_samples(
    rundir: RunDir, sinks: Iterable[type[Sink]], samples: Iterable[str]
) -> Iterator[Add]:
    """What adds a record to the outputs of its sample, in a folder of its name.

    Records come in the order of their samples. Each of ``samples`` gets its outputs, with or
    without records, and so does every other that has any. One sample is written at a time, and a
    few are being synced to disk.
    """
    sinks = [sink for sink in sinks if sink.per_file]
    waiting, closing = deque(samples), deque[Future[None]]()
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
                begin(waiting.popleft() if sample in waiting else sample)
            assert add_to is not None
            add_to(result)

        yield add
        for sample in waiting:
            begin(sample)
        close()
        for closed in closing:
            closed.result()
