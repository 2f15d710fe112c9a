"""Store the scores of a shard's frames, in a run that keeps no vectors.

A file has columns: the place of each frame in its record, its score, and what a reader needs for
copies and for frames that wait for their bases. Like a feature file it has a label at its end, and
it exists only when it is complete. The recipe in the label includes the head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import numpy as tensors

from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import SHARD_NAME, Shard
from virnucpro.store.feature_file import (
    Attributes,
    Checksums,
    checksummed_label,
    open_reader,
    read_checksummed,
    verify,
)
from virnucpro.store.shard_store import ShardStore

FRAME_SCORES = ".frames"  # suffix
_FILE = rf"({SHARD_NAME})()\{FRAME_SCORES}"  # compiled by ``re`` at the first use

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class FrameScoreStore(ShardStore):
    """The frame scores of a run, one file per shard."""

    tree: SafeDir  # the run folder
    folder: Path
    fingerprint: str  # hash of the recipe

    def path(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}{FRAME_SCORES}"

    def expected(self, shard: Shard) -> Attributes:
        file_format = 1  # increase it when readers need other columns
        return {
            "format": file_format,
            "fingerprint": self.fingerprint,
            "shard_sha256": shard.sha256,
        }

    def match(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(_FILE, name)

    def verify(self, path: Path, attributes: Attributes) -> Checksums:
        return verify(path, attributes)

    def may_need_failed(self, shard: Shard, replaced: frozenset[str]) -> bool:
        """Return True: the file of a shard does not say which copies have a failed original."""
        return True

    def write(self, shard: Shard, columns: Columns, failed_records: Sequence[str]) -> None:
        """Write a shard's file atomically.

        Args:
            failed_records: records with an original that has no vector.

        Raises:
            OutputError, StorageError: the file cannot be written.
        """
        content = tensors.save(dict(columns))
        label = checksummed_label(content, self.expected(shard), failed_records)
        self.tree.write_file(self.path(shard), content + label)

    def read(self, shard: Shard) -> Columns:
        """Read a shard's file, and verify every bit.

        Raises:
            FeatureFileError: it is missing or corrupt, or belongs to another recipe or shard.
            OutputError, StorageError: it cannot be read now.
        """
        path = self.path(shard)
        _, content = read_checksummed(path, self.expected(shard))
        with open_reader(path):
            columns: Columns = tensors.load(content)
        return columns
