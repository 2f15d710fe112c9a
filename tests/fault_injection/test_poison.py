"""Sequences that no device can embed fail alone, at a bounded cost."""

from __future__ import annotations

from pathlib import Path

import faulty_workers
import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from fair_esm_reference import random_protein
from run_helpers import assert_same_vectors, leftovers, run_inline, statuses, vectors

from virnucpro.core.events import BatchStarted, WorkerLost
from virnucpro.engine.local import ProcessExecutor

pytestmark = pytest.mark.usefixtures("quick_starts")
N_PROTEINS = 1_000
POISONED = {f"p{i}" for i in range(150, N_PROTEINS, 350)}  # three, in different shards


@pytest.fixture(scope="module")
def proteins(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("poison") / "proteins.faa"
    lengths = np.random.default_rng(3).integers(10, 60, N_PROTEINS)
    with path.open("w") as out:
        for i, length in enumerate(lengths):
            poison = faulty_workers.POISON if f"p{i}" in POISONED else ""
            out.write(f">p{i} of a test\n{poison}{random_protein(length, i)}\n")
    return path


ABOUT = {"input_type": "protein", "residues_per_shard": 7_000}


@pytest.fixture(scope="module")
def healthy(configure, tiny, proteins) -> Path:
    config = configure(proteins, output=proteins.parent / "healthy", **ABOUT)
    run_inline(config, tiny.head)
    return config.output


@pytest.mark.parametrize(
    ("worker", "n_losses", "reason"),
    [
        (faulty_workers.RaisingWorker, 0, "RuntimeError: a [red]bad[/red] sequence"),
        (faulty_workers.CrashingWorker, 2, "the worker died: SIGSEGV"),
    ],
)
def test_poisonous_sequence_fails_alone_at_low_cost(
    make_config, tiny, proteins, healthy, worker, n_losses, reason
):
    config = make_config(proteins, **ABOUT)
    events = []
    executor = ProcessExecutor(["cpu"] * 2, worker)
    assert run_inline(config, tiny.head, events.append, executor).exit_code == 2

    found = statuses(config.output)
    assert {name for name, status in found.items() if status == "failed"} == POISONED
    assert found | dict.fromkeys(POISONED, "scored") == statuses(healthy)
    expected = vectors(healthy)
    assert_same_vectors(
        vectors(config.output), {name: expected[name] for name in found.keys() - POISONED}
    )
    assert read(config.output / "failed_sequences.fa") == {
        title: sequence
        for title, sequence in read(proteins).items()
        if title.split()[0] in POISONED
    }
    listing = (config.output / "failed_files.txt").read_text().splitlines()
    assert sum(int(line.split("|")[2].split()[0]) for line in listing) == len(POISONED)
    assert all(reason in line for line in listing)
    assert not leftovers(config.output)

    assert sum(isinstance(event, WorkerLost) for event in events) == n_losses * len(POISONED)
    n_begun = sum(len(event.rows) for event in events if isinstance(event, BatchStarted))
    assert n_begun < 2 * N_PROTEINS


def read(path: Path) -> dict[str, str]:
    with path.open() as lines:
        return dict(SimpleFastaParser(lines))
