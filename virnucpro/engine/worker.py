"""Embed shards on one device. The same object runs inline or in a process.

A GPU gets its next batch before the current one is done, even across shards. A thread writes the
file of a finished shard meanwhile.

A shard that killed its worker comes back with ``suspects``, which are embedded one by one, and
``condemned`` ORFs, which are skipped. Every batch is then saved in a partial file, so that the next
attempt begins where this one died.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import psutil
import torch

from virnucpro.core.errors import OutputError, StorageError, UnavailableError, VirnucproError
from virnucpro.core.events import (
    BatchDone,
    BatchSizeReduced,
    BatchStarted,
    ErrorText,
    Memory,
    ShardDone,
    ShardFailed,
    WorkerEvent,
)
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Alphabet, EncoderSpec
from virnucpro.core.types import Shard
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.shard_embedding import BatchError, ShardEmbedding, collect, run_catching
from virnucpro.engine.vector_cache import VectorCache
from virnucpro.models.base import Encoder, Pending, load_encoder
from virnucpro.models.packing import use_device
from virnucpro.store.shard_files import read_shard

_ENDING_ERRORS = (OSError, OutputError, StorageError, UnavailableError)  # of the whole run
_TRIAL = "ATG"  # bases
_TRIAL_PROTEIN = "ACDEFGHIKLMNPQRSTVWY"
_MAX_FIRST_FAILURES = 100  # sequences that fail alike before any has a vector
_CHECK_BOTH = (
    "the model or the device is at fault, not the sequences: check the file with `virnucpro models "
    "verify` and the device with `virnucpro models check`, or try --precision fp32 or --device cpu"
)
# FLOP/s of a slow device of each kind: a batch that takes longer counts as hung
_SLOWEST = {"cpu": 2e9, "mps": 1e11, "cuda": 1e12}


class _OpenShard(NamedTuple):
    """A shard that is being embedded or written."""

    attempt: Attempt
    started: float
    embeddings: list[ShardEmbedding]  # one for each encoder


class Worker:
    """The encoders of a run, loaded on one device."""

    def __init__(self, job: WorkerConfig, resources: Resources, name: str, device: str) -> None:
        self.job, self.resources, self.name = job, resources, name
        self.device = torch.device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # one core each: processes scale better than threads
        use_device(self.device)
        self.encoders = [
            load_encoder(spec, weights, self.device)
            for spec, weights in zip(job.encoders, job.weights, strict=True)
        ]
        self.caches = [
            VectorCache(job.cache, spec, self.device.type) if job.cache else None
            for spec in job.encoders
        ]
        budget = resources.tokens_per_batch
        self.tokens_per_batch = {encoder.spec: budget for encoder in self.encoders}
        self.batches_in_flight = 2 if self.device.type == "cuda" else 1
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.open: deque[_OpenShard] = deque()  # at most two, besides empty ones
        # the embedded shard that is being written; see ``_write``
        self.writing: tuple[_OpenShard, Future[tuple[float, str]]] | None = None
        # batches on the device, all of one encoder
        self.in_flight: deque[tuple[ShardEmbedding, list[int], Pending | BatchError]] = deque()
        # per encoder, until it makes a first vector: why sequences failed, and how many
        self.first_failures = {encoder.spec: Counter[str]() for encoder in self.encoders}
        for encoder in self.encoders:  # a device that cannot compute must not look ready
            self._try(encoder)

    def _try(self, encoder: Encoder) -> None:
        """Embed a short sequence.

        Raises:
            UnavailableError: its vector is not finite.
        """
        spec = encoder.spec
        trial = _TRIAL_PROTEIN if spec.reads is Alphabet.PROTEIN else _TRIAL
        if not np.isfinite(encoder.start([trial]).rows()).all():
            raise UnavailableError(
                f"the model {printable(spec.model)} makes vectors that are not finite, on "
                f"{self.device} in {spec.precision}",
                hint=_CHECK_BOTH,
            )

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
        return Memory(psutil.Process().memory_info().rss, self.resources.memory)

    def free_memory(self) -> None:
        """Release the memory that the allocator of a GPU caches."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        """Begin a batch."""
        return encoder.start(sequences)

    def run(self, attempt: Attempt) -> Iterator[WorkerEvent]:
        """Embed one shard with every encoder; its last batches may still run when this returns.

        The next ``run`` or ``finish`` completes them, writes the shard and yields its ShardDone or
        ShardFailed. A shard that has killed a worker starts when all others are done and is
        finished before the next, so that it is clear which shard caused a loss.
        """
        if attempt.n_failures:
            yield from self.finish()
        try:
            self.open.append(self._open_shard(attempt))
        except _ENDING_ERRORS as error:
            yield self._ending(attempt.shard, error)
            return
        yield from self._run_batches(to_the_end=bool(attempt.n_failures))
        if attempt.n_failures:
            yield from self._report_written()

    def finish(self) -> Iterator[WorkerEvent]:
        """Embed and write all open shards.

        A caller with another shard may stop after a BatchDone or a ShardDone.
        """
        yield from self._run_batches(to_the_end=True)
        yield from self._report_written()

    def _open_shard(self, attempt: Attempt) -> _OpenShard:
        started, shard = time.monotonic(), attempt.shard
        orfs = [orf for orf in read_shard(shard) if orf.copy_of is None]
        stations = zip(self.encoders, self.job.stores, self.caches, strict=True)
        embeddings = [
            ShardEmbedding(encoder, store, cache, attempt, orfs)
            for encoder, store, cache in stations
        ]
        for each in embeddings:
            if attempt.n_failures:
                each.load_partial(self.job.owner)
            each.plan_batches(self.tokens_per_batch[each.encoder.spec])
        return _OpenShard(attempt, started, embeddings)

    def _run_batches(self, *, to_the_end: bool) -> Iterator[WorkerEvent]:
        """Embed the open shards, to the end or until the device has room for another batch."""
        while self.open:
            of_all = [embedding for shard in self.open for embedding in shard.embeddings]
            has_room = self._has_room(of_all)
            if has_room and (found := self._next_batch(of_all)):
                yield self._announce_batch(*found)
                self.in_flight.append((*found, self._start_batch(*found)))
                continue
            is_left = any(embedding.pending for embedding in of_all)
            if has_room and self.in_flight and not to_the_end and not is_left:
                return
            yield from self._finish_oldest()

    def _has_room(self, of_all: Sequence[ShardEmbedding]) -> bool:
        most = 1 if any(each.is_alone for each in of_all) else self.batches_in_flight
        return len(self.in_flight) < most

    def _finish_oldest(self) -> Iterator[WorkerEvent]:
        """Take the oldest batch from the device, and close shards that are then embedded."""
        if self.in_flight:
            yield from self._collect_oldest()
        if self.writing and self.writing[1].done():
            yield from self._report_written()
        while self.open and not any(map(self._is_running, self.open[0].embeddings)):
            yield from self._report_written()
            shard = self.open.popleft()
            written = self.writer.submit(self._write_shard, shard.attempt.shard, shard.embeddings)
            self.writing = shard, written

    def _next_batch(
        self, of_all: Sequence[ShardEmbedding]
    ) -> tuple[ShardEmbedding, list[int]] | None:
        """The next batch that can be started while others are in flight."""
        for embedding in of_all:
            if self.in_flight and self.in_flight[0][0].encoder is not embedding.encoder:
                return None
            if batch := embedding.next_batch(self.tokens_per_batch[embedding.encoder.spec]):
                return embedding, batch
        return None

    def _is_running(self, embedding: ShardEmbedding) -> bool:
        is_in_flight = any(other is embedding for other, *_ in self.in_flight)
        return is_in_flight or bool(embedding.pending)

    def _announce_batch(self, embedding: ShardEmbedding, batch: list[int]) -> BatchStarted:
        busy = [*((other, rows) for other, rows, _ in self.in_flight), (embedding, batch)]
        lengths = [length for each, rows in busy for length in each.batch_lengths(rows)]
        seconds = self.allowed_seconds(embedding.encoder, lengths)
        return BatchStarted(self.name, embedding.attempt.shard, tuple(batch), seconds)

    def _start_batch(self, embedding: ShardEmbedding, batch: list[int]) -> Pending | BatchError:
        sequences = [embedding.sequences[i] for i in batch]
        started = run_catching(lambda: self.start(embedding.encoder, sequences))
        if isinstance(started, BatchError) and started.is_too_large:
            self.free_memory()
        return started

    def _collect_oldest(self) -> Iterator[WorkerEvent]:
        embedding, batch, started = self.in_flight.popleft()
        try:
            yield from self._collect_batch(embedding, batch, started)
        except _ENDING_ERRORS as error:  # the run ends, so that other open shards do not matter
            self.open.clear()
            self.in_flight.clear()
            yield self._ending(embedding.attempt.shard, error)

    def _collect_batch(
        self, embedding: ShardEmbedding, batch: list[int], started: Pending | BatchError
    ) -> Iterator[WorkerEvent]:
        """Wait for a batch and keep its rows; if it failed, try it again in parts, then alone.

        Raises:
            UnavailableError: the first sequences all failed for the same reason.
        """
        match collect(started):
            case BatchError(is_too_large=is_too_large) if len(batch) > 1:
                if is_too_large:
                    self.free_memory()
                    spec, half = embedding.encoder.spec, embedding.count_tokens(batch) // 2
                    self.tokens_per_batch[spec] = min(self.tokens_per_batch[spec], half)
                    yield BatchSizeReduced(self.name, self.tokens_per_batch[spec])
                embedding.split_batch(batch)
                return
            case BatchError(is_too_large=True) if embedding.retry_alone(batch):
                self.free_memory()
                return
            case BatchError(reason=reason):
                embedding.mark_failed(dict.fromkeys(batch, reason))
                self._count_failure(embedding.encoder.spec, reason)
            case rows:
                embedding.store_rows(batch, rows)
                self.first_failures.pop(embedding.encoder.spec, None)
        attempt, n_tokens = embedding.attempt, embedding.count_tokens(batch)
        if attempt.n_failures:
            embedding.save_partial(batch, self.job.owner)
        yield BatchDone(self.name, attempt.shard, tuple(batch), n_tokens, self.memory())

    def _count_failure(self, spec: EncoderSpec, reason: str) -> None:
        """Count a sequence that failed, until the encoder makes its first vector.

        Raises:
            UnavailableError: so many failed alike that the model or the device is at fault.
        """
        failures = self.first_failures.get(spec)
        if failures is None:
            return
        failures[reason] += 1
        if failures.total() == failures[reason] == _MAX_FIRST_FAILURES:
            raise UnavailableError(
                f"the first {_MAX_FIRST_FAILURES} sequences all failed with the model "
                f"{printable(spec.model)} on {self.device} in {spec.precision}: {reason}",
                hint=_CHECK_BOTH,
            )

    def _report_written(self) -> Iterator[WorkerEvent]:
        """Wait until the last shard is written, and report it."""
        if self.writing is None:
            return
        (shard, written), self.writing = self.writing, None
        try:
            end, cache_fault = written.result()
        except _ENDING_ERRORS as error:
            yield self._ending(shard.attempt.shard, error)
        else:
            yield ShardDone(
                self.name,
                shard.attempt.shard,
                end - shard.started,
                n_failed=len(set().union(*(each.reasons for each in shard.embeddings))),
                n_cached=sum(len(each.cached) for each in shard.embeddings),
                n_cached_tokens=sum(each.count_tokens(each.cached) for each in shard.embeddings),
                cache_fault=cache_fault,
            )

    def _write_shard(self, shard: Shard, embeddings: Sequence[ShardEmbedding]) -> tuple[float, str]:
        """Write the files of a shard. -> time of completion, and why the cache took nothing"""
        for each in embeddings:
            each.write(self.job.owner)
        end = time.monotonic()
        return end, next(filter(None, [each.store_in_cache() for each in embeddings]), "")

    def _ending(self, shard: Shard, error: OSError | VirnucproError) -> ShardFailed:
        """The event for an error that would stop all other shards too."""
        lines, refusal = "".join(traceback.format_exception(error)), ErrorText.from_error(error)
        return ShardFailed(self.name, shard, refusal.message, lines, refusal)

    def allowed_seconds(self, encoder: Encoder, lengths: Sequence[int]) -> float:
        """Time limit of a batch of sequences of these lengths on a slow device of this kind."""
        slowest = _SLOWEST.get(self.device.type, _SLOWEST["cpu"])
        return self.resources.silence_seconds + encoder.count_flop(lengths) / slowest
