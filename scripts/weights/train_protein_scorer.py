"""Add networks for proteins to the scorer, and evaluate them.

    python scripts/weights/scorer_proteins.py manifest.tsv > proteins.tsv
    python scripts/weights/train_protein_scorer.py manifest.tsv proteins.tsv \
        scripts/weights/scorer_split.tsv virnucpro/embedded/scorer.safetensors > metrics.tsv

Run it after ``train_embedded_scorer.py``, with the manifest of the scorer's training. It adds the
networks for proteins to the scorer's file, or replaces older ones. The rest of the file stays the
same.

Half of the samples are complete proteins, and half are fragments of 50 to 600 residues. The k-mers
and patterns for a protein's features are counted without its fold. Calibration and error rates come
from networks that were fitted without the fold of the protein. Seeds are fixed.

It writes metrics of three kinds of networks: "validation" networks are fitted to the training
groups, with three seeds, to choose hyperparameters. The "held out" network is fitted to training
and validation groups, and evaluated on test and locked groups. The networks of "folds" are those of
the calibration.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from piece_networks import TrainingConfig, TrainingSet, fit_network
from sampling import collect_records
from scorer_calibration import N_FOLDS, assign_folds, fit_knot
from scorer_file import save_scorer
from scorer_kmers import KmerGroupCounts, count_kmer_groups
from train_embedded_scorer import KIND_OF_KINGDOM, KINDS, KINGDOM_SHARES, N_VIRAL

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray, sigmoid
from virnucpro.training.evaluation.calibration import fit_error_rates
from virnucpro.training.evaluation.metrics import Samples
from virnucpro.training.frame_dataset import BASES_POWER
from virnucpro.training.labelled_data import read_data_manifest, read_records
from virnucpro.viral.features import NO_RESIDUE, Residues
from virnucpro.viral.networks import (
    ErrorRates,
    Knot,
    NetworkStack,
    ProteinNetworks,
    calibrate,
    load_scorer,
    thresholds,
)
from virnucpro.viral.options import FALSE_POSITIVES
from virnucpro.viral.proteins import (
    N_RESIDUES,
    PATTERNS,
    RATIO_STEP,
    SHORTEST,
    Features,
    ProteinFeatures,
    Proteins,
    Ratios,
    encode_protein,
    features_without_kmers,
    kmer_features,
)

N_FRAGMENTS = 150_000  # of each label
MAX_FRAGMENT_RESIDUES = 600
COMPLETE_SHARE = 0.5  # of the samples that are complete proteins
N_SYNTHETIC = 500  # synthetic negatives of each kind
SYNTHETIC_WEIGHT = 2.0
# pseudocounts of sparse patterns, relative to the frequencies expected from single residues
PSEUDOCOUNTS = {3: 0.1, 4: 0.3}
CONFIG = TrainingConfig(
    hidden=(256, 64),
    input_dropout=0.2,
    no_dropout=range(ProteinFeatures.N_COMPOSITION, ProteinFeatures.N_FEATURES),
    epochs=4,
)
# residues: lower limits of bins, and the length for which a bin calibrates
CALIBRATION_BINS = {50: 59, 70: 84, 100: 122, 150: 182, 220: 265, 320: 400, 500: 700, 1000: 1500}
REPORTED_LENGTHS = ((50, 99), (100, 149), (150, 299), (300, None), (150, None))  # residues
PARTS = ("train", "validation", "test", "locked")
SYNTHETIC_FOLD = -1  # of synthetic negatives
PROKARYOTIC = ("phages", "bacteria", "archaea", "bins")
WITH_INTERVAL = ("all", "phages and prokaryotes")
_BATCH_PROTEINS = 2000
SEED = 4
SEEDS = (0, 1, 2)
COLUMNS = (
    *("nets", "seed", "residues", "kind", "n_viral", "n_cellular", "groups_viral"),
    *("groups_cellular", "auroc", "low", "high", "ece"),
    *(f"{rate}_{preset}" for preset in FALSE_POSITIVES for rate in ("recall", "false_positives")),
)


@dataclass(frozen=True, slots=True, eq=False)
class ProteinSet:
    """Labelled proteins or fragments of them, as slices of concatenated residues."""

    residues: Residues  # all proteins, concatenated
    first: IntArray
    length: IntArray
    group: IntArray
    fold: IntArray
    kind: IntArray  # index in KINGDOM_SHARES
    is_virus: BoolArray
    part: IntArray  # index in PARTS

    def __len__(self) -> int:
        return len(self.first)

    def select(self, rows: BoolArray | IntArray) -> ProteinSet:
        columns = ("first", "length", "group", "fold", "kind", "is_virus", "part")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def blocks(self) -> Iterator[tuple[slice, Proteins]]:
        for low in range(0, len(self), _BATCH_PROTEINS):
            rows = slice(low, min(len(self), low + _BATCH_PROTEINS))
            length = self.length[rows]
            shift = self.first[rows] - (np.cumsum(length) - length)
            positions = np.repeat(shift, length) + np.arange(length.sum())
            yield rows, Proteins(self.residues[positions], length)

    def compute(self, featurize: Callable[[Proteins], Features]) -> Features:
        return np.concatenate([featurize(proteins) for _, proteins in self.blocks()])

    def iter_residues(self) -> Iterator[Residues]:
        for first, length in zip(self.first.tolist(), self.length.tolist(), strict=True):
            yield self.residues[first : first + length]

    def sampling_probabilities(self, by_residue: bool) -> FloatArray:
        """Return the probability of each protein: kinds by share, groups nearly evenly."""
        probabilities = np.zeros(len(self))
        shares = np.array(list(KINGDOM_SHARES.values()))
        n_groups = int(self.group.max()) + 1
        for kind in np.unique(self.kind):
            rows = np.flatnonzero(self.kind == kind)
            group = self.group[rows]
            length = self.length[rows]
            group_weights = np.bincount(group, length, n_groups) ** BASES_POWER
            size = length if by_residue else np.ones(len(rows))
            share_in_group = size / np.bincount(group, size, n_groups)[group]
            weighted = shares[kind] * group_weights[group] / group_weights.sum()
            probabilities[rows] = weighted * share_in_group
        for label in (True, False):
            probabilities[self.is_virus == label] /= probabilities[self.is_virus == label].sum()
        return probabilities


def read_proteins(path: Path, split: Path, folds: dict[str, int]) -> ProteinSet:
    csv.field_size_limit(2**31 - 1)
    part_of = {row["group"]: PARTS.index(row["part"]) for row in read_rows(split)}
    rows = [row for row in read_rows(path) if len(row["protein"]) >= SHORTEST]
    names, group = np.unique([row["group"] for row in rows], return_inverse=True)
    length = np.array([len(row["protein"]) for row in rows], dtype=np.int64)
    return ProteinSet(
        encode_protein("".join(row["protein"] for row in rows)),
        np.cumsum(length) - length,
        length,
        group,
        np.array([folds[name] for name in names])[group],
        np.array([list(KINGDOM_SHARES).index(row["kingdom"]) for row in rows]),
        np.array([row["label"] == "virus" for row in rows]),
        np.array([part_of[name] for name in names])[group],
    )


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)


def sample_proteins(protein_set: ProteinSet, n: int, rng: np.random.Generator) -> ProteinSet:
    """Sample ``n`` proteins of each label, some complete, others cut to a random length."""
    probabilities = protein_set.sampling_probabilities(by_residue=False)
    sampled = [
        rng.choice(rows := np.flatnonzero(protein_set.is_virus == label), n, p=probabilities[rows])
        for label in (True, False)
    ]
    chosen = protein_set.select(np.concatenate(sampled))
    longest = np.minimum(MAX_FRAGMENT_RESIDUES, chosen.length)
    cut_length = np.exp(rng.uniform(np.log(SHORTEST), np.log(longest + 1))).astype(np.int64)
    is_complete = rng.random(len(chosen)) < COMPLETE_SHARE
    length = np.where(is_complete, chosen.length, np.minimum(cut_length, longest))
    first = chosen.first + rng.integers(chosen.length - length, endpoint=True)
    return replace(chosen, first=first, length=length)


class FoldCounts:
    """Counts of k-mers and patterns in all folds, for tables without some folds."""

    def __init__(self, protein_set: ProteinSet, kmers: KmerGroupCounts) -> None:
        self._kmers = kmers
        self._counts = [count_pattern(protein_set, pattern) for pattern in PATTERNS]
        probabilities = np.repeat(
            protein_set.sampling_probabilities(by_residue=True) / protein_set.length,
            protein_set.length,
        )
        is_known = protein_set.residues < NO_RESIDUE
        shares = np.bincount(protein_set.residues[is_known], probabilities[is_known], N_RESIDUES)
        self._residue_frequencies = shares / shares.sum()

    def ratios(self, excluded_folds: Collection[int]) -> tuple[Ratios, ...]:
        folds = [fold for fold in range(N_FOLDS) if fold not in excluded_folds]
        return tuple(
            self._ratios(pattern, counts[folds].sum(axis=0, dtype=np.float64))
            for pattern, counts in zip(PATTERNS, self._counts, strict=True)
        )

    def _ratios(self, pattern: Sequence[int], counts: FloatArray) -> Ratios:
        """Return log ratios of pattern frequencies, viruses to cells, in steps. (2, n) -> (n,)"""
        expected = np.ones(1)
        for _ in pattern:
            expected = (expected[:, None] * self._residue_frequencies).reshape(-1)
        shares = counts / counts.sum(axis=1, keepdims=True) + PSEUDOCOUNTS[len(pattern)] * expected
        steps = np.rint((np.log(shares[1]) - np.log(shares[0])) / RATIO_STEP)
        return np.asarray(steps.clip(-127, 127).astype(np.int8))

    def kmer_features_without(self, fold: int) -> Callable[[Proteins], Features]:
        """Make a function that computes k-mer features from counts without this fold."""
        kmers = self._kmers.table({fold})
        ratios = self.ratios({fold})
        return lambda proteins: kmer_features(proteins, kmers, ratios)


def find_pattern(proteins: Proteins, offsets: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return the protein of each occurrence of a pattern, and its residues as one number.

    The number has one digit in base 20 for each offset of the pattern.
    """
    residues = proteins.residues
    owner = proteins.owner
    n = max(0, len(residues) - offsets[-1])
    is_match: BoolArray = owner[:n] == owner[len(residues) - n :]
    numbers = np.zeros(n, dtype=np.int64)
    for offset in offsets:
        numbers *= N_RESIDUES
        numbers += residues[offset : offset + n]
        is_match &= residues[offset : offset + n] < NO_RESIDUE
    positions = np.flatnonzero(is_match)
    return owner[positions], numbers[positions]


