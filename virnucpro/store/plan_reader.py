"""Read the plan of an earlier start, and drop the slices whose files are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from virnucpro.core.atomic_io import hash_file, parse_json
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.types import (
    Shard,
    check_counts,
    shard_name,
)
from virnucpro.sequences.fasta import Span
from virnucpro.store.feature_file import Attributes, read_checksummed
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import InputSpans, Plan, PlanCounts, Slice, SlicePlan, plan_key
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_store import OnShard


def read_plan(rundir: RunDir, manifest: Manifest) -> Plan | None:
    """Read the slices in ``plan.json``, if it belongs to this run, with their intact plans."""
    damage = (FeatureFileError, ValueError, KeyError, TypeError)  # errors from a corrupt file
    try:
        listing = _read_json(rundir.plan, {"key": plan_key(manifest)})
        n_inputs = len(manifest.inputs)
        slices = tuple(_slice_from_json(stored, n_inputs) for stored in listing["slices"])
        plan = Plan(rundir, manifest, slices, {}, bool(listing["keep_intermediate"]))
    except damage:
        return None
    slice_plans = {}
    for input_slice in slices:
        with suppress(*damage):
            slice_plans[input_slice.index] = _read_part(plan, input_slice)
    return replace(plan, slice_plans=slice_plans)


def without_damaged(
    plan: Plan, shards: Sequence[Shard], on_shard: OnShard = lambda *_: None
) -> Plan:
    """Return the plan without slices that have corrupt ids or corrupt ``shards``."""
    damaged = _find_damaged(shards, on_shard)
    intact = {}
    for input_slice in plan.planned_slices:
        slice_plan = plan.slice_plans[input_slice.index]
        if damaged.isdisjoint(shard.index for shard in slice_plan.shards):
            with suppress(FeatureFileError):
                plan.read_ids(input_slice)
                intact[input_slice.index] = slice_plan
    return replace(plan, slice_plans=intact)


def _read_json(path: Path, seal: Attributes) -> dict[str, Any]:
    """Read a JSON file of this plan, and verify it.

    Raises:
        FeatureFileError, ValueError, TypeError: it is missing, corrupt, or from another plan.
    """
    return dict(parse_json(read_checksummed(path, seal)[1]))


def _slice_from_json(stored: Sequence[Any], n_inputs: int) -> Slice:
    """Convert a stored slice.

    Raises:
        ValueError, TypeError: it does not describe a slice of ``n_inputs`` inputs.
    """
    index, generation, rule_index, spans, is_first = stored
    check_counts(index, generation, rule_index)
    return Slice(index, generation, rule_index, _row_spans(spans, n_inputs), bool(is_first))


def _row_spans(stored: Sequence[Any], n_inputs: int) -> InputSpans:
    """Convert stored input spans.

    Raises:
        ValueError, TypeError: they do not describe spans of ``n_inputs`` inputs.
    """
    spans = tuple((index, Span(*span)) for index, span in stored)
    for index, span in spans:
        check_counts(index, span.start, span.n_lines, span.start if span.end is None else span.end)
        if index >= n_inputs:
            raise ValueError("there are not so many inputs")
    return spans


def _read_part(plan: Plan, input_slice: Slice) -> SlicePlan:
    """Read the plan of a slice.

    Raises:
        FeatureFileError, ValueError, KeyError, TypeError: it is missing or corrupt.
    """
    stored = _read_json(
        plan.folder / f"{input_slice.name}{RunDir.plan_suffix}", plan.checksum_header(input_slice)
    )
    shards = []
    for index, *facts in stored["shards"]:
        if not input_slice.index <= index <= input_slice.index + len(stored["shards"]):
            raise ValueError("a shard of another slice")
        shards.append(Shard(index, plan.folder / f"{shard_name(index)}.faa", *facts))
    spans = tuple((int(first), int(end)) for first, end in stored["spans"])
    blocks = tuple(
        _row_spans(block_spans, len(plan.manifest.inputs)) for block_spans in stored["blocks"]
    )
    n_orfs = tuple(stored["n_orfs"])
    check_counts(*n_orfs)
    if sum(n_orfs) != sum(shard.n_orfs for shard in shards):
        raise ValueError("blocks have other ORFs than the shards")
    return SlicePlan(tuple(shards), PlanCounts(**stored["counts"]), spans, blocks, n_orfs)


def _find_damaged(shards: Sequence[Shard], on_shard: OnShard) -> set[int]:
    """Return the indices of the shards with missing or corrupt files."""
    damaged = set[int]()
    with ThreadPoolExecutor() as pool:  # hashing a block releases the GIL
        completeness = pool.map(_is_complete, shards)
        for i, (shard, is_complete) in enumerate(zip(shards, completeness, strict=True)):
            on_shard(i, len(shards))
            if not is_complete:
                damaged.add(shard.index)
    return damaged


def _is_complete(shard: Shard) -> bool:
    try:
        # each ORF and each residue takes at least one byte in the file
        is_large_enough = shard.n_orfs + shard.n_residues <= shard.path.stat().st_size
        return is_large_enough and hash_file(shard.path) == shard.sha256
    except OSError:
        return False
