"""The door of the encoders: what every model that makes vectors can do, and the families.

A family is a module with ``load(spec, weights, device)``, and a line in ``FAMILIES``. It is
imported when one of its encoders is loaded, and not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.config import EncoderSpec, Reads

Rows = NDArray[np.float32]


class Pending(Protocol):
    """A batch that the device works on."""

    def rows(self) -> Rows:
        """Wait for its vectors: (n, dim), or (sum of lengths, dim) where nothing is pooled."""


class Encoder(Protocol):
    """A model that turns sequences into one vector each, on one device."""

    spec: EncoderSpec

    @property
    def kernel(self) -> str:
        """Name of the attention kernel, for messages."""

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """Number of tokens in a batch of sequences of these lengths."""

    def count_flop(self, lengths: Sequence[int]) -> float:
        """Number of floating point operations that such a batch takes."""

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        """Group the indices of ``lengths`` into batches. Every index occurs once.

        A sequence that is longer than a batch may be gets one of its own.
        """

    def start(self, sequences: Sequence[str]) -> Pending:
        """Begin a batch; a GPU may still be at the one before.

        Raises:
            torch.OutOfMemoryError: the batch is too large for the device.
        """


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of encoder, as far as it is known without loading one."""

    module: str  # has ``load(spec, weights, device) -> Encoder``
    reads: Reads
    letters_per_token: float = 1.0
    extra_tokens: int = 2  # tokens added to each sequence


FAMILIES = {
    "esm2": Family("virnucpro.encoders.esm2.encoder", reads="protein"),
    "fair-esm": Family("virnucpro.encoders.fair_esm", reads="protein"),
    "learned": Family("virnucpro.encoders.learned.encoder", reads="protein"),
    "composition": Family("virnucpro.encoders.composition", reads="dna", extra_tokens=0),
}


def load_encoder(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """The encoder of a recipe, on a device.

    Raises:
        UnavailableError: the weights cannot be used.
    """
    encoder: Encoder = import_module(FAMILIES[spec.family].module).load(spec, weights, device)
    return encoder


def estimate_tokens(encoders: Iterable[EncoderSpec], n_sequences: int, n_residues: int) -> int:
    """The number of tokens that these encoders see of so many frames or proteins."""
    total = 0.0
    for spec in encoders:
        family = FAMILIES[spec.family]
        n_letters = 3 * n_residues if family.reads == "dna" else n_residues
        total += n_letters / family.letters_per_token + family.extra_tokens * n_sequences
    return round(total)


class HostCopy:
    """Copy of results from a device to the host: on a GPU, beside the next batch's work."""

    def __init__(self, device: torch.device) -> None:
        self.copying: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, results: Tensor) -> Pending:
        """Begin to copy float32 rows, into pinned memory."""
        if self.copying is None:
            return _Arrived(results.cpu().numpy())
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        self.copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copying):
            host.copy_(results, non_blocking=True)
            copied = self.copying.record_event()
        results.record_stream(self.copying)
        return _Arriving(host, copied)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    array: Rows

    def rows(self) -> Rows:
        return self.array


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    host: Tensor  # pinned
    copied: torch.cuda.Event

    def rows(self) -> Rows:
        self.copied.synchronize()
        array: Rows = self.host.numpy()
        return array
