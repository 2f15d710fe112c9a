"""The door of the encoders: what every model that makes vectors can do, and the families.

A family is a module and a line in ``FAMILIES``. The module has ``load(spec, weights, device)``,
and, if models of the family are named by their files, ``inspect(path, on_event)``: a ``Model``, or
None if the path is of another family. The door itself needs no torch; families do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import EncoderSpec, Footprint, Pooling, Precision, Reads
from virnucpro.ground.events import OnEvent

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.float32]


class Model(Protocol):
    """A model on disk, inspected but not loaded."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def family(self) -> str:
        """A name in ``FAMILIES``."""

    @property
    def reads(self) -> Reads: ...

    @property
    def encoder_id(self) -> str:
        """Hash of the weights, by which a head names its encoder."""

    @property
    def n_layers(self) -> int:
        """Number of layers; ``--layer`` is 1 to this."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def width(self) -> str:
        """The dimensions for messages, with the heads where there are some."""

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """Supported values of ``--pooling``."""

    @property
    def footprint(self) -> Footprint: ...

    @property
    def head(self) -> Path | None:
        """The head that comes with the model, if any."""

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        """Its own precision on a kind of device ("cuda", "cpu"), in a run in ``precision``."""

    def describe(self, spec: EncoderSpec) -> str:
        """The model and the choices for its vectors, for the announcement."""

    def prepare(
        self, precision: Precision, folder: Path | None, on_event: OnEvent
    ) -> tuple[Path, str]:
        """The file or folder that ``load`` is given, and the SHA-256 of the weights.

        A converted model is kept in ``folder``; None is the default folder.

        Raises:
            UnavailableError: it is not the model that its name says.
        """


class Pending(Protocol):
    """A batch that the device works on."""

    @property
    def n_repeated(self) -> int:
        """Sequences that the precision could not hold, and float32 did; complete with the rows."""

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
    has_files: bool = False  # True if its module has ``inspect``


FAMILIES = {
    "esm2": Family("virnucpro.encoders.esm2.encoder", reads="protein"),
    "fair-esm": Family("virnucpro.encoders.fair_esm", reads="protein"),
    "learned": Family("virnucpro.encoders.learned.encoder", reads="protein", has_files=True),
    "dnabert-s": Family(
        "virnucpro.encoders.dnabert_s.encoder", reads="dna", letters_per_token=4.6, has_files=True
    ),
    "composition": Family("virnucpro.encoders.composition", reads="dna", extra_tokens=0),
}


def recognise(path: Path, on_event: OnEvent) -> Model | None:
    """The model of a file or folder, if a family recognises it as its own.

    Raises:
        UnavailableError: it is recognised, and damaged.
    """
    for family in FAMILIES.values():
        if family.has_files:
            model: Model | None = import_module(family.module).inspect(path, on_event)
            if model is not None:
                return model
    return None


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
