"""The workflow of ``examples/snakemake``, on this machine and on a real SLURM of one node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from one_node_slurm import NEEDS_SLURM, one_node_slurm
from oracle import random_protein
from runs import assert_same_run, leftovers, predict_here

SNAKEMAKE = shutil.which("snakemake")
pytestmark = pytest.mark.skipif(SNAKEMAKE is None, reason="needs snakemake on the path")
SNAKEFILE = Path(__file__).parents[1] / "examples" / "snakemake" / "Snakefile"
ON_SLURM = ("--executor", "slurm", "--jobs", "4", "--slurm-no-account")
ON_SLURM += ("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "2")


def snakemake(folder: Path, tiny, environment: dict[str, str], *how: str) -> Path:
    """Run the workflow on three shards, in two parts; return the run folder."""
    proteins = folder / "proteins.faa"
    proteins.write_text("".join(f">p{i}\n{random_protein(500, i)}\n" for i in range(600)))
    config = {
        "input": proteins,
        "run": folder / "run",
        "options": f"--model {tiny.model} --head {tiny.head_file} --precision fp32",
        "work_options": "--device cpu --workers 1",
        "parts": 2,
    }
    ours = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words = [f"{name}={value}" for name, value in config.items()]
    answer = subprocess.run(
        [SNAKEMAKE, "--snakefile", SNAKEFILE, "--directory", folder, *how, "--config", *words],
        env={**environment, "PATH": ours},
        capture_output=True,
        text=True,
    )
    logs = [path.read_text() for path in folder.glob(".snakemake/slurm_logs/*/*.log")]
    assert answer.returncode == 0, "\n".join([answer.stdout, answer.stderr, *logs])
    predict_here(proteins, tiny, folder / "one_machine")
    return folder / "run"


def assert_as_one_machine(run: Path) -> None:
    assert len(list((run / "logs").glob("work-*.log"))) == 2
    assert not leftovers(run)
    assert_same_run(run, run.parent / "one_machine")


def test_the_workflow_gives_the_run_of_one_machine(tiny, tmp_path):
    assert_as_one_machine(snakemake(tmp_path, tiny, dict(os.environ), "--cores", "2"))


@pytest.mark.slurm
@NEEDS_SLURM
def test_the_same_on_slurm(tiny):
    with one_node_slurm() as slurm:
        run = snakemake(slurm.root, tiny, slurm.environment, *ON_SLURM)
        assert_as_one_machine(run)
