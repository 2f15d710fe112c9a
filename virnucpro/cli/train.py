"""``virnucpro train``."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from virnucpro.cli.exits import exits, needing
from virnucpro.cli.options import (
    DEVICES,
    FILES,
    MODEL,
    DeviceOption,
    Gpus,
    LogFile,
    Quiet,
    Resume,
    Verbose,
)
from virnucpro.cli.running import checked_path, watched
from virnucpro.errors import UsageError, VirnucproError

if TYPE_CHECKING:
    from virnucpro.dashboard import EventLog
    from virnucpro.training.request import TrainOptions
    from virnucpro.training.story import Training

_LOOP = "Training"
_KEPT = "finished epochs are kept: go on with --resume"


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Options of a file become defaults, so that those on the command line win."""
    if path is None:
        return None
    with exits(), needing("train"):
        from virnucpro.training.config_file import read_config

        options = {option.name: option for option in context.command.params if option.name}
        found = read_config(path, options.keys() - {"config"})
        context.default_map = {
            name: [value] if options[name].multiple and not isinstance(value, list) else value
            for name, value in found.items()
        }
    return path


def train(
    data: Annotated[
        Path,
        typer.Option(
            metavar="MANIFEST",
            help="Table of labelled FASTA: columns path, label (virus or other), group, and if "
            "you like id, weight, kingdom.",
            rich_help_panel=FILES,
            show_default=False,
        ),
    ],
    output_dir: Annotated[
        str,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            help="Folder of the training.",
            rich_help_panel=FILES,
            show_default=False,
        ),
    ],
    split: Annotated[
        Path | None,
        typer.Option(
            help="Table of groups and their splits, as an earlier training wrote it.",
            rich_help_panel=FILES,
            show_default="70 % of the groups train, 15 % validation, 15 % test",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="YAML",
            help="These options by name, for example `batch_size: 64`; the command line wins.",
            callback=_read_config,
            is_eager=True,
            rich_help_panel=FILES,
        ),
    ] = None,
    resume: Resume = False,
    finetune: Annotated[
        bool,
        typer.Option("--finetune", help="Train the encoder too.", rich_help_panel=MODEL),
    ] = False,
    pretrain: Annotated[
        bool,
        typer.Option(
            "--pretrain",
            help="Train an encoder alone, on masked residues; labels only split.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Encoder to start from: a name, .pt file, or Hugging Face folder.",
            rich_help_panel=MODEL,
            show_default="esm2_virnucpro; with --pretrain a new one",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of a new encoder.", rich_help_panel=MODEL, show_default="6")
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Of a new encoder.", rich_help_panel=MODEL, show_default="128"),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Of a new encoder.", rich_help_panel=MODEL, show_default="4")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Folder of the encoder in DIR, and its name.", rich_help_panel=MODEL)
    ] = "esm2_trained",
    encoding: Annotated[
        Literal["esm2", "onehot", "blosum62", "composition"],
        typer.Option(
            help="What is known of a residue; composition: only the bases. predict uses esm2.",
            rich_help_panel=MODEL,
        ),
    ] = "esm2",
    architecture: Annotated[
        Literal["mlp", "cnn", "lstm", "unet"],
        typer.Option(
            help="How residues become one vector; mlp: their mean. predict uses mlp.",
            rich_help_panel=MODEL,
        ),
    ] = "mlp",
    chunk_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Bases per chunk. Repeatable; the head is for the first.",
            rich_help_panel=MODEL,
            show_default="500",
        ),
    ] = None,
    hidden: Annotated[
        int, typer.Option(help="Width of the classifier.", rich_help_panel=MODEL)
    ] = 128,
    dropout: Annotated[float, typer.Option(help="In the classifier.", rich_help_panel=MODEL)] = 0.3,
    epochs: Annotated[int, typer.Option(help="Passes over the data.", rich_help_panel=_LOOP)] = 10,
    batch_size: Annotated[
        int, typer.Option(help="Frames on each device.", rich_help_panel=_LOOP)
    ] = 128,
    lr: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=_LOOP)] = 5e-4,
    scale_lr: Annotated[
        Literal["none", "linear", "sqrt"],
        typer.Option(
            help="Times effective batch / --batch-size (linear), or times the root of it.",
            rich_help_panel=_LOOP,
        ),
    ] = "none",
    warmup_epochs: Annotated[
        float,
        typer.Option(
            help="In which the rate rises; then it falls as a cosine.", rich_help_panel=_LOOP
        ),
    ] = 0.1,
    grad_accum_steps: Annotated[
        int, typer.Option(help="Batches of each device in one step.", rich_help_panel=_LOOP)
    ] = 1,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.", rich_help_panel=_LOOP)] = 0.01,
    class_weights: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="auto: both labels weigh the same, a group by the root of its frames; none: only "
            "the weights of the manifest.",
            rich_help_panel=_LOOP,
        ),
    ] = "auto",
    eval_every: Annotated[
        int, typer.Option(help="Epochs between two looks at validation.", rich_help_panel=_LOOP)
    ] = 1,
    early_stopping: Annotated[
        int,
        typer.Option(
            help="End after so many looks without a better one; 0: never.", rich_help_panel=_LOOP
        ),
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Of the split, first weights, order and dropout.", rich_help_panel=_LOOP
        ),
    ] = 0,
    gpus: Gpus = None,
    no_multi_gpu: Annotated[
        bool, typer.Option("--no-multi-gpu", help="Only the first GPU.", rich_help_panel=DEVICES)
    ] = False,
    device: DeviceOption = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes with --device cpu.", rich_help_panel=DEVICES, show_default="1"
        ),
    ] = None,
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        typer.Option(help="auto: bf16 where the device has it.", rich_help_panel=DEVICES),
    ] = "auto",
    num_workers: Annotated[
        int,
        typer.Option(
            help="Processes beside each device that make its batches.", rich_help_panel=DEVICES
        ),
    ] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where the time goes.", rich_help_panel=DEVICES)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Train a head for an encoder, fine-tune both, or pretrain an encoder.

    Records are cut and translated as predict does it; whole groups (viral families, host genera)
    are held out. DIR gets split.tsv, training.json, checkpoints/, tensorboard/, held_out.tsv, and
    what predict takes: head.safetensors, and the encoder if it was trained.

    A head on an encoder that stays as it is, and its use:

    - virnucpro train --data manifest.tsv -o model/

    - virnucpro predict -i contigs.fa -o results/ --head model/head.safetensors

    Encoder and head together:

    - virnucpro train --data manifest.tsv -o model/ --finetune --model esm2_t12_35M_UR50D

    - virnucpro predict -i contigs.fa -o results/ --model model/esm2_trained
    --head model/head.safetensors

    All GPUs of this machine are used, with a process for each; for several machines:

    - torchrun --nnodes 2 --nproc-per-node 8 ... -m virnucpro train ...
    """
    _run(locals())


def _run(given: dict[str, Any]) -> None:
    """One training with what was given on the command line."""
    quiet, verbose, log_file = (given.pop(name) for name in ("quiet", "verbose", "log_file"))
    given.pop("config")
    with exits(_KEPT):
        with needing("train"):
            from virnucpro.training.ranks import run_on, run_under_torchrun, started_by_torchrun
            from virnucpro.training.request import TrainOptions, describe, open_folder, resolve
            from virnucpro.training.story import learn
        from virnucpro.log import announce
        from virnucpro.rundir import RunDir

        output = checked_path(given.pop("output_dir"), "--output-dir")
        options = TrainOptions(
            output_dir=output,
            chunk_size=given.pop("chunk_size") or [500],
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            **given,
        )
        started = started_by_torchrun(os.environ)
        if started and (options.gpus or options.workers or options.no_multi_gpu):
            raise UsageError(
                "--gpus, --workers and --no-multi-gpu do not go with torchrun",
                hint="torchrun chooses the devices: see --nproc-per-node and CUDA_VISIBLE_DEVICES",
            )
        is_first = started is None or started.rank == 0
        with watched(quiet or not is_first, verbose, log_file) as events:
            training, choice = resolve(options, events)
            if not is_first:
                assert started is not None
                run_under_torchrun(started, choice.kind, partial(learn, training), events)
                return
            with RunDir(output).in_use():
                open_folder(training, options)
                for line in describe(training, choice):
                    announce(line)
                if training.has_stored_vectors:
                    _extract(training, options, events)
                if started is None:
                    run_on(choice.devices, partial(learn, training), events)
                else:
                    run_under_torchrun(started, choice.kind, partial(learn, training), events)


def _extract(training: Training, options: TrainOptions, events: EventLog) -> None:
    """Make the vectors that a head is trained on, as ``extract`` makes them; or go on with it."""
    from virnucpro.engine.processes import ProcessExecutor
    from virnucpro.pipeline import run
    from virnucpro.request import Options, resolve
    from virnucpro.rundir import RunDir
    from virnucpro.training.features import write_fasta

    write_fasta(training.fasta, training.data)
    config, _ = resolve(
        Options(
            command="extract",
            input=[training.fasta],
            output_dir=training.features,
            input_type="nucleotide",
            chunk_size=training.chunk_sizes[0],
            min_length=0,
            model=str(training.encoder),
            gpus=options.gpus,
            device=options.device,
            workers=options.workers,
            esm_batch_size="auto",
            precision=options.precision,
            worker_timeout=300.0,
            resume=RunDir(training.features).read_manifest() is not None,
            force=False,
            keep_intermediate=False,
            argv=tuple(sys.argv),
            cuda_visible_devices=options.cuda_visible_devices,
        ),
        events,
    )
    devices = config.resources.devices
    executor = ProcessExecutor(devices[:1] if options.no_multi_gpu else devices)
    summary = run(config, None, executor, events)
    if summary.exit_code:
        raise VirnucproError(
            f"not every frame has a vector: see {training.features}",
            hint="run the same command again with --resume",
        )
