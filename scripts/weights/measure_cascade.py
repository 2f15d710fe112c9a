"""Measure the trade-off of ``--embed``: embedded records against lost calls, on held-out groups.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv
    python scripts/weights/measure_cascade.py manifest.tsv [BASES] [FRAGMENTS]

Each group is in one of ten folds. A first classifier scores fragments of BASES (500) by codon
frequencies and other features. A second classifier also uses vectors of the built-in ESM-2. Both
are cross-validated. The encoder was pretrained on some of the sequences, without labels. FRAGMENTS
(2000) of each label are sampled, by group. The kingdoms of the manifest have the shares of the
scorer's training. All have the same share if the manifest names no such kingdom for a label.

For each row of the table, a share of the cells is embedded: those with the highest scores of the
first classifier. Viruses with such scores are embedded too, and all other fragments are called
"other". The second classifier calls the embedded fragments, with the threshold at which it calls 3
% of all cells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from feature_extraction import fragment_features
from sampling import Fragments, collect_records, sample_fragments
from scorer_calibration import N_FOLDS, assign_folds
from train_embedded_scorer import KINGDOM_SHARES

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

COLUMNS = ("requested share", "cells embedded", "viruses embedded", "viruses called", "lost calls")
EMBEDDED_SHARES = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
SEED = 1
CHUNK_BASES = 500
BATCH_TOKENS = 4096
RIDGE = 0.3  # regularization


def sampling_shares(records: Iterable[LabelledRecord]) -> Mapping[str, float]:
    """Return ``KINGDOM_SHARES``, or equal shares if they lack the kingdoms of a label."""
    kingdoms = {(record.is_virus, record.kingdom) for record in records}
    if len({is_virus for is_virus, kingdom in kingdoms if kingdom in KINGDOM_SHARES}) == 2:
        return KINGDOM_SHARES
    return dict.fromkeys((kingdom for _, kingdom in kingdoms), 1.0)


def embed_fragments(fragments: Fragments) -> FloatArray:
    """Return mean vectors of the open frames of fragments, and their numbers. -> (n, dim + 1)"""
    device = torch.device("cpu")
    use_device(device)
    model = open_model(TINY_MODEL, lambda _: None)
    model_fields = {"model": TINY_MODEL, "sha256": "", "layer": model.n_layers, "dim": model.dim}
    spec = EncoderSpec(**model_fields, pooling="mean", precision="fp32")  # type: ignore[arg-type]
    encoder = load_encoder(spec, embedded_model(), device)
    letters = np.frombuffer(b"ACGTN", dtype=np.uint8)[np.minimum(fragments.digits, 4)]
    records = [FastaRecord(str(i), "", row.tobytes().decode()) for i, row in enumerate(letters)]
    chunks = [chunk for record in records for chunk in Chunk.from_record(record, CHUNK_BASES)]
    orfs = translate_six_frames(chunks)
    owners = np.array([int(orf.record_id) for orf in orfs])
    proteins = [orf.protein for orf in orfs]
    sums = np.zeros((len(fragments), model.dim + 1))
    for rows in encoder.plan(list(map(len, proteins)), BATCH_TOKENS):
        vectors = encoder.start([proteins[i] for i in rows]).rows()
        np.add.at(sums, owners[rows], np.append(vectors, np.ones((len(rows), 1)), axis=1))
    sums[:, :-1] /= np.maximum(sums[:, -1:], 1)
    return sums


def cross_validated_scores(inputs: FloatArray, is_virus: BoolArray, folds: IntArray) -> FloatArray:
    """Score each row with a classifier fitted without its fold. -> (n,)

    The classifier is a kernel ridge regression of the label (Saunders et al. 1998), with a Gaussian
    kernel.
    """
    deviation = inputs.std(axis=0)
    rows = (inputs - inputs.mean(axis=0))[:, deviation > 0] / deviation[deviation > 0]
    squares = (rows**2).sum(axis=1)
    distances = squares[:, None] + squares - 2 * rows @ rows.T
    kernel = np.exp(-distances / rows.shape[1])
    target = np.where(is_virus, 1.0, -1.0)
    scores = np.full(len(rows), np.nan)
    for fold in range(N_FOLDS):
        is_training = folds != fold
        is_held_out = folds == fold
        regularized = kernel[np.ix_(is_training, is_training)] + RIDGE * np.eye(is_training.sum())
        scores[is_held_out] = kernel[np.ix_(is_held_out, is_training)] @ np.linalg.solve(
            regularized, target[is_training]
        )
    return scores


def cascade_curve(
    first: FloatArray, second: FloatArray, is_virus: BoolArray
) -> list[tuple[float, ...]]:
    """Return a row for each share of ``EMBEDDED_SHARES``, in the order of ``COLUMNS``."""
    is_called = second >= np.quantile(second[~is_virus], 1 - FALSE_POSITIVES["default"])
    rows: list[tuple[float, ...]] = []
    for share in EMBEDDED_SHARES:
        threshold = np.quantile(first[~is_virus], 1 - share) if share < 1 else -np.inf
        is_embedded = first >= threshold
        called = is_called & is_embedded & is_virus
        lost = (is_called & ~is_embedded & is_virus).sum() / (is_called & is_virus).sum()
        shares = (is_embedded[~is_virus].mean(), is_embedded[is_virus].mean())
        rows.append((share, *shares, called.sum() / is_virus.sum(), lost))
    return rows


def measure(manifest: Path, n_bases: int, n_fragments: int) -> None:
    collection = collect_records(read_records(read_data_manifest(manifest)))
    rng = np.random.default_rng([n_bases, SEED])
    shares = sampling_shares(collection.records)
    fragments = sample_fragments(collection, n_bases, n_fragments, shares, rng)
    records = [collection.records[record] for record in fragments.record]
    fold_of_group = assign_folds(collection.records)
    folds = np.array([fold_of_group[record.group] for record in records])
    is_virus = np.array([record.is_virus for record in records])
    features = fragment_features(fragments.digits, NO_KMERS).astype(np.float64)
    first = cross_validated_scores(features, is_virus, folds)
    with_vectors = np.append(features, embed_fragments(fragments), axis=1)
    second = cross_validated_scores(with_vectors, is_virus, folds)
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for row in cascade_curve(first, second, is_virus):
        sys.stdout.write("\t".join(f"{share:.1%}" for share in row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case [manifest, *numbers] if Path(manifest).is_file() and len(numbers) < 3:
            n_bases, n_fragments = (*map(int, numbers), *(500, 2000)[len(numbers) :])
            measure(Path(manifest), n_bases, n_fragments)
        case _:
            raise SystemExit(__doc__)
