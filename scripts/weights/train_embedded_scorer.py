"""Make the scorer that comes with VirNucPro, virnucpro/embedded/scorer.safetensors, or measure it.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv
    python scripts/weights/scorer_elements.py manifest.tsv elements.fa > elements.tsv
    tail -n +2 elements.tsv >> manifest.tsv
    python scripts/weights/scorer_genes.py markers.fasta genes.fa > genes.tsv
    python scripts/weights/train_embedded_scorer.py train manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv scorer.safetensors train validation test locked

The scorer is trained on the groups of the named parts and on genes of archaea, which nets of short
pieces alone read; their k-mers are not counted. Folds over the same groups, left out two at a time,
give its calibration and its error rates by kingdom. The k-mers for a fragment's features are always
counted without its fold. For each two folds, a scorer without them is written to scorer_folds/, for
measurements on groups that the scorer itself has seen. Fits that are there already are not
repeated. Seeds are fixed: on the same machine, the same data makes the same file. The nets of
windows are those of the package's scorer, from before nets learned kinds: nets with kinds find the
same prophages, and one more false region.

The package's scorer has seen all groups. To measure the recipe on groups that influenced nothing,
train a file without them:

    python scripts/weights/train_embedded_scorer.py train manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv without_locked.safetensors train validation test
    python scripts/weights/train_embedded_scorer.py measure manifest.tsv \
        scripts/weights/scorer_split.tsv without_locked.safetensors locked

Measuring writes a table. For each length, it has a row for all fragments of the parts, then rows
for each kind of virus against all cells, and for each kind of cells against all viruses. Training
writes the same for the groups of its folds. The fragments of the other side are the same in all
rows. "called" counts the kind's own fragments at or above the threshold; the other figures weight
both sides equally.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection as Container
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import made
import numpy as np
import torch
from numpy.typing import NDArray
from piece_nets import (
    FIGURES_AND_WORDS,
    FIGURES_WORDS_AND_LAYOUT,
    Fitting,
    Lessons,
    Range,
    fit_piece_nets,
)
from reading import fragment_features, whole_features
from sampling import Collection, Fragments, collect, draw, gc_matched_weights
from scorer_file import save_scorer
from scorer_folds import (
    ELEMENTS,
    evened,
    fit_knot,
    fragment_scores,
    group_folds,
    held_out_log_odds,
    kinds_of_cells,
    margin_of,
    with_kinds,
)
from scorer_kmers import KmerGroupCounts, KmersByFold, count_kmer_groups

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
from virnucpro.viral.features import GC
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
class Drawing:
    """How fragments are drawn and weighed.

    Both labels weigh the same at each GC if ``gc_power`` is 1, and as they are drawn if it is 0.
    """

    shares: Mapping[str, float]
    gc_power: float


GENES = "unlinked archaeal genes"  # the last name: these groups move no other to another fold
SHARES = {  # of the viral fragments, then of the cellular ones
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
# kinds that nets do not distinguish; with so few known archaea, new ones would look like viruses
KIND_OF = {
    "archaeal viruses": "phages",
    "bins": "bacteria",
    "plasmids": "bacteria",
    "archaea": "bacteria",
    GENES: "bacteria",
}
KINDS = tuple(dict.fromkeys(KIND_OF.get(kingdom, kingdom) for kingdom in SHARES))  # viruses first
N_VIRAL = KINDS.index("bacteria")
# these may be called so many times as often as others; most transcripts are from protists, and
# some plasmids are phages
LEEWAY = {"protists": 2.0, "plasmids": 2.0, "transcripts": 2.0, ELEMENTS: 10 / 3}
NO_GENOMES = ("transcripts", ELEMENTS)
# each with its own cuts; synthetic sequences have no share in either
KINGDOMS = {
    "prokaryotes": tuple(KINDS.index(name) for name in ("phages", "bacteria")),
    "eukaryotes": tuple(
        number for number, name in enumerate(KINDS) if name not in ("phages", "bacteria")
    ),
}
RANGES = (
    Range(150, 150, 350),
    Range(300, 180, 1000),
    Range(500, 350),
    Range(1000, 700),
    Range(3000, 2000, 10_000, part=1000),
    Range(10_000, 10_000, part=1000),
)
FITTING = Fitting(hidden=(256, 64), input_dropout=0.2, spared=FIGURES_AND_WORDS, epochs=4)
PART_FITTING = Fitting(input_dropout=0.2, spared=FIGURES_WORDS_AND_LAYOUT)
MATCHED = Drawing(SHARES, gc_power=1)
# with archaea of other families, as most archaea of the data are of one order
WITH_GENES = Drawing(SHARES | {"archaea": 0.06, GENES: 0.08}, gc_power=0.5)
PROKARYOTE_DRAWING = Drawing(  # and of their viruses
    {k: s for k, s in WITH_GENES.shares.items() if KIND_OF.get(k, k) in ("phages", "bacteria")},
    WITH_GENES.gc_power,
)
SHARE_OF_PROKARYOTES = 2 / 3  # of the fragments of other nets, for those that learn these alone
N_FRAGMENTS = {
    150: 200_000,
    300: 200_000,
    500: 300_000,
    1000: 200_000,
    3000: 50_000,
    10_000: 20_000,
}
# not left out with their relatives: Haloarcula, and Saccharomyces, whose elements are Copia too
APART = {"genus Haloferax": 7, "genus Arabidopsis": 7}
MADE_SHARE = 40  # fragments of each label per synthetic one of each kind
MADE_WEIGHT = 2.0
# left out together; with few archaea among them, and none that are close relatives
PAIRS_OF_FOLDS = ((0, 6), (1, 8), (2, 9), (3, 4), (5, 7))
# shares of the fragments of short pieces, which take less time to fit
SHARE_OF_FRAGMENTS = 0.75  # for the networks of the file
SHARE_OF_FOLDS = 0.5  # for the networks of folds
SEED = 3  # of the fragments for measuring the nets of folds
KNOTS = {  # on both sides of each length where other nets begin
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
class Course:
    """The data for fitting nets: records, their folds, and k-mers counted only in them."""

    collection: Collection
    fold_of_record: IntArray
    kmers: KmersByFold


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """The records for a scorer, genes last, with their folds, and the k-mers of all but genes."""

    collection: Collection
    fold_of_record: IntArray
    counts: KmerGroupCounts

    @classmethod
    def read(
        cls,
        manifest: Path,
        genes: Path,
        split: Path,
        parts: list[str],
        apart: dict[str, int] = APART,
    ) -> Data:
        """``apart`` has other folds for some groups."""
        gene_records = read_records(read_data_manifest(genes))
        collection = collect(chain(records_of(manifest, split, parts), gene_records))
        fold_of_group = group_folds(collection.records) | apart
        fold = np.array([fold_of_group[record.group] for record in collection.records])
        is_counted = np.array([record.kingdom != GENES for record in collection.records])
        counts = count_kmer_groups(collection.where(is_counted), fold[is_counted])
        return cls(collection, fold, counts)

    def without(self, folds: Container[int]) -> Course:
        """The records of the other folds; with none left out, all."""
        is_inside = np.array([fold not in folds for fold in self.fold_of_record.tolist()])
        kmers = KmersByFold.of(self.counts, folds)
        return Course(self.collection.where(is_inside), self.fold_of_record[is_inside], kmers)


def lessons(course: Course, bases: Range, n_fragments: int, drawing: Drawing, seed: int) -> Lessons:
    """Draw ``n_fragments`` of each label, and add synthetic ones, which are not viral."""
    size = bases.size
    rng = np.random.default_rng([size, seed])
    fragments = draw(course.collection, size, n_fragments, drawing.shares, rng)
    records = course.collection.records
    kingdoms = [records[record].kingdom for record in fragments.record]
    kind = np.array([KINDS.index(KIND_OF.get(kingdom, kingdom)) for kingdom in kingdoms])
    is_virus = kind < N_VIRAL
    read = partial(whole_features, part=bases.part) if bases.part else fragment_features
    features = course.kmers.features(fragments, course.fold_of_record, read)
    gc = features[:, GC].astype(np.float64)
    weights = gc_matched_weights(gc, is_virus) ** drawing.gc_power
    cells = fragments.digits[~is_virus]
    invented = np.stack(
        [
            made.make_sequence(name, size, cells[rng.integers(len(cells))], rng)
            for name in made.KINDS
            for _ in range(n_fragments // MADE_SHARE)
        ]
    )
    return Lessons(
        np.concatenate([features, read(invented, course.kmers.table)]),
        np.append(kind, np.full(len(invented), len(KINDS))),  # a kind of their own
        np.append(weights, np.full(len(invented), MADE_WEIGHT)),
        N_VIRAL,
        len(KINDS) + 1,
    )


def fit(course: Course, share: float) -> tuple[PieceNetworks, ...]:
    """Fit the nets of all sizes. Those of short pieces learn a share of the usual fragments."""
    return tuple(fit_range(course, bases, share) for bases in RANGES)


def fit_range(course: Course, bases: Range, share: float) -> PieceNetworks:
    fitting, drawing = (PART_FITTING, MATCHED) if bases.part else (FITTING, WITH_GENES)
    n_fragments = int(N_FRAGMENTS[bases.size] * (1.0 if bases.part else share))
    draws = [lessons(course, bases, n_fragments, drawing, seed=0)]
    n_own = int(SHARE_OF_PROKARYOTES * n_fragments)
    own = None if bases.part else lessons(course, bases, n_own, PROKARYOTE_DRAWING, seed=0)
    return fit_piece_nets(bases, draws, course.kmers.table, fitting, own)


def fit_once(data: Data, left_out: tuple[int, ...], file: Path) -> tuple[PieceNetworks, ...]:
    """Fit the nets without some folds and save them, or read those that a fit before saved.

    All but the nets of the file is the package's.
    """
    if not file.exists():
        share = SHARE_OF_FOLDS if left_out else SHARE_OF_FRAGMENTS
        nets = fit(data.without(left_out), share)
        save_scorer(file, replace(Scorer.load_builtin(), pieces=nets, proteins=None))
        print(file.name, file=sys.stderr, flush=True)
    return load_scorer(file).pieces


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Fragments of one length, with calibrated held-out log-odds and the kingdom of each."""

    collection: Collection
    fragments: Fragments
    log_odds: FloatArray
    kingdom: IntArray

    @property
    def records(self) -> list[LabelledRecord]:
        return records_of_fragments(self.collection, self.fragments)

    @property
    def is_virus(self) -> NDArray[np.bool_]:
        return np.array([record.is_virus for record in self.records])

    def error_rates(self, kingdoms: Sequence[int]) -> tuple[ErrorRates, FloatArray]:
        """Derive error rates and their margin from the fragments of some kingdoms.

        The rates are those of genomes. Transcripts and elements, which few samples have and which
        resemble viruses most, only raise cuts.
        """
        n_bases = self.fragments.digits.shape[1]
        inside = np.isin(self.kingdom, kingdoms) & ~np.isnan(self.log_odds)
        cell_kinds = kinds_of_cells(self.collection, self.fragments, inside)
        kinds = [(is_kind, LEEWAY.get(name, 1.0)) for name, is_kind in cell_kinds.items()]
        is_apart = np.array([record.kingdom in NO_GENOMES for record in self.records])
        counts = inside & ~is_apart
        log_odds = self.log_odds[counts]
        rates = fit_error_rates(n_bases, log_odds, self.is_virus[counts])
        rates = with_kinds(rates, self.log_odds, kinds)
        records = [one for one, is_one in zip(self.records, counts, strict=True) if is_one]
        rng = np.random.default_rng([n_bases, SEED])
        return rates, margin_of(rates, log_odds, records, rng)


