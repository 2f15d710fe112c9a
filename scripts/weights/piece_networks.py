"""Fit the networks of a scorer to fragments of one length.

The networks of one view are multi-class: they distinguish viruses from cells, and the kinds of
each. What distinguishes a phage from a retrovirus, or a bacterium from a transposon, helps with
families that are not in the training set. The networks of the other view are binary. Both views
together are more accurate than either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from quantization import FloatLayer, FloatStack, quantize_networks
from torch import Tensor, nn

from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.viral.features import (
    CLIP,
    Features,
    KmerClassTable,
    WindowFeatures,
)
from virnucpro.viral.networks import ALL, VIEWS, NetworkStack, PieceNetworks

_BLOCK_ROWS = 20_000
STATISTICS_AND_KMERS = range(WindowFeatures.PALINDROMES.start, WindowFeatures.KMERS.stop)
STATISTICS_KMERS_AND_LAYOUT = range(
    STATISTICS_AND_KMERS.start, STATISTICS_AND_KMERS.stop + WindowFeatures.N_LAYOUT
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Hyperparameters."""

    hidden: tuple[int, int] = (128, 64)
    input_dropout: float = 0.4
    no_dropout: range = range(0)  # features without dropout
    dropout: float = 0.3
    label_smoothing: float = 0.05  # distance of targets from 0 and 1
    multiclass_views: tuple[str, ...] = ("shares",)  # others are binary
    kind_loss_weight: float = 0.5  # weight of the loss over kinds; that of viruses and cells is 1
    epochs: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-3
    warmup_share: float = 0.15  # share of the steps
    weight_decay: float = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSet:
    """Features, kinds and weights of fragments, as parallel rows."""

    features: Features  # (n, 1229); (n, 1241) for fragments that are read in parts
    kind: IntArray  # (n,) from 0; kinds of viruses come first
    weights: FloatArray
    n_viral: int  # kinds of viruses
    n_kinds: int

    @property
    def as_binary(self) -> TrainingSet:
        """The same fragments with two kinds, viruses and cells."""
        return replace(
            self, kind=(self.kind >= self.n_viral).astype(np.int64), n_viral=1, n_kinds=2
        )


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Pieces of this size are cut from records of ``shortest`` to below ``longest`` bases.

    Features are computed for the piece, or are means over its parts of ``part`` bases.
    """

    size: int
    shortest: int
    longest: int | None = None
    part: int | None = None


def fit_piece_networks(
    bases: PieceRange,
    training_sets: Sequence[TrainingSet],
    kmers: KmerClassTable,
    config: TrainingConfig,
    prokaryote_set: TrainingSet | None = None,
) -> PieceNetworks:
    """Fit a network of each view to each training set. The index of the set is the seed.

    One more network of ratios is fitted to ``prokaryote_set``, if given. Features are standardised
    by the first training set. ``kmers`` is the table for inference.
    """
    mean, deviation = _moments(training_sets[0].features)
    views = {view: columns for view, columns in VIEWS.items() if view != ALL}
    networks: dict[str, list[list[FloatLayer]]] = {view: [] for view in views}
    stacks: dict[int, FloatStack] = {}
    for seed, training_set in enumerate(training_sets):
        inputs = _standardize(training_set.features, mean, deviation)
        for view, columns in views.items():
            is_multiclass = view in config.multiclass_views
            view_set = training_set if is_multiclass else training_set.as_binary
            networks[view].append(_fit_network(inputs, columns, view_set, seed, config))
            layers = tuple(_stack_layers(networks[view]))
            stacks[columns.start or 0] = layers, view_set.n_viral
    prokaryotic: FloatStack | None = None
    if prokaryote_set is not None:
        inputs = _standardize(prokaryote_set.features, mean, deviation)
        network = _fit_network(
            inputs, WindowFeatures.RATIOS_VIEW, prokaryote_set.as_binary, 0, config
        )
        prokaryotic = tuple(_stack_layers([network])), 1
    nets = quantize_networks(mean, deviation, stacks, prokaryotic)
    return PieceNetworks(bases.size, bases.shortest, bases.longest, bases.part, kmers, nets)


def fit_network(training_set: TrainingSet, seed: int, config: TrainingConfig) -> NetworkStack:
    """Fit one network that reads all features."""
    mean, deviation = _moments(training_set.features)
    inputs = _standardize(training_set.features, mean, deviation)
    layers = _fit_network(inputs, slice(None), training_set, seed, config)
    return quantize_networks(
        mean, deviation, {0: (tuple(_stack_layers([layers])), training_set.n_viral)}
    )


def _blocks(features: Features) -> Iterator[tuple[slice, Features]]:
    """Yield blocks of rows, since the features of all fragments fill the memory."""
    for first in range(0, len(features), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        yield rows, features[rows]


def _moments(features: Features) -> tuple[Features, Features]:
    """Return the mean and the standard deviation of each feature, (n_features,)."""
    mean = np.sum([block.sum(axis=0, dtype=np.float64) for _, block in _blocks(features)], axis=0)
    mean /= len(features)
    squares = [((block - mean) ** 2).sum(axis=0) for _, block in _blocks(features)]
    deviation = np.sqrt(np.sum(squares, axis=0) / len(features))
    return mean.astype(np.float32), deviation.astype(np.float32) + np.float32(1e-4)


def _standardize(features: Features, mean: Features, deviation: Features) -> Tensor:
    """Standardise and clip features. (n, n_features) -> the same in bfloat16"""
    inputs = torch.empty(features.shape, dtype=torch.bfloat16)
    for rows, block in _blocks(features):
        standard = ((block - mean) / deviation).clip(-CLIP, CLIP)
        inputs[rows] = torch.from_numpy(standard.astype(np.float32))
    return inputs


def _fit_network(
    features: Tensor, columns: slice, training_set: TrainingSet, seed: int, config: TrainingConfig
) -> list[FloatLayer]:
    """Fit a network to some columns of the standardised features."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    inputs = features[:, columns]
    first = columns.start or 0
    exempt = slice(config.no_dropout.start - first, config.no_dropout.stop - first)
    dropout = _InputDropout(config.input_dropout, exempt, rng)
    net = _network(inputs.shape[1], training_set.n_kinds, config)
    kinds = torch.from_numpy(training_set.kind)
    n_viral = training_set.n_viral
    targets = (kinds < n_viral) * (1 - 2 * config.label_smoothing) + config.label_smoothing
    weights = torch.from_numpy(training_set.weights.astype(np.float32))
    n_batches = len(targets) // config.batch_size
    assert n_batches, "fewer fragments than one batch"
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        config.learning_rate,
        total_steps=config.epochs * n_batches + 1,
        pct_start=config.warmup_share,
    )
    for _ in range(config.epochs):
        order = torch.from_numpy(rng.permutation(len(targets)))
        for rows in order[: n_batches * config.batch_size].reshape(n_batches, config.batch_size):
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(dropout(inputs[rows])).float()
            log_odds = logits[:, :n_viral].logsumexp(1) - logits[:, n_viral:].logsumexp(1)
            losses = nn.functional.binary_cross_entropy_with_logits(
                log_odds, targets[rows], reduction="none"
            )
            losses += config.kind_loss_weight * nn.functional.cross_entropy(
                logits, kinds[rows], reduction="none", label_smoothing=config.label_smoothing
            )
            loss = (losses * weights[rows]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return list(_layers(net))


class _InputDropout:
    """Dropout with exempt inputs. The probability is rounded to a multiple of 1/256.

    Drawing random bytes takes a third of the time that ``nn.Dropout`` takes for random numbers.
    """

    def __init__(self, p: float, exempt: slice, rng: np.random.Generator) -> None:
        self._threshold = round(256 * p)  # the smallest byte that keeps its input
        self._exempt = exempt
        self._rng = rng

    def __call__(self, inputs: Tensor) -> Tensor:
        """Set random inputs to 0 and scale the others. (n, n_inputs) -> the same"""
        random_bytes = np.frombuffer(bytearray(self._rng.bytes(inputs.numel())), dtype=np.uint8)
        mask = torch.from_numpy(random_bytes >= self._threshold).reshape(inputs.shape)
        outputs = inputs * mask * (256 / max(1, 256 - self._threshold))
        outputs[:, self._exempt] = inputs[:, self._exempt]
        return outputs


def _network(n_inputs: int, n_kinds: int, config: TrainingConfig) -> nn.Sequential:
    first, second = config.hidden
    return nn.Sequential(
        nn.Linear(n_inputs, first),
        nn.GELU(approximate="tanh"),
        nn.Dropout(config.dropout),
        nn.Linear(first, second),
        nn.GELU(approximate="tanh"),
        nn.Dropout(config.dropout),
        nn.Linear(second, n_kinds),
    )


def _layers(net: nn.Sequential) -> Iterator[FloatLayer]:
    for module in net:
        if isinstance(module, nn.Linear):
            yield module.weight.detach().numpy(), module.bias.detach().numpy()


def _stack_layers(nets: Sequence[Sequence[FloatLayer]]) -> Iterator[FloatLayer]:
    """Stack the layers of several networks."""
    for layers in zip(*nets, strict=True):
        yield np.stack([weight for weight, _ in layers]), np.stack([bias for _, bias in layers])
