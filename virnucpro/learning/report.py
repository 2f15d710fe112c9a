"""What an evaluation leaves, all of it made of the figures of ``evaluation.json``.

The same figures as a table, in the card of a model, in a few lines and on a page. The page is made
of the file itself, of any version: what it lacks is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from virnucpro import __version__
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import sha256, write_whole
from virnucpro.ground.log import counted, escaped, printable
from virnucpro.ground.tasks import Pool
from virnucpro.learning.evaluate import Figures, evaluate
from virnucpro.learning.metrics import MEASURES, NOT_DEFINED
from virnucpro.learning.options import EvaluateOptions
from virnucpro.learning.pages import add_evaluation, find_card, markdown_table, write_training_page
from virnucpro.learning.records import write_table
from virnucpro.learning.regions import evaluate_regions
from virnucpro.learning.request import FACTS
from virnucpro.page.charts import Chart
from virnucpro.page.facts import Facts
from virnucpro.page.html import render
from virnucpro.page.run import write_run_page
from virnucpro.run.folder import RunDir
from virnucpro.run.hashes import Outputs

_CARD_TABLES = (
    ("All samples; those without a score count as the lowest", "no_orf_as_0"),
    ("Samples with a score", "scored"),
    ("Samples with a score; each group counts the same", "equal_groups"),
)
_FACTS = ("unit", "length", "subset", "kingdom", "n", "n_virus", "n_groups")
_FILE = "evaluation.json"
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


def report_evaluation(options: EvaluateOptions, on_event: OnEvent) -> list[str]:
    """Evaluate records or regions, write the tables and the page, and return lines for the user.

    Raises:
        VirnucproError: as ``evaluate`` and ``evaluate_regions``.
    """
    if options.regions is not None:
        return evaluate_regions(options, options.regions, on_event)
    card = find_card(options.model) if options.card and options.model else None
    figures = evaluate(options, on_event)
    write_report(options, figures)
    write_evaluation_page(options.output_dir)
    if card is not None:
        part = (options.part or "test") if options.split else "all"
        add_evaluation(card, list(_card_lines(figures, part)))
    return summary_lines(options.output_dir, figures)


def write_report(options: EvaluateOptions, figures: Figures) -> None:
    """Write ``evaluation.tsv`` and ``evaluation.json``."""
    split = None
    if (path := options.split) is not None:
        split = {"path": str(path), "sha256": sha256(path), "part": options.part or "test"}
    content = {
        "virnucpro_version": __version__,
        "data": {"path": str(options.data), "sha256": figures["data_sha256"]},
        "split": split,
        "head": None,
        "scorer": None,
        **{name: value for name, value in figures.items() if name != "data_sha256"},
    }
    folder, rows = options.output_dir, [_columns(row) for row in figures["rows"]]
    write_table(folder / "evaluation.tsv", rows[0], (row.values() for row in rows))
    write_whole(folder / _FILE, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _columns(row: Figures) -> dict[str, object]:
    """The cells of a row of ``evaluation.tsv`` by their columns, figures with 6 decimals."""
    scored, of_all = row["scored"], row["no_orf_as_0"]
    figures = {
        "auroc": scored["auroc"],
        "auroc_low": row["low"]["auroc"],
        "auroc_high": row["high"]["auroc"],
        **{name: scored[name] for name in MEASURES[1:]},
        **{f"{name}_equal_groups": row["equal_groups"][name] for name in MEASURES},
        **{f"auroc_{name}": row[name]["auroc"] for name in _OF_ALL},
        "recall_no_orf_as_0": of_all["recall"],
        "false_positives_no_orf_as_0": of_all["false_positives"],
    }
    return {
        **{name: row[name] for name in _FACTS},
        "no_orf": f"{row['n_no_orf'] / row['n']:.6f}",
        "n_trained": row["n_trained"],
        **{n: NOT_DEFINED if v is None else f"{v:.6f}" for n, v in figures.items()},
    }


def _card_lines(figures: Figures, part: str) -> Iterator[str]:
    """All figures for the model card: a table for each way to count, a row for each kind."""
    yield (
        f"On {_data(figures)}, {part} of the data with the SHA-256 {figures['data_sha256']}; "
        f"called virus: {figures['cut']}. Of these, {figures['n_trained_records']:,} or others of "
        "their groups were trained on.\n"
    )
    for title, name in _CARD_TABLES:
        yield f"### {title}\n"
        rows = [
            (*(row[fact] for fact in _FACTS), *(_short(row[name][one]) for one in MEASURES))
            for row in figures["rows"]
        ]
        yield from markdown_table((*_FACTS, *MEASURES), rows)


def _data(figures: Figures) -> str:
    return f"{counted(figures['n_records'], 'record')} of {counted(figures['n_groups'], 'group')}"


def summary_lines(folder: Path, figures: Figures) -> list[str]:
    """The lines for the user at the end."""
    lines = [
        f"evaluated on {_data(figures)}; called virus: {figures['cut']}",
        f"{'':16}{'n':>8}{'no score':>10}  {'AUROC of all (95 % interval)':<30}{'recall':>8}"
        f"{'false +':>9}{'precision at 5 % viruses':>26}",
        *(_line(row) for row in figures["rows"] if row["subset"] == "all"),
        f"by kingdom, and more: {printable(folder / 'evaluation.tsv')}, .json; curves: report.html",
    ]
    if n_trained := figures["n_trained_records"]:
        lines.append(
            f"WITH TRAINING DATA: {n_trained:,} of the records, or their groups, were trained on; "
            "the figures are too good"
        )
    return lines


def _line(row: Figures) -> str:
    """The figures of all samples; one without a score counts as the lowest."""
    of_all = row["no_orf_as_0"]
    auroc, low, high = (_short(row[name]["auroc"]) for name in _OF_ALL)
    name = f"{row['unit']}s, {row['length']}" if row["unit"] == "record" else "chunks"
    return (
        f"  {name:<14}{row['n']:>8}{row['n_no_orf'] / row['n']:>10.1%}  "
        f"{f'{auroc} ({low} to {high})':<30}"
        f"{_short(of_all['recall']):>8}{_short(of_all['false_positives']):>9}"
        f"{_short(of_all['precision_if_5_percent_viral']):>26}"
    )


def _short(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.3f}"


# Pages


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
        (folder / _FILE, write_evaluation_page),
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
    Outputs(rundir).check(but=[RunDir.page])
    write_run_page(rundir, Pool())


def write_evaluation_page(folder: Path) -> None:
    """Write the page of an evaluation into its folder.

    Raises:
        InputMissingError: there is no evaluation in this folder.
        ResumeError: ``evaluation.json`` is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    facts = Facts.read(folder / _FILE)
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
    page = render("evaluation.html", content, {})
    rundir = RunDir(folder)
    rundir.write_whole(rundir.report, page)


