"""Batches in the order in which they are learned, made here or in processes beside the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from virnucpro.ground.errors import VirnucproError
from virnucpro.ground.processes import Child, Pipe, Raised, interrupts_held, kill_all, start
from virnucpro.learning.labelled.frames import Rows
from virnucpro.learning.training.objectives import B, Objective

BatchRows = tuple[int, Rows]  # of an epoch: its number, and the rows of one batch


@contextmanager
def batches_of(
    objective: Objective[B], n_processes: int
) -> Iterator[Callable[[Iterable[BatchRows]], Iterator[B]]]:
    """A function from parts to their batches, made in ``n_processes``, or here if that is 0."""
    if not n_processes:
        yield lambda parts: (objective.batch(rows, epoch) for epoch, rows in parts)
        return
    children: list[Child] = []
    try:
        with interrupts_held():
            for _ in range(n_processes):
                children.append(start(_make_batches))
        for child in children:
            with suppress(OSError):  # it has died; that is heard when it is asked
                child.pipe.send(objective)
        yield lambda parts: _made_beside(children, parts)
    finally:
        kill_all(children)


def _made_beside(children: list[Child], parts: Iterable[BatchRows]) -> Iterator[Any]:
    """In turn. Each has one part at most: it could not say a batch while it is told another."""
    left, busy = iter(parts), deque[Child]()

    def give(child: Child) -> None:
        for part in islice(left, 1):
            with suppress(OSError):  # as above
                child.pipe.send(part)
            busy.append(child)

    for child in children:
        give(child)
    while busy:
        child = busy.popleft()
        batch = _answer(child)
        give(child)  # it makes the next one while this one is learned
        yield batch


def _answer(child: Child) -> object:
    """
    Raises:
        VirnucproError: the process has ended, and why.
    """
    try:
        answer = child.pipe.recv()
    except (EOFError, OSError):
        reason = child.cause_of_end()
    else:
        if not isinstance(answer, Raised):
            return answer
        reason = answer.reason
    raise VirnucproError(
        f"a process that makes batches ended: {reason}",
        hint="the epochs that were finished are kept: go on with --resume and --num-workers 0",
    )


def _make_batches(pipe: Pipe) -> None:
    objective: Objective[object] = pipe.recv()
    while True:
        epoch, rows = pipe.recv()
        pipe.send(objective.batch(rows, epoch))
