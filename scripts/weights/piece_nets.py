"""Fit the nets of a scorer to fragments of one length.

The nets of one view learn to distinguish viruses from cells and also the kinds of each. What
distinguishes a phage from a retrovirus, or a bacterium from a transposon, helps with families that
no net has seen. The nets of the other view learn no kinds. Both views together do better than
either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rounding import Fitted, FittedLayer, rounded
from torch import Tensor, nn

from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.viral.features import (
    CLIP,
    FIGURES,
    N_KMER_FEATURES,
    N_LAYOUT,
    N_PALINDROMES,
    RATIOS,
    Features,
    KmerClassTable,
)
from virnucpro.viral.networks import ALL, VIEWS, NetworkStack, PieceNetworks

_ROWS_AT_ONCE = 20_000
NO_FEATURES = range(0)
FIGURES_AND_WORDS = range(FIGURES.start - N_PALINDROMES, FIGURES.stop + N_KMER_FEATURES)
FIGURES_WORDS_AND_LAYOUT = range(FIGURES_AND_WORDS.start, FIGURES_AND_WORDS.stop + N_LAYOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The settings for fitting nets."""

    hidden: tuple[int, int] = (128, 64)
    input_dropout: float = 0.4
    spared: range = NO_FEATURES  # features without dropout
    dropout: float = 0.3
    smoothing: float = 0.05  # targets are this far from 0 and 1
    views_of_kinds: tuple[str, ...] = ("shares",)  # views with nets that learn kinds
    share_of_kinds: float = 0.5  # weight of the loss over kinds; that of viruses and cells is 1
    epochs: int = 8
    batch: int = 256
    rate: float = 1e-3
    warm_up: float = 0.15  # share of the steps
    weight_decay: float = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """The features, kinds and weights of fragments, as parallel rows."""

    features: Features  # (n, 1229); (n, 1241) for fragments that are read in parts
    kind: IntArray  # (n,) from 0; kinds of viruses come first
    weights: FloatArray
    n_viral: int  # kinds of viruses
    n_kinds: int

    @property
    def without_kinds(self) -> Lessons:
        """The same with two kinds: viruses and cells."""
        return replace(
            self, kind=(self.kind >= self.n_viral).astype(np.int64), n_viral=1, n_kinds=2
        )


@dataclass(frozen=True, slots=True)
class Range:
    """Pieces of this size are cut from records of ``shortest`` to below ``longest`` bases.

    They are read whole, or in parts of ``part`` bases.
    """

    size: int
    shortest: int
    longest: int | None = None
    part: int | None = None


def fit_piece_nets(
    bases: Range,
    lessons: Sequence[Lessons],
    kmers: KmerClassTable,
    fitting: Fitting,
    prokaryote_lessons: Lessons | None = None,
) -> PieceNetworks:
    """Fit a net of each view to each of several draws of fragments. The index is the seed.

    Another net of ratios is fitted to ``prokaryote_lessons``, if they are given. Features are
    standardised by the first draw. ``k-mers`` is the table for later use.
    """
    mean, deviation = _spread(lessons[0].features)
    views = {view: columns for view, columns in VIEWS.items() if view != ALL}
    fitted: dict[str, list[list[FittedLayer]]] = {view: [] for view in views}
    stacks: dict[int, Fitted] = {}
    for seed, draw in enumerate(lessons):
        inputs = _standardised(draw.features, mean, deviation)
        for view, columns in views.items():
            view_draw = draw if view in fitting.views_of_kinds else draw.without_kinds
            fitted[view].append(_fit(inputs, columns, view_draw, seed, fitting))
            layers = tuple(_stacked(fitted[view]))
            stacks[columns.start or 0] = layers, view_draw.n_viral
    prokaryotic: Fitted | None = None
    if prokaryote_lessons is not None:
        inputs = _standardised(prokaryote_lessons.features, mean, deviation)
        net = _fit(inputs, RATIOS, prokaryote_lessons.without_kinds, 0, fitting)
        prokaryotic = tuple(_stacked([net])), 1
    nets = rounded(mean, deviation, stacks, prokaryotic)
    return PieceNetworks(bases.size, bases.shortest, bases.longest, bases.part, kmers, nets)


def fit_nets(lessons: Lessons, seed: int, fitting: Fitting) -> NetworkStack:
    """Fit one net that reads all features."""
    mean, deviation = _spread(lessons.features)
    inputs = _standardised(lessons.features, mean, deviation)
    layers = _fit(inputs, slice(None), lessons, seed, fitting)
    return rounded(mean, deviation, {0: (tuple(_stacked([layers])), lessons.n_viral)})


