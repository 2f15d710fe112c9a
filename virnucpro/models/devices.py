"""Find the devices of a machine, and choose devices, precision and batch size for a run.

GPUs are listed through NVML, so the parent never starts CUDA. As everywhere in CUDA, a GPU is
selected by UUID or by its index among the visible ones (``CUDA_VISIBLE_DEVICES``). GPUs are checked
before any process starts. Importing torch takes seconds, so it is imported only on a Mac.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.logging import format_count
from virnucpro.core.machine import Machine, read_machine
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Footprint, Precision

if TYPE_CHECKING:
    from virnucpro.core.option_schema import ComputeOptions

_GIB = 1 << 30
_CPU_TOKENS = 2048  # tokens that fit into the CPU caches, doubled for a narrow model
_CPU_SHARE = 80  # to be busy, a GPU needs this many times more tokens than a core
_MPS_TOKENS = 8192
_WORKER_BYTES = _GIB // 2  # PyTorch and a batch in a CPU worker, without the model
_MAX_WORKERS = 1024
_CPU_FACTS = Path("/proc/cpuinfo")
_OLDEST_FOR_CUDA_13 = (7, 5)  # compute capability; CUDA 13 drops older cards
# Compute capabilities supported by PyTorch 2.10 to 2.14 for CUDA 12.6.
_OLDEST_FOR_CUDA_12 = (5, 0)
_NEWEST_FOR_CUDA_12 = (9, 0)
_INSTALL_FOR_CUDA_12 = (
    "pip install --force-reinstall 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"
)
_OLDEST_FOR_FP8 = (8, 9)
_ELSE_CPU = with_options("see `virnucpro devices`, or run on the CPU with {device:cpu}")
_IDLE_FREE_SHARE = 0.9  # a GPU with this share of its memory free counts as unused
_COLUMNS, _INDENT = 80, 8 * " "  # for the lines that describe a machine
_UNBROKEN = "\N{NO-BREAK SPACE}"
_SMALL_BUDGET_SHARE = 0.75  # warn if a GPU has less than this share of another GPU's tokens


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
        return self.capability >= _OLDEST_FOR_FP8


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a run and their capabilities."""

    devices: tuple[str, ...]  # torch device names, one per worker
    descriptions: tuple[str, ...]
    has_bf16: bool
    memory: int  # free bytes on the smallest GPU, or for each CPU worker
    gpus: tuple[Gpu, ...] = ()  # NVIDIA GPUs, in ``devices`` order

    @property
    def kind(self) -> str:
        return self.devices[0].partition(":")[0]

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
        small = [place for place, n in enumerate(tokens) if n < _SMALL_BUDGET_SHARE * max(tokens)]
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


class TorchBuild(NamedTuple):
    """The installed torch."""

    version: str
    cuda: str | None  # None: built without CUDA


class _Unusable(NamedTuple):
    """The reason why a GPU cannot be used, and the remedy."""

    reason: str
    remedy: str

    def error(self, refusal: str) -> UnavailableError:
        hint = with_options(
            "{remedy}; or run on the CPU with {device:cpu}; calls by the scorer need no GPU",
            remedy=self.remedy,
        )
        return UnavailableError(f"{refusal}: {self.reason}", hint=hint)


def _why_unusable(gpu: Gpu, torch: TorchBuild) -> _Unusable | None:
    """Explain why this torch build cannot use a GPU, as far as is known before CUDA starts.

    A driver supports its own CUDA major version, in any minor version, and older major versions
    (NVIDIA, "CUDA Compatibility"). Builds for CUDA 12 differ in the cards that they have kernels
    for. In that case torch reports the mismatch when a worker starts.
    """
    build = f"this build of torch ({torch.version})"
    if torch.cuda is None:
        return _Unusable(f"{build} has no CUDA", "install a PyTorch that is built for CUDA")
    major = int(torch.cuda.partition(".")[0])
    fits_cuda_12 = _OLDEST_FOR_CUDA_12 <= gpu.capability <= _NEWEST_FOR_CUDA_12
    install = f"install PyTorch for CUDA 12: {_INSTALL_FOR_CUDA_12}"
    update = f"update the NVIDIA driver to one for CUDA {major}"
    if major >= 13 and gpu.capability < _OLDEST_FOR_CUDA_13:
        reason = (
            f"{gpu.name} has compute capability {_format_version(gpu.capability)}, and "
            f"{build}, for CUDA "
            f"{torch.cuda}, has kernels for {_format_version(_OLDEST_FOR_CUDA_13)} and newer"
        )
        return _Unusable(reason, install if fits_cuda_12 else "use a newer GPU")
    if gpu.driver[0] < major:
        reason = (
            f"the NVIDIA driver supports CUDA up to {_format_version(gpu.driver)}, and "
            f"{build} needs "
            f"CUDA {major}"
        )
        has_choice = major >= 13 and gpu.driver[0] >= 12 and fits_cuda_12
        return _Unusable(reason, f"{update}, or {install}" if has_choice else update)
    return None


