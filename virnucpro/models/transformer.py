"""The base for ESM-2 and ESM C: pre-norm transformers with rotary positions on packed proteins.

Matrix products use the chosen precision. The residual stream, norms, rotary tables and pooling are
always float32, because a rotary table in bf16 gives wrong angles. In fp8 and int8, products within
the layers take 8-bit numbers, and everything else is as in bf16.

A family subclasses ``TransformerLayer`` and ``PackedTransformer``. Its layers have the modules
``attention_norm``, ``qkv``, ``attention_out`` and ``mlp_norm``, and an MLP specific to the family.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnucpro.core.native import call
from virnucpro.models.attention import (
    COMPILED_KERNELS,
    TILE_KERNELS,
    TRITON_KERNELS,
    Kernel,
    RunLayout,
    attend_runs,
    choose_kernel,
    triton_kernels,
)
from virnucpro.models.checkpoint import ROPE_THETA, Tensors
from virnucpro.models.eight_bits import EIGHT_BITS, Linear8, Rows8, quantise
from virnucpro.models.packing import PackedBatch
from virnucpro.models.smoothing import NormedProducts, measure_channels, smooth

# The dtype of weights in memory and of product results, by precision.
DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(EIGHT_BITS, torch.bfloat16),  # before ``PackedTransformer.quantise``
}

Factor = Tensor | Rows8  # the first factor in a product with weights


class TransformerShape(Protocol):
    """The dimensions of a transformer."""

    @property
    def n_layers(self) -> int: ...

    @property
    def dim(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def n_parameters(self) -> int: ...


@dataclass(slots=True, eq=False)
class ResidualStream:
    """The residual stream, (n_tokens, dim) float32, with the branches not yet added to it.

    With Triton, an addition is deferred to the next LayerNorm. One kernel adds, norms and rounds,
    and writes the sum only at every second LayerNorm. The sums are the same. In our C code, one
    function adds, norms and rounds, too, and writes every sum. It reads bf16 branches. Others are
    added at once, by PyTorch.
    """

    x: Tensor
    has_triton: bool  # our Triton kernels add and norm
    has_c: bool = False  # our C code adds and norms, except in float32
    branch_scale: float = 1.0  # factor for each branch
    waiting: list[Tensor] = field(default_factory=list)  # at most two, in C at most one

    def add(self, branch: Tensor) -> None:
        """Add the result of a sub-layer, (n_tokens, dim), in any dtype."""
        if self.has_triton or (self.has_c and branch.dtype == torch.bfloat16):
            self.waiting.append(branch)
        else:
            self.x = self._sum(self.x, branch)

    def _sum(self, x: Tensor, branch: Tensor) -> Tensor:
        # Only gradients in training need this special case. Without them, `alpha=1` would do.
        if self.branch_scale == 1:
            return x + branch
        return torch.add(x, branch, alpha=self.branch_scale)

    def normed(self, norm: nn.LayerNorm, dtype: torch.dtype) -> Factor:
        """Norm the stream for a sub-layer. -> (n_tokens, dim) in ``dtype``"""
        max_waiting = 2  # branches that one kernel adds at once
        if self.has_c and dtype != torch.float32:
            rows = self._add_and_norm_in_c(norm, is_bf16=dtype == torch.bfloat16)
            return quantise(rows, dtype) if dtype in EIGHT_BITS.values() else rows
        if not self.has_triton:
            rows = norm(self.x)
            return quantise(rows, dtype) if dtype in EIGHT_BITS.values() else rows.to(dtype)
        out = torch.empty_like(self.x, dtype=dtype)
        scales = self.x.new_empty(len(out), 1) if dtype in EIGHT_BITS.values() else None
        total = torch.empty_like(self.x) if len(self.waiting) == max_waiting else None
        self._add_and_norm(norm, out, total, scales)
        if total is not None:
            self.x = total
            self.waiting = []
        return out if scales is None else Rows8(out, scales)

    def _add_and_norm(
        self, norm: nn.LayerNorm, out: Tensor, total: Tensor | None, scales: Tensor | None
    ) -> None:
        triton_kernels().add_and_norm(
            self.x, self.waiting, norm, out, total, scales, branch_scale=self.branch_scale
        )

    def _add_and_norm_in_c(self, norm: nn.LayerNorm, *, is_bf16: bool) -> Tensor:
        """Add the waiting branch, and norm the sums. -> (n_tokens, dim) bf16 or float32"""
        assert self.x.is_contiguous() and self.x.dtype == torch.float32, "what C reads"
        assert len(self.waiting) <= 1, "C adds one branch at once"
        out = torch.empty_like(self.x, dtype=torch.bfloat16 if is_bf16 else torch.float32)
        sums = torch.empty_like(self.x) if self.waiting else self.x
        call(
            "add_and_norm",
            self.x.data_ptr(),
            self.waiting[0].data_ptr() if self.waiting else 0,
            self.branch_scale,
            norm.weight.data_ptr(),
            0 if norm.bias is None else norm.bias.data_ptr(),
            norm.eps,
            *self.x.shape,
            sums.data_ptr(),
            out.data_ptr(),
            is_bf16,
        )
        self.x = sums
        self.waiting = []
        return out

    def as_factor(self, rows: Tensor, dtype: torch.dtype) -> Factor:
        """Convert rows within a sub-layer to a ``dtype`` factor. Only 8 bits change their dtype."""
        return self.quantised(rows, dtype) if dtype in EIGHT_BITS.values() else rows

    def quantised(self, rows: Tensor, dtype: torch.dtype, *, has_gelu: bool = False) -> Rows8:
        """Round rows within a sub-layer to 8 bits, with ``has_gelu`` after GELU."""
        if not self.has_triton:
            return quantise(rows, dtype, has_gelu=has_gelu)
        out = Rows8(torch.empty_like(rows, dtype=dtype), self.x.new_empty(len(rows), 1))
        triton_kernels().quantise(rows, *out, has_gelu=has_gelu)
        return out

    def final(self, norm: nn.Module) -> Tensor:
        """Return the stream after the last layer, normed if that is the model's last. -> float32"""
        if self.has_triton and isinstance(norm, nn.LayerNorm):
            out = torch.empty_like(self.x)
            self._add_and_norm(norm, out, None, None)
            return out
        x = self.x
        for branch in self.waiting:
            x = self._sum(x, branch)
        normed: Tensor = norm(x)
        return normed


