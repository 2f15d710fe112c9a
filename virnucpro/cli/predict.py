"""The commands that write a run folder: ``predict``, ``extract``, ``work`` and ``regions``."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.cli.console import gpu_steps, loading, next_step, planned_steps, report, watched
from virnucpro.cli.exit_codes import Finished, exits, needing
from virnucpro.cli.typer_dataclass import ConsoleOptions, command
from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import carry
from virnucpro.core.plugins import find_plugins
from virnucpro.engine.options import WorkOptions
from virnucpro.workflows.options import ExtractOptions, PredictOptions, RegionsOptions, RunOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.core.helper_pool import Pool
    from virnucpro.engine.base import Executor
    from virnucpro.store.progress_log import ShardFigures

_RUN_KEPT = "what was finished is kept: run the same command with --resume"
_FORCE_KEPT = (
    "if the earlier results are still there, run the same command again; if they are gone, with "
    "--resume in place of --force, which would delete what was finished"
)
_WORK_KEPT = "finished files are kept: run the same command again to do the rest"
_REGIONS_KEPT = "the folder is unchanged: run the same command again"
_PLUGINS = "virnucpro.executors"  # entry points: classes, called with the options and devices


@command(PredictOptions, ConsoleOptions)
def predict(options: PredictOptions, console: ConsoleOptions) -> None:
    """Find viruses in FASTA or FASTQ, and write viruses.tsv, viruses.fasta and predictions.tsv.

    A fast scorer calls each record virus or other. With --model cnn_virnucpro, a network also
    reads the records that may be viral by their score, and both call these together: slower, and
    better for unknown families in records of 300 to 1,000 bases; it may lose known ones. With
    another --model, or any device option except --workers, ESM-2 embeds every translated frame and
    writes vectors to features.h5. The built-in ESM-2 changes no call. Your own head does, where its
    training showed a gain.

    Example: virnucpro predict -i contigs.fa -o results/

    More unknown viruses in short records, on all GPUs or else on the CPU: virnucpro predict
    -i contigs.fa -o results/ --model cnn_virnucpro

    Calls and ESM-2 vectors: virnucpro predict -i contigs.fa -o results/ --gpus 0,1,2

    Many files, each with its own tables: virnucpro predict -i assemblies/ -i samples.tsv
    -o results/ --per-file

    With your own model and head: virnucpro predict -i contigs.fa -o results/
    --model training/model --gpus 0,1,2

    A large model, only on records that may be viral, with a cache for later runs: virnucpro
    predict -i contigs.fa -o results/ --model esm2_t33_650M_UR50D --embed viral --cache vectors/

    Exit codes: 0 all records accounted for, 2 some failed (see failed_files.txt), 1 no usable
    result, 64 usage, 65 bad input, 66 input missing, 69 device or model unavailable, 73 output
    folder not usable, 74 disk full, 130/143 interrupted (continue with --resume).
    """
    _run(options, console)


@command(ExtractOptions, ConsoleOptions)
def extract(options: ExtractOptions, console: ConsoleOptions) -> None:
    """Embed FASTA or FASTQ with ESM-2, and write features.h5 and records.tsv.

    Proteins are embedded as they are; nucleotides are chunked and translated as in predict.
    Exit codes are those of predict.

    Example: virnucpro extract -i proteins.faa -o features/ --model esm2_t33_650M_UR50D

    Many files: virnucpro extract -i proteomes/ -i samples.tsv -o features/

    With half the disk space, and as Parquet too: virnucpro extract -i contigs.fa -o features/
    --store bfloat16 --format parquet
    """
    _run(options, console)


def _executor_on(options: RunOptions) -> Callable[[Sequence[str]], Executor]:
    """Return a function that makes the requested executor from the devices of this machine.

    Raises:
        UsageError: no executor has this name.
        UnavailableError: its package is missing or broken.
    """
    if options.executor == "local":
        from virnucpro.engine.local import ProcessExecutor

        return ProcessExecutor
    if options.executor != "parsl":
        plugins = find_plugins(_PLUGINS, type)
        if options.executor not in plugins:
            raise UsageError(
                f"there is no executor {printable(options.executor)}",
                hint=f"the executors are {', '.join(('local', 'parsl', *sorted(plugins)))}",
            )
        return partial(plugins[options.executor](), options)
    with needing("cluster"):
        from virnucpro.engine.parsl import ParslExecutor
    # Parsl starts its own programs by name; they are in the folder of this interpreter
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    cache = options.cache and options.cache.absolute()
    work = carry(options, WorkOptions, folder=options.output_dir.absolute(), cache=cache)
    executor = ParslExecutor(options.executor_config, work, work_in_block)
    return lambda _: executor


def _begun_pool(options: RunOptions) -> Pool | None:
    """Start the processes of a new run without vectors while this one imports its modules.

    Raises:
        UsageError: ``--workers`` is not a valid number.
    """
    from virnucpro.core.helper_pool import Pool
    from virnucpro.models.devices import count_workers

    if options.asks_for_vectors or options.resume:
        return None
    pool, n_bytes = Pool(count_workers(options.workers, model_bytes=0) - 1), 0
    with suppress(OSError):  # reported later, when the input is opened
        n_bytes = sum(path.stat().st_size for path in options.input if path.is_file())
    pool.begin(n_bytes, "virnucpro.workflows.table_tasks")
    return pool


def _run(options: RunOptions, console: ConsoleOptions) -> None:
    with exits(lambda: _FORCE_KEPT if options.force else _RUN_KEPT):
        with loading(console):
            pool = _begun_pool(options)
            from virnucpro.core.events import STAGES
            from virnucpro.workflows.pipeline import execute

            executor_on = _executor_on(options)
            if isinstance(options, ExtractOptions) and options.format == "parquet":
                with needing("arrow"):
                    import pyarrow.parquet  # noqa: F401 - fail before anything is embedded
        with pool or nullcontext(), watched(console) as events:
            summary = execute(options, events, executor_on, pool)
    with exits():
        if summary.n_slices is None:
            table = summary.first_table(options.output_dir, options.command)
            step = next_step(table, sys.argv[1:], failed=summary.exit_code != 0)
        else:
            step = planned_steps(options, summary.n_slices, sys.argv[1:])
        offer = [] if STAGES[1] in summary.stages else gpu_steps(options, sys.argv[1:])
        report([*summary.lines(options.output_dir), *offer, *step], console.quiet)
    raise Finished(summary.exit_code)


def work_in_block(options: WorkOptions, indices: tuple[int, ...]) -> list[ShardFigures]:
    """Embed some shards of a run, in a process that a scheduler started on another machine.

    The process ends with its parent; Parsl's own workers do not.
    """
    from virnucpro.core.child_process import end_with
    from virnucpro.workflows import work_share as story

    end_with(os.getppid())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return story.work_for_run(replace(options, cuda_visible_devices=visible), indices)


@command(WorkOptions, ConsoleOptions)
def work(options: WorkOptions, console: ConsoleOptions) -> None:
    """Do one part of a planned run; any number of parts may run at once, on any machines.

    DIR was planned with --plan-only and is on a file system that all machines share. A part reads
    and translates its slices of the input, embeds them, and writes their table rows. Afterwards,
    the planned command with --resume joins all parts and does the missing work.

    Example: virnucpro work results/ --part 3/16

    In a SLURM array each task takes its own part: sbatch --array=1-16 --gres=gpu:1
    --wrap "virnucpro work results/"

    In a PBS array: virnucpro work results/ --part 16

    Exit codes are those of predict.
    """
    with exits(lambda: _WORK_KEPT):
        with loading(console):
            from virnucpro.workflows import work_share as story

        with watched(console) as events:
            part = story.work(replace(options, array=dict(os.environ)), events)
    with exits():
        report(part.lines, console.quiet)
    raise Finished(part.exit_code)


@command(RegionsOptions, ConsoleOptions)
def regions(options: RegionsOptions, console: ConsoleOptions) -> None:
    """Find virus-like regions, such as prophages, in the records of a finished run.

    Use it after predict --no-regions, or with another --region-model. It writes regions.tsv, .bed,
    .gff3 and .fasta, tracks.tsv.gz, the notes in predictions.tsv, and the proviruses in viruses.tsv
    and viruses.fasta. No call changes. The input files must still be in place.

    Example: virnucpro regions results/

    Exit codes are those of predict.
    """
    kept = _REGIONS_KEPT
    with exits(lambda: kept):
        with loading(console):
            from virnucpro.workflows.find_proviruses import TABLE, find_regions

        with watched(console) as events:
            tally = find_regions(options, events)
        kept = ""
        kinds = f"{tally.n_regions or 0:,}, {tally.n_whole_regions:,} of them whole records"
        table = options.folder / TABLE
        step = next_step(table, (), failed=False) if table.exists() else []
        report([tally.virus_line, f"virus-like regions: {kinds}", *step], console.quiet)
