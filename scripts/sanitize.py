"""Run tests of the C library with the sanitizers of addresses and undefined behaviour.

Usage: python scripts/sanitize.py [PYTEST_ARGUMENT ...]

A temporary folder gets the tracked files and a library that stops at the first error. Without the
sanitizers of ``cc``, the program says so and ends with 0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from virnucpro.core.native import hash_sources

ROOT = Path(__file__).parents[1]
FLAGS = (
    *("-std=c99", "-O1", "-g", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-psabi"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
RUNTIMES = ("libasan.so", "libubsan.so")
TESTS = (
    "tests/unit/test_attention_library.py",
    "tests/unit/test_composition.py",
    "tests/unit/test_hdf5_layout.py",
    "tests/unit/test_int8_rows.py",
    "tests/unit/test_layer_norm_library.py",
    "tests/unit/test_samples.py",
    "tests/unit/test_scorer_library.py",
    "tests/unit/test_scorer_proteins.py",
    "tests/unit/test_shards.py",
    "tests/unit/test_translate.py",
)


def find_runtimes() -> list[str]:
    """The libraries that a sanitized library needs; empty if the compiler lacks one."""
    if not shutil.which("cc"):
        return []
    found = []
    for name in RUNTIMES:
        command = ("cc", f"-print-file-name={name}")
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        path = Path(answer.stdout.strip())
        if not path.is_absolute():  # the compiler repeats the name of a file that it lacks
            return []
        found.append(str(path))
    return found


def build(package: Path) -> None:
    """Compile the sources of a package folder into its library, with sanitizers."""
    sources = map(str, sorted(package.rglob("*.c")))
    digest = f'-DSOURCE_SHA256="{hash_sources(package)}"'
    library = package / "core" / "libvirnucpro.so"
    subprocess.run(["cc", *FLAGS, digest, "-o", str(library), *sources, "-lm"], check=True)


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files of this checkout to a folder."""
    listed = subprocess.run(
        ("git", "ls-files", "-z"),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in map(os.fsdecode, listed.stdout.split(b"\0")[:-1]):
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)


def main(arguments: Sequence[str]) -> int:
    runtimes = find_runtimes()
    if not runtimes:
        print("The sanitizers are skipped: cc is missing, or it lacks libasan or libubsan.")
        return 0
    with TemporaryDirectory() as name:
        copy_tracked(Path(name))
        build(Path(name, "virnucpro"))
        environment = {
            **os.environ,
            "PYTHONPATH": name,
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory until it ends
        }
        command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, *arguments)
        return subprocess.run(command, cwd=name, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
