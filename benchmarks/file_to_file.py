"""Time a real ``extract`` in separate processes, from a FASTA of proteins to feature files.

The start-up (hash the model, start workers, load the model) is reported separately, because it is
the same for ten proteins and for ten million. To measure it, workers start after the plan here, not
during it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from timing import FAILURES, Setting, reason_of

from virnucpro.core.errors import VirnucproError
from virnucpro.core.events import (
    STARTING,
    BatchDone,
    BatchStarted,
    RunEvent,
    ShardDone,
    WorkerReady,
)
from virnucpro.core.option_schema import build_options
from virnucpro.core.recipe import RESIDUES_PER_SHARD
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.local import ProcessExecutor
from virnucpro.models.validation.timing import count_tokens
from virnucpro.sequences.fasta import write_record
from virnucpro.workflows.extract import run_extract
from virnucpro.workflows.extract_config import ExtractConfig, resolve_extract
from virnucpro.workflows.extract_options import ExtractOptions

_SHARDS_PER_WORKER = 4


class _LateWorkers(ProcessExecutor):
    """Workers that start after the shards are written, so that reading excludes their start."""

    def start(self, job: WorkerConfig, resources: Resources, n_workers: int) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    model: str
    profile: str
    n_proteins: int
    n_tokens: int
    precision: str = ""
    n_workers: int | None = None
    residues_per_shard: int | None = None
    tokens_per_second: float | None = None  # without start-up
    outside_batches: float | None = None  # share of the workers' time without a batch in flight
    peak_bytes: int | None = None  # in a worker's device; on a CPU, in the worker
    starting_seconds: float | None = None
    stages: dict[str, float] = field(default_factory=dict)  # seconds
    seconds: tuple[float, ...] = ()  # of the whole run, start-up included
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    model: str
    profile: str
    proteins: Sequence[str]
    setting: Setting
    n_workers: int | None  # processes on a CPU
    cuda_visible_devices: str | None


def time_extract(file_run: FileRun) -> FileRow:
    """Time one run. It has many batches, so it is not repeated."""
    n_tokens = count_tokens(file_run.proteins)
    row = FileRow(
        model=file_run.model,
        profile=file_run.profile,
        n_proteins=len(file_run.proteins),
        n_tokens=n_tokens,
    )
    try:
        with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
            return _time(file_run, row, Path(folder))
    except (*FAILURES, VirnucproError) as error:
        return replace(row, reason=reason_of(error))


def _time(file_run: FileRun, row: FileRow, folder: Path) -> FileRow:
    fasta = folder / "proteins.faa"
    with fasta.open("w", encoding="utf-8") as out:
        for number, protein in enumerate(file_run.proteins, start=1):
            write_record(out, f"protein_{number}", protein)
    watch = _Watch()
    started = time.perf_counter()
    config = resolve_extract(_options(file_run, fasta, folder / "run"), watch)
    config = _cut_finely(config, sum(map(len, file_run.proteins)))
    resolved = time.perf_counter()
    summary = run_extract(config, _LateWorkers(config.resources.devices), watch)
    ended = time.perf_counter()
    starting = resolved - started + summary.seconds[STARTING]
    rate = summary.n_tokens / (ended - started - starting)
    return replace(
        row,
        precision=config.recipe.encoders[0].precision,
        n_workers=len(config.resources.devices),
        residues_per_shard=config.recipe.residues_per_shard,
        tokens_per_second=rate,
        outside_batches=watch.outside_batches,
        peak_bytes=watch.peak_bytes,
        starting_seconds=starting,
        stages=summary.seconds,
        seconds=(ended - started,),
        reason="" if not summary.exit_code else "some proteins failed",
    )


def _options(file_run: FileRun, fasta: Path, output: Path) -> ExtractOptions:
    kind = file_run.setting.device.partition(":")[0]
    checkpoint = file_run.setting.checkpoint
    torch.hub.set_dir(checkpoint.parent)  # of converted models
    return build_options(
        ExtractOptions,
        {
            "input": [fasta],
            "output_dir": output,
            "input_type": "protein",
            "model": str(checkpoint),
            "gpus": "0" if kind == "cuda" else None,
            "device": kind,
            "workers": file_run.n_workers if kind == "cpu" else None,
            "esm_batch_size": file_run.setting.tokens_per_batch,
            "argv": ("measure.py", "files"),
            "cuda_visible_devices": file_run.cuda_visible_devices,
        },
    )


def _cut_finely(config: ExtractConfig, n_residues: int) -> ExtractConfig:
    """Make shards small enough that every worker gets some, as in a real run."""
    n_shards = _SHARDS_PER_WORKER * len(config.resources.devices)
    size = min(RESIDUES_PER_SHARD, -(-n_residues // n_shards))
    return replace(config, recipe=replace(config.recipe, residues_per_shard=size))


class _Watch:
    """Records, from the events of a run, the workers' time in batches and their memory."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._in_batches = self._last_done = 0.0
        self._ready: dict[str, float] = {}
        self._open: defaultdict[str, set[int]] = defaultdict(set)  # rows in flight
        self._since: dict[str, float] = {}

    def __call__(self, event: RunEvent) -> None:
        now = time.perf_counter()
        match event:
            case WorkerReady(worker=worker):
                self._ready[worker] = now
            case ShardDone():
                self._last_done = now
            case BatchStarted(worker=worker, rows=rows):
                if not self._open[worker]:
                    self._since[worker] = now
                self._open[worker].update(rows)
            case BatchDone(worker=worker, rows=rows, memory=memory):
                self._open[worker].difference_update(rows)
                if not self._open[worker]:
                    self._in_batches += now - self._since[worker]
                self.peak_bytes = max(self.peak_bytes, memory.used)

    @property
    def outside_batches(self) -> float:
        """The share of worker time outside batches, from ready to the last shard."""
        there = sum(self._last_done - ready for ready in self._ready.values())
        return max(0.0, 1 - self._in_batches / there)
