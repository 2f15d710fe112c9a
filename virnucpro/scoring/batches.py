"""Frames beside their records become predictions: the head's work, in blocks of many frames.

A frame's score needs its vector, which comes from the shards, and its bases, which are in its
record. However many records wait for their scores, and however long one is, memory holds one
block; a score does not depend on the block that it is computed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import InputError
from virnucpro.records import PROTEIN, FastaRecord, Orf, Prediction
from virnucpro.scoring.head import Head
from virnucpro.sequences.composition import frame_bases

FRAMES_AT_ONCE = 2048
_LETTERS_AT_ONCE = 1_000_000  # bases of the records that wait for the scores of their frames

Predicted = tuple[FastaRecord, list[Prediction]]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An ORF with its vector, (dim,); without one, it failed or no score is needed."""

    orf: Orf
    vector: NDArray[np.float32] | None
    failure: str = ""


def predict_records(
    records: Iterable[tuple[FastaRecord, Iterable[Frame]]], head: Head | None
) -> Iterator[Predicted]:
    """Each record, in order, with a prediction for each of its frames, in their order.

    The frames of a record are taken before the next record is.
    """
    block = _Block(head)
    block_records: list[Predicted] = []
    n_letters = 0
    for record, frames in records:
        predictions: list[Prediction] = []
        block_records.append((record, predictions))
        n_letters += len(record.header) + len(record.sequence)
        for frame in frames:
            block.add(frame, record.sequence, predictions)
        if not block.n_frames or n_letters >= _LETTERS_AT_ONCE:
            block.score()
            yield from block_records
            block_records, n_letters = [], 0
    block.score()
    yield from block_records


def input_changed() -> InputError:
    return InputError(
        "an input file changed while it was read",
        hint="let it be written to its end, then start again with --force",
    )


class _Block:
    """Frames that wait for their scores, each with the list that its prediction goes to."""

    def __init__(self, head: Head | None) -> None:
        self._head = head
        self._frames: list[Frame] = []
        self._bases: list[str] = []
        self._targets: list[list[Prediction]] = []

    @property
    def n_frames(self) -> int:
        return len(self._frames)

    def add(self, frame: Frame, sequence: str, target: list[Prediction]) -> None:
        """Add a frame of a record with this sequence; a block that is full is scored.

        Raises:
            InputError: the sequence is not the one that the frame was found in.
        """
        if frame.orf.strand != PROTEIN and frame.orf.end > len(sequence):
            raise input_changed()
        self._frames.append(frame)
        self._bases.append(frame_bases(frame.orf, sequence))
        self._targets.append(target)
        if len(self._frames) == FRAMES_AT_ONCE:
            self.score()

    def score(self) -> None:
        """Hand out the predictions, in order, and be empty again."""
        scores = self._scores()
        for i, (frame, target) in enumerate(zip(self._frames, self._targets, strict=True)):
            target.append(Prediction(frame.orf, scores.get(i), frame.failure))
        self._frames, self._bases, self._targets = [], [], []

    def _scores(self) -> dict[int, float]:
        """The score of each frame that has a vector, by its place in the block."""
        places, vectors = [], []
        for i, frame in enumerate(self._frames):
            if frame.vector is not None:
                places.append(i)
                vectors.append(frame.vector)
        if self._head is None or not places:
            return {}
        stacked = np.stack(vectors)
        if self._frames[0].orf.strand == PROTEIN:
            values = self._head.classify(stacked)
        else:
            values = self._head.classify_frames(stacked, [self._bases[i] for i in places])
        return dict(zip(places, values.tolist(), strict=True))
