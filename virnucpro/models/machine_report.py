"""Describe the devices of this machine, for ``virnucpro devices``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from virnucpro.core.logging import format_count
from virnucpro.core.machine import GIB, Machine
from virnucpro.models.device_choice import (
    OLDEST_FOR_FP8,
    OLDEST_FOR_INT8,
    DeviceChoice,
    Gpu,
    choose_precision,
    format_version,
)
from virnucpro.models.devices import cpu_has_bf16, cpu_has_int8, has_mps
from virnucpro.models.gpu_state import GpuState, format_cores, read_gpu_state, read_near_cores
from virnucpro.models.nvidia import Unusable, list_gpus, visible_gpus, why_unusable
from virnucpro.models.torch_build import TorchBuild, torch_build

_UNBROKEN = "\N{NO-BREAK SPACE}"
_KERNELS = (
    "rotation",
    "residual + LayerNorm",
    "fp8 quantise",
    "int8 quantise",
    "DNABERT-S attention",
)
_USED = "used"
_WITHOUT_TRITON = {
    "no_fp8": "only `virnucpro models check` emulates it here",
    "no_int8": "it is for NVIDIA GPUs and CPUs",
    "kernels": dict.fromkeys(_KERNELS, "they are for NVIDIA GPUs"),
}
# Takes torch device names. For each device, returns why it has no products in "fp8" or "int8" and
# why each kernel does not run (key: kernel name). A reason is "" if there is none.
TryGpus = Callable[[Sequence[str]], Mapping[str, Mapping[str, str]]]


def format_machine(
    cuda_visible_devices: str | None, machine: Machine, try_gpus: TryGpus, *, as_json: bool
) -> list[str]:
    """Format the output of ``virnucpro devices``, as text or as JSON."""
    facts = measure_machine(cuda_visible_devices, machine, try_gpus)
    return [json.dumps(facts, indent=2)] if as_json else describe_machine(facts)


def measure_machine(
    cuda_visible_devices: str | None, machine: Machine, try_gpus: TryGpus
) -> dict[str, Any]:
    """Measure what ``virnucpro devices --json`` prints. Memory is in bytes."""
    gpus, reason = list_gpus()
    visible = visible_gpus(gpus, cuda_visible_devices)
    torch = torch_build()
    places = {gpu.uuid: f"cuda:{place}" for place, gpu in enumerate(visible)}
    usable = [places[gpu.uuid] for gpu in visible if torch and not why_unusable(gpu, torch)]
    trials = try_gpus(usable) if usable else {}
    return {
        "torch": torch._asdict() if torch else None,
        "driver_cuda": format_version(gpus[0].driver) if gpus else None,
        "gpus": [_gpu_facts(gpu, places.get(gpu.uuid), torch, trials) for gpu in gpus],
        "no_gpu": None if gpus else reason,
        "mps": has_mps(),
        "cpu": {
            "cores": machine.cores,
            "cores_limited_by": machine.cores_source,
            "memory_free": machine.memory_available,
            "memory_total": machine.memory_total,
            "memory_limited_by": machine.memory_source,
            "precision": "bf16" if cpu_has_bf16() else "fp32",
            **_WITHOUT_TRITON,
            "no_int8": None if cpu_has_int8() else "it needs VNNI or AMX",
        },
    }


def _gpu_facts(
    gpu: Gpu, device: str | None, torch: TorchBuild | None, trials: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    lack = (
        why_unusable(gpu, torch)
        if torch
        else Unusable("PyTorch is not installed", "pip install torch")
    )
    refusals = dict(trials.get(device or "", {}))
    for precision, oldest in (("fp8", OLDEST_FOR_FP8), ("int8", OLDEST_FOR_INT8)):
        if gpu.capability < oldest:
            needs = f"it needs compute capability {format_version(oldest)}"
            refusals[precision] = f"{needs}; this has {format_version(gpu.capability)}"
        kernel = f"{precision} quantise"
        refusals[kernel] = refusals.get(kernel) or refusals.get(precision, "")
    kernels = {name: refusals.get(name) or _USED for name in _KERNELS}
    return {
        "device": device,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_free": gpu.memory_free,
        "memory_total": gpu.memory_total,
        "cannot_be_used": lack.reason if lack else None,
        "remedy": lack.remedy if lack else None,
        "precision": choose_precision("auto", DeviceChoice((), (), gpu.has_bf16, 0, (gpu,))),
        "no_fp8": refusals.get("fp8") or None,
        "no_int8": refusals.get("int8") or None,
        "kernels": kernels if device in trials else {},
        "state": asdict(read_gpu_state(gpu.uuid)),
        "near_cores": format_cores(read_near_cores(gpu.uuid)) or None,
    }


def describe_machine(facts: Mapping[str, Any]) -> list[str]:
    """Describe which devices a run would use here, and why no others, for ``virnucpro devices``."""
    torch = facts["torch"]
    cpu = facts["cpu"]
    lines = ["torch is not installed: models need it (pip install torch), the scorer does not"]
    if torch:
        lines = [f"torch {torch['version']}, CUDA {torch['cuda'] or 'not built in'}"]
    if facts["gpus"]:
        lines.append(f"NVIDIA driver, CUDA up to {facts['driver_cuda']}")
    for gpu in facts["gpus"]:
        lines += _wrap_lines(
            f"{gpu['device'] or 'hidden':<8}{gpu['name']}, {_format_memory(gpu)}",
            gpu["uuid"],
            *_format_state(gpu),
            *_format_usage(gpu),
        )
    if facts["no_gpu"]:
        lines += _wrap_lines(f"no GPU: {facts['no_gpu']}")
    if facts["mps"]:
        without = _describe_kernels(_WITHOUT_TRITON)
        lines += _wrap_lines("mps     Apple GPU, fp32, SDPA", *without)
    head = (
        f"cpu     {format_count(cpu['cores'], 'core')}, {_format_memory(cpu)}, {cpu['precision']}"
    )
    limits = f"cores limited by {cpu['cores_limited_by']}, memory by {cpu['memory_limited_by']}"
    return lines + _wrap_lines(head, limits, *_describe_kernels(cpu))


def _format_memory(facts: Mapping[str, Any]) -> str:
    free = facts["memory_free"] / GIB
    total = facts["memory_total"] / GIB
    return f"{free:.1f} of {total:.1f} GiB free"


def _format_state(gpu: Mapping[str, Any]) -> list[str]:
    """Describe a GPU's clock, temperature and faults, and the CPU cores near it."""
    words = GpuState(**gpu["state"]).describe()
    if gpu["near_cores"]:
        words.append(f"near CPU cores {gpu['near_cores']}")
    return [", ".join(words)] if words else []


