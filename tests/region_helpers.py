"""Sequences of hosts and phages, and the regions of a run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

import numpy as np
from conftest import random_dna

from virnucpro.core.types import reverse_complement
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.viral.hmm import RegionModel
from virnucpro.viral.provirus_features import HostBackground, Levels, WindowTable

MODEL = RegionModel(
    size=1000,
    step=500,
    host=HostBackground(gc=0.5, slope=-10.0, shape=(5.0, 1.0, 2.0), deviation=(0.3, 0.3, 1.0)),
    levels=Levels((-3.0,) * 25, 1.0),
    gc_weight=0.5,
    shape_weight=1.5,
    shape_bases=2_500,
    edges=(0.0, 2.0),
    log_ratios=(-1.0, 0.1, 1.0),
    genes=Levels((-2.0,) * 25, 0.3),
    gene_log_ratios=(-0.6, 0.1, 0.6),
    weight=0.35,
    deviation=1.8,
    distance=3.0,
    first_share=0.05,
    host_bases=40_000.0,
    virus_bases=8_000.0,
    training="a test",
)


def items_of(log_odds: np.ndarray, model: RegionModel = MODEL) -> WindowTable:
    """Return pieces with these log-odds. Everything else is as in a host."""
    starts = model.step * np.arange(len(log_odds))
    gc = np.full(len(log_odds), model.host.gc)
    shape = np.tile(model.host.shape, (len(log_odds), 1))
    return WindowTable(starts, log_odds, gc, shape, np.full(len(log_odds), np.nan))


# codons per thousand of E. coli K-12, rounded; the others count 3
USUAL = {
    **{"CTG": 52, "GCG": 33, "GGC": 29, "GAA": 39, "GAT": 32, "ATT": 30, "GTG": 26, "AAA": 33},
    **{"ACC": 23, "CAG": 28, "CCG": 23, "CGC": 22, "CGT": 21, "TTT": 22, "TTC": 16, "ATC": 25},
    **{"GGT": 24, "GCC": 25, "AAC": 21, "AAT": 17, "ATG": 27, "TAT": 16, "TAC": 12, "CAT": 13},
    **{"AGC": 16, "GAC": 19, "GAG": 17, "TGG": 15, "GCA": 20, "GCT": 15, "GTT": 18, "GTC": 15},
    **{"TCG": 9, "TCC": 9, "TCT": 8, "CAA": 15, "TTG": 13, "TTA": 13},
}
# more of those that proteins of membranes have: their random proteins look cellular, too
OFTEN = ("CTG", "ATT", "GTG", "GCG", "TTT", "GGC", "TTA", "TTG", "ATC", "GTT")
USUAL_IN_HOST = {**USUAL, **{codon: 1.6 * USUAL[codon] for codon in OFTEN}}
# those that make proteins like phage T4's
USUAL_IN_T4 = {
    **{"AAA": 67, "GAA": 63, "ATT": 52, "GAT": 50, "AAT": 40, "GGT": 38, "GTT": 33, "TAT": 32},
    **{"TTT": 32, "GCT": 32, "ACT": 30, "TTA": 26, "ATG": 26, "GCA": 25, "GTA": 24, "TCT": 22},
    **{"AAG": 20, "TCA": 20, "CAA": 20, "ACA": 20, "AAC": 17, "CTT": 16, "CGT": 16, "GAC": 16},
    **{"AGA": 15, "GAG": 14, "TGG": 14, "CCT": 14, "TTC": 14, "ATC": 12, "TAC": 12, "CCA": 10},
}


def host_dna(n_bases: int, rng: np.random.Generator) -> str:
    """Return genes of 300 codons as in E. coli, on both strands. They look cellular."""
    return genes_dna(n_bases, rng, 300, USUAL_IN_HOST, "TTAGTTAACTAACTTAG")


def phage_dna(n_bases: int, rng: np.random.Generator) -> str:
    """Return short genes as in T4. They look viral."""
    return genes_dna(n_bases, rng, 150, USUAL_IN_T4)


def genes_dna(
    n_bases: int,
    rng: np.random.Generator,
    n_codons: int,
    usual: Mapping[str, float],
    behind: str = "",
) -> str:
    stops = ("TAA", "TAG", "TGA")
    codons = [codon for codon in map("".join, product("ACGT", repeat=3)) if codon not in stops]
    weights = np.array([usual.get(codon, 3) for codon in codons], dtype=np.float64)
    n_genes = n_bases // (3 * n_codons) + 1
    drawn = rng.choice(codons, (n_genes, n_codons), p=weights / weights.sum())
    genes = []
    for row in drawn:
        gene = "ATG" + "".join(row) + "TAA"
        if rng.random() < 0.5:
            gene = reverse_complement(gene)
        genes.append(gene + behind + random_dna(40, rng))
    return "".join(genes)[:n_bases]


SENSE = [c for c, x in STANDARD.meanings.items() if x != "*"]
AT_RICH = [1 + 2 * sum(base in "AT" for base in codon) for codon in SENSE]


def gene(n_codons: int, seed: int, *, code: int = 11) -> str:
    """Return an open stretch of AT-rich codons. Synonyms replace reassigned codons."""
    rng = random.Random(seed)
    codons = rng.choices(SENSE, AT_RICH, k=n_codons)
    spelled = {
        same: codon for codon, same in GeneticCode.from_number(code).standard_synonyms.items()
    }
    return "".join(spelled.get(codon, codon) for codon in codons)
