"""``virnucpro bench``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import end_cleanly, exits
from virnucpro.cli.options import DeviceOption
from virnucpro.cli.running import spare_the_collector

_MEASURED = "the tables, and the file of --json, hold what was measured"


def bench(
    models: Annotated[
        str | None,
        typer.Option(
            help="Sizes of ESM-2, in order: 8M, 35M, 150M, 650M, 3B, 15B; weights are made up.",
            show_default="all but 15B on a GPU, else 8M,35M",
        ),
    ] = None,
    profiles: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the proteins: six-frame-500, reads-150, proteins.", show_default="all"
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="Parts to measure: limits, encoder.", show_default="all"),
    ] = None,
    device: DeviceOption = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores for every program, on a CPU.", show_default="all that it may use"
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="In one measurement.", show_default="some full batches"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="After one to warm up; just one of what takes over 5 s.", show_default="5"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of proteins and weights.")] = 1,
    json: Annotated[
        Path | None,
        typer.Option(help="Write every figure there, as it comes.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="8M, one profile, 3 repeats: under a minute.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say what is done.")] = False,
) -> None:
    """Measure this machine: its limits, and the encoder beside fair-esm and transformers.

    Ratios are to the first row, fair-esm's own extract loop; without it
    (in the folder of the source: pip install -c constraints.txt '.[oracle]') to the first of ours.

    Example: virnucpro bench --quick --json bench.json
    """
    given = locals()
    path, quiet = given.pop("json"), given.pop("quiet")
    with exits(_MEASURED):
        from virnucpro.bench.programme import BenchOptions, resolve, run
        from virnucpro.bench.report import Report, make_console

        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        end_cleanly()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        programme = resolve(BenchOptions(**given, cuda_visible_devices=visible))
        report = Report(sys.argv, seed, path)
        spare_the_collector()
        try:
            run(programme, report.add, lambda line: None if quiet else typer.echo(line, err=True))
        finally:
            report.print_tables(make_console(is_terminal=sys.stdout.isatty()))
