"""Draw the records of a prediction by length and score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from virnucpro.results.report.aggregates import (
    RecordRows,
    RunCounts,
    ScoreGrid,
    bounded_log_odds,
)
from virnucpro.results.report.charts import (
    ChartPath,
    Drawing,
    Place,
    line_path,
    linear,
    short_number,
)


def scores_by_length(
    counts: RunCounts, rows: RecordRows, cut: Sequence[tuple[float, float]], letters: str
) -> Drawing | None:
    """Draw records by length and score, coloured by call. None: no record has a score.

    Args:
        rows: all records, if they are few.
        cut: length and threshold, at some lengths.
    """
    max_dots = 2_000  # records drawn as single dots
    score_ticks = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
    density = counts.density
    in_use = np.flatnonzero(density.sum(axis=(1, 2)))
    if not len(in_use):
        return None
    per_doubling = ScoreGrid.PER_DOUBLING
    first = int(in_use[0])
    last = int(in_use[-1]) + 1
    if last - first < per_doubling:
        first = max(0, first - per_doubling)
        last += per_doubling
    x_at = linear(first / per_doubling, last / per_doubling, Drawing.left, Drawing.right)
    y_at = linear(-ScoreGrid.MAX_LOG_ODDS, ScoreGrid.MAX_LOG_ODDS, Drawing.bottom, Drawing.top)
    is_few = counts.n_records <= max_dots
    layers = _dots(rows, x_at, y_at) if is_few else _shades(density, first, last, x_at, y_at)
    low = 2 ** (first / per_doubling)
    high = 2 ** (last / per_doubling)
    if cut:
        points = [(x_at(length), y_at(odds)) for length, odds in _within(cut, low, high)]
        layers.append(ChartPath("cut", line_path(points), "threshold: lowest score called virus"))
    return Drawing(
        "Scores by length",
        f"Records called virus (above the threshold): {counts.n_viral:,}; other records: "
        f"{int(density.sum()) - counts.n_viral:,}.",
        f"length in {letters}",
        "score",
        [(x_at(math.log2(n)), short_number(n)) for n in _round_lengths(low, high)],
        [(y_at(_odds(score)), f"{score:g}") for score in score_ticks],
        layers,
        (first / per_doubling, last / per_doubling),
    )


def _dots(rows: RecordRows, x_at: Place, y_at: Place) -> list[ChartPath]:
    """Draw a dot for each record with a score."""
    paths = {"other": "", "viral": ""}
    for length, score, is_viral in zip(rows.lengths, rows.scores, rows.are_viral, strict=True):
        if length and not math.isnan(score):
            x = x_at(math.log2(length))
            y = y_at(_odds(score))
            paths["viral" if is_viral else "other"] += f"M{x:.1f} {y:.1f}h0"
    labels = {"other": "other", "viral": "virus"}
    return [
        ChartPath(f"dot {css_class}", path, labels[css_class]) for css_class, path in paths.items()
    ]


def _shades(
    density: NDArray[np.int64], first: int, last: int, x_at: Place, y_at: Place
) -> list[ChartPath]:
    """Draw cells by length and score. The more records, the darker."""
    layers = []
    n_shades = 5  # of cells with records
    for call, (css_class, label) in enumerate((("other", "other"), ("viral", "virus"))):
        cells = density[first:last, :, call]
        shades = np.ceil(n_shades * np.log1p(cells) / np.log1p(max(1, int(cells.max()))))
        for shade in range(1, n_shades + 1):
            shaded = np.argwhere(shades == shade)
            path = "".join(_cell(x_at, y_at, first + int(i), int(j)) for i, j in shaded)
            layers.append(
                ChartPath(f"{css_class} d{shade}", path, label if shade == n_shades else "")
            )
    return layers


def _odds(score: float) -> float:
    return float(bounded_log_odds(np.array([score]))[0])


def _cell(x_at: Place, y_at: Place, i: int, j: int) -> str:
    left = x_at(i / ScoreGrid.PER_DOUBLING)
    right = x_at((i + 1) / ScoreGrid.PER_DOUBLING)
    height = 2 * ScoreGrid.MAX_LOG_ODDS / ScoreGrid.N_SCORES
    top = y_at(-ScoreGrid.MAX_LOG_ODDS + (j + 1) * height)
    bottom = y_at(-ScoreGrid.MAX_LOG_ODDS + j * height)
    return f"M{left:.1f} {top:.1f}H{right - 0.4:.1f}V{bottom - 0.4:.1f}H{left:.1f}z"


def _within(
    cut: Sequence[tuple[float, float]], low: float, high: float
) -> list[tuple[float, float]]:
    """Return points on the threshold line between two lengths: log2(length), and log-odds.

    They are interpolated over the logarithm.
    """
    log_lengths = np.log2([n for n, _ in cut])
    values = bounded_log_odds(np.array([score for _, score in cut]))
    inner = [math.log2(n) for n, _ in cut if low < n < high]
    xs = [math.log2(low), *inner, math.log2(high)]
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
