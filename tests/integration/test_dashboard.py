"""The figures that a user sees during a run."""

from __future__ import annotations

import io
import logging
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from run_helpers import CONTIGS, wait_until
from scorer_run_helpers import predict

from virnucpro.cli.console import is_for_console
from virnucpro.cli.dashboard import ConsoleHandler, Dashboard
from virnucpro.cli.progress import EventLog, line_of
from virnucpro.core.events import (
    SCORING,
    STAGES,
    BatchDone,
    EmbeddingStarted,
    Memory,
    Progress,
    ShardDone,
    ShardFailed,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.logging import LOGGER, announce, log_to_handler, printable
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard
from virnucpro.engine.progress import (
    Point,
    ProgressState,
    add_sample,
    estimate_rate,
    seconds_left,
)

GIB = 1 << 30
ESCAPE = "\x1b"
ESM2 = EncoderSpec(model="esm2_x", sha256="", layer=2, pooling="mean", precision="fp32", dim=32)
SHARDS = tuple(Shard(i, Path(f"{i:06d}.faa"), 10, 10, 1000, "") for i in range(4))


@pytest.fixture
def log():
    """An event log with two workers and one finished shard."""
    log = EventLog()
    log(EmbeddingStarted(SHARDS, 2, encoders=(ESM2,)))
    for name in ("cuda:0", "cuda:1"):
        log(WorkerReady(name, "an [H200]", Memory(GIB, 140 * GIB)))
    log(BatchDone("cuda:0", SHARDS[0], tuple(range(10)), 1020, Memory(3 * GIB, 140 * GIB)))
    log(ShardDone("cuda:0", SHARDS[0], 0.5, 1))
    log(ShardFailed("cuda:1", SHARDS[1], "a [bold]reason"))
    return log


def drawn(log: EventLog, width: int = 120, height: int = 50, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, **options)
    console.print(Dashboard(log.state, console).draw())
    return console.file.getvalue()


def log_of(n_workers: int, n_shards_done: int = 3) -> EventLog:
    """Return an event log of workers that each finished some shards and part of another."""
    shards = [Shard(i, Path(f"{i:06d}.faa"), 10, 10, 980, "") for i in range(1000)]
    log = EventLog()
    memory = Memory(100 * GIB, 140 * GIB)
    log(EmbeddingStarted(tuple(shards), 0, encoders=(ESM2,)))
    for worker in range(n_workers):
        name = f"cuda:{worker}"
        log(WorkerReady(name, "an H200", memory))
        for _ in range(n_shards_done):
            shard = shards.pop()
            log(BatchDone(name, shard, tuple(range(10)), 1000, memory))
            log(ShardDone(name, shard, 0.5, 0))
        log(BatchDone(name, shards.pop(), tuple(range(5)), 500, memory))
    return log


def test_line_has_all_figures(log):
    line = line_of(log.state)
    assert "4/6 shards (66%)" in line
    assert "11 failed" in line  # one sequence of shard 0, ten of shard 1
    assert "cuda:0 1 shard " in line and "memory 3.0/140.0 GiB" in line
    assert "elapsed 0:00:0" in line and "remaining 0:00:0" in line
    log(WorkerReady("node7 cuda:0", "an H200", Memory(0, 0)))
    assert "node7 cuda:0 0 shards " in line_of(log.state)
    assert line_of(log.state).count("memory unknown") == 1


def test_dashboard_has_total_and_device_rows(log):
    rows = [line.split() for line in drawn(log).splitlines()]
    assert [row[0] for row in rows] == ["total", "4/6", "device", "cuda:0", "cuda:1"]
    assert rows[0][-1] == "66%"
    assert "11 failed" in " ".join(rows[1])
    assert rows[3][1] == "1" and rows[3][3:5] == ["3.0/140.0", "GiB"]
    assert rows[4][1] == "0" and rows[4][3:5] == ["1.0/140.0", "GiB"]


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 100, 200])
def test_device_row_fits_a_narrow_terminal(width):
    lines = drawn(log_of(12), width, force_terminal=True, no_color=True).splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    assert max(map(len, plain)) <= width
    devices = [line for line in plain if line.startswith("cuda")]
    assert [line.split()[0] for line in devices] == [f"cuda:{worker}" for worker in range(12)]
    if width >= 60:
        assert all("100.0/140.0 GiB" in line for line in devices)
        assert all(("━" in line) == (width >= 100) for line in devices)
        assert ("current shard" in " ".join(plain)) == (width >= 100)


