"""The processes of one training: one per device, started here or by torchrun.

Only this module knows how they were started. A single process has no process group.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from virnucpro.core.atomic_io import disk_error
from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.errors import UnavailableError, UsageError, VirnucproError
from virnucpro.core.events import ErrorText, EventHandler
from virnucpro.core.logging import LOGGER, printable
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.packing import use_device

T = TypeVar("T")
_TIMEOUT = timedelta(hours=6)  # the first rank may compute vectors while the others wait
_LISTEN_SECONDS = 0.1  # between two checks
# Keys in the store that torchrun's processes share.
_EXIT_CODE = "virnucpro/exit_code"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process in the training."""

    rank: int
    world_size: int
    device: torch.device
    on_event: EventHandler = lambda _: None  # receives the training progress

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and reports progress."""
        return self.rank == 0

    def wrap(self, module: nn.Module, *, is_cut: bool) -> nn.Module:
        """Move a module to the device, and average its gradients over all ranks.

        Each rank has a complete copy or, with ``is_cut``, one shard per weight. In the latter case
        the encoder layers are units, and everything else is one unit (FSDP, Zhao et al. 2023,
        arXiv:2304.11277). The first rank then sends the weights one after another.
        """
        if self.world_size == 1 or not is_cut:
            module.to(self.device)
            return module if self.world_size == 1 else DistributedDataParallel(module)
        weights = module.state_dict() if self.is_first else {}
        module.to("meta")
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        encoder = next(part for part in module.modules() if isinstance(part, ESM2))
        for layer in [*encoder.layers][1:]:  # the first layer runs in parts
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        if hasattr(module, "logits"):
            register_fsdp_forward_method(module, "logits")
        module.to_empty(device=self.device)
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, weights, options=sent)
        return module

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate locally. A later step averages them."""
        if isinstance(wrapped, DistributedDataParallel):
            context: AbstractContextManager[None] = wrapped.no_sync()
            return context
        return nullcontext()

    def gather(self, value: T) -> list[T]:
        """Gather one value per rank, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()


class Started(NamedTuple):
    """The environment that torchrun gives to a process."""

    rank: int
    local_rank: int
    world_size: int

    def device(self, kind: str) -> str:
        return f"cuda:{self.local_rank}" if kind == "cuda" else kind


def started_by_torchrun(environ: Mapping[str, str]) -> Started | None:
    """Read the environment of torchrun, or return None if it did not start this process.

    Raises:
        UsageError: some variables are missing.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: environ[name] for name in names if name in environ}
    if "RANK" not in variables:
        return None
    if missing := [name for name in names if name not in variables]:
        raise UsageError(
            f"RANK is set, but {', '.join(missing)} is not",
            hint="start with torchrun, or unset RANK and give --gpus",
        )
    rank, local_rank, world_size = (int(variables[name]) for name in names[:3])
    return Started(rank, local_rank, world_size)


def run_under_torchrun(
    started: Started,
    kind: str,
    prepared: AbstractContextManager[None],
    work: Callable[[Ranks], None],
    on_event: EventHandler,
) -> None:
    """Run ``work`` as one process that torchrun started.

    The first rank enters ``prepared`` while the others wait. The first error ends all processes
    with its exit code and is reported once.

    Raises:
        VirnucproError, OSError: this process was the first to fail.
        SystemExit: another process failed first. The exit code belongs to its error.
    """
    used = _set_device(started.device(kind))
    rank = started.rank
    world_size = started.world_size
    store = _connect()
    prepared_key = "virnucpro/prepared"
    with _fail_together(store, world_size), prepared if rank == 0 else nullcontext():
        if rank == 0:
            store.set(prepared_key, "")
        while not store.check([prepared_key]):  # ``wait`` would block the store for other threads
            time.sleep(_LISTEN_SECONDS)
        join_group(store, rank, world_size, used)
        work(Ranks(rank, world_size, used, on_event))
        dist.destroy_process_group()


