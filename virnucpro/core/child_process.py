"""Start child processes (workers, ranks, helpers), and make them end with this process.

A child is a new interpreter. It is bound to its parent before it imports anything slow. It searches
the parent's module path, but never the current folder: a file next to the data is data, whatever
its name. (``multiprocessing`` starts interpreters and a semaphore tracker that import from the
current folder.)

    parent  <--objects-->  child     the child's own pipe
    parent  ------------>  child     its stdin, never written to, closes when the parent ends
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
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

from virnucpro.core.cpu_limit import ask_before_cpu_limit
from virnucpro.core.logging import printable

P = ParamSpec("P")

# `-c` puts the current folder first in the path. It is removed before any import that could find a
# module there. The child imports the same package folder as its parent, even if that folder is not
# in the path (Python was started in a source tree) or another one precedes it. NumPy threads would
# wait for each other and for those in other processes, so there is one.
_PROGRAM = (
    "import sys; ours = sys.argv[2]; sys.path[:] = sys.argv[3:]; "
    "import importlib, typing; sys.path.insert(0, ours); import virnucpro; sys.path.remove(ours); "
    "import os; os.environ.setdefault('OPENBLAS_NUM_THREADS', '1'); "
    "os.environ['CUDA_DEVICE_ORDER'] = 'PCI_BUS_ID'; "  # as NVML numbers them
    "from virnucpro.core.child_process import run_child; run_child(int(sys.argv[1]))"
)


class Pipe(Connection):
    """One end of a connection to another process, for picklable objects."""

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        """Create both ends of a connection."""
        first, second = socket.socketpair()
        return cls(first.detach()), cls(second.detach())

    def send(self, value: object) -> None:
        """Pickle a value and send it.

        ``Connection.send`` passes a view of a ``BytesIO``. If the other process is gone, the error
        refers to that view. When Python 3.12 or 3.13 collects such an error, it may close the
        ``BytesIO`` first, and then crash or print a ``BufferError``.
        """
        self.send_bytes(pickle_message(value))


@dataclass(frozen=True, slots=True)
class ChildError:
    """The last message of a process that died with an exception: the text, not the exception."""

    reason: str
    traceback: str
    seconds: float  # on the monotonic clock, which all processes share


@dataclass(frozen=True, slots=True, eq=False)
class ChildProcess:
    """A child process and the pipe to it, which closes when the child ends."""

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
        """Wait for the process to end. Return False if it still runs after ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.is_alive

    def close(self) -> None:
        """Close the pipes, which ends the process if it still runs."""
        self.pipe.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def exit_reason(self, seconds: float | None = None) -> str:
        """Return the reason why a process ended. Wait for it first, since its pipe may close
        earlier.
        """
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
        """Return advice for the user after this process ended, as in ``with_options``."""
        if self.process.returncode == -signal.SIGXCPU:
            return "raise the limit of CPU time (`ulimit -t`, or that of the job)"
        return "if memory ran out, use fewer {workers}"

    @staticmethod
    def wait_any(
        children: Sequence[ChildProcess], seconds: float | None = None
    ) -> list[ChildProcess]:
        """Wait for children that have sent a message or ended. Return [] at a timeout."""
        ready = connection.wait([child.pipe for child in children], seconds)
        return [child for child in children if child.pipe in ready]

    @staticmethod
    def kill_all(children: Sequence[ChildProcess]) -> None:
        """Kill processes and wait for them to end. They contain no state that could be lost."""
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            child.close()


def start_process(
    target: Callable[Concatenate[Pipe, P], None], *args: P.args, **kwargs: P.kwargs
) -> ChildProcess:
    """Start ``target(pipe, ...)`` in a child process. Interrupts must be deferred.

    The target is pickled, so it must be a module-level function.
    """
    parent_end, child_end = Pipe.pair()
    with child_end:
        child = ChildProcess(start_interpreter(child_end), parent_end)
    with suppress(OSError):  # the child has died, and its pipe reports that
        parent_end.send((target, args, kwargs))
    return child


def pickle_message(value: object) -> bytes:
    """Pickle a value once, for ``send_bytes`` on several pipes.

    Return bytes instead of the view from ``ForkingPickler.dumps``: see ``Pipe.send``.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def start_interpreter(pipe: Pipe) -> subprocess.Popen[bytes]:
    """Start a Python that runs what comes through the pipe. Tests replace it by a faster start."""
    package_parent = str(Path(__file__).parents[2])
    folders = [folder for folder in sys.path if Path(folder).is_absolute()]  # "" is the cwd
    return subprocess.Popen(
        [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            "-c",
            _PROGRAM,
            str(pipe.fileno()),
            package_parent,
            *folders,
        ],
        stdin=subprocess.PIPE,
        pass_fds=[pipe.fileno()],
    )


def run_child(number: int) -> None:
    """Run the target that the parent sends, then end the process. This entry point never returns.

    ``number`` is the pipe's file descriptor.
    """
    _follow_parent()
    os.set_inheritable(number, False)
    gc.set_threshold(50_000)  # as in the command line
    pipe = Pipe(number)
    exit_code = 0
    try:
        target, args, kwargs = pipe.recv()
        target(pipe, *args, **kwargs)
    except Exception as error:  # the parent must receive any error
        exit_code = 1
        reason = f"{type(error).__name__}: {printable(error)}"
        with suppress(OSError):  # the parent is gone
            pipe.send(ChildError(reason, traceback.format_exc(), time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing
            stream.flush()
    os._exit(exit_code)  # torch's threads may crash a normal interpreter shutdown


def _follow_parent() -> None:
    """End with the parent and ignore Ctrl-C. The parent deferred interrupts at the start."""
    _set_parent_death_signal()  # also ends a suspended process, in which no thread runs
    threading.Thread(target=_wait_for_parent_exit, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Schedulers send their signals to every process of a job. They stay blocked here, because only
    # the parent acts on them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGXCPU})
    ask_before_cpu_limit()


def exit_with_parent(parent: int) -> None:
    """Make this process end with its parent, given the parent's process id (Linux)."""
    _set_parent_death_signal()
    if os.getppid() != parent:
        os._exit(1)


def _set_parent_death_signal() -> None:
    set_death_signal = 1  # PR_SET_PDEATHSIG in prctl(2)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _wait_for_parent_exit() -> None:
    os.read(0, 1)
    os._exit(1)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer the signals that would end this process, so that no started child is forgotten.

    Children inherit the signal mask. Ctrl-C and a lost terminal therefore do not end them, but the
    end of this process does. Another thread of this process may receive the signal despite the
    mask, so the handlers are deferred too.
    """
    blocked: list[int] = []
    is_main_thread = threading.current_thread() is threading.main_thread()  # only it runs handlers
    # signals that end this process and, with it, its children
    ending = (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGXCPU,
    )
    handlers = {
        number: handler
        for number in ending
        if is_main_thread and callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, lambda number, _: blocked.append(number))
    original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, original_mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if blocked:
            signal.raise_signal(blocked[0])
