"""Compute charts as SVG geometry. A template draws them, without JavaScript.

Coordinates are within ``WIDTH`` and ``HEIGHT``. No markup is made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.logging import format_count
from virnucpro.engine.device_timeline import DeviceTimeline
from virnucpro.results.report.aggregates import (
    MOST_LOG_ODDS,
    N_SCORES,
    PER_DOUBLING,
    RecordRows,
    RunCounts,
    bounded_log_odds,
)

WIDTH = 760
HEIGHT = 320
GIB = 1 << 30
_LEFT = 64
_RIGHT = 16
_TOP = 14
_BOTTOM = 46
_MOST_DOTS = 2_000  # records drawn as single dots
_SHADES = 5  # for cells with records
_N_TICKS = 5  # approximately
_SCORE_TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)

Place = Callable[[float], float]  # value -> coordinate
_Tick = tuple[float, str]  # coordinate and label


class _ChartPath(NamedTuple):
    """A path in the drawing."""

    look: str  # style sheet classes
    path: str
    label: str = ""  # in the legend


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A chart, ready to draw."""

    title: str
    text: str  # alternative text
    x_label: str
    y_label: str
    x_ticks: Sequence[_Tick]
    y_ticks: Sequence[_Tick]
    layers: Sequence[_ChartPath]
    x_range: tuple[float, float] = (0.0, 1.0)  # values at the left and right edges
    width: ClassVar = WIDTH
    height: ClassVar = HEIGHT
    left: ClassVar = _LEFT
    right: ClassVar = WIDTH - _RIGHT
    top: ClassVar = _TOP
    bottom: ClassVar = HEIGHT - _BOTTOM

    @property
    def n_labels(self) -> int:
        return sum(bool(layer.label) for layer in self.layers)


@dataclass(frozen=True, slots=True)
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
    look: Sequence[str] = ()  # classes that replace the default ones

    def drawn(self) -> _Drawing:
        xs = [x for _, series_x, _ in self.series for x in series_x]
        ys = [y for *_, series_y in self.series for y in series_y if y is not None]
        x_range = self.x_range or (min(xs, default=0.0), max(xs, default=1.0))
        y_range = self.y_range or (min(0.0, *ys, 0.0), max([*ys, 0.0]) or 1.0)
        x_at = _linear(*x_range, _LEFT, WIDTH - _RIGHT)
        y_at = _linear(*y_range, HEIGHT - _BOTTOM, _TOP)
        return _Drawing(
            self.title,
            self.text,
            self.x_label,
            self.y_label,
            [(x_at(x), text) for x, text in _ticks(*x_range)],
            [(y_at(y), text) for y, text in _ticks(*y_range)],
            list(self._layers(x_at, y_at)),
            x_range,
        )

    def _layers(self, x_at: Place, y_at: Place) -> Iterator[_ChartPath]:
        if self.diagonal:
            yield _ChartPath("guide", _line([(x_at(0), y_at(0)), (x_at(1), y_at(1))]))
        for i, (label, series_x, series_y) in enumerate(self.series):
            points = [
                (x_at(x), None if y is None else y_at(y))
                for x, y in zip(series_x, series_y, strict=True)
            ]
            points = list(_stepped(points)) if self.is_stepped else points
            look = self.look[i] if self.look else f"line s{i % 7}"
            yield _ChartPath(look, _line(points), label)

    def as_data(self) -> dict[str, object]:
        """Return the values, which the page shows at the cursor."""
        xs = sorted({x for _, series_x, _ in self.series for x in series_x})
        lines = []
        for label, series_x, series_y in self.series:
            values = dict(zip(series_x, series_y, strict=True))
            lines.append({"label": label, "y": [values.get(x) for x in xs]})
        return {"x": xs, "series": lines, "xLabel": self.x_label}


def _linear(start: float, end: float, first: float, last: float) -> Place:
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


def _line(points: Iterable[tuple[float, float | None]]) -> str:
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
    if not end > start:
        return [(start, _short(start))]
    raw = (end - start) / _N_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(start / step - 1e-9)
    values = [step * i for i in range(first, math.floor(end / step + 1e-9) + 1)]
    return [(value, _short(value)) for value in values]


