"""The tutorial runs command by command, and prints what the page shows."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = Path(__file__).parents[3] / "shared" / "data" / "inputs"
TUTORIAL = (ROOT / "docs/TUTORIAL.md").read_text(encoding="utf-8")
# a command, and what it prints if the page shows that
STEPS = re.findall(r"```sh\n(.*?)```(?:\n\n```\n(.*?)```)?", TUTORIAL, re.DOTALL)
GENOMES = {
    "NC_000913.3": "ecoli_K12_MG1655_GCF_000005845.2.fna.gz",
    "NC_001416.1": "lambda_virus.fa",
    "NC_045512.2": "sars-cov-2_wuhan-hu-1.fasta",
}


def download(folder: Path) -> None:
    """Write the files of the first step, without a network."""
    folder.mkdir()
    for name, file in GENOMES.items():
        path = INPUTS / file
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        header, _, bases = text.partition(b"\n")
        title = header.partition(b" ")[2]
        (folder / f"{name}.fa").write_bytes(b">%s %s\n%s" % (name.encode(), title, bases))


def run(command: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def alike(shown: str, printed: str) -> bool:
    """Compare lines. The last digits of scores may differ between processors."""
    words = [line.split() for line in (shown, printed)]
    if len(words[0]) != len(words[1]):
        return False
    return all(
        a == b or ("." in a and a.replace(".", "").isdigit() and abs(float(a) - float(b)) <= 1e-4)
        for a, b in zip(*words, strict=True)
    )


@pytest.mark.skipif(not INPUTS.exists(), reason="the shared real sequences are not here")
def test_steps_print_what_the_tutorial_shows(tmp_path: Path) -> None:
    (first, _), *steps = STEPS
    assert set(re.findall(r"NC_\d+\.\d", first)) == set(GENOMES)
    download(tmp_path / "genomes")
    for command, shown in steps:
        printed = run(command, tmp_path).splitlines()
        for line in shown.splitlines():
            assert any(alike(line, each) for each in printed), (command, line, printed)
