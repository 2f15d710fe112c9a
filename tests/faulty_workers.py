"""Workers with a built-in fault, for the tests of the engine. Spawned processes import them."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch

from virnucpro.core.child_process import Pipe
from virnucpro.core.events import WorkerEvent
from virnucpro.core.logging import LOGGER
from virnucpro.engine import local
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.worker import Worker, _OpenShard
from virnucpro.models.base import Encoder, Pending, Rows

POISON = "WWWWCWWWW"  # no test protein contains it by chance


class PoisonableWorker(Worker):
    """Fails on a batch with a poisonous sequence."""

    is_harmed = False

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        self.is_harmed |= any(POISON in text for text in sequences)
        if self.is_harmed:
            self.suffer()
        return super().start(encoder, sequences)


class CrashingWorker(PoisonableWorker):
    """Exits at once, as after a fault in a kernel."""

    def suffer(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSEGV)


class RaisingWorker(PoisonableWorker):
    def suffer(self) -> None:
        self.is_harmed = False
        raise RuntimeError("a [red]bad[/red] sequence")


class HangingWorker(PoisonableWorker):
    def suffer(self) -> None:
        signal.pause()


class LostContextWorker(PoisonableWorker):
    """Has an unusable device context after a poisonous sequence."""

    def suffer(self) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered (a test)")


class NanWorker(Worker):
    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        pending = super().start(encoder, sequences)

        def rows() -> Rows:
            found = pending.rows()
            found[[POISON in text for text in sequences]] = np.nan
            return found

        return Pending(rows)


def take_memory(sequences: Sequence[str], n_used: int = 0) -> int:
    """Return the tokens of a batch, or fail if they do not fit memory for 500 tokens."""
    n_tokens = sum(len(text) + 2 for text in sequences)
    if n_used + n_tokens > 500:
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")
    return n_tokens


class SmallWorker(Worker):
    """Has memory for 500 tokens."""

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        take_memory(sequences)
        return super().start(encoder, sequences)


class OneDeviceWorker(Worker):
    """Starts only on the first device, and only after the others have failed."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        failed = job.root / ".failed.00000000.tmp"  # deleted like all temporary files
        if not name.endswith("#0"):
            failed.touch()
            raise RuntimeError("no kernel image is available for this device (a test)")
        while not failed.exists():
            time.sleep(0.01)
        super().__init__(job, resources, name, device)


class OneStuckWorker(Worker):
    """Starts on the first device, and hangs on the others before it is ready."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        if not name.endswith("#0"):
            signal.pause()
        super().__init__(job, resources, name, device)


class WarningWorker(Worker):
    def __init__(self, job, resources, name: str, device: str) -> None:
        super().__init__(job, resources, name, device)
        LOGGER.warning("rotation: PyTorch (a [red]test[/red])")


class NeverStartingWorker(Worker):
    def __init__(self, job, resources, name: str, device: str) -> None:
        raise RuntimeError("CUDA driver version is insufficient (a test)")


class KilledWorker(Worker):
    """Is killed at the start of a batch, three times in all."""

    is_early = is_hunted = False
    is_at_risk = True

    def run(self, attempt: Attempt) -> Iterator[WorkerEvent]:
        self.is_at_risk = attempt.shard.index == 2 or not self.is_hunted
        if self.is_early:
            self.die()
        yield from super().run(attempt)

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        if self.is_at_risk:
            self.die()
        return super().start(encoder, sequences)

    def die(self) -> None:
        with (self.job.root / "features/.kills.00000000.tmp").open("ab") as kills:
            if kills.tell() < 3:
                kills.write(b".")
                kills.flush()
                os.kill(os.getpid(), signal.SIGKILL)


class EarlyKilledWorker(KilledWorker):
    """Is killed before its first batch."""

    is_early = True


class HuntedWorker(KilledWorker):
    """Is killed only while it works on shard 2."""

    is_hunted = True


class OverlappingWorker(Worker):
    """Keeps two batches in flight, as on a GPU. A batch ends only when it is collected."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        super().__init__(job, resources, name, device)
        self.batches_in_flight = 2

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        return Pending(lambda: super(OverlappingWorker, self).start(encoder, sequences).rows())


class OverlappingCrashingWorker(OverlappingWorker):
    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        def rows() -> Rows:
            time.sleep(0.01)
            if any(POISON in text for text in sequences):
                os.kill(os.getpid(), signal.SIGKILL)
            return pending.rows()

        pending = super().start(encoder, sequences)
        return Pending(rows)


class OverlappingSmallWorker(OverlappingWorker):
    """Runs out of memory when a batch is collected, not when it starts."""

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        def rows() -> Rows:
            take_memory(sequences)
            return pending.rows()

        pending = super().start(encoder, sequences)
        return Pending(rows)


