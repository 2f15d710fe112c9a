"""The scores of a run without a model, in files: one for each block of records.

A file holds what every output is made of but the cut and the letters of the records: so another cut
needs no scoring, and no input. Like a feature file it has a label at its end and exists only when
it is whole. One that is damaged, or of other records or another scorer, counts as missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.pieces import ScoredRecord
from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.files import parse_json, writing
from virnucpro.ground.records import FastaRecord, Region, Track, shard_name
from virnucpro.ground.tree import Tree
from virnucpro.run.feature_file import Label, read_label, sealed_label
from virnucpro.scorer.score import PieceScores, RecordScore

SUFFIX = ".scores"
_FORMAT = 1  # raise it when the same records and scorer would give another content
# what numpy, zipfile and JSON raise on a file that is not as it should be
_DAMAGE = (
    *(OSError, LookupError, ValueError, TypeError, EOFError, StopIteration),
    *(zipfile.BadZipFile, zlib.error),
)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ScoreStore:
    """The score files of a run, by the places of their blocks."""

    tree: Tree
    folder: Path
    fingerprint: str  # of the recipe
    finder: str  # hash of what finds regions, "" without
    unknown: ClassVar = " "  # stands for each letter of a record whose sequence is not here

    @property
    def _attributes(self) -> dict[str, str | int]:
        return {"format": _FORMAT, "fingerprint": self.fingerprint}

    def make_folder(self) -> None:
        """Make the folder of the files, unless it is there."""
        with writing(self.folder):
            self.tree.make_folder(self.folder)

    def path(self, index: int) -> Path:
        return self.folder / f"{shard_name(index)}{SUFFIX}"

    def write(self, index: int, scored: Sequence[ScoredRecord], work: int) -> None:
        """Write one file; its label says how much work it was.

        Raises:
            OutputError, StorageError: the disk refuses it.
        """
        records = [one.record for one in scored]
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **_to_arrays(scored))
        attributes: dict[str, str | int] = {
            **self._attributes,
            "records": _key_of(records),
            "finder": self.finder,
            "n_letters": sum(len(record.sequence) for record in records),
            "work": work,
        }
        with self.tree.replacing(self.path(index)) as out:
            out.write(content.getbuffer())
            out.write(sealed_label(content.getvalue(), attributes))

    def read(self, index: int, records: Sequence[FastaRecord]) -> tuple[list[ScoredRecord], bool]:
        """The scores of these records, none if they are not there.

        Beside them: whether they were searched for regions as they are now.
        """
        return self._read(self.path(index), {"records": _key_of(records)}, records)

    def read_blind(self, path: Path) -> list[ScoredRecord]:
        """The scores of a file, if it is whole; ``unknown`` is every letter of a record."""
        return self._read(path, {}, None)[0]

    def _read(
        self, path: Path, more: Mapping[str, str], records: Sequence[FastaRecord] | None
    ) -> tuple[list[ScoredRecord], bool]:
        try:
            label = read_label(path, {**self._attributes, **more})
            content = path.read_bytes()[: label.n_bytes]
            if hashlib.sha256(content).hexdigest() != label.sha256:
                return [], False
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                scored = _from_arrays(arrays, records)
        except (FeatureFileError, *_DAMAGE):
            return [], False
        return scored, label.attributes.get("finder") == self.finder

    def files(self) -> list[Path]:
        """Those that are there, by their places."""
        files = [path for path in self.folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()]
        return sorted(files, key=lambda path: int(path.stem))

    def labels(self) -> Iterator[tuple[Path, Label]]:
        """The files of this recipe, each with its label."""
        for path in self.files():
            try:
                label = read_label(path, self._attributes)
            except FeatureFileError:
                continue
            yield path, label

    def keep(self, n_blocks: int) -> None:
        """Delete the files behind the last block."""
        for path in self.files():
            if int(path.stem) >= n_blocks:
                self.tree.delete(path)


def _key_of(records: Iterable[FastaRecord]) -> str:
    """A hash of all that the records hold."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record._replace(sequence="")).encode())
        digest.update(record.sequence.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def _to_arrays(scored: Sequence[ScoredRecord]) -> dict[str, NDArray[Any]]:
    scores = [one.score for one in scored if one.score is not None]
    pieces = [score.pieces for score in scores]
    tracks = [track for one in scored if one.found for _, track in one.found]
    text = json.dumps(list(map(_text_of, scored)))
    return {
        "text": np.frombuffer(text.encode(), dtype=np.uint8),
        "log_odds": np.array([score.log_odds for score in scores], dtype=np.float64),
        **_columns("piece", pieces, ("start", "n_bases", "log_odds")),
        **_columns("track", tracks, Track._fields),
    }


def _text_of(one: ScoredRecord) -> list[object]:
    """All of a record that is no table, but its letters."""
    fields = [*one.record._replace(sequence=""), len(one.record.sequence)]
    regions = [regions for regions, _ in one.found] if one.found else None
    return [fields, one.status, one.note, one.score is not None, regions]


def _columns(name: str, each: Sequence[object], fields: Sequence[str]) -> Arrays:
    """The columns of several tables, one behind the other, and the length of each table."""
    lengths = np.array([len(getattr(one, fields[0])) for one in each], dtype=np.int64)
    columns = {}
    for field in fields:
        dtype = np.float64 if field in ("log_odds", "posterior") else np.int64
        values = [np.empty(0, dtype), *(getattr(one, field) for one in each)]
        columns[f"{name}_{field}"] = np.concatenate(values)
    return {f"n_{name}": lengths, **columns}


def _tables(name: str, arrays: Arrays, fields: Sequence[str]) -> Iterator[list[NDArray[Any]]]:
    """The columns of each table of ``_columns``."""
    columns = [arrays[f"{name}_{field}"] for field in fields]
    first = 0
    for n in arrays[f"n_{name}"].tolist():
        if not 0 <= n <= len(columns[0]) - first:
            raise ValueError("a table is longer than its columns")
        yield [column[first : first + n] for column in columns]
        first += n


def _from_arrays(arrays: Arrays, records: Sequence[FastaRecord] | None) -> list[ScoredRecord]:
    """
    Raises:
        ValueError, LookupError, TypeError: they are not as they were written.
    """
    texts = parse_json(arrays["text"].tobytes())
    if records is None:
        records = [_blind(fields) for fields, *_ in texts]
    scores = _scores(arrays)
    tracks = (Track(*columns) for columns in _tables("track", arrays, Track._fields))
    return [
        ScoredRecord(
            record,
            status,
            note,
            next(scores) if has_score else None,
            _both(regions, tracks) if regions else None,
        )
        for record, (_, status, note, has_score, regions) in zip(records, texts, strict=True)
    ]


def _scores(arrays: Arrays) -> Iterator[RecordScore]:
    tables = _tables("piece", arrays, ("start", "n_bases", "log_odds"))
    for log_odds, columns in zip(arrays["log_odds"].tolist(), tables, strict=True):
        pieces = PieceScores(np.zeros(len(columns[0]), dtype=np.int64), *columns)
        yield RecordScore(None if log_odds != log_odds else log_odds, pieces)  # NaN


def _both(both: Sequence[Any], tracks: Iterator[Track]) -> tuple[Any, Any]:
    as_other, as_virus = (
        (tuple(Region(*region) for region in regions), next(tracks)) for regions in both
    )
    return as_other, as_virus


def _blind(fields: Sequence[Any]) -> FastaRecord:
    *of_record, length = fields
    return FastaRecord(*of_record)._replace(sequence=ScoreStore.unknown * length)
