"""The journal of a run: what each device and each machine did, and when.

``machine.json`` has the work of each device over time, and what was lost, for each start of a run.
Only the report reads it: no result depends on it, and a run goes on without it.

The log of a ``work`` has text for people, and a line of figures for each shard that it ended:

    2026-01-01 12:00:00,000 INFO    figures {"shard": 12, "device": "cuda:0", ...}

It is also the tag of its process (``lock``): its name has host and process, and its lock shows
whether that process still works. The seconds that are left of a run follow from the rate of its
latest work: ``seconds_left``.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from virnucpro.ground.errors import VirnucproError
from virnucpro.ground.events import (
    BatchDone,
    BudgetReduced,
    Event,
    ShardDone,
    ShardFailed,
    WorkerLost,
    WorkerReady,
)
from virnucpro.ground.files import open_plain, parse_json, read_json
from virnucpro.ground.log import LOGGER, escaped
from virnucpro.ground.tree import Tree
from virnucpro.run.lock import holder_of, is_held

_FIRST_WIDTH = 1.0  # seconds of a bin at first
_MOST_BINS = 240  # then neighbours are joined, and bins are twice as wide
_MOST_STARTS = 20  # the latest ones are kept
_MOST_INCIDENTS = 100  # that are told of a start; all are counted
_LONGEST_TEXT = 300  # letters of a reason
_MOST = 10**15  # no count, and no number of bytes or seconds, is larger
_MARK = " figures "
_FEWEST_STEPS = 2  # that a rate is taken of, if there are so many
_STALLED = 3  # times the longest step


@dataclass(slots=True)
class _DeviceSeries:
    """The work of one device in bins of time."""

    description: str = ""
    n_shards: int = 0
    memory_total: int = 0  # bytes
    tokens: list[int] = field(default_factory=list)  # embedded in each bin
    memory: list[int] = field(default_factory=list)  # largest number of bytes used in each bin

    def add(self, place: int, n_tokens: int, memory: int) -> None:
        missing = place + 1 - len(self.tokens)
        self.tokens += [0] * missing
        self.memory += [0] * missing
        self.tokens[place] += n_tokens
        self.memory[place] = max(self.memory[place], memory)

    def join_bins(self) -> None:
        """Make one bin of each two neighbours."""
        self.tokens = [sum(self.tokens[i : i + 2]) for i in range(0, len(self.tokens), 2)]
        self.memory = [max(self.memory[i : i + 2]) for i in range(0, len(self.memory), 2)]


@dataclass(slots=True)
class Start:
    """One start of a run, from the first worker on; it takes the events of the executor."""

    clock: Callable[[], float] = time.monotonic  # seconds
    seconds_per_bin: float = _FIRST_WIDTH
    seconds: float = 0.0  # until the last event
    devices: dict[str, _DeviceSeries] = field(default_factory=dict)
    n_losses: int = 0  # workers that were lost, replaced or not
    n_reductions: int = 0  # batches that did not fit into the memory of a device
    n_failed_shards: int = 0
    # the first ones: seconds since the start, device, what happened
    incidents: list[tuple[float, str, str]] = field(default_factory=list)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def take(self, event: Event) -> None:
        self.seconds = round(self.clock() - self.began, 3)
        match event:
            case WorkerReady(worker, description, memory, warnings):
                device = self._device(worker)
                device.description, device.memory_total = description, memory.total
                device.add(self._place(), 0, memory.used)
                for warning in warnings:
                    self._tell(worker, warning)
            case BatchDone(worker=worker, n_tokens=n_tokens, memory=memory):
                self._device(worker).add(self._place(), n_tokens, memory.used)
            case ShardDone(worker=worker):
                self._device(worker).n_shards += 1
            case WorkerLost(worker=worker, reason=reason, is_final=is_final):
                self.n_losses += 1
                self._tell(worker, f"lost: {reason}; {'given up' if is_final else 'replaced'}")
            case BudgetReduced(worker, tokens):
                self.n_reductions += 1
                self._tell(worker, f"out of memory: batches of {tokens:,} tokens from then on")
            case ShardFailed(worker=worker, shard=shard, reason=reason):
                self.n_failed_shards += 1
                self._tell(worker, f"shard {shard.name} failed: {reason}")

    def _device(self, worker: str) -> _DeviceSeries:
        return self.devices.setdefault(worker, _DeviceSeries())

    def _place(self) -> int:
        """The bin of this moment."""
        while self.seconds >= _MOST_BINS * self.seconds_per_bin:
            self.seconds_per_bin *= 2
            for device in self.devices.values():
                device.join_bins()
        return int(self.seconds / self.seconds_per_bin)

    def _tell(self, device: str, text: str) -> None:
        if len(self.incidents) < _MOST_INCIDENTS:
            self.incidents.append((self.seconds, device, escaped(text)[:_LONGEST_TEXT]))

    @contextmanager
    def kept(self, path: Path) -> Iterator[None]:
        """Write this start after the earlier ones of a file, however the block ends.

        That it cannot be written is a warning: no result depends on it.
        """
        try:
            yield
        finally:
            starts = [*self.read_all(path), self][-_MOST_STARTS:]
            try:
                content = json.dumps({"starts": [start._facts for start in starts]})
                Tree(path.parent).write_whole(path, content + "\n")
            except VirnucproError as error:
                LOGGER.warning("the work of the devices over time is not kept: %s", error)

    @property
    def _facts(self) -> dict[str, Any]:
        facts = asdict(self)
        return {name: facts[name] for name in facts if name not in ("clock", "began")}

    @staticmethod
    def read_all(path: Path) -> list[Start]:
        """The starts in a file; none if there is no such file, or it is damaged."""
        try:
            return [_from_json(start) for start in read_json(path)["starts"]]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return []


def _from_json(stored: dict[str, Any]) -> Start:
    """
    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is not as it was written.
    """
    devices = {
        str(name): _DeviceSeries(
            description=str(device["description"]),
            n_shards=_count(device["n_shards"]),
            memory_total=_count(device["memory_total"]),
            tokens=[_count(n) for n in device["tokens"][:_MOST_BINS]],
            memory=[_count(n) for n in device["memory"][:_MOST_BINS]],
        )
        for name, device in stored["devices"].items()
    }
    if any(len(series.tokens) != len(series.memory) for series in devices.values()):
        raise ValueError("a device has tokens in other bins than memory")
    seconds_per_bin = _amount(stored["seconds_per_bin"])
    if not seconds_per_bin > 0:
        raise ValueError(f"bins of {seconds_per_bin} seconds")
    return Start(
        seconds_per_bin=seconds_per_bin,
        seconds=_amount(stored["seconds"]),
        devices=devices,
        n_losses=_count(stored["n_losses"]),
        n_reductions=_count(stored["n_reductions"]),
        n_failed_shards=_count(stored["n_failed_shards"]),
        incidents=[
            (_amount(seconds), str(device), str(text))
            for seconds, device, text in stored["incidents"][:_MOST_INCIDENTS]
        ],
    )


def _amount(stored: float) -> float:
    """
    Raises:
        ValueError, TypeError: it is none: JSON holds infinities, NaN and integers of any size too.
    """
    if not 0 <= stored <= _MOST:
        raise ValueError(f"{stored} is no amount")
    return float(stored)


def _count(stored: float) -> int:
    return int(_amount(stored))


# The logs of machines


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

    def note(self) -> None:
        """Write the end of the shard into the log."""
        LOGGER.info("%s%s", _MARK.lstrip(), json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path, start: int = 0) -> tuple[list[ShardFigures], int]:
        """The figures in a log from a byte on, in order, and the byte after its last whole line.

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
                    figures.append(cls(**parse_json(text)))
        return figures, start + len(content) - len(rest)


