"""Score the frames of a shard by a head, and collect the predictions of each record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from math import isnan

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.types import PROTEIN, Orf, Records
from virnucpro.viral.head import Head
from virnucpro.viral.types import Prediction
from virnucpro.workflows.shard_frames import Frame, FrameRange, ShardFrames


def score_frames(
    orfs: Sequence[Orf], vectors: NDArray[np.float32], reasons: Mapping[str, str], head: Head
) -> ShardFrames:
    """Score the frames in a shard.

    Args:
        vectors: (n, dim) float32, one row per frame that has a vector, in order.
        reasons: id -> why a frame has no vector.
    """
    embedded = [orf for orf in orfs if orf.id not in reasons]
    pending_rows = [row for row, orf in enumerate(embedded) if _needs_record(orf, head)]
    waiting_rows = {embedded[row].id: position for position, row in enumerate(pending_rows)}
    rows = [row for row, orf in enumerate(embedded) if orf.id not in waiting_rows]
    ready_orfs = [embedded[row] for row in rows]
    bases = [orf.bases[: orf.end - orf.start] for orf in ready_orfs]
    is_protein = bool(ready_orfs) and ready_orfs[0].strand == PROTEIN
    values = _classify(head, vectors[rows] if waiting_rows else vectors, bases, is_protein)
    scores = dict(zip((orf.id for orf in ready_orfs), values, strict=True))
    frames = (
        Frame.from_orf(orf, scores.get(orf.id), reasons.get(orf.id, ""), waiting_rows.get(orf.id))
        for orf in orfs
    )
    return ShardFrames.pack(frames, vectors[pending_rows])


def _needs_record(orf: Orf, head: Head) -> bool:
    """Return True if the head reads bases and the shard lacks some bases in this frame."""
    is_complete = 3 * len(orf.protein) == orf.end - orf.start
    return head.nucleotide is not None and orf.strand != PROTEIN and not is_complete


def _classify(
    head: Head, vectors: NDArray[np.float32], bases: Sequence[str], is_protein: bool = False
) -> list[float]:
    """Score frames that have vectors and bases, block by block."""
    frames_at_once = 2048
    values: list[float] = []
    for first in range(0, len(bases), frames_at_once):
        rows = slice(first, first + frames_at_once)
        if is_protein:
            values += head.classify(vectors[rows]).tolist()
        else:
            values += head.classify_frames(vectors[rows], bases[rows]).tolist()
    return values


def predict_records(
    records: Records,
    ranges: Sequence[Sequence[FrameRange]],
    frames: Sequence[ShardFrames],
    head: Head | None,
) -> list[list[Prediction]]:
    """Return each record's predictions, one per frame."""
    firsts = [0] * len(frames)  # first frame of each shard that belongs to these records
    ends = [0] * len(frames)
    for shard, first, end in chain.from_iterable(ranges):
        firsts[shard] = min(firsts[shard], first) if ends[shard] else first
        ends[shard] = max(ends[shard], end)
    unpacked = list(map(_unpack, frames, firsts, ends))
    predictions: list[list[Prediction]] = []
    for record_ranges in ranges:
        record_predictions: list[Prediction] = []
        for shard, first, end in record_ranges:
            n_before = firsts[shard]
            record_predictions += unpacked[shard][first - n_before : end - n_before]
        predictions.append(record_predictions)
    if any((packed.vector_rows >= 0).any() for packed in frames):
        _score_waiting(records, ranges, frames, head, predictions)
    return predictions


def _unpack(frames: ShardFrames, first: int, end: int) -> list[Prediction]:
    """Return predictions for the frames ``first:end`` in a shard."""
    rows = slice(first, end)
    orfs = map(
        Orf,
        frames.ids.split("\n")[rows],
        frames.chunk_ids.split("\n")[rows],
        frames.record_ids.split("\n")[rows],
        frames.starts[rows].tolist(),
        frames.ends[rows].tolist(),
        frames.strands[rows],
        repeat(""),  # without letters
    )
    scores = [None if isnan(score) else score for score in frames.scores[rows].tolist()]
    failures = [""] * len(scores)
    for position, reason in frames.failures.items():
        if first <= position < end:
            failures[position - first] = reason
    return list(map(Prediction, orfs, scores, failures))


def _score_waiting(
    records: Records,
    ranges: Sequence[Sequence[FrameRange]],
    frames: Sequence[ShardFrames],
    head: Head | None,
    predictions: Sequence[list[Prediction]],
) -> None:
    """Score the vectors that waited for bases, in the predictions of each record."""
    waiting = list(_find_waiting(ranges, frames))
    if not waiting:
        return
    assert head, "frames wait only for a head that reads bases"
    bases = [
        predictions[index][position].orf.coding_sequence(records.sequences[index])
        for index, position, _ in waiting
    ]
    values = _classify(head, np.stack([vector for _, _, vector in waiting]), bases)
    for (index, position, _), value in zip(waiting, values, strict=True):
        prediction = predictions[index][position]
        predictions[index][position] = prediction._replace(virus_score=value)


def _find_waiting(
    ranges: Sequence[Sequence[FrameRange]], frames: Sequence[ShardFrames]
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Yield record index, position among its frames, and vector, of each frame that waits."""
    for index, record_ranges in enumerate(ranges):
        n_before = 0
        for shard, first, end in record_ranges:
            rows = frames[shard].vector_rows[first:end]
            for position in np.flatnonzero(rows >= 0).tolist():
                yield index, n_before + position, frames[shard].vectors[rows[position]]
            n_before += end - first
