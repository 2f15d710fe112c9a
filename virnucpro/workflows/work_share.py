"""``virnucpro work``: do one part of a run on this machine.

A part plans input slices, embeds their shards, and writes their table rows. Any number of parts can
run concurrently, on any machines that share the run folder. Even the same part may run twice: files
appear complete, and their content does not depend on who writes them. At the end ``predict
--resume`` computes what is missing and joins the tables. No process waits for a part that does not
run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from virnucpro.core.errors import FeatureFileError, OutputError, ResumeError, UsageError
from virnucpro.core.events import (
    EmbeddingStarted,
    EventHandler,
    Progress,
    ShardDone,
    ShardFailed,
    WorkerEvent,
)
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.types import Shard
from virnucpro.engine.base import WorkerConfig
from virnucpro.engine.event_log import record_event
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.progress import ProgressState
from virnucpro.engine.work_options import WorkOptions
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, Selection
from virnucpro.store.plan_reader import read_plan, without_damaged
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.collect_inputs import number_taken_names
from virnucpro.workflows.extract import extract_context, record_extract
from virnucpro.workflows.extract_config import resolve_extract_part
from virnucpro.workflows.run_config import RunConfig
from virnucpro.workflows.run_context import RunContext
from virnucpro.workflows.run_steps import ExecutorOn, find_pending, write_in_thread
from virnucpro.workflows.summary import warn_of_cache
from virnucpro.workflows.write_tables import Backlog, Group, TableWriter, check_stored


@dataclass(slots=True)
class WorkShare:
    """One of ``n`` parts of a run, counted from 0, and what this process has done for it.

    A part is every n-th slice of the run, or every n-th share of the slices.
    """

    number: int = 0
    n: int = 1
    n_planned: int = 0  # slices that it has planned
    n_rows: int = 0  # slices with rows that it has written
    n_pending: int = 0  # shards that it has to embed
    progress: ProgressState = field(default_factory=ProgressState, compare=False)

    def __str__(self) -> str:
        return f"part {self.number + 1} of {self.n}"

    def shares(self, n_slices: int, *, has_shards: bool = True) -> tuple[int, dict[int, list[int]]]:
        """Divide the slices into shares.

        Shares do not depend on other parts or on finished work. A run with few slices is divided
        within the slices, by shards.

        Returns:
            Shares per slice, and this part's shares by slice index.
        """
        min_shares = 4  # per part, so that all parts have about the same work
        n_shares = max(1, -(-min_shares * self.n // max(1, n_slices))) if has_shards else 1
        ours: dict[int, list[int]] = {}
        for share in range(self.number, n_slices * n_shares, self.n):
            ours.setdefault(share // n_shares, []).append(share % n_shares)
        return n_shares, ours

    @property
    def n_shards(self) -> int:
        """Shards that it has embedded."""
        return len(self.progress.embedding.done)

    @property
    def exit_code(self) -> int:
        return 2 if self.progress.embedding.n_failed else 0

    @property
    def lines(self) -> list[str]:
        """The lines that the user sees at the end."""
        embedding = self.progress.embedding
        work = []
        if self.n_planned:
            work.append(f"{format_count(self.n_planned, 'slice')} planned")
        if self.n_pending:
            work.append(f"{self.n_shards:,} of {format_count(self.n_pending, 'shard')} embedded")
        if self.n_rows:
            work.append(f"tables of {format_count(self.n_rows, 'slice')} written")
        lines = [f"{self} done: {', '.join(work) or 'nothing was left to do'}"]
        if n_tokens := embedding.n_tokens_embedded:
            rate = embedding.tokens_per_second
            lines += [f"embedded: {n_tokens:,} tokens at {rate:,.0f} per second"]
        if embedding.n_cached:
            lines += [f"cache: {format_count(embedding.n_cached, 'vector')} read"]
        lines += map(printable, embedding.lost_devices)
        if self.exit_code:
            n_failed = sum(embedding.done.values())
            n_lost = len(embedding.lost)
            lines += [
                f"failed: {format_count(n_failed, 'sequence')} and {format_count(n_lost, 'shard')}",
                "  run the same command again, or --resume, to try them again",
            ]
        if work:
            lines += ["next: when all parts are done, run the planned command with --resume"]
        return lines


def work(
    options: WorkOptions, on_event: EventHandler, executor_on: ExecutorOn = ProcessExecutor
) -> WorkShare:
    """Plan and embed a part of a run on the devices of this machine, and write its rows.

    Raises:
        VirnucproError: see ``errors``. Finished files are always kept.
    """
    rundir = open_run_dir(options.folder)
    part = choose_part(options.part, options.array)
    find_run(rundir)
    with rundir.shared():
        recorded = find_run(rundir)
        has_tables = rundir.record_table(recorded.recipe.command).exists()
        if has_tables and read_plan(rundir, recorded) is None:
            announce("nothing to do: this run is complete")
            return part
        inputs = tuple(file.with_stamp() for file in recorded.inputs)
        manifest = number_taken_names(replace(recorded, inputs=inputs), on_event)
        share = resolve_share(rundir, manifest, options, on_event)
        with HelperPool(share.config.resources.n_helpers) as pool:
            plan, groups, shards = plan_part(share, part, pool, on_event)
            context = share.make_context(plan, pool, on_event)
            do_part(context, share, part, groups, shards, executor_on)
    return part


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShare:
    """A planned run, resolved for this machine."""

    config: RunConfig
    plan: Plan  # for the complete run
    job: WorkerConfig
    selection: Selection
    # Builds the context of the run with another plan, such as that of a part.
    make_context: Callable[[Plan, HelperPool, EventHandler], RunContext]


def resolve_share(
    rundir: RunDir, manifest: Manifest, options: WorkOptions, on_event: EventHandler
) -> RunShare:
    """Resolve a planned run for this machine.

    Raises:
        ResumeError: the run has no plan.
        VirnucproError: as ``resolve_extract_part`` and ``resolve_predict_part``.
    """
    plan = read_plan(rundir, manifest)
    if plan is None:
        raise ResumeError(
            f"{printable(rundir.root)} has no plan, or a damaged one",
            hint="make it with --resume --plan-only, and the options of the run",
        )
    if manifest.recipe.command == "extract":
        return _resolve_extract_share(plan, options, on_event)
    return _resolve_predict_share(plan, options, on_event)


def _resolve_extract_share(plan: Plan, options: WorkOptions, on_event: EventHandler) -> RunShare:
    rundir = plan.rundir
    config = resolve_extract_part(options, rundir.read_facts(), plan.manifest, on_event)
    record = record_extract(rundir, config, plan.manifest)
    return RunShare(
        config=config,
        plan=plan,
        job=WorkerConfig.from_recipe(rundir, plan.manifest.recipe, config.weights, options),
        selection=Selection(),
        make_context=partial(extract_context, config, record),
    )


def _resolve_predict_share(plan: Plan, options: WorkOptions, on_event: EventHandler) -> RunShare:
    # an extraction needs no classifier
    from virnucpro.workflows.predict import (
        make_sink,
        predict_context,
        record_predict,
        resolve_calls,
    )
    from virnucpro.workflows.predict_rows import SELECTION
    from virnucpro.workflows.resolve_predict import resolve_predict_part

    rundir = plan.rundir
    config = resolve_predict_part(options, rundir.read_facts(), plan.manifest, on_event)
    recipe = plan.manifest.recipe
    calls = resolve_calls(config, rundir, recipe)
    record = record_predict(rundir, config, plan.manifest, calls)
    sink = make_sink(rundir, recipe, calls.classifier)
    return RunShare(
        config=config,
        plan=plan,
        job=WorkerConfig.from_recipe(rundir, recipe, config.weights, options, sink),
        selection=SELECTION,
        make_context=partial(predict_context, config, record, calls),
    )


def do_part(
    context: RunContext,
    share: RunShare,
    part: WorkShare,
    groups: Sequence[Group],
    shards: Mapping[int, Sequence[Shard]],
    executor_on: ExecutorOn,
) -> None:
    """Embed, and write rows. Slices that other parts have finished by then come last.

    If parts share a slice, the last one to finish writes its rows.

    Args:
        context: with the part's plan.
        groups: its slices.
        shards: its shards, by first slice.
    """
    plan = context.plan
    job = share.job
    replaced = frozenset(plan.manifest.replaced)
    ours = list(chain(*shards.values()))
    pending = find_pending(job.shard_stores, ours, replaced, context.on_event)
    part.n_pending = len(pending)
    n_shards = len(ours)
    if n_shards:
        announce(f"{part}: {len(pending):,} of {format_count(n_shards, 'shard')} to embed")
    has_rows = context.finished_rows.cache.has
    missing = [group for group in groups if not has_rows(group)]
    alone = []
    for group in missing:
        n_group_shards = len(_run_all(plan, group))
        if len(shards[group[0].index]) == n_group_shards:
            alone.append(group)
    backlog = Backlog(pending)
    with (
        writing_part(context, backlog, alone) as tables,
        closing(embed(pending, job, share.config, executor_on)) as events,
    ):
        if pending:
            n_before = n_shards - len(pending)
            started = EmbeddingStarted(tuple(pending), n_before, encoders=job.encoders)
            context.on_event(started)
            part.progress.update(started)
        for event in events if pending else ():
            context.on_event(event)
            backlog.on_event(event)
            record_event(event, part.progress)
            warn_of_cache(event)
        tables.result()
    done: set[str] = set()
    if job.stores:
        done = set.intersection(*(store.completed_names() for store in job.shard_stores))
    shared = [
        group
        for group in missing
        if group not in alone and all(shard.name in done for shard in _run_all(plan, group))
    ]
    with writing_part(context, Backlog(), shared) as tables:
        tables.result()
    part.n_rows = sum(map(has_rows, missing))


def plan_part(
    share: RunShare, part: WorkShare, pool: HelperPool, on_event: EventHandler
) -> tuple[Plan, list[Group], dict[int, list[Shard]]]:
    """Plan a part's slices that are not planned yet.

    Returns:
        The plan of its slices, these slices, and its shards by first slice.

    Raises:
        InputError: an input is not a FASTA file, or an id occurs twice in this part.
    """
    groups = list(share.plan.group_by_records())
    n_shares, ours = part.shares(len(groups), has_shards=bool(share.job.stores))
    slices = [slice_ for index in ours for slice_ in groups[index]]
    plan = share.plan.select_slices({slice_.index for slice_ in slices})
    plan = without_damaged(plan, plan.shards)
    part.n_planned = len(plan.missing_slices)

    def on_letters(n_done: int) -> None:
        on_event(Progress("planning this part", n_done, 0, "letters"))

    if slices:
        plan = plan.plan_slices(share.selection, on_letters, pool)
        now = read_plan(plan.rundir, plan.manifest)
        if part.n_planned and now is not None and not now.missing_slices:
            now.reject_duplicates(is_begun=True)
    shards: dict[int, list[Shard]] = {}
    for index, shares in ours.items():
        shards[groups[index][0].index] = [
            shard
            for number, shard in enumerate(_run_all(plan, groups[index]))
            if number % n_shares in shares
        ]
    return plan, [groups[index] for index in ours], shards


@contextmanager
def writing_part(
    context: RunContext, backlog: Backlog, groups: Sequence[Group]
) -> Iterator[Future[None]]:
    """Write slice rows in a thread that ends with the block."""
    writer = TableWriter(context, backlog)
    helpers = writer.count_helpers(groups)

    def write() -> None:
        try:
            writer.write_rows(groups, helpers)
        except FeatureFileError as error:
            LOGGER.warning("%s; the tables of this part are written at the end of the run", error)

    with write_in_thread(context.pool, backlog, write) as tables:
        yield tables


def _run_all(plan: Plan, group: Group) -> list[Shard]:
    """List the shards of slices with the same records."""
    return list(chain.from_iterable(plan.slice_plans[slice_.index].shards for slice_ in group))


def work_for_run(options: WorkOptions, indices: Sequence[int]) -> list[ShardDone | ShardFailed]:
    """Embed shards for the run that locks the folder, until they are done or the run is over.

    If this machine cannot see the lock at the start, it does not check whether the run is over.

    Returns:
        The end of each shard.

    Raises:
        OutputError: the run is over.
        VirnucproError: see ``errors``.
    """
    look_seconds = 2.0  # between two checks whether the run is over
    rundir = open_run_dir(options.folder)
    ends: list[ShardDone | ShardFailed] = []
    with rundir.locked_for_work():
        can_see = rundir.has_run
        last = time.monotonic()
        share = resolve_share(rundir, find_run(rundir), options, lambda _: None)
        shards_by_index = {shard.index: shard for shard in share.plan.shards}
        shards = [shards_by_index[index] for index in indices]
        progress = ProgressState()
        with closing(embed(shards, share.job, share.config, ProcessExecutor)) as events:
            for event in events:
                if isinstance(event, (ShardDone, ShardFailed)):
                    check_stored(event)
                    ends.append(event)
                record_event(event, progress)
                warn_of_cache(event)
                if not can_see or time.monotonic() - last <= look_seconds:
                    continue
                last = time.monotonic()
                if not rundir.has_run:
                    raise OutputError(
                        f"the run in {printable(rundir.root)} ended while this machine worked on "
                        "it",
                        hint="continue with --resume",
                    )
    return ends


def embed(
    shards: Sequence[Shard], job: WorkerConfig, config: RunConfig, executor_on: ExecutorOn
) -> Generator[WorkerEvent, None, None]:
    """Embed shards here and yield the events. At the end, delete this process's partial files."""
    for announcement in config.announcements:
        announce(announcement)
    executor = executor_on(config.resources.devices)
    for store in job.shard_stores:
        store.make_folder()
    try:
        with closing(executor.run(shards, job, config.resources)) as events:
            yield from events
    finally:
        for store in job.stores:
            store.delete_partials(job.owner)