Point: TypeAlias = tuple[float, float]  # a time in seconds, and the work that was done until then


def rate_of(points: Sequence[Point]) -> float:
    """The latest work per second; 0 if it is unknown. The points rise in both.

    Only the last third of the time counts, and a few steps at least: the first batches are slow,
    and some workers begin later than others.
    """
    first = _first_of_late(points)
    (begin, before), (end, done) = (points[first], points[-1]) if points else ((0, 0), (0, 0))
    return (done - before) / (end - begin) if end > begin else 0.0


def seconds_left(points: Sequence[Point], pending: float, now: float) -> float | None:
    """The seconds that the pending work will take; None if they are unknown.

    Work shows when a step ends: what passed since then counts as spent on the next step, unless
    that takes far longer than the steps before.
    """
    rate = rate_of(points)
    if not rate:
        return None
    late = points[_first_of_late(points) :]
    waited = now - late[-1][0]
    longest = max(end - begin for (begin, _), (end, _) in pairwise(late))
    if waited > _STALLED * longest:
        return pending * (now - late[0][0]) / (late[-1][1] - late[0][1])
    return max(0.0, pending / rate - waited)


def _first_of_late(points: Sequence[Point]) -> int:
    """The place of the point from which on work counts as late."""
    if len(points) < 2:
        return 0
    begin, end = points[0][0], points[-1][0]
    third = bisect_left(points, (end - (end - begin) / 3, -inf))
    return max(0, min(third, len(points) - 1 - _FEWEST_STEPS))


@dataclass(frozen=True, slots=True)
class HostFigures:
    """The figures of all ``work`` of one host."""

    host: str
    n_working: int  # processes that are at it now
    n_shards: int  # shards that have a feature file
    n_failed: int  # sequences that failed
    n_lost: int  # shards that were given up, and are still to be done
    tokens_per_second: float  # of those that are at it; else the average of those that were


def read_hosts(logs: Path) -> list[HostFigures]:
    """The figures of each host, by name, from all logs in a folder."""
    by_host: dict[str, list[tuple[bool, list[ShardFigures]]]] = {}
    for path in sorted(logs.glob("work-*.log")):
        if holder := holder_of(path):
            figures, _ = ShardFigures.read(path)
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
