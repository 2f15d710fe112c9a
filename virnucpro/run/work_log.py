"""The log of a ``work``: text for people, and a line of figures for each shard that it ended.

    2026-01-01 12:00:00,000 INFO    figures {"shard": 12, "device": "cuda:0", ...}

The log is also the tag of its process (``lock``): so its name tells host and process, and whoever
reads it can tell whether they are still at work.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from virnucpro.ground.files import open_plain, parse_json
from virnucpro.ground.log import LOGGER
from virnucpro.run.lock import holder_of, is_held

_MARK = " figures "


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """The end of one shard."""

    shard: int
    device: str
    n_tokens: int
    n_failed: int  # sequences that failed
    is_lost: bool  # it has no feature file
    elapsed: float  # seconds since the devices of this process were ready

    def __post_init__(self) -> None:
        numbers = (self.shard, self.n_tokens, self.n_failed, self.elapsed)
        if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
            raise ValueError("figures are numbers")


@dataclass(frozen=True, slots=True)
class HostFigures:
    """The figures of all ``work`` of one host."""

    host: str
    n_working: int  # processes that are at it now
    n_shards: int  # shards that have a feature file
    n_failed: int  # sequences that failed
    n_lost: int  # shards that were given up, and are still to be done
    tokens_per_second: float  # of those that are at it; else the average of those that were


def note_shard(figures: ShardFigures) -> None:
    """Write the end of a shard into the log."""
    LOGGER.info("%s%s", _MARK.lstrip(), json.dumps(asdict(figures)))


def read_hosts(logs: Path) -> list[HostFigures]:
    """The figures of each host, by name, from all logs in a folder."""
    by_host: dict[str, list[tuple[bool, list[ShardFigures]]]] = {}
    for path in sorted(logs.glob("work-*.log")):
        if holder := holder_of(path):
            figures, _ = read_figures(path)
            by_host.setdefault(holder[0], []).append((is_held(path), figures))
    return [_of_host(host, logs_of_host) for host, logs_of_host in by_host.items()]


def _of_host(host: str, logs: list[tuple[bool, list[ShardFigures]]]) -> HostFigures:
    n_working = sum(is_working for is_working, _ in logs)
    ends = {end.shard: end for _, figures in logs for end in figures}  # the last word on each
    rates = [
        sum(end.n_tokens for end in figures) / max(1e-3, figures[-1].elapsed)
        for is_working, figures in logs
        if figures and (is_working or not n_working)
    ]
    return HostFigures(
        host=host,
        n_working=n_working,
        n_shards=sum(not end.is_lost for end in ends.values()),
        n_failed=sum(end.n_failed for end in ends.values()),
        n_lost=sum(end.is_lost for end in ends.values()),
        tokens_per_second=round(sum(rates) if n_working else sum(rates) / max(1, len(rates)), 1),
    )


def read_figures(path: Path, start: int = 0) -> tuple[list[ShardFigures], int]:
    """The figures in a log from a byte on, in order, and the byte behind its last whole line.

    Lines that are none of ours, or damaged, are left out.
    """
    with open_plain(path) as log:
        log.seek(start)
        content = log.read()
    *lines, rest = content.split(b"\n")
    figures = []
    for line in lines:
        _, mark, text = line.partition(_MARK.encode())
        if mark:
            with suppress(ValueError, TypeError):
                figures.append(ShardFigures(**parse_json(text)))
    return figures, start + len(content) - len(rest)
