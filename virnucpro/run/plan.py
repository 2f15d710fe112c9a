"""The plan of a run: which ORFs of the inputs stand in which shard.

Records stream from the inputs through screening, chunking and translation into shards. Blocks of
them are scored, where that decides what is embedded, and translated in tasks, here or by helpers;
all that needs their order is done here. The inputs of each generation are cut by themselves, and of
these the records that each step of ``--embed`` asks for. So inputs and records that are added later
leave the shards of earlier ones, and their feature files, as they are.
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

from virnucpro.callers.cascade import first_asking
from virnucpro.callers.options import Embed
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
from virnucpro.sequences.survey import find_repeat
from virnucpro.sequences.translate import chunk_record, protein_of, screen, translate_six_frames

Spans: TypeAlias = tuple[tuple[int, int], ...]  # of shards: the first, and one after the last
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
    n_left: int = 0  # records that could be embedded, and that --embed does not ask for
    n_left_letters: int = 0

    def __post_init__(self) -> None:
        check_counts(*(getattr(self, count.name) for count in fields(self)))


@dataclass(frozen=True)
class Plan:
    """The shards of each series, and what they were made of."""

    series: tuple[tuple[Shard, ...], ...]
    counts: PlanCounts = field(default_factory=PlanCounts)
    files: tuple[Spans, ...] = ()  # of each input

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(chain.from_iterable(self.series))


def count_done(files: Iterable[Spans], missing: Sequence[int]) -> int:
    """The number of files without a shard among ``missing``, which is sorted."""
    return sum(
        all(bisect_left(missing, first) == bisect_left(missing, end) for first, end in spans)
        for spans in files
    )


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


@dataclass(frozen=True, slots=True)
class _AskTask:
    """Ask which step each record of a block is embedded by."""

    n_letters: int
    records: Records
    rules: tuple[Embed, ...]

    def do(self, recipe: Recipe) -> list[int | None]:
        return first_asking(self.records, recipe, self.rules)


@dataclass(slots=True)
class _Planner:
    """One pass over the inputs for each series."""

    rundir: RunDir
    manifest: Manifest
    keep_intermediate: bool
    on_letters: Callable[[int], None]
    helpers: Helpers[Recipe]
    counts: PlanCounts = field(default_factory=PlanCounts)
    files: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # spans, by path
    # 8 bytes per record: ids themselves would fill the memory
    hashes: array[int] = field(default_factory=lambda: array("q"))
    ends: deque[str] = field(default_factory=deque)  # of each task: the file that it ends, or ""

    def run(self) -> Plan:
        recipe, replaced = self.manifest.recipe, frozenset(self.manifest.replaced)
        shards: list[tuple[Shard, ...]] = []
        with ExitStack() as stack:
            chunks = None
            if self.keep_intermediate and recipe.has_frames:
                content = stack.enter_context(self.rundir.replacing(self.rundir.planned.chunks))
                chunks = stack.enter_context(as_text(content))
            by_generation = list(generations(self.manifest.inputs))
            for generation, step in self.manifest.series:
                # the first step has met each record; another one counts nothing again
                again = replace(self, counts=PlanCounts(), hashes=array("q"))
                planner = again if step else self
                writer = ShardWriter(
                    self.rundir,
                    self.rundir.planned.shards,
                    recipe.largest_shard,
                    sum(map(len, shards)),
                    keep_bases=self.keep_intermediate,
                )
                earlier = replaced if generation else frozenset[str]()
                seen = SeenOrfs()
                tasks = planner.tasks(by_generation[generation], step, earlier, chunks)
                first = writer.next_index
                for headers, proteins, digests in self.helpers.in_order(tasks):
                    writer.extend(headers, proteins, seen.originals(digests))
                    if path := self.ends.popleft():
                        self.files.setdefault(path, []).append((first, writer.end_index))
                        first = writer.next_index
                writer.flush()
                shards.append(tuple(map(self.in_place, writer.shards)))
                self.counts.n_copies += writer.n_copies
                self.counts.n_copied_residues += writer.n_copied_residues
        self.on_letters(self.counts.n_letters)
        refuse_duplicates(self.hashes, self.manifest)
        files = [tuple(self.files[file.path]) for file in self.manifest.inputs]
        return Plan(tuple(shards), self.counts, tuple(files))

    def in_place(self, shard: Shard) -> Shard:
        return replace(shard, path=self.rundir.shards / shard.path.name)

    def tasks(
        self, inputs: Iterable[InputFile], step: int, replaced: frozenset[str], out: TextIO | None
    ) -> Iterator[_EntryTask]:
        """The tasks of a series, one or more of each file; its chunks go ``out``."""
        recipe, corrected = self.manifest.recipe, set[str]()
        for file in inputs:
            records = self.asked(self.screened(file, replaced, corrected), step)
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
                    self.ends.append("")
                    yield _EntryTask(n_letters, tuple(zip(*block, strict=True)))
                    block, n_letters = [], 0
            self.ends.append(file.path)
            yield _EntryTask(n_letters, tuple(zip(*block, strict=True)))

    def asked(self, records: Iterable[FastaRecord], step: int) -> Iterator[FastaRecord]:
        """The records that are embedded by a step; the first step counts those that none asks for.

        A record is scored once for each step.
        """
        rules = tuple(one.rule for one in self.manifest.embed)
        if rules[0] == "all":
            yield from records
            return
        waiting = deque[list[FastaRecord]]()

        def tasks() -> Iterator[_AskTask]:
            for block in _blocks(records):
                waiting.append(block)
                of_block = Records.of(block)
                yield _AskTask(of_block.n_letters, of_block, rules)

        for places in self.helpers.in_order(tasks()):
            for record, place in zip(waiting.popleft(), places, strict=True):
                if place == step:
                    yield record
                elif place is None:
                    self.counts.n_left += 1
                    self.counts.n_left_letters += len(record.sequence)

    def screened(
        self, file: InputFile, replaced: frozenset[str], corrected: set[str]
    ) -> Iterator[FastaRecord]:
        """The records that can be embedded. Those of ``replaced`` may have been there before."""
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


def _blocks(records: Iterable[FastaRecord]) -> Iterator[list[FastaRecord]]:
    """Neighbouring records, of about so many letters together as are looked up at once."""
    block, n_letters = list[FastaRecord](), 0
    for record in records:
        block.append(record)
        n_letters += len(record.sequence)
        if n_letters >= _BLOCK_LETTERS:
            yield block
            block, n_letters = [], 0
    if block:
        yield block


def refuse_duplicates(hashes: array[int], manifest: Manifest) -> None:
    """
    Raises:
        InputError: an id occurs twice; only then the inputs are read again to say where.
    """
    replaced = frozenset(manifest.replaced)
    repeat = find_repeat(
        (
            (file, record)
            for file in manifest.inputs
            for record in manifest.ids.read(file)
            if not (file.generation and record.id in replaced)
        ),
        hashes,
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
    embed = [tuple(step) for step in manifest.embed]
    text = repr((manifest.recipe.fingerprint, hashes, manifest.replaced, embed))
    return hashlib.sha256(text.encode()).hexdigest()


def _plan_sha256(stored: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(stored).encode()).hexdigest()


def _to_json(plan: Plan, manifest: Manifest) -> dict[str, object]:
    stored = {
        "key": _key(manifest),
        "counts": asdict(plan.counts),
        "series": [
            [[shard.n_orfs, shard.n_embedded, shard.n_residues, shard.sha256] for shard in shards]
            for shards in plan.series
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
        index, series = 0, []
        for entries in stored["series"]:
            shards = []
            for n_orfs, n_embedded, n_residues, digest in entries:
                path = rundir.shards / f"{shard_name(index)}.faa"
                shards.append(Shard(index, path, n_orfs, n_embedded, n_residues, digest))
                index += 1
            series.append(tuple(shards))
        files = tuple(tuple((int(a), int(b)) for a, b in spans) for spans in stored["files"])
        return Plan(tuple(series), PlanCounts(**stored["counts"]), files)
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
