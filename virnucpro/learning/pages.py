"""The pages of what is learned and measured, and ``virnucpro report``, which finds a folder's.

That of a training is made of the tables that it leaves, that of an evaluation of its
``evaluation.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from virnucpro.ground.log import escaped, printable
from virnucpro.learning.evaluation.metrics import NOT_DEFINED
from virnucpro.learning.training.request import EPOCHS, FACTS, GAIN, HELD_OUT, SPLIT
from virnucpro.page.charts import Chart
from virnucpro.page.counts import damaged
from virnucpro.page.facts import Facts, is_number, read_complaints
from virnucpro.page.html import pack, render
from virnucpro.page.run import write_run_page
from virnucpro.run.folder import PAGE, RunDir
from virnucpro.run.hashes import Outputs

_MOST_SEEDS = 6  # in a chart
Table = list[dict[str, str]]
EVALUATION = "evaluation.json"
# figures of all samples, those without a score as the lowest, and their interval
_OF_ALL = ("no_orf_as_0", "no_orf_as_0_low", "no_orf_as_0_high")
_LABELS = ("virus", "other")
_N_HISTOGRAMS = 2  # of whole records, and of chunks or the longest fragments
_MEASURES = (
    ("recall", "recall"),
    ("false_positives", "false positives"),
    ("precision_if_5_percent_viral", "precision if 5 % are viral"),
    ("recall_at_1_percent", "recall at 1 % false positives"),
    ("calibration_error", "calibration error"),
)
_Series = tuple[str, list[float], list[float]]  # label, x, y


def report_folder(folder: Path) -> Path:
    """Write the page of a folder that nobody is working on. -> its file

    Raises:
        InputMissingError: it holds none of these.
        OutputError: another process is using it.
        VirnucproError: as the pages do.
    """
    rundir = RunDir(folder)
    kinds: list[tuple[Path, Callable[[Path], None]]] = [
        (rundir.manifest, _write_run_page),
        (folder / FACTS, write_training_page),
        (folder / EVALUATION, write_evaluation_page),
    ]
    for file, write in kinds:
        if file.is_file():
            with rundir.locked():
                rundir.sweep()
                write(folder)
            return rundir.report
    raise rundir.no_run("give the --output-dir of one", "run, no training and no evaluation")


def _write_run_page(folder: Path) -> None:
    rundir = RunDir(folder)
    Outputs(rundir).check(but=[PAGE])
    write_run_page(rundir)


def write_training_page(folder: Path) -> None:
    """Write the page of a training into its folder.

    Raises:
        InputMissingError: there is no training in this folder.
        ResumeError: ``training.json`` is damaged.
        InputError: a table is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    facts = Facts.read(folder / FACTS)
    names = (EPOCHS, GAIN, HELD_OUT, SPLIT)
    epochs, gains, held_out, split = (read_table(folder / name) for name in names)
    charts = [chart for chart in _learning_curves(epochs) if chart.series]
    content = {
        "is_finished": bool(epochs or held_out),
        "charts": [(chart.name, chart.drawn()) for chart in charts],
        "tables": [
            ("Gain of the head over the scorer, by length", GAIN, _columns(gains)),
            ("AUROC on held-out groups", HELD_OUT, _columns(held_out)),
            ("Groups and records of the split", SPLIT, _columns(_by_kind(split))),
        ],
        "complaints": list(read_complaints(RunDir(folder).log).items()),
        "provenance": list(_training_facts(facts)),
    }
    data = {"charts": {chart.name: chart.as_data() for chart in charts}}
    page = render("training.html", content, pack(data))
    rundir = RunDir(folder)
    rundir.write_whole(rundir.report, page)


def read_table(path: Path) -> Table:
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
            all(row[name] == NOT_DEFINED or number_in(row[name]) is not None for row in table),
            [escaped(row[name]) for row in table],
        )
        for name in (table[0] if table else ())
    ]


