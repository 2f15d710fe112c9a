"""Fill the templates of the pages: HTML with Python in tags like those of Jinja.

``{{ value }}`` writes a value, escaped. ``{% if ... %}`` with ``elif`` and ``else``, and
``{% for ... %}``, are Python's; ``{% macro f(x) %}`` defines a function that returns HTML. Each
ends with ``{% end... %}``. A line with nothing but such a tag leaves no line. Values of objects and
of dictionaries are read with a dot.

A page defines the macros ``title``, ``nav`` and ``main``, which its frame, ``page.html``, calls.
The templates are files of this package and compiled like its modules; no value is part of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

_ASSETS = Path(__file__).with_name("assets")
_TAG = re.compile(r"(?m)(?:^[ \t]*)?(\{%.*?%\}|\{#.*?#\})\n?|(\{\{.*?\}\})")
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"})


class Safe(str):
    """Text that is already HTML."""

    __slots__ = ()


class _Dotted(dict[str, Any]):
    """A dictionary whose values are attributes, too."""

    __getattr__ = dict.__getitem__


def fill(name: str, words: Mapping[str, object]) -> str:
    """Fill a template, in the frame of every page, with values.

    Raises:
        NameError, LookupError, AttributeError: a name has no value.
    """
    out = list[str]()
    tools = {"out": out, "escaped": _escaped, "Safe": Safe}
    exec(_compiled(name), {**_dotted(words), **tools})
    return "".join(out)


def asset(name: str) -> str:
    """A file of the pages."""
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _compiled(name: str) -> CodeType:
    text = asset(name) + asset("page.html").removesuffix("\n")
    return compile("\n".join(_statements(text)), name, "exec")


def _statements(text: str) -> Iterator[str]:
    """The lines of a program that appends the parts of a template to the list ``out``."""
    depth = 0
    for part in filter(None, _TAG.split(text)):
        word, _, rest = part[2:-2].strip().partition(" ")
        if part.startswith("{{"):
            yield f"{' ' * depth}out.append(escaped({part[2:-2].strip()}))"
        elif part.startswith("{#"):
            continue
        elif not part.startswith("{%"):
            yield f"{' ' * depth}out.append({part!r})"
        elif word == "macro":
            depth += 1
            yield f"def {rest}:"
            yield " out = []"
        elif word.startswith("end"):
            if word == "endmacro":
                yield " return Safe(''.join(out))"
            depth -= 1
        elif word in ("else", "elif"):
            yield f"{' ' * (depth - 1)}{word} {rest}:"
        else:
            yield f"{' ' * depth}{word} {rest}:"
            depth += 1


def _dotted(value: Any) -> Any:  # noqa: ANN401 - as it comes
    if type(value) is dict:
        return _Dotted((name, _dotted(one)) for name, one in value.items())
    return [_dotted(one) for one in value] if type(value) is list else value


def _escaped(value: object) -> str:
    return value if isinstance(value, Safe) else str(value).translate(_ESCAPES)
