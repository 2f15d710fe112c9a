"""A large input is embedded while it is planned."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from threading import Event

import pytest
from run_helpers import (
    again,
    assert_same_run,
    leftovers,
    our_processes,
    run_inline,
    tables,
    wait_until,
)

from virnucpro.core.errors import InputError, VirnucproError
from virnucpro.core.events import (
    EmbeddingStarted,
    RunEvent,
    ShardDone,
    ShardsPlanned,
    WorkerLost,
    WorkerReady,
)
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.results.outputs import open_run_dir
from virnucpro.workflows.status import inspect_run, measure_run

pytestmark = pytest.mark.usefixtures("quick_starts")
SLICE = 4000  # bytes; the contigs fill a dozen


@pytest.fixture
def config(make_config, contigs):
    return make_config(contigs, bytes_per_slice=SLICE)


@pytest.fixture
def planned_first(make_config, tiny, contigs, tmp_path) -> Path:
    """The run of an executor that needs the complete plan."""
    config = make_config(contigs, bytes_per_slice=SLICE, output=tmp_path / "planned_first")
    run_inline(config, tiny.head, executor=InlineExecutor())
    return config.output


class Listener:
    """Keeps the events of a run. The planning thread waits in it before the third slice."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.is_done = Event()
        self.n_planned = 0

    def __call__(self, event: RunEvent) -> None:
        self.events.append(event)
        if isinstance(event, ShardDone):
            self.is_done.set()
        if isinstance(event, ShardsPlanned):
            self.n_planned += 1
            if self.n_planned == 4:  # the first one has the shards of earlier starts
                assert self.is_done.wait(60), "no device works before the plan is complete"
                self.on_third_slice()

    def on_third_slice(self) -> None:
        """Look at the run, of which two slices are planned."""

    def select(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def test_device_works_before_the_plan_is_complete(config, tiny, planned_first):
    class Look(Listener):
        def on_third_slice(self) -> None:
            lines = inspect_run(config.output, verify=False)[0]
            text = "\n".join(lines)
            assert "in the planned slices" in text
            assert "files  " not in text
            assert "slices    " in text
            state = measure_run(config.output)
            assert 2 <= state["slices"]["planned"] < state["slices"]["total"]

    listener = Look()
    executor = ProcessExecutor(["cpu", "cpu"])
    assert run_inline(config, tiny.head, listener, executor).exit_code == 0
    (started,) = listener.select(EmbeddingStarted)
    assert started.planned_share == 0.0
    planned = listener.select(ShardsPlanned)
    shares = [event.planned_share for event in planned]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert planned[-1].files
    shards = [shard.index for event in planned for shard in event.pending]
    assert sorted(shards) == sorted(event.shard.index for event in listener.select(ShardDone))
    assert_same_run(config.output, planned_first)
    counts = [
        json.loads((folder / "run.json").read_text())["counts"]
        for folder in (config.output, planned_first)
    ]
    for name in ("n_files", "n_letters", "n_copies", "n_tokens", "n_tokens_in_all", "statuses"):
        assert counts[0][name] == counts[1][name]
    assert not leftovers(config.output)
    assert not our_processes()


def test_extraction_is_streamed(make_config, contigs, tmp_path):
    folders = []
    for name, executor in (("one", InlineExecutor()), ("two", ProcessExecutor(["cpu"]))):
        listener = Listener()
        folders.append(tmp_path / name)
        changes = {"command": "extract", "bytes_per_slice": SLICE, "keep_intermediate": True}
        config = make_config(contigs, output=folders[-1], n_helpers=1, **changes)
        run_inline(config, None, listener, executor)
        assert bool(listener.select(ShardsPlanned)) == (name == "two")
    one, two = (folder / "records.tsv" for folder in folders)
    assert one.read_bytes() == two.read_bytes()
    for name in ("chunks.fa", "features.h5"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_small_input_is_planned_first(make_config, contigs, tiny, undisturbed):
    listener = Listener()
    config = make_config(contigs)
    run_inline(config, tiny.head, listener, ProcessExecutor(["cpu"]))
    assert not listener.select(ShardsPlanned)
    assert_same_run(config.output, undisturbed)


def test_idle_worker_that_dies_is_replaced(config, tiny, planned_first):
    class Kill(Listener):
        def on_third_slice(self) -> None:
            n_shards = sum(len(event.pending) for event in self.select(ShardsPlanned)[:3])
            wait_until(lambda: len(self.select(ShardDone)) == n_shards)
            for worker in our_processes():
                os.kill(worker.pid, signal.SIGKILL)
            wait_until(lambda: self.select(WorkerLost))

    listener = Kill()
    run_inline(config, tiny.head, listener, ProcessExecutor(["cpu"]))
    assert len(listener.select(WorkerReady)) == 2
    assert_same_run(config.output, planned_first)


REPEATED = ">contig1 again\nATGATGATG\n"
NAMELESS = ">\nATGATG\n"  # a record without an id


@pytest.mark.parametrize("fault", [REPEATED, NAMELESS], ids=["repeated id", "no id"])
def test_input_rejected_late_leaves_a_free_folder(
    config, make_config, tiny, contigs, planned_first, tmp_path, fault
):
    good = contigs.read_text()
    contigs.write_text(good + fault)
    config = again(config, input_type="nucleotide")  # not guessed from the complete file
    listener = Listener()
    with pytest.raises(InputError) as streamed:
        run_inline(config, tiny.head, listener, ProcessExecutor(["cpu"]))
    assert listener.select(ShardDone)
    first = make_config(contigs, bytes_per_slice=SLICE, output=tmp_path / "first")
    with pytest.raises(InputError) as expected:
        run_inline(again(first, input_type="nucleotide"), tiny.head, executor=InlineExecutor())
    assert str(streamed.value) == str(expected.value)
    assert streamed.value.hint == expected.value.hint
    left = {path.name for path in config.output.iterdir()}
    assert left == {path.name for path in first.output.iterdir()}
    assert not our_processes()
    contigs.write_text(good)
    run_inline(config, tiny.head, executor=ProcessExecutor(["cpu"]))
    assert_same_run(config.output, planned_first)


def test_forced_run_is_planned_before_old_results_go(config, tiny, contigs, planned_first):
    run_inline(config, tiny.head, executor=InlineExecutor())
    before = tables(config.output)
    contigs.write_text(contigs.read_text() + REPEATED)
    listener = Listener()
    with pytest.raises(InputError, match="occurs twice"):
        run_inline(again(config, force=True), tiny.head, listener, ProcessExecutor(["cpu"]))
    assert not listener.select(EmbeddingStarted)
    assert tables(config.output) == before
    assert_same_run(config.output, planned_first)


def test_planned_run_is_streamed_at_its_join(config, tiny, planned_first):
    run_inline(again(config, plan_only=True), tiny.head)
    listener = Listener()
    run_inline(again(config, resume=True), tiny.head, listener, ProcessExecutor(["cpu"]))
    assert listener.select(ShardsPlanned)
    assert_same_run(config.output, planned_first)


def test_error_while_planning_leaves_a_run_to_resume(config, tiny, planned_first):
    class Fail(Listener):
        def on_third_slice(self) -> None:
            raise VirnucproError("a test")

    with pytest.raises(VirnucproError, match="a test"):
        run_inline(config, tiny.head, Fail(), ProcessExecutor(["cpu"]))
    assert open_run_dir(config.output).plan.exists()
    assert not our_processes()
    run_inline(again(config, resume=True), tiny.head, executor=ProcessExecutor(["cpu"]))
    assert_same_run(config.output, planned_first)
