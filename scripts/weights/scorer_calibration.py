"""Calibrate a scorer, and derive error rates and thresholds, on held-out groups.

The networks of a fold are fitted without its groups, and score only fragments of these groups. So
their error rates estimate those of a scorer fitted to all groups, on new groups.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from sampling import Fragments, RecordSet

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits
from virnucpro.training.evaluation.calibration import fit_logistic
from virnucpro.training.labelled_data import LabelledRecord
from virnucpro.viral.networks import ErrorRates, Knot, PieceNetworks
from virnucpro.viral.scoring import record_log_odds

ELEMENTS = "transposable elements"  # the kingdom of records in groups of other kingdoms
N_FOLDS = 10
MIN_GROUPS = 5  # of a kind of cells that can raise thresholds
_SAME_LENGTH = 0.01  # difference of logarithms below which lengths are merged
_SMOOTHING_WIDTH = 0.7  # standard deviation of the kernel, in logarithms of the length
_N_RESAMPLES = 200  # bootstrap samples of groups
_CONFIDENCE = 0.9  # share of the bootstrap samples with no more false discoveries than stated


def assign_folds(records: Iterable[LabelledRecord]) -> dict[str, int]:
    """Return the fold of each group. Folds are stratified by kingdom.

    Transposable elements do not count, so no group moves if other elements are found.
    """
    kingdoms: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record.kingdom != ELEMENTS:
            kingdoms[record.group][record.kingdom] += 1
    members: dict[str, list[str]] = defaultdict(list)
    for group, n_records in kingdoms.items():
        members[min(n_records, key=lambda name: (-n_records[name], name))].append(group)
    ordered_groups = [
        group
        for _, groups in sorted(members.items())
        for group in sorted(groups, key=lambda name: hashlib.blake2b(name.encode()).digest())
    ]
    return {group: index % N_FOLDS for index, group in enumerate(ordered_groups)}


def held_out_log_odds(
    fragments: Fragments,
    fold_of_record: IntArray,
    nets: Mapping[tuple[int, ...], Sequence[PieceNetworks]],
    n_kinds: int,
) -> tuple[FloatArray, FloatArray]:
    """Score each fragment with the networks that have not seen its fold.

    Returns:
        The log-odds (n,), and the probability of each kind (n, n_kinds).
    """
    log_odds = np.full(len(fragments), np.nan)
    kinds = np.zeros((len(fragments), n_kinds))
    folds = fold_of_record[fragments.record]
    for held_out_folds, pieces in nets.items():
        rows = np.flatnonzero(np.isin(folds, held_out_folds))
        log_odds[rows], kinds[rows] = fragment_scores(fragments.digits[rows], pieces)
    return log_odds, kinds


def fragment_log_odds(digits: Digits, pieces: Sequence[PieceNetworks]) -> FloatArray:
    """Return uncalibrated log-odds of fragments as records. (n, n_bases) -> (n,)"""
    return fragment_scores(digits, pieces)[0]


def fragment_scores(
    digits: Digits, pieces: Sequence[PieceNetworks]
) -> tuple[FloatArray, FloatArray]:
    """Return uncalibrated log-odds of fragments as records, and the probability of each kind.

    (n, n_bases) -> (n,), (n, n_kinds)
    """
    n, n_bases = digits.shape
    bases = np.frombuffer(b"ACGTN", np.uint8)[digits].tobytes().decode()
    return record_log_odds(bases, np.full(n, n_bases), pieces)


def fit_knot(n_bases: int, log_odds: FloatArray, is_virus: BoolArray) -> Knot:
    """Fit Platt scaling with equal weights of both labels (Platt 1999)."""
    weights = np.where(is_virus, 0.5 / is_virus.sum(), 0.5 / (~is_virus).sum())
    inputs = np.stack([log_odds, np.ones(len(log_odds))], axis=1)
    values = fit_logistic(inputs, is_virus, weights, np.array([1.0, 0.0]))
    slope, offset = values.tolist()
    return Knot(n_bases, slope, offset)


def raise_thresholds(
    rates: ErrorRates, log_odds: FloatArray, kinds: Sequence[tuple[BoolArray, float]]
) -> ErrorRates:
    """Raise thresholds until each kind of cells has at most the stated false positive rates.

    A kind has a mask, and the factor by which it may exceed these rates.
    """
    shares = np.array(rates.false_positives)
    kind_thresholds = [
        np.quantile(log_odds[mask], 1 - np.minimum(1, factor * shares)) for mask, factor in kinds
    ]
    return replace(rates, cuts=tuple(np.max([rates.cuts, *kind_thresholds], axis=0).tolist()))


def cell_kind_masks(
    collection: RecordSet, fragments: Fragments, is_selected: BoolArray
) -> dict[str, BoolArray]:
    """Return the selected fragments of each kind of cells with most of its fragments selected.

    A kind needs ``MIN_GROUPS`` selected groups: fewer do not estimate its rate. Nor do the few
    fragments of a kind that resemble another kingdom, which are called more often. A record counts
    with at most as many fragments as fit into it without overlap.
    """
    records = [collection.records[record] for record in fragments.record]
    kingdoms = np.array([record.kingdom for record in records])
    groups = np.array([record.group for record in records])
    is_cellular = np.array([not record.is_virus for record in records])
    max_fragments = collection.lengths[fragments.record] // fragments.digits.shape[1]
    is_cellular &= _count_earlier_duplicates(fragments.record) < max_fragments
    kinds = {}
    for kingdom in np.unique(kingdoms[is_cellular]):
        is_kind = is_cellular & (kingdoms == kingdom)
        mask = is_kind & is_selected
        has_most = 2 * mask.sum() > is_kind.sum()
        if has_most and len(np.unique(groups[mask])) >= MIN_GROUPS:
            kinds[str(kingdom)] = mask
    return kinds


def _count_earlier_duplicates(values: IntArray) -> IntArray:
    """Count the earlier values that are equal to each value.

    >>> _count_earlier_duplicates(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    _, first, n_same = np.unique(values[order], return_index=True, return_counts=True)
    earlier = np.empty(len(values), dtype=np.int64)
    earlier[order] = np.arange(len(values)) - np.repeat(first, n_same)
    return earlier


def smooth_error_rates(
    error_rates: Sequence[ErrorRates], margins: Sequence[FloatArray]
) -> list[ErrorRates]:
    """Smooth thresholds and margins over the lengths.

    The kind of cells that is called most often determines a threshold. At some lengths, this is up
    to a few records. So the ratio of the observed to the nominal false positive rate is smoothed.
    It is at most 1. Margins (``bootstrap_margin``) are smoothed in the same way, and true positives
    are divided by them.
    """
    n_bases = [rates.n_bases for rates in error_rates]
    log_ratios = _smooth_over_lengths(
        n_bases, np.array([_log_rate_ratios(rates) for rates in error_rates])
    )
    factors = np.exp(_smooth_over_lengths(n_bases, np.log(margins)))
    return [_with_smoothed(*row) for row in zip(error_rates, log_ratios, factors, strict=True)]


def _smooth_over_lengths(n_bases: Sequence[int], values: FloatArray) -> FloatArray:
    """Take a running median of three lengths, then smooth it with a Gaussian kernel.

    The kernel is over the logarithm of the length. (n_lengths, n) -> (n_lengths, n)
    """
    log_bases = np.log(n_bases)
    length = np.cumsum(np.diff(log_bases, prepend=-np.inf) > _SAME_LENGTH) - 1
    n_same = np.bincount(length)
    length_means = np.stack([np.bincount(length, column) / n_same for column in values.T], axis=1)
    padded = np.pad(length_means, ((1, 1), (0, 0)), mode="edge")
    medians = np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)
    centres = np.bincount(length, log_bases) / n_same
    weights = np.exp(-(((log_bases[:, None] - centres) / _SMOOTHING_WIDTH) ** 2) / 2)
    return np.asarray(weights @ medians / weights.sum(axis=1, keepdims=True))


