"""What the user sees while a run goes on: pure consumers of events.

``Progressing`` keeps the figures; ``EventLog`` writes them as plain lines into the log, every
ten seconds; ``Dashboard`` draws them on a terminal.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from virnucpro.engine.events import (
    BatchDone,
    BudgetReduced,
    EmbeddingStarted,
    Memory,
    Progress,
    ShardDone,
    ShardFailed,
    Telling,
    WorkerLost,
    WorkerReady,
)
from virnucpro.esm2.packing import EXTRA_TOKENS
from virnucpro.log import LOGGER, log_figures
from virnucpro.plan import count_done
from virnucpro.records import Shard

EVERY_SECONDS = 10.0
_GIB = 1 << 30
_BAR_WIDTH = 24


@dataclass(slots=True)
class DeviceState:
    """One worker, as its events tell."""

    n_shards: int = 0
    n_tokens: int = 0
    memory: Memory | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / max(1e-9, time.monotonic() - self.since)

    @property
    def memory_text(self) -> str:
        if self.memory is None:
            return "starting"
        return f"{self.memory.used / _GIB:.1f}/{self.memory.total / _GIB:.1f} GiB"


@dataclass(slots=True)
class Progressing:
    """The figures of a run so far."""

    stage: Progress | None = None
    devices: dict[str, DeviceState] = field(default_factory=dict)
    n_shards: int = 0  # in all
    n_before: int = 0  # done by an earlier start
    n_tokens: int = 0  # to do
    n_failed: int = 0  # sequences
    n_failed_shards: int = 0
    n_failed_tokens: int = 0
    files: tuple[tuple[int, int], ...] = ()  # of each: its first shard, one after its last
    pending: set[int] = field(default_factory=set)  # shards
    started: float = field(default_factory=time.monotonic)
    embedding_since: float = 0.0

    def take(self, event: Telling) -> None:
        match event:
            case Progress():
                self.stage = event
            case EmbeddingStarted(pending=pending, n_done_before=before, files=files):
                self.stage = None
                self.files, self.pending = files, {shard.index for shard in pending}
                self.devices = {}
                self.n_failed = self.n_failed_shards = self.n_failed_tokens = 0
                self.n_shards, self.n_before = before + len(pending), before
                self.n_tokens = sum(map(_tokens_of, pending))
                self.embedding_since = time.monotonic()
            case WorkerReady(worker=worker, memory=memory):
                if not self.devices:
                    self.embedding_since = time.monotonic()  # starting is no measure of speed
                self.devices.setdefault(worker, DeviceState()).memory = memory
            case BatchDone(worker=worker, n_tokens=n_tokens, memory=memory):
                device = self.devices[worker]
                device.n_tokens += n_tokens
                device.memory = memory
            case ShardDone(worker=worker, shard=shard, n_failed=n_failed):
                self.pending.discard(shard.index)
                self.devices[worker].n_shards += 1
                self.n_failed += n_failed
            case ShardFailed(shard=shard, refusal=None):
                self.pending.discard(shard.index)
                self.n_failed += shard.n_embedded
                self.n_failed_shards += 1
                self.n_failed_tokens += _tokens_of(shard)

    @property
    def n_done(self) -> int:
        """Shards that need nothing more."""
        done_now = sum(device.n_shards for device in self.devices.values())
        return self.n_before + self.n_failed_shards + done_now

    @property
    def n_files_done(self) -> int:
        """Input files of which no shard is to be done."""
        return count_done(self.files, sorted(self.pending))

    @property
    def parts_text(self) -> str:
        """Shards done, and files, if there are several."""
        shards = f"{self.n_done}/{self.n_shards} shards"
        if len(self.files) < 2:
            return shards
        return f"{shards}, {self.n_files_done:,}/{len(self.files):,} files"

    @property
    def n_tokens_done(self) -> int:
        done = self.n_failed_tokens + sum(device.n_tokens for device in self.devices.values())
        return min(self.n_tokens, done)  # a shard that is tried again counts twice

    @property
    def share_done(self) -> float:
        """Of the whole run, with what an earlier start did; finer than whole shards."""
        pending = self.n_shards - self.n_before
        done = self.n_before + pending * self.n_tokens_done / max(1, self.n_tokens)
        return done / max(1, self.n_shards)

    @property
    def tokens_per_second(self) -> float:
        return sum(device.tokens_per_second for device in self.devices.values())

    @property
    def elapsed(self) -> str:
        return _clock(time.monotonic() - self.started)

    @property
    def remaining(self) -> str:
        done = self.n_tokens_done
        if not done:
            return "unknown"
        spent = time.monotonic() - self.embedding_since
        return _clock(max(0.0, spent * (self.n_tokens - done) / done))

    def shards_of(self, device: DeviceState) -> int:
        """Shards that a device will have done at the end, if all are equally fast."""
        left = self.n_shards - self.n_done
        return device.n_shards + round(left / max(1, len(self.devices)))

    def share_done_by(self, device: DeviceState) -> float:
        """Of the tokens that a device will have done at the end."""
        left = (self.n_tokens - self.n_tokens_done) / max(1, len(self.devices))
        return device.n_tokens / max(1.0, device.n_tokens + left)

    @property
    def stage_text(self) -> str:
        assert self.stage is not None
        stage, done, total = self.stage.stage, self.stage.done, self.stage.total
        unit = self.stage.unit
        of = f" of {total:,} ({min(1.0, done / total):.0%})" if total else ""
        return f"{stage}: {done:,}{of} {unit}"

    @property
    def line(self) -> str:
        """All of it in one plain line."""
        if self.stage is None and not self.n_shards:
            return f"looking at model and devices, elapsed {self.elapsed}"
        if self.stage is not None:
            return f"{self.stage_text}, elapsed {self.elapsed}"
        devices = "; ".join(
            f"{name} {device.n_shards} shards {device.tokens_per_second:,.0f} tok/s "
            f"{device.memory_text}"
            for name, device in self.devices.items()
        )
        return (
            f"embedding: {self.parts_text} ({self.share_done:.0%}), "
            f"{self.tokens_per_second:,.0f} tok/s, {self.n_failed} failed, "
            f"elapsed {self.elapsed}, remaining {self.remaining}"
            + (f" | {devices}" if devices else " | workers are starting")
        )


def _tokens_of(shard: Shard) -> int:
    return shard.n_residues + EXTRA_TOKENS * shard.n_embedded


class EventLog:
    """Writes events, and every ten seconds a line of figures, to the log."""

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        self.progressing = Progressing()
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

    def __call__(self, event: Telling) -> None:
        with self._lock:
            self.progressing.take(event)
        level, message = _describe(event)
        if message:
            LOGGER.log(level, "%s", message)

    def _tick(self) -> None:
        while not self._stopped.wait(self._every):
            with self._lock:
                line = self.progressing.line
            log_figures(line)


def _describe(event: Telling) -> tuple[int, str]:
    match event:
        case EmbeddingStarted(pending=pending, n_done_before=before):
            return logging.INFO, f"{len(pending)} shards to embed, {before} done before"
        case WorkerReady(worker=worker, description=description):
            return logging.INFO, f"{worker} is ready: {description}"
        case WorkerLost(worker=worker, reason=reason, shard=shard, is_final=is_final):
            held = f" with shard {shard.name}" if shard else ""
            fate = "it is given up" if is_final else "it is replaced"
            detail = f"\n{event.traceback.rstrip()}" if event.traceback else ""
            LOGGER.debug("%s%s", worker, detail)
            return logging.WARNING, f"{worker} was lost{held}: {reason}; {fate}"
        case BudgetReduced(worker=worker, tokens_per_batch=tokens):
            return logging.WARNING, f"{worker}: out of memory; batches of {tokens} tokens from now"
        case ShardDone(worker=worker, shard=shard, seconds=seconds, n_failed=n_failed):
            failed = f", {n_failed} sequences failed" if n_failed else ""
            level = logging.WARNING if n_failed else logging.INFO
            return level, f"shard {shard.name} done by {worker} in {seconds:.2f} s{failed}"
        case ShardFailed(worker=worker, shard=shard, reason=reason):
            LOGGER.debug("%s %s", worker, event.traceback)
            # what the disk refused ends the run, which tells it
            level = logging.INFO if event.refusal else logging.ERROR
            return level, f"shard {shard.name} failed on {worker}: {reason}"
    return logging.DEBUG, ""


class Dashboard:
    """Draws the figures of an ``EventLog`` on a terminal, several times a second."""

    def __init__(self, progressing: Progressing, console: Console) -> None:
        self._progressing = progressing
        self._live = Live(
            console=console, get_renderable=self.draw, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Dashboard:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def draw(self) -> RenderableType:
        now = self._progressing
        if now.stage is None and not now.n_shards:
            return Text("looking at model and devices")
        if now.stage is not None:
            bar = ProgressBar(
                total=now.stage.total or None,
                completed=min(now.stage.done, now.stage.total or now.stage.done),
                width=_BAR_WIDTH,
                pulse=not now.stage.total,
            )
            row = Table.grid(padding=(0, 2))
            row.add_row(bar, Text(now.stage_text), Text(f"elapsed {now.elapsed}"))
            return row
        table = Table.grid(padding=(0, 2))
        for name, device in sorted(now.devices.items()):
            share = now.share_done_by(device)
            table.add_row(
                Text(name, style="bold"),
                ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH),
                Text(f"{device.n_shards}/{now.shards_of(device)} shards"),
                Text(f"{share:.0%}", justify="right"),
                Text(f"{device.tokens_per_second:,.0f} tok/s"),
                Text(device.memory_text),
            )
        if not now.devices:
            table.add_row(Text("workers are starting"))
        table.add_row(
            Text("total", style="bold"),
            ProgressBar(total=1.0, completed=now.share_done, width=_BAR_WIDTH),
            Text(now.parts_text),
            Text(f"{now.share_done:.0%}", justify="right"),
            Text(f"{now.tokens_per_second:,.0f} tok/s"),
            Text(f"{now.n_failed} failed", style="red" if now.n_failed else ""),
        )
        times = Text(f"elapsed {now.elapsed}   remaining {now.remaining}", style="dim")
        return Group(table, times)


class ConsoleHandler(logging.Handler):
    """Prints log records above a dashboard, as they are: no markup, no colours of their own."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._console.print(Text(self.format(record)), soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
