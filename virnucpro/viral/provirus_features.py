"""The signal of each piece of a record: its log-odds, corrected for GC, and its genes.

The scorer's protein nets tell phages from hosts far better than its nets for pieces, at about four
times the cost. So they read only the genes of pieces that may be viral.

Genes of phages are shorter and closer together than genes of their hosts, as PhiSpy uses (Akhter
et al. 2012, Nucleic Acids Res. 40:e126); here stop-free stretches stand for genes.

The usual values of a host are medians over the record itself, shrunk towards the medians over all
hosts if the record is short. The level of a host depends on its GC, and differs between hosts with
the same GC: ``Levels``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray, find_runs
from virnucpro.sequences.translate import STANDARD, GeneticCode
from virnucpro.viral.networks import Scorer
from virnucpro.viral.scoring import score_windows

# columns among the 36 plain figures of a piece: its longest stretch, the same beyond chance, and
# gene-like stretches per kb
_SHAPE = (3, 24, 7)
N_SHAPE = len(_SHAPE)
_PRIOR_ITEMS = 100  # pieces of a record that weigh as much as all other hosts
_KNOTS = np.linspace(0.2, 0.8, 25)  # shares of GC
_NEAR = 0.03  # of GC: standard deviation of the kernel that averages levels of similar hosts
_FAR = 1e-4  # least weight of a host

# starts, ends, log-odds and strands of the genes of an upper-case sequence: see
# ``landmarks.genes_of``
Genes: TypeAlias = tuple[IntArray, IntArray, FloatArray, IntArray]
ReadGenes: TypeAlias = Callable[[str], Genes]


class WindowTable(NamedTuple):
    """Pieces along a record and their figures, in parallel columns."""

    start: IntArray  # (n,)
    log_odds: FloatArray  # (n,), NaN for a piece without a known base
    gc: FloatArray  # (n,)
    shape: FloatArray  # (n, 3)
    genes: FloatArray  # (n,) mean log-odds of the proteins on it; NaN: none, or not scored

    @classmethod
    def from_scores(
        cls, sequences: Sequence[str], scorer: Scorer, step: int, code: GeneticCode = STANDARD
    ) -> list[WindowTable]:
        """One piece every ``step`` bases of each sequence, as long as the window nets read."""
        pieces, figures = score_windows(sequences, scorer, step, code, (0, *_SHAPE))
        gc, shape = figures[:, 0].astype(np.float64), figures[:, 1:].astype(np.float64)
        everything = cls(pieces.start, pieces.log_odds, gc, shape, np.full(len(gc), np.nan))
        bounds = np.searchsorted(pieces.record, range(len(sequences) + 1)).tolist()
        return [everything.select(slice(first, end)) for first, end in pairwise(bounds)]

    @classmethod
    def concatenate(cls, each: Sequence[WindowTable]) -> WindowTable:
        """Concatenate the pieces of several records."""
        nothing = np.zeros(0)
        empty = cls(np.zeros(0, np.int64), nothing, nothing, np.zeros((0, N_SHAPE)), nothing)
        return cls(*map(np.concatenate, zip(empty, *each, strict=True)))

    @property
    def median_gc(self) -> float:
        """The median GC of the pieces with log-odds; NaN without one."""
        is_known = self.is_known
        return float(median(self.gc[is_known])) if is_known.any() else np.nan

    @property
    def is_known(self) -> BoolArray:
        return ~np.isnan(self.log_odds)

    def select(self, chosen: IntArray | BoolArray | slice) -> WindowTable:
        """The chosen pieces, in this order."""
        return WindowTable._make(column[chosen] for column in self)

    def with_genes(
        self, sequence: str, chosen: BoolArray, size: int, read_genes: ReadGenes
    ) -> WindowTable:
        """The same pieces, with gene scores for the chosen ones. The sequence is upper case."""
        genes = np.full(len(self.genes), np.nan)
        for first, end in find_runs(chosen):
            start, stop = int(self.start[first]), int(self.start[end - 1]) + size
            of_run = read_genes(sequence[start:stop])
            places = self.start[first:end] - start
            genes[first:end] = _means_on(of_run, places, size)
        return self._replace(genes=genes)

    def signal(
        self, host: HostBackground, gc_weight: float, shape_weight: float, n_items: int
    ) -> FloatArray:
        """Log-odds at the median GC of the host, plus a term for the shape of genes nearby. (n,)

        ``gc_weight`` is the share of the slope over GC that is subtracted. The shape is averaged
        over ``n_items`` neighbouring pieces, in standard deviations of a host's pieces, and
        multiplied by ``shape_weight``.
        """
        numbers = np.array([host.gc, gc_weight * host.slope, *host.shape, *host.deviation])
        signal = np.empty(len(self.start))
        call("piece_signal", *self._figures, numbers, n_items, shape_weight, signal)
        return signal

    @property
    def _figures(self) -> tuple[FloatArray, FloatArray, FloatArray, int]:
        """The arguments of library functions."""
        return self.log_odds, self.gc, self.shape, len(self.start)

    def own_figures(self) -> tuple[float, float, tuple[float, ...]]:
        """Median GC, slope of log-odds over GC, and median shape, of pieces with log-odds.

        The slope is fitted to the medians of 20 parts of the pieces by GC; 0 if GC does not vary.
        At least one piece has log-odds.
        """
        figures = np.empty(2 + N_SHAPE)
        call("host_figures", *self._figures, figures)
        gc, slope, *shape = figures.tolist()
        return gc, slope, tuple(shape)


@dataclass(frozen=True, slots=True)
class HostBackground:
    """The usual medians and slopes of hosts: means over many hosts, or those of one record."""

    gc: float
    slope: float  # of log-odds over GC, within a host
    shape: tuple[float, ...]
    deviation: tuple[float, ...]  # of each figure of the shape, between pieces of a host

    @classmethod
    def mean(cls, each: Sequence[HostBackground]) -> HostBackground:
        def mean(values: Sequence[float]) -> float:
            return round(float(np.mean(values)), 4)

        return cls(
            mean([one.gc for one in each]),
            mean([one.slope for one in each]),
            tuple(map(mean, zip(*(one.shape for one in each), strict=True))),
            tuple(map(mean, zip(*(one.deviation for one in each), strict=True))),
        )

    @classmethod
    def from_items(cls, items: WindowTable) -> HostBackground:
        """The medians of one record that is mostly host."""
        deviation = items.shape[items.is_known].std(axis=0) + 1e-6
        return cls(*items.own_figures(), tuple(deviation.tolist()))

    def value_at(self, items: WindowTable, *, is_virus: bool) -> HostBackground:
        """The medians of this record's host; for a virus, the usual ones of hosts."""
        n = int(np.count_nonzero(items.is_known))
        if not n:
            return self
        if is_virus:
            return replace(self, gc=items.median_gc)
        gc, slope, shape = items.own_figures()
        share = n / (n + _PRIOR_ITEMS)
        has_slope = n >= _PRIOR_ITEMS

        def drawn(value: float, prior: float) -> float:
            return share * value + (1 - share) * prior

        return HostBackground(
            gc,
            drawn(slope, self.slope) if has_slope else self.slope,
            tuple(map(drawn, shape, self.shape)),
            self.deviation,
        )


