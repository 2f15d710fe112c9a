"""Describe a run folder without changing it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from virnucpro.core.errors import InputMissingError, ResumeError, VirnucproError
from virnucpro.core.logging import escape_markup, format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.core.types import Shard
from virnucpro.engine.device_timeline import DeviceTimeline
from virnucpro.engine.event_log import HostProgress, WorkProgress, read_work, sum_hosts
from virnucpro.engine.progress import Point, estimate_rate, seconds_left
from virnucpro.models.token_estimate import estimate_tokens
from virnucpro.results.outputs import OUTPUTS, RunOutput, open_run_dir
from virnucpro.sequences.file_scan import hash_inputs
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.checksums import Outputs, has_vectors
from virnucpro.store.feature_store import is_feature_file
from virnucpro.store.frame_scores import FRAME_SCORES
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, count_done
from virnucpro.store.plan_reader import read_plan
from virnucpro.store.run_dir import RunDir
from virnucpro.store.run_lock import find_run_lock
from virnucpro.store.shard_store import ShardStore
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.table_cache import RowStore

if TYPE_CHECKING:
    from virnucpro.workflows.recompute import Recomputed

_LISTED = 8  # maximum number of listed files


@dataclass(frozen=True)
class _RunState:
    """A run folder snapshot."""

    rundir: RunDir
    manifest: Manifest
    facts: Mapping[str, Any]  # complete content of ``run.json``
    running: str  # name of the run that has locked the folder
    plan: Plan | None
    work: list[WorkProgress]  # of other processes
    stores: tuple[ShardStore, ...]  # of finished shards; empty: the scorer does all the work
    done: set[str]  # names of shards that have a file in each store

    @property
    def state(self) -> str:
        return str(self.facts.get("state"))

    @property
    def shards(self) -> Sequence[Shard]:
        return self.plan.shards if self.plan else ()

    @cached_property
    def hosts(self) -> list[HostProgress]:
        return sum_hosts(self.work)

    @cached_property
    def pending(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.name not in self.done]

    @property
    def has_all(self) -> bool:
        """Whether the run is complete, or has every vector although a file was unreadable."""
        if self.state == "partial" and self.stores:
            return not self.facts["counts"]["n_failed_frames"]
        return self.state == "complete"


@contextmanager
def _read_state(folder: Path) -> Iterator[_RunState]:
    """Take a snapshot of a run. Errors from a damaged ``run.json`` become ``ResumeError``.

    Raises:
        InputMissingError: there is no run in this folder.
        ResumeError: ``run.json`` is damaged.
    """
    rundir = open_run_dir(folder)
    manifest = rundir.read_manifest()
    run = find_run_lock(folder)
    if manifest is None and run:
        raise InputMissingError(
            f"{printable(folder)}: {printable(run)} is still reading the input",
            hint="try again later",
        )
    manifest = manifest or rundir.read_run(hint=with_options("give the {output_dir} of a run"))
    facts = rundir.read_facts()
    plan = read_plan(rundir, manifest)
    stores = rundir.shard_stores(manifest.recipe)
    done = [store.completed_names() for store in stores]
    try:
        yield _RunState(
            rundir,
            manifest,
            facts,
            run,
            plan,
            read_work(rundir.logs),
            stores,
            set.intersection(*done) if done else set(),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResumeError(
            f"{printable(folder)}: run.json is damaged: {printable(error)}",
            hint=with_options("run with {resume} to rewrite it"),
        ) from error


def inspect_run(
    folder: Path, *, verify: bool, recomputed: Recomputed | None = None
) -> tuple[list[str], int]:
    """Describe a run.

    Args:
        verify: read every feature file and output completely. Otherwise no file counts as damaged.
        recomputed: recomputed parts. Those that differ count as damaged.

    Returns:
        Lines to print, and the damaged file count.

    Raises:
        InputMissingError: there is no run in this folder.
        ResumeError: ``run.json`` is damaged.
    """
    with _read_state(folder) as seen:
        lines = _describe(seen)
    if not verify:
        return lines, 0
    damaged, verified = _verify(seen)
    if recomputed:
        damaged += [f"differs   {fault}" for fault in recomputed.faults]
        lines.append(f"compared  {recomputed.line}")
    return [*lines, *(damaged or [verified])], len(damaged)


@dataclass(slots=True)
class _Findings:
    """Results of ``--verify``: faults, what is intact, and what could not be verified."""

    faults: list[str] = field(default_factory=list)
    intact: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        counts = ", ".join(self.intact) or "nothing"
        return f"verified  intact: {'; '.join([counts, *self.remarks])}"


def _verify(seen: _RunState) -> tuple[list[str], str]:
    """Return a line per damaged file or changed input, and the line to print if there are none."""
    no_checksum = "run.json has no SHA-256 of its own: an older version wrote it"
    findings = _Findings()
    hashes = Outputs(seen.rundir).read_hashes()
    if seen.stores:
        _verify_shards(seen, hashes, findings)
    _verify_outputs(seen, hashes, findings)
    if not seen.rundir.has_checksum:
        findings.remarks.append(no_checksum)
    _verify_inputs(seen, findings)
    return findings.faults, findings.line


def _verify_shards(seen: _RunState, hashes: Mapping[str, str] | None, findings: _Findings) -> None:
    """Find feature files that are damaged, missing, or differ from ``run.json``."""
    hashes_by_path = {
        seen.rundir.root / name: digest
        for name, digest in (hashes or {}).items()
        if _is_shard_file(name)
    }
    for store in seen.stores:
        for _, error in store.find_damaged(seen.shards, hashes=hashes_by_path):
            hint = f"; {error.hint}" if error.hint else ""
            findings.faults.append(f"damaged   {error}{hint}")
    for path in hashes_by_path:
        if not path.exists():
            missing = f"damaged   {printable(path)} is missing; --resume recomputes it"
            findings.faults.append(missing)
    n_files = sum(len(list(store.files())) for store in seen.stores)
    kind = "feature file" if seen.manifest.recipe.keep_vectors else "file of scores"
    findings.intact.append(format_count(n_files, kind, kind.replace("file", "files")))
    if seen.plan is None and hashes is None:
        findings.remarks.append("their places were not checked: the plan is missing")


def _is_shard_file(name: str) -> bool:
    """Return True if an output belongs to a finished shard, given its relative path."""
    is_scored = Path(name).suffix == FRAME_SCORES
    return is_scored or (has_vectors(name) and is_feature_file(Path(name).name))


def _verify_outputs(seen: _RunState, hashes: Mapping[str, str] | None, findings: _Findings) -> None:
    """Find other outputs that are damaged or missing."""
    no_hashes = (
        "outputs were not verified: run.json has no SHA-256 of them (the run is not finished, or "
        "an older version made it)"
    )
    if hashes is None:
        findings.remarks.append(no_hashes)
        return
    outputs = Outputs(seen.rundir)
    other_hashes = {name: digest for name, digest in hashes.items() if not _is_shard_file(name)}
    for _, error in outputs.find_damaged(other_hashes):
        findings.faults.append(f"damaged   {error}; {error.hint}")
    findings.intact.append(format_count(len(other_hashes), "output"))
    if n_unknown := outputs.count_unhashed(hashes):
        unknown = format_count(n_unknown, "output")
        findings.remarks.append(f"{unknown} without a SHA-256 in run.json")


def _verify_inputs(seen: _RunState, findings: _Findings) -> None:
    """Find inputs that changed after the run."""
    inputs = seen.manifest.inputs
    present = [file for file in inputs if Path(file.path).exists()]
    for file in present:
        if fault := _find_fault(file):
            findings.faults.append(f"changed   {fault}")
    if present:
        findings.intact.append(format_count(len(present), "input"))
    if n_gone := len(inputs) - len(present):
        findings.remarks.append(f"{format_count(n_gone, 'input')} gone, and not compared")


def _find_fault(file: InputFile) -> str:
    """Return why an input is not the one that the run read, or "" if it is."""
    try:
        if hash_inputs(file).sha256 == file.sha256:
            return ""
    except VirnucproError as error:
        return str(error)
    return f"{file.display_name}: this input has another SHA-256 than in run.json"


def _describe(seen: _RunState) -> list[str]:
    rundir = seen.rundir
    manifest = seen.manifest
    facts = seen.facts
    run = seen.running
    recipe = manifest.recipe
    lines = [
        printable(f"state     {facts.get('state')}, {facts.get('time')} on {facts.get('host')}"),
        *([printable(f"running   {run}")] if run else []),
        printable(f"command   {recipe.command}, {_describe_executor(recipe)}"),
        *_folded([f"input     {file.display_name}" for file in manifest.inputs]),
        *_folded([f"unread    {printable(file.error)}" for file in manifest.refused]),
    ]
    if rules := manifest.embed_rules:
        lines.append(f"embedded  only records that --embed {rules} chooses")
    lines += _describe_shards(seen) if seen.stores else _describe_letters(seen)
    lines += _describe_speed(seen)
    lines += _folded([f"device    {printable(line)}" for line in _lost_devices(seen)])
    step = seen.state
    slices = _count_slices(seen)
    if slices and (seen.state == "planned" or slices["planned"] < slices["total"]):
        text = "{planned:,} of {total:,} planned, {tables:,} with tables"
        lines.append(f"slices    {text.format(**slices)}")
    if slices and seen.state == "planned" and slices["tables"] == slices["total"]:
        step = "worked"
    if "counts" in facts:
        statuses = facts["counts"]["statuses"].items()
        counts = ", ".join(f"{n} {status}" for status, n in statuses if n)
        lines.append(printable(f"records   {counts}"))
        lines += _describe_missing(rundir, recipe)
    lines += _next_steps(seen, step)
    listing = rundir.output(RunOutput.FAILED_FILES.file)
    if listing.exists():
        lines.append(f"failed    see {printable(listing)}")
    return lines


def _next_steps(seen: _RunState, step: str) -> Iterator[str]:
    """Yield what the user can do next, and the run's command."""
    next_steps = {
        "unfinished": "repeat the command of the run with --resume",
        "planned": "virnucpro work {} on any machines, then the planned command with --resume",
        "worked": "the planned command with --resume",
    }
    if seen.running or step not in next_steps:
        return
    yield f"next      {next_steps[step].format(shlex.quote(printable(seen.rundir.root)))}"
    match seen.facts.get("argv"):
        case [_, *words] if words:  # without the program path
            yield escape_markup(f"as typed  {shlex.join(map(str, ('virnucpro', *words)))}")


