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

from virnucpro.core.child_process import Child, Pipe, Raised, interrupts_held, start
from virnucpro.core.errors import UnavailableError, VirnucproError
from virnucpro.core.events import BatchDone, ErrorText, Event, ShardDone, WorkerReady
from virnucpro.core.logging import LOGGER, counted, logging_to
from virnucpro.core.option_text import join_texts, with_options
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Job, Resources
from virnucpro.engine.retry_policy import MAX_IN_FLIGHT, Attempt, Loss, Workload

if TYPE_CHECKING:
    from virnucpro.engine.worker import Worker

_WorkerOn: TypeAlias = "Callable[[Job, Resources, str, str], Worker]"  # ..., name, device
_NAMED = 8  # most shards named in a message
_TICK_SECONDS = 1.0  # between two checks for silent workers
_START_SECONDS = 900.0  # for a worker to import, load the model and report
GRACE_SECONDS = 5.0  # for idle workers to end by themselves
_MOST_WARNINGS = 100  # kept from the start of a worker
_KILLED = {
    -signal.SIGKILL,
    -signal.SIGTERM,
    -signal.SIGQUIT,
    -signal.SIGXCPU,
}  # exit codes of an outside kill
# glibc mallopt option -> size above which freed memory goes back to the system
_KEEPING = {-3: 32 << 20, -1: 256 << 20}  # M_MMAP_THRESHOLD (at most 32 MiB), M_TRIM_THRESHOLD


def load_worker(job: Job, resources: Resources, name: str, device: str) -> Worker:
    """Load the worker of a device. Only the process that computes imports torch, here."""
    from virnucpro.engine.worker import Worker

    return Worker(job, resources, name, device)


class InlineExecutor(Executor):
    """One device in this process: for users of Python, tests and debuggers."""

    def __init__(self, device: str = "cpu", worker: _WorkerOn = load_worker) -> None:
        self.device, self.worker = device, worker

    def run(
        self, shards: Sequence[Shard], job: Job, resources: Resources
    ) -> Generator[Event, None, None]:
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
        worker: _WorkerOn = load_worker,
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self.devices, self.worker, self.start_seconds = tuple(devices), worker, start_seconds
        self.waiting: deque[Attempt] = deque()
        self.peers: list[_Peer] = []
        self.last_loss: Loss | None = None

    def start(self, job: Job, resources: Resources, n_workers: int) -> None:
        """Start workers, as ``Executor.start`` says."""
        self.add_missing(job, resources, n_workers)

    def add_missing(self, job: Job, resources: Resources, n_workers: int) -> None:
        """Start workers until there are so many, or one per device."""
        named = list(zip(_names(self.devices), self.devices, strict=True))
        for name, device in named[len(self.peers) : n_workers]:
            self.add(Workload(name), device, job, resources)

    def close(self) -> None:
        self.keep(0)

    def run(
        self, shards: Sequence[Shard], job: Job, resources: Resources
    ) -> Generator[Event, None, None]:
        """Run every shard, as ``Executor.run`` says.

        Raises:
            UnavailableError: no worker is left; or no device, and the message names the shards.
            VirnucproError: the last worker ended by this error.
        """
        if shards and not self.devices:
            raise _no_device(shards, job)
        given = (job, resources)
        assert all((peer.job, peer.resources) == given for peer in self.peers), "started for others"
        try:
            self.waiting = deque(map(Attempt, shards))
            self.add_missing(job, resources, len(shards))
            self.keep(len(shards))
            yield from self.events()
        finally:
            self.close()

    def add(self, work: Workload, device: str, job: Job, resources: Resources) -> None:
        """Start a worker."""
        with interrupts_held():
            child = start(_serve, self.worker, job, resources, work.worker, device)
            deadline = time.monotonic() + self.start_seconds
            self.peers.append(_Peer(work, device, job, resources, child, deadline))

    def keep(self, n_workers: int) -> None:
        """End the workers beyond this number."""
        surplus = self.peers[n_workers:]
        with ExitStack() as ends:  # end every worker even if ending one raises
            for peer in surplus:
                ends.callback(peer.kill)
            del self.peers[n_workers:]
            for peer in surplus:
                peer.tell_to_end()
            deadline = time.monotonic() + GRACE_SECONDS
            for peer in surplus:
                peer.child.wait(max(0.0, deadline - time.monotonic()))

    def events(self) -> Iterator[Event]:
        for peer in self.peers:  # silence counts from now on
            peer.deadline = time.monotonic() + self.start_seconds
        while self.waiting or any(peer.work.attempts for peer in self.peers):
            if not self.peers:
                raise self.no_worker_left()
            self.deal()
            for peer in self.peers_with_news():
                loss = yield from peer.receive()
                if loss is not None:
                    yield from self.after_loss(peer, loss)

    def deal(self) -> None:
        """Deal round-robin: each ready worker gets a first shard before any gets a second.

        A second shard is dealt only while enough are left for workers that are still starting. Idle
        workers get shards without waiting for them.
        """
        n_starting = sum(not peer.work.is_ready for peer in self.peers)
        for n_attempts in range(1, MAX_IN_FLIGHT + 1):
            n_kept = n_starting if n_attempts > 1 else 0
            for peer in self.peers:
                if len(self.waiting) > n_kept and peer.work.wants(n_attempts):
                    peer.give(self.waiting.popleft())

    def peers_with_news(self) -> list[_Peer]:
        """Wait until a worker has reported, died, or been silent for too long.

        Time in which this process was suspended (Ctrl-Z, a scheduler) does not count: the workers
        were suspended too.
        """
        children = [peer.child for peer in self.peers]
        while True:
            before = time.monotonic()
            ready = Child.with_news(children, _TICK_SECONDS)
            now = time.monotonic()
            if now - before > 2 * _TICK_SECONDS:
                for peer in self.peers:
                    peer.deadline += now - before
            peers = [peer for peer in self.peers if peer.child in ready or peer.deadline < now]
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
        n_shards = counted(len(self.waiting), "shard")
        return UnavailableError(
            f"no worker is left for {n_shards}; the last one: {loss.reason}", hint=kept
        )

    def after_loss(self, peer: _Peer, loss: Loss) -> Iterator[Event]:
        """Take back the worker's attempts, and replace it."""
        peer.kill()
        aftermath = peer.work.end(loss)
        yield aftermath.lost
        self.last_loss = loss
        self.waiting.extendleft(reversed(aftermath.first))
        self.waiting.extend(aftermath.last)
        if aftermath.failed is not None:
            yield aftermath.failed
        self.peers.remove(peer)
        if self.waiting and not aftermath.lost.is_final:
            self.add(peer.work.successor(), peer.device, peer.job, peer.resources)


