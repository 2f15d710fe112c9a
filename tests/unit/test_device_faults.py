"""Device errors: how they are recognised, and what follows for a device, a shard and a sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from virnucpro.core.events import BatchDone, BatchStarted, Memory, ShardReturned
from virnucpro.core.types import Shard
from virnucpro.engine.device_faults import DeviceFault, find_device_fault
from virnucpro.engine.retry_policy import (
    Attempt,
    WorkerFailure,
    WorkerState,
    attempt_after_return,
    next_attempt,
)
from virnucpro.engine.shard_embedding import BatchError, run_catching

SHARD = Shard(0, Path("000000.faa"), 10, 10, 1000, "")
A = "cuda:0"
B = "cuda:1"
ONLY = frozenset[str]()
BATCH = frozenset({4, 5})
ROW = frozenset({4})
ECC = WorkerFailure(
    "device", "CUDA error: ECC", fault=DeviceFault("uncorrectable ECC error", may_be_input=False)
)
KERNEL = WorkerFailure(
    "device", "illegal", fault=DeviceFault("misaligned address", may_be_input=True)
)
CRASHED = WorkerFailure("crashed", "crashed")
KILLED = WorkerFailure("killed", "killed")


@pytest.mark.parametrize(
    ("message", "name", "may_be_input"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "uncorrectable ECC error", False),
        ("CUDA error: uncorrectable NVLink error detected", "uncorrectable NVLink error", False),
        ("CUDA error: hardware stack error", "hardware stack error", False),
        ("NVRM: Xid (PCI:0000:3b:00): 79", "Xid", False),
        ("GPU 0000:3B:00.0 has fallen off the bus", "fallen off the bus", False),
        ("NVML: GPU is lost", "GPU is lost", False),
        ("CUDA error: context is destroyed", "context is destroyed", False),
        ("CUDA error: invalid device context", "invalid device context", False),
        ("CUDA error: unspecified launch failure", "unspecified launch failure", True),
        ("an illegal memory access was encountered", "illegal memory access", True),
        ("CUDA error: an illegal instruction", "illegal instruction", True),
        ("CUDA error: misaligned address", "misaligned address", True),
        ("CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", True),
    ],
)
def test_message_names_device_fault(message, name, may_be_input):
    assert find_device_fault(f"AcceleratorError: {message}\n(a test)") == (name, may_be_input)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: no kernel image is available for execution on the device",
        "the size of tensor a (3) must match the size of tensor b (4)",
        "the vector is not finite",
    ],
)
def test_other_messages_name_no_device_fault(message):
    assert find_device_fault(message) is None


def test_device_fault_is_no_reason_of_a_sequence():
    def work() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        run_catching(work)

    def fail() -> None:
        raise RuntimeError("wrong size")

    assert run_catching(fail) == BatchError("RuntimeError: wrong size")


# The device


def work_on(attempt: Attempt, *rows: int, device: str = A) -> WorkerState:
    """Return a worker with an attempt and these rows in flight."""
    work = WorkerState(device, device, is_ready=True, attempts=[attempt])
    work.on_event(BatchStarted(device, attempt.shard, rows, 100.0))
    return work


@pytest.mark.parametrize("loss", [ECC, KERNEL])
@pytest.mark.parametrize("n_batches_between", [0, 3])
def test_second_device_fault_removes_device(loss, n_batches_between):
    work = work_on(Attempt(SHARD), 4, 5)
    first = work.handle_failure(loss, {B}).failure_event
    assert (first.is_final, first.n_device_errors, first.lost_device) == (False, 1, "")
    work = replace(work.for_replacement(), is_ready=True, attempts=[Attempt(SHARD)])
    for _ in range(n_batches_between):
        work.on_event(BatchStarted(A, SHARD, (1,), 100.0))
        work.on_event(BatchDone(A, SHARD, (1,), 50, Memory(0, 1)))
    second = work.handle_failure(loss, {B}).failure_event
    assert second.is_final
    assert second.lost_device == (
        f"{A} was taken out of the run after 2 device errors: {loss.fault.name}"
    )


def test_fault_at_start_removes_device():
    lost = WorkerState(A, A).handle_failure(ECC, {B}).failure_event
    assert lost.is_final
    assert lost.lost_device == (
        "cuda:0 was taken out of the run after 1 device error: uncorrectable ECC error"
    )


def test_other_losses_do_not_count_as_device_faults():
    work = work_on(Attempt(SHARD), 4, 5)
    work.handle_failure(CRASHED, {B})
    assert work.n_device_errors == 0


# The rows


@pytest.mark.parametrize("rows", [frozenset[int](), ROW, BATCH])
@pytest.mark.parametrize("others", [ONLY, {B}])
def test_hardware_fault_changes_no_attempt(rows, others):
    before = Attempt(SHARD, n_failures=2, suspects=BATCH, killed_once=ROW)
    for _ in range(10):
        assert next_attempt(before, rows, ECC, A, others) == before


def test_kernel_fault_isolates_rows_elsewhere():
    after = next_attempt(Attempt(SHARD), BATCH, KERNEL, A, {B})
    assert after.suspects == BATCH
    assert after.avoided == {A}
    assert not after.failed_rows and not after.failed_on


def test_kernel_fault_on_two_devices_fails_row():
    first = next_attempt(Attempt(SHARD, suspects=BATCH), ROW, KERNEL, A, {B})
    assert (first.failed_on, first.failed_rows, first.avoided) == ({4: {A}}, {}, {A})
    second = next_attempt(first, ROW, KERNEL, B, {A})
    assert (second.failed_on, second.failed_rows) == ({4: {A, B}}, {4: "illegal"})


def test_kernel_fault_on_one_device_fails_no_row():
    attempt = Attempt(SHARD, suspects=BATCH)
    for _ in range(5):
        attempt = next_attempt(attempt, ROW, KERNEL, A, ONLY)
    assert not attempt.failed_rows and not attempt.failed_on


def test_row_that_faults_two_devices_clears_them():
    attempt = Attempt(SHARD, suspects=BATCH, faulted_on=(A,), failed_on={4: frozenset({B})})
    work = work_on(attempt, 4, device=A)
    work.n_device_errors = 1
    decision = work.handle_failure(KERNEL, {B})
    assert decision.retry_first[0].failed_rows == {4: "illegal"}
    assert not decision.failure_event.is_final and work.n_device_errors == 0
    assert decision.cleared.count(B) == 1


@pytest.mark.parametrize(
    ("loss", "n"), [(CRASHED, 1), (KILLED, 2)], ids=["crashes once", "is killed twice"]
)
def test_row_fails_on_second_device_only(loss, n):
    attempt = Attempt(SHARD, n_failures=1, suspects=BATCH)
    for _ in range(n):
        assert not attempt.failed_on
        attempt = next_attempt(attempt, ROW, loss, A, {B})
    assert (attempt.failed_on, attempt.failed_rows, attempt.avoided) == ({4: {A}}, {}, {A})
    attempt = next_attempt(attempt, ROW, loss, B, {A})
    assert attempt.failed_rows == {4: loss.reason}


@pytest.mark.parametrize(("device", "others"), [("cpu", {A}), (A, ONLY)])
def test_row_fails_at_once_on_cpu_or_only_device(device, others):
    attempt = next_attempt(
        Attempt(SHARD, n_failures=1, suspects=BATCH), ROW, CRASHED, device, others
    )
    assert attempt.failed_rows == {4: "crashed"} and not attempt.avoided


def test_returned_rows_go_to_another_device():
    event = ShardReturned(A, SHARD, {4: "not finite", 5: "too large"}, error="not finite")
    after = attempt_after_return(Attempt(SHARD), event, A, {B})
    assert after.failed_on == {4: {A}, 5: {A}} and not after.failed_rows
    assert (after.avoided, after.returned_by) == ({A}, {A: "not finite"})
    assert after.n_failures == 1, "so that its partial file is read"
    assert after.for_device(A, has_other_device=True).failed_on == {}
    assert after.for_device(B, has_other_device=True).failed_on == after.failed_on


def test_returned_rows_fail_without_another_device():
    event = ShardReturned(A, SHARD, {4: "not finite"}, error="not finite")
    after = attempt_after_return(Attempt(SHARD), event, A, ONLY)
    assert after.failed_rows == {4: "not finite"} and not after.avoided
