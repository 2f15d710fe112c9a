"""End every command with an exit code and, after an error, a message and a hint."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

import click

from virnucpro.cli.early_exit import INTERRUPTED_EXIT
from virnucpro.core.errors import StorageError, UnavailableError, VirnucproError

USAGE_EXIT = 64
# Schedulers send these before a time limit, or at one. A shell reports 128 plus the number.
_ENDED_BY = {
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",
    signal.SIGUSR1: "ended by SIGUSR1",
    signal.SIGUSR2: "ended by SIGUSR2",
    signal.SIGALRM: "ended by SIGALRM",
    signal.SIGXCPU: "ended by SIGXCPU: the limit of CPU time is reached (see `ulimit -t`)",
}
DEAF_SECONDS = 10.0  # time to clean up after a signal, during which later signals are ignored
GONE = (errno.EPIPE, errno.EIO)  # the reader of the output is gone


class CommandExit(Exception):  # noqa: N818 - an end, not an error
    """Ends the command with this exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Terminated(SystemExit):
    """A signal requested the end, or the terminal was closed. ``code`` is the exit code."""

    def __init__(self, number: signal.Signals) -> None:
        terminated_exit = 143
        self.message = _ENDED_BY[number]
        self.exit_code = terminated_exit if number == signal.SIGHUP else 128 + number
        super().__init__(self.exit_code)


@contextmanager
def exit_on_error(kept: Callable[[], str] = str) -> Iterator[None]:
    """Turn any error or signal in a command into a message and an exit code.

    Args:
        kept: returns the hint for an interrupted command, from the files that exist by then.
    """
    no_threads = "too many processes and threads: see `ulimit -u`, or the limits of the job"
    try:
        yield
    except VirnucproError as error:
        _exit(error, kept)
    except KeyboardInterrupt as error:
        print_error("interrupted", kept())
        raise CommandExit(INTERRUPTED_EXIT) from error
    except _Terminated as error:
        print_error(error.message, kept())
        raise CommandExit(error.exit_code) from error
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from virnucpro.models.torch_build import torch_is_missing

        _exit(torch_is_missing(), kept)
    except (OSError, MemoryError) as error:
        from virnucpro.core.atomic_io import disk_error

        if isinstance(error, MemoryError):
            error = OSError(errno.ENOMEM, "no memory is left")
        _exit(disk_error(error), kept)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        _exit(StorageError("no thread can be started", no_threads), kept)


def _exit(error: VirnucproError, kept: Callable[[], str]) -> NoReturn:
    after = [kept()] if isinstance(error, StorageError) else []
    print_error(str(error), "; ".join(filter(None, [error.hint, *after])))
    raise CommandExit(error.exit_code) from error


@contextmanager
def require_packages(extra: str) -> Iterator[None]:
    """Wrap imports of packages from an extra that the core installation lacks.

    Raises:
        UnavailableError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "torch":  # in no extra: see ``exit_on_error``
            raise
        raise UnavailableError(
            f"this command needs {error.name}, which is not installed",
            hint=f"pip install 'virnucpro[{extra}]'",
        ) from error


def print_error(message: str, hint: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        click.secho(f"error: {message}", fg="red", err=True, color=None if has_colours() else False)
        if hint:
            click.echo(f"hint:  {hint}", err=True)


def has_colours() -> bool:
    return "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def end_cleanly() -> None:
    """Turn signals into exceptions, so that processes stop and temporary files are deleted."""
    from virnucpro.core.cpu_limit import ask_before_cpu_limit

    _install_handlers(-DEAF_SECONDS)
    ask_before_cpu_limit()


def _install_handlers(since: float) -> None:
    for number in (signal.SIGINT, *_ENDED_BY):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, partial(_raise_terminated, since))


def _raise_terminated(since: float, number: int, _: object) -> None:
    """Stop once after Ctrl-C or a signal in ``_ENDED_BY``, and ignore further signals.

    Nothing is printed, because a line may be half written to the terminal.
    """
    now = time.monotonic()
    if now - since < DEAF_SECONDS:
        return
    _install_handlers(now)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise _Terminated(signal.Signals(number))
