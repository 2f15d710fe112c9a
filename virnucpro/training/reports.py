"""Pages for trainings and evaluations, and other texts for people: states, heads, cards, summaries.

The model card is a Markdown page in the model folder, for its users. ``evaluate --card``
adds its figures. A resumed training rewrites the card, so that no figures for other weights remain.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from virnucpro._version import __version__
from virnucpro.core.atomic_io import hash_file, open_regular_file, read_json
from virnucpro.core.errors import InputMissingError, UsageError
from virnucpro.core.logging import escape_markup, format_count, printable
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.family import ModelFile
from virnucpro.models.lookup import open_model
from virnucpro.results.names import tsv_line
from virnucpro.results.outputs import open_run_dir
from virnucpro.results.report.charts import Chart
from virnucpro.results.report.html import render
from virnucpro.results.report.run_json import RunJson, read_complaints
from virnucpro.training.evaluation.metrics import NOT_DEFINED
from virnucpro.training.labelled_data import read_cells, write_table
from virnucpro.training.training_config import TrainingFile
from virnucpro.viral.head import Head

_Table = list[dict[str, str]]
CARD_FILE = "README.md"  # next to the head
# Figures for all samples (without a score: lowest), and the ends of their interval.
OVERALL_MEASURES = ("no_orf_as_0", "no_orf_as_0_low", "no_orf_as_0_high")
_MEASURES = {
    "recall": "recall",
    "false_positives": "false positives",
    "precision_if_5_percent_viral": "precision if 5 % are viral",
    "recall_at_1_percent": "recall at 1 % false positives",
    "calibration_error": "calibration error",
}
_EVALUATION = "## Evaluation"


def write_training_page(folder: Path) -> None:
    """Write a finished training's page into its folder.

    Raises:
        InputError: a table is damaged.
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    epochs = read_table(folder / TrainingFile.EPOCHS)
    gains = read_table(folder / TrainingFile.GAIN)
    held_out = read_table(folder / TrainingFile.HELD_OUT)
    split = read_table(folder / TrainingFile.SPLIT)
    charts = list(_learning_curves(epochs))
    rundir = open_run_dir(folder)
    content = {
        "charts": charts,
        "tables": [
            ("Gain of the head over the scorer, by length", TrainingFile.GAIN, _columns(gains)),
            ("AUROC on held-out groups", TrainingFile.HELD_OUT, _columns(held_out)),
            (
                "Groups and records of the split",
                TrainingFile.SPLIT,
                _columns(_group_by_kind(split)),
            ),
        ],
        "complaints": list(read_complaints(rundir.log).items()),
        "provenance": list(_training_facts(read_json(folder / TrainingFile.FACTS))),
    }
    data = {"charts": {chart.name: chart.as_data() for chart in charts}}
    rundir.write_file(rundir.report, render("training.html", content, data))


def read_table(path: Path) -> _Table:
    """Read a small table as rows by column name. A missing table is empty.

    Raises:
        InputError: the table is empty, or a row has too few or too many values.
    """
    hint = "it was changed since the training wrote it: run the training again with --resume"
    return [cells for _, cells in read_cells(path, (), hint)] if path.is_file() else []


def write_figures(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]], form: str
) -> None:
    """Write a table, with floats in the format ``form``. A missing value or None is undefined.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """

    def cell(value: object) -> str:
        if isinstance(value, float):
            return format(value, form)
        return NOT_DEFINED if value is None else str(value)

    write_table(path, columns, ([cell(row.get(name)) for name in columns] for row in rows))


def _columns(table: _Table) -> list[tuple[str, bool, list[str]]]:
    """Return a table's columns: name, whether it contains numbers, and the cells as text."""
    columns: list[tuple[str, bool, list[str]]] = []
    for name in table[0] if table else ():
        title = escape_markup(name).replace("_", " ")
        cells = [row[name] for row in table]
        is_numeric = all(cell == NOT_DEFINED or _parse_number(cell) is not None for cell in cells)
        columns.append((title, is_numeric, list(map(escape_markup, cells))))
    return columns


def _learning_curves(epochs: _Table) -> Iterator[Chart]:
    """Yield charts of losses and validation figures by epoch, with a line per seed and name."""
    names = [name for name in (epochs[0] if epochs else ()) if name not in ("seed", "epoch", "lr")]
    losses = [name for name in names if "loss" in name]
    figures = [name for name in names if name not in losses]
    for name, title, label, columns in (
        ("loss", "Learning curve", "loss", losses),
        ("figures", "Figures of the validation groups", "figure", figures),
    ):
        if series := list(_series(columns, epochs)):
            yield Chart(name, title, "One point for each epoch.", "epoch", label, series)


