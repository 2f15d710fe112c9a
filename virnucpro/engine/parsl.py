"""Run shards on Parsl, which requests nodes from a scheduler while there is work.

    this process --Parsl--> a block, a scheduler node  --ProcessExecutor--> its devices
    this process <--files--  vectors, and one log per process that works on a part

A part is a list of shards, embedded in a process on a block, as ``virnucpro work`` does. Finished
shards are read from its log while it runs, and from its result at the end. If a part is lost
with its node, another block gets the shards without vectors. A part ends when no process owns the
run folder's lock any more. Parsl's own processes end with this one.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parsl
from parsl.config import Config
from parsl.dataflow.dflow import DataFlowKernel
from parsl.errors import ParslError
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput.errors import CommandClientBadError, CommandClientTimeoutError
from parsl.providers import LocalProvider, SlurmProvider
from typeguard import TypeCheckError

from virnucpro.core.errors import UsageError, VirnucproError
from virnucpro.core.events import (
    BatchDone,
    ShardDone,
    ShardFailed,
    WorkerEvent,
    WorkerLost,
)
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.types import Shard
from virnucpro.core.yaml_config import read_config
from virnucpro.engine.base import Executor, Resources, WorkerConfig
from virnucpro.engine.event_log import read_events
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.work_options import WorkOptions
from virnucpro.store.run_dir import OutputNames, RunDir
from virnucpro.store.run_lock import tags_in

# Embeds the shards with these indices on a block, and returns the end of each.
RunPart = Callable[[WorkOptions, tuple[int, ...]], list[ShardDone | ShardFailed]]


def read_blocks(path: Path | None) -> tuple[Any, int]:
    """Read a YAML file of blocks, in the terms of Parsl's providers. None means this machine.

    Returns:
        The provider that Parsl requests blocks from, and the number of parts.

    Raises:
        InputMissingError: the file cannot be read.
        UsageError: it has an unknown or invalid option.
    """
    parts_per_block = 4  # so that a block that starts late or ends early costs little
    ours = ("provider", "parts")
    if path is None:
        return LocalProvider(), parts_per_block
    providers = {"local": LocalProvider, "slurm": SlurmProvider}
    names = sorted(set(ours).union(*map(_describe_block, providers.values())))
    try:
        settings = read_config(path, names)
    except UsageError as error:
        hint = f"give a table of options of blocks: {', '.join(names)}"
        raise UsageError(str(error), hint) from error
    minima = {"parts": 1, "max_blocks": 1, "nodes_per_block": 1, "min_blocks": 0, "init_blocks": 0}
    for name in minima.keys() & settings:
        if type(settings[name]) is not int or settings[name] < minima[name]:
            problem = f"{name} is {printable(settings[name])}"
            raise _unusable_error(path, problem, f"give a whole number, {minima[name]} or more")
    kind = str(settings.pop("provider", "local"))
    n_parts = settings.pop("parts", parts_per_block * settings.get("max_blocks", 1))
    if kind not in providers:
        problem = f"there is no provider {printable(kind)}"
        raise _unusable_error(path, problem, f"there are {', '.join(providers)}")
    words = _describe_block(providers[kind])
    if strangers := settings.keys() - words:
        problem = f"the provider {kind} has no option {min(strangers)}"
        raise _unusable_error(path, problem, f"its options are {', '.join(sorted(words))}")
    try:
        return providers[kind](**settings), n_parts
    except (TypeError, ValueError, TypeCheckError) as error:
        hint = 'text of digits needs quotes, for example walltime: "12:00:00"'
        raise _unusable_error(path, printable(error), hint) from error


def _unusable_error(path: Path, problem: str, hint: str) -> UsageError:
    return UsageError(f"{printable(path)}: {problem}", hint)


def _describe_block(provider: type) -> set[str]:
    not_plain = {"self", "launcher", "regex_job_id"}
    return set(inspect.signature(provider).parameters) - not_plain


@dataclass(frozen=True, slots=True)
class _ParslTask:
    shards: tuple[Shard, ...]
    n_losses: int = 0


@dataclass(slots=True)
class _TaskEvents:
    """The events of a run's blocks. Each shard ends once."""

    logs: Path
    shards: dict[int, Shard]  # not ended yet
    ends: dict[Path, int] = field(default_factory=dict)  # log -> bytes already read

    def skip(self) -> None:
        """Skip log content from earlier starts."""
        self.ends = {path: path.stat().st_size for path in self._paths()}

    def read(self) -> Iterator[WorkerEvent]:
        """Yield the events added to the logs since the last call."""
        for path in self._paths():
            events, self.ends[path] = read_events(path, self.ends.get(path, 0))
            process = path.stem.removeprefix("work-")
            yield from self.report(process, (logged.event for logged in events))

    def report(self, process: str, events: Iterable[WorkerEvent]) -> Iterator[WorkerEvent]:
        """Yield the events of a process, with its host in the names of the workers."""
        host = process.rpartition("-")[0]
        for event in events:
            renamed = event._replace(worker=f"{host} {event.worker}")
            match renamed:
                case BatchDone(shard=shard) | ShardDone(shard=shard) | ShardFailed(shard=shard):
                    if shard.index in self.shards:  # otherwise it ended before
                        yield renamed._replace(shard=self.shards[shard.index])
                case _:
                    yield renamed
            if isinstance(event, (ShardDone, ShardFailed)):
                self.shards.pop(event.shard.index, None)

    def _paths(self) -> list[Path]:
        return list(tags_in(self.logs))


