"""Pool the hidden states of protein tokens, ``<cls> residues <eos>``, into vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from virnucpro.core.model_outputs import Pooling
from virnucpro.models.packing import PackedBatch, bag_max, bag_mean, segment_mean, to_device

Pool = Callable[[Tensor, PackedBatch], Tensor]


def mean_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Average the residues of each protein, excluding ``<cls>`` and ``<eos>``.

    (n_tokens, dim) -> (n_proteins, dim) float32
    """
    if hidden.device.type == "cuda":
        return bag_mean(hidden, batch.residues, batch.residues_before)
    return segment_mean(hidden, batch.runs, n_ends=1)


def max_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Return the largest number of each dimension over the residues of each protein.

    (n_tokens, dim) -> (n_proteins, dim) float32
    """
    if hidden.device.type == "cuda":
        return bag_max(hidden, batch.residues, batch.residues_before)
    return torch.cat([part.amax(dim=1) for part in split_residues(hidden, batch)])


def std_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Return the standard deviation of each dimension over the residues of each protein.

    It is that of the residues themselves, not an estimate for a population that they sample: a
    protein with one residue has the standard deviation 0. (n_tokens, dim) -> (n_proteins, dim)
    """
    if hidden.device.type == "cuda":
        means = mean_pool(hidden, batch)
        n_tokens = to_device(batch.seqlens, hidden.device)
        squares = (hidden - means.repeat_interleave(n_tokens, dim=0, output_size=len(hidden))) ** 2
        return mean_pool(squares, batch).sqrt()
    parts = split_residues(hidden, batch)
    return torch.cat([part.std(dim=1, correction=0) for part in parts])


def split_residues(hidden: Tensor, batch: PackedBatch) -> Iterator[Tensor]:
    """Yield the residues of each run of equally long proteins, (n_proteins, n_residues, dim)."""
    for first, n_proteins, seqlen in batch.runs:
        yield hidden[first : first + n_proteins * seqlen].view(n_proteins, seqlen, -1)[:, 1:-1]


def bos_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Return the vector of each ``<cls>``. (n_tokens, dim) -> (n_proteins, dim)"""
    return hidden[to_device(batch.cu_seqlens[:-1].astype("int64"), hidden.device)]


def residues_only(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Drop ``<cls>`` and ``<eos>``. (n_tokens, dim) -> (n_residues, dim), in order"""
    return hidden[to_device(batch.residues, hidden.device)]


POOLS: Mapping[Pooling, Pool] = {
    "mean": mean_pool,
    "max": max_pool,
    "std": std_pool,
    "bos": bos_pool,
    "none": residues_only,
}
