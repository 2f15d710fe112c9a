"""The feature store: where the vectors of a run are, whose they are, and how they are read.

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
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.config import FOLLOWS, EncoderSpec
from virnucpro.errors import FeatureFileError
from virnucpro.files import writing
from virnucpro.log import LOGGER, printable
from virnucpro.records import Embeddings, Failure, Orf, Shard
from virnucpro.run.feature_file import (
    Attributes,
    find_vectors,
    read_embeddings,
    read_label,
    read_rows,
    read_vectors,
    update_embeddings,
    write_embeddings,
)

OnShard = Callable[[int, int], None]  # hears how many shards were looked at, and of how many
_COPIES = "_copies"  # ends the stem of a file of copies
_FILE = re.compile(rf"\d{{6}}({_COPIES})?\.h5")
_FOLDER = re.compile(r"\w+-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """The vectors that one encoder makes of the shards of a run."""

    folder: Path
    encoder: EncoderSpec
    fingerprint: str  # hash of the recipe

    def path(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}.h5"

    def path_of_copies(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}{_COPIES}.h5"

    def partial(self, shard: Shard, owner: str) -> Path:
        """The partial file of a shard that killed its worker, kept for the owner's next attempt."""
        return self.folder / f".{shard.name}.{owner}.partial"

    @property
    def index(self) -> Path:
        """The file over all files of the store, beside its folder."""
        return index_of(self.folder)

    def attributes(self, shard: Shard) -> Attributes:
        """The attributes of the file of a shard."""
        encoder = self.encoder
        return {
            "model": encoder.model,
            "layer": encoder.layer,
            "pooling": encoder.pooling,
            "precision": encoder.precision,
            "fingerprint": self.fingerprint,
            "copies": 0,
            "shard_sha256": shard.sha256,
        }

    def attributes_of_copies(self, shard: Shard) -> Attributes:
        """The attributes of a shard's file of copies."""
        return {**self.attributes(shard), "copies": 1}

    def write(self, shard: Shard, embeddings: Embeddings) -> None:
        """Write the file of a shard, which appears when it is whole."""
        write_embeddings(self.path(shard), embeddings, self.attributes(shard))

    def make_folder(self) -> None:
        """Make the folder that the files go to, in the run folder, which must be there."""
        self.folder.mkdir(exist_ok=True)

    def reader(self, lost: Mapping[int, str]) -> FeatureReader:
        """A reader of a generation's shards; ``lost`` has the reasons of those without a file."""
        return FeatureReader(self, lost)

    def files(self, shards: Sequence[Shard] = ()) -> Iterator[tuple[Path, Attributes]]:
        """All files, copies included, with the attributes that are known of them."""
        hashes = {shard.name: shard.sha256 for shard in shards}
        for path in sorted(self.folder.glob("*.h5")):
            if _FILE.fullmatch(path.name):
                attributes: dict[str, str | int] = {"fingerprint": self.fingerprint}
                if digest := hashes.get(path.stem.removesuffix(_COPIES)):
                    attributes["shard_sha256"] = digest
                yield path, attributes

    def read_files(self) -> Iterator[Embeddings]:
        """The content of all files, one at a time.

        Raises:
            FeatureFileError: a file is not whole, or of another recipe.
        """
        for path, attributes in self.files():
            yield read_embeddings(path, attributes, self.encoder.dim)

    def names_done(self) -> set[str]:
        """The names of the shards that have a file, by one look at the folder.

        A file that exists was whole when it was written.
        """
        if not self.folder.is_dir():
            return set()
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if _FILE.fullmatch(entry.name)]
        return {name.removesuffix(".h5") for name in names if not name.endswith(f"{_COPIES}.h5")}

    def failed_records(self, shard: Shard) -> set[str] | None:
        """The records of which a shard's file holds failures; None without a complete file."""
        return _failed_records(self.path(shard), self.attributes(shard))

    def find_pending(
        self, shards: Sequence[Shard], replaced: frozenset[str], on_shard: OnShard
    ) -> list[Shard]:
        """The shards without a file, or whose failed records were not all ``replaced``.

        Files are known by their labels: what is damaged within is found when it is read. What was
        replaced is still owed if a copy of it is.
        """
        pending, settled = [], []
        for i, shard in enumerate(shards):
            on_shard(i, len(shards))
            failed = self.failed_records(shard)
            if failed is None or not failed <= replaced:
                pending.append(shard)
            elif failed:
                settled.append(shard)
        if settled:
            with_copies = [shard for shard in shards if shard.n_orfs > shard.n_embedded]
            of_copies = [
                _failed_records(self.path_of_copies(shard), self.attributes_of_copies(shard))
                for shard in with_copies
            ]
            if any(failed is None or not failed <= replaced for failed in of_copies):
                pending = sorted([*pending, *settled], key=lambda shard: shard.index)
        return pending

    def owes(self, shard: Shard, replaced: frozenset[str]) -> bool:
        """Whether a shard has no complete file, or one with failures that were not ``replaced``.

        Nothing is deleted: somebody else may be about to write the file.
        """
        try:
            label = read_label(self.path(shard), self.attributes(shard))
        except FeatureFileError:
            return True
        return not replaced.issuperset(label.failed_records)

    def find_damaged(self, shards: Sequence[Shard]) -> list[FeatureFileError]:
        """The errors of all files, read to the last bit, also against the shards if given."""
        errors = []
        for path, attributes in self.files(shards):
            try:
                read_embeddings(path, attributes)
            except FeatureFileError as error:
                errors.append(error)
        return errors

    def discard_damaged(self, shards: Sequence[Shard], on_shard: OnShard) -> None:
        """Delete the files that are not as they were written, to the last bit."""
        for i, shard in enumerate(shards):
            on_shard(i, len(shards))
            path = self.path(shard)
            try:
                if path.exists():
                    read_embeddings(path, self.attributes(shard), self.encoder.dim)
            except FeatureFileError as error:
                _discard(path, error)


