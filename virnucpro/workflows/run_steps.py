"""The steps of a run that ``extract`` and ``predict`` share, in execution order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from virnucpro._version import __version__
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.events import STAGES, EmbeddingStarted, EventHandler, Progress, WorkerEvent
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.types import Shard
from virnucpro.engine.base import (
    Executor,
    NoExecutor,
    ShardSink,
    StreamingExecutor,
    WorkerConfig,
)
from virnucpro.engine.progress import ProgressState
from virnucpro.models.torch_build import torch_build
from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.checksums import Outputs
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, Selection
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_store import ShardStore
from virnucpro.workflows.collect_inputs import collect_inputs
from virnucpro.workflows.options import RunOptions, record_options
from virnucpro.workflows.run_config import RunConfig
from virnucpro.workflows.run_context import RunContext, RunRecord
from virnucpro.workflows.summary import Summary, warn_of_cache
from virnucpro.workflows.table_cache import FinishedRows, RowStore, ScoreFiles
from virnucpro.workflows.write_tables import Backlog, TableWriter

_BYTES_PER_WORKER = 1_000_000  # input bytes; less is planned in a tenth of a second

T = TypeVar("T")
ExecutorOn: TypeAlias = Callable[[Sequence[str]], Executor]  # devices -> executor


def choose_executor(config: RunConfig, executor_on: ExecutorOn) -> Executor:
    """Choose a run's executor, without devices if other processes embed."""
    if not config.recipe.encoders:
        return NoExecutor()
    is_left_to_others = config.options.no_embed or config.options.plan_only
    return local_executor(()) if is_left_to_others else executor_on(config.resources.devices)


def local_executor(devices: Sequence[str]) -> Executor:
    """Return the executor for this machine. Only runs that embed import it."""
    from virnucpro.engine.local import ProcessExecutor

    return ProcessExecutor(devices)


# Opening


@dataclass(frozen=True, slots=True, eq=False)
class OpenRun:
    """A run folder, the recorded run to resume, and the helpers of this start."""

    dir: RunDir
    recorded: Manifest | None  # None: a new run
    pool: HelperPool


@contextmanager
def lock_run_dir(folder: Path, *, create: bool = True) -> Iterator[Callable[[], None]]:
    """Lock an existing folder, from the first look at it to the end of the block.

    Args:
        create: create the folder if it is missing.

    Yields:
        A function that creates and locks a missing folder, to be called once all options are
        checked. It never creates a folder that existed at first: it may have been moved since.

    Raises:
        OutputError, StorageError: as ``RunDir.locked``.
    """
    run_dir = open_run_dir(folder)
    with ExitStack() as stack:
        is_there = run_dir.root.is_dir()
        if is_there:
            stack.enter_context(run_dir.locked())

        def lock_new() -> None:
            if not is_there:
                stack.enter_context(run_dir.locked(create=create))

        yield lock_new


@contextmanager
def open_run(config: RunConfig, executor: Executor, pool: HelperPool | None) -> Iterator[OpenRun]:
    """Begin a run in a locked folder, and stop its processes at the end of the block.

    Args:
        pool: helpers that may still be starting. None: start them when they are needed.

    Raises:
        OutputError, UsageError, ResumeError: the folder is not free, or damaged.
    """
    options = config.options
    run_dir = open_run_dir(config.output)
    pool = pool or HelperPool(config.resources.n_helpers)
    with run_dir.logged(), closing(executor), pool:
        run_dir.check_free(resume=options.resume, force=options.force)
        LOGGER.info("virnucpro %s: %s", __version__, printable(" ".join(options.argv)))
        recorded = run_dir.read_manifest() if options.resume else None
        yield OpenRun(run_dir, recorded, pool)


def read_inputs(run: OpenRun, config: RunConfig, on_event: EventHandler) -> Manifest:
    """Find and read the inputs, and check that they match the recorded run, if any.

    Raises:
        InputError, InputMissingError: no input can be read.
        ResumeError, UsageError: the recorded run is a different one, or an option does not fit.
    """
    options = config.options
    if options.resume and run.recorded is None:
        announce(f"no run yet in {printable(run.dir.root)}: starting a new one")
    if options.force:
        run.dir.check_can_clear(options.input)
    manifest = collect_inputs(config, run.dir, run.recorded, on_event)
    options.check_type(manifest.recipe.input_type)
    return manifest


