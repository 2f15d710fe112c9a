"""Find the entry points that other packages add to VirNucPro.

Only installed packages count, never the current folder. A file next to the data is data, whatever
its name.
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
    """Return the loader of each entry point in a group, by name. The first on the path wins."""
    from importlib.metadata import distributions

    loaders: dict[str, Callable[[], T]] = {}
    for distribution in distributions(path=_installed_folders()):
        for plugin in distribution.entry_points.select(group=group):
            loaders.setdefault(plugin.name, partial(_load, plugin, kind))
    return loaders


def _load(plugin: EntryPoint, kind: type[T]) -> T:
    """Load the object that an entry point names.

    Raises:
        UnavailableError: it cannot be imported or has the wrong type.
    """
    original_path = list(sys.path)
    sys.path[:] = _installed_folders()
    try:
        value = plugin.load()
    except Exception as error:  # third-party code may raise anything
        raise _broken_plugin(plugin, f"{type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = original_path
    if not isinstance(value, kind):
        raise _broken_plugin(
            plugin, f"{plugin.value} is a {type(value).__name__}, not a {kind.__name__}"
        )
    return value


def _installed_folders() -> list[str]:
    current_folder = Path.cwd()
    return [folder for folder in sys.path if folder and Path(folder).resolve() != current_folder]


def _broken_plugin(plugin: EntryPoint, why: str) -> UnavailableError:
    package = plugin.dist.name if plugin.dist is not None else "a package"
    return UnavailableError(
        f"{printable(package)} cannot be used as {plugin.group}: {printable(why)}",
        hint=f"repair the package, or remove it: pip uninstall {printable(package)}",
    )
