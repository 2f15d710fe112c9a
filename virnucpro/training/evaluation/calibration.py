"""Calibrate a trained head: turn log-odds into probabilities, and combine it with the scorer.

Parameters are fitted to validation groups, in this order:

- the frame rule, best frame or mean, by chunk AUROC
- the temperature, by chunk cross-entropy
- the chunk-count exponent, by cross-entropy for records of many lengths
- the threshold, by the share of non-viral samples called viral

Ensemble weights are fitted separately for each length: a logistic regression of the two log-odds,
drawn slightly towards the scorer alone. Cross-validation over groups shows whether the head adds
anything. If not, its weight is 0.
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

FALSE_POSITIVES = 0.05  # share of non-viral validation samples that reach the threshold
N_CHUNKS = (1, 2, 6, 20)  # per record; 500 to 10,000 bases if a chunk has 500
_TEMPERATURES: list[float] = np.geomspace(1 / 20, 20, 601).round(4).tolist()  # 1 % apart
N_FOLDS = 5
MIN_GROUPS = 2  # per label, to fit on some and measure on the rest


@dataclass(frozen=True, slots=True)
class Calibration:
    """Head calibration. Temperatures are the best between 1/20 and 20."""

    frames: FrameRule
    temperature: float  # for the network with composition
    protein_temperature: float
    exponent: float
    threshold: float

    @property
    def is_at_limit(self) -> bool:
        """True if the best temperature may be out of range: nothing or all is separated."""
        return self.temperature in (_TEMPERATURES[0], _TEMPERATURES[-1])


def calibrate(protein: FloatArray, nucleotide: FloatArray, frames: LabelledFrames) -> Calibration:
    """Calibrate both networks on frames from groups that they were not trained on.

    Args:
        protein: (n,) float64, log-odds per frame from the protein network.
        nucleotide: (n,) float64, log-odds per frame from the nucleotide network.
        frames: the n frames.
    """
    weight = balanced_weights(frames).astype(np.float64)
    rules: tuple[FrameRule, ...] = ("max", "mean")
    chunks = {rule: select_chunks(nucleotide, frames, weight, rule) for rule in rules}
    rule = max(rules, key=lambda rule: chunks[rule].auroc())
    temperature = fit_temperature(chunks[rule])
    max_chunks = len(chunks[rule])  # no record has more chunks
    fragments = [_monotone_runs(chunks[rule], n, temperature) for n in (*N_CHUNKS, max_chunks)]
    exponent = min(
        np.linspace(0, 1, 21).round(2).tolist(),
        key=lambda exponent: sum(
            _concatenate(part, exponent).cross_entropy() for part in fragments
        ),
    )
    lengths = [_concatenate(part, exponent) for part in fragments[: len(N_CHUNKS)]]
    return Calibration(
        frames=rule,
        temperature=temperature,
        protein_temperature=fit_temperature(select_chunks(protein, frames, weight, rule)),
        exponent=exponent,
        threshold=_threshold(lengths),
    )


def select_chunks(
    odds: FloatArray, frames: LabelledFrames, weight: FloatArray, rule: FrameRule
) -> Samples:
    """Combine each chunk's frames by ``rule`` into one sample, grouped by record.

    Args:
        odds: (n,) log-odds per frame.
        weight: (n,) weight per frame, equal within a chunk.
    """
    _, first, chunk, n = np.unique(
        frames.chunk, return_index=True, return_inverse=True, return_counts=True
    )
    if rule == "max":
        combined = np.full(len(n), -np.inf)
        np.maximum.at(combined, chunk, odds)
    else:
        combined = np.bincount(chunk, odds) / n
    return Samples(combined, frames.is_virus[first], frames.record[first], weight[first])


def fit_temperature(samples: Samples) -> float:
    """Return the divisor of log-odds with the least cross-entropy (Guo et al. 2017)."""
    return min(_TEMPERATURES, key=lambda value: samples.cross_entropy(1 / value))


def _monotone_runs(
    chunks: Samples, n_chunks: int, temperature: float
) -> tuple[Samples, NDArray[np.int64]]:
    """Merge up to ``n_chunks`` neighbouring chunks per record.

    Log-odds and weights are summed within a run.

    Returns:
        The runs, and their chunk counts, (n_runs,).
    """
    record = chunks.groups
    position = np.arange(len(record)) - np.searchsorted(record, record)
    key = record * (len(position) + 1) + position // n_chunks
    _, first, run, n = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    weight: FloatArray = np.bincount(run, chunks.weights).astype(np.float64)
    total: FloatArray = np.bincount(run, chunks.scores / temperature).astype(np.float64)
    return Samples(total, chunks.is_virus[first], record[first], weight), n


def _concatenate(run: tuple[Samples, NDArray[np.int64]], exponent: float) -> Samples:
    samples, n = run
    return replace(samples, scores=samples.scores / n**exponent)


def _threshold(fragments: Sequence[Samples]) -> float:
    """Return the score that a share ``FALSE_POSITIVES`` of non-viral fragments reaches.

    All lengths weigh the same. The threshold is rounded as scores are, because high scores cluster
    near 1. It is at least 0.5, so that a record that is probably not viral is never called viral.
    """
    odds = np.concatenate([samples.scores[~samples.is_virus] for samples in fragments])
    weight = np.concatenate(
        [samples.weights[~samples.is_virus] / samples.weights.sum() for samples in fragments]
    )
    order = np.argsort(-odds)
    share = np.cumsum(weight[order]) / weight.sum()
    odds_at_share = odds[order][np.searchsorted(share, FALSE_POSITIVES)]
    score = np.round(sigmoid(odds_at_share), DECIMALS)
    return float(np.clip(score, 0.5, 1 - 10.0**-DECIMALS))


@dataclass(frozen=True, eq=False)
class ScoredFragments(Samples):
    """Fragments of about one length, with log-odds from scorer and head.

    Scores are the scorer's calibrated log-odds, NaN if it cannot read a fragment.
    """

    n_bases: int  # of their chunks, end to end
    head: FloatArray  # (n,) mean log-odds over scored chunks; NaN: no chunk has a score
    chunks: Rows  # (n, 2): first chunk, and one after the last

    @classmethod
    def from_scores(
        cls, n_bases: int, base: FloatArray, is_virus: BoolArray, groups: Rows, chunks: Rows
    ) -> ScoredFragments:
        """Make fragments with even weights, and without log-odds from a head."""
        nothing = np.full(len(base), np.nan)
        weights = _even_weights(is_virus, groups)
        return cls(base, is_virus, groups, weights, n_bases, nothing, chunks)

    def select(self, mask: BoolArray) -> ScoredFragments:
        selected = Samples.select(self, mask)
        return replace(selected, weights=_even_weights(selected.is_virus, selected.groups))

    def with_head(self, chunk: Rows, odds: FloatArray) -> ScoredFragments:
        """Add the mean of a head's log-odds over each fragment's chunks.

        Args:
            chunk: (k,) int64, scored chunks, ascending.
            odds: (k,) float64, their log-odds.
        """
        low, high = np.searchsorted(chunk, self.chunks.T)
        sums = np.concatenate([[0.0], np.cumsum(odds)])
        n_scored = high - low
        means = (sums[high] - sums[low]) / np.maximum(1, n_scored)
        return replace(self, head=np.where(n_scored > 0, means, np.nan))

    @property
    def has_both(self) -> BoolArray:
        """(n,) True for fragments with log-odds from both scorer and head."""
        return ~np.isnan(self.scores + self.head)

    def concatenate(self, knot: EnsembleKnot) -> FloatArray:
        """Combine the log-odds by these weights. If one is missing, the other counts alone. (n,)"""
        combined = knot.base * self.scores + knot.head * self.head + knot.offset
        either = np.where(np.isnan(self.scores), self.head, self.scores)
        return np.where(np.isnan(combined), either, combined)

    def group_by(self, log_odds: FloatArray) -> ScoredFragments:
        """Return the fragments with these scores. A missing score counts as the lowest."""
        return replace(self, scores=log_odds).with_missing_lowest(-np.inf)


def _even_weights(is_virus: BoolArray, groups: Rows) -> FloatArray:
    """Return weights (n,) that sum to 1: groups count nearly evenly, both labels equally."""
    weights = np.full(len(groups), np.nan)
    for label in (False, True):
        rows = is_virus == label
        _, group, sizes = np.unique(groups[rows], return_inverse=True, return_counts=True)
        even = sizes[group] ** (BASES_POWER - 1)
        weights[rows] = 0.5 * even / even.sum()
    return weights


def is_enough(fragments: ScoredFragments) -> bool:
    """Return True if each label has enough groups to fit on some and measure on the rest."""
    complete = fragments.select(fragments.has_both)
    n_groups = [
        len(set(complete.groups[complete.is_virus == label].tolist())) for label in (False, True)
    ]
    return min(n_groups) >= MIN_GROUPS


def fit_join(
    fragments_by_length: Sequence[ScoredFragments], scorer: Scorer
) -> EnsembleWeights | None:
    """Fit ensemble weights per fragment length. None: no length has enough groups.

    Where the head has no weight, all error rates are the scorer's, so that equal scores give equal
    calls.
    """
    fitted_fragments = [fragments for fragments in fragments_by_length if is_enough(fragments)]
    knots = tuple(choose_knot(fragments) for fragments in fitted_fragments)
    if not knots:
        return None
    rates = {
        knot.n_bases: _error_rates(fragments, knot, scorer)
        for fragments, knot in zip(fitted_fragments, knots, strict=True)
    }
    lengths = np.array([scorer_rates.n_bases for scorer_rates in scorer.error_rates])
    weights = interpolate_lengths(lengths, knots, [knot.head for knot in knots])
    for scorer_rates, weight in zip(scorer.error_rates, weights, strict=True):
        if weight == 0:
            rates[scorer_rates.n_bases] = scorer_rates
    return EnsembleWeights(scorer.sha256, knots, tuple(rates[n_bases] for n_bases in sorted(rates)))


def _error_rates(fragments: ScoredFragments, knot: EnsembleKnot, scorer: Scorer) -> ErrorRates:
    """Return the error rates of combined log-odds.

    Each cut calls as many cellular fragments as the scorer's cut, but never more than its share of
    all of them. If the head has no weight, the rates are the scorer's, interpolated between its
    lengths.
    """
    lengths = np.array([knot.n_bases])
    if knot.head == 0:
        columns: dict[str, tuple[float, ...]] = {}
        for name in ("log_odds", "false_positives", "true_positives", "cuts"):
            rows = [getattr(rates, name) for rates in scorer.error_rates]
            columns[name] = tuple(
                interpolate_lengths(lengths, scorer.error_rates, values).item()
                for values in zip(*rows, strict=True)
            )
        return ErrorRates(knot.n_bases, **columns)
    complete = fragments.select(fragments.has_both)
    combined = complete.concatenate(knot)
    is_cell = ~complete.is_virus
    rates = fit_error_rates(complete.n_bases, combined, complete.is_virus)
    scorer_cuts = [
        thresholds(scorer.error_rates, lengths, share) for share in rates.false_positives
    ]
    n_called = np.array([np.count_nonzero(complete.scores[is_cell] >= cut) for cut in scorer_cuts])
    equivalent_cuts = np.sort(combined[is_cell])[-np.maximum(1, n_called)]
    return replace(rates, cuts=tuple(np.maximum(equivalent_cuts, rates.log_odds).tolist()))


def fit_error_rates(n_bases: int, log_odds: FloatArray, is_virus: BoolArray) -> ErrorRates:
    """Return the log-odds that each share of cellular fragments reaches, and the viral share there.

    Viral shares count one more fragment than exists, so that no share is 0.
    """
    false_positives = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
    shares = np.array(false_positives)
    at_shares = np.quantile(log_odds[~is_virus], 1 - shares)
    viral = np.sort(log_odds[is_virus])
    n_called = len(viral) - np.searchsorted(viral, at_shares)
    true_positives = (n_called + 1) / (len(viral) + 1)
    columns = (at_shares, shares, true_positives, at_shares)
    return ErrorRates(n_bases, *(tuple(column.tolist()) for column in columns))


def choose_knot(fragments: ScoredFragments) -> EnsembleKnot:
    """Return the weights at a length: the scorer alone, unless the head clearly adds something.

    This requires that the cross-validated gain is above 0 at the lower end of its 95 % interval
    over groups. A gain that the choice of groups may explain does not count.
    """
    alone = EnsembleKnot(fragments.n_bases, 1.0, 0.0, 0.0)
    knot = fit_join_knot(fragments)
    scorer_odds = fragments.concatenate(alone)
    ensemble_odds = fold_log_odds(fragments)
    before = fragments.group_by(scorer_odds)
    after = fragments.group_by(ensemble_odds)
    seed = 0  # for resampling groups
    _, (low, _) = auroc_gain(before, after, seed)
    return knot if low is not None and low > 0 and knot.head > 0 else alone


def fold_log_odds(fragments: ScoredFragments) -> FloatArray:
    """Return combined log-odds (n,), with weights fitted without the fold's groups."""
    fold = _folds(fragments)
    log_odds = np.full(len(fragments), np.nan)
    for number in np.unique(fold).tolist():
        inside = fold == number
        knot = fit_join_knot(fragments.select(~inside))
        log_odds[inside] = fragments.select(inside).concatenate(knot)
    return log_odds


