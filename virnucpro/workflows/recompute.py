"""Recompute random run parts from the input, and compare them with the stored results.

A checksum only shows that a file is unchanged since it was written. This module shows that files
follow from the input: vectors for some shards, scores for some record blocks, and plan and table
rows for some input slices. Everything is computed in a temporary folder, by the functions that
compute a run. Nothing in the run folder changes.

Plans, scores and rows must match byte for byte. Vectors are bit-identical on a CPU of the same
kind. Elsewhere they may differ by rounding: see ``largest_distance_explained``.
"""

from __future__ import annotations

import gzip
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import FeatureFileError, InputError, InputMissingError
from virnucpro.core.events import ShardFailed
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import format_count, printable
from virnucpro.core.model_outputs import OutputSpec, parse_vector_name
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.core.types import Embeddings, Shard
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.work_options import WorkOptions
from virnucpro.results.outputs import OutputFile, open_run_dir
from virnucpro.results.row_batches import RowBatch, Rows
from virnucpro.sequences.file_scan import hash_inputs
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.feature_export import split_output, split_rows
from virnucpro.store.feature_store import FeatureStore, ReadOnlyStore
from virnucpro.store.frame_scores import FrameScoreStore
from virnucpro.store.plan import Plan
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_store import ShardStore
from virnucpro.workflows.collect_inputs import number_taken_names
from virnucpro.workflows.predict_rows import CallRowBuilder
from virnucpro.workflows.run_context import RunContext
from virnucpro.workflows.run_steps import ExecutorOn
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.table_cache import SliceRows
from virnucpro.workflows.work_share import RunShare, embed, resolve_share
from virnucpro.workflows.write_tables import Backlog, Group, TableWriter

T = TypeVar("T")


@dataclass(slots=True)
class Recomputed:
    """What was recomputed, and what differs from the run."""

    seed: int
    n_shards: int = 0
    n_same_bits: int = 0  # shards with bit-identical vectors
    largest_distance: float = 0.0  # between vectors, relative to their length
    n_blocks: int = 0
    n_slices: int = 0
    n_skipped: int = 0  # slices without tables, or with a shard that has no vectors
    faults: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """A line that states what was compared, and how to repeat it."""
        parts = []
        if self.n_shards:
            same = f"{self.n_same_bits:,} with the same bits"
            if self.n_same_bits < self.n_shards:
                same += f", largest distance {self.largest_distance:.1e}"
            parts.append(f"{format_count(self.n_shards, 'shard')} ({same})")
        if self.n_blocks:
            parts.append(format_count(self.n_blocks, "block of scores", "blocks of scores"))
        parts.append(f"tables of {format_count(self.n_slices, 'slice')}")
        skipped = (
            f"; {format_count(self.n_skipped, 'slice')} without tables" if self.n_skipped else ""
        )
        return f"recomputed from the input: {', '.join(parts)}{skipped}; --seed {self.seed}"


@dataclass(frozen=True, slots=True)
class _Recomputation:
    """Run parts that are recomputed in a temporary folder."""

    rundir: RunDir  # the original run folder
    share: RunShare  # the run in the temporary folder
    context: RunContext  # the same, with the plan of the chosen parts and the stored vectors
    groups: Sequence[Group]  # the chosen slices
    shards: Sequence[int]  # indices of the chosen shards
    blocks: Sequence[int]

    @property
    def scratch(self) -> RunDir:
        return self.context.run_dir


def recompute(
    folder: Path,
    n: int,
    seed: int,
    executor_on: ExecutorOn = ProcessExecutor,
    visible: str | None = None,
) -> Recomputed:
    """Recompute ``n`` random shards, blocks and slices in a run, and compare them.

    Args:
        n: how many shards, blocks and slices, each.
        seed: for the random choice.
        visible: GPUs that may be used, as in CUDA_VISIBLE_DEVICES.

    Raises:
        InputMissingError: an input is missing.
        InputError: an input has changed.
        UnavailableError: the model is not on this machine, or no device supports its precision.
    """
    rundir = open_run_dir(folder)
    made = Recomputed(seed)
    with TemporaryDirectory(prefix="virnucpro-") as temporary, HelperPool() as pool:
        options = WorkOptions(folder=Path(temporary), cuda_visible_devices=visible)
        share = _copy_run(rundir, options)
        again = _choose(rundir, share, pool, n, Random(seed))
        _compare_shards(again, executor_on, made)
        _compare_slices(again, made)
    return made


