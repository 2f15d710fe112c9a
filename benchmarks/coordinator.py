"""Measure the coordinator alone: the real executor, with workers that have no model.

There are two figures for each number of workers: shards per second if a shard takes no time, and
how long a worker is idle between two shards if a shard takes 50 ms. The worker measures the second
by its own clock, from handing over ``ShardDone`` to receiving the next shard.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
from timing import FAILURES, reason_of

from virnucpro.core.errors import UnavailableError, VirnucproError
from virnucpro.core.events import Memory, ShardDone, ShardFailed, WorkerEvent
from virnucpro.core.types import Shard
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.worker import Worker

N_EMPTY = 2000  # shards that take no time
N_NAPS = 10  # shards per worker that take NAP_SECONDS
NAP_SECONDS = 0.05
_BYTES_PER_WORKER = 256 << 20
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRow:
    n_workers: int
    n_shards: int = N_EMPTY
    shards_per_second: float | None = None
    seconds: float | None = None  # of these shards
    idle_seconds: float | None = None  # median between two shards of 50 ms
    idle_seconds_of_each: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class NappingJob(WorkerConfig):
    n_workers: int
    first_nap: int  # index of the first shard that takes time


class IdleWorker(Worker):
    """Waits for the other workers in its first shard; later it does nothing, or sleeps.

    ``ShardDone.seconds`` is the time that it was idle before the shard.
    """

    job: NappingJob

    def __init__(self, job: WorkerConfig, resources: Resources, name: str, device: str) -> None:
        assert isinstance(job, NappingJob)
        self.job = job
        self.resources = resources
        self.name = name
        self.is_first = True
        self.handed_over = time.monotonic()

    @property
    def description(self) -> str:
        return "does nothing"

    def memory(self) -> Memory:
        return Memory(0, 1)

    def run(self, attempt: Attempt) -> Iterator[WorkerEvent]:
        idle = time.monotonic() - self.handed_over
        if self.is_first:
            self.wait_for_all()
        elif attempt.shard.index >= self.job.first_nap:
            time.sleep(NAP_SECONDS)
        self.handed_over = time.monotonic()
        yield ShardDone(self.name, attempt.shard, idle, 0)

    def finish(self) -> Iterator[WorkerEvent]:
        """Do nothing: no file is being written."""
        return iter(())

    def wait_for_all(self) -> None:
        """Wait until all workers have started, which takes seconds, before measuring."""
        self.is_first = False
        (self.job.root / self.name).touch()
        while len(list(self.job.root.iterdir())) < self.job.n_workers:
            time.sleep(_POLL_SECONDS)


def time_coordinator(n_workers: int) -> CoordinatorRow:
    row = CoordinatorRow(n_workers=n_workers)
    try:
        needed = n_workers * _BYTES_PER_WORKER
        available = psutil.virtual_memory().available
        if needed > 0.8 * available:
            raise UnavailableError(f"{n_workers} workers need {needed >> 30} GiB of memory")
        with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
            return _time(row, Path(folder))
    except (*FAILURES, VirnucproError) as error:
        return replace(row, reason=reason_of(error))


def _time(row: CoordinatorRow, folder: Path) -> CoordinatorRow:
    n_workers = row.n_workers
    first_empty = 2 * n_workers  # in the first two shards of each, workers wait for each other
    first_nap = first_empty + N_EMPTY
    shards = [
        Shard(index, folder / f"{index}.faa", 1, 1, 1, "")
        for index in range(first_nap + N_NAPS * n_workers)
    ]
    job = NappingJob(folder, (), (), "", n_workers, first_nap)  # without a model
    done: list[float] = []  # when the empty shards were done
    idle: list[float] = []
    napped: set[str] = set()  # workers with a nap; the idle time before a first nap does not count
    devices = ("cpu",) * n_workers
    resources = Resources(devices=devices, tokens_per_batch=1, silence_seconds=900.0)
    executor = ProcessExecutor(devices, IdleWorker)
    with closing(executor.run(shards, job, resources)) as events:
        for event in events:
            match event:
                case ShardDone(worker=worker, shard=shard, seconds=seconds):
                    if first_empty <= shard.index < first_nap:
                        done.append(time.perf_counter())
                    elif shard.index >= first_nap:
                        if worker in napped:
                            idle.append(seconds)
                        napped.add(worker)
                case ShardFailed(reason=reason):
                    raise UnavailableError(reason)
    seconds = done[-1] - done[0]
    return replace(
        row,
        shards_per_second=(len(done) - 1) / seconds,
        seconds=seconds,
        idle_seconds=median(idle),
        idle_seconds_of_each=tuple(idle),
    )
