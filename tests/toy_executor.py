"""An executor as anyone could write one: one class, and one line or an entry point for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial

from virnucpro.core.events import Event, WorkerReady
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Job, Resources
from virnucpro.engine.retry_policy import Attempt, Loss, Workload
from virnucpro.engine.worker import Worker


class BackwardExecutor(Executor):
    """Runs the last shard first, in this process, and replaces a worker that raises."""

    def __init__(self, worker: type[Worker] = Worker) -> None:
        self.worker = worker

    def run(
        self, shards: Sequence[Shard], job: Job, resources: Resources
    ) -> Generator[Event, None, None]:
        start = partial(self.worker, job, resources)
        waiting, work = deque(Attempt(shard) for shard in reversed(shards)), Workload("toy")
        while waiting:
            try:
                for event in self._events(start(work.worker, "cpu"), work, waiting):
                    work.take(event)
                    yield event
            except RuntimeError as error:
                aftermath = work.end(Loss("raised", str(error)))
                yield aftermath.lost
                if aftermath.failed:
                    yield aftermath.failed
                waiting.extendleft(reversed(aftermath.first))
                waiting.extend(aftermath.last)
                work = work.successor()

    def _events(self, worker: Worker, work: Workload, waiting: deque[Attempt]) -> Iterator[Event]:
        with worker.writer:
            yield WorkerReady(worker.name, worker.description, worker.memory())
            while waiting:
                work.attempts.append(waiting.popleft())
                yield from worker.run(work.attempts[-1])
            yield from worker.finish()
