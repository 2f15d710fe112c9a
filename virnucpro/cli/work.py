"""The command ``work``."""

from __future__ import annotations

import os
from dataclasses import replace

from virnucpro.cli.command import ConsoleOptions, command
from virnucpro.cli.console import loading, print_lines, show_progress
from virnucpro.cli.exit_codes import CommandExit, exit_on_error
from virnucpro.engine.work_options import WorkOptions


@command(WorkOptions, ConsoleOptions)
def work(options: WorkOptions, console: ConsoleOptions) -> None:
    """Run one part of a planned run. Parts can run concurrently on any number of machines.

    DIR was planned with --plan-only and is on a file system that all machines share. A part reads
    and translates its slices of the input, embeds them, and writes their table rows. Afterwards,
    the planned command with --resume joins all parts and does the missing work.

    Example: virnucpro work results/ --part 3/16

    In a SLURM array each task takes its own part: sbatch --array=1-16 --gres=gpu:1
    --wrap "virnucpro work results/"

    In a PBS array: virnucpro work results/ --part 16

    Exit codes are those of predict.
    """
    work_kept = "finished files are kept: run the same command again to do the rest"
    with exit_on_error(lambda: work_kept):
        with loading(console):
            from virnucpro.workflows import work_share

        with show_progress(console) as events:
            part = work_share.work(replace(options, array=dict(os.environ)), events)
    with exit_on_error():
        print_lines(part.lines, console.quiet)
    raise CommandExit(part.exit_code)
