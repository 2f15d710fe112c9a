"""Cores and memory that a process may use: control groups, SLURM, CPU affinity."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from forkserver_runner import virnucpro
from run_helpers import write_fasta

from virnucpro.core.machine import CoreLimit, Machine, count_workers, read_machine
from virnucpro.models.devices import choose_devices
from virnucpro.models.environment import slurm_variables
from virnucpro.workflows.extract_options import ExtractOptions

MIB = 1 << 20
GIB = 1 << 30
EIGHT = CoreLimit(8, "the machine")
# of a version 1 controller without a limit
UNLIMITED = 9223372036854771712


def make_root(
    root: Path, mounts: str, groups: str, files: Mapping[str, object], available: int = 12 * GIB
) -> Path:
    """Write ``proc`` and the control groups of a machine with 16 GiB."""
    texts = {
        "proc/meminfo": f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {available >> 10} kB\n",
        "proc/self/mountinfo": mounts,
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def mount(filesystem: str, options: str, at: str, top: str = "/") -> str:
    return f"35 31 0:32 {top} {at} rw,relatime shared:1 - {filesystem} cgroup rw,{options}\n"


def test_machine_without_limits(tmp_path):
    machine = read_machine({}, make_root(tmp_path, "", "", {}), EIGHT)
    assert machine == Machine(8, "the machine", 16 * GIB, 12 * GIB, "the machine")
    assert machine.binding_limits == ""


def test_v1_limits_of_own_group(tmp_path):
    memory = "sys/fs/cgroup/memory/job"
    cpu = "sys/fs/cgroup/cpu,cpuacct/job"
    root = make_root(
        tmp_path,
        mount("cgroup", "memory", "/sys/fs/cgroup/memory")
        + mount("cgroup", "cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct"),
        "4:memory:/job\n3:cpuset:/\n2:cpu,cpuacct:/job\n",
        {
            f"{memory}/memory.limit_in_bytes": 380 * MIB,
            f"{memory}/memory.usage_in_bytes": 100 * MIB,
            f"{memory}/memory.stat": f"total_inactive_file {30 * MIB}\ntotal_active_file {MIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
            f"{cpu}/cpu.cfs_quota_us": 50_000,
            f"{cpu}/cpu.cfs_period_us": 100_000,
        },
    )
    assert read_machine({}, root, EIGHT) == Machine(
        cores=1,
        cores_source="the CPU quota of the control group /job (cgroup v1)",
        memory_total=380 * MIB,
        memory_available=311 * MIB,
        memory_source="the memory limit of the control group /job (cgroup v1)",
    )


def test_v2_limits_of_groups_above(tmp_path):
    """The smallest limit on the path to the root counts."""
    top = "sys/fs/cgroup"
    root = make_root(
        tmp_path,
        mount("cgroup2", "nsdelegate", "/sys/fs/cgroup"),
        "0::/slurm/job_7/step_0\n",
        {
            f"{top}/slurm/job_7/step_0/memory.max": "max",
            f"{top}/slurm/job_7/step_0/cpu.max": "max 100000",
            f"{top}/slurm/job_7/memory.max": 8 * GIB,
            f"{top}/slurm/job_7/memory.high": "max",
            f"{top}/slurm/job_7/memory.current": 3 * GIB,
            f"{top}/slurm/job_7/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 0",
            f"{top}/slurm/job_7/cpu.max": "450000 100000",
            f"{top}/slurm/memory.max": 9 * GIB,
            f"{top}/slurm/memory.current": 8 * GIB,  # of other jobs too
            f"{top}/slurm/cpu.max": "250000 100000",
        },
    )
    assert read_machine({}, root, EIGHT) == Machine(
        cores=3,
        cores_source="the CPU quota of the control group /slurm (cgroup v2)",
        memory_total=8 * GIB,
        memory_available=GIB,
        memory_source="the memory limit of the control group /slurm/job_7 (cgroup v2)",
    )


@pytest.mark.parametrize(
    ("groups", "top"),
    [
        ("0::/\n", "/"),  # a container with a namespace of its own
        ("0::/docker/abc\n", "/docker/abc"),  # without one, and with a mount of its group alone
        ("0::/../other\n", "/"),  # a process outside of the namespace
        ("0::/elsewhere\n", "/docker/abc"),
    ],
)
def test_container_sees_limit_at_its_mount(tmp_path, groups, top):
    files = {"sys/fs/cgroup/memory.max": 2 * GIB, "sys/fs/cgroup/cpu.max": "200000 100000"}
    root = make_root(tmp_path, mount("cgroup2", "x", "/sys/fs/cgroup", top), groups, files)
    machine = read_machine({}, root, EIGHT)
    assert (machine.cores, machine.memory_total) == (2, 2 * GIB)


def test_hidden_parent_limits_memory_in_v1(tmp_path):
    """The container sees its own group, and in memory.stat the limit of its parents."""
    files = {
        "cg/memory.limit_in_bytes": UNLIMITED,
        "cg/memory.stat": f"hierarchical_memory_limit {3 * GIB}",
    }
    groups = "4:memory:/kube/pod\n"
    root = make_root(tmp_path, mount("cgroup", "memory", "/cg", "/kube/pod"), groups, files)
    assert read_machine({}, root, EIGHT).memory_total == 3 * GIB


def test_memory_high_is_a_limit(tmp_path):
    files = {"cg/memory.max": 4 * GIB, "cg/memory.high": GIB, "cg/memory.current": 2 * GIB}
    root = make_root(tmp_path, mount("cgroup2", "x", "/cg"), "0::/\n", files)
    machine = read_machine({}, root, EIGHT)
    assert (machine.memory_total, machine.memory_available) == (GIB, 0)


def test_mount_point_with_a_space(tmp_path):
    files = {"my cg/a b/memory.max": GIB}
    root = make_root(tmp_path, mount("cgroup2", "x", r"/my\040cg"), "0::/a b\n", files)
    assert read_machine({}, root, EIGHT).memory_total == GIB


@pytest.mark.parametrize(("text", "n_cores"), [("garbage", 8), ("", 8), ("0 0", 8), ("1 10", 1)])
def test_odd_quotas(tmp_path, text, n_cores):
    files = {"cg/cpu.max": text, "cg/memory.max": text}
    root = make_root(tmp_path, mount("cgroup2", "x", "/cg"), "0::/\n", files)
    machine = read_machine({}, root, EIGHT)
    assert (machine.cores, machine.memory_total) == (n_cores, 16 * GIB)


@pytest.mark.parametrize(
    ("variables", "cores", "memory", "source"),
    [
        ({"SLURM_CPUS_PER_TASK": "3"}, 3, 16 * GIB, "the machine"),
        ({"SLURM_CPUS_PER_TASK": "99"}, 8, 16 * GIB, "the machine"),
        ({"SLURM_MEM_PER_NODE": "2048"}, 8, 2 * GIB, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "0"}, 8, 16 * GIB, "the machine"),  # all memory
        ({"SLURM_MEM_PER_CPU": "512"}, 8, GIB // 2, "SLURM_MEM_PER_CPU"),
        (
            {"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"},
            *(8, 2 * GIB, "SLURM_MEM_PER_CPU"),
        ),
        (
            {"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "2"},
            *(2, GIB, "SLURM_MEM_PER_CPU"),
        ),
        (
            {"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "3"},
            *(8, 3 * GIB, "SLURM_MEM_PER_GPU"),
        ),
        ({"SLURM_CPUS_PER_TASK": "two"}, 8, 16 * GIB, "the machine"),
    ],
)
def test_slurm_limits(tmp_path, variables, cores, memory, source):
    machine = read_machine(variables, make_root(tmp_path, "", "", {}), EIGHT)
    assert (machine.cores, machine.memory_total, machine.memory_source) == (cores, memory, source)
    assert machine.memory_available == min(memory, 12 * GIB)


def test_variables_of_slurm_alone_are_kept():
    environment = {"HOME": "/", "SLURM_CPUS_PER_TASK": "2", "MY_SLURM_JOB": "1"}
    assert slurm_variables(environment) == {"SLURM_CPUS_PER_TASK": "2"}


def test_system_without_proc_is_asked_for_memory(tmp_path):
    assert read_machine({}, tmp_path).memory_total == psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_affinity_limits_cores(tmp_path):
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    os.sched_setaffinity(0, {min(before)})
    try:
        machine = read_machine({}, tmp_path)
    finally:
        os.sched_setaffinity(0, before)
    assert (machine.cores, machine.cores_source) == (1, "the CPU affinity")


# What the limits decide


@pytest.mark.parametrize(
    ("n_cores", "available", "n_workers"), [(8, 16 * GIB, 8), (8, 2 * GIB, 3), (8, 300 * MIB, 1)]
)
def test_limits_decide_workers(n_cores, available, n_workers):
    machine = Machine(n_cores, "a quota", available, available, "a limit")
    assert count_workers(None, 0, machine) == n_workers
    assert count_workers(5, 0, machine) == 5


def test_slurm_decides_devices_of_a_run(tmp_path):
    slurm = {"SLURM_CPUS_PER_TASK": "1"}
    options = ExtractOptions(input=(), output_dir=tmp_path, device="cpu", slurm=slurm)
    choice = choose_devices(options)
    assert choice.devices == ("cpu",)
    assert choice.descriptions == (
        "CPU, up to 1 worker of one core each on 1 core (limits: cores by SLURM_CPUS_PER_TASK)",
    )


def test_slurm_decides_helpers_and_memory_of_a_run(tmp_path):
    fasta = write_fasta(tmp_path / "in.fa", {"a": "ACGTTGCA" * 50})
    env = {**os.environ, "SLURM_CPUS_PER_TASK": "1", "SLURM_MEM_PER_NODE": "1000"}
    answer = virnucpro("predict", "-i", fasta, "-o", tmp_path / "run", env=env)
    assert answer.returncode == 0, answer.stderr
    resources = json.loads((tmp_path / "run" / "run.json").read_text())["resources"]
    assert (resources["n_helpers"], resources["memory"]) == (0, 1000 * MIB)


def test_devices_shows_limits_and_sources():
    env = {**os.environ, "SLURM_CPUS_PER_TASK": "1", "SLURM_MEM_PER_NODE": "1024"}
    text = " ".join(virnucpro("devices", env=env).stdout.split())
    assert "cpu 1 core, " in text and "of 1.0 GiB free" in text
    assert "cores limited by SLURM_CPUS_PER_TASK, memory by SLURM_MEM_PER_NODE" in text
    facts = json.loads(virnucpro("devices", "--json", env=env).stdout)["cpu"]
    assert (facts["cores"], facts["cores_limited_by"]) == (1, "SLURM_CPUS_PER_TASK")
    assert (facts["memory_total"], facts["memory_limited_by"]) == (GIB, "SLURM_MEM_PER_NODE")
