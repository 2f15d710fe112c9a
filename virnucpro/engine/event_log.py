"""Log the events of a process that does a part of a run, and rebuild its progress from the log.

The log contains text for people. An event is a line of it:

    2026-01-01 12:00:00,000 INFO    event {"time": 1767225600.25, "event": "ShardDone", ...}

A batch is not logged: before the end of a shard, one ``BatchDone`` has the tokens of all its
batches. The log is also the tag of its process (see ``run_lock``): its name contains host and
process, and its lock shows whether the process still runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from virnucpro.core.atomic_io import open_regular_file, parse_json
from virnucpro.core.events import (
    BatchDone,
    BatchSizeReduced,
    Memory,
    ShardDone,
    ShardFailed,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.logging import LOGGER
from virnucpro.core.types import Shard, check_counts
from virnucpro.engine.progress import EmbeddingProgress, ProgressState
from virnucpro.store.run_lock import is_held, tags_in

_MARK = " event "
_KINDS = (WorkerReady, WorkerLost, BatchDone, BatchSizeReduced, ShardDone, ShardFailed)
_KINDS_BY_NAME: Mapping[str, type[Any]] = {kind.__name__: kind for kind in _KINDS}
_TYPES = {kind: get_type_hints(kind) for kind in _KINDS}


def record_event(event: WorkerEvent, progress: ProgressState) -> None:
    """Count an event, and log it if it tells other processes about this one."""
    if isinstance(event, (ShardDone, ShardFailed)):
        n_tokens = progress.embedding.in_work.get(event.shard.index, 0)
        device = progress.embedding.devices.get(event.worker)
        memory = (device.memory if device else None) or Memory(0, 0)
        _log(BatchDone(event.worker, event.shard, (), n_tokens, memory))
    progress.update(event)
    if isinstance(event, _KINDS) and not isinstance(event, BatchDone):
        _log(event)


def _log(event: WorkerEvent) -> None:
    not_logged = ("rows", "warnings", "traceback", "refusal")
    fields = {name: value for name, value in event._asdict().items() if name not in not_logged}
    if (shard := fields.get("shard")) is not None:
        fields["shard"] = [shard.index, shard.n_orfs, shard.n_embedded, shard.n_residues]
    line = {"time": round(time.time(), 3), "event": type(event).__name__, **fields}
    LOGGER.info("%s%s", _MARK.lstrip(), json.dumps(line))


class LoggedEvent(NamedTuple):
    """An event in a log."""

    time: float  # seconds since the epoch
    event: WorkerEvent


def read_events(path: Path, start: int = 0) -> tuple[list[LoggedEvent], int]:
    """Read the events from byte ``start`` of a log on. Other lines and corrupt ones are skipped.

    Returns:
        Events in order, and the byte after the last complete line.
    """
    with open_regular_file(path) as log:
        log.seek(start)
        content = log.read()
    *lines, partial_line = content.split(b"\n")
    events = []
    for line in lines:
        _, mark, text = line.partition(_MARK.encode())
        if mark:
            with suppress(ValueError, TypeError, LookupError):
                events.append(_from_json(**parse_json(text)))
    return events, start + len(content) - len(partial_line)


def _from_json(time: float, event: str, **fields: Any) -> LoggedEvent:  # noqa: ANN401 - JSON
    """Convert a line.

    Raises:
        ValueError, TypeError, LookupError: it was changed.
    """
    max_time = 10**12
    if not 0 <= time <= max_time:
        raise ValueError("the time is not one of this epoch")
    kind = _KINDS_BY_NAME[event]
    types = _TYPES[kind]
    for name, value in fields.items():
        fields[name] = _convert(value, types[name])
    if "rows" in types:
        fields["rows"] = ()
    return LoggedEvent(time, kind(**fields))


def _convert(value: Any, kind: object) -> object:  # noqa: ANN401 - JSON
    """Convert a field of an event.

    Raises:
        ValueError, TypeError: it was changed.
    """
    if kind is Shard or (kind == Shard | None and value is not None):
        index, n_orfs, n_embedded, n_residues = value
        return Shard(index, Path(), n_orfs, n_embedded, n_residues, "")
    if kind is Memory:
        check_counts(*value)
        return Memory(*value)
    if kind is int:
        check_counts(value)
    elif kind in (str, bool) and type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind}")
    return value


def replay(events: Sequence[LoggedEvent]) -> ProgressState:
    """Rebuild the progress of a process. Its times are seconds since the epoch."""
    now = events[0].time if events else 0.0

    def clock() -> float:
        return now

    state = ProgressState(embedding=EmbeddingProgress(started=now), clock=clock)
    for logged in events:
        now = max(now, logged.time)
        state.update(logged.event)
    state.clock = time.time
    return state


@dataclass(frozen=True, slots=True)
class HostProgress:
    """The figures of all ``work`` processes on one host."""

    host: str
    n_working: int  # processes working now
    n_shards: int  # shards that have a feature file
    n_failed: int  # sequences that failed
    n_lost: int  # shards that failed and are not done yet
    tokens_per_second: float  # sum over the running processes, or without any, the mean of all


class WorkProgress(NamedTuple):
    """The progress of a ``work`` process."""

    host: str
    is_working: bool
    state: ProgressState


def read_work(logs: Path) -> list[WorkProgress]:
    """Read the progress of each ``work`` process, by name, from all logs in a folder."""
    return [
        WorkProgress(host, is_held(path), replay(read_events(path)[0]))
        for path, (host, _) in tags_in(logs).items()
    ]


def sum_hosts(processes: Iterable[WorkProgress]) -> list[HostProgress]:
    """Sum the progress of each host, by name."""
    by_host: dict[str, list[WorkProgress]] = {}
    for process in processes:
        by_host.setdefault(process.host, []).append(process)
    return [_sum_host(host, processes) for host, processes in by_host.items()]


def _sum_host(host: str, processes: Iterable[WorkProgress]) -> HostProgress:
    n_working = sum(process.is_working for process in processes)
    done: dict[int, int] = {}
    lost: set[int] = set()
    rates = []
    for _, is_working, state in processes:
        embedding = state.embedding
        done |= embedding.done
        lost |= embedding.lost
        if (embedding.done or embedding.lost) and (is_working or not n_working):
            rates.append(embedding.tokens_per_second)
    return HostProgress(
        host=host,
        n_working=n_working,
        n_shards=len(done),
        n_failed=sum(done.values()),
        n_lost=len(lost - done.keys()),
        tokens_per_second=round(sum(rates) if n_working else sum(rates) / max(1, len(rates)), 1),
    )
