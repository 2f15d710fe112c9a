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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from virnucpro.core.atomic_io import parse_json, read_bounded
from virnucpro.core.errors import ResumeError
from virnucpro.core.logging import printable

_FORMAT = "json_format"
_CHECKSUM = "sha256"
_END = re.compile(rb',\n  "sha256": "([0-9a-f]{64})"\n}\n\Z')
_END_BYTES = 83
_SCALARS = frozenset((str, int, float, bool, type(None)))


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
    without further ones, and a list of such objects, such as the inputs of a run.
    """
    if not isinstance(value, dict | list | tuple) or not value:
        return json.dumps(value)
    inner = f"{margin}  "
    if isinstance(value, dict):
        return f"{{\n{inner}{_indent_object(value, inner)}\n{margin}}}"
    return f"[\n{inner}{_indent_list(value, inner)}\n{margin}]"


def _indent_object(value: Mapping[str, Any], margin: str) -> str:
    """Return the entries of an object as lines, the first one without a margin."""
    if _has_scalars(value.values()):
        return json.dumps(value, separators=(f",\n{margin}", ": "))[1:-1]
    pairs = ((json.dumps({name: 0})[1:-4], item) for name, item in value.items())
    return f",\n{margin}".join(f"{name}: {_indent(item, margin)}" for name, item in pairs)


def _indent_list(value: Sequence[Any], margin: str) -> str:
    """Return the entries of a list as lines, the first one without a margin."""
    if _has_scalars(value):
        return json.dumps(value, separators=(f",\n{margin}", ": "))[1:-1]
    if not all(map(_is_flat_object, value)):
        return f",\n{margin}".join(_indent(item, margin) for item in value)
    # text contains no line end, so each one here is between two entries
    inner = f"{margin}  "
    text = json.dumps(value, separators=(f",\n{inner}", ": "))[2:-2]
    lines = text.replace(f"}},\n{inner}{{", f"\n{margin}}},\n{margin}{{\n{inner}")
    return f"{{\n{inner}{lines}\n{margin}}}"


def _has_scalars(values: Iterable[object]) -> bool:
    """Return True if none of the values is an object or a list."""
    return not any(isinstance(item, dict | list | tuple) for item in values)


def _is_flat_object(value: object) -> bool:
    """Return True for a JSON object with entries, all of which are text, numbers and the like."""
    if type(value) is not dict or not value:
        return False
    return _SCALARS.issuperset(map(type, value.values()))


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