def start_record(
    run_dir: RunDir, config: RunConfig, manifest: Manifest, announced: Sequence[str], key: object
) -> RunRecord:
    """Collect the facts about this start for ``run.json``.

    Args:
        announced: lines about the classifier and the encoders.
        key: everything that the rows depend on, besides records, shards and recipe.
    """
    torch = torch_build()
    versions = {"torch": torch.version} if torch else {}
    facts: dict[str, Any] = {
        "argv": list(config.options.argv),
        "versions": {**versions, "numpy": np.__version__},
        "host": os.uname().nodename,
        "checkpoints": list(map(str, config.checkpoints)),
        "announced": list(announced),
        "resources": asdict(config.resources),
        **record_options(config.options),
    }
    key = (key, manifest.taken.key) if manifest.taken else key
    cache_key = hashlib.sha256(repr(key).encode()).hexdigest()
    return RunRecord(run_dir=run_dir, manifest=manifest, facts=facts, cache_key=cache_key)


def start_workers(
    run: OpenRun,
    config: RunConfig,
    record: RunRecord,
    executor: Executor,
    sink: ShardSink | None = None,
) -> WorkerConfig:
    """Announce the run, and start as many workers as its input justifies.

    Their models load during planning.

    Args:
        sink: takes the vectors. None: they are kept, and no head reads them.
    """
    for announcement in record.facts["announced"]:
        announce(announcement)
    for compromise in config.compromises:
        LOGGER.warning("%s", compromise)
    manifest = record.manifest
    job = WorkerConfig.from_recipe(run.dir, manifest.recipe, config.weights, config.options, sink)
    if job.stores:
        new = manifest.inputs[len(run.recorded.inputs) if run.recorded else 0 :]
        n_worth = sum(file.n_bytes for file in new) // _BYTES_PER_WORKER
        executor.start(job, config.resources, n_worth)
    return job


# Planning


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanSteps:
    """The facts that planning needs, and what follows it."""

    run: OpenRun
    record: RunRecord
    config: RunConfig
    selection: Selection
    scores: ScoreFiles | None  # None: the run stores no scores
    describe: Callable[[Plan], RunContext]  # announces a complete plan; the context of its run
    on_event: EventHandler

    @property
    def manifest(self) -> Manifest:
        return self.record.manifest


def make_plan(steps: PlanSteps, executor: Executor) -> Plan:
    """Cut the inputs into shards, unless an earlier start did, and claim the folder.

    With --plan-only, cut them into slices, which other processes plan. The slices of a large input
    may stay for ``embed_while_planning``. Otherwise, old results are deleted and ``run.json`` is
    written only after every input was read to its end, so a rejected input changes nothing. If
    killed at any point, the folder contains a resumable run or is free.
    """
    run = steps.run
    options = steps.config.options
    keep = options.keep_intermediate
    plan = _find_plan(steps, keep=keep) if run.recorded else None
    if plan is None:
        plan = Plan.cut(run.dir, steps.manifest, keep_intermediate=keep)
    if not (options.plan_only or _is_streamed(plan, executor)):
        total = 0 if plan.slice_plans else InputFile.total_letters(steps.manifest.inputs)

        is_scored = not steps.manifest.recipe.encoders

        def on_letters(n_done: int) -> None:
            steps.on_event(_reading_progress(n_done, total, is_scored=is_scored))

        plan = plan.plan_slices(steps.selection, on_letters, run.pool)
    if plan.is_staged:
        plan.write_listing()
        if run.recorded is None:
            run.dir.delete_results()
    steps.record.write_begun("unfinished")
    if plan.is_staged:
        run.dir.adopt_plan()
        plan = replace(plan, is_staged=False)
    if not plan.missing_slices:
        write_missing_chunks(plan, steps.selection)
    run.dir.clear_copies(steps.manifest)
    run.dir.delete(run.dir.report)  # it shows an earlier state
    return plan


def _is_streamed(plan: Plan, executor: Executor) -> bool:
    """Return True if embedding can begin before the plan is complete.

    A small input is planned before a worker is ready. Earlier results stay until every input was
    read to its end.
    """
    if not isinstance(executor, StreamingExecutor) or not executor.has_devices:
        return False
    keeps_results = plan.is_staged and plan.rundir.manifest.exists()
    return len(plan.missing_slices) > 1 and not keeps_results


def write_missing_chunks(plan: Plan, selection: Selection) -> None:
    """Write the chunks of a complete plan, if they are kept and not there yet."""
    if plan.keeps_chunks and not plan.rundir.chunks.is_file():
        plan.write_chunks(selection)


