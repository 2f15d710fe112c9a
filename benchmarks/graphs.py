"""Fewer kernels, which no run uses yet: compiled layers and CUDA graphs.

A CUDA graph is a forward pass recorded once and replayed, for models that launches hold back. It
has one shape: every batch is laid into the same buffers of ``n_tokens``; what is left over is
filled with proteins of ``<pad>`` that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from timing import TimedEncoder
from torch import Tensor, nn

from virnucpro.encoders.esm2.attention import StagedBatch, flash_attention
from virnucpro.encoders.esm2.checkpoint import PAD
from virnucpro.encoders.esm2.model import ESM2, Layer, mean_pool
from virnucpro.encoders.transfer import PackedBatch, send

# turned queries and keys, and values, (n_tokens, n_heads, head_dim), -> the same
Attend = Callable[[Tensor, Tensor, Tensor, StagedBatch], Tensor]
_TOKENS_PER_PROTEIN = 16  # on average, at the least
_N_WARM_UP = 3


def as_graphed(encoder: TimedEncoder) -> TimedEncoder:
    """The same, to replay CUDA graphs."""
    assert isinstance(encoder.model, ESM2)
    graphed = GraphedESM2(encoder.model, encoder.setting.tokens_per_batch)

    @torch.inference_mode()
    def embed(proteins: list[str]) -> Tensor:
        batch = PackedBatch.of(proteins)
        return mean_pool(graphed(batch), batch)

    return replace(encoder, model=graphed, embed=embed)


def compile_layers(
    model: ESM2, attend: Attend = flash_attention, backend: str | Callable[..., object] = "inductor"
) -> None:
    """Fuse all that lies between one attention and the next, across the border of two layers.

    All layers share three graphs, which take any number of tokens: what comes before the first
    attention, between two, and after the last.
    """
    head = torch.compile(_head, dynamic=True, fullgraph=True, backend=backend)
    tail_head = torch.compile(_tail_head, dynamic=True, fullgraph=True, backend=backend)
    tail = torch.compile(_tail, dynamic=True, fullgraph=True, backend=backend)
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]

    def encode(batch: StagedBatch) -> Tensor:
        x = F.embedding(batch.tokens, model.token_rows())
        turned = head(layers[0], x, batch.cos, batch.sin)
        for layer, following in pairwise(layers):
            attended = attend(*turned, batch)
            x, turned = tail_head(layer, following, x, attended, batch.cos, batch.sin)
        return tail(layers[-1], model.final_norm, x, attend(*turned, batch))

    model.encode = encode  # type: ignore[method-assign]


def attend_each(q: Tensor, k: Tensor, v: Tensor, batch: StagedBatch) -> Tensor:
    """Attention protein by protein, on any device: to try the layers without a GPU."""
    out = torch.full_like(v, torch.nan)
    for first, last in pairwise(batch.cu_seqlens.tolist()):
        of_protein = [x[first:last].transpose(0, 1) for x in (q, k, v)]
        attended = F.scaled_dot_product_attention(of_protein[0], of_protein[1], of_protein[2])
        out[first:last] = attended.transpose(0, 1)
    return out


Turned = tuple[Tensor, Tensor, Tensor]  # queries, keys, and values, which do not turn


def _head(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Turned:
    """What attention is given, (n_tokens, n_heads, head_dim) each."""
    qkv = layer.project(layer.attention_norm(x).to(layer.dtype))
    a, b = qkv[:, :2].float().chunk(2, dim=-1)
    c, s = cos[:, None, None, : a.shape[-1]], sin[:, None, None]
    # no writing into slices, as ``rotate`` has it: so it becomes a single kernel
    turned = torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(qkv.dtype)
    return turned[:, 0], turned[:, 1], qkv[:, 2]


def _tail_head(
    layer: Layer, following: Layer, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Turned]:
    x = _finish(layer, x, attended)
    return x, _head(following, x, cos, sin)


def _tail(layer: Layer, norm: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    hidden: Tensor = norm(_finish(layer, x, attended))
    return hidden


def _finish(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.linear(layer.attention_out, attended.flatten(1))
    normed = layer.mlp_norm(x).to(layer.dtype)
    return x + layer.linear(layer.down, layer.linear(layer.up, normed, has_gelu=True))


class GraphedESM2(nn.Module):
    """An ESM-2 on a CUDA device with a kernel that takes offsets (``attend_varlen``)."""

    def __init__(self, model: ESM2, n_tokens: int) -> None:
        super().__init__()
        self.model, self.n_tokens = model, n_tokens
        self.n_offsets = n_tokens // _TOKENS_PER_PROTEIN + 1
        self.static: StagedBatch | None = None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by the longest protein

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """The same as ``ESM2.forward``; the result holds until the next call."""
        n_tokens = len(batch.tokens)
        offsets = pad_offsets(batch, self.n_tokens, self.n_offsets)
        if offsets is None:
            eager: Tensor = self.model(batch)
            return eager
        staged = StagedBatch.of(batch, self.model.inv_freq)
        staged = replace(staged, cu_seqlens=send(offsets, staged.tokens.device))
        if self.static is None:
            self.static = self._make_buffers(staged)
        for name in ("tokens", "cos", "sin"):
            getattr(self.static, name)[:n_tokens].copy_(getattr(staged, name))
        self.static.cu_seqlens.copy_(staged.cu_seqlens)
        self.static.tokens[n_tokens:] = PAD
        longest = 1 << (batch.max_seqlen - 1).bit_length()
        if longest not in self.graphs:
            self.graphs[longest] = self._record(replace(self.static, max_seqlen=longest))
        graph, hidden = self.graphs[longest]
        graph.replay()
        return hidden[:n_tokens]

    def _make_buffers(self, like: StagedBatch) -> StagedBatch:
        def buffer(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(self.n_tokens, *tensor.shape[1:])

        return replace(
            like,
            tokens=buffer(like.tokens),
            cu_seqlens=like.cu_seqlens.clone(),
            cos=buffer(like.cos),
            sin=buffer(like.sin),
        )

    def _record(self, batch: StagedBatch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_N_WARM_UP):
                self.model.encode(batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            hidden = self.model.encode(batch)
        return graph, hidden


def pad_offsets(batch: PackedBatch, n_tokens: int, n_offsets: int) -> NDArray[np.int32] | None:
    """Offsets of the proteins, of the padding in pieces no longer than they are, and of nothing.

    None if the batch does not fit. -> (n_offsets,), from 0 to ``n_tokens``
    """
    used = batch.cu_seqlens
    padding = np.arange(used[-1] + batch.max_seqlen, n_tokens, batch.max_seqlen, dtype=np.int32)
    n_left = n_offsets - len(used) - len(padding)
    if used[-1] > n_tokens or n_left < 1:
        return None
    return np.concatenate([used, padding, np.full(n_left, n_tokens, dtype=np.int32)])
