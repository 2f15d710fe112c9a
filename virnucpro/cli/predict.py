"""The commands ``predict``, ``work`` and ``regions``, which write a run folder."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from virnucpro.cli.command import ConsoleOptions, command
from virnucpro.cli.console import loading, next_step, print_lines, show_progress
from virnucpro.cli.exit_codes import exit_on_error
from virnucpro.cli.run_command import Workflow, run_command
from virnucpro.workflows.predict_options import PredictOptions, RegionsOptions

if TYPE_CHECKING:
    from virnucpro.core.helper_pool import HelperPool


@command(PredictOptions, ConsoleOptions)
def predict(options: PredictOptions, console: ConsoleOptions) -> None:
    """Find viruses in FASTA or FASTQ, and write viruses.tsv, viruses.fasta and predictions.tsv.

    A fast scorer and an index of known viruses call every record virus or other. With --model, or
    any device option except --workers, ESM-2 embeds every translated frame and writes vectors to
    features.h5. The default is the published ESM-2 650M, downloaded once. ESM-2 alone does not
    affect calls. A head you trained does, where it improved accuracy in training. If no option but
    the model or the head asks for vectors, only the scores of frames are kept: see --keep-vectors.

    Only a model uses a GPU. Without --model and without a device option, the scorer runs on CPU
    cores.

    Example: virnucpro predict -i contigs.fa -o results/

    Calls and ESM-2 vectors on three GPUs, or continue such a run: virnucpro predict
    -i contigs.fa -o results/ --gpus 0,1,2 --resume

    Many files, each with its own tables: virnucpro predict -i assemblies/ -i samples.tsv
    -o results/ --per-file

    With your own model and head: virnucpro predict -i contigs.fa -o results/
    --model training/model --gpus 0,1,2

    A large model, only on records that may be viral, with a cache for later runs: virnucpro
    predict -i contigs.fa -o results/ --model esm2_t33_650M_UR50D --embed viral --cache vectors/

    Exit codes: 0 all records accounted for, 2 some failed (see failed_files.txt), 1 no usable
    result, 64 usage, 65 bad input, 66 input missing, 69 device or model unavailable, 73 output
    folder not usable, 74 disk full, 130/143 interrupted, 128 and more: ended by a signal (continue
    with --resume).
    """

    def load() -> Workflow[PredictOptions]:
        from virnucpro.workflows.predict import predict as run

        return run

    run_command(options, console, load, partial(_start_pool, options))


def _start_pool(options: PredictOptions) -> HelperPool | None:
    """Start the processes of a new run without vectors while this one imports its modules.

    Raises:
        UsageError: ``--workers`` is not a valid number.
    """
    if options.asks_for_vectors or options.resume:
        return None
    from virnucpro.core.helper_pool import HelperPool
    from virnucpro.core.machine import count_workers, read_machine

    machine = read_machine(options.slurm)
    pool = HelperPool(count_workers(options.workers, 0, machine) - 1)
    n_bytes = 0
    with suppress(OSError):  # reported later, when the input is opened
        n_bytes = sum(path.stat().st_size for path in options.input if path.is_file())
    pool.start_helpers(n_bytes, "virnucpro.workflows.predict_rows")
    return pool


@command(RegionsOptions, ConsoleOptions)
def regions(options: RegionsOptions, console: ConsoleOptions) -> None:
    """Find virus-like regions, such as prophages, in the records of a finished run.

    Use it after predict --no-regions, or with another --region-model. It writes regions.tsv, .bed,
    .gff3 and .fasta, tracks.tsv.gz, the notes in predictions.tsv, and the proviruses in viruses.tsv
    and viruses.fasta. No call changes. The input files must still exist.

    Example: virnucpro regions results/

    Exit codes are those of predict.
    """
    regions_kept = "the folder is unchanged: run the same command again"
    kept = regions_kept
    with exit_on_error(lambda: kept):
        with loading(console):
            from virnucpro.workflows.find_proviruses import TABLE, find_regions

        with show_progress(console) as events:
            tally = find_regions(options, events)
        kept = ""
        kinds = f"{tally.n_regions or 0:,}, {tally.n_whole_regions:,} of them complete records"
        table = options.folder / TABLE
        step = next_step(table, (), failed=False) if table.exists() else []
        print_lines([tally.virus_line(), f"virus-like regions: {kinds}", *step], console.quiet)
