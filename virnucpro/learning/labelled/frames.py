"""Labelled records as frames: chunked and translated as ``predict`` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Values
from virnucpro.ground.records import FastaRecord
from virnucpro.learning.labelled.arrays import ArrayRows, Rows, Texts
from virnucpro.sequences.composition import N_CODONS, frame_bases
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.translate import chunk_record, translate_six_frames

_FRAMES_AT_ONCE = 4096
_MOST_WEIGHT = 10.0  # largest weight of a frame, where the mean is 1
BASES_POWER = 0.25  # of what a group has, in how much it counts
GC_EDGES = np.linspace(0.25, 0.7, 10)  # of the bins in which both labels weigh the same
HEAVIEST = 4.0  # times as much as without bins


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFrames:
    """Stop-free frames with their labels and features; all rows are in step.

    A frame has its record's label. ``chunk`` and ``record`` number the chunks and the records.
    Ids are unique where there is one size of chunks. Groups are numbered in the order of their
    names.
    """

    ids: Texts
    proteins: Texts
    composition: ArrayRows  # (n, N_FEATURES)
    chunk: Rows
    record: Rows
    is_virus: NDArray[np.bool_]
    weight: NDArray[np.float32]
    group: Rows
    vectors: ArrayRows  # (n, dim) if they were made before, else (n, 0)

    def __len__(self) -> int:
        return len(self.chunk)

    @property
    def lengths(self) -> Rows:
        return self.proteins.lengths

    def take(self, rows: Rows) -> LabelledFrames:
        return LabelledFrames(
            self.ids.take(rows),
            self.proteins.take(rows),
            self.composition.take(rows),
            self.chunk[rows],
            self.record[rows],
            self.is_virus[rows],
            self.weight[rows],
            self.group[rows],
            self.vectors.take(rows),
        )


@dataclass(slots=True)
class FrameBlock:
    """Some thousand frames on their way to the files. Lists in step."""

    ids: list[str]
    proteins: list[str]
    bases: list[str]
    places: list[tuple[int, int, int]]  # numbers of chunk and record, size of the chunks

    @classmethod
    def empty(cls) -> FrameBlock:
        return cls([], [], [], [])


def translate_records(
    records: Iterable[FastaRecord], chunk_sizes: Sequence[int], code: GeneticCode
) -> Iterator[FrameBlock]:
    """Every frame of the records, cut at each of the chunk sizes, record by record."""
    block, n_chunks = FrameBlock.empty(), 0
    for number, record in enumerate(records):
        for size in chunk_sizes:
            chunks = list(chunk_record(record, size))
            place = {chunk.id: n_chunks + i for i, chunk in enumerate(chunks)}
            n_chunks += len(chunks)
            for orf in translate_six_frames(chunks, code):
                block.ids.append(orf.id)
                block.proteins.append(orf.protein)
                block.bases.append(frame_bases(orf, record.sequence))
                block.places.append((place[orf.chunk_id], number, size))
        if len(block.ids) >= _FRAMES_AT_ONCE:
            yield block
            block = FrameBlock.empty()
    yield block


def given_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """The weights of the manifest. (n,)"""
    return frames.weight


def balanced_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights that give a group the square root of its frames, and both classes the same.

    (n,) with mean 1. A few large genomes would otherwise stand for all of their
    class. None is over ``_MOST_WEIGHT`` by much: a group of one frame says little.
    """
    _, group, size = np.unique(frames.group, return_inverse=True, return_counts=True)
    weight = frames.weight / np.sqrt(size[group])
    for is_virus in (False, True):
        rows = frames.is_virus == is_virus
        if rows.any():
            weight[rows] = np.minimum(weight[rows] / weight[rows].mean(), _MOST_WEIGHT)
            weight[rows] *= len(frames) / 2 / weight[rows].sum()
    return weight.astype(np.float32)


def recipe_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights of frames that stand for drawing them by the scorer's recipe. (n,) with mean 1

    A group has a low power of its number of frames, times the manifest's weights; both labels have
    the same say, over all and in each bin of GC, as far as ``HEAVIEST`` allows.
    """
    side = 2 * frames.group + frames.is_virus
    _, group, size = np.unique(side, return_inverse=True, return_counts=True)
    weights = frames.weight * size[group] ** (BASES_POWER - 1)
    bins = np.digitize(_gc_of(frames), GC_EDGES)
    for label in (False, True):
        rows = frames.is_virus == label
        if rows.any():
            weights[rows] = np.minimum(weights[rows] / weights[rows].mean(), _MOST_WEIGHT)
            weights[rows] /= weights[rows].sum()
    for number in range(len(GC_EDGES) + 1):
        inside = bins == number
        total = weights[inside].sum()
        for label in (False, True):
            rows = inside & (frames.is_virus == label)
            if rows.any():
                weights[rows] *= min(HEAVIEST, total / 2 / weights[rows].sum())
    even: NDArray[np.float32] = (weights / weights.mean()).astype(np.float32)
    return even


def _gc_of(frames: LabelledFrames) -> Values:
    """The share of G and C in the codons of each frame. (n,)"""
    codons = np.arange(N_CODONS)
    n_gc = sum(np.isin(codons // 4**place % 4, (1, 2)).astype(np.float64) for place in range(3))
    blocks = [block[:, :N_CODONS] @ n_gc / 3 for block in frames.composition.blocks()]
    return np.concatenate(blocks) if blocks else np.empty(0)
