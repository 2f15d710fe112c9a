"""``virnucpro work``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from virnucpro.cli.command import command
from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.running import loading, report, watched
from virnucpro.engine.options import WorkOptions
from virnucpro.ground.options import ConsoleOptions

if TYPE_CHECKING:
    from virnucpro.run.work_log import ShardFigures

_KEPT = "finished shards are kept: the same command again does the rest"


def work_in_block(options: WorkOptions, indices: tuple[int, ...]) -> list[ShardFigures]:
    """Some shards of a run, in a process that a scheduler placed on another machine.

    The process ends with the one that started it, which Parsl's own workers do not.
    """
    from virnucpro.ground.processes import end_with
    from virnucpro.stories.work import work_for_run

    end_with(os.getppid())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return work_for_run(replace(options, cuda_visible_devices=visible), indices)


@command(WorkOptions, ConsoleOptions)
def work(options: WorkOptions, console: ConsoleOptions) -> None:
    """Embed a part of a planned run: on as many machines, and as often at once, as you like.

    DIR was planned with --plan-only and lies where all machines see it. Nothing is written there
    but vectors and logs/work-HOST-PID.log; the tables come from the planned command with --resume.

    Example: virnucpro work results/ --part 3/16

    In a SLURM array each task finds its part: sbatch --array=1-16 --gres=gpu:1
    --wrap "virnucpro work results/"

    In a PBS array: virnucpro work results/ --part 16

    Exit codes are those of predict.
    """
    with exits(lambda: _KEPT):
        with loading(console):
            from virnucpro.stories import work as story

        array = {name: os.environ[name] for name in story.ARRAY_VARIABLES if name in os.environ}
        with watched(console) as events:
            tally = story.work(replace(options, array=array), events)
    with exits():
        report(tally.lines, console.quiet)
    raise Finished(tally.exit_code)
