"""Fit the nets of a scorer to fragments of one length.

Those of one view learn to tell viruses from cells, and the kinds of both apart: what tells a
phage from a retrovirus, or a bacterium from a transposon, helps with families that no net has
seen. Those of the other learn nothing of kinds. The two together are better than either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from virnucpro.numeric import Counts, Values
from virnucpro.scorer.features import FIGURES, N_LAYOUT, Features
from virnucpro.scorer.nets import FARTHEST, VIEWS, Layer, Nets, PieceNets
from virnucpro.scorer.words import N_WORD_FIGURES, WordTable

NO_FEATURES = range(0)
FIGURES_AND_WORDS = range(FIGURES.start, FIGURES.stop + N_WORD_FIGURES)
FIGURES_WORDS_AND_LAYOUT = range(FIGURES.start, FIGURES_AND_WORDS.stop + N_LAYOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The settings by which nets are fitted."""

    hidden: tuple[int, int] = (128, 64)
    input_dropout: float = 0.4
    spared: range = NO_FEATURES  # features that no dropout falls on
    dropout: float = 0.3
    smoothing: float = 0.05  # targets are this far from 0 and 1
    views_of_kinds: tuple[str, ...] = ("shares",)  # whose nets tell kinds apart
    share_of_kinds: float = 0.5  # weight of the loss of kinds beside that of viruses and cells
    epochs: int = 8
    batch: int = 256
    rate: float = 1e-3
    warm_up: float = 0.15  # share of the steps
    weight_decay: float = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """Features of fragments, what these are, and what each weighs. Rows in step."""

    features: Features  # (n, 826), of what is read as parts (n, 838)
    kind: Counts  # (n,) from 0 on; kinds of viruses come first
    weights: Values
    n_viral: int  # kinds of viruses
    n_kinds: int

    @property
    def without_kinds(self) -> Lessons:
        """The same of two kinds, viruses and cells."""
        return replace(
            self, kind=(self.kind >= self.n_viral).astype(np.int64), n_viral=1, n_kinds=2
        )


@dataclass(frozen=True, slots=True)
class Range:
    """Pieces of this size are cut from records of ``shortest`` to below ``longest`` bases.

    They are read at once, or as parts of so many bases.
    """

    size: int
    shortest: int
    longest: int | None = None
    part: int | None = None


def fit_piece_nets(
    of_size: Range, lessons: Sequence[Lessons], words: WordTable, fitting: Fitting
) -> PieceNets:
    """A net of each view for each of several draws of fragments, which seed themselves by place.

    Features are standardised by the first draw. ``words`` is what the nets are to read later.
    """
    first = lessons[0].features
    mean, deviation = first.mean(axis=0), first.std(axis=0) + np.float32(1e-4)
    fitted: dict[str, list[list[Layer]]] = {view: [] for view in VIEWS}
    n_viral: dict[str, int] = {}
    for seed, draw in enumerate(lessons):
        standard = ((draw.features - mean) / deviation).clip(-FARTHEST, FARTHEST)
        inputs = torch.from_numpy(standard.astype(np.float32))
        for view, columns in VIEWS.items():
            of_view = draw if view in fitting.views_of_kinds else draw.without_kinds
            fitted[view].append(_fit(inputs, columns, of_view, seed, fitting))
            n_viral[view] = of_view.n_viral
    views = {view: Nets(tuple(_stacked(nets)), n_viral[view]) for view, nets in fitted.items()}
    return PieceNets(
        of_size.size,
        of_size.shortest,
        of_size.longest,
        of_size.part,
        words,
        mean,
        deviation,
        views,
    )


def _fit(
    features: Tensor, columns: slice, lessons: Lessons, seed: int, fitting: Fitting
) -> list[Layer]:
    """A net that reads these columns of the standardised features."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    inputs = features[:, columns]
    first = columns.start or 0
    spared = slice(fitting.spared.start - first, fitting.spared.stop - first)
    net = _network(inputs.shape[1], lessons.n_kinds, spared, fitting)
    kinds, n_viral = torch.from_numpy(lessons.kind), lessons.n_viral
    targets = (kinds < n_viral) * (1 - 2 * fitting.smoothing) + fitting.smoothing
    weights = torch.from_numpy(lessons.weights.astype(np.float32))
    n_batches = len(targets) // fitting.batch
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
            logits = net(inputs[rows])
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


class _InputDropout(nn.Dropout):
    """Dropout that spares some of the inputs."""

    def __init__(self, p: float, spared: slice) -> None:
        super().__init__(p)
        self._spared = spared

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        outputs[:, self._spared] = inputs[:, self._spared]
        return outputs


def _network(n_inputs: int, n_kinds: int, spared: slice, fitting: Fitting) -> nn.Sequential:
    first, second = fitting.hidden
    return nn.Sequential(
        _InputDropout(fitting.input_dropout, spared),
        nn.Linear(n_inputs, first),
        nn.GELU(approximate="tanh"),
        nn.Dropout(fitting.dropout),
        nn.Linear(first, second),
        nn.GELU(approximate="tanh"),
        nn.Dropout(fitting.dropout),
        nn.Linear(second, n_kinds),
    )


def _layers(net: nn.Sequential) -> Iterator[Layer]:
    for module in net:
        if isinstance(module, nn.Linear):
            yield module.weight.detach().numpy(), module.bias.detach().numpy()


def _stacked(nets: Sequence[Sequence[Layer]]) -> Iterator[Layer]:
    """Nets as layers of all of them."""
    for layers in zip(*nets, strict=True):
        yield np.stack([weight for weight, _ in layers]), np.stack([bias for _, bias in layers])
