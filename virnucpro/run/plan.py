"""The plan of a run: which ORFs of the inputs stand in which shard.

The inputs of each generation are cut into slices, by their content alone. Each slice is planned by
itself, by any process of any machine: its records go through screening, chunking and translation
into shards of its own, those that each step of ``--embed`` asks for apart. So neither machines, nor
inputs and records that are added later, change the shards of a slice, or their feature files.
Shards are numbered by where their slice begins, so numbers have gaps.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TextIO, TypeAlias, TypeVar

from virnucpro.callers.caller import asking
from virnucpro.callers.regions import SHORTEST_RECORD
from virnucpro.ground.config import Recipe
from virnucpro.ground.errors import InputError
from virnucpro.ground.files import as_text, open_plain, parse_json, sha256
from virnucpro.ground.log import printable
from virnucpro.ground.records import (
    PROTEIN,
    FastaRecord,
    Orf,
    Records,
    Shard,
    check_counts,
    shard_name,
)
from virnucpro.ground.tasks import Pool
from virnucpro.run.folder import CHUNKS, IDS, PLAN, RunDir
from virnucpro.run.manifest import Manifest
from virnucpro.run.shards import N_SMALL_SHARDS, SeenOrfs, ShardWriter, digests_of, header_of
from virnucpro.sequences.fasta import Block, Span, Streams, parsed, write_record
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.samples import id_digests
from virnucpro.sequences.survey import find_repeat
from virnucpro.sequences.translate import Chunk, GeneticCode, translate_six_frames

Places: TypeAlias = tuple[tuple[int, Span], ...]  # each of an input, by its place in the manifest
Spans: TypeAlias = tuple[tuple[int, int], ...]  # of shards: the first, and one after the last
LETTERS_AT_ONCE = 500_000  # of the records that are called
_PARTS_AT_ONCE = 5_000  # records, or small files
_BLOCK_LETTERS = 500_000  # letters that are translated, or looked up, at once
_SHARDS_AT_ONCE = 256  # shards that are verified at once
_FORMAT = 3  # raise it when the same records would give another plan, or other digests of ids
_LEAST_NUMBERS = 1000  # of the shards of a slice, so that their names are short


@dataclass(slots=True)
class _PlanCounts:
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


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighbouring records of the inputs, cut by content alone: planned, and called, by itself."""

    index: int  # of its first shard, and of its first block of records
    generation: int  # of the inputs
    step: int  # of ``--embed``
    spans: Places
    is_first: bool  # of its series

    @property
    def name(self) -> str:
        return shard_name(self.index)

    def blocks(self, manifest: Manifest, streams: Streams) -> Iterator[Block]:
        """The records, by their ids in the run.

        Raises:
            InputError, InputMissingError: as ``InputFile.blocks``.
        """
        return manifest.blocks(self.spans, streams)