class ParslExecutor(Executor):
    """Run parts on Parsl's blocks, as many at once as there are blocks."""

    def __init__(self, config: Path | None, options: WorkOptions, run_part: RunPart) -> None:
        """Read the configuration of blocks.

        Raises:
            InputMissingError, UsageError: as ``read_blocks``.
        """
        self.provider, self.n_parts = read_blocks(config)
        self.options = options
        self.run_part = run_part

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        """Run every shard, as ``Executor.run`` specifies. The blocks have their own devices.

        Raises:
            VirnucproError: a part failed with an error that would also occur on another block.
        """
        tick_seconds = 1.0  # between two reads of the logs
        rundir = RunDir(job.root, OutputNames())  # only for the paths of logs and Parsl's files
        n = min(self.n_parts, len(shards))
        news = _TaskEvents(rundir.logs, {shard.index: shard for shard in shards})
        news.skip()
        with load_parsl_executor(self.provider, rundir) as kernel:
            submit = parsl.python_app(self.run_part, data_flow_kernel=kernel)

            def submit_part(part: _ParslTask) -> Future[list[ShardDone | ShardFailed]]:
                indices = tuple(shard.index for shard in part.shards)
                future: Future[list[ShardDone | ShardFailed]] = submit(self.options, indices)
                return future

            parts = [_ParslTask(tuple(shards[i::n])) for i in range(n)]
            running = {submit_part(part): part for part in parts}
            while running:
                ended, _ = wait(running, tick_seconds, FIRST_COMPLETED)
                yield from news.read()
                for future in ended:
                    part = running.pop(future)
                    if (error := future.exception()) is None:
                        yield from news.report("block-0", future.result())
                    remaining = yield from _count_remaining(part, news, job, error)
                    if remaining is not None:
                        running[submit_part(remaining)] = remaining


def _count_remaining(
    part: _ParslTask, news: _TaskEvents, job: WorkerConfig, error: BaseException | None
) -> Generator[WorkerEvent, None, _ParslTask | None]:
    """Return the remainder of a part that ended, or None if it is complete or has failed."""
    if isinstance(error, VirnucproError):
        raise error
    unreported = [shard for shard in part.shards if shard.index in news.shards]
    pending: list[Shard] = []
    for shard in unreported:
        if any(store.is_pending(shard, frozenset()) for store in job.shard_stores):
            pending.append(shard)
        else:
            yield from news.report("block-0", [ShardDone("", shard, 0.0, 0)])
    if not pending:
        return None
    reason = f"a part was lost: {type(error).__name__}: {printable(error)}"
    remaining = _ParslTask(tuple(pending), part.n_losses + 1)
    is_final = remaining.n_losses >= Attempt.max_failures_idle
    yield WorkerLost("parsl", reason, is_final=is_final, has_device=False)
    if not is_final:
        return remaining
    for shard in pending:
        del news.shards[shard.index]
        yield ShardFailed("parsl", shard, reason)
    return None


@contextmanager
def load_parsl_executor(provider: Any, rundir: RunDir) -> Iterator[DataFlowKernel]:  # noqa: ANN401 - Parsl's
    """Start Parsl with one pool on a provider's blocks. Its processes end with this one."""
    shutil.rmtree(rundir.parsl, ignore_errors=True)
    parent = os.getpid()
    bound = (
        f"from virnucpro.core.child_process import exit_with_parent; exit_with_parent({parent}); "
        "import os; os.execvp('interchange.py', ['interchange.py'])"
    )
    silence_seconds = 30  # of Parsl's processes on a node
    executor = HighThroughputExecutor(
        label="virnucpro",
        provider=provider,
        address="127.0.0.1" if isinstance(provider, LocalProvider) else None,
        max_workers_per_node=1,
        cores_per_worker=1e-6,  # one worker per block, which starts a process per device
        heartbeat_period=5,
        heartbeat_threshold=silence_seconds,
        interchange_launch_cmd=[sys.executable, "-c", bound],
    )
    kernel = DataFlowKernel(
        Config(
            executors=[executor],
            run_dir=str(rundir.parsl.absolute()),
            strategy="htex_auto_scale",
            max_idletime=silence_seconds,
            initialize_logging=False,
        )
    )
    try:
        yield kernel
    finally:
        # Parsl's errors when a scheduler or one of its processes does not answer
        errors_at_end = (ParslError, CommandClientBadError, CommandClientTimeoutError, OSError)
        try:
            kernel.cleanup()
        except errors_at_end as error:
            LOGGER.warning(
                "Parsl did not shut down cleanly: %s; cancel its jobs if squeue still lists them",
                printable(error),
            )
        shutil.rmtree(rundir.parsl, ignore_errors=True)