def test_total_bar_is_as_wide_as_the_terminal():
    log = log_of(8, n_shards_done=60)
    lengths = [drawn(log, width).splitlines()[0].count("━") for width in (60, 100, 200)]
    # 484 of 1000 shards, without "total", "48%" and two gaps of two
    assert lengths == [int((width - 12) * 0.484) for width in (60, 100, 200)]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_extra_devices_are_summed_in_one_row(width):
    log = log_of(32)
    lines = drawn(log, width, height=24).splitlines()
    assert len(lines) == 23  # one is free, for the cursor
    (fold,) = [line for line in lines if line.startswith("+ ")]
    devices = [line.split() for line in lines if line.startswith("cuda")]
    assert fold.split()[:3] == ["+", str(32 - len(devices)), "more"]
    n_shards = sum(int(device[1]) for device in devices) + int(fold.split()[3])
    assert n_shards == 96 and "96/1,000 shards" in "".join(lines)


def test_terminal_of_a_few_lines_has_the_total():
    lines = drawn(log_of(32), 60, height=5).splitlines()
    assert lines[0].startswith("total")
    assert lines[-1].startswith("+ 32 more")


def test_restarted_shard_counts_once(log):
    """Its worker is lost when half of shard 2 is done. Then all of it is done."""
    half = tuple(range(5))
    whole = tuple(range(10))
    before = log.state.embedding.n_tokens_done
    log(BatchDone("cuda:1", SHARDS[2], half, 510, Memory(GIB, 140 * GIB)))
    assert log.state.embedding.n_tokens_done == before + 510
    log(WorkerLost("cuda:1", "SIGKILL", SHARDS[2]))
    assert log.state.embedding.n_tokens_done == before
    log(BatchDone("cuda:0", SHARDS[2], whole, 1020, Memory(GIB, 140 * GIB)))
    log(ShardDone("cuda:0", SHARDS[2], 0.5, 0))
    assert log.state.embedding.n_tokens_done == before + 1020 == 3 * 1020


def test_nothing_counts_as_done_too_early(log):
    log(BatchDone("cuda:0", SHARDS[2], tuple(range(10)), 1020, Memory(GIB, 140 * GIB)))
    log(ShardDone("cuda:0", SHARDS[2], 0.5, 0))
    log(BatchDone("cuda:0", SHARDS[3], tuple(range(9)), 1019, Memory(GIB, 140 * GIB)))
    assert drawn(log).splitlines()[0].endswith(" 99%")


def test_lost_device_is_shown(log):
    log(WorkerLost("cuda:0", "SIGKILL"))
    log(WorkerLost("cuda:1", "no answer", is_final=True))
    assert "GPU memory, used/total" in drawn(log)
    log(WorkerLost("cpu#0", "it never started", is_final=True))
    rows = {line.split()[0]: line.rstrip() for line in drawn(log).splitlines()}
    assert rows["cuda:0"].endswith("starting")
    assert rows["cuda:1"].endswith("abandoned") and rows["cpu#0"].endswith("abandoned")
    assert "memory, process/machine" in drawn(log)


def test_stage_is_shown_before_devices_start():
    log = EventLog()
    log(Progress("reading", 250, 1000, "letters"))
    bar, amount = drawn(log).splitlines()
    assert bar.startswith("reading  ━") and bar.endswith(" 25%")
    assert amount.startswith("250 of 1,000 letters   elapsed 0:00:0")
    assert line_of(log.state).startswith("reading: 250 of 1,000 letters (25%)")
    log(Progress("reading", 250, 0, "letters", also=("loss 0.5", "rate 0.001")))
    assert drawn(log).splitlines()[1].startswith("250 letters   elapsed")
    assert "loss 0.5   rate 0.001" in drawn(log) and line_of(log.state).endswith(
        ", loss 0.5, rate 0.001"
    )