def ends_of_groups() -> Callable[[int], bool]:
    """A function that says whether a group that is called at once ends with the next of its parts.

    It is given the number of letters of each.
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


@dataclass(frozen=True, slots=True)
class _SlicePlan:
    """The shards of a slice, and what they were made of."""

    shards: tuple[Shard, ...]
    counts: _PlanCounts
    spans: Spans  # of each of its inputs
    # parts of the inputs that are scored at once, if any process can read them: each of some files
    blocks: tuple[Places, ...] = ()
    ids: str = ""  # SHA-256 of the digests of its ids; none in a later step of ``--embed``


@dataclass(frozen=True)
class Plan:
    """The slices of each series, in order, and the plans of those that are planned."""

    slices: tuple[Slice, ...]
    parts: Mapping[int, _SlicePlan] = field(default_factory=dict)  # by the index of the slice
    keep_intermediate: bool = False  # bases of the shards, and chunks

    @classmethod
    def cut(cls, manifest: Manifest, *, keep_intermediate: bool) -> Plan:
        """The slices of the inputs, none of which is planned.

        Raises:
            InputError, InputMissingError: an input cannot be read.
        """
        return cls(_slices_of(manifest), {}, keep_intermediate)

    @classmethod
    def read(cls, rundir: RunDir, manifest: Manifest) -> Plan | None:
        """The slices in ``plan.json``, if it is of this run, with the plans that are as written."""
        try:
            key = _key(manifest)
            listing = _read_sealed(rundir.plan, key)
            n_inputs = len(manifest.inputs)
            slices = tuple(_slice_from_json(one, n_inputs) for one in listing["slices"])
            keep_intermediate = bool(listing["keep_intermediate"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        parts = {}
        for one in slices:
            with suppress(OSError, ValueError, KeyError, TypeError):
                parts[one.index] = _read_part(rundir, key, one, n_inputs)
        return cls(slices, parts, keep_intermediate)

    @property
    def missing(self) -> list[Slice]:
        return [one for one in self.slices if one.index not in self.parts]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        parts = (self.parts[one.index] for one in self.slices if one.index in self.parts)
        return tuple(chain.from_iterable(part.shards for part in parts))

    @cached_property
    def indices(self) -> list[int]:
        """Those of the shards, which rise."""
        return [shard.index for shard in self.shards]

    @cached_property
    def counts(self) -> _PlanCounts:
        each = [part.counts for part in self.parts.values()]
        names = [count.name for count in fields(_PlanCounts)]
        return _PlanCounts(*(sum(getattr(counts, name) for counts in each) for name in names))

    @cached_property
    def files(self) -> tuple[Spans, ...]:
        """The shards of each input, as far as they are planned."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for one in [one for one in self.slices if one.index in self.parts]:
            for (place, _), ends in zip(one.spans, self.parts[one.index].spans, strict=True):
                spans.setdefault(place, []).append(ends)
        return tuple(tuple(spans[place]) for place in sorted(spans))

    def by_records(self) -> Iterator[list[Slice]]:
        """The slices of all records, in the order of the tables: those of one for each step."""
        same: dict[tuple[int, Places], list[Slice]] = {}
        for one in self.slices:
            same.setdefault((one.generation, one.spans), []).append(one)
        yield from (same[key] for key in sorted(same, key=lambda key: (key[0], same[key][0].index)))

    def limited(self, indices: Collection[int]) -> Plan:
        """The plan of some of the slices."""
        parts = {index: part for index, part in self.parts.items() if index in indices}
        slices = tuple(one for one in self.slices if one.index in indices)
        return replace(self, slices=slices, parts=parts)


def count_done(files: Iterable[Spans], missing: Sequence[int]) -> int:
    """The number of files without a shard among ``missing``, which is sorted."""
    return sum(
        all(bisect_left(missing, first) == bisect_left(missing, end) for first, end in spans)
        for spans in files
    )


