"""A worker that lists the modules of its process. Spawned processes import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from virnucpro.core.events import ShardDone, WorkerEvent
from virnucpro.engine.worker import Worker

FILE = "worker_modules.txt"  # in the run folder


class ListingWorker(Worker):
    def finish(self) -> Iterator[WorkerEvent]:
        for event in super().finish():
            if isinstance(event, ShardDone):
                (self.job.root / FILE).write_text("\n".join(sys.modules))
            yield event
