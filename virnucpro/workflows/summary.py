"""Count a run's figures once, from its plan, batches and records.

``run.json``, the log and the console all show these figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from virnucpro.core.events import STAGES, STARTING, ShardDone, WorkerEvent
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.recipe import Command, InputType
from virnucpro.engine.progress import EmbeddingProgress
from virnucpro.models.token_estimate import estimate_tokens
from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import RunOutput, open_run_dir
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan


def warn_of_cache(event: WorkerEvent) -> None:
    """Warn if a worker could not add vectors to the cache. It does not retry."""
    if isinstance(event, ShardDone) and event.cache_fault:
        LOGGER.warning(
            "%s no longer adds to the cache: %s; the run is complete without it",
            event.worker,
            event.cache_fault,
        )


class Classifier(Protocol):
    """The classifier properties that the summary reports."""

    @property
    def announcements(self) -> tuple[str, ...]: ...

    @property
    def stages(self) -> tuple[str, ...]: ...

    @property
    def threshold(self) -> tuple[str, tuple[tuple[int, float], ...]]: ...


@dataclass(slots=True, eq=False)
class Summary:
    """A run's figures."""

    callers: tuple[str, ...] = ()  # lines that describe the classifiers
    input_type: InputType = "nucleotide"
    stages: tuple[str, ...] = STAGES
    cut: str = ""  # threshold rule for calling a record viral, in words
    # The same in numbers: length, and the lowest score of a viral record with that length.
    cut_scores: tuple[tuple[int, float], ...] = ()
    records: RecordCounts = field(default_factory=RecordCounts)
    n_files: int = 0
    n_slices: int | None = None  # if the run was only planned; None: the run finished
    n_refused: int = 0  # files that could not be read
    n_letters: int = 0  # letters of all records
    n_left: int = 0  # records that --embed left to the scorer
    n_left_letters: int = 0
    n_tokens: int = 0  # embedded by this start
    n_cached: int = 0  # vectors that this start read from the cache
    n_cached_tokens: int = 0
    n_copies: int = 0  # frames with an earlier frame's protein
    n_tokens_saved: int = 0  # tokens of the copies
    n_tokens_in_all: int = 0  # tokens of the complete run, including copies
    seconds: dict[str, float] = field(default_factory=dict)  # per stage
    # Device, precision, kernels and budget of each worker in this start.
    workers: list[str] = field(default_factory=list)
    lost_devices: list[str] = field(default_factory=list)  # of this start, a line for each

    def announce_calls(self, classifier: Classifier, recorded: Manifest | None) -> None:
        """Record who calls and the threshold. Announce it, and an earlier one if it differs."""
        self.callers = classifier.announcements
        self.stages = classifier.stages
        self.cut, self.cut_scores = classifier.threshold
        if self.cut:
            announce(f"threshold: {self.cut}")
        if recorded is not None and self.cut != recorded.cut != "":
            announce(f"the earlier start used another threshold: {recorded.cut}")

    def count_plan(self, plan: Plan) -> None:
        """Count a run's files and the tokens that copies save."""
        manifest = plan.manifest
        self.input_type = manifest.recipe.input_type
        encoders = manifest.recipe.encoders
        counts = plan.counts
        shards = plan.shards
        self.n_refused = len(manifest.refused)
        self.n_files = len(manifest.inputs) + self.n_refused
        self.n_letters = counts.n_letters
        self.n_left = counts.n_left
        self.n_left_letters = counts.n_left_letters
        self.n_copies = counts.n_copies
        self.n_tokens_saved = estimate_tokens(encoders, counts.n_copies, counts.n_copied_residues)
        n_embedded = sum(shard.n_embedded for shard in shards)
        n_residues = sum(shard.n_residues for shard in shards)
        n_tokens = estimate_tokens(encoders, n_embedded, n_residues)
        self.n_tokens_in_all = n_tokens + self.n_tokens_saved

    def count_embedding(self, embedding: EmbeddingProgress) -> None:
        """Add what the workers did. They start again if a feature file was damaged."""
        self.n_tokens += embedding.n_tokens_embedded
        self.n_cached += embedding.n_cached
        self.n_cached_tokens += embedding.n_cached_tokens
        self.workers += embedding.workers
        self.lost_devices += embedding.lost_devices
        if embedding.ready is not None:
            self.seconds.setdefault(STARTING, round(embedding.ready - embedding.started, 3))

    @property
    def facts(self) -> dict[str, object]:
        """The figures for ``run.json``."""
        # Figures that ``run.json`` omits, because they follow from the tables.
        in_tables = (
            "input_type",
            "n_failed_records",
            "first_failure",
            "n_mendable",
            "viral_lengths",
            "groups",
            "families",
            "best",
        )
        facts: dict[str, object] = {}
        for name, value in asdict(self).items():
            facts |= value if name == "records" else {name: value}
        for name in in_tables:
            del facts[name]
        return facts

    @property
    def unit(self) -> str:
        """What is embedded."""
        return "protein" if self.input_type == "protein" else "frame"

    @property
    def is_embedding(self) -> bool:
        """True if vectors are computed, False if only the scorer reads the letters."""
        return STAGES[1] in self.stages

    @property
    def exit_code(self) -> int:
        """2 if a file was not read or a frame failed, 1 if nothing usable is left, else 0."""
        if not self.records.n_failed_frames:
            return 2 if self.n_refused else 0
        return 2 if self.records.n_frames or self.records.statuses["scored"] else 1

    def lines(self, folder: Path) -> list[str]:
        """Return the lines that the user sees at the end."""
        if self.n_slices is not None:
            return [
                f"planned: {format_count(self.n_slices, 'slice')} of the input",
                f"results: {printable(folder)}",
                *self._repair_lines(folder),
            ]
        has_report = open_run_dir(folder).report.exists()
        return [
            *self._record_lines(),
            *self._engine_lines(),
            f"results: {printable(folder)}{' (start with report.html)' * has_report}",
            *self._repair_lines(folder),
        ]

    @property
    def time_line(self) -> str:
        """The seconds of each stage that this start has reached."""
        return "time: " + ", ".join(
            f"{name} {self.seconds[name]:.1f} s" for name in self.stages if name in self.seconds
        )

    def first_table(self, folder: Path, command: Command) -> Path:
        """Return the table to read first: viruses if there are any, else all records."""
        rundir = open_run_dir(folder)
        has_viruses = self.records.n_viruses
        return (
            rundir.output(RunOutput.VIRUS_TABLE.file)
            if has_viruses
            else rundir.record_table(command)
        )

    def _record_lines(self) -> Iterator[str]:
        records = self.records
        if self.cut:
            yield records.virus_line("protein" if self.input_type == "protein" else "contig")
        statuses = ", ".join(f"{n:,} {status}" for status, n in records.statuses.items() if n)
        seconds = sum(self.seconds[name] for name in self.stages)
        n_records = format_count(records.n_records, "record")
        yield f"{n_records} in {seconds:,.1f} s{': ' * bool(statuses)}{statuses}"
        if self.cut and records.n_records and not records.statuses["scored"]:
            table = RunOutput.RECORD_TABLE.file
            yield f"no record was scored: see the columns status and note of {table}"

    def _engine_lines(self) -> Iterator[str]:
        if n_frames := self.records.n_frames:
            yield f"embedded: {format_count(n_frames, self.unit)}{self._speed}"
        if self.n_left:
            share = self.n_left_letters / self.n_letters
            left = format_count(self.n_left, "record")
            yield f"not embedded (--embed): {left}, {share:.1%} of all letters"
        if self.n_copies:
            share = self.n_tokens_saved / self.n_tokens_in_all
            copies = format_count(self.n_copies, self.unit)
            yield (
                f"copies: {copies} with a sequence that occurred before, "
                f"{self.n_tokens_saved:,} tokens not embedded again ({share:.1%})"
            )
        if self.n_cached:
            share = self.n_cached_tokens / (self.n_cached_tokens + self.n_tokens)
            vectors = format_count(self.n_cached, "vector")
            yield f"cache: {vectors} read, {share:.1%} of the tokens of this start"
        yield from map(printable, self.lost_devices)

    @property
    def _speed(self) -> str:
        """The tokens of this start and their speed, in words, or "" if nothing was embedded."""
        if not self.n_tokens:
            return ""
        starting = self.seconds.get(STARTING, 0.0)
        rate = self.n_tokens / max(1e-3, self.seconds[STAGES[1]] - starting)
        return (
            f", {self.n_tokens:,} tokens at {rate:,.0f} per second (workers ready after "
            f"{starting:.1f} s)"
        )

    def _repair_lines(self, folder: Path) -> list[str]:
        listing = printable(folder / RunOutput.FAILED_FILES.file)
        lines: list[str] = []
        if self.n_slices is not None:  # no table is written yet
            listing = f"virnucpro status {printable(folder)}"
        if self.n_refused:
            pronoun = "it" if self.n_refused == 1 else "them"
            n_files = format_count(self.n_files, "file")
            lines += [
                f"failed: {self.n_refused:,} of {n_files}: see {listing}",
                f"  fix {pronoun} or remove {pronoun} from the command, then run with --resume",
            ]
        n = self.records.n_failed_frames
        if n > 1 and not self.records.n_frames:
            lines += [
                f"failed: all {format_count(n, self.unit)}: see {listing}",
                f"  the first one: {printable(self.records.first_failure)}",
                "  check the model and the device with `virnucpro models check`,",
                "  then run with --resume to try the same sequences again",
            ]
        elif n:
            lines += [
                f"failed: {format_count(n, self.unit)}: see {listing}",
                "  run with --resume to try the same sequences again, or fix them and run with",
                f"  --resume --add --input {printable(folder / RunOutput.FAILED_SEQUENCES.file)}",
            ]
        return lines

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        seconds = self.seconds.get(name, 0.0) + time.monotonic() - start
        self.seconds[name] = round(seconds, 3)
