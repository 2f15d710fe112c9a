"""``virnucpro predict`` and ``virnucpro extract``."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

import typer

from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.options import (
    FILES,
    MODEL,
    BatchSize,
    ChunkSize,
    DeviceOption,
    Force,
    Gpus,
    Head,
    Input,
    InputTypeOption,
    Keep,
    LogFile,
    MinLength,
    Model,
    ModelToPredict,
    Output,
    PerFile,
    PrecisionOption,
    Quiet,
    RenameDuplicates,
    Resume,
    Strict,
    Verbose,
    Workers,
    WorkerTimeout,
)
from virnucpro.cli.running import (
    checked_path,
    loading,
    next_step,
    optional_path,
    report,
    watched,
)


def predict(
    input: Input,
    output_dir: Output,
    input_type: InputTypeOption = "auto",
    chunk_size: ChunkSize = None,
    min_length: MinLength = 0,
    model: ModelToPredict = None,
    head: Head = None,
    gpus: Gpus = None,
    device: DeviceOption = "auto",
    workers: Workers = None,
    esm_batch_size: BatchSize = "auto",
    precision: PrecisionOption = "auto",
    worker_timeout: WorkerTimeout = 300.0,
    resume: Resume = False,
    force: Force = False,
    keep_intermediate: Keep = False,
    per_file: PerFile = False,
    strict: Strict = False,
    rename_duplicates: RenameDuplicates = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Call viruses: FASTA in, predictions.tsv and viral.fasta out.

    Nucleotides of 150 bases and more are scored in seconds, without a language model. With
    --model every frame is embedded, and the calls come from the embeddings; so do those of
    proteins.

    Example: virnucpro predict -i contigs.fa -o results/

    Calls and vectors: virnucpro predict -i contigs.fa -o results/ --model esm2_virnucpro

    Many files, each with tables of its own: virnucpro predict -i assemblies/ -i samples.tsv
    -o results/ --per-file

    With another model: virnucpro predict -i contigs.fa -o results/ --model esm2_t33_650M_UR50D
    --head head.safetensors --gpus 0,1,2

    Exit codes: 0 all records accounted for, 2 some failed (see failed_files.txt), 1 nothing
    usable, 64 usage, 65 bad input, 66 input missing, 69 device or model unavailable, 73 output
    folder not usable, 74 disk full, 130/143 interrupted (go on with --resume).
    """
    _run("predict", locals())


def extract(
    input: Input,
    output_dir: Output,
    input_type: InputTypeOption = "auto",
    chunk_size: ChunkSize = None,
    min_length: MinLength = 0,
    model: Model = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Representation after this layer.", rich_help_panel=MODEL, show_default="the last"
        ),
    ] = None,
    pooling: Annotated[
        Literal["mean", "bos", "none"],
        typer.Option(
            help="mean over residues, bos (vector of the start token), none (one row per residue).",
            rich_help_panel=MODEL,
        ),
    ] = "mean",
    format: Annotated[
        Literal["h5", "npz", "pt"],
        typer.Option(
            help="Write npz, or pt as VirNucPro's _ESM.pt, beside the h5 files.",
            rich_help_panel=FILES,
        ),
    ] = "h5",
    gpus: Gpus = None,
    device: DeviceOption = "auto",
    workers: Workers = None,
    esm_batch_size: BatchSize = "auto",
    precision: PrecisionOption = "auto",
    worker_timeout: WorkerTimeout = 300.0,
    resume: Resume = False,
    force: Force = False,
    keep_intermediate: Keep = False,
    per_file: PerFile = False,
    strict: Strict = False,
    rename_duplicates: RenameDuplicates = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Extract ESM-2 features: FASTA in, features.h5 and records.tsv out.

    Proteins are embedded as they are; nucleotides are chunked and translated as in predict.
    Exit codes are those of predict.

    Example: virnucpro extract -i proteins.faa -o features/ --model esm2_t33_650M_UR50D

    Many files: virnucpro extract -i proteomes/ -i samples.tsv -o features/
    """
    _run("extract", locals())


def _run(command: Literal["predict", "extract"], given: dict[str, Any]) -> None:
    """One ``predict`` or ``extract`` with what was given on the command line."""
    quiet, verbose, log_file = (given.pop(name) for name in ("quiet", "verbose", "log_file"))
    # numpy's matrices are small here: its threads would wait for each other, and take the cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with exits():
        with loading(quiet):
            from virnucpro.engine.local import ProcessExecutor
            from virnucpro.pipeline import run
            from virnucpro.resolve import Options, resolve
            from virnucpro.run.folder import RunDir

        with watched(quiet, verbose, log_file) as events:
            options = Options(
                command=command,
                input=[checked_path(name, "--input") for name in given.pop("input")],
                output_dir=checked_path(given.pop("output_dir"), "--output-dir"),
                head=optional_path(given.pop("head", None), "--head"),
                argv=tuple(sys.argv),
                cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
                **given,
            )
            config, head = resolve(options, events)
            executor = ProcessExecutor(config.resources.devices)
            summary = run(config, head, executor, events)
    with exits():
        table = RunDir(options.output_dir).record_table(command)
        step = next_step(table, sys.argv[1:], failed=summary.exit_code != 0)
        report([*summary.lines(options.output_dir), *step], quiet)
    raise Finished(summary.exit_code)
