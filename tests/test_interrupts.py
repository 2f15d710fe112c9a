"""Real runs of the command line, killed at random moments, then resumed and compared.

``pytest tests/test_interrupts.py --rounds 20`` runs more rounds; a failing round is replayed
with ``--chaos-seed``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import make_tiny, open_dna
from runs import assert_same_run, leftovers

N_RECORDS = 2600  # about three shards


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A command without its output folder, and what it leaves when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("interrupts")
    rng = np.random.default_rng(11)
    fasta = folder / "contigs.fa"
    contigs = [open_dna(480, rng) for _ in range(N_RECORDS)]
    contigs += contigs[::4]  # are not embedded again
    fasta.write_text("".join(f">c{i}\n{bases}\n" for i, bases in enumerate(contigs)))
    tiny = make_tiny(folder)
    command = [
        *(sys.executable, "-m", "virnucpro", "predict", "--quiet", "--device", "cpu"),
        *("--workers", "2", "-i", str(fasta), "--model", str(tiny.model)),
        *("--head", str(tiny.head_file)),
        "-o",
    ]
    whole = folder / "undisturbed"
    finished = subprocess.run([*command, str(whole)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert len(list((whole / "features").glob("*[0-9].h5"))) >= 3
    assert list((whole / "features").glob("*_copies.h5"))
    return command, whole


def start(command: list[str], output: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, str(output), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as a shell makes for a job
    )


def wait_for_work(output: Path, process: subprocess.Popen[str]) -> None:
    """Until a worker has said that it is ready."""
    log = output / "virnucpro.log"
    while not (log.exists() and "is ready" in log.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    family = psutil.Process(process.pid).children(recursive=True)
    return [child for child in family if "spawn_main" in " ".join(child.cmdline())]


def test_random_kills_and_resumes_leave_the_bytes_of_an_undisturbed_run(
    setting, tmp_path, chaos_seed
):
    command, whole = setting
    chance = random.Random(chaos_seed)
    output = tmp_path / "run"
    for _ in range(chance.randint(1, 3)):
        process = start(command, output, "--resume")
        family = [psutil.Process(process.pid)]
        try:
            if chance.random() < 0.7:
                wait_for_work(output, process)
            time.sleep(chance.uniform(0.0, 2.0))
            family += psutil.Process(process.pid).children(recursive=True)
            if chance.random() < 0.5 and (victims := workers_of(process)):
                chance.choice(victims).kill()
                time.sleep(chance.uniform(0.0, 1.0))
            process.kill()
        except psutil.NoSuchProcess:
            pass  # it was quicker
        process.communicate()
        assert_all_gone(family)
    process = start(command, output, "--resume")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_same_run(output, whole)
    assert not leftovers(output)


def test_a_killed_worker_does_not_disturb_the_run(setting, tmp_path):
    command, whole = setting
    output = tmp_path / "run"
    process = start(command, output)
    wait_for_work(output, process)
    workers_of(process)[0].kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "was lost" in errors and "it is replaced" in errors
    assert_same_run(output, whole)


@pytest.mark.parametrize(
    ("number", "exit_code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_ctrl_c_and_sigterm_stop_within_seconds_and_keep_what_is_done(
    setting, tmp_path, number, exit_code, word
):
    command, whole = setting
    output = tmp_path / "run"
    process = start(command, output)
    wait_for_work(output, process)
    family = psutil.Process(process.pid).children(recursive=True)
    asked = time.monotonic()
    os.killpg(process.pid, number)  # as a terminal, or a batch system, does
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - asked < 10
    assert process.returncode == exit_code
    assert f"error: {word}" in errors and "--resume" in errors
    assert "Traceback" not in errors
    assert_all_gone(family)
    refused = subprocess.run([*command, str(output)], capture_output=True)
    assert refused.returncode == 73
    again = start(command, output, "--resume")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert_same_run(output, whole)
    assert not leftovers(output)