def n_pattern_values(offsets: Sequence[int]) -> int:
    """Return the number of different values of a pattern."""
    return int(N_RESIDUES ** len(offsets))


def count_pattern(protein_set: ProteinSet, pattern: Sequence[int]) -> NDArray[np.float32]:
    """Count each value of a pattern in the cells and viruses of each fold.

    Groups count nearly evenly. -> (n_folds, 2, n_numbers)
    """
    weights = protein_set.sampling_probabilities(by_residue=True) / protein_set.length
    counts = np.zeros((N_FOLDS, 2, n_pattern_values(pattern)), dtype=np.float32)
    for fold in range(N_FOLDS):
        for label in (0, 1):
            rows = np.flatnonzero((protein_set.fold == fold) & (protein_set.is_virus == label))
            for block, proteins in protein_set.select(rows).blocks():
                owner, numbers = find_pattern(proteins, pattern)
                block_weights = weights[rows[block]][owner]
                counts[fold, label] += np.bincount(
                    numbers, block_weights, n_pattern_values(pattern)
                )
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSamples:
    """Fragments, then synthetic negatives, and their features, as parallel rows.

    Synthetic negatives have the last kind, and no fold (``SYNTHETIC_FOLD``).
    """

    fragments: ProteinSet
    kind: IntArray
    features: Features

    @classmethod
    def from_proteins(cls, protein_set: ProteinSet, fold_counts: FoldCounts) -> TrainingSamples:
        rng = np.random.default_rng(SEED)
        fragments = add_synthetic(sample_proteins(protein_set, N_FRAGMENTS, rng), rng)
        names = [KIND_OF_KINGDOM.get(name, name) for name in KINGDOM_SHARES]
        kinds = np.array([*map(KINDS.index, names), len(KINDS)])
        composition = fragments.compute(features_without_kmers)
        n_composition = composition.shape[1]
        n_kmer_features = ProteinFeatures.N_FEATURES - n_composition
        features = np.hstack([composition, np.empty((len(composition), n_kmer_features), "f4")])
        for fold in range(SYNTHETIC_FOLD, N_FOLDS):
            rows = np.flatnonzero(fragments.fold == fold)
            featurize = fold_counts.kmer_features_without(fold)
            features[rows, n_composition:] = fragments.select(rows).compute(featurize)
        return cls(fragments, kinds[fragments.kind], features)

    def fit(self, rows: BoolArray, seed: int = 0) -> NetworkStack:
        """Fit a network to these rows and the synthetic negatives."""
        rows = rows | (self.fragments.fold == SYNTHETIC_FOLD)
        chosen = self.fragments.select(rows)
        is_synthetic = chosen.fold == SYNTHETIC_FOLD
        balanced_weights = length_weights(chosen.length, chosen.is_virus)
        weights = np.where(is_synthetic, SYNTHETIC_WEIGHT, balanced_weights)
        training_set = TrainingSet(
            self.features[rows], self.kind[rows], weights, N_VIRAL, len(KINDS) + 1
        )
        return fit_network(training_set, seed, CONFIG)


