"""Helper processes give the same bytes as a run without any, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import psutil
import pytest
from conftest import open_dna, random_dna
from faulty_workers import POISON, RaisingWorker
from run_helpers import (
    assert_gone,
    assert_same_run,
    flip_bit,
    is_own_process,
    kill_ours,
    our_processes,
    run_inline,
    vectors,
    wait_until,
    within,
    write_fasta,
)
from scorer_run_helpers import many, predict

from virnucpro.core import helper_pool as tasks
from virnucpro.core import helper_processes
from virnucpro.core.errors import InputError, UnavailableError
from virnucpro.core.events import Progress, ShardDone
from virnucpro.core.helper_pool import HelperPool
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.device_choice import DeviceChoice
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences import record_text
from virnucpro.store import plan
from virnucpro.workflows.table_tasks import BlockTask

pytestmark = pytest.mark.usefixtures("quick_starts")
POISON_BASES = POISON.replace("W", "TGG").replace("C", "TGT")


def wait_until_ready(pool: HelperPool) -> None:
    wait_until(lambda: len(pool.ready) == len(pool.children))


@contextmanager
def helpers_for(n_helpers: int) -> Iterator[tasks.TaskRunner[str]]:
    with HelperPool(n_helpers) as pool:
        yield pool.helpers("no maker", 10**9, "tables")


@pytest.fixture
def in_small_blocks(monkeypatch) -> None:
    """Give every run many tasks for helpers, which are ready before the first one."""
    usual = tasks.TaskRunner.map_in_order

    def when_ready(helpers: tasks.TaskRunner, blocks) -> Iterator:
        wait_until_ready(helpers.pool)
        return usual(helpers, blocks)

    monkeypatch.setattr(tasks.TaskRunner, "map_in_order", when_ready)
    monkeypatch.setattr(tasks, "_LETTERS_PER_HELPER", 1)
    monkeypatch.setattr(plan, "LETTERS_AT_ONCE", 3_000)
    monkeypatch.setattr(record_text, "READ_BYTES", 3_000)


def give_all_to_helpers(monkeypatch, before_second: Callable[[], object] = lambda: None) -> None:
    """Let a helper take each block before the next is made, and the first before the second."""
    usual = tasks.TaskRunner.map_in_order

    def given(helpers: tasks.TaskRunner, blocks) -> Iterator:
        def each() -> Iterator:
            for number, block in enumerate(blocks):
                if number == 1:
                    before_second()
                yield block
                wait_until(helpers.pool.processes.orders.empty)

        return usual(helpers, each())

    monkeypatch.setattr(tasks.TaskRunner, "map_in_order", given)


@pytest.fixture
def hard(tmp_path) -> list[Path]:
    """Two files: repeats, frames with unknown letters, frames that fail, and long records."""
    rng = np.random.default_rng(3)
    records = {}
    for i in range(30):
        text = records[f"r{i}"] = open_dna(300 + 40 * i, rng)
        records[f"n{i}"] = text[:100] + "NNRN" + text[104:]
    records["poisonous"] = POISON_BASES + open_dna(600, rng)
    records["long"] = open_dna(4_000, rng) + random_dna(12_000, rng)
    records["nothing"] = "N" * 400
    again = {f"again_{name}": text for name, text in records.items() if name[0] != "n"}
    paths = [tmp_path / "first.fa", tmp_path / "second.fa"]
    for path, some in zip(paths, (records, again), strict=True):
        write_fasta(path, {f"{name} x": text for name, text in some.items()})
    return paths


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize("command", ["predict", "extract"])
def test_any_number_of_helpers_gives_the_same_bytes(make_config, tiny, hard, tmp_path, command):
    head = tiny.head if command == "predict" else None
    alone = tmp_path / "alone"
    helped = tmp_path / "helped"
    for folder, n_helpers in ((alone, 0), (helped, 3)):
        changes = {"command": command, "n_helpers": n_helpers, "per_file": True}
        changes |= {"keep_intermediate": True, "bytes_per_slice": 9_000}
        executor = InlineExecutor(worker=RaisingWorker)
        run_inline(make_config(*hard, output=folder, **changes), head, executor=executor)
    assert (alone / "failed_files.txt").read_text().count("failed") == 2  # in either file
    files = [path.relative_to(helped) for path in helped.rglob("*") if path.is_file()]
    assert len([path for path in files if "copies" in path.name]) > 2
    assert "parts of the plan are made by 3 helpers" in (helped / "virnucpro.log").read_text()
    assert open_run_dir(alone).plan.read_bytes() == open_run_dir(helped).plan.read_bytes()
    for path in files:
        # these have times, or blocks, which are small in this process alone
        if path.suffix not in (".log", ".json", ".html", ".plan"):
            assert (alone / path).read_bytes() == (helped / path).read_bytes(), path
    assert not our_processes()


@pytest.mark.usefixtures("in_small_blocks")
def test_called_records_have_the_same_tables(tmp_path, monkeypatch):
    # here, where blocks are small
    monkeypatch.setattr(plan._SliceTask, "n_letters", tasks._LETTERS_AHEAD + 1)
    fasta = write_fasta(tmp_path / "in.fa", many())
    folders = []
    done: list[int] = []

    def hear(event) -> None:
        if isinstance(event, Progress) and event.stage == "scoring":
            done.append(event.done)

    for workers in (1, 3):
        folders.append(tmp_path / f"by{workers}")
        predict(fasta, to=folders[-1], workers=workers, on_event=hear)
    assert "tables are made by 2 helpers" in (folders[1] / "virnucpro.log").read_text()
    assert "tables are made" not in (folders[0] / "virnucpro.log").read_text()
    assert len(list((folders[0] / "scores").iterdir())) > 5
    for path in folders[0].rglob("*"):
        name = path.relative_to(folders[0])
        if path.is_dir() or path.suffix in (".log", ".json", ".html"):
            continue
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    n_letters = sum(map(len, many().values()))
    assert done.count(n_letters) == 2
    assert done == sorted(done[: len(done) // 2]) * 2


@pytest.mark.usefixtures("in_small_blocks")
def test_killed_planning_helper_frees_the_folder(make_config, tiny, contigs, tmp_path, monkeypatch):
    """Both helpers are killed when one has a slice and before the other gets the next."""
    n_killed: list[int] = []
    config = make_config(contigs, n_helpers=2, bytes_per_slice=3_000)
    with monkeypatch.context() as patch:
        give_all_to_helpers(patch, lambda: n_killed.append(kill_ours()))
        with pytest.raises(UnavailableError, match="makes shards or tables was lost: SIGKILL"):
            run_inline(config, tiny.head)
    assert n_killed == [2]
    assert not our_processes()
    assert not (config.output / "run.json").exists()
    again = {"resume": True, "n_helpers": 2, "bytes_per_slice": 3_000}
    run_inline(make_config(contigs, **again), tiny.head)
    alone = make_config(contigs, bytes_per_slice=3_000, output=tmp_path / "alone")
    run_inline(alone, tiny.head)
    assert_same_run(config.output, alone.output)


def test_small_input_starts_no_process(make_config, tiny, contigs):
    seen = []
    run_inline(make_config(contigs, n_helpers=8), tiny.head, lambda _: seen.append(our_processes()))
    assert seen and not any(seen)


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize("n_helpers", [0, 2])
def test_file_damaged_during_tables_is_remade(make_config, tiny, contigs, undisturbed, n_helpers):
    """It is the last file: most records were counted before."""
    config = make_config(contigs, n_helpers=n_helpers)
    done = []

    def damage(event) -> None:
        if isinstance(event, ShardDone):
            done.append(event.shard.index)
            if len(done) == 7:
                flip_bit(config.output / "features" / "000006.h5", 1000)

    records = run_inline(config, tiny.head, damage).records
    assert done == [*range(7), 6]
    assert (records.n_records, records.n_frames) == (40, len(vectors(undisturbed)))
    counts = json.loads((config.output / "run.json").read_text())["counts"]
    assert (counts["n_frames"], counts["statuses"]) == (records.n_frames, records.statuses)
    assert_same_run(config.output, undisturbed)
    assert not our_processes()


@pytest.mark.usefixtures("in_small_blocks")
def test_killed_helper_is_reported_and_resumed(
    make_config, tiny, contigs, undisturbed, monkeypatch
):
    """Each block is given to a helper here. A run that no longer needs the helper would succeed."""

    def kill(event) -> None:
        if isinstance(event, ShardDone):
            kill_ours()

    give_all_to_helpers(monkeypatch)
    config = make_config(contigs, n_helpers=2)
    with pytest.raises(UnavailableError, match=r"was lost: SIGKILL \(out of memory\?\)") as caught:
        run_inline(config, tiny.head, kill)
    assert "--resume" in caught.value.hint
    assert not our_processes()
    assert not (config.output / "predictions.tsv").exists()
    run_inline(make_config(contigs, resume=True, n_helpers=2), tiny.head)
    assert_same_run(config.output, undisturbed)


@pytest.mark.usefixtures("in_small_blocks")
def test_interrupt_ends_working_helpers(make_config, tiny, contigs):
    def interrupt(event) -> None:
        if isinstance(event, ShardDone):
            assert len(our_processes()) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_inline(make_config(contigs, n_helpers=2), tiny.head, interrupt)
    assert not our_processes()


def test_helper_error_is_reported_as_text(capfd):
    with (
        helpers_for(1) as helpers,
        pytest.raises(UnavailableError, match="was lost: AttributeError: 'str' object"),
    ):
        helpers.submit(BlockTask(index=0, n_letters=0)).result()
    assert not our_processes()
    assert not capfd.readouterr().err


PARENT = """
import signal, sys
from virnucpro.core.helper_pool import HelperPool
with HelperPool(2) as pool:
    pool.helpers("no maker", 10**9, "tables")
    print(*[child.pid for child in pool.children], flush=True)
    signal.pause()
