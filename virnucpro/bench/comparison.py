"""The encoders side by side: the same weights and proteins, in turn, in the same process.

Every way is run once to warm up and to have its vectors, and then in turn, so that what else the
machine does falls on all alike. The figures come from the medians of the wall clock.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from virnucpro.bench.encoder import OURS, Pass, Vectors, Way
from virnucpro.bench.layouts import FAILURES, Layout, reason_of
from virnucpro.bench.synthetic import count_tokens, flop_per_token, lengths_of
from virnucpro.config import Precision
from virnucpro.encoders.esm2.model import ESM2Shape

LONG_SECONDS = 5.0  # a pass that takes longer is repeated once: its share of chance is small


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRow:
    """One way in one layout; where ``reason`` says why it has no figures, they are None."""

    model: str
    profile: str
    program: str
    precision: Precision
    how: str
    layout: str
    n_proteins: int
    n_tokens: int
    reason: str = ""
    tokens_per_second: float | None = None
    ratio: float | None = None  # to the first row
    largest_error: float | None = None  # relative L2 distance of a vector from the first row's
    n_batches: int | None = None
    seconds_per_batch: float | None = None
    limit_share: float | None = None  # of what the matrix products alone would allow
    host_share: float | None = None  # of the time, outside of the model's forward
    peak_bytes: int | None = None
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    model: str
    shape: ESM2Shape
    profile: str
    proteins: Sequence[str]
    repeats: int
    limits: Mapping[Precision, float]  # FLOP/s of a matrix product, where it was measured


@dataclass(slots=True, eq=False)
class _Lane:
    """A row while it is measured."""

    way: Way
    layout: Layout
    vectors: Vectors | None = None
    passes: list[Pass] = field(default_factory=list)
    reason: str = ""
    n_due: int = 0

    @property
    def seconds(self) -> float:
        return median(found.seconds for found in self.passes)

    def run(self, proteins: Sequence[str]) -> tuple[Pass, Vectors] | None:
        try:
            outcome = self.layout.time(self.way, proteins)
            if np.isfinite(outcome[1]).all():
                return outcome
            self.fail("its vectors are not finite")
        except FAILURES as error:
            self.fail(reason_of(error))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def fail(self, reason: str) -> None:
        self.reason, self.n_due, self.vectors = reason, 0, None


def compare(
    comparison: Comparison, ways: Sequence[Way], layouts: Sequence[Layout]
) -> list[EncoderRow]:
    """One row for each way in each layout; the first one's first."""
    lanes = [_Lane(way, layout) for way in ways for layout in layouts]
    for lane in lanes:  # the warm-up
        if outcome := lane.run(comparison.proteins):
            first, lane.vectors = outcome
            lane.n_due = comparison.repeats if first.seconds < LONG_SECONDS else 1
    while any(lane.n_due for lane in lanes):
        for lane in lanes:
            if lane.n_due and (outcome := lane.run(comparison.proteins)):
                lane.passes.append(outcome[0])
                lane.n_due -= 1
    reference = _reference(lanes)
    return [_row(comparison, lane, reference) for lane in lanes]


def _reference(lanes: Sequence[_Lane]) -> _Lane | None:
    """The first lane if it has figures, or the first of ours that has."""
    candidates = [*lanes[:1], *(lane for lane in lanes if lane.way.program == OURS)]
    return next((lane for lane in candidates if not lane.reason), None)


def _row(comparison: Comparison, lane: _Lane, reference: _Lane | None) -> EncoderRow:
    lengths, way = lengths_of(comparison.proteins), lane.way
    n_tokens = count_tokens(lengths)
    row = {
        "model": comparison.model,
        "profile": comparison.profile,
        "program": way.program,
        "precision": way.precision,
        "how": way.how,
        "layout": lane.layout.name,
        "n_proteins": len(lengths),
        "n_tokens": n_tokens,
        "reason": lane.reason,
    }
    if lane.reason or lane.vectors is None:
        return EncoderRow(**row)  # type: ignore[arg-type]
    passes, rate = lane.passes, n_tokens / lane.seconds
    limit = comparison.limits.get(way.precision)
    forward = median(found.forward_seconds / found.seconds for found in passes)
    row |= {
        "tokens_per_second": rate,
        "n_batches": passes[0].n_batches,
        "seconds_per_batch": lane.seconds * lane.layout.n_processes / passes[0].n_batches,
        "limit_share": rate * flop_per_token(comparison.shape, lengths) / limit if limit else None,
        "host_share": max(0.0, 1 - forward),
        "peak_bytes": passes[0].peak_bytes,
        "seconds": tuple(found.seconds for found in passes),
        "cpu_seconds": tuple(found.cpu_seconds for found in passes),
    }
    if reference is not None and reference.vectors is not None:
        row["ratio"] = reference.seconds / lane.seconds
        row["largest_error"] = largest_error(lane.vectors, reference.vectors)
    return EncoderRow(**row)  # type: ignore[arg-type]


def largest_error(vectors: Vectors, reference: Vectors) -> float:
    """The largest relative L2 distance of a row."""
    distance = np.linalg.norm(vectors - reference, axis=1)
    return float((distance / np.linalg.norm(reference, axis=1)).max())
