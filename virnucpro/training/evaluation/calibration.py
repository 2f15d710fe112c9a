"""Calibrate a trained head: turn its log-odds into probabilities, and join it with the scorer.

The parameters are fitted to validation groups, in this order: whether a chunk takes its best frame
or the mean (by AUROC of chunks); the temperature (by cross-entropy of chunks); the exponent of the
number of chunks (by cross-entropy of records of many lengths); the threshold (by the share of
others called viral).

The weights of the join are fitted separately for each length: a logistic regression of the two
log-odds, drawn a little towards the scorer alone. Folds over the groups show whether the head adds
anything; if not, its weight is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.numeric import DECIMALS, BoolArray, FloatArray, sigmoid
from virnucpro.training.evaluation.metrics import Samples, auroc_gain
from virnucpro.training.frame_dataset import BASES_POWER, LabelledFrames, Rows, balanced_weights
from virnucpro.viral.head import EnsembleKnot, EnsembleWeights, FrameRule
from virnucpro.viral.networks import ErrorRates, Scorer, interpolate_lengths, thresholds

FALSE_POSITIVES = 0.05  # of the others in validation, at the threshold
N_CHUNKS = (1, 2, 6, 20)  # of one record; 500 to 10,000 bases if a chunk has 500
_TEMPERATURES: list[float] = np.geomspace(1 / 20, 20, 601).round(4).tolist()  # 1 % apart
_RULES: tuple[FrameRule, ...] = ("max", "mean")
N_FOLDS = 5
FEWEST_GROUPS = 2  # per label, to fit on some and measure on others
_SEED = 0  # for resampling groups
_FALSE_POSITIVES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
_PULL = 1e-3  # towards the scorer alone; the weights of all fragments add up to 1
_STEPS = 50  # a few are enough
_DAMPING = 1e-6  # keeps each step solvable, even if all rows are alike


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of a head. The temperatures are the best between 1/20 and 20."""

    frames: FrameRule
    temperature: float  # of the network with composition
    protein_temperature: float
    exponent: float
    threshold: float

    @property
    def is_at_limit(self) -> bool:
        """True if the best temperature may lie outside: scores separate nothing, or everything."""
        return self.temperature in (_TEMPERATURES[0], _TEMPERATURES[-1])


def calibrate(protein: FloatArray, nucleotide: FloatArray, frames: LabelledFrames) -> Calibration:
    """Calibrate both networks on frames of groups that they were not trained on.

    ``protein`` and ``nucleotide`` are their log-odds of the frames, (n,) each.
    """
    weight = balanced_weights(frames).astype(np.float64)
    chunks = {rule: select_chunks(nucleotide, frames, weight, rule) for rule in _RULES}
    rule = max(_RULES, key=lambda rule: chunks[rule].auroc())
    temperature = fit_temperature(chunks[rule])
    whole = len(chunks[rule])  # no record has more chunks
    fragments = [_monotone_runs(chunks[rule], n, temperature) for n in (*N_CHUNKS, whole)]
    exponent = min(
        np.linspace(0, 1, 21).round(2).tolist(),
        key=lambda exponent: sum(
            _concatenate(part, exponent).cross_entropy() for part in fragments
        ),
    )
    others = [_concatenate(part, exponent) for part in fragments[: len(N_CHUNKS)]]
    return Calibration(
        frames=rule,
        temperature=temperature,
        protein_temperature=fit_temperature(select_chunks(protein, frames, weight, rule)),
        exponent=exponent,
        threshold=_threshold(others),
    )


def select_chunks(
    odds: FloatArray, frames: LabelledFrames, weight: FloatArray, rule: FrameRule
) -> Samples:
    """Join the frames of each chunk by ``rule`` into one sample; its record is its group.

    ``weight`` is per frame; all frames of a chunk weigh the same.
    """
    _, first, chunk, n = np.unique(
        frames.chunk, return_index=True, return_inverse=True, return_counts=True
    )
    if rule == "max":
        joined = np.full(len(n), -np.inf)
        np.maximum.at(joined, chunk, odds)
    else:
        joined = np.bincount(chunk, odds) / n
    return Samples(joined, frames.is_virus[first], frames.record[first], weight[first])


