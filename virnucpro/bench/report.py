"""Where the figures go: a JSON that is whole after every row, and tables of plain text."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pynvml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from virnucpro import __version__
from virnucpro.bench.comparison import EncoderRow
from virnucpro.bench.coordinator import CoordinatorRow
from virnucpro.bench.file_to_file import FileRow
from virnucpro.bench.front_end import FrontEndRow
from virnucpro.bench.limits import LimitRow
from virnucpro.devices import list_gpus, usable_cores
from virnucpro.files import atomic
from virnucpro.log import printable

Row = LimitRow | EncoderRow | FileRow | FrontEndRow | CoordinatorRow
SECTIONS: dict[type[Row], str] = {
    LimitRow: "limits",
    EncoderRow: "encoder",
    FileRow: "files",
    FrontEndRow: "front_end",
    CoordinatorRow: "coordinator",
}
_PACKAGES = ("torch", "fair-esm", "transformers", "numpy")
_PLAIN_WIDTH = 170  # of a pipe or a file, which have none
_GIB = 1 << 30


class Report:
    """Collects rows, and writes all of them anew into ``path`` after each."""

    def __init__(self, argv: Sequence[str], seed: int, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.facts: dict[str, object] = {
            "command": shlex.join(argv),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": describe_machine(),
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
        with atomic(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def print_tables(self, console: Console) -> None:
        for kind, section in SECTIONS.items():
            rows = [row for row in self.rows if isinstance(row, kind)]
            if rows:
                console.print(_table(section.replace("_", " "), rows))
                console.print()


def make_console(*, is_terminal: bool) -> Console:
    """On a terminal as wide as it is; in a pipe plain text that is not wrapped."""
    return Console() if is_terminal else Console(width=_PLAIN_WIDTH, no_color=True)


def describe_machine() -> dict[str, object]:
    gpus, _ = list_gpus()
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "gpus": [gpu.name for gpu in gpus],
        "driver": _driver(),
        "platform": platform.platform(),
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
    columns = COLUMNS[type(rows[0])]
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name, _ in columns:
        is_text = name in _TEXTS
        table.add_column(Text(name), justify="left" if is_text else "right", no_wrap=not is_text)
    reasons = any(_reason(row) for row in rows)
    if reasons:
        table.add_column(Text("why not"))
    for row in rows:
        cells = [Text(show(row)) for _, show in columns]
        table.add_row(*cells, *([Text(printable(_reason(row)))] if reasons else []))
    return table


def _reason(row: Row) -> str:
    return "" if isinstance(row, FrontEndRow) else row.reason


def _cell(name: str, form: str = "{}", scale: float = 1) -> Callable[[Row], str]:
    """How a field is shown; nothing where it is not known."""

    def show(row: Row) -> str:
        value = getattr(row, name)
        if value is None or value == "":
            return "-"
        return form.format(value if scale == 1 else value * scale)

    return show


def _rate(row: Row) -> str:
    assert isinstance(row, LimitRow)
    if row.rate is None:
        return "-"
    return f"{row.rate / 1e12:.3g} TFLOP/s" if row.precision else f"{row.rate / 1e9:.0f} GB/s"


def _allowed(row: Row) -> str:
    assert isinstance(row, LimitRow)
    return ", ".join(f"{model} {rate:,.0f}" for model, rate in row.tokens_per_second.items())


def _way(row: Row) -> str:
    assert isinstance(row, EncoderRow)
    return f"{row.program} {row.precision}"


_TEXTS = ("what", "layout", "model", "profile", "way", "how", "input", "allows tokens/s")
COLUMNS: dict[type[Row], list[tuple[str, Callable[[Row], str]]]] = {
    LimitRow: [
        ("what", _cell("what")),
        ("precision", _cell("precision")),
        ("layout", _cell("layout")),
        ("rate", _rate),
        ("allows tokens/s", _allowed),
    ],
    EncoderRow: [
        ("model", _cell("model")),
        ("profile", _cell("profile")),
        ("way", _way),
        ("how", _cell("how")),
        ("layout", _cell("layout")),
        ("tokens/s", _cell("tokens_per_second", "{:,.0f}")),
        ("ratio", _cell("ratio", "{:.2f}")),
        ("error", _cell("largest_error", "{:.1e}")),
        ("ms/batch", _cell("seconds_per_batch", "{:.1f}", 1000)),
        ("of limit", _cell("limit_share", "{:.0%}")),
        ("host", _cell("host_share", "{:.1%}")),
        ("GiB", _cell("peak_bytes", "{:.1f}", 1 / _GIB)),
    ],
    FileRow: [
        ("model", _cell("model")),
        ("profile", _cell("profile")),
        ("precision", _cell("precision")),
        ("workers", _cell("n_workers")),
        ("tokens", _cell("n_tokens", "{:,}")),
        ("tokens/s", _cell("tokens_per_second", "{:,.0f}")),
        ("ratio", _cell("ratio", "{:.2f}")),
        ("outside batches", _cell("outside_batches", "{:.1%}")),
        ("start-up s", _cell("starting_seconds", "{:.1f}")),
        ("GiB", _cell("peak_bytes", "{:.1f}", 1 / _GIB)),
    ],
    FrontEndRow: [
        ("input", _cell("input")),
        ("way", _cell("way")),
        ("Mbp", _cell("n_bases", "{:.2f}", 1e-6)),
        ("ORFs", _cell("n_orfs", "{:,}")),
        ("Mbp/s", _cell("mbp_per_second", "{:.2f}")),
        ("ratio", _cell("ratio", "{:.1f}")),
    ],
    CoordinatorRow: [
        ("workers", _cell("n_workers")),
        ("shards/s", _cell("shards_per_second", "{:,.0f}")),
        ("idle between shards, ms", _cell("idle_seconds", "{:.2f}", 1000)),
    ],
}