def _connect() -> Store:
    """Connect to torchrun's store.

    Raises:
        UnavailableError: the process with the store (torchrun's agent or the first) is gone.
    """
    first_seconds = 900  # connection timeout; the first process may not have started yet
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=first_seconds)))[0]
    except dist.DistError as error:
        raise UnavailableError(
            f"no connection to the other processes within {first_seconds} seconds: "
            f"{printable(error)}",
            hint="check that torchrun is still running, and that its first node can be reached",
        ) from error
    store.set_timeout(_TIMEOUT)
    return store


@contextmanager
def _fail_together(store: Store, world_size: int) -> Iterator[None]:
    """End all processes with the first error's exit code."""
    n_errors = "virnucpro/n_errors"
    is_done = threading.Event()
    watcher = threading.Thread(target=_end_together, args=(store, world_size, is_done), daemon=True)
    watcher.start()
    try:
        yield
    except (VirnucproError, OSError) as error:
        is_done.set()
        watcher.join()
        reported_error = error if isinstance(error, VirnucproError) else disk_error(error)
        with suppress(dist.DistError):  # the store is gone, with its process
            if store.add(n_errors, 1) > 1:
                exit_code = int(store.get(_EXIT_CODE))
                _wait_for_all(store, world_size, heard=1)
                raise SystemExit(exit_code) from error
            store.set(_EXIT_CODE, str(reported_error.exit_code))
            _wait_for_all(store, world_size, heard=0)
        raise
    finally:
        is_done.set()
        watcher.join()


def _end_together(store: Store, world_size: int, is_done: threading.Event) -> None:
    """End this process after an error of another one, even if its main thread waits inside torch.

    Nothing can wake that thread, because a destroyed group closes its connections only once nothing
    refers to it.
    """
    with suppress(dist.DistError):  # the store is gone, with its process; torch reports that
        while not is_done.wait(_LISTEN_SECONDS):
            if store.check([_EXIT_CODE]):
                exit_code = int(store.get(_EXIT_CODE))
                with suppress(dist.DistError):
                    _wait_for_all(store, world_size, heard=1)
                os._exit(exit_code)


