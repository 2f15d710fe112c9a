"""DNABERT-S's forward pass on packed texts (Zhou et al. 2025, doi:10.1093/bioinformatics/btaf188).

The model is a MosaicBERT (Portes et al. 2023, arXiv:2312.17482). It has a norm after each sub-layer
and a gated MLP. Instead of position embeddings, it subtracts a penalty from attention scores that
grows with the distance between two tokens (ALiBi, Press et al. 2022, arXiv:2108.12409). All numbers
are float32. On tensor cores a product may split its factors into two bf16 parts each, which keep 16
of their 24 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.core.logging import LOGGER
from virnucpro.models.attention import triton_kernels
from virnucpro.models.packing import PackedBatch, bag_mean, segment_mean, to_device

LAYER_NORM_EPS = 1e-12


@dataclass(frozen=True, slots=True)
class DNABERTShape:
    """The dimensions of a DNABERT-S model."""

    n_layers: int
    dim: int
    n_heads: int
    inner: int  # MLP width, after its gate
    n_words: int  # vocabulary size

    @property
    def layer_products(self) -> int:
        """Count the weights in a layer's matrix products."""
        return 4 * self.dim**2 + 3 * self.inner * self.dim

    @property
    def n_parameters(self) -> int:
        """Count the parameters, without the pooler."""
        per_layer = self.layer_products + 9 * self.dim
        return self.n_layers * per_layer + (self.n_words + 4) * self.dim


def pack(rows: Sequence[Sequence[int]]) -> tuple[PackedBatch, NDArray[np.int64]]:
    """Pack tokenized texts, sorted by number of tokens. -> batch, and the index of each text"""
    seqlens = np.array(list(map(len, rows)))
    order = np.argsort(seqlens, kind="stable")
    tokens = np.concatenate([rows[i] for i in order])
    return PackedBatch.from_tokens(tokens, seqlens[order]), np.argsort(order)


# Attention within each text in a batch: a layer's queries, keys and values, (n_tokens, 3, n_heads,
# head_dim) -> (n_tokens, n_heads, head_dim). Created once per batch, number of heads and device.
# All layers share it.
Attend = Callable[[Tensor], Tensor]
Kernel = Callable[[PackedBatch, int, torch.device], Attend]