def _describe_missing(rundir: RunDir, recipe: Recipe) -> Iterator[str]:
    """Yield the outputs that every finished run has, or that this one had, and that are gone."""
    always = [sink.file for sink in OUTPUTS[recipe.command] if not sink.is_optional]
    recorded = Outputs(rundir).read_hashes() or {}
    paths = {name: rundir.output(name) for name in (*always, *recorded)}
    folders = {path.parent for path in paths.values()}
    present = {path for folder in folders for path in folder.glob("*")}  # faster than one by one
    if names := [name for name, path in paths.items() if path not in present]:
        listed = printable(", ".join(names[:_LISTED]))
        more = f" + {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
        yield f"missing   {listed}{more}: --resume writes them if the input is there"


def _describe_executor(recipe: Recipe) -> str:
    encoders = (
        f"{encoder.model}, layer {encoder.layer}, {encoder.precision}"
        for encoder in recipe.encoders
    )
    return "; ".join(encoders) or recipe.reader


def _describe_letters(seen: _RunState) -> list[str]:
    letters = _scoring(seen).counts["letters"]
    total = letters["total"]
    n_done = letters["done"]
    total_text = "" if total is None else f" of {total:,}"
    return [f"scored    {n_done:,}{total_text} letters"] if total or n_done else []


