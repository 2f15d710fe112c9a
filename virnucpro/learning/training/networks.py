"""Networks to train: the encoder with a head for masked residues, or with a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virnucpro.encoders.esm2.attention import attend_to_train
from virnucpro.encoders.esm2.checkpoint import N_TOKENS, ESM2Shape
from virnucpro.encoders.esm2.model import ESM2
from virnucpro.encoders.esm2.packing import PackedBatch, StagedBatch
from virnucpro.encoders.readers import Reader
from virnucpro.encoders.transfer import send
from virnucpro.learning.labelled.frames import ArrayRows, Values
from virnucpro.sequences.composition import N_FEATURES

NETWORKS = ("protein", "nucleotide")  # of a classifier; without residues the second is alone
_LINEAR = ("qkv", "attention_out", "up", "down")  # of a layer of ESM-2
_LEAST_SPREAD = 1e-3  # of a word that hardly occurs: its weights hardly learn either


@dataclass(frozen=True, slots=True, eq=False)
class MaskedBatch:
    """Proteins of which some residues are to be told."""

    packed: PackedBatch  # with <mask> in it
    scale: NDArray[np.float32]  # (n_tokens,), of each token's embedding: 0 where masked
    places: NDArray[np.int64]  # (n_chosen,) in the row of tokens
    targets: NDArray[np.int64]  # (n_chosen,)


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames with their labels."""

    rows: NDArray[np.int64]  # (n,), of the frames, in the order of what follows
    packed: PackedBatch
    composition: NDArray[np.float32]  # (n, N_FEATURES)
    is_virus: NDArray[np.float32]  # (n,)
    weight: NDArray[np.float32]  # (n,)
    vectors: NDArray[np.float32]  # (n, dim) if they were made before, else (n, 0)


