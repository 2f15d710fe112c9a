"""Measures of how well scores tell viruses from the rest. Pure functions of arrays.

Every figure is of weighted samples, so that a resample is a new weighting and no copy. What is
not defined, as any ranking of a single class, is None and never a number that looks like one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.records import Mask, Values

_PREVALENCES = (0.01, 0.05, 0.2)  # shares of viruses in a sample, at which precision is told
_MAX_FALSE_POSITIVES = 0.01  # share of what is not viral, at which recall is measured
_N_BINS = 15  # of the reliability curve, equally wide
_N_RESAMPLES = 200
CHANCE = 0.5  # the AUROC of scores that tell nothing
NOT_DEFINED = "n/a"  # a figure in a table that is None
INTERVAL = (2.5, 97.5)  # percentiles: 95 % lie between


S = TypeVar("S", bound="Samples")


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The one table of scores with labels, groups and weights. Rows in step.

    Whatever is scored stands in it: chunks, records or fragments; a subclass adds columns. Scores
    are log-odds or lie in [0, 1]; a sample without one has NaN.
    """

    scores: Values  # (n,)
    is_virus: Mask  # (n,)
    groups: NDArray[np.int64]  # (n,), numbers of what stands or falls together
    weights: Values  # (n,), above 0

    def __post_init__(self) -> None:
        shapes = {values.shape for values in (self.scores, self.is_virus, self.groups)}
        if shapes != {self.weights.shape} or self.scores.ndim != 1:
            raise ValueError(f"samples of shapes {shapes} with weights of {self.weights.shape}")
        if not (self.weights > 0).all():
            raise ValueError("a weight that is not above 0")

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def sides(self) -> NDArray[np.int64]:
        """(n,) numbers of the groups of either label by themselves: one group may hold both."""
        return 2 * self.groups + self.is_virus

    def where(self: S, mask: Mask) -> S:
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        chosen = {n: v[mask] for n, v in columns.items() if isinstance(v, np.ndarray)}
        return replace(self, **chosen)

    @property
    def scored(self: S) -> S:
        """The samples with a score."""
        return self.where(~np.isnan(self.scores))

    def filled(self: S, lowest: float) -> S:
        """All samples; those without a score have the lowest."""
        return replace(self, scores=np.where(np.isnan(self.scores), lowest, self.scores))

    def auroc(self) -> float:
        """Both labels must be there, and every score a number."""
        return _Ranked(self).auroc(self.weights)

    def cross_entropy(self, scale: float = 1.0) -> float:
        """The mean of what is lost if the scores, log-odds, are multiplied by ``scale``."""
        losses = np.logaddexp(0, np.where(self.is_virus, -self.scores, self.scores) * scale)
        return float(np.average(losses, weights=self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Figures of one set of samples; None where one is not defined.

    From ``accuracy`` to ``false_positives`` they are of the calls; so is the precision that recall
    and false positives would have in a sample of which a share is viral.
    """

    auroc: float | None = None  # a virus scores higher than the rest; ties count half
    auprc: float | None = None  # average precision
    accuracy: float | None = None
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    false_positives: float | None = None  # share of what is not viral that is called
    precision_if_1_percent_viral: float | None = None
    precision_if_5_percent_viral: float | None = None
    precision_if_20_percent_viral: float | None = None
    recall_at_1_percent: float | None = None  # where at most 1 % of what is not viral is called
    threshold_at_1_percent: float | None = None  # the lowest such; None if none calls anything
    calibration_error: float | None = None  # expected; both labels weigh the same


MEASURES = tuple(field.name for field in fields(Measures))
Interval = tuple[Measures, Measures]  # its low and its high end; None where a resample lacks one
# distinct scores, falling, and the weights of viruses and of others that reach each; (n_distinct,)
_Curve = tuple[Values, Values, Values]


@dataclass(frozen=True, slots=True, eq=False)
class _Reliability:
    """Per bin that is not empty: the mean score, and the share of viruses.

    Both labels weigh the same, as a score is a probability where half of all is viral.
    """

    mean_score: Values
    share_of_viruses: Values
    weight: Values  # of the bin; they add up to 1
    n: Values  # sum of the weights of the samples


def measure(samples: Samples, is_called: Mask) -> Measures:
    """The figures of samples, of which some are called. (n,) calls"""
    return _Ranked(samples).measures(samples.weights, is_called)


def auroc(scores: Values, is_virus: Mask) -> float:
    """The AUROC of samples of one weight; both labels must be there. (n,) each"""
    groups = np.zeros(len(scores), dtype=np.int64)
    return Samples(scores, is_virus, groups, np.ones(len(scores))).auroc()


def auroc_interval(samples: Samples, seed: int) -> tuple[float | None, float | None]:
    """The 95 % interval of the AUROC, as ``bootstrap`` has it."""
    ranked = _Ranked(samples)
    return _interval([ranked.auroc(weights) for weights in _resamples(samples, seed)])


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    low, high = np.percentile(values, INTERVAL).tolist() if values else (None, None)
    return low, high


def bootstrap(samples: Samples, is_called: Mask, seed: int) -> Interval:
    """95 % intervals by resampling whole groups, with replacement, within each label.

    What is drawn is a group, as the pieces of one genome, or of relatives, stand and fall
    together. A label of a single group has no spread to be seen: no interval then. Nor has the
    calibration error one: noise can only widen the gaps that it adds up, so that resamples lie
    above it.
    """
    ranked = _Ranked(samples)
    resamples = [ranked.measures(weights, is_called) for weights in _resamples(samples, seed)]
    if not resamples:
        return Measures(), Measures()
    low, high = (_percentile(resamples, at) for at in INTERVAL)
    return low, high


def auroc_gain(
    before: Samples, after: Samples, seed: int
) -> tuple[float, float | None, float | None]:
    """The AUROC of other scores of the same samples less that of the first, and its 95 % interval.

    Both classes must be there. Resamples are those of ``bootstrap``, the same for both.
    """
    first, second = _Ranked(before), _Ranked(after)
    gains = [second.auroc(weights) - first.auroc(weights) for weights in _resamples(before, seed)]
    return second.auroc(after.weights) - first.auroc(before.weights), *_interval(gains)


def _resamples(samples: Samples, seed: int) -> Iterator[Values]:
    """Weights of each resample of whole groups; none if a label has fewer than two."""
    sides, own = np.unique(samples.sides, return_inverse=True)
    members = [np.flatnonzero(sides % 2 == label) for label in (0, 1)]
    if min(map(len, members)) < 2:
        return
    rng = np.random.default_rng(seed)
    for _ in range(_N_RESAMPLES):
        groups = np.concatenate([rng.choice(of_label, len(of_label)) for of_label in members])
        yield samples.weights * np.bincount(groups, minlength=len(sides))[own]


def _percentile(resamples: Sequence[Measures], at: float) -> Measures:
    percentiles: dict[str, float | None] = {}
    for name in MEASURES:
        if name == "calibration_error":
            continue
        values = [value for one in resamples if (value := getattr(one, name)) is not None]
        percentiles[name] = (
            float(np.percentile(values, at)) if len(values) == len(resamples) else None
        )
    return Measures(**percentiles)


def roc_curve(samples: Samples) -> _Curve:
    return _Ranked(samples).curve(samples.weights)


def reliability(samples: Samples) -> _Reliability:
    """The reliability curve (Guo et al. 2017, On Calibration of Modern Neural Networks)."""
    return _Ranked(samples).reliability(samples.weights)


class _Ranked:
    """Samples sorted once, so that every weighting of them is measured in one pass."""

    def __init__(self, samples: Samples) -> None:
        """
        Raises:
            ValueError: a score is not a number.
        """
        if np.isnan(samples.scores).any():
            raise ValueError("a score that is not a number")
        self.order = np.argsort(-samples.scores, kind="stable")
        self.scores = samples.scores[self.order]
        self.is_virus = samples.is_virus[self.order]
        is_last = np.append(self.scores[1:] != self.scores[:-1], True)[: len(self.scores)]
        self.last_of_ties = np.flatnonzero(is_last)
        self.thresholds = self.scores[self.last_of_ties]

    @cached_property
    def bins(self) -> NDArray[np.int64]:
        """The bin of the reliability curve of each score.

        Raises:
            ValueError: a score lies outside [0, 1].
        """
        if not ((self.scores >= 0) & (self.scores <= 1)).all():
            raise ValueError("a score outside [0, 1]")
        return np.minimum((self.scores * _N_BINS).astype(np.int64), _N_BINS - 1)

    def curve(self, weights: Values) -> _Curve:
        sorted_weights = weights[self.order]
        true = np.cumsum(np.where(self.is_virus, sorted_weights, 0.0))
        false = np.cumsum(np.where(self.is_virus, 0.0, sorted_weights))
        return self.thresholds, true[self.last_of_ties], false[self.last_of_ties]

    def auroc(self, weights: Values) -> float:
        """Both classes must have a weight."""
        _, true, false = self.curve(weights)
        return _auroc(true, false)

    def reliability(self, weights: Values) -> _Reliability:
        n = weights[self.order].astype(np.float64)
        w = n.copy()
        for side in (self.is_virus, ~self.is_virus):
            w[side] /= max(2 * float(w[side].sum()), np.finfo(float).tiny)
        total, score, virus, count = (
            np.bincount(self.bins, weights=values, minlength=_N_BINS).astype(np.float64)
            for values in (w, w * self.scores, w * self.is_virus, n)
        )
        full = total > 0
        return _Reliability(
            score[full] / total[full], virus[full] / total[full], total[full], count[full]
        )

    def measures(self, weights: Values, is_called: Mask) -> Measures:
        """(n,) weights, 0 for what was not drawn, and calls, both in the order of the samples."""
        thresholds, true, false = self.curve(weights)
        n_virus, n_other = (float(side[-1]) if len(side) else 0.0 for side in (true, false))
        of_calls = np.where(is_called, weights, 0.0)[self.order]
        called, wrongly = (float(of_calls[side].sum()) for side in (self.is_virus, ~self.is_virus))
        if not n_virus or not n_other:
            return Measures(
                recall=called / n_virus if n_virus else None,
                false_positives=wrongly / n_other if n_other else None,
            )
        steps = np.diff(true, prepend=0.0)
        curves = self.reliability(weights)
        gap = np.abs(curves.mean_score - curves.share_of_viruses)
        n_allowed = int(np.searchsorted(false, _MAX_FALSE_POSITIVES * n_other, side="right"))
        return Measures(
            auroc=_auroc(true, false),
            auprc=float(steps @ (true / np.maximum(true + false, np.finfo(float).tiny))) / n_virus,
            accuracy=(called + n_other - wrongly) / (n_virus + n_other),
            precision=called / (called + wrongly) if called + wrongly else None,
            recall=called / n_virus,
            f1=2 * called / (called + wrongly + n_virus),
            false_positives=wrongly / n_other,
            **_precisions(called / n_virus, wrongly / n_other),
            recall_at_1_percent=float(true[n_allowed - 1]) / n_virus if n_allowed else 0.0,
            threshold_at_1_percent=float(thresholds[n_allowed - 1]) if n_allowed else None,
            calibration_error=float(gap @ curves.weight),
        )


def _auroc(true: Values, false: Values) -> float:
    """The area from cumulated weights of the viruses and of the rest; ties count half."""
    beaten = false[-1] - false + np.diff(false, prepend=0.0) / 2
    return float(np.diff(true, prepend=0.0) @ beaten) / float(true[-1] * false[-1])


def _precisions(recall: float, false_positives: float) -> dict[str, float | None]:
    """The precision at each of ``_PREVALENCES``; None where nothing is called."""
    precisions: dict[str, float | None] = {}
    for share in _PREVALENCES:
        rightly, wrongly = share * recall, (1 - share) * false_positives
        n_called = rightly + wrongly
        name = f"precision_if_{share * 100:.0f}_percent_viral"
        precisions[name] = rightly / n_called if n_called else None
    return precisions
