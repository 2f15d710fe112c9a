"""Compile the C sources into a library of the package: a step of every build of a wheel.

The wheel has the manual pages where ``docs/make_man.py`` has written them. An editable install
gets the library into its source folder; other builds write nothing there. The compiler is ``$CC``
or ``cc``; on a machine without one, that of the package ``ziglang``, which the build asks for then.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("virnucpro")
LIBRARY = PACKAGE / "core" / "libvirnucpro.so"  # `core.native` loads it
MANUAL = Path("packaging", "man")  # in the source archive of a release
# no -march=native and no -ffast-math: the library runs on any machine of its kind, and scores
# are the same on all of them; nobody reads errno or the flags of exceptions, which changes none
FLAGS = (
    *("-std=c99", "-O3", "-fPIC", "-shared", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
ZIG = (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")


def compiler() -> list[str]:
    """The command of the compiler of this machine; empty without one."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return command if shutil.which(command[0]) else []


def build_library(root: Path, library: Path) -> None:
    """Compile the library from the sources below ``root``."""
    sources = sorted((root / PACKAGE).rglob("*.[ch]"))  # with headers, as `core.native` hashes them
    files = [str(source) for source in sources if source.suffix == ".c"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [*(compiler() or ZIG), *FLAGS, f'-DSOURCE_SHA256="{digest}"']
    try:
        subprocess.run([*command, "-o", str(unfinished), *files, "-lm"], check=True)
        unfinished.replace(library)  # a program that runs keeps the one that it has loaded
    finally:
        unfinished.unlink(missing_ok=True)


class LibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    folder = ""  # of the library until it is in the wheel

    def dependencies(self) -> list[str]:
        return [] if self.target_name != "wheel" or compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "editable":
            build_library(Path(self.root), Path(self.root, LIBRARY))
            build_data["artifacts"].append(LIBRARY.as_posix())
        else:
            self.folder = mkdtemp()
            library = Path(self.folder, LIBRARY.name)
            build_library(Path(self.root), library)
            build_data["force_include"][str(library)] = LIBRARY.as_posix()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        for page in sorted(Path(self.root, MANUAL).glob("*.1")):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.folder:
            shutil.rmtree(self.folder)
