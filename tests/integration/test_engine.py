"""The engine when workers die, hang, run out of memory, or meet sequences that crash them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import faulty_workers
import numpy as np
import psutil
import pytest
import torch
from conftest import TINY, open_dna
from fair_esm_reference import random_protein, tolerance, worst_row
from run_helpers import (
    assert_same_run,
    assert_same_vectors,
    leftovers,
    our_processes,
    rows,
    run_inline,
    statuses,
    tables,
    vectors,
    within,
    write_fasta,
)
from toy_executor import BackwardExecutor

from virnucpro.cli.progress import EventLog
from virnucpro.core.child_process import defer_interrupts, start_process
from virnucpro.core.errors import InputError, UnavailableError
from virnucpro.core.events import (
    STAGES,
    BatchDone,
    BatchSizeReduced,
    BatchStarted,
    RunEvent,
    ShardDone,
    ShardFailed,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.types import Shard
from virnucpro.engine import local
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.local import InlineExecutor, ProcessExecutor, WorkerHandle
from virnucpro.engine.retry_policy import Attempt, WorkerState
from virnucpro.engine.shard_embedding import BatchError, run_catching
from virnucpro.engine.worker import Worker
from virnucpro.results.outputs import open_run_dir
from virnucpro.workflows import run_steps

pytestmark = pytest.mark.usefixtures("quick_starts", "early_starts")
ONE = {"p0": "MKVLEFPQIL"}
CODONS_OF_POISON = "TGG" * 4 + "TGC" + "TGG" * 4


@pytest.fixture
def early_starts(monkeypatch):
    """Start workers before the plan for small inputs too."""
    monkeypatch.setattr(run_steps, "_BYTES_PER_WORKER", 1)


@pytest.fixture
def run_by(make_config, tiny, contigs):
    """Run the contigs, or another input, with an executor. -> folder, exit code, events"""

    def start(executor=None, fasta=contigs, **changes):
        config = make_config(fasta, **changes)
        events = []
        summary = run_inline(config, tiny.head, events.append, executor)
        return config.output, summary.exit_code, events

    return start


class Watch:
    """Handles the events of a run, and records which processes exist at each event."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.pids: dict[str, set[int | None]] = {}  # by the stage of the run

    def __call__(self, event: RunEvent) -> None:
        self.events.append(event)
        some = self.pids.setdefault(getattr(event, "stage", ""), set())
        some.update(child.pid for child in multiprocessing.active_children())

    @property
    def started(self) -> set[int | None]:
        return set().union(*self.pids.values())


def select_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture
def poisoned(contigs):
    """The contigs with poison in two of them, one in shard 0 and one in a later shard."""
    text = contigs.read_text()
    for name in ("contig1", "contig23"):
        header = f">{name} of a test\n"
        assert header in text
        text = text.replace(header, f"{header}{CODONS_OF_POISON}")
    path = contigs.with_name("poisoned.fa")
    path.write_text(text)
    return path


def test_workers_get_ready_while_the_run_is_planned(
    make_config, tiny, contigs, undisturbed, tmp_path
):
    config = make_config(contigs, output=tmp_path / "early")
    watch = Watch()
    run_inline(config, tiny.head, watch, ProcessExecutor(["cpu"] * 2))
    assert watch.pids["reading"] == watch.started and len(watch.started) == 2
    assert_same_run(config.output, undisturbed)


