"""Measure the cost of sequences that crash their worker: an undisturbed and a poisoned run.

Both runs use the built-in virnucpro-tiny on CPU workers, one after the other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from virnucpro.core.recipe import Recipe
from virnucpro.engine.base import Resources
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.worker import Worker
from virnucpro.models.base import Encoder, Pending
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.lookup import embedded_model
from virnucpro.workflows.extract import run_extract
from virnucpro.workflows.extract_config import ExtractConfig
from virnucpro.workflows.extract_options import ExtractOptions

POISON = "WWWWCWWWW"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonRow:
    run: str
    n_proteins: int
    n_failed: int
    seconds: float
    cpu_seconds: float
    ratio: float  # of the seconds to those of the undisturbed run


class CrashingWorker(Worker):
    """A worker that ends by a fault, as with a broken kernel."""

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        if any(POISON in sequence for sequence in sequences):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().start(encoder, sequences)


def measure_poison(
    n_proteins: int, n_poisoned: int, length: int, n_workers: int
) -> Iterator[PoisonRow]:
    """Yield a row for the undisturbed run and one for the poisoned run."""
    with TemporaryDirectory(prefix="virnucpro-measure-") as name:
        folder = Path(name)
        undisturbed = 0.0
        write_proteins(folder / "proteins.faa", n_proteins, n_poisoned, length)
        for run_name, worker in (("undisturbed", Worker), ("poisoned", CrashingWorker)):
            config = configure(folder / "proteins.faa", folder / run_name, n_workers)
            began = time.monotonic()
            cpu = os.times()
            executor = ProcessExecutor(config.resources.devices, worker)
            summary = run_extract(config, executor, lambda _: None)
            seconds = time.monotonic() - began
            used = os.times()
            undisturbed = undisturbed or seconds
            yield PoisonRow(
                run=run_name,
                n_proteins=n_proteins,
                n_failed=summary.records.statuses["failed"],
                seconds=seconds,
                cpu_seconds=sum(used[:4]) - sum(cpu[:4]),
                ratio=seconds / undisturbed,
            )


def write_proteins(path: Path, n_proteins: int, n_poisoned: int, length: int) -> None:
    letters = np.array(list("LAGVSERTIDPKQNFYMH"))  # none of POISON
    rows = np.random.default_rng(3).choice(letters, (n_proteins, length))
    step = n_proteins // n_poisoned
    with path.open("w") as out:
        for i, row in enumerate(rows):
            out.write(f">p{i}\n{POISON if i % step == step // 2 else ''}{''.join(row)}\n")


def configure(proteins: Path, folder: Path, n_workers: int) -> ExtractConfig:
    checkpoint = inspect_esm2(embedded_model())
    return ExtractConfig(
        options=ExtractOptions(input=(proteins,), output_dir=folder, input_type="protein"),
        recipe=Recipe(
            command="extract",
            input_type="protein",
            chunk_size=0,
            min_length=0,
            encoders=(checkpoint.spec(sha256=checkpoint.sha256(), precision="bf16"),),
        ),
        resources=Resources(devices=("cpu",) * n_workers, tokens_per_batch=4096),
        checkpoints=(checkpoint.path,),
        weights=(checkpoint.path,),
    )
