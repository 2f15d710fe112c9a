"""The classifier head: small networks from what is known of a frame to "virus" or "others".

A safetensors file: ``protein.layers.0.weight``, ``protein.layers.0.bias``,
``protein.layers.1.weight`` … of the network that sees an embedding; the same under
``nucleotide.`` of the one that sees the embedding and the composition of the frame's bases, if
there is one; and the head's facts as metadata. Between two layers stands a ReLU; the last gives
two logits. Digests of what it was trained on may lie beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from virnucpro.config import Pooling
from virnucpro.errors import UnavailableError
from virnucpro.files import atomic, sha256
from virnucpro.log import printable
from virnucpro.sequences.composition import N_FEATURES, frame_composition

CLASSES = "others,virus"
DECIMALS = 6
_DIGESTS = ("trained_records", "trained_groups", "encoder_records", "encoder_groups")

FrameRule = Literal["max", "mean"]
Values = NDArray[Any]
Layer = tuple[NDArray[np.float32], NDArray[np.float32]]  # weight (out, in), bias (out,)


def _no_digests() -> NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64)


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
    frames: FrameRule  # which log-odds of its frames a chunk has: the largest, or the mean
    exponent: float  # a record has the sum of its n chunks' log-odds over n ** exponent
    training: str  # how it was trained, in a sentence
    classes: str = CLASSES

    def __post_init__(self) -> None:
        if self.classes != CLASSES:
            raise ValueError(f"the classes {self.classes!a}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"a threshold of {self.threshold}")
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"an exponent of {self.exponent}")


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Fully connected layers, and the temperature that calibrates them.

    Logits are divided by it before the softmax (Guo et al. 2017, arXiv:1706.04599).
    """

    layers: tuple[Layer, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a network without a layer")
        n_inputs = self.n_inputs
        for weight, bias in self.layers:
            is_layer = weight.ndim == 2 and weight.size and bias.shape == weight.shape[:1]
            if not is_layer or weight.shape[1] != n_inputs:
                raise ValueError(f"a layer of shape {weight.shape} behind {n_inputs} values")
            n_inputs = len(weight)
        if n_inputs != 2:
            raise ValueError(f"{n_inputs} outputs for the classes {CLASSES!a}")
        if not all(np.isfinite(values).all() for layer in self.layers for values in layer):
            raise ValueError("a weight that is not finite")
        if not all(values.dtype == np.float32 for layer in self.layers for values in layer):
            raise ValueError("weights that are not float32")
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"a temperature of {self.temperature}")
        if not isfinite(self._largest_logit):
            raise ValueError("weights so large that scores would not be finite")

    @property
    def _largest_logit(self) -> float:
        """A bound for inputs within float32, as ``classify`` computes."""
        largest = float(np.finfo(np.float32).max)
        with np.errstate(over="ignore", invalid="ignore"):
            for weight, bias in self.layers:
                sums = np.abs(weight.astype(np.float64)).sum(axis=1) * largest + np.abs(bias)
                largest = float(sums.max())
            return float(np.float64(2 * largest) / self.temperature)

    @property
    def n_inputs(self) -> int:
        return int(self.layers[0][0].shape[-1])

    def classify(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probability that each row is viral, 6 decimals. (n, n_inputs) -> (n,)

        In float64: a score does not depend on the rows beside it.
        """
        x = inputs
        for i, (weight, bias) in enumerate(self.layers):
            x = (np.maximum(x, 0) if i else x) @ weight.T.astype(np.float64) + bias
        logit = (x[:, 0] - x[:, 1]) / self.temperature
        scores: NDArray[np.float64] = np.round(0.5 * (1 - np.tanh(logit / 2)), DECIMALS)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Both networks have the same facts; one without the second scores every frame by its protein.

    The digests, sorted, are of the sequences and the groups of the records that it was trained and
    tuned on, and of those that its encoder was.
    """

    facts: HeadFacts
    protein: Network
    nucleotide: Network | None = None
    trained_records: NDArray[np.uint64] = field(default_factory=_no_digests)
    trained_groups: NDArray[np.uint64] = field(default_factory=_no_digests)
    encoder_records: NDArray[np.uint64] = field(default_factory=_no_digests)
    encoder_groups: NDArray[np.uint64] = field(default_factory=_no_digests)
    sha256: str = ""

    def __post_init__(self) -> None:
        dim = self.facts.dim
        if self.protein.n_inputs != dim:
            raise ValueError(f"a layer of {self.protein.n_inputs} inputs behind {dim} values")
        if self.nucleotide is not None and self.nucleotide.n_inputs != dim + N_FEATURES:
            raise ValueError(
                f"a layer of {self.nucleotide.n_inputs} inputs behind {dim} + {N_FEATURES} values"
            )
        for digests in (getattr(self, name) for name in _DIGESTS):
            if digests.dtype != np.uint64 or digests.ndim != 1:
                raise ValueError("digests that are no row of uint64")
            if (digests[1:] <= digests[:-1]).any():
                raise ValueError("digests that are not sorted, or one of them twice")

    def classify(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """The probability that each protein is viral, 6 decimals. (n, dim) -> (n,)"""
        return self.protein.classify(vectors.astype(np.float64))

    def classify_frames(
        self, vectors: NDArray[np.float32], frames: Sequence[str]
    ) -> NDArray[np.float64]:
        """As ``classify``, of frames of nucleotides with their coding strands' bases.

        (n, dim), n strings as of ``composition.frame_bases`` -> (n,)
        """
        if self.nucleotide is None:
            return self.classify(vectors)
        inputs = np.hstack([vectors.astype(np.float64), frame_composition(frames)])
        return self.nucleotide.classify(inputs)


def load_head(path: Path) -> Head:
    """
    Raises:
        UnavailableError: the file is missing, damaged, or no head.
    """
    try:
        with safe_open(path, framework="np") as handle:
            stored = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        has_nucleotide = any(name.startswith("nucleotide.") for name in tensors)
        return Head(
            facts=_facts(stored),
            protein=_network("protein", tensors, stored),
            nucleotide=_network("nucleotide", tensors, stored) if has_nucleotide else None,
            **{name: tensors[name] for name in _DIGESTS if name in tensors},
            sha256=sha256(path),
        )
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is no head of VirNucPro: {printable(error)}",
            hint="a head is a safetensors file that `virnucpro train` writes",
        ) from error


def _facts(stored: Mapping[str, str]) -> HeadFacts:
    return HeadFacts(
        encoder=stored["encoder"],
        encoder_id=stored["encoder_id"],
        layer=int(stored["layer"]),
        pooling=_pooling(stored["pooling"]),
        dim=int(stored["dim"]),
        chunk_size=int(stored["chunk_size"]),
        threshold=float(stored["threshold"]),
        frames=_frame_rule(stored["frames"]),
        exponent=float(stored["exponent"]),
        training=stored["training"],
        classes=stored["classes"],
    )


def _pooling(name: str) -> Pooling:
    match name:
        case "mean":
            return "mean"
        case "bos":
            return "bos"
    raise ValueError(f"a head on {name!a} pooling")


def _frame_rule(name: str) -> FrameRule:
    match name:
        case "max":
            return "max"
        case "mean":
            return "mean"
    raise ValueError(f"a head with the {name!a} of a chunk's frames")


def _network(name: str, tensors: Mapping[str, Values], stored: Mapping[str, str]) -> Network:
    n_tensors = sum(tensor.startswith(f"{name}.") for tensor in tensors)
    layers = tuple(
        (tensors[f"{name}.layers.{i}.weight"], tensors[f"{name}.layers.{i}.bias"])
        for i in range(-(-n_tensors // 2))
    )
    return Network(layers, float(stored[f"{name}.temperature"]))


def save_head(path: Path, head: Head) -> None:
    """Write a head, but for the hash of its file."""
    networks = {"protein": head.protein}
    if head.nucleotide is not None:
        networks["nucleotide"] = head.nucleotide
    facts = {name: str(getattr(head.facts, name)) for name in HeadFacts.__slots__}
    facts |= {f"{name}.temperature": str(network.temperature) for name, network in networks.items()}
    tensors: dict[str, Values] = {
        f"{name}.layers.{i}.{kind}": values
        for name, network in networks.items()
        for i, layer in enumerate(network.layers)
        for kind, values in zip(("weight", "bias"), layer, strict=True)
    }
    tensors |= {name: getattr(head, name) for name in _DIGESTS}
    content = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    with atomic(path) as temporary:
        temporary.write_bytes(_with_sorted_facts(save(content, metadata=facts)))


def _with_sorted_facts(content: bytes) -> bytes:
    """The same file, with the same bytes every time: safetensors shuffles metadata.

    Eight bytes say how long the header is, which is JSON, padded to a multiple of eight.
    """
    n_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n_bytes])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + n_bytes :]
