"""The join of a head with the scorer, fitted to fragments of held-out groups, and its gain.

At each length the weights are fitted by themselves: a logistic regression of the two log-odds,
drawn a little towards the scorer alone. Folds over the groups say whether the head adds anything;
where it does not, its weight is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from virnucpro.callers.join import Join, JoinKnot, join_log_odds
from virnucpro.ground.numeric import Mask, Values, sigmoid
from virnucpro.learning.evaluation.metrics import Samples, auroc_gain
from virnucpro.learning.labelled.frames import BASES_POWER, Rows
from virnucpro.scorer.nets import ErrorRates, Scorer, at_lengths, thresholds

N_FOLDS = 5
_FEWEST_GROUPS = 2  # of each label, to fit on some and measure on others
_SEED = 0  # of the resamples of groups
_FALSE_POSITIVES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
_PULL = 1e-3  # towards the scorer alone, where the weights of all fragments add up to 1
_STEPS = 50  # a few are enough
_DAMPING = 1e-6  # each step can be solved, even where all rows are alike


@dataclass(frozen=True, slots=True, eq=False)
class ScoredFragments:
    """Fragments of about one length, and what scorer and head say of them. Rows in step."""

    n_bases: int  # of their chunks side by side
    base: Values  # calibrated log-odds of the scorer; NaN where it reads nothing
    head: Values  # mean log-odds of the scored chunks; NaN without one
    is_virus: Mask
    group: Rows
    chunks: Rows  # (n, 2): numbers of the first chunk, and of the one behind the last

    def __len__(self) -> int:
        return len(self.base)

    def where(self, mask: Mask) -> ScoredFragments:
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        chosen: dict[str, Any] = {
            name: values[mask] for name, values in columns.items() if isinstance(values, np.ndarray)
        }
        return replace(self, **chosen)

    def with_head(self, chunk: Rows, odds: Values) -> ScoredFragments:
        """With the mean of a head's log-odds of their chunks. ``chunk`` rises; its are the odds."""
        low, high = np.searchsorted(chunk, self.chunks.T)
        sums = np.concatenate([[0.0], np.cumsum(odds)])
        n_scored = high - low
        means = (sums[high] - sums[low]) / np.maximum(1, n_scored)
        return replace(self, head=np.where(n_scored > 0, means, np.nan))

    @property
    def has_both(self) -> Mask:
        """True for fragments that scorer and head have read."""
        return ~np.isnan(self.base + self.head)

    @property
    def weights(self) -> Values:
        """Weights that let groups count nearly evenly, and both labels the same. They sum to 1."""
        weights = np.full(len(self), np.nan)
        for label in (False, True):
            rows = self.is_virus == label
            _, group, sizes = np.unique(self.group[rows], return_inverse=True, return_counts=True)
            even = sizes[group] ** (BASES_POWER - 1)
            weights[rows] = 0.5 * even / even.sum()
        return weights

    def joined(self, knots: Sequence[JoinKnot]) -> Values:
        """Log-odds by these weights; the scorer's or the head's alone where the other has none."""
        lengths = np.full(len(self), self.n_bases)
        both = join_log_odds(knots, self.base, self.head, lengths)
        either = np.where(np.isnan(self.base), self.head, self.base)
        return np.where(np.isnan(both), either, both)

    def samples(self, log_odds: Values) -> Samples:
        """The same fragments with these log-odds; every one counts, without any as the lowest."""
        return Samples(log_odds, self.is_virus, self.group, self.weights).filled(-np.inf)


def is_enough(fragments: ScoredFragments) -> bool:
    """True if each label has groups to fit on, and others to measure on."""
    both = fragments.where(fragments.has_both)
    n_groups = [len(set(both.group[both.is_virus == label].tolist())) for label in (False, True)]
    return min(n_groups) >= _FEWEST_GROUPS


def fit_join(of_lengths: Sequence[ScoredFragments], scorer: Scorer) -> Join | None:
    """The join from fragments of each length; None if there are groups for none of them.

    Wherever the head has no weight, error rates are the scorer's, all that it has there: the same
    scores have the same calls.
    """
    fitted = [fragments for fragments in of_lengths if is_enough(fragments)]
    knots = tuple(choose_knot(fragments) for fragments in fitted)
    if not knots:
        return None
    rates = {
        knot.n_bases: error_rates(fragments, knot, scorer)
        for fragments, knot in zip(fitted, knots, strict=True)
    }
    lengths = np.array([one.n_bases for one in scorer.error_rates])
    weights = at_lengths(lengths, knots, [knot.head for knot in knots])
    for one, weight in zip(scorer.error_rates, weights, strict=True):
        if weight == 0:
            rates[one.n_bases] = one
    return Join(scorer.sha256, knots, tuple(rates[n_bases] for n_bases in sorted(rates)))


def error_rates(fragments: ScoredFragments, knot: JoinKnot, scorer: Scorer) -> ErrorRates:
    """The error rates of joined log-odds; a cut calls as many of the cells as the scorer's does.

    Never more than its share of all cells. Where the head has no weight the rates are the
    scorer's, on lines between its lengths.
    """
    at = np.array([knot.n_bases])
    if knot.head == 0:
        columns = {
            name: tuple(
                at_lengths(at, scorer.error_rates, values).item()
                for values in zip(*(getattr(one, name) for one in scorer.error_rates), strict=True)
            )
            for name in ("log_odds", "false_positives", "true_positives", "cuts")
        }
        return ErrorRates(knot.n_bases, **columns)
    both = fragments.where(fragments.has_both)
    joined, is_cell = both.joined([knot]), ~both.is_virus
    rates = fit_error_rates(both.n_bases, joined, both.is_virus)
    of_scorer = [thresholds(scorer.error_rates, at, share) for share in rates.false_positives]
    n_called = np.array([np.count_nonzero(both.base[is_cell] >= cut) for cut in of_scorer])
    alike = np.sort(joined[is_cell])[-np.maximum(1, n_called)]
    return replace(rates, cuts=tuple(np.maximum(alike, rates.log_odds).tolist()))


