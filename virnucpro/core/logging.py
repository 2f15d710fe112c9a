"""Configure logging once, in the parent, and make user text safe to print.

The log file gets everything. The console gets warnings and announcements. Without a dashboard, it
also gets a line of figures every ten seconds.
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


def printable(text: object) -> str:
    """Escape control characters in user text (an id, a path) and shorten it for a message.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    tail = 100  # characters shown from its end
    head = 200  # characters shown from the start of a long text
    safe = escape_markup(text)
    return safe if len(safe) <= head + tail else f"{safe[:head]}...{safe[-tail:]}"


def escape_markup(text: object) -> str:
    """Escape control characters in a text without shortening it."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_count(n: int, noun: str, several: str = "") -> str:
    """Format a number with its noun, whose irregular plural is ``several``.

    >>> format_count(1, "file"), format_count(1200, "file"), format_count(0, "match", "matches")
    ('1 file', '1,200 files', '0 matches')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {several or noun + 's'}"


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Wrap text at spaces only, so that paths and options stay intact. Indent all lines but the
    first.

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
    """Log a message that also appears on the console."""
    LOGGER.info("%s", message, extra={"is_announced": True})


def open_nonblocking(path: str, flags: int) -> int:
    """Open a log file. A pipe without a reader raises an error instead of blocking."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


class _FileHandler(logging.StreamHandler):  # type: ignore[type-arg] # from Python 3.11 on
    """Write to a log file. If writing fails, warn once and let the run continue."""

    is_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self.is_warned:
            self.is_warned = True  # set first, because the warning may fail here too
            error = sys.exc_info()[1]
            LOGGER.warning("%s cannot be written: %s", printable(self.stream.name), error)

    def close(self) -> None:
        super().close()
        self.stream.close()


@contextmanager
def log_to_handler(handler: logging.Handler, level: int = logging.INFO) -> Iterator[None]:
    """Log to ``handler`` within the block. A handler without a format gets the default format."""
    if handler.formatter is None:
        handler.setFormatter(logging.Formatter(FORMAT))
    original_level = LOGGER.level
    original_propagate = LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(original_level)
        LOGGER.propagate = original_propagate
        with suppress(OSError):  # a full disk is reported by the code that writes to it
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
            name = (
                "" if hasattr(error, "hint") else f"{type(error).__name__} "
            )  # not a VirNucPro error
            ending = f"the run ended: {name}{error}".rstrip()
            handler.handle(logging.makeLogRecord({"msg": ending, "levelname": "ERROR"}))
            raise


def format_bytes(n_bytes: int) -> str:
    """Format a byte count for people."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
