"""Run shards on this machine: in one process per device, or in this process.

    parent  --Attempt-->  worker     a pipe of the worker's own,
    parent  <--Event----  worker     for both

Workers share nothing: a process killed inside ``Queue.get`` would keep the queue's lock, and the
others would wait for ever. One thread of the parent waits on all pipes; one more per worker sends
it shards, so a worker that does not read delays no other. Workers that are ready get shards
round-robin, then on demand. Each worker holds two (besides those being written), or more small
ones, so that no device waits for the parent.

Workers may start before there are shards; their events wait in the pipes. A worker that ends or
falls silent is replaced, and its shard continues: see ``recovery``.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, TypeAlias

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.errors import UnavailableError, VirnucproError
from virnucpro.core.events import BatchDone, ErrorText, ShardDone, WorkerEvent, WorkerReady
from virnucpro.core.logging import LOGGER, format_count, log_to_handler
from virnucpro.core.option_text import join_texts, with_options
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Resources, WorkerConfig
from virnucpro.engine.retry_policy import MAX_IN_FLIGHT, Attempt, WorkerFailure, WorkerState

if TYPE_CHECKING:
    from virnucpro.engine.worker import Worker

# ..., name, device
_WorkerFactory: TypeAlias = "Callable[[WorkerConfig, Resources, str, str], Worker]"
_MAX_NAMED_SHARDS = 8  # most shards named in a message
_TICK_SECONDS = 1.0  # between two checks for silent workers
_START_SECONDS = 900.0  # for a worker to import, load the model and report
GRACE_SECONDS = 5.0  # for idle workers to end by themselves
_MAX_STARTUP_WARNINGS = 100  # kept from the start of a worker
_KILL_EXIT_CODES = {
    -signal.SIGKILL,
    -signal.SIGTERM,
    -signal.SIGQUIT,
    -signal.SIGXCPU,
}  # exit codes of an outside kill
# glibc mallopt option -> size above which freed memory goes back to the system
_MALLOC_OPTIONS = {
    -3: 32 << 20,
    -1: 256 << 20,
}  # M_MMAP_THRESHOLD (at most 32 MiB), M_TRIM_THRESHOLD


def load_worker(job: WorkerConfig, resources: Resources, name: str, device: str) -> Worker:
    """Load the worker of a device. Only the process that computes imports torch, here."""
    from virnucpro.engine.worker import Worker

    return Worker(job, resources, name, device)


class InlineExecutor(Executor):
    """One device in this process: for users of Python, tests and debuggers."""

    def __init__(self, device: str = "cpu", worker: _WorkerFactory = load_worker) -> None:
        self.device, self.worker = device, worker

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard, as ``Executor.run`` says."""
        import torch

        n_threads = torch.get_num_threads()
        try:
            worker = self.worker(job, resources, self.device, self.device)
            with worker.writer:
                yield WorkerReady(worker.name, worker.description, worker.memory())
                for shard in shards:
                    yield from worker.run(Attempt(shard))
                yield from worker.finish()
        finally:
            torch.set_num_threads(n_threads)  # a worker takes one on a CPU


