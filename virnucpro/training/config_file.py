"""Options from a YAML file, by their names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from virnucpro.errors import InputMissingError, UsageError
from virnucpro.log import printable


def read_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """
    Raises:
        InputMissingError: the file cannot be read.
        UsageError: it is no table of options, names one twice, or one that is not ``known``.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputMissingError(f"{printable(path)}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{printable(path)} is no YAML: {printable(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"{printable(path)} is no table of options", hint="for example: batch_size: 64"
        )
    options: dict[str, Any] = {}
    for written, value in content.items():
        name = str(written).replace("-", "_")
        if name in options:
            raise UsageError(f"{printable(path)}: {printable(name)} stands there twice")
        options[name] = value
    if unknown := sorted(set(options) - set(known)):
        raise UsageError(
            f"{printable(path)}: there is no option {printable(unknown[0])}",
            hint="see `virnucpro train --help`",
        )
    return options