def fit_error_rates(
    n_bases: int,
    log_odds: Values,
    is_virus: Mask,
    kinds: Sequence[tuple[Mask, float]] = (),
) -> ErrorRates:
    """The log-odds from which on each share of the cellular fragments lies, and of the viral ones.

    A share counts one more fragment than there is, so that none is 0. From its cut on no kind of
    cells is called more often either, or not more than so many times as often.
    """
    shares = np.array(_FALSE_POSITIVES)
    at_shares = np.quantile(log_odds[~is_virus], 1 - shares)
    of_kinds = [
        np.quantile(log_odds[kind], 1 - np.minimum(1, times * shares)) for kind, times in kinds
    ]
    cuts = np.max([at_shares, *of_kinds], axis=0)
    viral = np.sort(log_odds[is_virus])
    n_called = len(viral) - np.searchsorted(viral, at_shares)
    true_positives = (n_called + 1) / (len(viral) + 1)
    columns = (at_shares, shares, true_positives, cuts)
    return ErrorRates(n_bases, *(tuple(column.tolist()) for column in columns))


def choose_knot(fragments: ScoredFragments) -> JoinKnot:
    """The weights at a length, or those of the scorer alone if the head surely adds nothing.

    It adds something where the gain of folds is above 0 at the lower end of its 95 % interval over
    groups: a gain that the choice of groups explains is none.
    """
    alone = JoinKnot(fragments.n_bases, 1.0, 0.0, 0.0)
    knot, by_scorer = fit_join_knot(fragments), fragments.joined([alone])
    by_both = fold_log_odds(fragments)
    _, low, _ = auroc_gain(fragments.samples(by_scorer), fragments.samples(by_both), _SEED)
    return knot if low is not None and low > 0 and knot.head > 0 else alone


def fold_log_odds(fragments: ScoredFragments) -> Values:
    """The joined log-odds of each fragment, by weights fitted without the groups of its fold."""
    fold = _folds(fragments)
    log_odds = np.full(len(fragments), np.nan)
    for number in np.unique(fold).tolist():
        inside = fold == number
        knot = fit_join_knot(fragments.where(~inside))
        log_odds[inside] = fragments.where(inside).joined([knot])
    return log_odds


def _folds(fragments: ScoredFragments) -> Rows:
    """The fold of each fragment: whole groups, those that can be fitted to spread evenly. (n,)"""
    fold_of: dict[int, int] = {}
    fitted = set(fragments.group[fragments.has_both].tolist())
    cellular, viral = (
        set(fragments.group[fragments.is_virus == label].tolist()) for label in (False, True)
    )
    for groups in (cellular & viral, cellular - viral, viral - cellular):
        in_order = sorted(groups, key=lambda group: (group not in fitted, group))
        fold_of |= {group: place % N_FOLDS for place, group in enumerate(in_order)}
    return np.array([fold_of[group] for group in fragments.group.tolist()], dtype=np.int64)


def fit_join_knot(fragments: ScoredFragments) -> JoinKnot:
    """The weights of the least cross-entropy, none below 0."""
    both = fragments.where(fragments.has_both)
    inputs = np.stack([both.base, both.head, np.ones(len(both))], axis=1)
    is_used = np.ones(3, dtype=np.bool_)
    values = _fit(inputs, both, is_used)
    for column in (1, 0):
        if values[column] < 0:
            is_used[column] = False
            values = _fit(inputs, both, is_used)
    base, head, offset = values.tolist()
    return JoinKnot(fragments.n_bases, max(base, 0.0), max(head, 0.0), offset)


def _fit(inputs: Values, fragments: ScoredFragments, is_used: Mask) -> Values:
    """Logistic regression on some of the columns; the weights of the others are 0. -> (3,)"""
    start = np.array([1.0, 0.0, 0.0])  # the scorer alone
    values = np.zeros(3)
    values[is_used] = fit_logistic(
        inputs[:, is_used], fragments.is_virus, fragments.weights, start[is_used], _PULL
    )
    return values


def fit_logistic(
    inputs: Values, is_virus: Mask, weights: Values, start: Values, pull: float = 0.0
) -> Values:
    """The coefficients of the least weighted cross-entropy. (n, k), (n,), (n,), (k,) -> (k,)

    Weights add up to about 1. ``pull`` draws the coefficients towards the start, and keeps them
    finite where the labels are told apart perfectly.
    """
    fitted: Values = start.copy()
    for _ in range(_STEPS):
        chances = sigmoid(inputs @ fitted)
        gradient = inputs.T @ (weights * (is_virus - chances)) - pull * (fitted - start)
        curvature = (inputs * (weights * chances * (1 - chances))[:, None]).T @ inputs
        fitted += np.linalg.solve(curvature + max(pull, _DAMPING) * np.eye(len(fitted)), gradient)
    return fitted
