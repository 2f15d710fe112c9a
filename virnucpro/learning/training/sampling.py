"""Fragments of labelled records to train a scorer on: every group, not every base, has its say.

A kingdom has a share of the fragments of its label; inside it a group is drawn by its weight and
a low power of its bases, a record of the group evenly, a place and a strand at random.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Counts, Mask, Values
from virnucpro.learning.labelled.frames import MOST_WEIGHT, LabelledFrames
from virnucpro.learning.labelled.records import Labelled, LabelledRecord
from virnucpro.scorer.pieces import Digits, encode, opposite_strand
from virnucpro.sequences.composition import N_CODONS

BASES_POWER = 0.25
_GC_EDGES = np.linspace(0.25, 0.7, 10)
_FEWEST = 20  # fragments of a class that a bin of GC is shared out to
_HEAVIEST = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """Labelled records and their bases, side by side."""

    records: tuple[LabelledRecord, ...]
    digits: Digits
    starts: Counts  # (n_records,)
    lengths: Counts  # (n_records,)

    def sequence(self, record: int) -> Digits:
        start = self.starts[record]
        return self.digits[start : start + self.lengths[record]]

    def where(self, chosen: Mask) -> Collection:
        """Some of the records, beside the same bases."""
        records = tuple(self.records[i] for i in np.flatnonzero(chosen))
        return Collection(records, self.digits, self.starts[chosen], self.lengths[chosen])


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Fragments of one length and what they are. Rows in step."""

    digits: Digits  # (n, n_bases)
    record: Counts  # (n,) places in the collection

    def __len__(self) -> int:
        return len(self.record)


def collect(pairs: Iterable[Labelled]) -> Collection:
    """Labelled records with all their bases."""
    labelled, parts = [], []
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
    """Draw so many fragments of each label from the records that are long enough.

    ``shares`` are of kingdoms; one that it does not name, or that has no record, has none.
    """
    drawn = []
    for is_virus in (True, False):
        groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, record in enumerate(collection.records):
            if record.is_virus == is_virus and collection.lengths[i] >= n_bases:
                groups[record.kingdom][record.group].append(i)
        members, weights = [], []
        for kingdom, by_group in sorted(groups.items()):
            named = [by_group[name] for name in sorted(by_group)]
            inside = np.array([_weight(collection, records) for records in named])
            members += named
            weights.append(shares.get(kingdom, 0.0) * inside / inside.sum())
        chances = np.concatenate(weights)
        for group in rng.choice(len(members), n_fragments, p=chances / chances.sum()):
            drawn.append(members[group][rng.integers(len(members[group]))])
    record_of = np.array(drawn)
    return Fragments(_cut(collection, record_of, n_bases, rng), record_of)


def _weight(collection: Collection, records: list[int]) -> float:
    n_bases = float(collection.lengths[records].sum())
    heaviest = max(collection.records[i].weight for i in records)
    return float(n_bases**BASES_POWER * heaviest)


def _cut(
    collection: Collection, record_of: Counts, n_bases: int, rng: np.random.Generator
) -> Digits:
    """A window of each of these records, at a random place on a random strand."""
    first = rng.integers(collection.lengths[record_of] - n_bases, endpoint=True)
    starts = collection.starts[record_of] + first
    digits = np.empty((len(starts), n_bases), dtype=np.uint8)
    for row, start in enumerate(starts):
        digits[row] = collection.digits[start : start + n_bases]
    is_reverse = rng.random(len(starts)) < 0.5
    digits[is_reverse] = opposite_strand(digits[is_reverse])
    return digits


def gc_matched_weights(gc: Values, is_virus: Mask) -> Values:
    """Weights that give both labels the same say in each bin of GC, so that it tells nothing."""
    bins = np.digitize(gc, _GC_EDGES)
    weights = np.ones(len(gc))
    for number in range(len(_GC_EDGES) + 1):
        inside = bins == number
        for label in (False, True):
            members = inside & (is_virus == label)
            weights[members] = inside.sum() / 2 / max(members.sum(), _FEWEST)
    balanced: Values = np.minimum(weights / weights.mean(), _HEAVIEST)
    return balanced


def recipe_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights of frames that stand for drawing them by the scorer's recipe. (n,) with mean 1

    A group has a low power of its number of frames, times the manifest's weights; both labels have
    the same say, over all and in each bin of GC, as far as ``_HEAVIEST`` allows.
    """
    side = 2 * frames.group + frames.is_virus
    _, group, size = np.unique(side, return_inverse=True, return_counts=True)
    weights = frames.weight * size[group] ** (BASES_POWER - 1)
    bins = np.digitize(_gc_of(frames), _GC_EDGES)
    for label in (False, True):
        rows = frames.is_virus == label
        if rows.any():
            weights[rows] = np.minimum(weights[rows] / weights[rows].mean(), MOST_WEIGHT)
            weights[rows] /= weights[rows].sum()
    for number in range(len(_GC_EDGES) + 1):
        inside = bins == number
        total = weights[inside].sum()
        for label in (False, True):
            rows = inside & (frames.is_virus == label)
            if rows.any():
                weights[rows] *= min(_HEAVIEST, total / 2 / weights[rows].sum())
    even: NDArray[np.float32] = (weights / weights.mean()).astype(np.float32)
    return even


def _gc_of(frames: LabelledFrames) -> Values:
    """The share of G and C in the codons of each frame. (n,)"""
    codons = np.arange(N_CODONS)
    n_gc = sum(np.isin(codons // 4**place % 4, (1, 2)).astype(np.float64) for place in range(3))
    blocks = [block[:, :N_CODONS] @ n_gc / 3 for block in frames.composition.blocks()]
    return np.concatenate(blocks) if blocks else np.empty(0)
