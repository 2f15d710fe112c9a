"""Add a checksum to a JSON file, which detects any changed bit.

The file ends with the SHA-256 of all bytes before that entry, so formatting counts as well as
values. An earlier entry, ``json_format``, declares that a checksum must follow. Without it, a
flipped bit in the name of the last entry would make the file look like an older version, which had
no checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from virnucpro.core.atomic_io import parse_json, read_bounded
from virnucpro.core.errors import ResumeError
from virnucpro.core.logging import printable

_FORMAT = "json_format"
_CHECKSUM = "sha256"
_END = re.compile(rb',\n  "sha256": "([0-9a-f]{64})"\n}\n\Z')
_END_BYTES = 83


def add_checksum(content: Mapping[str, Any]) -> str:
    """Return a JSON object as indented text with a checksum, which replaces an earlier one."""
    version = 2  # format version; version 1 had neither entry
    entries = {name: value for name, value in content.items() if name not in (_FORMAT, _CHECKSUM)}
    text = _indent({_FORMAT: version, **entries}).removesuffix("\n}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text},\n  "{_CHECKSUM}": "{digest}"\n}}\n'


def _indent(value: object, margin: str = "") -> str:
    """Return JSON as ``json.dumps(value, indent=2)`` does, but in a fraction of its time.

    The encoder in C does not indent. But it accepts separators, which indent an object or a list
    without further ones, such as each input of a run.
    """
    if not isinstance(value, dict | list | tuple) or not value:
        return json.dumps(value)
    inner = f"{margin}  "
    is_object = isinstance(value, dict)
    values = value.values() if isinstance(value, dict) else value
    if not any(isinstance(item, dict | list | tuple) for item in values):
        lines = json.dumps(value, separators=(f",\n{inner}", ": "))[1:-1]
    elif isinstance(value, dict):
        pairs = ((json.dumps({name: 0})[1:-4], item) for name, item in value.items())
        lines = f",\n{inner}".join(f"{name}: {_indent(item, inner)}" for name, item in pairs)
    else:
        lines = f",\n{inner}".join(_indent(item, inner) for item in values)
    opening, closing = "{}" if is_object else "[]"
    return f"{opening}\n{inner}{lines}\n{margin}{closing}"


def has_checksum(text: bytes) -> bool:
    """Return True if a file ends with a checksum, right or wrong."""
    return _END.search(text[-_END_BYTES:]) is not None


def parse_checked(text: bytes) -> Any:  # noqa: ANN401 - as it comes
    """Parse a JSON file and verify its checksum, if any. Objects are returned without it.

    Raises:
        ValueError: the file was changed, or is not JSON.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        return content
    end = _END.search(text[-_END_BYTES:])
    if end is None and not {_FORMAT, _CHECKSUM} & content.keys():
        return content  # written by an older version
    if end is None or hashlib.sha256(text[:-_END_BYTES]).hexdigest() != end[1].decode():
        raise ValueError("its content does not have the SHA-256 at its end: it was changed")
    return {name: value for name, value in content.items() if name not in (_FORMAT, _CHECKSUM)}


def read_facts(path: Path) -> dict[str, Any]:
    """Read the JSON object that describes a run or a training, without its checksum.

    Raises:
        OSError: the file cannot be opened, or is not a plain file.
        ResumeError: the file is corrupt.
    """
    why: object = "it is not a JSON object"
    try:
        content = parse_checked(read_bounded(path))
        if isinstance(content, dict):
            return content
    except ValueError as error:
        why = error
    raise ResumeError(
        f"{printable(path)} is damaged: {printable(why)}", hint="restore a copy of it"
    )
