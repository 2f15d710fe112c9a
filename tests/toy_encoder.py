"""An encoder as a third party could write it. A line in ``FAMILIES`` or an entry point adds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.events import EventHandler
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint
from virnucpro.models.base import Model, Pending, not_published
from virnucpro.models.registry import Published

MAGIC = b"counts of bases\n"  # the file of such an encoder
ROOM = Footprint(n_parameters=0, file_bytes=len(MAGIC), bytes_per_token=1, filling_tokens=4096)


def inspect(path: Path, on_event: EventHandler) -> CountingModel | None:
    if not path.is_file() or path.read_bytes() != MAGIC:
        return None
    return CountingModel(
        path=path,
        name="counts",
        family="toy",
        reads=Alphabet.DNA,
        encoder_id=hash_file(path),
        n_layers=1,
        dim=4,
        poolings=("mean",),
        footprint=ROOM,
        files=[path],
    )


def footprint_of(published: Published) -> Footprint:
    return ROOM


def open_published(name: str, published: Published, path: Path) -> CountingModel:
    model = inspect(path, lambda _: None)
    if model is None:
        raise not_published(path, name, "it holds no counts")
    return model


class CountingModel(Model):
    """The model file, inspected but not loaded."""

    def describe(self, spec: EncoderSpec) -> str:
        return "four counts"


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> CountingEncoder:
    return CountingEncoder(spec)


@dataclass(frozen=True)
class CountingEncoder:
    """Counts each base: four numbers for each frame."""

    spec: EncoderSpec
    kernel = "count"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        return float(sum(lengths))

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return [[i] for i in range(len(lengths))]

    def start(self, sequences: Sequence[str]) -> Pending:
        counts = [[text.count(base) for base in "ACGT"] for text in sequences]
        return Pending(lambda: np.array(counts, dtype=np.float32))
