"""A faulty GPU harms no protein: another device does its work, and the run names the GPU.

The GPUs are simulated: their workers compute on the CPU. ``--rounds 20`` runs 20 rounds.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import faulty_workers
import numpy as np
import pytest
from fair_esm_reference import random_protein
from run_helpers import (
    assert_same_vectors,
    invoke,
    leftovers,
    run_inline,
    statuses,
    vectors,
    write_fasta,
)

from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import WorkerLost
from virnucpro.engine.local import ProcessExecutor

pytestmark = pytest.mark.usefixtures("quick_starts")
N_PROTEINS = 800
ABOUT = {
    "input_type": "protein",
    "residues_per_shard": 2_000,
    "tokens_per_batch": 256,
}
GPUS = ["cuda:0", "cuda:1"]


@pytest.fixture(scope="module")
def proteins(tmp_path_factory) -> Path:
    lengths = np.random.default_rng(4).integers(10, 60, N_PROTEINS)
    records = {f"p{i}": random_protein(int(n), i) for i, n in enumerate(lengths)}
    return write_fasta(tmp_path_factory.mktemp("sick") / "proteins.faa", records)


@pytest.fixture(scope="module")
def healthy(configure, tiny, proteins) -> Path:
    config = configure(proteins, output=proteins.parent / "healthy", **ABOUT)
    run_inline(config, tiny.head)
    return config.output


@pytest.fixture
def run_on(make_config, tiny, proteins):
    """Run the proteins on simulated GPUs. -> folder, summary, events"""

    def start(worker, gpus=GPUS, fasta=proteins, **changes):
        config = make_config(fasta, **ABOUT | changes)
        events = []
        executor = ProcessExecutor(gpus, worker)
        summary = run_inline(config, tiny.head, events.append, executor)
        return config.output, summary, events

    return start


# worker, share of its batches with a fault, batches that the other GPU waits for, end of the GPU
@pytest.mark.parametrize(
    ("gpu", "share", "n_awaited", "end"),
    [
        (faulty_workers.EccGpu, 0.04, 1, None),
        (faulty_workers.EccGpu, 1.0, 2, "after 2 device errors: uncorrectable ECC error"),
        (faulty_workers.IllegalAccessGpu, 0.04, 1, None),
        (faulty_workers.IllegalAccessGpu, 1.0, 2, "after 2 device errors: illegal memory access"),
        (faulty_workers.CrashingGpu, 0.04, 1, None),
        (faulty_workers.CrashingGpu, 1.0, 4, None),
        (faulty_workers.SlowGpu, 0.5, 1, None),
        (faulty_workers.NanGpu, 0.04, 1, None),
        (faulty_workers.NanGpu, 1.0, 300, "after 2 device errors: the vector is not finite"),
        (faulty_workers.RaisingGpu, 0.3, 1, None),
    ],
)
def test_sick_gpu_harms_no_protein(run_on, healthy, gpu, share, n_awaited, end, chaos_seed):
    """``end`` None: the GPU may recover, or be taken out of the run."""
    worker = partial(gpu, seed=chaos_seed, share=share, n_awaited=n_awaited)
    folder, summary, events = run_on(worker)
    assert summary.exit_code == 0
    assert_unharmed(folder, healthy)
    lost = [event for event in events if isinstance(event, WorkerLost) and event.is_final]
    assert summary.lost_devices == [event.lost_device for event in lost]
    assert {event.worker for event in lost} <= {"cuda:1"}
    if end is not None:
        (line,) = summary.lost_devices
        assert line.startswith("cuda:1 was taken out of the run") and end in line


def assert_unharmed(folder: Path, healthy: Path) -> None:
    assert statuses(folder) == statuses(healthy)
    assert set(statuses(folder).values()) == {"scored"}
    assert_same_vectors(vectors(folder), vectors(healthy))
    assert not leftovers(folder)
    assert not (folder / "failed_sequences.fa").exists()


def test_hanging_gpu_harms_no_protein(run_on, healthy, chaos_seed):
    worker = partial(faulty_workers.HangingGpu, seed=chaos_seed, share=0.04, n_awaited=0)
    folder, summary, _ = run_on(worker, silence_seconds=4.0)
    assert summary.exit_code == 0
    assert_unharmed(folder, healthy)


POISON = {"bad": f"{faulty_workers.POISON}MKVLEFPQIL"}


@pytest.fixture
def poisoned(tmp_path) -> Path:
    good = {f"p{i}": random_protein(30, i) for i in range(60)}
    return write_fasta(tmp_path / "poisoned.faa", good | POISON | {"last": random_protein(40)})


def test_sequence_that_faults_two_gpus_fails_alone(run_on, poisoned):
    folder, summary, events = run_on(faulty_workers.PoisonedGpu, fasta=poisoned)
    assert summary.exit_code == 2
    assert {name for name, what in statuses(folder).items() if what == "failed"} == {"bad"}
    assert not summary.lost_devices, "the sequence is at fault, not the GPUs"
    faults = [event for event in events if isinstance(event, WorkerLost)]
    assert {event.worker for event in faults} == set(GPUS)


def test_sequence_that_faults_only_gpu_is_named(run_on, poisoned, tmp_path):
    with pytest.raises(UnavailableError) as ended:
        run_on(faulty_workers.PoisonedGpu, ["cuda:0"], poisoned)
    assert "cuda:0 was taken out of the run after 2 device errors" in str(ended.value)
    assert "the sequence bad was alone on the device" in str(ended.value)
    assert not list((tmp_path / "run").rglob("failed_sequences.fa"))


def test_model_that_fails_on_all_gpus_ends_run(run_on):
    with pytest.raises(UnavailableError, match="the first 100 sequences all failed"):
        run_on(faulty_workers.NanEverywhereGpu)


def test_last_gpu_with_faults_ends_run(run_on, tiny, make_config, proteins, healthy, tmp_path):
    """The error and `status` name it. A resume on another device completes the run."""
    worker = partial(faulty_workers.EccGpu, seed=1, share=0.1, n_awaited=0)
    with pytest.raises(UnavailableError) as ended:
        run_on(worker, ["cuda:1"])
    line = "cuda:1 was taken out of the run after 2 device errors: uncorrectable ECC error"
    assert line in str(ended.value) and "at fault" not in str(ended.value)
    for remedy in ("nvidia-smi -q -d ECC", "--gpus", "--device cpu", "--resume"):
        assert remedy in ended.value.hint
    folder = tmp_path / "run"
    assert line in invoke("status", folder)[1]
    assert json.loads(invoke("status", folder, "--json")[1])["lost_devices"] == [line]
    config = make_config(proteins, resume=True, **ABOUT)
    assert run_inline(config, tiny.head).exit_code == 0
    assert_same_vectors(vectors(folder), vectors(healthy))


def test_lost_gpu_is_named_at_the_end(run_on):
    worker = partial(faulty_workers.EccGpu, seed=1, share=1.0, n_awaited=2)
    folder, summary, _ = run_on(worker)
    line = "cuda:1 was taken out of the run after 2 device errors: uncorrectable ECC error"
    assert line in summary.lines(folder)
    assert json.loads((folder / "run.json").read_text())["counts"]["lost_devices"] == [line]
    code, text = invoke("status", folder)
    assert code == 0 and f"device    {line}" in text
