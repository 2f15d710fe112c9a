"""Where packages are missing, and on which Pythons the installed program runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from labelled import write_labelled
from runs import write_fasta


def without(package: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command where a package is not installed."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from virnucpro.cli.main import main\n"
        f"sys.argv = {['virnucpro', *map(str, words)]}\n"
        "main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("yaml", "train", ("train", "--data", "m.tsv", "--config", "c.yaml")),
        ("pyarrow", "arrow", ("extract", "--format", "parquet", "-i", "in.fa")),
        ("parsl", "cluster", ("extract", "--executor", "parsl", "-i", "in.fa")),
    ],
)
def test_missing_extra_is_named_at_once(tmp_path, package, extra, command):
    answer = without(package, *command, "-o", tmp_path / "x")
    assert answer.returncode == 69
    assert f"this command needs {package}" in answer.stderr
    assert f"hint:  pip install 'virnucpro[{extra}]'\n" in answer.stderr
    assert not (tmp_path / "x").exists()


def test_training_without_tensorboard_warns(tiny, tmp_path):
    words = ["--data", write_labelled(tmp_path), "--model", tiny.model, "--workers", 1]
    words += ["--chunk-size", 300, "--batch-size", 16, "--hidden", 8, "--epochs", 1]
    answer = without("tensorboard", "train", *words, "--device", "cpu", "-o", tmp_path / "out")
    assert answer.returncode == 0, answer.stderr
    assert "TensorBoard is not installed (hint: `pip install 'virnucpro[train]'`" in answer.stderr
    assert (tmp_path / "out" / "model" / "head.safetensors").exists()
    assert not (tmp_path / "out" / "tensorboard").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("extract", "-i", "in.fa"),
        ("train", "--data", "m.tsv"),
        ("predict", "-i", "in.fa", "--gpus", "0"),
    ],
)
def test_missing_torch_is_one_line(tmp_path, words):
    write_fasta(tmp_path / "in.fa", {"a": "ACGTTGCA" * 50})
    (tmp_path / "m.tsv").write_text("")
    words = [tmp_path / word if word in ("in.fa", "m.tsv") else word for word in words]
    answer = without("torch", *words, "-o", tmp_path / "x")
    assert answer.returncode == 69
    assert answer.stderr.splitlines()[-2] == "error: PyTorch is not installed, and models need it"
    assert "Traceback" not in answer.stderr


def test_scorer_runs_without_torch(tmp_path):
    fasta = write_fasta(tmp_path / "in.fa", {"a": "ACGTTGCA" * 50})
    answers = {}
    for package in ("torch", "nothing_at_all"):
        out = tmp_path / package
        answer = without(package, "predict", "-q", "-i", fasta, "-o", out)
        assert (answer.returncode, answer.stderr) == (0, "")
        answers[package] = (out / "predictions.tsv").read_bytes()
    assert answers["torch"] == answers["nothing_at_all"]
    assert list(json.loads((tmp_path / "torch" / "run.json").read_text())["versions"]) == ["numpy"]
