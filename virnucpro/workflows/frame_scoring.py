"""Score frames where their vectors are, and read the scores later, in a run without vectors.

A worker has the vectors of a shard in memory. It applies the head and writes scores and the places
of the frames, so a reader needs neither the vectors nor the shard. Only a frame that waits for its
bases (see ``table_tasks``) keeps its vector in the file. The file has no score for a copy. A reader
takes the score, the failure or the vector of its original: the plan of such a run makes a frame a
copy only if the head reads the same in both.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import parse_json
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import printable
from virnucpro.core.types import Embeddings, Orf, Shard
from virnucpro.store.feature_file import open_reader
from virnucpro.store.frame_scores import Columns, FrameScoreStore
from virnucpro.store.shard_files import read_shard
from virnucpro.viral.head import Head
from virnucpro.workflows.frame_predictions import score_frames
from virnucpro.workflows.shard_frames import Frame, ShardFrames

_TEXTS = ("ids", "chunk_ids", "record_ids", "strands")
_NUMBERS = ("starts", "ends", "scores", "vector_rows", "vectors")


@dataclass(frozen=True, slots=True)
class FrameScorer:
    """Applies a head to the vectors of a shard, in the worker; see ``engine.base.ShardSink``."""

    store: FrameScoreStore
    head: Head

    def write(self, shard: Shard, orfs: Sequence[Orf], embeddings: Sequence[Embeddings]) -> None:
        """Score the frames of a shard, and write their file.

        Raises:
            OutputError, StorageError: the file cannot be written.
        """
        failures = [failure for result in reversed(embeddings) for failure in result.failures]
        reasons = {failure.orf_id: failure.reason for failure in failures}
        originals = [orf for orf in orfs if orf.copy_of is None]
        ids = [orf.id for orf in originals if orf.id not in reasons]
        vectors = [result.select_vectors(ids) for result in embeddings]
        combined = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
        frames = score_frames(originals, combined, reasons, self.head)
        if len(originals) < len(orfs):
            frames = _insert_copies(frames, orfs)
        copied = [-1 if orf.copy_of is None else orf.copy_of for orf in orfs]
        columns = {**_to_columns(frames), "originals": np.array(copied, dtype=np.int64)}
        failed_records = list(dict.fromkeys(failure.record_id for failure in failures))
        self.store.write(shard, columns, failed_records)


def _insert_copies(originals: ShardFrames, orfs: Sequence[Orf]) -> ShardFrames:
    """Add the copies among the ORFs to the frames of the others, without scores."""
    frames = iter(originals.unpack())
    all_frames = [
        next(frames) if orf.copy_of is None else Frame.from_orf(orf, None, "", None) for orf in orfs
    ]
    return ShardFrames.pack(all_frames, originals.vectors)


def _to_columns(frames: ShardFrames) -> dict[str, NDArray[np.generic]]:
    columns: dict[str, NDArray[np.generic]] = {}
    for name in _TEXTS:
        text = getattr(frames, name).encode("utf-8", "surrogateescape")
        columns[name] = np.frombuffer(text, dtype=np.uint8)
    for name in _NUMBERS:
        columns[name] = np.ascontiguousarray(getattr(frames, name))
    failures = json.dumps(list(frames.failures.items())).encode()
    columns["failures"] = np.frombuffer(failures, dtype=np.uint8)
    return columns


def _from_columns(columns: Columns) -> ShardFrames:
    """Restore the frames of a file.

    Raises:
        ValueError, LookupError, TypeError: the columns are damaged.
    """
    values: dict[str, Any] = {name: columns[name] for name in _NUMBERS}
    for name in _TEXTS:
        values[name] = columns[name].tobytes().decode("utf-8", "surrogateescape")
    failures = dict(parse_json(columns["failures"].tobytes()))
    return ShardFrames(failures=failures, **values)


@dataclass(slots=True, eq=False)
class _StoredShard:
    """The frames of a shard, as its file has them."""

    frames: ShardFrames  # copies have no score
    originals: NDArray[np.int64]  # (n,) ordinal of each copy's original, or -1
    embedded: NDArray[np.int64]  # places of the frames that are not copies


@dataclass(slots=True, eq=False)
class FrameScoreReader:
    """Reads the frames of the shards of a slice, and finds the original of each copy."""

    store: FrameScoreStore
    shards: Sequence[Shard]
    _loaded: dict[int, _StoredShard] = field(default_factory=dict)  # by shard index

    def read(self, shard: Shard, lost_shards: Mapping[int, str]) -> ShardFrames:
        """Read the frames of a shard, copies with the score of their original.

        Args:
            lost_shards: index of each shard without a file -> reason.

        Raises:
            FeatureFileError: a file is missing or corrupt.
            StorageError: a shard without a file has changed since it was written.
        """
        stored = self._load(shard, lost_shards)
        places = np.flatnonzero(stored.originals >= 0).tolist()
        return self._fill(stored, places, lost_shards) if places else stored.frames

    def _fill(
        self, stored: _StoredShard, places: Sequence[int], lost_shards: Mapping[int, str]
    ) -> ShardFrames:
        """Return the frames with what the originals of copies have."""
        frames = stored.frames
        scores = frames.scores.copy()
        vector_rows = frames.vector_rows.copy()
        failures = dict(frames.failures)
        vectors = [frames.vectors]
        n_vectors = len(frames.vectors)
        for place in places:
            source, source_place = self._find(int(stored.originals[place]), lost_shards)
            scores[place] = source.scores[source_place]
            if reason := source.failures.get(source_place):
                failures[place] = reason
            row = int(source.vector_rows[source_place])
            if row >= 0:
                vectors.append(source.vectors[row : row + 1])
                vector_rows[place] = n_vectors
                n_vectors += 1
        return ShardFrames(
            ids=frames.ids,
            chunk_ids=frames.chunk_ids,
            record_ids=frames.record_ids,
            starts=frames.starts,
            ends=frames.ends,
            strands=frames.strands,
            scores=scores,
            failures=failures,
            vector_rows=vector_rows,
            vectors=np.concatenate([rows for rows in vectors if len(rows)] or [frames.vectors]),
        )

    def _find(self, ordinal: int, lost_shards: Mapping[int, str]) -> tuple[ShardFrames, int]:
        """Return the frames with an original, and its place in them."""
        with_originals = [shard for shard in self.shards if shard.n_embedded]
        firsts = [0, *accumulate(shard.n_embedded for shard in with_originals)]
        number = bisect_right(firsts, ordinal) - 1
        stored = self._load(with_originals[number], lost_shards)
        return stored.frames, int(stored.embedded[ordinal - firsts[number]])

    def _load(self, shard: Shard, lost_shards: Mapping[int, str]) -> _StoredShard:
        n_loaded_at_once = 32
        if loss := lost_shards.get(shard.index):
            return _lost(shard, loss)
        if shard.index not in self._loaded:
            while len(self._loaded) >= n_loaded_at_once:
                self._loaded.pop(next(iter(self._loaded)))
            self._loaded[shard.index] = self._read(shard)
        return self._loaded[shard.index]

    def _read(self, shard: Shard) -> _StoredShard:
        columns = self.store.read(shard)
        path = self.store.path(shard)
        with open_reader(path):
            frames = _from_columns(columns)
            originals = columns["originals"]
        if (frames.n_frames, len(originals)) != (shard.n_orfs, shard.n_orfs):
            raise FeatureFileError(f"{printable(path)} has {frames.n_frames} frames")
        return _StoredShard(frames, originals, np.flatnonzero(originals < 0))


def _lost(shard: Shard, reason: str) -> _StoredShard:
    """Return the frames of a shard that has no file."""
    orfs = read_shard(shard)
    originals = np.array([-1 if orf.copy_of is None else orf.copy_of for orf in orfs], np.int64)
    frames = ShardFrames.pack(
        Frame.from_orf(orf, None, reason if orf.copy_of is None else "", None) for orf in orfs
    )
    return _StoredShard(frames, originals, np.flatnonzero(originals < 0))