def _short(value: float) -> str:
    """Format a number for an axis.

    >>> _short(2_500_000), _short(12_000), _short(0.25)
    ('2.5M', '12k', '0.25')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def scores_by_length(
    counts: RunCounts, rows: RecordRows, cut: Sequence[tuple[float, float]], letters: str
) -> _Drawing | None:
    """Draw records by length and score, coloured by call. None: no record has a score.

    Args:
        rows: all records, if they are few.
        cut: length and threshold, at some lengths.
    """
    density = counts.density
    in_use = np.flatnonzero(density.sum(axis=(1, 2)))
    if not len(in_use):
        return None
    first = int(in_use[0])
    last = int(in_use[-1]) + 1
    if last - first < PER_DOUBLING:
        first = max(0, first - PER_DOUBLING)
        last += PER_DOUBLING
    x_at = _linear(first / PER_DOUBLING, last / PER_DOUBLING, _LEFT, WIDTH - _RIGHT)
    y_at = _linear(-MOST_LOG_ODDS, MOST_LOG_ODDS, HEIGHT - _BOTTOM, _TOP)
    is_few = counts.n_records <= _MOST_DOTS
    layers = _dots(rows, x_at, y_at) if is_few else _shades(density, first, last, x_at, y_at)
    low = 2 ** (first / PER_DOUBLING)
    high = 2 ** (last / PER_DOUBLING)
    if cut:
        points = [(x_at(length), y_at(odds)) for length, odds in _within(cut, low, high)]
        layers.append(_ChartPath("cut", _line(points), "threshold: lowest score called virus"))
    return _Drawing(
        "Scores by length",
        f"Records called virus (above the threshold): {counts.n_viral:,}; other records: "
        f"{int(density.sum()) - counts.n_viral:,}.",
        f"length in {letters}",
        "score",
        [(x_at(math.log2(n)), _short(n)) for n in _round_lengths(low, high)],
        [(y_at(_odds(score)), f"{score:g}") for score in _SCORE_TICKS],
        layers,
        (first / PER_DOUBLING, last / PER_DOUBLING),
    )


def _dots(rows: RecordRows, x_at: Place, y_at: Place) -> list[_ChartPath]:
    """Draw a dot for each record with a score."""
    paths = {"other": "", "viral": ""}
    for length, score, is_viral in zip(rows.lengths, rows.scores, rows.are_viral, strict=True):
        if length and not math.isnan(score):
            x = x_at(math.log2(length))
            y = y_at(_odds(score))
            paths["viral" if is_viral else "other"] += f"M{x:.1f} {y:.1f}h0"
    labels = {"other": "other", "viral": "virus"}
    return [_ChartPath(f"dot {look}", path, labels[look]) for look, path in paths.items()]


def _shades(
    density: NDArray[np.int64], first: int, last: int, x_at: Place, y_at: Place
) -> list[_ChartPath]:
    """Draw cells by length and score. The more records, the darker."""
    layers = []
    for call, (look, label) in enumerate((("other", "other"), ("viral", "virus"))):
        cells = density[first:last, :, call]
        shades = np.ceil(_SHADES * np.log1p(cells) / np.log1p(max(1, int(cells.max()))))
        for shade in range(1, _SHADES + 1):
            shaded = np.argwhere(shades == shade)
            path = "".join(_cell(x_at, y_at, first + int(i), int(j)) for i, j in shaded)
            layers.append(_ChartPath(f"{look} d{shade}", path, label if shade == _SHADES else ""))
    return layers


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


def _odds(score: float) -> float:
    return float(bounded_log_odds(np.array([score]))[0])


def _cell(x_at: Place, y_at: Place, i: int, j: int) -> str:
    left = x_at(i / PER_DOUBLING)
    right = x_at((i + 1) / PER_DOUBLING)
    height = 2 * MOST_LOG_ODDS / N_SCORES
    top = y_at(-MOST_LOG_ODDS + (j + 1) * height)
    bottom = y_at(-MOST_LOG_ODDS + j * height)
    return f"M{left:.1f} {top:.1f}H{right - 0.4:.1f}V{bottom - 0.4:.1f}H{left:.1f}z"


def _within(
    cut: Sequence[tuple[float, float]], low: float, high: float
) -> list[tuple[float, float]]:
    """Return points on the threshold line between two lengths: log2(length), and log-odds.

    They are interpolated over the logarithm.
    """
    log_lengths = np.log2([n for n, _ in cut])
    values = bounded_log_odds(np.array([score for _, score in cut]))
    inside = [math.log2(n) for n, _ in cut if low < n < high]
    xs = [math.log2(low), *inside, math.log2(high)]
    return list(zip(xs, np.interp(xs, log_lengths, values).tolist(), strict=True))


def _round_lengths(low: float, high: float) -> list[int]:
    """Return round axis lengths: powers of ten, and their multiples if these are few."""
    n_powers = math.log10(high / low)
    if n_powers > 3:
        multiples: Sequence[int] = (1,)
    elif n_powers > 0.7:
        multiples = (1, 2, 5)
    else:
        multiples = range(1, 10)
    values = (m * 10**power for power in range(11) for m in multiples)
    return [value for value in values if low <= value <= high]
