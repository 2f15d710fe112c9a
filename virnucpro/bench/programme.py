"""What ``virnucpro bench`` measures, in order, and the whole of it on one page."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from virnucpro.bench.comparison import Comparison, EncoderRow, compare
from virnucpro.bench.coordinator import time_coordinator
from virnucpro.bench.encoder import Setting, Way, our_ways
from virnucpro.bench.file_to_file import FileRow, FileRun, time_extract
from virnucpro.bench.front_end import measure_front_end
from virnucpro.bench.layouts import FAILURES, layouts, reason_of, threads
from virnucpro.bench.limits import measure_limits
from virnucpro.bench.peers import peer_ways
from virnucpro.bench.report import Row
from virnucpro.bench.synthetic import (
    MODELS,
    PROFILES,
    flop_per_token,
    lengths_of,
    make_proteins,
    write_checkpoint,
)
from virnucpro.config import Precision
from virnucpro.devices import Choice, choose_devices, choose_tokens, usable_cores
from virnucpro.encoders.esm2.model import ESM2Shape
from virnucpro.errors import UsageError
from virnucpro.options import BenchOptions

PARTS = ("limits", "encoder", "files", "front-end", "coordinator")
_GPU_MODELS = ("650M", "3B", "150M", "35M", "8M")  # the most telling first: time may run out
_CPU_MODELS = ("8M", "35M")
_QUICK_MODELS = ("8M",)
# of ours in a pass, on a GPU or on each core of a CPU: a little less than fills the last
_N_BATCHES = {"cuda": 3.9, "mps": 3.9, "cpu": 1.9}
_QUICK_BATCHES = 0.95
_FILE_PASSES, _QUICK_FILE_PASSES = 16, 8  # a run of files is that many passes long
_N_WORKERS = (1, 4, 16, 64)
_FRONT_END_BASES = 4_000_000
_LISTEN_SECONDS, _QUIET_SHARE = 0.5, 0.1  # of all cores, before anything is measured

Record = Callable[[Row], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """What to measure. ``tokens`` of a pass are, where None, ``n_batches`` of ours per core."""

    choice: Choice
    models: Mapping[str, ESM2Shape]
    profiles: tuple[str, ...]
    parts: tuple[str, ...]
    n_threads: int
    tokens: int | None
    repeats: int
    seed: int
    n_batches: float
    file_passes: int = _FILE_PASSES
    n_workers: tuple[int, ...] = _N_WORKERS
    front_end_bases: int = _FRONT_END_BASES
    cuda_visible_devices: str | None = None

    @property
    def device(self) -> str:
        return self.choice.devices[0]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        if self.choice.kind == "cpu":
            return ("fp32", "bf16") if self.choice.has_bf16 else ("fp32",)
        return ("fp32", "bf16", "fp16") if self.choice.has_bf16 else ("fp32", "fp16")


def resolve(options: BenchOptions) -> Programme:
    """
    Raises:
        UsageError: a name is unknown.
        UnavailableError: the device is not there.
    """
    n_threads = options.threads or usable_cores()
    choice = choose_devices(options.device, None, None, options.cuda_visible_devices, 0)
    is_quick = options.quick
    models = _GPU_MODELS if choice.kind == "cuda" else _CPU_MODELS
    profiles = tuple(PROFILES)
    given = _names("--models", options.models, _QUICK_MODELS if is_quick else models, MODELS)
    return Programme(
        choice=choice,
        models={name: MODELS[name] for name in given},
        profiles=_names(
            "--profiles", options.profiles, profiles[:1] if is_quick else profiles, PROFILES
        ),
        parts=_names("--parts", options.parts, PARTS, PARTS),
        n_threads=n_threads,
        tokens=options.tokens,
        repeats=options.repeats or (3 if is_quick else 5),
        seed=options.seed,
        n_batches=_QUICK_BATCHES if is_quick else _N_BATCHES[choice.kind],
        file_passes=_QUICK_FILE_PASSES if is_quick else _FILE_PASSES,
        n_workers=_N_WORKERS[:2] if is_quick else _N_WORKERS,
        front_end_bases=_FRONT_END_BASES // 8 if is_quick else _FRONT_END_BASES,
        cuda_visible_devices=options.cuda_visible_devices,
    )


def _names(
    option: str,
    given: str | None,
    default: Sequence[str],
    known: Sequence[str] | Mapping[str, object],
) -> tuple[str, ...]:
    names = tuple(default) if given is None else tuple(given.split(","))
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: {name!a} is unknown", hint=f"known: {', '.join(known)}")
    return names


def run(programme: Programme, record: Record, say: Say) -> None:
    """Measure it all; every row is handed over as soon as it is known."""
    busy = psutil.cpu_percent(interval=_LISTEN_SECONDS) / 100
    if busy > _QUIET_SHARE:
        say(f"other programs use {busy:.0%} of this machine: the figures will be low, and uneven")
    limits = _run_limits(programme, record, say) if "limits" in programme.parts else {}
    if {"encoder", "files"} & set(programme.parts):
        for model, shape in programme.models.items():
            with TemporaryDirectory(prefix="virnucpro-bench-") as folder:
                say(f"{model}: making weights")
                setting = Setting(
                    checkpoint=Path(folder) / f"{model}.pt",
                    shape=shape,
                    device=programme.device,
                    tokens_per_batch=choose_tokens(programme.choice, shape),
                )
                _Model(programme, model, setting, record, say).run(limits)
    if "front-end" in programme.parts:
        say("front end")
        for row in measure_front_end(programme.front_end_bases, programme.repeats, programme.seed):
            record(row)
    if "coordinator" in programme.parts:
        for n_workers in programme.n_workers:
            say(f"coordinator: {n_workers} workers")
            record(time_coordinator(n_workers))


def _run_limits(programme: Programme, record: Record, say: Say) -> dict[Precision, float]:
    """FLOP/s by precision."""
    say("limits")
    lengths = lengths_of(make_proteins(programme.profiles[0], 10_000, programme.seed))
    flop = {model: flop_per_token(shape, lengths) for model, shape in programme.models.items()}
    is_cpu = programme.choice.kind == "cpu"
    layout = f"{programme.n_threads} threads" if is_cpu else programme.device
    found: dict[Precision, float] = {}
    device = torch.device(programme.device)
    with threads(programme.n_threads if is_cpu else torch.get_num_threads()):
        rows = measure_limits(device, programme.precisions, programme.repeats, flop, layout)
        for precision, row in zip((*programme.precisions, None), rows, strict=True):
            record(row)
            if precision is not None and row.rate is not None:
                found[precision] = row.rate
    return found


@dataclass(frozen=True, slots=True)
class _Model:
    """The parts that need weights, for one model."""

    programme: Programme
    name: str
    setting: Setting
    record: Record
    say: Say

    def run(self, limits: Mapping[Precision, float]) -> None:
        first: EncoderRow | None = None
        profiles = self.programme.profiles
        try:
            write_checkpoint(self.setting.checkpoint, self.setting.shape, self.programme.seed)
        except FAILURES as error:  # no room for them, in memory or on disk
            self.record(self.without_weights(reason_of(error)))
            return
        if "encoder" in self.programme.parts:
            first = self.run_encoders(limits)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the worker of the next part needs the room
        if "files" in self.programme.parts:
            self.say(f"{self.name}, {profiles[0]}: file to file")
            reference = None if first is None else first.tokens_per_second
            self.record(time_extract(self.file_run(reference)))

    def without_weights(self, reason: str) -> FileRow:
        row = FileRow(model=self.name, profile="", n_proteins=0, n_tokens=0)
        return replace(row, reason=f"no weights could be made: {reason}")

    def run_encoders(self, limits: Mapping[Precision, float]) -> EncoderRow:
        """Returns the row of the first profile that the others are held against."""
        references = []
        ways = self.ways()
        with layouts(self.setting, self.programme.n_threads, len(ways)) as places:
            for profile in self.programme.profiles:
                self.say(f"{self.name}, {profile}: {len(ways)} ways in {len(places)} layouts")
                comparison = Comparison(
                    model=self.name,
                    shape=self.setting.shape,
                    profile=profile,
                    proteins=make_proteins(profile, self.tokens, self.programme.seed),
                    repeats=self.programme.repeats,
                    limits=limits,
                )
                rows = compare(comparison, ways, places)
                for row in rows:
                    self.record(row)
                references.append(next((row for row in rows if row.ratio == 1), rows[0]))
        return references[0]

    def ways(self) -> list[Way]:
        has_bf16 = "bf16" in self.programme.precisions
        return [
            *peer_ways(self.setting, has_bf16=has_bf16),
            *our_ways(self.programme.precisions, self.setting),
        ]

    @property
    def tokens(self) -> int:
        if self.programme.tokens is not None:
            return self.programme.tokens
        n_processes = self.programme.n_threads if self.programme.choice.kind == "cpu" else 1
        return int(self.programme.n_batches * self.setting.tokens_per_batch * n_processes)

    def file_run(self, reference: float | None) -> FileRun:
        profile = self.programme.profiles[0]
        n_tokens = self.programme.file_passes * self.tokens
        return FileRun(
            model=self.name,
            profile=profile,
            proteins=make_proteins(profile, n_tokens, self.programme.seed),
            setting=self.setting,
            n_workers=self.programme.n_threads,
            cuda_visible_devices=self.programme.cuda_visible_devices,
            reference=reference,
        )
