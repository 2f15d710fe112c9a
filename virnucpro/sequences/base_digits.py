"""Map the byte of each base to a digit: A, C, G and T (or U) are 0 to 3, in either case."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _digit_by_byte() -> NDArray[np.uint8]:
    unknown = 4  # any letter but ACGTU
    digits = np.full(256, unknown, dtype=np.uint8)
    for digit, letters in enumerate(("Aa", "Cc", "Gg", "TtUu")):
        digits[list(letters.encode())] = digit
    return digits


BASE_DIGITS = _digit_by_byte()  # (256,)
