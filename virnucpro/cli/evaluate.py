"""``virnucpro evaluate``."""

from __future__ import annotations

from virnucpro.cli.command import command
from virnucpro.cli.exits import exits
from virnucpro.cli.running import loading, report, watched
from virnucpro.ground.options import ConsoleOptions
from virnucpro.learning.options import EvaluateOptions

_KEPT = "run the same command again with --resume"


@command(EvaluateOptions, ConsoleOptions)
def evaluate(options: EvaluateOptions, console: ConsoleOptions) -> None:
    """Measure the scorer, or a head, on labelled sequences that it was not trained on.

    Fragments of each length and the whole records are called as predict calls them, in the run
    folder DIR/run. evaluation.tsv, .json and report.html have AUROC (with intervals over groups),
    AUPRC, accuracy, precision, recall, F1 and false positives of the calls, precision where 1, 5
    and 20 % are viral, recall at 1 % false positives, and calibration; overall and by kingdom, of
    all fragments and of those with a score. report.html draws the curves.

    Example: virnucpro evaluate --data manifest.tsv --output-dir evaluation/

    That is the scorer. A head: virnucpro evaluate --data manifest.tsv --split split.tsv
    --output-dir evaluation/ --model esm2_t12_35M_UR50D --head head.safetensors

    Known prophages beside the regions that predict finds, in regions_evaluation.tsv: precision and
    recall of bases, and of genes with a GFF; found and false regions; the error of their ends:

    virnucpro evaluate --data genomes/ --regions prophages.tsv --genes genes.gff -o evaluation/

    Exit codes are those of predict.
    """
    with exits(lambda: _KEPT):
        with loading(console):
            from virnucpro.learning.evaluation.report import report_evaluation

        with watched(console) as events:
            lines = report_evaluation(options, events)
    with exits():
        report(lines, console.quiet)
