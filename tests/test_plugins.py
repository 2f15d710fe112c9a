"""Encoders and executors of other packages, by the entry points of an installed distribution."""

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
from runs import bases_by_frame, vectors

from virnucpro.encoders.families import family_of
from virnucpro.ground.errors import UnavailableError

PROGRAM = Path(sysconfig.get_path("scripts")) / "virnucpro"
ENTRY_POINTS = """
[virnucpro.encoders]
toy = toy_package:FAMILY

[virnucpro.executors]
backward = toy_package:Executor
"""
MODULE = """
from virnucpro.encoders.families import Family, Published, RemoteFile
from toy_package_executor import BackwardExecutor

published = Published(
    n_layers=1, dim=4, n_heads=1, files=(RemoteFile(url="http://127.0.0.1:1/counts.toy"),)
)
FAMILY = Family(
    "toy_package_encoder",
    reads="dna",
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
    """A folder with an installed distribution, as pip leaves one."""
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
def extract(contigs, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``virnucpro extract`` with the toy model, named by its path, from a folder."""
    model = tmp_path / "counts.toy"
    model.write_bytes(toy_encoder.MAGIC)

    def run(
        path: Path | str, *more: str, cwd: Path = tmp_path, by: tuple[object, ...] = (PROGRAM,)
    ):
        words = ["extract", "-i", contigs, "-o", tmp_path / "run", "--model", model]
        words += ["--device", "cpu", "--precision", "fp32", "--chunk-size", 300, *more]
        return subprocess.run(
            list(map(str, [*by, *words])),
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def assert_counted(contigs: Path, folder: Path) -> None:
    """The vectors are those of the toy encoder."""
    counts = {
        name: [bases.count(base) for base in "ACGT"]
        for name, bases in bases_by_frame(contigs).items()
    }
    assert len(counts) > 100
    assert {name: row.tolist() for name, row in vectors(folder).items()} == counts


def test_the_encoder_of_an_installed_package_embeds_in_worker_processes(
    package, extract, contigs, tmp_path
):
    answer = extract(package, "--workers", "2")
    assert answer.returncode == 0, answer.stderr
    assert_counted(contigs, tmp_path / "run")


def test_the_executor_of_an_installed_package_runs_the_shards(package, extract, contigs, tmp_path):
    answer = extract(package, "--executor", "backward")
    assert answer.returncode == 0, answer.stderr
    assert_counted(contigs, tmp_path / "run")
    assert "toy" in (tmp_path / "run" / "virnucpro.log").read_text()


def test_an_unknown_executor_is_refused_with_those_that_are_known(package, extract, tmp_path):
    answer = extract(package, "--executor", "slurm")
    assert answer.returncode == 64
    assert "there is no executor slurm" in answer.stderr
    assert "the executors are local, parsl, backward" in answer.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_a_model_that_another_package_publishes_has_a_name(package, tmp_path):
    answer = subprocess.run(
        [PROGRAM, "models", "info", "toy-counts"],
        env={**os.environ, "PYTHONPATH": str(package), "TORCH_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "http://127.0.0.1:1/counts.toy" in answer.stdout


def test_models_are_listed_for_programs_those_of_packages_too(package, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(package), "TORCH_HOME": str(tmp_path / "hub")}

    def models(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, "models", *words], env=environment, capture_output=True, text=True
        )

    listed = {one["name"]: one for one in json.loads(models("list", "--json").stdout)}
    keys = ["name", "kind", "parameters", "gpu_memory", "to_fetch", "path", "encoders"]
    assert all(list(one) == keys for one in listed.values())
    assert {"embedded", "published", "bundle"} == {one["kind"] for one in listed.values()}
    assert listed["esm2_virnucpro"]["to_fetch"] == 0
    assert Path(listed["esm2_virnucpro"]["path"]).exists()
    assert listed["virnucpro-500"]["encoders"] == ["dnabert-s", "esm2_t36_3B_UR50D"]
    assert listed["esm2_t6_8M_UR50D"]["to_fetch"] == 30_099_493
    assert listed["toy-counts"]["kind"] == "published"
    assert [line.split()[0] for line in models("list").stdout.splitlines()] == list(listed)
    assert "did you mean toy-counts?" in models("info", "toy-count").stderr


@pytest.mark.parametrize("by", [(PROGRAM,), (sys.executable, "-m", "virnucpro")])
@pytest.mark.parametrize("path", ["", "."])
def test_a_package_that_lies_in_the_current_folder_is_data(package, extract, tmp_path, by, path):
    mark = f"open({str(tmp_path / 'mark')!r}, 'w').close()\n"
    (package / "toy_package.py").write_text(mark + MODULE)
    answer = extract(path, cwd=package, by=by)
    assert answer.returncode == 69 and "is not an ESM-2 checkpoint" in answer.stderr
    answer = extract(path, "--executor", "backward", cwd=package, by=by)
    assert answer.returncode == 64 and "there is no executor backward" in answer.stderr
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("module", ["import no_such_module", "FAMILY = Executor = 1"])
def test_a_package_that_is_broken_is_named(package, extract, module):
    (package / "toy_package.py").write_text(module)
    for more in ((), ("--executor", "backward")):
        answer = extract(package, *more)
        shown = answer.stderr.replace("\n", " ")
        assert answer.returncode == 69, shown
        assert "toy-package cannot be used as virnucpro.e" in shown
        assert "pip uninstall toy-package" in shown and "Traceback" not in shown


def test_a_run_whose_package_is_gone_has_a_status_and_is_not_embedded(package, extract, tmp_path):
    planned = extract(package, "--plan-only")
    assert planned.returncode == 0, planned.stderr
    status, work = (
        subprocess.run([PROGRAM, command, tmp_path / "run"], capture_output=True, text=True)
        for command in ("status", "work")
    )
    assert status.returncode == 0 and "virnucpro work" in status.stdout
    assert work.returncode == 69 and "counts.toy is not an ESM-2 checkpoint" in work.stderr
    with pytest.raises(UnavailableError, match="no package here has the encoder toy"):
        family_of("toy")