def _no_device(shards: Sequence[Shard], job: Job) -> UnavailableError:
    names = ", ".join(shard.name for shard in shards[:_NAMED])
    more = f" and {len(shards) - _NAMED:,} more" if len(shards) > _NAMED else ""
    return UnavailableError(
        f"vectors of {counted(len(shards), 'shard')} are missing: {names}{more}",
        hint=with_options(
            "run `virnucpro work {root}` on a machine with devices, then this command "
            "again; or leave out --no-embed to embed them here",
            root=job.root,
        ),
    )


def _names(devices: Sequence[str]) -> list[str]:
    """Names of workers: their device, with a number if several share it."""
    return [
        f"{device}#{devices[:place].count(device)}" if devices.count(device) > 1 else device
        for place, device in enumerate(devices)
    ]


@dataclass(slots=True, eq=False)
class _Peer:
    """The parent's view of one worker process."""

    work: Workload
    device: str
    job: Job
    resources: Resources
    child: Child
    deadline: float  # monotonic clock; a worker still silent then counts as hung
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    error: ErrorText | None = None  # of ours, that ends the worker

    def give(self, attempt: Attempt) -> None:
        LOGGER.info("shard %s given to %s", attempt.shard.name, self.work.worker)
        if not self.work.attempts:
            self.deadline = time.monotonic() + self.resources.silence_seconds
        self.work.attempts.append(attempt)
        self.send(attempt)

    def send(self, attempt: Attempt | None) -> None:
        """Send an attempt, or None to end the worker; its pipe shows if it has died."""
        self.sender.submit(self.child.pipe.send, attempt)

    def receive(self) -> Generator[Event, None, Loss | None]:
        """Yield the events of the worker; return its loss, if any."""
        try:
            while self.child.pipe.poll():
                event: Event | ErrorText | Raised = self.child.pipe.recv()
                if isinstance(event, ErrorText):  # the reason for what follows
                    self.error = event
                    continue
                if isinstance(event, Raised):
                    return Loss("raised", event.reason, event.traceback, self.error)
                self.take(event)
                yield event
        except (EOFError, OSError):
            reason = f"the worker died: {self.child.cause_of_end(GRACE_SECONDS)}"
            is_killed = self.child.process.returncode in _KILLED
            return Loss("killed" if is_killed else "crashed", reason)
        if self.deadline < time.monotonic():
            return Loss("silent", "the worker fell silent and was stopped")
        return None

    def take(self, event: Event) -> None:
        self.work.take(event)
        self.deadline = time.monotonic() + self.work.patience(self.resources.silence_seconds)

    def tell_to_end(self) -> None:
        if self.work.is_ready and not self.work.attempts and self.child.is_alive:
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
            self.work.worker,
            self.child.pid,
        )


def _serve(
    pipe: Pipe, worker_on: _WorkerOn, job: Job, resources: Resources, name: str, device: str
) -> None:
    """The worker process."""
    if device == "cpu":
        _keep_freed_memory()
    heard = BufferingHandler(_MOST_WARNINGS)
    heard.setLevel(logging.WARNING)
    with logging_to(heard):
        try:
            worker = worker_on(job, resources, name, device)
        except VirnucproError as error:
            pipe.send(ErrorText.of(error))
            raise
        warnings = tuple(record.getMessage() for record in heard.buffer)
    pipe.send(WorkerReady(name, worker.description, worker.memory(), warnings))
    while True:
        if not pipe.poll():
            _send_until_news(worker.finish(), pipe)
        attempt: Attempt | None = pipe.recv()
        if attempt is None:
            return
        for event in worker.run(attempt):
            pipe.send(event)


def _send_until_news(events: Iterator[Event], pipe: Pipe) -> None:
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
        for option, n_bytes in _KEEPING.items():
            library.mallopt(option, n_bytes)
