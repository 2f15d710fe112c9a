"""The rows of a slice in all tables, in a file: any machine makes it, and the end only joins them.

Like a feature file it has a label at its end and exists only when it is whole. A key says what its
rows were made of: records, shards, recipe, cut. One of another key counts as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.files import open_plain, parse_json, writing
from virnucpro.ground.log import printable
from virnucpro.ground.records import shard_name
from virnucpro.ground.tree import Tree
from virnucpro.run.feature_file import read_label, sealed_label
from virnucpro.run.folder import ROWS
from virnucpro.run.index import IndexPart
from virnucpro.tables.sinks import Portion, Tally


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
            read_label(self.path(index), {"key": key})
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
        texts: list[bytes] = []

        def packed(of_tables: Mapping[str, str] | None) -> list[tuple[str, int]] | None:
            if of_tables is None:
                return None
            first = len(texts)
            texts.extend(text.encode("utf-8", "surrogateescape") for text in of_tables.values())
            return list(zip(of_tables, map(len, texts[first:]), strict=True))

        portions = [
            (one.sample, _facts_of(one.tally), packed(one.rows), packed(one.own_rows))
            for one in rows.portions
        ]
        facts = ([list(map(asdict, one)) for one in rows.files], _counts(rows), portions)
        content = b"".join((json.dumps(facts).encode(), b"\n", *texts))
        with self.tree.replacing(self.path(index)) as out:
            out.write(content)
            out.write(sealed_label(content, {"key": key}))

    def read(self, index: int, key: str) -> SliceRows:
        """
        Raises:
            FeatureFileError: the file is not as it was written; it is deleted.
        """
        path = self.path(index)
        try:
            label = read_label(path, {"key": key})
            with open_plain(path) as handle:
                content = handle.read(label.n_bytes)
            if hashlib.sha256(content).hexdigest() != label.sha256:
                raise FeatureFileError(f"{printable(path)} is damaged")
        except FeatureFileError:
            self.tree.delete(path)
            raise
        facts, _, text = content.partition(b"\n")
        files, counts, portions = parse_json(facts)
        place = 0

        def unpacked(lengths: Sequence[tuple[str, int]] | None) -> dict[str, str] | None:
            nonlocal place
            if lengths is None:
                return None
            rows = {}
            for name, length in lengths:
                rows[name] = text[place : place + length].decode("utf-8", "surrogateescape")
                place += length
            return rows

        each = [
            Portion(sample, unpacked(rows) or {}, _tally(tally), unpacked(own_rows))
            for sample, tally, rows, own_rows in portions
        ]
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
