"""Calibrate a scorer, and derive error rates and cuts, on groups that its nets have not seen.

The nets of a fold are fitted without its groups, and score only fragments of these groups. So their
figures estimate how a scorer that is fitted to all groups does on new ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from sampling import Collection, Fragments

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits
from virnucpro.training.evaluation.calibration import fit_logistic
from virnucpro.training.labelled_data import LabelledRecord
from virnucpro.viral.networks import ErrorRates, Knot, PieceNetworks
from virnucpro.viral.scoring import record_log_odds

ELEMENTS = "transposable elements"  # the kingdom of records in groups of other kingdoms
N_FOLDS = 10
MIN_GROUPS = 5  # of a kind of cells that can raise cuts
_SAME = 0.01  # lengths with nearer logarithms count as one
_WIDTH = 0.7  # standard deviation of the weights of neighbours, in logarithms of the length
_N_DRAWS = 200  # of groups
_KEPT = 0.9  # share of the draws with no more false discoveries than stated


def group_folds(records: Iterable[LabelledRecord]) -> dict[str, int]:
    """The fold of each group. The groups of a kingdom are spread evenly over the folds.

    Elements have no say, so that no group moves if others are found.
    """
    kingdoms: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record.kingdom != ELEMENTS:
            kingdoms[record.group][record.kingdom] += 1
    members: dict[str, list[str]] = defaultdict(list)
    for group, n_records in kingdoms.items():
        members[min(n_records, key=lambda name: (-n_records[name], name))].append(group)
    in_order = [
        group
        for _, groups in sorted(members.items())
        for group in sorted(groups, key=lambda name: hashlib.blake2b(name.encode()).digest())
    ]
    return {group: place % N_FOLDS for place, group in enumerate(in_order)}


def held_out_log_odds(
    fragments: Fragments,
    fold_of_record: IntArray,
    nets: Mapping[tuple[int, ...], Sequence[PieceNetworks]],
    n_kinds: int,
) -> tuple[FloatArray, FloatArray]:
    """The log-odds of each fragment by the nets of its folds, and its kinds. (n,), (n, n_kinds)"""
    log_odds = np.full(len(fragments), np.nan)
    kinds = np.zeros((len(fragments), n_kinds))
    folds = fold_of_record[fragments.record]
    for left_out, pieces in nets.items():
        rows = np.flatnonzero(np.isin(folds, left_out))
        log_odds[rows], kinds[rows] = fragment_scores(fragments.digits[rows], pieces)
    return log_odds, kinds


def fragment_log_odds(digits: Digits, pieces: Sequence[PieceNetworks]) -> FloatArray:
    """The log-odds of fragments as records, before calibration. (n, n_bases) -> (n,)"""
    return fragment_scores(digits, pieces)[0]


def fragment_scores(
    digits: Digits, pieces: Sequence[PieceNetworks]
) -> tuple[FloatArray, FloatArray]:
    """The log-odds of fragments as records, before calibration, and the probability of each kind.

    (n, n_bases) -> (n,), (n, n_kinds)
    """
    n, n_bases = digits.shape
    bases = np.frombuffer(b"ACGTN", np.uint8)[digits].tobytes().decode()
    return record_log_odds(bases, np.full(n, n_bases), pieces)


def fit_knot(n_bases: int, log_odds: FloatArray, is_virus: BoolArray) -> Knot:
    """Fit Platt's scaling, with equal weights of both labels (Platt 1999)."""
    weights = np.where(is_virus, 0.5 / is_virus.sum(), 0.5 / (~is_virus).sum())
    inputs = np.stack([log_odds, np.ones(len(log_odds))], axis=1)
    values = fit_logistic(inputs, is_virus, weights, np.array([1.0, 0.0]))
    slope, offset = values.tolist()
    return Knot(n_bases, slope, offset)


def with_kinds(
    rates: ErrorRates, log_odds: FloatArray, kinds: Sequence[tuple[BoolArray, float]]
) -> ErrorRates:
    """Raise cuts until each kind of cells is called at most as often as the rates say.

    A kind has a mask and the factor by which it may exceed the rates.
    """
    shares = np.array(rates.false_positives)
    kind_rates = [
        np.quantile(log_odds[kind], 1 - np.minimum(1, times * shares)) for kind, times in kinds
    ]
    return replace(rates, cuts=tuple(np.max([rates.cuts, *kind_rates], axis=0).tolist()))


