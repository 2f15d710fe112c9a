"""Options for ``train`` and ``evaluate``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from virnucpro.core.device_options import DeviceOptions
from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import (
    OptionInfo,
    Panel,
    convert_options,
    count,
    option,
    option_names,
    reject_options,
)
from virnucpro.engine.options import EngineOptions
from virnucpro.models.names import DEFAULT_MODEL
from virnucpro.models.options import Architecture, Encoding, model_option
from virnucpro.viral.options import CallsBy, Head, RegionModel
from virnucpro.workflows.options import FolderOptions, GeneticCode, OutputOptions

Mode = Literal["head", "finetune", "pretrain"]


SHAPE = {"layers": 6, "dim": 128, "heads": 4}  # default for a new encoder


def _file_option(help: str, metavar: str) -> OptionInfo:
    return option(help, Panel.FILES, metavar=metavar, show_default=False)


def _known_prophages(purpose: str) -> OptionInfo:
    return _file_option(
        f"{purpose} this table of known prophages (seq_id, start, end, kind); --data then names "
        "the FASTA files.",
        "TRUTH",
    )


def _split_table(default: str) -> OptionInfo:
    what = "Split the groups by this table, the split.tsv of a training."
    return option(what, Panel.FILES, metavar="TABLE", show_default=default)


def _rate_option(help: str, **more: Any) -> OptionInfo:  # noqa: ANN401 - fields of ``OptionInfo``
    return option(help, Panel.TRAINING, metavar="RATE", min=1e-9, max=1, **more)


def _shape_option(name: str, noun: str) -> OptionInfo:
    what = f"Make a new encoder with this number of {noun}."
    return count(what, Panel.MODEL, min=1, show_default=str(SHAPE[name]))


@dataclass(frozen=True, kw_only=True)
class _LabelledOptions:
    data: Annotated[
        Path,
        _file_option(
            "Read this table of labelled FASTA files, with the columns path, label (virus or "
            "other) and group; id, weight (of training) and kingdom are optional.",
            "MANIFEST",
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class _EvaluatedOptions(_LabelledOptions):
    """Labelled sequences to evaluate on, and how they are cut."""

    split: Annotated[Path | None, _split_table("all records")] = None
    part: Annotated[
        Literal["train", "validation", "test"] | None,
        option("Evaluate on these groups of the split.", Panel.FILES, show_default="test"),
    ] = None  # not "test", so that it is rejected without a split
    lengths: Annotated[
        str, option("Cut fragments of these lengths, in bases.", Panel.SAMPLES, metavar="N,N,...")
    ] = "150,300,500,1000,3000,10000"
    fragments_per_record: Annotated[
        int,
        count(
            "Cut at most N fragments per record and length, without overlap. A longer record is "
            "itself cut to N times the longest length.",
            Panel.SAMPLES,
            min=1,
        ),
    ] = 3
    seed: Annotated[
        int, count("Draw fragments and intervals with this seed.", Panel.SAMPLES, min=0)
    ] = 0
    genetic_code: GeneticCode = 11
    held_out_only: Annotated[
        bool,
        option(
            "Leave out records that the head, its encoder or the scorer was trained on, and all "
            "others of their groups.",
            Panel.MODEL,
        ),
    ] = False
    allow_training_data: Annotated[
        bool, option("Evaluate on training records too; the report counts them.", Panel.MODEL)
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EngineOptions, FolderOptions, _EvaluatedOptions):
    # the options that most users need; --help lists the others in the panel Advanced
    main_options: ClassVar = (
        "data",
        "output_dir",
        "split",
        "part",
        "resume",
        "force",
        "card",
        "lengths",
        "model",
        "head",
        "held_out_only",
        "gpus",
    )

    regions: Annotated[Path | None, _known_prophages("Evaluate regions, not a head, on")] = None
    region_model: RegionModel = None
    genes: Annotated[
        Path | None,
        _file_option("Also count the genes in this GFF3 file of the sequences.", "GFF"),
    ] = None
    model: Annotated[
        str | None, model_option(f"none: the scorer is evaluated; {DEFAULT_MODEL} with --head")
    ] = None
    head: Head = None
    calls: CallsBy = "auto"
    card: Annotated[
        bool,
        option(
            "Write the figures into the card (README.md) of the trained model that --model names.",
            Panel.FILES,
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.held_out_only and self.allow_training_data:
            raise UsageError(
                "--held-out-only and --allow-training-data contradict each other",
                hint="the first leaves out training records, the second keeps them",
            )
        if self.split is None:
            reject_options(self, ("part",), "without --split")
        if not self.fragment_lengths:
            raise UsageError(
                f"--lengths is {printable(self.lengths)!r}; it must be numbers of bases above 0, "
                "each once",
                hint="for example --lengths 300,500,3000",
            )
        if self.regions is None:
            reject_options(
                self,
                ("region_model", "genes"),
                "without --regions",
                "name the known prophages with --regions",
            )
            if self.model is None:
                reject_options(self, ("card",), "without the --model that has the card")
            if self.head:
                reject_options(self, ("card",), "with a --head that is not the model's")
            if not (self.model or self.head) and self.calls != "head":
                engine_names = option_names(EngineOptions) - {"workers"}
                remedy = "name a trained --model, or a --head, to evaluate it"
                reject_options(self, engine_names, "where the scorer calls", remedy)
            if self.calls == "scorer":
                reject_options(self, ("model",), "with --calls scorer, which embeds nothing")
            return
        head_names = option_names(EngineOptions, _EvaluatedOptions)
        head_names -= {"data", "seed", "genetic_code"}
        reject_options(self, head_names | {"model", "head", "calls", "card"}, "with --regions")

    @property
    def for_part(self) -> str:
        """The split part to evaluate on."""
        return self.part or "test"

    @property
    def fragment_lengths(self) -> tuple[int, ...]:
        """Fragment lengths in bases, or empty if they are invalid."""
        words = [word.strip() for word in self.lengths.split(",")]
        lengths = tuple(int(word) for word in words if word.isascii() and word.isdigit())
        is_right = len(set(lengths) - {0}) == len(words)
        return lengths if is_right else ()


@dataclass(frozen=True, kw_only=True)
class _StartOptions(OutputOptions, _LabelledOptions):
    """The start of a training: labelled sequences, mode and encoder."""

    split: Annotated[
        Path | None,
        _split_table("70 % of the groups for training, 15 % validation, 15 % test"),
    ] = None
    features: Annotated[
        Path | None,
        _file_option(
            "Train a head on the vectors in this folder, which `virnucpro extract` made from the "
            "same files; many trainings may share it.",
            "DIR",
        ),
    ] = None
    finetune: Annotated[bool, option("Train the encoder together with the head.", Panel.MODEL)] = (
        False
    )
    pretrain: Annotated[
        bool,
        option(
            "Train an encoder alone, on masked residues; labels only affect the split.", Panel.MODEL
        ),
    ] = False
    model: Annotated[str | None, model_option(f"{DEFAULT_MODEL}; with --pretrain a new one")] = None
    layers: Annotated[int | None, _shape_option("layers", "layers")] = None
    dim: Annotated[int | None, _shape_option("dim", "dimensions")] = None
    heads: Annotated[int | None, _shape_option("heads", "attention heads")] = None

    @property
    def mode(self) -> Mode:
        return "finetune" if self.finetune else "pretrain" if self.pretrain else "head"

    @property
    def has_shape(self) -> bool:
        """True if the options shape a new encoder."""
        return any(getattr(self, name) is not None for name in SHAPE)


@dataclass(frozen=True, kw_only=True)
class _NetworkOptions:
    """The network to train. Its weights depend on all these options."""

    encoding: Annotated[
        Encoding,
        option("Encode residues in this way; composition: use only the bases.", Panel.MODEL),
    ] = "esm2"
    architecture: Annotated[
        Architecture,
        option(
            "Combine residues into one vector by this network; mlp: by their mean.", Panel.MODEL
        ),
    ] = "mlp"
    chunk_size: Annotated[
        tuple[int, ...],
        option(
            "Cut chunks of this length. Repeatable; the head is for the first length.",
            Panel.MODEL,
            metavar="BASES",
            show_default="500",
        ),
    ] = (500,)
    genetic_code: GeneticCode = 11
    lora: Annotated[
        int,
        count(
            "Freeze the encoder and train added matrices of this rank (LoRA), which are merged at "
            "the end. 0: train the encoder itself.",
            Panel.MODEL,
            min=0,
        ),
    ] = 0
    lora_alpha: Annotated[
        float | None,
        option(
            "Scale the LoRA matrices by this number divided by their rank.",
            Panel.MODEL,
            metavar="ALPHA",
            show_default="twice --lora",
        ),
    ] = None
    train_layers: Annotated[
        int | None,
        count(
            "Train only the last N layers of the encoder.",
            Panel.MODEL,
            min=1,
            show_default="all",
        ),
    ] = None
    hidden: Annotated[
        int, count("Give the classifier N hidden units.", Panel.MODEL, min=1, max=65_536)
    ] = 128
    dropout: Annotated[
        float,
        option(
            "Train the classifier with this dropout.", Panel.MODEL, metavar="RATE", min=0, max=0.99
        ),
    ] = 0.3


@dataclass(frozen=True, kw_only=True)
class _LoopOptions:
    """The training loop. Sizes are for one step on one device, unless noted.

    The weights after an epoch depend on all these options except ``LOOP_MAY_DIFFER``.
    """

    epochs: Annotated[int, count("Train for this number of epochs.", Panel.TRAINING, min=1)] = 10
    batch_size: Annotated[
        int, count("Train on batches of N frames on each device.", Panel.TRAINING, min=1)
    ] = 128
    lr: Annotated[float, _rate_option("Set the peak learning rate.")] = 5e-4
    encoder_lr: Annotated[
        float | None,
        _rate_option(
            "Set the peak learning rate of the encoder; --lr is for new weights.",
            show_default="--lr",
        ),
    ] = None
    scale_lr: Annotated[
        Literal["none", "linear", "sqrt"],
        option(
            "Scale --lr by effective batch / --batch-size (linear), or by its square root (sqrt).",
            Panel.TRAINING,
        ),
    ] = "none"
    warmup_epochs: Annotated[
        float,
        option(
            "Raise the learning rate linearly for this number of epochs, then lower it along a "
            "cosine.",
            Panel.TRAINING,
            metavar="EPOCHS",
            min=0,
        ),
    ] = 0.1
    grad_accum_steps: Annotated[
        int, count("Sum the gradients of N batches for each step.", Panel.TRAINING, min=1)
    ] = 1
    weight_decay: Annotated[
        float, option("Set the weight decay of AdamW.", Panel.TRAINING, metavar="RATE", min=0)
    ] = 0.01
    class_weights: Annotated[
        Literal["auto", "recipe", "none"],
        option(
            "Weight frames. auto: both labels equally, each group by the square root of its number "
            "of frames; recipe: groups nearly evenly, both labels equally at each GC, as the "
            "scorer was trained; none: by the weights in the manifest.",
            Panel.TRAINING,
        ),
    ] = "auto"
    eval_every: Annotated[int, count("Validate after every N epochs.", Panel.TRAINING, min=1)] = 1
    best_by: Annotated[
        Literal["auroc", "f1", "loss"],
        option(
            "Keep the epoch that is best by this measure on the validation frames; --pretrain "
            "always uses the loss.",
            Panel.TRAINING,
        ),
    ] = "auroc"
    early_stopping: Annotated[
        int, count("Stop after N validations without improvement; 0: never.", Panel.TRAINING, min=0)
    ] = 0
    keep_checkpoints: Annotated[
        int,
        count(
            "Keep the checkpoints of the last N epochs and of the best epoch.",
            Panel.TRAINING,
            min=1,
        ),
    ] = 1
    seed: Annotated[
        int,
        count(
            "Draw the split, initial weights, order and dropout with this seed.",
            Panel.TRAINING,
            min=0,
        ),
    ] = 0
    fsdp: Annotated[
        bool,
        option(
            "Shard weights, gradients and moments over the devices (FSDP), for an encoder "
            "that is too large for one; implies --gradient-checkpointing.",
            Panel.DEVICES,
        ),
    ] = False
    num_workers: Annotated[
        int,
        count(
            "Make batches ahead in N threads per device, while the device computes.",
            Panel.DEVICES,
            min=0,
        ),
    ] = 0

    def effective_batch(self, world_size: int) -> int:
        """Return frames per step on all devices."""
        return self.batch_size * world_size * self.grad_accum_steps

    def scaled_lr(self, world_size: int) -> float:
        """Return the learning rate for the effective batch.

        Linear: Goyal et al. 2017. Square root: Krizhevsky 2014.
        """
        ratio = world_size * self.grad_accum_steps
        factor = {"none": 1.0, "linear": float(ratio), "sqrt": math.sqrt(ratio)}[self.scale_lr]
        return self.lr * factor


# May differ on resume. Effective batch and peak rate must not differ, and epochs may only rise.
LOOP_MAY_DIFFER = (
    "num_workers",
    "early_stopping",
    "keep_checkpoints",
    "fsdp",
    "epochs",
    "batch_size",
    "grad_accum_steps",
    "lr",
    "scale_lr",
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(DeviceOptions, _LoopOptions, _NetworkOptions, _StartOptions):
    # the options that most users need; --help lists the others in the panel Advanced
    main_options: ClassVar = (
        "data",
        "output_dir",
        "split",
        "resume",
        "model",
        "finetune",
        "pretrain",
        "check",
        "epochs",
        "batch_size",
        "lr",
        "gpus",
    )

    regions: Annotated[Path | None, _known_prophages("Learn regions, not a head, from")] = None
    workers: Annotated[
        int | None,
        count("Start N processes with --device cpu.", Panel.DEVICES, show_default="1"),
    ] = None
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        option(
            "Compute matrix products in this precision; auto: bf16 where it is faster than fp32, "
            "else fp16 (with scaled losses) where it is fast, else fp32.",
            Panel.DEVICES,
        ),
    ] = "auto"
    check: Annotated[
        bool,
        option(
            "Print frames, groups, missing data, and the time, memory and disk that the training "
            "needs, without starting it.",
            Panel.TRAINING,
        ),
    ] = False
    seeds: Annotated[
        int,
        count(
            "Train N times, with --seed and the seeds after it, to show the spread of the gain "
            "(gain.tsv); the head of --seed is kept.",
            Panel.TRAINING,
            min=1,
        ),
    ] = 1
    gradient_checkpointing: Annotated[
        bool,
        option(
            "Keep only the inputs of layers and recompute the rest for the gradient: less memory, "
            "one more forward pass.",
            Panel.DEVICES,
        ),
    ] = False
    multi_gpu: Annotated[
        bool,
        option("Train on all GPUs, or only on the first.", Panel.DEVICES),
    ] = True
    profile: Annotated[bool, option("Print the time per stage at the end.", Panel.DEVICES)] = False
    argv: tuple[str, ...] = ()  # the command, for run.json and the log

    def __post_init__(self) -> None:
        if self.regions is not None:
            unread = option_names(TrainOptions) - {"regions", "data", "output_dir", "seed"}
            reject_options(self, unread, "with --regions, which trains no network")
        self._check_network()
        sizes = self.chunk_size
        if min(sizes, default=0) < 30 or len(set(sizes)) < len(sizes):
            hint = "give each size once, 30 bases or more"
            raise UsageError(f"--chunk-size is {sizes}", hint=hint)
        if self.warmup_epochs >= self.epochs:
            hint = "give fewer than --epochs"
            raise UsageError(f"--warmup-epochs is {self.warmup_epochs}", hint=hint)
        if not self.multi_gpu:
            reject_options(self, ("gpus",), "with --no-multi-gpu")
        if self.mode != "finetune":
            reject_options(self, ("lora", "train_layers", "encoder_lr"), "without --finetune")
        if not self.lora:
            reject_options(self, ("lora_alpha",), "without --lora")
        match self.mode:
            case "head":
                encoder_names = ("gradient_checkpointing", "fsdp", *SHAPE)
                reject_options(
                    self, encoder_names, "without --finetune or --pretrain, which train an encoder"
                )
                if self.encoding == "esm2" and len(sizes) > 1:
                    raise UsageError(
                        "a head on stored vectors has one --chunk-size",
                        hint="train it with --finetune for several",
                    )
                if (self.encoding, self.architecture) != ("esm2", "mlp"):
                    reject_options(self, ("features",), "without the mean vectors of an ESM-2")
            case "finetune":
                reject_options(self, ("features",), "with --finetune, which changes the vectors")
            case "pretrain":
                reject_options(self, ("features",), "with --pretrain, which reads residues")
                head_names = (
                    "hidden",
                    "dropout",
                    "class_weights",
                    "best_by",
                    "architecture",
                    "seeds",
                )
                reject_options(self, head_names, "with --pretrain, which trains an encoder alone")

    def _check_network(self) -> None:
        """Check the network options.

        Raises:
            UsageError: network options contradict each other.
        """
        if self.finetune:
            first = "pretrain first, then fine-tune the result: --finetune --model DIR"
            reject_options(self, ("pretrain",), "with --finetune", first)
        if self.encoding != "esm2":
            esm2_names = ("finetune", "pretrain", "model", *SHAPE)
            reject_options(
                self, esm2_names, f"with --encoding {self.encoding}, which uses no ESM-2"
            )
        if self.encoding == "composition":
            reject_options(
                self, ("architecture",), "with --encoding composition, which has no residues"
            )
        if self.model is not None:
            reject_options(self, SHAPE, "with --model, which has a shape")
        if self.has_shape:
            reject_options(
                self, ("lora", "train_layers"), "for a new encoder, which has random weights"
            )

    @property
    def network_options(self) -> dict[str, object]:
        """The network options, by name. A resume must agree."""
        return asdict(convert_options(self, _NetworkOptions))

    @property
    def loop_options(self) -> dict[str, object]:
        """The loop options, by name. A resume must agree, except in ``LOOP_MAY_DIFFER``."""
        return {
            **asdict(convert_options(self, _LoopOptions)),
            "mode": self.mode,
            "precision": self.precision,
        }


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    output: Annotated[
        Path, option("Write the manifest here.", Panel.FILES, "--output", "-o", metavar="FILE")
    ]
    virus: Annotated[
        tuple[Path, ...],
        _file_option(
            "Take this FASTA file, or those in this folder, as viral. Repeatable.", "FILE"
        ),
    ] = ()
    other: Annotated[
        tuple[Path, ...],
        _file_option(
            "Take this FASTA file, or those in this folder, as not viral. Repeatable.", "FILE"
        ),
    ] = ()
    table: Annotated[
        Path | None,
        _file_option(
            "Label the records of --fasta by this table, with the columns accession; label or "
            "superkingdom; family, genus or species; optionally kingdom.",
            "TSV",
        ),
    ] = None
    fasta: Annotated[
        tuple[Path, ...],
        _file_option("Look for the accessions of --table in this file. Repeatable.", "FILE"),
    ] = ()
    group_by: Annotated[
        str | None,
        option(
            "Group the records of --table by this column.",
            Panel.SAMPLES,
            metavar="COLUMN",
            show_default="family, else genus, else species",
        ),
    ] = None
    force: Annotated[bool, option("Replace an existing manifest.", Panel.FILES)] = False

    def __post_init__(self) -> None:
        is_table = self.table is not None
        if bool(self.virus or self.other) == is_table or bool(self.fasta) != is_table:
            raise UsageError(
                "a manifest needs folders for the labels, or a table and its FASTA files",
                hint="give --virus DIR --other DIR, or --table TSV --fasta FILE",
            )
        if not is_table:
            reject_options(self, ("group_by",), "without --table")
