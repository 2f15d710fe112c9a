"""The processes of one training: one per device, started here or by torchrun.

Nothing but this module knows how they were started. One process alone has no group.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel

from virnucpro.engine.events import Telling
from virnucpro.engine.processes import cause_of_end, interrupts_held, obey_parent
from virnucpro.errors import UnavailableError, UsageError, VirnucproError
from virnucpro.files import disk_error
from virnucpro.log import LOGGER, printable

T = TypeVar("T")
OnEvent = Callable[[Telling], None]
_LOCALHOST = "127.0.0.1"
_TIMEOUT = timedelta(hours=6)  # the first may have vectors to make while the others wait
_LISTEN_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for the others to hear of an error
_AGENT_SECONDS, _FIRST_SECONDS = 30, 900  # to answer; the first process may have to start yet
# in the store that torchrun's processes share
_PREPARED, _EXIT_CODE = "virnucpro/prepared", "virnucpro/exit_code"
_N_ERRORS, _N_HEARD = "virnucpro/n_errors", "virnucpro/n_heard"
_SET_DEATH_SIGNAL = 1  # of prctl(2)
_KEPT = "the epochs that were finished are kept: go on with --resume when it is mended"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the training."""

    rank: int
    world_size: int
    device: torch.device
    on_event: OnEvent = lambda _: None  # whoever watches the training

    @property
    def is_first(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def tell(self, event: Telling) -> None:
        """Tell it to whoever watches, once: all ranks do the same."""
        if self.is_first:
            self.on_event(event)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Have the gradients of all ranks averaged."""
        if self.world_size == 1:
            return module
        return DistributedDataParallel(module)

    def alone(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Let gradients add up in this process, until a later step averages them."""
        if isinstance(wrapped, DistributedDataParallel):
            alone: AbstractContextManager[None] = wrapped.no_sync()
            return alone
        return nullcontext()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@dataclass(frozen=True, slots=True)
class Started:
    """What torchrun says to a process that it started."""

    rank: int
    local_rank: int
    world_size: int
    has_agent: bool  # which is there before the processes, and has what they share

    def device(self, kind: str) -> str:
        return f"cuda:{self.local_rank}" if kind == "cuda" else kind


def started_by_torchrun(environ: Mapping[str, str]) -> Started | None:
    """None if torchrun did not start this process.

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
    rank, local_rank, world_size = (int(given[name]) for name in names[:3])
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Started(rank, local_rank, world_size, has_agent)


def end_with(parent: int) -> None:
    """Have the kernel end this process with the one that started it, torchrun's agent (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run_under_torchrun(
    started: Started,
    kind: str,
    prepared: AbstractContextManager[None],
    work: Callable[[Ranks], None],
    on_event: OnEvent,
) -> None:
    """Run ``work`` as one of the processes that torchrun started.

    The first enters ``prepared`` before, while the others wait for it. An error of one ends all
    with its exit code; it is told once.

    Raises:
        VirnucproError, OSError: of this process, the first of all to fail.
        SystemExit: another was the first; with the exit code of its error.
    """
    used, rank, world_size = _use(started.device(kind)), started.rank, started.world_size
    store = _connect(started)
    with _ending_together(store, world_size), prepared if rank == 0 else nullcontext():
        if rank == 0:
            store.set(_PREPARED, "")
        while not store.check([_PREPARED]):
            if store.check([_EXIT_CODE]):
                store.add(_N_HEARD, 1)
                raise SystemExit(int(store.get(_EXIT_CODE)))
            time.sleep(_LISTEN_SECONDS)
        dist.init_process_group(
            _backend(kind), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
        )
        work(Ranks(rank, world_size, used, on_event))
        dist.destroy_process_group()


def _connect(started: Started) -> Store:
    """
    Raises:
        UnavailableError: the process that has the store, torchrun's agent or the first, is gone.
    """
    seconds = _AGENT_SECONDS if started.has_agent else _FIRST_SECONDS
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
    except dist.DistError as error:
        raise UnavailableError(
            f"no connection to the other processes within {seconds} seconds: {printable(error)}",
            hint="is torchrun still running, and can its first node be reached?",
        ) from error
    store.set_timeout(_TIMEOUT)
    return store


@contextmanager
def _ending_together(store: Store, world_size: int) -> Iterator[None]:
    """The first error of a process ends all of them with its exit code."""
    try:
        yield
    except (VirnucproError, OSError) as error:
        told = error if isinstance(error, VirnucproError) else disk_error(error)
        if store.add(_N_ERRORS, 1) > 1:
            raise SystemExit(told.exit_code) from error
        store.set(_EXIT_CODE, str(told.exit_code))
        deadline = time.monotonic() + _GRACE_SECONDS
        while not dist.is_initialized() and time.monotonic() < deadline:  # the others listen
            if store.add(_N_HEARD, 0) == world_size - 1:
                break
            time.sleep(_LISTEN_SECONDS)
        raise
    except RuntimeError as error:  # so torch says that another process has gone
        with suppress(dist.DistError):  # with the store, if it was the first
            if store.check([_EXIT_CODE]):
                raise SystemExit(int(store.get(_EXIT_CODE))) from error
        raise


