"""Attention kernels for a packed batch. Tokens attend only within their own protein.

All kernels share one signature. A kernel takes the projected queries, keys and values as (n_tokens,
3, n_heads, head_dim), rotates queries and keys by their positions in float32, and returns
(n_tokens, n_heads, head_dim) in the input dtype. The kernel is chosen once, when the model is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from virnucpro.core.logging import LOGGER
from virnucpro.core.native import call, multiplies_bf16
from virnucpro.models.attention_tiles import plan_tiles
from virnucpro.models.packing import PackedBatch, Runs, to_device


@dataclass(frozen=True, slots=True, eq=False)
class RunLayout:
    """A packed batch on its device, with the tables that all layers share."""

    tokens: Tensor  # (n_tokens,)
    cu_seqlens: Tensor  # (n_proteins + 1,) int32
    cos: Tensor  # (n_tokens, head_dim) float32, two equal halves
    sin: Tensor  # (n_tokens, head_dim / 2) float32
    runs: Runs
    max_seqlen: int
    mask_shares: Tensor | None = None  # (n_tokens,) float32, see ``PackedBatch``
    tile_bounds: Tensor | None = None  # (n_tiles, 4) int32, see ``Tiles``
    token_starts: Tensor | None = None  # (n_tokens,) int32, see ``Tiles``

    @classmethod
    def from_batch(
        cls, batch: PackedBatch, inv_freq: Tensor, *, has_tiles: bool = False
    ) -> RunLayout:
        """Copy the batch to the device, with ``has_tiles`` also its tiles.

        Args:
            batch: the batch.
            inv_freq: radians per position, (head_dim / 2,).
            has_tiles: attention reads tiles.
        """
        device = inv_freq.device
        tiles = plan_tiles(batch.cu_seqlens, TILE_ROWS) if has_tiles else None
        angles = to_device(batch.positions, device)[:, None].float() * inv_freq
        shares = batch.mask_shares
        return cls(
            tokens=to_device(batch.tokens, device),
            cu_seqlens=to_device(batch.cu_seqlens, device),
            cos=angles.cos().repeat(1, 2),
            sin=angles.sin(),
            runs=batch.runs,
            max_seqlen=batch.max_seqlen,
            mask_shares=None if shares is None else to_device(shares, device),
            tile_bounds=None if tiles is None else to_device(tiles.bounds, device),
            token_starts=None if tiles is None else to_device(tiles.starts, device),
        )

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines by position in a sequence: those of the longest one.

        (max_seqlen, head_dim) and (max_seqlen, head_dim / 2), views
        """
        first = next(first for first, _, seqlen in self.runs if seqlen == self.max_seqlen)
        positions = slice(first, first + self.max_seqlen)
        return self.cos[positions], self.sin[positions]


Kernel = Callable[[Tensor, RunLayout], Tensor]

E4M3 = torch.float8_e4m3fn
TILE_ROWS = 64  # queries in a tile of ``attend_tiles``, and keys per step


