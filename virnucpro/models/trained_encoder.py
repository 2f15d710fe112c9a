"""Encoders made by ``train``, and their file: a CNN, LSTM or U-Net over residues, a mean, or none.

``train`` writes the file, in safetensors, next to the head of a trained model. It contains the
weights of the network over the residues. Its only metadata entry describes the encoder in JSON. The
ESM-2 below the network is not in the file. The metadata names its checkpoint, which is next to the
file or at its path during training. If the vectors are the means of an unchanged ESM-2, the file
contains only this name, and the model is that ESM-2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import check_counts
from virnucpro.models.base import (
    Encoder,
    Model,
    check_intact,
    check_unchanged,
    has_prefix,
    read_tensors,
)
from virnucpro.models.eight_bits import EIGHT_BITS
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.esm2.model_files import ESM2Model, inspect_esm2, require_esm2
from virnucpro.models.family import ModelFile
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.models.lookup import open_model
from virnucpro.models.options import Architecture, Encoding
from virnucpro.models.packing import PackedBatch, PackedEncoder
from virnucpro.models.transformer import DTYPES

LEARNED = "learned"  # family name
COMPOSITION = "composition"  # family name
_FACTS = "virnucpro_encoder"  # metadata entry
_NETWORK = "network."  # prefix of weight names: the network's module in a reader

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseModel:
    """The ESM-2 below the network, which embeds its residues."""

    model: str  # a name, a path, or "." for the folder of the file
    encoder_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedEncoderInfo:
    """Metadata for a trained encoder, stored in its weight file."""

    encoding: Encoding
    architecture: Architecture
    dim: int  # vector length, 0 if the file has only a name
    base: _BaseModel | None = None

    def __post_init__(self) -> None:
        check_counts(self.dim)
        if self.encoding not in get_args(Encoding) or self.architecture not in get_args(
            Architecture
        ):
            raise ValueError(f"{self.encoding!a} read by {self.architecture!a}")
        if (self.base is not None) != (self.encoding == "esm2"):
            raise ValueError(f"{self.encoding} with the checkpoint {self.base}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedModel(Model):
    """A trained encoder on disk. Its id is the file's hash."""

    facts: _TrainedEncoderInfo
    base: ESM2Model | None
    weights: Weights = field(compare=False, repr=False)  # of the network over the residues

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        return "bf16" if precision in EIGHT_BITS else precision

    def describe(self, spec: EncoderSpec) -> str:
        on_base = f" on {printable(self.base.name)}" if self.base is not None else ""
        return f"{self.dim} dimensions{on_base}, {spec.precision}"


def save_frame_network(
    path: Path,
    reader: FrameNetwork,
    encoding: Encoding,
    architecture: Architecture,
    base: tuple[str | None, Model] | None,
) -> Model:
    """Write a reader as an encoder.

    Args:
        path: the file to write.
        reader: the network.
        encoding: the network's input.
        architecture: the network's architecture.
        base: the ESM-2 below the network, with its name or path, or None without one. A name of
            None means that the ESM-2 is next to the file.

    Returns:
        The encoder, as from ``inspect``.

    Raises:
        UnavailableError: the base is missing.
    """
    here = "."  # the ESM-2 in the same folder as the file
    named = _BaseModel(model=base[0] or here, encoder_id=base[1].encoder_id) if base else None
    facts = _TrainedEncoderInfo(
        encoding=encoding, architecture=architecture, dim=reader.width, base=named
    )
    network = reader.network.state_dict() if reader.network is not None else {}
    weights = {
        f"{_NETWORK}{name}": tensor.float().cpu().numpy() for name, tensor in network.items()
    }
    save_trained_encoder(path, facts, weights)
    return _inspect_file(path)


def save_trained_encoder(path: Path, facts: _TrainedEncoderInfo, weights: Weights) -> None:
    """Write an encoder file. Equal weights give equal bytes."""
    content = {name: np.ascontiguousarray(values) for name, values in weights.items()}
    metadata = {_FACTS: json.dumps(asdict(facts), sort_keys=True)}
    SafeDir(path.parent).write_file(path, save(content, metadata=metadata))


def inspect_trained_encoder(path: Path, on_event: EventHandler = lambda _: None) -> _TrainedModel:
    """Inspect the file with a trained encoder.

    Raises:
        UnavailableError: the file is damaged, contains more than metadata and weights, or its base
            is missing.
    """
    hint = "`virnucpro train` writes an encoder next to its head: name that file"
    with check_intact(path, "an encoder of VirNucPro", hint):
        stored, weights = read_tensors(path, _FACTS, "np")
        named = stored.pop("base")
        facts = _TrainedEncoderInfo(
            **stored, base=_BaseModel(**named) if named is not None else None
        )
        for name, values in weights.items():
            if values.dtype != np.float32 or not np.isfinite(values).all():
                raise ValueError(f"{name} is not of finite float32")
    base = _find_base(path, facts.base, on_event) if facts.base is not None else None
    head = path.parent / ModelFile.HEAD
    is_composition = facts.encoding == "composition"
    return _TrainedModel(
        path=path,
        name=f"{facts.encoding}-{facts.architecture}",
        family=COMPOSITION if is_composition else LEARNED,
        reads=Alphabet.DNA if is_composition else Alphabet.PROTEIN,
        encoder_id=hash_file(path),
        dim=facts.dim,
        footprint=_footprint(path, weights, base),
        head=head if head.is_file() else None,
        facts=facts,
        base=base,
        weights=weights,
    )


