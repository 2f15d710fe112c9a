"""The measurements of ``virnucpro bench``, in order, on one page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from virnucpro.encoders.bench.comparison import (
    FAILURES,
    Comparison,
    EncoderRow,
    compare_ways,
    layouts,
    reason_of,
    threads,
)
from virnucpro.encoders.bench.encoder import OURS, Setting, Way, fair_esm_ways, our_ways
from virnucpro.encoders.bench.limits import measure_limits
from virnucpro.encoders.bench.report import Report, Row
from virnucpro.encoders.bench.synthetic import (
    MODELS,
    PROFILES,
    flop_per_token,
    lengths_of,
    make_proteins,
    write_checkpoint,
)
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.family import room_for
from virnucpro.encoders.options import BenchOptions
from virnucpro.ground.config import Precision
from virnucpro.ground.devices import (
    Choice,
    choose_devices,
    choose_precision,
    choose_tokens,
    usable_cores,
)
from virnucpro.ground.errors import UsageError

PARTS = ("limits", "encoder")
_GPU_MODELS = ("650M", "3B", "150M", "35M", "8M")  # the most telling first: time may run out
_CPU_MODELS = ("8M", "35M")
_QUICK_MODELS = ("8M",)
# of ours in a pass, on a GPU or on each core of a CPU: a little less than fills the last
_N_BATCHES = {"cuda": 3.9, "mps": 3.9, "cpu": 1.9}
_QUICK_BATCHES = 0.95
_LEAST_SECONDS = 5.0  # of a repeat on a GPU: what it holds, and not what it begins with
_LISTEN_SECONDS, _QUIET_SHARE = 0.5, 0.1  # of all cores, before anything is measured

Record = Callable[[Row], None]
Say = Callable[[str], None]
Show = Callable[[list[str]], None]


def bench(options: BenchOptions, argv: Sequence[str], say: Say, show: Show) -> None:
    """Measure this machine; ``show`` gets the tables at the end, also of what was cut off.

    Raises:
        UsageError: a name is unknown.
        UnavailableError: the device is not there.
    """
    programme = resolve_bench(options)
    report = Report(argv, options.seed, options.json)
    try:
        run_bench(programme, report.add, say)
    finally:
        show(report.lines(is_terminal=sys.stdout.isatty()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """The programme of a benchmark. If ``tokens`` is None, a pass has ``n_batches`` per core."""

    choice: Choice
    models: Mapping[str, ESM2Shape]
    profiles: tuple[str, ...]
    parts: tuple[str, ...]
    n_threads: int
    tokens: int | None
    repeats: int
    seed: int
    n_batches: float
    least_seconds: float
    precisions: tuple[Precision, ...]  # of ours, and of the peers but for the reference

    @property
    def device(self) -> str:
        return self.choice.devices[0]


def resolve_bench(options: BenchOptions) -> Programme:
    """
    Raises:
        UsageError: a name is unknown.
        UnavailableError: the device is not there.
    """
    choice = choose_devices(options.device, None, None, options.cuda_visible_devices, 0)
    return programme_on(choice, options)


def programme_on(choice: Choice, options: BenchOptions) -> Programme:
    """The programme on devices that are there. Raises as ``resolve_bench``."""
    is_quick = options.quick
    models = _GPU_MODELS if choice.kind == "cuda" else _CPU_MODELS
    profiles = tuple(PROFILES)
    names = _names("--models", options.models, _QUICK_MODELS if is_quick else models, MODELS)
    return Programme(
        choice=choice,
        models={name: MODELS[name] for name in names},
        profiles=_names(
            "--profiles", options.profiles, profiles[:1] if is_quick else profiles, PROFILES
        ),
        parts=_names("--parts", options.parts, PARTS, PARTS),
        n_threads=options.threads or usable_cores(),
        tokens=options.tokens,
        repeats=options.repeats or (3 if is_quick else 5),
        seed=options.seed,
        n_batches=_QUICK_BATCHES if is_quick else _N_BATCHES[choice.kind],
        least_seconds=_LEAST_SECONDS if choice.kind == "cuda" and not is_quick else 0.0,
        precisions=_precisions(options, choice),
    )


def _precisions(options: BenchOptions, choice: Choice) -> tuple[Precision, ...]:
    """float32 takes most of the time on a GPU, and is measured only if it is asked for.

    Raises:
        UnavailableError: the device does not compute in one of them.
    """
    defaults = ["bf16"] if choice.has_bf16 else []
    if choice.kind == "cpu":
        defaults = ["fp32", *defaults]
    else:
        defaults += ["fp16"]
    names = _names("--precisions", options.precisions, defaults, ("bf16", "fp16", "fp32"))
    return tuple(choose_precision(name, choice) for name in names)


def _names(
    option: str,
    listed: str | None,
    default: Sequence[str],
    choices: Sequence[str] | Mapping[str, object],
) -> tuple[str, ...]:
    names = tuple(default) if listed is None else tuple(listed.split(","))
    for name in names:
        if name not in choices:
            raise UsageError(f"{option}: {name!a} is unknown", hint=f"known: {', '.join(choices)}")
    return names


def run_bench(programme: Programme, record: Record, say: Say) -> None:
    """Measure it all; every row is handed over as soon as it is known."""
    busy = psutil.cpu_percent(interval=_LISTEN_SECONDS) / 100
    if busy > _QUIET_SHARE:
        say(f"other programs use {busy:.0%} of this machine: the figures will be low, and uneven")
    limits = _run_limits(programme, record, say) if "limits" in programme.parts else {}
    if "encoder" not in programme.parts:
        return
    for model, shape in programme.models.items():
        with TemporaryDirectory(prefix="virnucpro-bench-") as folder:
            say(f"{model}: making weights")
            setting = Setting(
                checkpoint=Path(folder) / f"{model}.pt",
                shape=shape,
                device=programme.device,
                tokens_per_batch=choose_tokens(
                    programme.choice,
                    room_for(shape),
                    choose_precision("auto", programme.choice),
                ),
            )
            _Model(programme, setting, record, say).run(limits)


def _run_limits(programme: Programme, record: Record, say: Say) -> dict[Precision, float]:
    """FLOP/s by precision."""
    say("limits")
    lengths = lengths_of(make_proteins(programme.profiles[0], 10_000, programme.seed))
    flop = {model: flop_per_token(shape, lengths) for model, shape in programme.models.items()}
    is_cpu = programme.choice.kind == "cpu"
    layout = f"{programme.n_threads} threads" if is_cpu else programme.device
    rates: dict[Precision, float] = {}
    device = torch.device(programme.device)
    with threads(programme.n_threads if is_cpu else torch.get_num_threads()):
        rows = measure_limits(device, programme.precisions, programme.repeats, flop, layout)
        for precision, row in zip((*programme.precisions, None), rows, strict=True):
            record(row)
            if precision is not None and row.rate is not None:
                rates[precision] = row.rate
    return rates


@dataclass(frozen=True, slots=True)
class _Model:
    """The encoders side by side, for one model."""

    programme: Programme
    setting: Setting
    record: Record
    say: Say

    def run(self, limits: Mapping[Precision, float]) -> None:
        try:
            write_checkpoint(self.setting.checkpoint, self.setting.shape, self.programme.seed)
        except FAILURES as error:  # no room for them, in memory or on disk
            self.record(self.without_weights(reason_of(error)))
            return
        ways, model = self.ways(), self.setting.model
        with layouts(self.setting, self.programme.n_threads, len(ways)) as places:
            for profile in self.programme.profiles:
                self.say(f"{model}, {profile}: {len(ways)} ways in {len(places)} layouts")
                comparison = Comparison(
                    profile=profile,
                    proteins=make_proteins(profile, self.tokens, self.programme.seed),
                    repeats=self.programme.repeats,
                    limits=limits,
                    least_seconds=self.programme.least_seconds,
                    one_by_one=self.programme.choice.kind != "cpu",
                )
                for row in compare_ways(comparison, ways, places):
                    self.record(row)

    def without_weights(self, reason: str) -> EncoderRow:
        return EncoderRow(
            model=self.setting.model,
            profile="",
            program=OURS,
            precision=self.programme.precisions[0],
            how="",
            layout="",
            n_proteins=0,
            n_tokens=0,
            reason=f"no weights could be made: {reason}",
        )

    def ways(self) -> list[Way]:
        """On a GPU ours in the first precision comes first: time may run out."""
        has_bf16 = "bf16" in self.programme.precisions
        peers = fair_esm_ways(self.setting, has_bf16=has_bf16)
        ours = our_ways(self.programme.precisions, self.setting)
        n_first = 0 if self.programme.choice.kind == "cpu" else 1
        return [*ours[:n_first], *peers, *ours[n_first:]]

    @property
    def tokens(self) -> int:
        if self.programme.tokens is not None:
            return self.programme.tokens
        n_processes = self.programme.n_threads if self.programme.choice.kind == "cpu" else 1
        return int(self.programme.n_batches * self.setting.tokens_per_batch * n_processes)