class TransformerLayer(nn.Module):
    """A transformer layer, which adds attention and MLP to the residual stream."""

    products: ClassVar[tuple[str, ...]]  # names of the linear layers
    attention_norm: nn.LayerNorm
    qkv: nn.Linear
    attention_out: nn.Linear

    def __init__(self, n_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dtype = dtype  # dtype of the first factor in products
        self.is_fused = dtype == torch.bfloat16 and cpu_fuses_linear()

    @property
    @abstractmethod
    def normed_products(self) -> tuple[NormedProducts, ...]:
        """Return the norms with the linear layers that take their outputs."""

    @abstractmethod
    def add_mlp(self, stream: ResidualStream) -> None:
        """Add the MLP result to the stream."""

    def add_to(self, stream: ResidualStream, batch: RunLayout, attend: Kernel) -> None:
        normed = stream.normed(self.attention_norm, self.dtype)
        self.finish(stream, attend(self.project(normed), batch))

    def project(self, normed: Factor) -> Tensor:
        """Project queries, keys and values. (n_tokens, dim) -> (n_tokens, 3, n_heads, head_dim)"""
        projected = self.linear(self.qkv, normed)
        return projected.view(len(projected), 3, self.n_heads, -1)

    def finish(self, stream: ResidualStream, attended: Tensor) -> None:
        """Add attention, (n_tokens, n_heads, head_dim), and MLP to the stream."""
        mixed = stream.as_factor(attended.flatten(1), self.dtype)
        stream.add(self.linear(self.attention_out, mixed))
        self.add_mlp(stream)

    def in_float32(self) -> Self:
        """Copy the layer with float32 products and the same fp16 weights."""
        layer = copy.deepcopy(self).float()
        layer.dtype = torch.float32
        return layer

    def reorder_weights(self) -> None:
        """Convert the weights to oneDNN's layout once, instead of in each batch.

        The converted copy works only in ``linear`` and has no gradients.
        """
        usual_tokens = 2048  # in a batch on a CPU
        self.is_fused = True
        for name in self.products:
            part = getattr(self, name)
            ordered = torch.ops.mkldnn._reorder_linear_weight(part.weight, usual_tokens)
            part.weight = nn.Parameter(ordered, requires_grad=False)

    def quantise(self, dtype: torch.dtype, *, has_triton: bool = False) -> None:
        """Switch to products of 8-bit numbers. The loaded weights are bf16."""
        for name in self.products:
            setattr(self, name, Linear8(getattr(self, name), dtype, has_triton=has_triton))
        self.dtype = dtype
        self.is_fused = False

    def linear(self, part: nn.Linear, x: Factor, *, has_gelu: bool = False) -> Tensor:
        """Apply a linear layer, with ``has_gelu`` and exact GELU (not the tanh approximation).

        oneDNN fuses bias and GELU with the product.
        """
        if self.is_fused and isinstance(x, Tensor) and x.device.type == "cpu":
            fused = torch.ops.mkldnn._linear_pointwise
            attribute = "gelu" if has_gelu else "none"
            out: Tensor = fused(x, part.weight, part.bias, attribute, [], "none")
            return out
        out = part(x)
        return F.gelu(out) if has_gelu else out


class PackedTransformer(nn.Module):
    """A transformer up to a chosen layer, without heads."""

    _NO_NORM = nn.Identity()

    def __init__(
        self,
        *,
        shape: TransformerShape,
        n_tokens: int,
        layers: Sequence[TransformerLayer],
        final_norm: nn.Module,
        attend: Kernel,
        branch_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.attend = attend
        self.branch_scale = branch_scale
        self.is_exact = False
        # Random weights on "meta" would import torch's compiler, which takes a second.
        self.embedding = nn.Embedding(n_tokens, shape.dim, _weight=torch.empty(n_tokens, shape.dim))
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", rotary_frequencies(shape.head_dim))

    def forward(self, batch: PackedBatch) -> Tensor:
        """Compute the hidden states after the last layer of this model, (n_tokens, dim) float32.

        Only the last layer of the family's full model is normed. The result has gradients if the
        weights require them and the kernel is ``attend_to_train`` or ``attend_runs``.
        ``torch.inference_mode`` disables gradients.
        """
        return self.encode(self.lay_out(batch))

    def lay_out(self, batch: PackedBatch) -> RunLayout:
        """Copy a batch to the device, with what the attention kernel reads."""
        return RunLayout.from_batch(batch, self.inv_freq, has_tiles=self.attend in TILE_KERNELS)

    def encode(self, batch: RunLayout) -> Tensor:
        """Compute ``forward`` for a batch on the device."""
        layers = self.layers_in_use()
        stream = self.apply_first(next(layers), batch, self.attend)
        return self.apply_layers(layers, stream, batch)

    def iter_states(
        self, batch: RunLayout, numbers: Container[int], attend: Kernel
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the hidden states after each layer with one of these numbers, in one pass.

        Args:
            batch: the batch, on the device.
            numbers: the first layer is 1.
            attend: the attention kernel.

        Yields:
            The number, and (n_tokens, dim) float32, normed only after the family's last layer.
        """
        layers = self.layers_in_use()
        stream = self.apply_first(next(layers), batch, attend)
        for number in range(1, len(self.layers) + 1):
            if number > 1:
                next(layers).add_to(stream, batch, attend)
            if number in numbers:
                is_last = number == len(self.layers)
                yield number, stream.final(self.final_norm if is_last else self._NO_NORM)

    def apply_first(
        self, first: TransformerLayer, batch: RunLayout, attend: Kernel
    ) -> ResidualStream:
        """Apply the first layer.

        It projects each token in the alphabet once, not each position in the batch, unless the
        input of a token depends on its sequence.
        """
        if (scaled := self.scale_tokens(batch)) is not None:
            stream = self.stream_of(scaled)
            first.add_to(stream, batch, attend)
            return stream
        rows = self.token_rows()
        stream = self.stream_of(F.embedding(batch.tokens, rows))
        has_c = self.attend in COMPILED_KERNELS
        token_stream = ResidualStream(rows, has_triton=False, has_c=has_c)
        normed = token_stream.normed(first.attention_norm, first.dtype)
        projected = first.project(normed)
        qkv = F.embedding(batch.tokens, projected.flatten(1)).view(-1, *projected.shape[1:])
        first.finish(stream, attend(qkv, batch))
        return stream

    def stream_of(self, x: Tensor) -> ResidualStream:
        return ResidualStream(
            x,
            has_triton=self.attend in TRITON_KERNELS,
            has_c=self.attend in COMPILED_KERNELS,
            branch_scale=self.branch_scale,
        )

    def token_rows(self) -> Tensor:
        """Return the first layer's input for each token in the alphabet, (n_tokens, dim)."""
        return self.embedding.weight

    def scale_tokens(self, batch: RunLayout) -> Tensor | None:
        """Return the first layer's input, (n_tokens, dim), if it depends on masks in a sequence."""
        return None

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
            self.attend = attend
            self.is_exact = False

    def quantise(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Move a bf16 model to a device, with products of 8-bit numbers within its layers.

        The model moves layer by layer, so the device never has all weights in 16 bits. For int8,
        it first embeds three proteins in bf16 on the CPU, and large channels are smoothed.
        """
        self.attend = attend_runs  # with it, norms are called as modules on any device
        maxima = self._measure_channels() if dtype == torch.int8 else {}
        self.attend = choose_kernel(device, dtype, self.shape.head_dim)
        has_triton = self.attend in TRITON_KERNELS
        for layer in self.each_layer():
            if dtype == torch.int8:
                for products in layer.normed_products:
                    smooth(products, maxima[products.norm])
            layer.to(device).quantise(dtype, has_triton=has_triton)
        return self.to(device)

    def _measure_channels(self) -> Mapping[nn.LayerNorm, Tensor]:
        """Return the largest size of each channel behind each norm in a layer, (dim,)."""
        products = [each for layer in self.each_layer() for each in layer.normed_products]
        return measure_channels(
            products, lambda protein: self(PackedBatch.from_sequences([protein]))
        )

    def reorder_weights(self) -> None:
        """Convert the weights to oneDNN's layout, if it runs their bf16 or fp32 products here."""
        for layer in self.each_layer() if cpu_fuses_linear() else ():
            if layer.dtype in (torch.bfloat16, torch.float32):
                layer.reorder_weights()

    def apply_layers(
        self, layers: Iterable[TransformerLayer], stream: ResidualStream, batch: RunLayout
    ) -> Tensor:
        """Apply layers and the final norm. -> (n_tokens, dim)"""
        for layer in layers:
            layer.add_to(stream, batch, self.attend)
        return stream.final(self.final_norm)

    def each_layer(self) -> Iterator[TransformerLayer]:
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            yield layer

    def layers_in_use(self) -> Iterator[TransformerLayer]:
        """Yield the layers, in float32 within ``in_float32``."""
        for layer in self.each_layer():
            yield layer.in_float32() if self.is_exact else layer


def rotary_frequencies(head_dim: int) -> Tensor:
    """Compute radians per position for each pair of dimensions, (head_dim / 2,) float32."""
    places = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (ROPE_THETA ** (places / head_dim))


def cpu_fuses_linear() -> bool:
    """Return True if oneDNN multiplies bf16 on this CPU (AVX-512 and newer), with bias and GELU."""
    ops = torch.ops.mkldnn
    return hasattr(ops, "_linear_pointwise") and bool(ops._is_mkldnn_bf16_supported())


# Weights


def iter_tensors(
    model: PackedTransformer, scheme: Mapping[str, str], joined: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors with their names in a checkpoint.

    Args:
        model: the model.
        scheme: our module name -> its name in the checkpoint; {} is the layer number.
        joined: our module name -> the checkpoint modules that it concatenates. Their tensors are
            views of ours.
    """
    if "inv_freq" in scheme:
        yield scheme["inv_freq"], model.inv_freq
    modules = [(0, *each) for each in model.named_children() if each[1] is not model.layers]
    for number, layer in enumerate(model.layers):
        modules += [(number, *each) for each in layer.named_children()]
    for number, name, module in modules:
        names = joined.get(name, (name,))
        for kind, tensor in module.named_parameters():
            for each, part in zip(names, tensor.chunk(len(names)), strict=True):
                yield f"{scheme[each].format(number)}.{kind}", part


def allocate(stub: PackedTransformer, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate a "meta" model on a device, with its kernel for ``dtype`` products."""
    # ``to_empty``, and ``empty_like`` on "meta" tensors, import sympy, which takes half a second.
    memory = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in stub.state_dict().items()
    }
    stub.load_state_dict(memory, assign=True)
    stub.inv_freq.copy_(rotary_frequencies(stub.shape.head_dim))
    stub.attend = choose_kernel(device, dtype, stub.shape.head_dim)
    stub.eval().requires_grad_(False)


def copy_tensors(parts: Iterable[tuple[str, Tensor]], tensors: Tensors) -> None:
    """Copy checkpoint tensors, read one by one, to the parts of a model with these names.

    Raises:
        UnavailableError: a tensor is missing, or has another shape.
    """
    for name, part in parts:
        content = tensors.get(name)
        if tuple(part.shape) != tuple(content.shape):
            raise tensors.error(f"a tensor of shape {tuple(content.shape)}")
        part.copy_(content)