def calibrate(
    data: Data, nets: Mapping[tuple[int, ...], Sequence[PieceNetworks]]
) -> tuple[list[Knot], list[ErrorRates], list[Kingdom]]:
    """Derive knots, and error rates of all fragments and by kingdom, from the nets of folds."""
    knots = []
    drawn = []
    for n_bases, n_fragments in KNOTS.items():
        rng = np.random.default_rng([n_bases, SEED])
        fragments = draw(data.collection, n_bases, n_fragments, SHARES, rng)
        log_odds, kinds = held_out_log_odds(fragments, data.fold_of_record, nets, len(KINDS) + 1)
        is_virus = np.array(
            [record.is_virus for record in records_of_fragments(data.collection, fragments)]
        )
        is_known = ~np.isnan(log_odds)  # a fragment may have only unknown bases
        knot = fit_knot(n_bases, log_odds[is_known], is_virus[is_known])
        kingdom_sums = [kinds[:, list(members)].sum(axis=1) for members in KINGDOMS.values()]
        kingdom = np.argmax(kingdom_sums, axis=0)
        knots.append(knot)
        drawn.append(Drawn(data.collection, fragments, knot.calibrated(log_odds), kingdom))
    error_rates = rates_over_lengths(drawn, range(len(KINGDOMS)))
    kingdoms = [
        Kingdom(name, members, tuple(rates_over_lengths(drawn, [number])))
        for number, (name, members) in enumerate(KINGDOMS.items())
    ]
    for place, one in enumerate(drawn):
        cuts = [of.error_rates[place].threshold_at(FALSE_POSITIVES["default"]) for of in kingdoms]
        n_bases = one.fragments.digits.shape[1]
        write_figures(n_bases, one.records, one.log_odds, np.array(cuts)[one.kingdom])
    return knots, error_rates, kingdoms