def open_stores(
    features: Path, encoders: Sequence[EncoderSpec], fingerprint: str
) -> tuple[FeatureStore, ...]:
    """A store for each encoder: the first in the folder itself, the others in folders in it."""
    return tuple(
        FeatureStore(features / _name(encoder) if i else features, encoder, fingerprint)
        for i, encoder in enumerate(encoders)
    )


def index_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.h5")


def _name(encoder: EncoderSpec) -> str:
    """A folder name that tells this encoder from any other of a run."""
    facts = {name: value for name, value in asdict(encoder).items() if name not in FOLLOWS}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{encoder.family}-{digest[:16]}"


def inner_names(features: Path) -> list[str]:
    """The names of what is in a folder of features in the place of a further encoder's store."""
    if not features.is_dir():
        return []
    return [path.name for path in features.iterdir() if _FOLDER.fullmatch(path.name)]


def _failed_records(path: Path, attributes: Attributes) -> set[str] | None:
    if not path.exists():
        return None
    try:
        return set(read_label(path, attributes).failed_records)
    except FeatureFileError as error:
        _discard(path, error)
        return None


def _discard(path: Path, error: FeatureFileError) -> None:
    LOGGER.warning("%s; it is made again", error)
    with writing(path):
        path.unlink()


@dataclass(frozen=True, slots=True, eq=False)
class ShardFeatures:
    """The content of a shard's files, and the reasons of the ORFs that have no vector."""

    files: tuple[tuple[Path, Embeddings], ...]
    reasons: Mapping[str, str]  # by the ids of the ORFs without a vector

    @property
    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """A row for each ORF that has one, by its id; not if there is one per residue."""
        rows: dict[str, NDArray[np.float32]] = {}
        for _, embeddings in self.files:
            assert not embeddings.per_residue, "an ORF has one row"
            rows |= zip(embeddings.ids, embeddings.vectors, strict=True)
        return rows


class FeatureReader:
    """Reads the shards of one generation, in order, and so knows where each original is."""

    def __init__(self, store: FeatureStore, lost: Mapping[int, str]) -> None:
        self._store, self._lost = store, lost
        self._sources: list[_Source] = []
        self._starts: dict[Path, int] = {}  # see ``find_vectors``
        self._n_embedded = 0

    def read(self, shard: Shard, orfs: Sequence[Orf]) -> ShardFeatures:
        """The features of the next shard, whose ORFs are given; a copy has those of its original.

        The file of copies is made of the originals every time, so an old one that does not agree is
        replaced.

        Raises:
            FeatureFileError: a file is missing or not whole, or its rows are in another order.
        """
        files, reasons = [], {}
        embedded = [orf for orf in orfs if orf.copy_of is None]
        if loss := self._lost.get(shard.index, ""):
            self._add(_Source(self._n_embedded, None, {}, loss), len(embedded))
            reasons = {orf.id: loss for orf in embedded}
        else:
            files.append((self._store.path(shard), self._read_embedded(shard, embedded)))
        if copies := [orf for orf in orfs if orf.copy_of is not None]:
            path, embeddings = self._store.path_of_copies(shard), self._copy_to(copies)
            update_embeddings(path, embeddings, self._store.attributes_of_copies(shard))
            files.append((path, embeddings))
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
        first = self._n_embedded
        failed = {first + i: reasons[orf.id] for i, orf in enumerate(orfs) if orf.id in reasons}
        self._add(_Source(first, path, failed), len(orfs))
        return embeddings

    def _add(self, source: _Source, n_embedded: int) -> None:
        if n_embedded:
            self._sources.append(source)
            self._n_embedded += n_embedded

    def _copy_to(self, copies: Sequence[Orf]) -> Embeddings:
        """The rows, or the failures, of copies whose originals were read."""
        rows: dict[int, NDArray[np.float32]] = {}
        reasons: dict[int, str] = {}
        ordinals = sorted({orf.copy_of for orf in copies if orf.copy_of is not None})
        for source, group in groupby(ordinals, key=self._source_of):
            with_rows = []
            for ordinal in group:
                if reason := source.reason(ordinal):
                    reasons[ordinal] = reason
                else:
                    with_rows.append(ordinal)
            if with_rows and source.path:
                places = [source.place(ordinal) for ordinal in with_rows]
                rows.update(zip(with_rows, self._rows_at(source.path, places), strict=True))
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

    def _rows_at(self, path: Path, places: Sequence[int]) -> list[NDArray[np.float32]]:
        """The rows of some ORFs of a file that was read."""
        encoder = self._store.encoder
        if encoder.per_residue:
            return read_rows(path, places)
        if path not in self._starts:
            self._starts[path] = find_vectors(path)
        return read_vectors(path, self._starts[path], encoder.dim, places)

    def _source_of(self, ordinal: int) -> _Source:
        return self._sources[bisect_right(self._sources, ordinal, key=lambda s: s.first) - 1]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The place of a shard's embedded ORFs: a file with its failures, or a loss."""

    first: int  # ordinal of the first ORF
    path: Path | None  # None: the shard was lost
    reasons: dict[int, str]  # ordinal -> reason of the failure
    loss: str = ""

    def reason(self, ordinal: int) -> str:
        return self.loss or self.reasons.get(ordinal, "")

    def place(self, ordinal: int) -> int:
        """The row in the feature file, which leaves out what failed."""
        return ordinal - self.first - sum(failed < ordinal for failed in self.reasons)


_NO_ROWS = np.empty((0, 0), dtype=np.float32)