def _slices_of(manifest: Manifest) -> tuple[Slice, ...]:
    """The slices of all series, in their order; files that are small share one."""
    n_bytes, n_numbers = manifest.recipe.bytes_per_slice, _count_numbers(manifest.recipe)
    slices, index = list[Slice](), 0
    by_generation = [list(_group(manifest, number)) for number in range(manifest.n_generations)]
    for generation, step in manifest.series:
        for place, (spans, size) in enumerate(by_generation[generation]):
            slices.append(Slice(index, generation, step, spans, place == 0))
            index += max(1, -(-size // n_bytes)) * n_numbers
    return tuple(slices)


def _group(
    manifest: Manifest, generation: int
) -> Iterator[tuple[tuple[tuple[int, Span], ...], int]]:
    """Neighbouring spans that fill a slice together, and their bytes."""
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
    """The numbers for the shards of a slice: a power of ten that they never reach.

    A base is in two residues of the six frames, and in two chunks at most.
    """
    most, number = N_SMALL_SHARDS + 4 * recipe.bytes_per_slice // recipe.largest_shard, 1
    while number < max(most, _LEAST_NUMBERS):
        number *= 10
    return number


@dataclass(frozen=True, slots=True)
class Planner:
    """What a slice is planned with; it may cross to helpers."""

    rundir: RunDir
    folder: Path  # that shards are written to, which may be aside
    manifest: Manifest
    keep_intermediate: bool

    key: str  # of the plan
    streams: Streams = field(default_factory=Streams)

    @classmethod
    def of(
        cls, rundir: RunDir, folder: Path, manifest: Manifest, *, keep_intermediate: bool
    ) -> Planner:
        return cls(rundir, folder, manifest, keep_intermediate, _key(manifest))

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    def find(
        self,
        on_shard: Callable[[int, int], None] = lambda *_: None,
        *,
        of: Collection[Slice] | None = None,
        joined: Callable[[Plan], Collection[int]] = lambda _: (),
    ) -> Plan | None:
        """The plan of an earlier start, if it is of this run: of the slices whose files are whole.

        With ``of``, of these slices alone. ``on_shard`` hears how many shards were read, of how
        many: those of slices that are ``joined`` are not, for nobody needs them.
        """
        plan = Plan.read(self.rundir, self.manifest)
        if plan is None or (self.keep_intermediate and not plan.keep_intermediate):
            return None
        if of is not None:
            plan = plan.limited({one.index for one in of})
            return _of_whole(self, plan, plan.shards, on_shard)
        needed = {one.index for one in plan.slices}.difference(joined(plan))
        plan = _of_whole(self, plan, plan.limited(needed).shards, on_shard)
        return None if self.lacks_chunks(plan) else plan

    @property
    def keeps_chunks(self) -> bool:
        return self.keep_intermediate and self.recipe.has_frames

    def lacks_chunks(self, plan: Plan) -> bool:
        """Whether chunks of planned slices are asked for, and neither joined nor there."""
        if not self.keeps_chunks or (self.rundir.chunks.is_file() and not plan.missing):
            return False
        names = [one.name for one in plan.slices if one.index in plan.parts]
        return not all((self.folder / f"{name}{CHUNKS}").is_file() for name in names)

    def write_listing(self, plan: Plan) -> None:
        """Write which slices there are, into the folder of their plans."""
        listing = {
            "slices": [astuple(one) for one in plan.slices],
            "keep_intermediate": self.keep_intermediate,
        }
        path = self.folder / self.rundir.plan.name
        self.rundir.write_whole(path, _sealed(listing, self.key))

    def join_chunks(self, plan: Plan) -> None:
        """Make one file of the chunks of all slices, beside the folder of their plans."""
        with self.rundir.replacing(self.folder.parent / self.rundir.chunks.name) as out:
            for one in plan.slices:
                with open_plain(self.folder / f"{one.name}{CHUNKS}") as chunks:
                    shutil.copyfileobj(chunks, out)

    def make(self, plan: Plan, on_letters: Callable[[int], None], pool: Pool) -> Plan:
        """Plan the slices that are not planned yet, with the processes of a pool if they pay off.

        The ids of all slices are compared, whoever planned them.

        Raises:
            InputError: an input is not a FASTA file, or an id occurs twice in these slices.
            UnavailableError: a process died.
        """
        missing, parts, n_letters = plan.missing, dict(plan.parts), 0
        n_expected = InputFile.letters_of(self.manifest.inputs)
        n_worth = n_expected * len(missing) // max(1, len(plan.slices))
        helpers = pool.helpers(self, n_worth, "parts of the plan")
        made = helpers.in_order(map(_SliceTask, missing))
        with pool.ended_by_errors():
            for one, part in zip(missing, made, strict=True):
                parts[one.index] = part
                n_letters += part.counts.n_letters
                on_letters(n_letters)
        plan = replace(plan, parts=parts)
        _refuse_duplicates(self, plan)
        return plan


@dataclass(frozen=True, slots=True)
class _SliceTask:
    """Plan a slice: write its shards, the digests of its ids, and then what vouches for both."""

    slice: Slice
    n_letters: ClassVar[int] = 0  # what waits for its turn lies on the disk

    def do(self, planner: Planner) -> _SlicePlan:
        """
        Raises:
            InputError: an input is not a FASTA file.
            OutputError, StorageError: the disk refuses the files.
        """
        return _Reading(planner, self.slice).run()


@dataclass(slots=True)
class _Reading:
    """One pass over the records of a slice."""

    planner: Planner
    slice: Slice
    counts: _PlanCounts = field(default_factory=_PlanCounts)
    digests: list[bytes] = field(default_factory=list)  # of ids: these would fill the memory
    is_end: Callable[[int], bool] = field(default_factory=ends_of_groups)
    blocks: list[list[tuple[int, Span]]] = field(default_factory=lambda: [[]])
    are_ranged: bool = True  # any process can read each block

    def run(self) -> _SlicePlan:
        planner, one, recipe = self.planner, self.slice, self.planner.recipe
        rundir, stem = planner.rundir, planner.folder / one.name
        writer = ShardWriter(
            rundir,
            planner.folder,
            recipe.largest_shard,
            one.index,
            keep_bases=planner.keep_intermediate,
            is_first=one.is_first,
        )
        seen, spans = SeenOrfs(), list[tuple[int, int]]()
        with ExitStack() as stack:
            out = None
            if planner.keeps_chunks:
                path = stem.with_suffix(CHUNKS)
                out = stack.enter_context(as_text(stack.enter_context(rundir.replacing(path))))
            for place, span in one.spans:
                first = writer.next_index
                for headers, proteins, digests in self.entries(planner.manifest, place, span, out):
                    writer.extend(headers, proteins, seen.originals(digests))
                spans.append((first, writer.end_index))
        writer.flush()
        ids = ""
        if one.step:  # the first step has met each record
            self.counts = _PlanCounts()
        else:
            content = b"".join(self.digests)
            ids = hashlib.sha256(content).hexdigest()
            rundir.write_whole(stem.with_suffix(IDS), content)
        self.counts.n_copies = writer.n_copies
        self.counts.n_copied_residues = writer.n_copied_residues
        shards = [replace(shard, path=rundir.shards / shard.path.name) for shard in writer.shards]
        blocks = tuple(map(tuple, filter(None, self.blocks))) if self.are_ranged else ()
        plan = _SlicePlan(tuple(shards), self.counts, tuple(spans), blocks, ids)
        rundir.write_whole(stem.with_suffix(PLAN), _sealed(_to_json(plan), planner.key))
        return plan

    def entries(
        self, manifest: Manifest, place: int, span: Span, out: TextIO | None
    ) -> Iterator[Entries]:
        """The entries for shards of blocks of a file; its chunks go ``out``."""
        recipe = self.planner.recipe
        records = self.asked(manifest, place, span)
        if not recipe.has_frames:
            for block in _blocks(records):
                texts = [(record.id, record.protein) for record in block]
                yield _entries_of(
                    [Orf(name, name, name, 0, len(text), PROTEIN, text) for name, text in texts],
                    recipe,
                )
            return
        code = GeneticCode.of(recipe.genetic_code)
        for chunks in _blocks(
            chain.from_iterable(Chunk.cut(r, recipe.chunk_size) for r in records)
        ):
            for chunk in chunks if out is not None else ():
                write_record(out, chunk.id, chunk.sequence)  # type: ignore[arg-type]
            yield _entries_of(translate_six_frames(chunks, code), recipe)

    def asked(self, manifest: Manifest, place: int, span: Span) -> Iterator[FastaRecord]:
        """The records that are embedded by the step; the first counts those that none asks for.

        A record is scored once for each step.
        """
        recipe, rules = manifest.recipe, tuple(one.rule for one in manifest.embed)
        file = manifest.inputs[place]
        blocks = manifest.ids.blocks(file, span, self.planner.streams)
        for records in parsed(blocks if recipe.encoders else self.noted(blocks, place)):
            self.count(records)
            ids = _told_apart(manifest, file, records.ids)
            self.digests.append(id_digests(ids).tobytes())
            for record, step in asking(records, recipe, rules):
                self.counts.n_short += 2 * len(record.sequence) < recipe.chunk_size
                if step == self.slice.step:
                    yield record
                elif step is None:
                    self.counts.n_left += 1
                    self.counts.n_left_letters += len(record.sequence)

    def noted(self, blocks: Iterable[Block], place: int) -> Iterator[Block]:
        """The same blocks of an input, when it is noted where they are."""
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

    def count(self, records: Records) -> None:
        counts, lengths = self.counts, records.lengths
        counts.n_records += len(lengths)
        counts.n_letters += int(lengths.sum())
        counts.n_searched += int(lengths[lengths >= SHORTEST_RECORD].sum())
        counts.n_gapped += sum(map(bool, records.n_gaps))
        counts.n_gaps += sum(records.n_gaps)


Entries: TypeAlias = tuple[list[str], list[str], list[bytes]]  # headers, proteins, digests


def _entries_of(orfs: Sequence[Orf], recipe: Recipe) -> Entries:
    headers, proteins = list(map(header_of, orfs)), [orf.protein for orf in orfs]
    return headers, proteins, digests_of(orfs, recipe.reads)


def _told_apart(manifest: Manifest, file: InputFile, ids: list[str]) -> list[str]:
    """The same ids; those of records that replace failed ones say of which generation they are."""
    replaced = frozenset(manifest.replaced if file.generation else ())
    if replaced.isdisjoint(ids):
        return ids
    return [f"{name} {file.generation}" if name in replaced else name for name in ids]


Piece = TypeVar("Piece", FastaRecord, Chunk)


def _blocks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Neighbouring pieces, of about so many letters together as are looked up at once."""
    block, n_letters = list[Piece](), 0
    for piece in pieces:
        block.append(piece)
        n_letters += len(piece.sequence)
        if n_letters >= _BLOCK_LETTERS:
            yield block
            block, n_letters = [], 0
    if block:
        yield block


def _refuse_duplicates(planner: Planner, plan: Plan) -> None:
    """Refuse an id that occurs twice in planned slices.

    Of a slice of others whose file is damaged, the ids are compared when it is planned again.

    Raises:
        InputError: there is one; only then the inputs are read again to say where.
    """
    digests = array("q")
    for one in plan.slices:
        with suppress(OSError, ValueError):
            digests.frombytes(_read_ids(planner.folder, one, plan.parts[one.index]))
    refuse_repeat(digests, planner.manifest, is_begun=planner.folder == planner.rundir.shards)


def refuse_repeat(digests: array[int], manifest: Manifest, *, is_begun: bool = False) -> None:
    """Refuse a repeated id; of a run that ``is_begun`` its input cannot change any more.

    Raises:
        InputError: two of the digests of ids are the same, and so are their ids.
    """
    repeat = find_repeat(_by_telling_ids(manifest), digests)
    if repeat is None:
        return
    name, is_corrected, _ = repeat.record_id.partition(" ")
    if is_corrected:
        raise InputError(
            f"{repeat.second}: the corrected record {printable(name)} occurs twice",
            hint="keep one of the two",
        )
    raise repeat.error(_remedy(manifest, is_begun=is_begun))


_AGAIN = (
    "; then start again with --force. Vectors in a --cache are read and not made again; nothing "
    "was deleted"
)


def _by_telling_ids(manifest: Manifest) -> Iterator[tuple[InputFile, FastaRecord]]:
    for file in manifest.inputs:
        for records in parsed(manifest.ids.blocks(file)):
            ids = _told_apart(manifest, file, records.ids)
            for record_id, record in zip(ids, records.each(), strict=True):
                yield file, record._replace(id=record_id)


def _remedy(manifest: Manifest, *, is_begun: bool) -> str:
    """The remedy other than making the ids unique."""
    if len(manifest.inputs) == 1:
        return "or add --rename-duplicates" + _AGAIN * is_begun
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
    text = repr((_FORMAT, manifest.recipe.fingerprint, hashes, manifest.replaced, embed))
    return hashlib.sha256(text.encode()).hexdigest()


def _sealed(content: Mapping[str, object], key: str) -> str:
    """A file of a plan: it says whose it is, and ends with a hash of what it holds."""
    text = json.dumps({"key": key, **content})
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def _read_sealed(path: Path, key: str) -> dict[str, Any]:
    """
    Raises:
        OSError, ValueError: it is not there, not whole, or of another plan.
    """
    with open_plain(path) as handle:
        text, _, digest = handle.read().decode().partition("\n")
    content = parse_json(text)
    if hashlib.sha256(text.encode()).hexdigest() != digest.strip() or content["key"] != key:
        raise ValueError("it is damaged, or of another plan")
    return dict(content)


def _to_json(plan: _SlicePlan) -> dict[str, object]:
    return {
        "counts": asdict(plan.counts),
        "shards": [
            [shard.index, shard.n_orfs, shard.n_embedded, shard.n_residues, shard.sha256]
            for shard in plan.shards
        ],
        "spans": plan.spans,
        "blocks": plan.blocks,
        "ids": plan.ids,
    }


def _of_whole(
    planner: Planner, plan: Plan, shards: Sequence[Shard], on_shard: Callable[[int, int], None]
) -> Plan:
    """The same plan, without those of slices whose ids, or one of ``shards``, are damaged."""
    damaged, parts = _find_damaged(shards, on_shard), {}
    for one in plan.slices:
        part = plan.parts.get(one.index)
        if part is not None and damaged.isdisjoint(shard.index for shard in part.shards):
            with suppress(OSError, ValueError):
                _read_ids(planner.folder, one, part)
                parts[one.index] = part
    return replace(plan, parts=parts)


def _read_ids(folder: Path, one: Slice, part: _SlicePlan) -> bytes:
    """The digests of the ids of a slice; none of a later step of ``--embed``.

    Raises:
        OSError, ValueError: they are not there, or not as they were written.
    """
    if one.step:
        return b""
    with open_plain(folder / f"{one.name}{IDS}") as handle:
        content = handle.read()
    if hashlib.sha256(content).hexdigest() != part.ids:
        raise ValueError("they are damaged")
    return content


def _slice_from_json(stored: Sequence[Any], n_inputs: int) -> Slice:
    """
    Raises:
        ValueError, TypeError: it is no slice of so many inputs.
    """
    index, generation, step, spans, is_first = stored
    check_counts(index, generation, step)
    return Slice(index, generation, step, _places(spans, n_inputs), bool(is_first))


def _places(stored: Sequence[Any], n_inputs: int) -> Places:
    """
    Raises:
        ValueError, TypeError: they are not in so many inputs.
    """
    each = tuple((place, Span(*span)) for place, span in stored)
    for place, span in each:
        check_counts(place, span.start, span.n_lines, span.start if span.end is None else span.end)
        if place >= n_inputs:
            raise ValueError("there are not so many inputs")
    return each


def _read_part(rundir: RunDir, key: str, one: Slice, n_inputs: int) -> _SlicePlan:
    """The plan of a slice, as it was written.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not there, or not whole.
    """
    stored = _read_sealed((rundir.shards / one.name).with_suffix(PLAN), key)
    shards = []
    for index, n_orfs, n_embedded, n_residues, digest in stored["shards"]:
        if not one.index <= index <= one.index + len(stored["shards"]):
            raise ValueError("a shard of another slice")
        path = rundir.shards / f"{shard_name(index)}.faa"
        shards.append(Shard(index, path, n_orfs, n_embedded, n_residues, digest))
    spans = tuple((int(first), int(end)) for first, end in stored["spans"])
    blocks = tuple(_places(places, n_inputs) for places in stored["blocks"])
    return _SlicePlan(tuple(shards), _PlanCounts(**stored["counts"]), spans, blocks, stored["ids"])


def _find_damaged(shards: Sequence[Shard], on_shard: Callable[[int, int], None]) -> set[int]:
    """The indices of the shards whose files are not those that were written."""
    damaged = set[int]()
    with ThreadPoolExecutor() as pool:  # Python's lock is free while a block is hashed
        for first in range(0, len(shards), _SHARDS_AT_ONCE):
            on_shard(first, len(shards))
            some = shards[first : first + _SHARDS_AT_ONCE]
            are_whole = pool.map(_is_whole, some)
            damaged |= {s.index for s, whole in zip(some, are_whole, strict=True) if not whole}
    return damaged


def _is_whole(shard: Shard) -> bool:
    try:
        # each ORF and each residue is a letter of the file, at least
        has_room = shard.n_orfs + shard.n_residues <= shard.path.stat().st_size
        return has_room and sha256(shard.path) == shard.sha256
    except OSError:
        return False