def _log_rate_ratios(rates: ErrorRates) -> FloatArray:
    """Return log ratios of observed to nominal false positive rates, for each threshold."""
    shares = np.log(rates.false_positives)
    return np.asarray(np.interp(rates.cuts, rates.log_odds, shares) - shares)


def _with_smoothed(rates: ErrorRates, log_ratios: FloatArray, margin: FloatArray) -> ErrorRates:
    shares = -np.log(rates.false_positives)
    cuts = np.maximum.accumulate(np.interp(shares - log_ratios, shares, rates.log_odds))
    true_positives = rates.true_positives / margin
    return replace(rates, cuts=tuple(cuts.tolist()), true_positives=tuple(true_positives.tolist()))


def bootstrap_margin(
    rates: ErrorRates,
    log_odds: FloatArray,
    records: Sequence[LabelledRecord],
    rng: np.random.Generator,
) -> FloatArray:
    """Return the factor by which the ratio of false to true positives may rise with other groups.

    It rises by no more in nine of ten bootstrap samples of the groups of each kingdom. A kingdom
    keeps its share of the fragments. Log-odds and records are those of fragments. The factor is at
    least 1. -> (n_shares,)
    """
    above = log_odds[:, None] >= np.array(rates.log_odds)
    n_called = np.zeros((2, _N_RESAMPLES, above.shape[1]))
    rows: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for row, record in enumerate(records):
        rows[record.is_virus, record.kingdom].append(row)
    for (is_virus, _), kingdom_rows in sorted(rows.items()):
        _, group = np.unique([records[row].group for row in kingdom_rows], return_inverse=True)
        sizes = np.bincount(group)
        hits = np.stack([np.bincount(group, column) for column in above[kingdom_rows].T], axis=1)
        resampled = rng.integers(len(sizes), size=(_N_RESAMPLES, len(sizes)))
        shares = hits[resampled].sum(axis=1) / sizes[resampled].sum(axis=1, keepdims=True)
        n_called[int(is_virus)] += len(kingdom_rows) * shares
    n_cells, n_viruses = np.bincount([record.is_virus for record in records], minlength=2)
    ratios = (n_called[0] / n_cells) / ((n_called[1] + 1) / (n_viruses + 1))
    stated = np.array(rates.false_positives) / np.array(rates.true_positives)
    return np.asarray(np.maximum(1.0, np.quantile(ratios, _CONFIDENCE, axis=0) / stated))
