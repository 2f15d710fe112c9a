"""What one device does with shards. The same object runs inline or in a process.

Within a shard a GPU is given a batch before the one ahead of it is done, and a shard's file is
written by a thread while the next shard is embedded.

A shard that killed its worker comes back with what is known of it: ``suspects`` are embedded
one by one, ``condemned`` not at all, and every batch is kept in a partial file, so that the
next attempt begins where this one died.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.config import EncoderSpec
from virnucpro.encoders.esm2.converted import open_esm2
from virnucpro.encoders.esm2.model import DTYPES, bos_pool, mean_pool, residues_only
from virnucpro.encoders.esm2.packing import EXTRA_TOKENS, PackedBatch, plan_batches
from virnucpro.engine.events import (
    BatchDone,
    BatchStarted,
    BudgetReduced,
    Event,
    Memory,
    Refusal,
    ShardDone,
    ShardFailed,
)
from virnucpro.engine.recovery import Task
from virnucpro.errors import OutputError, StorageError
from virnucpro.files import disk_error, writing
from virnucpro.log import printable
from virnucpro.records import Embeddings, Failure, Orf, Shard
from virnucpro.run.features import Attributes, write_embeddings
from virnucpro.run.shards import read_shard

_T = TypeVar("_T")
Arriving = Callable[[], NDArray[np.float32]]  # rows that wait for the device
_POOL = {"mean": mean_pool, "bos": bos_pool, "none": residues_only}
_STORAGE_ERRORS = (OSError, OutputError, StorageError)
# a slow device of its kind, FLOP/s: what takes longer than this is no longer just slow
_SLOWEST = {"cpu": 2e9, "mps": 1e11, "cuda": 1e12}


@dataclass(frozen=True, slots=True)
class Job:
    """All a worker needs to know. Picklable; the same for every shard of a run."""

    features: Path  # folder
    weights: Path  # a checkpoint, or its converted form
    encoders: tuple[EncoderSpec, ...]
    tokens_per_batch: int
    silence_seconds: float
    fingerprint: str  # of the recipe

    def feature_file(self, shard: Shard) -> Path:
        return self.features / f"{shard.name}.h5"

    def attributes_of(self, shard: Shard) -> Attributes:
        """What a feature file says of itself."""
        (encoder,) = self.encoders
        return {
            "model": encoder.model,
            "layer": encoder.layer,
            "pooling": encoder.pooling,
            "precision": encoder.precision,
            "fingerprint": self.fingerprint,
            "copies": 0,
            "shard_sha256": shard.sha256,
        }


@dataclass(frozen=True, slots=True)
class _Writing:
    """A shard that is embedded; its feature file is on the way to the disk."""

    shard: Shard
    started: float
    n_failed: int
    written: Future[float]  # when it was there, by the monotonic clock


class Worker:
    """One loaded model on one device."""

    def __init__(self, job: Job, name: str, device: str) -> None:
        self.job, self.name = job, name
        self.device = torch.device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # one core each: processes scale better than threads
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.copying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        (self.spec,) = job.encoders
        dtype = DTYPES[self.spec.precision]
        self.model = open_esm2(job.weights, self.spec.layer, dtype, self.device)
        self.tokens_per_batch = job.tokens_per_batch
        self.batches_in_flight = 2 if self.device.type == "cuda" else 1
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.writing: _Writing | None = None
        Worker.embed(self, ["M"])()  # a device that can do nothing must not look ready

    @property
    def description(self) -> str:
        kernel = self.model.attend.__name__
        return (
            f"{self.device}, {self.spec.precision}, {kernel}, {self.tokens_per_batch} tokens, "
            f"process {os.getpid()}"
        )

    def memory(self) -> Memory:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return Memory(total - free, total)
        return Memory(psutil.Process().memory_info().rss, psutil.virtual_memory().total)

    def run(self, task: Task) -> Iterator[Event]:
        """Embed one shard, and begin to write it.

        Its ShardDone or ShardFailed comes from the next ``run``, or from ``finish``. A shard that
        has killed a worker is finished before the next one: there must be no doubt who is at fault.
        """
        started, shard = time.monotonic(), task.shard
        partial = self.job.features / f".{shard.name}.partial"
        try:
            orfs = [orf for orf in read_shard(shard) if orf.copy_of is None]
            result = _Rows(orfs, self.model.shape.dim, self.spec.pooling == "none")
            result.condemn(task.condemned)
            if task.n_losses:
                result.restore(partial)
            yield from self._embed_shard(task, orfs, result, partial)
            embeddings = result.finish()
        except _STORAGE_ERRORS as error:
            yield self._not_stored(shard, error)
        else:
            yield from self.finish()
            written = self.writer.submit(self._write, shard, embeddings, partial)
            self.writing = _Writing(shard, started, len(embeddings.failures), written)
            if task.n_losses:
                yield from self.finish()

    def finish(self) -> Iterator[Event]:
        """Wait until the last shard is written, and tell."""
        writing, self.writing = self.writing, None
        if writing is None:
            return
        try:
            ended = writing.written.result()
        except _STORAGE_ERRORS as error:
            yield self._not_stored(writing.shard, error)
        else:
            seconds = ended - writing.started
            yield ShardDone(self.name, writing.shard, seconds, writing.n_failed)

    def _write(self, shard: Shard, embeddings: Embeddings, partial: Path) -> float:
        write_embeddings(self.job.feature_file(shard), embeddings, self.job.attributes_of(shard))
        partial.unlink(missing_ok=True)
        return time.monotonic()

    def _not_stored(self, shard: Shard, error: OSError | OutputError | StorageError) -> ShardFailed:
        told = disk_error(error) if isinstance(error, OSError) else error
        lines = "".join(traceback.format_exception(error))
        refusal = Refusal(told.hint, is_place=isinstance(told, OutputError))
        return ShardFailed(self.name, shard, printable(told), lines, refusal)

    def _embed_shard(
        self, task: Task, orfs: list[Orf], result: _Rows, partial: Path
    ) -> Iterator[Event]:
        lengths = [len(orf.protein) for orf in orfs]
        batches = deque(plan_batches(lengths, self.tokens_per_batch))
        in_flight: deque[tuple[list[int], Arriving | str]] = deque()
        # after a loss one batch at a time: there must be no doubt which one is at fault
        most = 1 if task.n_losses else self.batches_in_flight
        tried_again: set[int] = set()  # ORFs that did not fit alone
        while batches or in_flight:
            if batches and len(in_flight) < most:
                batch = batches.popleft()
                parts = self._parts(batch, lengths, task.suspects)
                if len(parts) > 1:
                    batches.extendleft(reversed(parts))
                    continue
                batch = [i for i in batch if not result.known[i]]
                if batch:
                    busy = [lengths[i] for rows, _ in [*in_flight, (batch, "")] for i in rows]
                    allowed = self._allowed_seconds(busy)
                    yield BatchStarted(self.name, task.shard, tuple(batch), allowed)
                    in_flight.append((batch, self._start([orfs[i].protein for i in batch])))
                continue
            batch, begun = in_flight.popleft()
            outcome = begun if isinstance(begun, str) else self._wait(begun)
            n_tokens = sum(lengths[i] + EXTRA_TOKENS for i in batch)
            is_too_large = isinstance(outcome, str) and outcome == _OUT_OF_MEMORY
            if isinstance(outcome, str) and len(batch) > 1:
                if is_too_large:
                    self.tokens_per_batch = min(self.tokens_per_batch, n_tokens // 2)
                    yield BudgetReduced(self.name, self.tokens_per_batch)
                batches.extendleft(reversed(_halves(batch)))
                continue
            if is_too_large and tried_again.isdisjoint(batch):
                tried_again.update(batch)
                most = 1  # it may fit with no other batch beside it
                batches.appendleft(batch)
                continue
            result.put(batch, outcome)
            if task.n_losses:
                result.save(batch, partial)
            yield BatchDone(self.name, task.shard, tuple(batch), n_tokens, self.memory())
            if self.writing and self.writing.written.done():
                yield from self.finish()

    def _parts(
        self, batch: list[int], lengths: list[int], suspects: frozenset[int]
    ) -> list[list[int]]:
        """The batch itself, or what to embed in its place."""
        if len(batch) > 1 and not suspects.isdisjoint(batch):
            return [[i] for i in batch]
        n_tokens = sum(lengths[i] + EXTRA_TOKENS for i in batch)
        if len(batch) > 1 and n_tokens > self.tokens_per_batch:
            return _halves(batch)
        return [batch]

    def _start(self, proteins: list[str]) -> Arriving | str:
        return self._try(lambda: self.embed(proteins))

    def _wait(self, rows: Arriving) -> NDArray[np.float32] | str:
        outcome = self._try(rows)
        if isinstance(outcome, str) or np.isfinite(outcome).all():
            return outcome
        return "the vector is not finite"

    def _try(self, work: Callable[[], _T]) -> _T | str:
        """What comes of it, or why nothing does.

        A device whose context is lost can do nothing more: that error ends the worker.
        """
        try:
            return work()
        except torch.OutOfMemoryError:
            reason = _OUT_OF_MEMORY
        except torch.AcceleratorError:
            raise
        except Exception as error:  # a worker outlives a bad sequence
            return f"{type(error).__name__}: {printable(error)}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return reason

    @torch.inference_mode()
    def embed(self, proteins: list[str]) -> Arriving:
        """Begin a batch: (n_proteins, dim) float32, or (n_residues, dim) when nothing is pooled."""
        batch = PackedBatch.of(proteins)
        pooled = _POOL[self.spec.pooling](self.model(batch), batch)
        if self.device.type == "cuda":
            return self._copy_out(pooled)
        rows: NDArray[np.float32] = pooled.cpu().numpy()
        return lambda: rows

    def _copy_out(self, pooled: Tensor) -> Arriving:
        """Copy to the host beside the next batch's work, into pinned memory."""
        host = torch.empty(pooled.shape, dtype=pooled.dtype, pin_memory=True)
        self.copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copying):
            host.copy_(pooled, non_blocking=True)
            copied = self.copying.record_event()
        pooled.record_stream(self.copying)

        def rows() -> NDArray[np.float32]:
            copied.synchronize()
            array: NDArray[np.float32] = host.numpy()
            return array

        return rows

    def _allowed_seconds(self, lengths: list[int]) -> float:
        shape = self.model.shape
        squares = float(sum(length * length for length in lengths))
        flop = 2.0 * shape.n_parameters * sum(lengths) + 4.0 * squares * shape.dim * shape.n_layers
        return self.job.silence_seconds + flop / _SLOWEST.get(self.device.type, 2e9)


