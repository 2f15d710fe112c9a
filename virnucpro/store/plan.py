"""Plan a run: decide which ORFs of the inputs go into which shard.

Inputs are cut into slices by content alone, separately for each generation. Any process on any
machine can plan a slice independently: it screens, chunks and translates the slice's records into
shards, with separate shards for each rule of ``--embed``. Neither the machine nor inputs and
records that are added later change a slice's shards or feature files. Each slice has its own range
of shard numbers, so the numbers have gaps.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import text_writer
from virnucpro.core.errors import FeatureFileError, InputError
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import printable
from virnucpro.core.numeric import IntArray
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EmbeddingRule, Recipe
from virnucpro.core.types import (
    FastaRecord,
    Records,
    Shard,
    check_counts,
    shard_name,
)
from virnucpro.sequences.derived_names import FRAME_ENDINGS
from virnucpro.sequences.fasta import Block, Span, StreamCache, parse_block, write_record
from virnucpro.sequences.input_scan import find_repeat
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.orfs import Orfs
from virnucpro.sequences.samples import id_digests
from virnucpro.sequences.screen import EXCLUDED, REJECTED, reject_records
from virnucpro.store.feature_file import read_checksummed, write_checksummed
from virnucpro.store.manifest import Manifest
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_files import N_SMALL_SHARDS, ShardWriter

if TYPE_CHECKING:
    from virnucpro.sequences.translate import Chunks

# spans of inputs, each with the input's index in the manifest
InputSpans: TypeAlias = tuple[tuple[int, Span], ...]
Part = TypeVar("Part")  # a record or file
ShardSpans: TypeAlias = tuple[tuple[int, int], ...]  # shard spans as (first, last + 1)
LETTERS_AT_ONCE = 500_000  # in records that are called, translated or screened together


# Returns for each record in a block the index of the first ``--embed`` rule that selects it,
# ``EXCLUDED`` or ``REJECTED``: (n,). Helper processes import it by its name.
SelectRecords: TypeAlias = Callable[[Records, Recipe, Sequence[EmbeddingRule]], IntArray]


def select_all_records(
    records: Records, recipe: Recipe, rules: Sequence[EmbeddingRule]
) -> IntArray:
    """Select every record that has a frame to embed, for the first rule."""
    return reject_records(np.zeros(len(records.ids), dtype=np.int64), records, recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The records that a run embeds, and those that it later searches for regions."""

    select: SelectRecords = select_all_records
    min_searched_length: int | None = None  # bases; None: no record is searched

    def count_searched(self, lengths: NDArray[np.int64]) -> int:
        """Count the letters in records that may be searched, given (n,) record lengths."""
        if self.min_searched_length is None:
            return 0
        is_searched = lengths >= self.min_searched_length
        return int(lengths[is_searched].sum()) if np.count_nonzero(is_searched) else 0


