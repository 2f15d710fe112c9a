"""The versions in ``constraints.txt`` exist for every supported Python."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from run_helpers import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = "3.11"
PROMISED = ("3.11", "3.12", "3.13", "3.14")


def pins_for(python: str) -> dict[str, str]:
    """Return the pinned versions for this Python, by package."""
    lines = CONSTRAINTS.read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    environment = {"python_version": python}
    kept = [one for one in pins if one.marker is None or one.marker.evaluate(environment)]
    assert len({one.name for one in kept}) == len(kept), "one version for each package"
    return {one.name: str(one.specifier) for one in kept}


@pytest.mark.parametrize("python", PROMISED[1:])
def test_every_python_pins_the_same_packages(python):
    assert pins_for(python).keys() - pins_for(OLDEST).keys() == set()
    missing = pins_for(OLDEST).keys() - pins_for(python).keys()
    assert missing <= {"backports.zstd"}, "part of Python from 3.14 on"


def test_every_pin_has_a_wheel_for_the_oldest_python(tmp_path, request):
    if not request.config.getoption("--index"):
        pytest.skip("asks the package index for each of them: with --index")
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--quiet"]
    where = ["--python-version", OLDEST, "--target", str(tmp_path / "nothing")]
    pins = [name + version for name, version in pins_for(OLDEST).items()]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--retries", "0", "--timeout", "15", *options, *where, *pins],
        capture_output=True,
        text=True,
        check=False,
    )
    if "from versions: none" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
