"""``virnucpro compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.running import report

_Result = typer.Argument(
    metavar="RESULT", help="Run folder, folder of the original VirNucPro, or one table of either."
)


def compare(
    a: Annotated[Path, _Result],
    b: Annotated[Path, _Result],
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            min=0,
            help="Largest difference of two scores that passes.",
            show_default="any",
        ),
    ] = None,
) -> None:
    """Compare two results, row by row: missing rows, other labels, distances of scores.

    Frames, chunks and records are joined by their ids, in the tables that both results have.

    Example: virnucpro compare old_merged/ results/

    One table alone: virnucpro compare old_merged/prediction_results.txt
    results/prediction_results.txt --tolerance 0.00002

    Exit codes: 0 the same rows and labels (and scores within --tolerance), 1 not so, 64 usage,
    65 bad table, 66 result missing.
    """
    with exits():
        from virnucpro.outputs.compare import compare as compare_results
        from virnucpro.outputs.compare import report_lines

        comparisons = compare_results(a, b)
        report(report_lines(comparisons))
        raise Finished(0 if all(one.agrees(tolerance) for one in comparisons) else 1)
