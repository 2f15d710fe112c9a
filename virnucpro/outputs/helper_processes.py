"""Processes beside the parent that make the rows of the outputs: see ``blocks``.

    parent  --Maker, Task-->  helper     a pipe of the helper's own, and a thread of the parent
    parent  <----result-----  helper     for each

A helper has one task at a time, so neither side waits for the other to read. It holds nothing that
could be lost: it is killed when it is needed no more, and ends with the parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from virnucpro.errors import UnavailableError, VirnucproError
from virnucpro.files import disk_error
from virnucpro.log import LOGGER, counted, printable
from virnucpro.outputs.blocks import BlockTask, Maker, Task
from virnucpro.outputs.sinks import Part
from virnucpro.processes import Child, Pipe, Raised, as_message, interrupts_held, start
from virnucpro.run.backlog import AbandonedError

_END_SECONDS = 5.0  # for a process whose pipe has ended to follow
_LETTERS_AHEAD = 50_000_000  # in blocks whose rows are waited for, unless one record has more

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refused:
    """The outcome of a task that met with an error of ours."""

    kind: type[VirnucproError]
    message: str
    hint: str


@dataclass(slots=True, eq=False)
class Helpers:
    """Processes for the tasks of a maker; without any, a task is done here, at once."""

    maker: Maker
    children: list[Child] = field(default_factory=list)
    threads: ThreadPoolExecutor | None = None
    idle: SimpleQueue[Child] = field(default_factory=SimpleQueue)
    is_stopped: bool = False
    loss: VirnucproError | None = None  # of the first helper that died

    @property
    def n_ahead(self) -> int:
        """The tasks that are worth being done before the result of the first is taken."""
        return 2 * len(self.children)

    def submit(self, task: Task[T]) -> Future[T]:
        """Have a task done."""
        if self.threads is not None:
            return self.threads.submit(self._do, task)
        future: Future[T] = Future()
        future.set_result(task.do(self.maker))
        return future

    def in_order(self, tasks: Iterable[BlockTask]) -> Iterator[list[Part]]:
        """The rows of blocks, in their order; a few blocks of bounded size are taken ahead."""
        waiting: deque[tuple[int, Future[list[Part]]]] = deque()
        n_letters = 0
        for task in tasks:
            n_letters += task.n_letters
            waiting.append((task.n_letters, self.submit(task)))
            while waiting and (len(waiting) > self.n_ahead or n_letters > _LETTERS_AHEAD):
                n_taken, future = waiting.popleft()
                n_letters -= n_taken
                yield future.result()
        for _, future in waiting:
            yield future.result()

    def _do(self, task: Task[T]) -> T:
        """
        Raises:
            VirnucproError: what the task raised, or that a helper died.
            AbandonedError: the helpers were stopped.
        """
        child = self.idle.get()
        try:
            child.pipe.send(task)
            outcome = child.pipe.recv()
        except (EOFError, OSError) as error:
            if self.is_stopped:
                raise AbandonedError from error
            raise self._lost(child.cause_of_end(_END_SECONDS)) from error
        finally:
            self.idle.put(child)
        match outcome:
            case Refused(kind, message, hint):
                raise kind(message, hint)
            case Raised(reason, lines):
                LOGGER.info("%s", printable(lines))
                raise self._lost(reason)
        result: T = outcome
        return result

    def _lost(self, reason: str) -> VirnucproError:
        """The error of a helper that died: the first, whichever task hears of one later."""
        if self.loss is None:
            self.loss = UnavailableError(
                f"a process that makes tables was lost: {printable(reason)}",
                hint="run the same command with --resume, which keeps vectors; if memory ran out, "
                "and no model was named, with fewer --workers",
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


@contextmanager
def helpers_for(maker: Maker, n_helpers: int) -> Iterator[Helpers]:
    """So many helpers, for the time of the block."""
    helpers = Helpers(maker)
    try:
        with interrupts_held():
            for _ in range(n_helpers):
                helpers.children.append(start(_serve))
        if helpers.children:
            LOGGER.info("tables are made by %s", counted(n_helpers, "helper"))
            helpers.threads = ThreadPoolExecutor(n_helpers, "helper")
            message = as_message(maker)
            for child in helpers.children:
                helpers.threads.submit(_introduce, child, message, helpers.idle.put)
        yield helpers
    finally:
        helpers.stop()


def _introduce(child: Child, maker: bytes, on_ready: Callable[[Child], None]) -> None:
    """Send a helper what it works with; if it has died, its first task hears of it."""
    try:
        child.pipe.send_bytes(maker)
    except OSError:
        LOGGER.debug("process %d ended before it began", child.pid)
    finally:
        on_ready(child)


def _serve(pipe: Pipe) -> None:
    """Do the tasks that come, until the parent ends."""
    maker: Maker = pipe.recv()
    while True:
        task: Task[Any] = pipe.recv()
        try:
            outcome = task.do(maker)
        except VirnucproError as error:
            outcome = Refused(type(error), str(error), error.hint)
        except OSError as error:
            told = disk_error(error)
            outcome = Refused(type(told), str(told), told.hint)
        pipe.send(outcome)