def _format_usage(gpu: Mapping[str, Any]) -> list[str]:
    """Describe how a run would use a GPU, or why it cannot."""
    if gpu["cannot_be_used"]:
        remedy, _, command = gpu["remedy"].partition(": ")
        # A command is not wrapped, so that it can be copied.
        commands = [command.replace(" ", _UNBROKEN)] if command else []
        return [f"cannot be used: {gpu['cannot_be_used']}", f"remedy: {remedy}", *commands]
    attention = "FlashAttention" if gpu["precision"] == "bf16" else "SDPA"
    return [f"{gpu['precision']}, {attention}", *_describe_kernels(gpu)]


def _describe_kernels(facts: Mapping[str, Any]) -> list[str]:
    by_outcome: dict[str, list[str]] = {}
    for kernel, outcome in facts["kernels"].items():
        by_outcome.setdefault(outcome, []).append(kernel)
    eight_bits = [
        f"no {name}: {reason}" if reason else f"{name} with --precision {name}"
        for name, reason in (("fp8", facts["no_fp8"]), ("int8", facts["no_int8"]))
    ]
    used = by_outcome.pop(_USED, [])
    kernels = [f"Triton kernels used: {', '.join(used)}"] if used else []
    kernels += [
        f"Triton kernels not used: {', '.join(names)} ({reason})"
        for reason, names in by_outcome.items()
    ]
    return [*eight_bits, *kernels]


def _wrap_lines(head: str, *rest: str) -> list[str]:
    """Wrap the description of a device for a narrow terminal without splitting words."""
    deeper = 8 * " "
    indents = ("", *[deeper] * len(rest))
    n_columns = 80  # of the lines that describe a machine
    return [
        line.replace(_UNBROKEN, " ")
        for indent, text in zip(indents, (head, *rest), strict=True)
        for line in wrap(
            text,
            n_columns,
            initial_indent=indent,
            subsequent_indent=deeper + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
