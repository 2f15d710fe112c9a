"""A command that runs ``pipeline.run``: its log, its dashboard, and its summary."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from virnucpro.cli.exits import GONE, end_cleanly
from virnucpro.errors import UsageError

if TYPE_CHECKING:
    from virnucpro.dashboard import EventLog


@contextmanager
def watched(quiet: bool, verbose: bool, log_file: Path | None) -> Iterator[EventLog]:
    """Log to the console, show the dashboard if somebody looks, and hear what happens."""
    from rich.console import Console

    from virnucpro.dashboard import ConsoleHandler, Dashboard, EventLog
    from virnucpro.log import ConsoleFilter, logging_to, logging_to_file

    # GPUs are numbered as NVML numbers them, by their place on the bus
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    end_cleanly()
    console, live = Console(stderr=True), is_live(quiet)
    handler = ConsoleHandler(console) if live else logging.StreamHandler()
    if not verbose:
        handler.addFilter(ConsoleFilter(with_figures=not live))
    with ExitStack() as stack:
        stack.enter_context(logging_to(handler, logging.DEBUG if verbose else logging.INFO))
        if log_file is not None:
            stack.enter_context(logging_to_file(log_file))
        events = stack.enter_context(EventLog())
        if live:
            stack.enter_context(Dashboard(events.progressing, console))
        spare_the_collector()
        yield events


def is_live(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def spare_the_collector() -> None:
    """Garbage is not looked for among what the imports made: that doubles the time of planning."""
    gc.collect()
    gc.freeze()


def checked_path(given: str, option: str) -> Path:
    if not given:
        raise UsageError(f"{option} is empty", hint="is the variable set that it came from?")
    from virnucpro.files import expanded

    return expanded(given)


def report(lines: Iterable[str]) -> None:
    """Tell the user how it went."""
    try:
        for line in lines:
            typer.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in GONE:
            from virnucpro.files import disk_error

            raise disk_error(error, "standard output") from error
        # nobody reads: the run is as done as it was
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