def rates_over_lengths(drawn: Sequence[Drawn], kingdoms: Sequence[int]) -> list[ErrorRates]:
    rates, margins = zip(*(one.error_rates(kingdoms) for one in drawn), strict=True)
    return evened(rates, margins)


def records_of_fragments(collection: Collection, fragments: Fragments) -> list[LabelledRecord]:
    return [collection.records[record] for record in fragments.record]


def records_of(manifest: Path, split: Path, parts: list[str]) -> Iterator[Labelled]:
    with split.open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        part_of = {row["group"]: row["part"] for row in rows}
    for labelled, record in read_records(read_data_manifest(manifest)):
        if part_of[labelled.group] in parts:
            yield labelled, record


def train(manifest: Path, genes: Path, split: Path, out: Path, parts: list[str]) -> None:
    data = Data.read(manifest, genes, split, parts)
    folder = out.with_name(f"{out.stem}_folds")
    folder.mkdir(exist_ok=True)
    pieces = fit_once(data, (), folder / "all.safetensors")
    nets: dict[tuple[int, ...], tuple[PieceNetworks, ...]] = {
        pair: fit_once(data, pair, folder / f"fold{''.join(map(str, pair))}.safetensors")
        for pair in PAIRS_OF_FOLDS
    }
    knots, error_rates, kingdoms = calibrate(data, nets)
    records = data.collection.records
    groups = {record.group for record in records}
    windows = Scorer.load_builtin()
    scorer = Scorer(
        pieces,
        windows.windows,
        windows.windows_knot,
        tuple(knots),
        f"{len(records):,} records of {len(groups):,} groups",
        tuple(error_rates),
        tuple(kingdoms),
        trained_records=np.unique(np.array([one.digest for one in records], dtype=np.uint64)),
        trained_groups=np.unique(np.array([*map(group_digest, groups)], dtype=np.uint64)),
    )
    save_scorer(out, scorer)
    for pair, pair_nets in nets.items():
        name = "".join(map(str, pair))
        unseen = replace(scorer, pieces=pair_nets, training=f"without folds {pair}")
        save_scorer(folder / f"fold{name}.safetensors", unseen)


