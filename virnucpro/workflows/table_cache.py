"""Store the rows of a slice for all tables in a file, so that the end of a run only joins files.

Any machine can make the file. Like a feature file it has a label at its end and exists only when it
is whole. Its key is a hash of what the rows are made from: records, shards, recipe, cut. A file
with another key, other columns, or differently computed scores counts as missing. ``run.json`` has
the part common to all keys, so that ``status`` knows which rows will be made again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from virnucpro._version import __version__
from virnucpro.core.atomic_io import parse_json
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.types import check_counts
from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import all_outputs
from virnucpro.results.row_batches import RowBatch
from virnucpro.store.feature_file import read_label, read_sealed, write_sealed
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.plan import Plan, Slice
from virnucpro.store.run_dir import ROWS
from virnucpro.workflows.score_cache import FORMAT as FORMAT_OF_SCORES

_FORMAT = 2  # raise it when the same scores, columns and key would give other rows

_COUNTS = ("n_records", "n_letters", "work", "n_blocks")
_Rows: TypeAlias = Mapping[str, bytes | memoryview]  # see ``RowBatch``


@dataclass(slots=True)
class SliceRows:
    """The table rows of a slice or a block of it, and the feature files of each store."""

    files: Sequence[list[IndexPart]] = ()
    portions: list[RowBatch] = field(default_factory=list)
    n_records: int = 0
    n_letters: int = 0
    work: int = 0  # letters read; letters searched for regions count twice
    n_blocks: int = 0
    is_scored: bool = False  # scored now, not read from a file
    index: int = 0  # of its first block

    @property
    def n_failed(self) -> int:
        return sum(portion.counts.n_failed_frames for portion in self.portions)

    def include(self, block: SliceRows) -> None:
        """Add the rows of the next block; neighbouring portions of one sample are joined."""
        for files, more in zip(self.files, block.files, strict=True):
            files.extend(more)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(block, name))
        for portion in block.portions:
            if self.portions and self.portions[-1].sample == portion.sample:
                self.portions[-1] = self.portions[-1].joined(portion)
            else:
                self.portions.append(portion)


@dataclass(frozen=True, slots=True)
class RowStore:
    """The row files of a plan: one per group of slices with the same records.

    A file has the index of the first slice in its name.
    """

    plan: Plan
    made_by: str  # hash of caller, cut and set of files, which all keys share
    field: ClassVar = "rows_made_by"  # its name in ``run.json``

    def path(self, group: Sequence[Slice]) -> Path:
        return self.plan.rundir.rows / f"{group[0].name}{ROWS}"

    def has(self, group: Sequence[Slice]) -> bool:
        """Whether the rows of some slices exist, judged by the label of their file.

        If records of a run were replaced, all rows are made at its end instead.
        """
        if self.plan.manifest.replaced:
            return False
        try:
            read_label(self.path(group), self._attributes(group))
        except FeatureFileError:
            return False
        return True

    def write(self, group: Sequence[Slice], rows: SliceRows) -> None:
        """
        Raises:
            OutputError, StorageError: the file cannot be written.
        """
        texts: list[bytes | memoryview] = []

        def packed(of_tables: _Rows | None) -> list[tuple[str, int]] | None:
            if of_tables is None:
                return None
            texts.extend(of_tables.values())
            return [(name, len(text)) for name, text in of_tables.items()]

        portions = [
            (one.sample, _facts_of(one.counts), packed(one.rows), packed(one.own_rows))
            for one in rows.portions
        ]
        counts = [getattr(rows, name) for name in _COUNTS]
        facts = ([list(map(asdict, one)) for one in rows.files], counts, portions)
        content = b"".join((json.dumps(facts).encode(), b"\n", *texts))
        rundir = self.plan.rundir
        write_sealed(rundir, self.path(group), content, self._attributes(group))

    def read(self, group: Sequence[Slice]) -> SliceRows | None:
        """Read the rows of some slices, if they exist; a damaged file is deleted."""
        path = self.path(group)
        if not self.has(group):
            return None
        try:
            facts, _, text = read_sealed(path, self._attributes(group))[1].partition(b"\n")
            return replace(_unpacked(facts, memoryview(text)), index=group[0].index)
        except (FeatureFileError, ValueError, LookupError, TypeError, AttributeError) as error:
            fault = error if isinstance(error, FeatureFileError) else f"{printable(path)}: {error}"
            LOGGER.warning("%s; it is made again", fault)
            self.plan.rundir.delete(path)
            return None

    def _attributes(self, group: Sequence[Slice]) -> dict[str, str | int]:
        """Attributes of a row file, including what differs between builds of one version."""
        columns = [(sink.file, sink.columns) for sink in all_outputs()]
        facts = (_FORMAT, FORMAT_OF_SCORES, columns)
        return {"key": self._key(group), "format": _hash(facts)}

    def _key(self, group: Sequence[Slice]) -> str:
        """Hash of what the rows are made from."""
        manifest, planned = self.plan.manifest, self.plan.parts
        of_run = manifest.recipe.fingerprint, manifest.is_qualified, self.made_by
        files = [(manifest.inputs[place], span) for place, span in group[0].spans]
        spans = [(one.sha256, one.sample, one.mate, one.n_renamed, span) for one, span in files]
        parts = [planned[one.index] for one in group if one.index in planned]
        shards = [shard.sha256 for part in parts for shard in part.shards]
        return _hash((__version__, of_run, spans, shards))


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _unpacked(facts: bytes, text: memoryview) -> SliceRows:
    """
    Raises:
        ValueError, LookupError, TypeError, AttributeError: they are damaged.
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
        RowBatch(sample, unpacked(rows) or {}, _tally(tally), unpacked(own_rows))
        for sample, tally, rows, own_rows in portions
    ]
    if place != len(text):
        raise ValueError("the rows do not have the length in the label")
    check_counts(*counts)
    parts = [[IndexPart(**one) for one in of_store] for of_store in files]
    return SliceRows(parts, each, *counts)


def _facts_of(tally: RecordCounts) -> dict[str, Any]:
    return {count.name: getattr(tally, count.name) for count in fields(tally)}


def _tally(stored: Mapping[str, Any]) -> RecordCounts:
    score, length, record_id = stored["best"]
    lengths = Counter({int(start): n for start, n in stored["viral_lengths"].items()})
    best = (score, length, record_id)
    named = {name: Counter(stored[name]) for name in ("kinds", "families")}
    return RecordCounts(**{**stored, **named, "best": best, "viral_lengths": lengths})