def _series(
    columns: Sequence[str], epochs: _Table
) -> Iterator[tuple[str, list[float], list[float | None]]]:
    """Yield a line for each seed and column, with a gap where a figure is not finite."""
    max_seeds = 6  # per chart
    seeds = list(dict.fromkeys(row["seed"] for row in epochs))[:max_seeds]
    for seed, column in product(seeds, columns):
        rows = [row for row in epochs if row["seed"] == seed]
        values = ((_parse_number(row["epoch"]), _parse_number(row[column])) for row in rows)
        points = [(x, y) for x, y in values if x is not None]
        words = escape_markup(column).replace("_", " ") + (
            f", seed {seed}" if len(seeds) > 1 else ""
        )
        yield words, [x for x, _ in points], [y for _, y in points]


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _group_by_kind(split: _Table) -> _Table:
    """Count groups and records by split, label and kingdom."""
    groups: Counter[tuple[str, str, str]] = Counter()
    records: Counter[tuple[str, str, str]] = Counter()
    for row in split:
        key = (row.get("split", ""), row.get("label", ""), row.get("kingdom", ""))
        groups[key] += 1
        records[key] += int(_parse_number(row.get("n_records", "")) or 0)
    names = ("split", "label", "kingdom", "groups", "records")
    rows: _Table = []
    for key, n_groups in sorted(groups.items()):
        cells = (*key, str(n_groups), str(records[key]))
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