def measure_parts(manifest: Path, split: Path, scorer_file: Path, parts: list[str]) -> None:
    scorer = load_scorer(scorer_file)
    collection = collect(records_of(manifest, split, parts))
    for n_bases, n_fragments in KNOTS.items():
        fragments = draw(collection, n_bases, n_fragments, SHARES, np.random.default_rng(n_bases))
        lengths = np.full(len(fragments), n_bases)
        log_odds, kinds = fragment_scores(fragments.digits, scorer.pieces)
        log_odds = calibrate_log_odds(scorer.knots, log_odds, lengths)
        rates = scorer.select_error_rates("nucleotide")
        kingdoms = most_probable(scorer.sum_by_kingdom(kinds))
        cuts = thresholds_of(rates, kingdoms, lengths, FALSE_POSITIVES["default"])
        write_figures(n_bases, records_of_fragments(collection, fragments), log_odds, cuts)


def write_figures(
    n_bases: int, records: Sequence[LabelledRecord], log_odds: FloatArray, cuts: FloatArray
) -> None:
    """Write rows of the table for fragments of one length, by their calibrated log-odds.

    Each fragment has its own cut.
    """
    samples = Samples(
        np.nan_to_num(sigmoid(log_odds), nan=0.0),  # no score: the lowest
        np.array([record.is_virus for record in records]),
        np.unique([record.group for record in records], return_inverse=True)[1],
        np.ones(len(records)),
    )
    kingdoms = np.array([record.kingdom for record in records])
    for cells in rows_of(samples, kingdoms, log_odds >= cuts):
        sys.stdout.write("\t".join([str(n_bases), *cells]) + "\n")
    sys.stdout.flush()