_OUT_OF_MEMORY = "out of memory on the device"


def _halves(batch: list[int]) -> list[list[int]]:
    middle = (len(batch) + 1) // 2
    return [batch[:middle], batch[middle:]]


class _Rows:
    """The vectors of a shard while they come in, by the place of their ORF.

    Rows begin as NaN, so that a forgotten one cannot become an embedding.
    """

    def __init__(self, orfs: list[Orf], dim: int, per_residue: bool) -> None:
        self.orfs, self.per_residue = orfs, per_residue
        self.lengths = np.array([len(orf.protein) for orf in orfs], dtype=np.int32)
        n_rows = self.lengths if per_residue else np.ones_like(self.lengths)
        self.bounds = np.concatenate([[0], np.cumsum(n_rows)])
        self.vectors = np.full((int(self.bounds[-1]), dim), np.nan, dtype=np.float32)
        self.known = np.zeros(len(orfs), dtype=np.bool_)
        self.reasons: dict[int, str] = {}
        self._saved = np.dtype([("row", "<i8"), ("vector", "<f4", (dim,))])

    def condemn(self, reasons: Mapping[int, str]) -> None:
        self.reasons.update(reasons)
        self.known[list(reasons)] = True

    def put(self, batch: list[int], outcome: NDArray[np.float32] | str) -> None:
        """Keep the rows of a batch, in its order, or the reason why one ORF has none."""
        if isinstance(outcome, str):
            self.condemn(dict.fromkeys(batch, outcome))
        else:
            self.vectors[self._rows_of(batch)] = outcome
            self.known[batch] = True

    def save(self, batch: list[int], path: Path) -> None:
        """Append the rows of a batch; a kill in the middle leaves whole rows before it."""
        rows = self._rows_of([i for i in batch if i not in self.reasons])
        saved = np.empty(len(rows), dtype=self._saved)
        saved["row"], saved["vector"] = rows, self.vectors[rows]
        with writing(path), path.open("ab") as out:
            out.write(saved.tobytes())

    def restore(self, path: Path) -> None:
        """Take over what an earlier attempt of this run saved."""
        if not path.exists():
            return
        content = path.read_bytes()
        whole = len(content) // self._saved.itemsize * self._saved.itemsize
        saved = np.frombuffer(content[:whole], dtype=self._saved)
        with path.open("r+b") as out:
            out.truncate(whole)
        self.vectors[saved["row"]] = saved["vector"]
        filled = np.isfinite(self.vectors).all(axis=1)
        self.known |= np.logical_and.reduceat(filled, self.bounds[:-1])

    def finish(self) -> Embeddings:
        delivered = [i for i in range(len(self.orfs)) if i not in self.reasons]
        assert self.known.all(), "every ORF has a vector or a reason"
        return Embeddings(
            ids=tuple(self.orfs[i].id for i in delivered),
            lengths=self.lengths[delivered],
            vectors=self.vectors[self._rows_of(delivered)],
            per_residue=self.per_residue,
            failures=tuple(
                Failure(self.orfs[i].id, self.orfs[i].record_id, self.reasons[i])
                for i in sorted(self.reasons)
            ),
        )

    def _rows_of(self, batch: list[int]) -> NDArray[np.int64]:
        if not batch:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in batch])
