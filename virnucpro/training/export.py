"""What a training leaves for ``predict``: an encoder folder and a head file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.esm2.weights import Checkpoint
from virnucpro.head import Head, HeadFacts, Layer, Network, load_head, save_head
from virnucpro.training.calibration import Calibration
from virnucpro.training.digests import group_digest, record_digest
from virnucpro.training.networks import Classifier

HEAD_FILE = "head.safetensors"  # beside the encoder, if that was trained too


def write_head(
    path: Path,
    classifier: Classifier,
    facts: HeadFacts,
    calibration: Calibration,
    trained_on: tuple[NDArray[np.uint64], NDArray[np.uint64]],
) -> Head:
    """Write the classifier with what calibrates it; ``trained_on``: see ``digests_of``."""
    n_before = facts.dim
    centre, spread = classifier.centre.double(), classifier.spread.double()
    shift = torch.cat([torch.zeros(n_before, dtype=torch.double), centre.cpu()])
    scale = torch.cat([torch.ones(n_before, dtype=torch.double), spread.cpu()])
    assert classifier.protein is not None, "a head reads an embedding"
    head = Head(
        facts,
        Network(_layers(classifier.protein), calibration.protein_temperature),
        Network(_layers(classifier.nucleotide, shift, scale), calibration.temperature),
        *trained_on,
    )
    save_head(path, head)
    return head


def facts_of(
    checkpoint: Checkpoint, calibration: Calibration, chunk_size: int, training: str
) -> HeadFacts:
    return HeadFacts(
        encoder=checkpoint.name,
        encoder_id=checkpoint.encoder_id,
        layer=checkpoint.shape.n_layers,
        pooling="mean",
        dim=checkpoint.shape.dim,
        chunk_size=chunk_size,
        threshold=calibration.threshold,
        frames=calibration.frames,
        exponent=calibration.exponent,
        training=training,
    )


def digests_of(
    sequences: Iterable[str], groups: Iterable[str], encoder: Path | None
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Of records and of groups, sorted, each once.

    With those of the head beside the encoder that was started from, as ``train`` leaves them: an
    encoder that was fine-tuned knows its data too.
    """
    records = {record_digest(sequence) for sequence in sequences}
    names = {group_digest(group) for group in groups}
    if encoder is not None and (before := encoder.with_name(HEAD_FILE)).is_file():
        head = load_head(before)
        records.update(head.trained_records.tolist())
        names.update(head.trained_groups.tolist())
    return _sorted(records), _sorted(names)


def _sorted(digests: set[int]) -> NDArray[np.uint64]:
    return np.array(sorted(digests), dtype=np.uint64)


def _layers(
    network: nn.Sequential, shift: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Layer, ...]:
    """Its linear layers; what standardises the input goes into the first, in float64."""
    layers = []
    for i, module in enumerate(m for m in network if isinstance(m, nn.Linear)):
        weight, bias = module.weight.detach().double().cpu(), module.bias.detach().double().cpu()
        if i == 0 and shift is not None and scale is not None:
            weight = weight / scale
            bias = bias - weight @ shift
        layers.append((weight.float().numpy(), bias.float().numpy()))
    return tuple(layers)
