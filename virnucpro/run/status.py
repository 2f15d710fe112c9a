"""The content of a run folder, described without changing it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from virnucpro.encoders.base import estimate_tokens
from virnucpro.ground.config import EncoderSpec, Recipe
from virnucpro.ground.errors import FeatureFileError, InputMissingError, ResumeError
from virnucpro.ground.files import read_json
from virnucpro.ground.log import counted, printable
from virnucpro.ground.records import Shard
from virnucpro.run.features import FeatureStore
from virnucpro.run.folder import ROWS, RunDir
from virnucpro.run.hashes import Outputs
from virnucpro.run.index import check_index
from virnucpro.run.lock import run_at
from virnucpro.run.manifest import Manifest
from virnucpro.run.plan import Plan, count_done, read_plan
from virnucpro.run.scores import ScoreStore
from virnucpro.run.work_log import HostFigures, Point, rate_of, read_hosts, seconds_left
from virnucpro.tables.sinks import SINKS, FailedFiles

_NEXT = {
    "unfinished": "the command of the run with --resume goes on",
    "planned": "virnucpro work DIR on any machines, then the planned command with --resume",
}
_NO_HASHES = (
    "outputs were not verified: run.json has no SHA-256 of them (the run is not finished, or an "
    "older version made it)"
)
_LISTED = 8  # number of files that are listed


def inspect_run(folder: Path, *, verify: bool) -> tuple[list[str], int]:
    """The lines that describe a run, and its number of damaged files.

    With ``verify`` every feature file and output is read to its last bit; without, none counts as
    damaged.

    Raises:
        InputMissingError: there is no run in this folder.
        ResumeError: ``run.json`` is damaged.
    """
    rundir = RunDir(folder)
    manifest = _read(rundir)
    with _told(folder):
        lines = _describe(rundir, manifest)
    n_damaged = 0
    if verify:
        damaged, verified = _verify(rundir, manifest)
        n_damaged = len(damaged)
        lines += damaged or [verified]
    return lines, n_damaged


def _read(rundir: RunDir) -> Manifest:
    """
    Raises:
        InputMissingError: there is no run in this folder.
        ResumeError: ``run.json`` is damaged.
    """
    manifest = rundir.read_manifest()
    if manifest is None:
        where, run = printable(rundir.root), run_at(rundir.root)
        if run:
            raise InputMissingError(
                f"{where}: {printable(run)} is reading the input, and has no plan yet",
                hint="ask again later",
            )
        present = [name for name in rundir.own_names if (rundir.root / name).exists()]
        if present and {*present} <= {rundir.copies.name, rundir.log.name}:
            raise InputMissingError(
                f"{where} holds no results: a run began there, and ended while it read the input",
                hint=f"run its command again; {printable(rundir.log)} has it, and how it ended",
            )
        raise rundir.no_run(hint="give the --output-dir of a run")
    return manifest


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Turn errors from what ``run.json`` holds into ours.

    Raises:
        ResumeError: ``run.json`` is not as it was written.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResumeError(
            f"{printable(folder)}: run.json is damaged: {printable(error)}",
            hint="go on with --resume, which writes it anew",
        ) from error


def _verify(rundir: RunDir, manifest: Manifest) -> tuple[list[str], str]:
    """A line for each damaged file, and the line to print if there is none."""
    outputs, damaged, whole, remarks = Outputs(rundir), list[str](), list[str](), list[str]()
    hashes = outputs.read_hashes()
    if manifest.recipe.has_encoder:
        damaged, n_files, remarks = _verify_features(rundir, manifest)
        whole.append(counted(n_files, "feature file"))
    if hashes is None:
        remarks.append(_NO_HASHES)
    else:
        damaged += [f"damaged   {error}; {error.hint}" for _, error in outputs.find_damaged(hashes)]
        whole.append(counted(len(hashes), "output"))
        if n_others := outputs.count_unhashed(hashes):
            remarks.append(f"{counted(n_others, 'output')} without a SHA-256 in run.json")
    return damaged, f"verified  whole: {'; '.join([', '.join(whole) or 'nothing', *remarks])}"


def _verify_features(rundir: RunDir, manifest: Manifest) -> tuple[list[str], int, list[str]]:
    """A line for each damaged file, the number of files, and what was not looked at."""
    plan = read_plan(rundir, manifest)
    damaged, n_files, has_index = [], 0, False
    for store in rundir.stores_of(manifest):
        of_store = [
            f"damaged   {error}" for error in store.find_damaged(plan.shards if plan else ())
        ]
        n_files += len(list(store.files()))
        if store.index.exists():
            has_index = True
            of_store += [] if of_store else _verify_index(store)
        damaged += of_store
    if plan is None and not has_index:
        remark = "whether each is in its place was not checked: the plan is not here"
        return damaged, n_files, [remark]
    return damaged, n_files, []


def _verify_index(store: FeatureStore) -> list[str]:
    try:
        check_index(store.index)
    except FeatureFileError as error:
        return [f"damaged   {error}; --resume writes it anew"]
    return []


def _describe(rundir: RunDir, manifest: Manifest) -> list[str]:
    stored = read_json(rundir.manifest)
    recipe, run = manifest.recipe, run_at(rundir.root)
    lines = [
        printable(f"state     {stored.get('state')}, {stored.get('time')} on {stored.get('host')}"),
        *([printable(f"running   {run}")] if run else []),
        printable(f"command   {recipe.command}, {_how(recipe)}"),
        *_folded([f"input     {file.shown}" for file in manifest.inputs]),
        *_folded([f"unread    {printable(file.error)}" for file in manifest.refused]),
    ]
    if rules := manifest.embed_rules:
        lines.append(f"embedded  only what --embed {rules} asks for")
    if recipe.has_encoder:
        lines += _describe_shards(rundir, manifest)
    elif letters := _letters(rundir, manifest, stored):
        lines.append(letters)
    if (slices := _count_slices(rundir, manifest)) and stored.get("state") == "planned":
        text = "{planned:,} of {total:,} planned, {tables:,} with tables"
        lines.append(f"slices    {text.format(**slices)}")
    if "counts" in stored:
        statuses = stored["counts"]["statuses"].items()
        counts = ", ".join(f"{n} {status}" for status, n in statuses if n)
        lines.append(printable(f"records   {counts}"))
    if "counts" in stored and (missing := _missing(rundir, recipe)):
        lines.append(f"missing   {', '.join(missing)}: --resume writes them, if it has the input")
    if not run and (next_step := _NEXT.get(stored.get("state"))):
        lines.append(f"next      {next_step}")
    listing = rundir.output(FailedFiles)
    if listing.exists():
        lines.append(f"failed    see {printable(listing)}")
    return lines


def _missing(rundir: RunDir, recipe: Recipe) -> list[str]:
    """The outputs that every finished run has, and this one has not."""
    always = [sink for sink in SINKS[recipe.command] if not sink.is_optional]
    return [sink.file for sink in always if not rundir.output(sink).exists()]


def _how(recipe: Recipe) -> str:
    if not recipe.has_encoder:
        return recipe.reader
    return "; ".join(
        f"{encoder.model}, layer {encoder.layer}, {encoder.precision}"
        for encoder in recipe.encoders
    )


def _describe_shards(rundir: RunDir, manifest: Manifest) -> list[str]:
    done = _names_done(rundir, manifest)
    head = f"shards    {len(done)} done"
    if not rundir.plan.exists():
        return [head]
    plan = read_plan(rundir, manifest)
    if plan is None:
        return [f"{head}, the plan is damaged, or of other inputs: --resume makes it again"]
    pending = [shard.index for shard in plan.shards if shard.name not in done]
    n_inputs = count_done(plan.files, pending)
    return [
        f"{head}, {len(pending)} pending",
        f"files     {n_inputs:,} of {len(plan.files):,} done",
        *_folded([_host_line(figures) for figures in read_hosts(rundir.logs)]),
    ]


def _count_slices(rundir: RunDir, manifest: Manifest) -> dict[str, int]:
    """The slices of the input, those that are planned, and those whose rows are written."""
    plan = read_plan(rundir, manifest)
    if plan is None:
        return {}
    n_rows = len(list(rundir.rows.glob(f"*{ROWS}")))
    return {
        "total": len(plan.slices),
        "planned": len(plan.slices) - len(plan.missing),
        "tables": n_rows,
    }


def _letters(rundir: RunDir, manifest: Manifest, stored: Mapping[str, Any]) -> str:
    """The line on what is scored, if anything is known of it."""
    work = _scoring(rundir, manifest, stored)
    total, done = work.total, work.n_done
    return f"scored    {done:,} of {total:,} letters" if total else ""


def _names_done(rundir: RunDir, manifest: Manifest) -> set[str]:
    """The names of the shards that have a file of every encoder."""
    return set.intersection(*(store.names_done() for store in rundir.stores_of(manifest)))


def _host_line(figures: HostFigures) -> str:
    now = f"{figures.n_working} at work" if figures.n_working else "ended"
    lost = f", {counted(figures.n_lost, 'shard')} given up" if figures.n_lost else ""
    return (
        f"host      {figures.host}: {now}, {counted(figures.n_shards, 'shard')} done, "
        f"{figures.tokens_per_second:,.0f} tokens/s, "
        f"{counted(figures.n_failed, 'sequence')} failed{lost}"
    )


def measure_run(folder: Path) -> dict[str, Any]:
    """The figures of a run for programs: what is done and pending, and the time that is left.

    Raises:
        InputMissingError, ResumeError: as ``inspect_run``.
    """
    rundir = RunDir(folder)
    manifest = _read(rundir)
    with _told(folder):
        return _measure(rundir, manifest)


def _measure(rundir: RunDir, manifest: Manifest) -> dict[str, Any]:
    stored, hosts = read_json(rundir.manifest), read_hosts(rundir.logs)
    scored = not manifest.recipe.has_encoder
    has_all = stored.get("state") == "complete" if scored else _has_all(stored)
    work = (_scoring if scored else _embedding)(rundir, manifest, stored)
    rates = [host.tokens_per_second for host in hosts if host.n_working]
    rate, running = sum(rates), run_at(rundir.root)
    left = work.pending / rate if rate and work.pending else None
    if running and not rates:
        rate, left = rate_of(work.points), seconds_left(work.points, work.pending, time.time())
    return {
        "state": stored.get("state"),
        "running": running or None,
        "slices": _count_slices(rundir, manifest) or None,
        "embed": manifest.embed_rules or "all",
        **work.counts,
        "sequences_failed": sum(host.n_failed for host in hosts),
        f"{'letters' if scored else 'tokens'}_per_second": round(rate * work.per_work, 1),
        "remaining_seconds": 0 if has_all else None if left is None else round(left),
        "hosts": [asdict(host) for host in hosts],
    }


class _Work(NamedTuple):
    """The work of a run: its counts, what is still to do, and what this start did by when."""

    counts: dict[str, object]
    pending: float
    points: list[Point]
    total: int | None
    n_done: int
    per_work: float = 1.0  # letters, or tokens, of a piece of work


def _embedding(rundir: RunDir, manifest: Manifest, stored: Mapping[str, Any]) -> _Work:
    plan, encoders = read_plan(rundir, manifest), manifest.recipe.encoders
    shards, has_all = plan.shards if plan else (), _has_all(stored)
    done = _names_done(rundir, manifest)  # its plan was deleted with its shards
    pending = _tokens(encoders, [shard for shard in shards if shard.name not in done])
    n_tokens = _tokens(encoders, shards)
    if plan is None and has_all:
        counts = stored["counts"]
        n_tokens = counts["n_tokens_in_all"] - counts["n_tokens_saved"]
    ends = [
        (max(store.path(shard).stat().st_mtime for store in stores), _tokens(encoders, [shard]))
        for stores in [rundir.stores_of(manifest)]
        for shard in shards
        if shard.name in done
    ]
    given_up = sum(host.n_lost for host in read_hosts(rundir.logs))
    return _Work(
        {
            "shards": {**_shard_counts(plan, done, has_all=has_all), "given_up": given_up},
            "tokens": {"total": n_tokens, "pending": pending},
        },
        pending,
        _points(rundir, ends),
        n_tokens,
        n_tokens - pending,
    )


def _scoring(rundir: RunDir, manifest: Manifest, stored: Mapping[str, Any]) -> _Work:
    plan = read_plan(rundir, manifest)
    store = ScoreStore(rundir, rundir.scores, manifest.recipe.fingerprint, finder="")
    labels = [(path.stat().st_mtime, label.attributes) for path, label in store.labels()]
    ends = [(seconds, int(each["work"])) for seconds, each in labels]
    n_done, worked = sum(int(each["n_letters"]) for _, each in labels), sum(n for _, n in ends)
    total, work = (n_done, worked) if stored.get("state") == "complete" else (None, worked)
    if plan is not None:
        total = work = plan.counts.n_letters
        if dict(stored.get("cut") or {}).get("regions"):
            work += plan.counts.n_searched
    return _Work(
        {
            "letters": {
                "total": total,
                "done": n_done,
                "pending": None if total is None else max(0, total - n_done),
            },
        },
        max(0, work - worked),
        _points(rundir, ends),
        total,
        n_done,
        n_done / max(1, worked),
    )


def _points(rundir: RunDir, ends: Iterable[tuple[float, float]]) -> list[Point]:
    """The work that was done by when since this start: it begins when ``run.json`` is written."""
    began = rundir.manifest.stat().st_mtime
    since = sorted((seconds, amount) for seconds, amount in ends if seconds > began)
    done = accumulate(amount for _, amount in since)
    return [(began, 0.0), *zip([seconds for seconds, _ in since], done, strict=True)]


def _shard_counts(
    plan: Plan | None, done: Collection[str], *, has_all: bool
) -> dict[str, int | None]:
    """None is what only a plan that is there would say."""
    n_done = len(done)
    if plan is None and not has_all:
        return {"total": None, "done": n_done, "pending": None}
    if plan is None:
        return {"total": n_done, "done": n_done, "pending": 0}
    n_pending = sum(shard.name not in done for shard in plan.shards)
    return {"total": len(plan.shards), "done": n_done, "pending": n_pending}


def _has_all(stored: Mapping[str, Any]) -> bool:
    """Whether a run has every vector; one that could not read a file is partial all the same."""
    state = stored.get("state")
    return state == "complete" or (state == "partial" and not stored["counts"]["n_failed_frames"])


def _tokens(encoders: Sequence[EncoderSpec], shards: Sequence[Shard]) -> int:
    n_embedded = sum(shard.n_embedded for shard in shards)
    return estimate_tokens(encoders, n_embedded, sum(shard.n_residues for shard in shards))


def _folded(lines: list[str]) -> list[str]:
    """The first few lines, and the number of the others."""
    if len(lines) <= _LISTED + 1:
        return lines
    return [*lines[:_LISTED], f"          + {len(lines) - _LISTED:,} more"]
