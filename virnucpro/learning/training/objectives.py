"""The objectives of a training on frames: masked residues, or the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from virnucpro.encoders.esm2.alphabet import MASK, RESIDUES, tokenize
from virnucpro.encoders.esm2.model import TOKEN_DROPOUT_SCALE
from virnucpro.encoders.esm2.packing import PackedBatch
from virnucpro.learning.evaluation.metrics import auroc
from virnucpro.learning.labelled.frames import LabelledFrames, Rows, Texts
from virnucpro.learning.training.networks import FrameBatch, FrameClassifier, MaskedBatch
from virnucpro.learning.training.ranks import Ranks

_VALIDATION_ROWS = 256  # in one batch
MASKED, OF_MASKED, OF_RANDOM = 0.15, 0.8, 0.1  # the rest of the chosen ones stays as it is
STANDARD = tokenize([RESIDUES[:20]])[1:-1]  # the tokens of the 20 amino acids

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class Objective(Protocol[B_co]):
    """An objective: its rows, batches, losses and evaluation. ``B_co`` is its kind of batch."""

    n_rows: int  # of an epoch
    unit: str
    best: str  # the name of the figure by which the best epoch is chosen; larger is better

    def batch(self, rows: Rows, epoch: int) -> B_co: ...

    def weight(self, rows: Rows) -> float:
        """The divisor of the losses of these rows."""

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]: ...


class MaskedResidues:
    """Tell the masked residues of proteins (``--pretrain``)."""

    unit, best = "frames", "minus_loss"

    def __init__(
        self,
        proteins: Texts,
        held_out: Texts,
        seed: int,
    ) -> None:
        self.proteins, self.held_out, self.seed = proteins, held_out, seed
        self.n_rows = len(proteins)
        self._n_chosen = np.maximum(1, np.round(MASKED * proteins.lengths))

    def batch(self, rows: Rows, epoch: int) -> MaskedBatch:
        rows = longest_first(rows, self.proteins)
        seeds = [(self.seed, epoch, int(row)) for row in rows]
        return masked_batch([self.proteins[row] for row in rows.tolist()], seeds)

    def weight(self, rows: Rows) -> float:
        """Every chosen residue weighs the same."""
        return float(self._n_chosen[rows].sum())

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]:
        """The mean loss per chosen residue, with masks that are the same every time."""
        loss, n_chosen = 0.0, 0
        for first in range(0, len(self.held_out), _VALIDATION_ROWS)[ranks.rank :: ranks.world_size]:
            rows = np.arange(first, min(first + _VALIDATION_ROWS, len(self.held_out)))
            rows = longest_first(rows, self.held_out)
            seeds = [(self.seed, -1 % 2**32, int(row)) for row in rows]
            batch = masked_batch([self.held_out[row] for row in rows.tolist()], seeds)
            loss += float(module(batch))
            n_chosen += len(batch.places)
        sums = np.sum(ranks.gather((loss, n_chosen)), axis=0)
        mean = float(sums[0] / max(1, sums[1]))
        return {"validation_loss": mean, "minus_loss": -mean}


def mask_residues(
    batch: PackedBatch, draws: Iterable[np.random.Generator]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose 15 % of the residues; of these 80 % are masked and 10 % replaced at random.

    That is the masked-language task of ESM-2 (Lin et al. 2023, after Devlin et al. 2018).

    -> the tokens to read, (n_tokens,), and the places of those to be told, (n_chosen,). Every
    protein has its own generator, so that its mask does not depend on its batch, and at least
    one chosen residue.
    """
    tokens, places = batch.tokens.copy(), []
    for rng, (begin, end) in zip(draws, pairwise(batch.cu_seqlens.tolist()), strict=True):
        n_residues = end - begin - 2
        order = rng.permutation(n_residues)[: max(1, round(MASKED * n_residues))]
        places.append(chosen := begin + 1 + order)
        what = rng.random(len(chosen))
        tokens[chosen[what < OF_MASKED]] = MASK
        swapped = chosen[(what >= OF_MASKED) & (what < OF_MASKED + OF_RANDOM)]
        tokens[swapped] = rng.choice(STANDARD, len(swapped))
    return tokens, np.concatenate(places)


