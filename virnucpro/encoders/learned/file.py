"""The file of a learned encoder: a safetensors file that ``train`` writes beside the head.

It holds the weights of the network over the residues; its facts, in JSON, are the one entry of
its metadata. The ESM-2 below it is not in the file, which names a checkpoint
beside the file, or where it was when the encoder was trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from virnucpro.config import Reads
from virnucpro.encoders.esm2.model import ESM2Shape
from virnucpro.encoders.esm2.weights import Checkpoint, inspect_checkpoint
from virnucpro.encoders.models import find_checkpoint
from virnucpro.errors import UnavailableError
from virnucpro.files import atomic, sha256
from virnucpro.log import printable
from virnucpro.options import Architecture, Encoding
from virnucpro.records import check_counts

ENCODER_FILE = "encoder.safetensors"
LEARNED, COMPOSITION = "learned", "composition"  # families
_FACTS = "virnucpro_encoder"  # entry of the metadata
_DAMAGE = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
_SMALL = ESM2Shape(n_layers=1, dim=128, n_heads=1)  # networks over residues take no more memory

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The ESM-2 that a network reads residues through."""

    model: str  # a name, or a path
    encoder_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedFacts:
    """The facts of a learned encoder, beside its weights."""

    encoding: Encoding
    architecture: Architecture
    dim: int  # length of a vector
    base: Base | None = None

    def __post_init__(self) -> None:
        check_counts(self.dim)
        if self.encoding not in get_args(Encoding) or self.architecture not in get_args(
            Architecture
        ):
            raise ValueError(f"{self.encoding!a} read by {self.architecture!a}")
        if (self.base is not None) != (self.encoding == "esm2"):
            raise ValueError(f"{self.encoding} with the checkpoint {self.base}")


@dataclass(frozen=True, slots=True)
class LearnedCheckpoint:
    """A learned encoder on disk, inspected but not loaded. See ``Checkpoint`` of an ESM-2."""

    path: Path
    facts: LearnedFacts
    encoder_id: str  # the hash of the file
    base: Checkpoint | None

    @property
    def name(self) -> str:
        return f"{self.facts.encoding}-{self.facts.architecture}"

    @property
    def family(self) -> str:
        return COMPOSITION if self.facts.encoding == "composition" else LEARNED

    @property
    def reads(self) -> Reads:
        return "dna" if self.family == COMPOSITION else "protein"

    @property
    def dim(self) -> int:
        return self.facts.dim

    @property
    def n_layers(self) -> int:
        return 1

    @property
    def shape(self) -> ESM2Shape:
        """The shape by which memory and batches are sized."""
        return self.base.shape if self.base is not None else _SMALL

    @property
    def n_bytes(self) -> int:
        return self.path.stat().st_size

    def sha256(self, on_bytes: Callable[[int], None] = lambda _: None) -> str:
        return sha256(self.path, on_bytes)


def save_learned(path: Path, facts: LearnedFacts, weights: Weights) -> None:
    """Write the file of an encoder; the same bytes for the same weights."""
    content = {name: np.ascontiguousarray(values) for name, values in weights.items()}
    metadata = {_FACTS: json.dumps(asdict(facts), sort_keys=True)}
    with atomic(path) as temporary:
        temporary.write_bytes(save(content, metadata=metadata))


def is_learned(path: Path) -> bool:
    """True for a file whose metadata say that it is a learned encoder."""
    try:
        with safe_open(path, framework="np") as handle:
            return _FACTS in (handle.metadata() or {})
    except (OSError, SafetensorError):
        return False


def inspect_learned(path: Path) -> LearnedCheckpoint:
    """
    Raises:
        UnavailableError: the file is damaged, or its base is not to be found.
    """
    facts = read_facts(path)
    base = _find_base(path, facts.base) if facts.base is not None else None
    return LearnedCheckpoint(path, facts, sha256(path), base)


def read_facts(path: Path) -> LearnedFacts:
    """
    Raises:
        UnavailableError: the file is damaged.
    """
    try:
        with safe_open(path, framework="np") as handle:
            stored = json.loads(handle.metadata()[_FACTS])
        base = stored.pop("base")
        return LearnedFacts(**stored, base=Base(**base) if base is not None else None)
    except (OSError, SafetensorError, *_DAMAGE) as error:
        raise _damaged(path, error) from error


def read_weights(path: Path) -> dict[str, NDArray[np.float32]]:
    """
    Raises:
        UnavailableError: the file is damaged, or holds more than weights.
    """
    try:
        with safe_open(path, framework="np") as handle:
            weights = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, *_DAMAGE) as error:
        raise _damaged(path, error) from error
    for name, values in weights.items():
        if values.dtype != np.float32 or not np.isfinite(values).all():
            raise _damaged(path, f"{name} is not of finite float32")
    return weights


def _damaged(path: Path, why: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not an encoder of VirNucPro: {printable(why)}",
        hint="`virnucpro train` writes an encoder beside its head: name that file",
    )


def _find_base(path: Path, base: Base) -> Checkpoint:
    """The checkpoint of this name beside the file, or else where it was.

    Raises:
        UnavailableError: there is none, or it holds other weights.
    """
    beside = path.parent / Path(base.model).name
    checkpoint = inspect_checkpoint(beside) if beside.exists() else find_checkpoint(base.model)
    if checkpoint.encoder_id != base.encoder_id:
        raise UnavailableError(
            f"{printable(path)} was learned on {printable(base.model)} ({base.encoder_id}); "
            f"{printable(checkpoint.path)} holds other weights ({checkpoint.encoder_id})",
            hint=f"put the checkpoint that it was learned on beside it, as {printable(beside)}",
        )
    return checkpoint
