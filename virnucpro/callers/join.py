"""The join of a head with the scorer: weights of their log-odds by length, and error rates.

The scorer's log-odds of a record are there for every call; a head says what its frames add. The
weights are fitted to groups that the head was not trained on. A weight of 0 says that the head
adds nothing at that length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from virnucpro.ground.numeric import Counts, Values
from virnucpro.scorer.nets import ErrorRates, at_lengths


@dataclass(frozen=True, slots=True)
class JoinKnot:
    """The weights at one length: log-odds are base * scorer's + head * head's + offset."""

    n_bases: int
    base: float
    head: float
    offset: float

    def __post_init__(self) -> None:
        is_finite = isfinite(self.base + self.head + self.offset)
        if self.n_bases < 1 or not is_finite or min(self.base, self.head) < 0:
            raise ValueError(f"weights of {self}")


@dataclass(frozen=True, slots=True)
class Join:
    """Weights and error rates, each rising in length, and the scorer that they were fitted with."""

    scorer_sha256: str
    knots: tuple[JoinKnot, ...]
    error_rates: tuple[ErrorRates, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.scorer_sha256, str):
            raise TypeError("a scorer is named by its hash")
        for at in (self.knots, self.error_rates):
            lengths = [one.n_bases for one in at]
            if not lengths or lengths != sorted(set(lengths)):
                raise ValueError(f"a join at {lengths} bases")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Join:
        """
        Raises:
            LookupError, TypeError, ValueError: these are not the facts of a join.
        """
        return cls(
            facts["scorer_sha256"],
            tuple(JoinKnot(**knot) for knot in facts["knots"]),
            tuple(ErrorRates.of(rates) for rates in facts["error_rates"]),
        )


def join_log_odds(knots: Sequence[JoinKnot], base: Values, head: Values, lengths: Counts) -> Values:
    """The joined log-odds of records. (n,) each -> (n,)

    ``base`` is the scorer's, calibrated; ``head`` the mean over a record's chunks; NaN where
    either says nothing, and so is the result. Weights and offset lie on lines between the knots,
    over the logarithm of the length.
    """
    of_base, of_head, offset = (
        at_lengths(lengths, knots, [getattr(knot, name) for knot in knots])
        for name in ("base", "head", "offset")
    )
    return np.asarray(of_base * base + of_head * head + offset)
