"""The options of the commands: name, type, default and help text of each, in this one place.

A class holds the options of one command, or of a duty that several share. ``cli.command`` makes the
command line of it, ``api`` and the tests make it themselves, and what is asked for is read from it
where it is used. A field without ``_option`` is on no command line: whoever calls fills it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from virnucpro.config import Command, FeatureFormat, InputType, Pooling
from virnucpro.encoders.published import EMBEDDED, NAMES
from virnucpro.errors import UsageError
from virnucpro.option_fields import flag, given_of, names_of, refuse

Encoding = Literal["esm2", "onehot", "blosum62", "composition"]
Architecture = Literal["mlp", "cnn", "lstm", "unet"]
Mode = Literal["head", "finetune", "pretrain"]
Calls = Literal["auto", "scorer", "head"]

FILES, MODEL, CALLS, DEVICES = "Files", "Model", "Calls", "Devices"
CLUSTER = "Several machines"
SAMPLES, LOOP = "Samples", "Training"
_SHEET = "columns path, label (virus or other) and group"


def _option(help: str, panel: str | None = None, *names: str, **more: Any) -> Any:  # noqa: ANN401
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def complete_model(incomplete: str) -> list[str]:
    """The names of models that begin so."""
    return [name for name in NAMES if name.startswith(incomplete)]


def _model(default: str) -> Any:  # noqa: ANN401 - as typer has it
    return _option(
        "Embed with this model: a name (see `virnucpro models list`), or the path, with a "
        "separator "
        "in it, of a fair-esm .pt file or Hugging Face folder: ./model.pt.",
        MODEL,
        metavar="NAME|PATH",
        show_default=default,
        autocompletion=complete_model,
    )


Head = Annotated[
    Path | None,
    _option(
        "Call with this classifier head (safetensors), made for the model by `virnucpro train`.",
        MODEL,
        metavar="PATH",
        show_default="none: the scorer calls",
    ),
]
CallsBy = Annotated[
    Calls,
    _option(
        "Let the scorer call alone, or the head alone. auto: the scorer, joined with the head of "
        "--head where it was joined in training.",
        CALLS,
    ),
]


RegionModel = Annotated[
    Path | None,
    _option(
        "Find regions with this model (regions.json), made by `virnucpro train --regions`.",
        CALLS,
        metavar="PATH",
        show_default="that of VirNucPro",
    ),
]


def _file(help: str, metavar: str) -> Any:  # noqa: ANN401 - as typer has it
    return _option(help, FILES, metavar=metavar, show_default=False)


def _folder(help: str) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Argument(metavar="DIR", help=help)


def _chunk_size(help: str, default: str) -> Any:  # noqa: ANN401 - as typer has it
    return _option(help, MODEL, metavar="BASES", show_default=default)


def _count(help: str, panel: str | None = None, **more: Any) -> Any:  # noqa: ANN401 - as typer has it
    return _option(help, panel, metavar="N", **more)


def _known_prophages(purpose: str) -> Any:  # noqa: ANN401 - as typer has it
    return _file(
        f"{purpose} this table of known prophages (seq_id, start, end, kind), in place of a head; "
        "--data then names the FASTA files.",
        "TRUTH",
    )


GeneticCode = Annotated[
    int, _count("Translate with this genetic code (NCBI number); 1 and 11 translate alike.", FILES)
]


# Shared by commands


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """The output of a command on the console; options of the command line alone."""

    quiet: Annotated[
        bool, _option("Show only warnings and the summary.", None, "--quiet", "-q")
    ] = False
    verbose: Annotated[
        bool, _option("Show the whole log on the console.", None, "--verbose", "-v")
    ] = False
    log_file: Annotated[
        Path | None, _option("Write the log to this file too.", metavar="FILE", show_default=False)
    ] = None

    def __post_init__(self) -> None:
        if self.quiet:
            refuse(self, ("verbose",), "with --quiet")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """A folder for results, in which a killed command goes on."""

    output_dir: Annotated[
        Path,
        _option(
            "Write results, the log, and what a resume needs to this folder.",
            FILES,
            "--output-dir",
            "-o",
            metavar="DIR",
            show_default=False,
        ),
    ]
    resume: Annotated[bool, _option("Resume the run in DIR; finished work is kept.", FILES)] = False


@dataclass(frozen=True, kw_only=True)
class FolderOptions(OutputOptions):
    """A run folder."""

    force: Annotated[bool, _option("Delete the results in DIR and start anew.", FILES)] = False
    keep_intermediate: Annotated[
        bool, _option("Keep chunks.fa and shards/ after the run.", FILES)
    ] = False
    argv: tuple[str, ...] = ()  # the command, for run.json and the log


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """A device, and the precision of matrix products on it."""

    gpus: Annotated[
        str | None,
        _option(
            "Use these of the visible GPUs: numbers (0,1,2) or UUIDs.",
            DEVICES,
            metavar="all|LIST",
            show_default="all",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cuda", "cpu", "mps"], _option("Use this kind of device.", DEVICES)
    ] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        _option(
            "Compute matrix products in this precision; auto: bf16 where the device has it, fp16 "
            "on "
            "older GPUs with tensor cores, else fp32.",
            DEVICES,
        ),
    ] = "auto"
    cuda_visible_devices: str | None = None  # the variable of the environment


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(ComputeOptions):
    """The devices of a run."""

    workers: Annotated[
        int | None,
        _count(
            "Start this number of processes, one core each. They embed with --device cpu, score "
            "where "
            "nothing is embedded, and make shards and tables with --plan-only, --no-embed or "
            "--executor parsl.",
            DEVICES,
            show_default="as many as cores and memory allow",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """The engine that makes vectors."""

    esm_batch_size: Annotated[
        str,
        _option(
            "Embed this number of tokens per batch; a longer sequence gets a batch of its own. "
            "auto: "
            "chosen by model, device and free memory.",
            DEVICES,
            metavar="auto|TOKENS",
        ),
    ] = "auto"
    worker_timeout: Annotated[
        float,
        _option(
            "Replace a worker that is silent for longer than this, beyond the time its batch "
            "needs.",
            DEVICES,
            metavar="SECONDS",
            min=1,
            max=86_400,
        ),
    ] = 300.0
    converted: Path | None = None  # folder of converted models, if not the usual one


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """The machines that embed the shards of a run."""

    plan_only: Annotated[
        bool,
        _option(
            "Stop after the plan; `virnucpro work DIR` then embeds, on any number of machines.",
            CLUSTER,
        ),
    ] = False
    no_embed: Annotated[
        bool,
        _option(
            "Stop with an error where vectors are missing, instead of embedding here; needs "
            "--resume.",
            CLUSTER,
        ),
    ] = False

    executor: Annotated[
        Literal["local", "parsl"],
        _option(
            "Embed on the devices of this machine, or on nodes that Parsl gets from a scheduler.",
            CLUSTER,
        ),
    ] = "local"
    executor_config: Annotated[
        Path | None,
        _option(
            "Describe Parsl's nodes by this YAML file: provider (local, slurm), max_blocks, "
            "walltime, ...",
            CLUSTER,
            metavar="FILE",
            show_default="one block on this machine",
        ),
    ] = None

    @property
    def embeds_here(self) -> bool:
        return not (self.plan_only or self.no_embed) and self.executor == "local"


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Sequences of the user's, and how they are read."""

    input: Annotated[
        tuple[Path, ...],
        _option(
            "Read this FASTA file (plain, gz, bz2, xz or zst), folder, sample sheet (.tsv or .csv "
            "with "
            "the columns sample and path), or standard input (-). Repeatable.",
            FILES,
            "--input",
            "-i",
            metavar="FILE",
            show_default=False,
        ),
    ]
    input_type: Annotated[
        Literal["auto", "nucleotide", "protein"],
        _option(
            "Take the sequences for nucleotide or protein; auto: by their letters.",
            FILES,
            metavar="TYPE",
        ),
    ] = "auto"
    min_length: Annotated[
        int,
        _option(
            "Give records shorter than this (proteins: in residues) the status too_short. The "
            "scorer "
            "needs at least 150 bases, or 50 residues.",
            FILES,
            metavar="BASES",
            min=0,
        ),
    ] = 0
    genetic_code: GeneticCode = 11
    per_file: Annotated[
        bool, _option("Write tables of each input file too, in DIR/samples/NAME/.", FILES)
    ] = False
    strict: Annotated[
        bool,
        _option(
            "Stop at the first unreadable input file; default: skip it.",
            FILES,
        ),
    ] = False
    rename_duplicates: Annotated[
        bool,
        _option(
            "Number ids that occur twice in a file (id, id_2, ...); default: skip the file.",
            FILES,
        ),
    ] = False

    @property
    def known_type(self) -> InputType | None:
        """The type that the user named; None if the letters of the input decide."""
        return None if self.input_type == "auto" else self.input_type


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A language model, and the chunks that it reads."""

    chunk_size: Annotated[
        int | None, _chunk_size("Cut nucleotides into chunks of this length.", "500, or the head's")
    ] = None
    model: Annotated[str | None, _model("esm2_virnucpro, which is part of this program")] = None

    @property
    def model_name(self) -> str:
        return EMBEDDED if self.model is None else self.model


Preset = Literal["sensitive", "default", "conservative"]
# the largest share of cellular records, of every length, that a preset calls viral
FALSE_POSITIVES: Mapping[Preset, float] = {
    "sensitive": 0.10,
    "default": 0.03,
    "conservative": 0.005,
}


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """The cut between viral records and others, and regions. Scores do not depend on it."""

    threshold: Annotated[
        float | None,
        _option(
            "Call a record virus if its score is at least this.",
            CALLS,
            metavar="SCORE",
            show_default="by --preset, or the head's",
        ),
    ] = None
    preset: Annotated[
        Preset,
        _option(
            "Use the thresholds, by length, at which at most 10, 3 or 0.5 % of unknown hosts are "
            "called virus.",
            CALLS,
        ),
    ] = "default"
    prevalence: Annotated[
        float,
        _option(
            "Expect this share of viral records in the sample, for the column fdr.",
            CALLS,
            metavar="SHARE",
        ),
    ] = 0.05
    regions: Annotated[
        bool,
        _option(
            "Search nucleotide records of 10,000 bases and more for virus-like regions, such as "
            "prophages.",
            CALLS,
            "--regions/--no-regions",
        ),
    ] = True
    region_model: RegionModel = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(
                f"--threshold is {self.threshold}; scores lie between 0 and 1",
                hint="leave it out for the thresholds of --preset",
            )
        if self.threshold is not None and self.preset != "default":
            raise UsageError(
                "--threshold and --preset contradict each other", hint="give one of them"
            )
        if not 0 < self.prevalence < 1:
            raise UsageError(
                f"--prevalence is {self.prevalence}; it must lie between 0 and 1",
                hint="give the share of viral records that you expect, for example 0.05",
            )
        if not self.regions:
            refuse(self, ("region_model",), "with --no-regions")


# Commands


@dataclass(frozen=True, kw_only=True)
class RunOptions(PlaceOptions, EngineOptions, ModelOptions, FolderOptions, SequenceOptions):
    """The options that ``predict`` and ``extract`` share."""

    command: ClassVar[Command]
    typed: tuple[str, ...] = ()  # names of the options on the command line, defaults too

    report: Annotated[
        bool,
        _option(
            "Write DIR/report.html, the run on one page that needs no network.",
            FILES,
            "--report/--no-report",
        ),
    ] = True

    def __post_init__(self) -> None:
        self.check_type(self.input_type)

    @property
    def asks_for_vectors(self) -> bool:
        """True if the run is to embed."""
        return True

    def check_without_engine(self) -> None:
        """Refuse options that are not read where nothing is embedded.

        Raises:
            UsageError: one of them was given.
        """
        refuse(self, ("keep_intermediate",), "where nothing is embedded", "add --model")

    def check_type(self, input_type: str) -> None:
        """Refuse options that are not read where the input is of this type.

        Raises:
            UsageError: one of them was given.
        """
        if input_type == "protein":
            refuse(self, ("chunk_size", "genetic_code"), "on proteins, which are not cut")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CutOptions, RunOptions):
    command: ClassVar[Command] = "predict"

    model: Annotated[
        str | None,
        _model(
            "none: nothing is embedded; esm2_virnucpro with any option of devices but --workers"
        ),
    ] = None
    head: Head = None
    calls: CallsBy = "auto"

    def __post_init__(self) -> None:
        CutOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        if self.calls == "scorer":
            refuse(self, ("head",), "with --calls scorer")

    @property
    def asks_for_vectors(self) -> bool:
        """True if a model, a head or any option of the engine was given."""
        of_engine = names_of(EngineOptions, PlaceOptions) - {"workers"} | {"model", "head"}
        is_typed = not of_engine.isdisjoint(self.typed)
        return is_typed or bool(given_of(self, of_engine)) or self.calls == "head"

    def check_type(self, input_type: str) -> None:
        super().check_type(input_type)
        if input_type == "protein":
            refuse(self, ("region_model",), "on proteins, which have no regions")


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(RunOptions):
    command: ClassVar[Command] = "extract"

    layer: Annotated[
        int | None,
        _count("Take the representation after this layer.", MODEL, show_default="the last"),
    ] = None
    pooling: Annotated[
        Pooling,
        _option(
            r"Pool residues into one vector. mean: their average; bos: the vector of the start "
            r"token, "
            r"\<cls>; none: one vector per residue.",
            MODEL,
        ),
    ] = "mean"
    format: Annotated[
        FeatureFormat,
        _option(
            "Write feature files in this format too, beside the h5 ones: npz, or pt as VirNucPro's "
            "_ESM.pt and _DNABERT_S.pt.",
            FILES,
        ),
    ] = "h5"


@dataclass(frozen=True, kw_only=True)
class WorkOptions(EngineOptions):
    folder: Annotated[Path, _folder("Run folder, planned with --plan-only.")]
    part: Annotated[
        str | None,
        _option(
            "Embed part I of N of the shards. N alone: I is the number of this task in its array.",
            CLUSTER,
            metavar="I/N",
            show_default="by SLURM's array, else all",
        ),
    ] = None
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # that of the run; no option
    array: Mapping[str, str] = field(default_factory=dict)  # variables of a task in a job array


@dataclass(frozen=True, kw_only=True)
class EvaluatedOptions:
    """Labelled sequences to evaluate on, and how they are cut."""

    data: Annotated[
        Path,
        _file(
            f"Evaluate on this table of labelled FASTA files, with the {_SHEET}; id and kingdom "
            f"are "
            "optional.",
            "MANIFEST",
        ),
    ]
    split: Annotated[
        Path | None,
        _option(
            "Split the groups by this table, as training writes it.",
            FILES,
            metavar="TABLE",
            show_default="all records",
        ),
    ] = None
    part: Annotated[
        Literal["train", "validation", "test"] | None,
        _option("Evaluate on this part of the split.", FILES, show_default="test"),
    ] = None
    lengths: Annotated[
        str, _option("Cut fragments of these lengths, in bases.", SAMPLES, metavar="N,N,...")
    ] = "150,300,500,1000,3000,10000"
    fragments_per_record: Annotated[
        int,
        _count(
            "Cut at most this number of fragments per record and length, without overlap. A whole "
            "record counts up to this many times the longest length.",
            SAMPLES,
            min=1,
        ),
    ] = 3
    seed: Annotated[int, _count("Draw fragments and intervals with this seed.", SAMPLES, min=0)] = 0
    genetic_code: GeneticCode = 11
    held_out_only: Annotated[
        bool,
        _option(
            "Leave out records that the head, its encoder or the scorer was trained on, and others "
            "of their groups.",
            MODEL,
        ),
    ] = False
    allow_training_data: Annotated[
        bool, _option("Evaluate on training records too; the report counts them.", MODEL)
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EngineOptions, FolderOptions, EvaluatedOptions):
    regions: Annotated[Path | None, _known_prophages("Evaluate regions on")] = None
    region_model: RegionModel = None
    genes: Annotated[
        Path | None,
        _file(
            "Count genes of this GFF3 file of the sequences, too.",
            "GFF",
        ),
    ] = None
    model: Annotated[
        str | None, _model("none: the scorer is evaluated; esm2_virnucpro with --head")
    ] = None
    head: Head = None
    calls: CallsBy = "auto"

    def __post_init__(self) -> None:
        if self.regions is None:
            refuse(
                self,
                ("region_model", "genes"),
                "without --regions",
                "name the known prophages with --regions",
            )
            if self.head is None and self.calls != "head":
                of_engine = names_of(EngineOptions) - {"workers"} | {"model"}
                refuse(self, of_engine, "where the scorer calls", "name a --head to evaluate it")
            return
        of_head = names_of(EngineOptions, EvaluatedOptions) - {"data", "seed", "genetic_code"}
        refuse(self, of_head | {"model", "head", "calls"}, "with --regions")


@dataclass(frozen=True, kw_only=True)
class LabelledOptions(OutputOptions):
    """Labelled sequences to train on."""

    data: Annotated[
        Path,
        _file(
            f"Train on this table of labelled FASTA files, with the {_SHEET}; id, weight and "
            f"kingdom "
            "are optional.",
            "MANIFEST",
        ),
    ]
    split: Annotated[
        Path | None,
        _option(
            "Split the groups by this table, as an earlier training wrote it.",
            FILES,
            metavar="TABLE",
            show_default="70 % of the groups train, 15 % validation, 15 % test",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The start of a training: its mode and its encoder."""

    finetune: Annotated[bool, _option("Train the encoder together with the head.", MODEL)] = False
    pretrain: Annotated[
        bool,
        _option("Train an encoder alone, on masked residues; labels only decide the split.", MODEL),
    ] = False
    model: Annotated[str | None, _model("esm2_virnucpro; with --pretrain a new one")] = None
    layers: Annotated[
        int | None,
        _count("Make a new encoder with this number of layers.", MODEL, show_default="6"),
    ] = None
    dim: Annotated[
        int | None,
        _count("Make a new encoder with this number of dimensions.", MODEL, show_default="128"),
    ] = None
    heads: Annotated[
        int | None,
        _count("Make a new encoder with this number of attention heads.", MODEL, show_default="4"),
    ] = None

    @property
    def mode(self) -> Mode:
        """
        Raises:
            UsageError: two modes were asked for.
        """
        match self.finetune, self.pretrain:
            case True, True:
                raise UsageError(
                    "--finetune and --pretrain contradict each other",
                    hint="pretrain first, then fine-tune the result: --finetune --model DIR",
                )
            case True, False:
                return "finetune"
            case False, True:
                return "pretrain"
        return "head"

    @property
    def has_shape(self) -> bool:
        return any(size is not None for size in (self.layers, self.dim, self.heads))


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network that is trained. Its weights depend on all of them."""

    name: Annotated[
        str,
        _option(
            "Give the trained encoder, and its folder in DIR, this name.", MODEL, metavar="NAME"
        ),
    ] = "esm2_trained"
    encoding: Annotated[
        Encoding, _option("Describe a residue by this; composition: by the bases alone.", MODEL)
    ] = "esm2"
    architecture: Annotated[
        Architecture,
        _option("Turn residues into one vector by this network; mlp: by their mean.", MODEL),
    ] = "mlp"
    chunk_size: Annotated[
        tuple[int, ...],
        _chunk_size("Cut chunks of this length; repeatable, the head is for the first.", "500"),
    ] = (500,)
    genetic_code: GeneticCode = 11
    hidden: Annotated[
        int, _count("Give the classifier this number of hidden units.", MODEL, min=1, max=65_536)
    ] = 128
    dropout: Annotated[
        float, _option("Train the classifier with this dropout.", MODEL, metavar="RATE")
    ] = 0.3


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The training loop. Sizes are of one step on one device unless they say more.

    The weights of an epoch depend on all of them but ``LOOP_MAY_DIFFER``.
    """

    epochs: Annotated[int, _count("Pass over the training data this often.", LOOP)] = 10
    batch_size: Annotated[
        int, _count("Train on this number of frames per batch on each device.", LOOP)
    ] = 128
    lr: Annotated[float, _option("Reach this learning rate at the peak.", LOOP, metavar="RATE")] = (
        5e-4
    )
    scale_lr: Annotated[
        Literal["none", "linear", "sqrt"],
        _option(
            "Scale --lr by effective batch / --batch-size (linear), or by the root of it (sqrt).",
            LOOP,
        ),
    ] = "none"
    warmup_epochs: Annotated[
        float,
        _option(
            "Warm up linearly for these epochs, then decay by a cosine.", LOOP, metavar="EPOCHS"
        ),
    ] = 0.1
    grad_accum_steps: Annotated[
        int, _count("Add up this number of batches of each device per optimizer step.", LOOP)
    ] = 1
    weight_decay: Annotated[
        float, _option("Train with this weight decay of AdamW.", LOOP, metavar="RATE")
    ] = 0.01
    class_weights: Annotated[
        Literal["auto", "recipe", "none"],
        _option(
            "Weight frames. auto: equal for both labels; per group the square root of its "
            "number of frames; recipe: groups nearly evenly, both labels equal at each GC, as the "
            "scorer was trained; none: those of the manifest.",
            LOOP,
        ),
    ] = "auto"
    eval_every: Annotated[
        int, _count("Evaluate on the validation groups after every N epochs.", LOOP)
    ] = 1
    early_stopping: Annotated[
        int,
        _count("Stop after this number of evaluations without improvement; 0: never.", LOOP),
    ] = 0
    keep_checkpoints: Annotated[
        int,
        _count(
            "Keep checkpoints of this number of last epochs, beside that of the best epoch.", LOOP
        ),
    ] = 1
    seed: Annotated[
        int,
        _count("Draw the split, the first weights, the order and dropout with this seed.", LOOP),
    ] = 0
    num_workers: Annotated[
        int,
        _count("Start this number of processes beside each device that make its batches.", DEVICES),
    ] = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "grad_accum_steps", "eval_every", "keep_checkpoints"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("num_workers", "early_stopping", "warmup_epochs", "weight_decay", "seed"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        self._check("lr", 0 < self.lr <= 1, "a rate above 0 and at most 1")
        self._check("warmup_epochs", self.warmup_epochs < self.epochs, "fewer than --epochs")

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        """
        Raises:
            UsageError: it is not right; names the option.
        """
        if not is_right:
            raise UsageError(f"{flag(name)} is {getattr(self, name)}", hint=f"give {allowed}")


LOOP_MAY_DIFFER = ("num_workers", "early_stopping", "keep_checkpoints")  # on resume


@dataclass(frozen=True, kw_only=True)
class TrainOptions(DeviceOptions, LoopOptions, NetworkOptions, StartOptions, LabelledOptions):
    regions: Annotated[Path | None, _known_prophages("Learn regions from")] = None
    workers: Annotated[
        int | None,
        _count("Start this number of processes with --device cpu.", DEVICES, show_default="1"),
    ] = None
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        _option(
            "Compute matrix products in this precision; auto: bf16 where the device has it, else "
            "fp32.",
            DEVICES,
        ),
    ] = "auto"
    seeds: Annotated[
        int,
        _count(
            "Train this often, with --seed and the seeds after it, for the spread of the gain "
            "(gain.tsv); the head is that of --seed.",
            LOOP,
        ),
    ] = 1
    no_multi_gpu: Annotated[bool, _option("Train on the first GPU alone.", DEVICES)] = False
    profile: Annotated[bool, _option("Show a table of the time per stage at the end.", DEVICES)] = (
        False
    )
    argv: tuple[str, ...] = ()  # the command, for run.json and the log

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regions is not None:
            unread = names_of(TrainOptions) - {"regions", "data", "output_dir", "seed"}
            refuse(self, unread, "with --regions, which trains no network")
        match self.mode:
            case "head":
                refuse(self, ("name",), "without --finetune or --pretrain, which train an encoder")
            case "pretrain":
                refuse(self, ("hidden", "dropout", "class_weights"), "with --pretrain")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    models: Annotated[
        str | None,
        _option(
            "Measure these sizes of ESM-2, in order: 8M, 35M, 150M, 650M, 3B, 15B; weights are "
            "random.",
            metavar="SIZE,...",
            show_default="all but 15B on a GPU, else 8M,35M",
        ),
    ] = None
    profiles: Annotated[
        str | None,
        _option(
            "Measure on proteins of these lengths: six-frame-500, reads-150, proteins.",
            metavar="NAME,...",
            show_default="all",
        ),
    ] = None
    parts: Annotated[
        str | None,
        _option("Measure these parts: limits, encoder.", metavar="NAME,...", show_default="all"),
    ] = None
    precisions: Annotated[
        str | None,
        _option(
            "Measure encoders in these precisions, in order: bf16, fp16, fp32. "
            "fair-esm as published is measured in fp32 always.",
            metavar="NAME,...",
            show_default="what the device has; on a GPU without fp32",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cuda", "cpu", "mps"], _option("Use this kind of device.")
    ] = "auto"
    threads: Annotated[
        int | None,
        _count(
            "Give every program this number of cores, on a CPU.",
            min=1,
            show_default="all that it may use",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        _count(
            "Embed this number of tokens in one measurement.",
            min=1,
            show_default="some full batches",
        ),
    ] = None
    repeats: Annotated[
        int | None,
        _count(
            "Measure this often after a warm-up, for 5 s or more each on a GPU; only once if a "
            "pass "
            "takes over 5 s.",
            min=1,
            show_default="5",
        ),
    ] = None
    seed: Annotated[int, _count("Draw proteins and weights with this seed.", min=0)] = 1
    json: Annotated[
        Path | None,
        _option(
            "Write all figures to this JSON file as they come.", metavar="FILE", show_default=False
        ),
    ] = None
    quick: Annotated[bool, _option("Measure for a short time: 8M, one profile, 3 repeats.")] = False
    quiet: Annotated[
        bool, _option("Show tables only, without progress.", None, "--quiet", "-q")
    ] = False
    cuda_visible_devices: str | None = None  # the variable of the environment


@dataclass(frozen=True, kw_only=True)
class RegionsOptions:
    folder: Annotated[Path, _folder("Run folder of a finished `virnucpro predict`.")]
    region_model: RegionModel = None
    argv: tuple[str, ...] = ()  # the command, for the log


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    folder: Annotated[Path, _folder("Folder of a run, a training or an evaluation.")]


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    folder: Annotated[Path, _folder("Run folder.")]
    verify: Annotated[bool, _option("Verify every output and feature file.")] = False
    as_json: Annotated[
        bool,
        _option(
            "Print figures for programs: shards done and pending, tokens/s of each host, "
            "remaining time.",
            None,
            "--json",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.as_json and self.verify:
            raise UsageError("--json and --verify contradict each other", hint="give one of them")


_Result = Annotated[
    Path,
    typer.Argument(
        metavar="RESULT",
        help="Run folder, folder of the original VirNucPro, or one table of either.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    a: _Result
    b: _Result
    tolerance: Annotated[
        float | None,
        _option(
            "Allow this difference between two scores of a row.",
            metavar="SCORE",
            min=0,
            show_default="any",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CiteOptions:
    bibtex: Annotated[bool, _option("Print BibTeX entries only.")] = False


@dataclass(frozen=True, kw_only=True)
class NamedModelOptions:
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH",
            help="Name, or path with a separator in it: ./model.pt.",
            autocompletion=complete_model,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ComputeOptions, NamedModelOptions):
    pass


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Published name of a model.", autocompletion=complete_model
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|NAME",
            help="fair-esm .pt file, or Hugging Face folder; with --from the name of a bundle.",
        ),
    ]
    name: Annotated[
        str | None,
        _option(
            "Give the model this name.", metavar="NAME", show_default="that of the file or folder"
        ),
    ] = None
    force: Annotated[bool, _option("Replace a model of that name.")] = False
    bundle_folder: Annotated[
        Path | None,
        _option(
            "Import the files of a bundle, or of dnabert-s, from this folder, under their "
            "published names.",
            None,
            "--from",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.bundle_folder is not None:
            refuse(self, ("name", "force"), "with --from: a bundle has published names")
