"""The model that a training leaves: one folder of an encoder or its name, and a head."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro import __version__
from virnucpro.callers.head import (
    EncoderFacts,
    Head,
    HeadFacts,
    Join,
    Layer,
    Network,
    save_head,
)
from virnucpro.encoders.base import Model
from virnucpro.encoders.catalogue import open_model
from virnucpro.encoders.esm2.checkpoint import LEARNED_FILE
from virnucpro.encoders.esm2.model import ESM2
from virnucpro.encoders.esm2.weights import save_esm2
from virnucpro.encoders.families import EMBEDDED
from virnucpro.encoders.learned import save_reader
from virnucpro.ground.log import LOGGER, announce, printable
from virnucpro.ground.tree import Tree
from virnucpro.learning.labelled.records import LabelledRecord, group_digest
from virnucpro.learning.training.calibration import Calibration
from virnucpro.learning.training.networks import Classifier, FrameClassifier, merge
from virnucpro.learning.training.request import Training, load_known
from virnucpro.sequences.sketch import NO_KMERS, Sketch, join_sketches

Digests = NDArray[np.uint64]  # rising


def export(
    training: Training,
    module: FrameClassifier,
    records: Sequence[LabelledRecord],
    kmers: Sketch,
    calibration: Calibration,
    join: Join | None,
) -> None:
    """Write the encoder, or its name where it was not trained, and the calibrated head.

    The head learned ``records``; ``kmers`` is their sketch.
    """
    Tree(training.output).make_folder(training.model)
    encoder = _export_encoder(training, module)
    if calibration.is_at_limit:
        LOGGER.warning(
            "the scores cannot be calibrated on the validation groups, which are told apart "
            "perfectly or not at all: label more groups"
        )
    chunk_size = training.options.chunk_size[0]
    facts = facts_of(encoder, calibration, chunk_size, _describe(training), join)
    is_trained = any(weight.requires_grad for weight in module.reader.parameters())
    trained_on = find_trained(records, kmers, load_known(training.encoder_head), is_trained)
    write_head(training.head, module.classifier, facts, calibration, trained_on)
    announce(
        f"model: {printable(training.model)}, a chunk is the {calibration.frames} of its frames, "
        f"temperature {calibration.temperature:.2f}, exponent {calibration.exponent:.2f}, "
        f"threshold {calibration.threshold:.3f}"
    )


def _export_encoder(training: Training, module: FrameClassifier) -> Model:
    """Write what of the encoder was trained. -> what makes the vectors of frames"""
    reader, options = module.reader, training.options
    base: tuple[str | None, Model] | None = None
    if training.settings.mode == "finetune":
        assert isinstance(reader.encoder, ESM2)
        merge(reader.encoder)
        save_esm2(training.model, reader.encoder)
        trained = open_model(str(training.model.absolute()), lambda _: None)
        if training.is_plain:
            return trained
        base = (None, trained)
    elif training.encoder is not None:
        name = options.model or EMBEDDED
        if Path(name).name != name:
            name = str(training.encoder.absolute())
        base = (name, open_model(name, lambda _: None))
    path = training.model / LEARNED_FILE
    return save_reader(path, reader, options.encoding, options.architecture, base)


def _describe(training: Training) -> str:
    settings = training.settings
    return (
        f"{settings.mode}, {settings.epochs} epochs, seed {settings.seed}, chunks of "
        f"{' and '.join(map(str, training.options.chunk_size))} bases, by virnucpro {__version__}"
    )


def write_head(
    path: Path,
    classifier: Classifier,
    facts: HeadFacts,
    calibration: Calibration,
    trained_on: tuple[Digests, Digests, Digests, Digests, Sketch, Sketch],
) -> Head:
    """Write the classifier with what calibrates it."""
    n_before = facts.dim
    centre, spread = classifier.centre.double(), classifier.spread.double()
    shift = torch.cat([torch.zeros(n_before, dtype=torch.double), centre.cpu()])
    scale = torch.cat([torch.ones(n_before, dtype=torch.double), spread.cpu()])
    alone = None
    if classifier.protein is not None:
        alone = Network(_layers(classifier.protein), calibration.protein_temperature)
    head = Head(
        facts,
        alone,
        Network(_layers(classifier.nucleotide, shift, scale), calibration.temperature),
        *trained_on,
    )
    save_head(path, head)
    return head


def facts_of(
    model: Model,
    calibration: Calibration,
    chunk_size: int,
    training: str,
    join: Join | None = None,
) -> HeadFacts:
    return HeadFacts(
        encoders=(EncoderFacts.of(model),),
        chunk_size=chunk_size,
        threshold=calibration.threshold,
        frame_rule=calibration.frames,
        exponent=calibration.exponent,
        training=training,
        join=join,
    )


def find_trained(
    records: Sequence[LabelledRecord], kmers: Sketch, known: Head | None, is_finetuned: bool
) -> tuple[Digests, Digests, Digests, Digests, Sketch, Sketch]:
    """Digests of the records and groups of the head, and of those that its encoder learned from.

    After them come the sketches of both.

    ``known`` is the head of the encoder that was started from, and ``is_finetuned`` if that was
    trained too.
    """
    own = {record.digest for record in records}
    groups = {group_digest(record.group) for record in records}
    of_encoder, groups_of_encoder = (own, groups) if is_finetuned else (set(), set())
    kmers_of_encoder = kmers if is_finetuned else NO_KMERS
    if known:
        sketches = [kmers_of_encoder, known.trained_kmers, known.encoder_kmers]
        kmers_of_encoder = join_sketches(sketches)
        of_encoder = of_encoder.union(
            known.trained_records.tolist(), known.encoder_records.tolist()
        )
        groups_of_encoder = groups_of_encoder.union(
            known.trained_groups.tolist(), known.encoder_groups.tolist()
        )
    return (
        _sorted(own),
        _sorted(groups),
        _sorted(of_encoder),
        _sorted(groups_of_encoder),
        kmers,
        kmers_of_encoder,
    )


def _sorted(digests: Set[int]) -> Digests:
    return np.array(sorted(digests), dtype=np.uint64)


def _layers(
    network: nn.Sequential, shift: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Layer, ...]:
    """The linear layers; the first one includes the standardisation of the input, in float64."""
    layers = []
    for i, module in enumerate(m for m in network if isinstance(m, nn.Linear)):
        weight, bias = module.weight.detach().double().cpu(), module.bias.detach().double().cpu()
        if i == 0 and shift is not None and scale is not None:
            weight = weight / scale
            bias = bias - weight @ shift
        layers.append((weight.float().numpy(), bias.float().numpy()))
    return tuple(layers)
