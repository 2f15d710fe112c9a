"""Output of a running command: a loading line, the log, the dashboard and the summary."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from virnucpro.cli.command import ConsoleOptions
from virnucpro.cli.exit_codes import GONE, end_cleanly, has_colours
from virnucpro.core.logging import FORMAT, log_to_file, log_to_handler, wrapped
from virnucpro.models.names import DEFAULT_MODEL
from virnucpro.workflows.options import RunOptions

if TYPE_CHECKING:
    from virnucpro.cli.progress import EventLog


@contextmanager
def loading(console: ConsoleOptions) -> Iterator[None]:
    """Show a line on a terminal while a command imports its modules, which may take a second.

    It is plain text and leaves the cursor visible, because a signal ends the program at once here.
    """
    erase_line = "\r\x1b[2K"
    # Numpy's matrices are small here, so its threads would only occupy cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    live = _is_live(console)
    gc.disable()
    try:
        if _is_terminal() and not console.quiet:
            _write_to_terminal("loading ..." + "\n" * (not live))
        yield
    finally:
        gc.freeze()  # modules stay, and scanning them for garbage doubles the planning time
        gc.enable()
        if live:
            _write_to_terminal(erase_line)


def _write_to_terminal(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(text)
        sys.stderr.flush()


@contextmanager
def show_progress(options: ConsoleOptions, *, is_one_stage: bool = False) -> Iterator[EventLog]:
    """Log to the console, show the dashboard on a terminal, and yield the event handler.

    With ``--quiet`` the console shows only warnings.

    Args:
        is_one_stage: see ``ProgressState``.
    """
    from virnucpro.cli.progress import EventLog

    number_gpus_by_bus()
    end_cleanly()
    events = EventLog(is_one_stage=is_one_stage)
    handler: logging.Handler = logging.StreamHandler()
    shown: AbstractContextManager[object] = nullcontext()
    if live := _is_live(options):
        from rich.console import Console

        from virnucpro.cli.dashboard import ConsoleHandler, Dashboard

        console = Console(stderr=True)
        handler = ConsoleHandler(console)
        shown = Dashboard(events.state, console)
    elif _is_terminal():
        handler.setFormatter(_TerminalFormatter(FORMAT))
    if options.quiet:
        handler.setLevel(logging.WARNING)
    if not options.verbose:
        handler.addFilter(partial(is_for_console, with_figures=not live))
    level = logging.DEBUG if options.verbose else logging.INFO
    file = log_to_file(options.log_file) if options.log_file else nullcontext()
    with log_to_handler(handler, level), file, events, shown:
        yield events


class _TerminalFormatter(logging.Formatter):
    """Wraps log lines at the terminal width, between words."""

    def format(self, record: logging.LogRecord) -> str:
        indent = " " * 4  # for lines that continue a log record
        return wrapped(super().format(record), get_terminal_size().columns, indent)


def is_for_console(record: logging.LogRecord, *, with_figures: bool) -> bool:
    """Return whether the console shows a record: warning, announcement, requested figures."""
    return (
        record.levelno >= logging.WARNING
        or hasattr(record, "is_announced")
        or (with_figures and hasattr(record, "is_figures"))
    )


def number_gpus_by_bus() -> None:
    """Make CUDA number the GPUs by bus position, as NVML does, whatever else is set."""
    by_bus = "PCI_BUS_ID"
    order = os.environ.get("CUDA_DEVICE_ORDER", by_bus)
    os.environ["CUDA_DEVICE_ORDER"] = by_bus
    if order != by_bus:
        click.echo(
            f"note: GPUs are numbered by bus position, as in nvidia-smi; "
            f"CUDA_DEVICE_ORDER={order!a} is ignored",
            err=True,
        )


def _is_live(options: ConsoleOptions) -> bool:
    return not options.quiet and _is_terminal() and os.environ.get("TERM") != "dumb"


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def print_lines(lines: Iterable[str], quiet: bool = False) -> None:
    """Print the outcome, with colours on a terminal unless ``quiet``."""
    colours = None if has_colours() and not quiet else False  # None: colours on a terminal
    try:
        for line in lines:
            click.echo(_colorize(line), color=colours)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in GONE:
            from virnucpro.core.atomic_io import disk_error

            raise disk_error(error, "standard output") from error
        # The reader of the output is gone, but the run is complete.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123


def _colorize(line: str) -> str:
    """Style a summary line. Colours repeat the words and suit colour-blind readers."""
    name, colon, fact = line.partition(": ")
    if name.endswith((" virus", " viruses")):
        return click.style(line, fg="cyan", bold=True)
    match name:
        case "failed":
            return click.style(line, fg="yellow", bold=True)
        case "next":
            return name + colon + click.style(fact, bold=True)
    return line


def next_step(table: Path, argv: Sequence[str], failed: bool) -> list[str]:
    """Suggest the next command after a run: the same one again, or one that shows the table."""
    is_piped = not {"-", "-i-", "--input=-"}.isdisjoint(argv)  # a pipe was read to its end
    if failed and not is_piped:
        return as_command(_resume_command(argv, "--resume"))
    name = f"./{table}" if str(table).startswith("-") else str(table)
    return as_command(["head", name], " | column -t -s $'\\t' | less -S")


def planned_steps(options: RunOptions, n_slices: int, argv: Sequence[str]) -> list[str]:
    """Suggest the commands after a plan: ``work``, then the same command with ``--resume``."""
    tasks = 16  # maximum number of tasks in a suggested job array
    rest = _resume_command(argv, "--resume")
    if not n_slices:
        return as_command(rest)
    work = ["virnucpro", "work", str(options.output_dir.absolute())]
    if n_slices > 1:
        is_for_cpus = options.device == "cpu" or not options.asks_for_vectors
        is_for_cpus |= (options.device, options.precision) == ("auto", "fp32")
        request = "--cpus-per-task=8" if is_for_cpus else "--gres=gpu:1"
        array = f"--array=1-{min(tasks, n_slices)}"
        work = ["sbatch", array, request, "--wrap", shlex.join(work)]
    return [*as_command(work), *as_command(rest, before="then")]


def gpu_steps(options: RunOptions, argv: Sequence[str]) -> list[str]:
    """Suggest uses for idle GPUs after a run that embedded nothing."""
    from virnucpro.models.nvidia_driver import has_nvml

    if not has_nvml():
        return []
    from virnucpro.models.nvidia import free_gpus

    if not (gpu_numbers := free_gpus(options.cuda_visible_devices)):
        return []
    gpu_flags = ["--gpus", ",".join(map(str, gpu_numbers)), "--force"]
    command = _resume_command(argv, "--model", DEFAULT_MODEL, *gpu_flags)
    return as_command(command, before=f"GPUs: {len(gpu_numbers)} free; with ESM-2 vectors")


def _resume_command(argv: Sequence[str], *more: str) -> list[str]:
    """Return the command with ``more`` instead of --force, --resume and --plan-only."""
    replaced_flags = ("--force", "--resume", "--plan-only")
    return ["virnucpro", *(word for word in argv if word not in replaced_flags), *more]


def as_command(words: Sequence[str], rest: str = "", before: str = "next") -> list[str]:
    """Return a line that suggests a command, or no line if a name in it is not printable."""
    if not all(map(str.isprintable, words)):
        return []
    return [f"{before}: {shlex.join(words)}{rest}"]