def test_refused_input_ends_workers(make_config, tiny, contigs, tmp_path, caplog):
    with contigs.open("a") as out:
        out.write(">contig1\nACGT\n")
    names = []
    watch = Watch()
    for executor in (InlineExecutor(), ProcessExecutor(["cpu"] * 2, faulty_workers.StuckWorker)):
        config = make_config(contigs, output=tmp_path / str(len(names)))
        with within(60), pytest.raises(InputError, match="occurs twice"):
            run_inline(config, tiny.head, watch, executor)
        names.append(sorted(path.name for path in config.output.rglob("*")))
    assert len(watch.started) == 2 and not our_processes()
    assert names[0] == names[1]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_finished_run_starts_no_worker(make_config, tiny, contigs, tmp_path):
    executor = ProcessExecutor(["cpu"])
    (begun, finished, further) = (Watch(), Watch(), Watch())
    run_inline(make_config(contigs), tiny.head, begun, executor)
    run_inline(make_config(contigs, resume=True, add=True), tiny.head, finished, executor)
    assert "reading" in finished.pids  # its plan was deleted with its shards
    assert len(begun.started) == 1 and not finished.started
    bases = open_dna(300, np.random.default_rng(3))
    added = write_fasta(tmp_path / "added.fa", {"added": bases})
    run_inline(make_config(contigs, added, resume=True, add=True), tiny.head, further, executor)
    assert len(further.started) == 1


def test_workers_end_before_tables_without_shards(make_config, tiny, contigs, tmp_path):
    executor = ProcessExecutor(["cpu"])
    watch = Watch()
    run_inline(make_config(contigs), tiny.head, executor=executor)
    added = write_fasta(tmp_path / "added.fa", {"added": "N" * 400})
    run_inline(make_config(contigs, added, resume=True, add=True), tiny.head, watch, executor)
    assert len(watch.started) == 1 and watch.pids[STAGES[2]] == set()


def test_workers_without_shards_end_silently(make_config, tiny, tmp_path):
    fasta = write_fasta(tmp_path / "one.faa", ONE)
    executor = ProcessExecutor(["cpu"] * 3, faulty_workers.OneStuckWorker)
    watch = Watch()
    config = make_config(fasta, input_type="protein")
    assert run_inline(config, tiny.head, watch, executor).exit_code == 0
    assert len(watch.started) == 3 and not select_kind(WorkerLost, watch.events)


def test_overlapping_batches_change_nothing(run_by, tmp_path):
    plain, _, _ = run_by(output=tmp_path / "plain", residues_per_shard=8000)
    executor = InlineExecutor(worker=faulty_workers.OverlappingWorker)
    folder, _, events = run_by(executor, residues_per_shard=8000)
    assert_same_run(folder, plain)
    kinds = [type(e) for e in events if isinstance(e, (BatchStarted, BatchDone))]
    assert kinds[:3] == [BatchStarted, BatchStarted, BatchDone]
    begun = [n for n, e in enumerate(events) if isinstance(e, BatchStarted) and e.shard.index == 1]
    done = [n for n, e in enumerate(events) if isinstance(e, BatchDone) and e.shard.index == 0]
    assert begun[0] < done[-1]  # also where one shard ends and the next begins


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pooling", ["mean", "bos", "none"])
def test_gpu_gives_the_vectors_of_a_cpu(make_config, contigs, tmp_path, pooling):
    config = make_config(contigs, output=tmp_path / "gpu", command="extract", pooling=pooling)
    plain = make_config(contigs, output=tmp_path / "cpu", command="extract", pooling=pooling)
    run_inline(config, None, executor=InlineExecutor("cuda:0"))
    run_inline(plain, None)
    found = vectors(config.output)
    expected = vectors(plain.output)
    assert found.keys() == expected.keys()
    limit = tolerance(TINY.n_layers, torch.float32, torch.float32)
    for name, vector in found.items():
        assert worst_row(torch.from_numpy(vector), torch.from_numpy(expected[name])) < limit, name


GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")


@GLIBC
@pytest.mark.parametrize(("device", "is_kept"), [("cpu", True), ("cuda:0", False)])
def test_cpu_worker_keeps_freed_memory(device, is_kept):
    with defer_interrupts():
        child = start_process(faulty_workers.serve_and_describe_the_allocator, device)
    with closing(child):
        ready = child.pipe.recv()
        child.pipe.send(None)
        assert child.wait(10)
    assert ready.description is is_kept