def attend_runs(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Apply SDPA to each run of equally long proteins: no mask, no padding, any device."""
    out = torch.empty_like(qkv[:, 0])
    for first, n, seqlen in batch.runs:
        q, k = rotate_run(qkv, batch, (first, n, seqlen)).to(qkv.dtype)
        v = qkv[first : first + n * seqlen, 2].view(n, seqlen, *qkv.shape[2:]).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v.contiguous()).transpose(1, 2)
        out[first : first + n * seqlen].view(n, seqlen, *out.shape[1:]).copy_(attended)
    return out


def attend_compiled(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Apply our C kernel for CPUs: one thread, one head at a time, float32 for every dtype."""
    is_bf16 = qkv.dtype == torch.bfloat16
    return _call_kernel("attend", qkv, batch, is_bf16)


def attend_compiled_bf16(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Apply our C kernel for CPUs that multiply bf16 numbers.

    As in FlashAttention, rotated queries and keys are rounded to bf16, and so are the weights of
    the keys. Sums are float32.
    """
    assert qkv.dtype == torch.bfloat16, "the type that it reads"
    return _call_kernel("attend_bf16", qkv, batch)


def _call_kernel(name: str, qkv: Tensor, batch: RunLayout, *options: bool) -> Tensor:
    assert qkv.is_contiguous() and not qkv.requires_grad, "no gradient flows through C"
    out = torch.empty_like(qkv[:, 0])
    tables = batch.cos.data_ptr(), batch.sin.data_ptr()
    runs = np.array(batch.runs, dtype=np.int64)
    shape = len(runs), *qkv.shape[2:]
    call(name, qkv.data_ptr(), *options, *tables, runs, *shape, out.data_ptr())
    return out


def attend_to_train(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Compute attention with gradients, for training.

    GPUs use SDPA. CPUs compute the attention scores explicitly, because the backward pass through
    SDPA would take three times as long.
    """
    attended = []
    with torch.autocast(qkv.device.type, enabled=False):
        for first, n, seqlen in batch.runs:
            position = slice(first, first + seqlen)
            part = qkv[first : first + n * seqlen].view(n, seqlen, *qkv.shape[1:])
            q, k, v = part.permute(2, 0, 3, 1, 4)
            q, k = (
                rotate(x.float(), batch.cos[position], batch.sin[position]).to(v.dtype)
                for x in (q * q.shape[-1] ** -0.5, k)
            )
            if qkv.device.type == "cpu":
                q, k, v = (x.reshape(-1, seqlen, x.shape[-1]) for x in (q, k, v))
                out = torch.bmm(torch.softmax(torch.bmm(q, k.mT), dim=-1), v)
                out = out.view(n, -1, *out.shape[1:])
            else:
                out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
            attended.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)


def attend_varlen(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Apply FlashAttention to the packed row in one launch (CUDA, fp16 or bf16)."""
    return flash_attention(*_rotate_pytorch(qkv, batch), batch)


def attend_varlen_triton(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Run ``attend_varlen`` with our Triton rotation, which overwrites queries and keys."""
    return flash_attention(*_rotate_triton(qkv, batch), batch)


def attend_tiles(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Apply our Triton attention in tiles that short proteins share, after our rotation.

    No run uses it, because its speed has not been measured.
    """
    triton_kernels().rotate_in_place(qkv, batch.cos, batch.sin)
    return _attend_in_tiles(qkv, batch, None)


def attend_tiles_rotating(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Run ``attend_tiles``, which then also rotates, and leaves queries and keys as they are.

    This saves reading and writing them once more. Keys are rotated in each tile that reads them.
    """
    return _attend_in_tiles(qkv, batch, batch.rotary_tables)


def _attend_in_tiles(qkv: Tensor, batch: RunLayout, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    # Imports Triton, so it is called only for a GPU.
    from virnucpro.models import triton_tiles

    bounds = batch.tile_bounds
    starts = batch.token_starts
    assert bounds is not None and starts is not None, "planned with the batch"
    return triton_tiles.attend_tiles(qkv, bounds, starts, TILE_ROWS, tables)


def attend_efficient(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Apply memory-efficient attention to the packed row in one launch (CUDA, fp32 or fp16)."""
    return efficient_attention(*_rotate_pytorch(qkv, batch), batch)


def attend_efficient_triton(qkv: Tensor, batch: RunLayout) -> Tensor:
    """Run ``attend_efficient`` with our Triton rotation (fp16 on GPUs before 8.0)."""
    return efficient_attention(*_rotate_triton(qkv, batch), batch)


def _rotate_pytorch(qkv: Tensor, batch: RunLayout) -> tuple[Tensor, Tensor, Tensor]:
    turned = rotate(qkv[:, :2].float(), batch.cos[:, None, None], batch.sin[:, None, None])
    q, k = turned.to(qkv.dtype).unbind(1)
    return q, k, qkv[:, 2]


def _rotate_triton(qkv: Tensor, batch: RunLayout) -> tuple[Tensor, Tensor, Tensor]:
    triton_kernels().rotate_in_place(qkv, batch.cos, batch.sin)
    q, k, v = qkv.unbind(1)
    return q, k, v


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, batch: RunLayout) -> Tensor:
    """Apply memory-efficient attention to rotated queries and keys.

    Shapes are as in ``flash_attention``. SDPA uses the same kernel for float32. The host does
    not wait for the device.
    """
    offsets = batch.cu_seqlens
    longest = batch.max_seqlen
    forward = torch.ops.aten._efficient_attention_forward
    rows = (x[None] for x in (q, k, v))
    out: Tensor = forward(*rows, None, offsets, offsets, longest, longest, 0.0, 0)[0]
    return out[0]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, batch: RunLayout) -> Tensor:
    """Apply FlashAttention to rotated queries and keys. (n_tokens, n_heads, head_dim) -> the same

    The operator is called directly. From torch 2.14 on, its wrapper ``varlen_attn`` uses cuDNN on
    some GPUs, and cuDNN takes about 50 ms to plan for every new batch shape.
    """
    offsets = batch.cu_seqlens
    longest = batch.max_seqlen
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(q, k, v, offsets, offsets, longest, longest, 0.0, False, False)[0]
    return out


# With these kernels, our Triton code also does the rotation and the sub-layer boundary.
TILE_KERNELS: tuple[Kernel, ...] = (attend_tiles, attend_tiles_rotating)
TRITON_KERNELS: tuple[Kernel, ...] = (attend_varlen_triton, attend_efficient_triton, *TILE_KERNELS)
# With these, our C code also does the sub-layer boundary, except in float32.
COMPILED_KERNELS: tuple[Kernel, ...] = (attend_compiled, attend_compiled_bf16)


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Choose the fastest kernel for a device, a precision and a head dimension.

    CPUs with AVX-512 use C, except in fp16. In bf16 and 8 bits they multiply bf16 numbers, if they
    have the instruction. CUDA devices with compute capability 8.0 or newer use FlashAttention in
    fp16 and bf16. FlashAttention and memory-efficient attention do not support every head
    dimension. SDPA does, by padding. In 16 bits Triton does the rotation and the sub-layer
    boundaries. If Triton cannot run, PyTorch does them, after a warning with the reason.
    """
    widest_head = 256  # dimensions per head, a limit in FlashAttention
    # AVX-512 has 32 registers with 16 numbers each.
    has_registers = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if device.type == "cpu" and dtype != torch.float16 and has_registers:
        multiplies = dtype != torch.float32 and multiplies_bf16()
        return attend_compiled_bf16 if multiplies else attend_compiled
    if device.type != "cuda" or head_dim % 8 or head_dim > widest_head:
        return attend_runs
    if dtype == torch.float32:
        return attend_efficient
    has_flash = torch.cuda.get_device_capability(device) >= (8, 0)
    if refusal := next(
        filter(None, triton_kernels().unavailable_kernels(device, dtype).values()), ""
    ):
        LOGGER.warning("rotation and LayerNorm: PyTorch, which is slower than Triton (%s)", refusal)
        return attend_varlen if has_flash else attend_efficient
    return attend_varlen_triton if has_flash else attend_efficient_triton


def describe(kernel: Kernel) -> str:
    """Name a kernel for messages, with the code for rotation and LayerNorm where that varies."""
    if kernel in TRITON_KERNELS:
        return f"{kernel.__name__}, rotation and LayerNorm: Triton"
    if kernel is attend_varlen:
        return f"{kernel.__name__}, rotation and LayerNorm: PyTorch"
    return kernel.__name__


def triton_kernels() -> ModuleType:
    """Import our Triton kernels, and Triton with them. Called only for a GPU."""
    from virnucpro.models import triton_kernels

    return triton_kernels


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021, eq. 34).

    Args:
        x: (..., head_dim) float32.
        cos: (..., head_dim) float32.
        sin: (..., head_dim / 2) float32.

    Returns:
        The shape and dtype of ``x``.
    """
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin)
    return turned


def rotate_run(qkv: Tensor, batch: RunLayout, run: tuple[int, int, int]) -> Tensor:
    """Rotate queries and keys. -> (2, n, n_heads, seqlen, head_dim) float32"""
    first, n, seqlen = run
    part = qkv[first : first + n * seqlen, :2].view(n, seqlen, 2, *qkv.shape[2:])
    part = part.permute(2, 0, 3, 1, 4)
    laid_out = torch.empty(part.shape, dtype=torch.float32, device=qkv.device).copy_(part)
    position = slice(first, first + seqlen)  # the same for every protein of the run
    return rotate(laid_out, batch.cos[position], batch.sin[position])
