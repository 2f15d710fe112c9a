"""The retry policy, by plain values: no process, no file, no clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnucpro.core.errors import StorageError
from virnucpro.core.events import (
    BatchDone,
    BatchStarted,
    ErrorText,
    Memory,
    ShardDone,
    ShardFailed,
    WorkerReady,
)
from virnucpro.core.types import Shard
from virnucpro.engine.retry_policy import Attempt, WorkerFailure, WorkerState, next_attempt

SHARDS = [Shard(i, Path(f"{i:06d}.faa"), 10, 10, 1000, "") for i in range(3)]
SHARD = SHARDS[0]
NO_MEMORY = Memory(0, 1)
RAISED = WorkerFailure("raised", "raised")
CRASHED = WorkerFailure("crashed", "crashed")
KILLED = WorkerFailure("killed", "killed")
SILENT = WorkerFailure("silent", "silent")
BATCH = {4, 5}
ROW = {4}
NOTHING = set[int]()


def workload(*shards: Shard, is_ready: bool = True) -> WorkerState:
    return WorkerState("cpu", is_ready=is_ready, attempts=[Attempt(shard) for shard in shards])


def start_batch(
    work: WorkerState, *rows: int, shard: Shard = SHARD, seconds: float = 100.0
) -> None:
    work.on_event(BatchStarted(work.worker, shard, rows, seconds))


def end_batch(work: WorkerState, *rows: int, shard: Shard = SHARD) -> None:
    work.on_event(BatchDone(work.worker, shard, rows, 50, NO_MEMORY))


# The next attempt at a shard

SUSPECTS = frozenset(BATCH)
ALONE = frozenset(ROW)


@pytest.mark.parametrize(
    ("losses", "lessons"),
    [
        ([(KILLED, BATCH)], {}),
        ([(SILENT, BATCH)], {}),
        ([(CRASHED, BATCH)], {"suspects": SUSPECTS}),
        ([(RAISED, BATCH)], {"suspects": SUSPECTS}),
        ([(KILLED, BATCH)] * 2, {"suspects": SUSPECTS}),
        ([(KILLED, BATCH), (KILLED, {7})], {"suspects": frozenset({7})}),
        ([(CRASHED, BATCH), (CRASHED, {7})], {"suspects": frozenset({4, 5, 7})}),
        ([(CRASHED, BATCH), (KILLED, ROW)], {"suspects": SUSPECTS, "killed_once": ALONE}),
        (
            [(CRASHED, BATCH), (KILLED, ROW), (KILLED, {5})],
            {"suspects": SUSPECTS, "killed_once": SUSPECTS},
        ),
        ([(CRASHED, BATCH), (CRASHED, ROW)], {"suspects": SUSPECTS, "failed_rows": {4: "crashed"}}),
        (
            [(CRASHED, BATCH), (KILLED, ROW), (RAISED, ROW)],
            {"suspects": SUSPECTS, "killed_once": ALONE, "failed_rows": {4: "raised"}},
        ),
        (
            [(KILLED, BATCH)] * 2 + [(KILLED, ROW), (SILENT, ROW)],
            {"suspects": SUSPECTS, "killed_once": ALONE, "failed_rows": {4: "silent"}},
        ),
        (
            [(CRASHED, BATCH), (CRASHED, ROW), (RAISED, {5})],
            {"suspects": SUSPECTS, "failed_rows": {4: "crashed", 5: "raised"}},
        ),
        ([(KILLED, ROW)] * 3, {"suspects": ALONE, "killed_once": ALONE}),
        (
            [(KILLED, ROW)] * 4,
            {"suspects": ALONE, "killed_once": ALONE, "failed_rows": {4: "killed"}},
        ),
        ([(CRASHED, ROW)] * 2, {"suspects": ALONE, "failed_rows": {4: "crashed"}}),
        ([(CRASHED, NOTHING)], {"n_failures_idle": 1}),
        ([(KILLED, BATCH), (KILLED, NOTHING)], {"n_failures_idle": 1}),
        ([(KILLED, NOTHING), (KILLED, BATCH)], {"n_failures_idle": 1, "suspects": SUSPECTS}),
    ],
)
def test_next_attempt_knows_earlier_losses(losses, lessons):
    attempt: Attempt | None = Attempt(SHARD)
    for loss, rows in losses:
        attempt = next_attempt(attempt, rows, loss)
    assert attempt == Attempt(SHARD, n_failures=len(losses), **lessons)


@pytest.mark.parametrize("loss", [CRASHED, KILLED, SILENT])
def test_shard_that_kills_outside_batches(loss):
    attempt: Attempt | None = Attempt(SHARD)
    for n in range(1, 4):
        attempt = next_attempt(attempt, NOTHING, loss)
        assert attempt.n_failures_idle == n
    assert next_attempt(attempt, NOTHING, loss) is None


# Blame


def suspect(place: int, *rows: int) -> Attempt:
    return Attempt(SHARDS[place], n_failures=1, suspects=frozenset(rows))


IN_WRITING = Attempt(SHARDS[0], n_failures=1)
ONE_MORE = Attempt(SHARDS[2])


@pytest.mark.parametrize(
    ("started", "done", "loss", "first", "last"),
    [
        # the shard of the batches in flight is to blame; those before it are being written
        ([(1, (0, 1))], [], CRASHED, [suspect(1, 0, 1), ONE_MORE], [IN_WRITING]),
        # all batches in flight are suspects, and none that is done
        (
            [(1, (0, 1)), (1, (2, 3)), (1, (4,))],
            [(1, (0, 1))],
            CRASHED,
            [suspect(1, 2, 3, 4), ONE_MORE],
            [IN_WRITING],
        ),
        # two shards with batches in flight are both tried again, each alone
        (
            [(0, (8, 9)), (1, (0, 1))],
            [],
            CRASHED,
            [suspect(0, 8, 9), suspect(1, 0, 1), ONE_MORE],
            [],
        ),
        # the last batch of a shard is done while the next has one
        (
            [(0, (0, 1)), (1, (0, 1))],
            [(0, (0, 1))],
            KILLED,
            [Attempt(SHARDS[1], n_failures=1), ONE_MORE],
            [IN_WRITING],
        ),
        # without a batch in flight it is the first shard
        (
            *([], [], KILLED),
            [Attempt(SHARDS[0], n_failures=1, n_failures_idle=1), Attempt(SHARDS[1]), ONE_MORE],
            [],
        ),
    ],
)
def test_batches_in_flight_are_to_blame(started, done, loss, first, last):
    work = workload(*SHARDS)
    for place, rows in started:
        start_batch(work, *rows, shard=SHARDS[place])
    for place, rows in done:
        end_batch(work, *rows, shard=SHARDS[place])
    after = work.handle_failure(loss)
    assert (after.retry_first, after.retry_last, after.failed_shard) == (
        tuple(first),
        tuple(last),
        None,
    )
    assert after.failure_event.shard == first[0].shard


@pytest.mark.parametrize("is_ready", [True, False])
def test_worker_without_a_shard_blames_none(is_ready):
    after = workload(is_ready=is_ready).handle_failure(KILLED)
    assert (after.failure_event.shard, after.retry_first, after.retry_last) == (None, (), ())


def test_given_up_shard_delays_nothing():
    work = workload(*SHARDS)
    start_batch(work, 0, shard=SHARDS[1])
    end_batch(work, 0, shard=SHARDS[1])
    work.attempts[0] = Attempt(SHARDS[0], n_failures=3, n_failures_idle=3)
    after = work.handle_failure(RAISED)
    assert after.failed_shard == ShardFailed("cpu", SHARDS[0], "raised")
    assert (after.retry_first, after.retry_last) == ((Attempt(SHARDS[1]), Attempt(SHARDS[2])), ())


def test_failed_shard_leaves_nothing_in_flight():
    work = workload(*SHARDS)
    start_batch(work, 0, 1)
    refusal = ErrorText.from_error(StorageError("no space"))
    work.on_event(ShardFailed("cpu", SHARDS[0], "no space", refusal=refusal))
    assert work.blamed == [Attempt(SHARDS[1])]
    assert work.timeout(1.0) == 1.0


# When a device is given up


@pytest.mark.parametrize(
    ("loss", "fates"),
    [
        (RAISED, [True]),
        (SILENT, [False, True]),
        (KILLED, [False] * 5 + [True]),
        (CRASHED, [False] * 5 + [True]),
    ],
)
def test_device_that_never_starts_is_given_up(loss, fates):
    work = workload(is_ready=False)
    answers = []
    for _ in fates:
        answers.append(work.handle_failure(loss).failure_event.is_final)
        work = work.for_replacement()
    assert answers == fates


@pytest.mark.parametrize(("rows", "limit"), [((1, 2), 6), ((1,), 100)])
@pytest.mark.parametrize("loss", [RAISED, CRASHED, KILLED, SILENT])
def test_device_that_keeps_losing_workers(loss, rows, limit):
    """It is given up later if single sequences are to blame, of which there may be many."""
    work = workload()
    for n in range(1, limit + 1):
        work.on_event(WorkerReady("cpu", "", NO_MEMORY))
        work.attempts.append(Attempt(SHARD))
        start_batch(work, *rows)
        assert work.handle_failure(loss).failure_event.is_final == (n == limit)
        work = work.for_replacement()


def test_finished_batch_resets_device_failures():
    work = workload(SHARD)
    work.n_failures = 99
    work.n_unexplained_failures = 5
    start_batch(work, 0)
    end_batch(work, 0)
    assert not work.handle_failure(CRASHED).failure_event.is_final
    assert (work.n_failures, work.n_unexplained_failures) == (1, 1), "this loss alone"


# Assigned work and silence


def test_written_shard_makes_room():
    work = workload(*SHARDS[:2])
    assert len(work.open_attempts) == 2
    start_batch(work, 0, shard=SHARDS[1])
    assert len(work.open_attempts) == 1
    work.on_event(ShardDone("cpu", SHARDS[0], 1.0, 0))
    assert len(work.open_attempts) == 1


@pytest.mark.parametrize(("n_residues", "most"), [(16_000, 4), (32_000, 2), (250_000, 2)])
def test_worker_gets_more_small_shards(n_residues, most):
    work = workload()
    for n in range(4):
        assert work.has_room(4) == (n < most)
        work.attempts.append(Attempt(Shard(n, Path(f"{n}.faa"), 10, 10, n_residues, "")))
    assert not work.has_room(4)


def test_worker_gets_work_when_ready():
    assert not workload(is_ready=False).has_room(1)
    work = workload(Shard(0, Path("0.faa"), 10, 10, 100, ""))
    assert [work.has_room(n) for n in (0, 1, 2)] == [False, False, True]


def test_batch_keeps_its_time():
    work = workload(SHARD)
    start_batch(work, 0, 1, seconds=100.0)
    start_batch(work, 2, 3, seconds=200.0)
    end_batch(work, 0, 1)
    assert work.timeout(1.0) == 200.0
    end_batch(work, 2, 3)
    assert work.timeout(1.0) == 1.0


def test_idle_worker_may_be_silent():
    work = workload(SHARD)
    work.on_event(ShardDone("cpu", SHARD, 1.0, 0))
    assert work.timeout(1.0) == float("inf")
