"""Fewer launches of kernels, which no run uses: compiled layers and CUDA graphs.

A CUDA graph is a forward pass recorded once and replayed, for models that launches hold back. It
has one shape: every batch is laid into the same buffers of ``n_tokens``; what is left over is
filled with proteins of ``<pad>`` that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.bench.comparison import Comparison, EncoderRow, compare
from virnucpro.bench.encoder import OURS, Encoder, Setting, Way, load_ours
from virnucpro.bench.layouts import layouts
from virnucpro.config import Precision
from virnucpro.encoders.esm2.alphabet import PAD
from virnucpro.encoders.esm2.attention import attend_varlen
from virnucpro.encoders.esm2.model import ESM2, Layer, mean_pool
from virnucpro.encoders.esm2.packing import PackedBatch, StagedBatch

_TOKENS_PER_PROTEIN = 16  # on average, at the least
_N_WARM_UP = 3


def compare_launches(
    setting: Setting, model: str, profile: str, proteins: Sequence[str], repeats: int
) -> Iterator[EncoderRow]:
    """One row for the model as a run has it, one with compiled layers, one with CUDA graphs."""
    comparison = Comparison(
        model=model,
        shape=setting.shape,
        profile=profile,
        proteins=proteins,
        repeats=repeats,
        limits={},
    )
    loads = {"as in a run": load_plain, "compiled": load_compiled, "graphs": load_graphed}
    precision: Precision = "bf16"
    ways = [Way(OURS, precision, name, load) for name, load in loads.items()]
    with layouts(setting, 1, len(ways)) as places:
        yield from compare(comparison, ways, places)


def load_plain(setting: Setting) -> Encoder:
    return load_ours(setting, "bf16", attend_varlen)


def load_compiled(setting: Setting) -> Encoder:
    """Load the model with compiled layers; the compiler runs before the clock does."""
    encoder = load_plain(setting)
    assert isinstance(encoder.model, ESM2)
    compile_layers(encoder.model)
    encoder.embed(["M" * 100])
    return encoder


def load_graphed(setting: Setting) -> Encoder:
    """Load the model to replay CUDA graphs."""
    encoder = load_plain(setting)
    assert isinstance(encoder.model, ESM2)
    graphed = GraphedESM2(encoder.model, setting.tokens_per_batch)

    @torch.inference_mode()
    def embed(proteins: list[str]) -> Tensor:
        batch = PackedBatch.of(proteins)
        return mean_pool(graphed(batch), batch)

    return replace(encoder, model=graphed, embed=embed)


def compile_layers(model: ESM2, backend: str | Callable[..., object] = "inductor") -> None:
    """Fuse what lies around the attention of each layer into few kernels.

    All layers share one graph, which takes any number of tokens.
    """
    project = torch.compile(Layer.project, dynamic=True, backend=backend)
    finish = torch.compile(Layer.finish, dynamic=True, backend=backend)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.__dict__.update(project=partial(project, layer), finish=partial(finish, layer))


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
        staged = StagedBatch.of(replace(batch, cu_seqlens=offsets), self.model.inv_freq)
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
