"""One spawned process per device, a queue down and a pipe up for each.

    parent  --Task-->   worker     a multiprocessing queue of the worker's own
    parent  <--Event--  worker     a pipe of the worker's own

No queue is shared: a process killed inside ``Queue.get`` keeps the queue's lock, and the others
would wait for ever. The parent is a single thread that waits on all pipes and all process
sentinels at once. Shards are dealt round-robin, two in flight for each worker so that no device
waits for the parent (beside one that is being written), and then on demand.

A worker that ends or falls silent is replaced, and its shard goes on. A worker that was killed may
have been killed by chance: its shard is tried again as it was. If that one is killed too, or if a
worker crashed, the ORFs of the batch in flight are suspects and run one by one. A suspect that
crashes a worker, or with which two workers are killed, is condemned, and the rest of its shard is
delivered. So it takes two crashes, or four kills, to give a sequence up.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Final, TypeAlias

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
from virnucpro.log import LOGGER, printable
from virnucpro.records import Shard

TaskQueue: TypeAlias = "multiprocessing.Queue[Task | None]"

START_METHOD: Final = "spawn"  # CUDA does not survive a fork
IN_FLIGHT = 2  # shards per worker, beside one that is being written
TICK_SECONDS = 1.0  # between two looks at those that say nothing
START_SECONDS = 900.0  # to import, load the model and say so
MAX_IDLE_LOSSES = 6  # workers a device may lose in a row without one batch done
MAX_LOSSES = 100  # the same, with those that one ORF alone is to blame for
MAX_BLIND_LOSSES = 4  # workers a shard may kill while no batch is in flight
GRACE_SECONDS = 5.0  # for idle workers to end by themselves
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGQUIT}  # from outside
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_SET_DEATH_SIGNAL = 1  # of prctl(2)


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
                    peer.process.join(max(0.0, deadline - time.monotonic()))


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
                    hint="finished shards are kept: run again with --resume when that is mended",
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
        handles = [peer.pipe for peer in self.peers] + [p.process.sentinel for p in self.peers]
        while True:
            asked = time.monotonic()
            ready = wait(handles, timeout=TICK_SECONDS)
            now = time.monotonic()
            if now - asked > 2 * TICK_SECONDS:
                for peer in self.peers:
                    peer.deadline += now - asked
            found = [
                peer
                for peer in self.peers
                if peer.pipe in ready or peer.process.sentinel in ready or peer.deadline < now
            ]
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
    process: BaseProcess
    queue: TaskQueue
    pipe: Connection
    deadline: float  # by the monotonic clock: silent for longer means hung
    tasks: list[Task] = field(default_factory=list)  # given, and not ended yet, in order
    shard: Shard | None = None  # of the batches in flight
    rows: set[int] = field(default_factory=set)  # of them
    allowed: float = 0.0  # seconds of silence, while there are some
    ready: bool = False
    n_losses: int = 0  # in a row, without one batch done
    n_idle_losses: int = 0  # those of them that no single ORF is to blame for

    @classmethod
    def start(cls, name: str, device: str, job: Job, executor: ProcessExecutor) -> _Peer:
        """To be called with interrupts held: the child inherits that, and Ctrl-C is not for it."""
        context = multiprocessing.get_context(START_METHOD)
        queue = context.Queue()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_main,
            args=(executor.worker, job, name, device, queue, theirs),
            name=name,
            daemon=True,
        )
        process.start()
        theirs.close()
        deadline = time.monotonic() + executor.start_seconds
        return cls(name, device, job, executor, process, queue, ours, deadline)

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
            self.queue.put(task)

    def receive(self) -> Iterator[Event]:
        """All that the worker has said; its death and its silence are events like the others."""
        try:
            while self.pipe.poll():
                event: Event = self.pipe.recv()
                self.take(event)
                yield self.with_fate(event) if isinstance(event, WorkerLost) else event
                if isinstance(event, WorkerLost):
                    return
        except (EOFError, OSError):
            self.process.join(GRACE_SECONDS)
            code = self.process.exitcode
            reason = f"the worker died: {cause_of_end(code)}"
            yield self.with_fate(WorkerLost(self.name, reason, is_crash=code not in _KILLED))
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
                    self.queue.put(task)
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
        if not self.tasks and not isinstance(event, WorkerLost):
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
        if self.ready and not self.tasks and self.process.is_alive():
            self.queue.put(None)
        else:
            self.process.kill()  # nothing is lost: files appear only when they are whole

    def kill(self) -> None:
        self.process.kill()
        self.process.join(GRACE_SECONDS)
        if self.process.is_alive():
            LOGGER.warning(
                "%s (process %d) does not end, not even when killed: is its device, or its disk, "
                "out of order?",
                self.name,
                self.process.pid,
            )
        self.pipe.close()
        self.queue.close()
        self.queue.cancel_join_thread()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Put off for the block what would end this process, so that none is started and forgotten.

    The processes it starts do not hear of Ctrl-C and of a lost terminal: they end with this one.
    They inherit that by a mask. It holds nothing here, where other threads may take a signal for
    this one: so the handlers wait too.
    """
    held: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # handlers run in that one only
    handlers = {
        number: handler
        for number in _ENDING
        if here and callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, lambda number, _: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    resource_tracker.ensure_running()  # would let the others through if it came later
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def kill_children() -> None:
    """For the exit of a program: ``multiprocessing`` itself asks, and waits for a stopped one."""
    for child in multiprocessing.active_children():
        child.kill()


def cause_of_end(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-exit_code, f"signal {-exit_code}")
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"{name}{hint}"
    return f"exit code {exit_code}"


def _main(
    worker_class: type[Worker], job: Job, name: str, device: str, queue: TaskQueue, pipe: Connection
) -> None:
    """The worker process. It does not outlive its parent."""
    obey_parent()
    started = False
    try:
        worker = worker_class(job, name, device)
        pipe.send(WorkerReady(name, worker.description, worker.memory()))
        started = True
        while True:
            try:
                task = queue.get_nowait()
            except Empty:  # time to wait for the last file as well
                for event in worker.finish():
                    pipe.send(event)
                task = queue.get()
            if task is None:
                return
            for event in worker.run(task):
                pipe.send(event)
    except Exception as error:  # whatever it is, the parent must hear of it
        reason = f"{type(error).__name__}: {printable(error)}"
        story = traceback.format_exc()
        lost = WorkerLost(name, reason, None, story, is_crash=True, is_final=not started)
        with suppress(OSError):  # the parent is gone
            pipe.send(lost)


def obey_parent() -> None:
    """For a process that was started with interrupts held: to end with its parent, not before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if sys.platform == "linux":  # a process that was stopped has no thread that could end it
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(target=_wait_for_parents_end, daemon=True).start()


def _wait_for_parents_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
