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
        from virnucpro.encoders.bench.programme import resolve_bench, run_bench
        from virnucpro.encoders.bench.report import Report, make_console

        number_gpus_by_bus()
        end_cleanly()
        programme = resolve_bench(options)
        measured = Report(sys.argv, options.seed, options.json)
        spare_the_collector()
        try:
            run_bench(programme, measured.add, lambda line: _tell(line, options.quiet))
        finally:
            console = make_console(is_terminal=sys.stdout.isatty())
            with console.capture() as tables:
                measured.print_tables(console)
            report(tables.get().splitlines())


def _tell(line: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(line, err=True)
