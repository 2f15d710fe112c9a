"""``virnucpro bench``: measure this device's speed.

For each ESM-2 size, with random weights, on 500-base frames, it measures two programs:

- fair-esm's model in float32, in batches as large as in its own script
- our encoder, loaded and fed as in a worker, in each precision with a run's batches

It also measures the device limits: a large matrix product and a memory copy. On a CPU it measures
one core, since a run has a single-thread worker on each.

The report is JSON, complete after every row, and plain text lines.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
import torch
from torch.utils.benchmark import Timer

from virnucpro._version import __version__
from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.logging import format_bytes
from virnucpro.core.machine import read_machine
from virnucpro.core.option_schema import convert_options
from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.base import Encoder, load_encoder
from virnucpro.models.device_choice import DeviceChoice, choose_precision, choose_tokens
from virnucpro.models.devices import choose_devices
from virnucpro.models.eight_bits import EIGHT_BITS
from virnucpro.models.esm2.model_files import estimate_memory
from virnucpro.models.nvidia import list_gpus
from virnucpro.models.packing import use_device
from virnucpro.models.transformer import DTYPES
from virnucpro.models.validation.compare_reference import report_unavailable
from virnucpro.models.validation.options import BenchOptions
from virnucpro.models.validation.random_weights import MODELS, make_proteins, write_checkpoint
from virnucpro.models.validation.timing import FAIR_ESM_TOKENS, count_tokens, time_batches

_SIDE = {"cuda": 8192, "mps": 4096, "cpu": 1024}  # matrix rows and columns

Say = Callable[[str], None]
Show = Callable[[Iterable[str]], None]


@dataclass(slots=True, kw_only=True)
class _HardwareLimit:
    """The device's best rate, from the fastest repeat."""

    what: str
    precision: Precision | None
    unit: str  # unit for the rate
    rate: float | None = None
    reason: str = ""  # why there is no rate


@dataclass(slots=True, kw_only=True)
class _Row:
    """The measurements for a program with its settings, or None if ``reason`` explains why."""

    model: str
    program: str
    precision: Precision
    tokens_per_batch: int
    kernel: str = ""
    tokens_per_second: float | None = None  # median over the repeats
    ratio: float | None = None  # to fair-esm
    limit_share: float | None = None  # relative to the matrix product in this precision
    peak_bytes: int | None = None  # on a GPU
    rates: tuple[float, ...] = ()  # tokens/s in each repeat
    reason: str = ""