# Time left


Rates = Callable[[float, random.Random], float]  # work per second, by the share that is done


def steps_of(rates: Rates, n_steps: int, seed: int) -> list[Point]:
    """Return the steps of 5,000 units of work, at a rate that depends on the share that is done."""
    chance = random.Random(seed)
    seconds = 0.0
    points = [Point(0.0, 0.0)]
    for n_done in range(1, 5001):
        seconds += 1 / rates(n_done / 5000, chance)
        if not n_done % (5000 // n_steps):
            points.append(Point(seconds, n_done))
    return points


STREAMS: dict[str, Rates] = {
    "even": lambda _, __: 1.0,
    "a slow start": lambda share, _: 0.2 if share < 0.02 else 1.0,
    "workers that begin one after the other": lambda share, _: min(1.0, 0.25 + share * 20),
    "a loaded machine": lambda _, chance: chance.uniform(0.6, 1.4),
    "a slow start on a loaded machine": lambda share, chance: (
        (0.2 if share < 0.02 else 1.0) * chance.uniform(0.6, 1.4)
    ),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("n_steps", [40, 200, 5_000])
def test_time_left_is_within_a_third(stream, n_steps):
    for seed in range(20 if n_steps < 1_000 else 3):
        points = steps_of(STREAMS[stream], n_steps, seed)
        for share in (0.1, 0.3, 0.9):
            some = points[: int(share * n_steps) + 1]
            thinned: list[Point] = []
            for seconds, done in some:
                thinned = add_sample(thinned, seconds, done)
            now = some[-1].seconds
            truth = points[-1].seconds - now
            for known in (some, thinned):
                left = seconds_left(known, 5000 - some[-1].done, now)
                assert left is not None and 1 / 1.3 < left / truth < 1.3, (seed, share, left, truth)


def test_time_left_with_steps_in_bursts():
    """Four helpers finish a block each at about the same time."""
    points = [Point(10 * (n // 4) + n % 4 * 0.1, n) for n in range(41)]
    left = seconds_left(points[:21], 180, points[20].seconds)
    assert left is not None and 1 / 1.3 < left / (180 * 2.5) < 1.3


def test_time_left_within_a_step():
    assert seconds_left([], 10, now=5.0) is seconds_left([Point(0.0, 0.0)], 10, now=5.0) is None
    assert estimate_rate([Point(1.0, 0.0), Point(1.0, 5.0)]) == 0.0
    work = ((1000, 500), (1030, 510), (1060, 520), (1070, 600), (1080, 720), (1090, 820))
    points = [Point(seconds, done) for seconds, done in work]
    assert estimate_rate(points) == (820 - 520) / 30  # of the last third of the time
    assert seconds_left(points, 400, now=1090.0) == 40
    assert seconds_left(points, 400, now=1095.0) == 35
    assert seconds_left(points, 100, now=1110.0) == 0
    assert seconds_left(points, 400, now=1120.0) == 10  # a step may take three times the longest
    assert seconds_left(points, 400, now=1121.0) == 400 * (1121 - 1060) / (820 - 520)
    assert (
        estimate_rate([Point(0, 0), Point(10, 10), Point(19, 11), Point(20, 12)]) == 0.2
    )  # two steps


def test_time_left_while_scoring():
    """Earlier blocks cost nothing, and records that are searched for regions cost twice."""
    now = 0.0
    figures = ProgressState(clock=lambda: now)
    for number in range(1, 11):
        now += 0.001
        figures.update(Progress("scoring", number, 100, "letters", (0, 170 - 2 * number)))
    for number in range(11, 16):
        now += 2.0
        worked = 2 * (number - 10)
        figures.update(Progress("scoring", number, 100, "letters", (worked, 150 - worked)))
    assert line_of(figures).endswith("remaining 0:02:20")


def test_time_left_while_embedding():
    now = 0.0
    figures = ProgressState(clock=lambda: now)
    many = tuple(replace(SHARDS[0], index=index) for index in range(100))
    figures.update(EmbeddingStarted(many, 0, encoders=(ESM2,)))
    now = 600.0
    figures.update(WorkerReady("cpu#0", "a CPU", Memory(GIB, 64 * GIB)))
    for shard in many[:20]:
        now += 1.0
        figures.update(BatchDone("cpu#0", shard, tuple(range(10)), 1020, Memory(GIB, GIB)))
        figures.update(ShardDone("cpu#0", shard, 1.0, 0))
        if not shard.index % 4:  # every fourth shard is in the tables too
            figures.update(Progress(STAGES[2], 1 + shard.index // 4, 100, "shards"))
    assert figures.seconds_left is not None
    assert figures.seconds_left > 300, "the tables take four times as long as the vectors"


def figures_at(*steps: tuple[float, Progress], **options: bool) -> ProgressState:
    """Return the figures after stages whose progress came at these times."""
    now = 0.0
    figures = ProgressState(clock=lambda: now, **options)
    for seconds, progress in steps:
        now = seconds
        figures.update(progress)
    return figures


def test_time_left_of_reading_includes_scoring():
    steps = [(t, Progress("reading", 100 * t, 1000, "letters", (t, 110 - t))) for t in range(1, 6)]
    assert figures_at(*steps).seconds_left == 105
    assert line_of(figures_at(*steps)).endswith("remaining 0:01:45")


def test_time_left_continues_from_reading_to_scoring():
    reading = [(t, Progress("reading", t, 10, "letters", (t, 110 - t))) for t in range(11)]
    first = (12, Progress("scoring", 2, 100, "letters", (2, 98)))
    assert figures_at(*reading, first).seconds_left == pytest.approx(98)


@pytest.mark.parametrize("stage", ["reading", "hashing the input", "fetching a model"])
def test_time_left_of_an_early_stage_is_unknown(stage):
    steps = [(t, Progress(stage, t, 10, "bytes")) for t in range(1, 6)]
    assert figures_at(*steps).seconds_left is None
    assert line_of(figures_at(*steps)).endswith("elapsed 0:00:05, remaining unknown")
    assert figures_at(*steps, is_one_stage=True).seconds_left == 5


def test_time_left_of_tables_continues_after_embedding():
    now = 0.0
    figures = ProgressState(clock=lambda: now)
    shards = tuple(replace(SHARDS[0], index=index) for index in range(20))
    figures.update(EmbeddingStarted(shards, 0, encoders=(ESM2,)))
    figures.update(WorkerReady("cpu#0", "a CPU", Memory(GIB, 64 * GIB)))
    for shard in shards:
        now += 1.0
        figures.update(BatchDone("cpu#0", shard, tuple(range(10)), 1020, Memory(GIB, GIB)))
        figures.update(ShardDone("cpu#0", shard, 1.0, 0))
        if shard.index % 2:
            n_done = 1 + shard.index // 2
            figures.update(Progress(STAGES[2], n_done, 20, "shards", (n_done, 20 - n_done)))
    now += 2.0
    figures.update(Progress(STAGES[2], 11, 20, "shards", (11, 9)))
    assert figures.seconds_left == pytest.approx(18)


def test_time_left_of_the_sender_counts_down():
    now = 0.0
    figures = ProgressState(clock=lambda: now)
    figures.update(Progress("epoch 1 of 9", 5, 10, "frames", seconds_left=170.0))
    now = 20.0
    assert figures.seconds_left == 150
    assert "remaining 0:02:30" in line_of(figures)


def test_run_reports_the_work_of_all_stages(tmp_path):
    events: list[Progress] = []
    predict(CONTIGS, to=tmp_path / "run", on_event=events.append, workers=1)
    stages = {stage: [one.work for one in events if one.stage == stage] for stage in STAGES[:1]}
    scoring = [one.work for one in events if one.stage == SCORING]
    n_letters = sum(map(len, CONTIGS.read_text().split("\n")))
    assert stages[STAGES[0]][-1] is not None and scoring[-1] is not None
    assert stages[STAGES[0]][-1][1] == pytest.approx(n_letters, rel=0.1)
    assert scoring[-1][1] == 0, "nothing is left at the end"


def test_figures_are_logged_every_few_seconds():
    stream = io.StringIO()
    with log_to_handler(logging.StreamHandler(stream)), EventLog(every_seconds=0.05):
        wait_until(lambda: stream.getvalue().count("elapsed") >= 2)


def test_console_gets_warnings_and_file_gets_all(log):
    console = io.StringIO()
    file = io.StringIO()
    quiet = logging.StreamHandler(console)
    quiet.addFilter(partial(is_for_console, with_figures=False))
    with log_to_handler(logging.StreamHandler(file)), log_to_handler(quiet):
        announce("bf16 it is")
        log(ShardDone("cuda:0", SHARDS[2], 1.5, 0))
        log(WorkerLost("cuda:1", "SIGKILL", SHARDS[3]))
    assert "bf16 it is" in console.getvalue() and "bf16 it is" in file.getvalue()
    assert "cuda:1 was lost with shard 000003: SIGKILL; it is replaced" in console.getvalue()
    assert "shard 000002 done by cuda:0 in 1.50 s" in file.getvalue()
    assert "000002" not in console.getvalue()


def test_user_text_is_never_markup_or_control_codes():
    console = Console(file=io.StringIO(), width=200)
    with log_to_handler(ConsoleHandler(console)):
        LOGGER.warning("the id %s", printable("[red]a[/red]\x1b[2J\r\u202e"))
    assert "[red]a[/red]\\x1b[2J\\r\\u202e" in console.file.getvalue()
    log = EventLog()
    log(Progress("[red]reading", 1, 0, "[bold]letters"))
    assert "[red]reading" in drawn(log) and "[bold]letters" in drawn(log)
    assert len(printable("x" * 10_000)) < 400


def test_time_stamps_of_console_and_log():
    console = Console(file=io.StringIO(), width=200)
    file = io.StringIO()
    with log_to_handler(ConsoleHandler(console)), log_to_handler(logging.StreamHandler(file)):
        LOGGER.warning("a warning")
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING a warning\n", console.file.getvalue())
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING ", file.getvalue())


LONG_PATH = "/a/very/long/path/to/the/input/folder/of/somebody/" + "x" * 60 + ".fastq.gz"


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(
    "message",
    [
        "a.fa and b.fa are identical; every record will be counted twice, once for each of them",
        f"skipped 1 file without a FASTA or FASTQ suffix in {LONG_PATH}: notes.txt",
        "add --rename-duplicates, or choose another --output-dir for a new run of these files",
    ],
)
def test_log_lines_wrap_between_words(width: int, message: str) -> None:
    terminal = io.StringIO()
    handler = ConsoleHandler(Console(file=terminal, width=width, force_terminal=True))
    handler.emit(logging.makeLogRecord({"msg": message, "levelno": logging.INFO}))
    lines = terminal.getvalue().splitlines()
    assert " ".join(lines).split()[-len(message.split()) :] == message.split()
    too_long = [line.strip() for line in lines if len(line) > width]
    assert too_long in ([], [f"{LONG_PATH}:"]), "only a word that fits no line is longer"


def test_log_lines_of_several_lines_keep_them() -> None:
    terminal = io.StringIO()
    handler = ConsoleHandler(Console(file=terminal, width=60))
    handler.emit(logging.makeLogRecord({"msg": "Traceback:\n    in main\n", "levelno": 10}))
    assert terminal.getvalue().split("Traceback:")[1].splitlines()[1:] == ["    in main", ""]


def test_training_on_a_gpu_shows_memory() -> None:
    figures = ProgressState()
    memory = Memory(3 * GIB, 80 * GIB)
    for shown in (None, memory):
        figures.update(Progress("epoch 1 of 2", 5, 10, "frames", memory=shown))
        console = Console(file=io.StringIO(), width=100)
        console.print(Dashboard(figures, console).draw())
        text = console.file.getvalue()
        assert "5 of 10 frames" in text
        assert ("GPU memory 3.0/80.0 GiB" in text) == (shown is not None)
