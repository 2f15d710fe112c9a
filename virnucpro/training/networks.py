"""Networks to train: an encoder with a head for masked residues, or with a classifier.

An objective defines the batches, losses and figures for one of the two. ``build_module`` and
``build_objective`` create module and objective for a training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.core.errors import VirnucproError
from virnucpro.core.numeric import sigmoid
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model import ESM2, MaskedBatch
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.models.packing import PackedBatch, to_device
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.training.distributed import Ranks
from virnucpro.training.evaluation.metrics import Samples, auroc
from virnucpro.training.frame_dataset import WEIGHTS, LabelledFrames, Rows, Values
from virnucpro.training.training_config import TrainingRun

NETWORKS = ("protein", "nucleotide")  # in a classifier; without residues only the second
_LINEAR = ("qkv", "attention_out", "up", "down")  # in an ESM-2 layer


@dataclass(frozen=True, slots=True, eq=False)
class _FrameBatch:
    """Frames with their labels."""

    rows: NDArray[np.int64]  # (n,), frame indices, in the order of this batch
    packed: PackedBatch
    composition: NDArray[np.float32]  # (n, N_FEATURES)
    is_virus: NDArray[np.float32]  # (n,)
    weight: NDArray[np.float32]  # (n,)
    vectors: NDArray[np.float32]  # (n, dim); (n, 0): no stored vectors


class _LowRank(nn.Linear):
    """A frozen linear layer plus two trained low-rank matrices (LoRA).

    ``W x + alpha / rank * B A x`` (Hu et al. 2021, arXiv:2106.09685). B starts at 0, so that
    training starts from the original layer.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * F.linear(
            F.linear(input, self.lora_a), self.lora_b
        )

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return a plain layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, device=self.weight.device)
        layer.weight.copy_(self.weight + self.scale * (self.lora_b @ self.lora_a))
        layer.bias.copy_(self.bias)
        return layer


def add_adapters(encoder: ESM2, rank: int, alpha: float | None, n_layers: int | None) -> None:
    """Train only the last ``n_layers`` of an encoder (None: all), and freeze everything before.

    With a rank, these layers are frozen too, and each matrix becomes a ``_LowRank``.
    """
    if not rank and n_layers is None:
        return
    learned = [*encoder.layers][-(n_layers or len(encoder.layers)) :]
    encoder.requires_grad_(False)
    for layer in learned:
        if not rank:
            layer.requires_grad_()
            continue
        for name in _LINEAR:
            low = _LowRank(getattr(layer, name), rank, 2 * rank if alpha is None else alpha)
            setattr(layer, name, low)
    if not rank:
        encoder.final_norm.requires_grad_()


def merge_adapters(encoder: ESM2) -> None:
    """Replace ``_LowRank`` layers by plain layers with the learned weights."""
    for layer in encoder.layers:
        for name in _LINEAR:
            if isinstance(low := getattr(layer, name), _LowRank):
                setattr(layer, name, low.merged())