@GLIBC
def test_inline_model_leaves_malloc_alone(make_config, contigs):
    config = make_config(contigs)
    job = WorkerConfig.from_recipe(open_run_dir(config.output), config.recipe, config.weights)
    with defer_interrupts():
        child = start_process(faulty_workers.load_and_tell_of_the_allocator, job, config.resources)
    with closing(child):
        is_kept = child.pipe.recv()
        assert child.wait(10)
    assert is_kept is False


def test_shard_is_written_during_the_next(run_by):
    """Two may be written at a time, so the third may begin, but not the fourth."""
    _, _, events = run_by()
    first_done = next(i for i, e in enumerate(events) if isinstance(e, ShardDone))
    begun = {e.shard.index for e in select_kind(BatchStarted, events[:first_done])}
    assert {0, 1} <= begun <= {0, 1, 2}


@pytest.mark.parametrize("worker", [faulty_workers.KilledWorker, faulty_workers.HuntedWorker])
def test_shards_of_killed_workers_are_done(run_by, undisturbed, worker):
    folder, _, events = run_by(ProcessExecutor(["cpu"] * 2, worker))
    lost = select_kind(WorkerLost, events)
    assert len(lost) >= 3 and all("SIGKILL" in event.reason and event.shard for event in lost)
    if worker is faulty_workers.HuntedWorker:
        assert {event.shard.index for event in lost} == {2}
    assert_same_run(folder, undisturbed)
    assert not leftovers(folder)


@pytest.mark.parametrize("worker", [faulty_workers.KilledWorker, faulty_workers.EarlyKilledWorker])
def test_three_random_kills_lose_no_sequence(run_by, tmp_path, worker):
    """In a shard with one sequence, in its batch, and in a worker before its first batch."""
    fasta = write_fasta(tmp_path / "one.faa", ONE)
    _, exit_code, events = run_by(ProcessExecutor(["cpu"], worker), fasta, input_type="protein")
    lost = [event.reason for event in select_kind(WorkerLost, events)]
    assert exit_code == 0 and len(lost) == 3 and all("SIGKILL" in reason for reason in lost)


def test_many_poisonous_sequences_delay_no_others(run_by, tmp_path):
    """There are more in a row than the losses after which a device is given up."""
    bad = {f"bad{i}": f"{faulty_workers.POISON}{'ACDEFGHIKL'[i]}" for i in range(7)}
    fasta = write_fasta(tmp_path / "crowd.faa", bad | {"good": random_protein(40)})
    executor = ProcessExecutor(["cpu"], faulty_workers.CrashingWorker)
    folder, exit_code, _ = run_by(executor, fasta, input_type="protein")
    assert exit_code == 2
    assert statuses(folder) == dict.fromkeys(bad, "failed") | {"good": "scored"}


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (faulty_workers.RaisingWorker, "RuntimeError: a [red]bad[/red] sequence"),
        (faulty_workers.NanWorker, "the vector is not finite"),
        (faulty_workers.LostContextWorker, "AcceleratorError: an illegal memory access"),
        (faulty_workers.OverlappingCrashingWorker, "the worker died: SIGKILL"),
    ],
)
def test_poisonous_sequence_fails_alone(make_config, tiny, poisoned, tmp_path, worker, reason):
    config = make_config(poisoned, output=tmp_path / "poisoned")
    healthy = make_config(poisoned, output=tmp_path / "healthy")
    run_inline(healthy, tiny.head)
    summary = run_inline(config, tiny.head, executor=ProcessExecutor(["cpu"] * 2, worker))
    assert summary.exit_code == 2

    found = statuses(config.output)
    assert (found["contig1"], found["contig23"]) == ("failed", "scored")
    notes = {row["record"]: row["note"] for row in rows(config.output / "predictions.tsv")}
    assert {name for name, note in notes.items() if "frames failed" in note} == {
        "contig1",
        "contig23",
    }
    expected = vectors(healthy.output)
    delivered = vectors(config.output)
    missing = expected.keys() - delivered.keys()
    assert {name.rsplit("_chunk_", 1)[0] for name in missing} == {"contig1", "contig23"}
    assert len(missing) == 2
    assert_same_vectors(delivered, {name: expected[name] for name in delivered})
    listing = (config.output / "failed_files.txt").read_text()
    assert reason in listing
    assert all(line.count("|") == 2 for line in listing.splitlines())
    failed = (config.output / "failed_sequences.fa").read_text()
    assert [line for line in failed.splitlines() if line[0] == ">"] == [
        ">contig1 of a test",
        ">contig23 of a test",
    ]
    assert not leftovers(config.output)