def fit_temperature(samples: Samples) -> float:
    """The divisor of log-odds that gives the least cross-entropy (Guo et al. 2017)."""
    return min(_TEMPERATURES, key=lambda value: samples.cross_entropy(1 / value))


def _monotone_runs(
    chunks: Samples, n_chunks: int, temperature: float
) -> tuple[Samples, NDArray[np.int64]]:
    """Join up to ``n_chunks`` neighbouring chunks of a record. -> the runs, their numbers of chunks

    A run has the sum of the log-odds of its chunks, and the sum of their weights.
    """
    record = chunks.groups
    place = np.arange(len(record)) - np.searchsorted(record, record)
    key = record * (len(place) + 1) + place // n_chunks
    _, first, run, n = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    weight: FloatArray = np.bincount(run, chunks.weights).astype(np.float64)
    total: FloatArray = np.bincount(run, chunks.scores / temperature).astype(np.float64)
    return Samples(total, chunks.is_virus[first], record[first], weight), n


def _concatenate(run: tuple[Samples, NDArray[np.int64]], exponent: float) -> Samples:
    samples, n = run
    return replace(samples, scores=samples.scores / n**exponent)


def _threshold(fragments: Sequence[Samples]) -> float:
    """The score that a share of ``FALSE_POSITIVES`` of the others reaches; all lengths count alike.

    It is rounded as scores are, because high scores lie close together near 1. It is never below
    0.5: what is probably no virus is not called one.
    """
    odds = np.concatenate([one.scores[~one.is_virus] for one in fragments])
    weight = np.concatenate([one.weights[~one.is_virus] / one.weights.sum() for one in fragments])
    order = np.argsort(-odds)
    share = np.cumsum(weight[order]) / weight.sum()
    at = odds[order][np.searchsorted(share, FALSE_POSITIVES)]
    score = np.round(sigmoid(at), DECIMALS)
    return float(np.clip(score, 0.5, 1 - 10.0**-DECIMALS))


@dataclass(frozen=True, eq=False)
class ScoredFragments(Samples):
    """Fragments of about one length, with the log-odds of scorer and head.

    Scores are the calibrated log-odds of the scorer, NaN if it cannot read a fragment.
    """

    n_bases: int  # of their chunks, end to end
    head: FloatArray  # mean log-odds of the scored chunks; NaN: no chunk has a score
    chunks: Rows  # (n, 2): number of the first chunk, and one after the last

    @classmethod
    def from_scores(
        cls, n_bases: int, base: FloatArray, is_virus: BoolArray, groups: Rows, chunks: Rows
    ) -> ScoredFragments:
        """Make fragments with even weights, and without log-odds of a head."""
        nothing = np.full(len(base), np.nan)
        weights = _even_weights(is_virus, groups)
        return cls(base, is_virus, groups, weights, n_bases, nothing, chunks)

    def select(self, mask: BoolArray) -> ScoredFragments:
        chosen = Samples.select(self, mask)
        return replace(chosen, weights=_even_weights(chosen.is_virus, chosen.groups))

    def with_head(self, chunk: Rows, odds: FloatArray) -> ScoredFragments:
        """Add the mean of a head's log-odds over the chunks of each fragment.

        ``chunk`` has the numbers of the scored chunks, ascending, and ``odds`` their log-odds.
        """
        low, high = np.searchsorted(chunk, self.chunks.T)
        sums = np.concatenate([[0.0], np.cumsum(odds)])
        n_scored = high - low
        means = (sums[high] - sums[low]) / np.maximum(1, n_scored)
        return replace(self, head=np.where(n_scored > 0, means, np.nan))

    @property
    def has_both(self) -> BoolArray:
        """True for fragments with log-odds of both scorer and head."""
        return ~np.isnan(self.scores + self.head)

    def concatenate(self, knot: EnsembleKnot) -> FloatArray:
        """Log-odds joined by these weights; if one of the two is missing, the other alone."""
        both = knot.base * self.scores + knot.head * self.head + knot.offset
        either = np.where(np.isnan(self.scores), self.head, self.scores)
        return np.where(np.isnan(both), either, both)

    def group_by(self, log_odds: FloatArray) -> ScoredFragments:
        """The same fragments with these scores; a missing score counts as the lowest."""
        return replace(self, scores=log_odds).with_missing_lowest(-np.inf)


