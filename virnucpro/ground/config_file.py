"""Options from a YAML file, by their names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from virnucpro.ground.errors import InputMissingError, UsageError
from virnucpro.ground.log import printable

_EXAMPLE = "write an option and its value on each line, for example: batch_size: 64"


def read_config(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The options of a file, by their names in Python; ``names`` are all that there are.

    Raises:
        InputMissingError: the file cannot be read.
        UsageError: it is not a table of options, gives one twice, or one that is not in ``names``.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        table = loader.get_single_node()
        content = None if table is None else loader.construct_document(table)
    except OSError as error:
        raise InputMissingError(
            f"{printable(path)}: {error.strerror}", hint="check the path and its permissions"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{printable(path)} is not YAML: {printable(error)}", hint=_EXAMPLE
        ) from error
    if content is None:
        return {}
    if not isinstance(table, yaml.MappingNode) or not isinstance(content, dict):
        raise UsageError(f"{printable(path)} is not a table of options", hint=_EXAMPLE)
    _check_keys(path, table, names)
    return {_name(key): value for key, value in content.items()}


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _check_keys(path: Path, table: yaml.MappingNode, names: Collection[str]) -> None:
    """Look at the keys as they are written: of two that are the same, YAML keeps the last.

    Raises:
        UsageError: an option is given twice, or does not exist; names the line.
    """
    lines: dict[str, int] = {}
    for key, _ in table.value:
        name, line = _name(key.value), key.start_mark.line + 1
        if name not in names:
            raise UsageError(
                f"{printable(path)}:{line}: there is no option {printable(name)}",
                hint="see `virnucpro train --help`",
            )
        if name in lines:
            raise UsageError(
                f"{printable(path)}:{line}: {name} is given twice (first in line {lines[name]})",
                hint="keep one of the two lines",
            )
        lines[name] = line
