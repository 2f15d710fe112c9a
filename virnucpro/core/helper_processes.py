"""The helper processes of a pool, and what each of them does.

    parent  --context, Task-->  helper     one pipe per helper,
    parent  <-----result------  helper     served by one thread of the parent

The context is shared by all tasks of a kind and sent to each process once. A helper has one task at
a time, so neither side waits for the other to read. Helpers end with the parent. They contain no
state that could be lost, so they are killed when the work is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol, TypeAlias, TypeVar

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    pickle_message,
    start_process,
)
from virnucpro.core.errors import AbandonedError, UnavailableError, VirnucproError
from virnucpro.core.events import ErrorText
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.option_text import with_options

_SILENCE_SECONDS = 60.0  # helper silence before a warning

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Context = TypeVar("Context")
Context_contra = TypeVar("Context_contra", contravariant=True)


class Task(Protocol[Context_contra, T_co]):
    """A unit of work."""

    def do(self, tools: Context_contra, /) -> T_co: ...


# future, task, context, pickled context
_QueuedTask: TypeAlias = tuple[Future[Any], Task[Any, Any], object, bytes]


class HelperProcesses:
    """Helper processes, and the tasks that wait for one of them."""

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self.ready: list[ChildProcess] = []  # children that have started up
        self.orders: SimpleQueue[_QueuedTask | None] = SimpleQueue()  # None ends a thread
        self._threads: list[Thread] = []  # one per process
        self._contexts: dict[int, object] = {}  # pid -> context of the process
        self._is_stopped = False
        self._loss: VirnucproError | None = None  # error for the first process that died

    def start(self, module: str) -> None:
        """Start one more process, which first imports ``module``, if any."""
        with defer_interrupts():
            self.children.append(start_process(_helper_main, module))
        thread = Thread(target=self._serve_tasks, args=self.children[-1:], daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, task: Task[Context, T], tools: Context, message: bytes) -> Future[T]:
        """Queue a task with its context for the next free process."""
        future: Future[T] = Future()
        self.orders.put((future, task, tools, message))
        return future

    def stop(self) -> None:
        """Kill all processes, busy or not."""
        self._is_stopped = True
        with suppress(Empty):
            while order := self.orders.get_nowait():
                order[0].cancel()
        for child in self.children:
            child.kill()
            self.orders.put(None)
        for thread in self._threads:
            thread.join()
        for child in self.children:
            child.wait()
            child.close()

    def _serve_tasks(self, child: ChildProcess) -> None:
        """Run queued tasks in a process, one at a time, until the pool is stopped."""
        self._wait_until_ready(child)
        while (queued := self.orders.get()) is not None:
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

    def _run_task(
        self, child: ChildProcess, task: Task[Context, T], tools: Context, message: bytes
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


@dataclass(frozen=True, slots=True)
class _ContextMessage:
    """The context that a process gets before the tasks that need it."""

    context: object


def pickle_context(context: object) -> bytes:
    """Return the message with a context."""
    return pickle_message(_ContextMessage(context))


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
            task: _ContextMessage | Task[Any, Any] = pipe.recv()
            if isinstance(task, _ContextMessage):
                context = task.context
                outcome = None
            else:
                outcome = task.do(context)
        except (VirnucproError, OSError) as error:
            outcome = ErrorText.from_error(error)
        pipe.send(outcome)
