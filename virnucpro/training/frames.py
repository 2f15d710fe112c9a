"""Labelled records as frames: chunked and translated as ``predict`` does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.labelled.records import LabelledRecord
from virnucpro.records import FastaRecord
from virnucpro.sequences.composition import frame_bases, frame_composition
from virnucpro.sequences.translate import chunk_record, translate_six_frames

_FRAMES_AT_ONCE = 4096
MOST_WEIGHT = 10.0  # of a frame, where the mean is 1


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFrames:
    """Stop-free frames and what is known of each; all rows are in step.

    A frame has its record's label. ``chunk`` and ``record`` number the chunks and the records.
    Ids are unique where there is one size of chunks.
    """

    ids: tuple[str, ...]
    proteins: tuple[str, ...]
    composition: NDArray[np.float32]  # (n, N_FEATURES)
    chunk: NDArray[np.int64]
    record: NDArray[np.int64]
    is_virus: NDArray[np.bool_]
    weight: NDArray[np.float32]
    group: tuple[str, ...]
    vectors: NDArray[np.float32]  # (n, dim) if they were made before, else (n, 0)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(protein) for protein in self.proteins], dtype=np.int64)

    def take(self, rows: NDArray[np.int64]) -> LabelledFrames:
        return LabelledFrames(
            tuple(self.ids[i] for i in rows),
            tuple(self.proteins[i] for i in rows),
            self.composition[rows],
            self.chunk[rows],
            self.record[rows],
            self.is_virus[rows],
            self.weight[rows],
            tuple(self.group[i] for i in rows),
            self.vectors[rows],
        )


def collect_frames(
    records: Iterable[tuple[LabelledRecord, FastaRecord]],
    chunk_sizes: Sequence[int],
    on_record: Callable[[int], None] = lambda _: None,
) -> LabelledFrames:
    """Every frame of the records, cut at each of the chunk sizes."""
    rows: list[tuple[str, str, int, int, bool, float, str]] = []
    bases: list[str] = []
    compositions = [frame_composition([])]
    n_chunks = 0
    for number, (known, record) in enumerate(records):
        for size in chunk_sizes:
            chunks = list(chunk_record(record, size))
            place = {chunk.id: n_chunks + i for i, chunk in enumerate(chunks)}
            n_chunks += len(chunks)
            for orf in translate_six_frames(chunks):
                chunk = place[orf.chunk_id]
                facts = (known.is_virus, known.weight, known.group)
                rows.append((orf.id, orf.protein, chunk, number, *facts))
                bases.append(frame_bases(orf, record.sequence))
        if len(bases) >= _FRAMES_AT_ONCE:
            compositions.append(frame_composition(bases))
            bases.clear()
        on_record(number + 1)
    compositions.append(frame_composition(bases))
    columns = zip(*rows, strict=True) if rows else [()] * 7
    ids, proteins, chunk_of, record_of, is_virus, weight, group = columns
    return LabelledFrames(
        ids,
        proteins,
        np.concatenate(compositions),
        np.array(chunk_of, dtype=np.int64),
        np.array(record_of, dtype=np.int64),
        np.array(is_virus, dtype=np.bool_),
        np.array(weight, dtype=np.float32),
        group,
        np.empty((len(ids), 0), dtype=np.float32),
    )


def given_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Those of the manifest. (n,)"""
    return frames.weight


def balanced_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights that give a group the square root of its frames, and both classes the same.

    (n,) with mean 1. A few large genomes would otherwise stand for all of their
    class. None is over ``MOST_WEIGHT`` by much: a group of one frame says little.
    """
    _, group, size = np.unique(np.array(frames.group), return_inverse=True, return_counts=True)
    weight = frames.weight / np.sqrt(size[group])
    for is_virus in (False, True):
        rows = frames.is_virus == is_virus
        if rows.any():
            weight[rows] = np.minimum(weight[rows] / weight[rows].mean(), MOST_WEIGHT)
            weight[rows] *= len(frames) / 2 / weight[rows].sum()
    return weight.astype(np.float32)
