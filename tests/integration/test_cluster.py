"""``predict --executor parsl``: blocks on this machine, and on a SLURM cluster of one node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fair_esm_reference import random_protein
from one_node_slurm import NEEDS_SLURM, one_node_slurm
from run_helpers import assert_same_run, leftovers, predict_here, wait_until, within

from virnucpro.core.errors import UsageError
from virnucpro.results.outputs import open_run_dir

pytest.importorskip("parsl", reason="needs the extra cluster")
from parsl.providers import LocalProvider

from virnucpro.engine.parsl import load_parsl_executor, read_blocks

LOCAL = "provider: local\nmax_blocks: 2\nparts: 4\n"
SLURM = LOCAL.replace("local", "slurm") + "exclusive: false\ncores_per_node: 1\nmem_per_node: 1\n"
MARK = "VIRNUCPRO_TEST_OF_PARSL"


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some forty shards of proteins."""
    path = tmp_path_factory.mktemp("input") / "proteins.faa"
    path.write_text("".join(f">p{i}\n{random_protein(500, i)}\n" for i in range(1400)))
    return path


@pytest.fixture(scope="module")
def one_machine(proteins, tiny, tmp_path_factory) -> Path:
    return predict_here([proteins], tiny, tmp_path_factory.mktemp("one_machine") / "run")


class Run:
    """A command in a process, and all its descendants, found by a variable that they inherit."""

    def __init__(self, folder: Path, arguments: list[object], environment: dict[str, str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "virnucpro", "predict", *map(str, arguments)],
            env={**environment, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def descendants(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.pid != self.process.pid:
                    found.append(process)
        return found

    def await_shards(self, n: int) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return len(list((self.folder / "features").glob("*.h5"))) >= n

        wait_until(look)

    def busy_pool(self) -> psutil.Process:
        """Return Parsl's process of a block that is embedding."""

        def look() -> psutil.Process | None:
            for pool in self.descendants():
                with suppress(psutil.Error):
                    inner = [" ".join(p.cmdline()) for p in pool.children(recursive=True)]
                    is_pool = "process_worker_pool.py" in " ".join(pool.cmdline())
                    if is_pool and any("virnucpro.core.child_process" in line for line in inner):
                        return pool
            return None

        return wait_until(look)

    def end(self) -> None:
        output, _ = self.process.communicate()
        assert self.process.returncode == 0, output

    def await_end_of_all(self) -> None:
        wait_until(lambda: not self.descendants())

    def await_end_of_devices(self) -> None:
        """Wait until nothing embeds. A killed pool leaves an idle process of Parsl."""
        wait_until(lambda: not any("virnucpro" in line for line in self.command_lines()))

    def command_lines(self) -> Iterator[str]:
        for process in self.descendants():
            with suppress(psutil.Error):
                yield " ".join(process.cmdline())


@pytest.fixture
def start(proteins, tiny, tmp_path) -> Iterator[Callable[..., Run]]:
    runs = []

    def begin(
        *more: str, folder: Path = tmp_path / "run", blocks: str = LOCAL, **environment: str
    ) -> Run:
        config = tmp_path / "blocks.yaml"
        config.write_text(blocks)
        arguments = ["-i", proteins, "-o", folder, "--model", tiny.model, "--head", tiny.head_file]
        arguments += ["--precision", "fp32", "--device", "cpu", "--workers", "1", *more]
        arguments += ["--executor", "parsl", "--executor-config", config]
        runs.append(Run(folder, arguments, {**os.environ, **environment}))
        return runs[-1]

    try:
        with within(280):
            yield begin
    finally:
        for run in runs:
            run.process.kill()
            for process in run.descendants():
                with suppress(psutil.Error):
                    process.kill()


def test_blocks_give_the_run_of_one_machine(start, one_machine):
    run = start()
    run.await_shards(1)
    run.busy_pool().kill()
    run.end()
    run.await_end_of_devices()
    assert not leftovers(run.folder)
    assert_same_run(run.folder, one_machine)
    log = (run.folder / "virnucpro.log").read_text()
    assert log.count(" done by ") == len(list((one_machine / "features").glob("*.h5")))


def test_no_process_outlives_a_killed_parent(start, one_machine):
    run = start()
    run.await_shards(1)
    assert run.descendants()
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    run.await_end_of_all()
    expected, done = ({*(folder / "features").glob("*.h5")} for folder in (one_machine, run.folder))
    assert len(done) < len(expected)
    start("--resume").end()
    assert not leftovers(run.folder)
    assert_same_run(run.folder, one_machine)


@pytest.mark.slurm
@NEEDS_SLURM
def test_blocks_of_slurm_give_the_run_of_one_machine(start, one_machine):
    with one_node_slurm() as slurm:
        run = start(folder=slurm.root / "run", blocks=SLURM, **slurm.environment)
        run.end()
        assert_same_run(run.folder, one_machine)
        assert "virnucpro" in slurm.call("squeue", "--states=all", "--noheader", "--format=%j")


class StubbornProvider(LocalProvider):
    """A scheduler that does not cancel a job."""

    def cancel(self, job_ids):
        super().cancel(job_ids)
        raise OSError("scancel: no answer")


def test_silent_scheduler_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with load_parsl_executor(StubbornProvider(), open_run_dir(tmp_path)):
        pass
    assert "Parsl did not shut down cleanly: scancel: no answer" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provider: moon\n", "no provider moon"),
        ("provider: local\nwalltime: 1\npartition: gpu\n", "has no option partition"),
        ("provider: [local]\n", "no provider \\['local'\\]"),
        ("parts: 0\n", "parts is 0"),
        ("parts: true\n", "parts is True"),
        ("max_blocks: many\n", "max_blocks is many"),
        ("init_blocks: 1.5\n", "init_blocks is 1.5"),
        ("provider: slurm\nwalltime: 12:00:00\n", '"walltime" \\(int\\)'),
        ("colour: red\n", "no option colour"),
    ],
)
def test_faulty_block_description_is_refused(tmp_path, text, words):
    path = tmp_path / "blocks.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_blocks(path)
    assert caught.value.hint and "virnucpro train" not in caught.value.hint
