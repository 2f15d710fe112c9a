"""Run commands in sessions of their own, and kill, stop or signal their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from conftest import make_tiny, open_dna
from forkserver_runner import virnucpro
from run_helpers import hear_signals, is_own_process, wait_until, write_fasta

SILENCE = 8  # seconds after which a worker counts as hung
# a signal before the program can catch it ends it too, with the same meaning
ENDS = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGINT: {130, -signal.SIGINT},
    signal.SIGTERM: {143, -signal.SIGTERM},
    signal.SIGHUP: {143, -signal.SIGHUP},
}


@dataclass(frozen=True)
class Setting:
    """A command without its output folder, and the result of an undisturbed run."""

    program: tuple[str, ...]
    words: tuple[str, ...]
    undisturbed: Path


def make_setting(folder: Path, n_records: int) -> Setting:
    rng = np.random.default_rng(11)
    contigs = [open_dna(480, rng) for _ in range(n_records)]
    contigs += contigs[::4]  # are not embedded again
    records = {f"c{i}": bases for i, bases in enumerate(contigs)}
    fasta = write_fasta(folder / "contigs.fa", records)
    tiny = make_tiny(folder)
    program = (sys.executable, "-X", "faulthandler", "-m", "virnucpro")
    words = ("predict", "--quiet", "--device", "cpu", "--worker-timeout", str(SILENCE))
    words += ("-i", str(fasta), "--model", str(tiny.model), "--head", str(tiny.head_file))
    whole = folder / "undisturbed"
    finished = virnucpro(*words, "--workers", "2", "-o", whole)
    assert finished.returncode == 0, finished.stderr
    return Setting(program, words, whole)


@dataclass
class Run:
    """A running command, with all processes that it starts."""

    process: subprocess.Popen[str]
    output: Path

    @classmethod
    def start(cls, setting: Setting, output: Path, *more: str) -> Run:
        process = subprocess.Popen(
            [*setting.program, *setting.words, "-o", str(output), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # as for users
            start_new_session=True,  # a group of its own, as a shell makes for a job
            preexec_fn=hear_signals,
        )
        return cls(process, output)

    def wait_for_work(self) -> None:
        """Wait until another worker is ready, or the run has ended."""
        known = self.log().count("is ready")
        wait_until(lambda: self.log().count("is ready") > known or self.process.poll() is not None)

    def is_ready(self, worker: psutil.Process) -> bool:
        return f"process {worker.pid}\n" in self.log()

    def log(self) -> str:
        log = self.output / "virnucpro.log"
        return log.read_text() if log.exists() else ""

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.family() if is_own_process(one)]

    def family(self) -> list[psutil.Process]:
        """Return all processes of the run that exist, whatever their parent."""
        return [one for one in psutil.process_iter() if _session(one.pid) == self.process.pid]

    def send(self, number: int) -> None:
        """Send a signal to the parent only, as ``kill`` does."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def send_to_all(self, number: int) -> None:
        """Send a signal to all processes, as a terminal or a batch system does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, seconds: float = 120) -> str:
        """Wait until the run and all its processes have ended. -> its error output"""
        try:
            _, errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            family = self.family()
            self.send(signal.SIGABRT)  # has it say where it is
            psutil.wait_procs(family[:1], timeout=5)
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            _, errors = self.process.communicate()
            raise AssertionError(f"does not end: {family}\n{errors}") from None
        _, alive = psutil.wait_procs(self.family(), timeout=10)
        assert not alive, f"outlive their parent: {alive}"
        return errors


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return os.getsid(pid)
    return None
