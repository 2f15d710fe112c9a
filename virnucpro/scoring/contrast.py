"""How far each piece of a record stands out from its host: by its log-odds, and by its genes.

Hosts differ in the log-odds of their own pieces, and so do parts of a host in GC; both are taken
out. Genes of phages are shorter and lie closer than those of their hosts, as PhiSpy has it (Akhter
et al. 2012, Nucleic Acids Res. 40:e126); here stop-free stretches stand for genes.

What is usual in a host is measured on the record itself, by medians, and drawn to what is usual
among hosts where a record is short: one that is all virus would else be its own host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.scorer.nets import Scorer
from virnucpro.scorer.score import score_windows
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

# of the 36 plain figures of a piece: its longest stretch, that beyond chance, gene-like ones per kb
_SHAPE = (3, 24, 7)
_SIGNS = np.array([-1.0, -1.0, 1.0])  # of viral genes beside those of hosts
_PRIOR_ITEMS = 100  # pieces of a record that weigh as much as all other hosts
_PARTS = 20  # of a record, by GC, for the slope of log-odds over GC

Values = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Pieces along a record, and what is known of each. Columns in step."""

    start: Counts  # (n,)
    log_odds: Values  # (n,), NaN for one of unknown bases alone
    gc: Values  # (n,)
    shape: Values  # (n, 3)

    @classmethod
    def of(
        cls, sequence: str, scorer: Scorer, size: int, step: int, code: GeneticCode = STANDARD
    ) -> Items:
        pieces, figures = score_windows(sequence, scorer, size, step, code)
        shape = figures[:, _SHAPE].astype(np.float64)
        return cls(pieces.start, pieces.log_odds, figures[:, 0].astype(np.float64), shape)

    @property
    def is_known(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.log_odds)

    def take(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> Items:
        """The chosen ones, in this order."""
        return Items(self.start[chosen], self.log_odds[chosen], self.gc[chosen], self.shape[chosen])


@dataclass(frozen=True, slots=True)
class Hosts:
    """What is usual in hosts: medians and slopes of each, the mean over them."""

    log_odds: float
    gc: float
    slope: float  # of log-odds over GC, from part to part of a host
    shape: tuple[float, ...]
    deviation: tuple[float, ...]  # of each figure of the shape, between pieces of a host

    @classmethod
    def mean(cls, each: Sequence[Hosts]) -> Hosts:
        def mean(values: Sequence[float]) -> float:
            return round(float(np.mean(values)), 4)

        return cls(
            mean([one.log_odds for one in each]),
            mean([one.gc for one in each]),
            mean([one.slope for one in each]),
            tuple(map(mean, zip(*(one.shape for one in each), strict=True))),
            tuple(map(mean, zip(*(one.deviation for one in each), strict=True))),
        )

    @classmethod
    def of(cls, items: Items) -> Hosts:
        """What is usual in a record, which is mostly host."""
        known = items.take(items.is_known)
        slope = _slope(known.gc, known.log_odds)
        return cls(
            float(np.median(known.log_odds)),
            float(np.median(known.gc)),
            slope,
            tuple(np.median(known.shape, axis=0).tolist()),
            tuple((known.shape.std(axis=0) + 1e-6).tolist()),
        )

    def at(self, items: Items, *, is_virus: bool) -> Hosts:
        """What is usual in the host of this record; if it is a virus itself, by hosts of its GC."""
        n = int(np.count_nonzero(items.is_known))
        if not n:
            return self
        own = Hosts.of(items)
        share = 0.0 if is_virus else n / (n + _PRIOR_ITEMS)
        has_slope = n >= _PRIOR_ITEMS

        def drawn(value: float, prior: float) -> float:
            return share * value + (1 - share) * prior

        level = self.log_odds + self.slope * (own.gc - self.gc)
        return Hosts(
            drawn(own.log_odds, level),
            own.gc,
            drawn(own.slope, self.slope) if has_slope else self.slope,
            tuple(map(drawn, own.shape, self.shape)),
            self.deviation,
        )


def _slope(gc: Values, log_odds: Values) -> float:
    """The slope of the line through medians of parts of rising GC; 0 for equal ones."""
    order = np.argsort(gc, kind="stable")
    parts = [part for part in np.array_split(order, _PARTS) if len(part)]
    x = np.array([np.median(gc[part]) for part in parts])
    y = np.array([np.median(log_odds[part]) for part in parts])
    x -= x.mean()
    spread = float((x**2).sum())
    return float((x * (y - y.mean())).sum()) / spread if spread > 0 else 0.0


def contrast(
    items: Items, host: Hosts, gc_weight: float, shape_weight: float, n_items: int
) -> Values:
    """Log-odds above those of the host, and how much the genes around differ from its. (n,)

    ``gc_weight`` is the share of the slope over GC that is taken out; the shape is the mean over
    ``n_items`` pieces around, in standard deviations of a host's pieces, times ``shape_weight``.
    """
    relative = items.log_odds - host.log_odds - gc_weight * host.slope * (items.gc - host.gc)
    shape = ((items.shape - host.shape) / host.deviation) @ _SIGNS / len(_SIGNS)
    around = _moving_mean(np.where(items.is_known, shape, np.nan), n_items)
    return np.asarray(relative + shape_weight * around)


def _moving_mean(values: Values, n_items: int) -> Values:
    """The mean of the known values among ``n_items`` around each; fewer at the ends. (n,)"""
    is_known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_known)])
    middle = np.arange(len(values))
    low = np.maximum(0, middle - n_items // 2)
    high = np.minimum(len(values), middle + n_items // 2 + 1)
    means: Values = (sums[high] - sums[low]) / np.maximum(1, counts[high] - counts[low])
    return means
