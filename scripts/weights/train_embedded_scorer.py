"""Train the built-in scorer, virnucpro/embedded/scorer.safetensors, or evaluate it.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv
    python scripts/weights/scorer_elements.py manifest.tsv elements.fa > elements.tsv
    tail -n +2 elements.tsv >> manifest.tsv
    python scripts/weights/scorer_genes.py markers.fasta genes.fa > genes.tsv
    python scripts/weights/train_embedded_scorer.py train manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv scorer.safetensors train validation test locked

The scorer is trained on the groups of the named parts. Networks of short pieces are also trained on
genes of archaea, whose k-mers are not counted. Its calibration and its error rates by kingdom come
from cross-validation over the same groups, with two folds held out at a time. The k-mers for a
fragment's features are always counted without its fold. For each pair of folds, a scorer trained
without them is written to scorer_folds/, to evaluate on groups that the scorer itself was trained
on. Existing fits are not repeated. Seeds are fixed: on the same machine, the same data makes the
same file. The networks of windows are the binary ones of the built-in scorer: multi-class networks
find the same prophages, and one more false region.

The built-in scorer was trained on all groups. To evaluate the recipe on locked groups, train a file
without them:

    python scripts/weights/train_embedded_scorer.py train manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv without_locked.safetensors train validation test
    python scripts/weights/train_embedded_scorer.py measure manifest.tsv \
        scripts/weights/scorer_split.tsv without_locked.safetensors locked

``measure`` writes a table. For each length, it has a row for all fragments of the parts, then rows
for each kind of virus against all cells, and for each kind of cells against all viruses. ``train``
writes the same table for held-out fragments. The fragments of the other label are the same in all
rows. "called" counts the kind's own fragments at or above the threshold. The other metrics weight
both labels equally.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from feature_extraction import fragment_features, pooled_fragment_features
from numpy.typing import NDArray
from piece_networks import (
    STATISTICS_AND_KMERS,
    STATISTICS_KMERS_AND_LAYOUT,
    PieceRange,
    TrainingConfig,
    TrainingSet,
    fit_piece_networks,
)
from sampling import Fragments, RecordSet, collect_records, gc_matched_weights, sample_fragments
from scorer_calibration import (
    ELEMENTS,
    assign_folds,
    bootstrap_margin,
    cell_kind_masks,
    fit_knot,
    fragment_scores,
    held_out_log_odds,
    raise_thresholds,
    smooth_error_rates,
)
from scorer_file import save_scorer
from scorer_kmers import FoldKmerTables, KmerGroupCounts, count_kmer_groups
from synthetic_negatives import NEGATIVE_KINDS, make_negative

from virnucpro.core.numeric import FloatArray, IntArray, sigmoid
from virnucpro.training.evaluation.calibration import fit_error_rates
from virnucpro.training.evaluation.metrics import Samples
from virnucpro.training.labelled_data import (
    Labelled,
    LabelledRecord,
    group_digest,
    read_data_manifest,
    read_records,
)
from virnucpro.viral.features import WindowFeatures
from virnucpro.viral.networks import (
    ErrorRates,
    Kingdom,
    Knot,
    PieceNetworks,
    Scorer,
    load_scorer,
    most_probable,
    thresholds_of,
)
from virnucpro.viral.networks import calibrate as calibrate_log_odds
from virnucpro.viral.options import FALSE_POSITIVES


@dataclass(frozen=True, slots=True)
class SamplingScheme:
    """The shares of kingdoms, and the weights of fragments.

    With a ``gc_power`` of 1, both labels weigh the same at each GC content. With 0, fragments are
    not weighted.
    """

    shares: Mapping[str, float]
    gc_power: float


ARCHAEAL_GENES = "unlinked archaeal genes"  # sorted last, so other groups keep their folds
KINGDOM_SHARES = {  # of the viral fragments, then of the cellular ones
    "phages": 0.35,
    "archaeal viruses": 0.05,
    "RNA+ viruses": 0.20,
    "RNA- viruses": 0.13,
    "dsRNA viruses": 0.10,
    "dsDNA viruses of eukaryotes": 0.07,
    "ssDNA viruses of eukaryotes": 0.07,
    "reverse-transcribing viruses": 0.04,
    "bacteria": 0.36,
    "bins": 0.06,
    "plasmids": 0.05,
    "archaea": 0.14,
    "protists": 0.11,
    "transcripts": 0.10,
    "animals": 0.06,
    "fungi": 0.04,
    "plants": 0.03,
    "organelles": 0.03,
    "ribosomal operons": 0.02,
    ELEMENTS: 0.06,
}
# kingdoms that are one kind: known archaea are so few that new ones would look like viruses
KIND_OF_KINGDOM = {
    "archaeal viruses": "phages",
    "bins": "bacteria",
    "plasmids": "bacteria",
    "archaea": "bacteria",
    ARCHAEAL_GENES: "bacteria",
}
# viruses first
KINDS = tuple(dict.fromkeys(KIND_OF_KINGDOM.get(name, name) for name in KINGDOM_SHARES))
N_VIRAL = KINDS.index("bacteria")
# factors by which these may exceed false positive rates: most transcripts are from protists, and
# some plasmids are phages
RATE_FACTORS = {"protists": 2.0, "plasmids": 2.0, "transcripts": 2.0, ELEMENTS: 10 / 3}
THRESHOLD_ONLY = ("transcripts", ELEMENTS)  # excluded from error rates
# each with its own thresholds; synthetic sequences have no share in either
KINGDOMS = {
    "prokaryotes": tuple(KINDS.index(name) for name in ("phages", "bacteria")),
    "eukaryotes": tuple(
        number for number, name in enumerate(KINDS) if name not in ("phages", "bacteria")
    ),
}
PIECE_RANGES = (
    PieceRange(150, 150, 350),
    PieceRange(300, 180, 1000),
    PieceRange(500, 350),
    PieceRange(1000, 700),
    PieceRange(3000, 2000, 10_000, part=1000),
    PieceRange(10_000, 10_000, part=1000),
)
PIECE_CONFIG = TrainingConfig(
    hidden=(256, 64), input_dropout=0.2, no_dropout=STATISTICS_AND_KMERS, epochs=4
)
PART_CONFIG = TrainingConfig(input_dropout=0.2, no_dropout=STATISTICS_KMERS_AND_LAYOUT)
GC_MATCHED = SamplingScheme(KINGDOM_SHARES, gc_power=1)
# with archaea of other families, as most archaea of the data are of one order
WITH_ARCHAEAL_GENES = SamplingScheme(
    KINGDOM_SHARES | {"archaea": 0.06, ARCHAEAL_GENES: 0.08}, gc_power=0.5
)
PROKARYOTE_SCHEME = SamplingScheme(  # and of their viruses
    {
        kingdom: share
        for kingdom, share in WITH_ARCHAEAL_GENES.shares.items()
        if KIND_OF_KINGDOM.get(kingdom, kingdom) in ("phages", "bacteria")
    },
    WITH_ARCHAEAL_GENES.gc_power,
)
PROKARYOTE_FRAGMENT_SHARE = 2 / 3  # fragments for prokaryote networks, relative to other ones
TRAINING_FRAGMENTS = {
    150: 200_000,
    300: 200_000,
    500: 300_000,
    1000: 200_000,
    3000: 50_000,
    10_000: 20_000,
}
# not in the folds of their relatives: Haloarcula, and Saccharomyces, whose elements are Copia too
FOLD_OVERRIDES = {"genus Haloferax": 7, "genus Arabidopsis": 7}
FRAGMENTS_PER_SYNTHETIC = 40  # fragments of each label per synthetic one of each kind
SYNTHETIC_WEIGHT = 2.0
# folds held out together; with few archaea among them, and none that are close relatives
HELD_OUT_PAIRS = ((0, 6), (1, 8), (2, 9), (3, 4), (5, 7))
# shares of the fragments of short pieces, to save time
FINAL_FRAGMENT_SHARE = 0.75  # for the networks of the file
FOLD_FRAGMENT_SHARE = 0.5  # for cross-validation
SEED = 3  # of the fragments for cross-validation
EVALUATION_FRAGMENTS = {  # by length, on both sides of each limit of the networks
    150: 20_000,
    179: 20_000,
    180: 20_000,
    300: 20_000,
    349: 20_000,
    350: 20_000,
    500: 20_000,
    699: 20_000,
    700: 20_000,
    999: 20_000,
    1000: 20_000,
    1999: 20_000,  # records of 2,000 bases and more are also read in longer pieces
    2000: 20_000,
    3000: 10_000,
    9999: 5000,
    10_000: 5000,
    20_000: 3000,  # of few groups; hardly any longer cellular sequences exist
}
PROKARYOTIC = ("phages", "bacteria", "archaea", "bins")
COLUMNS = (
    "bases",
    "kind",
    *(f"{noun}_{kind}" for kind in ("viral", "cellular") for noun in ("n", "groups", "called")),
    *("auroc", "low", "high", "calibration_error"),
)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """Records for fitting networks, their folds, and k-mers counted only in them."""

    collection: RecordSet
    fold_of_record: IntArray
    kmers: FoldKmerTables


@dataclass(frozen=True, slots=True, eq=False)
class LabelledData:
    """The records for a scorer, genes last, with their folds, and the k-mers of all but genes."""

    collection: RecordSet
    fold_of_record: IntArray
    counts: KmerGroupCounts

    @classmethod
    def read(
        cls,
        manifest: Path,
        genes: Path,
        split: Path,
        parts: list[str],
        fold_overrides: dict[str, int] = FOLD_OVERRIDES,
    ) -> LabelledData:
        """Read the records of some parts of a split, and assign folds."""
        gene_records = read_records(read_data_manifest(genes))
        collection = collect_records(
            chain(read_split_records(manifest, split, parts), gene_records)
        )
        fold_of_group = assign_folds(collection.records) | fold_overrides
        fold = np.array([fold_of_group[record.group] for record in collection.records])
        is_counted = np.array([record.kingdom != ARCHAEAL_GENES for record in collection.records])
        counts = count_kmer_groups(collection.select(is_counted), fold[is_counted])
        return cls(collection, fold, counts)

    def exclude_folds(self, folds: Collection[int]) -> TrainingData:
        """Return the records of the other folds, or all without ``folds``."""
        is_kept = np.array([fold not in folds for fold in self.fold_of_record.tolist()])
        kmers = FoldKmerTables.from_counts(self.counts, folds)
        return TrainingData(self.collection.select(is_kept), self.fold_of_record[is_kept], kmers)


def sample_training_set(
    training_data: TrainingData,
    bases: PieceRange,
    n_fragments: int,
    scheme: SamplingScheme,
    seed: int,
) -> TrainingSet:
    """Sample ``n_fragments`` of each label, and add synthetic negatives."""
    size = bases.size
    rng = np.random.default_rng([size, seed])
    fragments = sample_fragments(training_data.collection, size, n_fragments, scheme.shares, rng)
    records = training_data.collection.records
    kingdoms = [records[record].kingdom for record in fragments.record]
    kind = np.array([KINDS.index(KIND_OF_KINGDOM.get(kingdom, kingdom)) for kingdom in kingdoms])
    is_virus = kind < N_VIRAL
    featurize = (
        partial(pooled_fragment_features, part=bases.part) if bases.part else fragment_features
    )
    features = training_data.kmers.compute_features(
        fragments, training_data.fold_of_record, featurize
    )
    gc = features[:, WindowFeatures.GC].astype(np.float64)
    weights = gc_matched_weights(gc, is_virus) ** scheme.gc_power
    cellular = fragments.digits[~is_virus]
    synthetic = np.stack(
        [
            make_negative(name, size, cellular[rng.integers(len(cellular))], rng)
            for name in NEGATIVE_KINDS
            for _ in range(n_fragments // FRAGMENTS_PER_SYNTHETIC)
        ]
    )
    return TrainingSet(
        np.concatenate([features, featurize(synthetic, training_data.kmers.table)]),
        np.append(kind, np.full(len(synthetic), len(KINDS))),  # a kind of their own
        np.append(weights, np.full(len(synthetic), SYNTHETIC_WEIGHT)),
        N_VIRAL,
        len(KINDS) + 1,
    )


def fit_networks(training_data: TrainingData, share: float) -> tuple[PieceNetworks, ...]:
    """Fit the networks of all sizes, those of short pieces to a share of the usual fragments."""
    return tuple(fit_range(training_data, bases, share) for bases in PIECE_RANGES)


def fit_range(training_data: TrainingData, bases: PieceRange, share: float) -> PieceNetworks:
    config, scheme = (
        (PART_CONFIG, GC_MATCHED) if bases.part else (PIECE_CONFIG, WITH_ARCHAEAL_GENES)
    )
    n_fragments = int(TRAINING_FRAGMENTS[bases.size] * (1.0 if bases.part else share))
    training_sets = [sample_training_set(training_data, bases, n_fragments, scheme, seed=0)]
    n_prokaryotic = int(PROKARYOTE_FRAGMENT_SHARE * n_fragments)
    prokaryotes = (
        None
        if bases.part
        else sample_training_set(training_data, bases, n_prokaryotic, PROKARYOTE_SCHEME, seed=0)
    )
    return fit_piece_networks(bases, training_sets, training_data.kmers.table, config, prokaryotes)


def fit_or_load(
    data: LabelledData, held_out_folds: tuple[int, ...], file: Path
) -> tuple[PieceNetworks, ...]:
    """Fit the networks without some folds and save them, or load saved ones.

    The rest of the file is that of the built-in scorer.
    """
    if not file.exists():
        share = FOLD_FRAGMENT_SHARE if held_out_folds else FINAL_FRAGMENT_SHARE
        nets = fit_networks(data.exclude_folds(held_out_folds), share)
        save_scorer(file, replace(Scorer.load_builtin(), pieces=nets, proteins=None))
        print(file.name, file=sys.stderr, flush=True)
    return load_scorer(file).pieces


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutFragments:
    """Fragments of one length, with calibrated held-out log-odds and the kingdom of each."""

    collection: RecordSet
    fragments: Fragments
    log_odds: FloatArray
    kingdom: IntArray

    @property
    def records(self) -> list[LabelledRecord]:
        return fragment_records(self.collection, self.fragments)

    @property
    def is_virus(self) -> NDArray[np.bool_]:
        return np.array([record.is_virus for record in self.records])

    def error_rates(self, kingdoms: Sequence[int]) -> tuple[ErrorRates, FloatArray]:
        """Estimate error rates and their margin from the fragments of some kingdoms.

        The rates are those of genomes. Transcripts and elements, which are rare in samples and
        resemble viruses most, only raise thresholds.
        """
        n_bases = self.fragments.digits.shape[1]
        is_selected = np.isin(self.kingdom, kingdoms) & ~np.isnan(self.log_odds)
        cell_kinds = cell_kind_masks(self.collection, self.fragments, is_selected)
        kinds = [(is_kind, RATE_FACTORS.get(name, 1.0)) for name, is_kind in cell_kinds.items()]
        is_threshold_only = np.array([record.kingdom in THRESHOLD_ONLY for record in self.records])
        is_counted = is_selected & ~is_threshold_only
        log_odds = self.log_odds[is_counted]
        rates = fit_error_rates(n_bases, log_odds, self.is_virus[is_counted])
        rates = raise_thresholds(rates, self.log_odds, kinds)
        records = [self.records[index] for index in np.flatnonzero(is_counted)]
        rng = np.random.default_rng([n_bases, SEED])
        return rates, bootstrap_margin(rates, log_odds, records, rng)


def calibrate(
    data: LabelledData, nets: Mapping[tuple[int, ...], Sequence[PieceNetworks]]
) -> tuple[list[Knot], list[ErrorRates], list[Kingdom]]:
    """Fit knots, and error rates of all fragments and by kingdom, to held-out fragments."""
    knots = []
    held_out = []
    for n_bases, n_fragments in EVALUATION_FRAGMENTS.items():
        rng = np.random.default_rng([n_bases, SEED])
        fragments = sample_fragments(data.collection, n_bases, n_fragments, KINGDOM_SHARES, rng)
        log_odds, kinds = held_out_log_odds(fragments, data.fold_of_record, nets, len(KINDS) + 1)
        is_virus = np.array(
            [record.is_virus for record in fragment_records(data.collection, fragments)]
        )
        is_known = ~np.isnan(log_odds)  # a fragment may have only unknown bases
        knot = fit_knot(n_bases, log_odds[is_known], is_virus[is_known])
        kingdom_sums = [kinds[:, list(members)].sum(axis=1) for members in KINGDOMS.values()]
        kingdom = np.argmax(kingdom_sums, axis=0)
        knots.append(knot)
        held_out.append(
            HeldOutFragments(data.collection, fragments, knot.calibrated(log_odds), kingdom)
        )
    error_rates = smooth_rates(held_out, range(len(KINGDOMS)))
    kingdoms = [
        Kingdom(name, members, tuple(smooth_rates(held_out, [number])))
        for number, (name, members) in enumerate(KINGDOMS.items())
    ]
    for index, sample in enumerate(held_out):
        thresholds = [
            kingdom.error_rates[index].threshold_at(FALSE_POSITIVES["default"])
            for kingdom in kingdoms
        ]
        n_bases = sample.fragments.digits.shape[1]
        fragment_thresholds = np.array(thresholds)[sample.kingdom]
        write_metrics(n_bases, sample.records, sample.log_odds, fragment_thresholds)
    return knots, error_rates, kingdoms


def smooth_rates(held_out: Sequence[HeldOutFragments], kingdoms: Sequence[int]) -> list[ErrorRates]:
    rates, margins = zip(*(sample.error_rates(kingdoms) for sample in held_out), strict=True)
    return smooth_error_rates(rates, margins)


def fragment_records(collection: RecordSet, fragments: Fragments) -> list[LabelledRecord]:
    return [collection.records[record] for record in fragments.record]


def read_split_records(manifest: Path, split: Path, parts: list[str]) -> Iterator[Labelled]:
    with split.open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        part_of = {row["group"]: row["part"] for row in rows}
    for labelled, record in read_records(read_data_manifest(manifest)):
        if part_of[labelled.group] in parts:
            yield labelled, record


def train(manifest: Path, genes: Path, split: Path, out: Path, parts: list[str]) -> None:
    data = LabelledData.read(manifest, genes, split, parts)
    folder = out.with_name(f"{out.stem}_folds")
    folder.mkdir(exist_ok=True)
    pieces = fit_or_load(data, (), folder / "all.safetensors")
    nets: dict[tuple[int, ...], tuple[PieceNetworks, ...]] = {
        pair: fit_or_load(data, pair, folder / f"fold{''.join(map(str, pair))}.safetensors")
        for pair in HELD_OUT_PAIRS
    }
    knots, error_rates, kingdoms = calibrate(data, nets)
    records = data.collection.records
    groups = {record.group for record in records}
    builtin = Scorer.load_builtin()
    scorer = Scorer(
        pieces,
        builtin.windows,
        builtin.windows_knot,
        tuple(knots),
        f"{len(records):,} records of {len(groups):,} groups",
        tuple(error_rates),
        tuple(kingdoms),
        trained_records=np.unique(np.array([record.digest for record in records], dtype=np.uint64)),
        trained_groups=np.unique(np.array([*map(group_digest, groups)], dtype=np.uint64)),
    )
    save_scorer(out, scorer)
    for pair, pair_nets in nets.items():
        name = "".join(map(str, pair))
        fold_scorer = replace(scorer, pieces=pair_nets, training=f"without folds {pair}")
        save_scorer(folder / f"fold{name}.safetensors", fold_scorer)


def evaluate_parts(manifest: Path, split: Path, scorer_file: Path, parts: list[str]) -> None:
    scorer = load_scorer(scorer_file)
    collection = collect_records(read_split_records(manifest, split, parts))
    for n_bases, n_fragments in EVALUATION_FRAGMENTS.items():
        fragments = sample_fragments(
            collection, n_bases, n_fragments, KINGDOM_SHARES, np.random.default_rng(n_bases)
        )
        lengths = np.full(len(fragments), n_bases)
        log_odds, kinds = fragment_scores(fragments.digits, scorer.pieces)
        log_odds = calibrate_log_odds(scorer.knots, log_odds, lengths)
        rates = scorer.select_error_rates("nucleotide")
        kingdoms = most_probable(scorer.sum_by_kingdom(kinds))
        thresholds = thresholds_of(rates, kingdoms, lengths, FALSE_POSITIVES["default"])
        write_metrics(n_bases, fragment_records(collection, fragments), log_odds, thresholds)


def write_metrics(
    n_bases: int, records: Sequence[LabelledRecord], log_odds: FloatArray, thresholds: FloatArray
) -> None:
    """Write rows of the table for fragments of one length, by their calibrated log-odds.

    Each fragment has its own threshold.
    """
    samples = Samples(
        np.nan_to_num(sigmoid(log_odds), nan=0.0),  # no score: the lowest
        np.array([record.is_virus for record in records]),
        np.unique([record.group for record in records], return_inverse=True)[1],
        np.ones(len(records)),
    )
    kingdoms = np.array([record.kingdom for record in records])
    for cells in metric_rows(samples, kingdoms, log_odds >= thresholds):
        sys.stdout.write("\t".join([str(n_bases), *cells]) + "\n")
    sys.stdout.flush()


def metric_rows(
    samples: Samples, kingdoms: NDArray[np.str_], is_called: NDArray[np.bool_]
) -> Iterator[tuple[str, ...]]:
    everything = np.ones(len(samples), dtype=np.bool_)
    is_prokaryotic = np.isin(kingdoms, PROKARYOTIC)
    yield metric_row("all", samples, everything, everything, is_called)
    yield metric_row("phages and prokaryotes", samples, is_prokaryotic, is_prokaryotic, is_called)
    for kingdom in KINGDOM_SHARES:
        is_kingdom = kingdoms == kingdom
        if is_kingdom.any():
            is_opposite = samples.is_virus != samples.is_virus[is_kingdom][0]
            yield metric_row(kingdom, samples, is_kingdom, is_kingdom | is_opposite, is_called)


def metric_row(
    name: str,
    samples: Samples,
    is_kingdom: NDArray[np.bool_],
    is_evaluated: NDArray[np.bool_],
    is_called: NDArray[np.bool_],
) -> tuple[str, ...]:
    """Count samples and calls of a kingdom, and rank it in a mixture with equal labels."""
    kingdom_samples = samples.select(is_kingdom)
    evaluated = samples.select(is_evaluated)
    n_per_label = np.bincount(evaluated.is_virus, minlength=2)
    evaluated = replace(evaluated, weights=1 / n_per_label[evaluated.is_virus.astype(np.int64)])
    metrics = evaluated.measure(is_called[is_evaluated])
    low, high = evaluated.bootstrap(is_called[is_evaluated], seed=0)
    cells = [name]
    for label in (True, False):
        has_label = kingdom_samples.is_virus == label
        n_groups = len(set(kingdom_samples.groups[has_label].tolist()))
        cells += map(str, (has_label.sum(), n_groups, is_called[is_kingdom][has_label].sum()))
    values = (metrics["auroc"], low["auroc"], high["auroc"], metrics["calibration_error"])
    cells += ["" if value is None else f"{value:.4f}" for value in values]
    return tuple(cells)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["train", manifest, genes, split, scorer_file, *parts] if parts:
            sys.stdout.write("\t".join(COLUMNS) + "\n")
            train(Path(manifest), Path(genes), Path(split), Path(scorer_file), parts)
        case ["measure", manifest, split, scorer_file, *parts] if parts:
            sys.stdout.write("\t".join(COLUMNS) + "\n")
            evaluate_parts(Path(manifest), Path(split), Path(scorer_file), parts)
        case _:
            raise SystemExit(__doc__)
