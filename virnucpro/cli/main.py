"""The command line: options in, exit code out. No work is done here.

``virnucpro --help`` must be quick, so the modules that do the work are imported when a command
needs them, and torch, by them, in the process that computes with it.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from virnucpro import __version__
from virnucpro.cli import running
from virnucpro.cli.bench import bench
from virnucpro.cli.cite import cite
from virnucpro.cli.command import Command, CommandOnInput
from virnucpro.cli.compare import compare
from virnucpro.cli.evaluate import evaluate
from virnucpro.cli.exits import (
    GONE,
    INTERRUPTED_EXIT,
    NOTHING_BEGAN,
    USAGE_EXIT,
    Finished,
    complain,
    exits,
)
from virnucpro.cli.inspect import devices, status
from virnucpro.cli.models import models
from virnucpro.cli.predict import extract, predict
from virnucpro.cli.regions import regions
from virnucpro.cli.report import report
from virnucpro.cli.train import train
from virnucpro.cli.work import work

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=CommandOnInput)(predict)
app.command(cls=CommandOnInput)(extract)
for command in (work, regions, report, train, evaluate, compare, devices, status, bench, cite):
    app.command(cls=Command)(command)
app.add_typer(models, name="models")


def _show_version(wanted: bool) -> None:
    if wanted:
        running.report([f"virnucpro {__version__}"])
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Version of the program."
        ),
    ] = False,
) -> None:
    """Find viral sequences in FASTA: by a fast scorer, or with the protein language model ESM-2."""


def main() -> None:
    """The entry point. Usage errors exit with 64: 2 means that something failed in a run."""
    _open_standard_streams()
    try:
        with exits():
            app()
    except Finished as finished:
        raise SystemExit(finished.exit_code) from None
    except SystemExit as error:
        if error.code == INTERRUPTED_EXIT:  # typer says nothing of Ctrl-C before a command began
            complain("interrupted", NOTHING_BEGAN)
        if {"-h", "--help"} & {*sys.argv} and isinstance(error.__context__, BrokenPipeError):
            raise SystemExit(0) from None  # nobody reads the help to its end
        raise SystemExit(USAGE_EXIT if error.code == 2 else error.code) from None
    finally:
        _forget_closed_streams()


def _open_standard_streams() -> None:
    """Lead those that were closed nowhere: else the next files to be opened take their place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _forget_closed_streams() -> None:
    """Keep output that nobody reads from becoming an exit code of Python's own (120)."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if error.errno in GONE:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