def _folds(fragments: ScoredFragments) -> Rows:
    """Assign a fold to each fragment, (n,). Groups are never split.

    Groups with both scores are spread evenly.
    """
    fold_by_group: dict[int, int] = {}
    fitted = set(fragments.groups[fragments.has_both].tolist())
    cellular = set(fragments.groups[~fragments.is_virus].tolist())
    viral = set(fragments.groups[fragments.is_virus].tolist())
    for groups in (cellular & viral, cellular - viral, viral - cellular):
        in_order = sorted(groups, key=lambda group: (group not in fitted, group))
        fold_by_group |= {group: index % N_FOLDS for index, group in enumerate(in_order)}
    return np.array([fold_by_group[group] for group in fragments.groups.tolist()], dtype=np.int64)


def find_knot(knots: Sequence[EnsembleKnot], n_bases: int) -> EnsembleKnot:
    """Return ensemble weights at a length, interpolated between the knots as for any record."""
    lengths = np.array([n_bases])
    base = interpolate_lengths(lengths, knots, [knot.base for knot in knots]).item()
    head = interpolate_lengths(lengths, knots, [knot.head for knot in knots]).item()
    offset = interpolate_lengths(lengths, knots, [knot.offset for knot in knots]).item()
    return EnsembleKnot(n_bases, base, head, offset)


