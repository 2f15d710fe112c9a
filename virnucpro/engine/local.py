"""Run shards on this machine: in one process per device, or in this process.

    parent  --Attempt-->  worker     one pipe per worker,
    parent  <--Event----  worker     in both directions

Workers share nothing, because a process killed inside ``Queue.get`` would keep the queue's lock,
and the others would wait forever. One thread in the parent waits on all pipes. One more thread per
worker sends it shards, so a worker that does not read delays no other. Ready workers get shards
round-robin, then on demand. Each worker has two (in addition to those being written), or more small
ones, so that no device waits for the parent.

Workers may start before there are shards. Their events wait in the pipes. Shards may arrive while
others run (see ``shard_feed``). A worker that ends or stops responding is replaced, and its shard
continues, as described in ``retry_policy``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.errors import UnavailableError, VirnucproError
from virnucpro.core.events import (
    BatchDone,
    ErrorText,
    ShardDone,
    ShardReturned,
    WorkerEvent,
    WorkerReady,
)
from virnucpro.core.logging import LOGGER, format_count, log_to_handler, printable
from virnucpro.core.option_text import join_texts, with_options
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Resources, StreamingExecutor, WorkerConfig
from virnucpro.engine.device_faults import DeviceFault, find_device_fault
from virnucpro.engine.retry_policy import (
    Attempt,
    WorkerFailure,
    WorkerState,
    attempt_after_return,
)
from virnucpro.engine.shard_feed import ShardFeed
from virnucpro.store.shard_files import read_shard

if TYPE_CHECKING:
    from virnucpro.engine.worker import Worker

# arguments: job, resources, name, device
_WorkerFactory: TypeAlias = "Callable[[WorkerConfig, Resources, str, str], Worker]"

GRACE_SECONDS = 5.0  # for idle workers to exit


def load_worker(job: WorkerConfig, resources: Resources, name: str, device: str) -> Worker:
    """Load the worker for a device. Only the computing process imports torch, here."""
    from virnucpro.engine.worker import Worker

    return Worker(job, resources, name, device)


def load_worker_near_device(
    job: WorkerConfig, resources: Resources, name: str, device: str
) -> Worker:
    """Load the worker for a device in a process of its own, on the CPU cores near its GPU."""
    if device.startswith("cuda"):
        _move_near_gpu(device)
    return load_worker(job, resources, name, device)


def _move_near_gpu(device: str) -> None:
    """Restrict this process to the cores near a GPU, so that its buffers lie in near memory.

    Buffers that a GPU reads from another processor's memory cross the link between processors.
    """
    import torch

    from virnucpro.models.gpu_state import choose_near_cores, read_near_cores

    near = read_near_cores(str(torch.cuda.get_device_properties(device).uuid))
    os.sched_setaffinity(0, choose_near_cores(near, os.sched_getaffinity(0)))


class InlineExecutor(Executor):
    """One device in this process: for Python users, tests and debuggers."""

    def __init__(self, device: str = "cpu", worker: _WorkerFactory = load_worker) -> None:
        self.device = device
        self.worker = worker

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard, as ``Executor.run`` specifies."""
        import torch

        n_threads = torch.get_num_threads()
        try:
            worker = self.worker(job, resources, self.device, self.device)
            with worker.writers:
                yield WorkerReady(worker.name, worker.description, worker.memory())
                for shard in shards:
                    yield from worker.run(Attempt(shard))
                yield from worker.finish()
        finally:
            torch.set_num_threads(n_threads)  # a CPU worker sets it to one


