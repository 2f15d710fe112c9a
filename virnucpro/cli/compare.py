"""``virnucpro compare``."""

from __future__ import annotations

from virnucpro.cli.command import command
from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.running import report
from virnucpro.stories.options import CompareOptions


@command(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Compare two results, row by row: missing rows, other labels, distances of scores.

    Frames, chunks and records are joined by their ids, in the tables that both results have.

    Example: virnucpro compare old_merged/ results/

    One table alone: virnucpro compare old_merged/prediction_results.txt
    results/prediction_results.txt --tolerance 0.00002

    Exit codes: 0 the same rows and labels (and scores within --tolerance), 1 not so, 64 usage,
    65 bad table, 66 result missing.
    """
    with exits():
        from virnucpro.stories.compare import compare as compare_results
        from virnucpro.stories.compare import report_lines

        comparisons = compare_results(options.a, options.b)
        report(report_lines(comparisons))
        agree = all(one.agrees(options.tolerance) for one in comparisons)
        raise Finished(0 if agree else 1)
