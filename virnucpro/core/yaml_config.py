"""Read options from a YAML file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from virnucpro.core.errors import InputMissingError, UsageError
from virnucpro.core.logging import printable


def read_config(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Read options from a YAML file.

    Args:
        path: the file.
        names: Python names of the options that are allowed.

    Returns:
        Values by Python name.

    Raises:
        InputMissingError: the file cannot be read.
        UsageError: the file is not a table of options, or an option is unknown or repeated.
    """
    example = "write an option and its value on each line, for example: batch_size: 64"
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        table = loader.get_single_node()
        content = None if table is None else loader.construct_document(table)
        entries = (
            list(_entries(loader, table, names)) if isinstance(table, yaml.MappingNode) else []
        )
    except OSError as error:
        raise InputMissingError.cannot_open(path, error) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{printable(path)} is not YAML: {printable(error)}", hint=example
        ) from error
    if not (content is None or isinstance(content, dict)):
        raise UsageError(f"{printable(path)} is not a table of options", hint=example)
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for line, key, value in entries:
        name, value = _as_option(key, value)
        where = f"{printable(path)}:{line}"
        if name not in names:
            raise UsageError(
                f"{where}: there is no option {printable(name)}",
                hint="see `virnucpro train --help`",
            )
        if name in lines:
            raise UsageError(
                f"{where}: {name} is given twice (first in line {lines[name]})",
                hint="keep one of the two lines",
            )
        lines[name] = line
        values[name] = value
    return values


def _entries(
    loader: yaml.SafeLoader, table: yaml.MappingNode, names: Collection[str]
) -> Iterator[tuple[int, str, Any]]:
    """Yield line, name and value of each entry, including those in sections like ``hardware:``."""
    for key, node in table.value:
        name = str(key.value).replace("-", "_")
        if name not in names and isinstance(node, yaml.MappingNode):
            yield from _entries(loader, node, names)
        else:
            yield key.start_mark.line + 1, name, loader.construct_object(node, deep=True)


def _as_option(name: str, value: object) -> tuple[str, object]:
    """Translate an option of another program into ours. Other options pass unchanged."""
    match name, value:
        case "gpu_ids", list():
            return "gpus", ",".join(map(str, value))
        case "gpu_ids", _:
            return "gpus", value
        case "use_multi_gpu", bool():
            return "multi_gpu", value
    return name, value
