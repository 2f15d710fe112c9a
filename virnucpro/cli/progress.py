"""Count the progress of a run from its events, and write its log.

``ProgressState`` counts. ``EventLog`` writes events to the log as plain lines, and the figures
every ten seconds. Every figure is a count, so the devices add up to the total. The time left covers
the complete run or is unknown: it never covers only one of several stages.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

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
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.logging import LOGGER, format_count
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard
from virnucpro.models.base import estimate_tokens
from virnucpro.store.plan import count_done
from virnucpro.store.progress_log import seconds_left

_EVERY_SECONDS = 10.0
_GIB = 1 << 30
_MOST_POINTS = 2_000
_FIRST = Progress("checking model and devices", 0, 0, "")
_TABLES_BEHIND = 8  # shards; a smaller lag of the tables is ignored


Point: TypeAlias = tuple[float, float]  # see ``seconds_left``


def add_sample(points: Sequence[Point], seconds: float, amount: float) -> list[Point]:
    """Return the points with a new one. If there are too many, every second point is dropped."""
    kept_points = list(points) if len(points) < _MOST_POINTS else list(points[::2])
    return [*kept_points, (seconds, amount)]


@dataclass(slots=True)
class DeviceState:
    """The figures of one worker."""

    n_shards: int = 0
    n_tokens: int = 0
    memory: Memory | None = None
    shard: Shard | None = None  # the shard that is being embedded
    is_given_up: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / max(1e-9, time.monotonic() - self.since)

    @property
    def memory_text(self) -> str:
        if self.memory is None:
            return "given up" if self.is_given_up else "starting"
        return _memory_text(self.memory)


@dataclass(slots=True)
class ProgressState:
    """The figures of a run so far.

    One thread takes events while another draws, so dicts are replaced and never changed in place.
    """

    # Current activity. None: shards are being embedded.
    stage: Progress | None = _FIRST
    devices: dict[str, DeviceState] = field(default_factory=dict)
    n_shards: int = 0  # total
    n_before: int = 0  # finished by an earlier start
    encoders: tuple[EncoderSpec, ...] = ()
    n_tokens: int = 0  # tokens to embed
    n_failed: int = 0  # failed sequences
    n_settled_tokens: int = 0  # tokens of finished and failed shards
    in_work: dict[int, int] = field(default_factory=dict)  # shard index -> tokens embedded so far
    files: tuple[tuple[tuple[int, int], ...], ...] = ()  # see ``EmbeddingStarted``
    pending: set[int] = field(default_factory=set)  # shard indices
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

    def on_event(self, event: RunEvent) -> None:
        match event:
            case Progress(stage=stage, done=done) if stage == STAGES[2] and self.pending:
                self.tables = self._update(
                    self.tables, done
                )  # written while another stage is shown
            case Progress(done=done, work=work):
                if self.stage is None or self.stage.stage != event.stage:
                    self._start_stage(event)
                amount = self.n_work_before + (work[0] if work else done)
                self.points = self._update(self.points, amount)
                self.stage = event
            case EmbeddingStarted(pending, before, files, encoders):
                self.stage = None
                self.devices = {}
                self.in_work = {}
                self.n_failed = 0
                self.n_settled_tokens = 0
                self.files = files
                self.pending = {shard.index for shard in pending}
                self.n_shards = before + len(pending)
                self.n_before = before
                self.encoders = encoders
                self.n_tokens = sum(map(self._shard_tokens, pending))
                self.points = []
                self.tables = []
            case WorkerReady(worker=worker, memory=memory):
                if not self.devices:  # starting workers does not count as work
                    self.points = self._update([], 0)
                self._device(worker).memory = memory
            case WorkerLost(worker=worker, shard=shard, is_final=is_final):
                device = self._device(worker)
                device.memory = None
                device.shard = None
                device.is_given_up = is_final
                if shard is not None:
                    self._finish_work(shard)
            case BatchDone(worker=worker, shard=shard, n_tokens=n_tokens, memory=memory):
                device = self.devices[worker]
                device.n_tokens += n_tokens
                device.memory = memory
                device.shard = shard
                n_before = self.in_work.get(shard.index, 0)
                self.in_work = {**self.in_work, shard.index: n_before + n_tokens}
                self.points = self._update(self.points, self.n_tokens_done)
            case ShardReturned(shard=shard):
                self._finish_work(shard)
            case ShardDone(worker=worker, shard=shard, n_failed=n_failed):
                self.devices[worker].n_shards += 1
                self._update_rate(shard, n_failed)
            case ShardFailed(shard=shard, refusal=None):
                self._update_rate(shard, shard.n_embedded)

    def _start_stage(self, event: Progress) -> None:
        """Continue the points of the previous stage if the work of both has the same unit."""
        self.n_work_before = 0
        if event.stage == STAGES[2] and self.tables:  # they were written while shards were embedded
            self.points = self.tables
        elif event.work and self.stage is not None and self.stage.work:
            self.n_work_before = self.points[-1][1]
        else:
            self.points = self._update([], 0)

    def _update(self, points: Sequence[Point], amount: float) -> list[Point]:
        return add_sample(points, self.clock(), max(amount, points[-1][1] if points else 0))

    def _device(self, worker: str) -> DeviceState:
        if worker not in self.devices:
            self.devices = {**self.devices, worker: DeviceState()}
        return self.devices[worker]

    def _finish_work(self, shard: Shard) -> None:
        self.in_work = {index: n for index, n in self.in_work.items() if index != shard.index}

    def _update_rate(self, shard: Shard, n_failed: int) -> None:
        self._finish_work(shard)
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
    def n_tokens_done(self) -> int:
        return min(self.n_tokens, self.n_settled_tokens + sum(self.in_work.values()))

    @property
    def to_dict(self) -> list[str]:
        """The facts after the counts: speed, failures, time."""
        left = self.seconds_left
        time = [f"elapsed {_format_clock(self.clock() - self.started)}"]
        if self.fraction is not None:
            time.append(f"remaining {'unknown' if left is None else _format_clock(left)}")
        if self.stage is not None:
            return [*time, *self.stage.also]
        n_tokens = sum(device.tokens_per_second for device in self.devices.values())
        return [f"{n_tokens:,.0f} tokens/s", f"{self.n_failed:,} failed", *time]

    def shard_fraction(self, device: DeviceState) -> float | None:
        """Return the embedded share of the device's current shard. None: it has no shard."""
        if device.shard is None or device.shard.index not in self.in_work:
            return None
        return min(1.0, self.in_work[device.shard.index] / max(1, self._shard_tokens(device.shard)))

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the run. None: unknown."""
        now = self.clock()
        if self.stage is not None:
            return self._seconds_since(self.stage, now)
        left = seconds_left(self.points, self.n_tokens - self.n_tokens_done, now)
        n_written = self.tables[-1][1] if self.tables else self.n_before
        if left is None or self.n_done - n_written < _TABLES_BEHIND:
            return left
        return max(left, seconds_left(self.tables, self.n_shards - n_written, now) or 0.0)

    def _seconds_since(self, stage: Progress, now: float) -> float | None:
        """Return seconds from a stage other than embedding to the end of the run."""
        if stage.seconds_left is not None:
            return max(0.0, stage.seconds_left - (now - self.points[-1][0]))
        if stage.work is not None:
            return seconds_left(self.points, stage.work[1], now)
        if self.is_one_stage and stage.total:
            return seconds_left(self.points, stage.total - stage.done, now)
        return None

    @property
    def title(self) -> str:
        return self.stage.stage if self.stage else "embedding"

    @property
    def fraction(self) -> float | None:
        """The completed share of the stage, or of embedding. None: unknown.

        While embedding, it counts tokens and covers the complete run, including earlier starts.
        """
        if self.stage is not None:
            return min(1.0, self.stage.done / self.stage.total) if self.stage.total else None
        pending = self.n_shards - self.n_before
        done = self.n_before + pending * self.n_tokens_done / max(1, self.n_tokens)
        return done / self.n_shards

    @property
    def counts(self) -> list[str]:
        """Completed amount in the stage. While embedding, the shards and, if several, the files."""
        if self.stage is not None:
            return [_format_count(self.stage)] if self.stage.unit else []
        shards = f"{self.n_done:,}/{self.n_shards:,} shards"
        if len(self.files) < 2:
            return [shards]
        n_files_done = count_done(self.files, sorted(self.pending))
        return [shards, f"{n_files_done:,}/{len(self.files):,} files"]

    @property
    def sorted_devices(self) -> list[tuple[str, DeviceState]]:
        """Devices in natural name order: cuda:2 before cuda:10."""
        return sorted(self.devices.items(), key=lambda item: _natural_key(item[0]))

    @property
    def line(self) -> str:
        """The figures in one plain line."""
        share = "" if self.fraction is None else f" ({percent(self.fraction)})"
        words = (f"{', '.join(self.counts)}{share}", *self.to_dict)
        line = f"{self.title}: {', '.join(filter(None, words))}"
        if self.stage is not None:
            return line
        devices = "; ".join(
            f"{name} {format_count(device.n_shards, 'shard')} "
            f"{device.tokens_per_second:,.0f} tokens/s "
            f"memory {device.memory_text}"
            for name, device in self.sorted_devices
        )
        return f"{line} | {devices or 'workers are starting'}"


def _natural_key(name: str) -> list[tuple[int, str]]:
    return [(int(word) if word.isdecimal() else -1, word) for word in re.split(r"(\d+)", name)]


def _format_clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _format_count(stage: Progress) -> str:
    total = f" of {stage.total:,}" if stage.total else ""
    memory = f", GPU memory {_memory_text(stage.memory)}" if stage.memory else ""
    return f"{stage.done:,}{total} {stage.unit}{memory}"


def _memory_text(memory: Memory) -> str:
    if not memory.total:
        return "unknown"
    return f"{memory.used / _GIB:.1f}/{memory.total / _GIB:.1f} GiB"


def percent(share: float) -> str:
    """Format a share in percent, rounded down, so that unfinished work never shows 100 %."""
    return f"{int(100 * share)}%"


class EventLog:
    """Writes events, and a line of figures every ten seconds, to the log."""

    def __init__(
        self, every_seconds: float = _EVERY_SECONDS, *, is_one_stage: bool = False
    ) -> None:
        self.figures = ProgressState(is_one_stage=is_one_stage)
        self._warnings: set[str] = set()  # already logged, because workers repeat most of them
        self._every = every_seconds
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> EventLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def __call__(self, event: RunEvent) -> None:
        with self._lock:
            self.figures.on_event(event)
        _log(event)
        if isinstance(event, WorkerReady):
            for warning in event.warnings:
                if warning not in self._warnings:
                    self._warnings.add(warning)
                    LOGGER.warning("%s: %s", event.worker, warning)

    def _tick(self) -> None:
        while not self._stopped.wait(self._every):
            with self._lock:
                line = self.figures.line
            LOGGER.info("%s", line, extra={"is_figures": True})


def _log(event: RunEvent) -> None:
    match event:
        case EmbeddingStarted(pending=pending, n_done_before=before):
            LOGGER.info(
                "%s to embed, %s finished earlier",
                format_count(len(pending), "shard"),
                f"{before:,}",
            )
        case WorkerReady(worker=worker, description=description):
            LOGGER.info("%s is ready: %s", worker, description)
        case WorkerLost(worker=worker, reason=reason, shard=shard, is_final=is_final):
            LOGGER.debug("%s", f"{worker}\n{event.traceback}".rstrip())
            work = f" with shard {shard.name}" if shard else ""
            fate = "it is not replaced" if is_final else "it is replaced"
            LOGGER.warning("%s was lost%s: %s; %s", worker, work, reason, fate)
        case ShardReturned(worker=worker, shard=shard, reasons=reasons):
            failed = format_count(len(reasons), "sequence")
            text = "shard %s: %s failed on %s; another device tries again"
            LOGGER.warning(text, shard.name, failed, worker)
        case BatchSizeReduced(worker=worker, tokens_per_batch=tokens):
            LOGGER.warning("%s: out of memory; batches now have %s tokens", worker, tokens)
        case ShardDone(worker=worker, shard=shard, seconds=seconds, n_failed=n_failed):
            failed_text = f", {format_count(n_failed, 'sequence')} failed" if n_failed else ""
            level = logging.WARNING if n_failed else logging.INFO
            text = "shard %s done by %s in %.2f s%s"
            LOGGER.log(level, text, shard.name, worker, seconds, failed_text)
        case ShardFailed(worker=worker, shard=shard, reason=reason):
            LOGGER.debug("%s %s", worker, event.traceback)
            # A disk error ends the run, which reports it.
            level = logging.INFO if event.refusal else logging.ERROR
            LOGGER.log(level, "shard %s failed on %s: %s", shard.name, worker, reason)
