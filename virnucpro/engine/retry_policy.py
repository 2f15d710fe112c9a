"""Decide after the loss of a worker which shard is to blame, and what is tried again or given up.

This module has no process, file or clock, so every executor can use it. An executor keeps a
``WorkerState`` per worker and passes it every event of the worker. When the worker ends or falls
silent, ``WorkerState.handle_failure`` decides about its attempts:

    killed, by chance or not         the shard is tried again as it was
    killed again, or crashed         the ORFs in flight are suspects, and run one by one
    crashed while a suspect ran      the suspect is condemned; the rest of its shard is delivered
    killed twice while a suspect ran the same
    nothing was in flight            the shard is tried again, MAX_BLIND_LOSSES times in all

So a sequence is given up after two crashes or four kills.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from virnucpro.core.events import (
    BatchDone,
    BatchStarted,
    ErrorText,
    ShardDone,
    ShardFailed,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.types import Shard

_LARGE_SHARDS_IN_FLIGHT = 2  # shards per worker, without those being written
MAX_IN_FLIGHT = 4  # the same for small shards, while they have less than ...
_MAX_SMALL_SHARD_RESIDUES = 64_000
MAX_UNEXPLAINED_FAILURES = 6  # workers a device may lose in a row without one batch done
MAX_FAILURES = 100  # the same, including losses caused by a single ORF
MAX_FAILURES_IDLE = 4  # workers a shard may kill while no batch is in flight


@dataclass(frozen=True, slots=True)
class Attempt:
    """A shard to embed, and what earlier attempts with lost workers showed. Rows are ORFs."""

    shard: Shard
    n_failures: int = 0
    n_failures_idle: int = 0  # losses without a batch in flight
    suspects: frozenset[int] = frozenset()  # rows to run one by one
    killed_once: frozenset[int] = frozenset()  # suspects that ran alone when a worker was killed
    failed_rows: Mapping[int, str] = field(default_factory=dict)  # row -> reason


class WorkerFailure(NamedTuple):
    """The unexpected end of a worker.

    It raised an exception and reported it, crashed, was killed from outside, or was stopped
    because it was silent for too long.
    """

    cause: Literal["raised", "crashed", "killed", "silent"]
    reason: str
    traceback: str = ""
    error: ErrorText | None = None  # that it raised, if it is one of ours

    @property
    def is_crash(self) -> bool:
        """True if the worker ended by itself: a kill or a silence may be an accident."""
        return self.cause in ("raised", "crashed")


class RetryDecision(NamedTuple):
    """The decision after a loss, about the worker and its attempts."""

    failure_event: WorkerLost
    retry_first: tuple[Attempt, ...]  # to run before all others, in this order
    retry_last: tuple[Attempt, ...]  # to run after all others
    failed_shard: ShardFailed | None  # a shard that is given up


@dataclass(slots=True)
class WorkerState:
    """The attempts of one worker and its batches in flight, tracked from its events."""

    worker: str
    n_failures: int = 0  # losses of its device in a row, without one batch done
    n_unexplained_failures: int = 0  # losses not caused by a single ORF
    is_ready: bool = False
    attempts: list[Attempt] = field(default_factory=list)  # in the order they were sent
    shard: Shard | None = None  # shard of the last batch that was started
    rows: dict[int, set[int]] = field(default_factory=dict)  # rows in flight, by the shard's index
    batch_seconds: float = 0.0  # limit of the last of these batches

    def on_event(self, event: WorkerEvent) -> None:
        """Note an event of the worker."""
        match event:
            case WorkerReady():
                self.is_ready = True
            case BatchStarted(shard=shard, rows=rows, allowed_seconds=seconds):
                self.shard, self.batch_seconds = shard, seconds
                self.rows.setdefault(shard.index, set()).update(rows)
            case BatchDone(shard=shard, rows=rows):
                self.rows.get(shard.index, set()).difference_update(rows)
                self.n_failures = self.n_unexplained_failures = 0
            case ShardDone(shard=shard) | ShardFailed(shard=shard):
                self.attempts = [attempt for attempt in self.attempts if attempt.shard != shard]
                self.rows.pop(shard.index, None)

    @property
    def open_attempts(self) -> list[Attempt]:
        """The attempts that are being embedded or waiting; the others are being written."""
        shards = [attempt.shard for attempt in self.attempts]
        return self.attempts[shards.index(self.shard) if self.shard in shards else 0 :]

    def has_room(self, n_attempts: int) -> bool:
        """True if the worker is ready and has fewer open attempts than this."""
        if not self.is_ready:
            return False
        attempts = self.open_attempts
        is_small = sum(attempt.shard.n_residues for attempt in attempts) < _MAX_SMALL_SHARD_RESIDUES
        return len(attempts) < n_attempts and (len(attempts) < _LARGE_SHARDS_IN_FLIGHT or is_small)

    def rows_of(self, attempt: Attempt) -> set[int]:
        """The rows of an attempt that are in flight."""
        return self.rows.get(attempt.shard.index, set())

    @property
    def blamed(self) -> list[Attempt]:
        """The attempts to blame for a loss now: any with batches in flight, else the first one."""
        return [attempt for attempt in self.attempts if self.rows_of(attempt)] or self.attempts[:1]

    def timeout(self, silence_seconds: float) -> float:
        """Seconds of silence after which the worker counts as hung."""
        if not self.attempts:
            return float("inf")
        return self.batch_seconds if any(self.rows.values()) else silence_seconds

    def handle_failure(self, loss: WorkerFailure) -> RetryDecision:
        """Decide about the worker's attempts after its loss."""
        guilty = self.blamed
        lost = WorkerLost(
            self.worker,
            loss.reason,
            guilty[0].shard if guilty else None,
            loss.traceback,
            is_final=self._count_failure(loss),
        )
        place = self.attempts.index(guilty[0]) if guilty else 0
        # earlier attempts were being written, which may have killed the worker
        in_writing = tuple(
            replace(attempt, n_failures=attempt.n_failures + 1) for attempt in self.attempts[:place]
        )
        waiting = [attempt for attempt in self.attempts[place:] if attempt not in guilty]
        again = [next_attempt(attempt, self.rows_of(attempt), loss) for attempt in guilty]
        failed = None
        if not all(again):
            failed = ShardFailed(self.worker, guilty[0].shard, loss.reason, loss.traceback)
        return RetryDecision(lost, (*filter(None, again), *waiting), in_writing, failed)

    def _count_failure(self, loss: WorkerFailure) -> bool:
        """Count a loss of the device; True if the device is given up."""
        # after a second loss in a row by silence, a third worker would only take as long again
        is_hopeless = loss.cause == "raised" or (loss.cause == "silent" and self.n_failures)
        self.n_failures += 1
        self.n_unexplained_failures += sum(map(len, self.rows.values())) != 1
        if not self.is_ready and is_hopeless:
            return True
        return (
            self.n_failures >= MAX_FAILURES
            or self.n_unexplained_failures >= MAX_UNEXPLAINED_FAILURES
        )

    def for_replacement(self) -> WorkerState:
        """The workload of the worker that replaces this one."""
        return WorkerState(self.worker, self.n_failures, self.n_unexplained_failures)


def next_attempt(attempt: Attempt, rows: Set[int], loss: WorkerFailure) -> Attempt | None:
    """The next attempt at a shard; None if the shard is given up.

    ``rows`` were in flight when the worker was lost.
    """
    again = replace(attempt, n_failures=attempt.n_failures + 1)
    if not rows:
        again = replace(again, n_failures_idle=attempt.n_failures_idle + 1)
        return again if again.n_failures_idle < MAX_FAILURES_IDLE else None
    if again.n_failures == 1 and not loss.is_crash:
        return again
    if not rows <= attempt.suspects:
        return replace(again, suspects=attempt.suspects | rows)
    (row,) = rows
    if loss.is_crash or row in attempt.killed_once:
        return replace(again, failed_rows={**attempt.failed_rows, row: loss.reason})
    return replace(again, killed_once=attempt.killed_once | rows)
