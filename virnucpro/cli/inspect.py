"""The commands ``devices`` and ``status``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.running import report
from virnucpro.errors import UsageError


def devices() -> None:
    """List the devices that a run would use: GPUs, memory, precision, kernels.

    Example: virnucpro devices
    """
    with exits():
        from virnucpro.devices import describe_machine

        report([*describe_machine(os.environ.get("CUDA_VISIBLE_DEVICES"))])


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder.")],
    verify: Annotated[
        bool,
        typer.Option("--verify", metavar="", help="Verification of every feature file."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            metavar="",
            help="Figures for programs: shards done and pending, tokens/s of each host, "
            "remaining time.",
        ),
    ] = False,
) -> None:
    """Describe a run folder: finished, pending and failed work, and who is at it.

    Example: virnucpro status results/ --verify
    """
    with exits():
        from virnucpro.run.status import inspect_run, measure_run

        if as_json and verify:
            raise UsageError("--json and --verify contradict each other", hint="give one of them")
        if as_json:
            report([json.dumps(measure_run(folder), indent=2)])
            raise Finished(0)
        lines, n_damaged = inspect_run(folder, verify=verify)
        report(lines)
        raise Finished(1 if n_damaged else 0)