class MaskedLanguageModel(nn.Module):
    """ESM-2 with its language-model head. The head's last matrix is the embedding."""

    def __init__(self, encoder: ESM2) -> None:
        super().__init__()
        dim = encoder.shape.dim
        self.encoder = encoder
        self.dense = nn.Linear(dim, dim)
        self.layer_norm = nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(encoder.embedding.num_embeddings))

    def logits(self, batch: MaskedBatch) -> Tensor:
        """Return token logits for each chosen residue, (n_chosen, n_tokens)."""
        hidden = self.layer_norm(F.gelu(self.dense(self.encoder.read_masked(batch))))
        return F.linear(hidden, self.encoder.embedding.weight, self.bias).float()

    def forward(self, batch: MaskedBatch) -> Tensor:
        """Return the sum of cross-entropies over the chosen residues."""
        logits = self.logits(batch)
        targets = to_device(batch.targets, logits.device)
        return F.cross_entropy(logits, targets, reduction="sum")

    def extra_tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors, by their names in transformers."""
        own = dict(self.named_parameters())
        return {f"lm_head.{n}": own[n] for n in own if not n.startswith("encoder.")}


class Classifier(nn.Module):
    """Two networks: one on the frame vector, one on vector and composition.

    Composition is standardised by ``centre`` and ``spread`` over the training frames. In a ``Head``
    the first layer does that. If no residues are read, ``dim`` is 0 and only the second network
    exists.
    """

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.protein = _mlp(dim, hidden, dropout) if dim else None
        self.nucleotide = _mlp(dim + N_FEATURES, hidden, dropout)
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("centre", torch.zeros(N_FEATURES))
        self.register_buffer("spread", torch.ones(N_FEATURES))

    def standardise(self, frames: LabelledFrames) -> None:
        min_spread = 1e-3  # minimum deviation, so that weights of rare features hardly learn
        mean, deviation = mean_and_deviation(frames)
        self.centre.copy_(torch.from_numpy(mean))
        self.spread.copy_(torch.from_numpy(deviation).clamp(min=min_spread))

    def forward(self, pooled: Tensor, composition: Tensor) -> Tensor:
        """(n, dim), (n, N_FEATURES) -> log-odds, (n_networks, n). The last network reads both."""
        standardised = (composition - self.centre) / self.spread
        logits = [self.nucleotide(torch.cat([pooled, standardised], dim=1))]
        if self.protein is not None:
            logits.insert(0, self.protein(pooled))
        stacked = torch.stack(logits)
        return stacked[..., 1] - stacked[..., 0]


def mean_and_deviation(
    frames: LabelledFrames,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return composition mean and deviation, bit-identical to numpy. (N_FEATURES,) each"""

    def mean_of(blocks: Iterable[Values]) -> NDArray[np.float32]:
        total = np.zeros((1, N_FEATURES), dtype=np.float32)
        for block in blocks:  # row by row, as in numpy
            total = np.add.reduce(np.vstack([total, block]), axis=0, keepdims=True)
        mean: NDArray[np.float32] = (total[0] / np.int64(len(frames))).astype(np.float32)
        return mean

    mean = mean_of(frames.compositions())
    return mean, np.sqrt(mean_of((block - mean) ** 2 for block in frames.compositions()))


def _mlp(n_inputs: int, hidden: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(dropout / 2),
        nn.Linear(n_inputs, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 2),
    )


class FrameClassifier(nn.Module):
    """A residue reader (``FrameNetwork``), and a classifier of its vectors.

    Stored vectors, if any, are appended to the reader's vectors.
    """

    def __init__(self, reader: FrameNetwork, classifier: Classifier) -> None:
        super().__init__()
        self.reader = reader
        self.classifier = classifier

    def logits(self, batch: _FrameBatch) -> Tensor:
        """Return viral log-odds by each network, (n_networks, n)."""
        device = self.classifier.centre.device
        read = self.reader(batch.packed).to(device)
        pooled = torch.cat([read, to_device(batch.vectors, device)], dim=1)
        out: Tensor = self.classifier(pooled, to_device(batch.composition, device))
        return out.float()

    def forward(self, batch: _FrameBatch) -> Tensor:
        """Return the sum of weighted losses over all networks and frames."""
        logits = self.logits(batch)
        is_virus = to_device(batch.is_virus, logits.device).expand_as(logits)
        weight = to_device(batch.weight, logits.device)
        losses = F.binary_cross_entropy_with_logits(logits, is_virus, reduction="none")
        return (losses * weight).sum()


class MaskedResidues:
    """Predicts the masked residues of proteins (``--pretrain``)."""

    best = "validation_loss"

    def __init__(self, frames: LabelledFrames, held_out: LabelledFrames, seed: int) -> None:
        self.frames = frames
        self.held_out = held_out
        self.seed = seed

    def batch(self, rows: Rows, epoch: int) -> MaskedBatch:
        return self._mask_tokens(self.frames, rows, epoch)

    def _mask_tokens(self, frames: LabelledFrames, rows: Rows, epoch: int) -> MaskedBatch:
        rows = _longest_first(rows, frames)
        seeds = [(self.seed, epoch, row) for row in rows.tolist()]
        return MaskedBatch.from_batch(frames.proteins(rows), seeds)

    def weight(self, rows: Rows) -> float:
        """Return the divisor for the losses of these rows: the chosen residue count."""
        return float(MaskedBatch.n_chosen(self.frames.n_residues(rows)).sum())

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]:
        """Return the mean loss per chosen residue, with the same masks every time."""
        no_epoch = 2**32 - 1  # replaces the epoch in mask seeds for validation
        loss = 0.0
        n_chosen = 0
        for rows, counts in _shares(np.arange(len(self.held_out)), ranks):
            batch = self._mask_tokens(self.held_out, rows, no_epoch)
            loss += counts * float(module(batch))
            n_chosen += counts * len(batch.places)
        sums = np.sum(ranks.gather((loss, n_chosen)), axis=0)
        return {"validation_loss": float(sums[0] / max(1, sums[1]))}


