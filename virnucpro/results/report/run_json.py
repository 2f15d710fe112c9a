"""Read a run's facts from its folder: all files except its tables.

A fact that is missing, or has an unexpected type, is omitted.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import InputMissingError
from virnucpro.core.json_checksum import read_facts
from virnucpro.core.logging import escape_markup, printable
from virnucpro.core.option_text import with_options

if TYPE_CHECKING:
    pass

_MESSAGE = re.compile(r"\S+ \S+ (INFO|WARNING|ERROR) +(.*)")
# First log line of a run, and of a command that adds regions to its tables.
_START = re.compile(r"virnucpro \S+: ")
_REGIONS_START = re.compile(r"virnucpro \S+ regions: ")
Key: TypeAlias = tuple[str, str]  # file and id of a record


@dataclass(frozen=True, slots=True, eq=False)
class RunJson:
    """Content from ``run.json`` or a similar file. Any value may be missing or wrong."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunJson:
        """Read facts about a run or a training from its JSON file.

        Raises:
            InputMissingError: the file does not exist.
            ResumeError: the file is damaged.
        """
        if not path.is_file():
            raise InputMissingError(
                f"{printable(path.parent)} contains no run",
                hint=with_options("give the {output_dir} of a run"),
            )
        return cls(read_facts(path))

    def _value_at(self, names: Sequence[str]) -> object:
        """Return the value at a name path."""
        value: object = self.content
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def section(self, *names: str) -> Mapping[str, Any]:
        """Return the object at a name path, empty if missing."""
        value = self._value_at(names)
        return value if isinstance(value, Mapping) else {}

    def text(self, *names: str) -> str:
        value = self._value_at(names)
        return escape_markup(value) if isinstance(value, str) else ""

    def number(self, *names: str) -> int:
        return _count(self._value_at(names))

    def decimal(self, *names: str) -> float | None:
        """Return the usable number at a name path, or None if it is missing."""
        value = self._value_at(names)
        return float(value) if is_number(value) else None

    def sequence(self, *names: str) -> Sequence[Any]:
        value = self._value_at(names)
        return value if isinstance(value, list) else ()

    def iter_section(self, *names: str) -> list[RunJson]:
        """Return the objects in a sequence."""
        return [RunJson(item) for item in self.sequence(*names) if isinstance(item, Mapping)]

    @property
    def inputs(self) -> list[RunJson]:
        """The input files, and the files that could not be read."""
        return [*self.iter_section("inputs"), *self.iter_section("refused")]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage, by name."""
        return {
            escape_markup(name): float(value)
            for name, value in self.section("counts", "seconds").items()
            if is_number(value)
        }

    @property
    def cut(self) -> list[tuple[float, float]]:
        """Length and threshold, at some lengths in ascending order."""
        pairs = [
            (float(pair[0]), float(pair[1]))
            for pair in self.sequence("counts", "cut_scores")
            if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
        ]
        return sorted((n, score) for n, score in pairs if n >= 1 and 0 <= score <= 1)

    @property
    def n_counted(self) -> int | None:
        """The record count when the run wrote its tables."""
        numbers = self.section("counts", "statuses").values()
        return sum(map(_count, numbers)) if numbers else None


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a usable number. JSON allows infinities, NaN and integers of any size."""
    most = 10**15  # largest number on the page
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -most <= value <= most


def _count(value: object) -> int:
    return value if is_number(value) and isinstance(value, int) else 0


def read_complaints(log: Path) -> Counter[str]:
    """Count warnings and errors in the log, if there is one.

    They come from the run's last start, and from the last region search after it.
    """
    max_log_bytes = 1 << 20  # bytes, from its end
    try:
        with open_regular_file(log) as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - max_log_bytes))
            text = handle.read().decode("utf-8", "backslashreplace")
    except OSError:
        return Counter()
    run_complaints: Counter[str] = Counter()
    region_complaints: Counter[str] = Counter()
    current = run_complaints
    for line in text.splitlines():
        match = _MESSAGE.fullmatch(line)
        if match is None:
            continue
        level, message = match.groups()
        if level != "INFO":
            current[printable(message)] += 1
        elif _START.match(message):
            run_complaints.clear()
            region_complaints.clear()
            current = run_complaints
        elif _REGIONS_START.match(message):
            region_complaints.clear()
            current = region_complaints
    return run_complaints + region_complaints
