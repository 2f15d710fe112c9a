"""Store the table rows of a slice in a file, so that the end of a run only joins files.

Any machine can write the file. Like a feature file it has a label at its end, and it exists only
when it is complete. Its key is a hash of everything that the rows depend on: records, shards,
recipe, threshold. A file with another key, other columns, or differently computed scores counts as
missing. ``run.json`` contains the part that all keys share, so ``status`` knows which rows will be
recomputed.
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
from virnucpro.store.plan import Plan, Slice
from virnucpro.store.run_dir import SCORE_FORMAT, RunDir
from virnucpro.store.shard_store import ShardStore

_COUNTS = ("n_records", "n_letters", "work", "n_blocks")


@dataclass(slots=True, eq=False)
class SliceRows:
    """The table rows of a slice or one of its blocks, and the feature files per store."""

    files: Sequence[list[IndexPart]] = ()
    batches: list[RowBatch] = field(default_factory=list)
    n_records: int = 0
    n_letters: int = 0
    work: int = 0  # letters read; letters searched for regions count twice
    n_blocks: int = 0
    is_scored: bool = False  # scored now, not read from a file
    index: int = 0  # index of the first block

    @property
    def n_failed(self) -> int:
        return sum(batch.total.n_failed_frames for batch in self.batches)

    def include(self, block: SliceRows) -> None:
        """Add the rows of the next block. Neighbouring batches of the same samples are joined."""
        for files, more in zip(self.files, block.files, strict=True):
            files.extend(more)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(block, name))
        for batch in block.batches:
            if self.batches and self.batches[-1].counts.keys() == batch.counts.keys():
                self.batches[-1] = self.batches[-1].joined(batch)
            else:
                self.batches.append(batch)


@dataclass(frozen=True, slots=True, eq=False)
class RowStore:
    """A plan's row files, one per group of slices with the same records.

    The file name contains the index of the first slice.
    """

    plan: Plan
    made_by: str  # hash of classifier, threshold and output files, which all keys share
    field: ClassVar = "rows_made_by"  # its name in ``run.json``

    def path(self, group: Sequence[Slice]) -> Path:
        return self.plan.rundir.rows / f"{group[0].name}{RunDir.rows_suffix}"

    def has(self, group: Sequence[Slice]) -> bool:
        """Return whether the rows of these slices exist, judged by the label of their file.

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
        """Write the rows of slices with the same records.

        Raises:
            OutputError, StorageError: the file cannot be written.
        """
        texts: list[bytes | memoryview] = []

        def lengths_of(rows_by_output: Rows | None) -> dict[str, int] | None:
            if rows_by_output is None:
                return None
            texts.extend(rows_by_output.values())
            return {name: len(text) for name, text in rows_by_output.items()}

        batches = [
            {
                "counts": {sample: _counts_to_json(n) for sample, n in batch.counts.items()},
                "rows": lengths_of(batch.rows),
                "own_rows": lengths_of(batch.own_rows),
            }
            for batch in rows.batches
        ]
        facts = {
            "files": [list(map(asdict, store_files)) for store_files in rows.files],
            "counts": {name: getattr(rows, name) for name in _COUNTS},
            "batches": batches,
        }
        content = b"".join((json.dumps(facts).encode(), b"\n", *texts))
        rundir = self.plan.rundir
        write_checksummed(rundir, self.path(group), content, self._attributes(group))

    def read(self, group: Sequence[Slice]) -> SliceRows | None:
        """Read these slices' rows, if they exist. A damaged file is deleted."""
        path = self.path(group)
        if not self.has(group):
            return None
        try:
            facts, _, text = read_checksummed(path, self._attributes(group))[1].partition(b"\n")
            return _unpack(facts, memoryview(text), group[0].index)
        except (FeatureFileError, ValueError, LookupError, TypeError, AttributeError) as error:
            fault = error if isinstance(error, FeatureFileError) else f"{printable(path)}: {error}"
            LOGGER.warning("%s; it will be recomputed", fault)
            self.plan.rundir.delete(path)
            return None

    def _attributes(self, group: Sequence[Slice]) -> dict[str, str | int]:
        """Return a row file's attributes, including what differs between builds."""
        columns = [(sink.file, sink.columns) for sink in all_outputs()]
        # Increment it when the same scores, columns and key would give other rows.
        format_number = 4
        facts = (format_number, SCORE_FORMAT, columns)
        return {"key": self._key(group), "format": _hash(facts)}

    def _key(self, group: Sequence[Slice]) -> str:
        """Hash everything that the rows depend on."""
        manifest = self.plan.manifest
        slice_plans = self.plan.slice_plans
        run_facts = (manifest.recipe.fingerprint, manifest.is_qualified, self.made_by)
        spans = []
        for index, span in group[0].spans:
            file = manifest.inputs[index]
            spans.append((file.identity, file.sample, file.mate, file.n_renamed, span))
        parts = [slice_plans[slice_.index] for slice_ in group if slice_.index in slice_plans]
        shards = [shard.sha256 for part in parts for shard in part.shards]
        return _hash((__version__, run_facts, spans, shards))