def bench(options: BenchOptions, argv: Sequence[str], say: Say, show: Show) -> None:
    """Measure this machine. ``show`` gets the report lines, even after an interrupt.

    Raises:
        UsageError: a name is unknown.
        UnavailableError: the device does not exist, or lacks a precision.
        OutputError, StorageError: the JSON cannot be written.
    """
    quick_models = ("8M",)
    cpu_models = ("8M", "35M")
    gpu_models = ("650M", "3B", "150M", "35M", "8M")  # most informative first: time may run out
    choice = choose_devices(convert_options(options, ComputeOptions))
    usual = gpu_models if choice.kind == "cuda" else cpu_models
    models = _model_names(
        "--models", options.models, quick_models if options.quick else usual, MODELS
    )
    usual_seconds = 2.0  # minimum duration of a repeat
    quick_seconds = 0.1
    measurement = _Bench(
        choice=choice,
        precisions=_precisions(options.precisions, choice),
        seconds=quick_seconds if options.quick else usual_seconds,
        say=say,
        path=options.json,
        facts={
            "command": shlex.join(["virnucpro", *argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine_facts(),
            "versions": describe_versions(),
        },
    )
    measurement.write()
    try:
        measurement.measure(models)
    finally:
        show(_lines(measurement.limits, measurement.rows))


def _precisions(listed: str | None, choice: DeviceChoice) -> tuple[Precision, ...]:
    """Return the ``auto`` precision and one more. A 16-bit GPU gets float32 only on request."""
    other = "fp32" if choice.kind == "cpu" else "fp16"
    usual = tuple(dict.fromkeys((choose_precision("auto", choice), other)))
    names = _model_names("--precisions", listed, usual, ("bf16", "fp16", "fp32", "fp8", "int8"))
    return tuple(choose_precision(name, choice) for name in names)


def _model_names(
    option: str, listed: str | None, default: Sequence[str], choices: Iterable[str]
) -> tuple[str, ...]:
    names = tuple(default) if listed is None else tuple(listed.split(","))
    for name in names:
        if name not in choices:
            raise UsageError(f"{option}: {name!a} is unknown", hint=f"known: {', '.join(choices)}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """The measurement on one device, with its results so far."""

    choice: DeviceChoice
    precisions: tuple[Precision, ...]
    seconds: float  # minimum duration of a repeat
    say: Say
    path: Path | None  # JSON path
    facts: Mapping[str, object]
    limits: list[_HardwareLimit] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device(self.choice.devices[0])

    def write(self) -> None:
        """Write all results to the ``--json`` file, if any."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        limits, encoder = (list(map(asdict, rows)) for rows in (self.limits, self.rows))
        content = {**self.facts, "limits": limits, "encoder": encoder}
        SafeDir(self.path.parent).write_file(self.path, json.dumps(content, indent=1) + "\n")

    def measure(self, models: Sequence[str]) -> None:
        """Measure everything."""
        use_device(self.device)
        torch.set_num_threads(1)  # as in a worker on a CPU
        self.say("limits")
        for limit in _limits(self.device, self.precisions):
            self.limits.append(limit)
            self.write()
        for model in models:
            self.say(f"{model}: making weights")
            with TemporaryDirectory(prefix="virnucpro-bench-") as folder:
                self._measure_model(model, Path(folder) / f"{model}.pt")

    def _measure_model(self, model: str, checkpoint: Path) -> None:
        """Measure fair-esm, and each precision with a run's batches."""
        theirs = _Row(
            model=model, program="fair-esm", precision="fp32", tokens_per_batch=FAIR_ESM_TOKENS
        )
        rows = [theirs]
        room = estimate_memory(MODELS[model])
        for precision in self.precisions:
            n_tokens = choose_tokens(self.choice, room, precision)
            ours = replace(theirs, program="virnucpro", precision=precision)
            rows.append(replace(ours, tokens_per_batch=n_tokens))
        seed = 1
        try:
            with report_unavailable("making weights", str(self.device)):
                write_checkpoint(checkpoint, MODELS[model], seed, self.device)
        except (UnavailableError, OSError) as error:
            self.rows.append(replace(theirs, reason=f"no weights could be made: {error}"))
            self.write()
            return
        n_batches = 3  # different batches with the largest budget
        proteins = make_proteins(n_batches * max(row.tokens_per_batch for row in rows), seed)
        for row in rows:
            self.say(f"{model}: {row.program} in {row.precision}, {row.tokens_per_batch:,} tokens")
            try:
                with report_unavailable(f"{row.program} in {row.precision}", str(self.device)):
                    self._measure_row(row, checkpoint, proteins)
            except UnavailableError as error:
                row.reason = str(error)
            if row.tokens_per_second and theirs.tokens_per_second:
                row.ratio = row.tokens_per_second / theirs.tokens_per_second
            self.rows.append(row)
            self.write()

    def _measure_row(self, row: _Row, checkpoint: Path, proteins: Sequence[str]) -> None:
        """Fill in the results in a row."""
        device = self.device
        shape = MODELS[row.model]
        lengths = [len(protein) for protein in proteins]
        spec = EncoderSpec(
            family="esm2" if row.program == "virnucpro" else "fair-esm",
            model=row.model,
            sha256="",
            layer=shape.n_layers,
            pooling="mean",
            precision=row.precision,
            dim=shape.dim,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        encoder = load_encoder(spec, checkpoint, device)
        plan = encoder.plan(lengths, row.tokens_per_batch)
        row.rates = _rates(encoder, [[proteins[i] for i in rows] for rows in plan], self.seconds)
        row.kernel, row.tokens_per_second = encoder.kernel, median(row.rates)
        flop_per_token = encoder.count_flop(lengths) / count_tokens(proteins)
        for limit in self.limits:
            if limit.precision == row.precision and limit.rate:
                row.limit_share = row.tokens_per_second * flop_per_token / limit.rate
        if device.type == "cuda":
            row.peak_bytes = torch.cuda.max_memory_allocated(device)


def _rates(encoder: Encoder, batches: Sequence[Sequence[str]], seconds: float) -> tuple[float, ...]:
    """Return each repeat's tokens per second, after a warm-up."""
    n_repeats = 3
    for batch in batches[:2]:
        encoder.start(batch).rows()
    endless = cycle(batches)
    rates = []
    for _ in range(n_repeats):
        timing = time_batches(encoder.start, _take_for(seconds, endless), lambda _: None)
        rates.append(timing.tokens_per_second)
    return tuple(rates)


def _take_for(seconds: float, batches: Iterator[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield batches until this time has passed, at least one."""
    started = time.perf_counter()
    for batch in batches:
        yield batch
        if time.perf_counter() - started >= seconds:
            return


# Limits


def _limits(device: torch.device, precisions: Sequence[Precision]) -> Iterator[_HardwareLimit]:
    """Measure the product in each precision, and the copy (bytes read and written)."""
    side = _SIDE[device.type]
    # Larger than any cache.
    copied_bytes = {"cuda": 4 << 30, "mps": 1 << 30, "cpu": 256 << 20}
    n_bytes = copied_bytes[device.type]
    for precision in precisions:
        if precision not in EIGHT_BITS:  # their products need a scale per row
            what = f"matrix product, {side} x {side}"
            limit = _HardwareLimit(what=what, precision=precision, unit="FLOP/s")
            yield _best_rate(limit, 2.0 * side**3, device, partial(_product, device, precision))
    limit = _HardwareLimit(what=f"memory copy, {n_bytes >> 20} MiB", precision=None, unit="bytes/s")
    yield _best_rate(limit, 2.0 * n_bytes, device, partial(_copy, device, n_bytes))


def _best_rate(
    limit: _HardwareLimit,
    amount: float,
    device: torch.device,
    make: Callable[[], Callable[[], object]],
) -> _HardwareLimit:
    """Measure a limit: ``amount`` divided by the fastest repeat's time. -> the limit"""
    try:
        with report_unavailable(limit.what, str(device)):
            # by default, torch's timer has one thread
            n_threads = torch.get_num_threads()
            timer = Timer("work()", globals={"work": make()}, num_threads=n_threads)
            limit.rate = amount / min(timer.blocked_autorange().times)
    except UnavailableError as error:
        limit.reason = str(error)
    return limit


def _product(device: torch.device, precision: Precision) -> Callable[[], object]:
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy(device: torch.device, n_bytes: int) -> Callable[[], object]:
    source = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# Report


def _lines(limits: Sequence[_HardwareLimit], rows: Sequence[_Row]) -> Iterator[str]:
    """Yield the report lines: limits and speeds."""
    for limit in limits:
        rate = f"{limit.rate / 1e9:,.0f} x 10^9 {limit.unit}" if limit.rate else limit.reason
        yield f"{limit.what:<30}{limit.precision or '':<6}{rate}"
    if rows:
        yield ""
        yield "model program   precision  batch     tokens/s  fair-esm x  of limit  GPU memory"
    yield from map(_line, rows)


def _line(row: _Row) -> str:
    start = f"{row.model:<6}{row.program:<10}{row.precision:<9}{row.tokens_per_batch:>7,}"
    if row.tokens_per_second is None:
        return f"{start}  {row.reason}"
    cells = (
        f"{row.tokens_per_second:,.0f}",
        f"{row.ratio:.2f}" if row.ratio else "-",
        f"{row.limit_share:.0%}" if row.limit_share else "-",
        format_bytes(row.peak_bytes) if row.peak_bytes else "-",
    )
    widths = (13, 12, 10, 12)
    return start + "".join(f"{cell:>{n}}" for cell, n in zip(cells, widths, strict=True))


def machine_facts() -> dict[str, object]:
    """Describe processor, memory in bytes, GPUs, and the load before the measurement."""
    gpus, _ = list_gpus()
    machine = read_machine({})
    return {
        "cpu": _cpu_name(),
        "cores": machine.cores,
        "memory": machine.memory_total,
        "gpus": [gpu.name for gpu in gpus],
        "driver": [gpu.driver for gpu in gpus[:1]],  # the newest CUDA version that it supports
        "load": psutil.getloadavg(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str | None]:
    packages = ("torch", "fair-esm", "transformers", "openvino", "numpy")
    versions: dict[str, str | None] = dict.fromkeys(("virnucpro", "python", *packages))
    versions |= {"virnucpro": __version__, "python": platform.python_version()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor()