def _training_facts(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        yield escape_markup(name), escape_markup("" if value is None else value)


def _measure(folder: Path, facts: RunJson) -> dict[str, Any]:
    """Measure each seed's progress in a training, and its best epoch."""
    settings = RunJson(facts.section("settings"))
    rows_by_seed: dict[str, list[dict[str, str]]] = {}
    for row in read_table(folder / TrainingFile.EPOCHS):
        rows_by_seed.setdefault(row.get("seed", ""), []).append(row)
    is_loss = settings.text("mode") == "pretrain" or settings.text("best_by") == "loss"
    name = "validation_loss" if is_loss else settings.text("best_by") or "auroc"
    # The results are written after the last checkpoint.
    card = folder / TrainingFile.MODEL / CARD_FILE
    epochs = [
        path.stat().st_mtime_ns for path in (folder / TrainingFile.CHECKPOINTS).glob("epoch_*.pt")
    ]
    is_finished = card.is_file() and card.stat().st_mtime_ns >= max(epochs, default=0)
    return {
        "kind": "training",
        "mode": settings.text("mode"),
        "epochs": settings.number("epochs"),
        "is_finished": is_finished,
        "seeds": {seed: _progress(rows, name) for seed, rows in rows_by_seed.items()},
    }


def _progress(rows: Sequence[Mapping[str, str]], name: str) -> dict[str, Any]:
    """Return a seed's progress, its best epoch by the named figure, and the last figures."""
    last = {key: _parse_number(value) for key, value in rows[-1].items() if key != "seed"}
    measured = [(_parse_number(row.get(name, "")), row) for row in rows]
    scored = [(-value if "loss" in name else value, row) for value, row in measured if value]
    best = max(scored, key=lambda scored_row: scored_row[0])[1] if scored else {}
    return {
        "n_epochs": len(rows),
        "best_epoch": int(_parse_number(best.get("epoch", "")) or 0),
        name: _parse_number(best.get(name, "")),
        "last": {key: value for key, value in last.items() if value is not None},
    }


def training_lines(folder: Path, *, as_json: bool) -> list[str] | None:
    """Describe a training folder, for people or for programs. None: no training began there.

    Raises:
        ResumeError: ``training.json`` is damaged.
        InputError: ``epochs.tsv`` is damaged.
    """
    if not (folder / TrainingFile.FACTS).is_file():
        return None
    facts = RunJson.read(folder / TrainingFile.FACTS)
    figures = _measure(folder, facts)
    return [json.dumps(figures, indent=2)] if as_json else list(_describe(folder, facts, figures))


def _describe(folder: Path, facts: RunJson, figures: Mapping[str, Any]) -> Iterator[str]:
    """Describe the training and its data, its progress, and the next steps."""
    yield f"training    {figures['mode']}, {printable(facts.text('manifest'))}"
    yield f"encoder     {facts.text('encoder') or 'a new one, or none'}"
    for seed, progress in figures["seeds"].items():
        last = ", ".join(f"{name} {value:.4g}" for name, value in progress["last"].items())
        yield (
            f"seed {printable(seed):<6} epoch {progress['n_epochs']} of {figures['epochs']}, "
            f"best {progress['best_epoch'] or 'unknown so far'}; last: {last}"
        )
    if not figures["seeds"]:
        yield f"epochs      0 of {figures['epochs']}"
    if figures["is_finished"]:
        yield "finished    to train longer, repeat the command with --resume and more --epochs"
        yield f"model       {printable(folder / TrainingFile.MODEL)}: see `virnucpro models info`"
    else:
        yield "unfinished  repeat the command of the training with --resume"


def describe_head(path: Path) -> Iterator[str]:
    """Describe a head: its purpose, how it calls, and its training data.

    Raises:
        UnavailableError: the head is damaged, or from an older version.
    """
    head = Head.load(path)
    facts = head.facts
    yield f"head        {printable(path)}"
    yield f"sha256      {head.sha256}"
    for encoder in facts.encoders:
        yield (
            f"encoder     {printable(encoder.name)}, layer {encoder.layer}, {encoder.pooling} of "
            f"{encoder.dim} dimensions, id {encoder.encoder_id}"
        )
    yield f"chunks      {facts.chunk_size} bases; of several frames, the {facts.frame_rule} counts"
    yield f"threshold   {facts.threshold:.6f}, exponent {facts.exponent:.2f}"
    alone = "none: this head calls alone, or not at all (--calls head lets it)"
    yield f"join        {f'with the scorer; {facts.join.weights}' if facts.join else alone}"
    yield (
        f"trained on  {format_count(len(head.trained_records), 'record')} of "
        f"{format_count(len(head.trained_groups), 'group')}: {printable(facts.training)}"
    )


def summary_lines(folders: Sequence[Path]) -> list[str]:
    """Tabulate mean and standard deviation of held-out figures over trainings and seeds.

    Raises:
        UsageError: fewer than two trainings or seeds have figures.
        InputError: a table is damaged.
    """
    values: dict[tuple[str, str, str], list[float]] = {}
    # Per table of figures: the columns that name a row, and those to summarise.
    summarised = {
        TrainingFile.HELD_OUT: (("split", "network"), ("auroc_frames", "auroc_chunks")),
        TrainingFile.GAIN: (("split", "n_bases"), ("base", "head", "joined", "gain", "weight")),
    }
    for (table, (keys, figures)), folder in product(summarised.items(), folders):
        for row, figure in product(read_table(folder / table), figures):
            name = " ".join(row.get(key, NOT_DEFINED) for key in keys)
            if (number := _parse_number(row.get(figure, ""))) is not None:
                values.setdefault((table, name, figure), []).append(number)
    rows = [
        (*names, f"{len(numbers)}", f"{fmean(numbers):.4f}", f"{stdev(numbers):.4f}")
        for names, numbers in values.items()
        if len(numbers) > 1
    ]
    if not rows:
        raise UsageError(
            "a mean needs at least two finished trainings or seeds",
            hint="name the folders of several trainings, or one that was trained with --seeds",
        )
    header = ("table", "row", "figure", "n", "mean", "deviation")
    return [tsv_line(cells).removesuffix("\n") for cells in (header, *rows)]


# The page of an evaluation


def write_evaluation_page(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write an evaluation page from ``evaluation.json``, into its folder.

    Raises:
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    rows = [(row["subset"] == "all", _evaluation_row(row)) for row in figures["rows"]]
    content = {
        "n_records": figures["n_records"],
        "n_trained": figures["n_trained_records"],
        "cut": figures["cut"],
        "measures": list(_MEASURES.values()),
        "overall": [row for is_overall, row in rows if is_overall],
        "by_kingdom": [row for is_overall, row in rows if not is_overall],
        "charts": list(_evaluation_charts(figures)),
        "provenance": list(_evaluation_facts(figures)),
    }
    rundir = open_run_dir(folder)
    rundir.write_file(rundir.report, render("evaluation.html", content, {}))


def _evaluation_row(row: Mapping[str, Any]) -> dict[str, object]:
    """Return a row of figures, with AUROC and its interval also as positions from 0.5 to 1."""
    auroc, low, high = (row[name]["auroc"] for name in OVERALL_MEASURES)
    return {
        **row,
        "kind": _run_name(row),
        "kingdom": escape_markup(row["kingdom"]),
        "auroc": auroc,
        "low": low,
        "high": high,
        "places": [
            None if figure is None else 200 * max(0.0, figure - 0.5)
            for figure in (low, auroc, high)
        ],
        "values": [row["no_orf_as_0"][name] for name in _MEASURES],
    }


def _run_name(kind: Mapping[str, str]) -> str:
    """Name a sample kind in a legend: records of a length, or chunks."""
    if kind["unit"] == "chunk":
        return "chunks"
    return "whole records" if kind["length"] == "whole" else f"{kind['length']} bases"


def _evaluation_charts(figures: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield charts: ROC, precision and recall, and reliability by kind, and of scores."""
    n_histograms = 2  # complete records, and chunks or the longest fragments
    unit = (0.0, 1.0)
    overall = [row for row in figures["rows"] if row["subset"] == "all"]
    curves = [
        pair for pair in zip(overall, figures["roc"], strict=True) if pair[1]["true_positives"]
    ]
    roc = [
        (_run_name(kind), [0.0, *kind["false_positives"]], [0.0, *kind["true_positives"]])
        for _, kind in curves
    ]
    precision = [
        (name, *_precision(false, true, row["n_virus"], row["n"]))
        for (row, _), (name, false, true) in zip(curves, roc, strict=True)
    ]
    reliability = [
        (_run_name(kind), kind["mean_score"], kind["share_of_viruses"])
        for kind in figures["reliability"]
        if kind["mean_score"]
    ]
    for name, title, text, x_label, y_label, series in (
        ("roc", "ROC", "Viruses called, over other samples called, at each possible cut.",
         "share of other samples called", "share of viruses called", roc),
        ("precision", "Precision and recall", "Precision at the share of viruses in this data.",
         "recall", "precision", precision),
        ("reliability", "Reliability", "Weighted as if half of the samples were viral. Calibrated "
         "scores lie on the diagonal.", "score", "share of viruses at that score", reliability),
    ):  # fmt: skip
        if series:
            is_diagonal = name != "precision"
            yield Chart(name, title, text, x_label, y_label, series, unit, unit, is_diagonal)
    for i, scores in enumerate(figures["scores"][-n_histograms:]):
        yield _histogram(f"scores{i}", scores)


def _precision(
    false: Sequence[float], true: Sequence[float], n_virus: int, n: int
) -> tuple[list[float], list[float]]:
    """Return recall and precision at the points of a ROC curve where something is called."""
    calls = [(t, t * n_virus, f * (n - n_virus)) for f, t in zip(false, true, strict=True)]
    shares = [(recall, tp / (tp + fp)) for recall, tp, fp in calls if tp + fp]
    return [recall for recall, _ in shares], [share for _, share in shares]


def _histogram(name: str, scores: Mapping[str, Any]) -> Chart:
    """Draw a score histogram, with a line per label and at the lowest score called virus."""
    labels = ("virus", "other")
    cut = scores["lowest_called"]
    edges = np.linspace(0, 1, len(scores["virus"]) + 1).repeat(2)[1:-1].tolist()
    series = [
        (f"{label} ({sum(scores[label]):,})", edges, np.repeat(scores[label], 2).tolist())
        for label in labels
    ]
    if cut is not None:
        most = max(1.0, *scores["virus"], *scores["other"])
        series.append(("lowest score called virus", [cut, cut], [0.0, most]))
    return Chart(
        name,
        f"Scores of {_run_name(scores)}",
        "Samples by score. Samples without a score are left out.",
        "score",
        "samples",
        series,
        x_range=(0.0, 1.0),
        css_classes=("line s0", "line s1", "cut"),
    )


def _evaluation_facts(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    nothing = dict.fromkeys(("path", "sha256", "part", "training"), "")
    data = figures["data"] or nothing
    split = figures["split"] or nothing
    head = figures["head"] or nothing
    scorer = figures["scorer"] or nothing
    yield "VirNucPro", figures["virnucpro_version"]
    for label, file in (("Labelled data", data), ("Split", split)):
        yield (
            label,
            escape_markup(f"{file['path']}, SHA-256 {file['sha256']}" if file["path"] else ""),
        )
    yield "Part of the split", split["part"]
    for label, model in (("Head", head), ("Scorer", scorer)):
        digest = model["sha256"]
        yield label, escape_markup(f"SHA-256 {digest}; {model['training']}" if digest else "")
    cutting = figures["cutting"].items()
    yield "Cutting", ", ".join(f"{name} {value}" for name, value in cutting)


# The model card


def write_card(training: Path) -> None:
    """Write the model card into a training folder.

    Raises:
        InputError: a table is damaged.
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    no_runs_message = (
        f"{_EVALUATION}\n\nNone yet: `virnucpro evaluate --data MANIFEST --split split.tsv --model "
        "FOLDER --card` measures it and writes all figures here.\n"
    )
    model = training / TrainingFile.MODEL
    lines = [
        *_summary_rows(training, model, read_json(training / TrainingFile.FACTS)),
        no_runs_message,
    ]
    SafeDir(model).write_file(model / CARD_FILE, "\n".join(lines))


def find_card(model: str) -> Path:
    """Return the card for the model that ``--model`` names.

    Raises:
        InputMissingError: the model has no card.
    """
    head = open_model(model, lambda _: None).head
    path = head and head.with_name(CARD_FILE)
    if path is None or not path.is_file():
        raise InputMissingError(
            f"the model {printable(model)} has no card",
            hint="--card is for the folder of a model that `virnucpro train` wrote",
        )
    return path


def add_evaluation(card: Path, lines: Sequence[str]) -> None:
    """Replace the evaluation figures in a card."""
    with open_regular_file(card) as stored:
        text = stored.read().decode("utf-8", errors="replace")
    before = text.split(_EVALUATION)[0]
    SafeDir(card.parent).write_file(card, "\n".join([f"{before}{_EVALUATION}\n", *lines, ""]))


def markdown_table(table: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield a Markdown table and an empty line, or nothing if there are no rows."""
    if table:
        names = [name.replace("_", " ") for name in table[0]]
        yield _markdown_row(names)
        yield "|---" * len(names) + "|"
        for row in table:
            yield _markdown_row(row.values())
        yield ""


def _markdown_row(cells: Iterable[object]) -> str:
    texts = [escape_markup(cell).replace("|", "&#124;") for cell in cells]
    return f"| {' | '.join(texts)} |"


def _summary_rows(training: Path, model: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    data_keys = ("data_sha256", "split_sha256")
    settings = facts["settings"]
    head = model / ModelFile.HEAD
    encoder = "a new one, or none"
    if facts["encoder"]:
        encoder = f"{escape_markup(Path(facts['encoder']).name)}, id {facts['encoder_id']}"
    yield f"# {printable(model.name)}\n"
    if head.is_file():
        yield "A virus classifier for VirNucPro: a protein encoder and a head that calls viruses.\n"
        yield f"    virnucpro predict -i contigs.fa -o results/ --model {printable(model.name)}/\n"
        yield f"- head: SHA-256 {hash_file(head)}"
    else:
        yield "A protein encoder for VirNucPro, trained on masked residues.\n"
    yield f"- made by VirNucPro {__version__}, mode {settings['mode']}"
    yield f"- encoder at the start: {encoder}\n"
    yield "## Data and split\n"
    yield "Each group is in one part only. The test part served neither training nor tuning.\n"
    yield from markdown_table(_group_by_kind(read_table(training / TrainingFile.SPLIT)))
    for name in data_keys:
        yield f"- {name.removesuffix('_sha256')}: SHA-256 {facts[name]}"
    yield "\n## Settings\n"
    # Shown elsewhere, or specific to this machine.
    not_listed = {
        *data_keys,
        "manifest",
        "encoder",
        "encoder_id",
        "vectors",
        "fasta_sha256",
        "settings",
    }
    shown = [item for item in {**facts, **settings}.items() if item[0] not in not_listed]
    yield from markdown_table([{"option": name, "value": value} for name, value in shown])
    for name, title in (
        (TrainingFile.HELD_OUT, "AUROC on the groups that were held out"),
        (TrainingFile.GAIN, "Gain of the head over the scorer, by length"),
    ):
        if rows := read_table(training / name):
            yield f"## {title}\n"
            yield from markdown_table(rows)
    yield "## SHA-256 of the files of sequences\n"
    yield from (f"- {escape_markup(digest)}" for digest in facts["fasta_sha256"])
    yield ""