class ProcessExecutor(Executor):
    """One worker process on each device of this machine; with no device, any shard is an error."""

    def __init__(
        self,
        devices: Sequence[str],
        worker: _WorkerFactory = load_worker,
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self.devices, self.worker, self.start_seconds = tuple(devices), worker, start_seconds
        self.pending: deque[Attempt] = deque()
        self.workers: list[WorkerHandle] = []
        self.last_loss: WorkerFailure | None = None

    def start(self, job: WorkerConfig, resources: Resources, n_workers: int) -> None:
        """Start workers, as ``Executor.start`` says."""
        self.start_missing_workers(job, resources, n_workers)

    def start_missing_workers(
        self, job: WorkerConfig, resources: Resources, n_workers: int
    ) -> None:
        """Start workers until there are so many, or one per device."""
        named = list(zip(_worker_names(self.devices), self.devices, strict=True))
        for name, device in named[len(self.workers) : n_workers]:
            self.start_worker(WorkerState(name), device, job, resources)

    def close(self) -> None:
        self.shrink_to(0)

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard, as ``Executor.run`` says.

        Raises:
            UnavailableError: no worker is left; or no device, and the message names the shards.
            VirnucproError: the last worker ended by this error.
        """
        if shards and not self.devices:
            raise _no_device_error(shards, job)
        given = (job, resources)
        assert all((peer.job, peer.resources) == given for peer in self.workers), (
            "started for others"
        )
        try:
            self.pending = deque(map(Attempt, shards))
            self.start_missing_workers(job, resources, len(shards))
            self.shrink_to(len(shards))
            yield from self.events()
        finally:
            self.close()

    def start_worker(
        self, work: WorkerState, device: str, job: WorkerConfig, resources: Resources
    ) -> None:
        """Start a worker."""
        with defer_interrupts():
            child = start_process(worker_main, self.worker, job, resources, work.worker, device)
            deadline = time.monotonic() + self.start_seconds
            self.workers.append(WorkerHandle(work, device, job, resources, child, deadline))

    def shrink_to(self, n_workers: int) -> None:
        """End the workers beyond this number."""
        surplus = self.workers[n_workers:]
        with ExitStack() as ends:  # end every worker even if ending one raises
            for peer in surplus:
                ends.callback(peer.kill)
            del self.workers[n_workers:]
            for peer in surplus:
                peer.request_stop()
            deadline = time.monotonic() + GRACE_SECONDS
            for peer in surplus:
                peer.child.wait(max(0.0, deadline - time.monotonic()))

    def events(self) -> Iterator[WorkerEvent]:
        for peer in self.workers:  # silence counts from now on
            peer.deadline = time.monotonic() + self.start_seconds
        while self.pending or any(peer.state.attempts for peer in self.workers):
            if not self.workers:
                raise self.no_worker_left()
            self.dispatch()
            for peer in self.wait_for_workers():
                loss = yield from peer.receive_events()
                if loss is not None:
                    yield from self.handle_failure(peer, loss)

    def dispatch(self) -> None:
        """Deal round-robin: each ready worker gets a first shard before any gets a second.

        A second shard is dealt only while enough are left for workers that are still starting. Idle
        workers get shards without waiting for them.
        """
        n_starting = sum(not peer.state.is_ready for peer in self.workers)
        for n_attempts in range(1, MAX_IN_FLIGHT + 1):
            n_kept = n_starting if n_attempts > 1 else 0
            for peer in self.workers:
                if len(self.pending) > n_kept and peer.state.has_room(n_attempts):
                    peer.assign(self.pending.popleft())

    def wait_for_workers(self) -> list[WorkerHandle]:
        """Wait until a worker has reported, died, or been silent for too long.

        Time in which this process was suspended (Ctrl-Z, a scheduler) does not count: the workers
        were suspended too.
        """
        children = [peer.child for peer in self.workers]
        while True:
            before = time.monotonic()
            ready = ChildProcess.wait_any(children, _TICK_SECONDS)
            now = time.monotonic()
            if now - before > 2 * _TICK_SECONDS:
                for peer in self.workers:
                    peer.deadline += now - before
            peers = [peer for peer in self.workers if peer.child in ready or peer.deadline < now]
            if peers:
                return peers

    def no_worker_left(self) -> VirnucproError:
        """The error of the last worker, if it is one of ours; else one that gives its reason."""
        loss = self.last_loss
        assert loss is not None, "workers end by losses alone"
        kept = with_options("finished shards are kept: fix the cause, then run again with {resume}")
        if loss.error is not None:
            hint = join_texts("; ", filter(None, [loss.error.hint, kept]))
            return loss.error.kind(loss.error.message, hint)
        n_shards = format_count(len(self.pending), "shard")
        return UnavailableError(
            f"no worker is left for {n_shards}; the last one: {loss.reason}", hint=kept
        )

    def handle_failure(self, peer: WorkerHandle, loss: WorkerFailure) -> Iterator[WorkerEvent]:
        """Take back the worker's attempts, and replace it."""
        peer.kill()
        aftermath = peer.state.handle_failure(loss)
        yield aftermath.failure_event
        self.last_loss = loss
        self.pending.extendleft(reversed(aftermath.retry_first))
        self.pending.extend(aftermath.retry_last)
        if aftermath.failed_shard is not None:
            yield aftermath.failed_shard
        self.workers.remove(peer)
        if self.pending and not aftermath.failure_event.is_final:
            self.start_worker(peer.state.for_replacement(), peer.device, peer.job, peer.resources)


def _no_device_error(shards: Sequence[Shard], job: WorkerConfig) -> UnavailableError:
    names = ", ".join(shard.name for shard in shards[:_MAX_NAMED_SHARDS])
    more = (
        f" and {len(shards) - _MAX_NAMED_SHARDS:,} more" if len(shards) > _MAX_NAMED_SHARDS else ""
    )
    return UnavailableError(
        f"vectors of {format_count(len(shards), 'shard')} are missing: {names}{more}",
        hint=with_options(
            "run `virnucpro work {root}` on a machine with devices, then this command "
            "again; or leave out --no-embed to embed them here",
            root=job.root,
        ),
    )


def _worker_names(devices: Sequence[str]) -> list[str]:
    """Names of workers: their device, with a number if several share it."""
    return [
        f"{device}#{devices[:place].count(device)}" if devices.count(device) > 1 else device
        for place, device in enumerate(devices)
    ]


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """The parent's view of one worker process."""

    state: WorkerState
    device: str
    job: WorkerConfig
    resources: Resources
    child: ChildProcess
    deadline: float  # monotonic clock; a worker still silent then counts as hung
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    error: ErrorText | None = None  # of ours, that ends the worker

    def assign(self, attempt: Attempt) -> None:
        LOGGER.info("shard %s given to %s", attempt.shard.name, self.state.worker)
        if not self.state.attempts:
            self.deadline = time.monotonic() + self.resources.silence_seconds
        self.state.attempts.append(attempt)
        self.send(attempt)

    def send(self, attempt: Attempt | None) -> None:
        """Send an attempt, or None to end the worker; its pipe shows if it has died."""
        self.sender.submit(self.child.pipe.send, attempt)

    def receive_events(self) -> Generator[WorkerEvent, None, WorkerFailure | None]:
        """Yield the events of the worker; return its loss, if any."""
        try:
            while self.child.pipe.poll():
                event: WorkerEvent | ErrorText | ChildError = self.child.pipe.recv()
                if isinstance(event, ErrorText):  # the reason for what follows
                    self.error = event
                    continue
                if isinstance(event, ChildError):
                    return WorkerFailure("raised", event.reason, event.traceback, self.error)
                self.on_event(event)
                yield event
        except (EOFError, OSError):
            reason = f"the worker died: {self.child.exit_reason(GRACE_SECONDS)}"
            is_killed = self.child.process.returncode in _KILL_EXIT_CODES
            return WorkerFailure("killed" if is_killed else "crashed", reason)
        if self.deadline < time.monotonic():
            return WorkerFailure("silent", "the worker fell silent and was stopped")
        return None

    def on_event(self, event: WorkerEvent) -> None:
        self.state.on_event(event)
        self.deadline = time.monotonic() + self.state.timeout(self.resources.silence_seconds)

    def request_stop(self) -> None:
        if self.state.is_ready and not self.state.attempts and self.child.is_alive:
            self.send(None)
        else:
            self.child.kill()  # safe: files appear only when they are whole

    def kill(self) -> None:
        self.child.kill()
        if self.child.wait(GRACE_SECONDS):
            self.sender.shutdown(cancel_futures=True)
            self.child.close()
            return
        self.sender.shutdown(wait=False, cancel_futures=True)
        LOGGER.warning(
            "%s (process %d) does not end, even after SIGKILL: check its device and its disk",
            self.state.worker,
            self.child.pid,
        )


def worker_main(
    pipe: Pipe,
    worker_on: _WorkerFactory,
    job: WorkerConfig,
    resources: Resources,
    name: str,
    device: str,
) -> None:
    """The worker process."""
    if device == "cpu":
        _keep_freed_memory()
    heard = BufferingHandler(_MAX_STARTUP_WARNINGS)
    heard.setLevel(logging.WARNING)
    with log_to_handler(heard):
        try:
            worker = worker_on(job, resources, name, device)
        except VirnucproError as error:
            pipe.send(ErrorText.from_error(error))
            raise
        warnings = tuple(record.getMessage() for record in heard.buffer)
    pipe.send(WorkerReady(name, worker.description, worker.memory(), warnings))
    while True:
        if not pipe.poll():
            _finish_until_next_shard(worker.finish(), pipe)
        attempt: Attempt | None = pipe.recv()
        if attempt is None:
            return
        for event in worker.run(attempt):
            pipe.send(event)


def _finish_until_next_shard(events: Iterator[WorkerEvent], pipe: Pipe) -> None:
    """Send the events of the last batches and files until the parent sends another shard."""
    for event in events:
        pipe.send(event)
        if isinstance(event, (BatchDone, ShardDone)) and pipe.poll():
            return


def _keep_freed_memory() -> None:
    """Make glibc reuse memory that a layer frees: fetching new pages takes up to a third longer.

    A batch frees about 20 MB per layer. Other C libraries are left as they are.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option, n_bytes in _MALLOC_OPTIONS.items():
            library.mallopt(option, n_bytes)
