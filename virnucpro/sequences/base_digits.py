"""Map the byte of each base to a digit: A, C, G and T (or U) are 0 to 3, in either case."""

from __future__ import annotations

import numpy as np

UNKNOWN_DIGIT = 4  # of any letter but ACGTU
BASE_DIGITS = np.full(256, UNKNOWN_DIGIT, dtype=np.uint8)
for _digit, _base in enumerate("ACGT"):
    BASE_DIGITS[[ord(_base), ord(_base.lower())]] = _digit
BASE_DIGITS[[ord("U"), ord("u")]] = BASE_DIGITS[ord("T")]