@dataclass(slots=True)
class PlanCounts:
    """The counts of a plan."""

    n_records: int = 0
    n_letters: int = 0
    n_searched: int = 0  # letters in records that may be searched for regions
    n_short: int = 0  # records shorter than half a chunk
    n_gapped: int = 0  # records with gaps
    n_gaps: int = 0  # gaps removed from them
    n_copies: int = 0  # ORFs with a protein that occurred before
    n_copied_residues: int = 0
    n_left: int = 0  # records that --embed excludes
    n_left_letters: int = 0

    def __post_init__(self) -> None:
        check_counts(*astuple(self))


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighbouring input records, cut by content alone, to be planned and called separately."""

    index: int  # index of its first shard and its first block
    generation: int  # generation of its inputs
    rule_index: int  # index of the ``--embed`` rule
    spans: InputSpans
    is_first: bool  # first in its series

    @property
    def name(self) -> str:
        return shard_name(self.index)

    def to_row(self) -> tuple[int, int, int, InputSpans, bool]:
        """Return the fields in order. ``dataclasses.astuple`` would copy every span."""
        return self.index, self.generation, self.rule_index, self.spans, self.is_first


def group_boundaries() -> Callable[[int], bool]:
    """Make a function that takes the letters of each part in turn: True if a group ends there.

    The parts of a group are called together.
    """
    parts_at_once = 5_000  # records, or small files
    n_letters = n_parts = 0

    def is_end(n_more: int) -> bool:
        nonlocal n_letters, n_parts
        n_letters += n_more
        n_parts += 1
        is_full = n_letters >= LETTERS_AT_ONCE or n_parts == parts_at_once
        if is_full:
            n_letters = n_parts = 0
        return is_full

    return is_end


def group_parts(parts: Iterable[Part], n_letters: Callable[[Part], int]) -> Iterator[list[Part]]:
    """Yield neighbouring parts in groups, as ``group_boundaries`` defines them."""
    group: list[Part] = []
    is_end = group_boundaries()
    for part in parts:
        group.append(part)
        if is_end(n_letters(part)):
            yield group
            group = []
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The shards of a slice, and the inputs that they come from."""

    shards: tuple[Shard, ...]
    counts: PlanCounts
    spans: ShardSpans  # one per input
    # input parts that are called together; empty if some process cannot read them
    blocks: tuple[InputSpans, ...] = ()
    n_orfs: tuple[int, ...] = ()  # of each block, also if some process cannot read them


