"""``virnucpro train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    complete_model,
    refuse_empty,
)
from virnucpro.cli.running import as_command, checked_path, loading, report, watched
from virnucpro.errors import UsageError, VirnucproError

if TYPE_CHECKING:
    from virnucpro.dashboard import EventLog
    from virnucpro.devices import Choice
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
        values = read_config(path, options.keys() - {"config"})
        context.default_map = {
            name: [value] if options[name].multiple and not isinstance(value, list) else value
            for name, value in values.items()
        }
    return path


def train(
    data: Annotated[
        Path,
        typer.Option(
            metavar="MANIFEST",
            help="Table of labelled FASTA files, with the columns path, label (virus or other) and "
            "group; id, weight and kingdom are optional.",
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
            help="Folder for the results of the training.",
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
            help="YAML file of options by name, for example `batch_size: 64`; the command line "
            "wins.",
            callback=_read_config,
            is_eager=True,
            rich_help_panel=FILES,
        ),
    ] = None,
    resume: Resume = False,
    finetune: Annotated[
        bool,
        typer.Option(
            "--finetune",
            help="Training of the encoder together with the head.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    pretrain: Annotated[
        bool,
        typer.Option(
            "--pretrain",
            help="Training of an encoder alone, on masked residues; labels only decide the split.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Encoder to start from: a name; or path, with a separator in it, of a .pt file "
            "or Hugging Face folder.",
            rich_help_panel=MODEL,
            show_default="esm2_virnucpro; with --pretrain a new one",
            callback=refuse_empty,
            autocompletion=complete_model,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Number of layers of a new encoder.", rich_help_panel=MODEL, show_default="6"
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            help="Dimensions of a new encoder.", rich_help_panel=MODEL, show_default="128"
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            help="Number of attention heads of a new encoder.",
            rich_help_panel=MODEL,
            show_default="4",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="Name of the trained encoder, and of its folder in DIR.", rich_help_panel=MODEL
        ),
    ] = "esm2_trained",
    encoding: Annotated[
        Literal["esm2", "onehot", "blosum62", "composition"],
        typer.Option(
            help="Features of a residue; composition: those of the bases alone. predict reads esm2 "
            "only.",
            rich_help_panel=MODEL,
        ),
    ] = "esm2",
    architecture: Annotated[
        Literal["mlp", "cnn", "lstm", "unet"],
        typer.Option(
            help="Network from residues to one vector; mlp: their mean. predict reads mlp only.",
            rich_help_panel=MODEL,
        ),
    ] = "mlp",
    chunk_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Bases per chunk; repeatable, the head is for the first.",
            rich_help_panel=MODEL,
            show_default="500",
        ),
    ] = None,
    hidden: Annotated[
        int, typer.Option(help="Hidden units of the classifier.", rich_help_panel=MODEL)
    ] = 128,
    dropout: Annotated[
        float, typer.Option(help="Dropout of the classifier.", rich_help_panel=MODEL)
    ] = 0.3,
    epochs: Annotated[
        int, typer.Option(help="Number of passes over the training data.", rich_help_panel=_LOOP)
    ] = 10,
    batch_size: Annotated[
        int, typer.Option(help="Frames per batch on each device.", rich_help_panel=_LOOP)
    ] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_LOOP)] = 5e-4,
    scale_lr: Annotated[
        Literal["none", "linear", "sqrt"],
        typer.Option(
            help="Scaling of --lr by effective batch / --batch-size (linear), or by the root of "
            "it (sqrt).",
            rich_help_panel=_LOOP,
        ),
    ] = "none",
    warmup_epochs: Annotated[
        float,
        typer.Option(
            help="Epochs of linear warm-up, followed by cosine decay.", rich_help_panel=_LOOP
        ),
    ] = 0.1,
    grad_accum_steps: Annotated[
        int, typer.Option(help="Batches of each device per optimizer step.", rich_help_panel=_LOOP)
    ] = 1,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of AdamW.", rich_help_panel=_LOOP)
    ] = 0.01,
    class_weights: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="Weights of frames. auto: the same for both labels, the square root of its frames "
            "for a group; none: those of the manifest alone.",
            rich_help_panel=_LOOP,
        ),
    ] = "auto",
    eval_every: Annotated[
        int,
        typer.Option(
            help="Epochs between two evaluations on the validation groups.", rich_help_panel=_LOOP
        ),
    ] = 1,
    early_stopping: Annotated[
        int,
        typer.Option(
            help="Number of evaluations without improvement that end the training; 0: never.",
            rich_help_panel=_LOOP,
        ),
    ] = 0,
    keep_checkpoints: Annotated[
        int,
        typer.Option(
            help="Number of checkpoints of the last epochs, beside that of the best epoch.",
            rich_help_panel=_LOOP,
        ),
    ] = 1,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Seed of the split, the first weights, the order and dropout.",
            rich_help_panel=_LOOP,
        ),
    ] = 0,
    gpus: Gpus = None,
    no_multi_gpu: Annotated[
        bool,
        typer.Option(
            "--no-multi-gpu", help="Training on the first GPU alone.", rich_help_panel=DEVICES
        ),
    ] = False,
    device: DeviceOption = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of processes with --device cpu.", rich_help_panel=DEVICES, show_default="1"
        ),
    ] = None,
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        typer.Option(
            help="Precision of matrix products; auto: bf16 where the device has it.",
            rich_help_panel=DEVICES,
        ),
    ] = "auto",
    num_workers: Annotated[
        int,
        typer.Option(
            help="Number of processes beside each device that make its batches.",
            rich_help_panel=DEVICES,
        ),
    ] = 0,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Table of where the time went, at the end.", rich_help_panel=DEVICES
        ),
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

    - torchrun --nnodes 2 --nproc-per-node 8 ... --no-python virnucpro train ...
    """
    _run(locals())


