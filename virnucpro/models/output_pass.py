"""Compute all outputs of a transformer from one pass over a batch.

Only the pseudo-perplexity needs further passes: one row for each residue, in which that residue is
masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.core.model_outputs import HeadOutput, parse_vector_name
from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.heads import ContactSum, Heads, LMHead
from virnucpro.models.packing import PackedBatch, bag_mean, split_costs, to_device
from virnucpro.models.pooling import POOLS, Pool, residues_only
from virnucpro.models.protein_tokens import SpecialToken
from virnucpro.models.transformer import PackedTransformer


@dataclass(frozen=True, slots=True, eq=False)
class OutputPass:
    """The outputs that a specification asks for, of a loaded model."""

    spec: EncoderSpec
    model: PackedTransformer
    heads: Heads | None = None  # None: no output needs one
    names: tuple[str, ...] = field(init=False)
    pools: dict[int, dict[str, Pool]] = field(init=False)  # layer -> output -> pooling

    def __post_init__(self) -> None:
        pools: dict[int, dict[str, Pool]] = {}
        for output in self.spec.outputs:
            if vectors := parse_vector_name(output.name):
                layer_pools = pools.setdefault(vectors.layer, {})
                layer_pools[output.name] = POOLS[vectors.pooling]
        object.__setattr__(self, "names", tuple(output.name for output in self.spec.outputs))
        object.__setattr__(self, "pools", pools)

    def run(self, batch: PackedBatch, tokens_per_pass: int) -> list[Tensor]:
        """Compute the rows of each output, in the order of ``spec.outputs``, on the device.

        Args:
            batch: the proteins.
            tokens_per_pass: limits each further pass. A single row may exceed it.
        """
        results: dict[str, Tensor] = {}
        layout = self.model.lay_out(batch)
        n_layers = len(self.model.layers)
        attend = self.model.attend
        contacts = None
        if HeadOutput.CONTACTS in self.names:
            assert self.heads is not None and self.heads.contacts is not None, "loaded for this"
            contacts = ContactSum(self.heads.contacts, attend)
            attend = contacts.attend
        for layer, hidden in self.model.iter_states(layout, {*self.pools, n_layers}, attend):
            for name, pool in self.pools.get(layer, {}).items():
                results[name] = pool(hidden, batch)
            if layer == n_layers and not {
                HeadOutput.LOGITS,
                HeadOutput.SINGLE_PASS_PERPLEXITY,
            }.isdisjoint(self.names):
                results |= self._predict_tokens(hidden, batch)
        if contacts is not None:
            results[HeadOutput.CONTACTS] = contacts.contacts()
        perplexity = HeadOutput.PERPLEXITY
        if perplexity in self.names:
            results[perplexity] = self._pseudo_perplexity(batch, tokens_per_pass)
        return [results[name] for name in self.names]

    @property
    def _lm_head(self) -> LMHead:
        assert self.heads is not None and self.heads.lm is not None, "loaded for this output"
        return self.heads.lm

    def _predict_tokens(self, hidden: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
        """Compute logits, and the perplexity of residues that the model sees.

        Args:
            hidden: (n_tokens, dim), after the last layer.
            batch: the proteins.
        """
        logits = self._lm_head(residues_only(hidden, batch))
        known = _KnownResidues.from_batch(batch)
        rows = to_device(np.searchsorted(batch.residues, known.places), hidden.device)
        losses = _losses(logits[rows], batch.tokens[known.places])
        return {
            HeadOutput.LOGITS: logits,
            HeadOutput.SINGLE_PASS_PERPLEXITY: known.perplexity(losses),
        }

    def _pseudo_perplexity(self, batch: PackedBatch, tokens_per_pass: int) -> Tensor:
        """Compute the perplexity of residues that are masked one at a time. -> (n_proteins, 1)"""
        known = _KnownResidues.from_batch(batch)
        losses = []
        for rows in known.iter_masked(tokens_per_pass):
            hidden = self.model(rows.packed)
            logits = self._lm_head(hidden[to_device(rows.places, hidden.device)])
            losses.append(_losses(logits, rows.targets))
        return known.perplexity(torch.cat(losses) if losses else self._no_losses())

    def _no_losses(self) -> Tensor:
        return torch.empty(0, device=self.model.inv_freq.device)


def _losses(logits: Tensor, targets: NDArray[np.int64]) -> Tensor:
    """Return the negative log-probabilities of tokens. (n, n_tokens) and (n,) -> (n,)"""
    return F.cross_entropy(logits, to_device(targets, logits.device), reduction="none")


@dataclass(frozen=True, slots=True, eq=False)
class _MaskedRows:
    """Copies of proteins, in each of which one residue is masked."""

    packed: PackedBatch
    places: NDArray[np.int64]  # (n_rows,) indices of the masks in the packed tokens
    targets: NDArray[np.int64]  # (n_rows,) original tokens


@dataclass(frozen=True, slots=True, eq=False)
class _KnownResidues:
    """The residues of a batch whose perplexity is computed: all that are no masks."""

    batch: PackedBatch
    places: NDArray[np.int64]  # (n_known,) indices into the tokens
    owners: NDArray[np.int64]  # (n_known,) protein of each

    @classmethod
    def from_batch(cls, batch: PackedBatch) -> Self:
        residues = batch.residues
        places = residues[batch.tokens[residues] != SpecialToken.MASK]
        owners = np.searchsorted(batch.cu_seqlens, places, side="right") - 1
        return cls(batch, places, owners)

    def perplexity(self, losses: Tensor) -> Tensor:
        """Return exp(mean loss) of each protein, NaN if all its residues are masks.

        (n_known,) -> (n_proteins, 1)
        """
        n_known = np.bincount(self.owners, minlength=len(self.batch.seqlens))
        starts = np.cumsum(n_known) - n_known
        means = bag_mean(losses[:, None], np.arange(len(losses)), starts)
        return means.exp().masked_fill(to_device(n_known == 0, means.device)[:, None], math.nan)

    def iter_masked(self, tokens_per_pass: int) -> Iterator[_MaskedRows]:
        """Yield passes of masked rows, in the order of the residues."""
        for part in split_costs(self.batch.seqlens[self.owners], tokens_per_pass):
            yield self._mask(self.places[part], self.owners[part])

    def _mask(self, residues: NDArray[np.int64], owners: NDArray[np.int64]) -> _MaskedRows:
        """Copy the protein of each residue, and mask the residue."""
        batch = self.batch
        seqlens = batch.seqlens[owners]
        shifts = np.cumsum(seqlens) - seqlens - batch.cu_seqlens[owners]  # of a row, in tokens
        tokens = batch.tokens[np.arange(seqlens.sum()) - np.repeat(shifts, seqlens)]
        places = residues + shifts
        targets = tokens[places]
        tokens[places] = SpecialToken.MASK
        return _MaskedRows(PackedBatch.from_tokens(tokens, seqlens), places, targets)
