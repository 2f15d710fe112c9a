"""The frames of a shard as columns, with their scores or what they lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.types import Orf

NO_VECTORS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


class Frame(NamedTuple):
    """A frame in a shard: its location, and its score or what it lacks."""

    id: str
    chunk_id: str
    record_id: str
    start: int
    end: int
    strand: str
    score: float | None  # None: no vector, waiting for bases, or not scored
    failure: str = ""  # why it has no vector
    vector_row: int | None = None  # row in ``ShardFrames.vectors``, if it waits for its bases

    @classmethod
    def from_orf(cls, orf: Orf, score: float | None, failure: str, vector_row: int | None) -> Frame:
        location = (orf.id, orf.chunk_id, orf.record_id, orf.start, orf.end, orf.strand)
        return cls(*location, score, failure, vector_row)

    @property
    def orf(self) -> Orf:
        """The frame without its letters."""
        location = self[:6]
        return Orf(*location, protein="")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardFrames:
    """A shard's frames as columns, which a process can pass on without reading them."""

    ids: str  # one per line, as ids contain no white space
    chunk_ids: str
    record_ids: str
    starts: NDArray[np.int64]  # (n,)
    ends: NDArray[np.int64]  # (n,)
    strands: str  # one letter each
    scores: NDArray[np.float64]  # (n,), NaN: None
    failures: Mapping[int, str]  # by position in the shard
    vector_rows: NDArray[np.int64]  # (n,), -1: None
    vectors: NDArray[np.float32]  # (n_waiting, dim)

    @classmethod
    def pack(
        cls, frames: Iterable[Frame], vectors: NDArray[np.float32] = NO_VECTORS
    ) -> ShardFrames:
        columns = list(zip(*frames, strict=True)) or [()] * len(Frame._fields)
        ids, chunk_ids, record_ids, starts, ends, strands, scores, failures, rows = columns
        return cls(
            ids="\n".join(ids),
            chunk_ids="\n".join(chunk_ids),
            record_ids="\n".join(record_ids),
            starts=np.array(starts, dtype=np.int64),
            ends=np.array(ends, dtype=np.int64),
            strands="".join(strands),
            scores=np.array(scores, dtype=np.float64),
            failures={position: reason for position, reason in enumerate(failures) if reason},
            vector_rows=np.array([-1 if row is None else row for row in rows], dtype=np.int64),
            vectors=vectors,
        )

    @property
    def n_frames(self) -> int:
        return len(self.starts)

    def load(self, _: object, /) -> ShardFrames:
        """Return these frames: see ``table_tasks.FrameSource``."""
        return self

    def unpack(self) -> list[Frame]:
        if not self.n_frames:
            return []
        columns = (
            self.ids.split("\n"),
            self.chunk_ids.split("\n"),
            self.record_ids.split("\n"),
            self.starts.tolist(),
            self.ends.tolist(),
            self.strands,
            [None if isnan(score) else score for score in self.scores.tolist()],
            [self.failures.get(position, "") for position in range(self.n_frames)],
            [None if row < 0 else row for row in self.vector_rows.tolist()],
        )
        return list(map(Frame, *columns))

    def fill(self, positions: NDArray[np.int64], frames: ShardFrames) -> ShardFrames:
        """Return the frames with scores, failures and vectors from others at these positions."""
        scores = self.scores.copy()
        scores[positions] = frames.scores
        vector_rows = self.vector_rows.copy()
        is_waiting = frames.vector_rows >= 0
        vector_rows[positions] = np.where(is_waiting, frames.vector_rows + len(self.vectors), -1)
        places = positions.tolist()
        more_failures = {places[i]: reason for i, reason in frames.failures.items()}
        vectors = [rows for rows in (self.vectors, frames.vectors) if len(rows)]
        return replace(
            self,
            scores=scores,
            failures={**self.failures, **more_failures},
            vector_rows=vector_rows,
            vectors=np.concatenate(vectors) if vectors else self.vectors,
        )

    def find_runs(self, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yield the record id, first and end of each run of frames in a range."""
        for record_id, run in groupby(self.record_ids.split("\n")[first:end]):
            n_frames = len(list(run))
            yield record_id, first, first + n_frames
            first += n_frames


class FrameRange(NamedTuple):
    """A record's neighbouring frames in one shard of a block."""

    shard: int  # index among the block's shards
    first: int
    end: int
