"""Runs of predict without a model, with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from run_helpers import execute
from run_helpers import tables as tables_of

from virnucpro.core.events import EventHandler, WorkerEvent
from virnucpro.core.types import Shard
from virnucpro.engine.base import Executor, Resources, WorkerConfig
from virnucpro.sequences import record_text
from virnucpro.store import plan
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.summary import Summary


class NoExecutor(Executor):
    """Fails if anything is to be embedded."""

    def start(self, job: WorkerConfig, resources: Resources, n_workers: int) -> None:
        assert not n_workers

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Iterator[WorkerEvent]:
        raise AssertionError("a run without a language model embeds")


def predict(
    *inputs: Path, to: Path, on_event: EventHandler = lambda _: None, **changes: object
) -> Summary:
    options = PredictOptions(**{"input": inputs, "output_dir": to, **changes})
    return execute(options, on_event, lambda _: NoExecutor())


def write(path: Path, **records: str) -> Path:
    path.write_text("".join(f">{name} of a test\n{bases}\n" for name, bases in records.items()))
    return path


def many(seed: int = 1) -> dict[str, str]:
    rng = np.random.default_rng(seed)
    lengths = [150, 151, 299, 300, 450, 499, 500, 749, 750, 999, 1000, 1249, 3000, 12_345]
    open_ones = {f"open{n}": open_dna(n, rng) for n in lengths}
    return open_ones | {f"random{n}": random_dna(n, rng) for n in lengths}


def in_blocks(monkeypatch: pytest.MonkeyPatch, n_letters: int = 2_000) -> None:
    """Cut runs into small blocks."""
    monkeypatch.setattr(plan, "LETTERS_AT_ONCE", n_letters)
    monkeypatch.setattr(record_text, "READ_BYTES", n_letters)


def outputs(folder: Path) -> dict[str, bytes]:
    """Return every output that does not contain times."""
    names = [*tables_of(folder), "regions.tsv", "regions.bed", "regions.gff3", "regions.fasta"]
    return {name: (folder / name).read_bytes() for name in (*names, "tracks.tsv.gz")}