def _even_weights(is_virus: BoolArray, groups: Rows) -> FloatArray:
    """Weights by which groups count nearly evenly, and both labels the same. They sum to 1."""
    weights = np.full(len(groups), np.nan)
    for label in (False, True):
        rows = is_virus == label
        _, group, sizes = np.unique(groups[rows], return_inverse=True, return_counts=True)
        even = sizes[group] ** (BASES_POWER - 1)
        weights[rows] = 0.5 * even / even.sum()
    return weights


def is_enough(fragments: ScoredFragments) -> bool:
    """True if each label has enough groups to fit on some and measure on others."""
    both = fragments.select(fragments.has_both)
    n_groups = [len(set(both.groups[both.is_virus == label].tolist())) for label in (False, True)]
    return min(n_groups) >= FEWEST_GROUPS


def fit_join(of_lengths: Sequence[ScoredFragments], scorer: Scorer) -> EnsembleWeights | None:
    """Fit the join to fragments of each length; None if no length has enough groups.

    Where the head has no weight, all error rates are the scorer's, so that the same scores give the
    same calls.
    """
    fitted = [fragments for fragments in of_lengths if is_enough(fragments)]
    knots = tuple(choose_knot(fragments) for fragments in fitted)
    if not knots:
        return None
    rates = {
        knot.n_bases: _error_rates(fragments, knot, scorer)
        for fragments, knot in zip(fitted, knots, strict=True)
    }
    lengths = np.array([one.n_bases for one in scorer.error_rates])
    weights = interpolate_lengths(lengths, knots, [knot.head for knot in knots])
    for one, weight in zip(scorer.error_rates, weights, strict=True):
        if weight == 0:
            rates[one.n_bases] = one
    return EnsembleWeights(scorer.sha256, knots, tuple(rates[n_bases] for n_bases in sorted(rates)))


def _error_rates(fragments: ScoredFragments, knot: EnsembleKnot, scorer: Scorer) -> ErrorRates:
    """The error rates of joined log-odds; a cut calls as many cells as the scorer's cut does.

    It never calls more than its share of all cells. If the head has no weight, the rates are the
    scorer's, interpolated between its lengths.
    """
    at = np.array([knot.n_bases])
    if knot.head == 0:
        columns = {
            name: tuple(
                interpolate_lengths(at, scorer.error_rates, values).item()
                for values in zip(*(getattr(one, name) for one in scorer.error_rates), strict=True)
            )
            for name in ("log_odds", "false_positives", "true_positives", "cuts")
        }
        return ErrorRates(knot.n_bases, **columns)
    both = fragments.select(fragments.has_both)
    joined, is_cell = both.concatenate(knot), ~both.is_virus
    rates = fit_error_rates(both.n_bases, joined, both.is_virus)
    of_scorer = [thresholds(scorer.error_rates, at, share) for share in rates.false_positives]
    n_called = np.array([np.count_nonzero(both.scores[is_cell] >= cut) for cut in of_scorer])
    alike = np.sort(joined[is_cell])[-np.maximum(1, n_called)]
    return replace(rates, cuts=tuple(np.maximum(alike, rates.log_odds).tolist()))


def fit_error_rates(n_bases: int, log_odds: FloatArray, is_virus: BoolArray) -> ErrorRates:
    """The log-odds that each share of cellular fragments reaches, and the viral share there.

    Viral shares count one more fragment than there is, so that none is 0.
    """
    shares = np.array(_FALSE_POSITIVES)
    at_shares = np.quantile(log_odds[~is_virus], 1 - shares)
    viral = np.sort(log_odds[is_virus])
    n_called = len(viral) - np.searchsorted(viral, at_shares)
    true_positives = (n_called + 1) / (len(viral) + 1)
    columns = (at_shares, shares, true_positives, at_shares)
    return ErrorRates(n_bases, *(tuple(column.tolist()) for column in columns))


