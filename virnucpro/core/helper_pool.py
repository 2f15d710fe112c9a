"""Run tasks, which plan a run or build its tables, in helper processes or here.

A task is pure, except for files that appear atomically, so any process may run it at any time.
Helpers live from planning to the report. A run that is too small for helpers does not import them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from virnucpro.core.errors import AbandonedError, VirnucproError
from virnucpro.core.logging import LOGGER, format_count

if TYPE_CHECKING:
    from virnucpro.core.child_process import ChildProcess
    from virnucpro.core.helper_processes import HelperProcesses, Task

_LETTERS_AHEAD = 50_000_000  # in pending blocks, unless a single record has more
_LETTERS_PER_HELPER = 1_000_000  # with fewer, a new process would start too late to help

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Context = TypeVar("Context")
Context_contra = TypeVar("Context_contra", contravariant=True)


class _Block(Protocol[Context_contra, T_co]):
    """A task of known size."""

    @property
    def n_letters(self) -> int: ...

    def do(self, tools: Context_contra, /) -> T_co: ...


class HelperPool:
    """The helpers of a run. Each starts when there is work for it, then stays."""

    def __init__(self, max_helpers: int = 0) -> None:
        self._max_helpers = max_helpers  # helper processes, in addition to this process
        self.processes: HelperProcesses | None = None  # None: no helper has started

    def __enter__(self) -> HelperPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def children(self) -> list[ChildProcess]:
        return [] if self.processes is None else self.processes.children

    @property
    def ready(self) -> list[ChildProcess]:
        """The children that have started up."""
        return [] if self.processes is None else self.processes.ready

    def start_helpers(self, n_letters: int, module: str = "") -> None:
        """Start as many helpers as pay off for ``n_letters``. Each first imports ``module``."""
        n_more = count_useful_helpers(self._max_helpers, n_letters) - len(self.children)
        if n_more > 0 and self.processes is None:
            from virnucpro.core.helper_processes import HelperProcesses

            self.processes = HelperProcesses()
        for _ in range(n_more):
            assert self.processes is not None
            self.processes.start(module)

    def helpers(self, context: Context, n_letters: int, products: str) -> TaskRunner[Context]:
        """Return a runner with this context, which uses helpers if they pay off or already run.

        Without letters, the runner uses no helpers. Logs the ``products`` that helpers make.
        """
        self.start_helpers(n_letters)
        if not n_letters or self.processes is None:
            return TaskRunner(context, self)
        from virnucpro.core.helper_processes import pickle_context

        LOGGER.info("%s are made by %s", products, format_count(len(self.children), "helper"))
        return TaskRunner(context, self, pickle_context(context))

    def submit(self, task: Task[Context, T], tools: Context, message: bytes) -> Future[T]:
        """Queue a task with its context for the next free process.

        Raises:
            AbandonedError: the processes were stopped.
        """
        processes = self.processes  # another thread may stop them
        if processes is None:
            raise AbandonedError
        return processes.submit(task, tools, message)

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
        processes = self.processes  # another thread may stop them, too
        if processes is not None:
            processes.stop()
            self.processes = None


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

    def submit(self, task: Task[Context, T]) -> Future[T]:
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


def _run_here(task: Task[Context, T], context: Context) -> Future[T]:
    """Run a task at once. The future raises its error, so that results and errors stay in order."""
    future: Future[T] = Future()
    try:
        future.set_result(task.do(context))
    except (VirnucproError, OSError) as error:
        future.set_exception(error)
    return future


def count_useful_helpers(max_helpers: int, n_letters: int) -> int:
    """Return the number of helpers that pay off for this many letters."""
    return min(max_helpers, n_letters // _LETTERS_PER_HELPER)
