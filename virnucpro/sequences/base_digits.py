"""Map the byte of each base to a digit: A, C, G and T (or U) are 0 to 3, in either case."""

from __future__ import annotations

import numpy as np

N_TETRANUCLEOTIDES = 256
# any letter but ACGTU gets a digit so large that k-mers with it are never counted
BASE_DIGITS = np.full(256, N_TETRANUCLEOTIDES, dtype=np.uint16)
for _digit, _base in enumerate("ACGT"):
    BASE_DIGITS[[ord(_base), ord(_base.lower())]] = _digit
BASE_DIGITS[[ord("U"), ord("u")]] = BASE_DIGITS[ord("T")]
