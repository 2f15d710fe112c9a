"""The feature store: where the vectors of a run are, what they belong to, and how they are read.

Each encoder of a run has a store of its own. A store has a file for every shard, of the ORFs that
were embedded. While the files are read, in order, it makes a second one of a shard with copies, of
what their originals have: so whoever opens the files finds every ORF, and an index over them needs
no entry for each copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import EncoderSpec
from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.files import writing
from virnucpro.ground.log import LOGGER, printable
from virnucpro.ground.records import SHARD_NAME, Embeddings, Failure, Orf, Shard
from virnucpro.ground.tree import Tree
from virnucpro.run.feature_file import (
    Attributes,
    find_vectors,
    read_embeddings,
    read_label,
    read_rows,
    read_vectors,
    write_embeddings,
)
from virnucpro.run.shards import read_shard

OnShard = Callable[[int, int], None]  # hears how many shards were looked at, and of how many
_COPIES = "_copies"  # ends the stem of a file of copies
_FILE = re.compile(rf"({SHARD_NAME})({_COPIES})?\.h5")
_EXPORT = re.compile(rf"{SHARD_NAME}(?:{_COPIES})?\.(?:npz|pt|parquet)")
_FOLDER = re.compile(r"\w+-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """The vectors that one encoder makes of the shards of a run."""

    tree: Tree  # the run folder
    folder: Path
    encoder: EncoderSpec
    fingerprint: str  # hash of the recipe

    def path(self, shard: Shard, copies: int = 0) -> Path:
        """The file of a shard; with ``copies=1``, that of its copies."""
        return self.folder / f"{shard.name}{_COPIES * copies}.h5"

    def partial(self, shard: Shard, owner: str) -> Path:
        """The partial file of a shard that killed its worker, kept for the owner's next attempt."""
        return self.folder / f".{shard.name}.{owner}.partial"

    @property
    def index(self) -> Path:
        """The file over all files of the store, next to its folder."""
        return index_of(self.folder)

    def attributes(self, shard: Shard, copies: int = 0) -> Attributes:
        """The attributes of a file of a shard; see ``path``."""
        encoder = self.encoder
        return {
            "model": encoder.model,
            "layer": encoder.layer,
            "pooling": encoder.pooling,
            "precision": encoder.precision,
            "fingerprint": self.fingerprint,
            "copies": copies,
            "shard_sha256": shard.sha256,
        }

    def write(self, shard: Shard, embeddings: Embeddings, copies: int = 0) -> None:
        """Write a file of a shard, which appears when it is whole; see ``path``."""
        path, attributes = self.path(shard, copies), self.attributes(shard, copies)
        write_embeddings(path, embeddings, attributes, self.tree, self.encoder.store)

    def delete_partials(self, owner: str) -> None:
        """Delete the partial files of a process."""
        self.tree.delete_files(self.folder, lambda name: name.endswith(f".{owner}.partial"))

    def make_folder(self) -> None:
        """Make the folder that the files go to, in the run folder, which must be there."""
        self.tree.make_folder(self.folder)

    def files(self, shards: Sequence[Shard] = ()) -> Iterator[tuple[Path, Attributes]]:
        """All files, by shard and with copies, and the attributes that are known of them."""
        hashes = {shard.name: shard.sha256 for shard in shards}
        for match in sorted(self._matches(), key=lambda match: (int(match[1]), match[0])):
            attributes: dict[str, str | int] = {"fingerprint": self.fingerprint}
            if digest := hashes.get(match[1]):
                attributes["shard_sha256"] = digest
            yield self.folder / match[0], attributes

    def read_files(self) -> Iterator[tuple[Path, int, Embeddings]]:
        """Each file, verified, with the byte at which its vectors begin, and its content.

        Raises:
            FeatureFileError: a file is not whole, or of another recipe.
        """
        for path, attributes in self.files():
            yield path, find_vectors(path), read_embeddings(path, attributes, self.encoder.dim)

    def names_done(self) -> set[str]:
        """The names of the shards that have a file, by one look at the folder.

        A file that exists was whole when it was written.
        """
        return {match[1] for match in self._matches() if not match[2]}

    def _matches(self) -> list[re.Match[str]]:
        """The names of the files: of the shard, and whether it is of copies."""
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            return [match for entry in entries if (match := _FILE.fullmatch(entry.name))]

    def find_pending(
        self, shards: Sequence[Shard], replaced: frozenset[str], on_shard: OnShard
    ) -> list[Shard]:
        """The shards that are owed; what was replaced is, too, while a copy of it is."""
        pending = dict[int, Shard]()
        for i, shard in enumerate(shards):
            on_shard(i, len(shards))
            if self.owes(shard, replaced):
                pending[i] = shard
        with_copies = [shard for shard in shards if shard.n_orfs > shard.n_embedded]
        if replaced and any(self.owes(shard, replaced, copies=1) for shard in with_copies):
            others = ((i, shard) for i, shard in enumerate(shards) if i not in pending)
            pending |= {i: shard for i, shard in others if self._failed_in(shard)}
        return [pending[i] for i in sorted(pending)]

    def owes(self, shard: Shard, replaced: frozenset[str], copies: int = 0) -> bool:
        """Whether a shard has no complete file, or one with failures that were not ``replaced``.

        Files are known by their labels: what is damaged within is found when it is read. Nothing is
        deleted: somebody else may be about to write the file.
        """
        failed = self._failed_in(shard, copies)
        return failed is None or not failed <= replaced

    def _failed_in(self, shard: Shard, copies: int = 0) -> set[str] | None:
        """The records with failures in a file; None without a complete one."""
        path = self.path(shard, copies)
        if not path.exists():
            return None
        try:
            return set(read_label(path, self.attributes(shard, copies)).failed_records)
        except FeatureFileError as error:
            LOGGER.warning("%s; it is made again", error)
            return None

    def find_damaged(
        self, shards: Sequence[Shard], on_file: OnShard = lambda *_: None
    ) -> Iterator[tuple[Path, FeatureFileError]]:
        """The damaged files, read to the last bit, also against the shards if given."""
        files = list(self.files(shards))
        for i, (path, attributes) in enumerate(files):
            on_file(i, len(files))
            try:
                read_embeddings(path, attributes, self.encoder.dim)
            except FeatureFileError as error:
                yield path, error

    def discard_damaged(self, shards: Sequence[Shard], on_shard: OnShard) -> None:
        """Delete the files that are not as they were written, to the last bit."""
        for path, error in self.find_damaged(shards, on_shard):
            LOGGER.warning("%s; it is made again", error)
            with writing(path):
                self.tree.delete(path)


