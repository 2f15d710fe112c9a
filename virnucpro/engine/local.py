"""One process per device, and a pipe to each.

    parent  --Task-->   worker     a pipe of the worker's own,
    parent  <--Event--  worker     for both

Nothing is shared: a process killed inside ``Queue.get`` keeps the queue's lock, and the others
would wait for ever. One thread of the parent waits on all pipes at once; another for each worker
hands it tasks, so that one that does not read keeps nobody waiting. Shards are dealt round-robin,
two in flight for each worker so that no device waits for the parent (beside one that is being
written), and then on demand.

A worker that ends or falls silent is replaced, and its shard goes on. A worker that was killed may
have been killed by chance: its shard is tried again as it was. If that one is killed too, or if a
worker crashed, the ORFs of the batch in flight are suspects and run one by one. A suspect that
crashes a worker, or with which two workers are killed, is condemned, and the rest of its shard is
delivered. So it takes two crashes, or four kills, to give a sequence up.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from virnucpro.engine.events import (
    BatchDone,
    BatchStarted,
    Event,
    ShardDone,
    ShardFailed,
    WorkerLost,
    WorkerReady,
)
from virnucpro.engine.worker import Job, Task, Worker
from virnucpro.errors import UnavailableError
from virnucpro.log import LOGGER
from virnucpro.processes import Child, Pipe, Raised, interrupts_held, start, with_news
from virnucpro.records import Shard

IN_FLIGHT = 2  # shards per worker, beside one that is being written
TICK_SECONDS = 1.0  # between two looks at those that say nothing
START_SECONDS = 900.0  # to import, load the model and say so
MAX_IDLE_LOSSES = 6  # workers a device may lose in a row without one batch done
MAX_LOSSES = 100  # the same, with those that one ORF alone is to blame for
MAX_BLIND_LOSSES = 4  # workers a shard may kill while no batch is in flight
GRACE_SECONDS = 5.0  # for idle workers to end by themselves
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGQUIT}  # from outside


class ProcessExecutor:
    """One worker process on each device of this machine."""

    def __init__(
        self,
        devices: Sequence[str],
        worker: type[Worker] = Worker,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.devices, self.worker, self.start_seconds = tuple(devices), worker, start_seconds

    def run(self, shards: Sequence[Shard], job: Job) -> Generator[Event, None, None]:
        """As ``Executor.run``."""
        run = _Run(job, deque(Task(shard) for shard in shards))
        try:
            devices = self.devices[: len(shards)]
            with interrupts_held():
                for name, device in zip(_names(devices), devices, strict=True):
                    run.peers.append(_Peer.start(name, device, job, self))
            yield from run.events()
        finally:
            with ExitStack() as ends:  # none is left, whatever may happen while they end
                for peer in run.peers:
                    ends.callback(peer.kill)
                for peer in run.peers:
                    peer.tell_to_end()
                deadline = time.monotonic() + GRACE_SECONDS
                for peer in run.peers:
                    peer.child.wait(max(0.0, deadline - time.monotonic()))


def _names(devices: Sequence[str]) -> list[str]:
    """Workers are called after their device, numbered where several share one."""
    shared = Counter(devices)
    seen: Counter[str] = Counter()
    names = []
    for device in devices:
        names.append(f"{device}#{seen[device]}" if shared[device] > 1 else device)
        seen[device] += 1
    return names


@dataclass(slots=True, eq=False)
class _Run:
    """The parent's side of one ``ProcessExecutor.run``."""

    job: Job
    waiting: deque[Task]
    peers: list[_Peer] = field(default_factory=list)
    alone: Counter[tuple[int, int]] = field(default_factory=Counter)  # (shard, row) -> losses
    blind: Counter[int] = field(default_factory=Counter)  # shard -> losses without a batch
    last_reason: str = ""

    def events(self) -> Iterator[Event]:
        while self.waiting or any(peer.tasks for peer in self.peers):
            if not self.peers:
                raise UnavailableError(
                    f"no worker is left for {len(self.waiting)} shards; the last one: "
                    f"{self.last_reason}",
                    hint="finished shards are kept: run again with --resume when that is fixed",
                )
            self.deal()
            for peer in self.peers_with_news():
                for event in peer.receive():
                    yield event
                    if isinstance(event, WorkerLost):
                        yield from self.after_loss(peer, event)

    def deal(self) -> None:
        """Round-robin: everyone gets a first shard before anyone gets a second."""
        for depth in range(IN_FLIGHT):
            for peer in self.peers:
                if self.waiting and peer.n_open <= depth:
                    peer.give(self.waiting.popleft())
        starting = [peer for peer in self.peers if not peer.ready and peer.tasks]
        for peer in self.peers:
            if peer.ready and not peer.tasks and starting:  # somebody takes long to start
                peer.give(starting[0].tasks.pop())
                starting = [other for other in starting if other.tasks]

    def peers_with_news(self) -> list[_Peer]:
        """Wait until a worker has spoken, died, or been silent for too long.

        Time in which this process did not run (Ctrl-Z, a scheduler that suspends) is no silence:
        the workers did not run then either.
        """
        children = [peer.child for peer in self.peers]
        while True:
            asked = time.monotonic()
            ready = with_news(children, TICK_SECONDS)
            now = time.monotonic()
            if now - asked > 2 * TICK_SECONDS:
                for peer in self.peers:
                    peer.deadline += now - asked
            found = [peer for peer in self.peers if peer.child in ready or peer.deadline < now]
            if found:
                return found

    def after_loss(self, peer: _Peer, lost: WorkerLost) -> Iterator[Event]:
        """Give back what the worker held, and replace it."""
        self.last_reason = lost.reason
        doing = peer.doing
        n_written = peer.tasks.index(doing) if doing else 0
        for task in peer.tasks[:n_written]:  # were being written: that may be what killed it
            self.waiting.append(replace(task, n_losses=task.n_losses + 1))
        for task in reversed(peer.tasks[n_written:]):
            if task is not doing:
                self.waiting.appendleft(task)
        if doing is not None:
            again = self.learn(doing, peer, lost)
            if isinstance(again, Task):
                self.waiting.appendleft(again)
            else:
                yield again
        self.peers.remove(peer)
        if self.waiting and not lost.is_final:
            with interrupts_held():
                self.peers.append(peer.restart())

    def learn(self, task: Task, peer: _Peer, lost: WorkerLost) -> Task | ShardFailed:
        """What the next attempt at a shard must know of this loss."""
        shard, batch = task.shard, peer.rows
        again = replace(task, n_losses=task.n_losses + 1)
        if not batch:
            self.blind[shard.index] += 1
            if self.blind[shard.index] < MAX_BLIND_LOSSES:
                return again
            return ShardFailed(lost.worker, shard, lost.reason, lost.traceback)
        if again.n_losses == 1 and not lost.is_crash:
            return again
        if not batch <= task.suspects:
            return replace(again, suspects=task.suspects | batch)
        (row,) = batch
        self.alone[shard.index, row] += 1
        if lost.is_crash or self.alone[shard.index, row] == 2:
            return replace(again, condemned={**task.condemned, row: lost.reason})
        return again