@dataclass(frozen=True, slots=True)
class Levels:
    """The level of the signal in hosts: the usual one at each GC, and the spread of hosts."""

    usual: tuple[float, ...]  # at each GC of 0.2 to 0.8, in steps of 0.025
    spread: float  # standard deviation between hosts with the same GC

    def __post_init__(self) -> None:
        if len(self.usual) != len(_KNOTS):
            raise ValueError(f"{len(self.usual)} levels of hosts, not {len(_KNOTS)}")
        if not 0 < self.spread < np.inf:
            raise ValueError(f"levels of hosts with the same GC spread by {self.spread}")

    @classmethod
    def from_values(cls, gc: FloatArray, level: FloatArray) -> Levels:
        """Means over two or more hosts, weighted by how near their GC is. (n,), (n,)

        The spread measures each host against the mean over the others.
        """
        apart = np.array(
            [
                level[i] - _means(np.delete(gc, i), np.delete(level, i), gc[i : i + 1])[0]
                for i in range(len(gc))
            ]
        )
        usual = np.round(_means(gc, level, _KNOTS), 4)
        return cls(tuple(usual.tolist()), round(float((apart**2).mean() ** 0.5), 4))

    def index_at(self, gc: float) -> float:
        return float(np.interp(gc, _KNOTS, self.usual))


def median(values: FloatArray) -> FloatArray:
    """The median of each column; numpy's own imports masked arrays. (n, ...), n > 0 -> ..."""
    middles = (len(values) - 1) // 2, len(values) // 2
    low, high = np.partition(values, middles, axis=0)[middles, ...]
    return np.asarray((low + high) / 2)


def _means_on(genes: Genes, places: IntArray, size: int) -> FloatArray:
    """The mean log-odds over the bases of each piece that lie on genes; NaN for none. (n,)"""
    is_known = ~np.isnan(genes[2])
    starts, ends, log_odds = genes[0][is_known], genes[1][is_known], genes[2][is_known]

    values = np.stack([np.ones(len(starts)), log_odds])
    bases = np.concatenate([places, places + size])

    def before(bounds: IntArray) -> FloatArray:
        """For each of ``bases``: the sum of each value times the bases since its bound."""
        order = np.argsort(bounds, kind="stable")
        rows = np.stack([values, values * bounds])[:, :, order]
        sums = np.zeros((2, 2, len(bounds) + 1))
        rows.cumsum(axis=2, out=sums[:, :, 1:])
        first, second = sums[:, :, np.searchsorted(bounds[order], bases)]
        return np.asarray(first * bases - second)

    low, high = np.split(before(starts) - before(ends), 2, axis=1)
    n_bases, total = high - low
    return np.where(n_bases > 0, total / np.maximum(1, n_bases), np.nan)


def _means(gc: FloatArray, level: FloatArray, places: FloatArray) -> FloatArray:
    """Mean levels of hosts, weighted by how near their GC is. (n,), (n,), (k,) -> (k,)"""
    weights = np.exp(-0.5 * ((places[:, None] - gc) / _NEAR) ** 2) + _FAR
    return np.asarray((weights * level).sum(axis=1) / weights.sum(axis=1))
