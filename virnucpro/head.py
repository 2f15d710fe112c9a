"""The classifier head: a small network from an embedding to "virus" or "others".

A safetensors file with ``layers.0.weight``, ``layers.0.bias``, ``layers.1.weight`` … and its
facts as metadata. Between two layers stands a ReLU; the last gives two logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from virnucpro.config import Pooling
from virnucpro.errors import UnavailableError
from virnucpro.files import atomic, sha256
from virnucpro.log import printable

CLASSES = "others,virus"
DECIMALS = 6
_DIGESTS = ("trained_records", "trained_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """What a head was made for, and how. Stored with it."""

    encoder: str  # the name, for people
    encoder_id: str  # of the checkpoint, whatever its format
    layer: int
    pooling: Pooling
    dim: int
    chunk_size: int  # bases; the default of --chunk-size
    threshold: float  # a record is called virus from this score on
    training: str  # how it was trained, in a sentence
    classes: str = CLASSES


def _no_digests() -> NDArray[np.uint64]:
    return np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    facts: HeadFacts
    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]  # (out, in), (out,)
    sha256: str = ""
    trained_records: NDArray[np.uint64] = field(default_factory=_no_digests)  # sorted, see
    trained_groups: NDArray[np.uint64] = field(default_factory=_no_digests)  # training.digests

    def __post_init__(self) -> None:
        n_inputs = self.facts.dim
        for weight, bias in self.layers:
            if weight.ndim != 2 or weight.shape[1] != n_inputs or bias.shape != weight.shape[:1]:
                raise ValueError(f"a layer of shape {weight.shape} behind {n_inputs} values")
            n_inputs = len(weight)
        if not self.layers or n_inputs != 2 or self.facts.classes != CLASSES:
            raise ValueError(f"{n_inputs} outputs for the classes {self.facts.classes!a}")
        if not all(np.isfinite(values).all() for layer in self.layers for values in layer):
            raise ValueError("a weight that is not finite")
        if not all(values.dtype == np.float32 for layer in self.layers for values in layer):
            raise ValueError("weights that are not float32")
        if not 0 <= self.facts.threshold <= 1:
            raise ValueError(f"a threshold of {self.facts.threshold}")
        for digests in (self.trained_records, self.trained_groups):
            if (
                digests.dtype != np.uint64
                or digests.ndim != 1
                or (digests[1:] < digests[:-1]).any()
            ):
                raise ValueError("digests that are not sorted, or no uint64")

    def classify(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """The probability that each row is viral, 6 decimals. (n, dim) -> (n,)

        In float64: a score does not depend on the rows beside it.
        """
        x = vectors.astype(np.float64)
        for i, (weight, bias) in enumerate(self.layers):
            x = (np.maximum(x, 0) if i else x) @ weight.T.astype(np.float64) + bias
        logit = x[:, 0] - x[:, 1]
        scores: NDArray[np.float64] = np.round(0.5 * (1 - np.tanh(logit / 2)), DECIMALS)
        return scores


def load_head(path: Path) -> Head:
    """
    Raises:
        UnavailableError: the file is missing, damaged, or no head.
    """
    try:
        with safe_open(path, framework="np") as handle:
            stored = handle.metadata() or {}
            names = set(handle.keys())
            n_layers = len(names - set(_DIGESTS)) // 2
            layers = tuple(
                (handle.get_tensor(f"layers.{i}.weight"), handle.get_tensor(f"layers.{i}.bias"))
                for i in range(n_layers)
            )
            digests = {name: handle.get_tensor(name) for name in _DIGESTS if name in names}
        facts = HeadFacts(
            encoder=stored["encoder"],
            encoder_id=stored["encoder_id"],
            layer=int(stored["layer"]),
            pooling=_pooling(stored["pooling"]),
            dim=int(stored["dim"]),
            chunk_size=int(stored["chunk_size"]),
            threshold=float(stored["threshold"]),
            training=stored["training"],
            classes=stored["classes"],
        )
        return Head(facts, layers, sha256(path), **digests)
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is no head of VirNucPro: {printable(error)}",
            hint="a head is a safetensors file; `virnucpro demo FOLDER` makes one to look at",
        ) from error


def _pooling(name: str) -> Pooling:
    match name:
        case "mean":
            return "mean"
        case "bos":
            return "bos"
    raise ValueError(f"a head on {name!a} pooling")


def save_head(path: Path, head: Head) -> None:
    tensors: dict[str, NDArray[np.generic]] = {
        f"layers.{i}.{kind}": np.ascontiguousarray(values, dtype=np.float32)
        for i, layer in enumerate(head.layers)
        for kind, values in zip(("weight", "bias"), layer, strict=True)
    }
    tensors |= {name: getattr(head, name) for name in _DIGESTS if len(getattr(head, name))}
    facts = {name: str(getattr(head.facts, name)) for name in HeadFacts.__slots__}
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata=facts)
