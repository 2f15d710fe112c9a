"""Define the executor interface, which embeds the shards of a run."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from virnucpro.core.events import WorkerEvent
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.core.types import Embeddings, Orf, Shard
from virnucpro.engine.options import CacheOptions
from virnucpro.engine.shard_feed import ShardFeed
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_store import ShardStore

if TYPE_CHECKING:
    from virnucpro.engine.vector_cache import CacheDir


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Resources:
    """The settings that change only the speed of a run."""

    devices: tuple[str, ...]  # torch devices ("cuda:0", "cpu", "mps"), one worker each
    tokens_per_batch: int
    silence_seconds: float = 300.0  # silence after which a worker is replaced
    n_helpers: int = 0  # maximum number of processes that make shards and tables
    memory: int = 0  # bytes for all processes on this machine; 0: unknown


class ShardSink(Protocol):
    """Takes the vectors of each shard in the worker that has them in memory, and writes its files.

    It is sent to the workers' processes, so it must be picklable.
    """

    @property
    def shard_stores(self) -> tuple[ShardStore, ...]:
        """The stores in which each finished shard has a file."""

    def write(self, shard: Shard, orfs: Sequence[Orf], embeddings: Sequence[Embeddings]) -> None:
        """Write the files of a shard atomically. A thread of the worker calls this.

        Args:
            orfs: all ORFs of the shard, copies included.
            embeddings: the vectors and failures of the ORFs that are not copies, per encoder.

        Raises:
            OutputError, StorageError: a file cannot be written.
        """


@dataclass(frozen=True, slots=True, eq=False)
class WorkerConfig:
    """The settings of a run that a worker needs: plain data that is sent to its process."""

    root: Path  # the run folder
    stores: tuple[FeatureStore, ...]  # one per encoder
    weights: tuple[Path, ...]  # one per encoder: a checkpoint or its converted form
    owner: str  # unique name of the process with this job, used in partial file names
    cache: CacheDir | None = field(default=None, kw_only=True)
    sink: ShardSink | None = field(default=None, kw_only=True)  # None: vectors go to ``stores``

    @classmethod
    def from_recipe(
        cls,
        rundir: RunDir,
        recipe: Recipe,
        weights: tuple[Path, ...],
        options: CacheOptions | None = None,
        sink: ShardSink | None = None,
    ) -> WorkerConfig:
        """Make the job of this process in a run folder, with the requested cache."""
        cache = None
        if options and options.cache:
            from virnucpro.engine.vector_cache import CacheDir

            cache = CacheDir.open(options.cache, options.cache_size)
        stores = rundir.encoder_stores(recipe)
        return cls(
            rundir.root,
            stores,
            weights if stores else (),
            rundir.lock_holder,
            cache=cache,
            sink=sink,
        )

    @property
    def encoders(self) -> tuple[EncoderSpec, ...]:
        return tuple(store.encoder for store in self.stores)

    @property
    def shard_stores(self) -> tuple[ShardStore, ...]:
        """Return the stores in which a finished shard has a file each."""
        return self.stores if self.sink is None else self.sink.shard_stores


class Executor(Protocol):
    """A way to run shards: in this process, in one process per device, or on a cluster.

    Slow preparation belongs in ``start``, which runs while the shards are planned.
    """

    def start(self, job: WorkerConfig, resources: Resources, n_workers: int) -> None:
        """Start this number of workers, at most one per device, for one ``run``.

        ``run`` must get the same job and resources.
        """
        return

    def close(self) -> None:
        """End workers that were started but never run."""
        return

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard. Each ends in one ShardDone or one ShardFailed.

        Closing the generator stops the workers.

        Raises:
            UnavailableError: no worker is left.
        """


@runtime_checkable
class StreamingExecutor(Executor, Protocol):
    """An executor that can begin before all shards are planned."""

    @property
    def has_devices(self) -> bool:
        """Return True if it can run shards."""

    def run_feed(
        self, feed: ShardFeed, job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard that the feed gets until it is closed, as ``run`` does.

        Raises:
            UnavailableError: no worker is left.
        """


class NoExecutor(Executor):
    """The executor of a run that embeds nothing, so it has no shards."""

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        assert not shards, "only encoders need shards"
        yield from ()