"""


@pytest.fixture
def beginning() -> Callable[[str], subprocess.Popen[str]]:
    """Return the start of a program that finds the modules of this process."""
    places = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def begin(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=places)

    return begin


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_helpers_end_with_a_killed_parent(beginning, number):
    with beginning(PARENT) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        # the command line is empty for a moment after exec
        wait_until(lambda: all(is_own_process(psutil.Process(pid)) for pid in pids))
        parent.send_signal(number)
    assert_gone(*pids)


@pytest.mark.parametrize(
    ("devices", "n_cores", "expected"),
    [
        (("cuda:0",), 16, 2),
        (("cuda:0",), 3, 1),
        (("cuda:0",), 1, 0),
        (tuple(f"cuda:{i}" for i in range(8)), 128, 16),
        (tuple(f"cuda:{i}" for i in range(8)), 16, 7),
        (("cpu",) * 2, 2, 0),
        (("cpu",) * 16, 16, 2),
        (("mps",), 8, 0),
    ],
)
def test_helpers_take_the_cores_that_devices_leave(devices, n_cores, expected):
    assert (
        DeviceChoice(devices, devices, has_bf16=True, memory=0).count_helpers(n_cores) == expected
    )


@dataclass(frozen=True)
class WhoDoesIt:
    """A block whose result is the process that computed it."""

    n_letters: int

    def do(self, _: object) -> int:
        return os.getpid()


def test_long_record_is_not_copied_to_a_helper():
    sizes = [10, tasks._LETTERS_AHEAD + 1, 10]
    with helpers_for(2) as helpers:
        wait_until_ready(helpers.pool)
        done_by = list(helpers.map_in_order(map(WhoDoesIt, sizes)))
    assert [number == os.getpid() for number in done_by][:2] == [False, True]


@dataclass(frozen=True)
class SlowElsewhere:
    """A block that is immediate in this process. In another it waits until a file is deleted."""

    number: int
    here: int
    file: Path
    n_letters: int = 10

    def do(self, _: object) -> tuple[int, bool]:
        is_here = os.getpid() == self.here
        if is_here:
            self.file.unlink(missing_ok=True)
        wait_until(lambda: not self.file.exists())
        return self.number, is_here


def test_busy_helpers_keep_the_order(tmp_path):
    """The helper waits for this process, which would wait for the helper if it had no work."""
    file = tmp_path / "wait"
    file.touch()

    def blocks() -> Iterator[SlowElsewhere]:
        for number in range(6):
            assert file.exists() == (number < 5)
            yield SlowElsewhere(number, os.getpid(), file)

    with helpers_for(1) as helpers, within(60):
        wait_until_ready(helpers.pool)
        done = list(helpers.map_in_order(blocks()))
    assert [number for number, _ in done] == [0, 1, 2, 3, 4, 5]
    assert done[4][1]
    wait_until(lambda: not [one for one in threading.enumerate() if "silence" in one.name])


def test_last_blocks_are_done_in_the_parent(tmp_path):
    """The helper waits for this process, which has no other block."""
    file = tmp_path / "wait"
    file.touch()
    with HelperPool(9) as pool, within(60):  # of which one has enough work
        helpers = pool.helpers(None, tasks._LETTERS_PER_HELPER, "tables")
        wait_until_ready(pool)
        blocks = (SlowElsewhere(number, os.getpid(), file) for number in range(3))
        done = list(helpers.map_in_order(blocks))
    assert [number for number, _ in done] == [0, 1, 2] and done[2][1]


@dataclass(frozen=True)
class Bad:
    """A block that fails."""

    number: int
    n_letters: int = 10

    def do(self, _: object) -> None:
        raise InputError(f"bad block {self.number}")


@pytest.mark.parametrize("n_helpers", [0, 1])
def test_first_bad_block_is_reported(n_helpers):
    with helpers_for(n_helpers) as helpers, pytest.raises(InputError, match="bad block 0"):
        wait_until_ready(helpers.pool)
        list(helpers.map_in_order(map(Bad, range(3))))


def test_blocks_ahead_are_limited_by_memory(tmp_path):
    """The third waits until the first is done, though helpers are free."""
    file = tmp_path / "wait"
    taken = []
    file.touch()

    def blocks() -> Iterator[SlowElsewhere]:
        for number in range(3):
            taken.append(number)
            yield SlowElsewhere(number, os.getpid(), file, tasks._LETTERS_AHEAD // 2 + 1)

    with helpers_for(1) as helpers, within(60):
        wait_until_ready(helpers.pool)
        threading.Timer(0.2, file.unlink).start()
        results = helpers.map_in_order(blocks())
        assert next(results) == (0, False) and taken == [0, 1]
        assert [number for number, _ in results] == [1, 2]


@pytest.mark.parametrize(
    ("most", "n_letters", "expected"),
    [(1, 990_000, 0), (1, 1_000_000, 1), (15, 2_400_000, 2), (15, 10**9, 15), (0, 10**9, 0)],
)
def test_helper_starts_for_every_million_letters(most, n_letters, expected):
    assert tasks.count_useful_helpers(most, n_letters) == expected


def test_stopped_helper_is_named(monkeypatch):
    heard = SimpleQueue()
    monkeypatch.setattr(helper_processes, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(tasks.LOGGER, "handlers", [QueueHandler(heard)])
    with helpers_for(1) as helpers:
        (helper,) = helpers.pool.children
        psutil.Process(helper.pid).suspend()
        task = helpers.submit(BlockTask(index=0, n_letters=0))
        warning = heard.get(timeout=30).getMessage()
        assert f"process {helper.pid}, which makes shards or tables" in warning
        assert f"kill -9 {helper.pid}" in warning
        helper.kill()
        with pytest.raises(UnavailableError, match="was lost: SIGKILL"):
            task.result()
    assert not our_processes()


PAUSED_PARENT = """
import os, signal, threading, time
from virnucpro.core import helper_pool as tasks, helper_processes
from virnucpro.workflows.table_tasks import BlockTask
helper_processes._SILENCE_SECONDS = 1.5
warned = threading.Event()
tasks.LOGGER.addFilter(lambda record: warned.set())
with tasks.HelperPool(1) as pool:
    helpers = pool.helpers("no maker", 10**9, "tables")
    os.kill(pool.children[0].pid, signal.SIGSTOP)
    helpers.submit(BlockTask(index=0, n_letters=0))
    os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    warned.wait()
    print(time.monotonic() - began)
"""


def test_stopped_parent_is_no_helper_silence(beginning):
    """Ctrl-Z and, later, `fg`. A helper that stays silent afterwards is named."""
    with beginning(PAUSED_PARENT) as parent, within(120):
        _, status = os.waitpid(parent.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(2.0)  # longer than a helper may be silent
        parent.send_signal(signal.SIGCONT)
        assert float(parent.stdout.read()) > 0.5
