"""``virnucpro extract``: embed the input records, and list the status of each."""

from __future__ import annotations

from virnucpro.core.events import STAGES, EventHandler
from virnucpro.core.helper_pool import HelperPool
from virnucpro.engine.base import Executor
from virnucpro.engine.local import ProcessExecutor
from virnucpro.results.outputs import OUTPUTS, open_run_dir
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, Selection
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.complete_run import complete_run
from virnucpro.workflows.extract_config import ExtractConfig, resolve_extract
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.extract_rows import EmbeddingRowBuilder
from virnucpro.workflows.run_context import RunContext, RunRecord, has_sample_tables
from virnucpro.workflows.run_steps import (
    ExecutorOn,
    PlanSteps,
    announce_plan,
    choose_executor,
    lock_run_dir,
    make_plan,
    open_run,
    read_inputs,
    start_record,
    start_workers,
)
from virnucpro.workflows.summary import Summary


def extract(
    options: ExtractOptions,
    on_event: EventHandler,
    executor_on: ExecutorOn = ProcessExecutor,
    pool: HelperPool | None = None,
    *,
    create: bool = True,
) -> Summary:
    """Embed the input records into the run folder.

    Args:
        pool: helpers that may still be starting. None: start them when they are needed.
        create: create the output folder if it is missing.

    Raises:
        VirnucproError: see ``errors``. Finished shards are always kept.
    """
    with lock_run_dir(options.output_dir, create=create) as lock_new_folder:
        config = resolve_extract(options, on_event)
        lock_new_folder()
        executor = choose_executor(config, executor_on)
        return run_locked_extract(config, executor, on_event, pool)


def run_extract(
    config: ExtractConfig,
    executor: Executor,
    on_event: EventHandler,
    pool: HelperPool | None = None,
) -> Summary:
    """Run or resume an extraction. Creates the folder if it is missing.

    Raises:
        VirnucproError: see ``errors``. Finished shards are always kept.
    """
    with open_run_dir(config.output).locked(create=True):
        return run_locked_extract(config, executor, on_event, pool)


def run_locked_extract(
    config: ExtractConfig,
    executor: Executor,
    on_event: EventHandler,
    pool: HelperPool | None = None,
) -> Summary:
    """Run or resume an extraction in a folder that the caller has locked.

    Raises:
        VirnucproError: see ``errors``. Finished shards are always kept.
    """
    summary = Summary()
    with open_run(config, executor, pool) as run:
        with summary.stage(STAGES[0]), run.dir.planning():
            manifest = read_inputs(run, config, on_event)
            record = record_extract(run.dir, config, manifest)
            job = start_workers(run, config, record, executor)

            def describe(plan: Plan) -> RunContext:
                context = extract_context(config, record, plan, run.pool, on_event)
                announce_plan(context, config.options, warnings=warn_of_plan(plan))
                return context

            steps = PlanSteps(
                run=run,
                record=record,
                config=config,
                selection=Selection(),
                scores=None,
                describe=describe,
                on_event=on_event,
            )
            plan = make_plan(steps, executor)
        complete_run(plan, steps, job, executor, summary)
    return summary


def record_extract(run_dir: RunDir, config: ExtractConfig, manifest: Manifest) -> RunRecord:
    """Record the facts of an extraction and the key of its rows."""
    key = ("extract", config.options.format, has_sample_tables(config.options, run_dir))
    return start_record(run_dir, config, manifest, config.announcements, key)


def extract_context(
    config: ExtractConfig, record: RunRecord, plan: Plan, pool: HelperPool, on_event: EventHandler
) -> RunContext:
    """Build the context that the steps after planning share."""
    options = config.options
    run_dir = record.run_dir
    manifest = plan.manifest
    per_file = has_sample_tables(options, run_dir)
    return RunContext(
        run_dir=run_dir,
        record=record,
        plan=plan,
        row_builder=EmbeddingRowBuilder(
            manifest=manifest,
            stores=run_dir.feature_stores(manifest.recipe),
            slices=plan.shards_by_slice,
            feature_format=options.format,
            per_file=per_file,
            with_own_ids=per_file and manifest.is_qualified,
        ),
        outputs=OUTPUTS["extract"],
        scores=None,
        searches_regions=False,
        per_file=per_file,
        keep_intermediate=options.keep_intermediate,
        has_report=options.report,
        pool=pool,
        on_event=on_event,
        max_merged_bytes=config.max_merged_bytes,
    )


def warn_of_plan(plan: Plan) -> list[str]:
    """Warn if there is nothing to embed."""
    if plan.shards:
        return []
    return ["no record has a frame to embed: the table has the status of each"]
