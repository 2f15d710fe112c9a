"""ESM-2 as an encoder of proteins: packed batches, pooling on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.encoders.base import Pending, Rows
from virnucpro.encoders.esm2.attention import E4M3, choose_kernel, describe
from virnucpro.encoders.esm2.converted import is_converted, open_esm2
from virnucpro.encoders.esm2.model import (
    DTYPES,
    ESM2,
    bos_pool,
    check_device,
    mean_pool,
    residues_only,
)
from virnucpro.encoders.esm2.packing import EXTRA_TOKENS, PackedBatch, plan_batches
from virnucpro.encoders.transfer import HostCopy
from virnucpro.ground.config import EncoderSpec

_POOL = {"mean": mean_pool, "bos": bos_pool, "none": residues_only}


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> ESM2Encoder:
    """The first ``spec.layer`` layers of a checkpoint or of its converted form.

    Raises:
        UnavailableError: it cannot be used.
    """
    dtype = DTYPES[spec.precision]
    if spec.precision == "fp8":
        check_device(device)
        model = open_esm2(weights, spec.layer, dtype, torch.device("cpu")).quantise(device)
        model.attend = choose_kernel(device, E4M3, model.shape.head_dim)
        return ESM2Encoder(spec, model, device)
    model = open_esm2(weights, spec.layer, dtype, device)
    if device.type == "cpu" and not is_converted(weights):  # which all workers share as it is
        model.reorder_weights()
    return ESM2Encoder(spec, model, device)


class ESM2Encoder:
    """Our ESM-2 on packed batches; see ``base.Encoder``."""

    def __init__(self, spec: EncoderSpec, model: ESM2, device: torch.device) -> None:
        self.spec, self.model = spec, model
        self.pool = _POOL[spec.pooling]
        self.copy = HostCopy(device)

    @property
    def kernel(self) -> str:
        attention = describe(self.model.attend)
        if self.spec.precision != "fp8":
            return attention
        is_emulated = self.model.inv_freq.device.type == "cpu"
        return f"{attention}, products in fp8: {'emulated' if is_emulated else 'PyTorch'}"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        squares = float(sum(length * length for length in lengths))
        return 2.0 * shape.n_parameters * sum(lengths) + 4.0 * squares * shape.dim * shape.n_layers

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        pending = self.copy.start(self.embed(sequences))
        if self.spec.precision != "fp16":
            return pending
        return Fp16Batch(sequences, pending, self.model, self.embed)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """The rows of a batch, on the device."""
        batch = PackedBatch.of(sequences)
        return self.pool(self.model(batch), batch)


@dataclass(slots=True, eq=False)
class Fp16Batch:
    """A batch in fp16; a protein whose numbers are too large for that is embedded in float32.

    It is embedded alone then, so that its vector does not depend on the batch.
    """

    sequences: Sequence[str]
    pending: Pending
    model: ESM2
    embed: Callable[[Sequence[str]], Tensor]
    n_repeated: int = 0

    def rows(self) -> Rows:
        rows = self.pending.rows()
        parts = np.split(rows, self.ends(len(rows))[:-1])  # views
        for sequence, part in zip(self.sequences, parts, strict=True):
            if not np.isfinite(part).all():
                with self.model.in_float32():
                    part[:] = self.embed([sequence]).cpu().numpy()
                self.n_repeated += 1
        return rows

    def ends(self, n_rows: int) -> NDArray[np.int64]:
        """The end of each protein among the rows, of which it has one, or one per residue."""
        if n_rows == len(self.sequences):
            return np.arange(1, n_rows + 1)
        return np.cumsum([len(sequence) for sequence in self.sequences])
