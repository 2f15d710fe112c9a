"""Frames become predictions: the head's work, first by shard and then by record.

A frame's score needs its vector and its bases. A shard has both, but for the bases of a frame with
letters that are no base: these are in its record alone, so its vector waits for that. A score does
not depend on the block that it is computed in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.head import Head
from virnucpro.ground.errors import InputError
from virnucpro.ground.records import PROTEIN, FastaRecord, Orf, Prediction
from virnucpro.sequences.composition import frame_bases

FRAMES_AT_ONCE = 2048

# the number of a ``ScoredFrames``, its first frame, and the one after the last
FrameRange = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredFrames:
    """The frames of a shard with their scores.

    Serialised, so that processes that only forward them do not parse them.
    """

    packed: bytes  # JSON of [id, chunk, record, start, end, strand, score, failure, row that waits]
    waiting: NDArray[np.float32]  # (n_waiting, dim), vectors of frames that wait for their bases


def score_frames(
    orfs: Sequence[Orf], vectors: NDArray[np.float32], reasons: Mapping[str, str], head: Head | None
) -> ScoredFrames:
    """The frames of a shard, with their scores where there is a head.

    ``reasons`` has those of the frames without a vector, by their ids; with a head the others have
    a row each, in their order. (n, dim)
    """
    if head is None:
        return ScoredFrames(_packed(orfs, {}, reasons, {}), vectors[[]])
    embedded = [orf for orf in orfs if orf.id not in reasons]
    rows_waiting = [i for i, orf in enumerate(embedded) if _needs_record(orf, head)]
    waiting = {embedded[i].id: place for place, i in enumerate(rows_waiting)}
    rows = [i for i, orf in enumerate(embedded) if orf.id not in waiting]
    ready = [embedded[i] for i in rows]
    bases = [orf.bases[: orf.end - orf.start] for orf in ready]
    is_protein = bool(ready) and ready[0].strand == PROTEIN
    values = _classify(head, vectors[rows] if waiting else vectors, bases, is_protein)
    scores = dict(zip((orf.id for orf in ready), values, strict=True))
    return ScoredFrames(_packed(orfs, scores, reasons, waiting), vectors[rows_waiting])


def _packed(
    orfs: Sequence[Orf],
    scores: Mapping[str, float],
    reasons: Mapping[str, str],
    waiting: Mapping[str, int],
) -> bytes:
    rows = [
        [*orf[:6], scores.get(orf.id), reasons.get(orf.id, ""), waiting.get(orf.id)] for orf in orfs
    ]
    return json.dumps(rows).encode()


def _needs_record(orf: Orf, head: Head) -> bool:
    """Whether the shard has fewer bases of a frame than its record, and the head reads them."""
    is_whole = 3 * len(orf.protein) == orf.end - orf.start
    return head.nucleotide is not None and orf.strand != PROTEIN and not is_whole


def _classify(
    head: Head, vectors: NDArray[np.float32], bases: Sequence[str], is_protein: bool = False
) -> list[float]:
    """The scores of frames that have a vector and their bases each, in blocks."""
    values: list[float] = []
    for first in range(0, len(bases), FRAMES_AT_ONCE):
        some = slice(first, first + FRAMES_AT_ONCE)
        if is_protein:
            values += head.classify(vectors[some]).tolist()
        else:
            values += head.classify_frames(vectors[some], bases[some]).tolist()
    return values


def predict_records(
    records: Sequence[FastaRecord],
    runs: Sequence[Sequence[FrameRange]],
    frames: Sequence[ScoredFrames],
    head: Head | None,
) -> list[list[Prediction]]:
    """The predictions of each record: one for each of its frames, which its runs name.

    Raises:
        InputError: a sequence is not the one that a frame was found in.
    """
    rows_of = [json.loads(each.packed) for each in frames]
    waiting: list[_Waiting] = []
    results = [
        _predict_record(record, runs_of_record, rows_of, waiting)
        for record, runs_of_record in zip(records, runs, strict=True)
    ]
    if head is not None and waiting:
        vectors = np.stack([frames[one.number].waiting[one.row] for one in waiting])
        scores = _classify(head, vectors, [one.bases for one in waiting])
        for one, score in zip(waiting, scores, strict=True):
            one.predictions[one.place] = Prediction(one.predictions[one.place].orf, score)
    return results


class _Waiting(NamedTuple):
    """A prediction without its score, and what the head reads for it."""

    predictions: list[Prediction]  # of the record
    place: int  # there
    number: int  # of the ``ScoredFrames`` with the vector
    row: int  # there
    bases: str


def _predict_record(
    record: FastaRecord,
    runs: Sequence[FrameRange],
    rows_of: Sequence[Sequence[Any]],
    waiting: list[_Waiting],
) -> list[Prediction]:
    """The predictions of a record; those that wait for its bases are put to ``waiting`` too."""
    predictions: list[Prediction] = []
    for number, first, end in runs:
        for *place, score, failure, row in rows_of[number][first:end]:
            orf = Orf._make((*place, "", "", None))
            if orf.strand != PROTEIN and orf.end > len(record.sequence):
                raise input_changed()
            if row is not None:
                bases = frame_bases(orf, record.sequence)
                waiting.append(_Waiting(predictions, len(predictions), number, row, bases))
            predictions.append(Prediction(orf, score, failure))
    return predictions


def input_changed() -> InputError:
    return InputError(
        "an input file changed while it was read",
        hint="wait until it is written completely, then start again with --force",
    )
