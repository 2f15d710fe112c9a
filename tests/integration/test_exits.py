"""An interrupted command ends once, with the right exit code, and leaves no process behind."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import termios
import time
from functools import partial
from pathlib import Path

import click
import numpy as np
import psutil
import pytest
from conftest import open_dna
from forkserver_runner import Beside, run_command, start, virnucpro
from run_helpers import assert_gone, hear_signals, our_processes, wait_until, write_fasta

from virnucpro.cli import exit_codes as module
from virnucpro.cli import main as main_module
from virnucpro.cli.exit_codes import (
    DEAF_SECONDS,
    CommandExit,
    _Terminated,
    end_cleanly,
    exit_on_error,
)
from virnucpro.viral.networks import BUILTIN_SCORER, load_scorer

PROGRAM = Path(sysconfig.get_path("scripts")) / "virnucpro"
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SCHEDULER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)


@pytest.fixture(autouse=True)
def signals_as_before():
    numbers = (*ASKING, *SCHEDULER_SIGNALS)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "exit_code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 143, "terminated"),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, "ended by SIGUSR1"),
        (signal.SIGUSR2, 128 + signal.SIGUSR2, "ended by SIGUSR2"),
        (signal.SIGALRM, 128 + signal.SIGALRM, "ended by SIGALRM"),
        (
            signal.SIGXCPU,
            128 + signal.SIGXCPU,
            "ended by SIGXCPU: the limit of CPU time is reached",
        ),
    ],
)
def test_end_is_reported_after_cleanup(capsys, number, exit_code, word):
    """The signal may come in the middle of a line to the terminal."""
    said_before = []
    with pytest.raises(CommandExit) as finished, exit_on_error(lambda: "all is kept"):
        end_cleanly()
        try:
            signal.raise_signal(number)
        finally:
            said_before.append(capsys.readouterr().err)
    assert finished.value.exit_code == exit_code
    assert said_before == [""]
    said = capsys.readouterr().err
    assert said.startswith(f"error: {word}") and said.endswith("\nhint:  all is kept\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "no memory is left\nhint:  free memory, .*ulimit -v"),
        (RuntimeError("can't start new thread"), "no thread .*\nhint:  .*ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files", "a"), "a: Too many .*\nhint:  .*ulimit -n"),
    ],
)
def test_system_limit_is_reported_with_a_remedy(capsys, error, words):
    with pytest.raises(CommandExit) as finished, exit_on_error(lambda: "all is kept"):
        raise error
    assert finished.value.exit_code == 74
    assert re.match(f"error: {words}.*; all is kept\n", capsys.readouterr().err)


def test_too_many_open_files_do_not_blame_the_scorer():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            load_scorer(BUILTIN_SCORER)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_second_signal_does_not_disturb_the_end(monkeypatch):
    end_cleanly()
    with pytest.raises(_Terminated):
        signal.raise_signal(signal.SIGTERM)
    for number in (*ASKING, *SCHEDULER_SIGNALS):
        signal.raise_signal(number)
    late = time.monotonic() + DEAF_SECONDS
    monkeypatch.setattr(module.time, "monotonic", lambda: late)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_signals_that_nohup_ignores_stay_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_cleanly()
    signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


FORGETFUL = """
import os, signal, warnings
import child_targets
from virnucpro.cli.exit_codes import end_cleanly
from virnucpro.core.child_process import defer_interrupts, start_process
warnings.simplefilter("ignore", ResourceWarning)
end_cleanly()
with defer_interrupts():
    child = start_process(child_targets.stay)
child.pipe.recv()
os.kill(child.pid, signal.SIGSTOP)
print(child.pid)
"""


def test_stopped_child_does_not_block_the_end(tmp_path):
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    ended = subprocess.run(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert ended.returncode == 0
    assert_gone(int(ended.stdout))


def in_the_terminal(words: list[str]) -> None:
    """Start a command as the session leader of a terminal, which is its standard streams."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    run_command(words)


def disowned_in_the_terminal(words: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    in_the_terminal(words)


@pytest.mark.parametrize(
    ("run", "n_records", "exit_code"),
    [
        (in_the_terminal, 500, 143),
        (disowned_in_the_terminal, 5, 0),
    ],  # the first signal does not end it
)
def test_closed_terminal_ends_the_run(tiny, tmp_path, run, n_records, exit_code):
    """The exit code is right without a reader for dashboard, warnings and summary."""
    rng = np.random.default_rng(1)
    output = tmp_path / "run"
    (parent, child) = pty.openpty()
    records = {f"r{i}": open_dna(600, rng) for i in range(n_records)}
    process = start(
        *("predict", "-i", write_fasta(tmp_path / "in.fa", records), "-o", output),
        *("--model", tiny.model, "--head", tiny.head_file, "--device", "cpu", "--workers", "1"),
        streams=[child, child, child],
        env={**os.environ, "TERM": "xterm"},
        run=run,
    )
    os.close(child)
    log = output / "virnucpro.log"
    try:
        wait_until(
            lambda: not process.is_alive() or (log.exists() and "CPU, up to" in log.read_text())
        )
        os.close(parent)
        process.join(120)
        assert process.exitcode == exit_code
    finally:
        process.kill()
        process.join()


def test_early_interrupt_is_reported(monkeypatch, capsys):
    """The child cannot report it itself."""

    @click.command()
    def slow_to_begin() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "app", slow_to_begin)
    monkeypatch.setattr(sys, "argv", ["virnucpro"])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("error: interrupted\nhint:  nothing was started")


