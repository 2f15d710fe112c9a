"""Logging, configured once, in the parent; and user text made safe to print.

The log file gets everything; the console warnings, and what is announced once. Without a
dashboard it also gets the line of figures that comes every ten seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOGGER = logging.getLogger("virnucpro")
_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_HEAD, _TAIL = 200, 100  # letters shown of a long text


def printable(text: object) -> str:
    """Text of a user (an id, a path) for a message: no control characters, not too long.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    safe = escaped(text)
    return safe if len(safe) <= _HEAD + _TAIL else f"{safe[:_HEAD]}...{safe[-_TAIL:]}"


def escaped(text: object) -> str:
    """All of a text, without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def announce(message: str) -> None:
    """Log a fact that the user should see on the console too."""
    LOGGER.info("%s", message, extra={"is_announced": True})


def log_figures(line: str) -> None:
    """Log the figures of the moment."""
    LOGGER.info("%s", line, extra={"is_figures": True})


class ConsoleFilter(logging.Filter):
    """Lets warnings and announcements pass, and figures where no dashboard draws them."""

    def __init__(self, *, with_figures: bool) -> None:
        super().__init__()
        self._with_figures = with_figures

    def filter(self, record: logging.LogRecord) -> bool:
        return (
            record.levelno >= logging.WARNING
            or hasattr(record, "is_announced")
            or (self._with_figures and hasattr(record, "is_figures"))
        )


class _QuietFileHandler(logging.FileHandler):
    """A log that cannot be written must not stop a run, nor fill the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


@contextmanager
def logging_to(handler: logging.Handler, level: int = logging.INFO) -> Iterator[None]:
    """Send the log to ``handler`` for the time of the block, in its own format if it has one."""
    if handler.formatter is None:
        handler.setFormatter(logging.Formatter(_FORMAT))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        with suppress(OSError):  # a full disk is told once, by what needs it
            handler.close()


@contextmanager
def logging_to_file(path: Path) -> Iterator[None]:
    """Append the log to a file for the time of the block."""
    handler = _QuietFileHandler(path, encoding="utf-8", errors="backslashreplace")
    with logging_to(handler, LOGGER.level or logging.INFO):
        try:
            yield
        except BaseException as error:
            ending = f"the run ended: {type(error).__name__} {error}".rstrip()
            handler.handle(logging.makeLogRecord({"msg": ending, "levelname": "ERROR"}))
            raise