def _format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def torch_is_missing() -> UnavailableError:
    """Make the error for a command that needs PyTorch, which is not installed."""
    return UnavailableError(
        "PyTorch is not installed, and models need it",
        hint=with_options(
            "pip install torch; `virnucpro predict` without {model} calls viruses without PyTorch"
        ),
    )


def require_torch() -> TorchBuild:
    """Read the installed torch, which is required.

    Raises:
        UnavailableError: PyTorch is not installed.
    """
    build = torch_build()
    if build is None:
        raise torch_is_missing()
    return build


def torch_build() -> TorchBuild | None:
    """Read the installed torch version from ``version.py``, without importing torch.

    Returns:
        The build, or None if torch is not installed.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:  # no origin: a folder with this name
        return None
    facts = run_path(str(Path(torch.origin).with_name("version.py")))
    return TorchBuild(facts["__version__"], facts["cuda"])


def has_mps() -> bool:
    """Return True if torch can use an Apple GPU."""
    if sys.platform != "darwin":
        return False
    import torch

    return torch.backends.mps.is_available()


def has_nvml() -> bool:
    """Return True if an NVIDIA driver is installed. This is cheaper than importing pynvml."""
    try:
        CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def list_gpus() -> tuple[list[Gpu], str]:
    """List the machine's NVIDIA GPUs, or return an empty list and the reason."""
    if not has_nvml():
        return [], "no NVIDIA driver found"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver answers ({error})"
    try:
        n_cards = pynvml.nvmlDeviceGetCount()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())  # 12040: 12.4
        driver = (cuda // 1000, cuda % 1000 // 10)
        gpus = [gpu for index in range(n_cards) for gpu in _describe(index, driver)]
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver does not answer ({error})"
    finally:
        pynvml.nvmlShutdown()
    return gpus, "" if gpus else f"{n_cards} cards are in MIG mode, and have no instance"


def _describe(index: int, driver: tuple[int, int]) -> list[Gpu]:
    """Describe a card, or its MIG slices."""
    import pynvml

    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    slices = _list_mig_slices(card)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    gpus = []
    for handle in [card] if slices is None else slices:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        gpu = Gpu(
            index=index,
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            name=pynvml.nvmlDeviceGetName(handle),
            memory_total=int(memory.total),
            memory_free=int(memory.free),
            capability=(int(capability[0]), int(capability[1])),
            driver=driver,
            card="" if slices is None else pynvml.nvmlDeviceGetUUID(card),
        )
        gpus.append(gpu)
    return gpus


def _list_mig_slices(card: object) -> list[object] | None:
    """List the NVML handles of a card's MIG instances. Return None if it is not in MIG mode."""
    import pynvml

    try:
        is_cut = pynvml.nvmlDeviceGetMigMode(card)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # the card has no MIG mode
        return None
    if not is_cut:
        return None
    handles = []
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with suppress(pynvml.NVMLError):  # an empty slot, or no permission
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place))
    return handles


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> list[Gpu]:
    """List the GPUs visible to CUDA, in its order. An invalid entry hides itself and the rest.

    CUDA shows a process only one MIG slice, and no slice if a complete card is also visible.
    """
    if cuda_visible_devices is None:
        return [gpu for gpu in gpus if not gpu.card] or list(gpus[:1])
    visible: list[Gpu] = []
    for entry in map(str.strip, cuda_visible_devices.split(",")):
        matches = _named_to_cuda(gpus, entry)
        if len(matches) != 1 or matches[0] in visible:
            break
        if matches[0].card:
            return visible or matches
        visible += matches
    return visible


def _named_to_cuda(gpus: Sequence[Gpu], entry: str) -> list[Gpu]:
    """List the GPUs that match an entry.

    The index or UUID of a sliced card selects its first slice.
    """
    if entry.isdigit():
        return [gpu for gpu in gpus if gpu.index == int(entry)][:1]
    cards = {gpu.card: gpu for gpu in reversed(gpus) if entry and gpu.card.startswith(entry)}
    return [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)] + list(cards.values())


def _find_gpu(visible: Sequence[Gpu], entry: str) -> list[Gpu]:
    if entry.isdigit():
        return list(visible[int(entry) : int(entry) + 1])
    return [gpu for gpu in visible if entry and gpu.uuid.startswith(entry)]


