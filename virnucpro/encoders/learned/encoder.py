"""Learned encoders of proteins: a CNN, LSTM or U-Net over residues, their mean, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from virnucpro.encoders.base import Encoder, Pending
from virnucpro.encoders.esm2.encoder import Fp16Batch
from virnucpro.encoders.esm2.model import DTYPES, ESM2
from virnucpro.encoders.esm2.packing import EXTRA_TOKENS, PackedBatch, plan_batches
from virnucpro.encoders.esm2.weights import load_esm2
from virnucpro.encoders.learned.file import (
    COMPOSITION,
    LearnedCheckpoint,
    inspect_learned,
    is_learned,
    read_weights,
)
from virnucpro.encoders.learned.readers import (
    MeanReader,
    PaddedReader,
    blosum62,
    new_reader,
    one_hot,
)
from virnucpro.encoders.transfer import Arrived, HostCopy
from virnucpro.ground.config import EncoderSpec
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.log import printable

Network = MeanReader | PaddedReader


def inspect(path: Path, on_event: OnEvent) -> LearnedCheckpoint | None:
    """
    Raises:
        UnavailableError: it is damaged, or the ESM-2 that it was learned on is not to be found.
    """
    return inspect_learned(path, on_event) if is_learned(path) else None


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """
    Raises:
        UnavailableError: the file, or the ESM-2 that it was learned on, cannot be used.
    """
    if spec.family == COMPOSITION:
        return EmptyEncoder(spec)
    checkpoint = inspect_learned(weights)
    reader = new_reader(*_residues(checkpoint, spec, device), checkpoint.facts.architecture)
    weights_by_name = {
        name: torch.from_numpy(values) for name, values in read_weights(weights).items()
    }
    try:
        result = reader.load_state_dict(weights_by_name, strict=False)
    except RuntimeError as error:
        raise _other(weights, error) from error
    names = [name for name in result.missing_keys if name.startswith("network.")]
    if names or result.unexpected_keys or reader.width != spec.dim:
        raise _other(weights, ", ".join(names or result.unexpected_keys) or "its width")
    return LearnedEncoder(spec, reader.to(device).eval(), device)


def _residues(
    checkpoint: LearnedCheckpoint, spec: EncoderSpec, device: torch.device
) -> tuple[nn.Module, int]:
    """The module that gives each residue its numbers, and how many these are."""
    if checkpoint.base is not None:
        shape = checkpoint.base.shape
        dtype = DTYPES[spec.precision]
        return load_esm2(checkpoint.base.path, shape.n_layers, dtype, device), shape.dim
    table = one_hot() if checkpoint.facts.encoding == "onehot" else blosum62()
    return table, table.rows.shape[1]


def _other(path: Path, why: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} does not hold the network that it names: {printable(why)}",
        hint="the file is damaged: get it again, or train again",
    )


class LearnedEncoder:
    """An encoder that was learned; see ``base.Encoder``. Its network is in float32."""

    def __init__(self, spec: EncoderSpec, reader: Network, device: torch.device) -> None:
        self.spec, self.reader = spec, reader
        self.copy = HostCopy(device)
        self.n_parameters = sum(p.numel() for p in reader.parameters())

    @property
    def kernel(self) -> str:
        return type(getattr(self.reader, "network", self.reader)).__name__

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        return 2.0 * self.n_parameters * sum(lengths)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        pending, base = self.copy.start(self.embed(sequences)), self.reader.encoder
        if self.spec.precision != "fp16" or not isinstance(base, ESM2):
            return pending
        return Fp16Batch(sequences, pending, base, self.embed)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """The vectors of a batch, on the device."""
        vectors: Tensor = self.reader(PackedBatch.of(sequences))
        return vectors


@dataclass(slots=True)
class EmptyEncoder:
    """The encoder without a model: an empty vector for each frame; see ``base.Encoder``.

    A head takes the composition of the bases, which it reads beside the vector, from the record.
    """

    spec: EncoderSpec

    @property
    def kernel(self) -> str:
        return "none"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        return 0.0

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return [list(range(len(lengths)))] if lengths else []

    def start(self, sequences: Sequence[str]) -> Pending:
        return Arrived(np.empty((len(sequences), 0), dtype=np.float32))
