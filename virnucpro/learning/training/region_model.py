"""The region model, learned from chromosomes whose prophages are known.

A chromosome counts as much as any other, so that the longest one does not decide alone; its viral
pieces count by the square root of their number. Hosts without a known prophage tell which level is
usual at which GC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from virnucpro.callers.chain import RegionModel
from virnucpro.callers.contrast import Hosts, Items, Levels, signal
from virnucpro.ground.errors import InputError
from virnucpro.ground.log import printable
from virnucpro.ground.numeric import Mask, Values
from virnucpro.learning.evaluation.regions import Span, Truth, mask

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

    def _has_middle(self, intervals: Sequence[Span]) -> Mask:
        return mask(intervals, len(self.sequence))[self.items.start + SIZE // 2]


@dataclass(frozen=True, slots=True, eq=False)
class _Contrasts:
    """How far the pieces of a chromosome stand out from its own host."""

    gc: float
    level: float  # of the host
    virus: Values  # of each piece in a prophage
    host: Values  # of each piece outside

    @classmethod
    def of(cls, chromosome: Chromosome, usual: Hosts) -> _Contrasts:
        is_host = chromosome.is_host
        gc, level = _gc_and_level(chromosome.items, usual, is_host)
        contrasts = _signal(chromosome.items, usual) - level
        return cls(gc, level, contrasts[chromosome.is_virus], contrasts[is_host])


def learn_region_model(
    chromosomes: Sequence[Chromosome], hosts: Sequence[Items], training: str
) -> RegionModel:
    """Regions are as rare as in these chromosomes; hosts add their level to those of these.

    Each chromosome has a piece of its host; a prophage may be too short for a piece.

    Raises:
        InputError: no prophage has a piece, or chromosomes do not differ.
    """
    usual = Hosts.mean([Hosts.of(one.items) for one in chromosomes])
    contrasts = [_Contrasts.of(one, usual) for one in chromosomes]
    with_virus = [one for one in contrasts if len(one.virus)]
    if not with_virus:
        names = ", ".join(printable(one.name) for one in chromosomes[:8])
        raise InputError(
            f"no prophage of {names} has a piece of {SIZE:,} bases of its own",
            hint="add chromosomes with longer prophages to the truth",
        )
    levels = [_gc_and_level(items, usual, items.is_known) for items in hosts]
    levels += [(one.gc, one.level) for one in contrasts]
    host_bases, virus_bases = _mean_lengths(chromosomes)
    try:
        return RegionModel(
            size=SIZE,
            step=STEP,
            host=usual,
            levels=Levels.of(*np.array(levels).T),
            gc_weight=GC_WEIGHT,
            shape_weight=SHAPE_WEIGHT,
            shape_bases=SHAPE_BASES,
            edges=EDGES,
            log_ratios=_log_ratios(with_virus, contrasts),
            weight=WEIGHT,
            deviation=round(float(np.mean([one.host.std() for one in contrasts])), 4),
            distance=round(float(np.mean([one.virus.mean() for one in with_virus])), 4),
            first_share=FIRST_SHARE,
            host_bases=host_bases,
            virus_bases=virus_bases,
            training=training,
        )
    except ValueError as error:
        raise InputError(
            f"no region model can be learned from these chromosomes: {error}",
            hint="give chromosomes of several species, whose prophages stand out from their hosts",
        ) from error


def _mean_lengths(chromosomes: Sequence[Chromosome]) -> tuple[int, int]:
    """Bases of host, and of prophage, for each prophage."""
    n_bases = sum(len(one.sequence) for one in chromosomes)
    n_regions = sum(len(one.truth.prophages) for one in chromosomes)
    masks = (mask(one.truth.prophages, len(one.sequence)) for one in chromosomes)
    n_virus = sum(int(np.count_nonzero(is_virus)) for is_virus in masks)
    return round((n_bases - n_virus) / n_regions), round(n_virus / n_regions)


def _log_ratios(
    with_virus: Sequence[_Contrasts], contrasts: Sequence[_Contrasts]
) -> tuple[float, ...]:
    """Log ratios of virus over host, as one piece among others counts, by bin of its contrast."""
    virus, host = np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1)
    for one in with_virus:
        virus += _counts(one.virus) / len(one.virus) ** 0.5
    for one in contrasts:
        host += _counts(one.host) / len(one.host)
    return tuple(np.round(np.log(_shares(virus) / _shares(host)) * WEIGHT, 4).tolist())


def _signal(items: Items, usual: Hosts) -> Values:
    host = usual.at(items, is_virus=False)
    return signal(items, host, GC_WEIGHT, SHAPE_WEIGHT, SHAPE_BASES // STEP)


def _gc_and_level(items: Items, usual: Hosts, is_host: Mask) -> tuple[float, float]:
    """The median GC of a host, and the median signal of its own pieces."""
    level = float(np.median(_signal(items, usual)[is_host]))
    return float(np.median(items.gc[items.is_known])), level


def _counts(contrasts: Values) -> Values:
    """Numbers of pieces in each bin. (n_pieces,) -> (n_bins,)"""
    bins = np.searchsorted(EDGES, contrasts)
    return np.bincount(bins, minlength=len(EDGES) + 1).astype(np.float64)


def _shares(counts: Values) -> Values:
    """Smooth shares above 0 of all bins; they add up to 1."""
    padded = np.pad(counts / counts.sum(), len(_KERNEL) // 2, mode="edge")
    smooth = np.convolve(padded, _KERNEL / _KERNEL.sum(), "valid") + _LEAST / len(counts)
    return np.asarray(smooth / smooth.sum())
