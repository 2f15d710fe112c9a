"""Keep encoders loaded, and embed sequences without a run folder.

A resident worker batches, retries and checks as the worker of a run does, because it is one. Only
its shards and its vectors stay in memory. Several devices have a process each, which ends with this
one. A device that fails ends the call with an error, because no other attempt is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.errors import UnavailableError, VirnucproError
from virnucpro.core.events import ErrorText, ShardFailed, WorkerEvent
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, Orf, Shard
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.worker import Worker
from virnucpro.store.feature_file import Checksums
from virnucpro.store.feature_store import FeatureStore


@dataclass(frozen=True, slots=True, eq=False)
class MemoryStore(FeatureStore):
    """A store that keeps vectors in memory until they are taken."""

    written: dict[int, Embeddings] = field(default_factory=dict)  # by shard index

    def write(self, shard: Shard, embeddings: Embeddings, copies: int = 0) -> Checksums:
        """Keep the vectors of a shard."""
        self.written[shard.index] = embeddings
        return Checksums("", "")


class ShardEmbedder(Protocol):
    """Embeds shards on its devices until it is closed."""

    def embed(self, shards: Sequence[Sequence[Orf]]) -> list[Embeddings]:
        """Embed shards. Each result has the failures of its ORFs, too."""

    def close(self) -> None:
        """Release the devices."""


class ResidentWorker(Worker):
    """A worker of this process."""

    _NOWHERE = Path("/nonexistent")  # a worker without a folder writes nothing

    def __init__(
        self, encoder: EncoderSpec, weights: Path, resources: Resources, device: str
    ) -> None:
        self.store_in_memory = MemoryStore(
            SafeDir(self._NOWHERE), self._NOWHERE / "features", encoder, ""
        )
        self.orfs: Sequence[Sequence[Orf]] = ()
        job = WorkerConfig(self._NOWHERE, (self.store_in_memory,), (weights,), "resident")
        with _own_threads():
            super().__init__(job, resources, device, device)
            self.n_threads = torch.get_num_threads()

    def read_orfs(self, shard: Shard) -> list[Orf]:
        return list(self.orfs[shard.index])

    def embed(self, shards: Sequence[Sequence[Orf]]) -> list[Embeddings]:
        """Embed shards, as ``ShardEmbedder.embed``."""
        self.orfs = shards
        with _own_threads():
            torch.set_num_threads(self.n_threads)
            for index, orfs in enumerate(shards):
                n_residues = sum(len(orf.protein) for orf in orfs)
                shard = Shard(index, self._NOWHERE, len(orfs), len(orfs), n_residues, "")
                _check(self.run(Attempt(shard)))
            _check(self.finish())
        return [self.store_in_memory.written.pop(index) for index in range(len(shards))]

    def close(self) -> None:
        """Stop the writing thread, and free the device."""
        self.writers.shutdown()
        self.encoders.clear()
        self.free_memory()


@contextmanager
def _own_threads() -> Iterator[None]:
    """Restore the number of torch threads of this process afterwards."""
    n_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _check(events: Iterator[WorkerEvent]) -> None:
    """Raise the error of a shard that could not be embedded."""
    for event in events:
        if isinstance(event, ShardFailed):
            if event.refusal is not None:
                raise event.refusal.to_error
            raise UnavailableError(event.reason)


def serve_shards(
    pipe: Pipe, encoder: EncoderSpec, weights: Path, resources: Resources, device: str
) -> None:
    """Embed the shards that the parent sends, one at a time, until its pipe closes."""
    worker = ResidentWorker(encoder, weights, resources, device)
    with suppress(EOFError):
        while True:
            orfs: Sequence[Orf] = pipe.recv()
            answer: Embeddings | ErrorText
            try:
                (answer,) = worker.embed([orfs])
            except VirnucproError as error:
                answer = ErrorText.from_error(error)
            pipe.send(answer)


class ResidentProcesses:
    """One resident worker per device, each in a process of its own."""

    def __init__(self, encoder: EncoderSpec, weights: Path, resources: Resources) -> None:
        self.children: list[ChildProcess] = []
        with defer_interrupts():
            for device in resources.devices:
                self.children.append(
                    start_process(serve_shards, encoder, weights, resources, device)
                )

    def embed(self, shards: Sequence[Sequence[Orf]]) -> list[Embeddings]:
        """Embed shards, as ``ShardEmbedder.embed``. Each goes to the next free device."""
        results: dict[int, Embeddings] = {}
        pending = deque(range(len(shards)))
        assigned: dict[int, int] = {}  # process id -> shard
        try:
            for child in self.children[: len(shards)]:
                self._assign(child, shards, pending, assigned)
            while assigned:
                busy = [child for child in self.children if child.pid in assigned]
                for child in ChildProcess.wait_any(busy):
                    results[assigned.pop(child.pid)] = _receive(child)
                    if pending:
                        self._assign(child, shards, pending, assigned)
        except BaseException:  # answers of this call must not be taken for those of the next
            self.close()
            raise
        return [results[index] for index in range(len(shards))]

    def _assign(
        self,
        child: ChildProcess,
        shards: Sequence[Sequence[Orf]],
        pending: deque[int],
        assigned: dict[int, int],
    ) -> None:
        index = pending.popleft()
        assigned[child.pid] = index
        with suppress(OSError):  # the child has ended, and its pipe reports that
            child.pipe.send(list(shards[index]))

    def close(self) -> None:
        """End the processes."""
        ChildProcess.kill_all(self.children)
        self.children.clear()


def _receive(child: ChildProcess) -> Embeddings:
    """Return the answer of a process.

    Raises:
        VirnucproError: its device or model failed.
        UnavailableError: the process ended.
    """
    try:
        answer = child.pipe.recv()
    except (EOFError, OSError) as error:
        raise UnavailableError(
            f"a process that embeds has ended: {child.exit_reason(5)}", hint=child.remedy
        ) from error
    if isinstance(answer, ErrorText):
        raise answer.to_error
    if isinstance(answer, ChildError):
        raise UnavailableError(f"a process that embeds has ended: {answer.reason}")
    assert isinstance(answer, Embeddings), "the answer of serve_shards"
    return answer


def open_resident(encoder: EncoderSpec, weights: Path, resources: Resources) -> ShardEmbedder:
    """Load an encoder on each device: on a single one in this process."""
    if len(resources.devices) == 1:
        return ResidentWorker(encoder, weights, resources, resources.devices[0])
    return ResidentProcesses(encoder, weights, resources)
