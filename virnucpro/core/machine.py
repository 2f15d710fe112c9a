"""Find the cores and memory that this process may use.

A process may use less than its machine has. A container or a batch system limits it by control
groups (cgroup, version 1 or 2), by CPU affinity, or by variables that only state the limit (SLURM).
All code that depends on cores or memory calls ``read_machine``.

Control groups are nested. A process gets the smallest limit on the path from its own group to the
root. A container may see only the lower part of that path.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from virnucpro.core.errors import UsageError
from virnucpro.core.option_text import with_options

MACHINE_LIMIT = "the machine"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CoreLimit:
    """A number of cores that the process may use, with its source."""

    cores: float  # a quota may be a fraction of a core
    source: str


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that the process may use, in bytes, with its source."""

    total: int
    available: int  # not used by any process with the same limit
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The share of the machine that this process may use."""

    cores: int  # at least 1; rounded up
    cores_source: str
    memory_total: int  # bytes
    memory_available: int
    memory_source: str

    @classmethod
    def from_limits(cls, cores: list[CoreLimit], memory: list[MemoryLimit]) -> Machine:
        """Apply the smallest limits. The first one wins a tie."""
        smallest_limit = min(cores, key=lambda limit: limit.cores)
        least = min(memory, key=lambda limit: limit.total)
        return cls(
            cores=max(1, math.ceil(smallest_limit.cores)),
            cores_source=smallest_limit.source,
            memory_total=least.total,
            memory_available=max(0, min(limit.available for limit in memory)),
            memory_source=least.source,
        )

    @property
    def binding_limits(self) -> str:
        """Describe the limits below the machine's own size for messages, or "" without any."""
        sources = (("cores", self.cores_source), ("memory", self.memory_source))
        return ", ".join(
            f"{resource} by {source}" for resource, source in sources if source != MACHINE_LIMIT
        )


def read_machine(
    slurm: Mapping[str, str], root: Path = Path("/"), cores: CoreLimit | None = None
) -> Machine:
    """Read all limits of this process.

    Args:
        slurm: variables that SLURM sets.
        root: folder with ``proc`` and the mounted control groups.
        cores: the operating system's limit, or None to read it.
    """
    machine_memory = _machine_memory(root)
    core_limits = [cores or _usable_cores()]
    memory_limits = [machine_memory]
    for group in _read_groups(root):
        if core_limit := group.core_limit():
            core_limits.append(core_limit)
        memory_limits.extend(group.memory_limits())
    core_limits.extend(_slurm_cores(slurm))
    memory_limits.extend(_slurm_memory(slurm, machine_memory.available))
    return Machine.from_limits(core_limits, memory_limits)


def count_workers(workers: int | None, model_bytes: int, machine: Machine) -> int:
    """Choose the number of CPU workers for ``--workers``.

    Each worker needs a core and ``model_bytes`` for its model. None means as many workers as fit
    into the cores and the memory that this process may use.

    Raises:
        UsageError: the number is out of range.
    """
    max_workers = 1024
    if workers is None:
        worker_bytes = GIB // 2  # PyTorch and a batch in a CPU worker, without the model
        n_fitting = int(0.8 * machine.memory_available / (model_bytes + worker_bytes))
        return min(machine.cores, max(1, n_fitting))
    if not 1 <= workers <= max_workers:
        raise UsageError(
            with_options("{workers} is {value}", value=workers),
            hint=f"give 1 to {max_workers}, or leave it out",
            option="workers",
        )
    return workers


def _usable_cores() -> CoreLimit:
    """Return the cores in the CPU affinity, which batch systems and ``taskset`` set."""
    n_cores = os.cpu_count() or 1
    n_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else n_cores
    return CoreLimit(n_usable, MACHINE_LIMIT if n_usable >= n_cores else "the CPU affinity")


def _machine_memory(root: Path) -> MemoryLimit:
    facts = _read_numbers(root / "proc" / "meminfo")
    if {"MemTotal:", "MemAvailable:"} <= facts.keys():
        total = facts["MemTotal:"] << 10
        available = facts["MemAvailable:"] << 10
        return MemoryLimit(total, available, MACHINE_LIMIT)
    import psutil  # for systems without that file; slow to import

    memory = psutil.virtual_memory()
    return MemoryLimit(memory.total, memory.available, MACHINE_LIMIT)


