"""A SLURM cluster of one node in a temporary folder: daemons, jobs and how they end."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from run_helpers import wait_until

NEEDED = ("sbatch", "slurmctld", "slurmd", "munged")
AWAY = [name for name in NEEDED if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
NEEDS_SLURM = pytest.mark.skipif(
    bool(AWAY) or os.geteuid() != 0,
    reason=f"needs root and Debian's slurmctld, slurmd, slurm-client and munge; missing: {AWAY}",
)
# jobs that are over; while a task waits for its turn again it is PENDING
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
CONF = """
ClusterName=virnucpro
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=3600
NodeName={host} CPUs=8 RealMemory=100000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    root: Path
    environment: dict[str, str]

    def call(self, *command: object) -> str:
        answer = subprocess.run(
            list(map(str, command)), env=self.environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, (command, answer.stderr)
        return answer.stdout.strip()

    def submit(self, *arguments: object) -> str:
        """Submit a job with one core, and return its number."""
        small = ("--parsable", "--gres=none", "--cpus-per-task=1", "--mem=1G", "--chdir", self.root)
        return self.call("sbatch", *small, *arguments)

    def states(self, job: str) -> dict[str, str]:
        """Return the state of each task of a job, by its name."""
        lines = self.call("squeue", "--all", "--states=all", "-rho", "%i %T", f"--jobs={job}")
        return dict(line.split() for line in lines.splitlines())

    def wait(self, *jobs: str, seconds: float = 240.0) -> dict[str, str]:
        """Wait until jobs end, and return the states of their tasks."""

        def look() -> dict[str, str] | None:
            states = {task: state for job in jobs for task, state in self.states(job).items()}
            return states if set(states.values()) <= ENDED else None

        return wait_until(look, seconds, apart=0.2, story=self.logs)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.root.glob("*.log")))


@contextmanager
def one_node_slurm() -> Iterator[Slurm]:
    """Start munged and both SLURM daemons, and end them with all their jobs."""
    with TemporaryDirectory(prefix="virnucpro-slurm-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # munged runs as its own user and must reach its files
        with _daemons(root) as slurm:
            yield slurm


@contextmanager
def _daemons(root: Path) -> Iterator[Slurm]:
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (root / name).mkdir()
    conf = root / "slurm.conf"
    conf.write_text(CONF.format(host=host, root=root, ports=_free_ports(2)))
    path = f"{_step_starter(root / 'bin', conf)}:{os.environ['PATH']}:/usr/sbin"
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
    slurm = Slurm(root, environment)
    with ExitStack() as stack:
        _start(stack, _munged(root / "munge"), root / "munged.out", environment)
        _await((root / "munge/socket").exists, root)
        for daemon in ("slurmctld", "slurmd"):
            command = [daemon, "-D", "-f", str(conf)]
            _start(stack, command, root / f"{daemon}.out", environment)
        stack.callback(_end_jobs, slurm)
        _await(lambda: "idle" in slurm.call("sinfo", "--noheader", "--format=%T"), root)
        yield slurm


def _step_starter(folder: Path, conf: Path) -> Path:
    """Make a folder with an ``srun`` that finds this SLURM even if a job lost its variables."""
    folder.mkdir()
    starter = folder / "srun"
    srun = shutil.which("srun")
    starter.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {srun} "$@"\n')
    starter.chmod(0o755)
    return folder


def _munged(folder: Path) -> list[str]:
    """Return the command for munged, which accepts only files of its own user."""
    folder.mkdir()
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for path in (folder, key):
        shutil.chown(path, "munge", "munge")
    options = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
    return [*as_munge, "munged", "--foreground", f"--socket={folder / 'socket'}", *options]


def _start(stack: ExitStack, command: list[str], out: Path, environment: dict[str, str]) -> None:
    with out.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _end_jobs(slurm: Slurm) -> None:
    jobs = slurm.call("squeue", "--noheader", "--format=%A").split()
    if jobs:
        slurm.call("scancel", *jobs)
        wait_until(lambda: not slurm.call("squeue", "--noheader"), 30, apart=0.2)


def _await(is_there: Callable[[], object], root: Path) -> None:
    def look() -> object:
        with suppress(AssertionError):  # a daemon does not answer yet
            return is_there()
        return None

    def outputs() -> str:
        return "\n".join(path.read_text(errors="replace") for path in root.glob("*.out"))

    wait_until(look, 30, apart=0.1, story=outputs)


def _free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
