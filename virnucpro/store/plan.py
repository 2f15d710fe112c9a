"""The plan of a run: which ORFs of the inputs are in which shard.

The content of the inputs of a generation alone determines how they are cut into slices. Any process
on any machine can plan a slice by itself: it screens, chunks and translates the records into shards
of this slice, separate ones for each step of ``--embed``. So neither the machines, nor inputs and
records that are added later, change the shards of a slice or their feature files. Each slice has a
range of shard numbers of its own, so numbers have gaps.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import hash_file, parse_json, text_writer
from virnucpro.core.errors import FeatureFileError, InputError
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EmbeddingRule, Recipe
from virnucpro.core.types import (
    PROTEIN,
    FastaRecord,
    Orf,
    Records,
    Shard,
    check_counts,
    shard_name,
)
from virnucpro.sequences.derived_names import FRAME_ENDINGS
from virnucpro.sequences.fasta import Block, Span, StreamCache, parse_block, write_record
from virnucpro.sequences.input_scan import find_repeat
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.samples import id_digests
from virnucpro.sequences.translate import Chunk, reject_reasons
from virnucpro.store.feature_file import Attributes, read_checksummed, write_checksummed
from virnucpro.store.feature_store import OnShard
from virnucpro.store.manifest import Manifest
from virnucpro.store.run_dir import IDS, PLAN, RunDir
from virnucpro.store.shard_files import N_SMALL_SHARDS, ShardWriter

# spans of inputs, each with the input's index in the manifest
InputSpans: TypeAlias = tuple[tuple[int, Span], ...]
Part = TypeVar("Part")  # of what is read
ShardSpans: TypeAlias = tuple[tuple[int, int], ...]  # of shards: first, and one after the last
LETTERS_AT_ONCE = 500_000  # of records that are called, translated or screened together
_PARTS_AT_ONCE = 5_000  # records, or small files
_FORMAT = 5  # raise it if parts of plans of two states could not be joined
_LEAST_NUMBERS = 1000  # for the shards of a slice, so that their names stay short
_DAMAGE = (FeatureFileError, ValueError, KeyError, TypeError)  # errors from a damaged file


# Yields the records of a block that can be embedded, each with the index of the first rule of
# ``--embed`` that selects it, or None if no rule does. Helper processes import it by its name.
SelectRecords: TypeAlias = Callable[
    [Records, Recipe, Sequence[EmbeddingRule]], Iterator[tuple[FastaRecord, int | None]]
]


def select_all_records(
    records: Records, recipe: Recipe, rules: Sequence[EmbeddingRule]
) -> Iterator[tuple[FastaRecord, int | None]]:
    """Select every record that has a frame to embed, for the first rule."""
    if not recipe.encoders:
        return
    screened = reject_reasons(records, recipe)
    for index, record in enumerate(records.iter_records()):
        if index not in screened:
            yield record, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which records of the inputs a run embeds, and which ones it searches for regions later."""

    select: SelectRecords = select_all_records
    min_searched_length: int | None = None  # bases; None: no record is searched

    def count_searched(self, lengths: NDArray[np.int64]) -> int:
        """The letters of the records that may be searched. (n,) lengths of records"""
        if self.min_searched_length is None:
            return 0
        return int(lengths[lengths >= self.min_searched_length].sum())


