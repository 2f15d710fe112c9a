"""An HDF5 connector that cannot be loaded is reported once, before any work."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from run_helpers import write_fasta

from virnucpro.core.errors import UnavailableError
from virnucpro.store.hdf5_check import check_connector

PROGRAM = Path(sysconfig.get_path("scripts")) / "virnucpro"
ENVIRONMENT = {**os.environ, "HDF5_VOL_CONNECTOR": "no_such_connector"}
ERROR = "error: HDF5 does not work with the connector of HDF5_VOL_CONNECTOR=no_such_connector: "


@pytest.mark.parametrize("name", [None, "", "native"])
def test_working_connector_is_accepted(monkeypatch, name):
    if name is not None:
        monkeypatch.setenv("HDF5_VOL_CONNECTOR", name)
    check_connector(name)


def test_unknown_connector_is_refused(monkeypatch, capfd):
    monkeypatch.setenv("HDF5_VOL_CONNECTOR", "no_such_connector")
    with pytest.raises(UnavailableError, match="HDF5_VOL_CONNECTOR=no_such_connector") as caught:
        check_connector("no_such_connector")
    assert "unset HDF5_VOL_CONNECTOR" in caught.value.hint
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("command", ["extract", "predict"])
def test_connector_is_reported_once_before_work(tmp_path, tiny, command):
    fasta = write_fasta(tmp_path / "in.fa", {"a": "ACGTTGCA" * 50})
    words = [PROGRAM, command, "-i", fasta, "-o", tmp_path / "run", "--model", tiny.model]
    if command == "predict":
        words += ["--head", tiny.head_file]
    answer = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert answer.returncode == 69
    lines = answer.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith(ERROR)
    assert lines[1].startswith("hint:  run `unset HDF5_VOL_CONNECTOR`")
    assert not (tmp_path / "run").exists()


def test_scorer_needs_no_connector(tmp_path):
    fasta = write_fasta(tmp_path / "in.fa", {"a": "ACGTTGCA" * 50})
    words = [PROGRAM, "predict", "-q", "-i", fasta, "-o", tmp_path / "run"]
    answer = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_python_names_the_connector(tmp_path):
    code = (
        "import virnucpro\n"
        "try:\n    virnucpro.read_features('run')\n"
        "except virnucpro.VirnucproError as error:\n    print(error.hint)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert answer.stdout.startswith("run `unset HDF5_VOL_CONNECTOR`"), answer.stderr
