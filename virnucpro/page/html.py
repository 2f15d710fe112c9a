"""The page itself: one HTML file with all that it needs, without a network.

The templates escape every value. Scripts and styles are those of this package, and the page names
their hashes, so that a browser runs nothing else. Data travel as columns in JSON, deflated, in a
block that is no script. The same content gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping

from virnucpro import __version__
from virnucpro.ground.log import counted, printable
from virnucpro.page.citation import WORKS, Work, as_text
from virnucpro.page.template import Safe, asset, fill

MOST_BYTES = 3_000_000
_LEVEL = 6  # of deflate


def render(template: str, content: Mapping[str, object], packed: str) -> bytes:
    """The bytes of a page with packed data."""
    script, style = asset("page.js"), asset("page.css")
    words = {
        "references": references_to(WORKS),
        **content,
        "version": __version__,
        "packed": packed,
        "script": Safe(script),
        "style": Safe(style),
        "policy": _policy(script, style),
    }
    return fill(template, words, _FILTERS).encode("utf-8", "backslashreplace")


def references_to(works: Iterable[Work]) -> list[tuple[str, str]]:
    """The role and the citation of each work."""
    return [(work.role, as_text(work)) for work in works]


def pack(data: object) -> str:
    """Data as JSON, deflated, in letters of base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), _LEVEL)).decode("ascii")


def _policy(script: str, style: str) -> str:
    """Nothing may be loaded, and of what is in the page only our own script and style count."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _count(value: int) -> str:
    return f"{value:,}"


def _percent(share: float) -> str:
    """
    >>> _percent(0.5), _percent(0.00042), _percent(0.9999)
    ('50 %', '0.04 %', '99.99 %')
    """
    digits = 0 if share in (0, 1) else 2 if share < 0.01 or share > 0.99 else 1
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def _seconds(seconds: float) -> str:
    """
    >>> _seconds(1.25), _seconds(75), _seconds(7_500)
    ('1.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


_FILTERS: Mapping[str, Callable[..., object]] = {
    "count": _count,
    "counted": counted,
    "percent": _percent,
    "printable": printable,
    "seconds": _seconds,
}