def attend_runs(batch: PackedBatch, n_heads: int, device: torch.device) -> Attend:
    """Apply SDPA to each run of texts with equal length, on any device."""
    penalties = distance_penalties(n_heads, batch.max_seqlen, device)

    def attend(qkv: Tensor) -> Tensor:
        out = torch.empty_like(qkv[:, 0])
        for first, n, seqlen in batch.runs:
            part = slice(first, first + n * seqlen)
            q, k, v = qkv[part].view(n, seqlen, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
            mask = penalties[None, :, :seqlen, :seqlen]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out[part].view(n, seqlen, *out.shape[1:]).copy_(attended.transpose(1, 2))
        return out

    return attend


def attend_texts_triton(batch: PackedBatch, n_heads: int, device: torch.device) -> Attend:
    """Apply our kernel, in one launch for all texts (CUDA)."""
    offsets = to_device(batch.cu_seqlens, device)
    slopes = send_slopes(n_heads, device)
    attend_texts = triton_kernels().attend_sequences

    def attend(qkv: Tensor) -> Tensor:
        attended: Tensor = attend_texts(qkv, offsets, slopes, batch.max_seqlen)
        return attended

    return attend


def choose_kernel(device: torch.device) -> Kernel:
    """Choose our kernel on an NVIDIA GPU. If Triton rejects it, a warning says why."""
    if device.type != "cuda":
        return attend_runs
    (refusal,) = triton_kernels().unavailable_kernels(device, torch.float32).values()
    if not refusal:
        return attend_texts_triton
    LOGGER.warning("attention: PyTorch, which is slower than Triton (%s)", refusal)
    return attend_runs


class _SplitLinear(nn.Module):
    """A float32 linear layer, computed as a bf16 product that is three times as long.

    Each factor is the sum of two bf16 numbers, high and low. Among the four products of their
    parts, the smallest, low by low, is omitted. Sums are float32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        high, low = _in_two_parts(linear.weight.detach())
        self.weight = nn.Parameter(torch.cat([high, high, low], dim=1), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        high, low = _in_two_parts(x)
        product = _multiply(torch.cat([high, low, high], dim=1), self.weight.mT)
        return product if self.bias is None else product.add_(self.bias)


def _in_two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply bf16 matrices in float32, which represents a product of two bf16 numbers exactly."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _Layer(nn.Module):
    """A transformer layer. (n_tokens, dim) -> the same."""

    def __init__(self, shape: DNABERTShape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        self.qkv: nn.Module = nn.Linear(shape.dim, 3 * shape.dim)
        self.attention_out: nn.Module = nn.Linear(shape.dim, shape.dim)
        self.attention_norm = nn.LayerNorm(shape.dim, eps=LAYER_NORM_EPS)
        self.gate_and_up: nn.Module = nn.Linear(shape.dim, 2 * shape.inner, bias=False)
        self.down: nn.Module = nn.Linear(shape.inner, shape.dim)
        self.mlp_norm = nn.LayerNorm(shape.dim, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3, self.n_heads, -1)
        x = self.attention_norm(x + self.attention_out(attend(qkv).flatten(1)))
        gate, up = self.gate_and_up(x).chunk(2, dim=1)
        normed: Tensor = self.mlp_norm(x + self.down(F.gelu(gate) * up))
        return normed


class DNABERT(nn.Module):
    """DNABERT-S up to ``n_layers``, without its pooler."""

    def __init__(self, shape: DNABERTShape, n_layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.kernel: Kernel = attend_runs
        self.embedding = nn.Embedding(shape.n_words, shape.dim)
        self.token_types = nn.Embedding(2, shape.dim)  # the first one is added to every token
        self.embedding_norm = nn.LayerNorm(shape.dim, eps=LAYER_NORM_EPS)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(n_layers))

    def forward(self, tokens: Tensor, batch: PackedBatch) -> Tensor:
        """Return the hidden state after this model's last layer. (n_tokens,) -> (n_tokens, dim)"""
        x: Tensor = self.embedding_norm(self.embedding(tokens) + self.token_types.weight[0])
        attend = self.kernel(batch, self.shape.n_heads, x.device)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def split_products(self) -> None:
        """Switch to matrix products with two bf16 parts. The weights must be loaded."""
        for layer in self.layers:
            for name, linear in list(layer.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(layer, name, _SplitLinear(linear))


def distance_penalties(n_heads: int, seqlen: int, device: torch.device) -> Tensor:
    """Return the values added to token pair scores, (n_heads, seqlen, seqlen) float32."""
    place = torch.arange(seqlen, dtype=torch.float32, device=device)
    slopes = send_slopes(n_heads, device)
    return -slopes[:, None, None] * (place[:, None] - place).abs()


def send_slopes(n_heads: int, device: torch.device) -> Tensor:
    """Copy the slopes from ``alibi_slopes`` to a device, (n_heads,) float32."""
    return to_device(np.array(alibi_slopes(n_heads), dtype=np.float32), device)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return each head's penalty for a distance of one token, in head order.

    For a power of two, the penalties are a geometric series down to 2^-8. For other numbers, they
    are the series for the next lower power of two, then every second value for the next higher one.
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2 ** (-8 * i / (2 * below)) for i in range(1, 2 * (n_heads - below), 2)]


def mean_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Average all tokens in each text in a batch, including [CLS] and [SEP].

    (n_tokens, dim) -> (n_texts, dim)
    """
    if hidden.device.type == "cuda":
        return bag_mean(hidden, np.arange(len(hidden)), batch.cu_seqlens[:-1].astype("int64"))
    return segment_mean(hidden, batch.runs)
