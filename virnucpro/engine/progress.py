"""The progress of a run: one state, and one reducer of the run's events.

Dashboard, log lines, summary, ``work``, ``status`` and ``machine.json`` are views of this state.
Other processes rebuild it from the log of this one (see ``event_log``). Every figure is a count, so
the devices add up to the total. The time left covers the complete run or is
unknown: it never covers only one of several stages.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from virnucpro.core.events import (
    STAGES,
    BatchDone,
    BatchSizeReduced,
    EmbeddingStarted,
    Memory,
    Progress,
    RunEvent,
    ShardDone,
    ShardFailed,
    ShardReturned,
    ShardsPlanned,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard
from virnucpro.engine.device_timeline import INITIAL_BIN_SECONDS, DeviceSeries, DeviceTimeline
from virnucpro.models.token_estimate import estimate_tokens
from virnucpro.store.plan import count_done

_FIRST = Progress("checking model and devices", 0, 0, "")

# The time left


class Point(NamedTuple):
    """The work done by a time."""

    seconds: float
    done: float


def add_sample(points: Sequence[Point], seconds: float, amount: float) -> list[Point]:
    """Return the points with a new one. If there are too many, every second point is dropped."""
    max_points = 2_000
    kept_points = points if len(points) < max_points else points[::2]
    return [*kept_points, Point(seconds, amount)]


def estimate_rate(points: Sequence[Point]) -> float:
    """Return the latest work per second, or 0 if unknown. Points ascend in time and work.

    Only the last third of the time counts, but at least a few steps. The first batches are slow,
    and some workers begin later than others.
    """
    if not points:
        return 0.0
    first = points[_first_recent(points)]
    last = points[-1]
    seconds = last.seconds - first.seconds
    return (last.done - first.done) / seconds if seconds > 0 else 0.0


def seconds_left(points: Sequence[Point], pending: float, now: float) -> float | None:
    """Estimate the seconds that the pending work will take, or return None if unknown.

    Progress is seen when a step ends. The time since then counts towards the next step, unless it
    is far longer than earlier steps took.
    """
    stalled = 3  # multiple of the longest step after which work counts as stalled
    rate = estimate_rate(points)
    if not rate:
        return None
    late = points[_first_recent(points) :]
    waited = now - late[-1].seconds
    longest = max(end.seconds - begin.seconds for begin, end in pairwise(late))
    if waited > stalled * longest:
        return pending * (now - late[0].seconds) / (late[-1].done - late[0].done)
    return max(0.0, pending / rate - waited)


def _first_recent(points: Sequence[Point]) -> int:
    """Return the index of the first point that counts as recent work."""
    min_steps = 2  # minimum steps for a rate, if available
    if len(points) < 2:
        return 0
    begin = points[0].seconds
    end = points[-1].seconds
    third = bisect_left(points, end - (end - begin) / 3, key=attrgetter("seconds"))
    return max(0, min(third, len(points) - 1 - min_steps))


# The state


@dataclass(slots=True, eq=False)
class DeviceProgress:
    """The work of one worker and its replacements."""

    since: float  # clock
    series: DeviceSeries = field(default_factory=DeviceSeries)
    n_tokens: int = 0
    memory: Memory | None = None  # None: no worker is ready
    shard: Shard | None = None  # the shard that is being embedded
    is_given_up: bool = False

    @property
    def n_shards(self) -> int:
        return self.series.n_shards


@dataclass(slots=True, eq=False)
class EmbeddingProgress:
    """The work of the workers on the shards that were pending at its start, or planned since.

    One thread updates it while another draws, so ``devices`` and ``in_work`` are replaced and never
    changed in place. A third thread may add shards, which changes no field that ``update`` sets.
    """

    started: float = 0.0  # clock
    pending: set[int] = field(default_factory=set)  # shard indices
    n_before: int = 0  # shards that an earlier start finished
    n_shards: int = 0  # all planned shards, with those of earlier starts
    n_tokens: int = 0  # tokens to embed in them
    planned_share: float = 1.0  # of the input
    encoders: tuple[EncoderSpec, ...] = ()
    files: tuple[tuple[tuple[int, int], ...], ...] = ()  # see ``EmbeddingStarted``
    ready: float | None = None  # clock when the first worker was ready
    seconds: float = 0.0  # from the start to the last event
    seconds_per_bin: float = INITIAL_BIN_SECONDS
    devices: dict[str, DeviceProgress] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)  # a description of each
    in_work: dict[int, int] = field(default_factory=dict)  # shard index -> tokens embedded so far
    done: dict[int, int] = field(default_factory=dict)  # shard index -> failed sequences
    lost: set[int] = field(default_factory=set)  # shards that have no feature file
    n_failed: int = 0  # failed sequences, with those of lost shards
    n_settled_tokens: int = 0  # tokens of finished and failed shards
    n_cached: int = 0  # vectors read from a cache
    n_cached_tokens: int = 0
    n_losses: int = 0  # lost workers, replaced or not
    n_reductions: int = 0  # batches that did not fit into device memory
    lost_devices: list[str] = field(default_factory=list)  # a line for each

    @classmethod
    def from_event(cls, event: EmbeddingStarted, now: float) -> EmbeddingProgress:
        progress = cls(started=now, encoders=event.encoders)
        progress.add_shards(event)
        return progress

    def add_shards(self, event: EmbeddingStarted | ShardsPlanned) -> None:
        """Count shards that were planned."""
        self.pending.update(shard.index for shard in event.pending)
        self.n_before += event.n_done_before
        self.n_shards += event.n_done_before + len(event.pending)
        self.n_tokens += sum(map(self._shard_tokens, event.pending))
        self.files = event.files
        self.planned_share = event.planned_share

    def update(self, event: WorkerEvent, now: float) -> None:
        """Count an event of a worker."""
        self.seconds = round(now - self.started, 3)
        match event:
            case WorkerReady(worker=worker, description=description, memory=memory):
                if self.ready is None:
                    self.ready = now
                self.workers.append(description)
                device = self._device(worker, now)
                device.series.description = description
                self._add_work(device, 0, memory)
            case BatchDone(worker=worker, shard=shard, n_tokens=n_tokens, memory=memory):
                device = self._device(worker, now)
                device.shard = shard
                self._add_work(device, n_tokens, memory)
                n_before = self.in_work.get(shard.index, 0)
                self.in_work = {**self.in_work, shard.index: n_before + n_tokens}
            case BatchSizeReduced():
                self.n_reductions += 1
            case WorkerLost():
                self._lose_worker(event, self._device(event.worker, now))
            case ShardReturned(shard=shard):
                self._drop_work(shard)
            case ShardDone(worker=worker, shard=shard, n_failed=n_failed):
                self._device(worker, now).series.n_shards += 1
                self.done[shard.index] = n_failed
                self.n_cached += event.n_cached
                self.n_cached_tokens += event.n_cached_tokens
                self._settle(shard, n_failed)
            case ShardFailed(shard=shard, refusal=refusal):
                self.lost.add(shard.index)
                if refusal is None:  # otherwise the error ends the run
                    self._settle(shard, shard.n_embedded)

    def _lose_worker(self, event: WorkerLost, device: DeviceProgress) -> None:
        self.n_losses += 1
        if event.lost_device:
            self.lost_devices.append(event.lost_device)
        device.memory = None
        device.shard = None
        device.is_given_up = event.is_final
        if event.shard is not None:
            self._drop_work(event.shard)

    def _device(self, worker: str, now: float) -> DeviceProgress:
        if worker not in self.devices:
            self.devices = {**self.devices, worker: DeviceProgress(now)}
        return self.devices[worker]

    def _add_work(self, device: DeviceProgress, n_tokens: int, memory: Memory) -> None:
        while self.seconds >= DeviceSeries.max_bins * self.seconds_per_bin:
            self.seconds_per_bin *= 2
            for other in self.devices.values():
                other.series.join_bins()
        device.series.add(int(self.seconds / self.seconds_per_bin), n_tokens, memory.used)
        device.n_tokens += n_tokens
        device.memory = memory

    def _drop_work(self, shard: Shard) -> None:
        self.in_work = {index: n for index, n in self.in_work.items() if index != shard.index}

    def _settle(self, shard: Shard, n_failed: int) -> None:
        self._drop_work(shard)
        self.pending.discard(shard.index)
        self.n_failed += n_failed
        self.n_settled_tokens += self._shard_tokens(shard)

    def _shard_tokens(self, shard: Shard) -> int:
        return estimate_tokens(self.encoders, shard.n_embedded, shard.n_residues)

    @property
    def n_done(self) -> int:
        """The number of finished and failed shards."""
        return self.n_shards - len(self.pending)

    @property
    def n_files_done(self) -> int:
        return count_done(self.files, sorted(self.pending))

    @property
    def n_tokens_done(self) -> int:
        return min(self.n_tokens, self.n_settled_tokens + sum(self.in_work.values()))

    @property
    def n_tokens_expected(self) -> float:
        """The tokens to embed in the complete input, estimated from the planned share."""
        return self.n_tokens / self.planned_share if self.planned_share else 0.0

    @property
    def n_tokens_embedded(self) -> int:
        """The tokens of all batches, with those of batches that were repeated."""
        return sum(device.n_tokens for device in self.devices.values())

    @property
    def tokens_per_second(self) -> float:
        """The mean speed of all devices, from the first ready worker to the last event."""
        ready = self.started if self.ready is None else self.ready
        return self.n_tokens_embedded / max(1e-3, self.started + self.seconds - ready)

    @property
    def fraction(self) -> float:
        """The share of the tokens that are embedded, with those of earlier starts.

        Input that is not planned yet counts as not embedded.
        """
        pending = self.n_shards - self.n_before
        done = self.n_before + pending * self.n_tokens_done / max(1, self.n_tokens)
        return self.planned_share * done / max(1, self.n_shards)

    def shard_fraction(self, device: DeviceProgress) -> float | None:
        """Return the embedded share of the device's current shard. None: it has no shard."""
        if device.shard is None or device.shard.index not in self.in_work:
            return None
        return min(1.0, self.in_work[device.shard.index] / max(1, self._shard_tokens(device.shard)))

    @property
    def sorted_devices(self) -> list[tuple[str, DeviceProgress]]:
        """Devices in natural name order: cuda:2 before cuda:10."""
        return sorted(self.devices.items(), key=lambda item: _natural_key(item[0]))

    @property
    def timeline(self) -> DeviceTimeline:
        """What each device did and when, for ``machine.json``."""
        return DeviceTimeline(
            seconds_per_bin=self.seconds_per_bin,
            seconds=self.seconds,
            devices={name: device.series for name, device in self.devices.items()},
            n_losses=self.n_losses,
            n_reductions=self.n_reductions,
            n_failed_shards=len(self.lost),
            lost_devices=self.lost_devices,
        )


