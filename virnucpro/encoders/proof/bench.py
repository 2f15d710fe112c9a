"""What ``virnucpro bench`` does: the limits of a machine, and how near encoders come to them.

A limit is what was reached at best: a large matrix product and a copy of memory on random data, at
the rate of the quickest repeat. The report is a JSON that is whole after every row, and tables of
plain text.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pynvml
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from virnucpro import __version__
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.family import room_for
from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.encoders.options import BenchOptions
from virnucpro.encoders.proof.synthetic import (
    MODELS,
    PROFILES,
    flop_per_token,
    lengths_of,
    make_proteins,
    write_checkpoint,
)
from virnucpro.encoders.proof.timing import (
    FAILURES,
    OURS,
    Comparison,
    EncoderRow,
    Setting,
    compare_ways,
    fair_esm_ways,
    layouts,
    our_ways,
    reason_of,
    synchronize,
    threads,
)
from virnucpro.ground.config import Precision
from virnucpro.ground.devices import (
    Choice,
    choose_devices,
    choose_precision,
    choose_tokens,
    list_gpus,
    usable_cores,
)
from virnucpro.ground.errors import UsageError
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import printable

PARTS = ("limits", "encoder")
_GPU_MODELS = ("650M", "3B", "150M", "35M", "8M")  # the most telling first: time may run out
_CPU_MODELS = ("8M", "35M")
_QUICK_MODELS = ("8M",)
# of ours in a pass, on a GPU or on each core of a CPU: a little less than fills the last
_N_BATCHES = {"cuda": 3.9, "mps": 3.9, "cpu": 1.9}
_QUICK_BATCHES = 0.95
_LEAST_SECONDS = 5.0  # of a repeat on a GPU: what it holds, and not what it begins with
_LISTEN_SECONDS, _QUIET_SHARE = 0.5, 0.1  # of all cores, before anything is measured

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
        for row in run_bench(programme, say):
            report.add(row)
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


def run_bench(programme: Programme, say: Say) -> Iterator[Row]:
    """Measure it all; every row comes as soon as it is known."""
    busy = psutil.cpu_percent(interval=_LISTEN_SECONDS) / 100
    if busy > _QUIET_SHARE:
        say(f"other programs use {busy:.0%} of this machine: the figures will be low, and uneven")
    limits: dict[Precision, float] = {}
    if "limits" in programme.parts:
        say("limits")
        limits = yield from _run_limits(programme)
    models = programme.models if "encoder" in programme.parts else {}
    for model, shape in models.items():
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
            yield from _compare(programme, setting, limits, say)


def _run_limits(programme: Programme) -> Generator[_LimitRow, None, dict[Precision, float]]:
    """A row for each limit. -> FLOP/s by precision"""
    lengths = lengths_of(make_proteins(programme.profiles[0], 10_000, programme.seed))
    flop = {model: flop_per_token(shape, lengths) for model, shape in programme.models.items()}
    is_cpu = programme.choice.kind == "cpu"
    layout = f"{programme.n_threads} threads" if is_cpu else programme.device
    rates: dict[Precision, float] = {}
    device = torch.device(programme.device)
    with threads(programme.n_threads if is_cpu else torch.get_num_threads()):
        rows = measure_limits(device, programme.precisions, programme.repeats, flop, layout)
        for precision, row in zip((*programme.precisions, None), rows, strict=True):
            yield row
            if precision is not None and row.rate is not None:
                rates[precision] = row.rate
    return rates


def _compare(
    programme: Programme, setting: Setting, limits: Mapping[Precision, float], say: Say
) -> Iterator[EncoderRow]:
    """The encoders side by side, for one model."""
    is_cpu = programme.choice.kind == "cpu"
    device, seed = torch.device(setting.device), programme.seed
    try:
        write_checkpoint(setting.checkpoint, setting.shape, seed, device)
    except FAILURES as error:  # no room for them, in memory or on disk
        yield EncoderRow(
            model=setting.model,
            profile="",
            program=OURS,
            precision=programme.precisions[0],
            how="",
            layout="",
            n_proteins=0,
            n_tokens=0,
            reason=f"no weights could be made: {reason_of(error)}",
        )
        return
    ways = fair_esm_ways(setting, has_bf16="bf16" in programme.precisions)
    ways += our_ways(programme.precisions, setting)
    n_processes = programme.n_threads if is_cpu else 1
    usual = int(programme.n_batches * setting.tokens_per_batch * n_processes)
    with layouts(setting, programme.n_threads, len(ways)) as places:
        for profile in programme.profiles:
            say(f"{setting.model}, {profile}: {len(ways)} ways in {len(places)} layouts")
            comparison = Comparison(
                profile=profile,
                proteins=make_proteins(profile, programme.tokens or usual, seed),
                repeats=programme.repeats,
                limits=limits,
                least_seconds=programme.least_seconds,
                one_by_one=not is_cpu,
            )
            yield from compare_ways(comparison, ways, places)


# Limits

_SIDE = {"cuda": 8192, "mps": 4096, "cpu": 2048}  # of the matrices
_COPIED = {"cuda": 4 << 30, "mps": 1 << 30, "cpu": 256 << 20}  # bytes, beyond any cache
Work = Callable[[], object]
_LEAST_FOR_A_LIMIT = 0.1  # seconds of one repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitRow:
    what: str
    precision: str
    layout: str
    unit: str  # of the rate
    rate: float | None = None
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)  # by model
    seconds: tuple[float, ...] = ()  # of one product or copy, for each repeat
    reason: str = ""


def measure_limits(
    device: torch.device,
    precisions: Sequence[Precision],
    repeats: int,
    flop_per_token: Mapping[str, float],
    layout: str,
) -> Iterator[_LimitRow]:
    """A row for the product in each precision, and one for the copy (read and written bytes)."""
    side, n_bytes = _SIDE[device.type], _COPIED[device.type]
    for precision in precisions:
        make = partial(_product, device, DTYPES[precision], side)
        what = f"matrix product, {side} x {side}"
        row = _LimitRow(what=what, precision=precision, layout=layout, unit="FLOP/s")
        row = _measured(row, make, 2.0 * side**3, device, repeats)
        if row.rate is not None:
            allowed = {model: row.rate / flop for model, flop in flop_per_token.items()}
            row = replace(row, tokens_per_second=allowed)
        yield row
    what = f"memory copy, {n_bytes >> 20} MiB"
    row = _LimitRow(what=what, precision="", layout=layout, unit="bytes/s")
    yield _measured(row, partial(_copy, device, n_bytes), 2.0 * n_bytes, device, repeats)


def _measured(
    row: _LimitRow, make: Callable[[], Work], amount: float, device: torch.device, repeats: int
) -> _LimitRow:
    try:
        seconds = _time(make(), partial(synchronize, device), repeats)
    except FAILURES as error:
        return replace(row, reason=reason_of(error))
    return replace(row, rate=amount / min(seconds), seconds=tuple(seconds))


def _time(work: Work, finish: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of one piece of work, for each repeat of as many as fill ``_LEAST_FOR_A_LIMIT``."""
    work()
    finish()
    started = time.perf_counter()
    work()
    finish()
    n = max(1, round(_LEAST_FOR_A_LIMIT / (time.perf_counter() - started)))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(n):
            work()
        finish()
        seconds.append((time.perf_counter() - started) / n)
    return seconds