def run_on(devices: Sequence[str], work: Callable[[Ranks], None], on_event: OnEvent) -> None:
    """Run ``work`` (which can be pickled) on each device: one here, several as processes.

    What the processes tell and log is heard here. The first error ends all of them. None
    outlives this call, nor this process.

    Raises:
        VirnucproError: one of the processes raised it, or ended otherwise.
    """
    if len(devices) == 1:
        work(Ranks(0, 1, _use(devices[0]), on_event))
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _LOCALHOST, 0, is_master=True, wait_for_workers=False
    )
    pipes = [multiprocessing.Pipe(duplex=False) for _ in devices]
    group = _Group(tuple(devices), store.port, tuple(theirs for _, theirs in pipes), LOGGER.level)
    ours = [pipe for pipe, _ in pipes]
    raised: list[VirnucproError] = []
    processes = None
    try:
        with interrupts_held():
            processes = spawn(  # type: ignore[no-untyped-call]
                _spawned, (group, work), nprocs=len(devices), join=False
            )
        while not processes.join(_LISTEN_SECONDS):
            raised += _hear(ours, on_event)
        _hear(ours, on_event)
    except (ProcessRaisedException, ProcessExitedException) as error:
        raised += _hear(ours, on_event)
        raise raised[0] if raised else _explained(error, devices) from error
    finally:
        started = processes.processes if processes else []
        for process in started:
            process.kill()
        for process in started:
            process.join()


@dataclass(frozen=True, slots=True)
class _Group:
    """What a process must know to find the others, and to tell its parent an error."""

    devices: tuple[str, ...]
    port: int
    pipes: tuple[Connection, ...]
    log_level: int


def _spawned(rank: int, group: _Group, work: Callable[[Ranks], None]) -> None:
    obey_parent()
    device, world_size, pipe = group.devices[rank], len(group.devices), group.pipes[rank]
    LOGGER.addHandler(_Relay(pipe))
    LOGGER.setLevel(group.log_level)
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    try:
        used = _use(device)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOCALHOST, group.port, is_master=False
        )
        dist.init_process_group(
            _backend(device), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
        )
        work(Ranks(rank, world_size, used, pipe.send))
    except VirnucproError as error:
        pipe.send((type(error), str(error), error.hint))
        raise
    except OSError as error:
        told = disk_error(error)
        pipe.send((type(told), str(told), told.hint))
        raise
    # only now: if an error closed the group, the others would fail at once, and be blamed for it
    dist.destroy_process_group()
    # all is done: torch's threads may abort a process while its interpreter is taken down
    Finalize(None, os._exit, args=(0,), exitpriority=-1)


def _hear(pipes: Sequence[Connection], on_event: OnEvent) -> list[VirnucproError]:
    """Pass on what the processes have said since. -> the errors that they raised on purpose"""
    raised = []
    for pipe in pipes:
        while pipe.poll():
            match pipe.recv():
                case logging.LogRecord() as record:
                    LOGGER.handle(record)
                case (kind, message, hint):
                    raised.append(kind(message, hint))
                case event:
                    on_event(event)
    return raised


class _Relay(logging.Handler):
    """Sends the log of a process to its parent, which has the handlers."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        facts = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
        self._pipe.send(logging.makeLogRecord(facts))


def _explained(
    error: ProcessRaisedException | ProcessExitedException, devices: Sequence[str]
) -> VirnucproError:
    """What ended the first process that did not end well, for people."""
    LOGGER.info("%s", error)
    if isinstance(error, ProcessExitedException):
        reason = cause_of_end(error.exit_code)
    else:
        reason = str(error).strip().splitlines()[-1]  # of its traceback
    return VirnucproError(
        f"the process on {devices[error.error_index]} ended: {printable(reason)}",
        hint=_KEPT,
    )


def _use(name: str) -> torch.device:
    """
    Raises:
        UnavailableError: there is no such GPU.
    """
    device = torch.device(name)
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise UnavailableError(
                f"there is no {name}: {torch.cuda.device_count()} GPUs are visible here",
                hint="start as many processes on a node as it has GPUs",
            )
        torch.cuda.set_device(device)
    return device


def _backend(device: str) -> str:
    return "nccl" if device.startswith("cuda") else "gloo"
