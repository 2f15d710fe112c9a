"""Set up a device, copy batches to it, and copy results back.

Sequences are packed into one row of tokens, without padding. The host computes everything that
depends on their lengths and sends it in one copy.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.base import Pending, Rows
from virnucpro.models.protein_tokens import EXTRA_TOKENS, tokenize

_SHAPES_KEPT = "32"  # a batch has about ten shapes, a training batch about twenty


def use_device(device: torch.device) -> None:
    """Set this process up to compute in true float32. A GPU becomes the current device.

    These defaults are changed:

    - By default cuBLAS may sum parts of 16-bit products in 16 bits. They are summed in float32.
    - cuDNN would round to TF32 in convolutions and LSTMs. As an SDPA backend it plans again for
      each batch shape.
    - On a CPU, MKL is set to sums that do not depend on a row's position in its batch. The default
      sums do depend on it in AVX2 kernels, and in AVX-512 kernels for batches with a few rows.
    - oneDNN, and PyTorch's layer above it, cache their preparation for the last shapes of bf16
      products. By default each caches 1,024 shapes. That takes a gigabyte, because nearly every
      batch has other shapes.

    All of these settings are read only before the first product.
    """
    if device.type == "cpu":
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
        for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(cache, _SHAPES_KEPT)
    if device.type == "cuda":
        if device.index is not None:  # otherwise it is the current device
            torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.enable_cudnn_sdp(False)


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Send an array to a device. Pinned memory lets a GPU receive it without blocking the host."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Runs = tuple[tuple[int, int, int], ...]  # (first token, number of sequences, tokens per sequence)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Token sequences packed end to end, proteins as ``<cls> residues <eos>``.

    Consecutive sequences with equal lengths form a run: a rectangle without a mask. Sorting by
    length gives few runs.
    """

    tokens: NDArray[np.int64]  # (n_tokens,)
    cu_seqlens: NDArray[np.int32]  # (n_sequences + 1,), from 0 to n_tokens
    runs: Runs

    @classmethod
    def from_sequences(cls, proteins: Sequence[str]) -> PackedBatch:
        seqlens = np.array([len(protein) for protein in proteins]) + EXTRA_TOKENS
        return cls.from_tokens(tokenize(list(proteins)), seqlens)

    @classmethod
    def from_tokens(cls, tokens: NDArray[np.int64], seqlens: NDArray[np.int64]) -> PackedBatch:
        """Pack tokens. (n_tokens,) and ``seqlens``, the tokens per sequence, (n_sequences,)"""
        starts = np.concatenate([[0], np.cumsum(seqlens)])
        assert len(tokens) == starts[-1], "one byte of text is one token"
        bounds = np.flatnonzero(np.diff(seqlens, prepend=0, append=0))
        runs = ((int(starts[a]), int(b - a), int(seqlens[a])) for a, b in pairwise(bounds))
        return cls(tokens, starts.astype(np.int32), tuple(runs))

    @property
    def positions(self) -> NDArray[np.int64]:
        """Return each token's position in its sequence, from 0. (n_tokens,)"""
        starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return np.arange(len(self.tokens)) - starts

    @property
    def residues(self) -> NDArray[np.int64]:
        """Return the residue indices: all tokens but ``<cls>`` and ``<eos>``. (n_residues,)"""
        is_residue = np.ones(len(self.tokens), dtype=np.bool_)
        is_residue[self.cu_seqlens[:-1]] = False
        is_residue[self.cu_seqlens[1:] - 1] = False
        return np.flatnonzero(is_residue)

    @property
    def residues_before(self) -> NDArray[np.int64]:
        """Count the residues before each protein. (n_proteins,)"""
        before = self.cu_seqlens[:-1].astype(np.int64)
        return before - EXTRA_TOKENS * np.arange(len(before))

    @property
    def max_seqlen(self) -> int:
        return max(seqlen for _, _, seqlen in self.runs)


def plan_batches(
    lengths: Sequence[int] | NDArray[np.int64], tokens_per_batch: int
) -> list[list[int]]:
    """Group the indices of ``lengths`` (residues) into batches of at most ``tokens_per_batch``.

    The longest proteins come first, so that the first batch shows the peak memory. Every index
    occurs once. A protein longer than the budget gets its own batch.
    """
    seqlens = np.asarray(lengths, dtype=np.int64) + EXTRA_TOKENS
    order = np.argsort(-seqlens, kind="stable")
    ends = np.cumsum(seqlens[order])
    batches: list[list[int]] = []
    first = 0
    while first < len(order):
        n_before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, n_before + tokens_per_batch, side="right"))
        last = max(last, first + 1)
        batches.append(order[first:last].tolist())
        first = last
    return batches


def bag_mean(hidden: Tensor, places: NDArray[np.int64], starts: NDArray[np.int64]) -> Tensor:
    """Average row bags, with one kernel for all sizes.

    Args:
        hidden: (n, dim).
        places: (n_places,) row indices, bag by bag.
        starts: (n_bags,) start of each bag in ``places``.

    Returns:
        (n_bags, dim).
    """
    rows = to_device(places, hidden.device)
    offsets = to_device(starts, hidden.device)
    return F.embedding_bag(rows, hidden, offsets, mode="mean")


def segment_mean(hidden: Tensor, runs: Runs, n_ends: int = 0) -> Tensor:
    """Average the rows of each sequence, run by run, excluding ``n_ends`` rows at either end."""
    parts = (hidden[first : first + n * seqlen].view(n, seqlen, -1) for first, n, seqlen in runs)
    return torch.cat([part[:, n_ends : part.shape[1] - n_ends].mean(dim=1) for part in parts])


def copy_to_host(results: Tensor) -> Pending:
    """Start copying float32 rows to the host. A GPU computes the next batch at the same time."""
    if not results.is_cuda:
        array: Rows = results.cpu().numpy()
        return Pending(lambda: array)
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    copying = torch.cuda.Stream(results.device)  # type: ignore[no-untyped-call] # one of a pool
    copying.wait_stream(torch.cuda.current_stream(results.device))
    with torch.cuda.stream(copying):
        host.copy_(results, non_blocking=True)
        copied = copying.record_event()
    results.record_stream(copying)

    def rows() -> Rows:
        copied.synchronize()
        array: Rows = host.numpy()
        return array

    return Pending(rows)


class PackedEncoder(ABC):
    """Base class for encoders of packed batches on one device. Subclasses implement ``embed``.

    In fp16, a protein that overflows is recomputed within ``in_float32``.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        device: torch.device,
        in_float32: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.in_float32 = in_float32

    @abstractmethod
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Compute a batch's rows, on the device."""

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        pending = copy_to_host(self.embed(sequences))
        if self.spec.precision != "fp16" or self.in_float32 is None:
            return pending
        return Pending(lambda: self._without_overflows(sequences, pending.rows()))

    def _without_overflows(self, sequences: Sequence[str], rows: Rows) -> Rows:
        """Recompute in float32 the proteins that overflowed in fp16.

        Each is embedded alone, so that its vector does not depend on the batch.
        """
        assert self.in_float32 is not None, "for fp16"
        is_pooled = len(rows) == len(sequences)  # otherwise one row per residue
        n_rows = [1 if is_pooled else len(sequence) for sequence in sequences]
        parts = np.split(rows, np.cumsum(n_rows)[:-1])  # views
        for sequence, part in zip(sequences, parts, strict=True):
            if not np.isfinite(part).all():
                with self.in_float32():
                    part[:] = self.embed([sequence]).cpu().numpy()
        return rows
