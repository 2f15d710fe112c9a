"""Run tasks, which plan a run or build its tables, in helper processes.

    parent  --context, Task-->  helper     one pipe per helper,
    parent  <-----result------  helper     served by one thread of the parent

A task is pure, except for files that appear atomically, so any process may run it at any time. The
context is shared by all tasks of a kind and sent to each process once. A helper has one task at a
time, so neither side waits for the other to read. Helpers live from planning to the report and end
with the parent. They contain no state that could be lost, so they are killed when the work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    pickle_message,
    start_process,
)
from virnucpro.core.errors import UnavailableError, VirnucproError
from virnucpro.core.events import ErrorText
from virnucpro.core.logging import LOGGER, format_count, printable
from virnucpro.core.option_text import with_options

_SILENCE_SECONDS = 60.0  # helper silence before a warning
_LETTERS_AHEAD = 50_000_000  # in pending blocks, unless a single record has more
_LETTERS_PER_HELPER = 1_000_000  # with fewer, a new process would start too late to help

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Context = TypeVar("Context")
Context_contra = TypeVar("Context_contra", contravariant=True)


class _Task(Protocol[Context_contra, T_co]):
    """A unit of work."""

    def do(self, tools: Context_contra, /) -> T_co: ...


class _Block(_Task[Context_contra, T_co], Protocol):
    """A task of known size."""

    @property
    def n_letters(self) -> int: ...


# future, task, context, pickled context
_QueuedTask: TypeAlias = tuple[Future[Any], _Task[Any, Any], object, bytes]


class AbandonedError(Exception):
    """The work was stopped early, so the awaited result never comes."""


class HelperPool:
    """The helpers of a run. Each starts when there is work for it, then stays."""

    def __init__(self, most: int = 0) -> None:
        self._most = most  # helper processes, in addition to this process
        self._reset()

    def _reset(self) -> None:
        self.children: list[ChildProcess] = []
        self.ready: list[ChildProcess] = []  # children that have started up
        self._threads: list[Thread] = []  # one per process
        self._orders: SimpleQueue[_QueuedTask | None] = SimpleQueue()  # None ends a thread
        self._contexts: dict[int, object] = {}  # pid -> context of the process
        self._is_stopped = False
        self._loss: VirnucproError | None = None  # error for the first process that died

    def __enter__(self) -> HelperPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_helpers(self, n_letters: int, module: str = "") -> None:
        """Start as many helpers as pay off for ``n_letters``. Each first imports ``module``."""
        n_more = count_useful_helpers(self._most, n_letters) - len(self.children)
        for _ in range(n_more):
            with defer_interrupts():
                self.children.append(start_process(_helper_main, module))
            self._threads.append(
                Thread(target=self._serve_tasks, args=self.children[-1:], daemon=True)
            )
            self._threads[-1].start()

    def helpers(self, context: Context, n_letters: int, products: str) -> TaskRunner[Context]:
        """Return a runner with this context, which uses helpers if they pay off or already run.

        Without letters, the runner uses no helpers. Logs the ``products`` that helpers make.
        """
        self.start_helpers(n_letters)
        if not (n_letters and self.children):
            return TaskRunner(context, self)
        LOGGER.info("%s are made by %s", products, format_count(len(self.children), "helper"))
        return TaskRunner(context, self, pickle_message(_ContextMessage(context)))

    def _serve_tasks(self, child: ChildProcess) -> None:
        """Run queued tasks in a process, one at a time, until the pool is stopped."""
        self._wait_until_ready(child)
        while (queued := self._orders.get()) is not None:
            future, task, context, message = queued
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._run_task(child, task, context, message))
                except BaseException as error:  # the waiting thread must receive any error
                    future.set_exception(error)

    def _wait_until_ready(self, child: ChildProcess) -> None:
        """Wait until a process has started up. If it died, its first task reports that."""
        try:
            with _warn_if_silent(child):
                self._receive_result(child)
        except (EOFError, OSError, VirnucproError):
            LOGGER.debug("process %d ended before it began", child.pid)
        finally:
            self.ready.append(child)

    def _send_context(self, child: ChildProcess, context: object, message: bytes) -> None:
        if self._contexts.get(child.pid) is not context:
            child.pipe.send_bytes(message)
            self._receive_result(child)
            self._contexts[child.pid] = context

    def _receive_result(self, child: ChildProcess) -> Any:  # noqa: ANN401 - any result
        """Wait for a message from a process and return it.

        Raises:
            EOFError, OSError: the process ended.
            VirnucproError: the task raised it, or the process died with an error.
        """
        match outcome := child.pipe.recv():
            case ErrorText():
                raise outcome.to_error
            case ChildError(reason, lines):
                LOGGER.info("%s", printable(lines))
                raise self._helper_error(reason)
        return outcome

    def submit(self, task: _Task[Context, T], tools: Context, message: bytes) -> Future[T]:
        """Queue a task with its context for the next free process."""
        future: Future[T] = Future()
        self._orders.put((future, task, tools, message))
        return future

    def _run_task(
        self, child: ChildProcess, task: _Task[Context, T], tools: Context, message: bytes
    ) -> T:
        """Run a task in a process and return its result.

        Raises:
            VirnucproError: the task raised it, or the process died.
            AbandonedError: the processes were stopped.
        """
        end_seconds = 5.0  # for a process to exit after its pipe has closed
        try:
            with _warn_if_silent(child):
                self._send_context(child, tools, message)
                child.pipe.send(task)
                result: T = self._receive_result(child)
        except (EOFError, OSError) as error:
            if self._is_stopped:
                raise AbandonedError from error
            raise self._helper_error(child.exit_reason(end_seconds), child.remedy) from error
        return result

    def _helper_error(self, reason: str, remedy: str = "") -> VirnucproError:
        """Return the error for a dead process. Later deaths are reported as the first one."""
        if self._loss is None:
            self._loss = UnavailableError(
                f"a process that makes shards or tables was lost: {printable(reason)}",
                hint=with_options(
                    "; ".join(filter(None, ["run the same command with {resume}", remedy]))
                ),
            )
        return self._loss

    @contextmanager
    def stop_on_error(self) -> Iterator[None]:
        """Stop all processes if an error ends the block."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill all processes, busy or not. Later work starts new ones."""
        self._is_stopped = True
        with suppress(Empty):
            while order := self._orders.get_nowait():
                order[0].cancel()
        for child in self.children:
            child.kill()
            self._orders.put(None)
        for thread in self._threads:
            thread.join()
        for child in self.children:
            child.wait()
            child.close()
        self._reset()


