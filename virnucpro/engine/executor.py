"""The door of the engine, and the executor that needs no processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from virnucpro.engine.job import Job
from virnucpro.engine.recovery import Attempt
from virnucpro.ground.config import Resources
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.events import Event, WorkerReady
from virnucpro.ground.log import counted
from virnucpro.ground.records import Shard

if TYPE_CHECKING:
    from virnucpro.engine.worker import Worker

WorkerOn: TypeAlias = "Callable[[Job, Resources, str, str], Worker]"  # given its name and device
_NAMED = 8  # shards in a message


def load_worker(job: Job, resources: Resources, name: str, device: str) -> Worker:
    """The worker of a device. Torch is imported here: by the process that computes, not before."""
    from virnucpro.engine.worker import Worker

    return Worker(job, resources, name, device)


class Executor(Protocol):
    """A way to run shards: in this process, in one process per device, on a cluster.

    Whoever needs time before the first shard takes it in ``start``, while the shards are planned.
    """

    def start(self, job: Job, resources: Resources, n_workers: int) -> None:
        """Start this number of workers, or one on each device, for one ``run``.

        That must be of the same job, with the same resources.
        """
        return

    def close(self) -> None:
        """End the workers that were started and have no run."""
        return

    def run(
        self, shards: Sequence[Shard], job: Job, resources: Resources
    ) -> Generator[Event, None, None]:
        """Run every shard; each ends in one ShardDone or one ShardFailed.

        Closing the generator stops the workers.

        Raises:
            UnavailableError: no worker is left that could go on.
        """


class NoExecutor(Executor):
    """A machine that must not embed."""

    def run(
        self, shards: Sequence[Shard], job: Job, resources: Resources
    ) -> Generator[Event, None, None]:
        """
        Raises:
            UnavailableError: always; names the shards.
        """
        names = ", ".join(shard.name for shard in shards[:_NAMED])
        more = f" and {len(shards) - _NAMED:,} more" if len(shards) > _NAMED else ""
        raise UnavailableError(
            f"vectors are missing of {counted(len(shards), 'shard')}: {names}{more}",
            hint=f"run `virnucpro work {job.features.parent}` where there are devices, then this "
            "command again; or leave --no-embed out to make them here",
        )
        yield


class InlineExecutor(Executor):
    """One device in this process: for users of Python, tests and debuggers."""

    def __init__(self, device: str = "cpu", worker: WorkerOn = load_worker) -> None:
        self.device, self.worker = device, worker

    def run(
        self, shards: Sequence[Shard], job: Job, resources: Resources
    ) -> Generator[Event, None, None]:
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
