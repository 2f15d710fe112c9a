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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from virnucpro._version import __version__
from virnucpro.core.atomic_io import parse_json
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.types import Shard, check_counts
from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import all_outputs
from virnucpro.results.row_batches import RowBatch, Rows
from virnucpro.store.feature_file import read_checksummed, read_label, write_checksummed
from virnucpro.store.feature_index import IndexPart
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.plan import Plan, Slice
from virnucpro.store.run_dir import ROWS, SCORE_FORMAT

_FORMAT = 3  # raise it when the same scores, columns and key would give other rows

_COUNTS = ("n_records", "n_letters", "work", "n_blocks")


@dataclass(slots=True)
class SliceRows:
    """The table rows of a slice or a block of it, and the feature files of each store."""

    files: Sequence[list[IndexPart]] = ()
    batches: list[RowBatch] = field(default_factory=list)
    n_records: int = 0
    n_letters: int = 0
    work: int = 0  # letters read; letters searched for regions count twice
    n_blocks: int = 0
    is_scored: bool = False  # scored now, not read from a file
    index: int = 0  # of its first block

    @property
    def n_failed(self) -> int:
        return sum(batch.counts.n_failed_frames for batch in self.batches)

    def include(self, block: SliceRows) -> None:
        """Add the rows of the next block; neighbouring batches of one sample are joined."""
        for files, more in zip(self.files, block.files, strict=True):
            files.extend(more)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(block, name))
        for batch in block.batches:
            if self.batches and self.batches[-1].sample == batch.sample:
                self.batches[-1] = self.batches[-1].joined(batch)
            else:
                self.batches.append(batch)


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

        def lengths_of(of_outputs: Rows | None) -> dict[str, int] | None:
            if of_outputs is None:
                return None
            texts.extend(of_outputs.values())
            return {name: len(text) for name, text in of_outputs.items()}

        batches = [
            {
                "sample": batch.sample,
                "counts": _counts_to_json(batch.counts),
                "rows": lengths_of(batch.rows),
                "own_rows": lengths_of(batch.own_rows),
            }
            for batch in rows.batches
        ]
        facts = {
            "files": [list(map(asdict, of_store)) for of_store in rows.files],
            "counts": {name: getattr(rows, name) for name in _COUNTS},
            "batches": batches,
        }
        content = b"".join((json.dumps(facts).encode(), b"\n", *texts))
        rundir = self.plan.rundir
        write_checksummed(rundir, self.path(group), content, self._attributes(group))

    def read(self, group: Sequence[Slice]) -> SliceRows | None:
        """Read the rows of some slices, if they exist; a damaged file is deleted."""
        path = self.path(group)
        if not self.has(group):
            return None
        try:
            facts, _, text = read_checksummed(path, self._attributes(group))[1].partition(b"\n")
            return _unpack(facts, memoryview(text), group[0].index)
        except (FeatureFileError, ValueError, LookupError, TypeError, AttributeError) as error:
            fault = error if isinstance(error, FeatureFileError) else f"{printable(path)}: {error}"
            LOGGER.warning("%s; it is made again", fault)
            self.plan.rundir.delete(path)
            return None

    def _attributes(self, group: Sequence[Slice]) -> dict[str, str | int]:
        """Attributes of a row file, including what differs between builds of one version."""
        columns = [(sink.file, sink.columns) for sink in all_outputs()]
        facts = (_FORMAT, SCORE_FORMAT, columns)
        return {"key": self._key(group), "format": _hash(facts)}

    def _key(self, group: Sequence[Slice]) -> str:
        """Hash of what the rows are made from."""
        manifest, planned = self.plan.manifest, self.plan.slice_plans
        of_run = manifest.recipe.fingerprint, manifest.is_qualified, self.made_by
        files = [(manifest.inputs[place], span) for place, span in group[0].spans]
        spans = [(one.identity, one.sample, one.mate, one.n_renamed, span) for one, span in files]
        parts = [planned[one.index] for one in group if one.index in planned]
        shards = [shard.sha256 for part in parts for shard in part.shards]
        return _hash((__version__, of_run, spans, shards))