def _unchanged(file: InputFile) -> InputFile:
    """Return the input with its current hashes, after checking that the run read this content.

    Raises:
        InputMissingError, InputError: the input is missing or has changed.
    """
    if not Path(file.path).exists():
        raise InputMissingError(
            f"{file.display_name} is gone: nothing can be recomputed without the input",
            hint="put it back, or leave --recompute out",
        )
    now = hash_inputs(file)
    if now.sha256 != file.sha256:
        raise InputError(
            f"{file.display_name} has changed: nothing can be recomputed from another input",
            hint="put the input of the run back, or leave --recompute out",
        )
    return now


def _copy_run(rundir: RunDir, options: WorkOptions) -> RunShare:
    """Plan a run's slices in a temporary folder.

    Raises:
        InputMissingError, InputError, UnavailableError: as ``recompute``.
    """
    manifest = rundir.read_run(hint=with_options("give the {output_dir} of a run"))
    facts = rundir.read_facts()
    manifest = replace(manifest, inputs=tuple(map(_unchanged, manifest.inputs)))
    manifest = number_taken_names(manifest, lambda _: None)
    scratch = open_run_dir(options.folder)
    scratch.write_manifest(manifest, facts)
    scratch.make_folder(scratch.shards)
    plan = Plan.cut(scratch, manifest, keep_intermediate=False)
    replace(plan, is_staged=False).write_listing()
    return resolve_share(scratch, manifest, options, lambda _: None)


def _choose(
    rundir: RunDir, share: RunShare, pool: HelperPool, n: int, random: Random
) -> _Recomputation:
    """Choose what to recompute, and plan the slices that contain it."""
    plan = share.plan
    recipe = plan.manifest.recipe
    stores = rundir.feature_stores(recipe)
    done = [store.completed_names() for store in rundir.shard_stores(recipe)]
    names = set(map(int, chain.from_iterable(done)))
    scores = ScoreStore(rundir, rundir.scores, recipe.fingerprint, "")
    groups = _sample(list(plan.group_by_records()), n, random)
    shards = _sample(sorted(names), n, random)
    blocks = _sample([int(path.stem) for path in scores.files()], n, random)
    firsts = sorted(slice_.index for slice_ in plan.slices)
    needed = {slice_.index for group in groups for slice_ in group}
    needed |= {firsts[bisect_right(firsts, index) - 1] for index in (*shards, *blocks)}
    planned = plan.select_slices(_show_steps(plan, needed)).plan_slices(
        share.selection, lambda _: None, pool
    )
    context = share.make_context(planned, pool, lambda _: None)
    builder = replace(
        context.row_builder,
        stores=tuple(ReadOnlyStore.from_folder(store) for store in stores),
        feature_format="h5",  # other formats are not exported
        per_file=rundir.samples.is_dir(),
        with_own_ids=rundir.samples.is_dir() and plan.manifest.is_qualified,
    )
    if isinstance(builder, CallRowBuilder):
        # Rows follow from the kept vectors, if there are any.
        frame_scores = rundir.frame_scores(recipe)
        builder = replace(builder, frame_scores=frame_scores, intermediate_scores=None)
    context = replace(context, row_builder=builder)
    return _Recomputation(rundir, share, context, groups, shards, blocks)


def _sample(values: Sequence[T], n: int, random: Random) -> list[T]:
    """Return at most ``n`` random values, in order."""
    indices = sorted(random.sample(range(len(values)), min(n, len(values))))
    return [values[index] for index in indices]


def _show_steps(plan: Plan, indices: set[int]) -> set[int]:
    """Return these slices, plus the other slices with the same records."""
    groups = ({slice_.index for slice_ in group} for group in plan.group_by_records())
    return {index for group in groups if group & indices for index in group}


# Shards