def _learning_curves(epochs: Table) -> Iterator[Chart]:
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
        values = ((number_in(row["epoch"]), number_in(row[column])) for row in rows)
        points = [(x, y) for x, y in values if x is not None]
        words = escaped(column).replace("_", " ") + (f", seed {seed}" if len(seeds) > 1 else "")
        series.append((words, [x for x, _ in points], [y for _, y in points]))
    return Chart(name, title, "One point for each epoch.", "epoch", label, series)


def number_in(text: str) -> float | None:
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
        n_groups_and_records[1] += int(number_in(row.get("n_records", "")) or 0)
    names = ("split", "label", "kingdom", "groups", "records")
    return [
        dict(zip(names, (*key, *map(str, numbers)), strict=True))
        for key, numbers in sorted(counts.items())
    ]


def _training_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, value in facts.content.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{key} {one}" for key, one in value.items())
            yield escaped(name), escaped(inner)
        else:
            yield escaped(name), escaped("" if value is None else value)


def write_evaluation_page(folder: Path) -> None:
    """Write the page of an evaluation into its folder.

    Raises:
        InputMissingError: there is no evaluation in this folder.
        ResumeError: ``evaluation.json`` is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    facts = Facts.read(folder / EVALUATION)
    rows = [row for row in facts.sequence("rows") if isinstance(row, dict)]
    content = {
        "n_records": facts.number("n_records"),
        "n_trained": facts.number("n_trained_records"),
        "cut": facts.text("cut"),
        "measures": [name for _, name in _MEASURES],
        "overall": [_evaluation_row(row) for row in rows if row.get("subset") == "all"],
        "by_kingdom": [_evaluation_row(row) for row in rows if row.get("subset") != "all"],
        "charts": [(chart.name, chart.drawn()) for chart in _evaluation_charts(facts, rows)],
        "provenance": list(_evaluation_facts(facts)),
    }
    page = render("evaluation.html", content, pack({}))
    rundir = RunDir(folder)
    rundir.write_whole(rundir.report, page)


def _evaluation_row(row: Mapping[str, Any]) -> dict[str, object]:
    """A row of figures; AUROC and its interval also as places between 0.5 and 1."""
    facts = Facts(row)
    of_all, low_of_all, high_of_all = map(facts.part, _OF_ALL)
    auroc, low, high = (_number(part, "auroc") for part in (of_all, low_of_all, high_of_all))
    return {
        "kind": _name(row),
        "subset": facts.text("subset"),
        "kingdom": facts.text("kingdom"),
        "n": facts.number("n"),
        "n_virus": facts.number("n_virus"),
        "n_groups": facts.number("n_groups"),
        "n_unscored": facts.number("n_no_orf"),
        "auroc": auroc,
        "low": low,
        "high": high,
        "places": [
            None if one is None else 200 * max(0.0, one - 0.5) for one in (low, auroc, high)
        ],
        "values": [_number(of_all, name) for name, _ in _MEASURES],
    }


def _number(part: Mapping[str, Any], name: str) -> float | None:
    value = part.get(name)
    return float(value) if value is not None and is_number(value) else None


def _name(kind: Mapping[str, Any]) -> str:
    """Records of a length, or chunks, as a legend has them."""
    facts = Facts(kind)
    if facts.text("unit") == "chunk":
        return "chunks"
    length = facts.text("length")
    return "whole records" if length == "whole" else printable(f"{length} bases")


def _evaluation_charts(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """ROC, precision over recall, and reliability, a line for each kind of samples; scores."""
    roc, precision = _ranking(facts, rows)
    reliability = list(_curves(facts, "reliability", ("mean_score", "share_of_viruses")))
    unit = (0.0, 1.0)
    texts = (
        ("roc", "ROC", "The share of viruses that is called, over that of the rest.", roc),
        ("precision", "Precision and recall", "In the mixture of this data.", precision),
        ("reliability", "Reliability", "Scores that mean what they say lie on the diagonal, where "
         "half of all is viral.", reliability),
    )  # fmt: skip
    labels = {
        "roc": ("share of the rest that is called", "share of viruses that is called"),
        "precision": ("recall", "precision"),
        "reliability": ("score", "share of viruses with that score"),
    }
    return [
        Chart(name, title, text, *labels[name], series, unit, unit, diagonal=name != "precision")
        for name, title, text, series in texts
        if series
    ] + [_histogram(i, one) for i, one in enumerate(_histograms(facts)[-_N_HISTOGRAMS:])]


def _histograms(facts: Facts) -> list[Mapping[str, Any]]:
    """Those whose numbers are there."""
    scores = [one for one in facts.sequence("scores") if isinstance(one, dict)]
    counts = [{len(_numbers(one, label)) for label in _LABELS} for one in scores]
    return [one for one, n in zip(scores, counts, strict=True) if len(n) == 1 and n != {0}]


def _histogram(i: int, scores: Mapping[str, Any]) -> Chart:
    """Steps over the scores, a line for each label, and the lowest score that is called."""
    series, look = [], []
    most = 1.0
    for place, label in enumerate(_LABELS):
        counts = np.array(_numbers(scores, label))
        edges = np.linspace(0, 1, len(counts) + 1)
        most = max(most, counts.max())
        name = f"{label} ({int(counts.sum()):,})"
        series.append((name, edges.repeat(2)[1:-1].tolist(), counts.repeat(2).tolist()))
        look.append(f"line s{place}")
    cut = _number(scores, "lowest_called")
    if cut is not None:
        series.append(("lowest score that is called", [cut, cut], [0.0, most]))
        look.append("cut")
    return Chart(
        f"scores{i}",
        f"Scores of {_name(scores)}",
        "Samples by score; those without a score are left out.",
        "score",
        "samples",
        series,
        x_range=(0.0, 1.0),
        look=look,
    )


def _ranking(
    facts: Facts, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[_Series], list[_Series]]:
    """The lines of ROC, and those of precision over recall."""
    sizes = {
        _name(row): (Facts(row).number("n_virus"), Facts(row).number("n"))
        for row in rows
        if row.get("subset") == "all"
    }
    roc: list[_Series] = []
    precision: list[_Series] = []
    for name, true, false in _curves(facts, "roc", ("true_positives", "false_positives")):
        roc.append((name, [0.0, *false], [0.0, *true]))
        n_virus, n = sizes.get(name, (0, 0))
        calls = [(t, t * n_virus, f * (n - n_virus)) for t, f in zip(true, false, strict=True)]
        shares = [(recall, tp / (tp + fp)) for recall, tp, fp in calls if tp + fp]
        precision.append((name, [recall for recall, _ in shares], [share for _, share in shares]))
    return roc, precision


def _curves(facts: Facts, kind: str, columns: tuple[str, str]) -> Iterator[_Series]:
    """The curves of a kind whose two columns are whole."""
    for curve in (one for one in facts.sequence(kind) if isinstance(one, dict)):
        first, second = (_numbers(curve, column) for column in columns)
        if first and len(first) == len(second):
            yield _name(curve), first, second


def _numbers(curve: Mapping[str, Any], name: str) -> list[float]:
    values = curve.get(name)
    if not isinstance(values, list) or not all(map(is_number, values)):
        return []
    return list(map(float, values))


def _evaluation_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "VirNucPro", facts.text("virnucpro_version")
    for label, name in (("Labelled data", "data"), ("Split", "split")):
        path, digest = facts.text(name, "path"), facts.text(name, "sha256")
        yield label, f"{path}, SHA-256 {digest}" if path else ""
    yield "Part of the split", facts.text("split", "part")
    for label, name in (("Head", "head"), ("Scorer", "scorer")):
        digest = facts.text(name, "sha256")
        yield label, f"SHA-256 {digest}; {facts.text(name, 'training')}" if digest else ""
    cutting = facts.part("cutting").items()
    yield "Cutting", escaped(", ".join(f"{name} {value}" for name, value in cutting))