class ProcessExecutor(StreamingExecutor):
    """One worker process per device on this machine. Without devices, any shard is an error.

    A large input is passed to ``run_feed``, and a small one to ``run``. To run shards differently,
    implement ``Executor`` instead of overriding one of the two.
    """

    def __init__(
        self,
        devices: Sequence[str],
        worker: _WorkerFactory = load_worker_near_device,
        start_seconds: float = 900.0,  # for a worker to import, load the model and report
    ) -> None:
        self.devices = tuple(devices)
        self.worker = worker
        self.start_seconds = start_seconds
        self.feed = ShardFeed.from_shards(())
        self.pending: deque[Attempt] = deque()
        self.workers: list[WorkerHandle] = []
        self.last_loss: WorkerFailure | None = None
        self.removed: set[str] = set()  # GPUs that are not used again
        self.last_removed = ""  # the last of them and why, in a line
        self.suspect: tuple[Shard, int] | None = None  # alone on the device at its last error

    def start(self, job: WorkerConfig, resources: Resources, n_workers: int) -> None:
        """Start workers, as ``Executor.start`` specifies."""
        self.start_missing_workers(job, resources, n_workers)

    def start_missing_workers(
        self, job: WorkerConfig, resources: Resources, n_workers: int
    ) -> None:
        """Start workers until there are ``n_workers``, or one per device."""
        names = zip(_worker_names(self.devices), self.devices, strict=True)
        named = [(name, device) for name, device in names if device not in self.removed]
        for name, device in named[len(self.workers) : n_workers]:
            self.start_worker(WorkerState(name, device), device, job, resources)

    def close(self) -> None:
        self.shrink_to(0)

    @final
    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard, as ``Executor.run`` specifies.

        Raises:
            UnavailableError: no worker is left, or there is no device. The message names the
                shards.
            VirnucproError: the error that ended the last worker.
        """
        if shards and not self.devices:
            raise _no_device_error(shards, job)
        yield from self._run(ShardFeed.from_shards(shards), job, resources, len(shards))

    @property
    def has_devices(self) -> bool:
        return bool(self.devices)

    @final
    def run_feed(
        self, feed: ShardFeed, job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard of a feed on all devices, as ``StreamingExecutor.run_feed`` specifies.

        Raises:
            UnavailableError, VirnucproError: as ``run``.
        """
        yield from self._run(feed, job, resources, len(self.devices))

    def _run(
        self, feed: ShardFeed, job: WorkerConfig, resources: Resources, n_workers: int
    ) -> Generator[WorkerEvent, None, None]:
        settings = [(worker.job, worker.resources) for worker in self.workers]
        assert all(setting == (job, resources) for setting in settings), "started for others"
        try:
            self.feed = feed
            self.pending = deque()
            self.start_missing_workers(job, resources, n_workers)
            self.shrink_to(n_workers)
            yield from self.events()
        finally:
            self.close()

    def start_worker(
        self, work: WorkerState, device: str, job: WorkerConfig, resources: Resources
    ) -> None:
        """Start a worker process."""
        with defer_interrupts():
            child = start_process(worker_main, self.worker, job, resources, work.worker, device)
            deadline = time.monotonic() + self.start_seconds
            self.workers.append(WorkerHandle(work, device, job, resources, child, deadline))

    def shrink_to(self, n_workers: int) -> None:
        """End the workers beyond this number."""
        surplus = self.workers[n_workers:]
        with ExitStack() as ends:  # end every worker even if ending one raises
            for worker in surplus:
                ends.callback(worker.kill)
            del self.workers[n_workers:]
            for worker in surplus:
                worker.request_stop()
            deadline = time.monotonic() + GRACE_SECONDS
            for worker in surplus:
                worker.child.wait(max(0.0, deadline - time.monotonic()))

    def events(self) -> Iterator[WorkerEvent]:
        for worker in self.workers:  # silence is counted from now on
            worker.deadline = time.monotonic() + self.start_seconds
        while self.has_work:
            self.pending.extend(map(Attempt, self.feed.take()))
            if not self.has_work:
                return
            if not self.workers:
                raise self.no_worker_left()
            self.dispatch()
            for worker in self.wait_for_workers():
                if worker not in self.workers:  # it was taken out of the run a moment ago
                    continue
                loss = yield from self.receive_events(worker)
                if loss is not None:
                    yield from self.handle_failure(worker, loss)

    @property
    def has_work(self) -> bool:
        """Return True if shards are left, or may follow."""
        return (
            not self.feed.is_finished
            or bool(self.pending)
            or any(worker.state.attempts for worker in self.workers)
        )

    def receive_events(
        self, worker: WorkerHandle
    ) -> Generator[WorkerEvent, None, WorkerFailure | None]:
        """Yield the events of a worker, and act on what they show about devices."""
        events = worker.receive_events()
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                loss: WorkerFailure | None = end.value
                return loss
            yield event
            attempt = worker.state.ended
            match event:
                case ShardReturned() if attempt is not None:
                    others = self.other_devices(worker.device)
                    again = attempt_after_return(attempt, event, worker.device, others)
                    self.pending.appendleft(again)
                    self.start_for_avoiding(again, worker)
                case ShardDone(n_recovered=n_recovered) if n_recovered and attempt is not None:
                    yield from self.blame_devices(attempt.returned_by, worker.device)

    def blame_devices(self, errors: Mapping[str, str], healthy: str) -> Iterator[WorkerEvent]:
        """Count an error of each device that failed on sequences which another one embedded."""
        for worker in [one for one in self.workers if one.device in errors.keys() - {healthy}]:
            if worker.state.n_device_errors + 1 < WorkerState.max_device_errors:
                worker.state.n_device_errors += 1
                continue
            reason = errors[worker.device]
            fault = DeviceFault(reason, may_be_input=False)
            yield from self.handle_failure(worker, WorkerFailure("device", reason, fault=fault))

    def other_devices(self, device: str) -> set[str]:
        """The devices besides this one that run shards, or could."""
        return set(self.devices) - self.removed - {device}

    def dispatch(self) -> None:
        """Assign shards round-robin: each ready worker gets a first shard before any gets a second.

        A second shard is assigned only while enough shards are left for workers that are still
        starting. Idle workers get shards without waiting for them.
        """
        n_starting = sum(not worker.state.is_ready for worker in self.workers)
        for n_attempts in range(1, WorkerState.max_in_flight + 1):
            n_reserved = n_starting if n_attempts > 1 else 0
            for worker in self.workers:
                if len(self.pending) > n_reserved and worker.state.has_room(n_attempts):
                    self.assign_next(worker)

    def assign_next(self, worker: WorkerHandle) -> None:
        """Give a worker the first attempt that need not wait for another device."""
        others = self.other_devices(worker.device)
        for attempt in self.pending:
            if worker.device not in attempt.avoided or others <= attempt.avoided:
                self.pending.remove(attempt)
                worker.assign(attempt, has_other_device=bool(others) and worker.device != "cpu")
                return

    def start_for_avoiding(self, attempt: Attempt, worker: WorkerHandle) -> None:
        """Start a worker for an attempt that must avoid the devices of all workers."""
        with_worker = {one.device for one in self.workers}
        others = self.other_devices(worker.device)
        if not attempt.avoided or not others or with_worker - attempt.avoided:
            return
        name, device = next(
            named
            for named in zip(_worker_names(self.devices), self.devices, strict=True)
            if named[1] in others
        )
        self.start_worker(WorkerState(name, device), device, worker.job, worker.resources)

    def wait_for_workers(self) -> list[WorkerHandle]:
        """Wait until a worker has reported, died, or been silent for too long.

        While shards may arrive, return [] after a moment.
        """
        tick_seconds = 1.0  # between two checks for silent workers
        feed_seconds = 0.02  # between two looks at the feed
        while True:
            is_fed = self.feed.is_open
            workers = self.poll_workers(feed_seconds if is_fed else tick_seconds)
            if workers or is_fed:
                return workers

    def poll_workers(self, seconds: float) -> list[WorkerHandle]:
        """Return the workers to look at now, if any. Wait for the first one for ``seconds``.

        Time during which this process was suspended (Ctrl-Z, a scheduler) does not count as
        silence, because the workers were suspended too.
        """
        suspended_seconds = 2.0  # a longer wait shows that this process was suspended
        children = [worker.child for worker in self.workers]
        wait_start = time.monotonic()
        ready = ChildProcess.wait_any(children, seconds)
        now = time.monotonic()
        if now - wait_start > suspended_seconds:
            for worker in self.workers:
                worker.deadline += now - wait_start
        return [worker for worker in self.workers if worker.child in ready or worker.deadline < now]

    def no_worker_left(self) -> VirnucproError:
        """Return the last worker's error if it is ours, or else an error with its reason."""
        loss = self.last_loss
        assert loss is not None, "workers end by losses alone"
        if loss.fault is not None:
            return self.device_error(loss.fault)
        remedy = with_options(
            "finished shards are kept: fix the cause, then run again with {resume}"
        )
        if loss.error is not None:
            hint = join_texts("; ", filter(None, [loss.error.hint, remedy]))
            return loss.error.kind(loss.error.message, hint)
        n_shards = format_count(len(self.pending), "shard")
        return UnavailableError(
            f"no worker is left for {n_shards}; the last one: {loss.reason}", hint=remedy
        )

    def device_error(self, fault: DeviceFault) -> UnavailableError:
        """The error of a run whose last device has errors of its own."""
        n_shards = format_count(len(self.pending), "shard")
        cause = ""
        if fault.may_be_input and self.suspect is not None:
            shard, row = self.suspect
            orf = [orf for orf in read_shard(shard) if orf.copy_of is None][row]
            cause = (
                f"; the sequence {printable(orf.id)} was alone on the device then, so that it may "
                "be at fault"
            )
        return UnavailableError(
            f"no device is left for {n_shards}: {self.last_removed}{cause}",
            hint=with_options(
                "finished shards are kept: look at the GPU with `nvidia-smi -q -d ECC`, then run "
                "again with {resume}, and leave that GPU out with {gpus}, or add {device:cpu}"
            ),
        )

    def handle_failure(self, worker: WorkerHandle, loss: WorkerFailure) -> Iterator[WorkerEvent]:
        """Take back the worker's attempts, and replace the worker."""
        worker.kill()
        self.suspect = worker.state.lone_suspect
        decision = worker.state.handle_failure(loss, self.other_devices(worker.device))
        for other in self.workers:
            if other is not worker:
                n_cleared = decision.cleared.count(other.device)
                other.state.n_device_errors = max(0, other.state.n_device_errors - n_cleared)
        if decision.failure_event.is_final:
            self.last_removed = decision.failure_event.lost_device
            if worker.device != "cpu":  # one worker out of many on a CPU
                self.removed.add(worker.device)
        yield decision.failure_event
        self.last_loss = loss
        self.pending.extendleft(reversed(decision.retry_first))
        self.pending.extend(decision.retry_last)
        if decision.failed_shard is not None:
            yield decision.failed_shard
        self.workers.remove(worker)
        has_shards = self.pending or not self.feed.is_finished
        if has_shards and not decision.failure_event.is_final:
            self.start_worker(
                worker.state.for_replacement(), worker.device, worker.job, worker.resources
            )
        for attempt in decision.retry_first:
            self.start_for_avoiding(attempt, worker)


