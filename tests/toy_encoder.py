"""An encoder as anyone could write one: a line in ``FAMILIES`` names this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from virnucpro.config import EncoderSpec
from virnucpro.encoders.base import Pending, Rows


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> CountingEncoder:
    return CountingEncoder(spec)


@dataclass(frozen=True)
class Counted:
    sequences: Sequence[str]

    def rows(self) -> Rows:
        counts = [[text.count(base) for base in "ACGT"] for text in self.sequences]
        return np.array(counts, dtype=np.float32)


@dataclass(frozen=True)
class CountingEncoder:
    """How often each base occurs: four numbers for each frame."""

    spec: EncoderSpec
    kernel = "count"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        return float(sum(lengths))

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return [[i] for i in range(len(lengths))]

    def start(self, sequences: Sequence[str]) -> Pending:
        return Counted(sequences)
