"""``report.html`` of a training, made of the tables that it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from virnucpro.ground.log import escaped
from virnucpro.learning.evaluation.metrics import NOT_DEFINED
from virnucpro.learning.training.request import EPOCHS, FACTS, GAIN, HELD_OUT, SPLIT
from virnucpro.page.charts import Chart
from virnucpro.page.counts import damaged
from virnucpro.page.facts import Facts, read_complaints, read_facts
from virnucpro.page.html import pack, render
from virnucpro.run.folder import RunDir

_MOST_SEEDS = 6  # in a chart
Table = list[dict[str, str]]


def write_training_page(folder: Path) -> None:
    """Write the page of a training into its folder.

    Raises:
        InputMissingError: there is no training in this folder.
        ResumeError: ``training.json`` is damaged.
        InputError: a table is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    facts = read_facts(folder / FACTS)
    names = (EPOCHS, GAIN, HELD_OUT, SPLIT)
    epochs, gains, held_out, split = (_read_table(folder / name) for name in names)
    charts = [chart for chart in _charts(epochs) if chart.series]
    content = {
        "is_finished": bool(epochs or held_out),
        "charts": [(chart.name, chart.drawn()) for chart in charts],
        "tables": [
            ("Gain of the head over the scorer, by length", GAIN, _columns(gains)),
            ("AUROC on held-out groups", HELD_OUT, _columns(held_out)),
            ("Groups and records of the split", SPLIT, _columns(_by_kind(split))),
        ],
        "complaints": list(read_complaints(RunDir(folder).log).items()),
        "provenance": list(_provenance(facts)),
    }
    data = {"charts": {chart.name: chart.as_data() for chart in charts}}
    page = render("training.html", content, pack(data))
    rundir = RunDir(folder)
    rundir.write_whole(rundir.report, page)


def _read_table(path: Path) -> Table:
    """The rows of a small table by the names of their columns; none without a table.

    Raises:
        InputError: it is empty, or a row has another number of values.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    names, *rows = (line.split("\t") for line in lines if line or line is lines[0])
    if names == [""] or any(len(row) != len(names) for row in rows):
        raise damaged(path, "a line has another number of values than there are names")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _columns(table: Table) -> list[tuple[str, bool, list[str]]]:
    """The columns of a table: name, whether it holds numbers, and the cells as they are shown."""
    return [
        (
            escaped(name).replace("_", " "),
            all(row[name] == NOT_DEFINED or _number(row[name]) is not None for row in table),
            [escaped(row[name]) for row in table],
        )
        for name in (table[0] if table else ())
    ]


def _charts(epochs: Table) -> Iterator[Chart]:
    """Losses and the figures of validation over the epochs, a line for each seed and name."""
    names = [name for name in (epochs[0] if epochs else ()) if name not in ("seed", "epoch", "lr")]
    losses = [name for name in names if "loss" in name]
    figures = [name for name in names if name not in losses]
    yield _chart("loss", "Learning curve", "loss", losses, epochs)
    yield _chart("figures", "Figures of the validation groups", "figure", figures, epochs)


def _chart(name: str, title: str, label: str, names: Sequence[str], epochs: Table) -> Chart:
    series = []
    seeds = list(dict.fromkeys(row["seed"] for row in epochs))[:_MOST_SEEDS]
    for seed, column in product(seeds, names):
        rows = [row for row in epochs if row["seed"] == seed]
        values = ((_number(row["epoch"]), _number(row[column])) for row in rows)
        points = [(x, y) for x, y in values if x is not None]
        words = escaped(column).replace("_", " ") + (f", seed {seed}" if len(seeds) > 1 else "")
        series.append((words, [x for x, _ in points], [y for _, y in points]))
    return Chart(name, title, "One point for each epoch.", "epoch", label, series)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _by_kind(split: Table) -> Table:
    """Numbers of groups and records by split, label and kingdom."""
    counts: dict[tuple[str, ...], list[int]] = {}
    for row in split:
        key = tuple(row.get(name, "") for name in ("split", "label", "kingdom"))
        n_groups_and_records = counts.setdefault(key, [0, 0])
        n_groups_and_records[0] += 1
        n_groups_and_records[1] += int(_number(row.get("n_records", "")) or 0)
    names = ("split", "label", "kingdom", "groups", "records")
    return [
        dict(zip(names, (*key, *map(str, numbers)), strict=True))
        for key, numbers in sorted(counts.items())
    ]


def _provenance(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, value in facts.content.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{key} {one}" for key, one in value.items())
            yield escaped(name), escaped(inner)
        else:
            yield escaped(name), escaped("" if value is None else value)
