"""The gain of a head over the scorer on held-out groups, by length and seed, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from virnucpro.callers.join import Join
from virnucpro.ground.files import write_whole
from virnucpro.learning.evaluation.metrics import NOT_DEFINED, auroc_gain
from virnucpro.learning.labelled.split import Split
from virnucpro.learning.training.joining import ScoredFragments, fold_log_odds, is_enough
from virnucpro.scorer.nets import at_lengths

_FACTS = ("split", "n_bases", "n", "n_virus", "n_groups")
_FIGURES = ("base", "head", "joined", "gain", "gain_low", "gain_high", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """AUROC of fragments of one length by the scorer, by the head, and by both.

    Every fragment counts, one without a score as the lowest; groups count nearly evenly.
    """

    seed: int
    split: Split
    n_bases: int
    n: int
    n_virus: int
    n_groups: int
    base: float
    head: float
    joined: float | None  # None: there is no join
    gain: float | None  # of both over the scorer, with a 95 % interval over groups
    gain_low: float | None
    gain_high: float | None
    weight: float | None  # of the head's log-odds

    @property
    def line(self) -> str:
        """One line for the user."""
        alone = f"AUROC by the scorer {self.base:.3f}, by the head {self.head:.3f}"
        if self.joined is None or self.gain is None:
            return f"{self.split}, {self.n_bases:,} bases: {alone}, not joined"
        interval = ""
        if self.gain_low is not None and self.gain_high is not None:
            interval = f" ({self.gain_low:+.3f} to {self.gain_high:+.3f})"
        return (
            f"{self.split}, {self.n_bases:,} bases: {alone}, by both {self.joined:.3f}: gain "
            f"{self.gain:+.3f}{interval}, weight of the head {self.weight:.2f}"
        )


def measure_gain(
    seed: int, split: Split, fragments: ScoredFragments, join: Join | None
) -> Gain | None:
    """None if a label is missing. On the groups that the join was fitted to, by folds."""
    if not 0 < fragments.is_virus.sum() < len(fragments):
        return None
    joined, weight, gain, low, high = None, None, None, None, None
    if join is not None:
        lengths, weights = np.array([fragments.n_bases]), [knot.head for knot in join.knots]
        weight = at_lengths(lengths, join.knots, weights).item()
        log_odds = fragments.joined(join.knots)
        if split == "validation" and weight and is_enough(fragments):
            log_odds = fold_log_odds(fragments)
        joined = fragments.auroc(log_odds)
        gain, low, high = auroc_gain(
            fragments.samples(fragments.base), fragments.samples(log_odds), seed
        )
    return Gain(
        seed=seed,
        split=split,
        n_bases=fragments.n_bases,
        n=len(fragments),
        n_virus=int(fragments.is_virus.sum()),
        n_groups=len(set(fragments.group.tolist())),
        base=fragments.auroc(fragments.base),
        head=fragments.auroc(fragments.head),
        joined=joined,
        gain=gain,
        gain_low=low,
        gain_high=high,
        weight=weight,
    )


def write_gains(path: Path, gains: Sequence[Gain]) -> None:
    """A row for each seed, split and length; for several seeds their mean and deviation too."""
    lines = ["\t".join(("seed", *_FACTS, *_FIGURES))]
    lines += ["\t".join((str(gain.seed), *_facts(gain), *_figures(gain))) for gain in gains]
    lines += _summaries(gains)
    write_whole(path, "\n".join([*lines, ""]))


def _summaries(gains: Sequence[Gain]) -> Iterator[str]:
    """Rows with the mean and the standard deviation over the seeds, in place of the seed."""
    by_kind: dict[tuple[Split, int], list[Gain]] = {}
    for gain in gains:
        by_kind.setdefault((gain.split, gain.n_bases), []).append(gain)
    repeated = [of_kind for of_kind in by_kind.values() if len(of_kind) > 1]
    for name, summarise in (("mean", fmean), ("deviation", stdev)):
        for of_kind in repeated:
            cells = (_over_seeds(of_kind, figure, summarise) for figure in _FIGURES)
            yield "\t".join((name, *_facts(of_kind[0]), *map(_cell, cells)))


def _over_seeds(
    gains: Sequence[Gain], figure: str, summarise: Callable[[list[float]], float]
) -> float | None:
    """None if a seed has none."""
    values = [getattr(gain, figure) for gain in gains]
    return None if None in values else summarise(values)


def _facts(gain: Gain) -> list[str]:
    return [str(getattr(gain, name)) for name in _FACTS]


def _figures(gain: Gain) -> list[str]:
    return [_cell(getattr(gain, name)) for name in _FIGURES]


def _cell(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.4f}"
