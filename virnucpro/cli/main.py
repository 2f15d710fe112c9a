"""The command line: it turns options into calls of other rooms, and outcomes into exit codes.

``virnucpro --help`` must be quick, so a command imports its modules only when it runs. They import
torch only in the process that computes with it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from virnucpro._version import __version__
from virnucpro.cli.exit_codes import (
    GONE,
    INTERRUPTED_EXIT,
    NOTHING_BEGAN,
    USAGE_EXIT,
    Finished,
    complain,
    exits,
)
from virnucpro.cli.typer_dataclass import Command, Group

_MODULES = {  # command -> module of this package with a function of that name, in --help order
    "predict": "predict",
    "extract": "extract",
    "work": "predict",
    "regions": "predict",
    "report": "info",
    "manifest": "train",
    "train": "train",
    "summary": "info",
    "evaluate": "train",
    "compare": "info",
    "devices": "info",
    "status": "info",
    "bench": "info",
    "cite": "info",
    "models": "models",
}


class _Loaded(Mapping[str, Any]):
    """Commands by name; looking one up imports its module."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - typer's or click's
        group = getattr(import_module(f"virnucpro.cli.{_MODULES[name]}"), name)
        if not isinstance(group, typer.Typer):
            run, group = group, typer.Typer(add_completion=False, rich_markup_mode=None)
            group.command(cls=Command)(run)
        return typer.main.get_command(group)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Commands(Group):
    def __init__(self, *args: Any, **more: Any) -> None:  # noqa: ANN401 - as typer has it
        super().__init__(*args, **{**more, "commands": _Loaded()})

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's or click's
        return list(self.commands)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from virnucpro.cli.console import report

        report([f"virnucpro {__version__}"])
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Find viral sequences in FASTA and FASTQ, and embed sequences with ESM-2."""


def main() -> None:
    """Run the command line. Usage errors exit with 64, since 2 means that part of a run failed."""
    _open_standard_streams()
    gc.set_threshold(50_000)  # modules and record columns are long-lived: collect rarely
    try:
        with exits():
            app()
    except Finished as finished:
        raise SystemExit(finished.exit_code) from None
    except SystemExit as error:
        if (
            error.code == INTERRUPTED_EXIT
        ):  # typer prints nothing for Ctrl-C before a command starts
            complain("interrupted", NOTHING_BEGAN)
        if {"-h", "--help"} & {*sys.argv} and isinstance(error.__context__, BrokenPipeError):
            raise SystemExit(0) from None  # the reader of the help has closed the pipe
        raise SystemExit(USAGE_EXIT if error.code == 2 else error.code) from None
    finally:
        _forget_closed_streams()


def _open_standard_streams() -> None:
    """Point closed streams to /dev/null, so that no later file takes their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _forget_closed_streams() -> None:
    """Drop unread output, which would make Python exit with its own code (120)."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if error.errno in GONE:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
