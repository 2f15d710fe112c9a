"""The objectives of a training on frames, masked residues or labels, and their batches.

Batches come in the order in which they are learned, made here or in processes beside the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from virnucpro.encoders.esm2.checkpoint import MASK, RESIDUES, tokenize
from virnucpro.encoders.esm2.model import TOKEN_DROPOUT_SCALE
from virnucpro.encoders.esm2.packing import PackedBatch
from virnucpro.ground.errors import VirnucproError
from virnucpro.ground.numeric import sigmoid
from virnucpro.ground.processes import Child, Pipe, Raised, interrupts_held, kill_all, start
from virnucpro.learning.evaluation.metrics import Samples, auroc, measure
from virnucpro.learning.labelled.frames import LabelledFrames, Rows, Texts
from virnucpro.learning.training.networks import FrameBatch, FrameClassifier, MaskedBatch
from virnucpro.learning.training.ranks import Ranks

_VALIDATION_ROWS = 256  # in one batch
MASKED, OF_MASKED, OF_RANDOM = 0.15, 0.8, 0.1  # the rest of the chosen ones stays as it is
STANDARD = tokenize([RESIDUES[:20]])[1:-1]  # the tokens of the 20 amino acids

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)
BatchRows = tuple[int, Rows]  # of an epoch: its number, and the rows of one batch


class Objective(Protocol[B_co]):
    """An objective: its rows, batches, losses and evaluation. ``B_co`` is its kind of batch."""

    n_rows: int  # of an epoch
    unit: str
    proteins: Texts  # of the rows
    best: str  # the name of the figure by which the best epoch is chosen; a loss is better smaller

    def batch(self, rows: Rows, epoch: int) -> B_co: ...

    def weight(self, rows: Rows) -> float:
        """The divisor of the losses of these rows."""

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]: ...


class MaskedResidues:
    """Tell the masked residues of proteins (``--pretrain``)."""

    unit, best = "frames", "validation_loss"

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
        for first, counts in _shares(len(self.held_out), ranks):
            rows = np.arange(first, min(first + _VALIDATION_ROWS, len(self.held_out)))
            rows = longest_first(rows, self.held_out)
            seeds = [(self.seed, -1 % 2**32, int(row)) for row in rows]
            batch = masked_batch([self.held_out[row] for row in rows.tolist()], seeds)
            loss += counts * float(module(batch))
            n_chosen += counts * len(batch.places)
        sums = np.sum(ranks.gather((loss, n_chosen)), axis=0)
        mean = float(sums[0] / max(1, sums[1]))
        return {"validation_loss": mean}


def _shares(n_rows: int, ranks: Ranks) -> Iterator[tuple[int, bool]]:
    """The first rows of this rank's batches, as many as the others have, and if one counts.

    Ranks that share their weights (FSDP) run together: one that has fewer repeats a batch.
    """
    starts = range(0, n_rows, _VALIDATION_ROWS)
    for place in range(ranks.rank, -(-len(starts) // ranks.world_size) * ranks.world_size)[
        :: ranks.world_size
    ]:
        yield starts[place % len(starts)], place < len(starts)


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

    unit = "frames"

    def __init__(
        self,
        frames: LabelledFrames,
        held_out: LabelledFrames,
        weigh: Callable[[LabelledFrames], NDArray[np.float32]],
        best: str = "auroc",
    ) -> None:
        self.best = best
        self.frames, self.held_out, self.proteins = frames, held_out, frames.proteins
        self.weights, self.held_out_weights = weigh(frames), weigh(held_out)
        self.n_rows = len(frames)

    def batch(self, rows: Rows, epoch: int) -> FrameBatch:
        return frame_batch(self.frames, rows, self.weights)

    def weight(self, rows: Rows) -> float:
        return float(self.weights[rows].sum())

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]:
        """AUROC of each network over the frames of held-out groups, and the loss as in training.

        The loss is the weighted mean over the frames, summed over the networks. AUPRC, accuracy and
        F1 are of the last network, called from log-odds of 0 on, with the same weights.
        """
        assert isinstance(module, FrameClassifier)
        logits = frame_log_odds(module, self.held_out, ranks)
        if not np.isfinite(logits).all():
            raise VirnucproError(
                "a validation frame has a score that is no number",
                hint="train again, in another --output-dir, with a smaller --lr, or in fp32",
            )
        is_virus = self.held_out.is_virus
        losses = np.logaddexp(0, np.where(is_virus, -logits, logits)).sum(axis=0)
        loss = float(np.average(losses, weights=self.held_out_weights))
        aurocs = [auroc(row.astype(np.float64), is_virus) for row in logits]
        samples = samples_of(logits[-1], self.held_out, self.held_out_weights)
        found = measure(samples, logits[-1] >= 0)
        figures = {"validation_loss": loss, "auroc": aurocs[-1]}
        for name in ("auprc", "accuracy", "f1"):
            figures[name] = float(getattr(found, name))
        return figures if len(aurocs) == 1 else {**figures, "auroc_protein": aurocs[0]}


def samples_of(
    log_odds: NDArray[np.float32], frames: LabelledFrames, weights: NDArray[np.float32]
) -> Samples:
    """Frames with their probabilities of being viral. (n,) each"""
    scores = sigmoid(log_odds.astype(np.float64))
    return Samples(scores, frames.is_virus, frames.group, weights.astype(np.float64))


@torch.inference_mode()
def frame_log_odds(
    module: FrameClassifier, frames: LabelledFrames, ranks: Ranks
) -> NDArray[np.float32]:
    """The log-odds of each network for every frame, on every rank. (n_networks, n)"""
    ones = np.ones(len(frames), dtype=np.float32)
    order = longest_first(np.arange(len(frames)), frames.proteins)
    mine = []
    for first, counts in _shares(len(frames), ranks):
        batch = frame_batch(frames, order[first : first + _VALIDATION_ROWS], ones)
        logits = module.logits(batch).cpu().numpy()
        if counts:
            mine.append((batch.rows, logits))
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


@contextmanager
def batches_of(
    objective: Objective[B], n_processes: int
) -> Iterator[Callable[[Iterable[BatchRows]], Iterator[B]]]:
    """A function from parts to their batches, made in ``n_processes``, or here if that is 0."""
    if not n_processes:
        yield lambda parts: (objective.batch(rows, epoch) for epoch, rows in parts)
        return
    children: list[Child] = []
    try:
        with interrupts_held():
            for _ in range(n_processes):
                children.append(start(_make_batches))
        for child in children:
            with suppress(OSError):  # it has died; that is heard when it is asked
                child.pipe.send(objective)
        yield lambda parts: _made_beside(children, parts)
    finally:
        kill_all(children)


def _made_beside(children: list[Child], parts: Iterable[BatchRows]) -> Iterator[Any]:
    """In turn. Each has one part at most: it could not say a batch while it is told another."""
    left, busy = iter(parts), deque[Child]()

    def give(child: Child) -> None:
        for part in islice(left, 1):
            with suppress(OSError):  # as above
                child.pipe.send(part)
            busy.append(child)

    for child in children:
        give(child)
    while busy:
        child = busy.popleft()
        batch = _answer(child)
        give(child)  # it makes the next one while this one is learned
        yield batch


def _answer(child: Child) -> object:
    """
    Raises:
        VirnucproError: the process has ended, and why.
    """
    try:
        answer = child.pipe.recv()
    except (EOFError, OSError):
        reason = child.cause_of_end()
    else:
        if not isinstance(answer, Raised):
            return answer
        reason = answer.reason
    raise VirnucproError(
        f"a process that makes batches ended: {reason}",
        hint="the epochs that were finished are kept: go on with --resume and --num-workers 0",
    )


def _make_batches(pipe: Pipe) -> None:
    objective: Objective[object] = pipe.recv()
    while True:
        epoch, rows = pipe.recv()
        pipe.send(objective.batch(rows, epoch))
