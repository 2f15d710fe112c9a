"""Figures of a scorer on groups that it has not seen, from folds; calibration and error rates.

The nets of a fold are fitted without its groups and score fragments of these alone. What comes
out says how a scorer that is fitted to all groups does on new ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from sampling import Collection, Fragments

from virnucpro.ground.numeric import Counts, Mask, Values
from virnucpro.learning.labelled.records import LabelledRecord
from virnucpro.learning.training.calibration import fit_logistic
from virnucpro.scorer.nets import Knot, PieceNets
from virnucpro.scorer.pieces import Digits
from virnucpro.scorer.score import record_log_odds

N_FOLDS = 10
FEWEST_GROUPS = 5  # of a kind of cells that has a say in where cuts lie


def group_folds(records: Iterable[LabelledRecord]) -> dict[str, int]:
    """The fold of each group. The groups of a kingdom are spread evenly over the folds."""
    kingdoms: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
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
    fragments: Fragments, fold_of_record: Counts, nets: Mapping[int, Sequence[PieceNets]]
) -> Values:
    """The log-odds of each fragment by the nets of its fold. -> (n,)"""
    log_odds = np.full(len(fragments), np.nan)
    folds = fold_of_record[fragments.record]
    for fold, pieces in nets.items():
        rows = np.flatnonzero(folds == fold)
        log_odds[rows] = fragment_log_odds(fragments.digits[rows], pieces)
    return log_odds


def fragment_log_odds(digits: Digits, pieces: Sequence[PieceNets]) -> Values:
    """The log-odds of fragments as records, before calibration. (n, n_bases) -> (n,)"""
    n, n_bases = digits.shape
    return record_log_odds(digits.reshape(-1), np.full(n, n_bases), pieces)


def fit_knot(n_bases: int, log_odds: Values, is_virus: Mask) -> Knot:
    """Platt's scaling, both labels having the same weight (Platt 1999)."""
    weights = np.where(is_virus, 0.5 / is_virus.sum(), 0.5 / (~is_virus).sum())
    inputs = np.stack([log_odds, np.ones(len(log_odds))], axis=1)
    values = fit_logistic(inputs, is_virus, weights, np.array([1.0, 0.0]))
    slope, offset = values.tolist()
    return Knot(n_bases, slope, offset)


def kinds_of_cells(collection: Collection, fragments: Fragments) -> dict[str, Mask]:
    """Which fragments are of each kind of cells; of two groups a share says little of a kind.

    Of a record that is drawn often, as many fragments have a say as lie in it side by side.
    """
    records = [collection.records[record] for record in fragments.record]
    kingdoms = np.array([record.kingdom for record in records])
    groups = np.array([record.group for record in records])
    is_cellular = np.array([not record.is_virus for record in records])
    n_inside = collection.lengths[fragments.record] // fragments.digits.shape[1]
    is_cellular &= _n_earlier(fragments.record) < n_inside
    kinds = {
        str(kingdom): is_cellular & (kingdoms == kingdom)
        for kingdom in np.unique(kingdoms[is_cellular])
    }
    return {
        kingdom: is_kind
        for kingdom, is_kind in kinds.items()
        if len(np.unique(groups[is_kind])) >= FEWEST_GROUPS
    }


def _n_earlier(values: Counts) -> Counts:
    """How many of the earlier values are the same.

    >>> _n_earlier(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    _, first, n_same = np.unique(values[order], return_index=True, return_counts=True)
    earlier = np.empty(len(values), dtype=np.int64)
    earlier[order] = np.arange(len(values)) - np.repeat(first, n_same)
    return earlier
