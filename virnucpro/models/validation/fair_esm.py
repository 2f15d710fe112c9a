"""Load the ESM-2 of fair-esm by the files in its distribution.

Two distributions install a package ``esm``: ``fair-esm`` with Meta's ESM-2, and ``esm`` with later
models. They write into the same folder. If both are installed, ``import esm`` finds one, or a
mixture. The modules for ESM-2 have no counterparts with the same name. So they are imported here
one by one, from the files that pip recorded for fair-esm, if these have the recorded hashes.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackagePath
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable

_PACKAGE = "esm"


class FairESM(NamedTuple):
    """The parts of fair-esm that implement its ESM-2."""

    esm2: Any  # the class ``ESM2``
    data: Any  # the module with alphabets and batches


@cache
def load_fair_esm() -> FairESM:
    """Import the ESM-2 of fair-esm, whatever ``import esm`` finds.

    Raises:
        UnavailableError: fair-esm is not installed, or its files are missing or changed.
    """
    return load_modules(find_modules(find_distribution(sys.path)))


def find_distribution(folders: Sequence[str]) -> Distribution:
    """Find fair-esm in the first folder that has it.

    Raises:
        UnavailableError: no folder has it.
    """
    for found in Distribution.discover(name="fair-esm", path=list(folders)):
        return found
    raise UnavailableError(
        "fair-esm, the reference for ESM-2, is not installed", hint="pip install fair-esm==2.0.0"
    )


def find_modules(found: Distribution) -> dict[str, Path]:
    """Return the file for each ESM-2 module in a distribution.

    Raises:
        UnavailableError: a file is missing, or its content differs from the recorded hash.
    """
    # the ESM-2 modules, each after those that it imports
    modules = (
        "constants",
        "rotary_embedding",
        "multihead_attention",
        "axial_attention",
        "modules",
        "data",
        "model.esm2",
    )
    recorded = {str(file): file for file in found.files or ()}
    paths = {}
    for module in modules:
        name = f"{_PACKAGE}/{module.replace('.', '/')}.py"
        path = Path(str(found.locate_file(name)))
        if name not in recorded or not path.is_file():
            raise _damaged_error(f"{name} is missing")
        if not _is_unchanged(recorded[name], path):
            raise _damaged_error(f"another package has replaced {name}")
        paths[module] = path
    return paths


def _is_unchanged(recorded: PackagePath, path: Path) -> bool:
    if recorded.hash is None:
        return True
    digest = hashlib.new(recorded.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded.hash.value


def _damaged_error(why: str) -> UnavailableError:
    install = "pip install --force-reinstall --no-deps fair-esm==2.0.0"
    return UnavailableError(
        f"fair-esm cannot be used: {why}",
        hint=f"{install}; the distribution `esm` has a package of the same name, so use an "
        "environment without it if this happens again",
    )


def load_modules(paths: dict[str, Path]) -> FairESM:
    """Import the modules from these files, and leave no trace in the imported modules.

    Raises:
        UnavailableError: a module cannot be imported.
    """
    with _isolate_modules() as package:
        for name, path in paths.items():
            spec = spec_from_file_location(f"{_PACKAGE}.{name}", path)
            assert spec is not None and spec.loader is not None, "a Python file"
            module = module_from_spec(spec)
            sys.modules[spec.name] = module
            try:
                spec.loader.exec_module(module)
            except (ImportError, AttributeError, SyntaxError) as error:
                raise _damaged_error(
                    f"{path.name} cannot be imported: {printable(error)}"
                ) from error
            if "." not in name:
                setattr(package, name, module)
        return FairESM(sys.modules[f"{_PACKAGE}.model.esm2"].ESM2, sys.modules[f"{_PACKAGE}.data"])


@contextmanager
def _isolate_modules() -> Iterator[ModuleType]:
    """Yield an empty package ``esm``, and restore the modules when the block ends."""
    before = {name: module for name, module in sys.modules.items() if _belongs_to_package(name)}
    for name in before:
        del sys.modules[name]
    for name in (_PACKAGE, f"{_PACKAGE}.model"):
        sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
    try:
        yield sys.modules[_PACKAGE]
    finally:
        for name in [name for name in sys.modules if _belongs_to_package(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _belongs_to_package(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
