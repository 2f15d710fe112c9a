"""The events of a run: plain values, which are pickled, logged and drawn.

Every shard of a run ends in exactly one ``ShardDone`` or ``ShardFailed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from virnucpro.core.atomic_io import disk_error
from virnucpro.core.errors import VirnucproError
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard

STAGES = ("reading", "embedding", "writing tables")  # of a run
SCORING = "scoring"  # replaces the last two in a run without encoders
STARTING = "starting workers"  # a part of embedding


class Memory(NamedTuple):
    """Bytes of a GPU; on a CPU, bytes used by the process and total bytes of the machine."""

    used: int
    total: int


class WorkerReady(NamedTuple):
    """A worker has loaded its models and waits for shards."""

    worker: str
    description: str  # device, precision, kernel, token budget, process
    memory: Memory
    warnings: tuple[str, ...] = ()  # of its start, where its process has no log


class WorkerLost(NamedTuple):
    """A worker could not start, died, or fell silent; ``shard`` is the one it worked on."""

    worker: str
    reason: str
    shard: Shard | None = None
    traceback: str = ""
    is_final: bool = False  # it is not replaced


class BatchStarted(NamedTuple):
    """A batch has started. Its ORFs, by index in the shard, are suspects if the worker dies.

    The next batch, of this shard or the next, may start before this one is done.
    """

    worker: str
    shard: Shard
    rows: tuple[int, ...]
    allowed_seconds: float  # limit after which the worker counts as hung


class BatchDone(NamedTuple):
    """Each ORF of a batch has a vector or the reason why it has none."""

    worker: str
    shard: Shard
    rows: tuple[int, ...]
    n_tokens: int
    memory: Memory


class BatchSizeReduced(NamedTuple):
    """A batch did not fit into the device's memory."""

    worker: str
    tokens_per_batch: int


class ShardDone(NamedTuple):
    """The shard's feature file is complete; it lists ``n_failed`` ORFs as failures.

    Sent when the file is written; the next shard is already being embedded.
    """

    worker: str
    shard: Shard
    seconds: float
    n_failed: int
    n_cached: int = 0  # vectors read from a cache
    n_cached_tokens: int = 0
    cache_fault: str = ""  # why the new vectors are not in the cache


class ErrorText(NamedTuple):
    """An error of ours as text, which another process raises again."""

    kind: type[VirnucproError]
    message: str
    hint: str
    option: str = ""

    @classmethod
    def from_error(cls, error: VirnucproError | OSError) -> ErrorText:
        ours = error if isinstance(error, VirnucproError) else disk_error(error)
        return cls(type(ours), ours.message, ours.hint, ours.option)

    @property
    def to_error(self) -> VirnucproError:
        return self.kind(self.message, self.hint, option=self.option)


class ShardFailed(NamedTuple):
    """The shard has no feature file."""

    worker: str
    shard: Shard
    reason: str
    traceback: str = ""
    # an error of the disk, the model or the device, which would stop all other shards too
    refusal: ErrorText | None = None


class Progress(NamedTuple):
    """The progress of a stage in the parent; ``total`` is 0 if unknown."""

    stage: str
    done: int
    total: int
    unit: str
    # work that this start did in this stage, and work still to do until the end of the run, both
    # in units of equal time; None: unknown
    work: tuple[int, int] | None = None
    memory: Memory | None = None  # of the GPU that computes
    also: tuple[str, ...] = ()  # further figures, as they are shown
    seconds_left: float | None = None  # until the end of the run; None: not estimated by the sender


class EmbeddingStarted(NamedTuple):
    """The plan is known, and so are the shards that an earlier start finished."""

    pending: tuple[Shard, ...]
    n_done_before: int
    # for each input, the spans of its shards: the first, and one after the last
    files: tuple[tuple[tuple[int, int], ...], ...] = ()
    encoders: tuple[EncoderSpec, ...] = ()


WorkerEvent = (
    WorkerReady | WorkerLost | BatchStarted | BatchDone | BatchSizeReduced | ShardDone | ShardFailed
)
RunEvent = WorkerEvent | Progress | EmbeddingStarted
EventHandler = Callable[[RunEvent], None]
