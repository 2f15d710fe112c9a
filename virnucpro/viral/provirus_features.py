"""Compute the signal of each window in a record: its log-odds, corrected for GC, and its genes.

The scorer's protein networks separate phages from hosts far better than its window networks, at
about four times the cost. So they read only the genes in windows that may be viral.

Phage genes are shorter and closer together than host genes, a property that PhiSpy uses (Akhter
et al. 2012, Nucleic Acids Res. 40:e126). Here, open reading frames stand in for genes.

A host's usual values are medians over the record itself, shrunk towards the medians over all
hosts if the record is short. A host's level depends on its GC, and differs between hosts with the
same GC: see ``Levels``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray, find_runs
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.viral.networks import Scorer
from virnucpro.viral.scoring import score_windows

# columns among the 36 plain statistics of a window: its longest open reading frame, the same beyond
# chance, and gene-like open reading frames per kb
_SHAPE = (3, 24, 7)
N_SHAPE = len(_SHAPE)

# starts, ends, log-odds and strands of the genes in an upper-case sequence: see
# ``host_markers.find_host_genes``
Genes: TypeAlias = tuple[IntArray, IntArray, FloatArray, IntArray]
ReadGenes: TypeAlias = Callable[[str], Genes]


class WindowTable(NamedTuple):
    """Windows along a record and their statistics, in parallel columns."""

    start: IntArray  # (n,)
    log_odds: FloatArray  # (n,), NaN for a window without a known base
    gc: FloatArray  # (n,)
    shape: FloatArray  # (n, 3)
    genes: FloatArray  # (n,) mean log-odds of the proteins in it. NaN: none, or not scored

    @classmethod
    def from_scores(
        cls, sequences: Sequence[str], scorer: Scorer, step: int, code: GeneticCode = STANDARD
    ) -> list[WindowTable]:
        """Score each sequence in sliding windows, one every ``step`` bases."""
        pieces, figures = score_windows(sequences, scorer, step, code, (0, *_SHAPE))
        gc = figures[:, 0].astype(np.float64)
        shape = figures[:, 1:].astype(np.float64)
        everything = cls(pieces.start, pieces.log_odds, gc, shape, np.full(len(gc), np.nan))
        bounds = np.searchsorted(pieces.record, range(len(sequences) + 1)).tolist()
        return [everything.select(slice(first, end)) for first, end in pairwise(bounds)]

    @classmethod
    def concatenate(cls, tables: Sequence[WindowTable]) -> WindowTable:
        """Concatenate the windows from several records."""
        nothing = np.zeros(0)
        empty = cls(np.zeros(0, np.int64), nothing, nothing, np.zeros((0, N_SHAPE)), nothing)
        return cls(*map(np.concatenate, zip(empty, *tables, strict=True)))

    @property
    def median_gc(self) -> float:
        """Return the median GC of the windows with log-odds, NaN without one."""
        is_known = self.is_known
        return float(median(self.gc[is_known])) if is_known.any() else np.nan

    @property
    def is_known(self) -> BoolArray:
        return ~np.isnan(self.log_odds)

    def select(self, chosen: IntArray | BoolArray | slice) -> WindowTable:
        """Return the chosen windows, in this order."""
        return WindowTable._make(column[chosen] for column in self)

    def with_genes(
        self, sequence: str, chosen: BoolArray, size: int, read_genes: ReadGenes
    ) -> WindowTable:
        """Add gene scores to the chosen windows. The sequence is upper case."""
        genes = np.full(len(self.genes), np.nan)
        for first, end in find_runs(chosen):
            start = int(self.start[first])
            stop = int(self.start[end - 1]) + size
            run_genes = read_genes(sequence[start:stop])
            window_starts = self.start[first:end] - start
            genes[first:end] = _means_on(run_genes, window_starts, size)
        return self._replace(genes=genes)

    def signal(
        self, host: HostBackground, gc_weight: float, shape_weight: float, n_items: int
    ) -> FloatArray:
        """Return log-odds at the median GC of the host, plus a term for nearby gene shape. (n,)

        ``gc_weight`` is the share of the slope over GC that is subtracted. The shape is averaged
        over ``n_items`` neighbouring windows, in standard deviations between windows in a host, and
        multiplied by ``shape_weight``.
        """
        numbers = np.array([host.gc, gc_weight * host.slope, *host.shape, *host.deviation])
        signal = np.empty(len(self.start))
        call("piece_signal", *self._figures, numbers, n_items, shape_weight, signal)
        return signal

    @property
    def _figures(self) -> tuple[FloatArray, FloatArray, FloatArray, int]:
        """Return the arguments for library functions."""
        return self.log_odds, self.gc, self.shape, len(self.start)

    def host_statistics(self) -> tuple[float, float, tuple[float, ...]]:
        """Return median GC, log-odds slope over GC, and median shape, over windows with log-odds.

        The slope is fitted to medians over 20 window groups by GC. It is 0 if GC does not
        vary. At least one window has log-odds.
        """
        statistics = np.empty(2 + N_SHAPE)
        call("host_figures", *self._figures, statistics)
        gc, slope, *shape = statistics.tolist()
        return gc, slope, tuple(shape)


@dataclass(frozen=True, slots=True)
class HostBackground:
    """The usual medians and slopes in hosts: means over many hosts, or from one record."""

    gc: float
    slope: float  # log-odds over GC, within a host
    shape: tuple[float, ...]
    deviation: tuple[float, ...]  # for each shape statistic, between windows in a host

    @classmethod
    def mean(cls, backgrounds: Sequence[HostBackground]) -> HostBackground:
        def mean(values: Sequence[float]) -> float:
            return round(float(np.mean(values)), 4)

        return cls(
            mean([background.gc for background in backgrounds]),
            mean([background.slope for background in backgrounds]),
            tuple(map(mean, zip(*(host.shape for host in backgrounds), strict=True))),
            tuple(map(mean, zip(*(host.deviation for host in backgrounds), strict=True))),
        )

    @classmethod
    def from_items(cls, items: WindowTable) -> HostBackground:
        """Return the medians for one record that is mostly host."""
        deviation = items.shape[items.is_known].std(axis=0) + 1e-6
        return cls(*items.host_statistics(), tuple(deviation.tolist()))

    def value_at(self, items: WindowTable, *, is_virus: bool) -> HostBackground:
        """Return the medians of this record's host, or the usual host medians for a virus."""
        prior_items = 100  # windows in a record that weigh as much as all other hosts
        n = int(np.count_nonzero(items.is_known))
        if not n:
            return self
        if is_virus:
            return replace(self, gc=items.median_gc)
        gc, slope, shape = items.host_statistics()
        share = n / (n + prior_items)
        has_slope = n >= prior_items

        def shrink(value: float, prior: float) -> float:
            return share * value + (1 - share) * prior

        return HostBackground(
            gc,
            shrink(slope, self.slope) if has_slope else self.slope,
            tuple(map(shrink, shape, self.shape)),
            self.deviation,
        )


