"""Measure what more fragments and more data bring to the nets of short pieces.

    python scripts/weights/measure_shares.py fit manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv EARLIER.tsv scores FIT ...
    python scripts/weights/measure_shares.py compare scores BASES PART BEFORE AFTER

A FIT is DATA:PART:SIZE:SHARE:SEED, such as later:06:1000:0.5:0. The nets of one size learn this
share of the usual fragments. With the data "later" these are from the manifest, and with "earlier"
only from its records that EARLIER.tsv names, too. PART is what the nets do not learn: two folds, or
"locked", the locked groups alone. No net learns locked groups. The log-odds of fragments of the
part, the same in each fit, are written to the folder. A fit that is there already is not repeated.

BEFORE and AFTER are DATA:SIZES:SHARE:SEEDS, such as later:500,1000:0.75:0,1. Log-odds are averaged
over the sizes. Differences are averaged over the seeds and, if PART is 06,18, over the parts.
Intervals are 95 %, over groups.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from piece_nets import fit_piece_nets
from sampling import Collection, collect, draw
from scorer_folds import fragment_log_odds, group_folds
from scorer_kmers import count_kmer_groups
from scorer_split import read_parts
from train_embedded_scorer import (
    APART,
    FITTING,
    GENES,
    KNOTS,
    N_FRAGMENTS,
    PROKARYOTE_DRAWING,
    PROKARYOTIC,
    RANGES,
    SEED,
    SHARE_OF_PROKARYOTES,
    SHARES,
    WITH_GENES,
    Course,
    Data,
    lessons,
)

from virnucpro.core.numeric import FloatArray
from virnucpro.training.evaluation.metrics import Samples
from virnucpro.training.labelled_data import read_data_manifest, read_records
from virnucpro.viral.networks import PieceNetworks

LOCKED = "locked"
MEASURED = (150, 300, 500, 1000, 2000, 3000)  # bases


@dataclass(frozen=True, slots=True)
class Fit:
    data: str
    part: str
    size: int
    share: float
    seed: int

    @classmethod
    def from_text(cls, text: str) -> Fit:
        data, part, size, share, seed = text.split(":")
        return cls(data, part, int(size), float(share), int(seed))

    def file(self, folder: Path) -> Path:
        return folder / f"{self.data}_{self.part}_{self.size}_{self.share:g}_{self.seed}.npz"

    @property
    def folds(self) -> tuple[int, ...]:
        return () if self.part == LOCKED else tuple(map(int, self.part))


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """All records, with genes last, the fold of each, and whether it is locked or in both data."""

    collection: Collection
    fold: NDArray[np.int64]
    is_locked: NDArray[np.bool_]
    is_earlier: NDArray[np.bool_]

    @classmethod
    def read(cls, manifest: Path, genes: Path, split: Path, earlier: Path) -> Records:
        both = [*read_records(read_data_manifest(manifest))]
        both += read_records(read_data_manifest(genes))
        collection = collect(both)
        records = collection.records
        fold_of_group = group_folds(records) | APART
        part_of = read_parts(split)
        in_earlier = {record.id for record, _ in read_records(read_data_manifest(earlier))}
        return cls(
            collection,
            np.array([fold_of_group[one.group] for one in records]),
            np.array([one.kingdom != GENES and part_of[one.group] == LOCKED for one in records]),
            np.array([one.kingdom == GENES or one.id in in_earlier for one in records]),
        )

    def data(self, name: str) -> Data:
        """The records that may be learned."""
        chosen = ~self.is_locked
        if name == "earlier":
            chosen &= self.is_earlier
        collection = self.collection.where(chosen)
        fold = self.fold[chosen]
        is_counted = np.array([record.kingdom != GENES for record in collection.records])
        counts = count_kmer_groups(collection.where(is_counted), fold[is_counted])
        return Data(collection, fold, counts)

    def part(self, fit: Fit) -> NDArray[np.bool_]:
        """The records of a part to measure."""
        if fit.part == LOCKED:
            return self.is_locked
        return ~self.is_locked & np.isin(self.fold, fit.folds)


def fit_size(course: Course, fit: Fit) -> PieceNetworks:
    """Fit nets as ``train_embedded_scorer.py`` does, to other fragments for each seed."""
    bases = next(bases for bases in RANGES if bases.size == fit.size)
    n_fragments = int(N_FRAGMENTS[fit.size] * fit.share)
    draws = [lessons(course, bases, n_fragments, WITH_GENES, fit.seed)]
    n_own = int(SHARE_OF_PROKARYOTES * n_fragments)
    own = lessons(course, bases, n_own, PROKARYOTE_DRAWING, fit.seed)
    return fit_piece_nets(bases, draws, course.kmers.table, FITTING, own)


def score(records: Records, fit: Fit, nets: PieceNetworks, folder: Path) -> dict[str, FloatArray]:
    """Score fragments of the part that the nets have not seen, of all lengths that they read.

    A table of the fragments is written for each length, unless it is there already.
    """
    collection = records.collection.where(records.part(fit))
    is_earlier = records.is_earlier[records.part(fit)]
    log_odds = {}
    for n_bases in MEASURED:
        if n_bases < nets.shortest or (nets.longest and n_bases >= nets.longest):
            continue
        seed = n_bases if fit.part == LOCKED else [n_bases, SEED]
        fragments = draw(collection, n_bases, KNOTS[n_bases], SHARES, np.random.default_rng(seed))
        log_odds[str(n_bases)] = fragment_log_odds(fragments.digits, [nets])
        table = folder / f"fragments_{fit.part}_{n_bases}.npz"
        if not table.exists():
            own = [collection.records[record] for record in fragments.record]
            np.savez(
                table,
                is_virus=np.array([record.is_virus for record in own]),
                group=np.array([record.group for record in own]),
                kingdom=np.array([record.kingdom for record in own]),
                is_earlier=is_earlier[fragments.record],
            )
    return log_odds


def fit_all(records: Records, fits: list[Fit], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    of_data: dict[str, Data] = {}
    courses: dict[tuple[str, str], Course] = {}
    for fit in fits:
        file = fit.file(folder)
        if file.exists():
            continue
        began = time.process_time()
        if fit.data not in of_data:
            of_data = {fit.data: records.data(fit.data)}
        key = (fit.data, fit.part)
        if key not in courses:
            courses = {key: of_data[fit.data].without(fit.folds)}
        fit_began = time.process_time()
        nets = fit_size(courses[key], fit)
        fitted = time.process_time()
        np.savez(file, **score(records, fit, nets, folder))  # type: ignore[arg-type]
        seconds = (fit_began - began, fitted - fit_began, time.process_time() - fitted)
        print(file.name, *(f"{each:.0f}" for each in seconds), file=sys.stderr, flush=True)


def read_samples(folder: Path, n_bases: int, part: str, nets: str, seed: int) -> dict[str, Samples]:
    """The fragments of a part with their log-odds by some nets: all, and several selections."""
    data, sizes, share, _ = nets.split(":")
    fits = [Fit(data, part, int(size), float(share), seed) for size in sizes.split(",")]
    log_odds = np.mean([np.load(fit.file(folder))[str(n_bases)] for fit in fits], axis=0)
    table = np.load(folder / f"fragments_{part}_{n_bases}.npz")
    number = np.unique(table["group"], return_inverse=True)[1]
    no_score = -99.0  # the lowest
    scores = np.nan_to_num(log_odds, nan=no_score)
    samples = Samples(scores, table["is_virus"], number, np.ones(len(number)))
    is_prokaryotic = np.isin(table["kingdom"], PROKARYOTIC)
    is_earlier = table["is_earlier"]
    return {
        "all": samples,
        "phages and prokaryotes": samples.select(is_prokaryotic),
        "earlier data": samples.select(is_earlier),
        "phages and prokaryotes of earlier data": samples.select(is_prokaryotic & is_earlier),
    }


def recall_at(samples: Samples, false_positives: float, weights: FloatArray | None) -> float:
    _, true, false = samples.curve(weights)
    n_called = int(np.searchsorted(false, false_positives * false[-1], side="right"))
    return float(true[n_called - 1] / true[-1]) if n_called else 0.0


def figures(samples: Samples, weights: FloatArray | None = None) -> FloatArray:
    """AUROC, and recall at 3 % false calls."""
    return np.array([samples.auroc(weights), recall_at(samples, 0.03, weights)])


def compare(folder: Path, n_bases: int, parts: list[str], before: str, after: str) -> None:
    """Write AUROC and recall of both, and their differences with intervals."""
    means: dict[str, list[FloatArray]] = defaultdict(list)
    for part in parts:
        sides = []
        for nets in (before, after):
            seeds = map(int, nets.rsplit(":", 1)[1].split(","))
            sides.append([read_samples(folder, n_bases, part, nets, seed) for seed in seeds])
        for name, first in sides[0][0].items():
            weightings = [None, *first.resamples(seed=0)]
            rows = [mean_figures([samples[name] for samples in side], weightings) for side in sides]
            means[name].append(np.array(rows))  # (2, 1 + n_draws, 2)
    interval = ("low", "high")
    columns = ("before", *interval, "after", *interval, "difference", *interval)
    print("fragments", "figure", *columns, sep="\t")
    for name, each in means.items():
        before_and_after = np.mean(each, axis=0)
        values = np.concatenate([before_and_after, np.diff(before_and_after, axis=0)])
        low, high = np.percentile(values[:, 1:], (2.5, 97.5), axis=1)
        for column, figure in enumerate(("AUROC", "recall at 3 %")):
            cells = np.stack([values[:, 0, column], low[:, column], high[:, column]], axis=1)
            print(name, figure, *(f"{cell:.4f}" for cell in cells.reshape(-1)), sep="\t")


def mean_figures(
    each: Sequence[Samples], weightings: Sequence[FloatArray | None]
) -> list[FloatArray]:
    """The figures by each weighting, averaged over some samples."""
    return [
        np.mean([figures(samples, weights) for samples in each], axis=0) for weights in weightings
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["fit", manifest, genes, split, earlier, folder, *fits] if fits:
            all_records = Records.read(Path(manifest), Path(genes), Path(split), Path(earlier))
            fit_all(all_records, [Fit.from_text(text) for text in fits], Path(folder))
        case ["compare", folder, bases, part, before, after]:
            compare(Path(folder), int(bases), part.split(","), before, after)
        case _:
            raise SystemExit(__doc__)
