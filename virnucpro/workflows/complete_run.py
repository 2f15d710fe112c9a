"""Complete a planned run: embed, write the tables, and record the outcome.

The shards of a large input are embedded while the rest of it is planned:

    thread  slice by slice: plan it, then all tables
              | ShardFeed                ^ Backlog
              v                          |
    main    executor: shards to workers, events

The plan in the folder is that of ``--plan-only``. Slices appear in it one by one, so a start that
was killed is resumed like any other, and plans what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from virnucpro.core.errors import FeatureFileError, InputError, InputMissingError
from virnucpro.core.events import EmbeddingStarted, ShardsPlanned
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, StreamingExecutor, WorkerConfig
from virnucpro.engine.progress import ProgressState
from virnucpro.engine.shard_feed import ShardFeed
from virnucpro.results.counts import RecordCounts
from virnucpro.store.plan import Plan
from virnucpro.workflows.run_context import RunContext
from virnucpro.workflows.run_steps import (
    PlanSteps,
    discard_damaged,
    embed_and_write,
    embed_and_write_once,
    find_pending,
    find_rows,
    finish_run,
    forward_events,
    log_summary,
    write_in_thread,
    write_missing_chunks,
)
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.write_tables import Backlog, TableWriter


def complete_run(
    plan: Plan, steps: PlanSteps, job: WorkerConfig, executor: Executor, summary: Summary
) -> None:
    """Embed and write the tables, or with --plan-only leave this to ``work`` processes."""
    if steps.config.options.plan_only:
        _leave_to_others(plan, steps, summary)
    elif plan.missing_slices:
        assert isinstance(executor, StreamingExecutor), "otherwise the plan is complete"
        context = embed_while_planning(plan, steps, job, executor, summary)
        finish_run(context, summary)
    else:
        context = steps.describe(plan)
        summary.count_plan(plan)
        embed_and_write(context, steps.config, job, executor, summary)
        finish_run(context, summary)
    log_summary(steps.run.dir, summary)


def _leave_to_others(plan: Plan, steps: PlanSteps, summary: Summary) -> None:
    context = steps.describe(plan)
    summary.count_plan(plan)
    for store in context.shard_stores:
        store.make_folder()  # for the ``work`` processes
    steps.record.write_begun("planned")
    summary.n_slices = len(plan.slices)


def embed_while_planning(
    plan: Plan,
    steps: PlanSteps,
    job: WorkerConfig,
    executor: StreamingExecutor,
    summary: Summary,
) -> RunContext:
    """Plan the missing slices, embed the shards as they are planned, and write the tables.

    If a new run turns out to have a rejected input, its folder is free again.

    Returns:
        The context of the run, with the complete plan.

    Raises:
        InputError, InputMissingError: an input is rejected.
        VirnucproError: see ``errors``. Finished shards and slices are kept.
    """
    run_dir = steps.run.dir
    stream = _PlanStream(plan, steps, job)
    try:
        _run_stream(stream, executor, summary)
    except (InputError, InputMissingError):
        if stream.context is None and steps.run.recorded is None:
            run_dir.delete_results()
        raise
    except FeatureFileError as error:
        if stream.context is None:
            raise
        discard_damaged(stream.context, job, error)
        embed_and_write_once(stream.context, steps.config, job, executor, summary)
    finally:
        run_dir.remove_leftovers()  # unfinished files of dead or stopped processes
    assert stream.context is not None, "tables have a complete plan"
    summary.count_plan(stream.context.plan)
    return stream.context


def _run_stream(stream: _PlanStream, executor: StreamingExecutor, summary: Summary) -> None:
    steps = stream.steps
    job = stream.job
    pool = steps.run.pool
    for store in job.shard_stores:
        store.make_folder()
    # A child ends with the thread that started it, so the other thread must start none.
    pool.start_helpers(sum(max(file.n_bytes, file.n_text_bytes) for file in steps.manifest.inputs))
    embedding, writing = summary.stages[-2:]
    started = EmbeddingStarted((), 0, encoders=job.encoders, planned_share=0.0)
    stream.report(started)
    with write_in_thread(pool, stream.backlog, stream.plan_and_write) as tables:
        with summary.stage(embedding):
            events = executor.run_feed(stream.feed, job, steps.config.resources)
            progress = stream.progress
            forward_events(events, steps.run.dir, progress, stream.backlog, tables, steps.on_event)
        summary.count_embedding(progress.embedding)
        with summary.stage(writing):
            summary.records = tables.result()


@dataclass(slots=True, eq=False)
class _PlanStream:
    """Plans the missing slices of a run in a thread, feeds an executor, then writes the tables."""

    plan: Plan
    steps: PlanSteps
    job: WorkerConfig
    feed: ShardFeed = field(default_factory=ShardFeed)
    backlog: Backlog = field(default_factory=Backlog)
    progress: ProgressState = field(default_factory=ProgressState)
    context: RunContext | None = None  # None: the plan is not complete

    def plan_and_write(self) -> RecordCounts:
        """Plan, then write the tables while the last shards are embedded.

        Raises:
            AbandonedError: embedding has stopped.
            VirnucproError: as ``Plan.plan_slices`` and ``TableWriter.write``.
        """
        try:
            plan = self._plan_slices()
            self.context = self.steps.describe(plan)
        finally:
            self.feed.close()
        self.context.finished_rows.delete_rows_without_vectors()
        writer = TableWriter(self.context, self.backlog)
        return writer.write(writer.count_helpers())

    def _plan_slices(self) -> Plan:
        """Plan the missing slices, and pass on the shards of each, after those of earlier starts.

        Raises:
            AbandonedError: embedding has stopped.
            InputError: an input is not a FASTA file, or an id occurs twice.
            UnavailableError: a process died.
        """
        plan = self.plan
        steps = self.steps
        planned = plan.select_slices(plan.slice_plans.keys())
        missing = list(find_rows(planned, steps).find_missing_shards())
        n_slices = len(plan.slices)
        self._pass_on(missing, len(planned.shards), len(planned.slices) / n_slices)
        slice_plans = dict(plan.slice_plans)
        for slice_, slice_plan in plan.plan_missing(steps.selection, steps.run.pool):
            slice_plans[slice_.index] = slice_plan
            shards = slice_plan.shards
            self._pass_on(shards, len(shards), len(slice_plans) / n_slices)
        plan = replace(plan, slice_plans=slice_plans)
        plan.reject_duplicates(is_begun=steps.run.recorded is not None)
        write_missing_chunks(plan, steps.selection)
        self.report(ShardsPlanned((), 0, 1.0, plan.shards_by_input))
        return plan

    def _pass_on(self, shards: Sequence[Shard], n_shards: int, planned_share: float) -> None:
        """Pass on the pending ones out of ``shards``, which may lack some of ``n_shards``.

        Raises:
            AbandonedError: embedding has stopped.
        """
        replaced = frozenset(self.steps.manifest.replaced)
        pending = find_pending(self.job.shard_stores, shards, replaced, lambda _: None)
        n_before = n_shards - len(pending)
        self.report(ShardsPlanned(tuple(pending), n_before, planned_share))
        self.backlog.add(pending)
        self.feed.add(pending)

    def report(self, event: EmbeddingStarted | ShardsPlanned) -> None:
        """Report planned shards before a worker gets them."""
        self.steps.on_event(event)
        self.progress.update(event)
