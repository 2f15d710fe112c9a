"""A run of the scorer is killed at any moment, and a resume gives the same bytes.

``pytest tests/fault_injection/test_scorer_kills.py --rounds 50`` runs 50 rounds. Replay a failing
round with ``--rounds 1 --chaos-seed`` and its number.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from faults import Run, Setting
from run_helpers import leftovers, wait_until

# the program, with blocks so small that a short input has many, and helpers for it
SMALL_BLOCKS = """
from virnucpro.core import helper_pool as tasks
from virnucpro.store import plan
from virnucpro.sequences import record_text
tasks._LETTERS_PER_HELPER = 100_000
plan.LETTERS_AT_ONCE = record_text.READ_BYTES = 20_000
from virnucpro.cli.main import main
main()
"""
TIMED_FILES = ("run.json", "report.html", "virnucpro.log", ".lock")


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    folder = tmp_path_factory.mktemp("scorer")
    rng = np.random.default_rng(12)
    fasta = folder / "contigs.fa"
    with fasta.open("w") as out:
        for number, n_bases in enumerate([400, 1_500, 12_000, 700, 3_000, 30_000] * 10):
            make = open_dna if number % 3 else random_dna
            out.write(f">c{number}\n{make(n_bases, rng)}\n")
    program = (sys.executable, "-c", SMALL_BLOCKS)
    words = ("predict", "--quiet", "--no-report", "-i", str(fasta))
    subprocess.run([*program, *words, "-o", str(folder / "undisturbed")], check=True)
    return Setting(program, words, folder / "undisturbed")


def outputs(folder: Path) -> dict[str, bytes]:
    """Return all files of a run that do not contain times."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in TIMED_FILES)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_repeated_kills_of_a_scorer_run(setting, tmp_path, chaos_seed):
    chance = random.Random(chaos_seed)
    output = tmp_path / "run"
    kept: dict[str, int] = {}
    for _ in range(chance.randint(1, 4)):
        run = Run.start(setting, output, "--resume", "--workers", chance.choice("12"))
        wait_for_scores(run, len(kept) + chance.randint(0, 8))
        time.sleep(chance.uniform(0.0, 0.1))
        (run.send_to_all if chance.random() < 0.5 else run.send)(signal.SIGKILL)
        run.end()
        assert run.process.returncode in (0, -signal.SIGKILL)
        now = score_files(output)
        assert kept.items() <= now.items(), "what was scored is not scored again"
        kept = now
    run = Run.start(setting, output, "--resume", "--workers", chance.choice("12"))
    errors = run.end()
    assert run.process.returncode == 0, errors
    assert kept.items() <= score_files(output).items()
    assert outputs(output) == outputs(setting.undisturbed)
    assert not leftovers(output)


def wait_for_scores(run: Run, n_blocks: int) -> None:
    """Wait until this number of blocks is scored, or the run has ended."""
    wait_until(lambda: run.process.poll() is not None or len(score_files(run.output)) >= n_blocks)


def score_files(folder: Path) -> dict[str, int]:
    """Return the score files, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("scores/*.scores")}
