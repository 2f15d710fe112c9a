"""An evaluation as a table for programs and people, as JSON with everything, and in a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple

import numpy as np

from virnucpro import __version__
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import sha256, write_whole
from virnucpro.ground.log import counted, printable
from virnucpro.learning.evaluate import (
    Evaluation,
    EvaluationRow,
    SamplesOfKind,
    evaluate,
)
from virnucpro.learning.metrics import (
    MEASURES,
    NOT_DEFINED,
    reliability,
    roc_curve,
)
from virnucpro.learning.options import EvaluateOptions
from virnucpro.learning.pages import add_evaluation, markdown_table, write_evaluation_page
from virnucpro.learning.records import write_table
from virnucpro.learning.regions import evaluate_regions

_ROC_POINTS = 200
_N_BARS = 40  # of the scores from 0 to 1
_CARD_TABLES = (
    ("All samples; those without a score count as the lowest", "no_orf_as_0"),
    ("Samples with a score", "scored"),
    ("Samples with a score; each group counts the same", "equal_groups"),
)
_FACTS = ("unit", "length", "subset", "kingdom", "n", "n_virus", "n_groups")


def report_evaluation(options: EvaluateOptions, on_event: OnEvent) -> list[str]:
    """Evaluate records or regions, write the tables and the page, and return lines for the user.

    Raises:
        VirnucproError: as ``evaluate`` and ``evaluate_regions``.
    """
    if options.regions is not None:
        return evaluate_regions(options, options.regions, on_event)
    evaluation = evaluate(options, on_event)
    write_report(evaluation)
    write_evaluation_page(options.output_dir)
    if evaluation.question.card is not None:
        add_evaluation(evaluation.question.card, list(_card_lines(evaluation)))
    return summary_lines(evaluation)


def write_report(evaluation: Evaluation) -> None:
    """``evaluation.tsv`` and ``evaluation.json``."""
    folder = evaluation.question.output
    rows = [_columns(row) for row in evaluation.rows]
    write_table(folder / "evaluation.tsv", rows[0], (row.values() for row in rows))
    content = json.dumps(_to_json(evaluation), indent=1, allow_nan=False)
    write_whole(folder / "evaluation.json", content + "\n")


def _card_lines(evaluation: Evaluation) -> Iterator[str]:
    """All figures for the model card: a table for each way to count, a row for each kind."""
    question, held_out = evaluation.question, evaluation.held_out
    yield (
        f"On {_data(evaluation)}, "
        f"{question.options.part or 'test' if question.splits else 'all'} of the data with the "
        f"SHA-256 {question.manifest.sha256}; called virus: {evaluation.cut}. Of these, "
        f"{len(held_out.trained):,} or others of their groups were trained on.\n"
    )
    for title, name in _CARD_TABLES:
        yield f"### {title}\n"
        rows = [
            (*(getattr(row, fact) for fact in _FACTS), *map(_short, astuple(getattr(row, name))))
            for row in evaluation.rows
        ]
        yield from markdown_table((*_FACTS, *MEASURES), rows)


def _data(evaluation: Evaluation) -> str:
    records = evaluation.held_out.records
    n_groups = len({record.group for record in records})
    return f"{counted(len(records), 'record')} of {counted(n_groups, 'group')}"


def summary_lines(evaluation: Evaluation) -> list[str]:
    """The lines for the user at the end."""
    held_out, question = evaluation.held_out, evaluation.question
    lines = [
        f"evaluated on {_data(evaluation)}; called virus: {evaluation.cut}",
        f"{'':16}{'n':>8}{'no score':>10}  {'AUROC of all (95 % interval)':<30}{'recall':>8}"
        f"{'false +':>9}{'precision at 5 % viruses':>26}",
        *(_line(row) for row in evaluation.rows if row.subset == "all"),
        f"by kingdom, and more: {printable(question.output / 'evaluation.tsv')}, .json; "
        "curves: report.html",
    ]
    if held_out.trained:
        lines.append(
            f"WITH TRAINING DATA: {len(held_out.trained):,} of the records, or their groups, "
            "were trained on; the figures are too good"
        )
    return lines


def _line(row: EvaluationRow) -> str:
    """The figures of all samples; one without a score counts as the lowest."""
    figures = row.no_orf_as_0
    low, high = _short(row.no_orf_as_0_low.auroc), _short(row.no_orf_as_0_high.auroc)
    auroc = f"{_short(figures.auroc)} ({low} to {high})"
    name = f"{row.unit}s, {row.length}" if row.unit == "record" else "chunks"
    return (
        f"  {name:<14}{row.n:>8}{row.n_no_orf / row.n:>10.1%}  {auroc:<30}"
        f"{_short(figures.recall):>8}{_short(figures.false_positives):>9}"
        f"{_short(figures.precision_if_5_percent_viral):>26}"
    )


def _short(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.3f}"


def _columns(row: EvaluationRow) -> dict[str, object]:
    """The cells of a row of ``evaluation.tsv`` by their columns, figures with 6 decimals."""
    figures = {
        "auroc": row.scored.auroc,
        "auroc_low": row.low.auroc,
        "auroc_high": row.high.auroc,
        **{name: getattr(row.scored, name) for name in MEASURES[1:]},
        **{f"{name}_equal_groups": getattr(row.equal_groups, name) for name in MEASURES},
        "auroc_no_orf_as_0": row.no_orf_as_0.auroc,
        "auroc_no_orf_as_0_low": row.no_orf_as_0_low.auroc,
        "auroc_no_orf_as_0_high": row.no_orf_as_0_high.auroc,
        "recall_no_orf_as_0": row.no_orf_as_0.recall,
        "false_positives_no_orf_as_0": row.no_orf_as_0.false_positives,
    }
    return {
        **{name: getattr(row, name) for name in _FACTS},
        "no_orf": f"{row.n_no_orf / row.n:.6f}",
        "n_trained": row.n_trained,
        **{n: NOT_DEFINED if v is None else f"{v:.6f}" for n, v in figures.items()},
    }


def _to_json(evaluation: Evaluation) -> dict[str, object]:
    question, held_out = evaluation.question, evaluation.held_out
    facts = evaluation.caller.facts
    options, kinds, split = question.options, [kind for kind in evaluation.kinds if len(kind)], None
    if options.split is not None:
        path, part = options.split, options.part or "test"
        split = {"path": str(path), "sha256": sha256(path), "part": part}
    return {
        "virnucpro_version": __version__,
        "data": {"path": str(options.data), "sha256": sha256(options.data)},
        "split": split,
        "n_records": len(held_out.records),
        "n_trained_records": len(held_out.trained),
        "head": facts.get("head"),
        "scorer": facts.get("scorer"),
        "cut": evaluation.cut,
        "cutting": question.cutting._asdict(),
        "rows": [_rounded(asdict(row)) for row in evaluation.rows],
        **{name: [_of_kind(kind, draw) for kind in kinds] for name, draw in _CURVES.items()},
    }


def _rounded(value: object) -> object:
    """A value of a row as JSON has it, figures with 6 decimals."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def _reliability_to_json(kind: SamplesOfKind) -> dict[str, object]:
    curve = reliability(kind.scored)
    return {
        "mean_score": curve.mean_score.round(6).tolist(),
        "share_of_viruses": curve.share_of_viruses.round(6).tolist(),
        "n": curve.n.tolist(),
    }


