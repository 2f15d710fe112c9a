"""How processes start and end: files in the data folder are never imported, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import child_targets
import psutil
import pytest
from forkserver_runner import missing_modules
from run_helpers import ROOT, assert_gone, hear_signals, is_own_process, wait_until, within

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.workflows.status import measure_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "contigs.fa"
PROGRAM = Path(sysconfig.get_path("scripts")) / "virnucpro"
# modules of Python, of others, and ours, which a start of our processes needs
NAMES = ["struct", "pickle", "json", "socket", "random", "numpy", "torch", "sitecustomize"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A data folder with modules that leave a mark if they are imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        mark = f"open({str(folder / 'mark')!r}, 'a').write(__name__ + '\\n')\n"
        (folder / f"{name}.py").write_text(mark)
    return folder


def marks(folder: Path) -> str:
    mark = folder / "mark"
    return mark.read_text() if mark.exists() else ""


def run_in(folder: Path, *command: object) -> None:
    answer = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert not marks(folder), answer.stderr


def test_folder_with_shadowing_modules(hostile):
    subprocess.run([sys.executable, "-c", "import struct"], cwd=hostile, capture_output=True)
    assert marks(hostile) == "struct\n"


def test_predict_imports_nothing_from_current_folder(hostile, tiny):
    """Neither do its processes, which start like those of every command."""
    options = ["--model", tiny.model, "--head", tiny.head_file, "--device", "cpu", "--workers", 1]
    predict = ["predict", "-q", "-i", EXAMPLE, "-o"]
    run_in(hostile, sys.executable, "-m", "virnucpro", *predict, "out")
    # Python itself takes a module of `-m` from there
    (hostile / "virnucpro.py").write_text((hostile / "json.py").read_text())
    run_in(hostile, PROGRAM, *predict, "other", *options)


START_IN_SOURCE_TREE = """
import child_targets
from virnucpro.core.child_process import ChildProcess, defer_interrupts, start_process
with defer_interrupts():
    child = start_process(child_targets.tell_package)
print(child.pipe.recv())
ChildProcess.kill_all([child])
"""


def test_child_imports_package_of_its_parent(tmp_path):
    """Another VirNucPro may be installed where Python runs in a source tree."""
    decoy = tmp_path / "virnucpro"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('another VirNucPro')")
    answer = subprocess.run(
        [sys.executable, "-c", START_IN_SOURCE_TREE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert (answer.stdout.strip(), answer.stderr) == (str(ROOT / "virnucpro"), "")


def test_process_sets_gpu_order_and_one_thread(monkeypatch):
    """Whatever the environment of the parent."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with defer_interrupts():
        child = start_process(child_targets.tell_environment)
    try:
        assert child.pipe.recv() == ["PCI_BUS_ID", "1"]
    finally:
        ChildProcess.kill_all([child])


@pytest.fixture
def predicting(tiny, tmp_path) -> Callable[[Path], subprocess.Popen[bytes]]:
    options = ["--model", tiny.model, "--head", tiny.head_file, "--device", "cpu", "--workers", 1]

    def begin(fasta: Path) -> subprocess.Popen[bytes]:
        command = [PROGRAM, "predict", "-q", "-i", fasta, "-o", tmp_path / "out", *options]
        return subprocess.Popen(list(map(str, command)), preexec_fn=hear_signals)

    return begin


def test_stopped_starting_worker_ends_with_parent(predicting):
    parent = predicting(EXAMPLE)
    try:
        worker = wait_for_import(parent, "libtorch")  # which is not the end of its start
        worker.suspend()
    finally:
        parent.kill()
        parent.wait()
    try:
        assert_gone(worker.pid)
    finally:
        if worker.is_running():
            worker.kill()


