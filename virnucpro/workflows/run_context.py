"""State that the steps of a planned run share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virnucpro.core.events import EventHandler
from virnucpro.core.helper_pool import HelperPool
from virnucpro.results.outputs import OutputFile
from virnucpro.store.checksums import Outputs
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_store import ShardStore
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.table_cache import FinishedRows, RowStore, ScoreFiles
from virnucpro.workflows.table_tasks import RowBuilder


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunRecord:
    """Writes ``run.json``: the manifest, the facts about this start, and the run state."""

    run_dir: RunDir
    manifest: Manifest
    facts: Mapping[str, Any]
    cache_key: str  # hash of classifier, threshold and output files: see ``RowStore``

    def write(self, state: str, **more: object) -> None:
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "state": state}
        self.run_dir.write_manifest(self.manifest, {**self.facts, **now, **more})

    def write_begun(self, state: str) -> None:
        """Write the state for a run whose tables are incomplete, with the key of its rows."""
        self.write(state, **{RowStore.field: self.cache_key})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunContext:
    """A planned run. Built once, after planning, and never changed."""

    run_dir: RunDir
    record: RunRecord
    plan: Plan
    row_builder: RowBuilder
    outputs: tuple[OutputFile, ...]
    scores: ScoreFiles | None  # None: the run stores no scores
    searches_regions: bool
    per_file: bool  # also write tables for each input file
    keep_intermediate: bool
    has_report: bool
    pool: HelperPool
    on_event: EventHandler
    max_merged_bytes: int | None = None  # None: the limit of ``merged_features``
    hashes: dict[Path, str] = field(default_factory=dict)  # files that this start has hashed

    @property
    def manifest(self) -> Manifest:
        return self.plan.manifest

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        return self.row_builder.stores

    @property
    def shard_stores(self) -> tuple[ShardStore, ...]:
        return self.row_builder.shard_stores

    @property
    def checksums(self) -> Outputs:
        """SHA-256 per output. A file that this start has hashed is not read again."""
        return Outputs(self.run_dir, self.hashes)

    @property
    def finished_rows(self) -> FinishedRows:
        """Rows of slices that need no recomputation."""
        cache = RowStore(self.plan, self.record.cache_key)
        return FinishedRows(cache=cache, stores=self.shard_stores, scores=self.scores)


def has_sample_tables(options: RunOptions, run_dir: RunDir) -> bool:
    """Return True if each input file gets tables, as this or an earlier start requested."""
    return options.per_file or (options.resume and run_dir.samples.is_dir())
