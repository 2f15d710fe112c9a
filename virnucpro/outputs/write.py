"""Every table of a run, written in one pass over the inputs beside the predictions.

The inputs are read again, in order; the frames of a record are met in the same order in the
shards. Both are joined by the record's id, so nothing is paired by its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.config import FeatureFormat
from virnucpro.engine.events import Progress, Telling
from virnucpro.engine.worker import Job
from virnucpro.errors import InputError
from virnucpro.log import announce, escaped, printable
from virnucpro.outputs.tables import Add, optional_table, sample_tables, tables
from virnucpro.records import Call, Embeddings, FastaRecord, Orf, Prediction, Shard, Status
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
from virnucpro.run.folder import COPIES, Manifest, RunDir
from virnucpro.run.plan import Plan, count_chunks, screen
from virnucpro.run.shards import read_shard
from virnucpro.scorer.nets import Scorer
from virnucpro.scoring.batches import Frame, Outcome, input_changed, predict_records
from virnucpro.scoring.calls import call_record
from virnucpro.scoring.head import Head
from virnucpro.scoring.pieces import call_by_scorer
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.inputs import InputFile, generations


@dataclass(slots=True)
class FailedFrames:
    """How many of a file have no vector, and the first of them with its reason."""

    first: str
    n_frames: int = 0
    n_records: int = 0


@dataclass(slots=True)
class Tally:
    """What the tables hold, counted while they are written."""

    statuses: Counter[Status] = field(default_factory=Counter)
    n_read: int = 0  # from the inputs, with those that were given anew
    n_viral: int = 0
    n_frames: int = 0
    failed_frames: dict[str, FailedFrames] = field(default_factory=dict)  # by sample
    n_parts: int = 0  # feature files with vectors
    parts: list[tuple[Path, NDArray[np.bool_]]] = field(default_factory=list)  # of features.h5

    def add(self, record: FastaRecord, predictions: list[Prediction], call: Call) -> None:
        self.statuses[call.status] += 1
        self.n_viral += call.is_virus
        self.n_frames += call.n_frames_scored
        failures = [prediction for prediction in predictions if prediction.failure]
        if failures:
            first = f"{failures[0].orf.id}: {failures[0].failure}"
            failed = self.failed_frames.setdefault(record.sample, FailedFrames(first))
            failed.n_records += 1
            failed.n_frames += len(failures)

    @property
    def n_failed_frames(self) -> int:
        return sum(failed.n_frames for failed in self.failed_frames.values())

    def add_part(self, path: Path, shown: NDArray[np.bool_]) -> None:
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

    def write(self) -> Tally:
        """
        Raises:
            InputError: an input changed while the run went on.
            FeatureFileError: a feature file is not whole.
        """
        tally = Tally()
        with ExitStack() as stack:
            failed = stack.enter_context(optional_table(self.rundir.failed_sequences))
            adds = [tally.add, *self.tables(stack)]
            for record, predictions, call in self.outcomes(tally):
                for add in adds:
                    add(record, predictions, call)
                if any(prediction.failure for prediction in predictions):
                    write_record(failed(), record.header, record.sequence)
            if tally.n_read != self.plan.counts.n_records:
                raise InputError(
                    f"{self.plan.counts.n_records} records were read at first, "
                    f"{tally.n_read} now: an input file changed while the run went on",
                    hint="let it be written to its end, then start again with --force",
                )
        self.write_failed_files(tally)
        if self.manifest.recipe.has_encoder:
            self.write_index(tally)
        return tally

    def tables(self, stack: ExitStack) -> Iterator[Add]:
        """What adds a record to the tables of the run and, if so asked, of its sample."""
        rundir, command = self.rundir, self.manifest.recipe.command
        yield stack.enter_context(tables(rundir, command, rundir.shards))
        if self.per_file:
            samples = [file.sample for file in self.manifest.inputs if not file.generation]
            yield stack.enter_context(sample_tables(rundir, command, samples))

    def write_failed_files(self, tally: Tally) -> None:
        """``failed_files.txt``: path, stage and error of each file, by ``|``, which no path has."""
        rows = [(file, "read", file.error) for file in self.manifest.refused]
        for file in self.manifest.inputs:
            if failed := tally.failed_frames.get(file.sample):
                counts = f"{failed.n_frames} frames of {failed.n_records} records failed"
                rows.append((file, "embed", f"{counts}; {failed.first}"))
        lines = []
        for file, stage, error in rows:
            path = escaped(file.name or file.path).replace("|", r"\x7c")
            lines.append(f"{path}|{stage}|{escaped(error)}\n")
        with optional_table(self.rundir.failed_files) as listing:
            for line in sorted(lines):
                listing().write(line)

    def write_index(self, tally: Tally) -> None:
        """``features.h5``, unless it would hold more than its readers can open."""
        index = self.rundir.feature_index
        if tally.n_parts <= MAX_PARTS:
            write_index(index, tally.parts, self.manifest.recipe.per_residue)
            return
        index.unlink(missing_ok=True)
        announce(
            f"no {index.name}: HDF5 cannot join {tally.n_parts:,} files ({MAX_PARTS:,} at most); "
            f"read those in {printable(self.rundir.features)} one by one"
        )

    def called(self, records: Iterable[tuple[FastaRecord, Iterable[Frame]]]) -> Iterator[Outcome]:
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
            yield Outcome(record, predictions, self.call(record, predictions))

    def tell(self, stage: str, done: int, total: int, unit: str) -> None:
        self.on_event(Progress(stage, done, total, unit))

    def call(self, record: FastaRecord, predictions: list[Prediction]) -> Call:
        recipe, length = self.manifest.recipe, len(record.sequence)
        status, note = screen(record, recipe)
        if status is not None:
            return Call(record.name, length, status, record.sample, note=note)
        facts = self.head.facts if self.head else None
        return call_record(record, count_chunks(length, recipe), predictions, facts)

    def outcomes(self, tally: Tally) -> Iterator[Outcome]:
        """Each record once, in input order, with its predictions and its call.

        A failed record that a later input gives anew stands in its old place with the new
        sequence and its predictions.
        """
        replaced = frozenset(self.manifest.replaced)
        inputs = list(generations(self.manifest.inputs))
        latest: dict[str, Outcome] = {}
        owners: dict[str, int] = {}  # replaced id -> its last generation
        given: set[str] = set()
        for number in range(1, len(inputs) if replaced else 1):
            records = self.generation(number, inputs[number], Tally(), owners)
            for outcome in self.called(records):
                if outcome.record.id in replaced:
                    latest[outcome.record.id] = outcome
                    owners[outcome.record.id] = number
        for number, files in enumerate(inputs):
            records = self.generation(number, files, tally, owners)
            for outcome in self.called(records):
                record = outcome.record
                if record.id not in replaced:
                    yield outcome
                elif record.id not in given:
                    given.add(record.id)
                    yield latest.get(record.id, outcome).in_place_of(record)

    def generation(
        self, number: int, inputs: list[InputFile], tally: Tally, owners: Mapping[str, int]
    ) -> Iterator[tuple[FastaRecord, Iterable[Frame]]]:
        """The records of one generation, each beside its frames, which are to be taken first."""
        shards, originals = self.plan.generations[number], Originals()
        hidden = frozenset(record_id for record_id, last in owners.items() if last != number)
        frames = chain.from_iterable(
            self.frames(shard, originals, tally, hidden) for shard in shards
        )
        groups = groupby(frames, key=lambda frame: frame.orf.record_id)
        record_id, group = next(groups, (None, iter(())))
        for record in chain.from_iterable(map(self.manifest.ids.read, inputs)):
            tally.n_read += 1
            if record.id == record_id:
                yield record, group
                record_id, group = next(groups, (None, iter(())))
            else:
                yield record, ()
        if record_id is not None:
            raise input_changed()

    def frames(
        self, shard: Shard, originals: Originals, tally: Tally, hidden: frozenset[str]
    ) -> Iterator[Frame]:
        """One per ORF of the shard, in its order; vectors are found by id.

        Vectors of ``hidden`` records were replaced and stay out of ``features.h5``.
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
            tally.add_part(path, shown)
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
