"""An executor as a third party could write it: one class, and one line or entry point."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial

from virnucpro.core.events import WorkerEvent, WorkerReady
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Resources, WorkerConfig
from virnucpro.engine.retry_policy import Attempt, WorkerFailure, WorkerState
from virnucpro.engine.worker import Worker


class BackwardExecutor(Executor):
    """Runs the last shard first, in this process, and replaces a worker that raises."""

    def __init__(self, worker: type[Worker] = Worker) -> None:
        self.worker = worker

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        start = partial(self.worker, job, resources)
        waiting = deque(Attempt(shard) for shard in reversed(shards))
        work = WorkerState("toy")
        while waiting:
            try:
                for event in self._events(start(work.worker, "cpu"), work, waiting):
                    work.on_event(event)
                    yield event
            except RuntimeError as error:
                aftermath = work.handle_failure(WorkerFailure("raised", str(error)))
                yield aftermath.failure_event
                if aftermath.failed_shard:
                    yield aftermath.failed_shard
                waiting.extendleft(reversed(aftermath.retry_first))
                waiting.extend(aftermath.retry_last)
                work = work.for_replacement()

    def _events(
        self, worker: Worker, work: WorkerState, waiting: deque[Attempt]
    ) -> Iterator[WorkerEvent]:
        with worker.writers:
            yield WorkerReady(worker.name, worker.description, worker.memory())
            while waiting:
                work.attempts.append(waiting.popleft())
                yield from worker.run(work.attempts[-1])
            yield from worker.finish()
