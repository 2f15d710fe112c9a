"""An evaluation as a table for programs and people, as JSON with everything, and in a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from virnucpro import __version__
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import sha256, write_whole
from virnucpro.ground.log import counted, printable
from virnucpro.learning.evaluation.evaluate import (
    Evaluation,
    EvaluationRow,
    SamplesOfKind,
    evaluate,
)
from virnucpro.learning.evaluation.evaluate_regions import evaluate_regions
from virnucpro.learning.evaluation.metrics import (
    MEASURES,
    NOT_DEFINED,
    Measures,
    reliability,
    roc_curve,
)
from virnucpro.learning.options import EvaluateOptions
from virnucpro.learning.pages import add_evaluation, markdown_table, write_evaluation_page

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
    lines = [rows[0].keys(), *(map(str, row.values()) for row in rows)]
    write_whole(folder / "evaluation.tsv", "".join("\t".join(line) + "\n" for line in lines))
    content = json.dumps(_to_json(evaluation), indent=1, allow_nan=False)
    write_whole(folder / "evaluation.json", content + "\n")


def _card_lines(evaluation: Evaluation) -> Iterator[str]:
    """All figures for the model card: a table for each way to count, a row for each kind."""
    question, held_out = evaluation.question, evaluation.held_out
    yield (
        f"On {counted(len(held_out.records), 'record')} of "
        f"{counted(len({record.group for record in held_out.records}), 'group')}, "
        f"{question.options.part or 'test' if question.splits else 'all'} of the data with the "
        f"SHA-256 {question.manifest.sha256}; called virus: {evaluation.cut}. Of these, "
        f"{len(held_out.trained):,} or others of their groups were trained on.\n"
    )
    for title, name in _CARD_TABLES:
        yield f"### {title}\n"
        rows = [
            (*(getattr(row, fact) for fact in _FACTS), *_shorts(getattr(row, name)))
            for row in evaluation.rows
        ]
        yield from markdown_table((*_FACTS, *MEASURES), rows)


def _shorts(measures: Measures) -> list[str]:
    return [_short(getattr(measures, name)) for name in MEASURES]


def summary_lines(evaluation: Evaluation) -> list[str]:
    """The lines for the user at the end."""
    held_out, question = evaluation.held_out, evaluation.question
    lines = [
        f"evaluated on {counted(len(held_out.records), 'record')} of "
        f"{counted(len({record.group for record in held_out.records}), 'group')}; called virus: "
        f"{evaluation.cut}",
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
    figures, (low, high) = row.no_orf_as_0, row.interval_no_orf_as_0
    auroc = f"{_short(figures.auroc)} ({_short(low.auroc)} to {_short(high.auroc)})"
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
    (low, high), (all_low, all_high) = row.interval, row.interval_no_orf_as_0
    figures = {
        "auroc": row.scored.auroc,
        "auroc_low": low.auroc,
        "auroc_high": high.auroc,
        **{name: getattr(row.scored, name) for name in MEASURES[1:]},
        **{f"{name}_equal_groups": getattr(row.equal_groups, name) for name in MEASURES},
        "auroc_no_orf_as_0": row.no_orf_as_0.auroc,
        "auroc_no_orf_as_0_low": all_low.auroc,
        "auroc_no_orf_as_0_high": all_high.auroc,
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
    options, kinds = question.options, [kind for kind in evaluation.kinds if len(kind)]
    return {
        "virnucpro_version": __version__,
        "data": {"path": str(options.data), "sha256": sha256(options.data)},
        "split": _split_to_json(options.split, options.part or "test"),
        "n_records": len(held_out.records),
        "n_trained_records": len(held_out.trained),
        "head": facts.get("head"),
        "scorer": facts.get("scorer"),
        "cut": evaluation.cut,
        "cutting": asdict(question.cutting),
        "rows": [_row_to_json(row) for row in evaluation.rows],
        **{name: [_of_kind(kind, draw) for kind in kinds] for name, draw in _CURVES.items()},
    }


def _split_to_json(split: Path | None, part: str) -> dict[str, str] | None:
    if split is None:
        return None
    return {"path": str(split), "sha256": sha256(split), "part": part}


def _row_to_json(row: EvaluationRow) -> dict[str, object]:
    def rounded(measures: Measures) -> dict[str, float | None]:
        values = asdict(measures).items()
        return {name: None if value is None else round(value, 6) for name, value in values}

    return {
        **{name: getattr(row, name) for name in (*_FACTS, "n_no_orf", "n_trained")},
        "scored": rounded(row.scored),
        "low": rounded(row.interval[0]),
        "high": rounded(row.interval[1]),
        "equal_groups": rounded(row.equal_groups),
        "no_orf_as_0": rounded(row.no_orf_as_0),
        "no_orf_as_0_low": rounded(row.interval_no_orf_as_0[0]),
        "no_orf_as_0_high": rounded(row.interval_no_orf_as_0[1]),
    }


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