@dataclass(frozen=True, eq=False)
class Plan:
    """The slices of each series, in order, and the plans made so far."""

    rundir: RunDir
    manifest: Manifest
    slices: tuple[Slice, ...] = ()
    slice_plans: Mapping[int, SlicePlan] = field(default_factory=dict)  # by slice index
    keep_intermediate: bool = False  # keep the shards' bases, and the chunks
    # files are written to a staging folder, so that the old plan stays until this one is complete
    is_staged: bool = False
    streams: StreamCache = field(default_factory=StreamCache)

    @classmethod
    def cut(cls, rundir: RunDir, manifest: Manifest, *, keep_intermediate: bool) -> Plan:
        """Cut the inputs into slices, to be planned in the staging folder.

        Raises:
            InputError, InputMissingError: an input cannot be read.
        """
        slices = _split_slices(manifest)
        return cls(rundir, manifest, slices, {}, keep_intermediate, is_staged=True)

    @property
    def folder(self) -> Path:
        return self.rundir.staged.shards if self.is_staged else self.rundir.shards

    @cached_property
    def key(self) -> str:
        """Return the key in this plan's files."""
        return plan_key(self.manifest)

    def checksum_header(self, input_slice: Slice) -> dict[str, str | int]:
        """Return the attributes that identify the files of a slice."""
        return {"key": self.key, "slice": input_slice.index}

    @property
    def planned_slices(self) -> list[Slice]:
        return [input_slice for input_slice in self.slices if input_slice.index in self.slice_plans]

    @property
    def missing_slices(self) -> list[Slice]:
        return [
            input_slice for input_slice in self.slices if input_slice.index not in self.slice_plans
        ]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        parts = (self.slice_plans[input_slice.index] for input_slice in self.planned_slices)
        return tuple(chain.from_iterable(part.shards for part in parts))

    @property
    def shards_by_slice(self) -> dict[int, tuple[Shard, ...]]:
        return {index: part.shards for index, part in self.slice_plans.items()}

    @cached_property
    def indices(self) -> list[int]:
        """Return the shard indices, in order."""
        return [shard.index for shard in self.shards]

    @cached_property
    def counts(self) -> PlanCounts:
        rows = [astuple(part.counts) for part in self.slice_plans.values()]
        return PlanCounts(*map(sum, zip(*rows, strict=True)))

    @cached_property
    def shards_by_input(self) -> tuple[ShardSpans, ...]:
        """Return the shards of each input, as far as they are planned."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for input_slice in self.planned_slices:
            shard_spans = self.slice_plans[input_slice.index].spans
            for (index, _), shard_span in zip(input_slice.spans, shard_spans, strict=True):
                spans.setdefault(index, []).append(shard_span)
        return tuple(tuple(spans[index]) for index in sorted(spans))

    def group_by_records(self) -> Iterator[list[Slice]]:
        """Yield the slices in table order, grouping those with the same records."""
        same: dict[tuple[int, InputSpans], list[Slice]] = {}
        for input_slice in self.slices:
            same.setdefault((input_slice.generation, input_slice.spans), []).append(input_slice)
        yield from (same[key] for key in sorted(same, key=lambda key: (key[0], same[key][0].index)))

    def select_slices(self, indices: Collection[int]) -> Plan:
        """Return a plan with only these slices."""
        parts = {index: part for index, part in self.slice_plans.items() if index in indices}
        slices = tuple(input_slice for input_slice in self.slices if input_slice.index in indices)
        return replace(self, slices=slices, slice_plans=parts)

    @property
    def keeps_chunks(self) -> bool:
        return self.keep_intermediate and self.manifest.recipe.has_chunks

    def write_listing(self) -> None:
        """Write the list of slices into the folder with their plans."""
        listing = {
            "slices": [input_slice.to_row() for input_slice in self.slices],
            "keep_intermediate": self.keep_intermediate,
        }
        path = self.folder / self.rundir.plan.name
        write_checksummed(self.rundir, path, _json(listing), {"key": self.key})

    def write_chunks(self, selection: Selection) -> None:
        """Write the chunks of all embedded records, in shard order.

        Raises:
            InputError, InputMissingError: an input can no longer be read.
        """
        with self.rundir.atomic_write(self.rundir.chunks) as content, text_writer(content) as out:
            for input_slice in self.slices:
                task = _SliceTask(input_slice)
                planner = _Planner(self, selection)
                for index, span in input_slice.spans:
                    blocks = self.manifest.blocks([(index, span)], self.streams)
                    for records in task.selected(planner, index, blocks):
                        for chunks in _cut(records, self.manifest):
                            for name, text in zip(chunks.ids, chunks.sequences, strict=True):
                                write_record(out, name, text)

    def plan_slices(
        self, selection: Selection, on_letters: Callable[[int], None], pool: HelperPool
    ) -> Plan:
        """Plan the slices that are not planned yet, with the pool's processes if that is faster.

        The ids of all slices are compared, including those planned by other processes.

        Raises:
            InputError: an input is not a FASTA file, or an id occurs twice in these slices.
            UnavailableError: a process died.
        """
        slice_plans = dict(self.slice_plans)
        n_letters = 0
        with pool.stop_on_error():
            for input_slice, slice_plan in self.plan_missing(selection, pool):
                slice_plans[input_slice.index] = slice_plan
                n_letters += slice_plan.counts.n_letters
                on_letters(n_letters)
        plan = replace(self, slice_plans=slice_plans)
        plan.reject_duplicates(is_begun=not self.is_staged)
        return plan

    def plan_missing(
        self, selection: Selection, pool: HelperPool
    ) -> Iterator[tuple[Slice, SlicePlan]]:
        """Plan the slices that are not planned yet, and yield each with its plan, in order.

        Raises:
            InputError: an input is not a FASTA file.
            UnavailableError: a process died.
        """
        missing = self.missing_slices
        n_expected = InputFile.total_letters(self.manifest.inputs)
        n_worth = n_expected * len(missing) // max(1, len(self.slices))
        planner = _Planner(replace(self, slices=(), slice_plans={}), selection)
        helpers = pool.helpers(planner, n_worth, "parts of the plan")
        yield from zip(missing, helpers.map_in_order(map(_SliceTask, missing)), strict=True)

    def read_ids(self, input_slice: Slice) -> bytes:
        """Read the id digests of a planned slice. They are empty in a later rule of ``--embed``.

        Raises:
            FeatureFileError: their file is missing or corrupt.
        """
        if input_slice.rule_index:
            return b""
        return read_checksummed(
            self.folder / f"{input_slice.name}{RunDir.ids_suffix}",
            self.checksum_header(input_slice),
        )[1]

    def reject_duplicates(self, *, is_begun: bool) -> None:
        """Reject an id that occurs twice in planned slices.

        A slice with a corrupt file will be planned again, and its ids are compared then.

        Args:
            is_begun: the run can no longer take other inputs.

        Raises:
            InputError: an id occurs twice. The inputs are read again to find its positions.
        """
        digests = array("q")
        for input_slice in self.slices:
            with suppress(FeatureFileError):
                digests.frombytes(self.read_ids(input_slice))
        reject_duplicates(digests, self.manifest, is_begun=is_begun)


def count_done(files: Iterable[ShardSpans], missing: Sequence[int]) -> int:
    """Count the inputs without a shard in ``missing``, which is sorted."""
    n_done = 0
    for spans in files:
        n_done += all(
            bisect_left(missing, first) == bisect_left(missing, end) for first, end in spans
        )
    return n_done


def _split_slices(manifest: Manifest) -> tuple[Slice, ...]:
    """Return the slices of all series, in order. Small files share a slice."""
    n_bytes = manifest.recipe.bytes_per_slice
    n_numbers = _count_numbers(manifest.recipe)
    slices: list[Slice] = []
    index = 0
    groups = [list(_group(manifest, generation)) for generation in range(manifest.n_generations)]
    for generation, rule_index in manifest.series:
        for position, (spans, size) in enumerate(groups[generation]):
            slices.append(Slice(index, generation, rule_index, spans, position == 0))
            index += max(1, -(-size // n_bytes)) * n_numbers
    return tuple(slices)


def _group(manifest: Manifest, generation: int) -> Iterator[tuple[InputSpans, int]]:
    """Yield neighbouring spans that together fill a slice, and their size in bytes."""
    n_bytes = manifest.recipe.bytes_per_slice
    group: list[tuple[int, Span]] = []
    size = 0
    for index, file in enumerate(manifest.inputs):
        if file.generation != generation:
            continue
        spans, n_content = file.spans(n_bytes)
        for span in spans:
            group.append((index, span))
            size += (n_content if span.end is None else span.end) - span.start
            if size >= n_bytes:
                yield tuple(group), size
                group = []
                size = 0
    if group:
        yield tuple(group), size


def _count_numbers(recipe: Recipe) -> int:
    """Return how many shard numbers a slice reserves: a power of ten that is never used up.

    Six frames have two residues per base, and a base is in at most two chunks.
    """
    min_numbers = 1000  # shard numbers per slice, so that shard names stay short
    number = min_numbers
    while number < N_SMALL_SHARDS + 4 * recipe.bytes_per_slice // recipe.largest_shard:
        number *= 10
    return number


@dataclass(frozen=True, slots=True, eq=False)
class _Planner:
    """The context for planning any slice, sent to helpers."""

    plan: Plan  # without slices
    selection: Selection


@dataclass(slots=True, eq=False)
class _SliceTask:
    """Plan a slice: write its shards, its id digests, and last the shard hashes."""

    slice: Slice
    n_letters: ClassVar[int] = 0  # waiting tasks keep no letters in memory
    counts: PlanCounts = field(default_factory=PlanCounts)
    digests: list[bytes] = field(default_factory=list)  # of ids, which would fill the memory
    blocks: list[list[tuple[int, Span]]] = field(default_factory=list)
    n_orfs: list[int] = field(default_factory=list)  # of each block
    are_ranged: bool = True  # True if any process can read each block
    is_complete: bool = True  # True if the next record begins a block
    is_end: Callable[[int], bool] = field(init=False)

    def do(self, planner: _Planner) -> SlicePlan:
        """Plan the slice and write its files.

        Raises:
            InputError: an input is not a FASTA file.
            OutputError, StorageError: the files cannot be written.
        """
        plan = planner.plan
        rundir = plan.rundir
        stem = plan.folder / self.slice.name
        header = plan.checksum_header(self.slice)
        self.is_end = group_boundaries()
        writer = ShardWriter(
            rundir,
            plan.folder,
            plan.manifest.recipe,
            self.slice.index,
            keep_bases=plan.keep_intermediate,
            is_first=self.slice.is_first,
        )
        spans = []
        for index, span in self.slice.spans:
            first = writer.next_index
            for orfs in self.orfs(planner, index, span):
                writer.add_orfs(orfs)
                self.n_orfs[-1] += len(orfs)
            spans.append((first, writer.end_index))
        writer.flush()
        if self.slice.rule_index:  # the first rule has counted each record
            self.counts = PlanCounts()
        else:
            content = b"".join(self.digests)
            write_checksummed(rundir, stem.with_suffix(RunDir.ids_suffix), content, header)
        self.counts.n_copies = writer.n_copies
        self.counts.n_copied_residues = writer.n_copied_residues
        shards = tuple(
            replace(shard, path=rundir.shards / shard.path.name) for shard in writer.shards
        )
        blocks = tuple(map(tuple, self.blocks)) if self.are_ranged else ()
        n_orfs = tuple(self.n_orfs)
        slice_plan = SlicePlan(shards, self.counts, tuple(spans), blocks, n_orfs)
        content = _json(_slice_to_dict(slice_plan))
        write_checksummed(rundir, stem.with_suffix(RunDir.plan_suffix), content, header)
        return slice_plan

    def orfs(self, planner: _Planner, index: int, span: Span) -> Iterator[Orfs]:
        """Yield the ORFs of a span, in blocks."""
        manifest = planner.plan.manifest
        recipe = manifest.recipe
        blocks = manifest.ids.blocks(manifest.inputs[index], span, planner.plan.streams)
        selected = self.selected(planner, index, self.listed(blocks, index))
        if not recipe.has_chunks:
            for records in selected:
                proteins = [record.protein for record in records.iter_records()]
                yield Orfs.from_proteins(records.ids, proteins)
            return
        # not needed for proteins
        from virnucpro.sequences.genetic_code import GeneticCode
        from virnucpro.sequences.translate import translate_chunks

        code = GeneticCode.from_number(recipe.genetic_code)
        for records in selected:
            for chunks in _cut(records, manifest):
                yield translate_chunks(chunks, code)

    def selected(self, planner: _Planner, index: int, blocks: Iterable[Block]) -> Iterator[Records]:
        """Yield the records that this rule embeds, in blocks. The first rule counts all records.

        Each rule scores every record again.
        """
        manifest = planner.plan.manifest
        recipe = manifest.recipe
        file = manifest.inputs[index]
        rules = tuple(manifest.embed)
        for records in parse_block(blocks):
            ids = _disambiguate_ids(manifest, file, records.ids)
            self.digests.append(id_digests(ids).tobytes())
            first_rules = planner.selection.select(records, recipe, rules)
            self.count(records, first_rules, planner)
            is_selected = first_rules == self.slice.rule_index
            if np.count_nonzero(is_selected):
                yield records.select(is_selected.tolist())

    def listed(self, blocks: Iterable[Block], index: int) -> Iterator[Block]:
        """Pass on the blocks of an input, and record their spans."""
        for block in blocks:
            if self.is_complete:
                self.blocks.append([])
                self.n_orfs.append(0)
            span = None if isinstance(block, Records) else block.span
            group = self.blocks[-1]
            if span is None:
                self.are_ranged = False
            elif group and group[-1][0] == index:
                group[-1] = (index, group[-1][1]._replace(end=span.end))
            else:
                group.append((index, span))
            self.is_complete = self.is_end(block.n_letters)
            yield block

    def count(self, records: Records, first_rules: IntArray, planner: _Planner) -> None:
        counts = self.counts
        lengths = records.lengths
        counts.n_records += len(lengths)
        counts.n_letters += records.n_letters
        counts.n_searched += planner.selection.count_searched(lengths)
        counts.n_gapped += sum(map(bool, records.n_gaps))
        counts.n_gaps += sum(records.n_gaps)
        # many blocks are small: numpy counts them several times as fast as it sums them
        is_short = 2 * lengths < planner.plan.manifest.recipe.chunk_size
        counts.n_short += int(np.count_nonzero(is_short & (first_rules != REJECTED)))
        is_left = first_rules == EXCLUDED
        if n_left := int(np.count_nonzero(is_left)):
            counts.n_left += n_left
            counts.n_left_letters += int(lengths[is_left].sum())


def _cut(records: Records, manifest: Manifest) -> Iterator[Chunks]:
    """Cut records into chunks. Neither chunks nor their frames get the id of another record."""
    from virnucpro.sequences.translate import Chunks  # not needed for proteins

    blocks = Chunks.from_records(records, manifest.recipe.chunk_size)
    taken = manifest.taken
    if not taken:
        yield from blocks
        return
    names = records.names
    is_concerned = taken.concern(records.ids) | taken.concern(names)
    concerned = dict(compress(zip(records.ids, names, strict=True), is_concerned))
    for chunks in blocks:
        ids = list(chunks.ids)
        for row, record_id in enumerate(chunks.record_ids):
            if record_id in concerned:
                suffix = ids[row][len(record_id) :]
                own_ids = (record_id, concerned[record_id])
                ids[row] = record_id + taken.free_suffix(own_ids, suffix, FRAME_ENDINGS)
        yield chunks._replace(ids=ids)


def _disambiguate_ids(manifest: Manifest, file: InputFile, ids: list[str]) -> list[str]:
    """Return the ids, with the generation added for records that replace failed ones."""
    replaced = frozenset(manifest.replaced if file.generation else ())
    if replaced.isdisjoint(ids):
        return ids
    return [f"{name} {file.generation}" if name in replaced else name for name in ids]


def reject_duplicates(digests: array[int], manifest: Manifest, *, is_begun: bool = False) -> None:
    """Reject a repeated id. ``is_begun`` means that the run can no longer take other inputs.

    Raises:
        InputError: two id digests are equal, and so are the ids.
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
        replan_hint = with_options(
            "; then start again with {force}. Vectors in a {cache} are read and not recomputed; "
            "nothing was deleted"
        )
        again = replan_hint if is_begun else ""
        remedy = with_options("or add {rename_duplicates}{again}", again=again)
    raise repeat.error(remedy)


