"""The report of the figures: a JSON that is whole after every row, and tables of plain text."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pynvml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from virnucpro import __version__
from virnucpro.encoders.bench.comparison import EncoderRow
from virnucpro.encoders.bench.limits import LimitRow
from virnucpro.ground.devices import list_gpus, usable_cores
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import printable

Row = LimitRow | EncoderRow
SECTIONS: dict[type[Row], str] = {
    LimitRow: "limits",
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
        self.by_key: dict[tuple[str, ...], Row] = {}
        self.facts: dict[str, object] = {
            "command": shlex.join(["virnucpro", *argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine_facts(),
            "versions": describe_versions(),
            "seed": seed,
        }
        self.write()

    def add(self, row: Row) -> None:
        """Keep a row, in the place of one of the same way that came before it."""
        self.by_key[row.key] = row
        self.write()

    @property
    def rows(self) -> list[Row]:
        return list(self.by_key.values())

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
    LimitRow: [
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
