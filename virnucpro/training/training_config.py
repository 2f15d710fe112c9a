"""Resolve the options of ``virnucpro train`` into a training that can start, and its devices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, hash_file, read_json
from virnucpro.core.errors import (
    InputError,
    OutputError,
    ResumeError,
    UsageError,
)
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import announce, printable
from virnucpro.core.option_schema import convert_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.base import Model
from virnucpro.models.device_choice import DeviceChoice, choose_precision
from virnucpro.models.devices import choose_devices
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model_files import require_esm2
from virnucpro.models.family import ModelFile
from virnucpro.models.lookup import find_model, find_published, open_default, open_model
from virnucpro.models.names import TINY_MODEL, current_name
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.store.hdf5_check import check_connector
from virnucpro.store.recipe_changes import list_changes
from virnucpro.store.run_dir import RunDir
from virnucpro.training.frame_dataset import FrameStore, delete_frames, write_frames
from virnucpro.training.labelled_data import (
    SPLITS,
    DataManifest,
    LabelledRecord,
    Split,
    check_data_manifest,
    check_groups,
    read_data_manifest,
    read_records,
    read_split,
    split_groups,
    warn_of_mixed_groups,
    write_split,
)
from virnucpro.training.options import LOOP_MAY_DIFFER, SHAPE, Mode, TrainOptions
from virnucpro.viral.head import Head


class TrainingFile(StrEnum):
    """Files and folders in the folder of a training."""

    FACTS = "training.json"
    REPORT = RunDir.page
    CHECKPOINTS = "checkpoints"
    SPLIT = "split.tsv"
    HELD_OUT = "held_out.tsv"
    TENSORBOARD = "tensorboard"
    GAIN = "gain.tsv"
    EPOCHS = "epochs.tsv"
    SEEDS = "seeds"
    FRAMES = "frames"
    FASTA = "records.fa"
    FEATURES = "features"
    MODEL = "model"


_MORE_GROUPS = "label more groups, or move some in a table of the split and give it with --split"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A requested training. Everything is checked except the data."""

    options: TrainOptions  # with the chosen precision
    encoder: Model | None  # an ESM-2 to start from; None: a new one with ``shape``
    shape: ESM2Shape | None  # None: no ESM-2 is used
    n_ranks: int  # processes, one per device
    is_repeat: bool = False  # repeated with another seed, and only measured

    def repeat(self, number: int) -> TrainingRun:
        """Return the same training with a later seed. Number 0 is this training."""
        options = replace(self.options, seed=self.options.seed + number)
        return replace(self, options=options, is_repeat=number > 0)

    @property
    def checkpoint_dir(self) -> Path:
        """The folder for checkpoints and TensorBoard files."""
        return (
            self.output / TrainingFile.SEEDS / str(self.options.seed)
            if self.is_repeat
            else self.output
        )

    @property
    def output(self) -> Path:
        return self.options.output_dir

    @property
    def split(self) -> Path:
        return self.output / TrainingFile.SPLIT

    @property
    def model(self) -> Path:
        """The trained model's folder, for ``--model``."""
        return self.output / TrainingFile.MODEL

    @property
    def head(self) -> Path:
        return self.model / ModelFile.HEAD

    @property
    def frames(self) -> Path:
        """Frames from all records, which every process maps."""
        return self.output / TrainingFile.FRAMES

    @property
    def features(self) -> Path:
        """The run folder with the vectors that a head is trained on: ``--features``, or our own."""
        return self.options.features or self.output / TrainingFile.FEATURES

    @property
    def fasta(self) -> Path:
        """The FASTA file with all records, which the engine and the scorer read."""
        return self.output / TrainingFile.FASTA

    @property
    def is_plain(self) -> bool:
        """True if a frame vector is a mean over ESM-2 vectors, which needs no file of ours."""
        return (self.options.encoding, self.options.architecture) == ("esm2", "mlp")

    @property
    def has_stored_vectors(self) -> bool:
        """True if the engine computes the vectors once, before the training."""
        return self.options.mode == "head" and self.is_plain


