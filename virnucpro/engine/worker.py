"""Embed shards on one device. The same object runs inline or in a process.

A GPU gets its next batch before the current one is done, even across shards. At the same time,
threads write the files of finished shards.

A shard that killed its worker comes back with ``suspects``, which are embedded one by one, and
``failed_rows``, which are skipped. Every batch is then saved in a partial file, so that the next
attempt continues where this one died.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, NamedTuple

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
    ShardReturned,
    WorkerEvent,
)
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Alphabet, EncoderSpec
from virnucpro.core.types import Orf, Shard
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.shard_embedding import (
    TOO_LARGE,
    BatchError,
    ShardEmbedding,
    collect,
    run_catching,
)
from virnucpro.engine.vector_cache import VectorCache
from virnucpro.models.base import Encoder, Pending, load_encoder
from virnucpro.models.gpu_state import format_cores, read_gpu_state
from virnucpro.models.packing import use_device
from virnucpro.store.shard_files import read_shard


class _OpenShard(NamedTuple):
    """A shard that is being embedded or written."""

    attempt: Attempt
    started: float
    orfs: Sequence[Orf]  # copies included
    embeddings: list[ShardEmbedding]  # one per encoder


class Worker:
    """The encoders of a run, loaded on one device."""

    _ENDING_ERRORS = (OSError, OutputError, StorageError, UnavailableError)  # end the complete run
    _TRIAL = "ATG"  # bases
    _CHECK_BOTH = (
        "the model or the device is at fault, not the sequences: check the file with `virnucpro "
        "models verify` and the device with `virnucpro models check`, or try --precision fp32 or "
        "--device cpu"
    )
    # One thread writes 2.0 to 2.3 GB per CPU second of vectors per residue on an Intel Xeon
    # (`benchmarks/store.py`), and 650M on an H200 makes 1.8 GB/s: two also suffice on slower cores.
    _N_WRITERS = 2
    # FLOP/s of slow devices by kind; a batch that takes longer counts as hung
    _SLOWEST: ClassVar = {"cpu": 2e9, "mps": 1e11, "cuda": 1e12}

    def __init__(self, job: WorkerConfig, resources: Resources, name: str, device: str) -> None:
        self.job = job
        self.resources = resources
        self.name = name
        self.device = torch.device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # one core per process scales better than threads
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
        self.writers = ThreadPoolExecutor(max_workers=self._N_WRITERS)
        self.open: deque[_OpenShard] = deque()  # at most two, not counting empty ones
        # embedded shards that are being written; see ``_write_shard``
        self.writing: deque[tuple[_OpenShard, Future[tuple[float, str]]]] = deque()
        # batches on the device, all from one encoder
        self.in_flight: deque[tuple[ShardEmbedding, list[int], Pending | BatchError]] = deque()
        # failure reasons and their counts, per encoder, until it makes its first vector
        self.first_failures = {encoder.spec: Counter[str]() for encoder in self.encoders}
        for encoder in self.encoders:  # a broken device must not report that it is ready
            self._try(encoder)

    def _try(self, encoder: Encoder) -> None:
        """Embed a short sequence.

        Raises:
            UnavailableError: its vector is not finite.
        """
        trial_protein = "ACDEFGHIKLMNPQRSTVWY"
        spec = encoder.spec
        trial = trial_protein if spec.reads is Alphabet.PROTEIN else self._TRIAL
        outputs = encoder.start([trial]).outputs()
        if not all(np.isfinite(rows).all() for rows in outputs):
            raise UnavailableError(
                f"the model {printable(spec.model)} makes vectors that are not finite, on "
                f"{self.device} in {spec.precision}",
                hint=self._CHECK_BOTH,
            )

    @property
    def description(self) -> str:
        encoders = ", ".join(
            f"{encoder.spec.precision}, {encoder.kernel}, {tokens} tokens"
            for encoder, tokens in zip(self.encoders, self.tokens_per_batch.values(), strict=True)
        )
        parts = [str(self.device), encoders, *self._describe_gpu(), f"process {os.getpid()}"]
        return ", ".join(parts)

    def _describe_gpu(self) -> list[str]:
        """Describe the state of a GPU, and the cores that this process may use near it."""
        if self.device.type != "cuda":
            return []
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        cores = format_cores(os.sched_getaffinity(0))
        return [*read_gpu_state(uuid).describe(), f"CPU cores {cores}"]

    def memory(self) -> Memory:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return Memory(total - free, total)
        return Memory(psutil.Process().memory_info().rss, self.resources.memory)

    def free_memory(self) -> None:
        """Release the memory that a GPU's allocator caches."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        """Start a batch."""
        return encoder.start(sequences)

    def run(self, attempt: Attempt) -> Iterator[WorkerEvent]:
        """Embed one shard with every encoder. Its last batches may still run when this returns.

        The next ``run`` or ``finish`` completes them, writes the shard and yields its ShardDone or
        ShardFailed. A shard that has killed a worker starts after all others are done and finishes
        before the next, so that it is clear which shard caused a failure.
        """
        if attempt.n_failures:
            yield from self.finish()
        try:
            self.open.append(self._open_shard(attempt))
        except self._ENDING_ERRORS as error:
            yield self._ending(attempt.shard, error)
            return
        yield from self._run_batches(drain=bool(attempt.n_failures))
        if attempt.n_failures:
            yield from self._report_written()

    def finish(self) -> Iterator[WorkerEvent]:
        """Embed and write all open shards.

        A caller with another shard may stop after a BatchDone or a ShardDone.
        """
        yield from self._run_batches(drain=True)
        yield from self._report_written()

    def read_orfs(self, shard: Shard) -> list[Orf]:
        """Return the ORFs of a shard, copies included."""
        return read_shard(shard)

    def _open_shard(self, attempt: Attempt) -> _OpenShard:
        started = time.monotonic()
        orfs = self.read_orfs(attempt.shard)
        originals = [orf for orf in orfs if orf.copy_of is None]
        embeddings = [
            ShardEmbedding(encoder, store, cache, attempt, originals)
            for encoder, store, cache in zip(
                self.encoders, self.job.stores, self.caches, strict=True
            )
        ]
        for embedding in embeddings:
            if attempt.n_failures:
                embedding.load_partial(self.job.owner)
            embedding.plan_batches(self.tokens_per_batch[embedding.encoder.spec])
        return _OpenShard(attempt, started, orfs, embeddings)

    def _run_batches(self, *, drain: bool) -> Iterator[WorkerEvent]:
        """Embed the open shards, either completely or until the device can take another batch."""
        while self.open:
            embeddings = [embedding for shard in self.open for embedding in shard.embeddings]
            can_start = self._can_start(embeddings)
            if can_start and (next_batch := self._next_batch(embeddings)):
                embedding, batch = next_batch
                yield self._announce_batch(embedding, batch)
                self.in_flight.append((embedding, batch, self._start_batch(embedding, batch)))
                continue
            has_pending = any(embedding.pending for embedding in embeddings)
            if can_start and self.in_flight and not drain and not has_pending:
                return
            yield from self._finish_oldest()

    def _can_start(self, embeddings: Sequence[ShardEmbedding]) -> bool:
        """Return True if another batch may be in flight."""
        is_alone = any(embedding.is_alone for embedding in embeddings)
        max_in_flight = 1 if is_alone else self.batches_in_flight
        return len(self.in_flight) < max_in_flight

    def _finish_oldest(self) -> Iterator[WorkerEvent]:
        """Collect the oldest batch from the device, and close shards that are then embedded."""
        if self.in_flight:
            yield from self._collect_oldest()
        while self.writing and self.writing[0][1].done():
            yield self._report_oldest()
        while self.open and not any(map(self._is_running, self.open[0].embeddings)):
            if len(self.writing) == self._N_WRITERS:
                yield self._report_oldest()
            shard = self.open.popleft()
            if returned := self._return_shard(shard):
                yield returned
                continue
            future = self.writers.submit(self._write_shard, shard)
            self.writing.append((shard, future))

    def _return_shard(self, shard: _OpenShard) -> ShardReturned | None:
        """Return a shard with rows that failed for the first time, if another device can try them.

        Its vectors go to the partial files, which the next attempt loads.
        """
        attempt = shard.attempt
        reasons = {row: why for each in shard.embeddings for row, why in each.reasons.items()}
        new = reasons.keys() - attempt.failed_rows.keys()
        if not any(map(attempt.is_retried_elsewhere, new)):
            return None
        for each in shard.embeddings:
            if not attempt.n_failures:  # else each batch was saved
                each.save_partial(list(range(len(each.orfs))), self.job.owner)
        failed = {row: reasons[row] for row in sorted(new)}
        errors = [why for why in failed.values() if why != TOO_LARGE.reason]
        return ShardReturned(self.name, attempt.shard, failed, next(iter(errors), ""))

    def _next_batch(
        self, embeddings: Sequence[ShardEmbedding]
    ) -> tuple[ShardEmbedding, list[int]] | None:
        """Return the next batch that can start while others are in flight."""
        for embedding in embeddings:
            if self.in_flight and self.in_flight[0][0].encoder is not embedding.encoder:
                return None
            if batch := embedding.next_batch(self.tokens_per_batch[embedding.encoder.spec]):
                return embedding, batch
        return None

    def _is_running(self, embedding: ShardEmbedding) -> bool:
        is_in_flight = any(running is embedding for running, *_ in self.in_flight)
        return is_in_flight or bool(embedding.pending)

    def _announce_batch(self, embedding: ShardEmbedding, batch: list[int]) -> BatchStarted:
        lengths: list[int] = []
        for running, running_batch, _ in self.in_flight:
            lengths.extend(running.batch_lengths(running_batch))
        lengths.extend(embedding.batch_lengths(batch))
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
        except self._ENDING_ERRORS as error:  # the run ends, so other open shards do not matter
            self.open.clear()
            self.in_flight.clear()
            yield self._ending(embedding.attempt.shard, error)

    def _collect_batch(
        self, embedding: ShardEmbedding, batch: list[int], started: Pending | BatchError
    ) -> Iterator[WorkerEvent]:
        """Wait for a batch and store its rows. If it failed, retry it in parts, then alone.

        Raises:
            UnavailableError: the first sequences all failed for the same reason.
        """
        match collect(started):
            case BatchError(is_too_large=is_too_large) if len(batch) > 1:
                if is_too_large:
                    self.free_memory()
                    spec = embedding.encoder.spec
                    half = embedding.count_tokens(batch) // 2
                    self.tokens_per_batch[spec] = min(self.tokens_per_batch[spec], half)
                    yield BatchSizeReduced(self.name, self.tokens_per_batch[spec])
                embedding.split_batch(batch)
                return
            case BatchError(is_too_large=True) if embedding.retry_alone(batch):
                self.free_memory()
                return
            case BatchError(reason=reason):
                embedding.mark_failed(dict.fromkeys(batch, reason))
                if not embedding.attempt.is_retried_elsewhere(batch[0]):
                    self._count_failure(embedding.encoder.spec, reason)
            case outputs:
                embedding.store_rows(batch, outputs)
                self.first_failures.pop(embedding.encoder.spec, None)
        attempt = embedding.attempt
        n_tokens = embedding.count_tokens(batch)
        if attempt.n_failures:
            embedding.save_partial(batch, self.job.owner)
        yield BatchDone(self.name, attempt.shard, tuple(batch), n_tokens, self.memory())

    def _count_failure(self, spec: EncoderSpec, reason: str) -> None:
        """Count a sequence that failed, until the encoder makes its first vector.

        Raises:
            UnavailableError: so many failed alike that the model or the device is at fault.
        """
        max_first_failures = 100  # sequences with the same failure before any has a vector
        failures = self.first_failures.get(spec)
        if failures is None:
            return
        failures[reason] += 1
        if failures.total() == failures[reason] == max_first_failures:
            raise UnavailableError(
                f"the first {max_first_failures} sequences all failed with the model "
                f"{printable(spec.model)} on {self.device} in {spec.precision}: {reason}",
                hint=self._CHECK_BOTH,
            )

    def _report_written(self) -> Iterator[WorkerEvent]:
        """Wait until all embedded shards are written, and report them."""
        while self.writing:
            yield self._report_oldest()

    def _report_oldest(self) -> WorkerEvent:
        """Wait until the oldest shard in ``writing`` is written."""
        shard, future = self.writing.popleft()
        try:
            end, cache_fault = future.result()
        except self._ENDING_ERRORS as error:
            return self._ending(shard.attempt.shard, error)
        embeddings = shard.embeddings
        failed_rows = set[int]().union(*(embedding.reasons for embedding in embeddings))
        n_cached_tokens = [embedding.count_tokens(embedding.cached) for embedding in embeddings]
        return ShardDone(
            self.name,
            shard.attempt.shard,
            end - shard.started,
            n_failed=len(failed_rows),
            n_cached=sum(len(embedding.cached) for embedding in embeddings),
            n_cached_tokens=sum(n_cached_tokens),
            cache_fault=cache_fault,
            n_recovered=len(shard.attempt.failed_on.keys() - failed_rows),
        )

    def _write_shard(self, finished: _OpenShard) -> tuple[float, str]:
        """Write the files of an embedded shard.

        Returns:
            The time of completion, and why the cache took nothing, or "".
        """
        shard = finished.attempt.shard
        results = [embedding.to_embeddings() for embedding in finished.embeddings]
        if self.job.sink is not None:
            self.job.sink.write(shard, finished.orfs, results)
        else:
            for store, embeddings in zip(self.job.stores, results, strict=True):
                store.write(shard, embeddings)
        for embedding in finished.embeddings:
            embedding.delete_partials(self.job.owner)
        end = time.monotonic()
        cache_faults = [embedding.store_in_cache() for embedding in finished.embeddings]
        return end, next(filter(None, cache_faults), "")

    def _ending(self, shard: Shard, error: OSError | VirnucproError) -> ShardFailed:
        """Make the event for an error that would also stop all other shards."""
        lines = "".join(traceback.format_exception(error))
        refusal = ErrorText.from_error(error)
        return ShardFailed(self.name, shard, refusal.message, lines, refusal)

    def allowed_seconds(self, encoder: Encoder, lengths: Sequence[int]) -> float:
        """Return the time limit for a batch with these lengths on a slow device of this kind."""
        slowest = self._SLOWEST.get(self.device.type, self._SLOWEST["cpu"])
        return self.resources.silence_seconds + encoder.count_flop(lengths) / slowest
