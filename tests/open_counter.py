"""Count how often a process opens each file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_COUNTERS: list[Counter[str]] = []  # an audit hook lasts as long as the process


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and arguments[1] is not None:  # None: an opener, within another event
        for counter in _COUNTERS:
            counter[str(arguments[0])] += 1


sys.addaudithook(_count)


@contextmanager
def counted_opens() -> Iterator[Counter[str]]:
    """Yield how often each path was opened within the block."""
    counter = Counter[str]()
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS.remove(counter)