def resolve_training(
    options: TrainOptions, on_event: EventHandler, n_ranks: int | None = None
) -> tuple[TrainingRun, DeviceChoice]:
    """Resolve a training and its devices, and check them before any work.

    Args:
        n_ranks: processes that torchrun started. None: one per device.

    Raises:
        VirnucproError: see ``errors``.
    """
    GeneticCode.from_number(options.genetic_code)
    check_data_manifest(options.data)  # before a model is downloaded
    options = _use_recorded_model(options)
    encoder, shape = _encoder(options, on_event)
    if shape and options.train_layers is not None and options.train_layers > shape.n_layers:
        raise UsageError(
            f"--train-layers is {options.train_layers}; the encoder has {shape.n_layers} layers",
            hint="give fewer, or leave it out to train all",
        )
    if options.mode != "pretrain":
        load_known_groups(encoder)  # read again at the end, when damage would be found too late
    # Weights, gradients, two moments.
    model_bytes = 16 * shape.n_parameters if shape else 0
    check_connector(options.hdf5_vol_connector)
    choice = choose_devices(options, options.workers, model_bytes)
    if not options.multi_gpu or (choice.kind == "cpu" and options.workers is None):
        choice = choice.first_device
    is_fp16 = options.precision == "fp16"  # possible on a CPU too, since losses are scaled
    precision = "fp16" if is_fp16 else choose_precision(options.precision, choice)
    if choice.kind == "mps":
        precision = "fp32"
    if (precision, choice.kind, options.architecture) == ("fp16", "cpu", "lstm"):
        raise UsageError(
            "PyTorch has no LSTM in fp16 for a CPU",
            hint="train it with --precision bf16 or fp32, or on a GPU",
        )
    n_ranks = n_ranks or len(choice.devices)
    if options.fsdp and n_ranks == 1:
        raise UsageError(
            "--fsdp shards weights over devices, and there is only one",
            hint="leave it out; --gradient-checkpointing and --lora save memory on one device",
        )
    options = convert_options(options, TrainOptions, precision=precision)
    return TrainingRun(options=options, encoder=encoder, shape=shape, n_ranks=n_ranks), choice


def load_known_groups(encoder: Model | None) -> Head | None:
    """Load the head that comes with an encoder. It records the training data for both.

    Raises:
        UnavailableError: the head is damaged.
    """
    return Head.load(encoder.head) if encoder and encoder.head else None


def _use_recorded_model(options: TrainOptions) -> TrainOptions:
    """Keep a resumed training's model if the options name none."""
    is_open = options.model is None and options.encoding == "esm2" and not options.has_shape
    if not (is_open and options.resume):
        return options
    try:
        encoder = read_json(options.output_dir / TrainingFile.FACTS)["encoder"]
    except (OSError, ValueError, LookupError, TypeError):
        return options  # nothing was begun, or the file is damaged, which is reported later
    if not isinstance(encoder, str):
        return options
    return replace(options, model=_model_name(Path(encoder)))


def _model_name(path: Path) -> str:
    """Return the model name at this path if it has one, else the path."""
    name = current_name(path.name.removesuffix(".pt"))
    is_built_in = name == TINY_MODEL and path.parent.name == EMBEDDED_FOLDER.name
    is_published = find_published(name) is not None and find_model(name) == path
    return name if is_built_in or is_published else str(path)


def _encoder(
    options: TrainOptions, on_event: EventHandler
) -> tuple[Model | None, ESM2Shape | None]:
    """Return the encoder to start from and its shape.

    Only a shape: a new encoder. Neither: no ESM-2.
    """
    if options.encoding != "esm2":
        return None, None
    if not options.has_shape and (options.mode != "pretrain" or options.model is not None):
        if options.model is None:
            opened = open_default(on_event, options.hugging_face)
        else:
            opened = open_model(options.model, on_event, options.hugging_face)
        encoder = require_esm2(opened)
        encoder.check(encoder.sha256())
        if not encoder.accepted:  # else its hash shows that they are those of the published model
            encoder.check_numbers("fp32")
        return encoder, encoder.shape
    asked = {name: getattr(options, name) for name in SHAPE}
    sizes = (SHAPE[name] if size is None else size for name, size in asked.items())
    n_layers, dim, n_heads = sizes
    if dim % (2 * n_heads):
        raise UsageError(
            f"{dim} dimensions in {n_heads} heads",
            hint="give dimensions that are a multiple of twice --heads",
        )
    return None, ESM2Shape(n_layers, dim, n_heads)


