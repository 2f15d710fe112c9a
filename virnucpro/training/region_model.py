"""The region model, learned from chromosomes whose prophages are known.

A chromosome counts as much as any other, so that the longest one does not decide alone; its viral
pieces count by the square root of their number. Hosts without a known prophage tell which level is
usual at which GC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import InputError
from virnucpro.evaluation.regions import Interval, Truth, mask
from virnucpro.log import printable
from virnucpro.scoring.chain import Mask, RegionModel, Values
from virnucpro.scoring.contrast import Hosts, Items, Levels, signal

SIZE, STEP = 1_000, 500
EDGES = tuple(np.arange(-4, 7.5, 0.5).tolist())  # contrast to the host
GC_WEIGHT, SHAPE_WEIGHT, SHAPE_BASES = 0.7, 1.5, 9_500
FIRST_SHARE = 0.1  # of records that begin in a virus; so phage lambda alone is one
WEIGHT = 0.7 * STEP / SIZE  # of a piece for its bases, each in several: neighbours are alike
_KERNEL = np.exp(-0.5 * np.arange(-3, 4) ** 2)  # over bins
_LEAST = 0.02  # of all, spread evenly over the bins


@dataclass(frozen=True, slots=True, eq=False)
class Chromosome:
    """A chromosome and what is known of it."""

    name: str
    sequence: str
    items: Items
    truth: Truth

    @property
    def is_virus(self) -> Mask:
        """A mask of the pieces whose middles lie in a prophage. (n_items,)"""
        return self._has_middle(self.truth.prophages) & self.items.is_known

    @property
    def is_host(self) -> Mask:
        """A mask of the pieces whose middles lie in no element of the truth. (n_items,)"""
        elements = (*self.truth.prophages, *self.truth.unclear)
        return ~self._has_middle(elements) & self.items.is_known

    def _has_middle(self, intervals: Sequence[Interval]) -> Mask:
        return mask(intervals, len(self.sequence))[self.items.start + SIZE // 2]


def learn_region_model(
    chromosomes: Sequence[Chromosome], hosts: Sequence[Items], training: str
) -> RegionModel:
    """Regions are as rare as in these chromosomes; hosts add their level to those of these.

    Each chromosome has a piece of its host; a prophage may be too short for a piece.

    Raises:
        InputError: no prophage has a piece, or chromosomes do not differ.
    """
    usual = Hosts.mean([Hosts.of(one.items) for one in chromosomes])
    virus, host = np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1)
    deviations, distances = [], []
    levels = [_gc_and_level(items, usual, items.is_known) for items in hosts]
    n_virus = 0
    for one in chromosomes:
        is_virus, is_host = one.is_virus, one.is_host
        levels.append(_gc_and_level(one.items, usual, is_host))
        contrasts = _signal(one.items, usual) - levels[-1][1]
        deviations.append(contrasts[is_host].std())
        if is_virus.any():
            distances.append(contrasts[is_virus].mean())
        bins = np.searchsorted(EDGES, contrasts)
        virus += _counts(bins[is_virus]) / max(1.0, float(is_virus.sum())) ** 0.5
        host += _counts(bins[is_host]) / float(is_host.sum())
        n_virus += int(np.count_nonzero(mask(one.truth.prophages, len(one.sequence))))
    if not distances:
        names = ", ".join(printable(one.name) for one in chromosomes[:8])
        raise InputError(
            f"no prophage of {names} has a piece of {SIZE:,} bases of its own",
            hint="add chromosomes with longer prophages to the truth",
        )
    n_bases = sum(len(one.sequence) for one in chromosomes)
    n_regions = sum(len(one.truth.prophages) for one in chromosomes)
    ratios = np.log(_shares(virus) / _shares(host)) * WEIGHT
    gc, level = np.array(levels).T
    try:
        return RegionModel(
            size=SIZE,
            step=STEP,
            host=usual,
            levels=Levels.of(gc, level),
            gc_weight=GC_WEIGHT,
            shape_weight=SHAPE_WEIGHT,
            shape_bases=SHAPE_BASES,
            edges=EDGES,
            log_ratios=tuple(np.round(ratios, 4).tolist()),
            weight=WEIGHT,
            deviation=round(float(np.mean(deviations)), 4),
            distance=round(float(np.mean(distances)), 4),
            first_share=FIRST_SHARE,
            host_bases=round((n_bases - n_virus) / n_regions),
            virus_bases=round(n_virus / n_regions),
            training=training,
        )
    except ValueError as error:
        raise InputError(
            f"no region model can be learned from these chromosomes: {error}",
            hint="give chromosomes of several species, whose prophages stand out from their hosts",
        ) from error


def _signal(items: Items, usual: Hosts) -> Values:
    host = usual.at(items, is_virus=False)
    return signal(items, host, GC_WEIGHT, SHAPE_WEIGHT, SHAPE_BASES // STEP)


def _gc_and_level(items: Items, usual: Hosts, is_host: Mask) -> tuple[float, float]:
    """The median GC of a host, and the median signal of its own pieces."""
    level = float(np.median(_signal(items, usual)[is_host]))
    return float(np.median(items.gc[items.is_known])), level


def _counts(bins: NDArray[np.int64]) -> Values:
    return np.bincount(bins, minlength=len(EDGES) + 1).astype(np.float64)


def _shares(counts: Values) -> Values:
    """Smooth shares above 0 of all bins; they add up to 1."""
    padded = np.pad(counts / counts.sum(), len(_KERNEL) // 2, mode="edge")
    smooth = np.convolve(padded, _KERNEL / _KERNEL.sum(), "valid") + _LEAST / len(counts)
    return np.asarray(smooth / smooth.sum())
