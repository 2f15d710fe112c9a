"""ESM-2's forward pass on packed proteins (Lin et al. 2023, doi:10.1126/science.ade2574).

The numbers are those of fair-esm 2.0.0: pre-norm layers, rotary positions, exact GELU, embeddings
scaled for token dropout. Matrix products use the chosen precision; the residual stream, norms,
rotary tables and pooling are always float32, since a rotary table in bf16 gives wrong angles.
In fp8 the products within the layers take 8-bit numbers; all else is as in bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.models.esm2.attention import (
    E4M3,
    OF_TRITON,
    Kernel,
    RunLayout,
    attend_runs,
    attend_to_train,
    choose_kernel,
    triton_kernels,
)
from virnucpro.models.esm2.config import (
    AMINO_ACID_TOKENS,
    LAYER_NORM_EPS,
    MASK,
    N_TOKENS,
    ROPE_THETA,
    ESM2Shape,
)
from virnucpro.models.packing import PackedBatch, bag_mean, segment_mean, to_device

# the type of weights in memory and of results of products, by precision
DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # before ``ESM2.quantise``
}
# share of the residues chosen in training, and of these masked or replaced; the rest stay
_CHOSEN, _OF_MASKED, _OF_RANDOM = 0.15, 0.8, 0.1
TOKEN_DROPOUT_SCALE = 1 - _CHOSEN * _OF_MASKED  # token dropout zeroes masked tokens
LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # stands for the largest number of a row of zeros
FP8_WIDTH = 16  # both dimensions of an 8-bit weight matrix are multiples of it
_USUAL_TOKENS = 2048  # of a batch on a CPU
_MOST_WAITING = 2  # sums that a kernel adds at once


# Matrix products of 8-bit numbers (e4m3), for GPUs that multiply them twice as fast as bf16.
#
# Each row of a factor has its own scale, which makes its largest number the largest of e4m3: rows
# of weights are scaled once, activations token by token. Products are summed in float32 (tensor
# cores keep about 14 bits within an instruction: DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2) and
# leave as bf16, with the bias. A GPU needs compute capability 8.9 (``_scaled_mm_allowed_device`` of
# PyTorch's ScaledBlas.cpp), contiguous rows of the first factor and columns of the second, and
# weights with multiples of 16 in both dimensions; the number of tokens is free. Other devices
# compute the same product of the same 8-bit numbers in float32, slowly.


class _Rows8(NamedTuple):
    """Rows in e4m3, each with a scale by which its numbers are multiplied."""

    values: Tensor  # (n_rows, dim) e4m3
    scales: Tensor  # (n_rows, 1) float32


def quantise(rows: Tensor) -> _Rows8:
    """Scale the rows, (n_rows, dim), and round them to e4m3."""
    rows = rows.float()
    largest = rows.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST)
    return _Rows8((rows * (LARGEST / largest)).to(E4M3), largest / LARGEST)


def restore(rows: _Rows8) -> Tensor:
    """The numbers of the rows, in float32."""
    return rows.values.float() * rows.scales


class _Linear8(nn.Module):
    """A linear layer with its weights quantised: ``_Rows8`` -> (n_rows, n_out) bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scales = quantise(linear.weight.detach())
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales.t().contiguous(), requires_grad=False)  # (1, n_out)
        self.bias = linear.bias

    def forward(self, rows: _Rows8) -> Tensor:
        if rows.values.device.type == "cpu":
            product = rows.values.float() @ self.weight.float().t()
            return (product * rows.scales * self.scales + self.bias.float()).to(torch.bfloat16)
        return torch._scaled_mm(
            rows.values,
            self.weight.t(),
            scale_a=rows.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,  # that would sum in fewer bits than float32
        )


