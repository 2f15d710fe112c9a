"""Fragments of held-out records for the join: runs of neighbouring chunks, read by the scorer.

The bases are read from the training's own copy of all records, because its frames do not hold
every base. A run is numbered by its first chunk, as the frames are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from virnucpro.ground.numeric import Mask, Values
from virnucpro.ground.records import FastaRecord
from virnucpro.learning.labelled.arrays import Rows
from virnucpro.learning.labelled.split import Split
from virnucpro.learning.training.calibration import N_CHUNKS
from virnucpro.learning.training.joining import ScoredFragments
from virnucpro.scorer.nets import Scorer
from virnucpro.scorer.score import score_sequences
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.translate import chunk_record

HELD_OUT: tuple[Split, ...] = ("validation", "test")
_PER_RECORD = 4  # runs of each length
_SHORTEST = 0.9  # share of the bases that its chunks would have side by side: they may overlap


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of as many chunks of records of one split. Rows in step."""

    n_bases: int  # of chunks side by side
    n_chunks: int
    first: Rows  # (n,) number of the first chunk
    record: Rows  # (n,) number of the record
    base: Values  # (n,) calibrated log-odds of the scorer, NaN where it reads nothing

    def with_head(self, chunk: Rows, odds: Values, is_virus: Mask, group: Rows) -> ScoredFragments:
        """The runs with the mean of a head's log-odds of their chunks.

        ``chunk`` rises, and numbers the chunks that ``odds`` are of; ``is_virus`` and ``group`` are
        of all records.
        """
        low = np.searchsorted(chunk, self.first)
        high = np.searchsorted(chunk, self.first + self.n_chunks)
        sums = np.concatenate([[0.0], np.cumsum(odds)])
        n_scored = high - low
        means = (sums[high] - sums[low]) / np.maximum(1, n_scored)
        head = np.where(n_scored > 0, means, np.nan)
        return ScoredFragments(
            self.n_bases, self.base, head, is_virus[self.record], group[self.record]
        )


class _Place(NamedTuple):
    split: Split
    n_chunks: int
    first: int
    record: int


def read_runs(
    fasta: Path,
    split_of: Sequence[Split],
    chunk_sizes: Sequence[int],
    scorer: Scorer,
    code: GeneticCode,
) -> dict[Split, list[Runs]]:
    """The runs of the validation and the test groups, by length, of chunks of the first size.

    ``fasta`` has all records, in the order of their numbers and of ``split_of``.
    """
    places: list[_Place] = []

    def sequences() -> Iterator[str]:
        for place, bases in _cut(fasta, split_of, chunk_sizes):
            places.append(place)
            yield bases

    scores = score_sequences(sequences(), scorer, code)
    base = np.array([np.nan if value is None else value for value in scores], dtype=np.float64)
    runs: dict[Split, list[Runs]] = {split: [] for split in HELD_OUT}
    for split, n_chunks in product(HELD_OUT, N_CHUNKS):
        rows = [i for i, p in enumerate(places) if (p.split, p.n_chunks) == (split, n_chunks)]
        first = np.array([places[i].first for i in rows], dtype=np.int64)
        record = np.array([places[i].record for i in rows], dtype=np.int64)
        n_bases = n_chunks * chunk_sizes[0]
        runs[split].append(Runs(n_bases, n_chunks, first, record, base[rows]))
    return runs


def _cut(
    fasta: Path, split_of: Sequence[Split], chunk_sizes: Sequence[int]
) -> Iterator[tuple[_Place, str]]:
    """The runs of each held-out record and their bases; their chunks follow one another."""
    n_before = 0
    for number, (record, split) in enumerate(zip(read_fasta(fasta), split_of, strict=True)):
        if split in HELD_OUT:
            for n_chunks, first, bases in _cut_record(record, chunk_sizes[0]):
                yield _Place(split, n_chunks, n_before + first, number), bases
        n_before += sum(-(-len(record.sequence) // size) for size in chunk_sizes)


def _cut_record(record: FastaRecord, size: int) -> Iterator[tuple[int, int, str]]:
    """The runs of a record: their number of chunks, the first of these, and their bases."""
    starts = [chunk.start for chunk in chunk_record(record, size)]
    for n_chunks in N_CHUNKS:
        for first in _spread(len(starts) // n_chunks) * n_chunks:
            end = starts[first + n_chunks - 1] + size
            bases = record.sequence[starts[first] : end]
            if len(bases) >= _SHORTEST * n_chunks * size:
                yield n_chunks, int(first), bases


def _spread(n_runs: int) -> Rows:
    """At most ``_PER_RECORD`` of so many runs, evenly."""
    return np.unique(np.linspace(0, n_runs - 1, min(n_runs, _PER_RECORD)).astype(np.int64))
