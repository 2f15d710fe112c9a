"""Show the progress of a run as text, and log its events.

``EventLog`` writes events to the log as plain lines, and the figures every ten seconds.
"""

from __future__ import annotations

import logging
import threading

from virnucpro.core.events import (
    BatchSizeReduced,
    EmbeddingStarted,
    Memory,
    Progress,
    RunEvent,
    ShardDone,
    ShardFailed,
    ShardReturned,
    ShardsPlanned,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.logging import LOGGER, format_count
from virnucpro.engine.progress import DeviceProgress, ProgressState


def title_of(state: ProgressState) -> str:
    return state.stage.stage if state.stage else "embedding"


def counts_of(state: ProgressState) -> list[str]:
    """Completed amount in the stage. While embedding, the shards and, if several, the files.

    If the plan is not complete, the planned share of the input follows.
    """
    if state.stage is not None:
        return [_format_amount(state.stage)] if state.stage.unit else []
    embedding = state.embedding
    shards = f"{embedding.n_done:,}/{embedding.n_shards:,} shards"
    if embedding.planned_share < 1:
        return [shards, f"{percent(embedding.planned_share)} of the input planned"]
    if len(embedding.files) < 2:
        return [shards]
    return [shards, f"{embedding.n_files_done:,}/{len(embedding.files):,} files"]


def facts_of(state: ProgressState) -> list[str]:
    """The facts after the counts: speed, failures, time."""
    time = [f"elapsed {_format_clock(state.clock() - state.started)}"]
    if state.fraction is not None:
        left = state.seconds_left
        time.append(f"remaining {'unknown' if left is None else _format_clock(left)}")
    if state.stage is not None:
        return [*time, *state.stage.also]
    speed = state.tokens_per_second(list(state.embedding.devices.values()))
    return [f"{speed:,.0f} tokens/s", f"{state.embedding.n_failed:,} failed", *time]


def memory_of(device: DeviceProgress) -> str:
    if device.memory is None:
        return "abandoned" if device.is_given_up else "starting"
    return _format_memory(device.memory)


def line_of(state: ProgressState) -> str:
    """The figures in one plain line."""
    share = "" if state.fraction is None else f" ({percent(state.fraction)})"
    words = (f"{', '.join(counts_of(state))}{share}", *facts_of(state))
    line = f"{title_of(state)}: {', '.join(filter(None, words))}"
    if state.stage is not None:
        return line
    devices = "; ".join(
        f"{name} {format_count(device.n_shards, 'shard')} "
        f"{state.tokens_per_second([device]):,.0f} tokens/s "
        f"memory {memory_of(device)}"
        for name, device in state.embedding.sorted_devices
    )
    return f"{line} | {devices or 'workers are starting'}"


def percent(share: float) -> str:
    """Format a share in percent, rounded down, so that unfinished work never shows 100 %."""
    return f"{int(100 * share)}%"


def _format_clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _format_amount(stage: Progress) -> str:
    total = f" of {stage.total:,}" if stage.total else ""
    memory = f", GPU memory {_format_memory(stage.memory)}" if stage.memory else ""
    return f"{stage.done:,}{total} {stage.unit}{memory}"


def _format_memory(memory: Memory) -> str:
    gib = 1 << 30
    if not memory.total:
        return "unknown"
    return f"{memory.used / gib:.1f}/{memory.total / gib:.1f} GiB"


class EventLog:
    """Counts events, and writes them and a line of figures every ten seconds to the log."""

    def __init__(self, every_seconds: float = 10.0, *, is_one_stage: bool = False) -> None:
        self.state = ProgressState(is_one_stage=is_one_stage)
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
            self.state.update(event)
        _log(event)
        if isinstance(event, WorkerReady):
            for warning in event.warnings:
                if warning not in self._warnings:
                    self._warnings.add(warning)
                    LOGGER.warning("%s: %s", event.worker, warning)

    def _tick(self) -> None:
        while not self._stopped.wait(self._every):
            with self._lock:
                line = line_of(self.state)
            LOGGER.info("%s", line, extra={"is_figures": True})


def _log(event: RunEvent) -> None:
    match event:
        case EmbeddingStarted(pending=pending, n_done_before=before, planned_share=share):
            LOGGER.info(
                "%s to embed, %s finished earlier%s",
                format_count(len(pending), "shard"),
                f"{before:,}",
                "" if share == 1 else f"; {percent(share)} of the input planned",
            )
        case ShardsPlanned(pending=pending, n_done_before=before, planned_share=share):
            LOGGER.info(
                "%s to embed, %s finished earlier; %s of the input planned",
                format_count(len(pending), "more shard"),
                f"{before:,}",
                percent(share),
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