def _reading_progress(n_done: int, total: int, *, is_scored: bool) -> Progress:
    """Return the planning progress. Embedding time is unknown before a model has run."""
    work = None
    if is_scored and total:
        n_unread = max(0, total - n_done)
        # Time to read a letter, relative to the time to score one: 0.07 for contigs of 3,000 bases,
        # 0.11 for chromosomes, 0.13 for reads of 150
        # (`taskset -c 1 virnucpro predict -i FILE --workers 1`).
        reading_share = 0.1
        work = (int(n_done * reading_share), int(n_unread * reading_share) + total)
    return Progress(STAGES[0], n_done, total, "letters", work)


def _find_plan(steps: PlanSteps, *, keep: bool) -> Plan | None:
    """Read the slices with intact files of an earlier plan, if it belongs to this run.

    Shards of slices that have rows are not read, because nothing needs them.
    """
    from virnucpro.store.plan_reader import read_plan, without_damaged

    plan = read_plan(steps.run.dir, steps.manifest)
    if plan is None or (keep and not plan.keep_intermediate):
        return None
    plan = replace(plan, keep_intermediate=keep)
    finished = find_rows(plan, steps)
    needed = {slice_.index for slice_ in plan.slices}.difference(finished.find_slices())
    on_shard = report_shards(steps.on_event, "checking shards")
    return without_damaged(plan, plan.select_slices(needed).shards, on_shard)


def find_rows(plan: Plan, steps: PlanSteps) -> FinishedRows:
    """Return the rows of earlier starts for the planned slices of a plan."""
    return FinishedRows(
        cache=RowStore(plan, steps.record.cache_key),
        stores=plan.rundir.shard_stores(steps.manifest.recipe),
        scores=steps.scores,
    )


def announce_plan(context: RunContext, options: RunOptions, warnings: Sequence[str] = ()) -> None:
    """Announce the input, and warn about what weakens calls.

    Args:
        warnings: from the classifier. They apply unless the input is empty.
    """
    plan = context.plan
    n_files = format_count(len(plan.manifest.inputs), "file")
    input_type = plan.manifest.recipe.input_type
    if options.plan_only:
        announce(f"{n_files}, {input_type}; {format_count(len(plan.slices), 'slice')}")
        return
    counts = plan.counts
    shards = f"; {format_count(len(plan.shards), 'shard')}" if plan.shards else ""
    announce(f"{format_count(counts.n_records, 'record')} in {n_files}, {input_type}{shards}")
    if not counts.n_records:
        LOGGER.warning(
            "the input has no records, so tables have only a header: check the files, or what "
            "writes to the pipe"
        )
        return
    for warning in warnings:
        LOGGER.warning("%s", warning)
    if counts.n_gaps:
        LOGGER.warning(
            "left out: %s (- . ~) of an alignment, in %s",
            format_count(counts.n_gaps, "gap"),
            format_count(counts.n_gapped, "record"),
        )


# Embedding, and writing tables


def embed_and_write(
    context: RunContext, config: RunConfig, job: WorkerConfig, executor: Executor, summary: Summary
) -> None:
    """Embed missing vectors and write the tables. Repeat if a feature file was damaged."""
    try:
        embed_and_write_once(context, config, job, executor, summary)
    except FeatureFileError as error:
        discard_damaged(context, job, error)
        embed_and_write_once(context, config, job, executor, summary)


def discard_damaged(context: RunContext, job: WorkerConfig, error: FeatureFileError) -> None:
    """Delete the damaged feature files, after an error about one of them."""
    LOGGER.warning("%s; checking all feature files, to recompute the damaged ones", error)
    on_shard = report_shards(context.on_event, "checking every feature file")
    for store in job.shard_stores:
        store.discard_damaged(context.plan.shards, on_shard)


