"""Find what other packages add to VirNucPro through entry points.

Only installed packages count, never the current folder: a file next to the data is data,
whatever its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def find_plugins(group: str, kind: type[T]) -> dict[str, Callable[[], T]]:
    """The loader of each entry point of a group, by name; the first on the path wins."""
    from importlib.metadata import distributions

    found: dict[str, Callable[[], T]] = {}
    for distribution in distributions(path=_installed_folders()):
        for plugin in distribution.entry_points.select(group=group):
            found.setdefault(plugin.name, partial(_load, plugin, kind))
    return found


def _load(plugin: EntryPoint, kind: type[T]) -> T:
    """The object that an entry point names.

    Raises:
        UnavailableError: it cannot be imported or has the wrong type.
    """
    before = list(sys.path)
    sys.path[:] = _installed_folders()
    try:
        value = plugin.load()
    except Exception as error:  # other people's code may raise anything
        raise _broken_plugin(plugin, f"{type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = before
    if not isinstance(value, kind):
        raise _broken_plugin(
            plugin, f"{plugin.value} is a {type(value).__name__}, not a {kind.__name__}"
        )
    return value


def _installed_folders() -> list[str]:
    here = Path.cwd()
    return [folder for folder in sys.path if folder and Path(folder).resolve() != here]


def _broken_plugin(plugin: EntryPoint, why: str) -> UnavailableError:
    package = plugin.dist.name if plugin.dist is not None else "a package"
    return UnavailableError(
        f"{printable(package)} cannot be used as {plugin.group}: {printable(why)}",
        hint=f"repair the package, or remove it: pip uninstall {printable(package)}",
    )