def new_encoder(shape: ESM2Shape) -> ESM2:
    """An ESM-2 with random weights, ready to be trained.

    Normal with a deviation of 0.02, and less where a layer adds to the residual stream, so that
    it does not grow with depth (Radford et al. 2019).
    """
    encoder = ESM2(shape, shape.n_layers, torch.float32, attend_to_train)
    for name, parameter in encoder.named_parameters():
        if parameter.ndim == 2:
            adds = name.endswith(("attention_out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * shape.n_layers) ** 0.5 if adds else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return encoder


class LowRank(nn.Linear):
    """A linear layer that stays as it is, and beside it two matrices of low rank that are learned.

    Those are LoRA's (Hu et al. 2021, arXiv:2106.09685): ``W x + alpha / rank * B A x``; B is 0 at
    first, so that training begins with what the layer was.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
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
        """One layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, device=self.weight.device)
        layer.weight.copy_(self.weight + self.scale * (self.lora_b @ self.lora_a))
        layer.bias.copy_(self.bias)
        return layer


def adapt(encoder: ESM2, rank: int, alpha: float | None, n_layers: int | None) -> None:
    """Have the last ``n_layers`` of an encoder learn (None: all), and nothing before them.

    With a rank the layers stay too, and have ``LowRank`` in the place of each matrix.
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
            low = LowRank(getattr(layer, name), rank, 2 * rank if alpha is None else alpha)
            setattr(layer, name, low)
    if not rank:
        encoder.final_norm.requires_grad_()


def merge(encoder: ESM2) -> None:
    """Put what ``LowRank`` layers have learned into the weights of plain ones."""
    for layer in encoder.layers:
        for name in _LINEAR:
            if isinstance(low := getattr(layer, name), LowRank):
                setattr(layer, name, low.merged())


def forget_activations(encoder: ESM2) -> None:
    """Have each layer keep its input alone, and run again for its gradient.

    Layers take and return tensors then, by which FSDP knows when it needs the weights of which.
    """
    for layer in encoder.layers:
        layer.forward = partial(_keep_input_alone, encoder, layer.forward)
    encoder.apply_layers = partial(_apply_to_tensors, encoder)  # type: ignore[method-assign]


def _keep_input_alone(
    encoder: ESM2, run: Callable[..., None], x: Tensor, batch: StagedBatch
) -> Tensor:
    def added(x: Tensor) -> Tensor:
        stream = encoder.stream_of(x)  # of which nothing waits where it is trained
        run(stream, batch, encoder.attend)
        return stream.x

    out: Tensor = checkpoint(added, x, use_reentrant=False)
    return out


def _apply_to_tensors(
    encoder: ESM2,
    layers: Iterable[nn.Module],
    stream: Any,  # noqa: ANN401 - that of the model
    batch: StagedBatch,
) -> Tensor:
    for layer in layers:
        stream.x = layer(stream.x, batch)
    out: Tensor = stream.end(encoder.final_norm)
    return out


class MaskedLanguageModel(nn.Module):
    """ESM-2 with its language-model head, whose last matrix is the embedding."""

    def __init__(self, encoder: ESM2) -> None:
        super().__init__()
        dim = encoder.shape.dim
        self.encoder = encoder
        self.dense = nn.Linear(dim, dim)
        self.layer_norm = nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(N_TOKENS))

    def logits(self, batch: MaskedBatch) -> Tensor:
        """Logits of the tokens for each chosen residue, (n_chosen, N_TOKENS)."""
        staged = StagedBatch.of(batch.packed, self.encoder.inv_freq)
        device = staged.tokens.device
        scale = send(batch.scale, device)
        x = self.encoder.embedding(staged.tokens) * scale[:, None]
        hidden = self.encoder.transform(x, staged)[send(batch.places, device)]
        hidden = self.layer_norm(F.gelu(self.dense(hidden)))
        return F.linear(hidden, self.encoder.embedding.weight, self.bias).float()

    def forward(self, batch: MaskedBatch) -> Tensor:
        """The cross-entropies of the chosen residues, summed."""
        logits = self.logits(batch)
        targets = send(batch.targets, logits.device)
        return F.cross_entropy(logits, targets, reduction="sum")

    def extra_tensors(self) -> dict[str, Tensor]:
        """The tensors beside the encoder's, as transformers names them."""
        return {
            "lm_head.dense.weight": self.dense.weight,
            "lm_head.dense.bias": self.dense.bias,
            "lm_head.layer_norm.weight": self.layer_norm.weight,
            "lm_head.layer_norm.bias": self.layer_norm.bias,
            "lm_head.bias": self.bias,
        }


class Classifier(nn.Module):
    """Two networks over the vector of a frame's residues: alone, and with its composition.

    Composition is standardised by ``centre`` and ``spread`` of the training frames, which
    ``Head`` has inside its first layer. Where no residues are read, ``dim`` is 0 and the second
    network stands alone.
    """

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.protein = _mlp(dim, hidden, dropout) if dim else None
        self.nucleotide = _mlp(dim + N_FEATURES, hidden, dropout)
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("centre", torch.zeros(N_FEATURES))
        self.register_buffer("spread", torch.ones(N_FEATURES))

    def standardise(self, composition: ArrayRows) -> None:
        """By these frames, (n, N_FEATURES)."""
        mean, deviation = mean_and_deviation(composition)
        self.centre.copy_(torch.from_numpy(mean))
        self.spread.copy_(torch.from_numpy(deviation).clamp(min=_LEAST_SPREAD))

    def forward(self, pooled: Tensor, composition: Tensor) -> Tensor:
        """(n, dim), (n, N_FEATURES) -> logits by network, (n_networks, n); the last knows all"""
        beside = (composition - self.centre) / self.spread
        logits = [self.nucleotide(torch.cat([pooled, beside], dim=1))]
        if self.protein is not None:
            logits.insert(0, self.protein(pooled))
        both = torch.stack(logits)
        return both[..., 1] - both[..., 0]


def mean_and_deviation(table: ArrayRows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and deviation of each column, bit for bit as numpy computes them. (width,) each"""

    def mean_of(blocks: Iterable[Values]) -> NDArray[np.float32]:
        total = np.zeros((1, table.width), dtype=np.float32)
        for block in blocks:  # row by row, as numpy does it
            total = np.add.reduce(np.vstack([total, block]), axis=0, keepdims=True)
        mean: NDArray[np.float32] = (total[0] / np.int64(len(table))).astype(np.float32)
        return mean

    mean = mean_of(table.blocks())
    return mean, np.sqrt(mean_of((block - mean) ** 2 for block in table.blocks()))


def _mlp(n_inputs: int, hidden: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(dropout / 2),
        nn.Linear(n_inputs, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 2),
    )


class FrameClassifier(nn.Module):
    """A reader of residues (``encoders.readers``), and a classifier of what it read.

    Vectors that were made before the training stand behind what the reader reads.
    """

    def __init__(self, reader: Reader, classifier: Classifier) -> None:
        super().__init__()
        self.reader, self.classifier = reader, classifier

    def logits(self, batch: FrameBatch) -> Tensor:
        """The log-odds of being viral by each network, (n_networks, n)."""
        device = self.classifier.centre.device
        read = self.reader(batch.packed).to(device)
        pooled = torch.cat([read, send(batch.vectors, device)], dim=1)
        out: Tensor = self.classifier(pooled, send(batch.composition, device))
        return out.float()

    def forward(self, batch: FrameBatch) -> Tensor:
        """The weighted losses of all networks, summed over the frames."""
        return weighted_loss(self.logits(batch), batch)


def weighted_loss(logits: Tensor, batch: FrameBatch) -> Tensor:
    """Cross-entropy of (n_networks, n) log-odds, by weight, summed."""
    is_virus = send(batch.is_virus, logits.device).expand_as(logits)
    weight = send(batch.weight, logits.device)
    losses = F.binary_cross_entropy_with_logits(logits, is_virus, reduction="none")
    return (losses * weight).sum()