def fit_join_knot(fragments: ScoredFragments) -> EnsembleKnot:
    """Return the weights with the least cross-entropy, all at least 0."""
    pull = 1e-3  # towards the scorer alone; fragment weights sum to 1
    complete = fragments.select(fragments.has_both)
    inputs = np.stack([complete.scores, complete.head, np.ones(len(complete))], axis=1)
    start = np.array([1.0, 0.0, 0.0])  # the scorer alone
    used = [0, 1, 2]

    def fit() -> FloatArray:
        """Fit the used columns, and set the others to 0. -> (3,)"""
        values = np.zeros(3)
        values[used] = fit_logistic(
            inputs[:, used], complete.is_virus, complete.weights, start[used], pull
        )
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
    """Return the coefficients with the least weighted cross-entropy.

    Args:
        inputs: (n, k).
        is_virus: (n,).
        weights: (n,), which sum to about 1.
        start: (k,).
        pull: draws coefficients towards the start, and keeps them finite if the labels are
            separated perfectly.

    Returns:
        (k,) float64.
    """
    damping = 1e-6  # keeps each step solvable, even if all rows are alike
    fitted: FloatArray = start.copy()
    n_steps = 50  # more than enough to converge
    for _ in range(n_steps):
        chances = sigmoid(inputs @ fitted)
        gradient = inputs.T @ (weights * (is_virus - chances)) - pull * (fitted - start)
        curvature = (inputs * (weights * chances * (1 - chances))[:, None]).T @ inputs
        fitted += np.linalg.solve(curvature + max(pull, damping) * np.eye(len(fitted)), gradient)
    return fitted
