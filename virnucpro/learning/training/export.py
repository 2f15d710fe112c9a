"""The results of a training for ``predict``: an encoder folder and a head file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.callers.head import (
    EncoderFacts,
    Head,
    HeadFacts,
    Layer,
    Network,
    save_head,
)
from virnucpro.callers.join import Join
from virnucpro.encoders.base import Model
from virnucpro.learning.labelled.digests import group_digest
from virnucpro.learning.labelled.store import Labels
from virnucpro.learning.training.calibration import Calibration
from virnucpro.learning.training.networks import Classifier
from virnucpro.learning.training.settings import head_beside


def write_head(
    path: Path,
    classifier: Classifier,
    facts: HeadFacts,
    calibration: Calibration,
    trained_on: TrainedOn,
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
        _sorted(trained_on.records),
        _sorted(trained_on.groups),
        _sorted(trained_on.encoder_records),
        _sorted(trained_on.encoder_groups),
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


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """Digests of the data of a head, and of what its encoder was trained on."""

    records: frozenset[int]
    groups: frozenset[int]
    encoder_records: frozenset[int] = frozenset()
    encoder_groups: frozenset[int] = frozenset()


def find_trained(labels: Labels, encoder: Path | None, is_finetuned: bool) -> TrainedOn:
    """``encoder`` is the one that was started from, and ``is_finetuned`` if it was trained too.

    The head beside it knows what it had been trained on before.
    """
    records = frozenset(labels.digests)
    names = frozenset(group_digest(record.group) for record in labels.records)
    encoder_records = records if is_finetuned else frozenset()
    encoder_groups = names if is_finetuned else frozenset()
    if head := head_beside(encoder):
        encoder_records |= {*head.trained_records.tolist(), *head.encoder_records.tolist()}
        encoder_groups |= {*head.trained_groups.tolist(), *head.encoder_groups.tolist()}
    return TrainedOn(records, names, encoder_records, encoder_groups)


def _sorted(digests: frozenset[int]) -> NDArray[np.uint64]:
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
