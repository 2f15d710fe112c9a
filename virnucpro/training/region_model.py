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

from virnucpro.evaluation.regions import Truth, mask
from virnucpro.scoring.chain import Mask, RegionModel, Values
from virnucpro.scoring.contrast import Hosts, Items, Levels, signal

SIZE, STEP = 1_000, 500
EDGES = tuple(np.arange(-4, 7.5, 0.5).tolist())  # contrast to the host
GC_WEIGHT, SHAPE_WEIGHT, SHAPE_BASES = 0.5, 1.5, 9_500
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


def learn_region_model(
    chromosomes: Sequence[Chromosome], hosts: Sequence[Items], training: str
) -> RegionModel:
    """Regions are as rare as in these chromosomes; hosts add their level to those of these."""
    usual = Hosts.mean([Hosts.of(one.items) for one in chromosomes])
    virus, host = np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1)
    deviations, distances = [], []
    levels = [_gc_and_level(items, usual, items.is_known) for items in hosts]
    n_virus = 0
    for one in chromosomes:
        n, middles = len(one.sequence), one.items.start + SIZE // 2
        is_virus = mask(one.truth.prophages, n)[middles] & one.items.is_known
        is_host = ~is_virus & ~mask(one.truth.unclear, n)[middles] & one.items.is_known
        levels.append(_gc_and_level(one.items, usual, is_host))
        contrasts = _signal(one.items, usual) - levels[-1][1]
        deviations.append(contrasts[is_host].std())
        distances.append(contrasts[is_virus].mean())
        bins = np.searchsorted(EDGES, contrasts)
        virus += _counts(bins[is_virus]) / max(1.0, float(is_virus.sum())) ** 0.5
        host += _counts(bins[is_host]) / max(1.0, float(is_host.sum()))
        n_virus += int(np.count_nonzero(mask(one.truth.prophages, n)))
    n_bases = sum(len(one.sequence) for one in chromosomes)
    n_regions = sum(len(one.truth.prophages) for one in chromosomes)
    ratios = np.log(_shares(virus) / _shares(host)) * WEIGHT
    gc, level = np.array(levels).T
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