def masked_batch(proteins: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> MaskedBatch:
    """Mask proteins; what is left of each is scaled up for what is masked, as in ESM-2."""
    packed = PackedBatch.of(proteins)
    tokens, places = mask_residues(packed, map(np.random.default_rng, seeds))
    n_tokens = np.diff(packed.cu_seqlens)
    protein_of = np.repeat(np.arange(len(proteins)), n_tokens)
    is_masked = tokens == MASK
    share = np.bincount(protein_of, is_masked, len(proteins)) / n_tokens
    scale = (TOKEN_DROPOUT_SCALE / (1 - share))[protein_of] * ~is_masked
    return MaskedBatch(
        PackedBatch(tokens, packed.positions, packed.cu_seqlens, packed.runs),
        scale.astype(np.float32),
        places,
        packed.tokens[places],
    )


class FrameLabels:
    """Tell viral frames from others (``--finetune``)."""

    unit, best = "frames", "auroc"

    def __init__(
        self,
        frames: LabelledFrames,
        held_out: LabelledFrames,
        weigh: Callable[[LabelledFrames], NDArray[np.float32]],
    ) -> None:
        self.frames, self.held_out = frames, held_out
        self.weights, self.held_out_weights = weigh(frames), weigh(held_out)
        self.n_rows = len(frames)

    def batch(self, rows: Rows, epoch: int) -> FrameBatch:
        return frame_batch(self.frames, rows, self.weights)

    def weight(self, rows: Rows) -> float:
        return float(self.weights[rows].sum())

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]:
        """AUROC of each network over the frames of held-out groups, and the loss as in training.

        The loss is the weighted mean over the frames, summed over the networks.
        """
        assert isinstance(module, FrameClassifier)
        logits = frame_log_odds(module, self.held_out, ranks)
        is_virus = self.held_out.is_virus
        losses = np.logaddexp(0, np.where(is_virus, -logits, logits)).sum(axis=0)
        loss = float(np.average(losses, weights=self.held_out_weights))
        aurocs = [auroc(row.astype(np.float64), is_virus) for row in logits]
        figures = {"validation_loss": loss, "auroc": aurocs[-1]}
        return figures if len(aurocs) == 1 else {**figures, "auroc_protein": aurocs[0]}


@torch.inference_mode()
def frame_log_odds(
    module: FrameClassifier, frames: LabelledFrames, ranks: Ranks
) -> NDArray[np.float32]:
    """The log-odds of each network for every frame, on every rank. (n_networks, n)"""
    ones = np.ones(len(frames), dtype=np.float32)
    order = longest_first(np.arange(len(frames)), frames.proteins)
    mine = []
    for first in range(0, len(frames), _VALIDATION_ROWS)[ranks.rank :: ranks.world_size]:
        batch = frame_batch(frames, order[first : first + _VALIDATION_ROWS], ones)
        mine.append((batch.rows, module.logits(batch).cpu().numpy()))
    parts = [part for of_rank in ranks.gather(mine) for part in of_rank]
    logits = np.full((len(parts[0][1]), len(frames)), np.nan, dtype=np.float32)
    for rows, values in parts:
        logits[:, rows] = values
    return logits


def frame_batch(frames: LabelledFrames, rows: Rows, weight: NDArray[np.float32]) -> FrameBatch:
    rows = longest_first(rows, frames.proteins)
    return FrameBatch(
        rows,
        PackedBatch.of([frames.proteins[row] for row in rows]),
        frames.composition[rows],
        frames.is_virus[rows].astype(np.float32),
        weight[rows],
        frames.vectors[rows],
    )


def longest_first(rows: Rows, proteins: Texts) -> Rows:
    """Neighbours of one length make few runs."""
    return rows[np.argsort(-proteins.take(rows).lengths, kind="stable")]