@dataclass(frozen=True, slots=True, eq=False)
class TaskRunner(Generic[Context]):
    """The processes of a pool, with their context. Without processes, tasks run here at once."""

    context: Context
    pool: HelperPool
    message: bytes | None = None  # pickled context for the processes; None: tasks run here

    @property
    def n_ahead(self) -> int:
        """Return the number of tasks to keep submitted: two per ready process."""
        return 0 if self.message is None else 2 * len(self.pool.ready)

    def submit(self, task: _Task[Context, T]) -> Future[T]:
        """Submit a task to a process, or run it here if there are no processes."""
        if self.message is None:
            return _run_here(task, self.context)
        return self.pool.submit(task, self.context, self.message)

    def map_in_order(self, tasks: Iterable[_Block[Context, T]]) -> Iterator[T]:
        """Yield the results of blocks in order, with a few blocks of bounded size in flight.

        If all helpers are busy, a block runs here, so that this process does not idle. Running a
        block and consuming its result may take as long as several helper tasks. Up to twice
        ``n_ahead`` blocks are therefore submitted, so helpers seldom idle either. At the end,
        blocks that no helper has started run here, last one first.
        """
        pending: deque[tuple[_Block[Context, T], Future[T]]] = deque()
        n_letters = 0
        for task in tasks:
            n_letters += task.n_letters
            n_unfinished = sum(not future.done() for _, future in pending)
            is_here = n_unfinished >= 2 * self.n_ahead or task.n_letters > _LETTERS_AHEAD
            pending.append((task, _run_here(task, self.context) if is_here else self.submit(task)))
            while pending and (
                pending[0][1].done()
                or len(pending) > 4 * self.n_ahead
                or n_letters > _LETTERS_AHEAD
            ):
                first, future = pending.popleft()
                n_letters -= first.n_letters
                yield future.result()
        while pending:
            if pending[0][1].done() or not self._run_pending_here(pending):
                yield pending.popleft()[1].result()

    def _run_pending_here(self, pending: deque[tuple[_Block[Context, T], Future[T]]]) -> bool:
        """Run the last block that no helper has started. Return False if all have started."""
        for index in reversed(range(len(pending))):
            task, future = pending[index]
            if future.cancel():
                pending[index] = task, _run_here(task, self.context)
                return True
        return False


@dataclass(frozen=True, slots=True)
class _ContextMessage:
    """The context that a process gets before the tasks that need it."""

    context: object


def _run_here(task: _Task[Context, T], context: Context) -> Future[T]:
    """Run a task at once. The future raises its error, so that results and errors stay in order."""
    future: Future[T] = Future()
    try:
        future.set_result(task.do(context))
    except (VirnucproError, OSError) as error:
        future.set_exception(error)
    return future


def count_useful_helpers(most: int, n_letters: int) -> int:
    """Return the number of helpers that pay off for this many letters."""
    return min(most, n_letters // _LETTERS_PER_HELPER)


@contextmanager
def _warn_if_silent(child: ChildProcess) -> Iterator[None]:
    """Warn if a helper does not answer within the block.

    If this process itself is suspended (Ctrl-Z, a scheduler), that counts as at most one wait.
    """
    n_waits = 60  # within that time
    answered = Event()

    def warn_after_silence() -> None:
        if any(answered.wait(_SILENCE_SECONDS / n_waits) for _ in range(n_waits)):
            return
        LOGGER.warning(
            "process %d, which makes shards or tables, has not answered for %.0f seconds (hint: if "
            "it uses no CPU time, it is stopped or waits for a disk: `kill -9 %d`, then --resume)",
            child.pid,
            _SILENCE_SECONDS,
            child.pid,
        )

    Thread(target=warn_after_silence, daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _helper_main(pipe: Pipe, module: str) -> None:
    """Import ``module``, if any, then run incoming tasks until the parent ends."""
    if module:
        import_module(module)
    pipe.send(None)
    context: Any = None
    while True:
        try:
            task: _ContextMessage | _Task[Any, Any] = pipe.recv()
            if isinstance(task, _ContextMessage):
                context = task.context
                outcome = None
            else:
                outcome = task.do(context)
        except (VirnucproError, OSError) as error:
            outcome = ErrorText.from_error(error)
        pipe.send(outcome)
