"""The commands and the code in docs/EMBEDDINGS.md run with the built-in model on a CPU."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import h5py
import pytest
from conftest import TINY
from fair_esm_reference import make_fair_esm, save_contact_head, save_fair_esm
from forkserver_runner import call, run_command, virnucpro

from virnucpro.models.validation import compare_reference
from virnucpro.models.validation.compare_reference import make_panel

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/EMBEDDINGS.md").read_text(encoding="utf-8")
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    " ".join(command.replace("\\\n", " ").split())
    for block in SHELL
    for command in re.findall(r"^virnucpro (?:[^\n]*\\\n)*[^\n]*$", block, re.MULTILINE)
    if "models download" not in command
]
# the page has the published model on GPUs
REPLACEMENTS = {
    "outputs/ --model esm2_t33_650M_UR50D": "outputs/ --model ./with_heads.pt",
    "--layers 6,20,33": "--layers 1,2",
    "--layers 20": "--layers 4",
    "esm2_t33_650M_UR50D": "virnucpro-tiny",
    "esmc-600m": "virnucpro-tiny",
    " --gpus 0,1,2": " --device cpu --workers 1",
    " --gpus 0": " --device cpu",
    "--pooling mean,std": "--pooling mean,std --device cpu --workers 1",
}


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_with_short_panel(words: list[str]) -> None:
    """Run a command. ``models check`` uses short proteins. ``test_check`` uses all of them."""
    panel = {name: protein for name, protein in make_panel().items() if len(protein) < 100}
    assert panel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_reference, "make_panel", lambda _: panel)
        run_command(words)


def for_this_machine(command: str) -> str:
    for old, new in REPLACEMENTS.items():
        command = command.replace(old, new)
    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which all commands of the page have run, in order."""
    folder = tmp_path
    records = (ROOT / "examples/proteins.faa").read_text(encoding="utf-8").split(">")[1:5]
    # Perplexity reads a protein once per residue, so short proteins save most of the time.
    first_lines = ["\n".join(record.split("\n")[:2]) for record in records]
    (folder / "proteins.faa").write_text("".join(f">{lines}\n" for lines in first_lines))
    module = make_fair_esm(TINY)  # the built-in model has no heads
    save_fair_esm(module, folder / "with_heads.pt")
    save_contact_head(module, folder / "with_heads-contact-regression.pt")
    for command in COMMANDS:
        words = shlex.split(for_this_machine(command))[1:]
        done = virnucpro(*words, cwd=folder, env=ONE_THREAD, run=run_with_short_panel)
        assert done.returncode == 0, (command, done.stderr)
    return folder


def check_commands(folder: Path) -> None:
    assert len(COMMANDS) >= 8
    for name in ("embeddings", "run"):
        rows = (folder / name / "records.tsv").read_text().splitlines()
        assert [row.split("\t")[3] for row in rows] == ["status"] + ["embedded"] * 4
    assert (folder / "residues/features/000000.parquet").exists()
    assert (folder / "embeddings.uniprot.h5").exists()
    assert (folder / "parts/part-00000.safetensors").exists()
    with h5py.File(folder / "outputs/features/000000.h5") as h5:
        assert {"std_layer1", "mean_layer2", "contacts", "perplexity"} <= set(h5)


def run_program(program: str) -> None:
    exec(program, {"__name__": "__main__"})


def check_python(folder: Path) -> None:
    program = "\n".join([*PYTHON, "print(vectors.shape, n_vectors, table.height)"])
    program = program.replace("mean_layer6", "mean_layer1")
    done = call(run_program, program, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "(4, 128)" in done.stdout  # a batch of mean vectors
    assert done.stdout.endswith("(2, 128) 4 4\n")


def test_page_runs(folder: Path) -> None:
    """One test, because parallel test processes would each run all commands."""
    check_commands(folder)
    check_python(folder)
