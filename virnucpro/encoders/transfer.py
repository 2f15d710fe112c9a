"""A device, arrays on their way to it, and results on their way back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.encoders.base import Pending, Rows
from virnucpro.ground.errors import UnavailableError


def use_device(device: torch.device) -> None:
    """Have a device of this process compute in float32 that is float32; a GPU is its current one.

    Products in 16 bits are summed in float32: cuBLAS may otherwise add up parts of one in 16 bits.
    cuDNN would round to TF32 in convolutions and LSTMs, and as a backend of SDPA it plans for each
    new shape of a batch. On a CPU, MKL is asked for sums that do not depend on a row's place in its
    batch: otherwise those of its AVX2 kernels do, and those of AVX-512 in batches of a few rows.
    It hears before its first product only.

    Raises:
        UnavailableError: this build of torch has no kernels for the GPU.
    """
    if device.type == "cpu":
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    if device.type == "cuda":
        if device.index is not None:  # else it is the current one
            torch.cuda.set_device(device)
        _check_kernels(device)
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.enable_cudnn_sdp(False)


def _check_kernels(device: torch.device) -> None:
    """
    Raises:
        UnavailableError: this build of torch has no kernels for the GPU.
    """
    capability = torch.cuda.get_device_capability(device)
    builds = [arch for arch in torch.cuda.get_arch_list() if arch.startswith(("sm_", "compute_"))]
    if builds and not any(_runs_on(capability, build) for build in builds):
        major, minor = capability
        raise UnavailableError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"this build of torch ({torch.__version__}) has kernels for {', '.join(builds)} alone",
            hint="install another build of PyTorch, or run on the CPU with --device cpu",
        )


def _runs_on(capability: tuple[int, int], build: str) -> bool:
    """True if such a GPU runs ``sm_80`` (of its own generation), or ``compute_80`` (compiled anew).

    A letter behind the number (``sm_90a``) is left out: the same without it is in the list too.
    """
    kind, _, number = build.partition("_")
    major, minor = divmod(int(number.rstrip("af")), 10)
    is_same = kind == "compute" or major == capability[0]
    return is_same and (major, minor) <= capability


def send(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Send an array to a device; a GPU takes pinned memory without making the host wait."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copy of results from a device to the host: on a GPU, beside the next batch's work."""

    def __init__(self, device: torch.device) -> None:
        self.copying: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, results: Tensor) -> Pending:
        """Begin to copy float32 rows, into pinned memory."""
        if self.copying is None:
            return Arrived(results.cpu().numpy())
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        self.copying.wait_stream(torch.cuda.current_stream(results.device))
        with torch.cuda.stream(self.copying):
            host.copy_(results, non_blocking=True)
            copied = self.copying.record_event()
        results.record_stream(self.copying)
        return _Arriving(host, copied)


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """Rows on the host; a ``base.Pending``."""

    array: Rows
    n_repeated: ClassVar[int] = 0

    def rows(self) -> Rows:
        return self.array


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    host: Tensor  # pinned
    copied: torch.cuda.Event
    n_repeated: ClassVar[int] = 0

    def rows(self) -> Rows:
        self.copied.synchronize()
        array: Rows = self.host.numpy()
        return array
