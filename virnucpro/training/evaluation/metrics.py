"""Measure how well scores separate viruses from the rest.

All figures use weighted samples, so a resample is only a new weighting. An undefined figure, such
as any ranking of a single class, is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.numeric import BoolArray, FloatArray

_PERCENT_VIRAL = (1, 5, 20)  # viral share of a sample for which precision is reported
CHANCE = 0.5  # AUROC of random scores
NOT_DEFINED = "n/a"  # table cell for None
INTERVAL = (2.5, 97.5)  # percentiles of a 95 % interval
# ``accuracy`` to ``false_positives`` measure the calls. So does ``precision_if_...``: the precision
# that follows from recall and false positives in a sample with this share of viruses.
MEASURES = (
    "auroc",  # a virus scores higher than the rest; ties count half
    "auprc",  # average precision
    "accuracy",
    "precision",
    "recall",
    "f1",
    "false_positives",  # called share of the samples that are not viral
    *(f"precision_if_{percent}_percent_viral" for percent in _PERCENT_VIRAL),
    "recall_at_1_percent",  # if at most 1 % of the samples that are not viral are called
    "threshold_at_1_percent",  # the lowest such threshold; None: none calls anything
    "calibration_error",  # expected; both labels weigh the same
)
Measures = dict[str, float | None]  # ``MEASURES`` -> figure, in this order; None: not defined
_Interval = tuple[float | None, float | None]  # low and high end

S = TypeVar("S", bound="Samples")


class _Reliability(NamedTuple):
    """The mean score and the viral share in each non-empty bin.

    Both labels weigh the same: a score is the probability of a virus if half the samples are
    viral.
    """

    mean_score: FloatArray
    virus_shares: FloatArray
    weight: FloatArray  # weights of the bins, which sum to 1
    n: FloatArray  # sum of the sample weights


@dataclass(frozen=True, eq=False)
class Samples:
    """Scores with labels, groups and weights, in parallel columns.

    Samples are chunks, records or fragments. A subclass adds columns. Scores are log-odds or
    between 0 and 1. NaN means no score. They are sorted once, so each weighting is measured in one
    pass. The method argument ``weights``, (n,), replaces the samples' own weights. 0 means not
    drawn.
    """

    _N_BINS = 15  # in the reliability curve, equally wide

    scores: FloatArray  # (n,)
    is_virus: BoolArray  # (n,)
    groups: NDArray[np.int64]  # (n,), group numbers; groups are resampled as units
    weights: FloatArray  # (n,), above 0

    def __post_init__(self) -> None:
        columns = (self.scores, self.is_virus, self.groups, self.weights)
        assert {values.shape for values in columns} == {(len(self),)}, "columns must be in step"
        assert (self.weights > 0).all(), "weights must be positive"

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def sides(self) -> NDArray[np.int64]:
        """Group numbers (n,), separate for each label, because a group may have both."""
        return 2 * self.groups + self.is_virus

    def select(self: S, mask: BoolArray) -> S:
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        selected = {n: v[mask] for n, v in columns.items() if isinstance(v, np.ndarray)}
        return replace(self, **selected)

    @property
    def scored(self: S) -> S:
        """The samples with a score."""
        return self.select(~np.isnan(self.scores))

    def with_missing_lowest(self: S, lowest: float) -> S:
        """Return all samples, with ``lowest`` for missing scores."""
        return replace(self, scores=np.where(np.isnan(self.scores), lowest, self.scores))

    @cached_property
    def _ranked(self) -> tuple[NDArray[np.int64], FloatArray, BoolArray]:
        """The order by descending score, and scores and labels in this order. (n,) each."""
        assert not np.isnan(self.scores).any(), "scores must not be NaN"
        order = np.argsort(-self.scores, kind="stable")
        return order, self.scores[order], self.is_virus[order]

    @cached_property
    def _last_tied(self) -> NDArray[np.int64]:
        """Index of the last sample per distinct score, by descending score. (n_distinct,)"""
        _, scores, _ = self._ranked
        return np.flatnonzero(np.append(scores[1:] != scores[:-1], True)[: len(scores)])

    @cached_property
    def _bins(self) -> NDArray[np.int64]:
        """Each sample's bin in the reliability curve, by descending score. (n,)"""
        _, scores, _ = self._ranked
        assert ((scores >= 0) & (scores <= 1)).all(), "scores must lie between 0 and 1"
        return np.minimum((scores * self._N_BINS).astype(np.int64), self._N_BINS - 1)

    def curve(self, weights: FloatArray | None = None) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return distinct scores, descending, with the viral and non-viral weights there.

        A weight sums all samples with this score or a higher one.

        Returns:
            Three arrays, (n_distinct,) each.
        """
        order, scores, is_virus = self._ranked
        sample_weights = (self.weights if weights is None else weights)[order]
        true = np.cumsum(np.where(is_virus, sample_weights, 0.0))
        false = np.cumsum(np.where(is_virus, 0.0, sample_weights))
        last = self._last_tied
        return scores[last], true[last], false[last]

    def auroc(self, weights: FloatArray | None = None) -> float:
        """Return the AUROC. Both labels need a positive weight, and no score may be NaN."""
        _, true, false = self.curve(weights)
        return _area(true, false)

    def auroc_interval(self, seed: int) -> _Interval:
        """Return the 95 % AUROC interval, as in ``bootstrap``."""
        return _interval([self.auroc(weights) for weights in self.resamples(seed)])

    def cross_entropy(self, scale: float = 1.0) -> float:
        """Return the mean cross-entropy if the scores are log-odds, multiplied by ``scale``."""
        losses = np.logaddexp(0, np.where(self.is_virus, -self.scores, self.scores) * scale)
        return float(np.average(losses, weights=self.weights))

    def reliability(self, weights: FloatArray | None = None) -> _Reliability:
        """Return the reliability curve.

        Source: Guo et al. 2017, On Calibration of Modern Neural Networks.
        """
        order, scores, is_virus = self._ranked
        sample_weights = (self.weights if weights is None else weights)[order]
        even = sample_weights.astype(np.float64)
        for side in (is_virus, ~is_virus):
            even[side] /= max(2 * float(even[side].sum()), np.finfo(float).tiny)

        def sum_bins(values: FloatArray) -> FloatArray:
            return np.bincount(self._bins, weights=values, minlength=self._N_BINS).astype(
                np.float64
            )

        total = sum_bins(even)
        score = sum_bins(even * scores)
        virus = sum_bins(even * is_virus)
        count = sum_bins(sample_weights)
        full = total > 0
        return _Reliability(
            score[full] / total[full], virus[full] / total[full], total[full], count[full]
        )

    def measure(self, is_called: BoolArray, weights: FloatArray | None = None) -> Measures:
        """Measure the samples.

        Args:
            is_called: (n,) True for samples that are called viral.
        """
        max_false_positives = 0.01  # share of non-viral samples at which recall is measured
        thresholds, true, false = self.curve(weights)
        n_virus = float(true[-1]) if len(true) else 0.0
        n_other = float(false[-1]) if len(false) else 0.0
        call_weights = np.where(is_called, self.weights if weights is None else weights, 0.0)
        order, _, is_virus = self._ranked
        called = float(call_weights[order][is_virus].sum())
        wrongly = float(call_weights[order][~is_virus].sum())
        figures: Measures = dict.fromkeys(MEASURES)
        recall = figures["recall"] = called / n_virus if n_virus else None
        false_positives = figures["false_positives"] = wrongly / n_other if n_other else None
        if recall is None or false_positives is None:
            return figures
        curve = self.reliability(weights)
        gap = np.abs(curve.mean_score - curve.virus_shares)
        n_allowed = int(np.searchsorted(false, max_false_positives * n_other, side="right"))
        shares = true / np.maximum(true + false, np.finfo(float).tiny)
        return figures | {
            "auroc": _area(true, false),
            "auprc": float(np.diff(true, prepend=0.0) @ shares) / n_virus,
            "accuracy": (called + n_other - wrongly) / (n_virus + n_other),
            "precision": called / (called + wrongly) if called + wrongly else None,
            "f1": 2 * called / (called + wrongly + n_virus),
            **_precisions(recall, false_positives),
            "recall_at_1_percent": float(true[n_allowed - 1]) / n_virus if n_allowed else 0.0,
            "threshold_at_1_percent": float(thresholds[n_allowed - 1]) if n_allowed else None,
            "calibration_error": float(gap @ curve.weight),
        }

    def bootstrap(self, is_called: BoolArray, seed: int) -> tuple[Measures, Measures]:
        """Compute 95 % intervals by resampling groups, with replacement, within each label.

        Groups are drawn as units, because pieces of one genome or of relatives are not independent.
        If a label has a single group, there is no interval. The calibration error never has one:
        noise only widens the gaps that it sums, so resamples are biased upwards.

        Returns:
            The low and the high ends. None: a figure is not defined in some resample.
        """
        resamples = [self.measure(is_called, weights) for weights in self.resamples(seed)]
        intervals = {
            name: _interval([measures[name] for measures in resamples]) for name in MEASURES
        }
        intervals["calibration_error"] = (None, None)
        low = {name: interval[0] for name, interval in intervals.items()}
        high = {name: interval[1] for name, interval in intervals.items()}
        return low, high

    def resamples(self, seed: int) -> Iterator[FloatArray]:
        """Yield weights per group resample, or nothing if a label has fewer than two groups."""
        n_resamples = 200
        sides, own = np.unique(self.sides, return_inverse=True)
        members = [np.flatnonzero(sides % 2 == label) for label in (0, 1)]
        if min(map(len, members)) < 2:
            return
        rng = np.random.default_rng(seed)
        for _ in range(n_resamples):
            draws = [rng.choice(label_sides, len(label_sides)) for label_sides in members]
            groups = np.concatenate(draws)
            yield self.weights * np.bincount(groups, minlength=len(sides))[own]


def auroc(scores: FloatArray, is_virus: BoolArray) -> float:
    """Return the AUROC for equally weighted samples, (n,) each. Both labels must occur."""
    groups = np.zeros(len(scores), dtype=np.int64)
    return Samples(scores, is_virus, groups, np.ones(len(scores))).auroc()


def auroc_gain(before: Samples, after: Samples, seed: int) -> tuple[float, _Interval]:
    """Return the gain in AUROC of ``after`` over ``before``, and its 95 % interval.

    Both score the same samples, and both labels must occur. Resamples are drawn as in
    ``bootstrap``, and are the same for both.
    """
    resamples = before.resamples(seed)
    gains = [after.auroc(weights) - before.auroc(weights) for weights in resamples]
    return after.auroc() - before.auroc(), _interval(gains)


def _interval(values: Sequence[float | None]) -> _Interval:
    """Return the interval for some values, or (None, None) if a value or all are missing."""
    defined = [value for value in values if value is not None]
    if not defined or len(defined) < len(values):
        return None, None
    low, high = np.percentile(defined, INTERVAL).tolist()
    return low, high


def _area(true: FloatArray, false: FloatArray) -> float:
    """Return the area under the curve, from cumulated viral and non-viral weights.

    Ties count half.
    """
    beaten = false[-1] - false + np.diff(false, prepend=0.0) / 2
    return float(np.diff(true, prepend=0.0) @ beaten) / float(true[-1] * false[-1])


def _precisions(recall: float, false_positives: float) -> Measures:
    """Return the precision for each viral share of a sample. None: nothing is called."""
    precisions: Measures = {}
    for percent in _PERCENT_VIRAL:
        rightly = percent / 100 * recall
        wrongly = (1 - percent / 100) * false_positives
        n_called = rightly + wrongly
        name = f"precision_if_{percent}_percent_viral"
        precisions[name] = rightly / n_called if n_called else None
    return precisions
