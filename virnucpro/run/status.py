"""The content of a run folder, described without changing it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from virnucpro.config import Recipe
from virnucpro.errors import FeatureFileError, InputMissingError, ResumeError
from virnucpro.log import printable
from virnucpro.outputs.features import check_index
from virnucpro.outputs.sinks import FailedFiles
from virnucpro.run.features import FeatureStore
from virnucpro.run.folder import RunDir, stores_of
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import count_done, read_plan

_LISTED = 8  # number of files that are listed


@dataclass(frozen=True, slots=True)
class Report:
    lines: tuple[str, ...]
    n_damaged: int


def inspect_run(folder: Path, *, verify: bool) -> Report:
    """Describe a run; with ``verify``, read every feature file to its last bit.

    Raises:
        InputMissingError: there is no run in this folder.
        ResumeError: ``run.json`` is damaged.
    """
    rundir = RunDir(folder)
    manifest = rundir.read_manifest()
    if manifest is None:
        raise InputMissingError(
            f"{printable(folder)} holds no run", hint="give the --output-dir of a run"
        )
    try:
        lines = _describe(rundir, manifest)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ResumeError(
            f"{printable(folder)}: run.json is damaged: {printable(error)}",
            hint="go on with --resume, which writes it anew",
        ) from error
    n_damaged = 0
    if verify:
        damaged, verified = _verify(rundir, manifest)
        n_damaged = len(damaged)
        lines += damaged or [verified]
    return Report(tuple(lines), n_damaged)


def _verify(rundir: RunDir, manifest: Manifest) -> tuple[list[str], str]:
    """A line for each damaged file, and the line to print if there is none."""
    if not manifest.recipe.has_encoder:
        return [], "verified  nothing to verify: there are no feature files"
    plan = read_plan(rundir, manifest)
    damaged, n_files, has_index = [], 0, False
    for store in stores_of(rundir, manifest):
        of_store = [
            f"damaged   {error}" for error in store.find_damaged(plan.shards if plan else ())
        ]
        n_files += len(list(store.files()))
        if store.index.exists():
            has_index = True
            of_store += [] if of_store else _verify_index(store)
        damaged += of_store
    verified = f"verified  all {n_files} feature files are whole"
    if plan is None and not has_index:
        verified += "; whether each is in its place was not checked: the plan is not here"
    return damaged, verified


def _verify_index(store: FeatureStore) -> list[str]:
    try:
        check_index(store.index)
    except FeatureFileError as error:
        return [f"damaged   {error}; --resume writes it anew"]
    return []


def _describe(rundir: RunDir, manifest: Manifest) -> list[str]:
    stored = json.loads(rundir.manifest.read_text())
    recipe = manifest.recipe
    lines = [
        printable(f"state     {stored.get('state')}, {stored.get('time')} on {stored.get('host')}"),
        printable(f"command   {recipe.command}, {_how(recipe)}"),
        *_folded([f"input     {file.shown}" for file in manifest.inputs]),
        *_folded([f"unread    {printable(file.error)}" for file in manifest.refused]),
    ]
    if recipe.has_encoder:
        lines += _describe_shards(rundir, manifest)
    if "counts" in stored:
        statuses = stored["counts"]["statuses"].items()
        lines.append(f"records   {', '.join(f'{n} {status}' for status, n in statuses if n)}")
    listing = rundir.output(FailedFiles)
    if listing.exists():
        lines.append(f"failed    see {printable(listing)}")
    return lines


def _how(recipe: Recipe) -> str:
    if not recipe.has_encoder:
        return recipe.reader
    return "; ".join(
        f"{encoder.model}, layer {encoder.layer}, {encoder.precision}"
        for encoder in recipe.encoders
    )


def _describe_shards(rundir: RunDir, manifest: Manifest) -> list[str]:
    stores = stores_of(rundir, manifest)
    head = f"shards    {min(store.count_files() for store in stores)} done"
    if not rundir.plan.exists():
        return [head]
    plan = read_plan(rundir, manifest)
    if plan is None:
        return [f"{head}, the plan is damaged, or of other inputs: --resume makes it again"]
    pending = [
        shard.index for shard in plan.shards if not all(store.is_done(shard) for store in stores)
    ]
    n_inputs = count_done(plan.files, pending)
    return [
        f"{head}, {len(pending)} pending",
        f"files     {n_inputs:,} of {len(plan.files):,} done",
    ]


def _folded(lines: list[str]) -> list[str]:
    """The first few lines, and the number of the others."""
    if len(lines) <= _LISTED + 1:
        return lines
    return [*lines[:_LISTED], f"          + {len(lines) - _LISTED:,} more"]
