"""``report.html`` of an evaluation, made of its ``evaluation.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from virnucpro.ground.log import escaped, printable
from virnucpro.page.charts import Chart
from virnucpro.page.facts import Facts, is_number, read_facts
from virnucpro.page.html import pack, render
from virnucpro.run.folder import RunDir

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


def write_evaluation_page(folder: Path) -> None:
    """Write the page of an evaluation into its folder.

    Raises:
        InputMissingError: there is no evaluation in this folder.
        ResumeError: ``evaluation.json`` is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    facts = read_facts(folder / EVALUATION)
    rows = [row for row in facts.sequence("rows") if isinstance(row, dict)]
    content = {
        "n_records": facts.number("n_records"),
        "n_trained": facts.number("n_trained_records"),
        "cut": facts.text("cut"),
        "measures": [name for _, name in _MEASURES],
        "overall": [_row(row) for row in rows if row.get("subset") == "all"],
        "by_kingdom": [_row(row) for row in rows if row.get("subset") != "all"],
        "charts": [(chart.name, chart.drawn()) for chart in _charts(facts, rows)],
        "provenance": list(_provenance(facts)),
    }
    page = render("evaluation.html", content, pack({}))
    rundir = RunDir(folder)
    rundir.write_whole(rundir.report, page)


def _row(row: Mapping[str, Any]) -> dict[str, object]:
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


def _charts(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
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


def _provenance(facts: Facts) -> Iterator[tuple[str, str]]:
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