def add_synthetic(fragments: ProteinSet, rng: np.random.Generator) -> ProteinSet:
    """Append synthetic negatives: shuffled and random proteins, homopolymers, repeats."""
    chosen = rng.integers(len(fragments), size=N_SYNTHETIC)
    synthetic = [rng.permutation(residues) for residues in fragments.select(chosen).iter_residues()]
    for number in range(N_SYNTHETIC):
        length = rng.integers(SHORTEST, MAX_FRAGMENT_RESIDUES, size=3)
        n = rng.integers(2, 12)
        synthetic.append(rng.integers(N_RESIDUES, size=length[0]).astype(np.uint8))
        synthetic.append(np.full(length[1], number % N_RESIDUES, dtype=np.uint8))
        synthetic.append(np.resize(rng.integers(N_RESIDUES, size=n).astype(np.uint8), length[2]))
    lengths = np.array([len(residues) for residues in synthetic])

    def pad(column: IntArray, value: int) -> IntArray:
        return np.append(column, np.full(len(synthetic), value))

    return ProteinSet(
        np.concatenate([fragments.residues, *synthetic]),
        np.append(fragments.first, len(fragments.residues) + np.cumsum(lengths) - lengths),
        np.append(fragments.length, lengths),
        pad(fragments.group, -1),
        pad(fragments.fold, SYNTHETIC_FOLD),
        pad(fragments.kind, len(KINGDOM_SHARES)),
        np.append(fragments.is_virus, np.zeros(len(synthetic), dtype=np.bool_)),
        pad(fragments.part, -1),
    )


