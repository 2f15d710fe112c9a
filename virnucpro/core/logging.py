"""Configure logging, once, in the parent; make user text safe to print.

The log file gets everything. The console gets warnings and announcements, and without a
dashboard a line of figures every ten seconds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import fill

LOGGER = logging.getLogger("virnucpro")
FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_HEAD, _TAIL = 200, 100  # letters shown of a long text


def printable(text: object) -> str:
    """Prepare user text (an id, a path) for a message: escape control characters, shorten.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    safe = escape_markup(text)
    return safe if len(safe) <= _HEAD + _TAIL else f"{safe[:_HEAD]}...{safe[-_TAIL:]}"


def escape_markup(text: object) -> str:
    """Escape the control characters of a text, without shortening it."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_count(n: int, noun: str, several: str = "") -> str:
    """A number and its noun; ``several`` is an irregular plural.

    >>> counted(1, "file"), counted(1200, "file"), counted(0, "match", "matches")
    ('1 file', '1,200 files', '0 matches')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {several or noun + 's'}"


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Break lines at spaces only, so that paths and options stay whole; ``indent`` later lines.

    >>> wrapped("read /a/long/path and more", 12, "  ")
    'read\\n  /a/long/path\\n  and more'
    """
    lines = (
        fill(
            line,
            max(width, len(indent) + 1),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        for line in text.split("\n")
    )
    return "\n".join(lines)


def announce(message: str) -> None:
    """Log a fact that the user should see on the console too."""
    LOGGER.info("%s", message, extra={"is_announced": True})


def open_nonblocking(path: str, flags: int) -> int:
    """Open a log; a pipe without a reader raises an error instead of blocking."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


class _FileHandler(logging.StreamHandler):  # type: ignore[type-arg] # from Python 3.11 on
    """Write to a log file. If that fails, warn once, and the run goes on."""

    is_told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self.is_told:
            self.is_told = True  # first: the warning itself comes here too
            error = sys.exc_info()[1]
            LOGGER.warning("%s cannot be written: %s", printable(self.stream.name), error)

    def close(self) -> None:
        super().close()
        self.stream.close()


@contextmanager
def log_to_handler(handler: logging.Handler, level: int = logging.INFO) -> Iterator[None]:
    """Log to ``handler`` within the block; a handler without a format gets ours."""
    if handler.formatter is None:
        handler.setFormatter(logging.Formatter(FORMAT))
    before = LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]
        with suppress(OSError):  # whatever needs the full disk reports it
            handler.close()


@contextmanager
def log_to_file(path: Path, opener: Callable[[str, int], int] = open_nonblocking) -> Iterator[None]:
    """Append the log to a file within the block."""
    file = open(  # noqa: SIM115 - closed below
        path.absolute(), "a", encoding="utf-8", errors="backslashreplace", opener=opener
    )
    os.set_blocking(file.fileno(), True)
    handler = _FileHandler(file)
    with log_to_handler(handler, LOGGER.level or logging.INFO):
        try:
            yield
        except BaseException as error:
            name = "" if hasattr(error, "hint") else f"{type(error).__name__} "  # not of ours
            ending = f"the run ended: {name}{error}".rstrip()
            handler.handle(logging.makeLogRecord({"msg": ending, "levelname": "ERROR"}))
            raise
