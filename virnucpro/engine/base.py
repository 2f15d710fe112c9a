"""The interface of the engine: what a run needs from an executor that embeds its shards."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from virnucpro.core.events import WorkerEvent
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.core.types import Shard
from virnucpro.engine.options import CacheOptions
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.run_dir import RunDir

if TYPE_CHECKING:
    from virnucpro.engine.vector_cache import CacheDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The settings that change only the speed of a run."""

    devices: tuple[str, ...]  # of torch: "cuda:0", "cpu", "mps"; one worker each
    tokens_per_batch: int
    silence_seconds: float = 300.0  # a worker that is silent for longer is replaced
    n_helpers: int = 0  # most processes that make shards and tables
    memory: int = 0  # bytes that the processes on this machine may use together; 0: not known


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker needs to know about a run: plain data that is sent to its process."""

    root: Path  # the run folder
    stores: tuple[FeatureStore, ...]  # one for each encoder
    weights: tuple[Path, ...]  # one per encoder: a checkpoint or its converted form
    owner: str  # unique name of the process with this job; part of the names of partial files
    cache: CacheDir | None = field(default=None, kw_only=True)

    @classmethod
    def from_recipe(
        cls,
        rundir: RunDir,
        recipe: Recipe,
        weights: tuple[Path, ...],
        options: CacheOptions | None = None,
    ) -> WorkerConfig:
        """Make the job of this process in a run folder, with the requested cache."""
        cache = None
        if options and options.cache:
            from virnucpro.engine.vector_cache import CacheDir

            cache = CacheDir.open(options.cache, options.cache_size)
        stores = rundir.feature_stores(recipe)
        return cls(rundir.root, stores, weights if stores else (), rundir.lock_holder, cache=cache)

    @property
    def encoders(self) -> tuple[EncoderSpec, ...]:
        return tuple(store.encoder for store in self.stores)


class Executor(Protocol):
    """A way to run shards: in this process, in one process per device, on a cluster.

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
        """Run every shard; each ends in one ShardDone or one ShardFailed.

        Closing the generator stops the workers.

        Raises:
            UnavailableError: no worker is left.
        """
