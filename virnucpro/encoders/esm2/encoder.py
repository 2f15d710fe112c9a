"""ESM-2 as an encoder of proteins: packed batches, pooled on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from virnucpro.config import EncoderSpec
from virnucpro.encoders.base import HostCopy, Pending
from virnucpro.encoders.esm2.converted import open_esm2
from virnucpro.encoders.esm2.model import DTYPES, ESM2, bos_pool, mean_pool, residues_only
from virnucpro.encoders.esm2.packing import EXTRA_TOKENS, PackedBatch, plan_batches

_POOL = {"mean": mean_pool, "bos": bos_pool, "none": residues_only}


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> ESM2Encoder:
    """The first ``spec.layer`` layers of a checkpoint or of its converted form.

    Raises:
        UnavailableError: it cannot be used.
    """
    model = open_esm2(weights, spec.layer, DTYPES[spec.precision], device)
    return ESM2Encoder(spec, model, device)


class ESM2Encoder:
    """Our ESM-2 on packed batches; see ``base.Encoder``."""

    def __init__(self, spec: EncoderSpec, model: ESM2, device: torch.device) -> None:
        self.spec, self.model = spec, model
        self.pool = _POOL[spec.pooling]
        self.copy = HostCopy(device)

    @property
    def kernel(self) -> str:
        return self.model.attend.__name__

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        squares = float(sum(length * length for length in lengths))
        return 2.0 * shape.n_parameters * sum(lengths) + 4.0 * squares * shape.dim * shape.n_layers

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    @torch.inference_mode()
    def start(self, sequences: Sequence[str]) -> Pending:
        batch = PackedBatch.of(sequences)
        return self.copy.start(self.pool(self.model(batch), batch))
