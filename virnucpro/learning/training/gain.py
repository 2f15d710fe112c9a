"""The gain of a head over the scorer on fragments of held-out groups, by length and seed.

A fragment is a run of neighbouring chunks, which the scorer reads whole. Its bases come from the
training's own copy of all records, because the frames do not hold every base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from virnucpro.callers.join import Join
from virnucpro.ground.files import write_whole
from virnucpro.learning.evaluation.metrics import NOT_DEFINED, auroc_gain
from virnucpro.learning.labelled.frames import Rows
from virnucpro.learning.labelled.split import Split
from virnucpro.learning.labelled.store import FrameStore
from virnucpro.learning.training.calibration import N_CHUNKS
from virnucpro.learning.training.joining import ScoredFragments, fold_log_odds, is_enough
from virnucpro.scorer.nets import Scorer, at_lengths
from virnucpro.scorer.score import score_sequences
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import GeneticCode

HELD_OUT: tuple[Split, ...] = ("validation", "test")
_PER_RECORD = 4  # runs of each length
_SHORTEST = 0.9  # share of the bases that its chunks would have side by side: they may overlap
_FACTS = ("split", "n_bases", "n", "n_virus", "n_groups")
_FIGURES = ("base", "head", "joined", "gain", "gain_low", "gain_high", "weight")


def read_fragments(
    fasta: Path,
    store: FrameStore,
    splits: Mapping[str, Split],
    size: int,
    scorer: Scorer,
    code: GeneticCode,
) -> dict[Split, list[ScoredFragments]]:
    """The fragments of the validation and the test groups, by length, read by the scorer alone.

    ``fasta`` has all records, in the order of their numbers; ``size`` is that of the chunks.
    """
    runs: dict[tuple[Split, int], list[tuple[int, int]]] = {}  # first chunk and place in the scores
    n_read = 0

    def sequences() -> Iterator[str]:
        nonlocal n_read
        for split, n_chunks, first, bases in _cut(fasta, store, splits, size):
            runs.setdefault((split, n_chunks), []).append((first, n_read))
            n_read += 1
            yield bases

    scores = score_sequences(sequences(), scorer, code)
    base = np.array([np.nan if value is None else value for value in scores], dtype=np.float64)
    is_virus = np.array([record.is_virus for record in store.records], dtype=np.bool_)
    group = np.unique([record.group for record in store.records], return_inverse=True)[1]
    fragments: dict[Split, list[ScoredFragments]] = {split: [] for split in HELD_OUT}
    for split, n_chunks in product(HELD_OUT, N_CHUNKS):
        of_run = np.array(runs.get((split, n_chunks), []), dtype=np.int64).reshape(-1, 2)
        first, place = of_run.T
        record = store.chunks[first, 0]
        fragments[split].append(
            ScoredFragments(
                n_bases=n_chunks * size,
                base=base[place],
                head=np.full(len(first), np.nan),
                is_virus=is_virus[record],
                group=group[record],
                chunks=np.stack([first, first + n_chunks], axis=1),
            )
        )
    return fragments


def _cut(
    fasta: Path, store: FrameStore, splits: Mapping[str, Split], size: int
) -> Iterator[tuple[Split, int, int, str]]:
    """Split, number of chunks, first of these and bases of each run of the held-out records."""
    rows = np.flatnonzero(store.chunks[:, 2] == size)
    begin = np.searchsorted(store.chunks[rows, 0], np.arange(len(store.records) + 1))
    records = zip(read_fasta(fasta), store.records, pairwise(begin.tolist()), strict=True)
    for record, labelled, (low, high) in records:
        split = splits[labelled.group]
        if split == "train":
            continue
        own = rows[low:high]
        for n_chunks in N_CHUNKS:
            for i in _spread(len(own) // n_chunks) * n_chunks:
                start, last = store.chunks[own[[i, i + n_chunks - 1]], 1].tolist()
                bases = record.sequence[start : last + size]
                if len(bases) >= _SHORTEST * n_chunks * size:
                    yield split, n_chunks, int(own[i]), bases


def _spread(n_runs: int) -> Rows:
    """At most ``_PER_RECORD`` of so many runs, evenly."""
    return np.unique(np.linspace(0, n_runs - 1, min(n_runs, _PER_RECORD)).astype(np.int64))


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
        joined = fragments.samples(log_odds).auroc()
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
        base=fragments.samples(fragments.base).auroc(),
        head=fragments.samples(fragments.head).auroc(),
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
