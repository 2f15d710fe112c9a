"""Score the frames of a shard by a head, and collect the predictions of each record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.types import PROTEIN, FastaRecord, Orf
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
    records: Sequence[FastaRecord],
    ranges: Sequence[Sequence[FrameRange]],
    frames: Sequence[ShardFrames],
    head: Head | None,
) -> list[list[Prediction]]:
    """Return each record's predictions, one per frame."""
    shard_frames = [packed.unpack() for packed in frames]
    frames_by_record: list[list[tuple[int, Frame]]] = []
    for record_ranges in ranges:
        record_frames: list[tuple[int, Frame]] = []
        for frame_range in record_ranges:
            selected = shard_frames[frame_range.shard][frame_range.first : frame_range.end]
            record_frames += [(frame_range.shard, frame) for frame in selected]
        frames_by_record.append(record_frames)
    waiting = list(_pending_records(records, frames_by_record))
    scores = _score_pending(waiting, frames, head) if waiting else {}
    predictions: list[list[Prediction]] = []
    for record_frames in frames_by_record:
        predictions.append([_to_prediction(shard, frame, scores) for shard, frame in record_frames])
    return predictions


def _score_pending(
    waiting: Sequence[tuple[int, int, str]], frames: Sequence[ShardFrames], head: Head | None
) -> dict[tuple[int, int], float]:
    """Score vectors that waited for their bases.

    Returns:
        (shard, vector row) -> score.
    """
    assert head, "frames wait only for a head that reads bases"
    vectors = np.stack([frames[shard].vectors[row] for shard, row, _ in waiting])
    values = _classify(head, vectors, [bases for _, _, bases in waiting])
    keys = ((shard, row) for shard, row, _ in waiting)
    return dict(zip(keys, values, strict=True))


def _to_prediction(shard: int, frame: Frame, scores: Mapping[tuple[int, int], float]) -> Prediction:
    score = frame.score if frame.vector_row is None else scores[shard, frame.vector_row]
    return Prediction(frame.orf, score, frame.failure)


def _pending_records(
    records: Sequence[FastaRecord], frames: Sequence[Sequence[tuple[int, Frame]]]
) -> Iterator[tuple[int, int, str]]:
    """Yield shard, vector row and bases for each vector that waits for bases."""
    for record, record_frames in zip(records, frames, strict=True):
        for shard, frame in record_frames:
            if frame.vector_row is not None:
                yield shard, frame.vector_row, frame.orf.coding_sequence(record.sequence)
