"""Define the events of a run: plain values that can be pickled, logged and displayed.

Every shard ends in exactly one ``ShardDone`` or ``ShardFailed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from virnucpro.core.atomic_io import disk_error
from virnucpro.core.errors import VirnucproError
from virnucpro.core.logging import format_count
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard

STAGES = ("reading", "embedding", "writing tables")  # in order
SCORING = "scoring"  # replaces the last two stages in a run without encoders
STARTING = "starting workers"  # the first part of embedding


class Memory(NamedTuple):
    """Memory in bytes.

    For a GPU, its used and total memory. For a CPU, the memory used by the process and the
    machine's total.
    """

    used: int
    total: int


class WorkerReady(NamedTuple):
    """A worker has loaded its models and waits for shards."""

    worker: str
    description: str  # device, precision, kernel, token budget, process
    memory: Memory
    warnings: tuple[str, ...] = ()  # start-up warnings of a process without a log


class WorkerLost(NamedTuple):
    """A worker failed to start, died, or stopped responding while it worked on ``shard``."""

    worker: str
    reason: str
    shard: Shard | None = None
    traceback: str = ""
    is_final: bool = False  # it is not replaced
    device_error: str = ""  # the fault of the device that ended it, such as "misaligned address"
    n_device_errors: int = 0  # of its device in this run, this one included
    has_device: bool = True  # False: a part that runs on devices of its own was lost

    @property
    def lost_device(self) -> str:
        """The line for people about a device that the run goes on without, or ""."""
        if not (self.is_final and self.has_device):
            return ""
        if not self.device_error:
            return f"{self.worker} was taken out of the run: {self.reason}"
        errors = format_count(self.n_device_errors, "device error")
        return f"{self.worker} was taken out of the run after {errors}: {self.device_error}"


class BatchStarted(NamedTuple):
    """A batch has started. If the worker dies, the ORFs at ``rows`` of the shard are suspects.

    The next batch, from this shard or the next, may start before this one is done.
    """

    worker: str
    shard: Shard
    rows: tuple[int, ...]
    allowed_seconds: float  # limit after which the worker counts as hung


class BatchDone(NamedTuple):
    """Every ORF of a batch has a vector or a failure reason."""

    worker: str
    shard: Shard
    rows: tuple[int, ...]
    n_tokens: int
    memory: Memory


class BatchSizeReduced(NamedTuple):
    """A batch did not fit into device memory."""

    worker: str
    tokens_per_batch: int


class ShardDone(NamedTuple):
    """The shard's feature file is complete and lists ``n_failed`` ORFs as failures.

    Sent once the file is written. The worker may already be embedding the next shard.
    """

    worker: str
    shard: Shard
    seconds: float
    n_failed: int
    n_cached: int = 0  # vectors read from a cache
    n_cached_tokens: int = 0
    cache_fault: str = ""  # why new vectors could not be cached
    n_recovered: int = 0  # sequences with a vector that had failed on another device


class ErrorText(NamedTuple):
    """A VirNucPro error as text, to be raised again in another process."""

    kind: type[VirnucproError]
    message: str
    hint: str
    option: str = ""

    @classmethod
    def from_error(cls, error: VirnucproError | OSError) -> ErrorText:
        reported = error if isinstance(error, VirnucproError) else disk_error(error)
        return cls(type(reported), reported.message, reported.hint, reported.option)

    @property
    def to_error(self) -> VirnucproError:
        return self.kind(self.message, self.hint, option=self.option)


class ShardFailed(NamedTuple):
    """The shard has no feature file."""

    worker: str
    shard: Shard
    reason: str
    traceback: str = ""
    # a disk, model or device error, which would also stop all other shards
    refusal: ErrorText | None = None


class ShardReturned(NamedTuple):
    """Rows of a shard failed alone on a device, and another device is to try them.

    Vectors that the device made are in the partial files. The shard ends later.
    """

    worker: str
    shard: Shard
    reasons: dict[int, str]  # row -> reason
    error: str = ""  # one of the reasons, if it is not that the memory ran out


class Progress(NamedTuple):
    """Progress of a stage in the parent. ``total`` is 0 if unknown."""

    stage: str
    done: int
    total: int
    unit: str
    # work done since this start and work left in the run, in units of equal time; None: unknown
    work: tuple[int, int] | None = None
    memory: Memory | None = None  # of the GPU in use
    also: tuple[str, ...] = ()  # further figures, formatted
    seconds_left: float | None = None  # until the end of the run; None: the sender has no estimate


class EmbeddingStarted(NamedTuple):
    """Embedding begins, and the finished shards of earlier starts have been counted.

    The shards of a large input follow in ``ShardsPlanned``.
    """

    pending: tuple[Shard, ...]
    n_done_before: int
    # shard spans of each input, as (first, last + 1); empty until the plan is complete
    files: tuple[tuple[tuple[int, int], ...], ...] = ()
    encoders: tuple[EncoderSpec, ...] = ()
    planned_share: float = 1.0  # of the input


class ShardsPlanned(NamedTuple):
    """More shards were planned while others are embedded. Fields as in ``EmbeddingStarted``."""

    pending: tuple[Shard, ...]
    n_done_before: int
    planned_share: float
    files: tuple[tuple[tuple[int, int], ...], ...] = ()


WorkerEvent = (
    WorkerReady
    | WorkerLost
    | BatchStarted
    | BatchDone
    | BatchSizeReduced
    | ShardDone
    | ShardFailed
    | ShardReturned
)
RunEvent = WorkerEvent | Progress | EmbeddingStarted | ShardsPlanned
EventHandler = Callable[[RunEvent], None]
