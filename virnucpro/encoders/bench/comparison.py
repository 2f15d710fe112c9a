"""The encoders side by side: the same weights and proteins, in the same process.

Every way is run once to warm up and to have its vectors, and then in turn, so that what else the
machine does falls on all alike; on a GPU, which may hold one model alone, one way after the other.
The figures come from the medians of the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from virnucpro.encoders.bench.encoder import OURS, Pass, Vectors, Way, mean_pass
from virnucpro.encoders.bench.layouts import FAILURES, Layout, reason_of
from virnucpro.encoders.bench.synthetic import count_tokens, flop_per_token, lengths_of
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.ground.config import Precision

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
    ratio: float | None = None  # to the reference: the first row of another program
    largest_error: float | None = None  # relative L2 distance of a vector from the reference's
    n_batches: int | None = None
    seconds_per_batch: float | None = None
    limit_share: float | None = None  # of what the matrix products alone would allow
    host_share: float | None = None  # of the time, outside of the model's forward
    peak_bytes: int | None = None
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """The kind of measurement, the same in every run."""
        way = (self.program, self.precision, self.how, self.layout)
        return (self.model, self.profile, *way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    model: str
    shape: ESM2Shape
    profile: str
    proteins: Sequence[str]
    repeats: int
    limits: Mapping[Precision, float]  # FLOP/s of a matrix product, where it was measured
    least_seconds: float = 0.0  # of a repeat, which is as many passes as that takes
    one_by_one: bool = False  # one model at a time is loaded


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
        return None

    def repeat(self, comparison: Comparison) -> None:
        """One measurement: a pass, or the mean of as many as fill the least time."""
        passes: list[Pass] = []
        while not passes or sum(one.seconds for one in passes) < comparison.least_seconds:
            outcome = self.run(comparison.proteins)
            if outcome is None:
                return
            passes.append(outcome[0])
        self.passes.append(mean_pass(passes))
        self.n_due -= 1

    def fail(self, reason: str) -> None:
        self.reason, self.n_due, self.vectors = reason, 0, None


def compare_ways(
    comparison: Comparison, ways: Sequence[Way], layouts: Sequence[Layout]
) -> Iterator[EncoderRow]:
    """A row for each way in each layout, as soon as it is known.

    A row that comes before that of the reference comes once more at the end, with its ratio and
    its error.
    """
    lanes = [_Lane(way, layout) for way in ways for layout in layouts]
    done: list[_Lane] = []
    early: list[_Lane] = []
    reference = None
    for together in [[lane] for lane in lanes] if comparison.one_by_one else [lanes]:
        _measure(comparison, together)
        done += together
        reference = _reference(done, is_all=len(done) == len(lanes))
        for lane in together:
            yield _row(comparison, lane, reference)
            if comparison.one_by_one:
                lane.layout.release(lane.way)
        early += together if reference is None else []
    for lane in early if reference is not None else []:
        yield _row(comparison, lane, reference)


def _reference(lanes: Sequence[_Lane], *, is_all: bool) -> _Lane | None:
    """The first lane of another program if it has figures, else, of all, the first of ours."""
    others = [lane for lane in lanes if lane.way.program != OURS][:1]
    ours = [lane for lane in lanes if lane.way.program == OURS and is_all]
    return next((lane for lane in others + ours if not lane.reason), None)


def _measure(comparison: Comparison, lanes: Sequence[_Lane]) -> None:
    for lane in lanes:  # the warm-up
        if outcome := lane.run(comparison.proteins):
            first, lane.vectors = outcome
            lane.n_due = comparison.repeats if first.seconds < LONG_SECONDS else 1
    while any(lane.n_due for lane in lanes):
        for lane in lanes:
            if lane.n_due:
                lane.repeat(comparison)


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
