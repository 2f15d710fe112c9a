"""Missing packages, and the Python versions on which the installed program runs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import check_pythons
import pytest
from forkserver_runner import run_command, virnucpro
from labelled_data_helpers import write_labelled
from run_helpers import write_fasta


def without(package: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command as if a package were not installed."""
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
        ("parsl", "cluster", ("extract", "--executor", "parsl", "-i", "in.fa")),
    ],
)
def test_missing_extra_is_named_at_once(tmp_path, package, extra, command):
    answer = without(package, *command, "-o", tmp_path / "x")
    assert answer.returncode == 69
    assert f"this command needs {package}" in answer.stderr
    assert f"hint:  pip install 'virnucpro[{extra}]'\n" in answer.stderr
    assert not (tmp_path / "x").exists()


def run_without_tensorboard(words: list[str]) -> None:
    assert "tensorboard" not in sys.modules
    sys.modules["tensorboard"] = None
    run_command(words)


def test_training_without_tensorboard_warns(tiny, tmp_path):
    words = ["--data", write_labelled(tmp_path), "--model", tiny.model, "--workers", 1]
    words += ["--chunk-size", 300, "--batch-size", 16, "--hidden", 8, "--epochs", 1]
    words += ["--device", "cpu", "-o", tmp_path / "out"]
    answer = virnucpro("train", *words, run=run_without_tensorboard)
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


# The check of every Python version


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("echo 'Exception ignored in: x' >&2", "stderr is not empty:\nException ignored in: x"),
        ("kill -SEGV $$", "exit code -11"),
        ("rm -r $output", "predictions.tsv is missing or differs"),
        ("", None),
    ],
)
def test_check_of_pythons_finds_faults(tmp_path, body, fault):
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/bash\nfor output; do :; done  # the last word\n"
        f'mkdir -p "$output"; echo right > "$output/predictions.tsv"\n{body}\n'
    )
    program.chmod(0o755)
    good = check_pythons.Outcome(0, "", hashlib.sha256(b"right\n").hexdigest(), seconds=1.0)
    outcome = check_pythons.check([program], tmp_path / "in.fa", tmp_path / "out")
    faults = outcome.faults(good.predictions_sha256)
    assert [one.startswith(fault) for one in faults] == [True] if fault else not faults
    assert check_pythons.judge({"3.11": good, "3.12": outcome}) == bool(fault)


def test_no_python_at_all_is_a_fault():
    assert check_pythons.judge({}) == 1


def test_check_needs_interpreter_of_the_version(tmp_path, monkeypatch):
    """A program with that name that does not start, such as a shim, does not count."""
    for version in ("3.90", "3.91"):
        shim = tmp_path / f"python{version}"
        shim.write_text("#!/bin/sh\necho 'not installed' >&2; exit 127\n" * (version == "3.90"))
        shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(check_pythons.UnavailableError, match="not on PATH, not in pyenv; uv: "):
        check_pythons.find_interpreter("3.90", tmp_path)
