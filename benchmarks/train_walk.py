"""Follow docs/TRAINING.md, from FASTA folders to calls, with a kill on the way.

Each step is a command of that page. Sequences and encoder are synthetic, so nothing is downloaded.
The times are real, but the figures of the head mean nothing. The training runs in two processes, is
killed (SIGKILL) in the middle of an epoch, and resumes in one process with the same effective
batch.

    python benchmarks/train_walk.py FOLDER [--shape 35M] [--epochs 40]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from virnucpro.models.validation.random_weights import MODELS, write_checkpoint

# codons without T, so that no frame of the strand has a stop
CODONS = {
    "virus": [a + b + c for a in "ACG" for b in "AC" for c in "AC"],
    "other": [a + b + c for a in "ACG" for b in "CG" for c in "CG"],
}
# per label; per record
N_GROUPS = 14
N_BASES = 1_500
BATCH = 16  # frames per step on all devices
MODEL = "./esm2_made_up.pt"
Command = Callable[[Sequence[str]], None]


def make_sequences(folder: Path, n_groups: int = N_GROUPS, n_bases: int = N_BASES) -> None:
    """Make folders ``virus`` and ``other`` with a FASTA file per group, and ``contigs.fa``."""
    draws = random.Random(1)
    contigs = []
    for label, codons in CODONS.items():
        (folder / label).mkdir(parents=True)
        for group in range(n_groups + 1):
            bases = "".join(draws.choices(codons, k=n_bases // 3))
            record = f">{label}_{group}\n{bases}\n"
            if group == n_groups:  # not trained on
                contigs.append(record)
            else:
                (folder / label / f"{label}_{group}.fa").write_text(record)
    (folder / "contigs.fa").write_text("".join(contigs))


def steps_before(epochs: int) -> list[list[str]]:
    """The commands up to the training, which is the last one and will be killed."""
    return [
        ["manifest", "--virus", "virus/", "--other", "other/", "-o", "manifest.tsv"],
        [*training(epochs, n_processes=2), "--check"],
        ["extract", "--input", "manifest.tsv", "--output-dir", "vectors/",
         "--model", MODEL, "--device", "cpu", "--workers", "2"],
        [*training(epochs, n_processes=2), "--features", "vectors/"],
    ]  # fmt: skip


def training(epochs: int, n_processes: int) -> list[str]:
    batch = str(BATCH // n_processes)
    workers = str(n_processes)
    return [
        *("train", "--data", "manifest.tsv", "--output-dir", "training/"),
        *("--model", MODEL, "--epochs", str(epochs), "--batch-size", batch),
        *("--device", "cpu", "--workers", workers),
    ]


def steps_after(epochs: int) -> list[list[str]]:
    """The commands from the resume to the calls."""
    return [
        ["status", "training/"],
        [*training(epochs, n_processes=1), "--features", "vectors/", "--resume"],
        ["models", "info", "training/model"],
        ["evaluate", "--data", "manifest.tsv", "--split", "training/split.tsv",
         "--output-dir", "evaluation/", "--model", "training/model", "--card", "--device", "cpu"],
        ["predict", "--input", "contigs.fa", "--output-dir", "results/",
         "--model", "training/model", "--device", "cpu"],
    ]  # fmt: skip


def run(words: Sequence[str], folder: Path) -> None:
    """
    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    announce(words)
    subprocess.run([sys.executable, "-m", "virnucpro", *words], cwd=folder, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    say(f"-- {words[0]}: {time.perf_counter() - begun:.0f} s, {cpu:.0f} CPU s\n")


def kill_in_an_epoch(words: Sequence[str], folder: Path, n_epochs: int) -> None:
    """Kill a training in its epoch ``n_epochs`` + 1, and wait until all its processes are gone."""
    announce(words)
    process = subprocess.Popen([sys.executable, "-m", "virnucpro", *words], cwd=folder)
    table = folder / "training" / "epochs.tsv"
    while not table.exists() or table.read_text().count("\n") <= n_epochs:
        if process.poll() is not None:
            raise SystemExit("the training ended before it could be killed: give more --epochs")
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    if alive:
        raise SystemExit(f"outlived the training: {alive}")
    say(f"-- killed in epoch {n_epochs + 1}; none of {len(family)} processes is left\n")


def announce(words: Sequence[str]) -> None:
    say(f"$ {shlex.join(['virnucpro', *words])}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(MODELS), default="35M")
    parser.add_argument("--epochs", type=int, default=40)
    given = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"
    make_sequences(given.folder)
    write_checkpoint(given.folder / MODEL, MODELS[given.shape], seed=1)
    *before, killed = steps_before(given.epochs)
    for words in before:
        run(words, given.folder)
    kill_in_an_epoch(killed, given.folder, given.epochs // 4)
    for words in steps_after(given.epochs):
        run(words, given.folder)


if __name__ == "__main__":
    main()
