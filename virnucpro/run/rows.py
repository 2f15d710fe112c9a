"""The rows of a slice in all tables, in a file: any machine makes it, and the end only joins them.

Like a feature file it has a label at its end and exists only when it is whole. A key says what its
rows were made of: records, shards, recipe, cut. One of another key counts as missing, and so does
one with other columns, or of scores that were computed in another way.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.files import open_plain, parse_json, writing
from virnucpro.ground.log import LOGGER, printable
from virnucpro.ground.records import check_counts, shard_name
from virnucpro.ground.tree import Tree
from virnucpro.run.feature_file import read_label, sealed_label
from virnucpro.run.folder import ROWS
from virnucpro.run.index import IndexPart
from virnucpro.run.scores import FORMAT as FORMAT_OF_SCORES
from virnucpro.tables.sinks import Portion, Tally, all_sinks

_FORMAT = 2  # raise it when the same scores, columns and key would give other rows

_Rows: TypeAlias = Mapping[str, bytes | memoryview]  # see ``Portion``


@dataclass(slots=True)
class SliceRows:
    """What the tables have of a slice, and the feature files of each store."""

    files: Sequence[Sequence[IndexPart]] = ()
    portions: list[Portion] = field(default_factory=list)
    n_records: int = 0
    n_letters: int = 0
    work: int = 0  # see ``Written``
    n_blocks: int = 0

    @property
    def n_failed(self) -> int:
        return sum(portion.tally.n_failed_frames for portion in self.portions)

    def add(self, portion: Portion) -> None:
        """Add rows; neighbours of one sample become one portion."""
        if self.portions and self.portions[-1].sample == portion.sample:
            self.portions[-1] = self.portions[-1].joined(portion)
        else:
            self.portions.append(portion)


@dataclass(frozen=True, slots=True)
class RowStore:
    """The files of rows of a run, by the indices of their slices."""

    tree: Tree
    folder: Path

    def path(self, index: int) -> Path:
        return self.folder / f"{shard_name(index)}{ROWS}"

    def make_folder(self) -> None:
        """Make the folder of the files, unless it is there."""
        with writing(self.folder):
            self.tree.make_folder(self.folder)

    def has(self, index: int, key: str) -> bool:
        """Whether the rows of a slice are there, by the label of their file."""
        try:
            read_label(self.path(index), _attributes(key))
        except FeatureFileError:
            return False
        return True

    def delete(self, index: int) -> None:
        self.tree.delete(self.path(index))

    def write(self, index: int, key: str, rows: SliceRows) -> None:
        """
        Raises:
            OutputError, StorageError: the disk refuses it.
        """
        texts: list[bytes | memoryview] = []

        def packed(of_tables: _Rows | None) -> list[tuple[str, int]] | None:
            if of_tables is None:
                return None
            texts.extend(of_tables.values())
            return [(name, len(text)) for name, text in of_tables.items()]

        portions = [
            (one.sample, _facts_of(one.tally), packed(one.rows), packed(one.own_rows))
            for one in rows.portions
        ]
        facts = ([list(map(asdict, one)) for one in rows.files], _counts(rows), portions)
        content = b"".join((json.dumps(facts).encode(), b"\n", *texts))
        with self.tree.replacing(self.path(index)) as out:
            out.write(content)
            out.write(sealed_label(content, {**_attributes(key), "crc32": crc32(content)}))

    def read(self, index: int, key: str) -> SliceRows | None:
        """The rows of a slice, if they are there; a file that is damaged is deleted."""
        path = self.path(index)
        if not self.has(index, key):
            return None
        try:
            label = read_label(path, _attributes(key))
            with open_plain(path) as handle:
                facts = handle.readline(label.n_bytes)
                text = memoryview(handle.read(label.n_bytes - len(facts)))
            # this finds damage in a third of the time that SHA-256 takes
            if crc32(text, crc32(facts)) != label.attributes.get("crc32"):
                raise FeatureFileError(f"{printable(path)} is damaged")
            return _unpacked(facts, text)
        except (FeatureFileError, ValueError, LookupError, TypeError, AttributeError) as error:
            fault = error if isinstance(error, FeatureFileError) else f"{printable(path)}: {error}"
            LOGGER.warning("%s; it is made again", fault)
            self.tree.delete(path)
            return None


def _attributes(key: str) -> dict[str, str | int]:
    """Of a file of rows of this program: an older one of the same version may write others."""
    columns = [(sink.file, sink.columns) for sink in all_sinks()]
    facts = (_FORMAT, FORMAT_OF_SCORES, columns)
    return {"key": key, "format": hashlib.sha256(repr(facts).encode()).hexdigest()}


def _unpacked(facts: bytes, text: memoryview) -> SliceRows:
    """
    Raises:
        ValueError, LookupError, TypeError, AttributeError: nothing of ours wrote them.
    """
    files, counts, portions = parse_json(facts)
    place = 0

    def unpacked(lengths: Sequence[tuple[str, int]] | None) -> _Rows | None:
        nonlocal place
        if lengths is None:
            return None
        rows = {}
        for name, length in lengths:
            check_counts(length)
            rows[name] = text[place : place + length]
            place += length
        return rows

    each = [
        Portion(sample, unpacked(rows) or {}, _tally(tally), unpacked(own_rows))
        for sample, tally, rows, own_rows in portions
    ]
    if place != len(text):
        raise ValueError("the rows are longer, or shorter, than is said")
    check_counts(*counts)
    parts = [[IndexPart(**one) for one in of_store] for of_store in files]
    return SliceRows(parts, each, *counts)


def _counts(rows: SliceRows) -> tuple[int, int, int, int]:
    return rows.n_records, rows.n_letters, rows.work, rows.n_blocks


def _facts_of(tally: Tally) -> dict[str, Any]:
    return {count.name: getattr(tally, count.name) for count in fields(tally)}


def _tally(stored: Mapping[str, Any]) -> Tally:
    score, length, record_id = stored["best"]
    lengths = Counter({int(start): n for start, n in stored["viral_lengths"].items()})
    best = (score, length, record_id)
    named = {name: Counter(stored[name]) for name in ("kinds", "families")}
    return Tally(**{**stored, **named, "best": best, "viral_lengths": lengths})
