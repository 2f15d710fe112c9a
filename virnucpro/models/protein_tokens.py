"""Protein tokens in ESM-2 and ESM C: fair-esm's alphabet "ESM-1b"."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.model_outputs import MASK_LETTER


class SpecialToken(IntEnum):
    """Tokens that do not stand for a letter of a protein."""

    CLS = 0
    PAD = 1
    EOS = 2
    UNK = 3
    MASK = 32


EXTRA_TOKENS = 2  # <cls> and <eos> per protein
RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO.-"  # tokens 4 to 30; token 31 is not a residue
_FIRST_RESIDUE = 4
AMINO_ACID_TOKENS = np.arange(_FIRST_RESIDUE, _FIRST_RESIDUE + 20)  # the 20 standard amino acids


def _build_token_table() -> NDArray[np.int64]:
    """Return the token of each byte of the text ``<residues>``. -> (256,)"""
    tokens = np.full(256, SpecialToken.UNK, dtype=np.int64)
    for token, letter in enumerate(RESIDUES, start=_FIRST_RESIDUE):
        tokens[[ord(letter), ord(letter.lower())]] = token
    tokens[ord("<")] = SpecialToken.CLS
    tokens[ord(">")] = SpecialToken.EOS
    tokens[ord(MASK_LETTER)] = SpecialToken.MASK
    return tokens


_TOKEN_BY_BYTE = _build_token_table()


def tokenize(proteins: list[str]) -> NDArray[np.int64]:
    """Tokenize proteins end to end, each as ``<cls> residues <eos>``.

    Lower case counts as upper case. A letter without a token (``J``, an inner ``*``) becomes
    ``<unk>``, and ``MASK_LETTER`` ``<mask>``. n proteins -> (n_residues + 2 n,)
    """
    text = "".join([f"<{protein}>" for protein in proteins]).encode("ascii", "replace")
    tokens: NDArray[np.int64] = _TOKEN_BY_BYTE[np.frombuffer(text, dtype=np.uint8)]
    return tokens
