"""Packing: many proteins in one row of tokens, without padding.

All that depends on lengths is computed on the host; a device gets it in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.encoders.esm2.checkpoint import tokenize
from virnucpro.encoders.transfer import send

EXTRA_TOKENS = 2  # <cls> and <eos> of each protein


Runs = tuple[tuple[int, int, int], ...]


def find_runs(starts: NDArray[np.int64], seqlens: NDArray[np.int64]) -> Runs:
    """Neighbours of one length: (first token, number of sequences, tokens of each)."""
    bounds = np.flatnonzero(np.diff(seqlens, prepend=0, append=0))
    return tuple((int(starts[a]), int(b - a), int(seqlens[a])) for a, b in pairwise(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Proteins laid end to end, each as ``<cls> residues <eos>``.

    Sorted proteins make few runs, and a run is a rectangle that needs no mask.
    """

    tokens: NDArray[np.int64]  # (n_tokens,)
    positions: NDArray[np.int64]  # (n_tokens,), counted from each <cls>
    cu_seqlens: NDArray[np.int32]  # (n_proteins + 1,), from 0 to n_tokens
    runs: Runs

    @classmethod
    def of(cls, proteins: Sequence[str]) -> PackedBatch:
        seqlens = np.array([len(protein) for protein in proteins]) + EXTRA_TOKENS
        cu_seqlens = np.concatenate([[0], np.cumsum(seqlens)])
        tokens = tokenize(list(proteins))
        assert len(tokens) == cu_seqlens[-1], "one byte of text is one token"
        return cls(
            tokens=tokens,
            positions=np.arange(len(tokens)) - np.repeat(cu_seqlens[:-1], seqlens),
            cu_seqlens=cu_seqlens.astype(np.int32),
            runs=find_runs(cu_seqlens, seqlens),
        )

    @property
    def residues(self) -> NDArray[np.int64]:
        """The places of the residues: all but ``<cls>`` and ``<eos>``. (n_residues,)"""
        is_residue = np.ones(len(self.tokens), dtype=np.bool_)
        is_residue[self.cu_seqlens[:-1]] = False
        is_residue[self.cu_seqlens[1:] - 1] = False
        return np.flatnonzero(is_residue)

    @property
    def max_seqlen(self) -> int:
        return max(seqlen for _, _, seqlen in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """A packed batch on its device, with what all layers share."""

    tokens: Tensor  # (n_tokens,)
    cu_seqlens: Tensor  # (n_proteins + 1,) int32
    cos: Tensor  # (n_tokens, head_dim) float32, each half the same
    sin: Tensor  # (n_tokens, head_dim / 2) float32
    runs: Runs
    max_seqlen: int

    @classmethod
    def of(cls, batch: PackedBatch, inv_freq: Tensor) -> StagedBatch:
        """Send the batch to the device of ``inv_freq``: radians per position, (head_dim / 2,)."""
        device = inv_freq.device
        angles = send(batch.positions, device)[:, None].float() * inv_freq
        return cls(
            tokens=send(batch.tokens, device),
            cu_seqlens=send(batch.cu_seqlens, device),
            cos=angles.cos().repeat(1, 2),
            sin=angles.sin(),
            runs=batch.runs,
            max_seqlen=batch.max_seqlen,
        )


def plan_batches(
    lengths: Sequence[int] | NDArray[np.int64], tokens_per_batch: int
) -> list[list[int]]:
    """Group the indices of ``lengths`` (residues) into batches of at most ``tokens_per_batch``.

    Longest first, so that the first batch shows the peak memory. Every index occurs once; a
    protein longer than the budget gets a batch of its own.
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