class ScoreFiles(Protocol):
    """The stored scores of a run, in one file per block of records."""

    @property
    def folder(self) -> Path: ...

    def is_complete(self, index: int) -> bool:
        """Whether the file of a block is there as it was written."""

    def keep(self, names: Collection[str]) -> None:
        """Delete all files except these names (without suffix)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRows:
    """The rows that an earlier start or another machine wrote and that are still valid."""

    cache: RowStore
    stores: tuple[FeatureStore, ...]  # one for each encoder
    scores: ScoreFiles | None  # None: the run stores no scores

    def read(self, group: Sequence[Slice]) -> SliceRows | None:
        """Read the rows of slices with the same records, if they exist and are intact.

        If the run stores scores, those that the rows were made from must be intact, too.
        """
        rows = self.cache.read(group)
        if rows is None or self.scores is None:
            return rows
        first = group[0].index
        is_intact = all(map(self.scores.is_complete, range(first, first + rows.n_blocks)))
        return rows if is_intact else None

    def find_slices(self) -> set[int]:
        """The indices of the slices of the plan that have their rows and all their vectors."""
        done = [store.completed_names() for store in self.stores]
        groups = self.cache.plan.group_by_records()
        return {one.index for group in groups if self._is_finished(group, done) for one in group}

    def _is_finished(self, group: Sequence[Slice], done: Sequence[set[str]]) -> bool:
        """True if the rows of these slices exist, and their shards are in ``done``.

        Damaged rows are found at the join if the shards exist, from which they can be made again;
        otherwise the rows are read and verified here.
        """
        parts = self.cache.plan.slice_plans
        shards = [shard for one in group if one.index in parts for shard in parts[one.index].shards]
        names = {shard.name for shard in shards}
        if not self.cache.has(group) or any(names - of_store for of_store in done):
            return False
        return all(shard.path.is_file() for shard in shards) or self.read(group) is not None

    def find_missing_shards(self) -> Iterator[Shard]:
        """The shards that the tables still need. Rows without vectors are deleted."""
        finished = self.find_slices()
        plan = self.cache.plan
        for group in plan.group_by_records():
            if group[0].index in finished:
                continue
            if self.cache.has(group):
                plan.rundir.delete(self.cache.path(group))
            for one in group:
                yield from plan.slice_plans[one.index].shards


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _unpack(facts: bytes, text: memoryview, index: int) -> SliceRows:
    """
    Raises:
        ValueError, LookupError, TypeError, AttributeError: they are damaged.
    """
    stored = parse_json(facts)
    position = 0

    def take_rows(lengths: Mapping[str, int] | None) -> Rows | None:
        nonlocal position
        if lengths is None:
            return None
        rows = {}
        for name, length in lengths.items():
            check_counts(length)
            rows[name] = text[position : position + length]
            position += length
        return rows

    batches = [
        RowBatch(
            batch["sample"],
            take_rows(batch["rows"]) or {},
            _counts_from_json(batch["counts"]),
            take_rows(batch["own_rows"]),
        )
        for batch in stored["batches"]
    ]
    if position != len(text):
        raise ValueError("the rows do not have the length in the label")
    counts = {name: stored["counts"][name] for name in _COUNTS}
    check_counts(*counts.values())
    files = [[IndexPart(**part) for part in of_store] for of_store in stored["files"]]
    return SliceRows(files=files, batches=batches, index=index, **counts)


def _counts_to_json(counts: RecordCounts) -> dict[str, Any]:
    return {count.name: getattr(counts, count.name) for count in fields(counts)}


def _counts_from_json(stored: Mapping[str, Any]) -> RecordCounts:
    score, length, record_id = stored["best"]
    lengths = Counter({int(start): n for start, n in stored["viral_lengths"].items()})
    best = (score, length, record_id)
    named = {name: Counter(stored[name]) for name in ("kinds", "families")}
    return RecordCounts(**{**stored, **named, "best": best, "viral_lengths": lengths})
