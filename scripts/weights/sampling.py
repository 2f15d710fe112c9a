"""Sample fragments of labelled records, balanced over groups rather than bases.

Each kingdom has a share of the fragments of its label. The probability of a group in its kingdom is
proportional to its weight and a low power of its bases. Records of a group, positions in a record
and strands are sampled uniformly.
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

_MIN_BIN_COUNT = 20  # rarer labels in a GC bin get no larger weights


@dataclass(frozen=True, slots=True, eq=False)
class RecordSet:
    """Labelled records and their concatenated bases."""

    records: tuple[LabelledRecord, ...]
    digits: Digits
    starts: IntArray  # (n_records,)
    lengths: IntArray  # (n_records,)

    def sequence(self, record: int) -> Digits:
        start = self.starts[record]
        return self.digits[start : start + self.lengths[record]]

    def select(self, chosen: BoolArray) -> RecordSet:
        """Select records. The bases are shared."""
        records = tuple(self.records[i] for i in np.flatnonzero(chosen))
        return RecordSet(records, self.digits, self.starts[chosen], self.lengths[chosen])


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Fragments of one length, and their records."""

    digits: Digits  # (n, n_bases)
    record: IntArray  # (n,) index in the collection

    def __len__(self) -> int:
        return len(self.record)


def collect_records(pairs: Iterable[Labelled]) -> RecordSet:
    """Collect labelled records with all their bases."""
    labelled = []
    parts = []
    for row, record in pairs:
        labelled.append(row)
        parts.append(encode(record.sequence))
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    return RecordSet(tuple(labelled), np.concatenate(parts), np.cumsum(lengths) - lengths, lengths)


def sample_fragments(
    collection: RecordSet,
    n_bases: int,
    n_fragments: int,
    shares: Mapping[str, float],
    rng: np.random.Generator,
) -> Fragments:
    """Sample ``n_fragments`` of each label from the records that are long enough.

    ``shares`` has the share of each kingdom. Other kingdoms are excluded.
    """
    sampled = []
    for is_virus in (True, False):
        members, probabilities = group_probabilities(collection, is_virus, n_bases, shares)
        for group in rng.choice(len(members), n_fragments, p=probabilities):
            sampled.append(members[group][rng.integers(len(members[group]))])
    record = np.array(sampled)
    return Fragments(_cut_windows(collection, record, n_bases, rng), record)


def group_probabilities(
    collection: RecordSet, is_virus: bool, n_bases: int, shares: Mapping[str, float]
) -> tuple[list[list[int]], FloatArray]:
    """Return the records that are long enough, by group, and the probability of each group.

    A group with records of several kingdoms counts in each of them. -> lists, (n_groups,)
    """
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, record in enumerate(collection.records):
        if record.is_virus == is_virus and collection.lengths[i] >= n_bases:
            groups[record.kingdom][record.group].append(i)
    members = []
    weights = []
    for kingdom, by_group in sorted(groups.items()):
        group_records = [by_group[name] for name in sorted(by_group)]
        group_weights = np.array([_group_weight(collection, records) for records in group_records])
        members += group_records
        weights.append(shares.get(kingdom, 0.0) * group_weights / group_weights.sum())
    probabilities = np.concatenate(weights)
    return members, probabilities / probabilities.sum()


def _group_weight(collection: RecordSet, records: list[int]) -> float:
    n_bases = float(collection.lengths[records].sum())
    max_weight = max(collection.records[i].weight for i in records)
    return float(n_bases**BASES_POWER * max_weight)


def _cut_windows(
    collection: RecordSet, record: IntArray, n_bases: int, rng: np.random.Generator
) -> Digits:
    """Cut a window at a random position on a random strand of each record."""
    first = rng.integers(collection.lengths[record] - n_bases, endpoint=True)
    starts = collection.starts[record] + first
    digits = np.empty((len(starts), n_bases), dtype=np.uint8)
    for row, start in enumerate(starts):
        digits[row] = collection.digits[start : start + n_bases]
    is_reverse = rng.random(len(starts)) < 0.5
    digits[is_reverse] = opposite_strand(digits[is_reverse])
    return digits


def gc_matched_weights(gc: FloatArray, is_virus: BoolArray) -> FloatArray:
    """Return weights that balance the labels in each GC bin, so that GC does not predict them."""
    table = gc_matched_table(gc, is_virus)
    weights: FloatArray = table[is_virus.astype(np.int64), np.digitize(gc, GC_EDGES)]
    return weights


def gc_matched_table(gc: FloatArray, is_virus: BoolArray) -> FloatArray:
    """Return the weight of each label in each GC bin. (n,), (n,) -> (2, n_bins), cells first"""
    bins = np.digitize(gc, GC_EDGES)
    label = is_virus.astype(np.int64)
    n_bins = len(GC_EDGES) + 1
    counts = np.stack([np.bincount(bins[label == row], minlength=n_bins) for row in (0, 1)])
    table = counts.sum(axis=0) / 2 / np.maximum(counts, _MIN_BIN_COUNT)
    balanced: FloatArray = np.minimum(table / table[label, bins].mean(), MAX_BIN_FACTOR)
    return balanced
