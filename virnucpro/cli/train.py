"""The commands on labelled sequences: ``manifest``, ``train`` and ``evaluate``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from virnucpro.cli.command import ConsoleOptions, command
from virnucpro.cli.console import as_command, loading, print_lines, show_progress
from virnucpro.cli.exit_codes import exit_on_error, require_packages
from virnucpro.cli.parameters import Option
from virnucpro.core.errors import UsageError
from virnucpro.core.option_schema import Panel
from virnucpro.core.paths import expand_path
from virnucpro.training.options import EvaluateOptions, ManifestOptions, TrainOptions


def _read_config(context: click.Context, _: click.Parameter, text: str | None) -> None:
    """Use the options in a file as defaults. The command line overrides them."""
    if text is None:
        return
    if not text:
        raise UsageError("--config is empty", hint="check that the shell variable in it is set")
    with require_packages("train"):
        from virnucpro.core.yaml_config import read_config

    options = {param.name: param for param in context.command.params if param.expose_value}
    values = read_config(expand_path(text), [name for name in options if name])
    context.default_map = {
        name: [value] if options[name].multiple and not isinstance(value, list) else value
        for name, value in values.items()
    }


_CONFIG = Option(
    ["--config"],
    panel=Panel.FILES,
    metavar="YAML",
    type=click.UNPROCESSED,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="Read options from this YAML file, such as `batch_size: 64`; the command line wins.",
)


@command(ManifestOptions)
def manifest(options: ManifestOptions) -> None:
    """Write a manifest of labelled sequences for train and evaluate.

    By folder: the group of a file is the first folder below the named one, else the file name.

    - virnucpro manifest --virus viruses/ --other bacteria/ --other human.fa -o manifest.tsv

    By table: records are matched by accession, with or without version.

    - virnucpro manifest --table taxonomy.tsv --fasta genomes.fa --group-by genus -o manifest.tsv
    """
    with exit_on_error():
        from virnucpro.training.labelled_data import write_manifest

        print_lines(write_manifest(options))


@command(TrainOptions, ConsoleOptions, more=[_CONFIG])
def train(options: TrainOptions, console: ConsoleOptions) -> None:
    """Train a head for an encoder, fine-tune both, or pretrain an encoder.

    Records are cut and translated as by predict. Complete groups (viral families, host genera) are
    held out. DIR gets split.tsv, training.json, checkpoints/, tensorboard/, held_out.tsv, gain.tsv
    (what the head adds to the scorer), and model/, to be passed to predict, extract and evaluate as
    --model. It contains the encoder or its name, head.safetensors, and a model card, README.md.

    Estimate the time, memory and disk that a training needs, without starting it:

    - virnucpro train --data manifest.tsv -o training/ --check

    Train a head on a frozen encoder, and use it:

    - virnucpro train --data manifest.tsv -o training/

    - virnucpro predict -i contigs.fa -o results/ --model training/model

    Train encoder and head together:

    - virnucpro train --data manifest.tsv -o training/ --finetune --model esm2_t12_35M_UR50D

    Train a model of virus-like regions, DIR/regions.json, on chromosomes with known prophages:

    - virnucpro train --data genomes/ --regions prophages.tsv -o training/

    Each GPU of this machine gets a process. On several machines:

    - torchrun --nnodes 2 --nproc-per-node 8 ... --no-python virnucpro train ...
    """
    if options.regions is not None:
        _train_regions(options, options.regions, console)
        return
    parent = os.getppid()  # before the slow imports
    kept = "finished epochs are kept: continue with --resume"
    with exit_on_error(lambda: "" if options.check else kept):
        with loading(console):
            from virnucpro.core.child_process import exit_with_parent
            from virnucpro.training.train import check_training
            from virnucpro.training.train import train as run_training

        rank = os.environ.get("RANK")  # set in processes that torchrun started
        if rank not in (None, "0"):
            console = replace(console, quiet=True)
        with show_progress(console) as events:
            if options.check:
                for line in check_training(options, events):
                    print_lines([line])
                return
            if rank is not None:
                exit_with_parent(parent)
            training = run_training(options, events, os.environ)
        if rank is None:
            model = training.model if training.head.exists() else None
            print_lines(_report_result(training.output, model), console.quiet)


def _train_regions(options: TrainOptions, truth: Path, console: ConsoleOptions) -> None:
    with exit_on_error():
        with loading(console):
            from virnucpro.training.provirus import train_regions

        with show_progress(console) as events:
            lines = train_regions(options, truth, events)
        print_lines(lines, console.quiet)


def _report_result(output: Path, model: Path | None) -> list[str]:
    """List the results folder, and the command that uses a model that calls."""
    from virnucpro.core.logging import printable

    lines = [f"results: {printable(output)}"]
    if model is not None:
        words = ["predict", "-i", "contigs.fa", "-o", "results", "--model", str(model)]
        lines += as_command(["virnucpro", *words])
    return lines


@command(EvaluateOptions, ConsoleOptions)
def evaluate(options: EvaluateOptions, console: ConsoleOptions) -> None:
    """Measure the scorer or a head on labelled sequences that it was not trained on.

    Fragments of each length and complete records are called as by predict, in the run folder
    DIR/run. evaluation.tsv and evaluation.json contain AUROC (with intervals over groups), AUPRC,
    accuracy, precision, recall, F1, false positives and calibration: for all samples and by
    kingdom, with and without the samples that have no score. report.html shows the curves.

    Example: virnucpro evaluate --data manifest.tsv --output-dir evaluation/

    This measures the scorer. For a trained head: virnucpro evaluate --data manifest.tsv --split
    training/split.tsv --output-dir evaluation/ --model training/model --card

    Compare regions with known prophages, in regions_evaluation.tsv: precision and recall by base,
    and by gene if a GFF is given, as well as matched and false regions and the error at their ends:
    virnucpro evaluate --data genomes/ --regions prophages.tsv --genes genes.gff -o evaluation/

    Exit codes are those of predict.
    """
    evaluation_kept = "run the same command again with --resume"
    with exit_on_error(lambda: evaluation_kept):
        with loading(console):
            from virnucpro.training.evaluation.evaluate import report_evaluation

        with show_progress(console) as events:
            lines = report_evaluation(options, events)
    with exit_on_error():
        print_lines(lines, console.quiet)
