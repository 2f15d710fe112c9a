"""The plan of a run: which ORFs of the inputs stand in which shard.

Records stream from the inputs through screening, chunking and translation into shards. Blocks of
them are translated in tasks, here or by helpers; all that needs their order is done here. The
inputs of each generation are cut by themselves, so that inputs added later leave the shards of
earlier ones, and their feature files, as they are.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, TextIO, TypeAlias

import numpy as np

from virnucpro.callers.regions import SHORTEST_RECORD
from virnucpro.ground.config import Recipe
from virnucpro.ground.errors import InputError
from virnucpro.ground.files import as_text, read_json, sha256
from virnucpro.ground.log import printable
from virnucpro.ground.records import (
    PROTEIN,
    Chunk,
    FastaRecord,
    Orf,
    Records,
    Shard,
    check_counts,
    shard_name,
)
from virnucpro.ground.tasks import Helpers, count_worth, helpers_for
from virnucpro.run.folder import RunDir
from virnucpro.run.manifest import Manifest
from virnucpro.run.shards import SeenOrfs, ShardWriter, digests_of, header_of
from virnucpro.sequences.fasta import parsed, write_record
from virnucpro.sequences.genetic_code import genetic_code
from virnucpro.sequences.inputs import InputFile, generations
from virnucpro.sequences.screen import protein_of, screen
from virnucpro.sequences.survey import find_repeat, repeated
from virnucpro.sequences.translate import chunk_record, translate_six_frames

_BLOCK_LETTERS = 500_000  # letters that are translated, or looked up, at once
_SHARDS_AT_ONCE = 256  # shards that are verified at once


@dataclass(slots=True)
class PlanCounts:
    """The counts of what went into a plan."""

    n_records: int = 0
    n_letters: int = 0
    n_searched: int = 0  # letters of records in which regions may be looked for
    n_short: int = 0  # records under half a chunk
    n_gapped: int = 0  # records with gaps
    n_gaps: int = 0  # gaps in them, left out
    n_copies: int = 0  # ORFs whose protein occurred before
    n_copied_residues: int = 0

    def __post_init__(self) -> None:
        check_counts(*(getattr(self, count.name) for count in fields(self)))


@dataclass(frozen=True)
class Plan:
    """The shards of each generation, and what they were made of."""

    generations: tuple[tuple[Shard, ...], ...]
    counts: PlanCounts = field(default_factory=PlanCounts)
    files: tuple[tuple[int, int], ...] = ()  # (first shard, one after the last) of each input

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(chain.from_iterable(self.generations))


def count_done(files: Iterable[tuple[int, int]], missing: Sequence[int]) -> int:
    """The number of files without a shard among ``missing``, which is sorted."""
    return sum(bisect_left(missing, first) == bisect_left(missing, end) for first, end in files)


def make_plan(
    rundir: RunDir,
    manifest: Manifest,
    *,
    keep_intermediate: bool,
    on_letters: Callable[[int], None],
    n_helpers: int = 0,
) -> Plan:
    """Write the shards, aside, in the time of ``RunDir.planning``, with so many helpers at most.

    Raises:
        InputError: an input is not a FASTA file, or an id occurs twice.
        UnavailableError: a helper died.
    """
    n_bytes = sum(file.n_bytes for file in manifest.inputs) if manifest.recipe.has_encoder else 0
    with helpers_for(manifest.recipe, count_worth(n_helpers, n_bytes), "shards") as helpers:
        plan = _Planner(rundir, manifest, keep_intermediate, on_letters, helpers).run()
    rundir.write_whole(rundir.planned.plan, json.dumps(_to_json(plan, manifest)))
    return plan


Entries: TypeAlias = tuple[list[str], list[str], list[bytes]]  # headers, proteins, digests


@dataclass(frozen=True, slots=True)
class _EntryTask:
    """Make the entries of a block for shards: of the frames of chunks, or of proteins."""

    n_letters: int
    columns: tuple[tuple[Any, ...], ...]  # fields of the chunks, or of the records

    def do(self, recipe: Recipe) -> Entries:
        if recipe.has_frames:
            chunks = list(map(Chunk._make, zip(*self.columns, strict=True)))
            orfs = translate_six_frames(chunks, genetic_code(recipe.genetic_code))
        else:
            records = map(FastaRecord._make, zip(*self.columns, strict=True))
            texts = [(record.id, protein_of(record)) for record in records]
            orfs = [Orf(name, name, name, 0, len(text), PROTEIN, text) for name, text in texts]
        headers, proteins = list(map(header_of, orfs)), [orf.protein for orf in orfs]
        return headers, proteins, digests_of(orfs, recipe.reads)


@dataclass(slots=True)
class _Planner:
    """One pass over the inputs."""

    rundir: RunDir
    manifest: Manifest
    keep_intermediate: bool
    on_letters: Callable[[int], None]
    helpers: Helpers[Recipe]
    counts: PlanCounts = field(default_factory=PlanCounts)
    files: list[tuple[int, int]] = field(default_factory=list)
    # 8 bytes per record: ids themselves would fill the memory
    hashes: array[int] = field(default_factory=lambda: array("q"))
    is_last: deque[bool] = field(default_factory=deque)  # of each task: whether it ends its file

    def run(self) -> Plan:
        recipe, replaced = self.manifest.recipe, frozenset(self.manifest.replaced)
        shards: list[tuple[Shard, ...]] = []
        with ExitStack() as stack:
            chunks = None
            if self.keep_intermediate and recipe.has_frames:
                content = stack.enter_context(self.rundir.replacing(self.rundir.planned.chunks))
                chunks = stack.enter_context(as_text(content))
            for number, inputs in enumerate(generations(self.manifest.inputs)):
                writer = ShardWriter(
                    self.rundir,
                    self.rundir.planned.shards,
                    recipe.largest_shard,
                    sum(map(len, shards)),
                    keep_bases=self.keep_intermediate,
                )
                earlier = replaced if number else frozenset[str]()
                seen = SeenOrfs()
                first, tasks = writer.next_index, self.tasks(inputs, earlier, chunks)
                for headers, proteins, digests in self.helpers.in_order(tasks):
                    writer.extend(headers, proteins, seen.originals(digests))
                    if self.is_last.popleft():
                        self.files.append((first, writer.end_index))
                        first = writer.next_index
                writer.flush()
                shards.append(tuple(map(self.in_place, writer.shards)))
                self.counts.n_copies += writer.n_copies
                self.counts.n_copied_residues += writer.n_copied_residues
        self.on_letters(self.counts.n_letters)
        refuse_duplicates(self.hashes, self.manifest)
        return Plan(tuple(shards), self.counts, tuple(self.files))

    def in_place(self, shard: Shard) -> Shard:
        return replace(shard, path=self.rundir.shards / shard.path.name)

    def tasks(
        self, inputs: Iterable[InputFile], replaced: frozenset[str], out: TextIO | None
    ) -> Iterator[_EntryTask]:
        """The tasks of a generation, one or more of each file; its chunks go ``out``."""
        recipe, corrected = self.manifest.recipe, set[str]()
        for file in inputs:
            records = self.screened(file, replaced, corrected)
            pieces: Iterable[FastaRecord | Chunk] = records
            if recipe.has_frames:
                pieces = chain.from_iterable(chunk_record(r, recipe.chunk_size) for r in records)
            block: list[FastaRecord | Chunk] = []
            n_letters = 0
            for piece in pieces:
                if out is not None:
                    write_record(out, piece.id, piece.sequence)
                block.append(piece)
                n_letters += len(piece.sequence)
                if n_letters >= _BLOCK_LETTERS:
                    self.is_last.append(False)
                    yield _EntryTask(n_letters, tuple(zip(*block, strict=True)))
                    block, n_letters = [], 0
            self.is_last.append(True)
            yield _EntryTask(n_letters, tuple(zip(*block, strict=True)))

    def screened(
        self, file: InputFile, replaced: frozenset[str], corrected: set[str]
    ) -> Iterator[FastaRecord]:
        """The records to embed, if any are. Those of ``replaced`` may have been there before."""
        recipe = self.manifest.recipe
        shortest = recipe.chunk_size if recipe.has_frames else 0
        for records in parsed(self.manifest.ids.blocks(file)):
            self.count(records)
            if replaced.isdisjoint(records.ids):
                self.hashes.extend(map(hash, records.ids))
            else:
                self.add_corrected(records, file, replaced, corrected)
            for record in records.each() if recipe.has_encoder else ():
                if screen(record, recipe)[0] is None:
                    self.counts.n_short += 2 * len(record.sequence) < shortest
                    yield record

    def count(self, records: Records) -> None:
        counts, lengths = self.counts, records.lengths
        counts.n_records += len(lengths)
        counts.n_letters += int(lengths.sum())
        counts.n_searched += int(lengths[lengths >= SHORTEST_RECORD].sum())
        counts.n_gapped += sum(map(bool, records.n_gaps))
        counts.n_gaps += sum(records.n_gaps)
        self.on_letters(counts.n_letters)

    def add_corrected(
        self,
        records: Records,
        file: InputFile,
        replaced: frozenset[str],
        corrected: set[str],
    ) -> None:
        """Add the ids of records of which some replace one that failed.

        Raises:
            InputError: two replace the same.
        """
        for name, line in zip(records.ids, records.lines, strict=True):
            if name not in replaced:
                self.hashes.append(hash(name))
            elif name in corrected:
                raise InputError(
                    f"{file.shown}:{line}: the corrected record {printable(name)} occurs twice",
                    hint="keep one of the two",
                )
            else:
                corrected.add(name)


def refuse_duplicates(hashes: array[int], manifest: Manifest) -> None:
    """
    Raises:
        InputError: an id occurs twice; only then the inputs are read again to say where.
    """
    twice = repeated(np.asarray(hashes))
    replaced = frozenset(manifest.replaced)
    repeat = find_repeat(
        (
            (file, record)
            for file in manifest.inputs
            for record in manifest.ids.read(file)
            if not (file.generation and record.id in replaced)
        ),
        twice,
    )
    if repeat is not None:
        raise repeat.error(_remedy(manifest))


def _remedy(manifest: Manifest) -> str:
    """The remedy beside making the ids unique."""
    if len(manifest.inputs) == 1:
        return "or add --rename-duplicates"
    return (
        "or start again with all files and --force: ids that files share are then written with "
        "their file; or leave the added file out"
    )


def _key(manifest: Manifest) -> str:
    hashes = [
        (
            *(file.sha256, file.generation, file.n_renamed),
            *(file.sample if manifest.is_qualified else "", *((file.mate,) if file.mate else ())),
        )
        for file in manifest.inputs
    ]
    text = repr((manifest.recipe.fingerprint, hashes, manifest.replaced))
    return hashlib.sha256(text.encode()).hexdigest()


def _plan_sha256(stored: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(stored).encode()).hexdigest()


def _to_json(plan: Plan, manifest: Manifest) -> dict[str, object]:
    stored = {
        "key": _key(manifest),
        "counts": asdict(plan.counts),
        "generations": [
            [[shard.n_orfs, shard.n_embedded, shard.n_residues, shard.sha256] for shard in shards]
            for shards in plan.generations
        ],
        "files": plan.files,
    }
    return {**stored, "sha256": _plan_sha256(stored)}


def find_plan(
    rundir: RunDir,
    manifest: Manifest,
    *,
    keep_intermediate: bool,
    on_shard: Callable[[int, int], None],
) -> Plan | None:
    """The plan of an earlier start, if it is of this run and all its files are whole.

    ``on_shard`` hears how many of them were read, and of how many.
    """
    if keep_intermediate and manifest.recipe.has_frames and not rundir.chunks.is_file():
        return None
    plan = read_plan(rundir, manifest)
    return plan if plan is not None and _are_whole(plan.shards, on_shard) else None


def read_plan(rundir: RunDir, manifest: Manifest) -> Plan | None:
    """The plan in ``plan.json``, if it is of this run and as it was written."""
    try:
        stored = dict(read_json(rundir.plan))
        if stored.pop("sha256") != _plan_sha256(stored) or stored["key"] != _key(manifest):
            return None
        index, by_generation = 0, []
        for entries in stored["generations"]:
            shards = []
            for n_orfs, n_embedded, n_residues, digest in entries:
                path = rundir.shards / f"{shard_name(index)}.faa"
                shards.append(Shard(index, path, n_orfs, n_embedded, n_residues, digest))
                index += 1
            by_generation.append(tuple(shards))
        files = tuple((int(first), int(end)) for first, end in stored["files"])
        return Plan(tuple(by_generation), PlanCounts(**stored["counts"]), files)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _are_whole(shards: Sequence[Shard], on_shard: Callable[[int, int], None]) -> bool:
    """True if the shard files are those that were written."""
    with ThreadPoolExecutor() as pool:  # Python's lock is free while a block is hashed
        for first in range(0, len(shards), _SHARDS_AT_ONCE):
            on_shard(first, len(shards))
            some = shards[first : first + _SHARDS_AT_ONCE]
            digests = pool.map(sha256, [shard.path for shard in some])
            try:
                if list(digests) != [shard.sha256 for shard in some]:
                    return False
                # each ORF and each residue is a letter of the file, at least
                if any(s.n_orfs + s.n_residues > s.path.stat().st_size for s in some):
                    return False
            except OSError:
                return False
    return True