@dataclass(slots=True)
class _PlanCounts:
    """What a plan has counted."""

    n_records: int = 0
    n_letters: int = 0
    n_searched: int = 0  # letters of records that may be searched for regions
    n_short: int = 0  # records shorter than half a chunk
    n_gapped: int = 0  # records with gaps
    n_gaps: int = 0  # gaps in them, which are left out
    n_copies: int = 0  # ORFs with a protein that occurred before
    n_copied_residues: int = 0
    n_left: int = 0  # records that --embed leaves out
    n_left_letters: int = 0

    def __post_init__(self) -> None:
        check_counts(*astuple(self))


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighbouring records of the inputs, cut by content alone; planned and called by itself."""

    index: int  # of its first shard, and of its first block
    generation: int  # of the inputs
    rule_index: int  # of ``--embed``
    spans: InputSpans
    is_first: bool  # in its series

    @property
    def name(self) -> str:
        return shard_name(self.index)


def group_boundaries() -> Callable[[int], bool]:
    """Make a function that takes the letters of each part in turn: True if a group ends there.

    The parts of a group are called together.
    """
    n_letters = n_parts = 0

    def is_end(n_more: int) -> bool:
        nonlocal n_letters, n_parts
        n_letters, n_parts = n_letters + n_more, n_parts + 1
        is_full = n_letters >= LETTERS_AT_ONCE or n_parts == _PARTS_AT_ONCE
        if is_full:
            n_letters = n_parts = 0
        return is_full

    return is_end


def group_parts(parts: Iterable[Part], n_letters: Callable[[Part], int]) -> Iterator[list[Part]]:
    """Yield neighbouring parts in the groups of ``group_boundaries``."""
    group, is_end = list[Part](), group_boundaries()
    for part in parts:
        group.append(part)
        if is_end(n_letters(part)):
            yield group
            group = []
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _SlicePlan:
    """The shards of a slice, and the inputs that they come from."""

    shards: tuple[Shard, ...]
    counts: _PlanCounts
    spans: ShardSpans  # of each of its inputs
    # the parts of the inputs that are scored together; empty if not every process can read them
    blocks: tuple[InputSpans, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The slices of each series, in order, and the plans made so far."""

    rundir: RunDir
    manifest: Manifest
    slices: tuple[Slice, ...] = ()
    slice_plans: Mapping[int, _SlicePlan] = field(default_factory=dict)  # by the index of the slice
    keep_intermediate: bool = False  # keep bases of the shards, and chunks
    # its files are written elsewhere: the old plan stays until this one is complete
    is_staged: bool = False
    streams: StreamCache = field(default_factory=StreamCache)

    @classmethod
    def cut(cls, rundir: RunDir, manifest: Manifest, *, keep_intermediate: bool) -> Plan:
        """Cut the inputs into slices, to be planned aside.

        Raises:
            InputError, InputMissingError: an input cannot be read.
        """
        slices = _split_slices(manifest)
        return cls(rundir, manifest, slices, {}, keep_intermediate, is_staged=True)

    @classmethod
    def read(cls, rundir: RunDir, manifest: Manifest) -> Plan | None:
        """Read the slices in ``plan.json``, if it belongs to this run, with their intact plans."""
        try:
            listing = _read_json(rundir.plan, {"key": _plan_key(manifest)})
            n_inputs = len(manifest.inputs)
            slices = tuple(_slice_from_json(one, n_inputs) for one in listing["slices"])
            plan = cls(rundir, manifest, slices, {}, bool(listing["keep_intermediate"]))
        except _DAMAGE:
            return None
        parts = {}
        for one in slices:
            with suppress(*_DAMAGE):
                parts[one.index] = _read_part(plan, one)
        return replace(plan, slice_plans=parts)

    @property
    def folder(self) -> Path:
        return self.rundir.staged.shards if self.is_staged else self.rundir.shards

    @cached_property
    def key(self) -> str:
        """The key in the files of this plan."""
        return _plan_key(self.manifest)

    def checksum_header(self, one: Slice) -> dict[str, str | int]:
        """What the files of a slice are sealed with."""
        return {"key": self.key, "slice": one.index}

    @property
    def planned_slices(self) -> list[Slice]:
        return [one for one in self.slices if one.index in self.slice_plans]

    @property
    def missing_slices(self) -> list[Slice]:
        return [one for one in self.slices if one.index not in self.slice_plans]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        parts = (self.slice_plans[one.index] for one in self.planned_slices)
        return tuple(chain.from_iterable(part.shards for part in parts))

    @property
    def shards_by_slice(self) -> dict[int, tuple[Shard, ...]]:
        return {index: part.shards for index, part in self.slice_plans.items()}

    @cached_property
    def indices(self) -> list[int]:
        """The indices of the shards, in order."""
        return [shard.index for shard in self.shards]

    @cached_property
    def counts(self) -> _PlanCounts:
        each = [astuple(part.counts) for part in self.slice_plans.values()]
        return _PlanCounts(*map(sum, zip(*each, strict=True)))

    @cached_property
    def shards_by_input(self) -> tuple[ShardSpans, ...]:
        """The shards of each input, so far as they are planned."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for one in self.planned_slices:
            for (place, _), ends in zip(one.spans, self.slice_plans[one.index].spans, strict=True):
                spans.setdefault(place, []).append(ends)
        return tuple(tuple(spans[place]) for place in sorted(spans))

    def group_by_records(self) -> Iterator[list[Slice]]:
        """Yield the slices in the order of the tables, together if they have the same records."""
        same: dict[tuple[int, InputSpans], list[Slice]] = {}
        for one in self.slices:
            same.setdefault((one.generation, one.spans), []).append(one)
        yield from (same[key] for key in sorted(same, key=lambda key: (key[0], same[key][0].index)))

    def select_slices(self, indices: Collection[int]) -> Plan:
        """The plan of these slices only."""
        parts = {index: part for index, part in self.slice_plans.items() if index in indices}
        slices = tuple(one for one in self.slices if one.index in indices)
        return replace(self, slices=slices, slice_plans=parts)

    def without_damaged(self, shards: Sequence[Shard], on_shard: OnShard = lambda *_: None) -> Plan:
        """The plan without slices that have damaged ids or damaged ``shards``."""
        damaged, parts = _find_damaged(shards, on_shard), {}
        for one in self.planned_slices:
            part = self.slice_plans[one.index]
            if damaged.isdisjoint(shard.index for shard in part.shards):
                with suppress(FeatureFileError):
                    self.read_ids(one)
                    parts[one.index] = part
        return replace(self, slice_plans=parts)

    @property
    def keeps_chunks(self) -> bool:
        return self.keep_intermediate and self.manifest.recipe.has_chunks

    def write_listing(self) -> None:
        """Write the list of slices into the folder of their plans."""
        listing = {
            "slices": [astuple(one) for one in self.slices],
            "keep_intermediate": self.keep_intermediate,
        }
        path = self.folder / self.rundir.plan.name
        write_checksummed(self.rundir, path, _json(listing), {"key": self.key})

    def write_chunks(self, selection: Selection) -> None:
        """Write the chunks of all embedded records, in the order of their shards.

        Raises:
            InputError, InputMissingError: an input can no longer be read.
        """
        with self.rundir.atomic_write(self.rundir.chunks) as content, text_writer(content) as out:
            for one in self.slices:
                task = _SliceTask(one)
                planner = _Planner(self, selection)
                records = chain.from_iterable(task.selected(planner, *where) for where in one.spans)
                for chunk in chain.from_iterable(_cut(r, self.manifest) for r in records):
                    write_record(out, chunk.id, chunk.sequence)

    def plan_slices(
        self, selection: Selection, on_letters: Callable[[int], None], pool: HelperPool
    ) -> Plan:
        """Plan the slices that are not planned yet, with the processes of a pool if that is faster.

        The ids of all slices are compared, including those that other processes planned.

        Raises:
            InputError: an input is not a FASTA file, or an id occurs twice in these slices.
            UnavailableError: a process died.
        """
        missing, parts, n_letters = self.missing_slices, dict(self.slice_plans), 0
        n_expected = InputFile.total_letters(self.manifest.inputs)
        n_worth = n_expected * len(missing) // max(1, len(self.slices))
        planner = _Planner(replace(self, slices=(), slice_plans={}), selection)
        helpers = pool.helpers(planner, n_worth, "parts of the plan")
        made = helpers.map_in_order(map(_SliceTask, missing))
        with pool.stop_on_error():
            for one, part in zip(missing, made, strict=True):
                parts[one.index] = part
                n_letters += part.counts.n_letters
                on_letters(n_letters)
        plan = replace(self, slice_plans=parts)
        plan.reject_duplicates()
        return plan

    def read_ids(self, one: Slice) -> bytes:
        """The digests of the ids of a planned slice; empty in a later step of ``--embed``.

        Raises:
            FeatureFileError: their file is missing or damaged.
        """
        if one.rule_index:
            return b""
        return read_checksummed(self.folder / f"{one.name}{IDS}", self.checksum_header(one))[1]

    def reject_duplicates(self) -> None:
        """Refuse an id that occurs twice in planned slices.

        A slice with a damaged file is planned again, and its ids are compared then.

        Raises:
            InputError: an id occurs twice; the inputs are read again to say where.
        """
        digests = array("q")
        for one in self.slices:
            with suppress(FeatureFileError):
                digests.frombytes(self.read_ids(one))
        reject_duplicates(digests, self.manifest, is_begun=not self.is_staged)


def count_done(files: Iterable[ShardSpans], missing: Sequence[int]) -> int:
    """The number of inputs without a shard in ``missing``, which is sorted."""
    return sum(
        all(bisect_left(missing, first) == bisect_left(missing, end) for first, end in spans)
        for spans in files
    )


def _split_slices(manifest: Manifest) -> tuple[Slice, ...]:
    """The slices of all series, in order; small files share a slice."""
    n_bytes, n_numbers = manifest.recipe.bytes_per_slice, _count_numbers(manifest.recipe)
    slices, index = list[Slice](), 0
    by_generation = [list(_group(manifest, number)) for number in range(manifest.n_generations)]
    for generation, step in manifest.series:
        for place, (spans, size) in enumerate(by_generation[generation]):
            slices.append(Slice(index, generation, step, spans, place == 0))
            index += max(1, -(-size // n_bytes)) * n_numbers
    return tuple(slices)


def _group(manifest: Manifest, generation: int) -> Iterator[tuple[InputSpans, int]]:
    """Yield neighbouring spans that fill a slice together, and their bytes."""
    n_bytes, group, size = manifest.recipe.bytes_per_slice, list[tuple[int, Span]](), 0
    for place, file in enumerate(manifest.inputs):
        if file.generation != generation:
            continue
        spans, n_content = file.spans(n_bytes)
        for span in spans:
            group.append((place, span))
            size += (n_content if span.end is None else span.end) - span.start
            if size >= n_bytes:
                yield tuple(group), size
                group, size = [], 0
    if group:
        yield tuple(group), size


def _count_numbers(recipe: Recipe) -> int:
    """The size of the range of numbers for the shards of a slice: a power of ten, never used up.

    Six frames have two residues per base, and a base is in at most two chunks.
    """
    number = _LEAST_NUMBERS
    while number < N_SMALL_SHARDS + 4 * recipe.bytes_per_slice // recipe.largest_shard:
        number *= 10
    return number


@dataclass(frozen=True, slots=True)
class _Planner:
    """What planning any slice needs. It is sent to helpers."""

    plan: Plan  # without slices
    selection: Selection


@dataclass(slots=True)
class _SliceTask:
    """Plan a slice: write its shards, the digests of its ids, and last the hashes of shards."""

    slice: Slice
    n_letters: ClassVar[int] = 0  # waiting tasks hold no letters in memory
    counts: _PlanCounts = field(default_factory=_PlanCounts)
    digests: list[bytes] = field(default_factory=list)  # of ids: the ids would fill the memory
    blocks: list[list[tuple[int, Span]]] = field(default_factory=lambda: [[]])
    are_ranged: bool = True  # True if any process can read each block
    is_end: Callable[[int], bool] = field(init=False)

    def do(self, planner: _Planner) -> _SlicePlan:
        """
        Raises:
            InputError: an input is not a FASTA file.
            OutputError, StorageError: the files cannot be written.
        """
        plan = planner.plan
        rundir, one, recipe = plan.rundir, self.slice, plan.manifest.recipe
        stem, self.is_end = plan.folder / one.name, group_boundaries()
        writer = ShardWriter(
            rundir,
            plan.folder,
            recipe,
            one.index,
            keep_bases=plan.keep_intermediate,
            is_first=one.is_first,
        )
        spans = []
        for place, span in one.spans:
            first = writer.next_index
            for orfs in self.orfs(planner, place, span):
                writer.add_orfs(orfs)
            spans.append((first, writer.end_index))
        writer.flush()
        if one.rule_index:  # the first step has counted each record
            self.counts = _PlanCounts()
        else:
            content = b"".join(self.digests)
            write_checksummed(rundir, stem.with_suffix(IDS), content, plan.checksum_header(one))
        self.counts.n_copies = writer.n_copies
        self.counts.n_copied_residues = writer.n_copied_residues
        shards = tuple(replace(s, path=rundir.shards / s.path.name) for s in writer.shards)
        blocks = tuple(map(tuple, filter(None, self.blocks))) if self.are_ranged else ()
        part = _SlicePlan(shards, self.counts, tuple(spans), blocks)
        write_checksummed(
            rundir, stem.with_suffix(PLAN), _json(_slice_to_dict(part)), plan.checksum_header(one)
        )
        return part

    def orfs(self, planner: _Planner, place: int, span: Span) -> Iterator[Sequence[Orf]]:
        """Yield the ORFs of blocks of a file."""
        recipe = planner.plan.manifest.recipe
        records = self.selected(planner, place, span)
        if not recipe.has_chunks:
            for block in group_parts(records, lambda record: len(record.sequence)):
                texts = [(record.id, record.protein) for record in block]
                yield [Orf(name, name, name, 0, len(text), PROTEIN, text) for name, text in texts]
            return
        cut = (_cut(record, planner.plan.manifest) for record in records)
        for chunks in group_parts(chain.from_iterable(cut), lambda chunk: len(chunk.sequence)):
            yield Chunk.orfs(chunks, recipe)

    def selected(self, planner: _Planner, place: int, span: Span) -> Iterator[FastaRecord]:
        """Yield the records that this step embeds, and count the records that no step embeds.

        Each step scores every record again.
        """
        manifest = planner.plan.manifest
        recipe = manifest.recipe
        file = manifest.inputs[place]
        rules = tuple(manifest.embed)
        blocks = manifest.ids.blocks(file, span, planner.plan.streams)
        for records in parse_block(blocks if recipe.encoders else self.listed(blocks, place)):
            self.count(records, planner.selection)
            ids = _disambiguate_ids(manifest, file, records.ids)
            self.digests.append(id_digests(ids).tobytes())
            for record, step in planner.selection.select(records, recipe, rules):
                self.counts.n_short += 2 * len(record.sequence) < recipe.chunk_size
                if step == self.slice.rule_index:
                    yield record
                elif step is None:
                    self.counts.n_left += 1
                    self.counts.n_left_letters += len(record.sequence)

    def listed(self, blocks: Iterable[Block], place: int) -> Iterator[Block]:
        """Pass on the blocks of an input, and note where they are."""
        for block in blocks:
            span = None if isinstance(block, Records) else block.span
            group = self.blocks[-1]
            if span is None:
                self.are_ranged = False
            elif group and group[-1][0] == place:
                group[-1] = (place, group[-1][1]._replace(end=span.end))
            else:
                group.append((place, span))
            if self.is_end(block.n_letters):
                self.blocks.append([])
            yield block

    def count(self, records: Records, selection: Selection) -> None:
        counts = self.counts
        lengths = records.lengths
        counts.n_records += len(lengths)
        counts.n_letters += int(lengths.sum())
        counts.n_searched += selection.count_searched(lengths)
        counts.n_gapped += sum(map(bool, records.n_gaps))
        counts.n_gaps += sum(records.n_gaps)


def _cut(record: FastaRecord, manifest: Manifest) -> Iterator[Chunk]:
    """Cut a record into chunks; neither they nor their frames have the id of another record."""
    chunks = Chunk.of(record, manifest.recipe)
    taken = manifest.taken
    ids = [record.id, record.name]
    if not (taken and taken.concern(ids).any()):
        return chunks
    n_before = len(record.id)
    return (
        chunk._replace(id=record.id + taken.free_suffix(ids, chunk.id[n_before:], FRAME_ENDINGS))
        for chunk in chunks
    )


def _disambiguate_ids(manifest: Manifest, file: InputFile, ids: list[str]) -> list[str]:
    """The ids, with the generation added for records that replace failed ones."""
    replaced = frozenset(manifest.replaced if file.generation else ())
    if replaced.isdisjoint(ids):
        return ids
    return [f"{name} {file.generation}" if name in replaced else name for name in ids]


def reject_duplicates(digests: array[int], manifest: Manifest, *, is_begun: bool = False) -> None:
    """Refuse a repeated id. ``is_begun``: the run can no longer take other inputs.

    Raises:
        InputError: two digests of ids are the same, and so are the ids.
    """
    repeat = find_repeat(_group_by_distinct_ids(manifest), digests)
    if repeat is None:
        return
    name, is_corrected, _ = repeat.record_id.partition(" ")
    if is_corrected:
        raise InputError(
            f"{repeat.second}: the corrected record {printable(name)} occurs twice",
            hint="keep one of the two",
        )
    remedy = with_options(
        "or start again with all files and {force}: ids that files share are then written "
        "with their file; or leave the added file out"
    )
    if len(manifest.inputs) == 1:
        again = _AGAIN if is_begun else ""
        remedy = with_options("or add {rename_duplicates}{again}", again=again)
    raise repeat.error(remedy)


_AGAIN = with_options(
    "; then start again with {force}. Vectors in a {cache} are read and not made again; "
    "nothing was deleted"
)


def _group_by_distinct_ids(manifest: Manifest) -> Iterator[tuple[InputFile, FastaRecord]]:
    for file in manifest.inputs:
        for records in parse_block(manifest.ids.blocks(file)):
            ids = _disambiguate_ids(manifest, file, records.ids)
            for record_id, record in zip(ids, records.iter_records(), strict=True):
                yield file, record._replace(id=record_id)


# The files of a plan


def _plan_key(manifest: Manifest) -> str:
    hashes = [
        (
            *(file.identity, file.generation, file.n_renamed),
            *(file.sample if manifest.is_qualified else "", *((file.mate,) if file.mate else ())),
        )
        for file in manifest.inputs
    ]
    steps = list(manifest.embed.items())
    text = repr((_FORMAT, manifest.recipe.fingerprint, hashes, manifest.replaced, steps))
    return hashlib.sha256(text.encode()).hexdigest()


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode()


def _read_json(path: Path, seal: Attributes) -> dict[str, Any]:
    """
    Raises:
        FeatureFileError, ValueError, TypeError: it is missing or damaged, or of another plan.
    """
    return dict(parse_json(read_checksummed(path, seal)[1]))


def _slice_to_dict(part: _SlicePlan) -> dict[str, object]:
    shards = [
        (shard.index, shard.n_orfs, shard.n_embedded, shard.n_residues, shard.sha256)
        for shard in part.shards
    ]
    return {
        "counts": asdict(part.counts),
        "shards": shards,
        "spans": part.spans,
        "blocks": part.blocks,
    }


def _slice_from_json(stored: Sequence[Any], n_inputs: int) -> Slice:
    """
    Raises:
        ValueError, TypeError: it does not describe a slice of so many inputs.
    """
    index, generation, step, spans, is_first = stored
    check_counts(index, generation, step)
    return Slice(index, generation, step, _row_spans(spans, n_inputs), bool(is_first))


def _row_spans(stored: Sequence[Any], n_inputs: int) -> InputSpans:
    """
    Raises:
        ValueError, TypeError: they do not describe spans of so many inputs.
    """
    each = tuple((place, Span(*span)) for place, span in stored)
    for place, span in each:
        check_counts(place, span.start, span.n_lines, span.start if span.end is None else span.end)
        if place >= n_inputs:
            raise ValueError("there are not so many inputs")
    return each


def _read_part(plan: Plan, one: Slice) -> _SlicePlan:
    """Read the plan of a slice.

    Raises:
        FeatureFileError, ValueError, KeyError, TypeError: it is missing or damaged.
    """
    stored = _read_json(plan.folder / f"{one.name}{PLAN}", plan.checksum_header(one))
    shards = []
    for index, *facts in stored["shards"]:
        if not one.index <= index <= one.index + len(stored["shards"]):
            raise ValueError("a shard of another slice")
        shards.append(Shard(index, plan.folder / f"{shard_name(index)}.faa", *facts))
    spans = tuple((int(first), int(end)) for first, end in stored["spans"])
    blocks = tuple(_row_spans(places, len(plan.manifest.inputs)) for places in stored["blocks"])
    return _SlicePlan(tuple(shards), _PlanCounts(**stored["counts"]), spans, blocks)


def _find_damaged(shards: Sequence[Shard], on_shard: OnShard) -> set[int]:
    """The indices of the shards with missing or damaged files."""
    damaged = set[int]()
    with ThreadPoolExecutor() as pool:  # hashing a block releases Python's lock
        for i, (shard, is_whole) in enumerate(
            zip(shards, pool.map(_is_complete, shards), strict=True)
        ):
            on_shard(i, len(shards))
            if not is_whole:
                damaged.add(shard.index)
    return damaged


def _is_complete(shard: Shard) -> bool:
    try:
        # each ORF and each residue takes at least a letter of the file
        has_room = shard.n_orfs + shard.n_residues <= shard.path.stat().st_size
        return has_room and hash_file(shard.path) == shard.sha256
    except OSError:
        return False
