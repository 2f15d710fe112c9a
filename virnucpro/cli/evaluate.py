"""``virnucpro evaluate``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from virnucpro.cli.exits import exits, needing
from virnucpro.cli.options import (
    FILES,
    MODEL,
    BatchSize,
    DeviceOption,
    Force,
    Gpus,
    Head,
    Keep,
    LogFile,
    Model,
    Output,
    PrecisionOption,
    Quiet,
    Resume,
    Verbose,
    Workers,
    WorkerTimeout,
)
from virnucpro.cli.running import checked_path, loading, optional_path, report, watched
from virnucpro.errors import UsageError
from virnucpro.log import printable

_SAMPLES = "Samples"


def evaluate(
    data: Annotated[
        Path,
        typer.Option(
            metavar="MANIFEST",
            help="Table of labelled FASTA files, with the columns path, label (virus or other) and "
            "group; id and kingdom are optional.",
            rich_help_panel=FILES,
            show_default=False,
        ),
    ],
    output_dir: Output,
    split: Annotated[
        Path | None,
        typer.Option(
            help="Table of groups and their splits, as training writes it.",
            rich_help_panel=FILES,
            show_default="all records",
        ),
    ] = None,
    part: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(
            help="Part of the split to evaluate on.",
            rich_help_panel=FILES,
            show_default="test",
        ),
    ] = None,
    model: Model = "esm2_virnucpro",
    head: Head = None,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,N,...", help="Lengths of the fragments in bases.", rich_help_panel=_SAMPLES
        ),
    ] = "150,300,500,1000,3000,10000",
    fragments_per_record: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of fragments per record and length, without overlap. A whole "
            "record counts up to this many times the longest length.",
            rich_help_panel=_SAMPLES,
        ),
    ] = 3,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed of the fragments and of the intervals.", rich_help_panel=_SAMPLES
        ),
    ] = 0,
    held_out_only: Annotated[
        bool,
        typer.Option(
            "--held-out-only",
            help="Only records whose sequence and group neither head nor encoder was trained on.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    allow_training_data: Annotated[
        bool,
        typer.Option(
            "--allow-training-data",
            help="Also records of the training; the report says so.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    gpus: Gpus = None,
    device: DeviceOption = "auto",
    workers: Workers = None,
    esm_batch_size: BatchSize = "auto",
    precision: PrecisionOption = "auto",
    worker_timeout: WorkerTimeout = 300.0,
    resume: Resume = False,
    force: Force = False,
    keep_intermediate: Keep = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Measure a head on labelled sequences that it was not trained on.

    Fragments of each length, the whole records and their chunks are scored as predict scores
    them, in the run folder DIR/run. evaluation.tsv, .json, .pdf and .png tell AUROC (with
    intervals over groups), AUPRC, accuracy, precision, recall, F1 and false positives at the
    head's threshold, recall at 1 % false positives, and calibration; overall and by kingdom.

    Example: virnucpro evaluate --data manifest.tsv --split split.tsv --output-dir evaluation/
    --model esm2_t12_35M_UR50D --head head.safetensors

    Exit codes are those of predict.
    """
    _run(locals())


def _run(given: dict[str, Any]) -> None:
    """One evaluation with what was given on the command line."""
    quiet, verbose, log_file = (given.pop(name) for name in ("quiet", "verbose", "log_file"))
    with exits():
        with loading(quiet):
            with needing("train"):
                from virnucpro.evaluation.figure import write_figure
            from virnucpro.engine.local import ProcessExecutor
            from virnucpro.evaluation.fragments import Cutting
            from virnucpro.evaluation.held_out import policy
            from virnucpro.evaluation.report import summary_lines, write_report
            from virnucpro.evaluation.story import Question, evaluate
            from virnucpro.resolve import Options, resolve

        with watched(quiet, verbose, log_file) as events:
            question = Question(
                data=given.pop("data"),
                output=checked_path(given.pop("output_dir"), "--output-dir"),
                split=given.pop("split"),
                part=given.pop("part"),
                of_training=policy(given.pop("held_out_only"), given.pop("allow_training_data")),
                cutting=Cutting(
                    lengths=_lengths(given.pop("lengths")),
                    per_record=given.pop("fragments_per_record"),
                    seed=given.pop("seed"),
                ),
            )
            manifest = question.read_manifest()
            options = Options(
                command="predict",
                input=[],
                input_type="nucleotide",
                output_dir=question.run_folder,
                chunk_size=None,
                min_length=0,
                argv=tuple(sys.argv),
                head=optional_path(given.pop("head"), "--head"),
                cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
                **given,
            )
            config, found = resolve(options, events)
            assert found is not None, "predict has a head"
            executor = ProcessExecutor(config.resources.devices)
            evaluation = evaluate(question, manifest, config, found, executor, events)
            write_report(evaluation)
            write_figure(evaluation)
    with exits():
        report(summary_lines(evaluation), quiet)


def _lengths(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"--lengths is {printable(text)!r}; it must be numbers of bases",
            hint="for example --lengths 300,500,3000",
        )
    return tuple(map(int, words))
