"""The ESM C forward pass on packed proteins (EvolutionaryScale 2024, "ESM Cambrian").

Results match ``EsmcModel`` in transformers. The layers differ from ESM-2's in four ways:

- Queries and keys are normed before the rotation, over all heads at once.
- The MLP is a SwiGLU (Shazeer 2020, arXiv:2002.05202).
- Linear layers have no bias.
- Branches are scaled where they join the residual stream.

Embeddings are used unscaled. Norms are float32, as in ESM-2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnucpro.models.attention import Kernel, attend_runs
from virnucpro.models.checkpoint import LAYER_NORM_EPS
from virnucpro.models.esmc.config import N_TOKENS, ESMCShape
from virnucpro.models.smoothing import NormedProducts
from virnucpro.models.transformer import (
    Factor,
    PackedTransformer,
    ResidualStream,
    TransformerLayer,
)


class ESMCLayer(TransformerLayer):
    """A transformer layer with normed queries and keys, and a SwiGLU."""

    products = ("qkv", "attention_out", "gate_up", "down")

    def __init__(self, shape: ESMCShape, dtype: torch.dtype) -> None:
        super().__init__(shape.n_heads, dtype)
        dim = shape.dim
        self.attention_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, dtype=dtype)
        self.q_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.gate_up = nn.Linear(dim, 2 * shape.inner, bias=False, dtype=dtype)
        self.down = nn.Linear(shape.inner, dim, bias=False, dtype=dtype)

    @property
    def normed_products(self) -> tuple[NormedProducts, ...]:
        return (
            NormedProducts(self.attention_norm, (self.qkv,)),
            NormedProducts(self.mlp_norm, (self.gate_up,)),
        )

    def project(self, normed: Factor) -> Tensor:
        """Project queries, keys and values. Norm queries and keys in place, in float32.

        (n_tokens, dim) -> (n_tokens, 3, n_heads, head_dim)
        """
        qkv = super().project(normed)
        for index, norm in enumerate((self.q_norm, self.k_norm)):
            rows = qkv[:, index].view(len(qkv), -1)
            rows.copy_(norm(rows.float()))
        return qkv

    def add_mlp(self, stream: ResidualStream) -> None:
        normed = stream.normed(self.mlp_norm, self.dtype)
        gate, up = self.linear(self.gate_up, normed).chunk(2, dim=1)
        inner = F.silu(gate).mul_(up)
        stream.add(self.linear(self.down, stream.as_factor(inner, self.dtype)))


class ESMC(PackedTransformer):
    """ESM C up to ``n_layers``, without the language-model head."""

    shape: ESMCShape

    def __init__(
        self, shape: ESMCShape, n_layers: int, dtype: torch.dtype, attend: Kernel = attend_runs
    ) -> None:
        is_complete = n_layers == shape.n_layers
        norm = nn.LayerNorm(shape.dim, eps=LAYER_NORM_EPS, bias=False)
        super().__init__(
            shape=shape,
            n_tokens=N_TOKENS,
            layers=[ESMCLayer(shape, dtype) for _ in range(n_layers)],
            final_norm=norm if is_complete else nn.Identity(),
            branch_scale=shape.branch_scale,
            attend=attend,
        )
