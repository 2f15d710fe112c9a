"""Features of pieces: how the stop-free stretches are spelled, and plain figures of the whole.

A piece has 1,229 features in seven blocks: codons of its longest stretch and of all long ones; the
junctions of codons of the long ones, which are the four bases around where one follows another;
pairs of neighbouring residues of the longest, all of them as square roots of their shares; its
palindromes; plain figures; how many of its words other groups have; and the codons again as log
ratios to what the GC of the piece lets expect. A long piece can be read as parts: it has the mean
of their features, and 12 more, of how the gene-like stretches lie in all of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.numeric import Values
from virnucpro.scorer.library import call
from virnucpro.scorer.pieces import N_CODES, Digits, Pieces, code_of, is_stop
from virnucpro.scorer.words import N_WORD_FIGURES, RESIDUE_OF_CODE, WordTable
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode, standard_synonyms

N_CODONS, N_PAIRS, N_FIGURES = 64, 400, 36
N_JUNCTION_WORDS = 4**4
N_JUNCTIONS = 2 * N_JUNCTION_WORDS
N_PALINDROMES = 4**2 + 3  # each of four bases, and all of two, four and six
N_LAYOUT = 12
N_FEATURES = 4 * N_CODONS + N_JUNCTIONS + N_PAIRS + N_PALINDROMES + N_FIGURES + N_WORD_FIGURES
SHARES = slice(0, -2 * N_CODONS)  # codons by shares, and all else
RATIOS = slice(2 * N_CODONS, None)  # all else, and codons by ratios
GC = 2 * N_CODONS + N_JUNCTIONS + N_PAIRS + N_PALINDROMES  # the column of the first figure
FIGURES = slice(GC, GC + N_FIGURES)
GENE_LIKE = 30  # codons of a stretch that may be a gene

Features = NDArray[np.float32]


def library_input(
    pieces: Pieces, words: WordTable, code: GeneticCode
) -> tuple[NDArray[Any] | int, ...]:
    """What functions of the library take to read pieces."""
    owners = pieces.owners(code, words)
    return *pieces.arguments(code), _tables_of(code), *words.arguments, owners


@cache
def _tables_of(code: GeneticCode) -> Digits:
    """Of each codon: whether it is a stop, what it counts as, and its residue. (3, 125)"""
    synonyms = np.arange(N_CODES, dtype=np.uint8)
    for codon, synonym in standard_synonyms(code).items():
        synonyms[code_of(codon)] = code_of(synonym)
    return np.stack([is_stop(code), synonyms, RESIDUE_OF_CODE])


def layout_features(pieces: Pieces, code: GeneticCode = STANDARD) -> Values:
    """How the gene-like stretches of each piece lie: -> (n, 12)

    How many there are per kilobase and what they cover; the logarithms of their median, mean and
    longest length and of the mean over what they cover; the first two again for those as long as
    a gene, with how often these change the strand and the share of the commoner one; and how many
    of the gaps between gene-like neighbours are short, and the mean gap in kilobases.
    """
    layout = np.empty((len(pieces), N_LAYOUT))
    call("layout_features", *pieces.arguments(code), layout)
    return layout
