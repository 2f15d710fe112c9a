"""What the steps of a run share once it is planned."""

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
from virnucpro.store.merged_features import MAX_BYTES
from virnucpro.store.plan import Plan
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.table_cache import FinishedRows, RowStore, ScoreFiles
from virnucpro.workflows.table_tasks import RowBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Writes ``run.json``: the manifest, the facts about this start, and the state of the run."""

    run_dir: RunDir
    manifest: Manifest
    facts: Mapping[str, Any]
    cache_key: str  # hash of the classifier, its threshold and the set of files: see ``RowStore``

    def write(self, state: str, **more: object) -> None:
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "state": state}
        self.run_dir.write_manifest(self.manifest, {**self.facts, **now, **more})

    def write_begun(self, state: str) -> None:
        """Write the state of a run whose tables are not complete, with the key of its rows."""
        self.write(state, **{RowStore.field: self.cache_key})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A planned run. It is built once, after the plan, and never changes."""

    run_dir: RunDir
    record: RunRecord
    plan: Plan
    row_builder: RowBuilder
    outputs: tuple[OutputFile, ...]
    scores: ScoreFiles | None  # None: the run stores no scores
    searches_regions: bool
    per_file: bool  # each input file gets tables of its own, too
    keep_intermediate: bool
    has_report: bool
    pool: HelperPool
    on_event: EventHandler
    max_merged_bytes: int = MAX_BYTES  # see ``merged_features``
    hashes: dict[Path, str] = field(default_factory=dict)  # of files that this start has hashed

    @property
    def manifest(self) -> Manifest:
        return self.plan.manifest

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        return self.row_builder.stores

    @property
    def checksums(self) -> Outputs:
        """The SHA-256 of each output; a file that this start has hashed is not read again."""
        return Outputs(self.run_dir, self.hashes)

    @property
    def finished_rows(self) -> FinishedRows:
        """The rows of slices that need not be made again."""
        cache = RowStore(self.plan, self.record.cache_key)
        return FinishedRows(cache=cache, stores=self.stores, scores=self.scores)


def has_sample_tables(options: RunOptions, run_dir: RunDir) -> bool:
    """True if each input file gets tables: it was asked for, now or by an earlier start."""
    return options.per_file or (options.resume and run_dir.samples.is_dir())
