"""Render a page: one HTML file that needs no other file and no network.

The templates are files in this package. A value is never part of a template, and every value is
escaped. Scripts and styles come from this package, and the page lists their hashes, so that a
browser runs nothing else. The data are columns in JSON, deflated, in a block that is not a script.
Equal content gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro._version import __version__
from virnucpro.core.logging import format_count, printable
from virnucpro.results.report.citation import all_works

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_BYTES = 3_000_000
_ASSETS = Path(__file__).with_name("assets")


def render(template: str, content: Mapping[str, object], data: object) -> bytes:
    """Render a page that cites all works, with ``data`` for its script."""
    return render_packed(template, {"works": all_works(), **content}, compress_data(data))


def render_packed(template: str, content: Mapping[str, object], packed: str) -> bytes:
    """Render a page with data from ``compress_data``, and return its bytes.

    Raises:
        jinja2.UndefinedError: the template names a value that is not in the content.
    """
    from markupsafe import Markup

    script = _asset("page.js")
    style = _asset("page.css")
    page = _templates().get_template(template)
    text = page.render(
        {
            **content,
            "version": __version__,
            "packed": packed,
            "script": Markup(script),
            "style": Markup(style),
            "policy": _policy(script, style),
        }
    )
    return text.encode("utf-8", "backslashreplace")


@cache
def _templates() -> Environment:
    """Return this package's templates.

    Jinja is imported here because a program that writes no page does not need it.
    """
    functions: dict[str, Callable[..., object]] = {
        "count": "{:,}".format,
        "counted": format_count,
        "percent": _percent,
        "printable": printable,
        "seconds": _seconds,
    }
    from virnucpro.results.report.templates import load_templates

    return load_templates(_ASSETS, functions)


def _asset(name: str) -> str:
    """Return a file's text for the pages."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def compress_data(data: object) -> str:
    """Pack data as deflated JSON in base64."""
    level = 4  # for deflate; level 6 takes three times as long and saves 4 %
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), level)).decode("ascii")


def _policy(script: str, style: str) -> str:
    """Return the content policy: the page loads nothing, and runs only our script and style."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _percent(share: float) -> str:
    """Format a share in percent.

    >>> _percent(0.5), _percent(0.00042), _percent(0.9999)
    ('50 %', '0.04 %', '99.99 %')
    """
    if share in (0, 1):
        digits = 0
    elif share < 0.01 or share > 0.99:
        digits = 2
    else:
        digits = 1
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def _seconds(seconds: float) -> str:
    """Format a duration.

    >>> _seconds(1.25), _seconds(75), _seconds(7_500)
    ('1.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
