"""Our processes: how workers, ranks and those of the benchmark start, hear signals and die.

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
import os
import signal
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
from typing import Concatenate, ParamSpec, TypeAlias

import virnucpro
from virnucpro.ground.log import printable

P = ParamSpec("P")
Pipe: TypeAlias = Connection

# `-c` puts the current folder first: it is gone before anything is imported that it could hold;
# numpy's threads would wait for each other, and for those of the processes beside this one
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "import os; os.environ.setdefault('OPENBLAS_NUM_THREADS', '1'); "
    "os.environ['CUDA_DEVICE_ORDER'] = 'PCI_BUS_ID'; "  # as NVML numbers them
    "from virnucpro.ground.processes import begin; begin(int(sys.argv[1]))"
)
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_SET_DEATH_SIGNAL = 1  # of prctl(2)


@dataclass(frozen=True, slots=True)
class Raised:
    """The last message of a process that an exception ended. Errors do not cross processes."""

    reason: str
    traceback: str
    seconds: float  # time by the monotonic clock, which all processes share


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A process that was started here, and the pipe to it, which ends with it."""

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
        """Wait for the end; False if it does not come within this time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.is_alive

    def close(self) -> None:
        """Close the pipes, which ends the process if it still runs."""
        self.pipe.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def cause_of_end(self, seconds: float | None = None) -> str:
        """The reason why a process ended; it may end a moment after its pipe."""
        self.wait(seconds)
        exit_code = self.process.returncode
        if exit_code is None:
            return "it closed its pipe, and has not ended"
        if exit_code >= 0:
            return f"exit code {exit_code}"
        names = {-number.value: number.name for number in signal.Signals}
        name = names.get(exit_code, f"signal {-exit_code}")
        return f"{name} (out of memory?)" if name == "SIGKILL" else name

    @staticmethod
    def with_news(children: Sequence[Child], seconds: float | None = None) -> list[Child]:
        """Wait for children that have sent something or ended; an empty list when time is over."""
        ready = connection.wait([child.pipe for child in children], seconds)
        return [child for child in children if child.pipe in ready]

    @staticmethod
    def kill_all(children: Sequence[Child]) -> None:
        """Kill processes, which hold nothing that could be lost, and wait for their end."""
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            child.close()


def start(target: Callable[Concatenate[Pipe, P], None], *args: P.args, **kwargs: P.kwargs) -> Child:
    """Start ``target(pipe, ...)`` as a process. Interrupts must be held.

    The target is pickled, so it must be a function of a module.
    """
    ours, theirs = connection.Pipe()
    with theirs:
        child = Child(_interpreter(theirs), ours)
    with suppress(OSError):  # it has died; that is heard at the pipe
        ours.send((target, args, kwargs))
    return child


def as_message(value: object) -> memoryview:
    """A value pickled once, for ``send_bytes`` of several pipes."""
    return ForkingPickler.dumps(value)


def _interpreter(pipe: Pipe) -> subprocess.Popen[bytes]:
    ours = str(Path(virnucpro.__file__).parents[1])
    folders = [folder for folder in sys.path if Path(folder).is_absolute()]  # "" is the current one
    return subprocess.Popen(
        [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            *("-c", _PROGRAM, str(pipe.fileno())),
            *(folders if ours in folders else [*folders, ours]),
        ],
        stdin=subprocess.PIPE,
        pass_fds=[pipe.fileno()],
    )


def begin(number: int) -> None:
    """Run what the parent sends; the first call in a process, which does not return.

    ``number`` is the file descriptor of its pipe.
    """
    _obey_parent()
    os.set_inheritable(number, False)
    gc.set_threshold(50_000)  # as in the command line
    pipe, exit_code = Connection(number), 0
    try:
        target, args, kwargs = pipe.recv()
        target(pipe, *args, **kwargs)
    except Exception as error:  # whatever it is, the parent must hear of it
        exit_code = 1
        reason = f"{type(error).__name__}: {printable(error)}"
        with suppress(OSError):  # the parent is gone
            pipe.send(Raised(reason, traceback.format_exc(), time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(exit_code)  # torch's threads may abort an interpreter that is taken down


def _obey_parent() -> None:
    """End with the parent, not before: it was started with interrupts held."""
    _die_with_parent()  # a process that was stopped has no thread that could end it
    threading.Thread(target=_wait_for_parents_end, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_with(parent: int) -> None:
    """Have this process end with the one that started it and has this number (Linux)."""
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _wait_for_parents_end() -> None:
    os.read(0, 1)
    os._exit(1)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back the signals that would end this process, so that no child is started and forgotten.

    The processes it starts do not hear of Ctrl-C and of a lost terminal: they end with this one.
    They inherit that by a mask. It holds nothing here, where other threads may take a signal for
    this one: so the handlers wait too.
    """
    blocked: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # handlers run in that one only
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
