"""Make the scorer that comes with VirNucPro, virnucpro/embedded/scorer.safetensors.

    python examples/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv
    python examples/train_embedded_scorer.py manifest.tsv examples/scorer_split.tsv OUT \
        train validation test

The groups of the parts that are named train it, and say in folds how it is to be calibrated.
Seeds are fixed: the same data makes the same file on the same machine.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import torch

from virnucpro.scorer.features import GC, fragment_features
from virnucpro.scorer.nets import Knot, PieceNets, Scorer, save_scorer
from virnucpro.training import made
from virnucpro.training.labelled import read_manifest
from virnucpro.training.piece_nets import Fitting, Lessons, Range, fit_piece_nets
from virnucpro.training.sampling import (
    Collection,
    draw,
    gc_matched_weights,
    read_collection,
)
from virnucpro.training.scorer_folds import N_FOLDS, fit_knot, group_folds, held_out_log_odds

SHARES = {
    "phages": 0.35,
    "archaeal viruses": 0.05,
    "RNA+ viruses": 0.20,
    "RNA- viruses": 0.13,
    "dsRNA viruses": 0.10,
    "dsDNA viruses of eukaryotes": 0.07,
    "ssDNA viruses of eukaryotes": 0.07,
    "reverse-transcribing viruses": 0.03,
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
}
RANGES = (Range(150, 150, 300), Range(300, 300, 500), Range(500, 500), Range(1000, 1000))
N_SEEDS = 3
N_FRAGMENTS = 20_000  # of each label, for each seed and size
N_MADE = 500  # of each kind, for each seed and size
MADE_WEIGHT = 2.0
KNOTS = {150: 4000, 300: 4000, 500: 4000, 1000: 4000, 3000: 2000, 10_000: 1500}


def lessons(collection: Collection, size: int, seed: int) -> Lessons:
    """Fragments of the collection, and made ones that are no virus."""
    rng = np.random.default_rng([size, seed])
    fragments = draw(collection, size, N_FRAGMENTS, SHARES, rng)
    is_virus = np.array([collection.records[record].is_virus for record in fragments.record])
    features = fragment_features(fragments.digits)
    gc = features[:, GC].astype(np.float64)
    cells = fragments.digits[~is_virus]
    invented = np.stack(
        [
            made.make(kind, size, cells[rng.integers(len(cells))], rng)
            for kind in made.KINDS
            for _ in range(N_MADE)
        ]
    )
    return Lessons(
        np.concatenate([features, fragment_features(invented)]),
        np.append(is_virus, np.zeros(len(invented), dtype=np.bool_)),
        np.append(gc_matched_weights(gc, is_virus), np.full(len(invented), MADE_WEIGHT)),
    )


def fit(collection: Collection, n_seeds: int) -> list[PieceNets]:
    return [
        fit_piece_nets(
            of_size,
            [lessons(collection, of_size.size, seed) for seed in range(n_seeds)],
            Fitting(),
        )
        for of_size in RANGES
    ]


def calibrate(collection: Collection) -> list[Knot]:
    """Knots from group folds, each with the nets of one seed."""
    fold_of_group = group_folds(collection.records)
    fold_of_record = np.array([fold_of_group[record.group] for record in collection.records])
    nets = {}
    for fold in range(N_FOLDS):
        nets[fold] = fit(collection.where(fold_of_record != fold), 1)
        print(f"fold {fold + 1} of {N_FOLDS}", file=sys.stderr, flush=True)
    knots = []
    for n_bases, n_fragments in KNOTS.items():
        rng = np.random.default_rng([n_bases, N_SEEDS])
        fragments = draw(collection, n_bases, n_fragments, SHARES, rng)
        is_virus = np.array([collection.records[record].is_virus for record in fragments.record])
        log_odds = held_out_log_odds(fragments, fold_of_record, nets)
        is_known = ~np.isnan(log_odds)  # a window may hold unknown bases alone
        knots.append(fit_knot(n_bases, log_odds[is_known], is_virus[is_known]))
    return knots


def main(manifest: Path, split: Path, out: Path, parts: list[str]) -> None:
    torch.set_num_threads(1)
    with split.open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        part_of = {row["group"]: row["part"] for row in rows}
    records = [row for row in read_manifest(manifest) if part_of[row.group] in parts]
    collection = read_collection(records)
    training = f"{len(records):,} records of {len({row.group for row in records}):,} groups"
    pieces = tuple(fit(collection, N_SEEDS))
    save_scorer(out, Scorer(pieces, (Knot(1000, 1.0, 0.0),), f"{training}, not calibrated"))
    save_scorer(out, Scorer(pieces, tuple(calibrate(collection)), training))


if __name__ == "__main__":
    if len(sys.argv) < 5:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
