"""Measure what ``--embed`` saves and loses: cost against lost calls, on unseen groups.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv
    python scripts/weights/measure_cascade.py manifest.tsv [BASES] [FRAGMENTS]

Each group is in one of ten folds. A first reader scores fragments of BASES (500) by their codons
and other figures. A second reader also uses vectors of the embedded ESM-2. Both are fitted without
the fold that they score, so they have not seen its groups. The encoder has seen some of the
sequences, without labels. FRAGMENTS (2000) of each label are drawn, by group. The kingdoms of the
manifest have the shares of the package's own training; all have the same share if it names no such
kingdom for a label.

For each row of the table, a share of the cells is embedded: those that the first reader scores
highest. Viruses with such scores are embedded too, and all other fragments are called "other". The
second reader calls the embedded fragments, with the cut at which it calls 3 % of all cells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from reading import fragment_features
from sampling import Fragments, collect, draw
from scorer_folds import N_FOLDS, group_folds
from train_embedded_scorer import SHARES

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import FastaRecord
from virnucpro.models.base import load_encoder
from virnucpro.models.lookup import embedded_model, open_model
from virnucpro.models.names import TINY_MODEL
from virnucpro.models.packing import use_device
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.training.labelled_data import LabelledRecord, read_data_manifest, read_records
from virnucpro.viral.features import NO_KMERS
from virnucpro.viral.options import FALSE_POSITIVES

COLUMNS = ("cells asked for", "cells embedded", "viruses embedded", "viruses called", "lost calls")
ASKED = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
SEED = 1
CHUNK = 500  # bases
TOKENS = 4096  # per batch
RIDGE = 0.3


def shares_of(records: Iterable[LabelledRecord]) -> Mapping[str, float]:
    """The share of each kingdom; equal ones if no kingdom of a label is in ``SHARES``."""
    kingdoms = {(record.is_virus, record.kingdom) for record in records}
    if len({is_virus for is_virus, kingdom in kingdoms if kingdom in SHARES}) == 2:
        return SHARES
    return dict.fromkeys((kingdom for _, kingdom in kingdoms), 1.0)


def vectors_of(fragments: Fragments) -> FloatArray:
    """The mean vector of each fragment's open frames, and their number. -> (n, dim + 1)"""
    device = torch.device("cpu")
    use_device(device)
    model = open_model(TINY_MODEL, lambda _: None)
    facts = {"model": TINY_MODEL, "sha256": "", "layer": model.n_layers, "dim": model.dim}
    spec = EncoderSpec(**facts, pooling="mean", precision="fp32")  # type: ignore[arg-type]
    encoder = load_encoder(spec, embedded_model(), device)
    letters = np.frombuffer(b"ACGTN", dtype=np.uint8)[np.minimum(fragments.digits, 4)]
    records = [FastaRecord(str(i), "", row.tobytes().decode()) for i, row in enumerate(letters)]
    chunks = [chunk for record in records for chunk in Chunk.from_record(record, CHUNK)]
    orfs = translate_six_frames(chunks)
    owners = np.array([int(orf.record_id) for orf in orfs])
    proteins = [orf.protein for orf in orfs]
    sums = np.zeros((len(fragments), model.dim + 1))
    for rows in encoder.plan(list(map(len, proteins)), TOKENS):
        vectors = encoder.start([proteins[i] for i in rows]).rows()
        np.add.at(sums, owners[rows], np.append(vectors, np.ones((len(rows), 1)), axis=1))
    sums[:, :-1] /= np.maximum(sums[:, -1:], 1)
    return sums


def unseen_scores(inputs: FloatArray, is_virus: BoolArray, folds: IntArray) -> FloatArray:
    """The score of each row, by a reader that was fitted without its fold. -> (n,)

    The reader is a kernel ridge regression of the label (Saunders et al. 1998) with Gaussians.
    """
    spread = inputs.std(axis=0)
    rows = (inputs - inputs.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    squares = (rows**2).sum(axis=1)
    distances = squares[:, None] + squares - 2 * rows @ rows.T
    likeness = np.exp(-distances / rows.shape[1])
    target = np.where(is_virus, 1.0, -1.0)
    scores = np.full(len(rows), np.nan)
    for fold in range(N_FOLDS):
        known = folds != fold
        unseen = folds == fold
        inside = likeness[np.ix_(known, known)] + RIDGE * np.eye(known.sum())
        scores[unseen] = likeness[np.ix_(unseen, known)] @ np.linalg.solve(inside, target[known])
    return scores


def curve(first: FloatArray, second: FloatArray, is_virus: BoolArray) -> list[tuple[float, ...]]:
    """A row for each share of ``ASKED``, in the order of ``COLUMNS``."""
    is_called = second >= np.quantile(second[~is_virus], 1 - FALSE_POSITIVES["default"])
    rows: list[tuple[float, ...]] = []
    for share in ASKED:
        bound = np.quantile(first[~is_virus], 1 - share) if share < 1 else -np.inf
        is_embedded = first >= bound
        called = is_called & is_embedded & is_virus
        lost = (is_called & ~is_embedded & is_virus).sum() / (is_called & is_virus).sum()
        shares = (is_embedded[~is_virus].mean(), is_embedded[is_virus].mean())
        rows.append((share, *shares, called.sum() / is_virus.sum(), lost))
    return rows


def measure(manifest: Path, n_bases: int, n_fragments: int) -> None:
    collection = collect(read_records(read_data_manifest(manifest)))
    rng = np.random.default_rng([n_bases, SEED])
    shares = shares_of(collection.records)
    fragments = draw(collection, n_bases, n_fragments, shares, rng)
    records = [collection.records[record] for record in fragments.record]
    fold_of_group = group_folds(collection.records)
    folds = np.array([fold_of_group[record.group] for record in records])
    is_virus = np.array([record.is_virus for record in records])
    figures = fragment_features(fragments.digits, NO_KMERS).astype(np.float64)
    first = unseen_scores(figures, is_virus, folds)
    both = np.append(figures, vectors_of(fragments), axis=1)
    second = unseen_scores(both, is_virus, folds)
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for row in curve(first, second, is_virus):
        sys.stdout.write("\t".join(f"{share:.1%}" for share in row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case [manifest, *numbers] if Path(manifest).is_file() and len(numbers) < 3:
            n_bases, n_fragments = (*map(int, numbers), *(500, 2000)[len(numbers) :])
            measure(Path(manifest), n_bases, n_fragments)
        case _:
            raise SystemExit(__doc__)
