"""Read a GPU's clocks, faults and nearest CPU cores through NVML. CUDA is never started.

Every figure is optional: cards for games count no memory errors, MIG slices have no clock of their
own, and containers may hide the counters. What NVML does not tell is None.

Source: NVML API Reference, "Device Queries" (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pynvml

_BITS_PER_WORD = 64  # NVML gives core sets as unsigned longs, the lowest cores first


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU at one moment."""

    clock: int | None = None  # MHz, of the multiprocessors
    max_clock: int | None = None  # MHz
    temperature: int | None = None  # degrees Celsius
    slowed_by: tuple[str, ...] = ()  # reasons for a clock below the maximum, while it computes
    n_memory_errors: int | None = None  # uncorrected ECC errors since the driver was loaded

    def describe(self) -> list[str]:
        """Describe the known figures, each in a few words."""
        words = []
        if self.clock is not None and self.max_clock is not None:
            words.append(f"{self.clock:,} of {self.max_clock:,} MHz")
        if self.temperature is not None:
            words.append(f"{self.temperature} °C")
        if self.slowed_by:
            words.append(f"slowed down by {' and '.join(self.slowed_by)}")
        if self.n_memory_errors:
            words.append(f"uncorrected ECC errors: {self.n_memory_errors:,}")
        return words


def read_gpu_state(uuid: str) -> GpuState:
    """Read the state of the GPU with this UUID, as NVML or CUDA write it."""
    with _open_nvml(uuid) as handle:
        if handle is None:
            return GpuState()
        return GpuState(
            clock=_ask(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            max_clock=_ask(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            temperature=_ask(
                lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
            slowed_by=name_slowdowns(
                _ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
            ),
            n_memory_errors=_ask(
                lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                    handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
                )
            ),
        )


def read_near_cores(uuid: str) -> frozenset[int]:
    """Return the CPU cores on the GPU's own memory node. Return an empty set if unknown."""
    n_words = -(-(os.cpu_count() or 1) // _BITS_PER_WORD)
    with _open_nvml(uuid) as handle, suppress(pynvml.NVMLError):
        if handle is not None:
            return frozenset(list_bits(pynvml.nvmlDeviceGetCpuAffinity(handle, n_words)))
    return frozenset()


def choose_near_cores(near: AbstractSet[int], allowed: AbstractSet[int]) -> frozenset[int]:
    """Choose the cores for a GPU's worker: the near ones among those that the run may use.

    A batch system may have given cores that are all on another node, or only one near core. The
    worker then keeps every core that it may use, since a far core costs less than a missing one.
    """
    min_cores = 4  # a worker computes, sends, writes and checksums at the same time
    chosen = frozenset(near & allowed)
    return chosen if len(chosen) >= min_cores else frozenset(allowed)


def format_cores(cores: Iterable[int]) -> str:
    """Format a core set as the kernel does: ``0-3,8``."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


@contextmanager
def _open_nvml(uuid: str) -> Iterator[object | None]:
    """Open NVML and yield the GPU's handle, or None if there is no driver or no such GPU."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        handle = None
        with suppress(pynvml.NVMLError):
            # CUDA writes the UUID of a card without the prefix that NVML needs.
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        yield handle
    finally:
        pynvml.nvmlShutdown()


def _ask(question: Callable[[], int]) -> int | None:
    """Ask for one figure. Return None if this card or container does not have it."""
    with suppress(pynvml.NVMLError):
        return int(question())
    return None


def name_slowdowns(reasons: int) -> tuple[str, ...]:
    """Name the reasons in NVML's bit set that slow a busy card down. An idle clock is no fault."""
    names = {
        pynvml.nvmlClocksThrottleReasonSwPowerCap: "the power limit",
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "the hardware",
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat, by the hardware",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "the power supply",
    }
    return tuple(name for bit, name in names.items() if reasons & bit)


def list_bits(words: Sequence[int]) -> Iterator[int]:
    """List the set bits of a bit set, the lowest word first."""
    for place, word in enumerate(words):
        for bit in range(_BITS_PER_WORD):
            if word >> bit & 1:
                yield place * _BITS_PER_WORD + bit
