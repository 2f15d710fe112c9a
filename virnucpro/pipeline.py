"""The whole of ``virnucpro predict`` and ``virnucpro extract``, on one page.

The two differ in one thing: ``predict`` has a head, and therefore calls.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from virnucpro import __version__
from virnucpro.config import EncoderSpec, Recipe, RunConfig
from virnucpro.encoders.base import estimate_tokens
from virnucpro.engine.events import (
    BatchDone,
    EmbeddingStarted,
    Progress,
    Refusal,
    ShardFailed,
    Telling,
    WorkerReady,
)
from virnucpro.engine.executor import Executor
from virnucpro.engine.worker import Job
from virnucpro.errors import FeatureFileError, OutputError, StorageError
from virnucpro.files import writing
from virnucpro.log import LOGGER, announce, printable
from virnucpro.outputs.write import Results, Tally, copies_file
from virnucpro.records import STATUSES, Shard, Status
from virnucpro.run.features import Attributes, read_embeddings, read_label
from virnucpro.run.folder import Manifest, RunDir
from virnucpro.run.intake import open_run
from virnucpro.run.plan import Plan, find_plan, make_plan
from virnucpro.scorer.nets import Scorer, load_scorer
from virnucpro.scoring.head import Head

STAGES = ("reading", "embedding", "writing tables")
STARTING = "starting workers"  # is part of embedding
OnEvent = Callable[[Telling], None]


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    scorer: str = ""  # what made the calls without an encoder, for people
    statuses: dict[Status, int] = field(default_factory=dict)
    n_viral: int = 0
    n_frames: int = 0
    n_failed_frames: int = 0
    n_files: int = 0
    n_refused: int = 0  # files that could not be read
    n_tokens: int = 0  # embedded by this start, not by those before it
    n_copies: int = 0  # frames whose protein was met before
    n_tokens_saved: int = 0  # those of the copies
    n_tokens_in_all: int = 0  # of the whole run, with those
    seconds: dict[str, float] = field(default_factory=dict)  # per stage

    @property
    def n_records(self) -> int:
        return sum(self.statuses.values())

    @property
    def exit_code(self) -> int:
        """2 when something failed, 1 when frames did and no other is there."""
        if not self.n_failed_frames:
            return 2 if self.n_refused else 0
        return 2 if self.n_frames else 1

    def lines(self, folder: Path) -> list[str]:
        """What to tell the user at the end."""
        parts = [f"{n} {status}" for status, n in self.statuses.items() if n]
        names = {name: name for name in STAGES}
        if self.scorer:  # nothing is embedded, and scores come with the tables
            names = {STAGES[0]: STAGES[0], STAGES[2]: "scoring"}
        stages = ", ".join(f"{names[name]} {self.seconds[name]:.1f} s" for name in names)
        starting = self.seconds.get(STARTING, 0.0)
        rate = self.n_tokens / max(1e-3, self.seconds["embedding"] - starting)
        lines = [
            f"records: {self.n_records} in = {' + '.join(parts) or '0'}",
            self.scorer or f"frames embedded: {self.n_frames}",
            f"time: {stages}",
            f"results: {printable(folder)}",
        ]
        if self.n_tokens:
            lines.insert(
                3,
                f"tokens: {self.n_tokens:,} embedded at {rate:,.0f} per second, once the workers "
                f"were ready after {starting:.1f} s",
            )
        if self.n_copies:
            share = self.n_tokens_saved / self.n_tokens_in_all
            lines.insert(
                2,
                f"repeats: {self.n_copies:,} frames had a protein met before: "
                f"{self.n_tokens_saved:,} tokens not embedded again ({share:.1%})",
            )
        if self.statuses.get("scored"):
            lines.insert(1, f"called virus: {self.n_viral} of {self.statuses['scored']}")
        return lines + self._repair_lines(folder)

    def _repair_lines(self, folder: Path) -> list[str]:
        listing, lines = printable(folder / "failed_files.txt"), []
        if self.n_refused:
            lines += [
                f"files: {self.n_refused} of {self.n_files} could not be read: see {listing};",
                "  mend them and run the same command with --resume, or leave them out of it",
            ]
        if self.n_failed_frames:
            lines += [
                f"failed: {self.n_failed_frames} frames, see {listing}; to repair, run again with",
                "  --resume to try the same sequences again, or mend them and run with",
                f"  --resume --input {printable(folder / 'failed_sequences.fa')}",
            ]
        return lines

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds = self.seconds.get(name, 0.0) + time.monotonic() - started
        self.seconds[name] = round(seconds, 3)


def run(config: RunConfig, head: Head | None, executor: Executor, on_event: OnEvent) -> Summary:
    """Run, or resume, a prediction (with a head) or an extraction (without).

    Raises:
        VirnucproError: see ``errors``; finished shards are kept in every case.
    """
    rundir, summary = RunDir(config.output), Summary()
    with rundir.in_use():
        rundir.check_free(resume=config.resume, force=config.force)
        LOGGER.info("virnucpro %s: %s", __version__, printable(" ".join(config.argv)))
        rundir.sweep()
        with summary.stage(STAGES[0]), rundir.planning():
            recorded = None if config.force else rundir.read_manifest()
            manifest = open_run(config, rundir, recorded, on_event)
            scorer = announce_choices(config, manifest.recipe)
            plan = plan_run(config, rundir, recorded, manifest, on_event)
            rundir.clear_copies(manifest)
            announce_input(plan, manifest)
            count_repeats(plan, manifest.recipe.encoders, summary)
        job = make_job(config, rundir, manifest)
        results = Results(
            rundir=rundir,
            manifest=manifest,
            plan=plan,
            job=job,
            head=head,
            scorer=scorer,
            lost={},
            feature_format=config.feature_format,
            per_file=config.per_file or (recorded is not None and rundir.samples.is_dir()),
            on_event=on_event,
        )
        try:
            tally = complete(results, executor, on_event, summary)
        except FeatureFileError as error:
            LOGGER.warning("%s; every feature file is read now, and made again if need be", error)
            discard_damaged(plan, job, on_event)
            tally = complete(results, executor, on_event, summary)
        close_run(config, rundir, manifest, summary, tally)
        for line in summary.lines(config.output):
            LOGGER.info("%s", line)
    return summary


def announce_choices(config: RunConfig, recipe: Recipe) -> Scorer | None:
    """Say what reads the records, and what was chosen for it; the scorer, if it is that."""
    choice = config.scorer_for(recipe.input_type)
    if choice is not None:
        announce(choice.announcement)
        return load_scorer(choice.path)
    for announcement in config.announcements:
        announce(announcement)
    for compromise in config.compromises:
        LOGGER.warning("%s", compromise)
    return None


def plan_run(
    config: RunConfig,
    rundir: RunDir,
    recorded: Manifest | None,
    manifest: Manifest,
    on_event: OnEvent,
) -> Plan:
    """Cut the inputs into shards, or find that an earlier start did, and claim the folder.

    Results go, and ``run.json`` comes, when every input was read to its end: one that is refused
    changes nothing. A kill at any point leaves a folder with a run, or one that is free.
    """
    keep, facts = config.keep_intermediate, {**_facts(config, manifest), "state": "unfinished"}
    if recorded is not None:
        found = find_plan(
            rundir,
            manifest,
            keep_intermediate=keep,
            on_shard=lambda done, total: on_event(
                Progress("checking shards", done, total, "shards")
            ),
        )
        if found is not None:
            rundir.write_manifest(manifest, facts)
            return found
    stage = "reading and translating" if manifest.recipe.has_frames else "reading"
    on_letters = _progress(on_event, stage, manifest)
    plan = make_plan(rundir, manifest, keep_intermediate=keep, on_letters=on_letters)
    if recorded is None:
        rundir.clear()
    rundir.write_manifest(manifest, facts)
    rundir.adopt_plan()
    return plan


def make_job(config: RunConfig, rundir: RunDir, manifest: Manifest) -> Job:
    recipe = manifest.recipe
    return Job(
        features=rundir.features,
        encoders=recipe.encoders,
        weights=config.weights if recipe.encoders else (),
        tokens_per_batch=config.resources.tokens_per_batch,
        silence_seconds=config.resources.silence_seconds,
        fingerprint=recipe.fingerprint,
    )


def complete(results: Results, executor: Executor, on_event: OnEvent, summary: Summary) -> Tally:
    """Embed what is not done yet, and make the tables of all.

    Raises:
        FeatureFileError: a file that looked finished is damaged within.
    """
    with summary.stage(STAGES[1]):
        try:
            lost = embed(results, executor, on_event, summary)
        finally:
            results.rundir.sweep()  # what workers that died, or were stopped, were writing
    with summary.stage(STAGES[2]):
        return replace(results, lost=lost).write()


def embed(
    results: Results, executor: Executor, on_event: OnEvent, summary: Summary
) -> dict[int, str]:
    """Run what is not done yet. Returns why a shard has no feature file, by its index."""
    plan, job = results.plan, results.job
    pending = find_pending(plan, job, frozenset(results.manifest.replaced), on_event)
    lost: dict[int, str] = {}
    if not pending:
        return lost
    job.features.mkdir(exist_ok=True)
    on_event(
        EmbeddingStarted(tuple(pending), len(plan.shards) - len(pending), plan.files, job.encoders)
    )
    started = time.monotonic()
    with closing(executor.run(pending, job)) as events:
        for event in events:
            on_event(event)
            match event:
                case WorkerReady() if STARTING not in summary.seconds:
                    summary.seconds[STARTING] = round(time.monotonic() - started, 3)
                case BatchDone(n_tokens=n_tokens):
                    summary.n_tokens += n_tokens
                case ShardFailed(refusal=Refusal(hint=hint, is_place=is_place)):
                    kind = OutputError if is_place else StorageError
                    raise kind(event.reason, hint)
                case ShardFailed():
                    lost[event.shard.index] = event.reason
    return lost


def find_pending(plan: Plan, job: Job, replaced: frozenset[str], on_event: OnEvent) -> list[Shard]:
    """The shards without a feature file, or that owe more than what was given anew.

    Files are known by their labels: what is damaged within is found when the tables read it. What
    was given anew is still owed if a copy of it is.
    """
    pending, settled, shards = [], [], plan.shards
    for done, shard in enumerate(shards):
        on_event(Progress("checking finished shards", done, len(shards), "shards"))
        failed = failed_records(job.feature_file(shard), job.attributes_of(shard))
        if failed is None or not failed <= replaced:
            pending.append(shard)
        elif failed:
            settled.append(shard)
    if settled:
        with_copies = [shard for shard in shards if shard.n_orfs > shard.n_embedded]
        of_copies = [failed_records(*copies_file(job, shard)) for shard in with_copies]
        if any(failed is None or not failed <= replaced for failed in of_copies):
            pending = sorted([*pending, *settled], key=lambda shard: shard.index)
    return pending


def failed_records(path: Path, attributes: Attributes) -> set[str] | None:
    """The records of which a feature file holds failures; None without a complete file."""
    if not path.exists():
        return None
    try:
        return set(read_label(path, attributes).failed_records)
    except FeatureFileError as error:
        _discard(path, error)
        return None


def discard_damaged(plan: Plan, job: Job, on_event: OnEvent) -> None:
    """Delete the feature files that are not as they were written, to the last bit."""
    shards = plan.shards
    for done, shard in enumerate(shards):
        on_event(Progress("reading every feature file", done, len(shards), "shards"))
        path = job.feature_file(shard)
        try:
            if path.exists():
                read_embeddings(path, job.attributes_of(shard), job.encoders[0].dim)
        except FeatureFileError as error:
            _discard(path, error)


def _discard(path: Path, error: FeatureFileError) -> None:
    LOGGER.warning("%s; it is made again", error)
    with writing(path):
        path.unlink()


def close_run(
    config: RunConfig, rundir: RunDir, manifest: Manifest, summary: Summary, tally: Tally
) -> None:
    """Write the last word into ``run.json``, and delete what only the run needed."""
    summary.statuses = {status: tally.statuses[status] for status in STATUSES}
    summary.n_viral, summary.n_frames = tally.n_viral, tally.n_frames
    summary.n_failed_frames = tally.n_failed_frames
    scorer = config.scorer_for(manifest.recipe.input_type)
    summary.scorer = scorer.announcement if scorer else ""
    summary.n_refused = len(manifest.refused)
    summary.n_files = len(manifest.inputs) + summary.n_refused
    state = "partial" if summary.exit_code else "complete"
    facts = {"state": state, "counts": asdict(summary)}
    rundir.write_manifest(manifest, {**_facts(config, manifest), **facts})
    if not config.keep_intermediate and not summary.n_failed_frames:
        rundir.clear_shards()


def _facts(config: RunConfig, manifest: Manifest) -> dict[str, object]:
    scorer = config.scorer_for(manifest.recipe.input_type)
    return {
        "argv": list(config.argv),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "checkpoint": str(scorer.path if scorer else config.checkpoint),
        "announced": [scorer.announcement] if scorer else list(config.announcements),
        "resources": asdict(config.resources),
    }


def _progress(on_event: OnEvent, stage: str, manifest: Manifest) -> Callable[[int], None]:
    """Letters read, of about as many as there are bytes if nothing is compressed."""
    plain = all(not Path(known.path).name.endswith(_PACKED) for known in manifest.inputs)
    total = sum(known.n_bytes for known in manifest.inputs) if plain else 0
    return lambda done: on_event(Progress(stage, done, total, "letters"))


_PACKED = (".gz", ".bz2", ".xz", ".zst")


def count_repeats(plan: Plan, encoders: Sequence[EncoderSpec], summary: Summary) -> None:
    counts, shards = plan.counts, plan.shards
    n_embedded = sum(shard.n_embedded for shard in shards)
    n_residues = sum(shard.n_residues for shard in shards)
    summary.n_copies = counts.n_copies
    summary.n_tokens_saved = estimate_tokens(encoders, counts.n_copies, counts.n_copied_residues)
    n_tokens = estimate_tokens(encoders, n_embedded, n_residues)
    summary.n_tokens_in_all = n_tokens + summary.n_tokens_saved


def announce_input(plan: Plan, manifest: Manifest) -> None:
    """Say what the input is, and what to expect of it if the head was not made for such."""
    counts, recipe = plan.counts, manifest.recipe
    shards = f"; {len(plan.shards)} shards" if recipe.has_encoder else ""
    announce(
        f"{counts.n_records:,} records of {len(manifest.inputs)} files, {recipe.input_type}{shards}"
    )
    if not counts.n_records:
        LOGGER.warning("the input holds no record: the tables hold a header only")
    elif recipe.has_encoder and not plan.shards:
        LOGGER.warning("no record has a frame to embed: see the table for each one's status")
    if counts.n_gaps:
        LOGGER.warning(
            "%d gaps (- . ~) of an alignment, in %d records, are left out",
            counts.n_gaps,
            counts.n_gapped,
        )
    if counts.n_short > counts.n_records / 2:
        LOGGER.warning(
            "%d of %d records are shorter than half a chunk of %d bases: expect weaker calls",
            counts.n_short,
            counts.n_records,
            recipe.chunk_size,
        )