class CrowdedWorker(Worker):
    """Has memory for 500 tokens in all batches in flight, of which there may be two."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        self.n_used = 0
        super().__init__(job, resources, name, device)
        self.batches_in_flight = 2

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        n_tokens = take_memory(sequences, self.n_used)
        self.n_used += n_tokens
        pending = super().start(encoder, sequences)

        def rows() -> Rows:
            self.n_used -= n_tokens
            return pending.rows()

        return Pending(rows)


class ScarceWorker(Worker):
    """Runs out of memory once, in its n-th batch."""

    n = 0

    def __init__(self, job, resources, name: str, device: str) -> None:
        self.n_begun = 0
        super().__init__(job, resources, name, device)

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        self.n_begun += 1
        if self.n_begun == self.n:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return super().start(encoder, sequences)


class StuckWorker(Worker):
    """Never becomes ready."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        signal.pause()


class StumblingWorker(Worker):
    """Exits in shard 1 before its first batch there."""

    def run(self, attempt: Attempt) -> Iterator[WorkerEvent]:
        if attempt.shard.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().run(attempt)


class FatalWriter(Worker):
    """Exits while it writes shard 0."""

    def _write_shard(self, finished: _OpenShard) -> tuple[float, str]:
        if finished.attempt.shard.index == 0:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._write_shard(finished)


class _Mallinfo(ctypes.Structure):
    """The ten numbers that glibc reports about its memory. One of them is used here."""

    _fields_: ClassVar = [
        ("before", ctypes.c_int * 3),
        ("n_mapped", ctypes.c_int),
        ("after", ctypes.c_int * 6),
    ]


def serve_and_describe_the_allocator(pipe: Pipe, device: str) -> None:
    """Run a worker that embeds nothing and reports ``keeps_large_blocks``."""

    def load(*_: object) -> SimpleNamespace:
        return SimpleNamespace(description=keeps_large_blocks(), memory=tuple, finish=tuple)

    _reset_allocator()
    local.worker_main(pipe, load, None, None, "worker", device)  # type: ignore[arg-type]


def load_and_tell_of_the_allocator(pipe: Pipe, job: WorkerConfig, resources: Resources) -> None:
    """Load a model in a user's own process, without our workers."""
    _reset_allocator()
    with closing(InlineExecutor().run([], job, resources)) as events:
        next(events)
        pipe.send(keeps_large_blocks())


def _reset_allocator() -> None:
    """Let glibc map large blocks as in a new process, because this one is a fork."""
    assert ctypes.CDLL(None).mallopt(-3, 128 << 10) == 1  # M_MMAP_THRESHOLD


def keeps_large_blocks() -> bool:
    """Return False if glibc maps a block of 20 MB, and so returns it when it is freed."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.mallinfo.restype = _Mallinfo
    n_before = library.mallinfo().n_mapped
    block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(20 << 20)))
    n_mapped = library.mallinfo().n_mapped - n_before
    library.free(block)
    return not n_mapped


class AllNanWorker(Worker):
    """Returns vectors that are not finite, except for the trial at its start."""

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        pending = super().start(encoder, sequences)
        return Pending(lambda: np.full_like(pending.rows(), np.nan))


class FeignedGpu(Worker):
    """Computes on the CPU under the name of a GPU. The GPU ``cuda:1`` has a fault.

    The fault occurs in a ``share`` of its batches. Other GPUs start when it has started
    ``n_awaited`` batches.
    """

    def __init__(
        self, job, resources, name: str, device: str, *, seed: int, share: float, n_awaited: int
    ) -> None:
        super().__init__(job, resources, name, "cpu")
        self.gpu = device
        self.seed = seed
        self.share = share
        self.n_awaited = n_awaited
        self.batches = job.root / "features/.batches.00000000.tmp"

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        if self.gpu == "cuda:1":
            with self.batches.open("ab") as batches:
                batches.write(b".")  # counted in all processes of this GPU
                n_batches = batches.tell()
            if random.Random(f"{self.seed} {n_batches}").random() < self.share:
                return self.suffer(encoder, sequences)
        else:
            while not (self.batches.exists() and self.batches.stat().st_size >= self.n_awaited):
                time.sleep(0.01)
        return super().start(encoder, sequences)

    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        return super().start(encoder, sequences)


class EccGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        raise torch.AcceleratorError(
            "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`"
        )


class IllegalAccessGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


class CrashingGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("a dead process goes on")


class HangingGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        signal.pause()
        raise AssertionError("a signal came")


class SlowGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        time.sleep(0.1)
        return super().suffer(encoder, sequences)


class NanGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        pending = super().suffer(encoder, sequences)
        return Pending(lambda: np.full_like(pending.rows(), np.nan))


class RaisingGpu(FeignedGpu):
    def suffer(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        raise RuntimeError("the size of a tensor is wrong (a test)")


class NanEverywhereGpu(AllNanWorker):
    """Computes on the CPU under the name of a GPU. No GPU returns a finite vector."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        super().__init__(job, resources, name, "cpu")


class PoisonedGpu(Worker):
    """Computes on the CPU under the name of a GPU. A faulty kernel fails on poison."""

    def __init__(self, job, resources, name: str, device: str) -> None:
        super().__init__(job, resources, name, "cpu")

    def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
        if any(POISON in text for text in sequences):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return super().start(encoder, sequences)
