"""What ``make example`` installs, with a pip that only records its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
cp "$(dirname "$0")/pip" "$3/bin/pip"
"""
PIP = """#!/bin/sh
echo "$@" >> "$ASKED"
case "$*" in *--index-url*) exit "$INDEX_EXIT";; esac
"""


@pytest.fixture
def install(tmp_path):
    """Run make with these variables. -> its output, and pip's arguments"""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in (("python", PYTHON), ("pip", PIP), ("nvidia-smi", "#!/bin/sh")):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)

    def run(*variables: str, index_exit: int = 0) -> tuple[str, list[str]]:
        asked = tmp_path / "asked"
        venv = tmp_path / "venv"
        made = subprocess.run(
            [
                *("make", "-C", ROOT, f"VENV={venv}", f"PYTHON={programs / 'python'}"),
                *(*variables, str(venv / "installed")),
            ],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "ASKED": str(asked),
                "INDEX_EXIT": str(index_exit),
            },
        )
        assert made.returncode == 0, made.stderr
        return made.stdout, asked.read_text().splitlines()

    return run


def test_torch_without_a_gpu_is_the_cpu_build(install):
    said, (first, second) = install("TORCH=cpu")
    assert first.endswith("--index-url https://download.pytorch.org/whl/cpu torch")
    assert "-c constraints.txt" in first and "--no-deps" in first
    assert second == "install --quiet --no-compile -c constraints.txt -e ."
    assert "installed without CUDA" in said and "is not available" not in said


def test_silent_index_is_reported(install):
    said, asked = install("TORCH=cpu", index_exit=1)
    assert len(asked) == 2
    assert "is not available from https://download.pytorch.org/whl/cpu" in said


def test_torch_with_a_gpu_is_from_the_index(install):
    for variables in ([], ["TORCH=default"]):  # an nvidia-smi is on the path
        said, asked = install(*variables)
        assert asked[-1] == "install --quiet --no-compile -c constraints.txt -e ."
        assert not any("--index-url" in line for line in asked)
        assert "CUDA" not in said


@pytest.mark.skipif(
    os.uname().sysname != "Linux" or Path("/dev/nvidiactl").exists() or which("nvidia-smi"),
    reason="no Linux machine without a GPU",
)
def test_linux_without_a_gpu_is_recognised(install, tmp_path):
    (tmp_path / "programs" / "nvidia-smi").unlink()
    _, asked = install()
    assert "--index-url" in asked[0]
