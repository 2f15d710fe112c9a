"""Commands that report: ``devices``, ``bench``, ``status``, ``compare``, ``report``, ``cite``."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from virnucpro.cli import console as running
from virnucpro.cli.command import command
from virnucpro.cli.exit_codes import CommandExit, end_cleanly, exit_on_error
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import argument, folder, option, reject_options
from virnucpro.models.validation.options import BenchOptions

if TYPE_CHECKING:
    from virnucpro.workflows.recompute import Recomputed


@dataclass(frozen=True, kw_only=True)
class _DevicesOptions:
    """How to describe the devices."""

    as_json: Annotated[bool, option("Print JSON instead of text.", None, "--json")] = False


@command(_DevicesOptions)
def devices(options: _DevicesOptions) -> None:
    """List the devices that a run would use: GPUs, memory, precision, kernels.

    Each usable GPU is tested: which VirNucPro Triton kernels run on it, and whether it supports
    fp8.

    Example: virnucpro devices
    """
    with exit_on_error():
        from virnucpro.core.machine import read_machine
        from virnucpro.models.environment import slurm_variables
        from virnucpro.models.machine_report import format_machine

        running.number_gpus_by_bus()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        machine = read_machine(slurm_variables(os.environ))
        running.print_lines(format_machine(visible, machine, _try_gpus, as_json=options.as_json))


def _try_gpus(devices: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    from virnucpro.models.validation.compare_reference import try_gpus

    return try_gpus(devices)


@command(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure how fast this device embeds proteins.

    Each size of ESM-2 is measured in each precision, and compared with fair-esm and with the
    device's matrix products. Weights are random, so nothing is downloaded.

    Example: virnucpro bench --quick

    One model: virnucpro bench --models 650M --json bench.json
    """
    measured = "the tables and the --json file contain the measurements so far"
    with exit_on_error(lambda: measured):
        from virnucpro.models.validation.bench import bench as measure

        running.number_gpus_by_bus()
        end_cleanly()
        say = (lambda _: None) if options.quiet else partial(click.echo, err=True)
        measure(options, sys.argv, say, running.print_lines)


@dataclass(frozen=True, kw_only=True)
class _StatusOptions:
    """A run folder, and how to describe it."""

    folder: Annotated[Path, folder("Run folder.")]
    verify: Annotated[
        bool, option("Verify every output and feature file, and the inputs that are still there.")
    ] = False
    recompute: Annotated[
        int | None,
        option(
            "With --verify: recompute N random shards, blocks of scores and slices of the tables "
            "from the input, and compare them with those of the run.",
            metavar="N",
            min=1,
            show_default="none",
        ),
    ] = None
    seed: Annotated[
        int | None,
        option(
            "With --recompute: choose the same files as the command that printed this seed.",
            metavar="SEED",
            min=0,
            show_default="random",
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "Print figures as JSON: records by status, unread files, finished and pending work, "
            "tokens/s of each host, remaining time.",
            None,
            "--json",
        ),
    ] = False


@command(_StatusOptions)
def status(options: _StatusOptions) -> None:
    """Describe a run folder: finished, pending and failed work, and the processes working on it.

    A folder of virnucpro train: the progress, best epoch and last figures of each seed.

    Example: virnucpro status results/

    With a check of every file: virnucpro status results/ --verify

    Results from somebody else, with their input: virnucpro status results/ --verify --recompute 3

    Exit codes: 0 intact, 1 --verify found damaged files or files that do not follow from the input.
    """
    with exit_on_error():
        from virnucpro.results.outputs import open_run_dir
        from virnucpro.workflows.status import inspect_run, measure_run

        if not options.verify:
            reject_options(options, ("recompute",), "without --verify")
        if options.recompute is None:
            reject_options(options, ("seed",), "without --recompute")
        if not open_run_dir(options.folder).manifest.exists():
            _report_training(options)
        recomputed = _recompute(options)
        if options.as_json:
            figures = measure_run(options.folder, verify=options.verify, recomputed=recomputed)
            running.print_lines([json.dumps(figures, indent=2)])
            raise CommandExit(1 if figures.get("damaged") else 0)
        lines, n_damaged = inspect_run(options.folder, verify=options.verify, recomputed=recomputed)
        running.print_lines(lines)
        raise CommandExit(1 if n_damaged else 0)


def _recompute(options: _StatusOptions) -> Recomputed | None:
    max_seed = 1_000_000  # short enough to be typed
    if options.recompute is None:
        return None
    from virnucpro.workflows.recompute import recompute

    end_cleanly()
    running.number_gpus_by_bus()
    seed = secrets.randbelow(max_seed) if options.seed is None else options.seed
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return recompute(options.folder, options.recompute, seed, visible=visible)