@dataclass(frozen=True, slots=True)
class Levels:
    """The signal level in hosts: the usual level at each GC, and the spread between hosts."""

    _KNOTS = np.linspace(0.2, 0.8, 25)  # GC as a share

    usual: tuple[float, ...]  # at each GC from 0.2 to 0.8, in steps of 0.025
    spread: float  # standard deviation between hosts with the same GC

    def __post_init__(self) -> None:
        if len(self.usual) != len(self._KNOTS):
            raise ValueError(f"{len(self.usual)} levels of hosts, not {len(self._KNOTS)}")
        if not 0 < self.spread < np.inf:
            raise ValueError(f"levels of hosts with the same GC spread by {self.spread}")

    @classmethod
    def from_values(cls, gc: FloatArray, level: FloatArray) -> Levels:
        """Average two or more hosts, weighted by GC similarity. (n,), (n,)

        The spread measures each host against the mean over the others.
        """
        differences = np.array(
            [
                level[i] - _means(np.delete(gc, i), np.delete(level, i), gc[i : i + 1])[0]
                for i in range(len(gc))
            ]
        )
        usual = np.round(_means(gc, level, cls._KNOTS), 4)
        return cls(tuple(usual.tolist()), round(float((differences**2).mean() ** 0.5), 4))

    def index_at(self, gc: float) -> float:
        return float(np.interp(gc, self._KNOTS, self.usual))


def median(values: FloatArray) -> FloatArray:
    """Return column medians (numpy's own imports masked arrays). (n, ...), n > 0 -> ..."""
    middles = (len(values) - 1) // 2, len(values) // 2
    low, high = np.partition(values, middles, axis=0)[middles, ...]
    return np.asarray((low + high) / 2)


def _means_on(genes: Genes, window_starts: IntArray, size: int) -> FloatArray:
    """Return the mean log-odds over each window's bases in genes, NaN for none. (n,)"""
    is_known = ~np.isnan(genes[2])
    starts = genes[0][is_known]
    ends = genes[1][is_known]
    log_odds = genes[2][is_known]

    values = np.stack([np.ones(len(starts)), log_odds])
    bases = np.concatenate([window_starts, window_starts + size])

    def before(bounds: IntArray) -> FloatArray:
        """For each position in ``bases``, sum each value times the bases since its bound."""
        order = np.argsort(bounds, kind="stable")
        rows = np.stack([values, values * bounds])[:, :, order]
        sums = np.zeros((2, 2, len(bounds) + 1))
        rows.cumsum(axis=2, out=sums[:, :, 1:])
        first, second = sums[:, :, np.searchsorted(bounds[order], bases)]
        return np.asarray(first * bases - second)

    low, high = np.split(before(starts) - before(ends), 2, axis=1)
    n_bases, total = high - low
    return np.where(n_bases > 0, total / np.maximum(1, n_bases), np.nan)


def _means(gc: FloatArray, level: FloatArray, target_gc: FloatArray) -> FloatArray:
    """Return mean host levels, weighted by GC similarity. (n,), (n,), (k,) -> (k,)"""
    near = 0.03  # of GC: standard deviation of the kernel that averages levels of similar hosts
    far = 1e-4  # minimum weight of a host
    weights = np.exp(-0.5 * ((target_gc[:, None] - gc) / near) ** 2) + far
    return np.asarray((weights * level).sum(axis=1) / weights.sum(axis=1))