def _shares(rows: Rows, ranks: Ranks) -> Iterator[tuple[Rows, bool]]:
    """Yield the rows of each batch for this rank, and whether the batch counts.

    All ranks have the same number of batches, since ranks with sharded weights (FSDP) run in step.
    A rank with fewer batches repeats one, which does not count.
    """
    validation_rows = 256  # per batch
    n_batches = -(-len(rows) // validation_rows)
    n_slots = -(-n_batches // ranks.world_size) * ranks.world_size
    for slot in range(ranks.rank, n_slots, ranks.world_size):
        first = slot % n_batches * validation_rows
        yield rows[first : first + validation_rows], slot < n_batches


class FrameLabels:
    """Classifies frames as viral or not."""

    def __init__(
        self,
        frames: LabelledFrames,
        held_out: LabelledFrames,
        weigh: Callable[[LabelledFrames], NDArray[np.float32]],
        best: str = "auroc",
    ) -> None:
        self.best = best
        self.frames = frames
        self.held_out = held_out
        self.weights = weigh(frames)
        self.held_out_weights = weigh(held_out)

    def batch(self, rows: Rows, epoch: int) -> _FrameBatch:
        return frame_batch(self.frames, rows, self.weights)

    def weight(self, rows: Rows) -> float:
        return float(self.weights[rows].sum())

    def validate(self, module: nn.Module, ranks: Ranks) -> dict[str, float]:
        """Return each network's AUROC on held-out frames, and the loss as in training.

        The loss is the weighted mean over the frames, summed over the networks. AUPRC, accuracy and
        F1 describe the last network with the same weights. Log-odds of 0 or more count as viral.
        """
        logits = frame_log_odds(module, self.held_out, ranks)
        if not np.isfinite(logits).all():
            raise VirnucproError(
                "the score of a validation frame is not finite",
                hint="train again, in another --output-dir, with a smaller --lr, or in fp32",
            )
        is_virus = self.held_out.is_virus
        losses = np.logaddexp(0, np.where(is_virus, -logits, logits)).sum(axis=0)
        loss = float(np.average(losses, weights=self.held_out_weights))
        aurocs = [auroc(row.astype(np.float64), is_virus) for row in logits]
        samples = frame_samples(logits[-1], self.held_out, self.held_out_weights)
        measures = samples.measure(logits[-1] >= 0)
        figures = {"validation_loss": loss, "auroc": aurocs[-1]}
        for name in ("auprc", "accuracy", "f1"):
            if (figure := measures[name]) is not None:
                figures[name] = figure
        return figures if len(aurocs) == 1 else {**figures, "auroc_protein": aurocs[0]}


# The task of a training: rows, batches, losses and validation. ``best`` names the figure that
# chooses the best epoch: the largest value, or the smallest loss.
Objective = MaskedResidues | FrameLabels


def frame_samples(
    log_odds: NDArray[np.float32], frames: LabelledFrames, weights: NDArray[np.float32]
) -> Samples:
    """Make samples from frames. Scores are viral probabilities. (n,) each"""
    scores = sigmoid(log_odds.astype(np.float64))
    return Samples(scores, frames.is_virus, frames.group, weights.astype(np.float64))


@torch.inference_mode()
def frame_log_odds(module: nn.Module, frames: LabelledFrames, ranks: Ranks) -> NDArray[np.float32]:
    """Return each network's log-odds for every frame, on every rank. (n_networks, n)"""
    assert isinstance(module, FrameClassifier)
    ones = np.ones(len(frames), dtype=np.float32)
    own_parts = []
    for rows, counts in _shares(_longest_first(np.arange(len(frames)), frames), ranks):
        batch = frame_batch(frames, rows, ones)
        logits = module.logits(batch).cpu().numpy()
        if counts:
            own_parts.append((batch.rows, logits))
    parts = list(chain.from_iterable(ranks.gather(own_parts)))
    logits = np.full((len(parts[0][1]), len(frames)), np.nan, dtype=np.float32)
    for rows, values in parts:
        logits[:, rows] = values
    return logits


def frame_batch(frames: LabelledFrames, rows: Rows, weight: NDArray[np.float32]) -> _FrameBatch:
    rows = _longest_first(rows, frames)
    return _FrameBatch(
        rows,
        PackedBatch.from_sequences(frames.proteins(rows)),
        frames.composition(rows),
        frames.is_virus[rows].astype(np.float32),
        weight[rows],
        frames.vectors(rows),
    )


def _longest_first(rows: Rows, frames: LabelledFrames) -> Rows:
    """Sort rows by length, longest first, so that a packed batch has few runs."""
    return rows[np.argsort(-frames.n_residues(rows), kind="stable")]


# Module and objective of a training


def build_module(
    training: TrainingRun, train: LabelledFrames, reader: FrameNetwork | None = None
) -> nn.Module:
    """Make the module to train. A classifier is standardised by the training frames."""
    module = _new_module(training, train.dim, reader)
    if isinstance(module, FrameClassifier):
        module.classifier.standardise(train)
    return module


def empty_module(training: TrainingRun, dim: int) -> nn.Module:
    """Make the same module without memory for its weights.

    Args:
        dim: dimensions of stored vectors.
    """
    with torch.device("meta"):
        return _new_module(replace(training, encoder=None), dim)


def _new_module(training: TrainingRun, dim: int, reader: FrameNetwork | None = None) -> nn.Module:
    options = training.options
    if options.mode == "pretrain":
        return MaskedLanguageModel(trained_encoder(training))
    if reader is None:
        encoding = "composition" if training.has_stored_vectors else options.encoding
        esm2 = trained_encoder(training) if encoding == "esm2" else None
        reader = FrameNetwork.create(encoding, options.architecture, esm2)
    return FrameClassifier(reader, Classifier(reader.width + dim, options.hidden, options.dropout))


def build_objective(
    training: TrainingRun, train: LabelledFrames, held_out: LabelledFrames
) -> Objective:
    options = training.options
    if options.mode == "pretrain":
        return MaskedResidues(train, held_out, options.seed)
    best = "validation_loss" if options.best_by == "loss" else options.best_by
    return FrameLabels(train, held_out, WEIGHTS[options.class_weights], best)


def trained_encoder(training: TrainingRun) -> ESM2:
    """Load the encoder to start from, or make a new one, in float32, with gradients."""
    assert training.shape is not None, "an encoding without an encoder"
    options = training.options
    if training.encoder is None:
        encoder = ESM2.create(training.shape)
    else:
        cpu = torch.device("cpu")  # moved to its device later, with the rest of the module
        path = training.encoder.path
        n_layers = training.shape.n_layers
        encoder = load_esm2(path, n_layers, torch.float32, cpu).to_train()
        encoder.requires_grad_(options.mode != "head")
    add_adapters(encoder, options.lora, options.lora_alpha, options.train_layers)
    if options.gradient_checkpointing or options.fsdp:
        encoder.forget_activations()
    return encoder


def make_batches(
    objective: Objective, parts: Iterable[Rows], epoch: int, n_threads: int
) -> Iterator[Any]:
    """Yield an epoch's batches, made ahead by ``n_threads``, or here if that is 0.

    Args:
        parts: rows per batch.
    """
    batches_ahead = 2  # per thread
    if not n_threads:
        yield from (objective.batch(rows, epoch) for rows in parts)
        return
    coming: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for rows in parts:
            coming.append(pool.submit(objective.batch, rows, epoch))
            if len(coming) > batches_ahead * n_threads:
                yield coming.popleft().result()
        yield from (batch.result() for batch in coming)
