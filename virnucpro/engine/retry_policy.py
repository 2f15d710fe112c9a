"""Decide after a worker failure which shard to blame, and what to retry or give up.

This module has no process, file or clock, so every executor can use it. An executor keeps a
``WorkerState`` per worker and passes it every event of the worker. When the worker ends or stops
responding, ``WorkerState.handle_failure`` decides about its attempts:

    killed once                      retry the shard unchanged
    killed again, or crashed         treat the ORFs in flight as suspects, and run them one by one
    crashed while a suspect ran      mark the suspect as failed, and deliver the rest of its shard
    killed twice while a suspect ran the same
    nothing was in flight            retry the shard, ``Attempt.max_failures_idle`` times
    an error of the device           retry the shard as it was, and blame no row

So a sequence is skipped after two crashes or four kills. On a GPU it is then tried on another
device, if there is one, and fails only if it fails there too. The same holds for a sequence that
raises an error or has no finite vector. A device is taken out of the run after
``WorkerState.max_device_errors`` errors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from virnucpro.core.events import (
    BatchDone,
    BatchStarted,
    ErrorText,
    ShardDone,
    ShardFailed,
    ShardReturned,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.types import Shard
from virnucpro.engine.device_faults import DeviceFault


@dataclass(frozen=True, slots=True)
class Attempt:
    """A shard to embed, with the findings of earlier attempts that failed. Rows are ORFs."""

    shard: Shard
    n_failures: int = 0
    n_failures_idle: int = 0  # failures without a batch in flight
    suspects: frozenset[int] = frozenset()  # rows to run one by one
    killed_once: frozenset[int] = frozenset()  # suspects that ran alone when a worker was killed
    failed_rows: Mapping[int, str] = field(default_factory=dict)  # row -> reason
    # row that failed alone -> the devices on which it did
    failed_on: Mapping[int, frozenset[str]] = field(default_factory=dict)
    faulted_on: tuple[str, ...] = ()  # devices whose errors made rows suspects
    returned_by: Mapping[str, str] = field(default_factory=dict)  # device -> error of its rows
    avoided: frozenset[str] = frozenset()  # devices that run it only if there is no other
    has_other_device: bool = False  # which tries the rows that fail for the first time

    max_failures_idle: ClassVar = 4  # workers a shard may kill while no batch is in flight

    def is_retried_elsewhere(self, row: int) -> bool:
        """Return True if another device tries a row that fails on this one."""
        return self.has_other_device and row not in self.failed_on

    def for_device(self, device: str, *, has_other_device: bool) -> Attempt:
        """The attempt as its worker gets it: ``failed_on`` has only rows of other devices."""
        others = {row: devices - {device} for row, devices in self.failed_on.items()}
        failed_on = {row: devices for row, devices in others.items() if devices}
        return replace(self, failed_on=failed_on, has_other_device=has_other_device)


class WorkerFailure(NamedTuple):
    """The unexpected end of a worker.

    It raised an exception and reported it, crashed, was killed from outside, or was stopped because
    it was silent for too long.
    """

    cause: Literal["raised", "crashed", "killed", "silent", "device"]
    reason: str
    traceback: str = ""
    error: ErrorText | None = None  # the VirnucproError that it raised, if any
    fault: DeviceFault | None = None  # if the cause is the device

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
    # A device for each of its errors that a sequence caused, this one included.
    cleared: tuple[str, ...] = ()


@dataclass(slots=True)
class WorkerState:
    """The attempts of one worker and its batches in flight, tracked from its events."""

    worker: str
    device: str = "cpu"
    n_device_errors: int = 0  # in the run
    n_failures: int = 0  # consecutive failures of its device without a finished batch
    n_unexplained_failures: int = 0  # failures not caused by a single ORF
    is_ready: bool = False
    attempts: list[Attempt] = field(default_factory=list)  # in the order they were sent
    shard: Shard | None = None  # shard of the last batch that was started
    rows: dict[int, set[int]] = field(default_factory=dict)  # rows in flight, by shard index
    batch_seconds: float = 0.0  # time limit of the last batch in flight
    ended: Attempt | None = None  # the last one that ended, or that was returned

    max_in_flight: ClassVar = 4  # attempts, if their shards are small: see ``has_room``
    # of one device in a run; batches that are done in between do not count
    max_device_errors: ClassVar = 2

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
            case ShardDone(shard=shard) | ShardFailed(shard=shard) | ShardReturned(shard=shard):
                self.ended = next((one for one in self.attempts if one.shard == shard), None)
                self.attempts = [attempt for attempt in self.attempts if attempt.shard != shard]
                self.rows.pop(shard.index, None)

    @property
    def open_attempts(self) -> list[Attempt]:
        """Return the attempts that are queued or being embedded, without those being written."""
        shards = [attempt.shard for attempt in self.attempts]
        return self.attempts[shards.index(self.shard) if self.shard in shards else 0 :]

    def has_room(self, n_attempts: int) -> bool:
        """Return True if the worker is ready and can take another of ``n_attempts`` attempts."""
        max_small_shard_residues = 64_000
        large_shards_in_flight = 2  # shards per worker, without those being written
        if not self.is_ready:
            return False
        attempts = self.open_attempts
        is_small = sum(attempt.shard.n_residues for attempt in attempts) < max_small_shard_residues
        return len(attempts) < n_attempts and (len(attempts) < large_shards_in_flight or is_small)

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

    @property
    def lone_suspect(self) -> tuple[Shard, int] | None:
        """The shard and the row of a suspect that is alone on the device."""
        rows = [(attempt, row) for attempt in self.attempts for row in self.rows_of(attempt)]
        if len(rows) == 1 and rows[0][1] in rows[0][0].suspects:
            return rows[0][0].shard, rows[0][1]
        return None

    def handle_failure(
        self, loss: WorkerFailure, other_devices: Set[str] = frozenset()
    ) -> RetryDecision:
        """Decide about the worker's attempts after its failure.

        ``other_devices`` can try what failed on this one.
        """
        blamed = self.blamed
        retries = [
            next_attempt(attempt, self.rows_of(attempt), loss, self.device, other_devices)
            for attempt in blamed
        ]
        cleared = _cleared_devices(blamed, retries) if loss.cause == "device" else ()
        is_final = self._count_failure(loss, cleared.count(self.device))
        failure_event = WorkerLost(
            self.worker,
            loss.reason,
            blamed[0].shard if blamed else None,
            loss.traceback,
            is_final=is_final,
            device_error=loss.fault.name if loss.fault else "",
            n_device_errors=self.n_device_errors,
        )
        first_blamed = self.attempts.index(blamed[0]) if blamed else 0
        # earlier attempts were being written, which may have killed the worker
        being_written = tuple(
            replace(attempt, n_failures=attempt.n_failures + 1)
            for attempt in self.attempts[:first_blamed]
        )
        queued = [attempt for attempt in self.attempts[first_blamed:] if attempt not in blamed]
        failed_shard = None
        if not all(retries):
            failed_shard = ShardFailed(self.worker, blamed[0].shard, loss.reason, loss.traceback)
        return RetryDecision(
            failure_event,
            (*filter(None, retries), *queued),
            being_written,
            failed_shard,
            cleared,
        )

    def _count_failure(self, loss: WorkerFailure, n_cleared: int) -> bool:
        """Count a failure of the device. Return True if the device is given up.

        A device is not to blame for ``n_cleared`` of its errors.
        """
        # consecutive worker failures per device without a finished batch
        max_unexplained_failures = 6
        max_failures = 100  # the same, including failures caused by a single ORF
        if loss.cause == "device":
            self.n_device_errors = max(0, self.n_device_errors + 1 - n_cleared)
            return not self.is_ready or self.n_device_errors >= self.max_device_errors
        # after two consecutive timeouts, a third worker would only take as long again
        is_hopeless = loss.cause == "raised" or (loss.cause == "silent" and self.n_failures)
        self.n_failures += 1
        self.n_unexplained_failures += sum(map(len, self.rows.values())) != 1
        if not self.is_ready and is_hopeless:
            return True
        return (
            self.n_failures >= max_failures
            or self.n_unexplained_failures >= max_unexplained_failures
        )

    def for_replacement(self) -> WorkerState:
        """Return the state of the worker that replaces this one."""
        return WorkerState(
            self.worker,
            self.device,
            self.n_device_errors,
            self.n_failures,
            self.n_unexplained_failures,
        )


def next_attempt(
    attempt: Attempt,
    rows: Set[int],
    loss: WorkerFailure,
    device: str = "cpu",
    other_devices: Set[str] = frozenset(),
) -> Attempt | None:
    """Return the next attempt at a shard, or None if the shard is given up.

    ``rows`` were in flight when the worker failed. ``other_devices`` can try a row that failed.
    """
    if loss.cause == "device":
        return _attempt_after_fault(attempt, rows, loss, device, other_devices)
    retry = replace(attempt, n_failures=attempt.n_failures + 1)
    if not rows:
        retry = replace(retry, n_failures_idle=attempt.n_failures_idle + 1)
        return retry if retry.n_failures_idle < Attempt.max_failures_idle else None
    if retry.n_failures == 1 and not loss.is_crash:
        return retry
    if not rows <= attempt.suspects:
        return replace(retry, suspects=attempt.suspects | rows)
    (row,) = rows
    if loss.is_crash or row in attempt.killed_once:
        return fail_rows(retry, {row: loss.reason}, device, other_devices)
    return replace(retry, killed_once=attempt.killed_once | rows)


def _attempt_after_fault(
    attempt: Attempt, rows: Set[int], loss: WorkerFailure, device: str, other_devices: Set[str]
) -> Attempt:
    """Return the next attempt at a shard after an error of the device. No row is to blame.

    If a defect of a kernel may have caused it, the rows in flight run one by one on another device.
    Only a row that was alone at such errors of two devices fails.
    """
    if loss.fault is None or not loss.fault.may_be_input or not rows:
        return attempt
    again = replace(attempt, n_failures=attempt.n_failures + 1, avoided=frozenset({device}))
    if len(rows) > 1 or not rows <= attempt.suspects:
        faulted_on = (*attempt.faulted_on, device)
        return replace(again, suspects=attempt.suspects | rows, faulted_on=faulted_on)
    (row,) = rows
    if other_devices or attempt.failed_on.get(row, frozenset()) - {device}:
        return fail_rows(again, {row: loss.reason}, device, other_devices)
    return again


def fail_rows(
    attempt: Attempt, reasons: Mapping[int, str], device: str, other_devices: Set[str]
) -> Attempt:
    """Return the next attempt at a shard of which rows failed alone on a device.

    A row fails on a CPU, on the second device, and if there is no other device to try it on.
    """
    failed_rows = dict(attempt.failed_rows)
    failed_on = dict(attempt.failed_on)
    for row, reason in reasons.items():
        before = failed_on.get(row, frozenset())
        if device == "cpu" or not other_devices or before - {device}:
            failed_rows[row] = reason
        if device != "cpu":
            failed_on[row] = before | {device}
    is_avoided = device != "cpu" and not reasons.keys() <= failed_rows.keys()
    avoided = frozenset({device} if is_avoided else ())
    return replace(attempt, failed_rows=failed_rows, failed_on=failed_on, avoided=avoided)


def attempt_after_return(
    attempt: Attempt, event: ShardReturned, device: str, other_devices: Set[str]
) -> Attempt:
    """Return the next attempt at a shard that a device returned for the rows that failed on it."""
    again = replace(attempt, n_failures=attempt.n_failures + 1)
    if event.error:
        again = replace(again, returned_by={**attempt.returned_by, device: event.error})
    return fail_rows(again, event.reasons, device, other_devices)


def _cleared_devices(
    attempts: Sequence[Attempt], again: Sequence[Attempt | None]
) -> tuple[str, ...]:
    """Return a device for each error that a sequence caused which now fails."""
    cleared = list[str]()
    for before, after in zip(attempts, again, strict=True):
        if after is not None:
            for row in after.failed_rows.keys() - before.failed_rows.keys():
                cleared += [*before.faulted_on, *after.failed_on[row]]
    return tuple(cleared)