def choose_knot(fragments: ScoredFragments) -> EnsembleKnot:
    """The weights at a length; the scorer's alone, unless the head surely adds something.

    It does if the gain over folds is above 0 at the lower end of its 95 % interval over groups: a
    gain that the choice of groups may explain does not count.
    """
    alone = EnsembleKnot(fragments.n_bases, 1.0, 0.0, 0.0)
    knot, by_scorer = fit_join_knot(fragments), fragments.concatenate(alone)
    by_both = fold_log_odds(fragments)
    _, (low, _) = auroc_gain(fragments.group_by(by_scorer), fragments.group_by(by_both), _SEED)
    return knot if low is not None and low > 0 and knot.head > 0 else alone


def fold_log_odds(fragments: ScoredFragments) -> FloatArray:
    """The joined log-odds of each fragment, by weights fitted without the groups of its fold."""
    fold = _folds(fragments)
    log_odds = np.full(len(fragments), np.nan)
    for number in np.unique(fold).tolist():
        inside = fold == number
        knot = fit_join_knot(fragments.select(~inside))
        log_odds[inside] = fragments.select(inside).concatenate(knot)
    return log_odds


def _folds(fragments: ScoredFragments) -> Rows:
    """The fold of each fragment, (n,): groups stay whole; groups with both scores spread evenly."""
    fold_of: dict[int, int] = {}
    fitted = set(fragments.groups[fragments.has_both].tolist())
    cellular, viral = (
        set(fragments.groups[fragments.is_virus == label].tolist()) for label in (False, True)
    )
    for groups in (cellular & viral, cellular - viral, viral - cellular):
        in_order = sorted(groups, key=lambda group: (group not in fitted, group))
        fold_of |= {group: place % N_FOLDS for place, group in enumerate(in_order)}
    return np.array([fold_of[group] for group in fragments.groups.tolist()], dtype=np.int64)


def find_knot(knots: Sequence[EnsembleKnot], n_bases: int) -> EnsembleKnot:
    """The weights of a join at a length, interpolated between its knots as for any record."""
    base, head, offset = (
        interpolate_lengths(np.array([n_bases]), knots, values).item()
        for values in zip(*((knot.base, knot.head, knot.offset) for knot in knots), strict=True)
    )
    return EnsembleKnot(n_bases, base, head, offset)


def fit_join_knot(fragments: ScoredFragments) -> EnsembleKnot:
    """The weights with the least cross-entropy, none below 0."""
    both = fragments.select(fragments.has_both)
    inputs = np.stack([both.scores, both.head, np.ones(len(both))], axis=1)
    start = np.array([1.0, 0.0, 0.0])  # the scorer alone
    used = [0, 1, 2]

    def fit() -> FloatArray:
        """Fit the weights of the used columns; the others are 0. -> (3,)"""
        values = np.zeros(3)
        of_used = inputs[:, used], both.is_virus, both.weights, start[used]
        values[used] = fit_logistic(*of_used, _PULL)
        return values

    values = fit()
    for column in (1, 0):
        if values[column] < 0:
            used.remove(column)
            values = fit()
    base, head, offset = values.tolist()
    return EnsembleKnot(fragments.n_bases, max(base, 0.0), max(head, 0.0), offset)


def fit_logistic(
    inputs: FloatArray,
    is_virus: BoolArray,
    weights: FloatArray,
    start: FloatArray,
    pull: float = 0.0,
) -> FloatArray:
    """The coefficients with the least weighted cross-entropy. (n, k), (n,), (n,), (k,) -> (k,)

    Weights add up to about 1. ``pull`` draws the coefficients towards the start, and keeps them
    finite if the labels are separated perfectly.
    """
    fitted: FloatArray = start.copy()
    for _ in range(_STEPS):
        chances = sigmoid(inputs @ fitted)
        gradient = inputs.T @ (weights * (is_virus - chances)) - pull * (fitted - start)
        curvature = (inputs * (weights * chances * (1 - chances))[:, None]).T @ inputs
        fitted += np.linalg.solve(curvature + max(pull, _DAMPING) * np.eye(len(fitted)), gradient)
    return fitted
