"""Draw fragments of labelled records to train a scorer, balanced over groups rather than bases.

A kingdom has a share of the fragments of its label. Within a kingdom, a group is drawn by its
weight and a low power of its bases; within a group, a record uniformly; within a record, a position
and a strand uniformly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.training.frame_dataset import BASES_POWER, GC_EDGES, MAX_BIN_FACTOR
from virnucpro.training.labelled_data import Labelled, LabelledRecord
from virnucpro.viral.windows import opposite_strand

_MIN_DIVISOR = 20  # smallest divisor of a GC bin: weights of rarer classes do not rise further


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """Labelled records and their concatenated bases."""

    records: tuple[LabelledRecord, ...]
    digits: Digits
    starts: IntArray  # (n_records,)
    lengths: IntArray  # (n_records,)

    def sequence(self, record: int) -> Digits:
        start = self.starts[record]
        return self.digits[start : start + self.lengths[record]]

    def where(self, chosen: BoolArray) -> Collection:
        """Some of the records, with the same bases."""
        records = tuple(self.records[i] for i in np.flatnonzero(chosen))
        return Collection(records, self.digits, self.starts[chosen], self.lengths[chosen])


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Fragments of one length, and their records."""

    digits: Digits  # (n, n_bases)
    record: IntArray  # (n,) index in the collection

    def __len__(self) -> int:
        return len(self.record)


def collect(pairs: Iterable[Labelled]) -> Collection:
    """Collect labelled records with all their bases."""
    labelled = []
    parts = []
    for row, record in pairs:
        labelled.append(row)
        parts.append(encode(record.sequence))
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    return Collection(tuple(labelled), np.concatenate(parts), np.cumsum(lengths) - lengths, lengths)


def draw(
    collection: Collection,
    n_bases: int,
    n_fragments: int,
    shares: Mapping[str, float],
    rng: np.random.Generator,
) -> Fragments:
    """Draw ``n_fragments`` of each label from the records that are long enough.

    ``shares`` has the share of each kingdom; kingdoms that it does not name are not drawn.
    """
    drawn = []
    for is_virus in (True, False):
        members, chances = groups_of(collection, is_virus, n_bases, shares)
        for group in rng.choice(len(members), n_fragments, p=chances):
            drawn.append(members[group][rng.integers(len(members[group]))])
    record_of = np.array(drawn)
    return Fragments(_cut(collection, record_of, n_bases, rng), record_of)


def groups_of(
    collection: Collection, is_virus: bool, n_bases: int, shares: Mapping[str, float]
) -> tuple[list[list[int]], FloatArray]:
    """The records that are long enough, by group, and the chance of each group in a draw.

    A group with records of several kingdoms counts in each of them. -> (n_groups,) that sum to 1
    """
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, record in enumerate(collection.records):
        if record.is_virus == is_virus and collection.lengths[i] >= n_bases:
            groups[record.kingdom][record.group].append(i)
    members = []
    weights = []
    for kingdom, by_group in sorted(groups.items()):
        named = [by_group[name] for name in sorted(by_group)]
        inside = np.array([_weight(collection, records) for records in named])
        members += named
        weights.append(shares.get(kingdom, 0.0) * inside / inside.sum())
    chances = np.concatenate(weights)
    return members, chances / chances.sum()


def _weight(collection: Collection, records: list[int]) -> float:
    n_bases = float(collection.lengths[records].sum())
    heaviest = max(collection.records[i].weight for i in records)
    return float(n_bases**BASES_POWER * heaviest)


def _cut(
    collection: Collection, record_of: IntArray, n_bases: int, rng: np.random.Generator
) -> Digits:
    """Cut a window from each of these records, at a random position on a random strand."""
    first = rng.integers(collection.lengths[record_of] - n_bases, endpoint=True)
    starts = collection.starts[record_of] + first
    digits = np.empty((len(starts), n_bases), dtype=np.uint8)
    for row, start in enumerate(starts):
        digits[row] = collection.digits[start : start + n_bases]
    is_reverse = rng.random(len(starts)) < 0.5
    digits[is_reverse] = opposite_strand(digits[is_reverse])
    return digits


def gc_matched_weights(gc: FloatArray, is_virus: BoolArray) -> FloatArray:
    """Weights that balance the labels in each GC bin, so that GC does not predict the label."""
    table = gc_matched_table(gc, is_virus)
    weights: FloatArray = table[is_virus.astype(np.int64), np.digitize(gc, GC_EDGES)]
    return weights


def gc_matched_table(gc: FloatArray, is_virus: BoolArray) -> FloatArray:
    """The weight of each label in each GC bin. (n,), (n,) -> (2, n_bins), cells first"""
    bins = np.digitize(gc, GC_EDGES)
    label = is_virus.astype(np.int64)
    n_bins = len(GC_EDGES) + 1
    n_inside = np.stack([np.bincount(bins[label == row], minlength=n_bins) for row in (0, 1)])
    table = n_inside.sum(axis=0) / 2 / np.maximum(n_inside, _MIN_DIVISOR)
    balanced: FloatArray = np.minimum(table / table[label, bins].mean(), MAX_BIN_FACTOR)
    return balanced