def length_weights(length: IntArray, is_virus: BoolArray) -> FloatArray:
    """Return weights that balance the labels at each length, so that it predicts no label."""
    edges = np.geomspace(60, 1000, 12)  # residues
    min_count = 20  # rarer labels get no larger weights
    max_weight = 4.0
    bins = np.digitize(length, edges)
    counts = np.bincount(2 * bins + is_virus, minlength=2 * len(edges) + 2).reshape(-1, 2)
    label_counts = np.maximum(min_count, counts[bins, is_virus.astype(int)])
    weights = counts.sum(axis=1)[bins] / 2 / label_counts
    return np.asarray(np.minimum(weights / weights.mean(), max_weight))


def fit_calibration(
    fragments: ProteinSet, log_odds: FloatArray
) -> tuple[tuple[Knot, ...], tuple[ErrorRates, ...]]:
    """Fit knots and error rates by length to the log-odds of held-out fragments."""
    lower_limits = tuple(CALIBRATION_BINS)
    in_bin = np.digitize(fragments.length, lower_limits[1:])
    knots = tuple(
        fit_knot(length, log_odds[in_bin == i], fragments.is_virus[in_bin == i])
        for i, length in enumerate(CALIBRATION_BINS.values())
    )
    log_odds = calibrate(knots, log_odds, fragments.length)
    rates = (
        fit_error_rates(length, log_odds[in_bin == i], fragments.is_virus[in_bin == i])
        for i, length in enumerate(CALIBRATION_BINS.values())
    )
    return knots, tuple(rates)


