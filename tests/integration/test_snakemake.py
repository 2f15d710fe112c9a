"""The workflow in ``examples/snakemake``, on this machine and on a SLURM cluster of one node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fair_esm_reference import random_protein
from one_node_slurm import NEEDS_SLURM, one_node_slurm
from run_helpers import assert_same_run, leftovers, predict_here

SNAKEMAKE = shutil.which("snakemake")
pytestmark = pytest.mark.skipif(SNAKEMAKE is None, reason="needs snakemake on the path")
SNAKEFILE = Path(__file__).parents[2] / "examples" / "snakemake" / "Snakefile"
ON_SLURM = ("--executor", "slurm", "--jobs", "4", "--slurm-no-account")
ON_SLURM += ("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "2")


def snakemake(folder: Path, environment: dict[str, str], *how: str, **config: object) -> None:
    """Run the workflow in a folder."""
    (folder / "config.json").write_text(json.dumps(config))
    ours = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [SNAKEMAKE, "--snakefile", SNAKEFILE, "--directory", folder, *how]
    answer = subprocess.run(
        [*command, "--configfile", folder / "config.json"],
        env={**environment, "PATH": ours},
        capture_output=True,
        text=True,
    )
    logs = [path.read_text() for path in folder.glob(".snakemake/slurm_logs/*/*/*.log")]
    assert answer.returncode == 0, "\n".join([answer.stdout, answer.stderr, *logs])


def embed_two_samples(folder: Path, tiny, environment: dict[str, str], *how: str) -> None:
    """Compare two samples, in two parts each, with runs on one machine. One has two files."""
    files = [folder / f"{name}.faa" for name in ("deep", "shallow 1", "shallow 2")]
    for number, path in enumerate(files):
        proteins = [random_protein(500, 1000 * number + i) for i in range(300)]
        path.write_text("".join(f">{number}p{i}\n{one}\n" for i, one in enumerate(proteins)))
    samples = {"deep": files[:1], "shallow": files[1:]}
    config = {
        "samples": {name: list(map(str, sample_files)) for name, sample_files in samples.items()},
        "options": f"--model {tiny.model} --head {tiny.head_file} --precision fp32",
        "work_options": "--device cpu --workers 1",
        "parts": 2,
    }
    snakemake(folder, environment, *how, **config)
    for name, sample_files in samples.items():
        run = folder / "results" / name
        assert len(list((run / "logs").glob("work-*.log"))) == 2
        assert not leftovers(run)
        assert_same_run(run, predict_here(sample_files, tiny, folder / name))


def test_runs_in_parts_are_those_of_one_machine(tiny, tmp_path):
    embed_two_samples(tmp_path, tiny, dict(os.environ), "--cores", "2")


def test_without_parts_each_sample_is_one_job(tmp_path):
    contigs = Path(__file__).parents[2] / "examples" / "contigs.fa"
    snakemake(tmp_path, dict(os.environ), "--cores", "2", samples={"a": str(contigs)}, results="r")
    assert (tmp_path / "r" / "a" / "predictions.tsv").read_text().count("\tvirus\t") == 8


@pytest.mark.slurm
@NEEDS_SLURM
def test_workflow_on_slurm(tiny):
    with one_node_slurm() as slurm:
        embed_two_samples(slurm.root, tiny, slurm.environment, *ON_SLURM)
