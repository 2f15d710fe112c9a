"""A run that is killed while it plans and embeds at the same time loses nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from run_helpers import (
    again,
    assert_same_run,
    leftovers,
    our_processes,
    run_inline,
    wait_until,
)

from virnucpro.core.events import RunEvent, ShardDone, ShardsPlanned
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.run_dir import RunDir

FORK = multiprocessing.get_context("fork")
SLICE = 4000  # bytes; the contigs fill a dozen


class Kill:
    """Kills this process when a slice is planned, or as soon as a shard is done, too."""

    def __init__(self, kind: type, n_slices: int) -> None:
        self.kind = kind
        self.n_slices = n_slices
        self.n_planned = 0
        self.n_done = 0

    def __call__(self, event: RunEvent) -> None:
        self.n_planned += isinstance(event, ShardsPlanned)
        self.n_done += isinstance(event, ShardDone)
        if isinstance(event, ShardsPlanned) and self.n_planned == self.n_slices:
            if self.kind is ShardDone:
                wait_until(lambda: self.n_done)
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(config, head, kill: Kill) -> None:
    process = FORK.Process(target=run_inline, args=(config, head, kill, ProcessExecutor(["cpu"])))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def undisturbed_slices(make_config, tiny, contigs, tmp_path) -> Path:
    config = make_config(contigs, bytes_per_slice=SLICE, output=tmp_path / "undisturbed")
    run_inline(config, tiny.head, executor=InlineExecutor())
    return config.output


@pytest.mark.parametrize("kind", [ShardsPlanned, ShardDone])
def test_kill_between_slices_loses_no_slice(make_config, tiny, contigs, undisturbed_slices, kind):
    config = make_config(contigs, bytes_per_slice=SLICE)
    plans: dict[str, int] = {}
    for n_slices in (3, 4, 4):  # of each start
        run_until_killed(config, tiny.head, Kill(kind, n_slices))
        shards = open_run_dir(config.output).shards
        now = {path.name: path.stat().st_mtime_ns for path in shards.glob(f"*{RunDir.plan_suffix}")}
        assert plans.items() < now.items(), "complete slices are not planned again"
        plans = now
        config = again(config, resume=True)
    run_inline(config, tiny.head, executor=ProcessExecutor(["cpu"]))
    assert_same_run(config.output, undisturbed_slices)
    assert not leftovers(config.output)
    assert not our_processes()


def test_kill_of_a_worker_while_planning_loses_nothing(
    make_config, tiny, contigs, undisturbed_slices
):
    config = make_config(contigs, bytes_per_slice=SLICE)

    def kill_workers(event: RunEvent) -> None:
        if isinstance(event, ShardsPlanned) and 0 < event.planned_share < 0.5:
            for worker in our_processes():
                os.kill(worker.pid, signal.SIGKILL)

    run_inline(config, tiny.head, kill_workers, ProcessExecutor(["cpu", "cpu"]))
    assert_same_run(config.output, undisturbed_slices)


def test_kill_while_a_rejected_input_is_cleared(make_config, tiny, contigs, undisturbed_slices):
    """The folder has a run to resume, which is rejected with advice."""
    good = contigs.read_text()
    contigs.write_text(f"{good}>contig1 again\nATGATGATG\n")
    config = make_config(contigs, bytes_per_slice=SLICE)
    run_until_killed(config, tiny.head, Kill(ShardDone, 3))
    with pytest.raises(Exception, match="occurs twice") as caught:
        run_inline(again(config, resume=True), tiny.head, executor=ProcessExecutor(["cpu"]))
    assert "--force" in caught.value.hint
    contigs.write_text(good)
    run_inline(again(config, force=True), tiny.head, executor=ProcessExecutor(["cpu"]))
    assert_same_run(config.output, undisturbed_slices)