def train(manifest: Path, proteins: Path, split: Path, scorer_file: Path) -> None:
    scorer = load_scorer(scorer_file)
    collection = collect_records(read_records(read_data_manifest(manifest)))
    fold_of_group = assign_folds(collection.records)
    fold_of_record = np.array([fold_of_group[record.group] for record in collection.records])
    protein_set = read_proteins(proteins, split, fold_of_group)
    fold_counts = FoldCounts(protein_set, count_kmer_groups(collection, fold_of_record))
    samples = TrainingSamples.from_proteins(protein_set, fold_counts)
    for seed in SEEDS:
        evaluate_split(samples, "validation", ("train",), ("validation",), seed)
    evaluate_split(samples, "held out", ("train", "validation"), ("test", "locked"), 0)
    network = samples.fit(np.ones(len(samples.fragments), dtype=np.bool_))
    knots, rates = calibrate_folds(samples)
    kmers = scorer.pieces[0].kmers
    training = f"{len(protein_set):,} proteins of {len(np.unique(protein_set.group)):,} groups"
    nets = ProteinNetworks(
        kmers,
        fold_counts.ratios(()),
        network,
        knots,
        rates,
        training,
    )
    save_scorer(scorer_file, replace(scorer, proteins=nets))


def evaluate_split(
    samples: TrainingSamples,
    evaluation_name: str,
    training_parts: Sequence[str],
    evaluation_parts: Sequence[str],
    seed: int,
) -> None:
    """Fit a network to some parts of the split, and write its metrics on others."""
    part = samples.fragments.part
    network = samples.fit(np.isin(part, [PARTS.index(name) for name in training_parts]), seed)
    rows = np.flatnonzero(np.isin(part, [PARTS.index(name) for name in evaluation_parts]))
    log_odds = network.log_odds(samples.features[rows])
    write_metrics(f"{evaluation_name}\t{seed}", samples.fragments.select(rows), log_odds)


def calibrate_folds(samples: TrainingSamples) -> tuple[tuple[Knot, ...], tuple[ErrorRates, ...]]:
    """Fit knots and error rates by cross-validation, and write the metrics."""
    folds = samples.fragments.fold
    log_odds = np.full(len(folds), np.nan)
    for fold in range(N_FOLDS):
        rows = np.flatnonzero(folds == fold)
        network = samples.fit((folds != fold) & (folds != SYNTHETIC_FOLD))
        log_odds[rows] = network.log_odds(samples.features[rows])
        print(f"fold {fold + 1} of {N_FOLDS}", file=sys.stderr, flush=True)
    rows = np.flatnonzero(folds != SYNTHETIC_FOLD)
    fragments = samples.fragments.select(rows)
    knots, rates = fit_calibration(fragments, log_odds[rows])
    values = calibrate(knots, log_odds[rows], fragments.length)
    thresholds_by_preset = {
        str(preset): thresholds(rates, fragments.length, share)
        for preset, share in FALSE_POSITIVES.items()
    }
    write_metrics("folds\t0", fragments, values, thresholds_by_preset)
    return knots, rates