@pytest.mark.parametrize("module_name", ["virnucpro.cli.main", "click", "virnucpro.core.errors"])
def test_interrupt_while_loading_is_reported(module_name):
    """Ctrl-C comes while this module is imported."""
    code = f"""
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {module_name!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from virnucpro.cli.launch import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr.startswith("error: interrupted\nhint:  nothing was started")
    assert "Traceback" not in ended.stderr


def test_entry_point_loads_next_to_nothing():
    """Before it runs, Ctrl-C would print a traceback."""
    code = "import sys; before = {*sys.modules}; import virnucpro.cli.launch; print(*sys.modules)"
    program = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    loaded = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()
    assert not {"typing", "re", "click", "numpy"} & set(loaded)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'virnucpro = "virnucpro.cli.launch:main"' in project


# Signals from schedulers, and CPU time limits


def limited_to(seconds: int, words: list[str]) -> None:
    """Return a command with this CPU time limit, set as by `ulimit -t`, without a soft limit."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    run_command(words)


@pytest.fixture
def long_run(tiny, tmp_path) -> list[object]:
    """Return ``predict`` with a model, for more than a minute."""
    rng = np.random.default_rng(1)
    fasta = write_fasta(tmp_path / "in.fa", {f"r{i}": open_dna(600, rng) for i in range(2_000)})
    words = ["predict", "-i", fasta, "-o", tmp_path / "run", "--model", tiny.model]
    return [*words, "--head", tiny.head_file, "--device", "cpu", "--workers", "1"]


@pytest.mark.parametrize("number", SCHEDULER_SIGNALS)
def test_signal_of_scheduler_ends_run(long_run, tmp_path, number):
    command = Beside(*long_run)
    log = tmp_path / "run" / "virnucpro.log"
    wait_until(lambda: log.exists() or not command.process.is_alive())
    os.kill(command.process.pid, number)
    said = command.said()
    assert command.returncode == 128 + number
    assert f"error: ended by {number.name}" in said and "--resume" in said
    assert "Traceback" not in said and not our_processes()


def test_signal_to_all_processes_of_job(long_run, tmp_path):
    """``scancel --signal=USR1`` reaches the workers too, which ignore it for the parent."""
    features = tmp_path / "run" / "features"
    command = [PROGRAM, *map(str, long_run)]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(command, stderr=said, preexec_fn=hear_signals)
        wait_until(lambda: [*features.glob("*.h5")] or process.poll() is not None)
        children = psutil.Process(process.pid).children()
        assert children
        for child in children:
            child.send_signal(signal.SIGUSR1)
        wait_until(lambda: len([*features.glob("*.h5")]) > 1 or process.poll() is not None)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 128 + signal.SIGUSR1
        said.seek(0)
        assert "was lost" not in said.read()


def test_cpu_limit_ends_run_with_its_name(tmp_path):
    """The parent itself has no time left: it scores without a model or a helper."""
    rng = np.random.default_rng(1)
    records = {f"r{i}": open_dna(30_000, rng) for i in range(1_000)}
    fasta = write_fasta(tmp_path / "in.fa", records)
    words = ("predict", "-i", fasta, "-o", tmp_path / "run", "--workers", "1")
    answer = virnucpro(*words, run=partial(limited_to, 3))
    assert answer.returncode == 128 + signal.SIGXCPU, answer.stderr
    assert "error: ended by SIGXCPU: the limit of CPU time is reached" in answer.stderr
    assert "memory" not in answer.stderr


SPINNING = """
import resource, signal
import child_targets
from virnucpro.core.child_process import ChildProcess, defer_interrupts, start_process
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
with defer_interrupts():
    child = start_process(child_targets.spin)
print(child.exit_reason(), "/", child.remedy)
ChildProcess.kill_all([child])
"""


def test_cpu_limit_of_child_is_named(tmp_path):
    """A limit by `ulimit -t` kills without a warning, unless a soft limit is set."""
    ended = subprocess.run(
        [sys.executable, "-c", SPINNING],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    cause, remedy = ended.stdout.strip().split(" / ")
    assert cause == "SIGXCPU (its CPU time limit is reached)"
    assert remedy == "raise the limit of CPU time (`ulimit -t`, or that of the job)"
