"""Pack columns of texts and numbers for the script of a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from virnucpro.core.logging import printable
from virnucpro.core.numeric import FloatArray


def join_lines(texts: Sequence[str]) -> str:
    """Join texts, made ``printable``, with line breaks."""
    # ``printable`` leaves texts of this length unchanged, unless they contain control characters.
    safe_letters = 200
    joined = "".join(texts)
    is_safe = joined.isprintable() and max(map(len, texts), default=0) <= safe_letters
    return "\n".join(texts if is_safe else map(printable, texts))


def scale(values: Sequence[float] | FloatArray, scale: int) -> list[int | None]:
    """Round to integers. NaN becomes None."""
    scaled = np.rint(np.array(values, np.float64) * scale)
    is_known = ~np.isnan(scaled)
    integers: list[int] = np.where(is_known, scaled, 0).astype(np.int64).tolist()
    if is_known.all():
        return [*integers]
    return [n if is_set else None for n, is_set in zip(integers, is_known.tolist(), strict=True)]