def _roc_to_json(kind: SamplesOfKind) -> dict[str, object]:
    """Some hundred points of the ROC curve of all samples; empty for a single label."""
    _, true, false = roc_curve(kind.filled(0.0))
    points = np.unique(np.linspace(0, len(true) - 1, min(len(true), _ROC_POINTS)).astype(np.int64))
    has_both = true[-1] > 0 and false[-1] > 0
    return {
        "true_positives": (true[points] / true[-1]).round(6).tolist() if has_both else [],
        "false_positives": (false[points] / false[-1]).round(6).tolist() if has_both else [],
    }


def _scores_to_json(kind: SamplesOfKind) -> dict[str, object]:
    """How many samples have a score in each of some equally wide bins, by label."""
    scored = kind.scored
    called = scored.scores[scored.is_called]
    virus, other = (
        np.histogram(scored.scores[scored.is_virus == label], bins=_N_BARS, range=(0, 1))[0]
        for label in (True, False)
    )
    return {
        "virus": virus.tolist(),
        "other": other.tolist(),
        "lowest_called": round(float(called.min()), 6) if len(called) else None,
    }


def _of_kind(
    kind: SamplesOfKind, draw: Callable[[SamplesOfKind], dict[str, object]]
) -> dict[str, object]:
    return {"unit": kind.unit, "length": kind.length, **draw(kind)}


_CURVES = {"reliability": _reliability_to_json, "roc": _roc_to_json, "scores": _scores_to_json}
