"""Encoders and executors from other packages, by the entry points of an installed distribution."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import toy_encoder
import toy_executor
from forkserver_runner import run_command, virnucpro
from run_helpers import bases_by_frame, vectors

from virnucpro.core.errors import UnavailableError
from virnucpro.models.registry import find_family

PROGRAM = Path(sysconfig.get_path("scripts")) / "virnucpro"
ENTRY_POINTS = """
[virnucpro.encoders]
toy = toy_package:FAMILY

[virnucpro.executors]
backward = toy_package:Executor
"""
MODULE = """
from virnucpro.models.registry import Family, Published, RemoteFile
from toy_package_executor import BackwardExecutor

published = Published(
    n_layers=1, dim=4, n_heads=1, files=(RemoteFile(url="http://127.0.0.1:1/counts.toy"),)
)
FAMILY = Family(
    "toy_package_encoder",
    extra_tokens=0,
    has_files=True,
    published={"toy-counts": published},
)


class Executor(BackwardExecutor):
    def __init__(self, options, devices):
        assert options.executor == "backward" and len(devices) == 1
        super().__init__()
"""


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder with an installed distribution, as pip leaves it."""
    folder = tmp_path / "site"
    info = folder / "toy_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "toy_package.py").write_text(MODULE)
    shutil.copy(toy_encoder.__file__, folder / "toy_package_encoder.py")
    shutil.copy(toy_executor.__file__, folder / "toy_package_executor.py")
    return folder


@pytest.fixture
def words(contigs, tmp_path) -> list[object]:
    """The words of ``extract`` with the toy model, named by its path."""
    model = tmp_path / "counts.toy"
    model.write_bytes(toy_encoder.MAGIC)
    words = ["extract", "-i", contigs, "-o", tmp_path / "run", "--model", model]
    return [*words, "--device", "cpu", "--precision", "fp32", "--chunk-size", 300]


@pytest.fixture
def extract(words, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``extract`` in a folder."""

    def run(
        path: Path | str, *more: str, cwd: Path = tmp_path, by: tuple[object, ...] = (PROGRAM,)
    ):
        return subprocess.run(
            list(map(str, [*by, *words, *more])),
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize("more", [("--workers", "1"), ("--executor", "backward")])
def test_installed_encoder_embeds(package, extract, contigs, tmp_path, more):
    answer = extract(package, *more)
    assert answer.returncode == 0, answer.stderr
    counts = {
        name: [bases.count(base) for base in "ACGT"]
        for name, bases in bases_by_frame(contigs).items()
    }
    assert len(counts) > 100
    assert {name: row.tolist() for name, row in vectors(tmp_path / "run").items()} == counts
    assert "toy" in (tmp_path / "run" / "virnucpro.log").read_text()


def test_unknown_executor_is_refused(package, extract, tmp_path):
    answer = extract(package, "--executor", "slurm")
    assert answer.returncode == 64
    assert "there is no executor slurm" in answer.stderr
    assert "the executors are local, parsl, backward" in answer.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def answers(
    folder: Path, path: Path, *commands: list[object]
) -> list[subprocess.CompletedProcess[str]]:
    """Return what commands print if ``path`` has installed packages."""
    env = {**os.environ, "TORCH_HOME": str(folder / "hub")}
    return [virnucpro(path, *words, cwd=folder, env=env, run=run_beside) for words in commands]


def run_beside(words: list[str]) -> None:
    """Run a command. Its first word is a folder with installed packages."""
    sys.path.append(words[0])
    run_command(words[1:])


def test_plugin_models_are_listed(package, tmp_path):
    as_json, as_text, info, wrong = answers(
        tmp_path,
        package,
        ["models", "list", "--json"],
        ["models", "list"],
        ["models", "info", "toy-counts"],
        ["models", "info", "toy-count"],
    )
    listed = {one["name"]: one for one in json.loads(as_json.stdout)}
    keys = {"name", "kind", "parameters", "dim", "least_gpu_memory", "gpu_memory", "to_fetch"}
    keys |= {"path", "encoders", "installed", "is_default", "notice"}
    assert all(set(one) == keys for one in listed.values())
    assert {"embedded", "published", "bundle"} == {one["kind"] for one in listed.values()}
    assert listed["virnucpro-tiny"]["to_fetch"] == 0
    assert Path(listed["virnucpro-tiny"]["path"]).exists()
    assert listed["virnucpro-500"]["encoders"] == ["dnabert-s", "esm2_t36_3B_UR50D"]
    assert listed["esm2_t6_8M_UR50D"]["to_fetch"] == 30_099_493
    assert listed["toy-counts"]["kind"] == "published"
    assert [line.split()[0] for line in as_text.stdout.splitlines()[1:]] == list(listed)
    assert info.returncode == 0 and "http://127.0.0.1:1/counts.toy" in info.stdout
    assert wrong.returncode != 0 and "did you mean toy-counts?" in wrong.stderr


def test_package_in_current_folder_is_data(package, extract, tmp_path):
    """With PYTHONPATH, and with ``-m``. First an encoder is asked for, then an executor."""
    mark = f"open({str(tmp_path / 'mark')!r}, 'w').close()\n"
    (package / "toy_package.py").write_text(mark + MODULE)
    answer = extract(".", cwd=package)
    assert answer.returncode == 69 and "is not an ESM-2 checkpoint" in answer.stderr
    by = (sys.executable, "-m", "virnucpro")
    answer = extract("", "--executor", "backward", cwd=package, by=by)
    assert answer.returncode == 64 and "there is no executor backward" in answer.stderr
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("module", ["import no_such_module", "FAMILY = Executor = 1"])
def test_broken_package_is_named(package, words, tmp_path, module):
    (package / "toy_package.py").write_text(module)
    for answer in answers(tmp_path, package, words, [*words, "--executor", "backward"]):
        shown = answer.stderr.replace("\n", " ")
        assert answer.returncode == 69, shown
        assert "toy-package cannot be used as virnucpro.e" in shown
        assert "pip uninstall toy-package" in shown and "Traceback" not in shown


def test_run_without_its_package(package, extract, tmp_path):
    planned = extract(package, "--plan-only")
    assert planned.returncode == 0, planned.stderr
    folder = tmp_path / "run"
    status, work = answers(tmp_path, tmp_path / "none", ["status", folder], ["work", folder])
    assert status.returncode == 0 and "virnucpro work" in status.stdout
    assert work.returncode == 69 and "counts.toy is not an ESM-2 checkpoint" in work.stderr
    with pytest.raises(UnavailableError, match="no package here has the encoder toy"):
        find_family("toy")
