"""The processes of one training: one per device, started here or by torchrun.

Nothing but this module knows how they were started. One process alone has no group.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from virnucpro.errors import UsageError

T = TypeVar("T")
_LOCALHOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the training."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """Have the gradients of all ranks averaged."""
        if self.world_size == 1:
            return module
        return DistributedDataParallel(module, broadcast_buffers=False)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def torchrun_ranks(environ: Mapping[str, str], device: str) -> tuple[int, int, str] | None:
    """Rank, number of ranks and device, if torchrun started this process; else None.

    Raises:
        UsageError: the variables are there in part.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: environ[name] for name in names if name in environ}
    if "RANK" not in given:
        return None
    if missing := [name for name in names if name not in given]:
        raise UsageError(
            f"RANK is set, but {', '.join(missing)} is not",
            hint="start with torchrun, or unset RANK and give --gpus",
        )
    local = f"cuda:{given['LOCAL_RANK']}" if device == "cuda" else device
    return int(given["RANK"]), int(given["WORLD_SIZE"]), local


def run_under_torchrun(
    rank: int, world_size: int, device: str, work: Callable[[Ranks], None]
) -> None:
    dist.init_process_group(_backend(device), rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        work(Ranks(rank, world_size, _use(device)))
    finally:
        dist.destroy_process_group()


def run_on(devices: Sequence[str], work: Callable[[Ranks], None]) -> None:
    """Run ``work`` (which can be pickled) on each device: one here, several as processes.

    The first error ends all, and is raised here with its traceback.
    """
    if len(devices) == 1:
        work(Ranks(0, 1, _use(devices[0])))
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _LOCALHOST, 0, is_master=True, wait_for_workers=False
    )
    spawn(  # type: ignore[no-untyped-call]
        _spawned, (tuple(devices), store.port, work), nprocs=len(devices)
    )


def _spawned(rank: int, devices: tuple[str, ...], port: int, work: Callable[[Ranks], None]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device = devices[rank]
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    store = dist.TCPStore(_LOCALHOST, port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        _backend(device), store=store, rank=rank, world_size=len(devices), timeout=_TIMEOUT
    )
    try:
        work(Ranks(rank, len(devices), _use(device)))
    finally:
        dist.destroy_process_group()


def _use(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _backend(device: str) -> str:
    return "nccl" if device.startswith("cuda") else "gloo"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
