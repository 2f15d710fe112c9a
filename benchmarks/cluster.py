"""Simulate a run on many machines from task times that are measured here, one after the other.

One part plans and embeds reads and writes their rows, with devices that take no time; then they are
joined. For the plan of a slice and for its rows, the CPU time of one process is measured. For the
list of slices (hashing and cutting) and for the join, it is the time by the clock. From these, the
time on any number of machines is computed for a larger input of the same kind. Tasks that one
process does for all slices grow with the input. Each slice takes its time on the machine that gets
it: a device embeds at the given speed, while helpers make rows. Schedulers and slower disks are not
counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from front_end import make_contigs, make_reads
from simulated import SimulatedRow, SimulatedWorker, config_of, register, write_input

from virnucpro.core.helper_pool import HelperPool
from virnucpro.engine.base import WorkerConfig
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.plan import Selection
from virnucpro.store.plan_reader import read_plan
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.predict import (
    make_sink,
    predict_context,
    record_predict,
    resolve_calls,
    run_predict,
)
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.work_share import WorkShare
from virnucpro.workflows.write_tables import Backlog, TableWriter

_COVERAGE = 4  # of contigs by reads
_INSTANT = 1e12  # tokens per second of a device that takes no time
_FIRST = 300_000  # bases
_HELPERS = 2  # processes per device that make rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """Seconds of the tasks of a run, and its size."""

    n_reads: int
    n_slices: int
    n_tokens: int
    cut: float  # the list of all slices
    plan: float  # of a slice
    rows: float  # of a slice
    join: float  # of all slices


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    n_workers: int
    n_reads: int
    n_slices: int
    speed: float  # tokens per second of each worker's device
    cut_seconds: float  # by one process
    work_seconds: float  # until the last worker ends
    join_seconds: float  # by one process
    seconds: float  # in total
    workers_worth: float  # seconds with one worker, divided by these


def simulate_clusters(
    n_bases: int,
    n_reads: int,
    speed: float,
    workers: Sequence[int],
    *,
    dim: int,
    keep_vectors: bool,
) -> Iterator[ClusterRow]:
    """Yield a row for each number of workers, for ``n_reads`` reads; ``n_bases`` are run here.

    Half of them are run as well, to separate the cost per run from the cost per read.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # others would take CPU time to wait
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:

        def measure(n_bases: int) -> TaskTimes:
            measuring = pool.submit(measure_tasks, n_bases, dim=dim, keep_vectors=keep_vectors)
            return measuring.result()

        measure(_FIRST)  # a warm-up for what a process does once
        small = measure(n_bases // 2)
        times = measure(n_bases)
    rows = [_row_of(small, times, n_reads, speed, n) for n in (1, *workers)]
    for row in rows[1:]:
        yield replace(row, workers_worth=round(rows[0].seconds / row.seconds, 1))


def measure_tasks(n_bases: int, *, dim: int, keep_vectors: bool) -> TaskTimes:
    """Run the tasks of a small run here, one after the other."""
    register()
    with TemporaryDirectory(prefix="virnucpro-measure-") as name:
        folder = Path(name)
        random = Random(1)
        contigs = make_contigs(random, n_bases // _COVERAGE)
        fasta = write_input(folder / "input.fa", make_reads(random, contigs, n_bases))
        (folder / "speed").write_text(str(_INSTANT))
        row = SimulatedRow(
            input="reads",
            n_bases=n_bases,
            n_devices=1,
            n_helpers=0,
            speed=_INSTANT,
            dilation=1.0,
            dim=dim,
            tokens_per_batch=16_384,
            keep_vectors=keep_vectors,
        )

        # The larger input has too many vectors for ``features.h5``.
        config = replace(
            config_of(row, fasta, folder / "run", folder / "speed"), max_merged_bytes=0
        )
        planned = replace(config, options=replace(config.options, plan_only=True))
        resumed = replace(config, options=replace(config.options, resume=True))
        with _timed(time.perf_counter) as cut:
            run_predict(planned, ProcessExecutor(()), lambda _: None)
        times = _work(open_run_dir(folder / "run"), resumed)
        os.sync()  # other machines have written the vectors, and the join does not read them
        with _timed(time.perf_counter) as join:
            run_predict(resumed, ProcessExecutor(()), lambda _: None)
        return replace(times, cut=cut[0], join=join[0])


def _work(rundir: RunDir, config: PredictConfig) -> TaskTimes:
    """Plan and embed all slices, and write their rows, as the only part of a run does."""
    manifest = rundir.read_manifest()
    assert manifest is not None
    manifest = replace(manifest, inputs=tuple(file.with_stamp() for file in manifest.inputs))
    plan = read_plan(rundir, manifest)
    assert plan is not None
    plan_seconds = list[float]()
    row_seconds = list[float]()
    n_slices = len(plan.slices)
    for one in plan.slices:
        with _timed(time.process_time) as seconds:
            part = plan.select_slices([one.index]).plan_slices(
                Selection(), lambda _: None, HelperPool()
            )
        plan_seconds += seconds
        plan = replace(plan, slice_plans={**plan.slice_plans, **part.slice_plans})
    calls = resolve_calls(config, rundir, manifest.recipe)
    sink = make_sink(rundir, manifest.recipe, calls.classifier)
    job = WorkerConfig.from_recipe(rundir, manifest.recipe, config.weights, sink=sink)
    for store in job.shard_stores:
        store.make_folder()
    executor = InlineExecutor(worker=SimulatedWorker)
    with closing(executor.run(plan.shards, job, config.resources)) as events:
        for _ in events:
            pass
    record = record_predict(rundir, config, manifest, calls)
    for one in plan.slices:
        slice_plan = plan.select_slices([one.index])
        context = predict_context(config, record, calls, slice_plan, HelperPool(), lambda _: None)
        writer = TableWriter(context, Backlog())
        groups = list(slice_plan.group_by_records())
        with _timed(time.process_time) as seconds:
            writer.write_rows(groups, writer.count_helpers(groups))
        row_seconds += seconds
    n_tokens = sum(shard.n_residues + 2 * shard.n_embedded for shard in plan.shards)
    return TaskTimes(
        n_reads=plan.counts.n_records,
        n_slices=n_slices,
        n_tokens=n_tokens,
        cut=0.0,
        plan=median(plan_seconds[:-1] or plan_seconds),  # the last one is not full
        rows=median(row_seconds[:-1] or row_seconds),
        join=0.0,
    )


def _grown(small: TaskTimes, times: TaskTimes, name: str, n_reads: int) -> float:
    """The seconds of a task of one process for ``n_reads`` reads: a constant and a rate."""
    seconds = getattr(times, name)
    each = (seconds - getattr(small, name)) / (times.n_reads - small.n_reads)
    return float(seconds + each * (n_reads - times.n_reads))


def _row_of(
    small: TaskTimes, times: TaskTimes, n_reads: int, speed: float, n_workers: int
) -> ClusterRow:
    times_larger = n_reads / times.n_reads
    n_slices = round(times.n_slices * times_larger)
    embed = times.n_tokens * times_larger / n_slices / speed
    cut, join = (_grown(small, times, name, n_reads) for name in ("cut", "join"))
    work = 0.0
    for number in range(n_workers):
        n_shares, ours = WorkShare(number, n_workers).shares(n_slices)
        shares = [len(slice_plan) / n_shares for slice_plan in ours.values()]
        embedded = written = times.plan * len(shares)
        for share in shares:
            embedded += embed * share
            written = max(written, embedded) + times.rows * share / _HELPERS
        work = max(work, written)
    return ClusterRow(
        n_workers=n_workers,
        n_reads=n_reads,
        n_slices=n_slices,
        speed=speed,
        cut_seconds=round(cut, 1),
        work_seconds=round(work, 1),
        join_seconds=round(join, 1),
        seconds=round(cut + work + join, 1),
        workers_worth=1.0,
    )


@contextmanager
def _timed(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of the ``with`` block."""
    seconds: list[float] = []
    start = clock()
    yield seconds
    seconds.append(clock() - start)
