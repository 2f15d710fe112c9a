"""A command that runs ``pipeline.run``: its first sign, its log, its dashboard, its summary."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from virnucpro.cli.command import ConsoleOptions
from virnucpro.cli.exits import GONE, end_cleanly, has_colours
from virnucpro.stories.options import RunOptions

if TYPE_CHECKING:
    from virnucpro.cli.figures import EventLog

_BY_BUS = "PCI_BUS_ID"
_TASKS = 16  # at most, in the array that is offered
_ERASE_LINE = "\r\x1b[2K"


@contextmanager
def loading(console: ConsoleOptions) -> Iterator[None]:
    """Show a line on a terminal while a command imports its modules, which may take a second.

    It is plain text, and the cursor stays visible: a signal may end the program here at once.
    """
    # numpy's matrices are small here: its threads would wait for each other, and take the cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    is_shown, live = not console.quiet and _is_terminal(), is_live(console.quiet)
    gc.disable()
    try:
        if is_shown:
            _write_to_terminal("loading ..." + ("" if live else "\n"))
        yield
    finally:
        gc.freeze()  # modules are no garbage: scanning them doubles the time of planning
        gc.enable()
        if is_shown:
            _write_to_terminal(_ERASE_LINE if live else "")


def _write_to_terminal(text: str) -> None:
    with suppress(OSError):  # it may be gone
        sys.stderr.write(text)
        sys.stderr.flush()


@contextmanager
def watched(options: ConsoleOptions) -> Iterator[EventLog]:
    """Log to the console, show the dashboard if somebody looks, and hear what happens.

    With ``--quiet`` the console gets warnings only.
    """
    from virnucpro.cli.figures import EventLog
    from virnucpro.ground.log import is_for_console, logging_to, logging_to_file

    number_gpus_by_bus()
    end_cleanly()
    events = EventLog()
    handler: logging.Handler = logging.StreamHandler()
    shown: AbstractContextManager[object] = nullcontext()
    if live := is_live(options.quiet):
        from rich.console import Console

        from virnucpro.cli.dashboard import ConsoleHandler, Dashboard

        console = Console(stderr=True)
        handler, shown = ConsoleHandler(console), Dashboard(events.figures, console)
    if options.quiet:
        handler.setLevel(logging.WARNING)
    if not options.verbose:
        handler.addFilter(partial(is_for_console, with_figures=not live))
    with ExitStack() as stack:
        stack.enter_context(logging_to(handler, logging.DEBUG if options.verbose else logging.INFO))
        if options.log_file is not None:
            stack.enter_context(logging_to_file(options.log_file))
        stack.enter_context(events)
        stack.enter_context(shown)
        yield events


def number_gpus_by_bus() -> None:
    """Have CUDA number the GPUs as NVML does, by their place on the bus, whatever is set."""
    order = os.environ.get("CUDA_DEVICE_ORDER", _BY_BUS)
    os.environ["CUDA_DEVICE_ORDER"] = _BY_BUS
    if order != _BY_BUS:
        typer.echo(
            f"note: GPUs are numbered by their place on the bus, as nvidia-smi does; "
            f"CUDA_DEVICE_ORDER={order!a} is not followed",
            err=True,
        )


def is_live(quiet: bool) -> bool:
    return not quiet and _is_terminal() and os.environ.get("TERM") != "dumb"


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def report(lines: Iterable[str], quiet: bool = False) -> None:
    """Print the outcome: in colours on a terminal, but not with ``quiet``."""
    colours = None if has_colours() and not quiet else False  # None: if it is a terminal
    try:
        for line in lines:
            typer.echo(_coloured(line), color=colours)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in GONE:
            from virnucpro.ground.files import disk_error

            raise disk_error(error, "standard output") from error
        # nobody reads: the run is as done as it was
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123


def _coloured(line: str) -> str:
    """A line of the summary. The colours are told apart by everybody, and repeat what words say."""
    name, colon, fact = line.partition(": ")
    match name:
        case "called virus":
            return name + colon + typer.style(fact, fg="cyan", bold=True)
        case "failed":
            return typer.style(line, fg="yellow", bold=True)
        case "next":
            return name + colon + typer.style(fact, bold=True)
    return line


def next_step(table: Path, argv: Sequence[str], failed: bool) -> list[str]:
    """The line for what to type after a run: the same command again, or a look at the table."""
    again = [word for word in argv if word not in ("--force", "--resume")]
    if failed and {"-", "-i-", "--input=-"}.isdisjoint(again):  # a pipe was read to its end
        return as_command(["virnucpro", *again, "--resume"])
    name = f"./{table}" if str(table).startswith("-") else str(table)
    return as_command(["head", name], " | column -t -s $'\\t' | less -S")


def planned_steps(options: RunOptions, n_slices: int, argv: Sequence[str]) -> list[str]:
    """The lines for what to type after a plan: the work, and then the same command to its end."""
    device, precision = options.device, options.precision
    is_for_cpus = device == "cpu" or (device == "auto" and precision == "fp32")
    is_for_cpus = is_for_cpus or not options.asks_for_vectors
    request = "--cpus-per-task=8" if is_for_cpus else "--gres=gpu:1"
    folder = options.output_dir
    again = [word for word in argv if word not in ("--force", "--resume", "--plan-only")]
    rest = as_command(["virnucpro", *again, "--resume"])
    if not n_slices:
        return rest
    work = ["virnucpro", "work", str(folder.absolute())]
    array = ["sbatch", f"--array=1-{min(_TASKS, n_slices)}", request, "--wrap", shlex.join(work)]
    return [
        *as_command(array if n_slices > 1 else work),
        *(f"then: {line.removeprefix('next: ')}" for line in rest),
    ]


def as_command(words: Sequence[str], rest: str = "") -> list[str]:
    """The line that offers a command; nothing if a name in it cannot be typed."""
    return [f"next: {shlex.join(words)}{rest}"] if all(map(str.isprintable, words)) else []
