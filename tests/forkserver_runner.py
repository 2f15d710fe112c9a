"""Processes that start quickly: forked from one that has imported their modules."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import hear_signals

from virnucpro.cli.main import main
from virnucpro.core import child_process as processes
from virnucpro.core.child_process import Pipe, run_child

NEEDED = [
    *("torch", "h5py", "virnucpro.engine.local"),
    *("faulty_workers", "training_helpers", "forkserver_runner"),
]
NEEDED += ["virnucpro.cli.main", "virnucpro.results.report.run_report"]
NEEDED += ["virnucpro.training.train", "torch._dynamo"]  # which every optimizer imports


class Forked:
    """The part of ``subprocess.Popen`` that tests use, for a child of the fork server."""

    def __init__(self, pipe: Pipe) -> None:
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb")
        with (
            Connection(theirs, writable=False) as parents_end,
            Connection(os.dup(pipe.fileno())) as copy,  # only this class can be sent
        ):
            self.process = fork_server().Process(
                target=_begin, args=(copy, parents_end, _blocked_signals()), daemon=True
            )
            self.process.start()
        _poll_from_any_thread(self.process._popen)

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float | None = None) -> None:
        self.process.join(seconds)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("forked", seconds or 0.0)

    def kill(self) -> None:
        self.process.kill()


def _poll_from_any_thread(popen: Any) -> None:
    """Let several threads ask for an exit code, which the fork server sends once.

    Without the lock, the second one finds the end of the pipe, and makes 255 of any code. Threads
    of helpers ask, and so does ``multiprocessing.active_children``.
    """
    lock = threading.Lock()
    read = popen.poll

    def poll(flag: int = os.WNOHANG) -> int | None:
        if popen.returncode is None and not wait([popen.sentinel], None if flag == 0 else 0):
            return None
        with lock:
            return read()

    popen.poll = poll


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Return the context of a server that has imported ``NEEDED``, and start it if none runs.

    The server skips a module that it cannot find without a word, and it looks in the folders of
    ``PYTHONPATH`` alone, not in those of pytest's option ``pythonpath``.
    """
    multiprocessing.set_forkserver_preload(NEEDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver._forkserver.ensure_running()  # which does nothing in a command: see ``_begun``
    return multiprocessing.get_context("forkserver")


def missing_modules() -> list[str]:
    """Return the modules of ``NEEDED`` that a process which has just been forked would import."""
    return call(_print_missing, NEEDED).stdout.split()


def _print_missing(names: list[str]) -> None:
    sys.stdout.write(" ".join(name for name in names if name not in sys.modules))


def _blocked_signals() -> set[int]:
    """Return the signal mask of this thread, which a child of the fork server does not inherit."""
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}


def _begin(pipe: Connection, parents_end: Connection, blocked: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.dup2(parents_end.fileno(), 0)
    parents_end.close()
    run_child(os.dup(pipe.fileno()))


def run_command(words: list[str]) -> None:
    sys.argv = ["virnucpro", *words]
    main()


def run_script(words: list[str]) -> None:
    """Run a Python file, as ``python FILE ARGUMENT ...`` does."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def start(
    *words: object,
    streams: Sequence[int],
    cwd: Path | None = None,
    env: Mapping | None = None,
    run: Callable[[list[str]], None] = run_command,
) -> BaseProcess:
    """Start a command with these standard streams. Its workers are forked as well."""
    return _start(run, [*map(str, words)], streams, cwd, env)


def _start(
    run: Callable[..., None],
    given: object,
    streams: Sequence[int],
    cwd: Path | None = None,
    env: Mapping | None = None,
) -> BaseProcess:
    with ExitStack() as stack:
        copies = [stack.enter_context(Connection(os.dup(number))) for number in streams]
        place = cwd or Path.cwd()
        variables = dict(os.environ if env is None else env)
        process = fork_server().Process(
            target=_begun, args=(run, given, copies, place, variables, _blocked_signals())
        )
        process.start()
    return process


class Beside:
    """A command or a function that runs in parallel with the test."""

    def __init__(
        self, *words: object, run: Callable[..., None] | None = None, env: Mapping | None = None
    ) -> None:
        self._out, self._errors = (
            tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when it has ended
            for _ in range(2)
        )
        streams = [self._out.fileno(), self._out.fileno(), self._errors.fileno()]
        given = [*words] if run else [*map(str, words)]
        self.process = _start(run or run_command, given, streams, env=env)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def said(self, seconds: float = 120) -> str:
        """Wait for the end and return what was written to stderr. After ``seconds``, kill it."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            raise subprocess.TimeoutExpired("forked", seconds)
        self._errors.seek(0)
        text = self._errors.read()
        self._out.close()
        self._errors.close()
        return text


def virnucpro(
    *words: object,
    input: str = "",
    cwd: Path | None = None,
    env: Mapping | None = None,
    run: Callable[[list[str]], None] = run_command,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as ``subprocess.run`` does."""
    return call(run, [*map(str, words)], input=input, cwd=cwd, env=env)


def call(
    run: Callable[..., None],
    given: object,
    input: str = "",
    cwd: Path | None = None,
    env: Mapping | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call a function with one argument in a forked process, and wait for its end."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(input)
        files[0].seek(0)
        process = _start(run, given, [file.fileno() for file in files], cwd, env)
        process.join()
        for file in files:
            file.seek(0)
        _, out, errors = (file.read() for file in files)
    return subprocess.CompletedProcess(given, process.exitcode, out, errors)


def _begun(
    run: Callable[..., None],
    given: list[object],
    streams: list[Connection],
    place: Path,
    env: dict[str, str],
    blocked: set[int],
) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(place)
    if threads := env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # torch read it when the server started
    hear_signals()
    processes.start_interpreter = Forked
    if sys.version_info < (
        3,
        14,
    ):  # later versions need a key, and a command starts its own server
        forkserver._forkserver.ensure_running = lambda: None
    run(given)