def _blocks(features: Features) -> Iterator[tuple[slice, Features]]:
    """Some of the rows at a time, since features of all fragments fill a memory by themselves."""
    for first in range(0, len(features), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        yield rows, features[rows]


def _spread(features: Features) -> tuple[Features, Features]:
    """The mean of each feature, and its deviation, which is above 0. -> twice (n_features,)"""
    mean = np.sum([block.sum(axis=0, dtype=np.float64) for _, block in _blocks(features)], axis=0)
    mean /= len(features)
    squares = [((block - mean) ** 2).sum(axis=0) for _, block in _blocks(features)]
    deviation = np.sqrt(np.sum(squares, axis=0) / len(features))
    return mean.astype(np.float32), deviation.astype(np.float32) + np.float32(1e-4)


def _standardised(features: Features, mean: Features, deviation: Features) -> Tensor:
    """(n, n_features) -> the same in bfloat16"""
    inputs = torch.empty(features.shape, dtype=torch.bfloat16)
    for rows, block in _blocks(features):
        standard = ((block - mean) / deviation).clip(-CLIP, CLIP)
        inputs[rows] = torch.from_numpy(standard.astype(np.float32))
    return inputs


def _fit(
    features: Tensor, columns: slice, lessons: Lessons, seed: int, fitting: Fitting
) -> list[FittedLayer]:
    """Fit a net to these columns of the standardised features."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    inputs = features[:, columns]
    first = columns.start or 0
    spared = slice(fitting.spared.start - first, fitting.spared.stop - first)
    dropout = _InputDropout(fitting.input_dropout, spared, rng)
    net = _network(inputs.shape[1], lessons.n_kinds, fitting)
    kinds = torch.from_numpy(lessons.kind)
    n_viral = lessons.n_viral
    targets = (kinds < n_viral) * (1 - 2 * fitting.smoothing) + fitting.smoothing
    weights = torch.from_numpy(lessons.weights.astype(np.float32))
    n_batches = len(targets) // fitting.batch
    assert n_batches, "fewer fragments than one batch"
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=fitting.rate, weight_decay=fitting.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        fitting.rate,
        total_steps=fitting.epochs * n_batches + 1,
        pct_start=fitting.warm_up,
    )
    for _ in range(fitting.epochs):
        order = torch.from_numpy(rng.permutation(len(targets)))
        for rows in order[: n_batches * fitting.batch].reshape(n_batches, fitting.batch):
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(dropout(inputs[rows])).float()
            log_odds = logits[:, :n_viral].logsumexp(1) - logits[:, n_viral:].logsumexp(1)
            losses = nn.functional.binary_cross_entropy_with_logits(
                log_odds, targets[rows], reduction="none"
            )
            losses += fitting.share_of_kinds * nn.functional.cross_entropy(
                logits, kinds[rows], reduction="none", label_smoothing=fitting.smoothing
            )
            loss = (losses * weights[rows]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return list(_layers(net))


class _InputDropout:
    """Dropout that spares some inputs. The probability is rounded to a multiple of 1/256.

    Drawing random bytes takes a third of the time that ``nn.Dropout`` takes for random numbers.
    """

    def __init__(self, p: float, spared: slice, rng: np.random.Generator) -> None:
        self._least = round(256 * p)  # the smallest byte that keeps its input
        self._spared = spared
        self._rng = rng

    def __call__(self, inputs: Tensor) -> Tensor:
        """Set random inputs to 0 and scale the others. (n, n_inputs) -> the same"""
        drawn = np.frombuffer(bytearray(self._rng.bytes(inputs.numel())), dtype=np.uint8)
        kept = torch.from_numpy(drawn >= self._least).reshape(inputs.shape)
        outputs = inputs * kept * (256 / max(1, 256 - self._least))
        outputs[:, self._spared] = inputs[:, self._spared]
        return outputs


def _network(n_inputs: int, n_kinds: int, fitting: Fitting) -> nn.Sequential:
    first, second = fitting.hidden
    return nn.Sequential(
        nn.Linear(n_inputs, first),
        nn.GELU(approximate="tanh"),
        nn.Dropout(fitting.dropout),
        nn.Linear(first, second),
        nn.GELU(approximate="tanh"),
        nn.Dropout(fitting.dropout),
        nn.Linear(second, n_kinds),
    )


def _layers(net: nn.Sequential) -> Iterator[FittedLayer]:
    for module in net:
        if isinstance(module, nn.Linear):
            yield module.weight.detach().numpy(), module.bias.detach().numpy()


def _stacked(nets: Sequence[Sequence[FittedLayer]]) -> Iterator[FittedLayer]:
    """Stack the layers of several nets."""
    for layers in zip(*nets, strict=True):
        yield np.stack([weight for weight, _ in layers]), np.stack([bias for _, bias in layers])