def kinds_of_cells(
    collection: Collection, fragments: Fragments, is_inside: BoolArray
) -> dict[str, BoolArray]:
    """The fragments inside of each kind of cells of which most are inside.

    The kind needs ``MIN_GROUPS`` groups there: a share over fewer says little about it. A few
    fragments of a kind that look like another kingdom are called more often, and say as little. A
    record counts with at most as many fragments as fit into it without overlap.
    """
    records = [collection.records[record] for record in fragments.record]
    kingdoms = np.array([record.kingdom for record in records])
    groups = np.array([record.group for record in records])
    is_cellular = np.array([not record.is_virus for record in records])
    n_inside = collection.lengths[fragments.record] // fragments.digits.shape[1]
    is_cellular &= _n_earlier(fragments.record) < n_inside
    kinds = {}
    for kingdom in np.unique(kingdoms[is_cellular]):
        is_kind = is_cellular & (kingdoms == kingdom)
        inside = is_kind & is_inside
        has_most = 2 * inside.sum() > is_kind.sum()
        if has_most and len(np.unique(groups[inside])) >= MIN_GROUPS:
            kinds[str(kingdom)] = inside
    return kinds


def _n_earlier(values: IntArray) -> IntArray:
    """The number of earlier values that are equal to each value.

    >>> _n_earlier(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    _, first, n_same = np.unique(values[order], return_index=True, return_counts=True)
    earlier = np.empty(len(values), dtype=np.int64)
    earlier[order] = np.arange(len(values)) - np.repeat(first, n_same)
    return earlier


def evened(error_rates: Sequence[ErrorRates], margins: Sequence[FloatArray]) -> list[ErrorRates]:
    """Smooth cuts and margins, so that they do not jump from one length to the next.

    The kind of cells that is called most often sets a cut; at some lengths, a few records decide.
    So the share of all cells that a cut calls, relative to the share that it allows, is smoothed
    over the lengths. No cut calls more of all cells than it allows. Margins (``margin_of``) are
    smoothed in the same way; true positives are divided by them.
    """
    n_bases = [rates.n_bases for rates in error_rates]
    kept = _over_lengths(n_bases, np.array([_kept_shares(rates) for rates in error_rates]))
    factors = np.exp(_over_lengths(n_bases, np.log(margins)))
    return [_rates_with(*three) for three in zip(error_rates, kept, factors, strict=True)]


def _over_lengths(n_bases: Sequence[int], values: FloatArray) -> FloatArray:
    """A running median of three lengths, then a weighted mean over the lengths.

    The weights are normal over the logarithm of the length. (n_lengths, n) -> (n_lengths, n)
    """
    at = np.log(n_bases)
    length = np.cumsum(np.diff(at, prepend=-np.inf) > _SAME) - 1
    n_same = np.bincount(length)
    length_means = np.stack([np.bincount(length, column) / n_same for column in values.T], axis=1)
    padded = np.pad(length_means, ((1, 1), (0, 0)), mode="edge")
    medians = np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)
    centres = np.bincount(length, at) / n_same
    weights = np.exp(-(((at[:, None] - centres) / _WIDTH) ** 2) / 2)
    return np.asarray(weights @ medians / weights.sum(axis=1, keepdims=True))


def _kept_shares(rates: ErrorRates) -> FloatArray:
    """For each share: the logarithm of the part of it that the cut calls among all cells."""
    shares = np.log(rates.false_positives)
    return np.asarray(np.interp(rates.cuts, rates.log_odds, shares) - shares)


def _rates_with(rates: ErrorRates, kept: FloatArray, margin: FloatArray) -> ErrorRates:
    shares = -np.log(rates.false_positives)
    cuts = np.maximum.accumulate(np.interp(shares - kept, shares, rates.log_odds))
    true_positives = rates.true_positives / margin
    return replace(rates, cuts=tuple(cuts.tolist()), true_positives=tuple(true_positives.tolist()))


def margin_of(
    rates: ErrorRates,
    log_odds: FloatArray,
    records: Sequence[LabelledRecord],
    rng: np.random.Generator,
) -> FloatArray:
    """The factor by which the ratio of false to true positives may rise with other groups.

    In nine of ten draws of as many groups of each kingdom, it rises by no more. A kingdom keeps its
    share of the fragments. Log-odds and records are those of fragments. The factor is at least 1.
    -> (n_shares,)
    """
    above = log_odds[:, None] >= np.array(rates.log_odds)
    n_called = np.zeros((2, _N_DRAWS, above.shape[1]))
    rows: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for row, record in enumerate(records):
        rows[record.is_virus, record.kingdom].append(row)
    for (is_virus, _), inside in sorted(rows.items()):
        _, group = np.unique([records[row].group for row in inside], return_inverse=True)
        sizes = np.bincount(group)
        hits = np.stack([np.bincount(group, column) for column in above[inside].T], axis=1)
        drawn = rng.integers(len(sizes), size=(_N_DRAWS, len(sizes)))
        shares = hits[drawn].sum(axis=1) / sizes[drawn].sum(axis=1, keepdims=True)
        n_called[int(is_virus)] += len(inside) * shares
    n_cells, n_viruses = np.bincount([record.is_virus for record in records], minlength=2)
    ratios = (n_called[0] / n_cells) / ((n_called[1] + 1) / (n_viruses + 1))
    said = np.array(rates.false_positives) / np.array(rates.true_positives)
    return np.asarray(np.maximum(1.0, np.quantile(ratios, _KEPT, axis=0) / said))