def check_device(device: torch.device) -> None:
    """Try a product on a GPU, since a build of PyTorch may lack it even for a new GPU.

    Raises:
        UnavailableError: the product does not run.
    """
    if device.type == "cpu":
        return
    try:
        linear = nn.Linear(FP8_WIDTH, FP8_WIDTH, dtype=torch.bfloat16, device=device)
        _Linear8(linear)(quantise(torch.ones(1, FP8_WIDTH, device=device)))
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"this build of torch ({torch.__version__}) has no products in fp8 for {device}: "
            f"{printable(error)}",
            hint=with_options("use {precision:bf16}"),
        ) from error


# The model


@dataclass(slots=True, eq=False)
class _ResidualStream:
    """The residual stream, (n_tokens, dim) float32, and the results still to be added to it.

    With Triton, an addition waits for the next LayerNorm: one kernel adds, norms and rounds, and
    writes the sum only at every second LayerNorm. The sums are the same.
    """

    x: Tensor
    has_triton: bool
    waiting: list[Tensor] = field(default_factory=list)  # at most two

    def add(self, branch: Tensor) -> None:
        """Add the result of a sub-layer; any type."""
        if self.has_triton:
            self.waiting.append(branch)
        else:
            self.x = self.x + branch

    def normed(self, norm: nn.LayerNorm, dtype: torch.dtype) -> Factor:
        """Norm the stream for a sub-layer. -> (n_tokens, dim) of ``dtype``"""
        if not self.has_triton:
            rows: Tensor = norm(self.x)
            return quantise(rows) if dtype == E4M3 else rows.to(dtype)
        out = torch.empty_like(self.x, dtype=dtype)
        scales = self.x.new_empty(len(out), 1) if dtype == E4M3 else None
        total = torch.empty_like(self.x) if len(self.waiting) == _MOST_WAITING else None
        triton_kernels().add_and_norm(self.x, self.waiting, norm, out, total, scales)
        if total is not None:
            self.x, self.waiting = total, []
        return out if scales is None else _Rows8(out, scales)

    def quantised(self, rows: Tensor, *, has_gelu: bool = False) -> _Rows8:
        """Round rows within a sub-layer to e4m3, with ``has_gelu`` after GELU."""
        if not self.has_triton:
            return quantise(F.gelu(rows.float()) if has_gelu else rows)
        out = _Rows8(torch.empty_like(rows, dtype=E4M3), self.x.new_empty(len(rows), 1))
        triton_kernels().quantise(rows, *out, has_gelu=has_gelu)
        return out

    def final(self, norm: nn.Module) -> Tensor:
        """The stream after the last layer, normed if that is ESM-2's last. -> float32"""
        if self.has_triton and isinstance(norm, nn.LayerNorm):
            out = torch.empty_like(self.x)
            triton_kernels().add_and_norm(self.x, self.waiting, norm, out, None)
            return out
        normed: Tensor = norm(sum(self.waiting, self.x))
        return normed


Factor = Tensor | _Rows8  # the first factor of a product with weights


