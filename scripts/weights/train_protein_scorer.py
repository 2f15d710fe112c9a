"""Add nets for proteins to the scorer, and measure them.

    python scripts/weights/scorer_proteins.py manifest.tsv > proteins.tsv
    python scripts/weights/train_protein_scorer.py manifest.tsv proteins.tsv \
        scripts/weights/scorer_split.tsv virnucpro/embedded/scorer.safetensors > figures.tsv

Run it after ``train_embedded_scorer.py``, with the manifest of the scorer's training. It adds the
nets for proteins to the scorer's file, or replaces older ones. All else in the file stays the same.

Half of the samples are whole proteins, and half are fragments of 50 to 600 residues. The k-mers and
patterns for a protein's features are counted without its fold. Calibration and error rates come
from nets that were fitted without the fold of the protein. Seeds are fixed.

It writes figures for three sorts of nets: "validation" for nets fitted to the training groups, with
three seeds, for making choices; "held out" for a net fitted to training and validation groups, on
the groups of test and locked; and "folds" for the nets that calibrate.
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
from piece_nets import Fitting, Lessons, fit_nets
from sampling import collect
from scorer_file import save_scorer
from scorer_folds import N_FOLDS, fit_knot, group_folds
from scorer_kmers import KmerGroupCounts, count_kmer_groups
from train_embedded_scorer import KIND_OF, KINDS, N_VIRAL, SHARES

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
    N_COMPOSITION,
    N_FEATURES,
    N_RESIDUES,
    PATTERNS,
    RATIO_STEP,
    SHORTEST,
    Features,
    Proteins,
    Ratios,
    encode_protein,
    kmer_features,
    spelling,
)

N_FRAGMENTS = 150_000  # of each label
LONGEST = 600  # residues of a fragment
WHOLE = 0.5  # share of the proteins that are read whole
N_MADE = 500  # synthetic sequences of each sort, which are not viral
MADE_WEIGHT = 2.0
# pseudocounts of sparse patterns, relative to the frequencies expected from single residues
PRIOR = {3: 0.1, 4: 0.3}
FITTING = Fitting(
    hidden=(256, 64), input_dropout=0.2, spared=range(N_COMPOSITION, N_FEATURES), epochs=4
)
BINS = (50, 70, 100, 150, 220, 320, 500, 1000)  # residues; the last bin has no upper limit
CENTRES = (59, 84, 122, 182, 265, 400, 700, 1500)
TOLD = ((50, 99), (100, 149), (150, 299), (300, None), (150, None))  # residues, in the figures
PARTS = ("train", "validation", "test", "locked")
MADE = -1  # the fold of synthetic sequences
PROKARYOTIC = ("phages", "bacteria", "archaea", "bins")
WITH_INTERVAL = ("all", "phages and prokaryotes")
_EDGES = np.geomspace(60, 1000, 12)
_MAX_FACTOR = 4.0
_MIN_DIVISOR = 20
_AT_ONCE = 2000  # proteins
SEED = 4
SEEDS = (0, 1, 2)
COLUMNS = (
    *("nets", "seed", "residues", "kind", "n_viral", "n_cellular", "groups_viral"),
    *("groups_cellular", "auroc", "low", "high", "ece"),
    *(f"{rate}_{preset}" for preset in FALSE_POSITIVES for rate in ("recall", "false_positives")),
)


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Labelled proteins, or fragments of them, as parallel rows and places in common residues."""

    residues: Residues  # all proteins, concatenated
    first: IntArray
    length: IntArray
    group: IntArray
    fold: IntArray
    kind: IntArray  # index in SHARES
    is_virus: BoolArray
    part: IntArray  # index in PARTS

    def __len__(self) -> int:
        return len(self.first)

    def where(self, rows: BoolArray | IntArray) -> Library:
        columns = ("first", "length", "group", "fold", "kind", "is_virus", "part")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def blocks(self) -> Iterator[tuple[slice, Proteins]]:
        for low in range(0, len(self), _AT_ONCE):
            rows = slice(low, min(len(self), low + _AT_ONCE))
            length = self.length[rows]
            moved = self.first[rows] - (np.cumsum(length) - length)
            places = np.repeat(moved, length) + np.arange(length.sum())
            yield rows, Proteins(self.residues[places], length)

    def read(self, what: Callable[[Proteins], Features]) -> Features:
        return np.concatenate([what(proteins) for _, proteins in self.blocks()])

    def each(self) -> Iterator[Residues]:
        for first, length in zip(self.first.tolist(), self.length.tolist(), strict=True):
            yield self.residues[first : first + length]

    def chances(self, by_residue: bool) -> FloatArray:
        """The probability of drawing each: kinds by their shares, groups nearly evenly."""
        chances = np.zeros(len(self))
        shares = np.array(list(SHARES.values()))
        n_groups = int(self.group.max()) + 1
        for kind in np.unique(self.kind):
            rows = np.flatnonzero(self.kind == kind)
            group = self.group[rows]
            length = self.length[rows]
            group_weights = np.bincount(group, length, n_groups) ** BASES_POWER
            inside = length if by_residue else np.ones(len(rows))
            inside = inside / np.bincount(group, inside, n_groups)[group]
            chances[rows] = shares[kind] * group_weights[group] / group_weights.sum() * inside
        for label in (True, False):
            chances[self.is_virus == label] /= chances[self.is_virus == label].sum()
        return chances


