"""The commands that look: ``devices``, ``status``, ``compare``, ``report`` and ``cite``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Annotated

import typer

from virnucpro.cli import running
from virnucpro.cli.command import command
from virnucpro.cli.exits import Finished, exits
from virnucpro.ground.log import printable
from virnucpro.ground.option_fields import refuse
from virnucpro.ground.options import option
from virnucpro.page.options import ReportOptions
from virnucpro.stories.options import CompareOptions, StatusOptions


def devices(
    *, as_json: Annotated[bool, option("Print the facts for programs.", None, "--json")] = False
) -> None:
    """List the devices that a run would use: GPUs, memory, precision, kernels.

    Example: virnucpro devices
    """
    with exits():
        from virnucpro.ground.devices import describe_machine, measure_machine

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if as_json:
            running.report([json.dumps(measure_machine(visible), indent=2)])
        else:
            running.report([*describe_machine(visible)])


@command(StatusOptions)
def status(options: StatusOptions) -> None:
    """Describe a run folder: finished, pending and failed work, and who is at it.

    Of a folder of virnucpro train: how far each seed is, its best epoch and its last figures.

    Example: virnucpro status results/ --verify

    Exit code 1: --verify found damaged files.
    """
    with exits():
        from virnucpro.run.folder import RunDir
        from virnucpro.run.status import inspect_run, measure_run

        if not RunDir(options.folder).manifest.exists():
            _report_training(options)
        if options.as_json:
            running.report([json.dumps(measure_run(options.folder), indent=2)])
            raise Finished(0)
        lines, n_damaged = inspect_run(options.folder, verify=options.verify)
        running.report(lines)
        raise Finished(1 if n_damaged else 0)


def _report_training(options: StatusOptions) -> None:
    """
    Raises:
        Finished: it is the folder of a training.
    """
    from virnucpro.learning.status import training_lines

    if lines := training_lines(options.folder, as_json=options.as_json):
        refuse(options, ("verify",), "for a training, whose --resume verifies its files")
        running.report(lines)
        raise Finished(0)


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
        running.report(report_lines(comparisons))
        agree = all(one.agrees(options.tolerance) for one in comparisons)
        raise Finished(0 if agree else 1)


@command(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write DIR/report.html: a run, a training or an evaluation on one page, without a network.

    Only files of the folder are read, and nothing is embedded or scored. The same folder gives
    the same page.

    Example: virnucpro report results/
    """
    with exits():
        from virnucpro.learning.pages import report_folder

        running.report([f"report: {printable(report_folder(options.folder))}"])


def summary(
    *,
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders of trainings.")],
) -> None:
    """Summarise trainings: mean and standard deviation of their held-out figures, as a table.

    The figures are those of held_out.tsv and gain.tsv. Every folder counts, and every seed in it.

    Example: virnucpro summary model_1/ model_2/ model_3/
    """
    with exits():
        from virnucpro.ground.files import expanded
        from virnucpro.learning.status import summary_lines

        running.report(summary_lines([expanded(folder) for folder in folders]))


def cite(
    *,
    bibtex: Annotated[bool, option("Print BibTeX entries only.", None, "--bibtex")] = False,
) -> None:
    """Print how to cite a result: this program, its language models, and the original VirNucPro.

    Example: virnucpro cite --bibtex >> references.bib
    """
    from virnucpro.page.citation import WORKS, as_bibtex

    references = "\n\n".join(map(as_bibtex, WORKS))
    running.report([references] if bibtex else [*_as_list(), references])


def _as_list() -> Iterator[str]:
    from virnucpro.page.citation import WORKS, as_text

    yield "Please cite:\n"
    for work in WORKS:
        only = " (only for results with --model that used it)" if work.families else ""
        yield f"- {work.role}{only}:\n  {as_text(work)}\n"
    yield "The same as BibTeX (alone: virnucpro cite --bibtex):\n"