def write_metrics(
    name: str,
    fragments: ProteinSet,
    log_odds: FloatArray,
    thresholds_by_preset: Mapping[str, FloatArray] | None = None,
) -> None:
    """Write rows of the table. Without thresholds, each preset calls its share of the cells."""
    for low, high in REPORTED_LENGTHS:
        has_length = (fragments.length >= low) & (fragments.length <= (high or np.inf))
        selected = fragments.select(has_length)
        values = log_odds[has_length]
        called: dict[str, BoolArray] = {}
        for preset, share in FALSE_POSITIVES.items():
            threshold = (
                thresholds_by_preset[preset][has_length]
                if thresholds_by_preset
                else np.quantile(values[~selected.is_virus], 1 - share)
            )
            called[preset] = values >= threshold
        residues = f"{low}-{high or ''}"
        for kind, is_kind, is_evaluated in kind_masks(selected):
            has_interval = kind in WITH_INTERVAL
            cells = metric_cells(selected, values, called, is_kind, is_evaluated, has_interval)
            sys.stdout.write("\t".join([name, residues, kind, *cells]) + "\n")
    sys.stdout.flush()


def kind_masks(fragments: ProteinSet) -> Iterator[tuple[str, BoolArray, BoolArray]]:
    """Yield each kind, its fragments, and these with the fragments of the other label."""
    everything = np.ones(len(fragments), dtype=np.bool_)
    yield "all", everything, everything
    kinds = np.array([*KINGDOM_SHARES, "synthetic"])[fragments.kind]
    is_prokaryotic = np.isin(kinds, PROKARYOTIC)
    yield "phages and prokaryotes", is_prokaryotic, is_prokaryotic
    for kind in KINGDOM_SHARES:
        if (is_kind := kinds == kind).any():
            is_opposite = fragments.is_virus != fragments.is_virus[is_kind][0]
            yield kind, is_kind, is_kind | is_opposite


def metric_cells(
    fragments: ProteinSet,
    log_odds: FloatArray,
    called: Mapping[str, BoolArray],
    is_kind: BoolArray,
    is_evaluated: BoolArray,
    has_interval: bool,
) -> Iterator[str]:
    kind_fragments = fragments.select(is_kind)
    for label in (True, False):
        yield str((kind_fragments.is_virus == label).sum())
    for label in (True, False):
        yield str(len(np.unique(kind_fragments.group[kind_fragments.is_virus == label])))
    evaluated = fragments.select(is_evaluated)
    n_per_label = np.bincount(evaluated.is_virus, minlength=2)
    samples = Samples(
        sigmoid(log_odds[is_evaluated]),
        evaluated.is_virus,
        evaluated.group,
        1 / n_per_label[evaluated.is_virus.astype(np.int64)],
    )
    is_called = called["default"][is_evaluated]
    metrics = samples.measure(is_called)
    values = [metrics["auroc"], None, None, metrics["calibration_error"]]
    if has_interval:
        low, high = samples.bootstrap(is_called, seed=0)
        values[1:3] = low["auroc"], high["auroc"]
    for mask in called.values():
        for label in (True, False):
            rows = is_kind & (fragments.is_virus == label)
            values.append(float(mask[rows].mean()) if rows.any() else None)
    yield from ("" if value is None else f"{value:.4f}" for value in values)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) != 5 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    train(*map(Path, sys.argv[1:]))
