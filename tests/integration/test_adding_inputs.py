"""A resume keeps the inputs of its run, and adds others only with ``--add``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import random_dna
from forkserver_runner import virnucpro
from run_helpers import execute, rows, write_fasta

from virnucpro.core.errors import ResumeError, UsageError
from virnucpro.core.option_schema import build_options
from virnucpro.workflows.predict_options import PredictOptions


@pytest.fixture
def fasta(tmp_path: Path) -> Callable[[str], Path]:
    """Write a file with one record of the same name."""

    def write(name: str) -> Path:
        rng = np.random.default_rng(sum(map(ord, name)))
        path = tmp_path / "inputs" / f"{name}.fa"
        path.parent.mkdir(exist_ok=True)
        return write_fasta(path, {name: random_dna(300, rng)})

    return write


def predict(*inputs: Path, to: Path, **options: object) -> Path:
    values = {"input": list(inputs), "output_dir": to, "report": False, **options}
    execute(build_options(PredictOptions, values), lambda _: None)
    return to


def records(folder: Path) -> list[str]:
    return [row["record"] for row in rows(folder / "predictions.tsv")]


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a run except its log, which records every start."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files if path.name != "virnucpro.log"}


def test_resume_refuses_another_input(fasta, tmp_path):
    run = predict(fasta("a"), to=tmp_path / "run")
    before = content(run)
    for inputs in ([fasta("b")], [fasta("a"), fasta("b")]):
        with pytest.raises(ResumeError, match=r"b\.fa: not in the run .* has .*a\.fa") as caught:
            predict(*inputs, to=run, resume=True)
        assert "--add" in caught.value.hint and "--output-dir" in caught.value.hint
    assert content(run) == before


def test_add_includes_another_input(fasta, tmp_path):
    run = predict(fasta("a"), to=tmp_path / "run")
    predict(fasta("b"), to=run, resume=True, add=True)
    assert records(run) == ["a", "b"]
    predict(fasta("b"), fasta("a"), to=run, resume=True)
    assert records(run) == ["a", "b"], "it is an input of the run from then on"


def test_add_starts_a_run_if_there_is_none(fasta, tmp_path):
    run = predict(fasta("a"), to=tmp_path / "run", resume=True, add=True)
    assert records(run) == ["a"]


def test_add_without_resume_is_refused():
    with pytest.raises(UsageError, match="--add: no effect without --resume"):
        build_options(PredictOptions, {"input": "a.fa", "output_dir": "run", "add": True})


def test_resume_takes_a_moved_or_copied_input(fasta, tmp_path):
    run = predict(fasta("a"), to=tmp_path / "run")
    moved = fasta("a").rename(tmp_path / "moved.fa")
    predict(moved, to=run, resume=True)
    predict(shutil.copy(moved, tmp_path / "copy.fa"), to=run, resume=True)
    assert records(run) == ["a"]


@pytest.mark.parametrize("kind", ["folder", "sheet"])
def test_resume_refuses_a_new_file_of_a_list(fasta, tmp_path, kind):
    first = fasta("a")
    named = first.parent
    sheet = tmp_path / "samples.tsv"
    sheet.write_text(f"sample\tpath\na\t{first}\n")
    if kind == "sheet":
        named = sheet
    run = predict(named, to=tmp_path / "run")
    second = fasta("b")
    sheet.write_text(f"{sheet.read_text()}b\t{second}\n")
    with pytest.raises(ResumeError, match=r"b\.fa: not in the run"):
        predict(named, to=run, resume=True)
    predict(named, to=run, resume=True, add=True)
    assert records(run) == ["a", "b"]


def test_resume_reads_a_repaired_input(fasta, tmp_path):
    broken = fasta("b")
    text = broken.read_text()
    broken.write_text("no FASTA")
    run = predict(fasta("a"), broken, to=tmp_path / "run")
    assert records(run) == ["a"]
    broken.write_text(text)
    predict(fasta("a"), broken, to=run, resume=True)
    assert records(run) == ["a", "b"]


def test_resume_refuses_an_unreadable_new_input(fasta, tmp_path):
    run = predict(fasta("a"), to=tmp_path / "run")
    (tmp_path / "binary.fa").write_bytes(b"\x7fELF\0")
    with pytest.raises(ResumeError, match=r"binary\.fa: not in the run"):
        predict(fasta("a"), tmp_path / "binary.fa", to=run, resume=True)


def test_file_in_the_run_folder_is_known_by_content(fasta, tmp_path):
    """It is copied, so its name alone does not make it an input of the run."""
    run = predict(fasta("a"), to=tmp_path / "run")
    mended = Path(shutil.copy(fasta("b"), run / "failed_sequences.fa"))
    predict(mended, to=run, resume=True, add=True)
    shutil.copy(fasta("c"), mended)
    with pytest.raises(ResumeError, match=r"failed_sequences\.fa: not in the run"):
        predict(mended, to=run, resume=True)
    predict(mended, to=run, resume=True, add=True)
    assert records(run) == ["a", "b", "c"]


def test_command_names_the_option_to_add(fasta, tmp_path):
    command = ("predict", "-o", tmp_path / "run", "-q", "--no-report")
    assert virnucpro(*command, "-i", fasta("a")).returncode == 0
    refused = virnucpro(*command, "--resume", "-i", fasta("b"))
    assert refused.returncode == 73
    assert "hint:  add --add to include it in that run" in refused.stderr
    assert virnucpro(*command, "--resume", "--add", "-i", fasta("b")).returncode == 0
    assert records(tmp_path / "run") == ["a", "b"]