def test_custom_executor_gives_the_same_run(run_by, undisturbed, poisoned, tmp_path):
    """Without losses, and with lost workers."""
    folder, _, _ = run_by(BackwardExecutor(), output=tmp_path / "toy")
    assert_same_run(folder, undisturbed)

    folder, exit_code, events = run_by(BackwardExecutor(faulty_workers.LostContextWorker), poisoned)
    lost = select_kind(WorkerLost, events)
    assert exit_code == 2 and len(lost) == 4 and not any(event.is_final for event in lost)
    assert not select_kind(ShardFailed, events)
    expected = vectors(run_by(None, poisoned, output=tmp_path / "2")[0])
    delivered = vectors(folder)
    missing = expected.keys() - delivered.keys()
    assert sorted(name.partition("_chunk_")[0] for name in missing) == ["contig1", "contig23"]
    assert_same_vectors(delivered, {name: expected[name] for name in delivered})


@pytest.mark.parametrize(
    ("worker", "guilty"), [(faulty_workers.StumblingWorker, 1), (faulty_workers.FatalWriter, 0)]
)
def test_shard_that_kills_outside_batches_is_lost(run_by, contigs, undisturbed, worker, guilty):
    folder, exit_code, events = run_by(ProcessExecutor(["cpu"] * 2, worker))
    assert exit_code == 2
    assert {e.shard.index for e in select_kind(ShardFailed, events)} == {guilty}
    expected = vectors(undisturbed)
    found = vectors(folder)
    assert_same_vectors(found, {name: expected[name] for name in found})
    listed = (folder / "failed_files.txt").read_text().splitlines()
    assert [line.split("|")[:2] for line in listed] == [[str(contigs), "embed"]]
    assert run_by(resume=True)[1] == 0
    assert_same_run(folder, undisturbed)


def test_repaired_sequences_complete_the_run(make_config, tiny, poisoned, tmp_path):
    output = tmp_path / "repaired"
    executor = InlineExecutor(worker=faulty_workers.RaisingWorker)
    assert run_inline(make_config(poisoned, output=output), tiny.head, executor=executor).exit_code
    failed = output / "failed_sequences.fa"
    failed.write_text(failed.read_text().replace(CODONS_OF_POISON, "GCA" * 9))
    summary = run_inline(
        make_config(failed, output=output, resume=True, add=True), tiny.head, executor=executor
    )
    assert summary.exit_code == 0
    assert not failed.exists() and not (output / "failed_files.txt").exists()

    mended = tmp_path / "mended" / poisoned.name
    mended.parent.mkdir()
    mended.write_text(poisoned.read_text().replace(CODONS_OF_POISON, "GCA" * 9))
    run_inline(make_config(mended, output=tmp_path / "whole"), tiny.head)
    assert lines_of(output) == lines_of(tmp_path / "whole")
    last = rows(output / "predictions.tsv")[-1]
    assert last["file"] == "failed_sequences", "a mended record comes with the file that mends it"
    # a vector may have been made in a batch of another shape, and on a CPU that changes nothing
    assert_same_vectors(vectors(output), vectors(tmp_path / "whole"))

    again = run_inline(make_config(poisoned, output=output, resume=True, add=True), tiny.head)
    assert again.exit_code == 0 and again.n_tokens == 0
    assert lines_of(output) == lines_of(tmp_path / "whole")


