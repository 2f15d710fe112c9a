"""Find the frames of shards that workers have scored, in a run that keeps its vectors."""

from __future__ import annotations

import numpy as np

from virnucpro.store.feature_file import read_label_digest, verify
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.shard_files import read_shard
from virnucpro.workflows.frame_scoring import FrameScoreReader, StoredShard
from virnucpro.workflows.shard_frames import ShardFrames
from virnucpro.workflows.table_tasks import FilledFrames, RowBuilder, ScoredShard, ShardTask


def find_scored(
    task: ShardTask, builder: RowBuilder, reader: FrameScoreReader
) -> ScoredShard | None:
    """Return the frames of a shard in a run that keeps vectors, if a worker has stored the scores.

    The vectors of copies are copied and scored here. No other vector is read, unless an earlier
    start wrote its file.

    Returns:
        None if the vectors must be read: the worker was killed before it stored the scores, or an
        ORF has no vector, or the feature file has changed since.

    Raises:
        FeatureFileError: a feature file is missing or corrupt.
        StorageError: the shard has changed since it was written.
    """
    shard = task.shard
    if shard.index in task.lost or not shard.n_embedded:
        return None
    stored = reader.find(shard)
    if stored is None or stored.frames.failures:
        return None
    files = _list_files(task, builder, stored)
    if files is None:
        return None
    positions = np.flatnonzero(stored.originals >= 0)
    copies = ShardFrames.pack([])
    if len(positions):
        orfs = read_shard(shard)
        features = [
            feature_reader.read_copies(shard, orfs, task.lost, task.n_verified)
            for feature_reader in builder.readers_of(task.slice_index)
        ]
        reasons: dict[str, str] = {}
        for store_files, store, shard_features in zip(files, builder.stores, features, strict=True):
            store_files += IndexPart.from_shard(store, shard_features, (), "h5")
        for shard_features in reversed(features):
            reasons |= shard_features.reasons
        copied = [orf for orf in orfs if orf.copy_of is not None]
        copies = builder.pack_frames(copied, features, reasons)
    frames = FilledFrames(task.slice_index, shard, stored.features, copies, positions)
    return ScoredShard(frames, files)


def _list_files(
    task: ShardTask, builder: RowBuilder, stored: StoredShard
) -> list[list[IndexPart]] | None:
    """Describe the feature files that stored scores are made from, one per encoder.

    Returns:
        None if a file is not the one that was scored.

    Raises:
        FeatureFileError: a file is missing, or the file of an earlier start is corrupt.
    """
    shard = task.shard
    files = []
    for store, checksums in zip(builder.stores, stored.features, strict=True):
        path = store.path(shard)
        if read_label_digest(path) != checksums.label:
            return None
        if shard.index >= task.n_verified:
            verify(path, store.expected(shard))
        n_vectors = shard.n_embedded
        dim = store.encoder.dim
        files.append([IndexPart.from_complete_file(path.name, checksums, dim, n_vectors)])
    return files
