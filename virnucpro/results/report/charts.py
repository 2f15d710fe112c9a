"""Compute charts as SVG geometry. A template draws them, without JavaScript.

Coordinates are within the width and height of ``Drawing``. No markup is made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from virnucpro.core.logging import format_count
from virnucpro.engine.device_timeline import DeviceTimeline

GIB = 1 << 30

Place = Callable[[float], float]  # value -> coordinate
_Tick = tuple[float, str]  # coordinate and label


class ChartPath(NamedTuple):
    """A path in the drawing."""

    css_class: str
    path: str
    label: str = ""  # in the legend


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart, ready to draw."""

    title: str
    text: str  # alternative text
    x_label: str
    y_label: str
    x_ticks: Sequence[_Tick]
    y_ticks: Sequence[_Tick]
    layers: Sequence[ChartPath]
    x_range: tuple[float, float] = (0.0, 1.0)  # values at the left and right edges
    width: ClassVar[int] = 760
    height: ClassVar[int] = 320
    # edges of the area between the axes
    left: ClassVar[int] = 64
    right: ClassVar[int] = width - 16
    top: ClassVar[int] = 14
    bottom: ClassVar[int] = height - 46

    @property
    def n_labels(self) -> int:
        return sum(bool(layer.label) for layer in self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """Lines over a common x axis. ``None`` in a series is a gap."""

    name: str  # identifies the chart in the page
    title: str
    text: str
    x_label: str
    y_label: str
    series: Sequence[tuple[str, Sequence[float], Sequence[float | None]]]  # label, x, y
    y_range: tuple[float, float] | None = None
    x_range: tuple[float, float] | None = None
    diagonal: bool = False
    is_stepped: bool = False
    css_classes: Sequence[str] = ()  # one per series, instead of the default ones

    def drawn(self) -> Drawing:
        xs = [x for _, series_x, _ in self.series for x in series_x]
        ys = [y for *_, series_y in self.series for y in series_y if y is not None]
        x_range = self.x_range or (min(xs, default=0.0), max(xs, default=1.0))
        y_range = self.y_range or (min(0.0, *ys, 0.0), max([*ys, 0.0]) or 1.0)
        x_at = linear(*x_range, Drawing.left, Drawing.right)
        y_at = linear(*y_range, Drawing.bottom, Drawing.top)
        return Drawing(
            self.title,
            self.text,
            self.x_label,
            self.y_label,
            [(x_at(x), text) for x, text in _ticks(*x_range)],
            [(y_at(y), text) for y, text in _ticks(*y_range)],
            list(self._layers(x_at, y_at)),
            x_range,
        )

    def _layers(self, x_at: Place, y_at: Place) -> Iterator[ChartPath]:
        if self.diagonal:
            yield ChartPath("guide", line_path([(x_at(0), y_at(0)), (x_at(1), y_at(1))]))
        for i, (label, series_x, series_y) in enumerate(self.series):
            points = [
                (x_at(x), None if y is None else y_at(y))
                for x, y in zip(series_x, series_y, strict=True)
            ]
            points = list(_stepped(points)) if self.is_stepped else points
            css_class = self.css_classes[i] if self.css_classes else f"line s{i % 7}"
            yield ChartPath(css_class, line_path(points), label)

    def as_data(self) -> dict[str, object]:
        """Return the values, which the page shows at the cursor."""
        xs = sorted({x for _, series_x, _ in self.series for x in series_x})
        lines = []
        for label, series_x, series_y in self.series:
            values = dict(zip(series_x, series_y, strict=True))
            lines.append({"label": label, "y": [values.get(x) for x in xs]})
        return {"x": xs, "series": lines, "xLabel": self.x_label}


def linear(start: float, end: float, first: float, last: float) -> Place:
    extent = (end - start) or 1.0
    return lambda value: first + (value - start) / extent * (last - first)


def _stepped(
    points: Sequence[tuple[float, float | None]],
) -> Iterator[tuple[float, float | None]]:
    """Turn each value into a step from half way before it to half way after it."""
    for i, (x, y) in enumerate(points):
        before = points[max(0, i - 1)][0]
        after = points[min(len(points) - 1, i + 1)][0]
        yield (before + x) / 2, y
        yield (x + after) / 2, y


def line_path(points: Iterable[tuple[float, float | None]]) -> str:
    """Return a path through points. A point without y is a gap."""
    words = []
    is_down = False
    for x, y in points:
        if y is None:
            is_down = False
            continue
        words.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        is_down = True
    if len(words) == 1:
        words.append("h0.1")  # a point
    return "".join(words)


def _ticks(start: float, end: float) -> list[tuple[float, str]]:
    """Return round numbers between two values, with labels.

    >>> _ticks(0, 1200)
    [(0.0, '0'), (500.0, '500'), (1000.0, '1,000')]
    """
    n_ticks = 5  # approximately
    if not end > start:
        return [(start, short_number(start))]
    raw = (end - start) / n_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(start / step - 1e-9)
    values = [step * i for i in range(first, math.floor(end / step + 1e-9) + 1)]
    return [(value, short_number(value)) for value in values]


def short_number(value: float) -> str:
    """Format a number for an axis.

    >>> short_number(2_500_000), short_number(12_000), short_number(0.25)
    ('2.5M', '12k', '0.25')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def device_charts(number: int, start: DeviceTimeline) -> list[Chart]:
    """Draw tokens per second and memory per device, or nothing if nothing was embedded."""
    devices = sorted(start.devices.items())
    if not any(device.tokens for _, device in devices):
        return []
    speed = [(name, *_rates(start, device.tokens)) for name, device in devices]
    memory = [
        (name, times, [round(n / GIB, 3) if n else None for n in device.memory])
        for (name, device), (_, times, _) in zip(devices, speed, strict=True)
    ]
    most = [f"{name} {max(device.memory, default=0) / GIB:.1f} GiB" for name, device in devices]
    n_tokens = sum(sum(device.tokens) for _, device in devices)
    work = f"{format_count(n_tokens, 'token')} on {format_count(len(devices), 'device')}"
    x_label = "seconds since the workers started"
    speed_chart = Chart(
        f"speed{number}",
        "Tokens per second of each device",
        f"{work} in {start.seconds:,.1f} seconds.",
        x_label,
        "tokens per second",
        speed,
        is_stepped=True,
    )
    memory_chart = Chart(
        f"memory{number}",
        "Memory of each device",
        f"Largest use: {', '.join(most)}.",
        x_label,
        "memory in GiB",
        memory,
        is_stepped=True,
    )
    return [speed_chart, memory_chart]


def _rates(start: DeviceTimeline, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return each bin's middle, in seconds since the start, and its tokens per second."""
    width = start.seconds_per_bin
    times = [round(width * (i + 0.5), 3) for i in range(len(tokens))]
    # The last bin is incomplete. A very short one counts as half a bin, for a steadier rate.
    lasts = [min(width, max(width / 2, start.seconds - width * i)) for i in range(len(tokens))]
    return times, [round(n / last, 1) for n, last in zip(tokens, lasts, strict=True)]
