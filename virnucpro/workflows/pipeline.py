"""Run ``virnucpro predict`` and ``virnucpro extract`` from options to tables.

The two differ in one thing: ``predict`` calls. The command line, the Python interface and the tests
all enter here.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from virnucpro._version import __version__
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.events import (
    STAGES,
    STARTING,
    BatchDone,
    EmbeddingStarted,
    Event,
    OnEvent,
    Progress,
    ShardDone,
    WorkerReady,
)
from virnucpro.core.helper_pool import Pool
from virnucpro.core.logging import LOGGER, announce, counted, printable
from virnucpro.core.option_schema import carry
from virnucpro.core.recipe import Recipe
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Job, Resources
from virnucpro.engine.device_timeline import Start
from virnucpro.engine.local import ProcessExecutor
from virnucpro.models.devices import torch_build
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.checksums import Outputs
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan
from virnucpro.viral.classifier import Caller
from virnucpro.viral.options import CutOptions
from virnucpro.viral.provirus import RegionFinder
from virnucpro.workflows.collect_inputs import open_run
from virnucpro.workflows.options import ExtractOptions, PredictOptions, RunOptions, facts_of
from virnucpro.workflows.rethreshold import cut_again, lost_inputs
from virnucpro.workflows.run_config import RunConfig, resolve
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.table_cache import RowStore
from virnucpro.workflows.table_tasks import SELECTION, Maker
from virnucpro.workflows.write_tables import Backlog, Results

# time to read a letter, in units of the time to score one: 0.07 for contigs of 3,000 bases, 0.11
# for chromosomes, 0.13 for reads of 150 (`taskset -c 1 virnucpro predict -i FILE --workers 1`)
_READING = 0.1
_BYTES_PER_WORKER = 1_000_000  # of input; less is planned in a tenth of a second

ExecutorOn = Callable[[Sequence[str]], Executor]  # devices -> executor


def execute(
    options: RunOptions,
    on_event: OnEvent,
    executor_on: ExecutorOn = ProcessExecutor,
    pool: Pool | None = None,
) -> Summary:
    """Call viruses or make vectors in the run folder, as the options say.

    ``pool``: helpers that may still be starting; None: start them when they are needed.

    Raises:
        VirnucproError: see ``errors``; finished shards are kept in every case.
    """
    config = resolve(options, on_event)
    is_left_to_others = options.no_embed or options.plan_only
    executor = ProcessExecutor(()) if is_left_to_others else executor_on(config.resources.devices)
    return run(config, executor, on_event, pool)


def run(
    config: RunConfig, executor: Executor, on_event: OnEvent, pool: Pool | None = None
) -> Summary:
    """Run, or resume, a prediction or an extraction.

    Raises:
        VirnucproError: see ``errors``; finished shards are kept in every case.
    """
    options, rundir, summary = config.options, open_run_dir(config.output), Summary()
    pool = pool or Pool(config.resources.n_helpers)
    with rundir.in_use(), closing(executor), pool:
        rundir.check_free(resume=options.resume, force=options.force)
        LOGGER.info("virnucpro %s: %s", __version__, printable(" ".join(options.argv)))
        recorded = rundir.read_manifest() if options.resume else None
        if recorded and (lost := lost_inputs(options, rundir, recorded)):
            recorded.check_same_recipe(config.recipe_for(recorded.recipe.input_type))
            cut_again(make_results(config, recorded, pool, on_event), lost[0], summary)
        else:
            with summary.stage(STAGES[0]), rundir.planning():
                results, job = begin(config, executor, pool, summary, on_event)
            if options.plan_only:
                close_plan(results, summary)
            else:
                complete(results, job, executor, config.resources, summary)
                results.close(summary)
        for line in summary.lines(rundir.root):
            LOGGER.info("%s", line)
    return summary


def begin(
    config: RunConfig, executor: Executor, pool: Pool, summary: Summary, on_event: OnEvent
) -> tuple[Results, Job]:
    """Open and plan the run while its workers start, and announce what it will do.

    -> everything that the outputs are made from, and the job of the workers
    """
    options, rundir = config.options, open_run_dir(config.output)
    recorded = None if options.force else rundir.read_manifest()
    if options.resume and recorded is None:
        announce(f"no run yet in {printable(rundir.root)}: starting a new one")
    if options.force:
        rundir.refuse_to_clear(options.input)
    manifest = open_run(options, config.recipe_for, rundir, recorded, on_event)
    options.check_type(manifest.recipe.input_type)
    manifest = replace(manifest, models=config.models, embed=config.rules)
    results = make_results(config, manifest, pool, on_event)
    for announcement in results.facts["announced"]:
        announce(announcement)
    for compromise in config.compromises:
        LOGGER.warning("%s", compromise)
    job = Job.of(rundir, manifest.recipe, config.weights, options)
    if job.stores:
        executor.start(job, config.resources, count_worth_starting(manifest, recorded))
    results = replace(results, plan=plan_run(results, recorded))
    rundir.clear_copies(manifest)
    if options.plan_only:
        files = counted(len(manifest.inputs), "file")
        slices = counted(len(results.plan.slices), "slice")
        announce(f"{files}, {manifest.recipe.input_type}; {slices}")
    else:
        announce_input(results)
    summary.announce_cut(results.plan, results.maker.caller, recorded)
    rundir.delete(rundir.report)  # it shows an earlier state
    return results, job


def make_results(config: RunConfig, manifest: Manifest, pool: Pool, on_event: OnEvent) -> Results:
    """Collect what the outputs of a run are made from, before it is planned."""
    rundir, options, recipe = open_run_dir(config.output), config.options, manifest.recipe
    caller = config.caller.of_type(recipe.input_type)
    finder = make_finder(options, recipe, caller)
    digest = finder.digest if finder else ""
    layout = options.format if isinstance(options, ExtractOptions) else "h5"
    per_file = options.per_file or (options.resume and rundir.samples.is_dir())
    scores = ScoreStore(rundir, rundir.scores, recipe.fingerprint, digest)
    maker = Maker(
        manifest=manifest,
        stores=rundir.stores_of(recipe),
        caller=caller,
        finder=finder,
        feature_format=layout,
        with_own_ids=per_file and manifest.is_qualified,
        scores=scores if caller.keeps_scores else None,
    )
    cut = carry(options, CutOptions, region_model=None) if isinstance(options, CutOptions) else ""
    hashes = sorted(caller.hashes.items())
    made_by = (type(caller).__name__, hashes, caller.cut, cut, digest, (layout, per_file))
    return Results(
        outputs=Outputs(rundir),
        maker=maker,
        plan=Plan(rundir, manifest),
        options=options,
        facts=_facts(config, caller),
        pool=pool,
        per_file=per_file,
        on_event=on_event,
        made_by=hashlib.sha256(repr(made_by).encode()).hexdigest(),
    )


def make_finder(options: RunOptions, recipe: Recipe, caller: Caller) -> RegionFinder | None:
    """Make the finder of regions in nucleotides; it uses the scorer, whatever the caller."""
    if not isinstance(options, PredictOptions) or not options.regions:
        return None
    if recipe.input_type != "nucleotide":
        return None
    least = options.least_posterior
    return RegionFinder.embedded(recipe.genetic_code, caller.scorer, options.region_model, least)


def plan_run(results: Results, recorded: Manifest | None) -> Plan:
    """Cut the inputs into shards, unless an earlier start did, and claim the folder.

    With --plan-only, cut them into slices, which other processes plan. Old results are deleted and
    ``run.json`` is written only after every input was read to its end, so a refused input changes
    nothing. A kill at any point leaves a folder with a run, or a free one.
    """
    rundir, manifest, on_event = results.rundir, results.maker.manifest, results.on_event
    plan_only, keep = results.options.plan_only, results.options.keep_intermediate
    plan = find_plan(results, keep=keep) if recorded else None
    if plan is None:
        plan = Plan.cut(rundir, manifest, keep_intermediate=keep)
    if not plan_only:
        total = 0 if plan.parts else InputFile.letters_of(manifest.inputs)
        is_scored = not results.maker.stores
        plan = plan.make(
            SELECTION, lambda done: on_event(_reading(done, total, is_scored)), results.pool
        )
    if plan.is_aside:
        plan.write_listing()
        if recorded is None:
            rundir.clear()
    results.record("unfinished", **{RowStore.field: results.made_by})
    if plan.is_aside:
        rundir.adopt_plan()
        plan = replace(plan, is_aside=False)
    if plan.keeps_chunks and not (plan_only or rundir.chunks.is_file()):
        plan.write_chunks(SELECTION)
    return plan


def _reading(done: int, total: int, is_scored: bool) -> Progress:
    """The progress of planning. Before a model has run, nobody knows how long embedding takes."""
    work = None
    if is_scored and total:
        n_unread = max(0, total - done)
        work = (int(done * _READING), int(n_unread * _READING) + total)
    return Progress(STAGES[0], done, total, "letters", work)


def find_plan(results: Results, *, keep: bool) -> Plan | None:
    """Read the plan of an earlier start, if it belongs to this run: slices with intact files.

    Shards of slices that have rows are not read: nothing needs them.
    """
    plan = Plan.read(results.rundir, results.maker.manifest)
    if plan is None or (keep and not plan.keep_intermediate):
        return None
    plan = replace(plan, keep_intermediate=keep)
    needed = {one.index for one in plan.slices}.difference(results.joined(plan))
    on_shard = _on_shard(results.on_event, "checking shards")
    return plan.without_damaged(plan.limited(needed).shards, on_shard)


def count_worth_starting(manifest: Manifest, recorded: Manifest | None) -> int:
    """Estimate how many workers pay off for inputs that are not planned yet."""
    new = manifest.inputs[len(recorded.inputs) if recorded else 0 :]
    return sum(file.n_bytes for file in new) // _BYTES_PER_WORKER


def close_plan(results: Results, summary: Summary) -> None:
    """Finish a plan: make the folders that the processes of ``work`` need."""
    for store in results.maker.stores:
        store.make_folder()
    results.record("planned", **{RowStore.field: results.made_by})
    summary.n_slices = len(results.plan.slices)


def complete(
    results: Results, job: Job, executor: Executor, resources: Resources, summary: Summary
) -> None:
    """Embed what is missing and write the tables; repeat if a feature file was damaged."""
    try:
        embed_and_write(results, job, executor, resources, summary)
    except FeatureFileError as error:
        LOGGER.warning("%s; checking every feature file; damaged ones are made again", error)
        on_shard = _on_shard(results.on_event, "checking every feature file")
        for store in job.stores:
            store.discard_damaged(results.plan.shards, on_shard)
        embed_and_write(results, job, executor, resources, summary)


def embed_and_write(
    results: Results, job: Job, executor: Executor, resources: Resources, summary: Summary
) -> None:
    """Embed what is missing, and write the tables as shards are done.

    Raises:
        FeatureFileError: a file that looked finished has damaged content.
    """
    plan, stores, on_event = results.plan, results.maker.stores, results.on_event
    before_tables, of_tables = summary.stages[-2:]
    with summary.stage(before_tables):
        owed = list(results.shards_without_rows())
        pending = find_pending(stores, owed, frozenset(results.maker.manifest.replaced), on_event)
        for store in stores if pending else ():
            store.make_folder()
    results = replace(results, backlog=Backlog(pending))
    write = partial(results.write, summary, results.helpers())
    try:
        if not pending:
            executor.close()  # workers started for inputs that gave no shard
            with summary.stage(of_tables), results.pool.ended_by_errors():
                write()
            return
        n_before = len(plan.shards) - len(pending)
        on_event(EmbeddingStarted(tuple(pending), n_before, plan.files, job.encoders))
        with beside(results, write) as tables:
            with summary.stage(before_tables):
                embed(executor.run(pending, job, resources), results, summary, tables)
            with summary.stage(of_tables):
                tables.result()
    finally:
        results.rundir.sweep()  # unfinished files of dead or stopped processes


@contextmanager
def beside(results: Results, write: Callable[[], None]) -> Iterator[Future[None]]:
    """Write tables in a thread that waits for each shard; it ends with the ``with`` block."""
    thread = ThreadPoolExecutor(1, "tables")
    try:
        with results.pool.ended_by_errors():
            yield thread.submit(write)
    finally:
        results.backlog.abandon()
        thread.shutdown()


def embed(
    events: Generator[Event, None, None],
    results: Results,
    summary: Summary,
    tables: Future[None],
) -> None:
    """Follow the events of an executor to their end, or until writing the tables fails."""
    machine = Start()
    start = time.monotonic()
    with machine.kept(results.rundir.machine), closing(events):
        for event in events:
            results.on_event(event)
            machine.take(event)
            results.backlog.take(event)
            match event:
                case WorkerReady(description=description):
                    summary.workers.append(description)
                    summary.seconds.setdefault(STARTING, round(time.monotonic() - start, 3))
                case BatchDone(n_tokens=n_tokens):
                    summary.n_tokens += n_tokens
                case ShardDone():
                    summary.count_cached(event)
            if tables.done() and not results.backlog.is_empty:
                return
    assert results.backlog.is_empty, "an executor ends each shard in ShardDone or ShardFailed"


def find_pending(
    stores: Sequence[FeatureStore],
    shards: Sequence[Shard],
    replaced: frozenset[str],
    on_event: OnEvent,
) -> list[Shard]:
    """The shards that an encoder still has to embed; failures of ``replaced`` records do not count.

    Nothing is deleted: other processes may be writing.
    """
    on_shard = _on_shard(on_event, "checking finished shards")
    by_store = [store.find_pending(shards, replaced, on_shard) for store in stores]
    owed = {shard.index for shard in chain.from_iterable(by_store)}
    return [shard for shard in shards if shard.index in owed]


def _on_shard(on_event: OnEvent, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: on_event(Progress(stage, done, total, "shards"))


def _facts(config: RunConfig, caller: Caller) -> dict[str, Any]:
    """The facts about this start for ``run.json``, all but the state of the run."""
    torch = torch_build()
    versions = {"torch": torch.version} if torch else {}
    return {
        "argv": list(config.options.argv),
        "versions": {**versions, "numpy": np.__version__},
        "host": socket.gethostname(),
        "checkpoints": list(map(str, config.checkpoints)),
        "announced": [*caller.announcements, *config.announcements],
        "resources": asdict(config.resources),
        **facts_of(config.options),
    }


def announce_input(results: Results) -> None:
    """Announce the input, and warn about what weakens calls."""
    plan, manifest = results.plan, results.maker.manifest
    counts, recipe = plan.counts, manifest.recipe
    shards = f"; {counted(len(plan.shards), 'shard')}" if plan.shards else ""
    records = counted(counts.n_records, "record")
    announce(f"{records} of {counted(len(manifest.inputs), 'file')}, {recipe.input_type}{shards}")
    if not counts.n_records:
        LOGGER.warning(
            "the input has no records, so tables have only a header: check the files, or what "
            "writes to the pipe"
        )
        return
    numbers = (counts.n_records, counts.n_short, len(plan.shards))
    for warning in results.maker.caller.warnings(recipe.chunk_size, *numbers):
        LOGGER.warning("%s", warning)
    if counts.n_gaps:
        LOGGER.warning(
            "left out: %s (- . ~) of an alignment, in %s",
            counted(counts.n_gaps, "gap"),
            counted(counts.n_gapped, "record"),
        )