def _run(given: dict[str, Any]) -> None:
    """One training with what was given on the command line."""
    quiet, verbose, log_file = (given.pop(name) for name in ("quiet", "verbose", "log_file"))
    given.pop("config")
    parent = os.getppid()  # before the imports, which take long
    with exits(_KEPT):
        with loading(quiet), needing("train"):
            from virnucpro.processes import end_with
            from virnucpro.training.ranks import run_on, run_under_torchrun, started_by_torchrun
            from virnucpro.training.request import TrainOptions, resolve
            from virnucpro.training.story import learn

        options = TrainOptions(
            output_dir=checked_path(given.pop("output_dir"), "--output-dir"),
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
            if started is not None:
                end_with(parent)
            training, choice = resolve(options, events)
            prepared = _prepared(training, choice, options, events)
            work = partial(learn, training)
            if started is not None:
                run_under_torchrun(started, choice.kind, prepared, work, events)
                return
            with prepared:
                run_on(choice.devices, work, events)
        report(_outcome(training, options), quiet)


def _outcome(training: Training, options: TrainOptions) -> list[str]:
    """Where the results are, and how to use them."""
    from virnucpro.log import printable

    lines = [f"results: {printable(training.output)}"]
    if training.head.exists():
        is_trained = training.settings.mode == "finetune"
        model = str(training.trained_encoder) if is_trained else options.model
        words = ["virnucpro", "predict", "-i", "contigs.fa", "-o", "results"]
        words += [*(["--model", model] if model else []), "--head", str(training.head)]
        lines += as_command(words)
    return lines


@contextmanager
def _prepared(
    training: Training, choice: Choice, options: TrainOptions, events: EventLog
) -> Iterator[None]:
    """The folder is ours, and holds all that every process of the training reads."""
    from virnucpro.log import announce
    from virnucpro.run.folder import RunDir
    from virnucpro.training.request import describe, open_folder

    with RunDir(training.output).in_use():
        open_folder(training, options, events)
        for line in describe(training, choice):
            announce(line)
        if training.has_stored_vectors:
            _extract(training, options, events)
        yield


def _extract(training: Training, options: TrainOptions, events: EventLog) -> None:
    """Make the vectors that a head is trained on, as ``extract`` makes them; or go on with it."""
    from virnucpro.engine.local import ProcessExecutor
    from virnucpro.labelled.store import Frames
    from virnucpro.pipeline import run
    from virnucpro.resolve import Options, resolve
    from virnucpro.run.folder import RunDir
    from virnucpro.training.features import write_vectors

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
    write_vectors(training.vectors, training.features, Frames.open(training.frames).all.ids)