def open_training(training: TrainingRun, on_event: EventHandler) -> None:
    """Read and split the labelled records, and store the request. On resume, check that it agrees.

    The folder must exist and be locked. Afterwards it contains everything that the processes read.

    Raises:
        OutputError: the folder is not empty, and this is not a resume.
        ResumeError: the folder contains another training.
        InputError: the manifest or the split is wrong.
    """
    output = training.output
    options = training.options
    checkpoints = chain(
        output.glob("checkpoints/*"), output.glob(f"{TrainingFile.SEEDS}/*/checkpoints/*")
    )
    stored = (str(path.relative_to(output)) for path in checkpoints)
    SafeDir(output).refuse_links((*TrainingFile, *stored))
    path = output / TrainingFile.FACTS
    is_begun = path.exists()
    _check_free(training.output, is_begun, options.resume)
    manifest = read_data_manifest(options.data)
    try:
        hashes = _prepare_frames(training, manifest, on_event)
        fingerprint = check_features(training, hashes) if options.features else ""
        n_frames = FrameStore.open(training.frames).count_frames(options.chunk_size[0])
        splits = read_splits(training, [*n_frames])
        check_parts(n_frames, splits, options.mode)
    except BaseException:
        if not is_begun:
            delete_frames(training.frames, training.fasta)
        raise
    if not training.split.exists():
        write_split(training.split, n_frames, splits)
    facts = _facts(training, manifest.sha256, hashes, fingerprint)
    if is_begun:
        _check_same(path, facts)
        announce(f"continuing the training in {printable(training.output)}")
    SafeDir(path.parent).write_json(path, facts)


def _prepare_frames(
    training: TrainingRun, manifest: DataManifest, on_event: EventHandler
) -> list[str]:
    """Read the labelled FASTA once and write its frames. Return the FASTA hashes."""
    options = training.options
    hashes: list[str] = []
    n_bytes = sum(path.stat().st_size for path in manifest.files)
    n_read = 0

    def hear(block: bytes | memoryview) -> None:
        nonlocal n_read
        n_read += len(block)
        on_event(Progress("reading the labelled sequences", n_read, n_bytes, "bytes"))

    pairs = read_records(manifest, hashes.append, hear)
    code = GeneticCode.from_number(options.genetic_code)
    fasta = None if options.mode == "pretrain" else training.fasta
    write_frames(training.frames, pairs, options.chunk_size, code, fasta)
    return hashes


def describe_training(training: TrainingRun, choice: DeviceChoice) -> list[str]:
    """Return lines on mode, model, precision and devices."""
    shape = training.shape
    options = training.options
    encoder = f"no ESM-2, {options.encoding}"
    if shape is not None:
        size = f"{shape.n_parameters / 1e6:.1f} M parameters"
        encoder = f"ESM-2 of {shape.n_layers} layers, {shape.dim} dimensions, {size}"
    if training.encoder is not None and training.encoder.notice:
        encoder += f" ({training.encoder.notice})"
    devices = choice.descriptions
    if choice.kind == "cpu":
        devices = (f"CPU, processes: {len(choice.devices)}",)
    return [f"{options.mode}: {encoder}, {options.precision}", *devices]


def _check_free(folder: Path, is_begun: bool, resume: bool) -> None:
    """Check that a training may use the folder.

    Raises:
        OutputError: the folder contains a training and this is no resume, or something else.
    """
    entries = {entry.name for entry in folder.iterdir()} - RunDir.command_files
    if is_begun and not resume:
        raise OutputError(
            f"{printable(folder)} already contains a training",
            hint="continue it with --resume, or give another --output-dir",
        )
    if resume:
        entries -= {
            TrainingFile.SPLIT,
            TrainingFile.FRAMES,
            TrainingFile.FASTA,
        }  # from a start killed before it claimed the folder
    if entries and not is_begun:
        raise OutputError(
            f"{printable(folder)} is not empty, and has no training: {printable(min(entries))}",
            hint="give another --output-dir",
        )


def read_splits(training: TrainingRun, records: Sequence[LabelledRecord]) -> dict[str, Split]:
    """Return the split from an earlier start, or from ``--split``, or a new one.

    Raises:
        ResumeError: ``--split`` differs from the earlier start's split.
        InputError: a group is in no split part.
    """
    warn_of_mixed_groups(records)
    options = training.options
    given_split = read_split(options.split) if options.split else None
    if training.split.exists():
        splits = read_split(training.split)
    else:
        splits = split_groups(records, options.seed) if given_split is None else given_split
    check_groups({record.group for record in records}, splits)
    if given_split is not None and (
        moved := [group for group in splits if given_split.get(group) != splits[group]]
    ):
        raise ResumeError(
            f"{printable(options.split)} is not the split of this training: "
            f"{printable(moved[0])} was for {splits[moved[0]]}",
            hint="leave --split out to continue, or give another --output-dir",
        )
    return splits


def check_parts(
    n_frames: Mapping[LabelledRecord, int], splits: Mapping[str, Split], mode: Mode
) -> None:
    """Check that every split part has the groups and frames that the mode needs.

    Raises:
        InputError: a part has no such group or frame.
    """
    for split in SPLITS:
        own = {record: n for record, n in n_frames.items() if splits[record.group] == split}
        if mode != "pretrain":
            _check_labels(split, own)
        elif split != "test" and not any(own.values()):
            raise InputError(
                f"the {split} groups have no frame without a stop",
                hint=f"{_MORE_GROUPS}, or give a smaller --chunk-size",
            )