def _evaluation_row(row: Mapping[str, Any]) -> dict[str, object]:
    """A row of figures; AUROC and its interval also as places between 0.5 and 1."""
    facts = Facts(row)
    auroc, low, high = (facts.real(name, "auroc") for name in _OF_ALL)
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
        "values": [facts.real(_OF_ALL[0], name) for name, _ in _MEASURES],
    }


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
    counts = [{len(Facts(one).reals(label)) for label in _LABELS} for one in scores]
    return [one for one, n in zip(scores, counts, strict=True) if len(n) == 1 and n != {0}]


def _histogram(i: int, scores: Mapping[str, Any]) -> Chart:
    """Steps over the scores, a line for each label, and the lowest score that is called."""
    series, look = [], []
    most = 1.0
    for place, label in enumerate(_LABELS):
        counts = np.array(Facts(scores).reals(label))
        edges = np.linspace(0, 1, len(counts) + 1)
        most = max(most, counts.max())
        name = f"{label} ({int(counts.sum()):,})"
        series.append((name, edges.repeat(2)[1:-1].tolist(), counts.repeat(2).tolist()))
        look.append(f"line s{place}")
    cut = Facts(scores).real("lowest_called")
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
        first, second = (Facts(curve).reals(column) for column in columns)
        if first and len(first) == len(second):
            yield _name(curve), first, second


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
