"""Layouts of a machine's cores: one process with all threads, or one process each.

The processes are started once, before the clock runs, and hold the encoders they loaded. Each
embeds the same share of the proteins; the time is that of the parent, from giving to having all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import psutil
import torch

from virnucpro.encoders.bench.encoder import Pass, Setting, TimedEncoder, Vectors, Way, time_pass
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.log import printable
from virnucpro.ground.processes import Child, Pipe, Raised, interrupts_held, kill_all, start

# what other people's code raises when it does not do: no memory, no kernel, another version
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ImportError,
    OSError,
    EOFError,
    MemoryError,
    UnavailableError,
)
_GIB = 1 << 30


class Layout(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def n_processes(self) -> int: ...

    def time(self, way: Way, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
        """One pass; what is not yet loaded is loaded before the clock runs."""

    def release(self, way: Way) -> None:
        """Give back the room of what is loaded; the next pass loads it again."""


@dataclass(slots=True, eq=False)
class OneProcess:
    """This process, with the threads that it has."""

    name: str
    setting: Setting
    n_processes: int = 1
    encoders: dict[str, TimedEncoder] = field(default_factory=dict)  # by the way's name

    def time(self, way: Way, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
        if way.name not in self.encoders:
            self.encoders[way.name] = way.load(self.setting)
        try:
            return time_pass(self.encoders[way.name], proteins)
        except FAILURES:
            self.release(way)  # the next one needs its room
            raise

    def release(self, way: Way) -> None:
        self.encoders.pop(way.name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(slots=True, eq=False)
class ManyProcesses:
    """``n_processes`` of one thread each, started when they are first needed."""

    setting: Setting
    n_processes: int
    n_ways: int
    children: list[Child] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.n_processes} x 1 thread"

    def time(self, way: Way, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
        if not self.children:
            self.start()
        self.ask([(way, [])] * self.n_processes)  # loads it
        order = np.argsort([-len(protein) for protein in proteins], kind="stable")
        shares = [order[i :: self.n_processes].tolist() for i in range(self.n_processes)]
        requests = [(way, [proteins[i] for i in share]) for share in shares]
        started = time.perf_counter()
        answers = self.ask(requests)
        seconds = time.perf_counter() - started
        vectors = np.full((len(proteins), self.setting.shape.dim), np.nan, dtype=np.float32)
        for share, (_, part) in zip(shares, answers, strict=True):
            vectors[share] = part
        passes = [found for found, _ in answers]
        return Pass(
            seconds=seconds,
            cpu_seconds=sum(found.cpu_seconds for found in passes),
            forward_seconds=sum(found.forward_seconds for found in passes) / self.n_processes,
            n_batches=sum(found.n_batches for found in passes),
            peak_bytes=None,
        ), vectors

    def release(self, way: Way) -> None:
        """They end together, with what they have loaded."""

    def ask(self, requests: Sequence[_Request]) -> list[tuple[Pass, Vectors]]:
        """
        Raises:
            UnavailableError: a process answers with a reason, or has died.
        """
        try:
            for child, request in zip(self.children, requests, strict=True):
                child.pipe.send(request)
            answers = [child.pipe.recv() for child in self.children]
        except (OSError, EOFError) as error:
            self.close()
            raise UnavailableError("a process died") from error
        for answer in answers:
            if isinstance(answer, Raised):
                self.close()
                raise UnavailableError(answer.reason)
            if isinstance(answer, str):
                raise UnavailableError(answer)
        return answers

    def start(self) -> None:
        n_bytes = self.n_processes * (_GIB // 2 + 4 * self.setting.shape.n_parameters * self.n_ways)
        available = psutil.virtual_memory().available
        if n_bytes > 0.8 * available:
            raise UnavailableError(
                f"{self.n_processes} processes would need {n_bytes / _GIB:.0f} GiB; "
                f"{available / _GIB:.0f} GiB are free"
            )
        with interrupts_held():
            for _ in range(self.n_processes):
                self.children.append(start(_serve, self.setting))

    def close(self) -> None:
        kill_all(self.children)
        self.children.clear()


_Request = tuple[Way, list[str]]


def _serve(pipe: Pipe, setting: Setting) -> None:
    """A process of ``ManyProcesses``."""
    torch.set_num_threads(1)
    here = OneProcess("1 thread", setting)
    while True:
        way, proteins = pipe.recv()
        try:
            answer: object = here.time(way, proteins)
        except FAILURES as error:
            answer = reason_of(error)
        pipe.send(answer)


def reason_of(error: BaseException) -> str:
    if isinstance(error, UnavailableError):
        return str(error)
    return f"{type(error).__name__}: {printable(error)}"


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` threads for the time of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def layouts(setting: Setting, n_threads: int, n_ways: int) -> Iterator[list[Layout]]:
    """The layouts that make sense on the device; one process is the first."""
    if not setting.device.startswith("cpu"):
        yield [OneProcess(f"1 process, {setting.device}", setting)]
        return
    one = OneProcess(f"1 x {n_threads} thread{'s' * (n_threads > 1)}", setting)
    many = ManyProcesses(setting, n_threads, n_ways)
    try:
        with threads(n_threads):
            both: list[Layout] = [one, many]
            yield both[:n_threads]
    finally:
        many.close()
