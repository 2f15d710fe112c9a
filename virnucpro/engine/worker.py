"""The work of one device on shards. The same object runs inline or in a process.

Within a shard a GPU is given a batch before the one ahead of it is done, and a shard's file is
written by a thread while the next shard is embedded.

A shard that killed its worker comes back with the lessons of that: ``suspects`` are embedded
one by one, ``condemned`` not at all, and every batch is kept in a partial file, so that the
next attempt begins where this one died.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from virnucpro.config import Resources
from virnucpro.encoders.base import Encoder, Pending, load_encoder
from virnucpro.engine.batches import (
    Batches,
    Embedded,
    Flight,
    Refused,
    ShardRows,
    TooLarge,
    attempt,
)
from virnucpro.engine.job import Job
from virnucpro.engine.recovery import Task
from virnucpro.errors import OutputError, StorageError
from virnucpro.events import (
    BatchDone,
    BatchStarted,
    BudgetReduced,
    Event,
    Memory,
    Refusal,
    ShardDone,
    ShardFailed,
)
from virnucpro.files import disk_error
from virnucpro.log import printable
from virnucpro.records import Embeddings, Orf, Shard
from virnucpro.run.shards import read_shard

_STORAGE_ERRORS = (OSError, OutputError, StorageError)
_TRIAL = {"protein": "M", "dna": "ATG"}
# FLOP/s of a slow device of its kind: a batch that takes longer counts as hung
_SLOWEST = {"cpu": 2e9, "mps": 1e11, "cuda": 1e12}


@dataclass(frozen=True, slots=True)
class _Writing:
    """A shard that is embedded; its feature file is on the way to the disk."""

    shard: Shard
    started: float
    n_failed: int
    written: Future[float]  # time when the file was there, by the monotonic clock


class Worker:
    """The encoders of a run, loaded on one device."""

    def __init__(self, job: Job, resources: Resources, name: str, device: str) -> None:
        self.job, self.resources, self.name = job, resources, name
        self.device = torch.device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # one core each: processes scale better than threads
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.encoders = [
            load_encoder(spec, weights, self.device)
            for spec, weights in zip(job.encoders, job.weights, strict=True)
        ]
        budget = resources.tokens_per_batch
        self.tokens_per_batch = {encoder.spec: budget for encoder in self.encoders}
        self.batches_in_flight = 2 if self.device.type == "cuda" else 1
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.writing: _Writing | None = None
        for encoder in self.encoders:  # a device that can do nothing must not look ready
            encoder.start([_TRIAL[encoder.spec.reads]]).rows()

    @property
    def description(self) -> str:
        encoders = ", ".join(
            f"{encoder.spec.precision}, {encoder.kernel}, {tokens} tokens"
            for encoder, tokens in zip(self.encoders, self.tokens_per_batch.values(), strict=True)
        )
        return f"{self.device}, {encoders}, process {os.getpid()}"

    def memory(self) -> Memory:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return Memory(total - free, total)
        return Memory(psutil.Process().memory_info().rss, psutil.virtual_memory().total)

    def free_memory(self) -> None:
        """Give back what the allocator of a GPU keeps for later."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        """Begin a batch."""
        return encoder.start(sequences)

    def run(self, task: Task) -> Iterator[Event]:
        """Embed one shard with every encoder, and begin to write it.

        Its ShardDone or ShardFailed comes from the next ``run``, or from ``finish``. A shard that
        has killed a worker is finished before the next one: there must be no doubt who is at fault.
        """
        started, shard = time.monotonic(), task.shard
        try:
            orfs = [orf for orf in read_shard(shard) if orf.copy_of is None]
            embedded = []
            for encoder, store in zip(self.encoders, self.job.stores, strict=True):
                partial = store.partial(shard, self.job.owner)
                embedding = _Embedding(self, encoder, task, orfs, partial)
                for event in embedding.events():
                    yield event
                    if self.writing and self.writing.written.done():
                        yield from self.finish()
                embedded.append(embedding.rows.finish())
        except _STORAGE_ERRORS as error:
            yield self._not_stored(shard, error)
        else:
            yield from self.finish()
            n_failed = len({f.orf_id for embeddings in embedded for f in embeddings.failures})
            written = self.writer.submit(self._write, shard, embedded)
            self.writing = _Writing(shard, started, n_failed, written)
            if task.n_losses:
                yield from self.finish()

    def finish(self) -> Iterator[Event]:
        """Wait until the last shard is written, and tell."""
        writing, self.writing = self.writing, None
        if writing is None:
            return
        try:
            end = writing.written.result()
        except _STORAGE_ERRORS as error:
            yield self._not_stored(writing.shard, error)
        else:
            seconds = end - writing.started
            yield ShardDone(self.name, writing.shard, seconds, writing.n_failed)

    def _write(self, shard: Shard, embedded: Sequence[Embeddings]) -> float:
        for store, embeddings in zip(self.job.stores, embedded, strict=True):
            store.write(shard, embeddings)
            store.partial(shard, self.job.owner).unlink(missing_ok=True)
        return time.monotonic()

    def _not_stored(self, shard: Shard, error: OSError | OutputError | StorageError) -> ShardFailed:
        failure = disk_error(error) if isinstance(error, OSError) else error
        lines = "".join(traceback.format_exception(error))
        refusal = Refusal(failure.hint, is_place=isinstance(failure, OutputError))
        return ShardFailed(self.name, shard, printable(failure), lines, refusal)

    def allowed_seconds(self, encoder: Encoder, lengths: Sequence[int]) -> float:
        """The limit for batches of sequences of these lengths on a slow device of this kind."""
        slowest = _SLOWEST.get(self.device.type, _SLOWEST["cpu"])
        return self.resources.silence_seconds + encoder.count_flop(lengths) / slowest


class _Embedding:
    """One shard on its way through one encoder."""

    def __init__(
        self,
        worker: Worker,
        encoder: Encoder,
        task: Task,
        orfs: Sequence[Orf],
        partial: Path,
    ) -> None:
        self.worker, self.encoder, self.task = worker, encoder, task
        self.sequences = [orf.text(encoder.spec.reads) for orf in orfs]
        lengths = list(map(len, self.sequences))
        self.rows = ShardRows(orfs, lengths, encoder)
        self.rows.condemn(task.condemned)
        self.partial = partial
        if task.n_losses:
            self.rows.restore(self.partial)
        budget = worker.tokens_per_batch[encoder.spec]
        self.batches = Batches(encoder, lengths, budget, task.suspects)
        self.in_flight: deque[Flight] = deque()
        # after a loss one batch at a time: there must be no doubt which one is at fault
        self.most_in_flight = 1 if task.n_losses else worker.batches_in_flight

    def events(self) -> Iterator[Event]:
        """Embed all rows that are not done."""
        while True:
            while len(self.in_flight) < self.most_in_flight and (
                batch := self.batches.pop(self.rows.done)
            ):
                yield self.announced(batch)
                self.start(batch)
            if not self.in_flight:
                return
            yield from self.land(self.in_flight.popleft())

    def announced(self, batch: list[int]) -> BatchStarted:
        busy = [i for flight in self.in_flight for i in flight.batch] + batch
        seconds = self.worker.allowed_seconds(self.encoder, self.batches.lengths_of(busy))
        return BatchStarted(self.worker.name, self.task.shard, tuple(batch), seconds)

    def start(self, batch: list[int]) -> None:
        sequences = [self.sequences[i] for i in batch]
        started = attempt(lambda: self.worker.start(self.encoder, sequences))
        if isinstance(started, TooLarge):
            self.worker.free_memory()
        self.in_flight.append(Flight(batch, started))

    def land(self, flight: Flight) -> Iterator[Event]:
        """Wait for a batch, and keep its rows; or try it again in parts, and then alone."""
        batch, n_repeated = flight.batch, 0
        match flight.land():
            case Embedded(rows, n_repeated):
                self.rows.put(batch, rows)
            case TooLarge() if len(batch) > 1:
                self.worker.free_memory()
                yield self.shrunk(batch)
                self.batches.halve(batch)
                return
            case Refused() if len(batch) > 1:
                self.batches.halve(batch)
                return
            case TooLarge() if self.batches.try_again(batch):
                self.worker.free_memory()
                self.most_in_flight = 1  # it may fit with no other batch beside it
                return
            case TooLarge(reason=reason) | Refused(reason=reason):
                self.rows.condemn(dict.fromkeys(batch, reason))
        if self.task.n_losses:
            self.rows.save(batch, self.partial)
        n_tokens = self.batches.n_tokens(batch)
        shard, memory = self.task.shard, self.worker.memory()
        yield BatchDone(self.worker.name, shard, tuple(batch), n_tokens, memory, n_repeated)

    def shrunk(self, batch: list[int]) -> BudgetReduced:
        self.batches.shrink(batch)
        tokens = self.batches.tokens_per_batch
        self.worker.tokens_per_batch[self.encoder.spec] = tokens
        return BudgetReduced(self.worker.name, tokens)
