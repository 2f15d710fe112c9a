"""Record what each machine in a run did and when, and estimate the time left.

The log of a ``work`` process contains text for people, and a line of figures per finished shard:

    2026-01-01 12:00:00,000 INFO    figures {"shard": 12, "device": "cuda:0", ...}

The log is also its process's tag (see ``run_lock``). Its name contains host and process, and its
lock shows whether the process still runs. ``seconds_left`` uses the latest rate of work.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TypeAlias

from virnucpro.core.atomic_io import open_regular_file, parse_json
from virnucpro.core.logging import LOGGER
from virnucpro.store.run_lock import is_held, tags_in

_MARK = " figures "
_FEWEST_STEPS = 2  # minimum steps for a rate, if available
_STALLED = 3  # multiple of the longest step after which work counts as stalled


@dataclass(frozen=True, slots=True)
class ProgressLog:
    """The end of one shard."""

    shard: int
    device: str
    n_tokens: int
    n_failed: int  # sequences that failed
    is_lost: bool  # the shard has no feature file
    elapsed: float  # seconds since the devices of this process were ready

    def __post_init__(self) -> None:
        numbers = (self.shard, self.n_tokens, self.n_failed, self.elapsed)
        if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
            raise ValueError("figures are numbers")

    def record(self) -> None:
        """Write the figures to the log."""
        LOGGER.info("%s%s", _MARK.lstrip(), json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path, start: int = 0) -> tuple[list[ProgressLog], int]:
        """Read figures from byte ``start`` of a log on. Other lines and corrupt ones are skipped.

        Returns:
            Figures in order, and the byte after the last complete line.
        """
        with open_regular_file(path) as log:
            log.seek(start)
            content = log.read()
        *lines, partial_line = content.split(b"\n")
        figures = []
        for line in lines:
            _, mark, text = line.partition(_MARK.encode())
            if mark:
                with suppress(ValueError, TypeError):
                    figures.append(cls(**parse_json(text)))
        return figures, start + len(content) - len(partial_line)


Point: TypeAlias = tuple[float, float]  # time in seconds, work done by then


def estimate_rate(points: Sequence[Point]) -> float:
    """Return the latest work per second, or 0 if unknown. Points ascend in time and work.

    Only the last third of the time counts, but at least a few steps. The first batches are slow,
    and some workers begin later than others.
    """
    if not points:
        return 0.0
    begin, done_before = points[_first_of_late(points)]
    end, done = points[-1]
    return (done - done_before) / (end - begin) if end > begin else 0.0


def seconds_left(points: Sequence[Point], pending: float, now: float) -> float | None:
    """Estimate the seconds that the pending work will take, or return None if unknown.

    Progress is seen when a step ends. The time since then counts towards the next step, unless it
    is far longer than earlier steps took.
    """
    rate = estimate_rate(points)
    if not rate:
        return None
    late = points[_first_of_late(points) :]
    waited = now - late[-1][0]
    longest = max(end - begin for (begin, _), (end, _) in pairwise(late))
    if waited > _STALLED * longest:
        return pending * (now - late[0][0]) / (late[-1][1] - late[0][1])
    return max(0.0, pending / rate - waited)


def _first_of_late(points: Sequence[Point]) -> int:
    """Return the index of the first point that counts as recent work."""
    if len(points) < 2:
        return 0
    begin = points[0][0]
    end = points[-1][0]
    third = bisect_left(points, (end - (end - begin) / 3, -inf))
    return max(0, min(third, len(points) - 1 - _FEWEST_STEPS))


@dataclass(frozen=True, slots=True)
class HostProgress:
    """The figures of all ``work`` processes on one host."""

    host: str
    n_working: int  # processes working now
    n_shards: int  # shards that have a feature file
    n_failed: int  # sequences that failed
    n_lost: int  # shards that failed and are not done yet
    tokens_per_second: float  # sum over the running processes, or without any, the mean of all


def read_hosts(logs: Path) -> list[HostProgress]:
    """Read the figures of each host, by name, from all logs in a folder."""
    logs_by_host: dict[str, list[tuple[bool, list[ProgressLog]]]] = {}
    for path, (host, _) in tags_in(logs).items():
        figures, _ = ProgressLog.read(path)
        logs_by_host.setdefault(host, []).append((is_held(path), figures))
    return [_parse_host(host, logs_of_host) for host, logs_of_host in logs_by_host.items()]


def _parse_host(host: str, logs: list[tuple[bool, list[ProgressLog]]]) -> HostProgress:
    n_working = sum(is_working for is_working, _ in logs)
    ends: dict[int, ProgressLog] = {}  # the latest entry of each shard
    rates = []
    for is_working, figures in logs:
        ends.update({end.shard: end for end in figures})
        if figures and (is_working or not n_working):
            n_tokens = sum(end.n_tokens for end in figures)
            rates.append(n_tokens / max(1e-3, figures[-1].elapsed))
    return HostProgress(
        host=host,
        n_working=n_working,
        n_shards=sum(not end.is_lost for end in ends.values()),
        n_failed=sum(end.n_failed for end in ends.values()),
        n_lost=sum(end.is_lost for end in ends.values()),
        tokens_per_second=round(sum(rates) if n_working else sum(rates) / max(1, len(rates)), 1),
    )
