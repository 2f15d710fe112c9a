"""The ESM-2 forward pass on packed proteins (Lin et al. 2023, doi:10.1126/science.ade2574).

Results match fair-esm 2.0.0: pre-norm layers, rotary positions, exact GELU, embeddings scaled for
token dropout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virnucpro.models.attention import Kernel, RunLayout, attend_runs, attend_to_train
from virnucpro.models.checkpoint import LAYER_NORM_EPS
from virnucpro.models.eight_bits import EIGHT_BITS
from virnucpro.models.esm2.config import N_TOKENS, ESM2Shape
from virnucpro.models.packing import PackedBatch, to_device
from virnucpro.models.protein_tokens import AMINO_ACID_TOKENS, SpecialToken
from virnucpro.models.smoothing import NormedProducts
from virnucpro.models.transformer import (
    Factor,
    PackedTransformer,
    ResidualStream,
    TransformerLayer,
)

# share of residues chosen in training, and shares of these masked or replaced (the rest stay)
_CHOSEN = 0.15
_MASK_SHARE = 0.8
TOKEN_DROPOUT_SCALE = 1 - _CHOSEN * _MASK_SHARE  # token dropout zeroes masked tokens


class Layer(TransformerLayer):
    """An ESM-2 layer. Its MLP uses exact GELU."""

    products = ("qkv", "attention_out", "up", "down")

    def __init__(self, shape: ESM2Shape, dtype: torch.dtype) -> None:
        super().__init__(shape.n_heads, dtype)
        dim = shape.dim
        self.attention_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.qkv = nn.Linear(dim, 3 * dim, dtype=dtype)
        self.attention_out = nn.Linear(dim, dim, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.up = nn.Linear(dim, 4 * dim, dtype=dtype)
        self.down = nn.Linear(4 * dim, dim, dtype=dtype)

    @property
    def normed_products(self) -> tuple[NormedProducts, ...]:
        return (
            NormedProducts(self.attention_norm, (self.qkv,)),
            NormedProducts(self.mlp_norm, (self.up,)),
        )

    def forward(self, x: Tensor, batch: RunLayout, attend: Kernel) -> Tensor:
        """Apply the layer, and keep only its input for the gradient (checkpointing).

        The arguments and the result are tensors, so that FSDP knows when the layer needs its
        weights.
        """

        def added(x: Tensor) -> Tensor:
            stream = ResidualStream(x, has_triton=False)
            self.add_to(stream, batch, attend)
            return stream.x

        out: Tensor = checkpoint(added, x, use_reentrant=False)
        return out

    def add_mlp(self, stream: ResidualStream) -> None:
        is_8_bits = self.dtype in EIGHT_BITS.values()
        normed = stream.normed(self.mlp_norm, self.dtype)
        inner: Factor = self.linear(self.up, normed, has_gelu=not is_8_bits)
        if isinstance(inner, Tensor) and is_8_bits:
            inner = stream.quantised(inner, self.dtype, has_gelu=True)
        stream.add(self.linear(self.down, inner))


@dataclass(frozen=True, slots=True, eq=False)
class MaskedBatch:
    """Proteins with some residues masked: the masked-language task of ESM-2.

    15 % of the residues are chosen. 80 % of these are masked and 10 % are replaced at random (Lin
    et al. 2023, after Devlin et al. 2018).
    """

    packed: PackedBatch  # contains <mask>
    scale: NDArray[np.float32]  # (n_tokens,), factor of each token's embedding: 0 where masked
    places: NDArray[np.int64]  # (n_chosen,) indices into the packed tokens
    targets: NDArray[np.int64]  # (n_chosen,) original tokens

    @classmethod
    def from_batch(cls, proteins: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> MaskedBatch:
        """Mask each protein with its own seed, so that its mask does not depend on the batch.

        As in ESM-2, the remaining embeddings are scaled up to compensate for the masked ones.
        """
        random_share = 0.1
        packed = PackedBatch.from_sequences(proteins)
        tokens = packed.tokens.copy()
        places = []
        for seed, (begin, end) in zip(seeds, pairwise(packed.cu_seqlens.tolist()), strict=True):
            rng = np.random.default_rng(seed)
            n_residues = end - begin - 2
            order = rng.permutation(n_residues)[: int(cls.n_chosen(np.array(n_residues)))]
            places.append(chosen := begin + 1 + order)
            what = rng.random(len(chosen))
            tokens[chosen[what < _MASK_SHARE]] = SpecialToken.MASK
            swapped = chosen[(what >= _MASK_SHARE) & (what < _MASK_SHARE + random_share)]
            tokens[swapped] = rng.choice(AMINO_ACID_TOKENS, len(swapped))
        n_tokens = np.diff(packed.cu_seqlens)
        is_masked = tokens == SpecialToken.MASK
        owner = np.repeat(np.arange(len(proteins)), n_tokens)
        share = np.bincount(owner, is_masked, len(proteins)) / n_tokens
        scale = (TOKEN_DROPOUT_SCALE / (1 - share))[owner] * ~is_masked
        chosen = np.concatenate(places)
        masked = replace(packed, tokens=tokens)
        return cls(masked, scale.astype(np.float32), chosen, packed.tokens[chosen])

    @staticmethod
    def n_chosen(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Count the chosen residues in proteins of these lengths, at least one each."""
        return np.maximum(1, np.round(_CHOSEN * lengths))