def lines_of(folder: Path) -> list[str]:
    """Return the lines of all tables, in any order and without the file of a record."""
    by_file = ("predictions.tsv", "viruses.tsv", "samples.tsv")
    texts = {name: text for name, text in tables(folder).items() if name not in by_file}
    calls = [str({**row, "file": ""}) for name in by_file[:2] for row in rows(folder / name)]
    return sorted(
        [*calls, *(line for text in texts.values() for line in text.decode().split("\n"))]
    )


def test_resume_retries_failed_sequences(run_by, poisoned, tmp_path):
    folder, _, _ = run_by(InlineExecutor(worker=faulty_workers.RaisingWorker), poisoned)
    twice = tmp_path / "twice.fa"
    twice.write_text(2 * f">contig1\n{'GCA' * 100}\n")
    with pytest.raises(InputError, match="contig1 occurs twice"):
        run_by(None, twice, resume=True, add=True)
    assert run_by(None, poisoned, resume=True, add=True)[1] == 0
    assert_same_run(folder, run_by(None, poisoned, output=tmp_path / "whole")[0])


def peer_with(*shards: Shard) -> WorkerHandle:
    """Return the parent's view of a ready worker with these shards. There is no process."""
    resources = Resources(devices=("cpu",), tokens_per_batch=2048, silence_seconds=1.0)
    child = SimpleNamespace(pipe=SimpleNamespace(send=lambda _: None), is_alive=False)
    work = WorkerState("cpu", is_ready=True)
    peer = WorkerHandle(work, "cpu", SimpleNamespace(), resources, child, deadline=0.0)
    for shard in shards:
        peer.assign(Attempt(shard))
    return peer


SHARDS = [Shard(i, Path(f"{i:06d}.faa"), 10, 10, 1000, "") for i in range(3)]


def test_silent_worker_is_replaced(run_by, tmp_path):
    proteins = {"good": random_protein(90), "hangs": f"{faulty_workers.POISON}A"}
    fasta = write_fasta(tmp_path / "few.faa", proteins)
    executor = ProcessExecutor(["cpu"], faulty_workers.HangingWorker)
    folder, _, events = run_by(executor, fasta, input_type="protein", silence_seconds=0.4)
    reasons = {event.reason for event in select_kind(WorkerLost, events)}
    assert reasons == {"the worker fell silent and was stopped"}
    assert statuses(folder) == {"good": "scored", "hangs": "failed"}


@pytest.mark.parametrize(
    "worker", [faulty_workers.SmallWorker, faulty_workers.OverlappingSmallWorker]
)
def test_batch_too_large_is_halved(run_by, undisturbed, worker):
    folder, _, events = run_by(InlineExecutor(worker=worker))
    assert_same_run(folder, undisturbed)
    reduced = [event.tokens_per_batch for event in select_kind(BatchSizeReduced, events)]
    assert reduced == sorted(reduced, reverse=True)
    last = max(i for i, event in enumerate(events) if isinstance(event, BatchSizeReduced))
    sizes = [event.n_tokens for event in select_kind(BatchDone, events[last:])]
    in_flight_then = 500 if worker is faulty_workers.OverlappingSmallWorker else 0
    assert len(reduced) < 5 and max(sizes) <= max(reduced[-1], in_flight_then)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_library_without_memory_is_out_of_memory(message):
    def work() -> None:
        raise RuntimeError(message)

    outcome = run_catching(work)
    assert isinstance(outcome, BatchError) and outcome.is_too_large


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ],
)
def test_library_failure_ends_the_worker(message):
    def work() -> None:
        raise RuntimeError(message)

    with pytest.raises(torch.AcceleratorError, match="EXECUTION_FAILED"):
        run_catching(work)


