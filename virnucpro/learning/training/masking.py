"""The masked-language task of ESM-2 (Lin et al. 2023, after Devlin et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from virnucpro.encoders.esm2.alphabet import MASK, RESIDUES, tokenize
from virnucpro.encoders.esm2.packing import PackedBatch

MASKED, OF_MASKED, OF_RANDOM = 0.15, 0.8, 0.1  # the rest of the chosen ones stays as it is
STANDARD = tokenize([RESIDUES[:20]])[1:-1]  # the tokens of the 20 amino acids


def mask_residues(
    batch: PackedBatch, draws: Iterable[np.random.Generator]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose 15 % of the residues; of these 80 % are masked and 10 % replaced at random.

    -> the tokens to read, (n_tokens,), and the places of those to be told, (n_chosen,). Every
    protein has its own generator, so that its mask does not depend on its batch, and at least
    one chosen residue.
    """
    tokens, places = batch.tokens.copy(), []
    for rng, (begin, end) in zip(draws, pairwise(batch.cu_seqlens.tolist()), strict=True):
        n_residues = end - begin - 2
        order = rng.permutation(n_residues)[: max(1, round(MASKED * n_residues))]
        places.append(chosen := begin + 1 + order)
        what = rng.random(len(chosen))
        tokens[chosen[what < OF_MASKED]] = MASK
        swapped = chosen[(what >= OF_MASKED) & (what < OF_MASKED + OF_RANDOM)]
        tokens[swapped] = rng.choice(STANDARD, len(swapped))
    return tokens, np.concatenate(places)
