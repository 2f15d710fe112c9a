"""An evaluation as a table for programs and people, as JSON with everything, and in a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from virnucpro import __version__
from virnucpro.ground.files import sha256, write_whole
from virnucpro.ground.log import counted, printable
from virnucpro.learning.evaluation.evaluate import Evaluation, EvaluationRow, SamplesOfKind
from virnucpro.learning.evaluation.metrics import (
    MEASURES,
    NOT_DEFINED,
    Measures,
    reliability,
    roc_curve,
)

_ROC_POINTS = 200
_N_BARS = 40  # of the scores from 0 to 1
_FACTS = ("unit", "length", "subset", "kingdom", "n", "n_virus", "n_groups")
_COLUMNS = (
    *_FACTS,
    "no_orf",
    "n_trained",
    "auroc",
    "auroc_low",
    "auroc_high",
    *MEASURES[1:],
    *(f"{name}_equal_groups" for name in MEASURES),
    "auroc_no_orf_as_0",
    "auroc_no_orf_as_0_low",
    "auroc_no_orf_as_0_high",
    "recall_no_orf_as_0",
    "false_positives_no_orf_as_0",
)


def write_report(evaluation: Evaluation) -> None:
    """``evaluation.tsv`` and ``evaluation.json``."""
    folder = evaluation.question.output
    lines = ["\t".join(_COLUMNS), *("\t".join(_cells(row)) for row in evaluation.rows), ""]
    write_whole(folder / "evaluation.tsv", "\n".join(lines))
    content = json.dumps(_to_json(evaluation), indent=1, allow_nan=False)
    write_whole(folder / "evaluation.json", content + "\n")


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
    figures, interval = row.no_orf_as_0, row.interval_no_orf_as_0
    auroc = (
        f"{_short(figures.auroc)} ({_short(interval.low.auroc)} to {_short(interval.high.auroc)})"
    )
    name = f"{row.unit}s, {row.length}" if row.unit == "record" else "chunks"
    return (
        f"  {name:<14}{row.n:>8}{row.n_no_orf / row.n:>10.1%}  {auroc:<30}"
        f"{_short(figures.recall):>8}{_short(figures.false_positives):>9}"
        f"{_short(figures.precision_if_5_percent_viral):>26}"
    )


def _short(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.3f}"


def _cells(row: EvaluationRow) -> Iterator[str]:
    yield from (str(getattr(row, name)) for name in _FACTS)
    yield f"{row.n_no_orf / row.n:.6f}"
    yield str(row.n_trained)
    yield _cell(row.scored.auroc)
    yield _cell(row.interval.low.auroc)
    yield _cell(row.interval.high.auroc)
    yield from (_cell(getattr(row.scored, name)) for name in MEASURES[1:])
    yield from (_cell(getattr(row.equal_groups, name)) for name in MEASURES)
    yield _cell(row.no_orf_as_0.auroc)
    yield _cell(row.interval_no_orf_as_0.low.auroc)
    yield _cell(row.interval_no_orf_as_0.high.auroc)
    yield _cell(row.no_orf_as_0.recall)
    yield _cell(row.no_orf_as_0.false_positives)


def _cell(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.6f}"


def _to_json(evaluation: Evaluation) -> dict[str, object]:
    question, held_out = evaluation.question, evaluation.held_out
    facts = evaluation.caller.facts
    options = question.options
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
        "reliability": [_reliability_to_json(kind) for kind in evaluation.kinds if len(kind)],
        "roc": [_roc_to_json(kind) for kind in evaluation.kinds if len(kind)],
        "scores": [_scores_to_json(kind) for kind in evaluation.kinds if len(kind)],
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
        "low": rounded(row.interval.low),
        "high": rounded(row.interval.high),
        "equal_groups": rounded(row.equal_groups),
        "no_orf_as_0": rounded(row.no_orf_as_0),
        "no_orf_as_0_low": rounded(row.interval_no_orf_as_0.low),
        "no_orf_as_0_high": rounded(row.interval_no_orf_as_0.high),
    }


def _reliability_to_json(kind: SamplesOfKind) -> dict[str, object]:
    curve = reliability(kind.scored)
    return {
        "unit": kind.unit,
        "length": kind.length,
        "mean_score": curve.mean_score.round(6).tolist(),
        "share_of_viruses": curve.share_of_viruses.round(6).tolist(),
        "n": curve.n.tolist(),
    }


def _roc_to_json(kind: SamplesOfKind) -> dict[str, object]:
    """Some hundred points of the ROC curve of all samples; empty for a single label."""
    curve = roc_curve(kind.filled(0.0))
    true, false = curve.true_positives, curve.false_positives
    points = np.unique(np.linspace(0, len(true) - 1, min(len(true), _ROC_POINTS)).astype(np.int64))
    has_both = true[-1] > 0 and false[-1] > 0
    return {
        "unit": kind.unit,
        "length": kind.length,
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
        "unit": kind.unit,
        "length": kind.length,
        "virus": virus.tolist(),
        "other": other.tolist(),
        "lowest_called": round(float(called.min()), 6) if len(called) else None,
    }
