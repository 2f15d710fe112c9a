"""Two runs in one folder, locks that outlive their run, and runs of other versions."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import h5py
import pytest
from run_helpers import (
    assert_same_run,
    run_inline,
    vectors,
    within,
    write_run_json,
)

from virnucpro._version import __version__
from virnucpro.core.errors import OutputError, ResumeError
from virnucpro.core.events import ShardDone
from virnucpro.results.outputs import open_run_dir
from virnucpro.store import run_lock as lock
from virnucpro.workflows.status import inspect_run

MARK = ".lock.held"
FORK = multiprocessing.get_context("fork")


class Contender:
    """A process that takes each folder it is sent, exclusively or shared with other `work`.

    It reports if it got the folder, and keeps it until it is told to release it.
    """

    def __init__(self) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=contend_for_folders, args=(theirs,))
        self.process.start()

    def tell(self, how: str = "", folder: Path | None = None) -> None:
        self.pipe.send((how, folder))

    def hear(self) -> str:
        with within(90):
            return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def contend_for_folders(pipe: Connection) -> None:
    lock.Timing.owner_name_seconds = 60.0  # a busy machine may keep a holder from writing its name
    lock.Timing.queue_seconds = 1.0
    while True:
        how, folder = pipe.recv()
        rundir = open_run_dir(folder)
        try:
            with rundir.locked(create=True) if how == "alone" else rundir.shared():
                pipe.send("in")
                pipe.recv()
        except OutputError as error:
            pipe.send(f"out: {error}; {error.hint}")
            pipe.recv()


@pytest.fixture(params=["flock", "no flock"])
def contend(request, monkeypatch) -> Iterator[Callable[[], Contender]]:
    """Start processes on a file system with or without locks, as for this one."""
    if request.param == "no flock":
        monkeypatch.setattr(fcntl, "flock", no_flock)
    with ExitStack() as stack:

        def start() -> Contender:
            contender = Contender()
            stack.callback(contender.kill)
            return contender

        yield start


def no_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@contextmanager
def held(folder: Path, contend: Callable[[], Contender], how: str = "alone") -> Iterator[Contender]:
    """Let another process lock the folder during the block, and then kill it."""
    contender = contend()
    contender.tell(how, folder)
    assert contender.hear() == "in"
    try:
        yield contender
    finally:
        contender.kill()


def refusal_of(folder: Path) -> OutputError:
    with pytest.raises(OutputError) as caught, open_run_dir(folder).locked(create=True):
        pass
    return caught.value


def test_one_of_many_starts_gets_the_folder(contend, tmp_path, chaos_seed):
    """In a new folder, in one that was released, and in one that was not."""
    with held(tmp_path / "killed", contend):
        pass
    contenders = [contend() for _ in range(5)]
    for number in range(12):
        folder = tmp_path / f"run{number}"
        if number % 3 == 1:
            with open_run_dir(folder).locked(create=True):
                pass
        elif number % 3 == 2:
            shutil.copytree(tmp_path / "killed", folder)
        for contender in contenders:
            contender.tell("alone", folder)
        answers = [contender.hear() for contender in contenders]
        assert answers.count("in") == 1, (chaos_seed, number, answers)
        winner = contenders[answers.index("in")].process.pid
        for answer in answers:
            assert answer == "in" or f"is using {folder}: process {winner} on" in answer, answer
        for contender in contenders:
            contender.tell()


def test_folder_in_use_is_rejected_and_owner_named(contend, make_config, tiny, contigs):
    config = make_config(contigs)
    run_inline(config, tiny.head)
    before = {path: path.read_bytes() for path in config.output.rglob("*.*") if path.is_file()}
    with held(config.output, contend) as holder:
        for changes in ({"resume": True}, {"force": True}, {}):
            with pytest.raises(OutputError) as caught:
                run_inline(make_config(contigs, **changes), tiny.head)
            named = f"process {holder.process.pid} on {socket.gethostname()} since 20"
            assert f"another run is using {config.output}: {named}" in str(caught.value)
            assert "wait for it, or choose another --output-dir" in caught.value.hint
        assert "complete" in inspect_run(config.output, verify=True)[0][0]
        locks = {config.output / name for name in (".lock", MARK)}
        for path in before.keys() - locks:
            assert path.read_bytes() == before[path]
        assert refusal_of(config.output)  # reading the lock has not released it
    run_inline(make_config(contigs, resume=True), tiny.head)


def test_lock_of_a_killed_process_is_free(contend, tmp_path):
    for _ in range(2):
        with held(tmp_path, contend):
            assert refusal_of(tmp_path)
        with open_run_dir(tmp_path).locked(create=True):
            assert refusal_of(tmp_path)
    assert not (tmp_path / MARK).exists()


def test_work_and_runs_exclude_each_other(contend, tmp_path, monkeypatch):
    monkeypatch.setattr(lock.Timing, "queue_seconds", 0.5)
    with ExitStack() as stack:
        for _ in range(2):
            one = stack.enter_context(held(tmp_path, contend, "work"))
            with open_run_dir(tmp_path).shared():
                error = refusal_of(tmp_path)
        assert f"`virnucpro work` is using {tmp_path}: " in str(error)
        for pid in (one.process.pid, os.getpid()):
            assert f"process {pid} on {socket.gethostname()}" in str(error)
        assert "finished shards are kept" in error.hint
        assert f"process {os.getpid()}" not in str(refusal_of(tmp_path)), "it has ended"
    with held(tmp_path, contend) as run:
        with pytest.raises(OutputError) as caught, open_run_dir(tmp_path).shared():
            pass
        assert f"another run is using {tmp_path}: process {run.process.pid} on" in str(caught.value)
    with (
        open_run_dir(tmp_path).shared(),
        open_run_dir(tmp_path).logs.joinpath("other.txt").open("w"),
    ):
        pass
    with open_run_dir(tmp_path).locked(create=True):
        assert not list(tmp_path.rglob("*.held")) or (tmp_path / MARK).exists()


def test_work_never_overlaps_a_run(contend, tmp_path, chaos_seed):
    """Either any number of `work` processes have the folder, or one run."""
    contenders = [contend() for _ in range(5)]
    kinds = ["alone", "work", "work", "alone", "work"]
    for number in range(6):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        for contender, kind in zip(contenders, kinds, strict=True):
            contender.tell(kind, folder)
        answers = [contender.hear() for contender in contenders]
        inside = [kind for kind, told in zip(kinds, answers, strict=True) if told == "in"]
        assert inside in (["alone"], ["work"] * len(inside)) and inside, (chaos_seed, answers)
        for contender in contenders:
            contender.tell()


def test_unreadable_lock_is_kept_and_deletable(tmp_path, monkeypatch):
    """Without file locks, after a kill between two calls, the lock names nobody."""
    monkeypatch.setattr(fcntl, "flock", no_flock)
    monkeypatch.setattr(lock.Timing, "owner_name_seconds", 0.1)
    mark = tmp_path / MARK
    mark.touch()
    error = refusal_of(tmp_path)
    assert "an unnamed process" in str(error) and f"delete {mark}" in error.hint
    mark.unlink()
    with open_run_dir(tmp_path).locked(create=True):
        assert mark.exists()
    assert not mark.exists()


@pytest.mark.parametrize("has_flock", [True, False])
def test_ctrl_c_while_locking_leaves_no_lock(tmp_path, monkeypatch, has_flock):
    def interrupted() -> bytes:
        raise KeyboardInterrupt

    if not has_flock:
        monkeypatch.setattr(fcntl, "flock", no_flock)
    run = tmp_path / "run"
    run.mkdir()
    with (
        pytest.raises(KeyboardInterrupt) as held,
        lock.locked(run, run / "logs", name_process=interrupted),
    ):
        pass
    with open_run_dir(tmp_path / "run").locked(create=True):
        assert held  # and its traceback, which keeps objects alive


def test_features_are_read_without_file_locks(make_config, tiny, contigs, tmp_path):
    """HDF5 locks the files that it opens. It cannot here, because another process has."""
    config = make_config(contigs, keep_intermediate=True)
    run_inline(config, tiny.head)
    shutil.copytree(config.output, tmp_path / "before")
    with ExitStack() as stack:
        for path in (*(config.output / "features").iterdir(), config.output / "features.h5"):
            fcntl.flock(stack.enter_context(path.open("rb")), fcntl.LOCK_EX)
        assert not inspect_run(config.output, verify=True)[1]
        events = []
        run_inline(make_config(contigs, resume=True), tiny.head, events.append)
    assert not any(isinstance(event, ShardDone) for event in events)
    assert_same_run(config.output, tmp_path / "before")


# Other versions of the program


@pytest.fixture
def older(make_config, tiny, contigs, tmp_path) -> Path:
    """A complete run of this version. ``before`` contains a copy of it."""
    config = make_config(contigs, keep_intermediate=True)
    run_inline(config, tiny.head)
    shutil.copytree(config.output, tmp_path / "before")
    for path in (config.output / "features").glob("*.h5"):
        assert __version__.encode() in path.read_bytes(), path
    return config.output


def change(run: Path, **facts: object) -> None:
    stored = json.loads((run / "run.json").read_text())
    stored["recipe"] |= facts.pop("recipe", {})
    write_run_json(run, stored | facts)


def test_newer_version_continues_an_older_run(
    make_config, tiny, contigs, older, tmp_path, monkeypatch
):
    """Only the recipe must agree. Another version is logged."""
    for name, module in list(sys.modules.items()):
        if name.startswith("virnucpro") and hasattr(module, "__version__"):
            monkeypatch.setattr(module, "__version__", "99.0.0")
    (older / "features" / "000001.h5").unlink()
    events = []
    run_inline(make_config(contigs, resume=True), tiny.head, events.append)
    assert [event.shard.index for event in events if isinstance(event, ShardDone)] == [1]
    assert_same_run(older, tmp_path / "before")
    versions = []
    for index in (0, 1):
        with h5py.File(older / "features" / f"{index:06d}.h5") as h5:
            versions.append(h5.attrs["virnucpro_version"])
    assert versions == [__version__, "99.0.0"]
    assert json.loads((older / "run.json").read_text())["virnucpro_version"] == "99.0.0"
    with h5py.File(older / "features" / "000000.h5") as h5:
        name = h5["ids"].asstr()[0]
        vector = h5["embeddings"][0]
    assert (vectors(older)[name] == vector).all()


@pytest.mark.parametrize(
    "facts",
    [
        {"recipe": {"shard_format": 99}},
        {"recipe": {"temperature": 0.5}},
        {"inputs": [{"path": "a.fa", "blake3": "00", "n_bytes": 1}]},
    ],
)
def test_incompatible_version_is_refused(make_config, tiny, contigs, older, facts):
    change(older, virnucpro_version="99.0.0", **facts)
    before = {path: path.read_bytes() for path in older.rglob("*.h5")}
    with pytest.raises(ResumeError) as caught:
        run_inline(make_config(contigs, resume=True), tiny.head)
    assert "another version of virnucpro, 99.0.0" in str(caught.value)
    assert f"virnucpro {__version__} cannot resume it" in str(caught.value)
    assert "finish it with that version" in caught.value.hint
    assert before == {path: path.read_bytes() for path in older.rglob("*.h5")}


# Other hosts, whose processes and locks cannot be seen from here


@pytest.fixture
def quick_beats(monkeypatch) -> None:
    monkeypatch.setattr(lock.Timing, "beat_seconds", 0.05)
    monkeypatch.setattr(lock.Timing, "dead_seconds", 0.5)


def left_by_another_host(folder: Path, name: str) -> Path:
    """Return the lock file that a process on another host has, or left when it died."""
    contents = {
        MARK: "7\nelsewhere\n",
        ".lock": "process 7 on elsewhere since 2026-01-01 00:00:00\n",
        "logs/work-elsewhere-7.log": "embedding\n",
    }
    (folder / "logs").mkdir()
    (folder / name).write_text(contents[name])
    return folder / name


@pytest.mark.usefixtures("quick_beats")
@pytest.mark.parametrize("name", [MARK, ".lock", "logs/work-elsewhere-7.log"])
def test_lock_of_a_silent_host_is_taken_over(tmp_path, monkeypatch, name):
    if name == MARK:
        monkeypatch.setattr(fcntl, "flock", no_flock)
    left_by_another_host(tmp_path, name)
    with within(20), open_run_dir(tmp_path).locked(create=True):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    assert not (tmp_path / MARK).exists()


@pytest.mark.usefixtures("quick_beats")
@pytest.mark.parametrize("name", [MARK, ".lock", "logs/work-elsewhere-7.log"])
def test_lock_of_a_live_host_is_respected(tmp_path, monkeypatch, name):
    if name == MARK:
        monkeypatch.setattr(fcntl, "flock", no_flock)
    with within(20), lock._heartbeat(left_by_another_host(tmp_path, name)):
        refusal = refusal_of(tmp_path)
    assert f"using {tmp_path}" in str(refusal) and refusal.hint
    assert name == MARK or "process 7 on elsewhere" in str(refusal)