def _footprint(path: Path, weights: Weights, base: ESM2Model | None) -> Footprint:
    """Estimate the memory. An ESM-2 needs more per token than a network over its residues."""
    filling_tokens = 327_680  # per batch on a GPU
    bytes_per_token = 8192  # for an LSTM, which needs most: gates, states and copies in float32
    n_parameters = sum(values.size for values in weights.values())
    file_bytes = path.stat().st_size
    if base is None:
        return Footprint(
            n_parameters=n_parameters,
            file_bytes=file_bytes,
            bytes_per_token=bytes_per_token,
            filling_tokens=filling_tokens,
        )
    return replace(
        base.footprint,
        n_parameters=base.footprint.n_parameters + n_parameters,
        file_bytes=base.footprint.file_bytes + file_bytes,
        converted_bytes=0,
    )


def _find_base(path: Path, base: _BaseModel, on_event: EventHandler) -> ESM2Model:
    """Find the checkpoint of this name next to the file, or at its path during training.

    Raises:
        UnavailableError: the checkpoint is missing, or has other weights.
    """
    beside = path.parent / Path(base.model).name
    if beside.exists():
        checkpoint = inspect_esm2(beside)
    else:
        checkpoint = require_esm2(open_model(base.model, on_event))
    if checkpoint.encoder_id != base.encoder_id:
        raise UnavailableError(
            f"{printable(path)} was learned on {printable(base.model)} ({base.encoder_id}); "
            f"{printable(checkpoint.path)} contains other weights ({checkpoint.encoder_id})",
            hint=f"put the checkpoint that it was learned on next to it, as {printable(beside)}",
        )
    return checkpoint


def inspect(path: Path, on_event: EventHandler) -> Model | None:
    """Inspect an encoder file, or the folder of a trained model.

    Returns:
        The encoder, or None if the path is something else.

    Raises:
        UnavailableError: the encoder is damaged, its ESM-2 is missing, or the folder belongs to a
            training, not to a model.
    """
    training_file = "training.json"
    if (path / training_file).is_file():
        raise UnavailableError(
            f"{printable(path)} is the folder of a training, not of a model",
            hint=f"name the model in it: {printable(path / 'model')}",
        )
    if (path / ModelFile.LEARNED).is_file():
        path /= ModelFile.LEARNED
    return _inspect_file(path, on_event) if has_prefix(path, _FACTS) else None


def _inspect_file(path: Path, on_event: EventHandler = lambda _: None) -> Model:
    """Return the encoder in a file, or the ESM-2 that the file names."""
    learned = inspect_trained_encoder(path, on_event)
    if learned.base is not None and learned.facts.architecture == "mlp":
        return replace(learned.base, head=learned.head)
    return learned


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load a trained encoder on a device.

    Raises:
        UnavailableError: the file or its ESM-2 cannot be used.
    """
    checkpoint = inspect_trained_encoder(weights)
    check_unchanged(spec, weights, checkpoint.encoder_id)
    base = checkpoint.base
    facts = checkpoint.facts
    esm2 = None
    if base is not None:
        esm2 = load_esm2(base.path, base.shape.n_layers, DTYPES[spec.precision], device)
    reader = FrameNetwork.create(facts.encoding, facts.architecture, esm2)
    network = nn.Module() if reader.network is None else reader.network
    state = {
        name.removeprefix(_NETWORK): torch.from_numpy(values)
        for name, values in checkpoint.weights.items()
    }
    try:
        network.load_state_dict(state)
        if reader.width != spec.dim:
            raise ValueError(f"its vectors have {reader.width} numbers, not {spec.dim}")
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"{printable(weights)} does not hold the network that it names: {printable(error)}",
            hint="the file is damaged: get it again, or train again",
        ) from error
    if spec.family == COMPOSITION:  # this family has empty vectors
        device = torch.device("cpu")
    return _TrainedEncoder(spec, reader.to(device).eval(), device)


class _TrainedEncoder(PackedEncoder):
    """A trained encoder. Its network is in float32.

    The family ``composition`` returns empty vectors: the head computes the base composition from
    the record.
    """

    def __init__(self, spec: EncoderSpec, reader: FrameNetwork, device: torch.device) -> None:
        base = reader.encoder
        super().__init__(spec, device, base.in_float32 if isinstance(base, ESM2) else None)
        self.reader = reader
        self.n_parameters = sum(p.numel() for p in reader.parameters())

    @property
    def kernel(self) -> str:
        if self.reader.encoder is None:
            return "none"
        network = self.reader.network
        return "mean" if network is None else type(network).__name__.lstrip("_")

    def count_flop(self, lengths: Sequence[int]) -> float:
        return 2.0 * self.n_parameters * sum(lengths)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Embed a batch. The vectors stay on the device."""
        vectors: Tensor = self.reader(PackedBatch.from_sequences(sequences))
        return vectors