def _compare_shards(again: _Recomputation, executor_on: ExecutorOn, made: Recomputed) -> None:
    """Embed the chosen shards, and compare the vectors."""
    planned = {shard.index: shard for shard in again.context.plan.shards}
    job = again.share.job
    shards = [planned[index] for index in again.shards if index in planned]
    unknown = [index for index in again.shards if index not in planned]
    made.faults += [f"{again.rundir.root}: the input gives no shard {i}" for i in unknown]
    if not shards:
        return
    with closing(embed(shards, job, again.share.config, executor_on)) as events:
        failed = {event.shard.index: event for event in events if isinstance(event, ShardFailed)}
    for shard in shards:
        made.n_shards += 1
        if event := failed.get(shard.index):
            made.faults.append(f"shard {shard.name} cannot be embedded: {printable(event.reason)}")
            continue
        stores = zip(again.context.shard_stores, job.shard_stores, strict=True)
        distances = [
            _compare_files(store, fresh, shard, made)
            for store, fresh in stores
            if store.path(shard).exists()
        ]
        made.n_same_bits += not any(distances)
        made.largest_distance = max([made.largest_distance, *distances])


def _compare_files(store: ShardStore, fresh: ShardStore, shard: Shard, made: Recomputed) -> float:
    """Compare a shard's stored file with a fresh one. -> as ``_compare_vectors``"""
    if isinstance(store, FrameScoreStore) and isinstance(fresh, FrameScoreStore):
        return _compare_frames(store, fresh, shard, made)
    assert isinstance(store, FeatureStore)
    assert isinstance(fresh, FeatureStore)
    return _compare_vectors(store, fresh, shard, made)


def _compare_frames(
    store: FrameScoreStore, fresh: FrameScoreStore, shard: Shard, made: Recomputed
) -> float:
    """Compare a shard's stored scores with fresh ones.

    Returns:
        The largest difference between two scores. Infinite if frames or failures differ.
    """
    largest_allowed = 0.05  # chosen, not derived: the head decides how roundings change a score
    path = store.path(shard)
    now = fresh.read(shard)
    try:
        stored = store.read(shard)
    except FeatureFileError as error:
        made.faults.append(str(error))
        return math.inf
    exact = now.keys() - {"scores", "vectors"}
    is_same = stored.keys() == now.keys() and all(
        stored[name].tobytes() == now[name].tobytes() for name in exact
    )
    if not is_same or stored["scores"].shape != now["scores"].shape:
        made.faults.append(f"{printable(path)} has other frames than the input")
        return math.inf
    differences = np.abs(stored["scores"] - now["scores"])
    difference = float(np.max(differences[~np.isnan(differences)], initial=0.0))
    is_scored = np.array_equal(np.isnan(stored["scores"]), np.isnan(now["scores"]))
    difference = max(difference, _relative(stored["vectors"], now["vectors"]))
    if difference > largest_allowed or not is_scored:
        made.faults.append(
            f"{printable(path)} has other scores than the input gives: the largest difference is "
            f"{difference:.1e}, and {largest_allowed} is allowed"
        )
    return difference


def _compare_vectors(
    store: FeatureStore, fresh: FeatureStore, shard: Shard, made: Recomputed
) -> float:
    """Compare every output in a shard's stored file with a fresh one.

    Returns:
        The largest distance between vectors, relative to their length. Infinite if ids, lengths or
        shapes differ.
    """
    path = store.path(shard)
    attributes = store.attributes(shard)
    now, _ = fresh.read(fresh.path(shard), attributes)
    try:
        stored, _ = store.read(path, attributes)
    except FeatureFileError as error:
        made.faults.append(str(error))
        return math.inf
    if _table_names(stored) != _table_names(now):
        made.faults.append(f"{printable(path)} has other ids, or other lengths, than the input")
        return math.inf
    expected = dict(_iter_outputs(store.encoder, now))
    distances = []
    for output, rows in _iter_outputs(store.encoder, stored):
        distance = _distance(rows, expected[output])
        distances.append(distance)
        limit = largest_distance_explained(store.encoder, output)
        if distance > limit:
            output_name = f" in {output.name}" if len(expected) > 1 else ""
            made.faults.append(
                f"{printable(path)} has other vectors than the input gives{output_name}: the "
                f"largest distance is {distance:.1e} of their length; roundings explain {limit:.1e}"
            )
    return max(distances)