def _report_training(options: _StatusOptions) -> None:
    """Report a training and end the command, if the folder contains one.

    Raises:
        CommandExit: the folder contains a training.
    """
    from virnucpro.training.reports import training_lines

    if lines := training_lines(options.folder, as_json=options.as_json):
        names = ("verify", "recompute", "seed")
        reject_options(options, names, "for a training: `train --resume` verifies its files")
        running.print_lines(lines)
        raise CommandExit(0)


_Result = Annotated[
    Path,
    argument(
        "Run folder, results folder of the original VirNucPro, or one table of either.", "RESULT"
    ),
]


@dataclass(frozen=True, kw_only=True)
class _CompareOptions:
    """The two results to compare."""

    a: _Result
    b: _Result
    tolerance: Annotated[
        float | None,
        option(
            "Allow scores of the same row to differ by this much.",
            metavar="SCORE",
            min=0,
            show_default="any",
        ),
    ] = None


@command(_CompareOptions)
def compare(options: _CompareOptions) -> None:
    """Compare two results row by row: missing rows, changed labels, score differences.

    Rows (frames or scorer pieces, chunks, records, viruses) are matched by id, in the tables that
    both results have. The file must match, too, unless both results have only one. The last two
    columns are score differences.

    Example: virnucpro compare old_merged/ results/

    One table alone: virnucpro compare old_merged/prediction_results.txt
    results/prediction_results.txt --tolerance 0.00002

    Exit codes: 0 same rows and labels (and scores within --tolerance), 1 differences,
    64 usage, 65 bad table, 66 result missing.
    """
    with exit_on_error():
        from virnucpro.workflows.compare import compare as compare_results
        from virnucpro.workflows.compare import report_lines

        comparisons = compare_results(options.a, options.b)
        running.print_lines(report_lines(comparisons))
        agree = all(comparison.agrees(options.tolerance) for comparison in comparisons)
        raise CommandExit(0 if agree else 1)


@dataclass(frozen=True, kw_only=True)
class _ReportOptions:
    """A folder with results."""

    folder: Annotated[Path, folder("Run folder.")]
    ro_crate: Annotated[
        bool,
        option("Write DIR/ro-crate-metadata.json instead: the run in machine-readable form."),
    ] = False


@command(_ReportOptions)
def report(options: _ReportOptions) -> None:
    """Write DIR/report.html: one page about a run, to read offline.

    Only files in the folder are read. Nothing is embedded or scored. The same folder gives the same
    page.

    Example: virnucpro report results/

    As metadata for an archive such as Zenodo or WorkflowHub: virnucpro report results/ --ro-crate
    """
    end_cleanly()
    with exit_on_error():
        if options.ro_crate:
            from virnucpro.results.ro_crate import write_ro_crate

            running.print_lines([f"RO-Crate: {printable(write_ro_crate(options.folder))}"])
            return
        from virnucpro.results.report.run_report import report_folder

        running.print_lines([f"report: {printable(report_folder(options.folder))}"])


@dataclass(frozen=True, kw_only=True)
class _SummaryOptions:
    """Training folders."""

    folders: Annotated[tuple[Path, ...], folder("Folders of trainings.")]


@command(_SummaryOptions)
def summary(options: _SummaryOptions) -> None:
    """Print mean and standard deviation of the held-out figures of several trainings or seeds.

    The figures come from gain.tsv, for every folder and every seed in it. If several folders are
    given, figures from held_out.tsv are added.

    Example: virnucpro summary model_1/ model_2/ model_3/
    """
    with exit_on_error():
        from virnucpro.training.reports import summary_lines

        running.print_lines(summary_lines(options.folders))


@dataclass(frozen=True, kw_only=True)
class _CiteOptions:
    """How to print the references."""

    folder: Annotated[Path | None, argument("Run folder: cite what this run used.", "[DIR]")] = None
    bibtex: Annotated[bool, option("Print BibTeX entries only.")] = False


@command(_CiteOptions)
def cite(options: _CiteOptions) -> None:
    """Print how to cite a result: this program, its language models, and the original VirNucPro.

    With a run folder, only the models, head and scorer used in that run are printed, with the works
    to cite for them.

    Example: virnucpro cite results/

    As BibTeX: virnucpro cite results/ --bibtex >> references.bib
    """
    with exit_on_error():
        from virnucpro.results.report.cite import cite_program, cite_run

        if options.folder is None:
            running.print_lines(cite_program(bibtex_only=options.bibtex))
        else:
            running.print_lines([*cite_run(options.folder, bibtex_only=options.bibtex)])
