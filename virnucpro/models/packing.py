"""Set up a device, copy batches to it, and copy results back.

Sequences are packed into one row of tokens, without padding. The host computes everything that
depends on their lengths and sends it in one copy.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.base import Pending, Rows
from virnucpro.models.protein_tokens import EXTRA_TOKENS, SpecialToken, tokenize


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
    shapes_kept = "32"  # a batch has about ten shapes, a training batch about twenty
    if device.type == "cpu":
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
        for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(cache, shapes_kept)
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
    def seqlens(self) -> NDArray[np.int64]:
        """Return the tokens per sequence. (n_sequences,)"""
        return np.diff(self.cu_seqlens).astype(np.int64)

    @property
    def mask_shares(self) -> NDArray[np.float32] | None:
        """Return for each token the share of masks in its sequence, or None without any mask.

        (n_tokens,)
        """
        is_masked = self.tokens == SpecialToken.MASK
        if not is_masked.any():
            return None
        n_masks = np.add.reduceat(is_masked, self.cu_seqlens[:-1], dtype=np.int64)
        shares: NDArray[np.float32] = (n_masks / self.seqlens).astype(np.float32)
        return np.repeat(shares, self.seqlens)

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
    return plan_costs(np.asarray(lengths, dtype=np.int64) + EXTRA_TOKENS, tokens_per_batch)


def plan_costs(costs: NDArray[np.int64], tokens_per_batch: int) -> list[list[int]]:
    """Group indices as ``plan_batches`` does, by the tokens that each sequence costs."""
    order = np.argsort(-costs, kind="stable")
    return [order[part].tolist() for part in split_costs(costs[order], tokens_per_batch)]


def split_costs(costs: NDArray[np.int64], tokens_per_part: int) -> Iterator[slice]:
    """Split a series into parts that cost at most ``tokens_per_part``, or contain one item."""
    ends = np.cumsum(costs)
    first = 0
    while first < len(costs):
        n_before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, n_before + tokens_per_part, side="right"))
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def bag_mean(hidden: Tensor, places: NDArray[np.int64], starts: NDArray[np.int64]) -> Tensor:
    """Average row bags, with one kernel for all sizes.

    Args:
        hidden: (n, dim).
        places: (n_places,) row indices, bag by bag.
        starts: (n_bags,) start of each bag in ``places``.

    Returns:
        (n_bags, dim).
    """
    return _reduce_bags(hidden, places, starts, "mean")


def bag_max(hidden: Tensor, places: NDArray[np.int64], starts: NDArray[np.int64]) -> Tensor:
    """Return the largest numbers of row bags. Arguments and result are as in ``bag_mean``."""
    return _reduce_bags(hidden, places, starts, "max")


def _reduce_bags(
    hidden: Tensor, places: NDArray[np.int64], starts: NDArray[np.int64], mode: str
) -> Tensor:
    rows = to_device(places, hidden.device)
    offsets = to_device(starts, hidden.device)
    return F.embedding_bag(rows, hidden, offsets, mode=mode)


def segment_mean(hidden: Tensor, runs: Runs, n_ends: int = 0) -> Tensor:
    """Average the rows of each sequence, run by run, excluding ``n_ends`` rows at either end."""
    parts = (hidden[first : first + n * seqlen].view(n, seqlen, -1) for first, n, seqlen in runs)
    return torch.cat([part[:, n_ends : part.shape[1] - n_ends].mean(dim=1) for part in parts])


def copy_to_host(outputs: Sequence[Tensor]) -> Pending:
    """Start copying float32 rows to the host. A GPU computes the next batch at the same time."""
    device = outputs[0].device
    if device.type != "cuda":
        arrays: list[Rows] = [rows.cpu().numpy() for rows in outputs]
        return Pending(lambda: arrays[0], lambda: tuple(arrays[1:]))
    hosts = [torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) for rows in outputs]
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # one of a pool
    copying.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(copying):
        for host, rows in zip(hosts, outputs, strict=True):
            host.copy_(rows, non_blocking=True)
        copied = copying.record_event()
    for rows in outputs:
        rows.record_stream(copying)

    def wait(hosts: Sequence[Tensor]) -> tuple[Rows, ...]:
        copied.synchronize()
        return tuple(host.numpy() for host in hosts)

    return Pending(lambda: wait(hosts[:1])[0], lambda: wait(hosts[1:]))


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
        """Compute a batch's rows of the first output, on the device."""

    def embed_all(self, sequences: Sequence[str]) -> Sequence[Tensor]:
        """Compute a batch's rows of each output in ``spec.outputs``, on the device."""
        assert not self.spec.extra, "this encoder has one output"
        return [self.embed(sequences)]

    def with_outputs(self, spec: EncoderSpec) -> Self:
        """Return an encoder with the same loaded model and other outputs."""
        encoder = copy(self)
        encoder.spec = spec
        return encoder

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        pending = copy_to_host(self.embed_all(sequences))
        if self.spec.precision != "fp16" or self.in_float32 is None:
            return pending

        def recompute() -> tuple[Rows, ...]:
            return self._without_overflows(sequences, pending.outputs())

        outputs = cache(recompute)
        return Pending(lambda: outputs()[0], lambda: outputs()[1:])

    def _without_overflows(
        self, sequences: Sequence[str], outputs: tuple[Rows, ...]
    ) -> tuple[Rows, ...]:
        """Recompute in float32 the proteins that overflowed in fp16.

        Each is embedded alone, so that its rows do not depend on the batch.
        """
        assert self.in_float32 is not None, "for fp16"
        lengths = np.array([len(sequence) for sequence in sequences])
        parts = [  # views, by output and sequence
            np.split(rows, np.cumsum(spec.count_rows(lengths))[:-1])
            for spec, rows in zip(self.spec.outputs, outputs, strict=True)
        ]
        for sequence, *own_parts in zip(sequences, *parts, strict=True):
            if all(np.isfinite(part).all() for part in own_parts):
                continue
            with self.in_float32():
                exact = self.embed_all([sequence])
            for part, rows in zip(own_parts, exact, strict=True):
                part[:] = rows.cpu().numpy()
        return outputs