def open_stores(
    features: Path, encoders: Sequence[EncoderSpec], fingerprint: str
) -> tuple[FeatureStore, ...]:
    """A store for each encoder: the first in the folder itself, the others in folders in it."""
    tree = Tree(features.parent)
    return tuple(
        FeatureStore(tree, features / _name(encoder) if i else features, encoder, fingerprint)
        for i, encoder in enumerate(encoders)
    )


def is_feature_file(name: str) -> bool:
    """Whether a file of this name holds vectors of a shard, or of its copies."""
    return _FILE.fullmatch(name) is not None


def is_export(path: Path) -> bool:
    """Whether a file in the folder of a store is one of a shard in another format."""
    return _EXPORT.fullmatch(path.name) is not None


def index_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.h5")


def _name(encoder: EncoderSpec) -> str:
    """A folder name that no other encoder of a run has."""
    digest = hashlib.sha256(json.dumps(encoder.facts, sort_keys=True).encode()).hexdigest()
    return f"{encoder.family}-{digest[:16]}"


def inner_names(features: Path) -> list[str]:
    """The names of what is in a folder of features in the place of a further encoder's store."""
    if not features.is_dir():
        return []
    return [path.name for path in features.iterdir() if _FOLDER.fullmatch(path.name)]


@dataclass(frozen=True, slots=True, eq=False)
class ShardFeatures:
    """The content of a shard's files, and the reasons of the ORFs that have no vector."""

    files: tuple[tuple[Path, Embeddings], ...]
    reasons: Mapping[str, str]  # by the ids of the ORFs without a vector

    def rows(self, orf_ids: Sequence[str]) -> NDArray[np.float32]:
        """The vectors of ORFs that have one each. n -> (n, dim)"""
        assert not any(embeddings.per_residue for _, embeddings in self.files), "one row each"
        ids = [orf_id for _, embeddings in self.files for orf_id in embeddings.ids]
        if not orf_ids:
            return _NO_ROWS
        vectors = np.concatenate([each.vectors for _, each in self.files if each.ids])
        if list(orf_ids) == ids:
            return vectors
        place = {orf_id: i for i, orf_id in enumerate(ids)}
        return vectors[[place[orf_id] for orf_id in orf_ids]]


