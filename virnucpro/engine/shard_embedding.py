"""Track a shard on one encoder: its pending batches and its finished rows."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from virnucpro.core.atomic_io import storage_errors
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.types import Embeddings, Failure, Orf, OutputArray, hash_texts
from virnucpro.engine.device_faults import find_device_fault
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.vector_cache import VectorCache
from virnucpro.models.base import Encoder, Pending, Rows
from virnucpro.store.feature_store import FeatureStore

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BatchError:
    """The encoder raised an error, or its vectors are not finite."""

    reason: str
    is_too_large: bool = False  # the batch did not fit into device memory


TOO_LARGE = BatchError("out of memory on the device", is_too_large=True)
# cuBLAS and cuDNN have no error classes: torch raises RuntimeError with the name of their status.
# These names mean that there is no memory for their handle or workspace.
_LIBRARY_OUT_OF_MEMORY = re.compile(
    "CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED"
)
_LIBRARY_ERROR = re.compile("CU(BLAS|DNN)_STATUS_")


def run_catching(work: Callable[[], _T]) -> _T | BatchError:
    """Run the work and return its result, or its error as a value.

    A device that lost its context can do nothing more, so that error ends the worker. So does an
    error that belongs to the device, which must not become the reason why a sequence failed.

    Raises:
        torch.AcceleratorError: the device lost its context, or the error belongs to it.
    """
    try:
        return work()
    except torch.OutOfMemoryError:
        return TOO_LARGE
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if _LIBRARY_OUT_OF_MEMORY.search(str(error)):
            return TOO_LARGE
        if _LIBRARY_ERROR.search(str(error)) or find_device_fault(str(error)):
            raise torch.AcceleratorError(str(error)) from error
        return _batch_error(error)
    except Exception as error:  # a worker must survive a bad sequence
        return _batch_error(error)


def _batch_error(error: Exception) -> BatchError:
    return BatchError(f"{type(error).__name__}: {printable(error)}")


def collect(started: Pending | BatchError) -> Sequence[Rows] | BatchError:
    """Wait for a batch; return the rows of each output or the error."""
    if isinstance(started, BatchError):
        return started
    outputs = run_catching(started.outputs)
    if isinstance(outputs, BatchError) or all(np.isfinite(rows).all() for rows in outputs):
        return outputs
    return BatchError("the vector is not finite")


class OutputRows:
    """The rows of one output of a shard. Indices are ORF positions in the shard.

    Rows start as NaN, so that a forgotten row cannot become an embedding.
    """

    def __init__(self, spec: OutputSpec, lengths: NDArray[np.int32]) -> None:
        self.spec = spec
        self.bounds = np.concatenate([[0], np.cumsum(spec.count_rows(lengths))])  # of each ORF
        self.values = np.full((int(self.bounds[-1]), spec.width), np.nan, dtype=np.float32)
        self._saved = np.dtype([("row", "<i8"), ("vector", "<f4", (spec.width,))])

    def store(self, batch: list[int], rows: Rows) -> None:
        """Store the rows of a batch, in its order."""
        self.values[self._places(batch)] = rows

    def select(self, orfs: list[int]) -> Rows:
        return self.values[self._places(orfs)]

    def is_stored(self) -> NDArray[np.bool_]:
        """Return for each ORF whether all its rows are stored. (n_orfs,)"""
        filled = np.isfinite(self.values).all(axis=1)
        stored: NDArray[np.bool_] = np.logical_and.reduceat(filled, self.bounds[:-1])
        return stored

    def to_bytes(self, orfs: list[int]) -> bytes:
        """Return the rows of ORFs for a partial file."""
        places = self._places(orfs)
        saved = np.empty(len(places), dtype=self._saved)
        saved["row"] = places
        saved["vector"] = self.values[places]
        return saved.tobytes()

    def load(self, content: bytes) -> int:
        """Store the rows in a partial file. -> the bytes of its complete rows"""
        n_bytes = len(content) // self._saved.itemsize * self._saved.itemsize
        saved = np.frombuffer(content[:n_bytes], dtype=self._saved)
        self.values[saved["row"]] = saved["vector"]
        return n_bytes

    def _places(self, orfs: list[int]) -> NDArray[np.int64]:
        """Return the row indices of ORFs."""
        if self.spec.has_one_row:
            return np.array(orfs, dtype=np.int64)
        if not orfs:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in orfs])


class ShardEmbedding:
    """A shard that is being embedded by one encoder. Indices are ORF positions in the shard.

    ``pending`` contains the batches that are not embedded yet.
    """

    def __init__(
        self,
        encoder: Encoder,
        store: FeatureStore,
        cache: VectorCache | None,
        attempt: Attempt,
        orfs: Sequence[Orf],
    ) -> None:
        self.encoder = encoder
        self.store = store
        self.cache = cache
        self.attempt = attempt
        self.orfs = orfs
        self.sequences = [orf.text(encoder.spec.reads) for orf in orfs]
        self.lengths = np.array(list(map(len, self.sequences)), dtype=np.int32)
        self.outputs = [OutputRows(spec, self.lengths) for spec in encoder.spec.outputs]
        self.done = np.zeros(len(orfs), dtype=np.bool_)
        self.reasons: dict[int, str] = {}  # ORF without a vector -> reason
        self.mark_failed(attempt.failed_rows)
        self.cached: list[int] = []
        self.pending: deque[list[int]] = deque()
        # one batch at a time, so that it is clear which batch caused another failure
        self.is_alone = attempt.n_failures > 0
        self.tried_alone: set[int] = set()

    def plan_batches(self, tokens_per_batch: int) -> None:
        """Read cached vectors, and make batches from all other ORFs."""
        vectors = self.cache.read(self.sequences) if self.cache else {}
        self.cached = sorted(vectors.keys() - self.reasons.keys())
        if self.cached:
            joined = np.stack([vectors[i] for i in self.cached])
            bounds = np.cumsum([output.spec.width for output in self.outputs])
            self.store_rows(self.cached, np.split(joined, bounds[:-1], axis=1))
        rows = sorted(set(range(len(self.orfs))).difference(self.cached))
        batches = self.encoder.plan(self.batch_lengths(rows), tokens_per_batch)
        self.pending.extend([rows[i] for i in batch] for batch in batches)

    def count_tokens(self, batch: Iterable[int]) -> int:
        return self.encoder.count_tokens(self.batch_lengths(batch))

    def batch_lengths(self, batch: Iterable[int]) -> list[int]:
        return [len(self.sequences[i]) for i in batch]

    def next_batch(self, tokens_per_batch: int) -> list[int] | None:
        """Remove and return the next batch, without finished rows. Suspects come one by one."""
        while self.pending:
            batch = self.pending.popleft()
            if len(batch) > 1 and not self.attempt.suspects.isdisjoint(batch):
                self.pending.extendleft([i] for i in reversed(batch))
            elif len(batch) > 1 and self.count_tokens(batch) > tokens_per_batch:
                self.split_batch(batch)
            elif batch := [i for i in batch if not self.done[i]]:
                return batch
        return None

    def split_batch(self, batch: list[int]) -> None:
        """Return a batch to ``pending`` as two halves, if it was too large or the encoder rejected
        it.
        """
        middle = (len(batch) + 1) // 2
        self.pending.extendleft([batch[middle:], batch[:middle]])

    def retry_alone(self, batch: list[int]) -> bool:
        """Return a row that did not fit to ``pending``. Alone on the device, it may fit.

        Returns:
            False if that was tried before.
        """
        if not self.tried_alone.isdisjoint(batch):
            return False
        self.tried_alone.update(batch)
        self.pending.appendleft(batch)
        self.is_alone = True
        return True

    def mark_failed(self, reasons: Mapping[int, str]) -> None:
        """Record why ORFs get no vector."""
        self.reasons.update(reasons)
        self.done[list(reasons)] = True

    def store_rows(self, batch: list[int], outputs: Sequence[Rows]) -> None:
        """Store the rows of a batch, in its order, for each output."""
        for output, rows in zip(self.outputs, outputs, strict=True):
            output.store(batch, rows)
        self.done[batch] = True

    def save_partial(self, batch: list[int], owner: str) -> None:
        """Append the rows of a batch to the owner's partial files, one for each output.

        After a kill in the middle, the rows before it are complete.
        """
        delivered = [i for i in batch if i not in self.reasons]
        self.store.make_folder()  # missing if the run keeps no vectors
        for path, output in self._partial_files(owner):
            with storage_errors(path), self.store.tree.open(path, "a") as out:
                out.write(output.to_bytes(delivered))

    def load_partial(self, owner: str) -> None:
        """Load the rows that an earlier attempt of the owner saved."""
        for path, output in self._partial_files(owner):
            try:
                partial = self.store.tree.open(path, "r+")
            except FileNotFoundError:
                return
            with partial:
                partial.truncate(output.load(partial.read()))
        stored = [output.is_stored() for output in self.outputs]
        self.done |= np.logical_and.reduce(stored)

    def _partial_files(self, owner: str) -> list[tuple[Path, OutputRows]]:
        shard = self.attempt.shard
        names = ["", *(output.spec.name for output in self.outputs[1:])]
        paths = [self.store.partial_path(shard, owner, name) for name in names]
        return list(zip(paths, self.outputs, strict=True))

    def to_embeddings(self) -> Embeddings:
        """Return the results, once every ORF has a vector or a failure reason."""
        assert self.done.all(), "every ORF has a vector or a reason"
        ids = [orf.id for orf in self.orfs]
        sequences = self.sequences
        lengths = self.lengths
        values = [output.values for output in self.outputs]
        if self.reasons:
            delivered = [i for i in range(len(ids)) if i not in self.reasons]
            ids = [ids[i] for i in delivered]
            sequences = [sequences[i] for i in delivered]
            lengths = lengths[delivered]
            values = [output.select(delivered) for output in self.outputs]
        return Embeddings(
            ids=tuple(ids),
            lengths=lengths,
            vectors=values[0],
            per_residue=self.encoder.spec.per_residue,
            failures=tuple(
                Failure(self.orfs[i].id, self.orfs[i].record_id, self.reasons[i])
                for i in sorted(self.reasons)
            ),
            extra=tuple(map(OutputArray, self.encoder.spec.extra, values[1:])),
            sequence_sha256=hash_texts(sequences),
        )

    def delete_partials(self, owner: str) -> None:
        """Delete the partial files of a shard that is written."""
        for path, _ in self._partial_files(owner):
            self.store.tree.delete(path)

    def store_in_cache(self) -> str:
        """Add the new vectors to the cache. Return "" or the reason why this failed."""
        if self.cache is None:
            return ""
        excluded = {*self.cached, *self.reasons}
        new = [i for i in range(len(self.orfs)) if i not in excluded]
        rows = np.concatenate([output.values[new] for output in self.outputs], axis=1)
        return self.cache.write([self.sequences[i] for i in new], rows)