def _check_labels(split: Split, n_frames: Mapping[LabelledRecord, int]) -> None:
    """Check that a part has both labels.

    Raises:
        InputError: a label is missing among a part's groups, or among the frames to learn.
    """
    n_by_label = Counter({True: 0, False: 0})
    for record, n in n_frames.items():
        n_by_label[record.is_virus] += n
    if missing := {"virus", "other"} - {record.label for record in n_frames}:
        raise InputError(
            f"no group with the label {min(missing)} is in the part {split}", hint=_MORE_GROUPS
        )
    if split != "test" and not all(n_by_label.values()):
        raise InputError(
            f"the {split} groups have {n_by_label[True]:,} viral frames, "
            f"{n_by_label[False]:,} others",
            hint=f"both are needed: {_MORE_GROUPS}",
        )


def _facts(
    training: TrainingRun, data_sha256: str, fasta_sha256: list[str], fingerprint: str
) -> dict[str, Any]:
    """Return the facts that determine the weights. Files are identified by their content."""
    options = training.options
    encoder = training.encoder
    facts: dict[str, Any] = {
        "manifest": options.data,
        "settings": options.loop_options,
        "effective_batch": options.effective_batch(training.n_ranks),
        "peak_lr": options.scaled_lr(training.n_ranks),
        "encoder": encoder.path if encoder else None,
        "vectors": options.features,
        "features_fingerprint": fingerprint,
        "shape": asdict(training.shape) if training.shape else None,
        **options.network_options,
        "data_sha256": data_sha256,
        "fasta_sha256": fasta_sha256,
        "split_sha256": hash_file(training.split),
        **({"encoder_id": encoder.encoder_id} if encoder else {}),
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def check_features(training: TrainingRun, fasta_sha256: Iterable[str]) -> str:
    """Check that the ``--features`` vectors equal those that would be computed here.

    Returns:
        Their recipe fingerprint.

    Raises:
        InputMissingError: there is no run in the folder.
        InputError: the vectors belong to other sequences, or to another recipe.
    """
    folder = training.features
    options = training.options
    run = open_run_dir(folder).read_run("give the --output-dir of virnucpro extract")
    recipe = run.recipe
    assert training.encoder is not None, "a head on an encoder"
    digest = require_esm2(training.encoder).sha256()
    n_layers = training.encoder.n_layers
    expected = replace(
        recipe,
        chunk_size=options.chunk_size[0],
        genetic_code=options.genetic_code,
        min_length=0,
        encoders=tuple(
            replace(encoder, sha256=digest, layer=n_layers, pooling="mean")
            for encoder in recipe.encoders[:1]
        ),
    )
    if not recipe.encoders:
        raise InputError(
            f"{printable(folder)} has no vectors", hint="name the folder of a virnucpro extract"
        )
    if changes := list_changes(run, expected):
        raise InputError(
            f"the vectors in {printable(folder)} are not those of this training: "
            f"{'; '.join(changes)}",
            hint="give --model, --chunk-size and --genetic-code of that virnucpro extract, which "
            "must have no --layer, --pooling or --min-length",
        )
    if absent := {*fasta_sha256} - {file.sha256 for file in run.inputs}:
        raise InputError(
            f"{printable(folder)} has no vectors for {len(absent)} of the labelled FASTA files",
            hint="give virnucpro extract the files that the manifest names, unchanged",
        )
    return recipe.fingerprint


def _check_same(path: Path, facts: Mapping[str, Any]) -> None:
    """Check that the stored training is this one.

    Raises:
        ResumeError: the folder contains another training. The message names what differs.
    """
    try:
        stored = _flatten(read_json(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResumeError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint="give another --output-dir",
        ) from error
    now = _flatten(facts)
    # Compared by content: data_sha256, encoder_id, features_fingerprint.
    places = {"manifest", "encoder", "vectors"}
    may_differ = {*LOOP_MAY_DIFFER, *places}
    if now["epochs"] < stored.get("epochs", 0):
        may_differ.remove("epochs")  # the rate would have to rise again
    differences = [
        f"{name} ({printable(stored.get(name))}, now {printable(now.get(name))})"
        for name in sorted({*stored, *now} - may_differ)
        if stored.get(name) != now.get(name)
    ]
    if differences:
        raise ResumeError(
            f"{printable(path.parent)} contains a training with other {'; '.join(differences)}",
            hint="give the options it was started with, or another --output-dir",
        )


def _flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in facts.items() if k != "settings"}, **facts["settings"]}