class Layer(nn.Module):
    """A transformer layer, which adds to the residual stream."""

    def __init__(self, shape: ESM2Shape, dtype: torch.dtype) -> None:
        super().__init__()
        dim = shape.dim
        self.n_heads, self.dtype = shape.n_heads, dtype  # of the first factor of products
        self.attention_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.qkv = nn.Linear(dim, 3 * dim, dtype=dtype)
        self.attention_out = nn.Linear(dim, dim, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.up = nn.Linear(dim, 4 * dim, dtype=dtype)
        self.down = nn.Linear(4 * dim, dim, dtype=dtype)
        self.is_fused = dtype == torch.bfloat16 and cpu_fuses_linear()

    def forward(self, x: Tensor, batch: RunLayout, attend: Kernel) -> Tensor:
        """Apply the layer, and keep only its input for the gradient (checkpointing).

        Takes and returns tensors, so that FSDP knows when the layer needs its weights.
        """

        def added(x: Tensor) -> Tensor:
            stream = _ResidualStream(x, has_triton=False)
            self.add_to(stream, batch, attend)
            return stream.x

        out: Tensor = checkpoint(added, x, use_reentrant=False)
        return out

    def add_to(self, stream: _ResidualStream, batch: RunLayout, attend: Kernel) -> None:
        normed = stream.normed(self.attention_norm, self.dtype)
        self.finish(stream, attend(self.project(normed), batch))

    def in_float32(self) -> Layer:
        """A copy of the layer with products in float32, of the same weights in fp16."""
        layer = copy.deepcopy(self).float()
        layer.dtype = torch.float32
        return layer

    def reorder_weights(self) -> None:
        """Lay the weights out for oneDNN once, instead of in each batch.

        The copy in this layout works only in ``linear``. It has no gradients.
        """
        self.is_fused = True
        for part in (self.qkv, self.attention_out, self.up, self.down):
            ordered = torch.ops.mkldnn._reorder_linear_weight(part.weight, _USUAL_TOKENS)
            part.weight = nn.Parameter(ordered, requires_grad=False)

    def quantise(self) -> None:
        """Switch to products of 8-bit numbers; the loaded weights are bf16."""
        for name in ("qkv", "attention_out", "up", "down"):
            setattr(self, name, _Linear8(getattr(self, name)))
        self.dtype, self.is_fused = E4M3, False

    def project(self, normed: Factor) -> Tensor:
        """Queries, keys and values. (n_tokens, dim) -> (n_tokens, 3, n_heads, head_dim)"""
        projected = self.linear(self.qkv, normed)
        return projected.view(len(projected), 3, self.n_heads, -1)

    def finish(self, stream: _ResidualStream, attended: Tensor) -> None:
        """Add attention, (n_tokens, n_heads, head_dim), and MLP to the stream."""
        is_8_bits, mixed = self.dtype == E4M3, attended.flatten(1)
        stream.add(self.linear(self.attention_out, stream.quantised(mixed) if is_8_bits else mixed))
        normed = stream.normed(self.mlp_norm, self.dtype)
        inner: Factor = self.linear(self.up, normed, has_gelu=not is_8_bits)
        if isinstance(inner, Tensor) and is_8_bits:
            inner = stream.quantised(inner, has_gelu=True)
        stream.add(self.linear(self.down, inner))

    def linear(self, part: nn.Linear, x: Factor, *, has_gelu: bool = False) -> Tensor:
        """Apply a linear layer, with ``has_gelu`` and exact GELU (not by tanh).

        oneDNN fuses bias and GELU with the product.
        """
        if self.is_fused and isinstance(x, Tensor) and x.device.type == "cpu":
            fused = torch.ops.mkldnn._linear_pointwise
            attribute = "gelu" if has_gelu else "none"
            out: Tensor = fused(x, part.weight, part.bias, attribute, [], "none")
            return out
        out = part(x)
        return F.gelu(out) if has_gelu else out


@dataclass(frozen=True, slots=True, eq=False)
class MaskedBatch:
    """Proteins with some residues hidden: the masked-language task of ESM-2.

    15 % of the residues are chosen; of these 80 % are masked and 10 % replaced at random (Lin et
    al. 2023, after Devlin et al. 2018).
    """

    packed: PackedBatch  # with <mask> in it
    scale: NDArray[np.float32]  # (n_tokens,), of each token's embedding: 0 where masked
    places: NDArray[np.int64]  # (n_chosen,) in the row of tokens
    targets: NDArray[np.int64]  # (n_chosen,) tokens that were there

    @classmethod
    def from_batch(cls, proteins: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> MaskedBatch:
        """Mask each protein by its own seed, so that its mask does not depend on the batch.

        As in ESM-2, the remaining embeddings are scaled up for the masked ones.
        """
        packed = PackedBatch.from_sequences(proteins)
        tokens, places = packed.tokens.copy(), []
        for seed, (begin, end) in zip(seeds, pairwise(packed.cu_seqlens.tolist()), strict=True):
            rng, n_residues = np.random.default_rng(seed), end - begin - 2
            order = rng.permutation(n_residues)[: int(cls.n_chosen(np.array(n_residues)))]
            places.append(chosen := begin + 1 + order)
            what = rng.random(len(chosen))
            tokens[chosen[what < _OF_MASKED]] = MASK
            swapped = chosen[(what >= _OF_MASKED) & (what < _OF_MASKED + _OF_RANDOM)]
            tokens[swapped] = rng.choice(AMINO_ACID_TOKENS, len(swapped))
        n_tokens, is_masked = np.diff(packed.cu_seqlens), tokens == MASK
        owner = np.repeat(np.arange(len(proteins)), n_tokens)
        share = np.bincount(owner, is_masked, len(proteins)) / n_tokens
        scale = (TOKEN_DROPOUT_SCALE / (1 - share))[owner] * ~is_masked
        chosen = np.concatenate(places)
        masked = replace(packed, tokens=tokens)
        return cls(masked, scale.astype(np.float32), chosen, packed.tokens[chosen])

    @staticmethod
    def n_chosen(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """The number of chosen residues of proteins of these lengths, at least one each."""
        return np.maximum(1, np.round(_CHOSEN * lengths))


class ESM2(nn.Module):
    """ESM-2 up to ``n_layers``, without LM and contact heads."""

    def __init__(
        self, shape: ESM2Shape, n_layers: int, dtype: torch.dtype, attend: Kernel = attend_runs
    ) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        self.is_exact = self.is_checkpointed = False
        # random weights on "meta" would import torch's compiler, which takes a second
        self.embedding = nn.Embedding(N_TOKENS, shape.dim, _weight=torch.empty(N_TOKENS, shape.dim))
        self.layers = nn.ModuleList(Layer(shape, dtype) for _ in range(n_layers))
        is_whole = n_layers == shape.n_layers
        norm = nn.LayerNorm(shape.dim, eps=LAYER_NORM_EPS)
        self.final_norm = norm if is_whole else nn.Identity()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", rotary_frequencies(shape.head_dim))

    @staticmethod
    def create(shape: ESM2Shape) -> ESM2:
        """Make an ESM-2 with random weights, ready for training.

        Normal with a standard deviation of 0.02; smaller where a layer adds to the residual stream,
        which then does not grow with depth (Radford et al. 2019).
        """
        encoder = ESM2(shape, shape.n_layers, torch.float32).to_train()
        for name, parameter in encoder.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.n_layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return encoder

    def forward(self, batch: PackedBatch) -> Tensor:
        """The representation after the last layer of this model, (n_tokens, dim) float32.

        As in fair-esm, only ESM-2's last layer is normed. It has gradients if the weights require
        them and the kernel is ``attend_to_train`` or ``attend_runs``; ``torch.inference_mode``
        switches them off.
        """
        return self.encode(RunLayout.from_batch(batch, self.inv_freq))

    def encode(self, batch: RunLayout) -> Tensor:
        """As ``forward``, for a batch on the device.

        The first layer projects each of the 33 tokens once, not each position of the batch.
        """
        rows, layers = self.token_rows(), self.layers_in_use()
        stream, first = self.stream_of(F.embedding(batch.tokens, rows)), next(layers)
        normed = _ResidualStream(rows, has_triton=False).normed(first.attention_norm, first.dtype)
        projected = first.project(normed)
        qkv = F.embedding(batch.tokens, projected.flatten(1)).view(-1, *projected.shape[1:])
        first.finish(stream, self.attend(qkv, batch))
        return self.apply_layers(layers, stream, batch)

    def stream_of(self, x: Tensor) -> _ResidualStream:
        return _ResidualStream(x, has_triton=self.attend in OF_TRITON)

    def token_rows(self) -> Tensor:
        """The input of the first layer for each token, (N_TOKENS, dim)."""
        rows = self.embedding.weight
        return rows * TOKEN_DROPOUT_SCALE if self.shape.token_dropout else rows

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute products in float32 within the block, with the same weights.

        Layers are converted one at a time, so only one needs extra memory.
        """
        attend = self.attend
        device = self.inv_freq.device
        self.attend = choose_kernel(device, torch.float32, self.shape.head_dim)
        self.is_exact = True
        try:
            yield
        finally:
            self.attend, self.is_exact = attend, False

    def transform(self, x: Tensor, batch: RunLayout) -> Tensor:
        """Apply all layers to embedded tokens. (n_tokens, dim) -> the same"""
        return self.apply_layers(self.layers_in_use(), self.stream_of(x), batch)

    def read_masked(self, batch: MaskedBatch) -> Tensor:
        """The representation of each chosen residue, as ``forward`` has it. -> (n_chosen, dim)"""
        staged = RunLayout.from_batch(batch.packed, self.inv_freq)
        scale, places = (
            to_device(one, self.inv_freq.device) for one in (batch.scale, batch.places)
        )
        x = self.embedding(staged.tokens) * scale[:, None]
        return self.transform(x, staged)[places]

    def forget_activations(self) -> None:
        """Checkpoint activations: layers keep only their inputs, and run again for gradients."""
        self.is_checkpointed = True

    def to_train(self) -> ESM2:
        """Switch to attention with gradients. -> this model"""
        self.attend = attend_to_train
        return self

    def quantise(self, device: torch.device) -> ESM2:
        """Move a model in bf16 to a device, with 8-bit products within its layers.

        It moves layer by layer, so the device never holds all weights in 16 bits.
        """
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.to(device).quantise()
        return self.to(device)

    def reorder_weights(self) -> None:
        """Lay the weights out for this CPU, if oneDNN computes its products in bf16 or fp32."""
        for layer in self.layers if cpu_fuses_linear() else ():
            if isinstance(layer, Layer) and layer.dtype in (torch.bfloat16, torch.float32):
                layer.reorder_weights()

    def apply_layers(
        self, layers: Iterable[Layer], stream: _ResidualStream, batch: RunLayout
    ) -> Tensor:
        """Apply layers and the final norm. -> (n_tokens, dim)"""
        for layer in layers:
            if self.is_checkpointed:
                stream.x = layer(stream.x, batch, self.attend)
            else:
                layer.add_to(stream, batch, self.attend)
        return stream.final(self.final_norm)

    def layers_in_use(self) -> Iterator[Layer]:
        """Yield the layers, in float32 within ``in_float32``."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer.in_float32() if self.is_exact else layer


def rotary_frequencies(head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, (head_dim / 2,) float32."""
    places = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (ROPE_THETA ** (places / head_dim))


def cpu_fuses_linear() -> bool:
    """True if oneDNN multiplies bf16 on this CPU (AVX-512 and newer), with bias and GELU."""
    ops = torch.ops.mkldnn
    return hasattr(ops, "_linear_pointwise") and bool(ops._is_mkldnn_bf16_supported())


def mean_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Average the residues of each protein, without ``<cls>`` and ``<eos>``.

    (n_tokens, dim) -> (n_proteins, dim) float32
    """
    if hidden.device.type == "cuda":
        return bag_mean(hidden, batch.residues, batch.residues_before)
    return segment_mean(hidden, batch.runs, n_ends=1)


def bos_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """The vector of each ``<cls>``. (n_tokens, dim) -> (n_proteins, dim)"""
    return hidden[to_device(batch.cu_seqlens[:-1].astype("int64"), hidden.device)]


def residues_only(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Drop ``<cls>`` and ``<eos>``. (n_tokens, dim) -> (n_residues, dim), in order"""
    return hidden[to_device(batch.residues, hidden.device)]