def _iter_outputs(
    encoder: EncoderSpec, embeddings: Embeddings
) -> Iterator[tuple[OutputSpec, dict[str, NDArray[np.float32]]]]:
    """Yield each output in a file, with its rows by id. A contact map is one row."""
    first, *_ = encoder.outputs
    yield first, dict(zip(embeddings.ids, split_rows(embeddings), strict=True))
    for array in embeddings.extra:
        rows = split_output(array, embeddings.lengths)
        if not array.spec.has_vectors:
            rows = [row.reshape(1, -1) for row in rows]
        yield array.spec, dict(zip(embeddings.ids, rows, strict=True))


def _table_names(embeddings: Embeddings) -> tuple[dict[str, int], set[str]]:
    """Return the lengths of ORFs with vectors, and the ids of all ORFs."""
    lengths = dict(zip(embeddings.ids, embeddings.lengths.tolist(), strict=True))
    return lengths, {*embeddings.ids, *(failure.orf_id for failure in embeddings.failures)}


def _distance(
    stored: Mapping[str, NDArray[np.float32]], now: Mapping[str, NDArray[np.float32]]
) -> float:
    """Return the largest L2 distance between rows with the same id, relative to their length."""
    distances = (_relative(row, now[name]) for name, row in stored.items() if name in now)
    return max(distances, default=0.0)


def _relative(row: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    if row.tobytes() == other.tobytes():
        return 0.0
    if row.shape != other.shape:
        return math.inf
    exact = other.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=-1)
    distances = np.linalg.norm(row - exact, axis=-1)
    return float(np.max(distances / np.maximum(lengths, np.finfo(np.float64).tiny)))


def largest_distance_explained(encoder: EncoderSpec, output: OutputSpec | None = None) -> float:
    """Return the largest relative distance between two vectors that rounding explains.

    ``output`` is the one that the vectors belong to, by default the first.

    Both vectors encode the same sequence in the same precision, but in other batches or by other
    kernels. In each layer a vector passes through 8 products with rounded results. Each result has
    a root mean square error of 0.42 units, or 0.42 sqrt(n) units in float32, where n counts the
    terms in the longest sum (four times the width). Errors are independent, so their squares add up
    over layers and over both computations. The limit is twice the total. Rounding of stored numbers
    adds one of their units.

    Heads and standard deviations are small differences of large numbers with the same errors, so
    they may differ by four times as much. This factor is chosen. ``models check`` derives their
    limit for each model.
    """
    products_per_layer = 8  # products with rounded results, per residue and layer
    one_rounding = 0.42  # units, root mean square: see ``models.validation.reference``
    margin = 2.0  # as in ``models check``
    # Half the distance between two numbers near 1. Factors in 8 bits come from numbers that differ
    # by rounding to bf16 (2^-8), so only those near a boundary round to a different number.
    units: dict[Precision, float] = {
        "fp32": 2.0**-24,
        "bf16x2": 2.0**-16,
        "fp16": 2.0**-11,
        "bf16": 2.0**-8,
        "fp8": 2.0**-6,
        "int8": 2.0**-6,
    }
    unit = units[encoder.precision]
    rounding_error = one_rounding * unit
    if encoder.precision == "fp32":
        rounding_error *= math.sqrt(4 * encoder.dim)
    n_roundings = 2 * products_per_layer * max(1, encoder.layer)
    output = output or encoder.outputs[0]
    stored = 2.0**-8 if output.dtype == "bfloat16" else 0.0
    vectors = parse_vector_name(output.name)
    amplified = 4.0 if vectors is None or vectors.pooling == "std" else 1.0
    return amplified * margin * rounding_error * math.sqrt(n_roundings) + stored


# Slices and their score blocks


def _compare_slices(again: _Recomputation, made: Recomputed) -> None:
    """Recompute the rows of slices, and compare them with the tables and the stored scores.

    Scores are computed with the rows, so the slice of each chosen block is recomputed, too.
    """
    if again.context.scores is not None:
        again.scratch.make_folder(again.scratch.scores)
    groups = {group[0].index: group for group in again.context.plan.group_by_records()}
    firsts = sorted(groups)
    blocks: dict[int, list[int]] = {}
    for index in again.blocks:
        blocks.setdefault(firsts[bisect_right(firsts, index) - 1], []).append(index)
    chosen = {group[0].index for group in again.groups}
    with_tables = {first for first in chosen if _has_tables(again, groups[first])}
    made.n_skipped += len(chosen - with_tables)
    made.n_slices += len(with_tables)
    for first in sorted(with_tables | blocks.keys()):
        try:
            rows = _make_rows(again, groups[first])
        except FeatureFileError as error:
            made.faults.append(str(error))
            continue
        if first in with_tables:
            made.faults += _differing_tables(again, rows.batches)
        for index in blocks.get(first, ()):
            _compare_scores(again, index, index < first + rows.n_blocks, made)