def rows_of(
    samples: Samples, kingdoms: NDArray[np.str_], is_called: NDArray[np.bool_]
) -> Iterator[tuple[str, ...]]:
    everything = np.ones(len(samples), dtype=np.bool_)
    is_prokaryotic = np.isin(kingdoms, PROKARYOTIC)
    yield row_of("all", samples, everything, everything, is_called)
    yield row_of("phages and prokaryotes", samples, is_prokaryotic, is_prokaryotic, is_called)
    for kingdom in SHARES:
        is_own = kingdoms == kingdom
        if is_own.any():
            is_opposite = samples.is_virus != samples.is_virus[is_own][0]
            yield row_of(kingdom, samples, is_own, is_own | is_opposite, is_called)


def row_of(
    name: str,
    samples: Samples,
    is_own: NDArray[np.bool_],
    is_inside: NDArray[np.bool_],
    is_called: NDArray[np.bool_],
) -> tuple[str, ...]:
    """The number of called own samples, and figures on a half viral mixture."""
    own = samples.select(is_own)
    inside = samples.select(is_inside)
    n_per_label = np.bincount(inside.is_virus, minlength=2)
    inside = replace(inside, weights=1 / n_per_label[inside.is_virus.astype(np.int64)])
    figures = inside.measure(is_called[is_inside])
    low, high = inside.bootstrap(is_called[is_inside], seed=0)
    cells = [name]
    for label in (True, False):
        has_label = own.is_virus == label
        n_groups = len(set(own.groups[has_label].tolist()))
        cells += map(str, (has_label.sum(), n_groups, is_called[is_own][has_label].sum()))
    values = (figures["auroc"], low["auroc"], high["auroc"], figures["calibration_error"])
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
            measure_parts(Path(manifest), Path(split), Path(scorer_file), parts)
        case _:
            raise SystemExit(__doc__)