def find_run(rundir: RunDir) -> Manifest:
    """Read the run in a folder.

    Raises:
        InputMissingError: the folder has no run.
        ResumeError: the run is damaged or from another version, or other machines cannot name its
            model.
    """
    hint = "plan one: virnucpro predict --plan-only --output-dir DIR, with input and options"
    manifest = rundir.read_run(hint)
    if len(manifest.models) != len(manifest.recipe.encoders):
        raise ResumeError(
            f"{printable(rundir.root)} contains a run with {printable(manifest.recipe.reader)}, "
            "which was not planned for several machines",
            hint="run its command with --resume --plan-only",
        )
    return manifest


def choose_part(text: str | None, array: Mapping[str, str]) -> WorkShare:
    """Parse ``--part``: I/N, or, in a job array, N or nothing.

    Args:
        array: environment variables, in which a batch system numbers the tasks of an array.

    Raises:
        UsageError: the text is not a part, or the array does not say which one this task is.
    """
    tasks = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID")
    task = next((array[name] for name in tasks if array.get(name, "").isdecimal()), None)
    if text is None:
        return WorkShare() if task is None else _array_task_part(array)
    words = re.fullmatch(r"(?:([0-9]{1,9})/)?([1-9][0-9]{0,8})", text)
    if words is None:
        raise UsageError(f"--part {printable(text)} is not a part", hint="give one as --part 3/16")
    n = int(words[2])
    if words[1] is None and task is not None:
        return WorkShare(int(task) % n, n)
    if words[1] is None or not 1 <= int(words[1]) <= n:
        raise UsageError(
            f"--part {text} names no part: parts are 1/{n} to {n}/{n}",
            hint=f"give one of these; --part {n} alone is for the tasks of a job array",
        )
    return WorkShare(int(words[1]) - 1, n)


def _array_task_part(array: Mapping[str, str]) -> WorkShare:
    """Return the part of a task in a SLURM job array with equally spaced numbers.

    Raises:
        UsageError: the array does not say which part this task is.
    """
    with suppress(KeyError, ValueError, ZeroDivisionError):
        variables = tuple(
            f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
        )
        number, first, last, step, n = (int(array[name]) for name in variables)
        if last - first == (n - 1) * step and (number - first) % step == 0:
            return WorkShare((number - first) // step, n)
    raise UsageError(
        "this job array does not say which part each task does: it is not of SLURM, or has gaps",
        hint="give the number of tasks of the complete array, as in --part 16, or --part I/N",
    )
