"""What there is: this machine, and a run folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import Finished, exits


def devices() -> None:
    """Say what a run would use here: GPUs by index and UUID, memory, precision, kernels."""
    with exits(kept=""):
        from virnucpro.devices import describe_machine

        for line in describe_machine(os.environ.get("CUDA_VISIBLE_DEVICES")):
            typer.echo(line)


def status(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every feature file.")] = False,
) -> None:
    """Say what a run folder holds: done, pending, failed, and whether it verifies.

    Example: virnucpro status results/ --verify
    """
    with exits(kept=""):
        from virnucpro.run.status import inspect_run

        report = inspect_run(folder, verify=verify)
        for line in report.lines:
            typer.echo(line)
        raise Finished(1 if report.n_damaged else 0)
