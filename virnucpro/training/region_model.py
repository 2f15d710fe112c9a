"""How regions are told is learned from chromosomes whose prophages are known.

A chromosome counts as much as any other, so that the longest one does not decide alone; its viral
pieces count by the square root of their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.scorer.score import PieceScores
from virnucpro.scoring.chain import Mask, RegionModel, Values
from virnucpro.scoring.regions import median_level

SIZE, STEP = 1_000, 500
EDGES = tuple(np.arange(-4, 7.5, 0.5).tolist())  # log-odds above the host's level
_KERNEL = np.exp(-0.5 * np.arange(-3, 4) ** 2)  # over bins
_LEAST = 0.02  # of all, spread evenly over the bins


@dataclass(frozen=True, slots=True, eq=False)
class Chromosome:
    """A chromosome and what is known of it. Intervals are bases, 0-based and half-open."""

    name: str
    sequence: str
    pieces: PieceScores
    prophages: tuple[tuple[int, int], ...]
    unclear: tuple[tuple[int, int], ...]  # neither virus nor host

    def bases(self, intervals: Sequence[tuple[int, int]]) -> Mask:
        """Which of its bases lie in these intervals. (n_bases,)"""
        mask = np.zeros(len(self.sequence), dtype=np.bool_)
        for start, end in intervals:
            mask[start:end] = True
        return mask


def learn_region_model(
    chromosomes: Sequence[Chromosome], weight: float, rarity: float, training: str
) -> RegionModel:
    """
    ``weight`` is how much a piece counts of its own bases: pieces overlap, and neighbours are
    alike. Regions are taken to be ``rarity`` times as rare as in these chromosomes.
    """
    virus, host = np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1)
    levels, n_virus = [], 0
    for one in chromosomes:
        level = median_level(one.pieces.log_odds, 0.0)
        bins = np.searchsorted(EDGES, one.pieces.log_odds - level)
        middles = one.pieces.start + SIZE // 2
        is_virus = one.bases(one.prophages)[middles]
        is_host = ~is_virus & ~one.bases(one.unclear)[middles]
        virus += _counts(bins[is_virus]) / max(1.0, float(is_virus.sum())) ** 0.5
        host += _counts(bins[is_host]) / max(1.0, float(is_host.sum()))
        levels.append(level)
        n_virus += int(np.count_nonzero(one.bases(one.prophages)))
    n_bases = sum(len(one.sequence) for one in chromosomes)
    n_regions = sum(len(one.prophages) for one in chromosomes)
    ratios = np.log(_shares(virus) / _shares(host)) * (weight * STEP / SIZE)
    return RegionModel(
        size=SIZE,
        step=STEP,
        host_level=round(float(np.mean(levels)), 4),
        edges=EDGES,
        log_ratios=tuple(np.round(ratios, 4).tolist()),
        host_bases=round(rarity * (n_bases - n_virus) / n_regions),
        virus_bases=round(n_virus / n_regions),
        training=training,
    )


def _counts(bins: NDArray[np.int64]) -> Values:
    return np.bincount(bins, minlength=len(EDGES) + 1).astype(np.float64)


def _shares(counts: Values) -> Values:
    """Smooth shares above 0 of all bins; they add up to 1."""
    padded = np.pad(counts / counts.sum(), len(_KERNEL) // 2, mode="edge")
    smooth = np.convolve(padded, _KERNEL / _KERNEL.sum(), "valid") + _LEAST / len(counts)
    return np.asarray(smooth / smooth.sum())