def test_worker_ends_with_parent_killed_in_planning(predicting, tmp_path):
    fasta = tmp_path / "long.fa"
    fasta.write_text("".join(f">r{i}\n{'TAAATAAATAACTTAATTAG' * 10}\n" for i in range(300_000)))
    parent = predicting(fasta)
    try:
        with within(120):
            wait_for_import(parent, "numpy")  # so it has received its task
            parent.send_signal(signal.SIGSTOP)
            worker = wait_for_import(parent, "libtorch")
        assert not is_planned(tmp_path / "out")
    finally:
        parent.kill()
        parent.wait()
    assert_gone(worker.pid)


def is_planned(folder: Path) -> bool:
    """Return True if a run has begun, and all of its slices are planned."""
    if not (folder / "run.json").exists():
        return False
    slices = measure_run(folder)["slices"]
    return slices["planned"] == slices["total"]


def wait_for_import(parent: subprocess.Popen[bytes], library: str) -> psutil.Process:
    """Wait for a worker that has begun to import the model. -> the worker"""

    def look() -> psutil.Process | None:
        assert parent.poll() is None
        for child in psutil.Process(parent.pid).children():
            if is_own_process(child) and library in Path(f"/proc/{child.pid}/maps").read_text():
                return child
        return None

    return wait_until(look)


# Messages of forked processes. The tests above start new interpreters.


quick = pytest.mark.usefixtures("quick_starts")


def say(pipe: Pipe, *words: object) -> None:
    for word in words:
        pipe.send(word)


def fail(pipe: Pipe) -> None:
    raise RuntimeError("a [red]fault[/red]")


def end(pipe: Pipe, how: int) -> None:
    os.kill(os.getpid(), how)


def hear(target: object, *words: object) -> tuple[list[object], str]:
    """Return all messages of a process, and what ended it."""
    with defer_interrupts():
        child = start_process(target, *words)
    heard = []
    try:
        while True:
            assert ChildProcess.wait_any([child], 60) == [child]
            heard.append(child.pipe.recv())
    except EOFError:
        return heard, child.exit_reason()
    finally:
        ChildProcess.kill_all([child])


@quick
@pytest.mark.parametrize(
    ("target", "words", "heard", "cause"),
    [
        (say, ("one", {"two": 2}), ["one", {"two": 2}], "exit code 0"),
        (end, (signal.SIGKILL,), [], "SIGKILL (out of memory?)"),
        (end, (signal.SIGINT,), [], "exit code 0"),  # Ctrl-C is for the parent
        (end, (signal.SIGTERM,), [], "SIGTERM"),
        (end, (signal.SIGXCPU,), [], "SIGXCPU (its CPU time limit is reached)"),
        (end, (signal.SIGUSR1,), [], "exit code 0"),  # that of a scheduler too
    ],
)
def test_messages_and_exit_reason_arrive(target, words, heard, cause):
    assert hear(target, *words) == (heard, cause)


def test_failed_send_keeps_no_buffer_view():
    """A ``BytesIO`` view in a traceback crashes Python 3.12 in garbage collection."""
    ours, theirs = Pipe.pair()
    theirs.close()
    with ours, pytest.raises(OSError) as caught:
        ours.send(list(range(1000)))
    frames = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    views = [value for value in values if isinstance(value, memoryview)]
    assert views and all(isinstance(view.obj, bytes) for view in views)


@quick
def test_exception_is_the_last_message():
    (last,), cause = hear(fail)
    assert isinstance(last, ChildError)
    assert last.reason == "RuntimeError: a [red]fault[/red]" and "in fail" in last.traceback
    assert cause == "exit code 1"


def test_forked_processes_import_nothing_slow():
    """The fork server says nothing of modules that it cannot import, and each child then does."""
    assert missing_modules() == []


@quick
def test_exit_code_is_the_same_in_each_thread():
    """The fork server sends it once, and several threads ask at the same time."""
    child = start_process(child_targets.stay)
    try:
        with ThreadPoolExecutor(8) as threads:
            reasons = [threads.submit(child.exit_reason) for _ in range(8)]
            child.kill()
        assert {reason.result() for reason in reasons} == {"SIGKILL (out of memory?)"}
    finally:
        ChildProcess.kill_all([child])
