"""A packed transformer as a protein encoder: packed batches, pooling on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.attention import E4M3, choose_kernel, describe
from virnucpro.models.base import check_unchanged
from virnucpro.models.checkpoint import count_bytes, hash_weights
from virnucpro.models.checkpoint_model import WORTH_CONVERTING
from virnucpro.models.converted import is_converted
from virnucpro.models.fp8 import check_device
from virnucpro.models.packing import PackedBatch, PackedEncoder
from virnucpro.models.pooling import POOLS
from virnucpro.models.transformer import DTYPES, PackedTransformer

# (path, layers, product dtype, device) -> the first layers of a model
LoadTransformer = Callable[[Path, int, torch.dtype, torch.device], PackedTransformer]


def load_encoder(
    spec: EncoderSpec, weights: Path, device: torch.device, load: LoadTransformer
) -> TransformerEncoder:
    """Load the first ``spec.layer`` layers of a checkpoint or its converted copy.

    Raises:
        UnavailableError: the checkpoint cannot be used, or is small and does not match the recipe.
    """
    is_copy = is_converted(weights)
    if not is_copy and count_bytes(weights) < WORTH_CONVERTING:
        check_unchanged(spec, weights, hash_weights(weights))
    dtype = DTYPES[spec.precision]
    if spec.precision == "fp8":
        check_device(device)
        model = load(weights, spec.layer, dtype, torch.device("cpu")).quantise(device)
        model.attend = choose_kernel(device, E4M3, model.shape.head_dim)
        return TransformerEncoder(spec, model, device)
    model = load(weights, spec.layer, dtype, device)
    # Workers share the pages of a converted copy, so its weights keep their layout.
    if device.type == "cpu" and not is_copy:
        model.reorder_weights()
    return TransformerEncoder(spec, model, device)


class TransformerEncoder(PackedEncoder):
    """Our transformer on packed batches."""

    def __init__(self, spec: EncoderSpec, model: PackedTransformer, device: torch.device) -> None:
        super().__init__(spec, device, model.in_float32)
        self.model = model
        self.pool = POOLS[spec.pooling]

    @property
    def kernel(self) -> str:
        attention = describe(self.model.attend)
        if self.spec.precision != "fp8":
            return attention
        is_emulated = self.model.inv_freq.device.type == "cpu"
        return f"{attention}, products in fp8: {'emulated' if is_emulated else 'PyTorch'}"

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        squares = float(sum(length * length for length in lengths))
        return 2.0 * shape.n_parameters * sum(lengths) + 4.0 * squares * shape.dim * shape.n_layers

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Embed a batch. The rows stay on the device."""
        batch = PackedBatch.from_sequences(sequences)
        return self.pool(self.model(batch), batch)