def read_library(path: Path, split: Path, folds: dict[str, int]) -> Library:
    csv.field_size_limit(2**31 - 1)
    part_of = {row["group"]: PARTS.index(row["part"]) for row in rows_of(split)}
    rows = [row for row in rows_of(path) if len(row["protein"]) >= SHORTEST]
    names, group = np.unique([row["group"] for row in rows], return_inverse=True)
    length = np.array([len(row["protein"]) for row in rows], dtype=np.int64)
    return Library(
        encode_protein("".join(row["protein"] for row in rows)),
        np.cumsum(length) - length,
        length,
        group,
        np.array([folds[name] for name in names])[group],
        np.array([list(SHARES).index(row["kingdom"]) for row in rows]),
        np.array([row["label"] == "virus" for row in rows]),
        np.array([part_of[name] for name in names])[group],
    )


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)


def draw(library: Library, n: int, rng: np.random.Generator) -> Library:
    """Draw ``n`` proteins of each label: some whole, others cut to a random length."""
    chances = library.chances(by_residue=False)
    drawn = [
        rng.choice(rows := np.flatnonzero(library.is_virus == label), n, p=chances[rows])
        for label in (True, False)
    ]
    chosen = library.where(np.concatenate(drawn))
    most = np.minimum(LONGEST, chosen.length)
    cut = np.exp(rng.uniform(np.log(SHORTEST), np.log(most + 1))).astype(np.int64)
    is_whole = rng.random(len(chosen)) < WHOLE
    length = np.where(is_whole, chosen.length, np.minimum(cut, most))
    first = chosen.first + rng.integers(chosen.length - length, endpoint=True)
    return replace(chosen, first=first, length=length)


class Counted:
    """Counts of k-mers and patterns in all folds, for tables without some folds."""

    def __init__(self, library: Library, kmers: KmerGroupCounts) -> None:
        self._words = kmers
        self._counts = [count_pattern(library, pattern) for pattern in PATTERNS]
        chances = np.repeat(library.chances(by_residue=True) / library.length, library.length)
        is_known = library.residues < NO_RESIDUE
        shares = np.bincount(library.residues[is_known], chances[is_known], N_RESIDUES)
        self._by_residue = shares / shares.sum()

    def ratios(self, left_out: Collection[int]) -> tuple[Ratios, ...]:
        folds = [fold for fold in range(N_FOLDS) if fold not in left_out]
        return tuple(
            self._ratios(pattern, counts[folds].sum(axis=0, dtype=np.float64))
            for pattern, counts in zip(PATTERNS, self._counts, strict=True)
        )

    def _ratios(self, pattern: Sequence[int], counts: FloatArray) -> Ratios:
        """The log ratio, viruses to cells, of each pattern's frequency, in steps. (2, n) -> (n,)"""
        expected = np.ones(1)
        for _ in pattern:
            expected = (expected[:, None] * self._by_residue).reshape(-1)
        shares = counts / counts.sum(axis=1, keepdims=True) + PRIOR[len(pattern)] * expected
        steps = np.rint((np.log(shares[1]) - np.log(shares[0])) / RATIO_STEP)
        return np.asarray(steps.clip(-127, 127).astype(np.int8))

    def shared_without(self, fold: int) -> Callable[[Proteins], Features]:
        """Make a function that computes k-mer features from counts without this fold."""
        kmers = self._words.table({fold})
        ratios = self.ratios({fold})
        return lambda proteins: kmer_features(proteins, kmers, ratios)