def embed_and_write_once(
    context: RunContext, config: RunConfig, job: WorkerConfig, executor: Executor, summary: Summary
) -> None:
    """Embed missing vectors, and write the tables as shards are done.

    Raises:
        FeatureFileError: a file that looked finished has damaged content.
    """
    plan = context.plan
    embedding, writing = summary.stages[-2:]
    with summary.stage(embedding):
        missing = list(context.finished_rows.find_missing_shards())
        replaced = frozenset(context.manifest.replaced)
        pending = find_pending(context.shard_stores, missing, replaced, context.on_event)
        for store in context.shard_stores if pending else ():
            store.make_folder()
    backlog = Backlog(pending)
    writer = TableWriter(context, backlog)
    write = partial(writer.write, writer.count_helpers())
    try:
        if not pending:
            executor.close()  # workers started for inputs that produced no shard
            with summary.stage(writing), context.pool.stop_on_error():
                summary.records = write()
            return
        n_before = len(plan.shards) - len(pending)
        started = EmbeddingStarted(tuple(pending), n_before, plan.shards_by_input, job.encoders)
        context.on_event(started)
        with write_in_thread(context.pool, backlog, write) as tables:
            progress = ProgressState()
            progress.update(started)
            with summary.stage(embedding):
                events = executor.run(pending, job, config.resources)
                forward_events(events, context.run_dir, progress, backlog, tables, context.on_event)
            summary.count_embedding(progress.embedding)
            with summary.stage(writing):
                summary.records = tables.result()
    finally:
        context.run_dir.remove_leftovers()  # unfinished files of dead or stopped processes


@contextmanager
def write_in_thread(
    pool: HelperPool, backlog: Backlog, write: Callable[[], T]
) -> Iterator[Future[T]]:
    """Write tables in a thread that waits for each shard. It ends with the ``with`` block."""
    thread = ThreadPoolExecutor(1, "tables")
    try:
        with pool.stop_on_error():
            yield thread.submit(write)
    finally:
        backlog.abandon()
        thread.shutdown()


def forward_events(
    events: Generator[WorkerEvent, None, None],
    run_dir: RunDir,
    progress: ProgressState,
    backlog: Backlog,
    tables: Future[RecordCounts],
    on_event: EventHandler,
) -> None:
    """Process executor events until they end, or until writing the tables fails."""
    try:
        with closing(events):
            for event in events:
                on_event(event)
                progress.update(event)
                backlog.on_event(event)
                warn_of_cache(event)
                if tables.done() and not backlog.is_empty:
                    return
    finally:
        progress.embedding.timeline.append_to(run_dir.machine)
    assert backlog.is_empty, "an executor ends each shard in ShardDone or ShardFailed"


def find_pending(
    stores: Sequence[ShardStore],
    shards: Sequence[Shard],
    replaced: frozenset[str],
    on_event: EventHandler,
) -> list[Shard]:
    """Find shards that still need embedding, ignoring failures in ``replaced`` records.

    Nothing is deleted, because other processes may be writing.
    """
    on_shard = report_shards(on_event, "checking finished shards")
    by_store = [store.find_pending(shards, replaced, on_shard) for store in stores]
    pending = {shard.index for shard in chain.from_iterable(by_store)}
    return [shard for shard in shards if shard.index in pending]


def report_shards(on_event: EventHandler, stage: str) -> Callable[[int, int], None]:
    """Return a function that reports how many shards are checked."""
    return lambda done, total: on_event(Progress(stage, done, total, "shards"))


# The end


def finish_run(context: RunContext, summary: Summary, *, is_complete: bool = True) -> None:
    """Write the outcome to ``run.json``, delete intermediate files, and write the page."""
    run_dir = context.run_dir
    hosts = _sum_hosts(run_dir)
    if context.stores:
        run_dir.clear_frame_scores()
    hashes = context.checksums.hash()
    state = "complete" if is_complete and not summary.exit_code else "partial"
    context.record.write(state, counts=summary.facts, hosts=hosts, **{Outputs.field: hashes})
    run_dir.clear_parts()
    if not context.stores:
        run_dir.delete_folder(run_dir.features)  # had the partial file of a worker that died
    if not context.keep_intermediate and not summary.records.n_failed_frames:
        run_dir.clear_shards()
    if context.has_report:
        _write_report(context)


def _sum_hosts(run_dir: RunDir) -> list[dict[str, Any]]:
    """Sum the work of each host, if ``work`` processes had a part in the run."""
    if not run_dir.logs.is_dir():
        return []
    from virnucpro.engine.event_log import read_work, sum_hosts

    return [asdict(host) for host in sum_hosts(read_work(run_dir.logs))]


def _write_report(context: RunContext) -> None:
    """Write the report page. Its code is imported only here, at the end of a run."""
    from virnucpro.results.report.run_report import write_run_page

    write_run_page(context.run_dir, context.pool)


def log_summary(run_dir: RunDir, summary: Summary) -> None:
    LOGGER.info("%s", summary.time_line)
    for line in summary.lines(run_dir.root):
        LOGGER.info("%s", line)
