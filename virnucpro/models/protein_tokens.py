"""Protein tokens in ESM-2 and ESM C: fair-esm's alphabet "ESM-1b"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.model_outputs import MASK_LETTER

CLS = 0
PAD = 1
EOS = 2
UNK = 3
MASK = 32
EXTRA_TOKENS = 2  # <cls> and <eos> per protein
RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO.-"  # tokens 4 to 30; token 31 is not a residue
_FIRST_RESIDUE = 4
AMINO_ACID_TOKENS = np.arange(_FIRST_RESIDUE, _FIRST_RESIDUE + 20)  # the 20 standard amino acids

_TOKEN_BY_BYTE = np.full(256, UNK, dtype=np.int64)
for _token, _letter in enumerate(RESIDUES, start=_FIRST_RESIDUE):
    _TOKEN_BY_BYTE[[ord(_letter), ord(_letter.lower())]] = _token
_TOKEN_BY_BYTE[[ord("<"), ord(">")]] = CLS, EOS
_TOKEN_BY_BYTE[ord(MASK_LETTER)] = MASK


def tokenize(proteins: list[str]) -> NDArray[np.int64]:
    """Tokenize proteins end to end, each as ``<cls> residues <eos>``.

    Lower case counts as upper case. A letter without a token (``J``, an inner ``*``) becomes
    ``<unk>``, and ``MASK_LETTER`` ``<mask>``. n proteins -> (n_residues + 2 n,)
    """
    text = "".join([f"<{protein}>" for protein in proteins]).encode("ascii", "replace")
    tokens: NDArray[np.int64] = _TOKEN_BY_BYTE[np.frombuffer(text, dtype=np.uint8)]
    return tokens
