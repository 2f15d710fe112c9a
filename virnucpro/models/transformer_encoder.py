"""A packed transformer as a protein encoder: packed batches, pooling on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.attention import describe
from virnucpro.models.base import check_unchanged
from virnucpro.models.checkpoint import count_bytes, hash_weights
from virnucpro.models.checkpoint_model import WORTH_CONVERTING
from virnucpro.models.converted import ReadHeads, is_converted, load_heads
from virnucpro.models.eight_bits import EIGHT_BITS, check_device
from virnucpro.models.heads import Heads
from virnucpro.models.output_pass import OutputPass
from virnucpro.models.packing import PackedBatch, PackedEncoder, plan_costs
from virnucpro.models.protein_tokens import EXTRA_TOKENS
from virnucpro.models.transformer import DTYPES, PackedTransformer

# (path, number of layers or None for all, product dtype, device) -> the first layers of a model
LoadTransformer = Callable[[Path, int | None, torch.dtype, torch.device], PackedTransformer]


def load_encoder(
    spec: EncoderSpec,
    weights: Path,
    device: torch.device,
    load: LoadTransformer,
    read_heads: ReadHeads,
) -> TransformerEncoder:
    """Load the layers and heads that ``spec`` needs, of a checkpoint or its converted copy.

    Raises:
        UnavailableError: the checkpoint cannot be used, or is small and does not match the recipe.
    """
    is_copy = is_converted(weights)
    if not is_copy and count_bytes(weights) < WORTH_CONVERTING:
        check_unchanged(spec, weights, hash_weights(weights))
    heads = load_heads(spec, weights, read_heads).to(device) if spec.needs_head else None
    n_layers = None if spec.needs_head else spec.layer
    dtype = DTYPES[spec.precision]
    if factors := EIGHT_BITS.get(spec.precision):
        check_device(device, spec.precision)
        model = load(weights, n_layers, dtype, torch.device("cpu")).quantise(device, factors)
        return TransformerEncoder(spec, model, device, heads)
    model = load(weights, n_layers, dtype, device)
    # Workers share the pages of a converted copy, so its weights keep their layout.
    if device.type == "cpu" and not is_copy:
        model.reorder_weights()
    return TransformerEncoder(spec, model, device, heads)


class TransformerEncoder(PackedEncoder):
    """Our transformer on packed batches."""

    _TOKENS_PER_PASS = 4096  # in passes with masks, before a batch is planned

    def __init__(
        self,
        spec: EncoderSpec,
        model: PackedTransformer,
        device: torch.device,
        heads: Heads | None = None,
    ) -> None:
        super().__init__(spec, device, model.in_float32)
        self.model = model
        self.outputs = OutputPass(spec, model, heads)
        self.tokens_per_pass = self._TOKENS_PER_PASS

    @property
    def kernel(self) -> str:
        attention = describe(self.model.attend)
        precision = self.spec.precision
        if precision not in EIGHT_BITS:
            return attention
        is_emulated = precision == "fp8" and self.model.inv_freq.device.type == "cpu"
        return f"{attention}, products in {precision}: {'emulated' if is_emulated else 'PyTorch'}"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return int(self._costs(lengths).sum())

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        residues = np.asarray(lengths, dtype=np.float64)
        n_rows = self._count_rows(residues)
        n_residues = float((n_rows * residues).sum())
        squares = float((n_rows * residues**2).sum())
        return 2.0 * shape.n_parameters * n_residues + 4.0 * squares * shape.dim * shape.n_layers

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        """Group proteins by the tokens of all their rows. The passes have the same limit."""
        self.tokens_per_pass = tokens_per_batch
        return plan_costs(self._costs(lengths), tokens_per_batch)

    def _costs(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        """Return the tokens of each protein, in all its rows. (n,)"""
        residues = np.asarray(lengths, dtype=np.int64)
        costs: NDArray[np.int64] = self._count_rows(residues) * (residues + EXTRA_TOKENS)
        return costs

    def _count_rows(self, residues: NDArray[Any]) -> NDArray[Any]:
        """Count the rows of proteins: one, and for a perplexity one more for each residue. (n,)"""
        return 1 + residues if self.spec.masks_residues else np.ones_like(residues)

    def embed(self, sequences: Sequence[str]) -> Tensor:
        return self.embed_all(sequences)[0]

    @torch.inference_mode()
    def embed_all(self, sequences: Sequence[str]) -> Sequence[Tensor]:
        batch = PackedBatch.from_sequences(sequences)
        return self.outputs.run(batch, self.tokens_per_pass)
