"""Nothing is lost, however a run ends.

``pytest tests/fault_injection --rounds 200`` runs 200 rounds with random faults. A failing round is
replayed with ``--rounds 1 --chaos-seed`` and its number. pytest shows the log of its faults.
"""

from __future__ import annotations

import logging
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from faults import ENDS, SILENCE, Run, Setting, make_setting
from forkserver_runner import virnucpro
from run_helpers import assert_same_run, leftovers, wait_until

N_RECORDS = 1_300  # some 16 shards, in more than a second of one worker
LOGGER = logging.getLogger("chaos")


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    made = make_setting(tmp_path_factory.mktemp("kills"), N_RECORDS)
    assert len(list((made.undisturbed / "features").glob("*[0-9].h5"))) >= 3
    assert list((made.undisturbed / "features").glob("*_copies.h5"))
    return made


class Campaign:
    """A random sequence of faults, from a seed, with a log."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.began = time.monotonic()

    def tell(self, what: str) -> None:
        LOGGER.warning("%6.2f s: %s", time.monotonic() - self.began, what)

    def wait(self, longest: float) -> None:
        time.sleep(self.chance.uniform(0.0, longest))

    def resources(self) -> list[str]:
        workers = self.chance.choice("12")
        tokens = self.chance.choice(["2048", "4096"])
        return ["--resume", "--workers", workers, "--esm-batch-size", tokens]

    def start(self, setting: Setting, output) -> Run:
        resources = self.resources()
        self.tell(f"start {' '.join(resources)}")
        run = Run.start(setting, output, *resources)
        if self.chance.random() < 0.8:
            run.wait_for_work()
        self.wait(2.0)
        return run

    def harm_a_worker(self, run: Run) -> None:
        workers = run.workers()
        if workers:
            victim = self.chance.choice(workers)
            ways = [signal.SIGKILL, signal.SIGSEGV]
            if run.is_ready(victim):  # starting may take time
                ways.append(signal.SIGSTOP)
            number = self.chance.choice(ways)
            self.tell(f"{number.name} for worker {victim.pid}, of {len(workers)}")
            try:
                victim.send_signal(number)
            except psutil.NoSuchProcess:
                self.tell("it was gone")
        self.wait(1.0)

    def put_to_sleep(self, run: Run) -> None:
        """Stop it as Ctrl-Z does, and continue it later as `fg` does."""
        self.tell("SIGSTOP for all, and SIGCONT")
        run.send_to_all(signal.SIGSTOP)
        time.sleep(self.chance.choice([0.5, SILENCE + 1]))
        run.send_to_all(signal.SIGCONT)

    def end(self, run: Run) -> None:
        """End the run, or wait for its end, and check how it ended."""
        number = self.chance.choice([*ENDS, signal.SIGKILL, None])
        expected = {0} if number is None else {0, *ENDS[number]}
        if number is not None:
            to_all = number == signal.SIGINT or self.chance.random() < 0.3
            self.tell(f"{number.name} for {'all' if to_all else 'the parent'}")
            (run.send_to_all if to_all else run.send)(number)
            if self.chance.random() < 0.2:
                self.wait(0.3)
                self.tell("SIGINT once more")
                run.send_to_all(signal.SIGINT)
                expected.add(-signal.SIGINT)  # Python ignores signals at its very end
        errors = run.end()
        self.tell(f"ended with {run.process.returncode}")
        assert run.process.returncode in expected, errors
        if run.process.returncode >= 0:  # else the system ended it, perhaps during imports
            assert "Traceback" not in errors, errors
            assert not leftovers(run.output)
            assert ("--resume" in errors) == (run.process.returncode > 0), errors


def test_random_kills_and_resumes_give_the_same_bytes(setting, tmp_path, chaos_seed):
    campaign = Campaign(chaos_seed)
    output = tmp_path / "run"
    for _ in range(campaign.chance.randint(1, 3)):
        run = campaign.start(setting, output)
        for _ in range(campaign.chance.randint(0, 2)):
            campaign.harm_a_worker(run)
        if campaign.chance.random() < 0.1:
            campaign.put_to_sleep(run)
        campaign.end(run)
    last = campaign.start(setting, output)
    if campaign.chance.random() < 0.5:
        campaign.harm_a_worker(last)
    errors = last.end()
    assert last.process.returncode == 0, errors
    assert_same_run(output, setting.undisturbed)
    assert not leftovers(output)


def test_stopped_worker_ends_with_killed_parent(setting, tmp_path):
    run = Run.start(setting, tmp_path / "run", "--workers", "2")
    run.wait_for_work()
    workers = run.workers()
    assert len(workers) == 2

    def are_stopped() -> bool:
        for worker in filter(
            run.is_ready, workers
        ):  # the process ends with its parent by its own request
            worker.suspend()
        return all(worker.status() == psutil.STATUS_STOPPED for worker in workers)

    wait_until(are_stopped)
    run.process.kill()
    run.end()
    assert_resumes(setting, run.output)


def test_ended_run_stops_soon_and_keeps_its_work(setting, tmp_path):
    """By Ctrl-C, and by a batch system that resumes it."""
    output = tmp_path / "run"
    done = end_amid_shards(setting, output, signal.SIGINT, 130, "interrupted")
    assert done
    more = end_amid_shards(setting, output, signal.SIGTERM, 143, "terminated", "--resume")
    assert more.items() > done.items()
    assert_resumes(setting, output)
    assert {path: path.stat().st_mtime_ns for path in more} == more


def assert_resumes(setting: Setting, output: Path) -> None:
    """Check that an undisturbed command completes the run with the expected bytes."""
    ended = virnucpro(*setting.words, "-o", output, "--resume", "--workers", "1")
    assert ended.returncode == 0, ended.stderr
    assert_same_run(output, setting.undisturbed)
    assert not leftovers(output)


def end_amid_shards(
    setting: Setting, output: Path, number: int, exit_code: int, word: str, *more: str
) -> dict[Path, int]:
    """Ask a run to end when its first shard is done. -> the feature files, and their times"""
    run = Run.start(setting, output, "--workers", "1", *more)
    n_before = run.log().count(" done by ")
    wait_until(lambda: run.log().count(" done by ") > n_before or run.process.poll() is not None)
    asked = time.monotonic()
    run.send_to_all(number)
    errors = run.end()
    assert time.monotonic() - asked < 10
    assert run.process.returncode == exit_code, errors
    assert f"error: {word}" in errors and "--resume" in errors
    assert "Traceback" not in errors
    assert not leftovers(output)
    return {path: path.stat().st_mtime_ns for path in (output / "features").glob("[0-9]*.h5")}
