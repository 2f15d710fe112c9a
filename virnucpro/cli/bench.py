"""``virnucpro bench``."""

from __future__ import annotations

import sys

import typer

from virnucpro.cli.command import command
from virnucpro.cli.exits import end_cleanly, exits
from virnucpro.cli.running import number_gpus_by_bus, report, spare_the_collector
from virnucpro.encoders.options import BenchOptions

_MEASURED = "the tables, and the file of --json, hold what was measured"


@command(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure this machine: its limits, and the encoder beside fair-esm.

    Ratios are to the first row, fair-esm's own extract loop.

    Example: virnucpro bench --quick --json bench.json
    """
    with exits(lambda: _MEASURED):
        from virnucpro.encoders.bench.programme import bench as measure

        number_gpus_by_bus()
        end_cleanly()
        spare_the_collector()
        measure(options, sys.argv, lambda line: _tell(line, options.quiet), report)


def _tell(line: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(line, err=True)