@dataclass(slots=True, eq=False)
class _Peer:
    """The parent's view of one worker process."""

    name: str
    device: str
    job: Job
    executor: ProcessExecutor
    child: Child
    deadline: float  # by the monotonic clock: silent for longer means hung
    tasks: list[Task] = field(default_factory=list)  # given, and not ended yet, in order
    shard: Shard | None = None  # of the batches in flight
    rows: set[int] = field(default_factory=set)  # of them
    allowed: float = 0.0  # seconds of silence, while there are some
    ready: bool = False
    n_losses: int = 0  # in a row, without one batch done
    n_idle_losses: int = 0  # those of them that no single ORF is to blame for
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    @classmethod
    def start(cls, name: str, device: str, job: Job, executor: ProcessExecutor) -> _Peer:
        """To be called with interrupts held."""
        child = start(_serve, executor.worker, job, name, device)
        return cls(name, device, job, executor, child, time.monotonic() + executor.start_seconds)

    def restart(self) -> _Peer:
        peer = _Peer.start(self.name, self.device, self.job, self.executor)
        peer.n_losses, peer.n_idle_losses = self.n_losses, self.n_idle_losses
        return peer

    def give(self, task: Task) -> None:
        LOGGER.info("shard %s given to %s", task.shard.name, self.name)
        if self.ready and not self.tasks:
            self.deadline = time.monotonic() + self.job.silence_seconds
        self.tasks.append(task)
        if self.ready:
            self.send(task)

    def send(self, task: Task | None) -> None:
        """If it has died, that is heard at the pipe."""
        self.sender.submit(self.child.pipe.send, task)

    def receive(self) -> Iterator[Event]:
        """All that the worker has said; its death and its silence are events like the others."""
        try:
            while self.child.pipe.poll():
                event: Event | Raised = self.child.pipe.recv()
                if isinstance(event, Raised):
                    reason, story = event.reason, event.traceback
                    lost = WorkerLost(
                        self.name, reason, None, story, is_crash=True, is_final=not self.ready
                    )
                    yield self.with_fate(lost)
                    return
                self.take(event)
                yield event
        except (EOFError, OSError):
            reason = f"the worker died: {self.child.cause_of_end(GRACE_SECONDS)}"
            is_crash = self.child.process.returncode not in _KILLED
            yield self.with_fate(WorkerLost(self.name, reason, is_crash=is_crash))
            return
        if self.deadline < time.monotonic():
            reason = "the worker fell silent and was stopped"
            is_final = not self.ready and self.n_losses > 0  # it would only take that long again
            yield self.with_fate(WorkerLost(self.name, reason, is_final=is_final))

    def take(self, event: Event) -> None:
        match event:
            case WorkerReady():
                self.ready = True
                for task in self.tasks:
                    self.send(task)
            case BatchStarted(shard=shard, rows=rows, allowed_seconds=allowed):
                self.shard, self.allowed = shard, allowed
                self.rows.update(rows)
            case BatchDone(rows=rows):
                self.rows.difference_update(rows)
                self.n_losses = self.n_idle_losses = 0
            case ShardDone(shard=shard) | ShardFailed(shard=shard):
                self.tasks = [task for task in self.tasks if task.shard != shard]
                if shard == self.shard:
                    self.rows.clear()
        patience = self.allowed if self.rows else self.job.silence_seconds
        self.deadline = time.monotonic() + patience
        if not self.tasks:
            self.deadline = float("inf")  # nothing to do is no reason to speak

    @property
    def n_open(self) -> int:
        """How many shards are embedded or wait: the others are being written."""
        shards = [task.shard for task in self.tasks]
        return len(shards) - (shards.index(self.shard) if self.shard in shards else 0)

    @property
    def doing(self) -> Task | None:
        """The task to blame if the worker dies now: that of the batches in flight, if any."""
        if not self.ready:
            return None  # it never got to one
        if self.rows:
            return next(task for task in self.tasks if task.shard == self.shard)
        return self.tasks[0] if self.tasks else None

    def with_fate(self, event: WorkerLost) -> WorkerLost:
        shard = self.doing.shard if self.doing else None
        self.n_losses += 1
        self.n_idle_losses += len(self.rows) != 1
        self.kill()
        has_lost_too_many = self.n_losses >= MAX_LOSSES or self.n_idle_losses >= MAX_IDLE_LOSSES
        is_final = event.is_final or has_lost_too_many
        return replace(event, shard=shard, is_final=is_final)

    def tell_to_end(self) -> None:
        if self.ready and not self.tasks and self.child.is_alive:
            self.send(None)
        else:
            self.child.kill()  # nothing is lost: files appear only when they are whole

    def kill(self) -> None:
        self.child.kill()
        if self.child.wait(GRACE_SECONDS):
            self.sender.shutdown(cancel_futures=True)
            self.child.close()
            return
        self.sender.shutdown(wait=False, cancel_futures=True)
        LOGGER.warning(
            "%s (process %d) does not end, not even when killed: is its device, or its disk, out "
            "of order?",
            self.name,
            self.child.pid,
        )


def _serve(pipe: Pipe, worker_class: type[Worker], job: Job, name: str, device: str) -> None:
    """The worker process."""
    worker = worker_class(job, name, device)
    pipe.send(WorkerReady(name, worker.description, worker.memory()))
    while True:
        if not pipe.poll():  # time to wait for the last file as well
            for event in worker.finish():
                pipe.send(event)
        task: Task | None = pipe.recv()
        if task is None:
            return
        for event in worker.run(task):
            pipe.send(event)