def test_sequence_too_large_for_device_fails_alone(run_by, tmp_path):
    proteins = {"small": "MKVLEFPQIL", "large": "MKVLEFPQIL" * 60}
    fasta = write_fasta(tmp_path / "proteins.faa", proteins)
    executor = InlineExecutor(worker=faulty_workers.SmallWorker)
    folder, exit_code, _ = run_by(executor, fasta, input_type="protein")
    assert exit_code == 2 and statuses(folder) == {"small": "scored", "large": "failed"}
    assert "out of memory" in (folder / "failed_files.txt").read_text()


def test_large_batch_is_embedded_alone(run_by, tmp_path):
    lengths = [480, *np.random.default_rng(5).integers(20, 100, 60)]
    proteins = {f"p{i}": random_protein(n, i) for i, n in enumerate(lengths)}
    fasta = write_fasta(tmp_path / "proteins.faa", proteins)
    plain, _, _ = run_by(None, fasta, output=tmp_path / "plain", input_type="protein")
    executor = InlineExecutor(worker=faulty_workers.CrowdedWorker)
    folder, exit_code, _ = run_by(executor, fasta, input_type="protein")
    assert exit_code == 0
    assert_same_run(folder, plain)


def test_out_of_memory_in_any_batch_loses_nothing(run_by, tmp_path):
    proteins = {f"p{i}": random_protein(100, i) for i in range(72)}
    fasta = write_fasta(tmp_path / "some.faa", proteins)

    def run_and_count(name, worker):
        changes = {"input_type": "protein", "tokens_per_batch": 1024, "output": tmp_path / name}
        folder, exit_code, events = run_by(InlineExecutor(worker=worker), fasta, **changes)
        assert exit_code == 0, name
        assert_same_run(folder, tmp_path / "plain")
        return len(select_kind(BatchStarted, events))

    n_batches = run_and_count("plain", Worker)
    assert n_batches > 6
    for n in range(1, n_batches + 1):
        scarce = type("ScarceWorker", (faulty_workers.ScarceWorker,), {"n": n})
        assert run_and_count(f"scarce{n}", scarce) > n_batches


def test_worker_that_never_starts_is_given_up(make_config, tiny, contigs):
    lost: list[RunEvent] = []
    executor = ProcessExecutor(["cpu"], faulty_workers.StuckWorker, start_seconds=0.5)
    with pytest.raises(UnavailableError, match="fell silent"):
        run_inline(make_config(contigs), tiny.head, lost.append, executor)
    lost = [event for event in lost if isinstance(event, WorkerLost)]
    assert [event.is_final for event in lost] == [False, True]


def test_startup_warnings_are_merged(make_config, tiny, contigs, tmp_path):
    config = make_config(contigs, output=tmp_path / "warned")
    log = EventLog()
    events: list[RunEvent] = []

    def hear(event):
        events.append(event)
        log(event)

    run_inline(config, tiny.head, hear, ProcessExecutor(["cpu"] * 2, faulty_workers.WarningWorker))
    ready = [event for event in events if isinstance(event, WorkerReady)]
    said = "rotation: PyTorch (a [red]test[/red])"
    assert ready and all(event.warnings == (said,) for event in ready)
    lines = (config.output / "virnucpro.log").read_text().splitlines()
    (warning,) = (line for line in lines if " WARNING " in line)
    assert warning.endswith(f"{ready[0].worker}: {said}")


def test_device_that_cannot_start_is_left_out(run_by, undisturbed):
    executor = ProcessExecutor(["cpu"] * 2, faulty_workers.OneDeviceWorker)
    folder, exit_code, events = run_by(executor)
    assert exit_code == 0
    lost = select_kind(WorkerLost, events)
    assert [(event.worker, event.is_final) for event in lost] == [("cpu#1", True)]
    assert_same_run(folder, undisturbed)


def test_slow_start_keeps_no_work(run_by, undisturbed):
    executor = ProcessExecutor(["cpu"] * 2, faulty_workers.OneStuckWorker, 60.0)
    folder, exit_code, events = run_by(executor)
    assert exit_code == 0 and not select_kind(WorkerLost, events)
    assert_same_run(folder, undisturbed)