def _wait_for_all(store: Store, world_size: int, *, heard: int) -> None:
    """Wait until all others have noticed an error: the process with the store must end last."""
    n_heard = "virnucpro/n_heard"
    grace_seconds = 30.0  # for the other processes to notice an error, even on a busy machine
    store.add(n_heard, heard)
    deadline = time.monotonic() + grace_seconds
    while store.add(n_heard, 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(_LISTEN_SECONDS)


def run_on(devices: Sequence[str], work: Callable[[Ranks], None], on_event: EventHandler) -> None:
    """Run ``work`` on each device: a single one in this process, several in child processes.

    Events and log records from the processes are forwarded. The first error ends all processes. No
    process outlives this call or this process.

    Args:
        work: must be picklable.

    Raises:
        VirnucproError: a process raised it, or ended unexpectedly.
    """
    if len(devices) == 1:
        work(Ranks(0, 1, _set_device(devices[0]), on_event))
        return
    store = open_store(0, is_master=True)
    children: list[ChildProcess] = []
    try:
        with defer_interrupts():
            for rank in range(len(devices)):
                children.append(
                    start_process(_run_rank, rank, devices, store.port, LOGGER.level, work)
                )
        _forward_logs(children, devices, on_event)
    finally:
        ChildProcess.kill_all(children)


def _run_rank(
    pipe: Pipe,
    rank: int,
    devices: Sequence[str],
    port: int,
    log_level: int,
    work: Callable[[Ranks], None],
) -> None:
    device = devices[rank]
    world_size = len(devices)
    LOGGER.addHandler(_Relay(pipe))
    LOGGER.setLevel(log_level)
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    try:
        used = _set_device(device)
        join_group(open_store(port, is_master=False), rank, world_size, used)
        work(Ranks(rank, world_size, used, pipe.send))
    except (VirnucproError, OSError) as error:
        pipe.send(ErrorText.from_error(error))
        raise
    # Not after an error: if it closed the group, the others would fail at once and be blamed.
    dist.destroy_process_group()


def _forward_logs(
    children: Sequence[ChildProcess], devices: Sequence[str], on_event: EventHandler
) -> None:
    """Forward messages from the processes until all have succeeded or one has failed.

    Raises:
        VirnucproError: the error of the process to blame, or the reason why it ended.
    """
    cause_seconds = 5.0  # wait for the cause: others notice a killed process before it has ended
    running = dict(zip(children, devices, strict=True))
    while running:
        ChildProcess.wait_any(list(running))
        if ends := _exit_order(running, on_event):
            # A cause is sent before other processes can fail because of it.
            ends += _exit_order(running, on_event)
            deadline = time.monotonic() + cause_seconds
            while running and all(end.may_be_consequence for end in ends):
                if not ChildProcess.wait_any(list(running), max(0.0, deadline - time.monotonic())):
                    break
                ends += _exit_order(running, on_event)
            first = min(ends, key=lambda end: end.place)
            if first.traceback:
                LOGGER.info("%s", first.traceback)
            raise first.error


@dataclass(frozen=True, slots=True)
class _RankExit:
    """A process that failed. The one with the lowest ``place`` is to blame."""

    place: tuple[int, float]
    error: VirnucproError
    traceback: str = ""

    @property
    def may_be_consequence(self) -> bool:
        """True if it raised an unexpected error, perhaps because another process is gone."""
        return self.place >= (2, 0.0)


def _exit_order(running: dict[ChildProcess, str], on_event: EventHandler) -> list[_RankExit]:
    """Forward new messages, drop processes that have ended, and return those that failed."""
    ends: list[_RankExit] = []
    for child, device in list(running.items()):
        try:
            while child.pipe.poll():
                match child.pipe.recv():
                    case logging.LogRecord() as record:
                        LOGGER.handle(record)
                    case ErrorText() as text:
                        ends.append(_RankExit((0, 0.0), text.to_error))
                    case ChildError(reason, traceback, seconds):
                        ends.append(_RankExit((2, seconds), _rank_exit(device, reason), traceback))
                        del running[child]  # this is its last message, and its end adds nothing
                        break
                    case event:
                        on_event(event)
        except (EOFError, OSError):
            del running[child]
            cause = child.exit_reason()
            if child.process.returncode != 0:
                ends.append(_RankExit((1, 0.0), _rank_exit(device, cause)))
    return ends


def _rank_exit(device: str, reason: str) -> VirnucproError:
    return VirnucproError(
        f"the process on {device} ended: {reason}",
        hint="finished epochs are kept: fix the cause, then continue with --resume",
    )


class _Relay(logging.Handler):
    """Sends a process log to its parent, which has the handlers."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        facts = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
        self._pipe.send(logging.makeLogRecord(facts))


def _set_device(name: str) -> torch.device:
    """Select a device for this process.

    Raises:
        UnavailableError: there is no such GPU.
    """
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"there is no {name}: {torch.cuda.device_count()} GPUs are visible here",
            hint="start as many processes on a node as it has GPUs",
        )
    use_device(device)
    return device


def open_store(port: int, *, is_master: bool) -> dist.TCPStore:  # type: ignore[name-defined]
    """Open the store that local processes share. NCCL uses it too, with its time-out."""
    localhost = "127.0.0.1"
    return dist.TCPStore(  # type: ignore[attr-defined]
        localhost, port, is_master=is_master, wait_for_workers=False, timeout=_TIMEOUT
    )


def join_group(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Join the process group. NCCL is given the device, which it would otherwise guess."""
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if is_gpu else None,
    )