def _has_tables(again: _Recomputation, group: Group) -> bool:
    """Return whether the run has tables, and vectors for all shards of these slices."""
    slice_plans = again.context.plan.slice_plans
    shards = list(chain.from_iterable(slice_plans[slice_.index].shards for slice_ in group))
    paths = [store.path(shard) for store in again.context.stores for shard in shards]
    command = again.share.plan.manifest.recipe.command
    return again.rundir.record_table(command).exists() and all(path.exists() for path in paths)


def _make_rows(again: _Recomputation, group: Group) -> SliceRows:
    """Make rows for slices with the same records.

    Raises:
        FeatureFileError: vectors do not belong to the input, or copies differ from originals.
    """
    writer = TableWriter(again.context, Backlog())
    return writer.make_rows(group, writer.count_helpers([group]))


def _compare_scores(again: _Recomputation, index: int, is_there: bool, made: Recomputed) -> None:
    """Compare a block's scores, if the input contains the block."""
    fingerprint = again.share.plan.manifest.recipe.fingerprint
    stored = ScoreStore(again.rundir, again.rundir.scores, fingerprint, "")
    fresh = ScoreStore(again.scratch, again.scratch.scores, fingerprint, "")
    path = printable(stored.path(index))
    made.n_blocks += 1
    try:
        if not is_there:
            made.faults.append(f"{path} is of no block of the input")
        elif stored.differs(fresh, index):
            made.faults.append(f"{path} has other scores than the input")
    except FeatureFileError as error:
        made.faults.append(str(error))


def _differing_tables(again: _Recomputation, batches: Sequence[RowBatch]) -> Iterator[str]:
    """Yield a line for each table, of the run or a sample, that lacks rows of these records."""
    rundir = again.rundir
    run_rows = _join([batch.rows for batch in batches])
    yield from _differing(rundir.root, run_rows, again.context.outputs)
    if not rundir.samples.is_dir():
        return
    per_file = [output for output in again.context.outputs if output.per_file]
    for batch in batches:
        rows = batch.rows if batch.own_rows is None else batch.own_rows
        yield from _differing(rundir.samples / batch.sample, rows, per_file)


def _join(rows_by_sample: Sequence[Rows]) -> Rows:
    """Append rows from neighbouring samples, for each output."""
    names = dict.fromkeys(name for rows in rows_by_sample for name in rows)
    return {name: b"".join(rows.get(name, b"") for rows in rows_by_sample) for name in names}


def _differing(folder: Path, rows: Rows, outputs: Sequence[OutputFile]) -> Iterator[str]:
    for output in outputs:
        path = folder / output.file
        text = bytes(rows.get(output.file, b""))
        if text and path.exists() and not _has_rows(path, text, output):
            yield f"{printable(path)} has other rows than the input gives"


def _has_rows(path: Path, text: bytes, output: OutputFile) -> bool:
    """Return whether a table has these rows, contiguous unless the table is sorted."""
    with open_regular_file(path) as plain:
        table = cast("BinaryIO", gzip.GzipFile(fileobj=plain)) if output.is_packed else plain
        if output.is_sorted:
            wanted = set(text.splitlines(keepends=True))
            for line in table:
                wanted.discard(line)
            return not wanted
        return _contains(table, b"\n" + text)


def _contains(table: BinaryIO, text: bytes) -> bool:
    """Return whether a file contains ``text``, which begins with a line end."""
    bytes_at_once = 1 << 24  # read at a time when a table is searched
    window = b"\n"
    while block := table.read(max(bytes_at_once, len(text))):
        window += block
        if text in window:
            return True
        window = window[-len(text) :]
    return text in window