def select_gpus(request: str, visible: Sequence[Gpu]) -> list[int]:
    """Return the indices of the requested GPUs (``all``, ``0,2`` or UUIDs) among the visible ones.

    Raises:
        UsageError: a GPU is out of range, ambiguous or named twice.
    """
    if request == "all":
        return list(range(len(visible)))
    places: list[int] = []
    for entry in request.split(","):
        matches = _find_gpu(visible, entry.strip())
        if len(matches) != 1:
            names = ", ".join(f"{i}: {gpu.name} {gpu.uuid}" for i, gpu in enumerate(visible))
            raise UsageError(
                with_options(
                    "{gpus:{request}}: {entry} is not a visible GPU",
                    request=request,
                    entry=f"{entry.strip()!a}",
                ),
                hint=f"visible: {names or 'none'}",
                option="gpus",
            )
        place = visible.index(matches[0])
        if place in places:
            raise UsageError(
                with_options(
                    "{gpus:{request}}: GPU {place} is named twice", request=request, place=place
                ),
                hint="name it once",
                option="gpus",
            )
        places.append(place)
    return places


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
    """Choose the requested GPUs. ``all`` means those that this torch build can use.

    Raises:
        UsageError: a named GPU is not visible.
        UnavailableError: a named GPU, or every GPU, cannot be used.
    """
    gpus, reason = list_gpus()
    visible = visible_gpus(gpus, cuda_visible_devices)
    if gpus and not visible:
        reason = f"CUDA_VISIBLE_DEVICES={cuda_visible_devices!a} hides all {len(gpus)} GPUs"
    if not visible:
        raise UnavailableError(f"no GPU can be used: {reason}", hint=_ELSE_CPU)
    torch = require_torch()
    lacks = {i: lack for i, gpu in enumerate(visible) if (lack := _why_unusable(gpu, torch))}
    if len(lacks) == len(visible):
        raise lacks[0].error("no GPU can be used")
    places = select_gpus(request, visible)
    refused = [place for place in places if place in lacks]
    if refused and request != "all":
        raise lacks[refused[0]].error(f"cuda:{refused[0]} cannot be used")
    places = [place for place in places if place not in lacks]
    selected = [visible[place] for place in places]
    descriptions = [
        f"cuda:{place} {gpu.name}, {gpu.memory_free / _GIB:.0f} of "
        f"{gpu.memory_total / _GIB:.0f} GiB free"
        for place, gpu in zip(places, selected, strict=True)
    ]
    descriptions[-1] += "".join(
        f"; cuda:{place} is left out: {lacks[place].reason}; {lacks[place].remedy}"
        for place in refused
    )
    return DeviceChoice(
        devices=tuple(f"cuda:{place}" for place in places),
        descriptions=tuple(descriptions),
        has_bf16=all(gpu.has_bf16 for gpu in selected),
        memory=min(gpu.memory_free for gpu in selected),
        gpus=tuple(selected),
    )


def free_gpus(cuda_visible_devices: str | None) -> list[int]:
    """Return the indices of the usable GPUs that are idle."""
    with suppress(UnavailableError):
        choice = _choose_cuda("all", cuda_visible_devices)
        places = (int(device.partition(":")[2]) for device in choice.devices)
        return [
            place
            for place, gpu in zip(places, choice.gpus, strict=True)
            if gpu.memory_free >= _IDLE_FREE_SHARE * gpu.memory_total
        ]
    return []


def _choose_mps(machine: Machine) -> DeviceChoice:
    if not has_mps():
        raise UnavailableError("this machine or this build of torch has no MPS", hint=_ELSE_CPU)
    return DeviceChoice(
        ("mps",), ("Apple GPU (MPS)",), has_bf16=False, memory=machine.memory_available
    )


def count_workers(workers: int | None, model_bytes: int, machine: Machine) -> int:
    """Choose the number of CPU workers for ``--workers``.

    Each worker needs a core and ``model_bytes`` for its model. None means as many workers as fit
    into the cores and the memory that this process may use.

    Raises:
        UsageError: the number is out of range.
    """
    if workers is None:
        n_fitting = int(0.8 * machine.memory_available / (model_bytes + _WORKER_BYTES))
        return min(machine.cores, max(1, n_fitting))
    if not 1 <= workers <= _MAX_WORKERS:
        raise UsageError(
            with_options("{workers} is {value}", value=workers),
            hint=f"give 1 to {_MAX_WORKERS}, or leave it out",
            option="workers",
        )
    return workers


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
        memory=machine.memory_available // n_workers,
    )


