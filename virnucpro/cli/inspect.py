"""The commands ``devices`` and ``status``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import Finished, exits


def devices() -> None:
    """List the devices that a run would use: GPUs, memory, precision, kernels."""
    with exits(kept=""):
        from virnucpro.devices import describe_machine

        for line in describe_machine(os.environ.get("CUDA_VISIBLE_DEVICES")):
            typer.echo(line)


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder.")],
    verify: Annotated[
        bool,
        typer.Option("--verify", metavar="", help="Verification of every feature file."),
    ] = False,
) -> None:
    """Describe a run folder: finished, pending and failed work.

    Example: virnucpro status results/ --verify
    """
    with exits(kept=""):
        from virnucpro.run.status import inspect_run

        report = inspect_run(folder, verify=verify)
        for line in report.lines:
            typer.echo(line)
        raise Finished(1 if report.n_damaged else 0)
