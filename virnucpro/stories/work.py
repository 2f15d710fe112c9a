"""The whole of ``virnucpro work``, on one page: a part of a planned run, on this machine.

Any number may be at it at once, on any machines that share the run folder, over the same part too:
a feature file appears when it is whole, and is the same whoever makes it. What is missing in the
end is made by ``predict --resume``, which also writes the tables.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

from virnucpro.engine.job import Job
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.options import WorkOptions
from virnucpro.ground.errors import OutputError, ResumeError, UsageError
from virnucpro.ground.events import (
    BatchDone,
    EmbeddingStarted,
    Event,
    OnEvent,
    Progress,
    ShardDone,
    ShardFailed,
    WorkerReady,
)
from virnucpro.ground.log import announce, counted, printable
from virnucpro.ground.records import Shard
from virnucpro.run.folder import RunDir
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import read_plan
from virnucpro.run.work_log import ShardFigures
from virnucpro.stories.pipeline import ExecutorOn, check_stored, make_job, open_cache
from virnucpro.stories.resolve import WorkConfig, resolve_work
from virnucpro.stories.summary import warn_of_cache

_LOOK_SECONDS = 2.0  # between two looks at a run that is helped


@dataclass(frozen=True, slots=True)
class Part:
    """One of ``n`` parts of the shards: every n-th, by its index. They are counted from 0."""

    number: int = 0
    n: int = 1

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.n}"

    def of(self, shards: Sequence[Shard]) -> list[Shard]:
        """Its shards, whatever the others do: parts never depend on what is done already."""
        return [shard for shard in shards if shard.index % self.n == self.number]


@dataclass(slots=True)
class PartResult:
    """The outcome of the shards of one ``work``."""

    part: Part
    n_pending: int = 0  # shards that it had to do
    n_shards: int = 0  # shards that it did
    n_failed: int = 0  # sequences that failed
    n_lost: int = 0  # shards that were given up
    n_tokens: int = 0
    n_cached: int = 0  # vectors that a cache had
    ready: float = field(default_factory=time.monotonic)  # time when the first worker was
    tokens: dict[int, int] = field(default_factory=dict)  # of shards in work
    ended: list[ShardFigures] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 2 if self.n_failed or self.n_lost else 0

    @property
    def lines(self) -> list[str]:
        """The lines for the user at the end."""
        seconds = time.monotonic() - self.ready
        pending = counted(self.n_pending, "pending shard")
        outcome = f"{self.n_shards:,} of {pending} done" if self.n_pending else "nothing left to do"
        lines = [f"part {self.part}: {outcome}"]
        if self.n_tokens:
            rate = self.n_tokens / max(1e-3, seconds)
            lines += [f"tokens: {self.n_tokens:,} embedded at {rate:,.0f} per second"]
        if self.n_cached:
            lines += [f"cache: {counted(self.n_cached, 'vector')} read"]
        if self.n_failed or self.n_lost:
            lines += [
                f"failed: {counted(self.n_failed, 'sequence')}, and "
                f"{counted(self.n_lost, 'shard')} as a whole; the same again, or --resume, "
                "tries them again"
            ]
        if self.n_shards:
            lines += ["next: when all parts are done, the planned command with --resume"]
        return lines

    def take(self, event: Event) -> None:
        """Count an event, and write the end of a shard into the log.

        Raises:
            OutputError, StorageError: the disk did not take a shard.
        """
        match event:
            case WorkerReady() if not self.n_tokens:
                self.ready = time.monotonic()
            case BatchDone(shard=shard, n_tokens=n_tokens):
                self.n_tokens += n_tokens
                self.tokens[shard.index] = self.tokens.get(shard.index, 0) + n_tokens
            case ShardDone(n_failed=n_failed):
                warn_of_cache(event)
                self.n_shards += 1
                self.n_failed += n_failed
                self.n_cached += event.n_cached
                self._note(event, n_failed)
            case ShardFailed():
                check_stored(event)
                self.n_lost += 1
                self._note(event, 0)

    def _note(self, event: ShardDone | ShardFailed, n_failed: int) -> None:
        figures = ShardFigures(
            shard=event.shard.index,
            device=event.worker,
            n_tokens=self.tokens.pop(event.shard.index, 0),
            n_failed=n_failed,
            is_lost=isinstance(event, ShardFailed),
            elapsed=round(time.monotonic() - self.ready, 3),
        )
        figures.note()
        self.ended.append(figures)


def work(
    options: WorkOptions, on_event: OnEvent, executor_on: ExecutorOn = ProcessExecutor
) -> PartResult:
    """Embed a part of the pending shards of a planned run, with the devices of this machine.

    Raises:
        VirnucproError: see ``errors``; finished shards are kept in every case.
    """
    rundir, part = RunDir(options.folder), choose_part(options.part, options.array)
    find_run(rundir)
    with rundir.shared():
        manifest = find_run(rundir)
        outcome, plan = PartResult(part), read_plan(rundir, manifest)
        if plan is None:
            if rundir.record_table(manifest.recipe.command).exists():
                announce("nothing is left to embed: the tables of this run are written")
                return outcome
            raise _no_plan(rundir)
        shards = part.of(plan.shards)
        pending = find_owed(rundir, manifest, shards, on_event)
        outcome.n_pending = len(pending)
        announce(f"part {part}: {counted(len(shards), 'shard')}, {len(pending):,} pending")
        if not pending:
            return outcome
        config = resolve_work(options, manifest, on_event)
        job = make_job(rundir, manifest.recipe, config.weights, open_cache(options))
        n_before = len(shards) - len(pending)
        on_event(EmbeddingStarted(tuple(pending), n_before, encoders=job.encoders))
        with closing(embed(pending, job, config, executor_on)) as events:
            for event in events:
                on_event(event)
                outcome.take(event)
    return outcome


def work_for_run(options: WorkOptions, indices: Sequence[int]) -> list[ShardFigures]:
    """Embed some shards for the run that has the folder, until they are done or it is over.

    Raises:
        OutputError: it is over.
        VirnucproError: see ``errors``.
    """
    rundir, outcome = RunDir(options.folder), PartResult(Part())
    with rundir.helped(), closing(_watched(rundir)) as watch:
        manifest = find_run(rundir)
        plan = read_plan(rundir, manifest)
        if plan is None:
            raise _no_plan(rundir)
        config = resolve_work(options, manifest, lambda _: None)
        job = make_job(rundir, manifest.recipe, config.weights, open_cache(options))
        shards = [plan.shards[index] for index in indices]
        with closing(embed(shards, job, config, ProcessExecutor)) as events:
            for event in events:
                outcome.take(event)
                next(watch)
    return outcome.ended


def _watched(rundir: RunDir) -> Generator[None, None, None]:
    """Look now and then, when asked, whether the run still has its folder.

    Where that cannot be seen from this machine it is not looked for.

    Raises:
        OutputError: it has not.
    """
    can_see, last = rundir.has_run, time.monotonic()
    while True:
        yield
        if can_see and time.monotonic() - last > _LOOK_SECONDS:
            last = time.monotonic()
            if not rundir.has_run:
                raise OutputError(
                    f"the run in {printable(rundir.root)} that this work was for is over",
                    hint="go on with --resume",
                )


def embed(
    shards: Sequence[Shard], job: Job, config: WorkConfig, executor_on: ExecutorOn
) -> Generator[Event, None, None]:
    """The events of shards that are embedded here."""
    for announcement in config.announcements:
        announce(announcement)
    executor = executor_on(config.resources.devices)
    with cleared(job), closing(executor.run(shards, job, config.resources)) as events:
        yield from events


def find_run(rundir: RunDir) -> Manifest:
    """The run in a folder, which must have shards to embed.

    Raises:
        InputMissingError: there is none.
        ResumeError: it is damaged, of another version, or embeds nothing.
    """
    hint = "plan one: virnucpro predict --plan-only --output-dir DIR, with input and model"
    manifest = rundir.read_run(hint)
    if not manifest.recipe.has_encoder or len(manifest.models) != len(manifest.recipe.encoders):
        raise ResumeError(
            f"{printable(rundir.root)} holds a run with {printable(manifest.recipe.reader)}, which "
            "was not planned for several machines",
            hint="a run with a model: its command with --resume --plan-only; else plan one in "
            "another folder, with --model, --precision and --plan-only",
        )
    return manifest


def _no_plan(rundir: RunDir) -> ResumeError:
    return ResumeError(
        f"{printable(rundir.root)} holds no plan, or a damaged one",
        hint="make it with --resume --plan-only, and the options of the run",
    )


def choose_part(text: str | None, array: Mapping[str, str]) -> Part:
    """The part for ``--part``: I/N; N alone, or nothing, for a task of a job array.

    ``array`` holds the variables by which schedulers number the tasks of an array.

    Raises:
        UsageError: it is no part, or the array does not tell which one.
    """
    if text is not None and (words := re.fullmatch(r"([0-9]{1,9})/([1-9][0-9]{0,8})", text)):
        number, n = int(words[1]), int(words[2])
        if not 1 <= number <= n:
            raise UsageError(
                f"--part {text}: parts are counted from 1 to {n}",
                hint=f"the last is --part {n}/{n}",
            )
        return Part(number - 1, n)
    if text is not None and re.fullmatch(r"[1-9][0-9]{0,8}", text):
        name = next((name for name in _TASKS if array.get(name, "").isdecimal()), None)
        if name is None:
            raise UsageError(
                f"--part {text}: this is no task of a job array, whose number is its part",
                hint=f"give --part 1/{text} to --part {text}/{text}",
            )
        return Part(int(array[name]) % int(text), int(text))
    if text is not None:
        raise UsageError(f"--part {printable(text)} is no part", hint="for example --part 3/16")
    if "SLURM_ARRAY_TASK_ID" in array:
        return _part_of_slurm(array)
    if any(name in array for name in _TASKS):
        raise UsageError(
            "this is a task of a job array, and PBS does not tell how many there are",
            hint="give their number: --part 16 for an array of 16 tasks",
        )
    return Part()


_TASKS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID")
_SLURM = tuple(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT"))
ARRAY_VARIABLES = tuple(dict.fromkeys((*_TASKS, *_SLURM)))


def _part_of_slurm(array: Mapping[str, str]) -> Part:
    """The part of a task in an array whose numbers have equal steps.

    Raises:
        UsageError: they have not.
    """
    with suppress(KeyError, ValueError, ZeroDivisionError):
        number, first, last, step, n = (int(array[name]) for name in _SLURM)
        if last - first == (n - 1) * step and (number - first) % step == 0:
            return Part((number - first) // step, n)
    raise UsageError(
        "the numbers of this job array have gaps, so they do not tell the parts",
        hint="give --part I/N; to do the parts of some tasks again, --part N with the N of the "
        "whole array",
    )


def find_owed(
    rundir: RunDir, manifest: Manifest, shards: Sequence[Shard], on_event: OnEvent
) -> list[Shard]:
    """The shards that any of the encoders owes. Nothing is deleted: others may be writing."""
    stores, replaced, owed = rundir.stores_of(manifest), frozenset(manifest.replaced), []
    for i, shard in enumerate(shards):
        on_event(Progress("checking finished shards", i, len(shards), "shards"))
        if any(store.owes(shard, replaced) for store in stores):
            owed.append(shard)
    return owed


@contextmanager
def cleared(job: Job) -> Iterator[None]:
    """Give the vectors a folder, and delete this process's partial files afterwards."""
    for store in job.stores:
        store.make_folder()
    try:
        yield
    finally:
        for store in job.stores:
            store.delete_partials(job.owner)
