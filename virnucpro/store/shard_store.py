"""Find the files that finished shards of a run have left: which shards are done, and which files
are damaged.

A shard is done when it has its file. The file is a feature file, or if a run keeps no vectors, a
file of scores.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from virnucpro.core.atomic_io import storage_errors
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Shard
from virnucpro.store.feature_file import Attributes, Checksums, read_label

OnShard = Callable[[int, int], None]  # called with the number of checked shards and the total


class ShardStore(ABC):
    """One file per shard in a folder of the run."""

    __slots__ = ()

    tree: SafeDir  # the run folder
    folder: Path
    fingerprint: str  # hash of the recipe

    @abstractmethod
    def path(self, shard: Shard) -> Path:
        """Return the file of a shard."""

    @abstractmethod
    def expected(self, shard: Shard) -> Attributes:
        """Return the attributes that a shard's file must have."""

    @abstractmethod
    def match(self, name: str) -> re.Match[str] | None:
        """Match the name of a file in this store.

        Group 1 is the shard's name. Group 2 is empty, unless the file is an additional one, which
        does not complete the shard.
        """

    @abstractmethod
    def verify(self, path: Path, attributes: Attributes) -> Checksums:
        """Read and verify every bit of a file.

        Raises:
            FeatureFileError: it is missing or corrupt, or has other attributes.
        """

    @abstractmethod
    def may_need_failed(self, shard: Shard, replaced: frozenset[str]) -> bool:
        """Return True if a shard's copies may need an original that failed in a replaced record."""

    def make_folder(self) -> None:
        """Create the store's folder in the run folder, which must exist."""
        self.tree.make_folder(self.folder)

    def files(self, shards: Sequence[Shard] = ()) -> Iterator[tuple[Path, Attributes]]:
        """Yield all files by shard, each with its known attributes."""
        hashes = {shard.name: shard.sha256 for shard in shards}
        for match in sorted(self._matches(), key=lambda match: (int(match[1]), match[0])):
            attributes: dict[str, str | int] = {"fingerprint": self.fingerprint}
            if digest := hashes.get(match[1]):
                attributes["shard_sha256"] = digest
            yield self.folder / match[0], attributes

    def completed_names(self) -> set[str]:
        """List the folder once, and return the names of shards that have a file.

        Files appear atomically, so an existing file was complete when it was written.
        """
        return {match[1] for match in self._matches() if not match[2]}

    def _matches(self) -> list[re.Match[str]]:
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            return [match for entry in entries if (match := self.match(entry.name))]

    def find_pending(
        self, shards: Sequence[Shard], replaced: frozenset[str], on_shard: OnShard
    ) -> list[Shard]:
        """Return the shards still to embed.

        If records were replaced and copies may need their originals, shards with failures are
        included.
        """
        pending = dict[int, Shard]()
        for i, shard in enumerate(shards):
            on_shard(i, len(shards))
            if self.is_pending(shard, replaced):
                pending[i] = shard
        with_copies = [shard for shard in shards if shard.n_orfs > shard.n_embedded]
        if replaced and any(self.may_need_failed(shard, replaced) for shard in with_copies):
            for i, shard in enumerate(shards):
                if i not in pending and self.failed_in(self.path(shard), self.expected(shard)):
                    pending[i] = shard
        return [pending[i] for i in sorted(pending)]

    def is_pending(self, shard: Shard, replaced: frozenset[str]) -> bool:
        """Return True if a shard has no complete file, or a file with failures not in ``replaced``.

        Only labels are checked, because corrupt content is found when it is read. Nothing is
        deleted, because another process may be about to write the file.
        """
        failed = self.failed_in(self.path(shard), self.expected(shard))
        return failed is None or not failed <= replaced

    def failed_in(self, path: Path, attributes: Attributes) -> set[str] | None:
        """Return the records with failures in a file, or None without a complete file."""
        if not path.exists():
            return None
        try:
            return set(read_label(path, attributes).failed_records)
        except FeatureFileError as error:
            LOGGER.warning("%s; it will be recomputed", error)
            return None

    def find_damaged(
        self,
        shards: Sequence[Shard],
        on_file: OnShard = lambda *_: None,
        hashes: Mapping[Path, str] = MappingProxyType({}),
    ) -> Iterator[tuple[Path, FeatureFileError]]:
        """Read all files, and yield the corrupt ones.

        Args:
            shards: check the attributes of these shards.
            on_file: called with the number of checked files and the total.
            hashes: check the checksums of these files.
        """
        remedy = with_options(
            "delete it, then repeat the command of the run with {resume} to make it again"
        )
        files = list(self.files(shards))
        for i, (path, attributes) in enumerate(files):
            on_file(i, len(files))
            try:
                checksums = self.verify(path, attributes)
            except FeatureFileError as error:
                yield path, error
                continue
            if hashes.get(path, checksums.file) != checksums.file:
                problem = "is a complete feature file, but run.json has another checksum"
                yield path, FeatureFileError(f"{printable(path)} {problem}", remedy)

    def discard_damaged(self, shards: Sequence[Shard], on_shard: OnShard) -> None:
        """Read all files and delete the corrupt ones."""
        for path, error in self.find_damaged(shards, on_shard):
            LOGGER.warning("%s; it will be recomputed", error)
            with storage_errors(path):
                self.tree.delete(path)