class _MemoryFiles(NamedTuple):
    """The memory files of a control group."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]  # memory.stat entries for cached files, which the kernel can free


_MEMORY_FILES = {
    1: _MemoryFiles(
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        cache=("total_active_file", "total_inactive_file"),
    ),
    # above `memory.high` the kernel slows the processes down, above `memory.max` it kills them
    2: _MemoryFiles(
        limits=("memory.max", "memory.high"),
        usage="memory.current",
        cache=("active_file", "inactive_file"),
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A control group on the path from this process to the root."""

    folder: Path
    name: str  # for messages
    version: int

    def core_limit(self) -> CoreLimit | None:
        """Return the CPU quota in cores, or None without one."""
        if self.version == 2:
            words = _read_text(self.folder / "cpu.max").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_read_text(self.folder / name).strip() for name in names]
        if len(words) != 2 or not all(word.isdecimal() for word in words):  # max, -1, or no file
            return None
        quota, period = map(int, words)
        if not quota or not period:
            return None
        return CoreLimit(quota / period, f"the CPU quota of {self._describe}")

    def memory_limits(self) -> Iterator[MemoryLimit]:
        files = _MEMORY_FILES[self.version]
        facts = _read_numbers(self.folder / "memory.stat")
        usage = _read_text(self.folder / files.usage).strip()
        used = int(usage) if usage.isdecimal() else 0
        used -= min(used, sum(facts.get(name, 0) for name in files.cache))
        limits = [_read_text(self.folder / name).strip() for name in files.limits]
        # version 1: the smallest limit on the path, including groups that a container cannot see
        limits.append(str(facts.get("hierarchical_memory_limit", "")))
        for limit in limits:
            if limit.isdecimal():  # not "max", and the file exists
                source = f"the memory limit of {self._describe}"
                yield MemoryLimit(int(limit), int(limit) - used, source)

    @property
    def _describe(self) -> str:
        return f"the control group {self.name} (cgroup v{self.version})"


def _read_groups(root: Path) -> Iterator[_Group]:
    """Yield the CPU and memory groups of this process, each with its parents."""
    paths = dict(_read_paths(root))
    for line in _read_text(root / "proc" / "self" / "mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        mount_words = mount.split()
        words = filesystem.split()
        if len(mount_words) < 5 or len(words) < 3 or words[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if words[0] == "cgroup2" else 1
        controllers = {""} if version == 2 else {"cpu", "memory"} & {*words[2].split(",")}
        top, mounted_at = map(_unescape, mount_words[3:5])
        for controller in controllers & paths.keys():
            for group in _parent_groups(paths[controller], top):
                folder = root / mounted_at.lstrip("/") / group
                yield _Group(folder, str(PurePosixPath("/") / group), version)


def _read_paths(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each controller with this process's group path. Version 2 has the controller ""."""
    for line in _read_text(root / "proc" / "self" / "cgroup").splitlines():
        _, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        if path:
            yield from ((controller, path) for controller in controllers.split(","))


def _parent_groups(group: str, top: str) -> list[PurePosixPath]:
    """Return the paths of a group and its parents, relative to the mount, whose root is ``top``.

    In a container, the mount may begin elsewhere. Then only the group at its top is known.
    """
    path = PurePosixPath(group)
    if not path.is_relative_to(top) or ".." in path.parts:
        return [PurePosixPath()]
    relative = path.relative_to(top)
    return [relative, *relative.parents]


def _slurm_cores(slurm: Mapping[str, str]) -> Iterator[CoreLimit]:
    name = "SLURM_CPUS_PER_TASK"
    if n_cores := _number(slurm, name):
        yield CoreLimit(n_cores, name)


def _slurm_memory(slurm: Mapping[str, str], available: int) -> Iterator[MemoryLimit]:
    """Yield the memory that SLURM grants on this node: MiB per node, CPU or GPU.

    The share used by other tasks of the job is unknown. 0 means all memory of the node.
    """
    mib = 1 << 20
    n_cpus = _number(slurm, "SLURM_CPUS_PER_TASK") or _number(slurm, "SLURM_CPUS_ON_NODE")
    counts = {
        "SLURM_MEM_PER_NODE": 1,
        "SLURM_MEM_PER_CPU": n_cpus or 1,
        "SLURM_MEM_PER_GPU": _number(slurm, "SLURM_GPUS_ON_NODE") or 1,
    }
    for name, count in counts.items():
        if size := _number(slurm, name):
            total = size * count * mib
            yield MemoryLimit(total, min(total, available), name)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else 0


def _read_text(path: Path) -> str:
    """Read a text file. Return "" if it is missing or unreadable."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def _read_numbers(path: Path) -> dict[str, int]:
    """Parse a file with a name and a number on each line."""
    lines = (line.split() for line in _read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _unescape(path: str) -> str:
    # In the paths of mountinfo, a space is \040.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
