"""Measure learning curves: accuracy by number of fragments and data, for networks of short pieces.

    python scripts/weights/measure_learning_curves.py fit manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv EARLIER.tsv scores FIT ...
    python scripts/weights/measure_learning_curves.py compare scores BASES PART BEFORE AFTER

A FIT is DATA:PART:SIZE:SHARE:SEED, such as later:06:1000:0.5:0. The networks of one size are
trained on this share of the usual fragments. With the data "later" these are from the manifest, and
with "earlier" only from its records that EARLIER.tsv names, too. PART is held out: two folds, or
"locked", the locked groups alone. No network is trained on locked groups. The log-odds of fragments
of the part, the same in each fit, are written to the folder. Existing fits are not repeated.

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
from piece_networks import fit_piece_networks
from sampling import RecordSet, collect_records, sample_fragments
from scorer_calibration import assign_folds, fragment_log_odds
from scorer_kmers import count_kmer_groups
from scorer_split import read_parts
from train_embedded_scorer import (
    ARCHAEAL_GENES,
    EVALUATION_FRAGMENTS,
    FOLD_OVERRIDES,
    KINGDOM_SHARES,
    PIECE_CONFIG,
    PIECE_RANGES,
    PROKARYOTE_FRAGMENT_SHARE,
    PROKARYOTE_SCHEME,
    PROKARYOTIC,
    SEED,
    TRAINING_FRAGMENTS,
    WITH_ARCHAEAL_GENES,
    LabelledData,
    TrainingData,
    sample_training_set,
)

from virnucpro.core.numeric import FloatArray
from virnucpro.training.evaluation.metrics import Samples
from virnucpro.training.labelled_data import read_data_manifest, read_records
from virnucpro.viral.networks import PieceNetworks

LOCKED = "locked"
EVALUATED_LENGTHS = (150, 300, 500, 1000, 2000, 3000)  # bases


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
class AllRecords:
    """All records, with genes last, their folds, and whether they are locked or in both data."""

    collection: RecordSet
    fold: NDArray[np.int64]
    is_locked: NDArray[np.bool_]
    is_earlier: NDArray[np.bool_]

    @classmethod
    def read(cls, manifest: Path, genes: Path, split: Path, earlier: Path) -> AllRecords:
        labelled = [*read_records(read_data_manifest(manifest))]
        labelled += read_records(read_data_manifest(genes))
        collection = collect_records(labelled)
        records = collection.records
        fold_of_group = assign_folds(records) | FOLD_OVERRIDES
        part_of = read_parts(split)
        in_earlier = {record.id for record, _ in read_records(read_data_manifest(earlier))}
        is_gene = [record.kingdom == ARCHAEAL_GENES for record in records]
        return cls(
            collection,
            np.array([fold_of_group[record.group] for record in records]),
            np.array(
                [
                    not gene and part_of[record.group] == LOCKED
                    for record, gene in zip(records, is_gene, strict=True)
                ]
            ),
            np.array(
                [
                    gene or record.id in in_earlier
                    for record, gene in zip(records, is_gene, strict=True)
                ]
            ),
        )

    def data(self, name: str) -> LabelledData:
        """Return the records that may be trained on."""
        chosen = ~self.is_locked
        if name == "earlier":
            chosen &= self.is_earlier
        collection = self.collection.select(chosen)
        fold = self.fold[chosen]
        is_counted = np.array([record.kingdom != ARCHAEAL_GENES for record in collection.records])
        counts = count_kmer_groups(collection.select(is_counted), fold[is_counted])
        return LabelledData(collection, fold, counts)

    def is_held_out(self, fit: Fit) -> NDArray[np.bool_]:
        """Return which records are held out."""
        if fit.part == LOCKED:
            return self.is_locked
        return ~self.is_locked & np.isin(self.fold, fit.folds)


def fit_size(training_data: TrainingData, fit: Fit) -> PieceNetworks:
    """Fit networks as ``train_embedded_scorer.py`` does, with other fragments for each seed."""
    bases = next(bases for bases in PIECE_RANGES if bases.size == fit.size)
    n_fragments = int(TRAINING_FRAGMENTS[fit.size] * fit.share)
    training_sets = [
        sample_training_set(training_data, bases, n_fragments, WITH_ARCHAEAL_GENES, fit.seed)
    ]
    n_prokaryotic = int(PROKARYOTE_FRAGMENT_SHARE * n_fragments)
    prokaryotes = sample_training_set(
        training_data, bases, n_prokaryotic, PROKARYOTE_SCHEME, fit.seed
    )
    return fit_piece_networks(
        bases, training_sets, training_data.kmers.table, PIECE_CONFIG, prokaryotes
    )


def score(
    records: AllRecords, fit: Fit, nets: PieceNetworks, folder: Path
) -> dict[str, FloatArray]:
    """Score held-out fragments of all lengths that the networks read.

    A table of the fragments is written for each length, unless it exists.
    """
    collection = records.collection.select(records.is_held_out(fit))
    is_earlier = records.is_earlier[records.is_held_out(fit)]
    log_odds = {}
    for n_bases in EVALUATED_LENGTHS:
        if n_bases < nets.shortest or (nets.longest and n_bases >= nets.longest):
            continue
        seed = n_bases if fit.part == LOCKED else [n_bases, SEED]
        fragments = sample_fragments(
            collection,
            n_bases,
            EVALUATION_FRAGMENTS[n_bases],
            KINGDOM_SHARES,
            np.random.default_rng(seed),
        )
        log_odds[str(n_bases)] = fragment_log_odds(fragments.digits, [nets])
        table = folder / f"fragments_{fit.part}_{n_bases}.npz"
        if not table.exists():
            fragment_records = [collection.records[record] for record in fragments.record]
            np.savez(
                table,
                is_virus=np.array([record.is_virus for record in fragment_records]),
                group=np.array([record.group for record in fragment_records]),
                kingdom=np.array([record.kingdom for record in fragment_records]),
                is_earlier=is_earlier[fragments.record],
            )
    return log_odds


def fit_all(records: AllRecords, fits: list[Fit], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    data_by_name: dict[str, LabelledData] = {}
    training_data_by_key: dict[tuple[str, str], TrainingData] = {}
    for fit in fits:
        file = fit.file(folder)
        if file.exists():
            continue
        started = time.process_time()
        if fit.data not in data_by_name:
            data_by_name = {fit.data: records.data(fit.data)}
        key = (fit.data, fit.part)
        if key not in training_data_by_key:
            training_data_by_key = {key: data_by_name[fit.data].exclude_folds(fit.folds)}
        fit_started = time.process_time()
        nets = fit_size(training_data_by_key[key], fit)
        fitted = time.process_time()
        np.savez(file, **score(records, fit, nets, folder))  # type: ignore[arg-type]
        seconds = (fit_started - started, fitted - fit_started, time.process_time() - fitted)
        print(file.name, *(f"{value:.0f}" for value in seconds), file=sys.stderr, flush=True)


def read_samples(folder: Path, n_bases: int, part: str, nets: str, seed: int) -> dict[str, Samples]:
    """Return held-out fragments with their log-odds: all, and several selections."""
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


def ranking_metrics(samples: Samples, weights: FloatArray | None = None) -> FloatArray:
    """Return AUROC, and recall at 3 % false positives."""
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
            rows = [mean_metrics([samples[name] for samples in side], weightings) for side in sides]
            means[name].append(np.array(rows))  # (2, 1 + n_draws, 2)
    interval = ("low", "high")
    columns = ("before", *interval, "after", *interval, "difference", *interval)
    print("fragments", "metric", *columns, sep="\t")
    for name, part_metrics in means.items():
        before_and_after = np.mean(part_metrics, axis=0)
        values = np.concatenate([before_and_after, np.diff(before_and_after, axis=0)])
        low, high = np.percentile(values[:, 1:], (2.5, 97.5), axis=1)
        for column, metric in enumerate(("AUROC", "recall at 3 %")):
            cells = np.stack([values[:, 0, column], low[:, column], high[:, column]], axis=1)
            print(name, metric, *(f"{cell:.4f}" for cell in cells.reshape(-1)), sep="\t")


def mean_metrics(
    replicates: Sequence[Samples], weightings: Sequence[FloatArray | None]
) -> list[FloatArray]:
    """Return the metrics by each weighting, averaged over replicates."""
    return [
        np.mean([ranking_metrics(samples, weights) for samples in replicates], axis=0)
        for weights in weightings
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["fit", manifest, genes, split, earlier, folder, *fits] if fits:
            all_records = AllRecords.read(Path(manifest), Path(genes), Path(split), Path(earlier))
            fit_all(all_records, [Fit.from_text(text) for text in fits], Path(folder))
        case ["compare", folder, bases, part, before, after]:
            compare(Path(folder), int(bases), part.split(","), before, after)
        case _:
            raise SystemExit(__doc__)