def _describe_shards(seen: _RunState) -> list[str]:
    head = f"shards    {len(seen.done)} done"
    if not seen.rundir.plan.exists():
        return [head]
    if seen.plan is None:
        return [f"{head}, the plan is damaged or belongs to other inputs: --resume recomputes it"]
    files = seen.plan.shards_by_input
    pending = [shard.index for shard in seen.pending]
    is_planned = not seen.plan.missing_slices
    return [
        f"{head}, {len(pending)} pending" + ("" if is_planned else " in the planned slices"),
        *([f"files     {count_done(files, pending):,} of {len(files):,} done"] * is_planned),
        *_folded(list(map(_host_line, seen.hosts))),
    ]


def _describe_speed(seen: _RunState) -> Iterator[str]:
    """Yield the speed and the time left, if the run is at work and has done something."""
    if not seen.running and not any(host.n_working for host in seen.hosts):
        return
    work = _measure_work(seen)
    rate, left = _rate(seen, work)
    if rate:
        remaining = "unknown" if left is None else timedelta(seconds=left)
        yield f"speed     {rate * work.per_work:,.0f} {work.unit}/s, remaining {remaining}"


def _lost_devices(seen: _RunState) -> list[str]:
    """A line for each device that the latest start with vectors lost."""
    starts = DeviceTimeline.read_all(seen.rundir.machine)
    lines = starts[-1].lost_devices if starts else []
    by_work = (process.state.embedding.lost_devices for process in seen.work)
    return [*lines, *chain.from_iterable(by_work)]


