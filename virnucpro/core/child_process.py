"""Start processes (workers, ranks, helpers), pass them signals, and make them end with us.

A process is a new interpreter, bound to the one that started it before it imports anything that
takes long. It looks for modules where its parent looks, but never in the current folder: a file
next to the data is data, whatever its name. (``multiprocessing`` starts interpreters, and a
tracker of semaphores, that import from there.)

    parent  <--objects-->  child     a pipe of the child's own
    parent  ------------>  child     its stdin: nothing is written; its end is the parent's end
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Concatenate, ParamSpec

from virnucpro.core.logging import printable

P = ParamSpec("P")

# `-c` puts the current folder first in the path; it is removed before any import that could find a
# module there. Our package comes from the folder of the parent's package, even if that is not in
# the path (Python that was started in a source tree), or if another one is before it. Threads of
# numpy would wait for each other and for those of other processes
_PROGRAM = (
    "import sys; ours = sys.argv[2]; sys.path[:] = sys.argv[3:]; "
    "import importlib, typing; sys.path.insert(0, ours); import virnucpro; sys.path.remove(ours); "
    "import os; os.environ.setdefault('OPENBLAS_NUM_THREADS', '1'); "
    "os.environ['CUDA_DEVICE_ORDER'] = 'PCI_BUS_ID'; "  # as NVML numbers them
    "from virnucpro.core.child_process import run_child; run_child(int(sys.argv[1]))"
)
# signals that end this process, and its children with it
_ENDING = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
)
_SECONDS_TO_END = 2  # of CPU time, between SIGXCPU and the kill at the limit
_SET_DEATH_SIGNAL = 1  # of prctl(2)


class Pipe(Connection):
    """One end of a connection to another process, for objects that can be pickled."""

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        """Create both ends of a connection."""
        first, second = socket.socketpair()
        return cls(first.detach()), cls(second.detach())

    def send(self, value: object) -> None:
        """Pickle a value and send it.

        ``Connection.send`` passes on a view of a ``BytesIO``. If the other process is gone, the
        error refers to that view. Python 3.12 and 3.13 may close the ``BytesIO`` of such an error
        first, when they collect garbage, and then crash or print a ``BufferError``.
        """
        self.send_bytes(pickle_message(value))


@dataclass(frozen=True, slots=True)
class ChildError:
    """The last message of a process that an exception ended: its text, not the exception."""

    reason: str
    traceback: str
    seconds: float  # time by the monotonic clock, which all processes share


@dataclass(frozen=True, slots=True, eq=False)
class ChildProcess:
    """A process that this one started, and the pipe to it, which closes when it ends."""

    process: subprocess.Popen[bytes]
    pipe: Pipe

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the process to end; False if it is still running after ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.is_alive

    def close(self) -> None:
        """Close the pipes, which ends the process if it still runs."""
        self.pipe.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def exit_reason(self, seconds: float | None = None) -> str:
        """The reason why a process ended; waits for it, since its pipe may close first."""
        self.wait(seconds)
        exit_code = self.process.returncode
        if exit_code is None:
            return "it closed its pipe, and has not ended"
        if exit_code >= 0:
            return f"exit code {exit_code}"
        names = {-number.value: number.name for number in signal.Signals}
        name = names.get(exit_code, f"signal {-exit_code}")
        reasons = {"SIGKILL": " (out of memory?)", "SIGXCPU": " (its CPU time limit is reached)"}
        return name + reasons.get(name, "")

    @property
    def remedy(self) -> str:
        """What a user can do after the end of this process; see ``with_options``."""
        if self.process.returncode == -signal.SIGXCPU:
            return "raise the limit of CPU time (`ulimit -t`, or that of the job)"
        return "if memory ran out, use fewer {workers}"

    @staticmethod
    def wait_any(
        children: Sequence[ChildProcess], seconds: float | None = None
    ) -> list[ChildProcess]:
        """Wait for children that have sent a message or ended; an empty list at a timeout."""
        ready = connection.wait([child.pipe for child in children], seconds)
        return [child for child in children if child.pipe in ready]

    @staticmethod
    def kill_all(children: Sequence[ChildProcess]) -> None:
        """Kill processes and wait until they have ended. They hold nothing that could be lost."""
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            child.close()


def start_process(
    target: Callable[Concatenate[Pipe, P], None], *args: P.args, **kwargs: P.kwargs
) -> ChildProcess:
    """Start ``target(pipe, ...)`` as a process. Interrupts must be held.

    The target is pickled, so it must be a function of a module.
    """
    ours, theirs = Pipe.pair()
    with theirs:
        child = ChildProcess(_start_interpreter(theirs), ours)
    with suppress(OSError):  # it has died; its pipe reports that
        ours.send((target, args, kwargs))
    return child


def pickle_message(value: object) -> bytes:
    """Pickle a value once, for ``send_bytes`` of several pipes.

    The message is not the view that ``ForkingPickler.dumps`` returns: see ``Pipe.send``.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def _start_interpreter(pipe: Pipe) -> subprocess.Popen[bytes]:
    ours = str(Path(__file__).parents[2])
    folders = [folder for folder in sys.path if Path(folder).is_absolute()]  # "" is the current one
    return subprocess.Popen(
        [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            *("-c", _PROGRAM, str(pipe.fileno()), ours),
            *folders,
        ],
        stdin=subprocess.PIPE,
        pass_fds=[pipe.fileno()],
    )