def test_run_says_why_no_device_can_start(run_by, tmp_path):
    with pytest.raises(UnavailableError, match="CUDA driver version is insufficient"):
        run_by(ProcessExecutor(["cpu"] * 2, faulty_workers.NeverStartingWorker))
    assert not (tmp_path / "run" / "predictions.tsv").exists()


def test_interrupt_while_workers_end(make_config, tiny, tmp_path):
    """A stopped worker does not end by itself. The run waits for it when Ctrl-C comes."""
    fasta = write_fasta(tmp_path / "one.faa", ONE)
    stopped = []

    def stop_the_worker_of_the_only_shard(event):
        if isinstance(event, ShardDone):
            stopped.extend(our_processes())
            os.kill(stopped[0].pid, signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 1.0)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    config = make_config(fasta, input_type="protein")
    try:
        with pytest.raises(KeyboardInterrupt):
            executor = ProcessExecutor(["cpu"])
            run_inline(config, tiny.head, stop_the_worker_of_the_only_shard, executor)
        assert stopped and not our_processes()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        for worker in stopped:
            with suppress(psutil.NoSuchProcess):
                worker.kill()


def test_worker_that_does_not_read_delays_nobody():
    peer = peer_with()
    began = time.monotonic()
    peer.child.pipe, theirs = Pipe()
    attempt = Attempt(SHARDS[0], suspects=frozenset(range(1_000_000)))
    with ThreadPoolExecutor() as pool, theirs:  # the end of this pipe ends its sender
        pool.submit(peer.assign, attempt).result(timeout=10)
        assert theirs.recv() == attempt
    assert peer.deadline > began + 1.0  # silence counts from when it got a shard
    peer.sender.shutdown()


def test_signal_waits_for_starting_processes():
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # which no mask of this one concerns
    other.start()
    n_steps = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(20):
                time.sleep(0.005)
                n_steps += 1
    finally:
        over.set()
        other.join()
        handler = signal.signal(signal.SIGINT, before)
    assert n_steps == 20
    assert handler is signal.default_int_handler


def test_ctrl_c_while_workers_start_leaves_none(make_config, tiny, contigs, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = []

    def start_and_be_interrupted(*arguments):
        started.append(start_process(*arguments))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(local, "start_process", start_and_be_interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_inline(make_config(contigs), tiny.head, executor=ProcessExecutor(["cpu"] * 2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert started and not any(child.is_alive for child in started)


def test_pause_of_all_processes_is_no_silence(monkeypatch):
    """Ctrl-Z and, later, `fg`. A worker that stays silent afterwards is lost."""
    peer = peer_with(SHARDS[0])
    peer.deadline = (began := time.monotonic()) + 8.0
    clock = [began]
    pauses = iter([100.0] + [1.0] * 20)

    def hear_nothing_and_be_paused(children, seconds):
        clock[0] += next(pauses)
        return []

    monkeypatch.setattr(local.ChildProcess, "wait_any", hear_nothing_and_be_paused)
    monkeypatch.setattr(local.time, "monotonic", lambda: clock[0])
    executor = ProcessExecutor([])
    executor.workers.append(peer)
    assert executor.wait_for_workers() == [peer]
    assert 108 < clock[0] - began < 111


def test_unkillable_process_is_reported(caplog):
    """For example a process in a call to a device or a disk that does not answer."""
    peer = peer_with()
    waited = []
    peer.child = SimpleNamespace(kill=lambda: None, wait=waited.append, pid=123)
    with caplog.at_level("WARNING", logger="virnucpro"):
        peer.kill()
    assert waited == [local.GRACE_SECONDS]
    assert "cpu (process 123) does not end" in caplog.text


def test_error_in_the_parent_leaves_no_process(make_config, tiny, contigs):
    def interrupt(event):
        if isinstance(event, BatchStarted):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:  # a traceback keeps generators alive
        run_inline(make_config(contigs), tiny.head, interrupt, ProcessExecutor(["cpu"] * 2))
    assert held and not our_processes()