def _count_slices(seen: _RunState) -> dict[str, int]:
    """Count the input slices, the planned ones, and those with written rows.

    Rows that will be recomputed, for example after a new threshold, do not count as written.
    """
    plan = seen.plan
    if plan is None:
        return {}
    made_by = str(seen.facts.get(RowStore.field))
    rows = RowStore(plan, made_by)
    return {
        "total": len(plan.slices),
        "planned": len(plan.planned_slices),
        "tables": sum(len(group) for group in plan.group_by_records() if rows.has(group)),
    }


def _host_line(figures: HostProgress) -> str:
    now = f"{figures.n_working} at work" if figures.n_working else "ended"
    lost_text = f", {format_count(figures.n_lost, 'shard')} abandoned" if figures.n_lost else ""
    return (
        f"host      {figures.host}: {now}, {format_count(figures.n_shards, 'shard')} done, "
        f"{figures.tokens_per_second:,.0f} tokens/s, "
        f"{format_count(figures.n_failed, 'sequence')} failed{lost_text}"
    )


def measure_run(
    folder: Path, *, verify: bool = False, recomputed: Recomputed | None = None
) -> dict[str, Any]:
    """Measure a run for programs: finished and pending work, and the time left.

    Args:
        verify: add a line per damaged file.
        recomputed: recomputed parts to add.

    Raises:
        InputMissingError, ResumeError: as ``inspect_run``.
    """
    with _read_state(folder) as seen:
        work = _measure_work(seen)
        rate, left = _rate(seen, work)
        damaged: dict[str, Any] = {"damaged": _verify(seen)[0]} if verify else {}
        if recomputed:
            damaged["recomputed"] = asdict(recomputed)
            damaged["damaged"] += recomputed.faults
        return {
            "state": seen.facts.get("state"),
            "running": seen.running or None,
            **_recorded_inputs(seen),
            **damaged,
            "slices": _count_slices(seen) or None,
            "embed": seen.manifest.embed_rules or "all",
            **work.counts,
            "sequences_failed": sum(host.n_failed for host in seen.hosts),
            f"{work.unit}_per_second": round(rate * work.per_work, 1),
            "remaining_seconds": 0 if seen.has_all else left,
            "hosts": [asdict(host) for host in seen.hosts],
            "lost_devices": _lost_devices(seen),
        }


def _recorded_inputs(seen: _RunState) -> dict[str, Any]:
    """Summarize the inputs. Records are counted when tables are written."""
    return {
        "command": seen.manifest.recipe.command,
        "records": dict(seen.facts.get("counts", {})).get("statuses"),
        "unread": [file.error for file in seen.manifest.refused],
    }


class _Work(NamedTuple):
    """A run's work: its counts, what is pending, and the progress of this start."""

    unit: str  # what is counted
    counts: Mapping[str, Mapping[str, int | None]]
    pending: float
    points: list[Point]
    per_work: float = 1.0  # letters or tokens per unit of work


def _measure_work(seen: _RunState) -> _Work:
    return _embedding(seen) if seen.stores else _scoring(seen)