def cpu_has_bf16() -> bool:
    """Return True if the CPU multiplies bf16 faster than fp32.

    This needs AMX, or an AMD CPU with AVX512-BF16. Intel CPUs with AVX512-BF16 but without AMX
    multiply bf16 at half the fp32 rate.
    """
    if not _CPU_FACTS.exists():
        return False
    with _CPU_FACTS.open(errors="replace") as lines:
        facts = dict(reversed([line.split(":", 1) for line in lines if ":" in line]))
    words = {name.strip(): fact.split() for name, fact in facts.items()}
    flags = words.get("flags", [])
    vendor = words.get("vendor_id", [])
    return "amx_tile" in flags or ("avx512_bf16" in flags and vendor != ["GenuineIntel"])


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
    raise UnavailableError(
        with_options(
            "{precision:{request}} is not possible on {shown}",
            request=request,
            shown=choice.descriptions[0],
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
        oldest=_format_version(_OLDEST_FOR_FP8),
    )
    if not old:
        return UnavailableError(
            with_options("{needs}, and this run uses none", needs=needs),
            hint="leave it out; `virnucpro models check MODEL --device cpu --precision fp8` shows "
            "what it does to vectors",
        )
    names = (
        f"{choice.describe_gpus([i])} has {_format_version(choice.gpus[i].capability)}" for i in old
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
    if choice.kind == "cpu":
        return min(max(_CPU_TOKENS, footprint.filling_tokens // _CPU_SHARE), 2 * _CPU_TOKENS)
    if choice.kind == "mps":
        return _MPS_TOKENS
    fitting = (choice.memory - footprint.weight_bytes(precision)) // 2 // footprint.bytes_per_token
    return max(footprint.fewest_tokens, min(fitting, footprint.filling_tokens))


def format_bytes(n_bytes: int) -> str:
    """Format a byte count for people."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


_KERNELS = ("rotation", "residual + LayerNorm", "fp8 quantise", "DNABERT-S attention")
_USED = "used"
_WITHOUT_TRITON = {
    "no_fp8": "only `virnucpro models check` emulates it here",
    "kernels": dict.fromkeys(_KERNELS, "they are for NVIDIA GPUs"),
}
# Takes torch device names. For each device, returns why it has no fp8 (key "fp8") and why each
# kernel does not run (key: kernel name). A reason is "" if the device has fp8, or the kernel runs.
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
    usable = [places[gpu.uuid] for gpu in visible if torch and not _why_unusable(gpu, torch)]
    trials = try_gpus(usable) if usable else {}
    return {
        "torch": torch._asdict() if torch else None,
        "driver_cuda": _format_version(gpus[0].driver) if gpus else None,
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
        },
    }


def _gpu_facts(
    gpu: Gpu, device: str | None, torch: TorchBuild | None, trials: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    from virnucpro.models.gpu_state import format_cores, read_gpu_state, read_near_cores

    lack = (
        _why_unusable(gpu, torch)
        if torch
        else _Unusable("PyTorch is not installed", "pip install torch")
    )
    refusals = dict(trials.get(device or "", {}))
    if not gpu.has_fp8:
        needs = f"it needs compute capability {_format_version(_OLDEST_FOR_FP8)}"
        refusals["fp8"] = f"{needs}; this has {_format_version(gpu.capability)}"
    refusals["fp8 quantise"] = refusals.get("fp8 quantise") or refusals.get("fp8", "")
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
    free = facts["memory_free"] / _GIB
    total = facts["memory_total"] / _GIB
    return f"{free:.1f} of {total:.1f} GiB free"


def _format_state(gpu: Mapping[str, Any]) -> list[str]:
    """Describe a GPU's clock, temperature and faults, and the CPU cores near it."""
    from virnucpro.models.gpu_state import GpuState

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
    fp8 = f"no fp8: {facts['no_fp8']}" if facts["no_fp8"] else "fp8 with --precision fp8"
    used = by_outcome.pop(_USED, [])
    kernels = [f"Triton kernels used: {', '.join(used)}"] if used else []
    kernels += [
        f"Triton kernels not used: {', '.join(names)} ({reason})"
        for reason, names in by_outcome.items()
    ]
    return [fp8, *kernels]


def _wrap_lines(head: str, *rest: str) -> list[str]:
    """Wrap the description of a device for a narrow terminal without splitting words."""
    indents = ("", *[_INDENT] * len(rest))
    return [
        line.replace(_UNBROKEN, " ")
        for indent, text in zip(indents, (head, *rest), strict=True)
        for line in wrap(
            text,
            _COLUMNS,
            initial_indent=indent,
            subsequent_indent=_INDENT + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