def _product(device: torch.device, dtype: torch.dtype, side: int) -> Work:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy(device: torch.device, n_bytes: int) -> Work:
    source = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# Report

Row = _LimitRow | EncoderRow
SECTIONS: dict[type[Row], str] = {
    _LimitRow: "limits",
    EncoderRow: "encoder",
}
_PACKAGES = ("torch", "fair-esm", "transformers", "openvino", "numpy")
_PLAIN_WIDTH = 170  # of a pipe or a file, which have none
_GIB = 1 << 30


class Report:
    """Collects rows, and writes all of them anew into ``path`` after each."""

    def __init__(self, argv: Sequence[str], seed: int, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self.facts: dict[str, object] = {
            "command": shlex.join(["virnucpro", *argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine_facts(),
            "versions": describe_versions(),
            "seed": seed,
        }
        self.write()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        content = dict(self.facts)
        for kind, section in SECTIONS.items():
            content[section] = [asdict(row) for row in self.rows if isinstance(row, kind)]
        write_whole(self.path, json.dumps(content, indent=1) + "\n")

    def lines(self, *, is_terminal: bool) -> list[str]:
        """The tables: as wide as the terminal; in a pipe, plain text that is not wrapped."""
        console = Console() if is_terminal else Console(width=_PLAIN_WIDTH, no_color=True)
        with console.capture() as tables:
            for kind, section in SECTIONS.items():
                rows = [row for row in self.rows if isinstance(row, kind)]
                if rows:
                    console.print(_table(section, rows))
                    console.print()
        return tables.get().splitlines()


def machine_facts() -> dict[str, object]:
    gpus, _ = list_gpus()
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "gpus": [gpu.name for gpu in gpus],
        "driver": _driver(),
        "load": psutil.getloadavg(),  # before anything is measured
        "platform": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "virnucpro": __version__,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        versions[package] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor()


def _driver() -> str | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    reasons = [row.reason for row in rows]
    for header, name, *_ in COLUMNS[type(rows[0])]:
        is_text = all(isinstance(getattr(row, name), str | Mapping) for row in rows)
        table.add_column(Text(header), justify="left" if is_text else "right", no_wrap=not is_text)
    if any(reasons):
        table.add_column(Text("why not"))
    for row, reason in zip(rows, reasons, strict=True):
        cells = [_cell(getattr(row, name), *form) for _, name, *form in COLUMNS[type(row)]] + [
            printable(reason)
        ] * any(reasons)
        table.add_row(*map(Text, cells))
    return table


def _cell(value: Any, form: str = "{}", scale: float = 1) -> str:  # noqa: ANN401 - any field's
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {form.format(number)}" for key, number in value.items())
    if value is None or value == "":
        return "-"
    return form.format(value if scale == 1 else value * scale)


# of each kind of row: header, field, and for numbers their form and unit
COLUMNS: dict[type[Row], list[tuple[Any, ...]]] = {
    _LimitRow: [
        ("what", "what"),
        ("precision", "precision"),
        ("layout", "layout"),
        ("rate, 10^9", "rate", "{:,.0f}", 1e-9),
        ("", "unit"),
        ("allows tokens/s", "tokens_per_second", "{:,.0f}"),
    ],
    EncoderRow: [
        ("model", "model"),
        ("profile", "profile"),
        ("program", "program"),
        ("", "precision"),
        ("how", "how"),
        ("layout", "layout"),
        ("tokens/s", "tokens_per_second", "{:,.0f}"),
        ("ratio", "ratio", "{:.2f}"),
        ("error", "largest_error", "{:.1e}"),
        ("ms/batch", "seconds_per_batch", "{:.1f}", 1000),
        ("of limit", "limit_share", "{:.0%}"),
        ("host", "host_share", "{:.1%}"),
        ("GiB", "peak_bytes", "{:.1f}", 1 / _GIB),
    ],
}
