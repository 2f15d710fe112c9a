"""An evaluation as a figure: ROC, reliability, and the scores of viruses and of the rest."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps, rc_context, rcdefaults
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from virnucpro.ground.files import atomic
from virnucpro.ground.numeric import Values
from virnucpro.learning.evaluation.metrics import reliability, roc_curve
from virnucpro.learning.evaluation.story import Evaluation, EvaluationRow, Sampled

_N_BARS = 40
_FORMATS = {"pdf": {"CreationDate": None}, "png": {}}  # without a date: the same bytes again


def write_figure(evaluation: Evaluation) -> None:
    """``evaluation.pdf`` and ``evaluation.png``."""
    with rc_context():
        rcdefaults()  # a `matplotlibrc` was read, from the current folder if one lies there
        figure = draw_figure(evaluation)
        for ending, metadata in _FORMATS.items():
            with atomic(evaluation.question.output / f"evaluation.{ending}") as temporary:
                figure.savefig(temporary, format=ending, metadata=metadata, dpi=150)


def draw_figure(evaluation: Evaluation) -> Figure:
    overall = {
        (row.unit, row.length): row
        for row in evaluation.rows
        if row.subset == "all" and row.no_orf_as_0.auroc is not None
    }
    kinds = [
        (kind, row)
        for kind in evaluation.kinds
        if (row := overall.get((kind.unit, kind.length))) is not None
    ]
    figure = Figure(figsize=(10, 9), layout="constrained")
    roc, calibration, of_records, of_chunks = figure.subplots(2, 2).flat
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(kinds)))
    for (kind, row), colour in zip(kinds, colours, strict=True):
        _draw_roc(roc, kind, row, colour)
        _draw_reliability(calibration, kind, colour)
    _finish_roc(roc)
    _finish_reliability(calibration)
    for axes, (kind, _) in zip((of_records, of_chunks), kinds[-2:], strict=False):
        _draw_scores(axes, kind)
    held_out = evaluation.held_out
    title = f"{len(held_out.records):,} labelled records"
    if held_out.trained:
        title += f", WITH {len(held_out.trained):,} OF THE TRAINING DATA"
    figure.suptitle(title)
    return figure


def _name(kind: Sampled) -> str:
    if kind.unit == "chunk":
        return "chunks"
    return "whole records" if kind.length == "whole" else f"{int(kind.length):,} bases"


def _draw_roc(axes: Axes, kind: Sampled, row: EvaluationRow, colour: Values) -> None:
    curve = roc_curve(kind.samples)
    false, true = curve.false_positives, curve.true_positives
    axes.plot(
        np.concatenate([[0.0], false / false[-1]]),
        np.concatenate([[0.0], true / true[-1]]),
        color=colour,
        label=f"{_name(kind)}: {row.no_orf_as_0.auroc:.3f}",
    )


def _finish_roc(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="share of the rest that is called", ylabel="share of viruses that is called")
    axes.set_title("ROC of all, with what has no score")
    axes.legend(title="area", loc="lower right", fontsize="small")


def _draw_reliability(axes: Axes, kind: Sampled, colour: Values) -> None:
    curve = reliability(kind.scored.samples)
    axes.plot(curve.mean_score, curve.share_of_viruses, color=colour, marker=".", label=_name(kind))


def _finish_reliability(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="score", ylabel="share of viruses with that score")
    axes.set_title("Reliability")


def _draw_scores(axes: Axes, kind: Sampled) -> None:
    scored = kind.scored
    samples, called = scored.samples, scored.scores[scored.is_called]
    bars = np.linspace(0, 1, _N_BARS + 1)
    for label, is_virus in (("other", False), ("virus", True)):
        scores = samples.scores[samples.is_virus == is_virus]
        axes.hist(scores, bins=bars.tolist(), alpha=0.6, label=f"{label} ({len(scores):,})")
    if len(called):
        axes.axvline(float(called.min()), color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="score", ylabel="samples")
    axes.set_title(f"Scores of {_name(kind)}")
    axes.legend(fontsize="small")
