"""The devices of a run, and the precision and batch size that suit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from virnucpro.core.errors import UnavailableError
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Footprint, Precision

ELSE_CPU = with_options("see `virnucpro devices`, or run on the CPU with {device:cpu}")
OLDEST_FOR_FP8 = (8, 9)
OLDEST_FOR_INT8 = (8, 0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG slice, as NVML describes it."""

    index: int  # card index in the machine, by PCI bus
    uuid: str
    name: str
    memory_total: int  # bytes
    memory_free: int
    capability: tuple[int, int]
    driver: tuple[int, int]  # newest CUDA version that the driver supports
    card: str = ""  # for a MIG slice, the UUID of its card

    @property
    def has_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def has_fast_fp16(self) -> bool:
        """Return True for cards with tensor cores, from Volta on."""
        return self.capability >= (7, 0)

    @property
    def has_fp8(self) -> bool:
        return self.capability >= OLDEST_FOR_FP8

    @property
    def has_int8(self) -> bool:
        """Return True if it has int8 products, and our 8-bit kernels run on it."""
        return self.capability >= OLDEST_FOR_INT8


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a run and their capabilities."""

    devices: tuple[str, ...]  # torch device names, one per worker
    descriptions: tuple[str, ...]
    has_bf16: bool
    memory: int  # free bytes on the smallest GPU, or for each CPU worker
    gpus: tuple[Gpu, ...] = ()  # NVIDIA GPUs, in ``devices`` order
    cpu_has_int8: bool = False  # instructions for products of 8-bit integers

    @property
    def kind(self) -> str:
        return self.devices[0].partition(":")[0]

    @property
    def has_int8(self) -> bool:
        return self.cpu_has_int8 or (bool(self.gpus) and all(gpu.has_int8 for gpu in self.gpus))

    @property
    def has_fast_fp16(self) -> bool:
        return bool(self.gpus) and all(gpu.has_fast_fp16 for gpu in self.gpus)

    @property
    def first_device(self) -> DeviceChoice:
        """Return a choice with only the first device."""
        gpus = self.gpus[:1]
        return replace(
            self,
            devices=self.devices[:1],
            descriptions=self.descriptions[:1],
            gpus=gpus,
            has_bf16=gpus[0].has_bf16 if gpus else self.has_bf16,
            memory=gpus[0].memory_free if gpus else self.memory,
        )

    def count_helpers(self, n_cores: int) -> int:
        """Return the largest useful number of helpers.

        Helpers make shards and tables during embedding. A GPU keeps one or two helpers busy
        (benchmarks/measure.py simulated). On a CPU the tables take a sixth of the smallest model's
        time.
        """
        if any(device.startswith("cuda") for device in self.devices):
            return max(0, min(2 * len(self.devices), n_cores - len(self.devices) - 1))
        return len(self.devices) // 6

    def mixed_gpu_warnings(
        self, footprint: Footprint, precision: Precision, is_auto: tuple[bool, bool]
    ) -> list[str]:
        """List warnings for GPUs that slow the others down, with the option that excludes them.

        Args:
            footprint: the model's memory.
            precision: the run's precision.
            is_auto: whether the devices determine the precision, and the tokens per batch.
        """
        small_budget_share = 0.75  # warn if a GPU has less than this share of another GPU's tokens
        auto_precision, auto_tokens = is_auto
        lines: list[str] = []
        if not self.gpus:
            return lines
        old = [place for place, gpu in enumerate(self.gpus) if not gpu.has_fast_fp16]
        if auto_precision and old and len(old) < len(self.gpus):
            lines.append(
                f"{self.describe_gpus(old)} is slow in 16 bits, so every GPU runs in fp32: "
                f"leave it out with {self.gpus_option_without(old)}"
            )
        alone = [replace(self, memory=gpu.memory_free) for gpu in self.gpus]
        tokens = [choose_tokens(each, footprint, precision) for each in alone]
        small = [place for place, n in enumerate(tokens) if n < small_budget_share * max(tokens)]
        if auto_tokens and small:
            lines.append(
                f"{self.describe_gpus(small)} has memory for batches of {min(tokens):,} "
                f"tokens, so every "
                f"GPU gets such batches instead of {max(tokens):,}: "
                f"leave it out with {self.gpus_option_without(small)}"
            )
        return lines

    def describe_gpus(self, places: Sequence[int]) -> str:
        return ", ".join(f"{self.devices[place]} ({self.gpus[place].name})" for place in places)

    def gpus_option_without(self, places: Sequence[int]) -> str:
        rest = [device for place, device in enumerate(self.devices) if place not in places]
        return f"--gpus {','.join(device.removeprefix('cuda:') for device in rest)}"


def format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def choose_precision(request: str, choice: DeviceChoice) -> Precision:
    """Choose the precision for ``--precision``.

    Raises:
        UnavailableError: the device does not support this precision.
    """
    match request:
        case "auto":
            if choice.has_bf16:
                return "bf16"
            return "fp16" if choice.has_fast_fp16 else "fp32"
        case "fp32":
            return "fp32"
        case "fp16" if choice.kind != "cpu":
            return "fp16"
        case "bf16" | "bf16x2" if choice.has_bf16 or choice.kind == "cpu":
            return request
        case "fp8" if choice.gpus and all(gpu.has_fp8 for gpu in choice.gpus):
            return "fp8"
        case "fp8":
            raise _why_no_fp8(choice)
        case "int8" if choice.has_int8:
            return "int8"
        case "int8":
            raise UnavailableError(
                with_options(
                    "{precision:int8} needs GPUs of compute capability {oldest} and newer, or a "
                    "CPU with VNNI or AMX, and the run uses {shown}",
                    oldest=format_version(OLDEST_FOR_INT8),
                    shown=choice.descriptions[0],
                ),
                hint="leave it out for the best that the device has",
                option="precision",
            )
    raise UnavailableError(
        with_options(
            "{precision:{request}} is not possible on {shown}",
            request=request,
            shown="CPUs" if choice.kind == "cpu" else choice.descriptions[0],
        ),
        hint="leave it out for the best that the device has",
        option="precision",
    )


def _why_no_fp8(choice: DeviceChoice) -> UnavailableError:
    """Make the error for ``--precision fp8`` without hardware support.

    A CPU could only emulate fp8, slowly.
    """
    old = [place for place, gpu in enumerate(choice.gpus) if not gpu.has_fp8]
    needs = with_options(
        "{precision:fp8} needs GPUs of compute capability {oldest} and newer",
        oldest=format_version(OLDEST_FOR_FP8),
    )
    if not old:
        return UnavailableError(
            with_options("{needs}, and this run uses none", needs=needs),
            hint="leave it out; `virnucpro models check MODEL --device cpu --precision fp8` shows "
            "what it does to vectors",
        )
    names = (
        f"{choice.describe_gpus([i])} has {format_version(choice.gpus[i].capability)}" for i in old
    )
    others = len(old) < len(choice.gpus)
    return UnavailableError(
        with_options("{needs}: {names}", needs=needs, names=", ".join(names)),
        hint=with_options(
            "use {precision:{other}}{or_gpus}",
            other=choose_precision("auto", choice),
            or_gpus=f", or the other GPUs alone with {choice.gpus_option_without(old)}"
            if others
            else "",
        ),
    )


def choose_tokens(choice: DeviceChoice, footprint: Footprint, precision: Precision) -> int:
    """Choose the tokens per batch: enough to saturate the device, and well within its memory."""
    mps_tokens = 8192
    cpu_share = 80  # to be busy, a GPU needs this many times more tokens than a core
    cpu_tokens = 2048  # tokens that fit into the CPU caches, doubled for a narrow model
    if choice.kind == "cpu":
        return min(max(cpu_tokens, footprint.filling_tokens // cpu_share), 2 * cpu_tokens)
    if choice.kind == "mps":
        return mps_tokens
    fitting = (choice.memory - footprint.weight_bytes(precision)) // 2 // footprint.bytes_per_token
    return max(footprint.min_tokens, min(fitting, footprint.filling_tokens))
