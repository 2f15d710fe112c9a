"""Draw the figures of a run within the terminal size. Colours only repeat words."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from virnucpro.cli.progress import counts_of, facts_of, memory_of, percent, title_of
from virnucpro.core.logging import wrapped
from virnucpro.engine.progress import DeviceProgress, ProgressState

_PADDING = 2  # between table columns
_WARNING = "yellow"


class Dashboard:
    """Draws the figures of an ``EventLog`` on a terminal, four times a second.

    The total comes first, then a line per device. If space is short, devices are merged into one
    line and columns are dropped from the right, so no line wraps.
    """

    def __init__(self, state: ProgressState, console: Console) -> None:
        self._state = state
        self._console = console
        self._live = Live(
            console=console, get_renderable=self.draw, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Dashboard:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def draw(self) -> RenderableType:
        now = self._state
        width = self._console.width
        below = _flow(map(_styled, [*counts_of(now), *facts_of(now)]), width)
        if now.stage is not None:
            return Group(_headline(title_of(now), now.fraction), below)
        total = _headline("total", now.fraction)
        if not now.embedding.devices:
            return Group(total, below, Text("workers are starting"))
        n_above = 3 + len(below.split())  # total and figures, table header, an empty line
        table = _device_table(now, width, self._console.height - n_above)
        return Group(total, below, table)


def _styled(fact: str) -> Text:
    if fact.endswith(" failed") and not fact.startswith("0 "):
        return Text(fact, _WARNING)
    return Text(fact, "dim" if fact.startswith(("elapsed ", "remaining ")) else "")


def _headline(label: str, share: float | None) -> Table:
    """Draw a label and a bar across the terminal."""
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(Text(label, "bold"), _bar(share), Text("" if share is None else percent(share)))
    return row


def _bar(share: float | None, width: int | None = None) -> ProgressBar:
    # Distinct for readers with red-green colour blindness.
    style = "cyan"
    return ProgressBar(
        total=1.0,
        completed=share or 0.0,
        width=width,
        pulse=share is None,
        complete_style=style,
        finished_style=style,
        pulse_style=style,
    )


def _flow(figures: Iterable[Text], width: int) -> Text:
    """Arrange figures side by side, on as many lines as needed."""
    gap = "   "  # between the figures on a line
    lines: list[Text] = []
    for figure in figures:
        if lines and lines[-1].cell_len + len(gap) + figure.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], gap, figure)
        else:
            lines.append(figure)
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _device_table(now: ProgressState, width: int, n_lines: int) -> Table:
    """Draw one line per device. The last line sums up devices that do not fit."""
    longest_bar = 40  # characters of a device bar; the bar for the total fills the terminal
    shortest_bar = 12  # characters of the shortest bar
    devices = now.embedding.sorted_devices
    n_visible = len(devices) if len(devices) <= n_lines else max(0, n_lines - 1)
    visible = devices[:n_visible]
    folded = [device for _, device in devices[n_visible:]]
    rows = [_headings(devices), *(_cells(now, name, [device]) for name, device in visible)]
    if folded:
        rows.append(_cells(now, f"+ {len(folded)} more", folded))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    while len(widths) > 1 and _table_width(widths) > width:
        widths.pop()
    bar_width = min(longest_bar, width - _table_width([*widths, 0]))
    table = Table.grid(padding=(0, _PADDING), pad_edge=False)
    for index in range(len(widths)):
        table.add_column(justify="right" if index else "left", no_wrap=True, overflow="ellipsis")
    shares = [now.embedding.shard_fraction(device) for _, device in visible]
    bars: list[RenderableType] = [Text("current shard")]
    bars += [Text() if share is None else _bar(share, bar_width) for share in shares]
    if folded:
        bars.append(Text())
    for row, bar in zip(rows, bars, strict=True):
        cells = [Text(cell) for cell in row[: len(widths)]]
        table.add_row(*cells, *([bar] if bar_width >= shortest_bar else []))
    table.rows[0].style = "dim"
    return table


def _headings(devices: Sequence[tuple[str, DeviceProgress]]) -> tuple[str, ...]:
    is_cuda = all(name.startswith("cuda") for name, _ in devices)
    memory = "GPU memory, used/total" if is_cuda else "memory, process/machine"
    return "device", "shards", "tokens/s", memory


def _cells(now: ProgressState, name: str, devices: Sequence[DeviceProgress]) -> tuple[str, ...]:
    """Format a table row for one device, or the sum of several."""
    return (
        name,
        f"{sum(device.n_shards for device in devices):,}",
        f"{now.tokens_per_second(devices):,.0f}",
        memory_of(devices[0]) if len(devices) == 1 else "",
    )


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + _PADDING * (len(widths) - 1)


class ConsoleHandler(logging.Handler):
    """Prints log records above a dashboard, without markup or milliseconds."""

    def __init__(self, console: Console) -> None:
        time = "%H:%M:%S"
        line = "%(asctime)s %(levelname)-7s %(message)s"
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter(line, time))

    def emit(self, record: logging.LogRecord) -> None:
        indent = " " * len("00:00:00 ")  # for lines that continue a record
        text = wrapped(self.format(record), self._console.width, indent)
        line = Text(text, _WARNING if record.levelno >= logging.WARNING else "")
        with suppress(OSError):  # the terminal may be gone
            self._console.print(line, overflow="ignore", crop=False)  # do not split a long word