class ScoreFiles(Protocol):
    """A run's stored scores, in one file per record block."""

    @property
    def folder(self) -> Path: ...

    def is_complete(self, index: int) -> bool:
        """Return whether a block's file exists intact."""

    def keep(self, names: Collection[str]) -> None:
        """Delete all files except these names (without suffix)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FinishedRows:
    """Rows that an earlier start or another machine wrote and that are still valid."""

    cache: RowStore
    stores: tuple[ShardStore, ...]  # in which a finished shard has a file each
    scores: ScoreFiles | None  # None: the run stores no scores

    def read(self, group: Sequence[Slice]) -> SliceRows | None:
        """Read the rows of slices with the same records, if they exist and are intact.

        If the run stores scores, the scores behind the rows must be intact, too.
        """
        rows = self.cache.read(group)
        if rows is None or self.scores is None:
            return rows
        first = group[0].index
        is_intact = all(map(self.scores.is_complete, range(first, first + rows.n_blocks)))
        return rows if is_intact else None

    def find_slices(self) -> set[int]:
        """Return the indices of slices that have their rows and all their vectors."""
        done = [store.completed_names() for store in self.stores]
        groups = self.cache.plan.group_by_records()
        indices: set[int] = set()
        for group in groups:
            if self._is_finished(group, done):
                indices.update(slice_.index for slice_ in group)
        return indices

    def _is_finished(self, group: Sequence[Slice], done: Sequence[set[str]]) -> bool:
        """Return True if the rows of these slices exist, and their shards are in ``done``.

        If the shards exist, damaged rows are found at the join and recomputed from them. Otherwise
        the rows are read and verified here.
        """
        parts = self.cache.plan.slice_plans
        shards: list[Shard] = []
        for slice_ in group:
            if slice_.index in parts:
                shards += parts[slice_.index].shards
        names = {shard.name for shard in shards}
        if not self.cache.has(group) or any(names - store_names for store_names in done):
            return False
        return all(shard.path.is_file() for shard in shards) or self.read(group) is not None

    def find_missing_shards(self) -> Iterator[Shard]:
        """Yield the shards that the tables still need, after deleting rows without vectors."""
        for slice_ in self.delete_rows_without_vectors():
            yield from self.cache.plan.slice_plans[slice_.index].shards

    def delete_rows_without_vectors(self) -> list[Slice]:
        """Delete rows whose slices lack vectors, and return the slices that are not finished."""
        finished = self.find_slices()
        plan = self.cache.plan
        unfinished: list[Slice] = []
        for group in plan.group_by_records():
            if group[0].index in finished:
                continue
            if self.cache.has(group):
                plan.rundir.delete(self.cache.path(group))
            unfinished += group
        return unfinished


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _unpack(facts: bytes, text: memoryview, index: int) -> SliceRows:
    """Restore slice rows from a file's content.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: the content is damaged.
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
            {sample: _counts_from_json(n) for sample, n in batch["counts"].items()},
            take_rows(batch["rows"]) or {},
            take_rows(batch["own_rows"]),
        )
        for batch in stored["batches"]
    ]
    if position != len(text):
        raise ValueError("the rows do not have the length in the label")
    counts = {name: stored["counts"][name] for name in _COUNTS}
    check_counts(*counts.values())
    files = [[IndexPart.from_json(part) for part in store_files] for store_files in stored["files"]]
    return SliceRows(files=files, batches=batches, index=index, **counts)


def _counts_to_json(counts: RecordCounts) -> dict[str, Any]:
    return {count.name: getattr(counts, count.name) for count in fields(counts)}


def _counts_from_json(stored: Mapping[str, Any]) -> RecordCounts:
    score, length, record_id = stored["best"]
    lengths = Counter({int(start): n for start, n in stored["viral_lengths"].items()})
    best = (score, length, record_id)
    named = {name: Counter(stored[name]) for name in ("groups", "families")}
    return RecordCounts(**{**stored, **named, "best": best, "viral_lengths": lengths})
