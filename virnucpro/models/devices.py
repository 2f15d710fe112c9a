"""Choose the devices of a run: GPUs if there are any, or else CPU workers.

Importing torch takes seconds, so it is imported only on a Mac.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.logging import format_count
from virnucpro.core.machine import Machine, count_workers, read_machine
from virnucpro.core.option_text import with_options
from virnucpro.models import nvidia_driver
from virnucpro.models.device_choice import ELSE_CPU, DeviceChoice

if TYPE_CHECKING:
    from virnucpro.core.device_options import ComputeOptions

CPU_FACTS = Path("/proc/cpuinfo")


def has_mps() -> bool:
    """Return True if torch can use an Apple GPU."""
    if sys.platform != "darwin":
        return False
    import torch

    return torch.backends.mps.is_available()


def choose_devices(
    options: ComputeOptions, workers: int | None = None, model_bytes: int = 0
) -> DeviceChoice:
    """Choose the devices for ``--device``, ``--gpus`` and ``--workers``.

    ``auto`` is the first kind that is available here.

    Raises:
        UsageError: the options contradict each other.
        UnavailableError: the requested device does not exist.
    """
    device = options.device
    gpus = options.gpus
    if gpus is not None and device in ("cpu", "mps"):
        raise UsageError(
            with_options("{gpus} does not go with {device:{kind}}", kind=device),
            hint="leave one of them out",
            option="gpus",
        )
    kinds: dict[str, Callable[[], DeviceChoice]] = {
        "cuda": lambda: _choose_cuda(gpus or "all", options.cuda_visible_devices),
        "mps": lambda: _choose_mps(read_machine(options.slurm)),
        "cpu": lambda: _choose_cpu(workers, model_bytes, read_machine(options.slurm)),
    }
    if gpus is not None:
        device = "cuda"
    choice = _first_available(kinds.values()) if device == "auto" else kinds[device]()
    if workers is not None and choice.kind != "cpu":
        raise UsageError(
            with_options(
                "{workers} is for {device:cpu}; one worker runs on each GPU: {gpu}",
                gpu=choice.descriptions[0],
            ),
            hint=with_options("leave it out, or add {device:cpu}"),
            option="workers",
        )
    return choice


def _first_available(kinds: Iterable[Callable[[], DeviceChoice]]) -> DeviceChoice:
    """Return the first available choice. The last resort is the CPU, with the reason."""
    *gpus, cpu = kinds
    lacks = []
    for choose in gpus:
        try:
            return choose()
        except UnavailableError as lack:
            lacks.append(str(lack))
    choice = cpu()
    (text,) = choice.descriptions
    return replace(choice, descriptions=(f"{text}; {lacks[0]}",))


def _choose_cuda(request: str, cuda_visible_devices: str | None) -> DeviceChoice:
    """Choose GPUs. The code for NVIDIA GPUs is imported only on a machine with their driver.

    Raises:
        UsageError, UnavailableError: as ``choose_gpus``.
    """
    if not nvidia_driver.has_nvml():
        raise UnavailableError(f"no GPU can be used: {nvidia_driver.NO_DRIVER}", hint=ELSE_CPU)
    from virnucpro.models.nvidia import choose_gpus

    return choose_gpus(request, cuda_visible_devices)


def _choose_mps(machine: Machine) -> DeviceChoice:
    if not has_mps():
        raise UnavailableError("this machine or this build of torch has no MPS", hint=ELSE_CPU)
    return DeviceChoice(
        ("mps",), ("Apple GPU (MPS)",), has_bf16=False, memory=machine.memory_available
    )


def _choose_cpu(workers: int | None, model_bytes: int, machine: Machine) -> DeviceChoice:
    n_workers = count_workers(workers, model_bytes, machine)
    limits = f" (limits: {machine.binding_limits})" if machine.binding_limits else ""
    return DeviceChoice(
        devices=("cpu",) * n_workers,
        descriptions=(
            f"CPU, up to {format_count(n_workers, 'worker')} of one core each on "
            f"{format_count(machine.cores, 'core')}{limits}",
        ),
        has_bf16=cpu_has_bf16(),
        cpu_has_int8=cpu_has_int8(),
        memory=machine.memory_available // n_workers,
    )


def cpu_has_bf16() -> bool:
    """Return True if the CPU multiplies bf16 faster than fp32.

    This needs AMX, or an AMD CPU with AVX512-BF16. Intel CPUs with AVX512-BF16 but without AMX
    multiply bf16 at half the fp32 rate.
    """
    facts = _read_cpu_facts()
    flags = facts.get("flags", [])
    vendor = facts.get("vendor_id", [])
    return "amx_tile" in flags or ("avx512_bf16" in flags and vendor != ["GenuineIntel"])


def cpu_has_int8() -> bool:
    """Return True if the CPU has instructions that multiply and add 8-bit integers."""
    flags = _read_cpu_facts().get("flags", [])
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags)


def _read_cpu_facts() -> dict[str, list[str]]:
    """Read what the kernel tells about the first processor: name -> words."""
    if not CPU_FACTS.exists():
        return {}
    with CPU_FACTS.open(errors="replace") as lines:
        facts = dict(reversed([line.split(":", 1) for line in lines if ":" in line]))
    return {name.strip(): fact.split() for name, fact in facts.items()}
