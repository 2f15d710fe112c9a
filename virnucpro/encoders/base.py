"""The door of the encoders: what every model that makes vectors can do.

Its families are in ``families``. The door itself needs no torch; their code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from virnucpro.encoders.families import FAMILIES, Family, family_of, installed_families
from virnucpro.ground.config import EncoderSpec, Footprint, Pooling, Precision, Reads
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.log import printable

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
        """A name in ``FAMILIES``, or of an entry point."""

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
    def files(self) -> Sequence[Path]:
        """The files that `models import` copies, the weights first; none: it stays where it is."""

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

    def verify(self) -> str:
        """Read every number of it. -> the SHA-256 of the weights

        Raises:
            UnavailableError: it is damaged.
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


def recognise(path: Path, on_event: OnEvent) -> Model:
    """The model of a file or folder. Other packages are asked for what no family here takes.

    Raises:
        UnavailableError: it is of no family, or damaged.
    """
    try:
        for family in reversed(FAMILIES.values()):
            if model := _inspect(family, path, on_event):
                return model
        raise AssertionError("the first family takes or refuses what is left")
    except UnavailableError:
        for family in installed_families().values():
            if model := _inspect(family, path, on_event):
                return model
        raise


def _inspect(family: Family, path: Path, on_event: OnEvent) -> Model | None:
    model: Model | None = family.code.inspect(path, on_event) if family.has_files else None
    return model


def describe_layers(model: Model, spec: EncoderSpec, of: str = "") -> str:
    """A language model and the choices for its vectors. ``of``: what is pooled, if not residues."""
    return (
        f"{model.n_layers} layers, {model.dim} dimensions, "
        f"{model.footprint.n_parameters / 1e6:.1f} M parameters; layer {spec.layer}, "
        f"{spec.pooling} pooling{of}, {spec.precision}"
    )


def not_published(path: Path, name: str, why: object) -> UnavailableError:
    """The error for other weights under the name of a published model."""
    return UnavailableError(
        f"{printable(path)} is not the published {name}: {why}",
        hint="delete it to fetch it again; name a model of your own by its path, "
        "or give it a name with `virnucpro models import PATH --name NAME`",
    )


def progress_of(stage: str, n_bytes: int, on_event: OnEvent) -> Callable[[int], None]:
    """What hears of the bytes of a model that are done, and tells the user."""
    return lambda done: on_event(Progress(stage, done, n_bytes, "bytes"))


def load_encoder(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """The encoder of a recipe, on a device.

    Raises:
        UnavailableError: the weights cannot be used, or the package of its family is not here.
    """
    encoder: Encoder = family_of(spec.family).code.load(spec, weights, device)
    return encoder


def estimate_tokens(encoders: Iterable[EncoderSpec], n_sequences: int, n_residues: int) -> int:
    """The number of tokens that these encoders see of so many frames or proteins."""
    total = 0.0
    for spec in encoders:
        family = family_of(spec.family)
        n_letters = 3 * n_residues if family.reads == "dna" else n_residues
        total += n_letters / family.letters_per_token + family.extra_tokens * n_sequences
    return round(total)
