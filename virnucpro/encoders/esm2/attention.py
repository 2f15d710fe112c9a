"""Attention within each protein of a packed batch: one signature, the kernels behind it.

A kernel takes the projected queries, keys and values, (n_tokens, 3, n_heads, head_dim), rotates
queries and keys by their positions in float32, and gives (n_tokens, n_heads, head_dim) of the
same type. It is chosen once, when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from virnucpro.encoders.esm2.packing import StagedBatch

Kernel = Callable[[Tensor, StagedBatch], Tensor]

# where the scores of a head outgrow the caches, a kernel that never writes them out is faster
_LONGEST_DENSE = 320  # tokens
_SCORES_AT_ONCE = 1 << 20  # numbers


def attend_runs(qkv: Tensor, batch: StagedBatch) -> Tensor:
    """SDPA on each run of proteins of one length: no mask and no padding, on any device."""
    out = torch.empty_like(qkv[:, 0])
    for first, n, seqlen in batch.runs:
        q, k, v = (x.to(qkv.dtype) for x in _turned(qkv, batch, (first, n, seqlen)))
        _put(out, first, F.scaled_dot_product_attention(q, k, v))
    return out


def attend_dense(qkv: Tensor, batch: StagedBatch) -> Tensor:
    """Written-out scores for short proteins, in blocks that stay in the caches (CPU, bf16).

    All is float32 but, on CPUs with AMX, the products, whose terms are rounded to bf16.
    """
    out = torch.empty_like(qkv[:, 0])
    n_heads = qkv.shape[2]
    for first, n, seqlen in batch.runs:
        at_once = max(1, _SCORES_AT_ONCE // (n_heads * seqlen**2))
        for i in range(0, n, at_once):
            block = (first + i * seqlen, min(at_once, n - i), seqlen)
            q, k, v = _turned(qkv, batch, block)
            if seqlen > _LONGEST_DENSE:
                attended = F.scaled_dot_product_attention(q, k, v)
            else:
                attended = _dense(q, k, v)
            _put(out, block[0], attended)
    return out


def attend_to_train(qkv: Tensor, batch: StagedBatch) -> Tensor:
    """Written-out scores, from which gradients flow: for training.

    On a CPU the backward pass of SDPA takes three times as long.
    """
    attended = []
    with torch.autocast(qkv.device.type, enabled=False):
        for first, n, seqlen in batch.runs:
            position = slice(first, first + seqlen)
            part = qkv[first : first + n * seqlen].view(n, seqlen, *qkv.shape[1:])
            q, k, v = part.permute(2, 0, 3, 1, 4)
            turned = [
                rotate(x.float(), batch.cos[position], batch.sin[position]).to(v.dtype)
                for x in (q * q.shape[-1] ** -0.5, k)
            ]
            q, k, v = (x.reshape(-1, seqlen, x.shape[-1]) for x in (*turned, v))
            out = torch.bmm(torch.softmax(torch.bmm(q, k.mT), dim=-1), v)
            attended.append(out.view(n, -1, *out.shape[1:]).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)


def attend_varlen(qkv: Tensor, batch: StagedBatch) -> Tensor:
    """FlashAttention over the packed row in one launch (CUDA, fp16 or bf16)."""
    turned = rotate(qkv[:, :2].float(), batch.cos[:, None, None], batch.sin[:, None, None])
    q, k = turned.to(qkv.dtype).unbind(1)
    return flash_attention(q, k, qkv[:, 2], batch)


def attend_varlen_triton(qkv: Tensor, batch: StagedBatch) -> Tensor:
    """``attend_varlen`` with the rotation in one kernel, which overwrites queries and keys."""
    _rotary_triton().rotate_in_place(qkv, batch.cos, batch.sin)
    q, k, v = qkv.unbind(1)
    return flash_attention(q, k, v, batch)


def attend_efficient(qkv: Tensor, batch: StagedBatch) -> Tensor:
    """Memory-efficient attention over the packed row in one launch (CUDA, fp32 or fp16).

    The kernel is the one that SDPA takes for float32; as there, nothing waits for the device.
    """
    turned = rotate(qkv[:, :2].float(), batch.cos[:, None, None], batch.sin[:, None, None])
    q, k = turned.to(qkv.dtype).unbind(1)
    offsets, longest = batch.cu_seqlens, batch.max_seqlen
    forward = torch.ops.aten._efficient_attention_forward
    rows = (x[None] for x in (q, k, qkv[:, 2]))
    out: Tensor = forward(*rows, None, offsets, offsets, longest, longest, 0.0, 0)[0]
    return out[0]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, batch: StagedBatch) -> Tensor:
    """FlashAttention on turned queries and keys. (n_tokens, n_heads, head_dim) -> the same

    The operator is called by its name: ``varlen_attn``, which stands for it, takes cuDNN on some
    GPUs from torch 2.14 on, and that plans anew, in some 50 ms, for each new shape of a batch.
    """
    offsets, longest = batch.cu_seqlens, batch.max_seqlen
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(q, k, v, offsets, offsets, longest, longest, 0.0, False, False)[0]
    return out


def choose_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest kernel for this device and precision.

    FlashAttention takes fp16 and bf16 on CUDA devices of compute capability 8.0 and newer.
    """
    if device.type == "cuda":
        has_flash = torch.cuda.get_device_capability(device) >= (8, 0)
        if dtype == torch.float32 or not has_flash:
            return attend_efficient
        return attend_varlen_triton if _rotary_triton().can_rotate(device) else attend_varlen
    return attend_dense if device.type == "cpu" and dtype == torch.bfloat16 else attend_runs


def _rotary_triton() -> ModuleType:
    """Imported for a GPU alone: it imports Triton, if that is there."""
    from virnucpro.encoders.esm2 import rotary_triton

    return rotary_triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, eq. 34).

    (..., head_dim) and cosines like it, sines (..., head_dim / 2), float32 -> like x
    """
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin)
    return turned


def _turned(qkv: Tensor, batch: StagedBatch, run: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Rotated queries and keys, and values: (n, n_heads, seqlen, head_dim) float32 each."""
    first, n, seqlen = run
    part = qkv[first : first + n * seqlen].view(n, seqlen, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
    laid_out = torch.empty(part.shape, dtype=torch.float32, device=qkv.device).copy_(part)
    position = slice(first, first + seqlen)  # as of every protein of the run
    q, k = rotate(laid_out[:2], batch.cos[position], batch.sin[position])
    return q, k, laid_out[2]


def _put(out: Tensor, first: int, attended: Tensor) -> None:
    """Write (n, n_heads, seqlen, head_dim) to the places of its tokens."""
    n, _, seqlen, _ = attended.shape
    out[first : first + n * seqlen].view(n, seqlen, *out.shape[1:]).copy_(attended.transpose(1, 2))


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale: float = q.shape[-1] ** -0.5
    with _onednn_products():
        scores = torch.bmm((q * scale).flatten(0, 1), k.flatten(0, 1).mT)
        torch.softmax(scores, dim=-1, out=scores)
        return torch.bmm(scores, v.flatten(0, 1)).view_as(v)


@contextmanager
def _onednn_products() -> Iterator[None]:
    """Have oneDNN multiply float32, twice as fast as MKL on small matrices.

    PyTorch gives it this work only if bf16 would be allowed, which it uses only on AMX.
    """
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
