"""Run ``predict`` or ``extract`` with an executor, and print the outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from virnucpro.cli.command import ConsoleOptions
from virnucpro.cli.console import (
    gpu_steps,
    loading,
    next_step,
    planned_steps,
    print_lines,
    show_progress,
)
from virnucpro.cli.exit_codes import CommandExit, exit_on_error, require_packages
from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import convert_options
from virnucpro.models.environment import environment_fields
from virnucpro.workflows.options import RunOptions

if TYPE_CHECKING:
    from virnucpro.core.events import EventHandler, ShardDone, ShardFailed
    from virnucpro.core.helper_pool import HelperPool
    from virnucpro.engine.base import Executor
    from virnucpro.engine.work_options import WorkOptions
    from virnucpro.workflows.summary import Summary

_Options = TypeVar("_Options", bound=RunOptions)
_Options_contra = TypeVar("_Options_contra", bound=RunOptions, contravariant=True)


class Workflow(Protocol[_Options_contra]):
    """The function behind a command, such as ``workflows.extract.extract``."""

    def __call__(
        self,
        options: _Options_contra,
        on_event: EventHandler,
        executor_on: Callable[[Sequence[str]], Executor],
        pool: HelperPool | None,
    ) -> Summary: ...


def _executor_on(options: RunOptions) -> Callable[[Sequence[str]], Executor]:
    """Return a function that makes the requested executor from the devices of this machine.

    Raises:
        UsageError: no executor has this name.
        UnavailableError: its package is missing or broken.
    """
    if options.executor == "local":
        from virnucpro.workflows.run_steps import local_executor

        return local_executor
    group = "virnucpro.executors"  # entry points: classes, called with the options and devices
    if options.executor != "parsl":
        from virnucpro.core.plugins import find_plugins

        plugins = find_plugins(group, type)
        if options.executor not in plugins:
            raise UsageError(
                f"there is no executor {printable(options.executor)}",
                hint=f"the executors are {', '.join(('local', 'parsl', *sorted(plugins)))}",
            )
        return partial(plugins[options.executor](), options)
    with require_packages("cluster"):
        from virnucpro.engine.parsl import ParslExecutor
        from virnucpro.engine.work_options import WorkOptions
    # Parsl starts its own programs by name. They are in the folder of this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    cache = options.cache and options.cache.absolute()
    work = convert_options(options, WorkOptions, folder=options.output_dir.absolute(), cache=cache)
    executor = ParslExecutor(options.executor_config, work, work_in_block)
    return lambda _: executor


def run_command(
    options: _Options,
    console: ConsoleOptions,
    load: Callable[[], Workflow[_Options]],
    start_pool: Callable[[], HelperPool | None] = lambda: None,
) -> None:
    """Run a workflow with these options, and print its outcome.

    Args:
        load: imports the workflow, and fails if a package that the options need is missing.
        start_pool: starts helpers while the workflow is imported.
    """
    force_kept = (
        "if the earlier results are still there, run the same command again; if they are gone, "
        "with --resume in place of --force, which would delete what was finished"
    )
    run_kept = "what was finished is kept: run the same command with --resume"
    with exit_on_error(lambda: force_kept if options.force else run_kept):
        with loading(console):
            pool = start_pool()
            workflow = load()
            executor_on = _executor_on(options)
        with pool or nullcontext(), show_progress(console) as events:
            summary = workflow(options, events, executor_on, pool)
    with exit_on_error():
        if summary.n_slices is None:
            table = summary.first_table(options.output_dir, options.command)
            step = next_step(table, sys.argv[1:], failed=summary.exit_code != 0)
        else:
            step = planned_steps(options, summary.n_slices, sys.argv[1:])
        offer = [] if summary.is_embedding else gpu_steps(options, sys.argv[1:])
        print_lines([*summary.lines(options.output_dir), *offer, *step], console.quiet)
    raise CommandExit(summary.exit_code)


def work_in_block(options: WorkOptions, indices: tuple[int, ...]) -> list[ShardDone | ShardFailed]:
    """Embed some shards of a run, in a process that a scheduler started on another machine.

    The process ends with its parent, unlike Parsl's own workers.
    """
    from virnucpro.core.child_process import exit_with_parent
    from virnucpro.workflows import work_share

    exit_with_parent(os.getppid())
    here = replace(options, **environment_fields(os.environ))
    return work_share.work_for_run(here, indices)
