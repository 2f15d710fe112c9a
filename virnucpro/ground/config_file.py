"""Read options from a YAML file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from virnucpro.ground.errors import InputMissingError, UsageError
from virnucpro.ground.log import printable

_EXAMPLE = "write an option and its value on each line, for example: batch_size: 64"


def read_config(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Read the options of a file, by their Python names; ``names`` are the possible ones.

    Raises:
        InputMissingError: the file cannot be read.
        UsageError: it is not a table of options, or an option is unknown or occurs twice.
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
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for line, key, value in _entries(table, content, names):
        name, value = _as_option(key, value)
        _check_key(path, line, name, names, lines)
        values[name] = value
    return values


def _entries(
    table: yaml.MappingNode, content: dict[Any, Any], names: Collection[str]
) -> Iterator[tuple[int, str, Any]]:
    """Yield line, name and value of each entry; of a repeated key, YAML keeps the last value.

    A section such as ``hardware:`` yields its entries.
    """
    of_key = {_name(key): value for key, value in content.items()}
    for key, node in table.value:
        name = _name(key.value)
        value = of_key.get(name)
        if name not in names and isinstance(node, yaml.MappingNode) and isinstance(value, dict):
            yield from _entries(node, value, names)
        else:
            yield key.start_mark.line + 1, name, value


def _as_option(name: str, value: object) -> tuple[str, object]:
    """Translate an option of other programs into ours; leave all others as they are."""
    match name, value:
        case "gpu_ids", list():
            return "gpus", ",".join(map(str, value))
        case "gpu_ids", _:
            return "gpus", value
        case "use_multi_gpu", bool():
            return "multi_gpu", value
    return name, value


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _check_key(
    path: Path, line: int, name: str, names: Collection[str], lines: dict[str, int]
) -> None:
    """
    Raises:
        UsageError: an option occurs twice or does not exist; the message names the line.
    """
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