def occurrences(proteins: Proteins, places: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Each occurrence of a pattern in a protein: the protein, and the residues as one number.

    The number has one digit in base 20 for each offset of the pattern.
    """
    residues = proteins.residues
    owner = proteins.owner
    n = max(0, len(residues) - places[-1])
    is_inside: BoolArray = owner[:n] == owner[len(residues) - n :]
    numbers = np.zeros(n, dtype=np.int64)
    for place in places:
        numbers *= N_RESIDUES
        numbers += residues[place : place + n]
        is_inside &= residues[place : place + n] < NO_RESIDUE
    found = np.flatnonzero(is_inside)
    return owner[found], numbers[found]


def n_numbers(places: Sequence[int]) -> int:
    """The number of different values that a pattern can have."""
    return int(N_RESIDUES ** len(places))


def count_pattern(library: Library, pattern: Sequence[int]) -> NDArray[np.float32]:
    """Count each value of a pattern in the cells and viruses of each fold.

    Groups count nearly evenly. -> (n_folds, 2, n_numbers)
    """
    weights = library.chances(by_residue=True) / library.length
    counts = np.zeros((N_FOLDS, 2, n_numbers(pattern)), dtype=np.float32)
    for fold in range(N_FOLDS):
        for label in (0, 1):
            rows = np.flatnonzero((library.fold == fold) & (library.is_virus == label))
            for some, proteins in library.where(rows).blocks():
                owner, numbers = occurrences(proteins, pattern)
                block_weights = weights[rows[some]][owner]
                counts[fold, label] += np.bincount(numbers, block_weights, n_numbers(pattern))
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Fragments, then synthetic ones, and their features, as parallel rows.

    Synthetic ones have the last kind, and no fold (``MADE``).
    """

    fragments: Library
    kind: IntArray
    features: Features

    @classmethod
    def of(cls, library: Library, counted: Counted) -> Course:
        rng = np.random.default_rng(SEED)
        fragments = with_made(draw(library, N_FRAGMENTS, rng), rng)
        names = [KIND_OF.get(name, name) for name in SHARES]
        kinds = np.array([*map(KINDS.index, names), len(KINDS)])
        alone = fragments.read(spelling)
        features = np.hstack([alone, np.empty((len(alone), N_FEATURES - alone.shape[1]), "f4")])
        for fold in range(MADE, N_FOLDS):
            rows = np.flatnonzero(fragments.fold == fold)
            others = counted.shared_without(fold)
            features[rows, alone.shape[1] :] = fragments.where(rows).read(others)
        return cls(fragments, kinds[fragments.kind], features)

    def fit(self, rows: BoolArray, seed: int = 0) -> NetworkStack:
        """Fit a net to these rows and the synthetic ones."""
        rows = rows | (self.fragments.fold == MADE)
        some = self.fragments.where(rows)
        is_made = some.fold == MADE
        weights = np.where(is_made, MADE_WEIGHT, length_weights(some.length, some.is_virus))
        lessons = Lessons(self.features[rows], self.kind[rows], weights, N_VIRAL, len(KINDS) + 1)
        return fit_nets(lessons, seed, FITTING)


def with_made(fragments: Library, rng: np.random.Generator) -> Library:
    """Append synthetic proteins, which are not viral: shuffled, random, homopolymers, repeats."""
    chosen = rng.integers(len(fragments), size=N_MADE)
    made = [rng.permutation(residues) for residues in fragments.where(chosen).each()]
    for number in range(N_MADE):
        length = rng.integers(SHORTEST, LONGEST, size=3)
        n = rng.integers(2, 12)
        made.append(rng.integers(N_RESIDUES, size=length[0]).astype(np.uint8))
        made.append(np.full(length[1], number % N_RESIDUES, dtype=np.uint8))
        made.append(np.resize(rng.integers(N_RESIDUES, size=n).astype(np.uint8), length[2]))
    lengths = np.array([len(one) for one in made])

    def behind(column: IntArray, value: int) -> IntArray:
        return np.append(column, np.full(len(made), value))

    return Library(
        np.concatenate([fragments.residues, *made]),
        np.append(fragments.first, len(fragments.residues) + np.cumsum(lengths) - lengths),
        np.append(fragments.length, lengths),
        behind(fragments.group, -1),
        behind(fragments.fold, MADE),
        behind(fragments.kind, len(SHARES)),
        np.append(fragments.is_virus, np.zeros(len(made), dtype=np.bool_)),
        behind(fragments.part, -1),
    )


def length_weights(length: IntArray, is_virus: BoolArray) -> FloatArray:
    """Weights that balance the labels at each length, so that it does not predict the label."""
    bins = np.digitize(length, _EDGES)
    counts = np.bincount(2 * bins + is_virus, minlength=2 * len(_EDGES) + 2).reshape(-1, 2)
    weights = (
        counts.sum(axis=1)[bins] / 2 / np.maximum(_MIN_DIVISOR, counts[bins, is_virus.astype(int)])
    )
    return np.asarray(np.minimum(weights / weights.mean(), _MAX_FACTOR))


def calibrated_by(
    fragments: Library, log_odds: FloatArray
) -> tuple[tuple[Knot, ...], tuple[ErrorRates, ...]]:
    """Derive knots and error rates by length, from nets that have not seen the fragments."""
    in_bin = np.digitize(fragments.length, BINS[1:])
    knots = tuple(
        fit_knot(length, log_odds[in_bin == i], fragments.is_virus[in_bin == i])
        for i, length in enumerate(CENTRES)
    )
    log_odds = calibrate(knots, log_odds, fragments.length)
    rates = (
        fit_error_rates(length, log_odds[in_bin == i], fragments.is_virus[in_bin == i])
        for i, length in enumerate(CENTRES)
    )
    return knots, tuple(rates)


def train(manifest: Path, proteins: Path, split: Path, scorer_file: Path) -> None:
    scorer = load_scorer(scorer_file)
    collection = collect(read_records(read_data_manifest(manifest)))
    fold_of_group = group_folds(collection.records)
    fold_of_record = np.array([fold_of_group[record.group] for record in collection.records])
    library = read_library(proteins, split, fold_of_group)
    counted = Counted(library, count_kmer_groups(collection, fold_of_record))
    course = Course.of(library, counted)
    for seed in SEEDS:
        look(course, "validation", ("train",), ("validation",), seed)
    look(course, "held out", ("train", "validation"), ("test", "locked"), 0)
    fitted = course.fit(np.ones(len(course.fragments), dtype=np.bool_))
    knots, rates = calibrate_folds(course)
    kmers = scorer.pieces[0].kmers
    training = f"{len(library):,} proteins of {len(np.unique(library.group)):,} groups"
    nets = ProteinNetworks(
        kmers,
        counted.ratios(()),
        fitted,
        knots,
        rates,
        training,
    )
    save_scorer(scorer_file, replace(scorer, proteins=nets))


def look(
    course: Course, name: str, fitted_to: Sequence[str], looked_at: Sequence[str], seed: int
) -> None:
    """Fit nets to some parts, and write their figures on others."""
    part = course.fragments.part
    fitted = course.fit(np.isin(part, [PARTS.index(one) for one in fitted_to]), seed)
    rows = np.flatnonzero(np.isin(part, [PARTS.index(one) for one in looked_at]))
    log_odds = fitted.log_odds(course.features[rows])
    write_figures(f"{name}\t{seed}", course.fragments.where(rows), log_odds)


def calibrate_folds(course: Course) -> tuple[tuple[Knot, ...], tuple[ErrorRates, ...]]:
    """Derive knots and error rates from the nets of folds; write their figures."""
    fold_of = course.fragments.fold
    log_odds = np.full(len(fold_of), np.nan)
    for fold in range(N_FOLDS):
        rows = np.flatnonzero(fold_of == fold)
        fitted = course.fit((fold_of != fold) & (fold_of != MADE))
        log_odds[rows] = fitted.log_odds(course.features[rows])
        print(f"fold {fold + 1} of {N_FOLDS}", file=sys.stderr, flush=True)
    rows = np.flatnonzero(fold_of != MADE)
    fragments = course.fragments.where(rows)
    knots, rates = calibrated_by(fragments, log_odds[rows])
    values = calibrate(knots, log_odds[rows], fragments.length)
    cuts = {
        str(preset): thresholds(rates, fragments.length, share)
        for preset, share in FALSE_POSITIVES.items()
    }
    write_figures("folds\t0", fragments, values, cuts)
    return knots, rates


def write_figures(
    name: str,
    fragments: Library,
    log_odds: FloatArray,
    cuts: Mapping[str, FloatArray] | None = None,
) -> None:
    """Write rows of the table. Without cuts, presets call their share of the cells in each row."""
    for low, high in TOLD:
        inside = (fragments.length >= low) & (fragments.length <= (high or np.inf))
        some = fragments.where(inside)
        values = log_odds[inside]
        called: dict[str, BoolArray] = {}
        for preset, share in FALSE_POSITIVES.items():
            cut = cuts[preset][inside] if cuts else np.quantile(values[~some.is_virus], 1 - share)
            called[preset] = values >= cut
        residues = f"{low}-{high or ''}"
        for kind, is_own, is_inside in kinds_of(some):
            cells = row_of(some, values, called, is_own, is_inside, kind in WITH_INTERVAL)
            sys.stdout.write("\t".join([name, residues, kind, *cells]) + "\n")
    sys.stdout.flush()


def kinds_of(fragments: Library) -> Iterator[tuple[str, BoolArray, BoolArray]]:
    """Yield each kind, its own fragments, and these with the fragments they are ranked against."""
    everything = np.ones(len(fragments), dtype=np.bool_)
    yield "all", everything, everything
    kinds = np.array([*SHARES, "made"])[fragments.kind]
    is_prokaryotic = np.isin(kinds, PROKARYOTIC)
    yield "phages and prokaryotes", is_prokaryotic, is_prokaryotic
    for kind in SHARES:
        if (is_own := kinds == kind).any():
            is_opposite = fragments.is_virus != fragments.is_virus[is_own][0]
            yield kind, is_own, is_own | is_opposite


def row_of(
    fragments: Library,
    log_odds: FloatArray,
    called: Mapping[str, BoolArray],
    is_own: BoolArray,
    is_inside: BoolArray,
    has_interval: bool,
) -> Iterator[str]:
    own = fragments.where(is_own)
    for label in (True, False):
        yield str((own.is_virus == label).sum())
    for label in (True, False):
        yield str(len(np.unique(own.group[own.is_virus == label])))
    inside = fragments.where(is_inside)
    samples = Samples(
        sigmoid(log_odds[is_inside]), inside.is_virus, inside.group, np.ones(len(inside))
    )
    n_per_label = np.bincount(inside.is_virus, minlength=2)
    samples = replace(samples, weights=1 / n_per_label[inside.is_virus.astype(np.int64)])
    is_called = called["default"][is_inside]
    figures = samples.measure(is_called)
    values = [figures["auroc"], None, None, figures["calibration_error"]]
    if has_interval:
        low, high = samples.bootstrap(is_called, seed=0)
        values[1:3] = low["auroc"], high["auroc"]
    for mask in called.values():
        for label in (True, False):
            rows = is_own & (fragments.is_virus == label)
            values.append(float(mask[rows].mean()) if rows.any() else None)
    yield from ("" if value is None else f"{value:.4f}" for value in values)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) != 5 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    train(*map(Path, sys.argv[1:]))