class ESM2(PackedTransformer):
    """ESM-2 up to ``n_layers``, without LM and contact heads."""

    shape: ESM2Shape

    def __init__(
        self, shape: ESM2Shape, n_layers: int, dtype: torch.dtype, attend: Kernel = attend_runs
    ) -> None:
        is_whole = n_layers == shape.n_layers
        norm = nn.LayerNorm(shape.dim, eps=LAYER_NORM_EPS)
        super().__init__(
            shape=shape,
            n_tokens=N_TOKENS,
            layers=[Layer(shape, dtype) for _ in range(n_layers)],
            final_norm=norm if is_whole else nn.Identity(),
            attend=attend,
        )
        self.is_checkpointed = False

    @staticmethod
    def create(shape: ESM2Shape) -> ESM2:
        """Make an ESM-2 with random weights, ready for training.

        Weights are normal with a standard deviation of 0.02. The deviation is smaller where a layer
        adds to the residual stream, so that the stream does not grow with depth (Radford et al.
        2019).
        """
        encoder = ESM2(shape, shape.n_layers, torch.float32).to_train()
        for name, parameter in encoder.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.n_layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return encoder

    def token_rows(self) -> Tensor:
        """Return the first layer's input for each token, scaled for token dropout."""
        rows = self.embedding.weight
        return rows * TOKEN_DROPOUT_SCALE if self.shape.token_dropout else rows

    def scale_tokens(self, batch: RunLayout) -> Tensor | None:
        """Embed tokens with token dropout: masks are zero, and the others compensate for them."""
        if batch.mask_shares is None or not self.shape.token_dropout:
            return None
        scale = TOKEN_DROPOUT_SCALE / (1 - batch.mask_shares)
        rows: Tensor = self.embedding(batch.tokens)
        return rows * (scale * (batch.tokens != SpecialToken.MASK))[:, None]

    def transform(self, x: Tensor, batch: RunLayout) -> Tensor:
        """Apply all layers to embedded tokens. (n_tokens, dim) -> the same"""
        return self.apply_layers(self.layers_in_use(), self.stream_of(x), batch)

    def read_masked(self, batch: MaskedBatch) -> Tensor:
        """Compute the hidden state of each chosen residue, as in ``forward``. -> (n_chosen, dim)"""
        staged = self.lay_out(batch.packed)
        scale, places = (
            to_device(one, self.inv_freq.device) for one in (batch.scale, batch.places)
        )
        x = self.embedding(staged.tokens) * scale[:, None]
        return self.transform(x, staged)[places]

    def forget_activations(self) -> None:
        """Checkpoint activations: layers keep only their inputs, and run again for gradients."""
        self.is_checkpointed = True

    def to_train(self) -> ESM2:
        """Switch to attention with gradients, and return this model."""
        self.attend = attend_to_train
        return self

    def apply_layers(
        self, layers: Iterable[TransformerLayer], stream: ResidualStream, batch: RunLayout
    ) -> Tensor:
        if not self.is_checkpointed:
            return super().apply_layers(layers, stream, batch)
        for layer in layers:
            stream.x = layer(stream.x, batch, self.attend)
        return stream.final(self.final_norm)
