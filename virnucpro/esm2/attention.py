"""Attention within each protein of a packed batch: one signature, the kernels behind it.

A kernel takes queries, keys and values, (n_tokens, n_heads, head_dim) each, and gives the
same shape. It is chosen once, when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from virnucpro.esm2.packing import PackedBatch

Kernel = Callable[[Tensor, Tensor, Tensor, PackedBatch], Tensor]


def attend_runs(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
    """SDPA on each run of proteins of one length: no mask and no padding, on any device."""
    out = torch.empty_like(q)
    for first, n, seqlen in batch.runs:
        last = first + n * seqlen
        shape = (n, seqlen, *q.shape[1:])
        query, key, value = (x[first:last].view(shape).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(query, key, value)
        out[first:last] = attended.transpose(1, 2).reshape(last - first, *q.shape[1:])
    return out


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
    """FlashAttention over the packed row in one launch (CUDA, fp16 or bf16)."""
    cu_seqlens = torch.from_numpy(batch.cu_seqlens).to(q.device, non_blocking=True)
    longest = batch.max_seqlen
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out


def choose_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest kernel for this device and precision.

    FlashAttention takes fp16 and bf16 on CUDA devices of compute capability 8.0 and newer.
    """
    if device.type == "cuda" and dtype != torch.float32:
        major, _ = torch.cuda.get_device_capability(device)
        if major >= 8:
            return attend_varlen
    return attend_runs