def _no_device_error(shards: Sequence[Shard], job: WorkerConfig) -> UnavailableError:
    max_named_shards = 8  # per message
    names = ", ".join(shard.name for shard in shards[:max_named_shards])
    more = f" and {len(shards) - max_named_shards:,} more" if len(shards) > max_named_shards else ""
    return UnavailableError(
        f"vectors of {format_count(len(shards), 'shard')} are missing: {names}{more}",
        hint=with_options(
            "run `virnucpro work {root}` on a machine with devices, then this command "
            "again; or leave out --no-embed to embed them here",
            root=job.root,
        ),
    )


def _worker_names(devices: Sequence[str]) -> list[str]:
    """Name workers after their devices, with a number if several share one."""
    return [
        f"{device}#{devices[:index].count(device)}" if devices.count(device) > 1 else device
        for index, device in enumerate(devices)
    ]


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """The parent's view of one worker process."""

    state: WorkerState
    device: str
    job: WorkerConfig
    resources: Resources
    child: ChildProcess
    deadline: float  # on the monotonic clock; a worker that is still silent counts as hung
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    error: ErrorText | None = None  # the VirnucproError that ends the worker

    def assign(self, attempt: Attempt, *, has_other_device: bool = False) -> None:
        LOGGER.info("shard %s given to %s", attempt.shard.name, self.state.worker)
        if not self.state.attempts:
            self.deadline = time.monotonic() + self.resources.silence_seconds
        self.state.attempts.append(attempt)
        self.send(attempt.for_device(self.device, has_other_device=has_other_device))

    def send(self, attempt: Attempt | None) -> None:
        """Send an attempt, or None to end the worker. If the worker has died, its pipe shows it."""
        self.sender.submit(self.child.pipe.send, attempt)

    def receive_events(self) -> Generator[WorkerEvent, None, WorkerFailure | None]:
        """Yield the worker's events. Return its failure, if any."""
        # exit codes after a kill from outside
        kill_exit_codes = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGQUIT, -signal.SIGXCPU}
        try:
            while self.child.pipe.poll():
                event: WorkerEvent | ErrorText | ChildError = self.child.pipe.recv()
                if isinstance(event, ErrorText):  # the reason for the next message
                    self.error = event
                    continue
                if isinstance(event, ChildError):
                    return self.raised_failure(event)
                self.on_event(event)
                yield event
        except (EOFError, OSError):
            reason = f"the worker died: {self.child.exit_reason(GRACE_SECONDS)}"
            is_killed = self.child.process.returncode in kill_exit_codes
            return WorkerFailure("killed" if is_killed else "crashed", reason)
        if self.deadline < time.monotonic():
            return WorkerFailure("silent", "the worker fell silent and was stopped")
        return None

    def raised_failure(self, error: ChildError) -> WorkerFailure:
        """The end of the worker by an error, which may belong to its GPU."""
        is_gpu = self.device != "cpu" and self.error is None
        fault = find_device_fault(error.reason) if is_gpu else None
        cause: Literal["device", "raised"] = "raised" if fault is None else "device"
        return WorkerFailure(cause, error.reason, error.traceback, self.error, fault)

    def on_event(self, event: WorkerEvent) -> None:
        self.state.on_event(event)
        self.deadline = time.monotonic() + self.state.timeout(self.resources.silence_seconds)

    def request_stop(self) -> None:
        if self.state.is_ready and not self.state.attempts and self.child.is_alive:
            self.send(None)
        else:
            self.child.kill()  # safe, because files appear atomically

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
    """Run a worker process: load the worker, then embed incoming shards."""
    max_startup_warnings = 100  # kept from a worker's start
    if device == "cpu":
        _keep_freed_memory()
    startup_log = BufferingHandler(max_startup_warnings)
    startup_log.setLevel(logging.WARNING)
    with log_to_handler(startup_log):
        try:
            worker = worker_on(job, resources, name, device)
        except VirnucproError as error:
            pipe.send(ErrorText.from_error(error))
            raise
        warnings = tuple(record.getMessage() for record in startup_log.buffer)
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
    """Send the events for the last batches and files until the parent sends another shard."""
    for event in events:
        pipe.send(event)
        if isinstance(event, (BatchDone, ShardDone)) and pipe.poll():
            return


def _keep_freed_memory() -> None:
    """Make glibc reuse memory that a layer frees. Fetching new pages takes up to a third longer.

    A batch frees about 20 MB per layer. Other C libraries are not configured.
    """
    # glibc mallopt option -> size in bytes above which freed memory returns to the system
    malloc_options = {
        -3: 32 << 20,  # M_MMAP_THRESHOLD, at most 32 MiB
        -1: 256 << 20,  # M_TRIM_THRESHOLD
    }
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option, n_bytes in malloc_options.items():
            library.mallopt(option, n_bytes)
