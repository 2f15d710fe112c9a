"""Pool the hidden states of protein tokens, ``<cls> residues <eos>``, into vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from virnucpro.models.packing import PackedBatch, bag_mean, segment_mean, to_device

Pool = Callable[[Tensor, PackedBatch], Tensor]


def mean_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Average the residues of each protein, excluding ``<cls>`` and ``<eos>``.

    (n_tokens, dim) -> (n_proteins, dim) float32
    """
    if hidden.device.type == "cuda":
        return bag_mean(hidden, batch.residues, batch.residues_before)
    return segment_mean(hidden, batch.runs, n_ends=1)


def bos_pool(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Return the vector of each ``<cls>``. (n_tokens, dim) -> (n_proteins, dim)"""
    return hidden[to_device(batch.cu_seqlens[:-1].astype("int64"), hidden.device)]


def residues_only(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Drop ``<cls>`` and ``<eos>``. (n_tokens, dim) -> (n_residues, dim), in order"""
    return hidden[to_device(batch.residues, hidden.device)]


POOLS: Mapping[str, Pool] = {"mean": mean_pool, "bos": bos_pool, "none": residues_only}