class FeatureReader:
    """Reads the shards of one generation, in any order: it knows where each original is."""

    def __init__(self, store: FeatureStore, shards: Sequence[Shard]) -> None:
        self._store = store
        self._shards = [shard for shard in shards if shard.n_embedded]
        self._firsts = [0, *accumulate(shard.n_embedded for shard in self._shards)]
        self._sources: dict[int, _Source] = {}  # by the index of the shard

    def read(
        self, shard: Shard, orfs: Sequence[Orf], lost: Mapping[int, str], n_verified: int
    ) -> ShardFeatures:
        """The features of a shard with these ORFs; a copy has those of its original.

        ``lost`` has the reasons of the shards without a file, by index. The files of the first
        ``n_verified`` shards were verified; another that has an original is verified here. The
        file of copies is made of the originals every time, so an old one that does not agree is
        replaced.

        Raises:
            FeatureFileError: a file is missing or not whole, or its rows are in another order.
        """
        files, reasons = [], {}
        embedded = [orf for orf in orfs if orf.copy_of is None]
        if loss := lost.get(shard.index, ""):
            reasons = {orf.id: loss for orf in embedded}
        else:
            files.append((self._store.path(shard), self._read_embedded(shard, embedded)))
        if copies := [orf for orf in orfs if orf.copy_of is not None]:
            embeddings = self._copy_to(copies, lost, n_verified)
            self._store.write(shard, embeddings, copies=1)
            files.append((self._store.path(shard, copies=1), embeddings))
        for _, embeddings in files:
            reasons |= {failure.orf_id: failure.reason for failure in embeddings.failures}
        return ShardFeatures(tuple(files), reasons)

    def _read_embedded(self, shard: Shard, orfs: Sequence[Orf]) -> Embeddings:
        store = self._store
        path = store.path(shard)
        embeddings = read_embeddings(path, store.attributes(shard), store.encoder.dim)
        reasons = {failure.orf_id: failure.reason for failure in embeddings.failures}
        if embeddings.ids != tuple(orf.id for orf in orfs if orf.id not in reasons):
            raise FeatureFileError(f"{printable(path)} does not hold its ORFs in their order")
        failed = {i: reasons[orf.id] for i, orf in enumerate(orfs) if orf.id in reasons}
        self._sources[shard.index] = _Source(path, failed)
        return embeddings

    def _copy_to(
        self, copies: Sequence[Orf], lost: Mapping[int, str], n_verified: int
    ) -> Embeddings:
        """The rows, or the failures, of copies."""
        rows: dict[int, NDArray[np.float32]] = {}
        reasons: dict[int, str] = {}
        ordinals = sorted({orf.copy_of for orf in copies if orf.copy_of is not None})
        for number, group in groupby(
            ordinals, key=lambda ordinal: bisect_right(self._firsts, ordinal) - 1
        ):
            first, source = self._firsts[number], self._source(number, lost, n_verified)
            places = [ordinal - first for ordinal in group]
            found = source.rows(places, self._store.encoder)
            rows |= {first + place: row for place, row in found.items()}
            reasons |= {first + i: source.reasons[i] for i in places if i in source.reasons}
        encoder = self._store.encoder
        delivered = [(orf, rows[orf.copy_of]) for orf in copies if orf.copy_of in rows]
        return Embeddings(
            ids=tuple(orf.id for orf, _ in delivered),
            lengths=np.array([len(orf.text(encoder.reads)) for orf, _ in delivered], np.int32),
            vectors=np.concatenate([row for _, row in delivered] or [_NO_ROWS]),
            per_residue=encoder.per_residue,
            failures=tuple(
                Failure(orf.id, orf.record_id, reasons[orf.copy_of])
                for orf in copies
                if orf.copy_of in reasons
            ),
        )

    def _source(self, number: int, lost: Mapping[int, str], n_verified: int) -> _Source:
        """The place of the originals in a shard, which another process may have read."""
        shard = self._shards[number]
        path, attributes = self._store.path(shard), self._store.attributes(shard)
        if loss := lost.get(shard.index):
            return _Source(path, dict.fromkeys(range(shard.n_embedded), loss))
        if shard.index not in self._sources:
            is_verified = shard.index < n_verified
            if is_verified and not read_label(path, attributes).failed_records:
                self._sources[shard.index] = _Source(path, {})
            else:
                embedded = [orf for orf in read_shard(shard) if orf.copy_of is None]
                self._read_embedded(shard, embedded)
        return self._sources[shard.index]


@dataclass(frozen=True, eq=False)
class _Source:
    """A feature file that has originals of copies; it was verified."""

    path: Path
    reasons: dict[int, str]  # place in the shard -> reason of the failure

    @cached_property
    def start(self) -> int:
        """The byte at which its vectors begin."""
        return find_vectors(self.path)

    def rows(self, places: Sequence[int], encoder: EncoderSpec) -> dict[int, NDArray[np.float32]]:
        """The rows of some ORFs, by their places in the shard; none of those that failed."""
        places = [place for place in places if place not in self.reasons]
        # the file leaves out what failed
        rows = [place - sum(failed < place for failed in self.reasons) for place in places]
        if not rows:
            return {}
        if encoder.per_residue:
            found = read_rows(self.path, rows)
        else:
            found = read_vectors(self.path, self.start, encoder, rows)
        return dict(zip(places, found, strict=True))


_NO_ROWS = np.empty((0, 0), dtype=np.float32)
