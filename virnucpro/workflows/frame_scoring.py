"""Score frames where their vectors are, and read the scores later.

A worker has the vectors of a shard in memory. It applies the head and writes scores and the places
of the frames, so a reader needs neither the vectors nor the shard. Only a frame that waits for its
bases (see ``table_tasks``) keeps its vector in the file. The file has no score for a copy.

In a run without vectors, a reader takes the score, the failure or the vector of the original: the
plan of such a run makes a frame a copy only if the head reads the same in both. A run that keeps
its vectors deletes the file at its end. The file names the feature files that have the vectors it
is made from. Copies are scored when their vectors are copied, because their bases may differ.
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
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.numeric import from_bfloat16, to_bfloat16
from virnucpro.core.types import Embeddings, Orf, Shard
from virnucpro.store.feature_file import Checksums, open_reader
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.frame_scores import Columns, FrameScoreStore
from virnucpro.store.shard_files import read_shard
from virnucpro.store.shard_store import ShardStore
from virnucpro.viral.head import Head
from virnucpro.workflows.frame_predictions import score_frames
from virnucpro.workflows.shard_frames import Frame, ShardFrames

_FEATURES = "features"  # column with the checksums of kept feature files
_TEXTS = ("ids", "chunk_ids", "record_ids", "strands")
_NUMBERS = ("starts", "ends", "scores", "vector_rows", "vectors")


@dataclass(frozen=True, slots=True)
class FrameScorer:
    """Applies a head to the vectors of a shard, in the worker; see ``engine.base.ShardSink``."""

    store: FrameScoreStore
    head: Head
    feature_stores: tuple[FeatureStore, ...] = ()  # one per encoder if the run keeps vectors

    @property
    def shard_stores(self) -> tuple[ShardStore, ...]:
        return self.feature_stores or (self.store,)

    def write(self, shard: Shard, orfs: Sequence[Orf], embeddings: Sequence[Embeddings]) -> None:
        """Write the feature files of a shard, if they are kept, and the scores of its frames.

        Raises:
            OutputError, StorageError: a file cannot be written.
        """
        columns = self._write_features(shard, embeddings) if self.feature_stores else {}
        failures = [failure for result in reversed(embeddings) for failure in result.failures]
        reasons = {failure.orf_id: failure.reason for failure in failures}
        originals = [orf for orf in orfs if orf.copy_of is None]
        ids = [orf.id for orf in originals if orf.id not in reasons]
        frames = score_frames(originals, self._select(ids, embeddings), reasons, self.head)
        if len(originals) < len(orfs):
            frames = _insert_copies(frames, orfs)
        copied = [-1 if orf.copy_of is None else orf.copy_of for orf in orfs]
        columns |= {**_to_columns(frames), "originals": np.array(copied, dtype=np.int64)}
        failed_records = list(dict.fromkeys(failure.record_id for failure in failures))
        self.store.write(shard, columns, failed_records)

    def _write_features(
        self, shard: Shard, embeddings: Sequence[Embeddings]
    ) -> dict[str, NDArray[np.generic]]:
        """Write the feature files of a shard, and return the column that names them."""
        checksums = [
            store.write(shard, result)
            for store, result in zip(self.feature_stores, embeddings, strict=True)
        ]
        self.store.make_folder()
        return {_FEATURES: np.frombuffer(json.dumps(checksums).encode(), dtype=np.uint8)}

    def _select(self, ids: Sequence[str], embeddings: Sequence[Embeddings]) -> NDArray[np.float32]:
        """Return the concatenated vectors of ORFs, as they are kept. n -> (n, dim)"""
        vectors = [result.select_vectors(ids) for result in embeddings]
        for i, store in enumerate(self.feature_stores):
            if store.encoder.store == "bfloat16":
                vectors[i] = from_bfloat16(to_bfloat16(vectors[i]))
        return vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)


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
class StoredShard:
    """The frames of a shard, as its file has them."""

    frames: ShardFrames  # copies have no score
    originals: NDArray[np.int64]  # (n,) ordinal of each copy's original, or -1
    embedded: NDArray[np.int64]  # places of the frames that are not copies
    features: tuple[Checksums, ...] = ()  # of the feature files, if they are kept


@dataclass(slots=True, eq=False)
class FrameScoreReader:
    """Reads the frames of the shards of a slice, and finds the original of each copy."""

    store: FrameScoreStore
    shards: Sequence[Shard]
    _loaded: dict[int, StoredShard] = field(default_factory=dict)  # by shard index

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

    def read_originals(self, shard: Shard, features: tuple[Checksums, ...]) -> ShardFrames:
        """Read the frames of a shard. Copies have no score.

        Args:
            features: of the feature files. Scores from other files are read again.

        Raises:
            FeatureFileError: the file is missing or corrupt.
        """
        stored = self._load(shard, {})
        if stored.features != features:
            del self._loaded[shard.index]
            stored = self._load(shard, {})
        return stored.frames

    def find(self, shard: Shard) -> StoredShard | None:
        """Read the file of a shard, if it has one. A damaged file is deleted."""
        path = self.store.path(shard)
        if not path.exists():
            return None
        try:
            return self._load(shard, {})
        except FeatureFileError as error:
            LOGGER.warning("%s; its vectors will be read instead", error)
            self.store.tree.delete(path)
            return None

    def _fill(
        self, stored: StoredShard, places: Sequence[int], lost_shards: Mapping[int, str]
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

    def _load(self, shard: Shard, lost_shards: Mapping[int, str]) -> StoredShard:
        n_loaded_at_once = 32
        if loss := lost_shards.get(shard.index):
            return _lost(shard, loss)
        if shard.index not in self._loaded:
            while len(self._loaded) >= n_loaded_at_once:
                self._loaded.pop(next(iter(self._loaded)))
            self._loaded[shard.index] = self._read(shard)
        return self._loaded[shard.index]

    def _read(self, shard: Shard) -> StoredShard:
        columns = self.store.read(shard)
        path = self.store.path(shard)
        with open_reader(path):
            frames = _from_columns(columns)
            originals = columns["originals"]
            facts = parse_json(columns[_FEATURES].tobytes()) if _FEATURES in columns else []
            features = tuple(Checksums(label, file) for label, file in facts)
        if (frames.n_frames, len(originals)) != (shard.n_orfs, shard.n_orfs):
            raise FeatureFileError(f"{printable(path)} has {frames.n_frames} frames")
        return StoredShard(frames, originals, np.flatnonzero(originals < 0), features)


def _lost(shard: Shard, reason: str) -> StoredShard:
    """Return the frames of a shard that has no file."""
    orfs = read_shard(shard)
    originals = np.array([-1 if orf.copy_of is None else orf.copy_of for orf in orfs], np.int64)
    frames = ShardFrames.pack(
        Frame.from_orf(orf, None, reason if orf.copy_of is None else "", None) for orf in orfs
    )
    return StoredShard(frames, originals, np.flatnonzero(originals < 0))
