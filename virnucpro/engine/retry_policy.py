"""Decide after a worker failure which shard to blame, and what to retry or give up.

This module has no process, file or clock, so every executor can use it. An executor keeps a
``WorkerState`` per worker and passes it every event of the worker. When the worker ends or stops
responding, ``WorkerState.handle_failure`` decides about its attempts:

    killed once                      retry the shard unchanged
    killed again, or crashed         treat the ORFs in flight as suspects, and run them one by one
    crashed while a suspect ran      mark the suspect as failed, and deliver the rest of its shard
    killed twice while a suspect ran the same
    nothing was in flight            retry the shard, MAX_FAILURES_IDLE times in all

So a sequence is skipped after two crashes or four kills.
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
MAX_IN_FLIGHT = 4  # the same for small shards, which together have fewer residues than ...
_MAX_SMALL_SHARD_RESIDUES = 64_000
MAX_UNEXPLAINED_FAILURES = 6  # consecutive worker failures per device without a finished batch
MAX_FAILURES = 100  # the same, including failures caused by a single ORF
MAX_FAILURES_IDLE = 4  # workers a shard may kill while no batch is in flight


@dataclass(frozen=True, slots=True)
class Attempt:
    """A shard to embed, with the findings of earlier attempts that failed. Rows are ORFs."""

    shard: Shard
    n_failures: int = 0
    n_failures_idle: int = 0  # failures without a batch in flight
    suspects: frozenset[int] = frozenset()  # rows to run one by one
    killed_once: frozenset[int] = frozenset()  # suspects that ran alone when a worker was killed
    failed_rows: Mapping[int, str] = field(default_factory=dict)  # row -> reason


class WorkerFailure(NamedTuple):
    """The unexpected end of a worker.

    It raised an exception and reported it, crashed, was killed from outside, or was stopped because
    it was silent for too long.
    """

    cause: Literal["raised", "crashed", "killed", "silent"]
    reason: str
    traceback: str = ""
    error: ErrorText | None = None  # the VirnucproError that it raised, if any

    @property
    def is_crash(self) -> bool:
        """Return True if the worker ended by itself. A kill or a silence may be an accident."""
        return self.cause in ("raised", "crashed")


class RetryDecision(NamedTuple):
    """The decision about a failed worker and its attempts."""

    failure_event: WorkerLost
    retry_first: tuple[Attempt, ...]  # run before all others, in this order
    retry_last: tuple[Attempt, ...]  # run after all others
    failed_shard: ShardFailed | None  # a shard that will not be retried


@dataclass(slots=True)
class WorkerState:
    """The attempts of one worker and its batches in flight, tracked from its events."""

    worker: str
    n_failures: int = 0  # consecutive failures of its device without a finished batch
    n_unexplained_failures: int = 0  # failures not caused by a single ORF
    is_ready: bool = False
    attempts: list[Attempt] = field(default_factory=list)  # in the order they were sent
    shard: Shard | None = None  # shard of the last batch that was started
    rows: dict[int, set[int]] = field(default_factory=dict)  # rows in flight, by shard index
    batch_seconds: float = 0.0  # time limit of the last batch in flight

    def on_event(self, event: WorkerEvent) -> None:
        """Track an event of the worker."""
        match event:
            case WorkerReady():
                self.is_ready = True
            case BatchStarted(shard=shard, rows=rows, allowed_seconds=seconds):
                self.shard = shard
                self.batch_seconds = seconds
                self.rows.setdefault(shard.index, set()).update(rows)
            case BatchDone(shard=shard, rows=rows):
                self.rows.get(shard.index, set()).difference_update(rows)
                self.n_failures = self.n_unexplained_failures = 0
            case ShardDone(shard=shard) | ShardFailed(shard=shard):
                self.attempts = [attempt for attempt in self.attempts if attempt.shard != shard]
                self.rows.pop(shard.index, None)

    @property
    def open_attempts(self) -> list[Attempt]:
        """Return the attempts that are queued or being embedded, without those being written."""
        shards = [attempt.shard for attempt in self.attempts]
        return self.attempts[shards.index(self.shard) if self.shard in shards else 0 :]

    def has_room(self, n_attempts: int) -> bool:
        """Return True if the worker is ready and can take another of ``n_attempts`` attempts."""
        if not self.is_ready:
            return False
        attempts = self.open_attempts
        is_small = sum(attempt.shard.n_residues for attempt in attempts) < _MAX_SMALL_SHARD_RESIDUES
        return len(attempts) < n_attempts and (len(attempts) < _LARGE_SHARDS_IN_FLIGHT or is_small)

    def rows_of(self, attempt: Attempt) -> set[int]:
        """Return the rows of an attempt that are in flight."""
        return self.rows.get(attempt.shard.index, set())

    @property
    def blamed(self) -> list[Attempt]:
        """Return the attempts to blame for a failure now.

        They are those with batches in flight, or else the first one.
        """
        return [attempt for attempt in self.attempts if self.rows_of(attempt)] or self.attempts[:1]

    def timeout(self, silence_seconds: float) -> float:
        """Return the seconds of silence after which the worker counts as hung."""
        if not self.attempts:
            return float("inf")
        return self.batch_seconds if any(self.rows.values()) else silence_seconds

    def handle_failure(self, loss: WorkerFailure) -> RetryDecision:
        """Decide about the worker's attempts after its failure."""
        blamed = self.blamed
        failure_event = WorkerLost(
            self.worker,
            loss.reason,
            blamed[0].shard if blamed else None,
            loss.traceback,
            is_final=self._count_failure(loss),
        )
        first_blamed = self.attempts.index(blamed[0]) if blamed else 0
        # earlier attempts were being written, which may have killed the worker
        being_written = tuple(
            replace(attempt, n_failures=attempt.n_failures + 1)
            for attempt in self.attempts[:first_blamed]
        )
        queued = [attempt for attempt in self.attempts[first_blamed:] if attempt not in blamed]
        retries = [next_attempt(attempt, self.rows_of(attempt), loss) for attempt in blamed]
        failed_shard = None
        if not all(retries):
            failed_shard = ShardFailed(self.worker, blamed[0].shard, loss.reason, loss.traceback)
        return RetryDecision(
            failure_event, (*filter(None, retries), *queued), being_written, failed_shard
        )

    def _count_failure(self, loss: WorkerFailure) -> bool:
        """Count a failure of the device. Return True if the device is given up."""
        # after two consecutive timeouts, a third worker would only take as long again
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
        """Return the state of the worker that replaces this one."""
        return WorkerState(self.worker, self.n_failures, self.n_unexplained_failures)


def next_attempt(attempt: Attempt, rows: Set[int], loss: WorkerFailure) -> Attempt | None:
    """Return the next attempt at a shard, or None if the shard is given up.

    ``rows`` were in flight when the worker failed.
    """
    retry = replace(attempt, n_failures=attempt.n_failures + 1)
    if not rows:
        retry = replace(retry, n_failures_idle=attempt.n_failures_idle + 1)
        return retry if retry.n_failures_idle < MAX_FAILURES_IDLE else None
    if retry.n_failures == 1 and not loss.is_crash:
        return retry
    if not rows <= attempt.suspects:
        return replace(retry, suspects=attempt.suspects | rows)
    (row,) = rows
    if loss.is_crash or row in attempt.killed_once:
        return replace(retry, failed_rows={**attempt.failed_rows, row: loss.reason})
    return replace(retry, killed_once=attempt.killed_once | rows)