@dataclass(slots=True, eq=False)
class ProgressState:
    """The progress of a command: its current stage, and the embedding if it has begun."""

    # Current activity. None: shards are being embedded.
    stage: Progress | None = _FIRST
    embedding: EmbeddingProgress = field(default_factory=EmbeddingProgress)
    clock: Callable[[], float] = time.monotonic
    # The command has one stage, or an unknown number: the time left is that of the stage.
    is_one_stage: bool = False
    started: float = field(init=False)
    # Work over time: in stages with a given amount of work or in embedding, and in tables (shards).
    points: list[Point] = field(default_factory=list)
    tables: list[Point] = field(default_factory=list)
    n_work_before: float = 0  # work of earlier stages, included in ``points``

    def __post_init__(self) -> None:
        self.started = self.clock()

    def update(self, event: RunEvent) -> None:
        """Count an event."""
        match event:
            case Progress(stage=stage, done=done) if stage == STAGES[2] and self.embedding.pending:
                # tables are written while another stage is shown
                self.tables = self._with_point(self.tables, done)
            case Progress(done=done, work=work):
                if self.stage is None or self.stage.stage != event.stage:
                    self._start_stage(event)
                amount = self.n_work_before + (work[0] if work else done)
                self.points = self._with_point(self.points, amount)
                self.stage = event
            case EmbeddingStarted():
                self.embedding = EmbeddingProgress.from_event(event, self.clock())
                self.points = []
                self.tables = []
                self.stage = None
            case ShardsPlanned():
                self.embedding.add_shards(event)
            case _:
                self._update_embedding(event)

    def _update_embedding(self, event: WorkerEvent) -> None:
        is_first = not self.embedding.devices
        self.embedding.update(event, self.clock())
        if isinstance(event, WorkerReady) and is_first:  # starting workers does not count as work
            self.points = self._with_point([], 0)
        elif isinstance(event, BatchDone):
            self.points = self._with_point(self.points, self.embedding.n_tokens_done)

    def _start_stage(self, event: Progress) -> None:
        """Continue the points of the previous stage if the work of both has the same unit."""
        self.n_work_before = 0
        if event.stage == STAGES[2] and self.tables:  # they were written while shards were embedded
            self.points = self.tables
        elif event.work and self.stage is not None and self.stage.work:
            self.n_work_before = self.points[-1].done
        else:
            self.points = self._with_point([], 0)

    def _with_point(self, points: Sequence[Point], amount: float) -> list[Point]:
        return add_sample(points, self.clock(), max(amount, points[-1].done if points else 0))

    def tokens_per_second(self, devices: Sequence[DeviceProgress]) -> float:
        now = self.clock()
        return sum(device.n_tokens / max(1e-9, now - device.since) for device in devices)

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the run. None: unknown."""
        tables_behind = 8  # shards; a smaller lag of the tables is ignored
        now = self.clock()
        if self.stage is not None:
            return self._seconds_after(self.stage, now)
        embedding = self.embedding
        n_tokens = max(embedding.n_tokens, embedding.n_tokens_expected)
        left = seconds_left(self.points, n_tokens - embedding.n_tokens_done, now)
        n_written = self.tables[-1].done if self.tables else embedding.n_before
        if left is None or embedding.n_done - n_written < tables_behind:
            return left
        return max(left, seconds_left(self.tables, embedding.n_shards - n_written, now) or 0.0)

    def _seconds_after(self, stage: Progress, now: float) -> float | None:
        """Return seconds from a stage other than embedding to the end of the run."""
        if stage.seconds_left is not None:
            return max(0.0, stage.seconds_left - (now - self.points[-1].seconds))
        if stage.work is not None:
            return seconds_left(self.points, stage.work[1], now)
        if self.is_one_stage and stage.total:
            return seconds_left(self.points, stage.total - stage.done, now)
        return None

    @property
    def fraction(self) -> float | None:
        """The completed share of the stage, or of embedding. None: unknown."""
        if self.stage is None:
            return self.embedding.fraction
        return min(1.0, self.stage.done / self.stage.total) if self.stage.total else None


def _natural_key(name: str) -> list[tuple[int, str]]:
    return [(int(word) if word.isdecimal() else -1, word) for word in re.split(r"(\d+)", name)]
