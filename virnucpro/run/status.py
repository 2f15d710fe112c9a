"""What a run folder holds, told without changing it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from virnucpro.config import Recipe
from virnucpro.errors import FeatureFileError, InputMissingError, ResumeError
from virnucpro.log import printable
from virnucpro.outputs.sinks import FailedFiles
from virnucpro.run.features import check_index, read_embeddings
from virnucpro.run.folder import COPIES, RunDir
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import count_done, read_plan

_LISTED = 8  # of many files


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
    """What is damaged, a line each, and what to say if nothing is."""
    if not manifest.recipe.has_encoder:
        return [], "verified  nothing to verify: there are no feature files"
    plan = read_plan(rundir, manifest)
    shards = {} if plan is None else {shard.path.stem: shard.sha256 for shard in plan.shards}
    files = sorted(rundir.features.glob("*.h5"))
    damaged = []
    for file in files:
        attributes = {"fingerprint": manifest.recipe.fingerprint}
        if shard := shards.get(file.stem.removesuffix(COPIES)):
            attributes["shard_sha256"] = shard
        try:
            read_embeddings(file, attributes)
        except FeatureFileError as error:
            damaged.append(f"damaged   {error}")
    verified = f"verified  all {len(files)} feature files are whole"
    if rundir.feature_index.exists():
        try:
            if not damaged:
                check_index(rundir.feature_index)
        except FeatureFileError as error:
            damaged.append(f"damaged   {error}; --resume writes it anew")
    elif plan is None:
        verified += "; whether each is in its place was not checked: the plan is not here"
    return damaged, verified


def _describe(rundir: RunDir, manifest: Manifest) -> list[str]:
    stored = json.loads(rundir.manifest.read_text())
    recipe = manifest.recipe
    n_files = sum(not file.stem.endswith(COPIES) for file in rundir.features.glob("*.h5"))
    lines = [
        printable(f"state     {stored.get('state')}, {stored.get('time')} on {stored.get('host')}"),
        printable(f"command   {recipe.command}, {_how(recipe)}"),
        *_folded([f"input     {file.shown}" for file in manifest.inputs]),
        *_folded([f"unread    {printable(file.error)}" for file in manifest.refused]),
    ]
    if recipe.has_encoder:
        lines += _describe_shards(rundir, manifest, n_files)
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


def _describe_shards(rundir: RunDir, manifest: Manifest, n_files: int) -> list[str]:
    done = f"shards    {n_files} done"
    if not rundir.plan.exists():
        return [done]
    plan = read_plan(rundir, manifest)
    if plan is None:
        return [f"{done}, the plan is damaged, or of other inputs: --resume makes it again"]
    files = (rundir.features / f"{shard.name}.h5" for shard in plan.shards)
    missing = [index for index, file in enumerate(files) if not file.exists()]
    n_inputs = count_done(plan.files, missing)
    return [
        f"{done}, {len(missing)} pending",
        f"files     {n_inputs:,} of {len(plan.files):,} done",
    ]


def _folded(lines: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    if len(lines) <= _LISTED + 1:
        return lines
    return [*lines[:_LISTED], f"          + {len(lines) - _LISTED:,} more"]
