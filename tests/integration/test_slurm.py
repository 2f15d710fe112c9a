"""The scripts in ``examples/slurm`` on a SLURM cluster of one node."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fair_esm_reference import random_protein
from one_node_slurm import NEEDS_SLURM, Slurm, one_node_slurm
from run_helpers import assert_same_run, leftovers, predict_here, wait_until

from virnucpro.core.events import ShardDone
from virnucpro.engine.event_log import read_events

pytestmark = [pytest.mark.slurm, NEEDS_SLURM]
SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with pytest.MonkeyPatch.context() as patch, one_node_slurm() as slurm:
        ours = str(Path(sys.executable).parent)  # where `virnucpro` is
        patch.setitem(slurm.environment, "PATH", f"{ours}:{slurm.environment['PATH']}")
        yield slurm


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some sixty shards of proteins."""
    path = tmp_path_factory.mktemp("input") / "proteins.faa"
    proteins = [random_protein(500, i) for i in range(2900)]
    path.write_text("".join(f">p{i}\n{protein}\n" for i, protein in enumerate(proteins)))
    return path


@pytest.fixture(scope="module")
def one_machine(proteins, tiny, tmp_path_factory) -> Path:
    """The same run without SLURM."""
    return predict_here([proteins], tiny, tmp_path_factory.mktemp("one_machine") / "run")


def done_shards(log: Path) -> set[int]:
    """Return the shards that a process has done."""
    events = (logged.event for logged in read_events(log)[0])
    return {event.shard.index for event in events if isinstance(event, ShardDone)}


def log_of(folder: Path, part: str) -> Path | None:
    """Return the log of the process that works on a part, after its first shard."""
    for path in sorted((folder / "logs").glob("work-*.log")):
        if f"part {part}: " in path.read_text() and done_shards(path):
            return path
    return None


def test_killed_and_requeued_array_equals_one_machine(slurm, proteins, tiny, one_machine):
    folder = slurm.root / "run"
    run = (proteins, folder, "--model", tiny.model, "--head", tiny.head_file, "--precision", "fp32")
    on_cpu = ("--device", "cpu", "--workers", "1")
    plan = slurm.submit(SCRIPTS / "predict_plan.sh", *run)
    array = slurm.submit(
        "--array=1-4", f"--dependency=afterok:{plan}", SCRIPTS / "predict_array.sh", folder, *on_cpu
    )
    merge = slurm.submit(
        f"--dependency=afterany:{array}", SCRIPTS / "predict_merge.sh", *run, *on_cpu
    )
    slurm.wait(plan)

    harm = {
        1: lambda _: slurm.call("scancel", "--batch", "--signal=TERM", f"{array}_1"),
        2: lambda log: os.kill(int(re.findall(r"\d+", log.name)[-1]), signal.SIGKILL),
        3: lambda _: slurm.call("scancel", f"{array}_3"),
    }
    while harm:
        wait_until(lambda: any(log_of(folder, f"{task} of 4") for task in harm))
        for task in list(harm):
            if log := log_of(folder, f"{task} of 4"):
                harm.pop(task)(log)

    states = slurm.wait(plan, array, merge)
    assert states == {
        plan: "COMPLETED",
        f"{array}_1": "COMPLETED",
        f"{array}_2": "FAILED",
        f"{array}_3": "CANCELLED",
        f"{array}_4": "COMPLETED",
        merge: "COMPLETED",
    }, slurm.logs()
    assert "Restarts=1" in slurm.call("scontrol", "show", "job", f"{array}_1")
    logs = [path.read_text() for path in (folder / "logs").glob("work-*.log")]
    assert sum("part 1 of 4: " in text for text in logs) == 2
    n_before_merge = len(set().union(*map(done_shards, (folder / "logs").glob("work-*.log"))))
    n_shards = len(list((folder / "features").glob("*[0-9].h5")))
    assert n_shards // 2 <= n_before_merge < n_shards  # two of four parts ended
    assert not leftovers(folder)
    assert_same_run(folder, one_machine)
