"""What ten sequences that crash their worker cost among 10,000: seconds beside an undisturbed run.

    python benchmarks/poison.py [--workers 2] [--length 160]

Both runs take the embedded model on CPU workers, one after the other; the ratio is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from virnucpro.config import EncoderSpec, Recipe, Resources, RunConfig
from virnucpro.encoders.esm2.weights import inspect_checkpoint
from virnucpro.encoders.models import embedded_model
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.worker import Arriving, Worker
from virnucpro.pipeline import run

N_PROTEINS, N_POISONED = 10_000, 10
POISON = "WWWWCWWWW"


class CrashingWorker(Worker):
    """Ends by a fault, as a broken kernel would."""

    def embed(self, proteins: list[str]) -> Arriving:
        if any(POISON in protein for protein in proteins):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().embed(proteins)


def write_proteins(path: Path, length: int) -> None:
    letters = np.array(list("LAGVSERTIDPKQNFYMH"))  # none of POISON
    rows = np.random.default_rng(3).choice(letters, (N_PROTEINS, length))
    step = N_PROTEINS // N_POISONED
    with path.open("w") as out:
        for i, row in enumerate(rows):
            out.write(f">p{i}\n{POISON if i % step == step // 2 else ''}{''.join(row)}\n")


def measure(proteins: Path, folder: Path, n_workers: int, worker: type[Worker]) -> dict[str, float]:
    checkpoint = inspect_checkpoint(embedded_model())
    config = RunConfig(
        inputs=(proteins,),
        output=folder,
        recipe=Recipe(
            command="extract",
            input_type="protein",
            chunk_size=0,
            min_length=0,
            encoders=(
                EncoderSpec(
                    model=checkpoint.name,
                    sha256=checkpoint.encoder_id,
                    layer=checkpoint.shape.n_layers,
                    pooling="mean",
                    precision="bf16",
                    dim=checkpoint.shape.dim,
                ),
            ),
        ),
        resources=Resources(devices=("cpu",) * n_workers, tokens_per_batch=4096),
        checkpoint=checkpoint.path,
        weights=checkpoint.path,
        input_type="protein",
    )
    began, cpu = time.monotonic(), os.times()
    executor = ProcessExecutor(config.resources.devices, worker)
    summary = run(config, None, executor, lambda _: None)
    used = os.times()
    return {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(sum(used[:4]) - sum(cpu[:4]), 2),
        "n_failed": summary.statuses.get("failed", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--length", type=int, default=160, help="residues of each protein")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_proteins(folder / "proteins.faa", options.length)
        runs = {
            case: measure(folder / "proteins.faa", folder / case, options.workers, worker)
            for case, worker in (("undisturbed", Worker), ("poisoned", CrashingWorker))
        }
    ratio = {
        name: round(runs["poisoned"][name] / runs["undisturbed"][name], 2)
        for name in ("seconds", "cpu_seconds")
    }
    json.dump({**vars(options), **runs, "ratio": ratio}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
