"""The figures that a user sees while a run goes on."""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path

import pytest
from rich.console import Console

from virnucpro.dashboard import ConsoleHandler, Dashboard, EventLog
from virnucpro.engine.events import (
    BatchDone,
    EmbeddingStarted,
    Memory,
    Progress,
    ShardDone,
    ShardFailed,
    WorkerLost,
    WorkerReady,
)
from virnucpro.log import LOGGER, ConsoleFilter, announce, logging_to, printable
from virnucpro.records import Shard

GIB = 1 << 30
SHARDS = tuple(Shard(i, Path(f"{i:06d}.faa"), 10, 10, 1000, "") for i in range(4))


@pytest.fixture
def log():
    """An event log that has heard of two workers and one shard done."""
    log = EventLog()
    log(EmbeddingStarted(SHARDS, 2))
    for name in ("cuda:0", "cuda:1"):
        log(WorkerReady(name, "an [H200]", Memory(GIB, 140 * GIB)))
    log(BatchDone("cuda:0", SHARDS[0], tuple(range(10)), 1020, Memory(3 * GIB, 140 * GIB)))
    log(ShardDone("cuda:0", SHARDS[0], 0.5, 1))
    log(ShardFailed("cuda:1", SHARDS[1], "a [bold]reason"))
    return log


def drawn(log: EventLog, **options: object) -> str:
    console = Console(file=io.StringIO(), width=120, **options)
    console.print(Dashboard(log.progressing, console).draw())
    return console.file.getvalue()


def test_the_line_has_all_the_facts(log):
    line = log.progressing.line
    assert "4/6 shards (67%)" in line
    assert "11 failed" in line  # one sequence of shard 0, ten of shard 1
    assert "cuda:0 1 shards" in line and "3.0/140.0 GiB" in line
    assert "elapsed 0:00:0" in line and "remaining 0:00:0" in line


def test_the_dashboard_has_a_row_per_device_and_a_total(log):
    text = drawn(log)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows.keys() >= {"cuda:0", "cuda:1", "total", "elapsed"}
    assert "1/2 shards" in rows["cuda:0"] and "50%" in rows["cuda:0"]
    assert "tok/s" in rows["cuda:1"] and "1.0/140.0 GiB" in rows["cuda:1"]
    assert "4/6 shards" in rows["total"] and "11 failed" in rows["total"]


def test_before_the_devices_start_the_stage_is_shown():
    log = EventLog()
    log(Progress("reading and translating", 250, 1000, "letters"))
    assert "reading and translating: 250 of 1,000 (25%) letters" in drawn(log)
    assert log.progressing.line.startswith("reading and translating: 250 of 1,000 (25%) letters")
    log(Progress("reading and translating", 250, 0, "letters"))
    assert "reading and translating: 250 letters" in drawn(log)


def test_without_colours_there_are_none(log):
    assert "\x1b[" not in drawn(log, force_terminal=True, color_system=None, no_color=True)


def test_a_line_of_figures_comes_every_few_seconds():
    stream = io.StringIO()
    with logging_to(logging.StreamHandler(stream)), EventLog(every_seconds=0.05):
        deadline = time.monotonic() + 10
        while stream.getvalue().count("elapsed") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().count("elapsed") >= 2


def test_the_console_gets_warnings_and_announcements_and_the_file_everything(log):
    console, file = io.StringIO(), io.StringIO()
    quiet = logging.StreamHandler(console)
    quiet.addFilter(ConsoleFilter(with_figures=False))
    with logging_to(logging.StreamHandler(file)), logging_to(quiet):
        announce("bf16 it is")
        log(ShardDone("cuda:0", SHARDS[2], 1.5, 0))
        log(WorkerLost("cuda:1", "SIGKILL", SHARDS[3]))
    assert "bf16 it is" in console.getvalue() and "bf16 it is" in file.getvalue()
    assert "cuda:1 was lost with shard 000003: SIGKILL; it is replaced" in console.getvalue()
    assert "shard 000002 done by cuda:0 in 1.50 s" in file.getvalue()
    assert "000002" not in console.getvalue()


def test_text_of_users_is_never_markup_or_control_codes():
    console = Console(file=io.StringIO(), width=200)
    with logging_to(ConsoleHandler(console)):
        LOGGER.warning("the id %s", printable("[red]a[/red]\x1b[2J\r\u202e"))
    assert "[red]a[/red]\\x1b[2J\\r\\u202e" in console.file.getvalue()
    assert len(printable("x" * 10_000)) < 400
