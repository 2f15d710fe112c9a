"""The encoder without a model: an empty vector for each frame, so that a head sees bases alone.

A head takes the composition of the bases, which it reads beside the vector, from the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from virnucpro.encoders.base import Pending
from virnucpro.encoders.transfer import Arrived
from virnucpro.ground.config import EncoderSpec


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> EmptyEncoder:
    """The encoder; no weights are read."""
    return EmptyEncoder(spec)


@dataclass(frozen=True, slots=True)
class EmptyEncoder:
    """An encoder of empty vectors; see ``base.Encoder``."""

    spec: EncoderSpec

    @property
    def kernel(self) -> str:
        return "none"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        return 0.0

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return [list(range(len(lengths)))] if lengths else []

    def start(self, sequences: Sequence[str]) -> Pending:
        return Arrived(np.empty((len(sequences), 0), dtype=np.float32))
