"""Time an encoder on batches of proteins.

``virnucpro bench`` and the programs in ``benchmarks/`` measure with this loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from virnucpro.models.base import Pending, Rows
from virnucpro.models.protein_tokens import EXTRA_TOKENS

FAIR_ESM_TOKENS = 4096  # per batch, in fair-esm's scripts/extract.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What was embedded, and how long it took."""

    n_batches: int
    n_tokens: int  # without padding
    seconds: float
    cpu_seconds: float  # of this process

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / self.seconds


def count_tokens(proteins: Iterable[str]) -> int:
    """Count residues and two more per protein, without padding."""
    return sum(len(protein) + EXTRA_TOKENS for protein in proteins)


def time_batches(
    start: Callable[[Sequence[str]], Pending],
    batches: Iterable[Sequence[str]],
    store: Callable[[Rows], object],
) -> Timing:
    """Embed batches. Two are in progress at a time, as in a worker on a GPU.

    The time includes that for which ``batches`` is iterated.

    Args:
        start: starts a batch on the device.
        batches: protein sequences.
        store: gets the vectors of each batch in turn, (n_proteins, dim) float32.
    """
    n_batches = 0
    n_tokens = 0
    pending = deque[Pending]()
    started = time.perf_counter()
    cpu_started = time.process_time()
    for batch in batches:
        pending.append(start(batch))
        n_batches += 1
        n_tokens += count_tokens(batch)
        if len(pending) > 1:
            store(pending.popleft().rows())
    for last in pending:
        store(last.rows())
    return Timing(
        n_batches=n_batches,
        n_tokens=n_tokens,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
    )