def _group_by_distinct_ids(manifest: Manifest) -> Iterator[tuple[InputFile, FastaRecord]]:
    for file in manifest.inputs:
        for records in parse_block(manifest.ids.blocks(file)):
            ids = _disambiguate_ids(manifest, file, records.ids)
            for record_id, record in zip(ids, records.iter_records(), strict=True):
                yield file, record._replace(id=record_id)


# The files of a plan


def plan_key(manifest: Manifest) -> str:
    facts = [_input_facts(manifest, file) for file in manifest.inputs]
    rules = list(manifest.embed.items())
    format_number = 6  # increase when plan parts from two program states cannot be joined
    text = repr((format_number, manifest.recipe.fingerprint, facts, manifest.replaced, rules))
    return hashlib.sha256(text.encode()).hexdigest()


def _input_facts(manifest: Manifest, file: InputFile) -> tuple[object, ...]:
    """Return the facts about an input that change the plan."""
    sample = file.sample if manifest.is_qualified else ""
    facts = (file.identity, file.generation, file.n_renamed, sample)
    return (*facts, file.mate) if file.mate else facts


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode()


def _slice_to_dict(part: SlicePlan) -> dict[str, object]:
    shards = [
        (shard.index, shard.n_orfs, shard.n_embedded, shard.n_residues, shard.sha256)
        for shard in part.shards
    ]
    return {
        "counts": asdict(part.counts),
        "shards": shards,
        "spans": part.spans,
        "blocks": part.blocks,
        "n_orfs": part.n_orfs,
    }