def _rate(seen: _RunState, work: _Work) -> tuple[float, int | None]:
    """Return the work per second and the seconds left (None: unknown).

    The rate is that of all working hosts, or of this start.
    """
    rates = [host.tokens_per_second for host in seen.hosts if host.n_working]
    if seen.running and not rates:
        left = seconds_left(work.points, work.pending, time.time())
        return estimate_rate(work.points), None if left is None else round(left)
    rate = sum(rates)
    return rate, round(work.pending / rate) if rate and work.pending else None


def _embedding(seen: _RunState) -> _Work:
    encoders = seen.manifest.recipe.encoders
    n_done = len(seen.done)
    pending = _tokens(encoders, seen.pending)
    n_tokens = _tokens(encoders, seen.shards)
    shards: dict[str, int | None] = {"total": None, "done": n_done, "pending": None}
    if seen.plan is not None:
        shards |= {"total": len(seen.shards), "pending": len(seen.pending)}
    elif seen.has_all:  # the plan was deleted with the shards
        shards |= {"total": n_done, "pending": 0}
        counts = seen.facts["counts"]
        n_tokens = counts["n_tokens_in_all"] - counts["n_tokens_saved"]
    shards["given_up"] = sum(host.n_lost for host in seen.hosts)
    ends: list[tuple[float, float]] = []
    for shard in seen.shards:
        if shard.name in seen.done:
            seconds = max(store.path(shard).stat().st_mtime for store in seen.stores)
            ends.append((seconds, _tokens(encoders, [shard])))
    tokens = {"total": n_tokens, "pending": pending}
    points = _rate_points(seen.rundir, ends)
    left = pending + _count_unplanned_tokens(seen.plan, n_tokens)
    return _Work("tokens", {"shards": shards, "tokens": tokens}, left, points)


def _count_unplanned_tokens(plan: Plan | None, n_planned: int) -> float:
    """Estimate the tokens of the slices that are not planned yet, from those that are."""
    if plan is None or not plan.slice_plans:
        return 0.0
    return n_planned * len(plan.missing_slices) / len(plan.slice_plans)


def _scoring(seen: _RunState) -> _Work:
    rundir = seen.rundir
    plan = seen.plan
    store = ScoreStore(rundir, rundir.scores, seen.manifest.recipe.fingerprint, finder="")
    labels = [(path.stat().st_mtime, label.attributes) for path, label in store.labels()]
    ends = [(seconds, int(attributes["work"])) for seconds, attributes in labels]
    n_done = sum(int(attributes["n_letters"]) for _, attributes in labels)
    worked = sum(amount for _, amount in ends)
    total = None
    work = worked
    if seen.has_all:  # by any scorer, so its files may not count now
        total = n_done = int(seen.facts["counts"].get("n_letters", n_done))
    if plan is not None and len(plan.planned_slices) == len(plan.slices):
        total = work = plan.counts.n_letters
        if dict(seen.facts.get("cut") or {}).get("regions"):
            work += plan.counts.n_searched
    pending = None if total is None else max(0, total - n_done)
    counts = {"letters": {"total": total, "done": n_done, "pending": pending}}
    left = max(0, work - worked)
    per_work = n_done / max(1, worked)
    return _Work("letters", counts, left, _rate_points(rundir, ends), per_work)


def _rate_points(rundir: RunDir, ends: Iterable[tuple[float, float]]) -> list[Point]:
    """Return the work of this start over time, since ``run.json`` was written."""
    began = rundir.manifest.stat().st_mtime
    since = sorted((seconds, amount) for seconds, amount in ends if seconds > began)
    done = accumulate(amount for _, amount in since)
    points = [Point(seconds, total) for (seconds, _), total in zip(since, done, strict=True)]
    return [Point(began, 0.0), *points]


def _tokens(encoders: Sequence[EncoderSpec], shards: Sequence[Shard]) -> int:
    n_embedded = sum(shard.n_embedded for shard in shards)
    return estimate_tokens(encoders, n_embedded, sum(shard.n_residues for shard in shards))


def _folded(lines: list[str]) -> list[str]:
    """Return the first few lines, and a count for the rest."""
    if len(lines) <= _LISTED + 1:
        return lines
    return [*lines[:_LISTED], f"          + {len(lines) - _LISTED:,} more"]
