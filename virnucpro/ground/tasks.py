"""Tasks (parts of a plan or of the outputs), and the processes that do them for the parent.

    parent  --tools, Task-->  helper     a pipe of the helper's own, and a thread of the parent
    parent  <----result-----  helper     for each

A task is pure but for files that appear whole, so it makes no difference which process does it, and
when. The tools are what tasks of a kind work with, sent once. A helper has one task at a time, so
neither side waits for the other to read. It holds nothing that could be lost: it is killed when it
is needed no more, and ends with the parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Generic, Protocol, TypeVar

from virnucpro.ground.errors import UnavailableError, VirnucproError
from virnucpro.ground.events import ErrorText
from virnucpro.ground.log import LOGGER, counted, printable
from virnucpro.ground.processes import (
    Child,
    Pipe,
    Raised,
    as_message,
    interrupts_held,
    start,
)

_SILENCE_SECONDS = 60.0  # of a helper, until it is named
_N_WAITS = 60  # for it, in this time
_END_SECONDS = 5.0  # for a process whose pipe has ended to follow
_LETTERS_AHEAD = 50_000_000  # in blocks whose results are waited for, unless one record has more
# a process takes 0.4 CPU seconds to start, in which these are scored
_LETTERS_PER_HELPER = 3_000_000

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Tools = TypeVar("Tools")
Tools_contra = TypeVar("Tools_contra", contravariant=True)


class _Task(Protocol[Tools_contra, T_co]):
    """A part of the work."""

    def do(self, tools: Tools_contra, /) -> T_co: ...


class _Block(_Task[Tools_contra, T_co], Protocol):
    """A task of known size."""

    @property
    def n_letters(self) -> int: ...


class AbandonedError(Exception):
    """The work was ended early, so the awaited result never comes."""


@dataclass(slots=True, eq=False)
class Helpers(Generic[Tools]):
    """Processes for tasks; without any, a task is done here, at once."""

    tools: Tools
    children: list[Child] = field(default_factory=list)
    threads: ThreadPoolExecutor | None = None
    idle: SimpleQueue[Child] = field(default_factory=SimpleQueue)
    ready: list[Child] = field(default_factory=list)  # those that have their tools
    is_stopped: bool = False
    loss: VirnucproError | None = None  # of the first helper that died

    @property
    def n_ahead(self) -> int:
        """The tasks that helpers which are ready can have at a time: one, and the next."""
        return 2 * len(self.ready)

    def submit(self, task: _Task[Tools, T]) -> Future[T]:
        """Have a task done."""
        if self.threads is not None:
            return self.threads.submit(self._do, task)
        return _done(task, self.tools)

    def in_order(self, tasks: Iterable[_Block[Tools, T]]) -> Iterator[T]:
        """The results of blocks, in their order; a few blocks of bounded size are taken ahead.

        What helpers have no time for is done here, so this process never waits while there is work.
        """
        waiting: deque[tuple[int, Future[T]]] = deque()
        n_letters = 0
        for task in tasks:
            n_letters += task.n_letters
            n_open = sum(not future.done() for _, future in waiting)
            is_here = n_open >= self.n_ahead or task.n_letters > _LETTERS_AHEAD
            future = _done(task, self.tools) if is_here else self.submit(task)
            waiting.append((task.n_letters, future))
            while waiting and (
                waiting[0][1].done()
                or len(waiting) > 2 * self.n_ahead
                or n_letters > _LETTERS_AHEAD
            ):
                n_taken, future = waiting.popleft()
                n_letters -= n_taken
                yield future.result()
        for _, future in waiting:
            yield future.result()

    def add_ready(self, child: Child) -> None:
        """Give tasks to a helper from now on."""
        self.idle.put(child)
        self.ready.append(child)

    def _do(self, task: _Task[Tools, T]) -> T:
        """
        Raises:
            VirnucproError: what the task raised, or that a helper died.
            AbandonedError: the helpers were stopped.
        """
        child = self.idle.get()
        answered = Event()
        Thread(target=_tell_of_silence, args=(child, answered), daemon=True).start()
        try:
            child.pipe.send(task)
            outcome = child.pipe.recv()
        except (EOFError, OSError) as error:
            if self.is_stopped:
                raise AbandonedError from error
            raise self._lost(child.cause_of_end(_END_SECONDS)) from error
        finally:
            answered.set()
            self.idle.put(child)
        match outcome:
            case ErrorText():
                raise outcome.error
            case Raised(reason, lines):
                LOGGER.info("%s", printable(lines))
                raise self._lost(reason)
        result: T = outcome
        return result

    def _lost(self, reason: str) -> VirnucproError:
        """The error of a helper that died: the first, whichever task hears of one later."""
        if self.loss is None:
            self.loss = UnavailableError(
                f"a process that makes shards or tables was lost: {printable(reason)}",
                hint="run the same command with --resume; if memory ran out, with fewer --workers",
            )
        return self.loss

    def stop(self) -> None:
        """End all helpers, whatever they do."""
        self.is_stopped = True
        for child in self.children:
            child.kill()
        if self.threads is not None:
            self.threads.shutdown(cancel_futures=True)
        for child in self.children:
            child.wait()
            child.close()


def _done(task: _Task[Tools, T], tools: Tools) -> Future[T]:
    """Do a task at once."""
    future: Future[T] = Future()
    future.set_result(task.do(tools))
    return future


def count_worth(most: int, n_letters: int) -> int:
    """The number of helpers that pay off for this number of letters."""
    return min(most, n_letters // _LETTERS_PER_HELPER)


@contextmanager
def helpers_for(tools: Tools, n_helpers: int, products: str) -> Iterator[Helpers[Tools]]:
    """Start this number of helpers for the time of the block; the log says what they make."""
    helpers = Helpers(tools)
    try:
        with interrupts_held():
            for _ in range(n_helpers):
                helpers.children.append(start(_serve))
        if helpers.children:
            LOGGER.info("%s are made by %s", products, counted(n_helpers, "helper"))
            helpers.threads = ThreadPoolExecutor(n_helpers, "helper")
            message = as_message(tools)
            for child in helpers.children:
                helpers.threads.submit(_introduce, child, message, helpers.add_ready)
        yield helpers
    finally:
        helpers.stop()


def _tell_of_silence(child: Child, answered: Event) -> None:
    """Warn of a helper that does not answer.

    Time in which this process did not run (Ctrl-Z, a scheduler that suspends) is at most one wait.
    """
    if any(answered.wait(_SILENCE_SECONDS / _N_WAITS) for _ in range(_N_WAITS)):
        return
    LOGGER.warning(
        "process %d, which makes shards or tables, has not answered for %.0f seconds (hint: if it "
        "uses no CPU time, it is stopped or waits for a disk: `kill -9 %d`, then --resume)",
        *(child.pid, _SILENCE_SECONDS, child.pid),
    )


def _introduce(child: Child, tools: memoryview, on_ready: Callable[[Child], None]) -> None:
    """Send a helper what it works with; if it has died, its first task hears of it."""
    try:
        child.pipe.send_bytes(tools)
    except OSError:
        LOGGER.debug("process %d ended before it began", child.pid)
    finally:
        on_ready(child)


def _serve(pipe: Pipe) -> None:
    """Do the tasks that come, until the parent ends."""
    tools: Any = pipe.recv()
    while True:
        task: _Task[Any, Any] = pipe.recv()
        try:
            outcome = task.do(tools)
        except (VirnucproError, OSError) as error:
            outcome = ErrorText.of(error)
        pipe.send(outcome)
