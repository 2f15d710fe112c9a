"""List NVIDIA GPUs, and select those that a run can use.

GPUs are listed through NVML, so the parent never starts CUDA. As everywhere in CUDA, a GPU is
selected by UUID or by its index among the visible ones (``CUDA_VISIBLE_DEVICES``). GPUs are checked
before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.machine import GIB
from virnucpro.core.option_text import with_options
from virnucpro.models import nvidia_driver
from virnucpro.models.device_choice import (
    ELSE_CPU,
    DeviceChoice,
    Gpu,
    format_version,
)
from virnucpro.models.torch_build import TorchBuild, require_torch


class Unusable(NamedTuple):
    """The reason why a GPU cannot be used, and the remedy."""

    reason: str
    remedy: str

    def error(self, refusal: str) -> UnavailableError:
        hint = with_options(
            "{remedy}; or run on the CPU with {device:cpu}; calls by the scorer need no GPU",
            remedy=self.remedy,
        )
        return UnavailableError(f"{refusal}: {self.reason}", hint=hint)


def why_unusable(gpu: Gpu, torch: TorchBuild) -> Unusable | None:
    """Explain why this torch build cannot use a GPU, as far as is known before CUDA starts.

    A driver supports its own CUDA major version, in any minor version, and older major versions
    (NVIDIA, "CUDA Compatibility"). Builds for CUDA 12 differ in the cards that they have kernels
    for. In that case torch reports the mismatch when a worker starts.
    """
    # Compute capabilities supported by PyTorch 2.10 to 2.14 for CUDA 12.6.
    install_for_cuda_12 = "pip install --force-reinstall 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"
    newest_for_cuda_12 = (9, 0)
    oldest_for_cuda_13 = (7, 5)  # compute capability; CUDA 13 drops older cards
    build = f"this build of torch ({torch.version})"
    if torch.cuda is None:
        return Unusable(f"{build} has no CUDA", "install a PyTorch that is built for CUDA")
    major = int(torch.cuda.partition(".")[0])
    oldest_for_cuda_12 = (5, 0)
    fits_cuda_12 = oldest_for_cuda_12 <= gpu.capability <= newest_for_cuda_12
    install = f"install PyTorch for CUDA 12: {install_for_cuda_12}"
    update = f"update the NVIDIA driver to one for CUDA {major}"
    if major >= 13 and gpu.capability < oldest_for_cuda_13:
        reason = (
            f"{gpu.name} has compute capability {format_version(gpu.capability)}, and "
            f"{build}, for CUDA "
            f"{torch.cuda}, has kernels for {format_version(oldest_for_cuda_13)} and newer"
        )
        return Unusable(reason, install if fits_cuda_12 else "use a newer GPU")
    if gpu.driver[0] < major:
        reason = (
            f"the NVIDIA driver supports CUDA up to {format_version(gpu.driver)}, and "
            f"{build} needs "
            f"CUDA {major}"
        )
        has_choice = major >= 13 and gpu.driver[0] >= 12 and fits_cuda_12
        return Unusable(reason, f"{update}, or {install}" if has_choice else update)
    return None


def list_gpus() -> tuple[list[Gpu], str]:
    """List the machine's NVIDIA GPUs, or return an empty list and the reason."""
    if not nvidia_driver.has_nvml():
        return [], nvidia_driver.NO_DRIVER
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


def choose_gpus(request: str, cuda_visible_devices: str | None) -> DeviceChoice:
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
        raise UnavailableError(f"no GPU can be used: {reason}", hint=ELSE_CPU)
    torch = require_torch()
    lacks = {i: lack for i, gpu in enumerate(visible) if (lack := why_unusable(gpu, torch))}
    if len(lacks) == len(visible):
        raise lacks[0].error("no GPU can be used")
    places = select_gpus(request, visible)
    refused = [place for place in places if place in lacks]
    if refused and request != "all":
        raise lacks[refused[0]].error(f"cuda:{refused[0]} cannot be used")
    places = [place for place in places if place not in lacks]
    selected = [visible[place] for place in places]
    descriptions = [
        f"cuda:{place} {gpu.name}, {gpu.memory_free / GIB:.0f} of "
        f"{gpu.memory_total / GIB:.0f} GiB free"
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
    idle_free_share = 0.9  # a GPU with this share of its memory free counts as unused
    with suppress(UnavailableError):
        choice = choose_gpus("all", cuda_visible_devices)
        places = (int(device.partition(":")[2]) for device in choice.devices)
        return [
            place
            for place, gpu in zip(places, choice.gpus, strict=True)
            if gpu.memory_free >= idle_free_share * gpu.memory_total
        ]
    return []