def run_child(number: int) -> None:
    """Run what the parent sends, then end the process. Called first, and never returns.

    ``number`` is the file descriptor of the pipe.
    """
    _follow_parent()
    os.set_inheritable(number, False)
    gc.set_threshold(50_000)  # as in the command line
    pipe = Pipe(number)
    exit_code = 0
    try:
        target, args, kwargs = pipe.recv()
        target(pipe, *args, **kwargs)
    except Exception as error:  # the parent must learn of any error
        exit_code = 1
        reason = f"{type(error).__name__}: {printable(error)}"
        with suppress(OSError):  # the parent is gone
            pipe.send(ChildError(reason, traceback.format_exc(), time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(exit_code)  # torch's threads may crash a normal interpreter shutdown


def _follow_parent() -> None:
    """End when the parent ends, and not at Ctrl-C; the parent held interrupts at the start."""
    _set_parent_death_signal()  # in a suspended process, no thread runs that could end it
    threading.Thread(target=_wait_for_parent_exit, daemon=True).start()
    # Schedulers send these to every process of a job, but only the parent acts on them. A mask does
    # not suffice: a library may have started a thread that does not block them.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGXCPU})
    ask_before_cpu_limit()


def ask_before_cpu_limit() -> None:
    """Have the kernel send SIGXCPU before it kills this process at its limit of CPU time.

    ``ulimit -t`` sets both limits to the same value. Then there is only the kill, which looks like
    one for want of memory, and leaves no time to end. Each process has a time of its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        return
    latest = max(1, hard - _SECONDS_TO_END)
    if soft == resource.RLIM_INFINITY or soft > latest:
        resource.setrlimit(resource.RLIMIT_CPU, (latest, hard))


def exit_with_parent(parent: int) -> None:
    """Make this process end with its parent, which has this process id (Linux)."""
    _set_parent_death_signal()
    if os.getppid() != parent:
        os._exit(1)


def _set_parent_death_signal() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _wait_for_parent_exit() -> None:
    os.read(0, 1)
    os._exit(1)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay the signals that would end this process, so that no started child is forgotten.

    Children inherit the signal mask, so Ctrl-C and a lost terminal do not end them; the end of this
    process does. In this process another thread may take the signal despite the mask, so the
    handlers are delayed too.
    """
    blocked: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # only it runs handlers
    handlers = {
        number: handler
        for number in _ENDING
        if here and callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, lambda number, _: blocked.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if blocked:
            signal.raise_signal(blocked[0])
