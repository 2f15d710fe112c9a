"""The classifier head: small networks that classify a frame as "virus" or "others".

A head is a safetensors file. ``protein.layers.0.weight``, ``protein.layers.0.bias``,
``protein.layers.1.weight`` … belong to the network that reads embeddings. The same names under
``nucleotide.`` belong to an optional network that reads the embedding and the base composition of
the frame. The metadata has a single entry, which describes the head in JSON. A ReLU separates
layers, and the last layer returns two logits. The file may also contain digests for its training
data.

A head may be combined with the scorer: a call uses a weighted sum over their log-odds. The weights
depend on length, and are fitted to groups that the head was not trained on. At lengths where its
weight is 0, the head adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from math import fsum, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.numeric import DECIMALS, FloatArray, IntArray
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Pooling
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import check_counts
from virnucpro.models.base import Model, read_tensors
from virnucpro.models.names import current_name
from virnucpro.sequences.kmers import N_FEATURES, Sketch, frame_composition
from virnucpro.viral.networks import ErrorRates, interpolate_lengths
from virnucpro.viral.probability import log_odds, probability
from virnucpro.viral.types import Prediction

CLASSES = "others,virus"
HEAD_ENTRY = "virnucpro_head"  # metadata key
_NETWORKS = ("protein", "nucleotide")
_DIGESTS = ("trained_records", "trained_groups", "encoder_records", "encoder_groups")
_SKETCHES = ("trained_kmers", "encoder_kmers")

FrameRule = Literal["max", "mean"]
_Array = NDArray[Any]
Layer = tuple[NDArray[np.float32], NDArray[np.float32]]  # weight (out, in), bias (out,)


def _no_digests() -> NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    """The encoder that a head was trained with."""

    family: str
    name: str  # in messages
    encoder_id: str  # hash of the weights, the same in every file format
    layer: int
    pooling: Pooling
    dim: int  # vector length

    def __post_init__(self) -> None:
        check_counts(self.layer, self.dim)
        has_names = all(isinstance(one, str) for one in (self.family, self.name, self.encoder_id))
        if not has_names or self.pooling not in ("mean", "bos"):
            raise ValueError("its facts do not describe an encoder")

    @classmethod
    def from_spec(cls, model: Model) -> EncoderInfo:
        """Describe a model's last layer, with mean pooling."""
        return cls(
            family=model.family,
            name=model.name,
            encoder_id=model.encoder_id,
            layer=model.n_layers,
            pooling="mean",
            dim=model.dim,
        )


@dataclass(frozen=True, slots=True)
class EnsembleKnot:
    """The weights at one length: base * (scorer's log-odds) + head * (head's) + offset."""

    n_bases: int
    base: float
    head: float
    offset: float

    def __post_init__(self) -> None:
        weights = (self.base, self.head, self.offset)
        max_weight = 1e6  # weight in an ensemble
        is_usual = all(abs(weight) <= max_weight for weight in weights)  # not NaN
        if self.n_bases < 1 or not is_usual or min(self.base, self.head) < 0:
            raise ValueError(f"invalid weights: {self}")


@dataclass(frozen=True, slots=True)
class EnsembleWeights:
    """Weights and error rates, sorted by length, and the scorer that they were fitted with."""

    scorer_sha256: str
    knots: tuple[EnsembleKnot, ...]
    error_rates: tuple[ErrorRates, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.scorer_sha256, str):
            raise TypeError("the hash of a scorer must be text")
        for curve in (self.knots, self.error_rates):
            lengths = [point.n_bases for point in curve]
            if not lengths or lengths != sorted(set(lengths)):
                raise ValueError(f"the lengths of a join must rise: {lengths}")

    @property
    def weights(self) -> str:
        """Return both weights at the shortest and at the longest length, for messages."""
        ends = self.knots[:1] + self.knots[1:][-1:]
        weights = (
            f"{knot.base:.2f} and {knot.head:.2f} at {knot.n_bases:,} bases" for knot in ends
        )
        return f"weights of scorer and head: {', '.join(weights)}"

    @classmethod
    def from_knots(cls, facts: Mapping[str, Any]) -> EnsembleWeights:
        """Read the ensemble weights from a head's metadata.

        Raises:
            LookupError, TypeError, ValueError: the metadata does not describe an ensemble.
        """
        return cls(
            facts["scorer_sha256"],
            tuple(EnsembleKnot(**knot) for knot in facts["knots"]),
            tuple(ErrorRates.from_scores(rates) for rates in facts["error_rates"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInfo:
    """Head description, stored in its file: encoders, rules and training."""

    encoders: tuple[EncoderInfo, ...]  # their vectors are concatenated in this order
    chunk_size: int  # bases, the default of --chunk-size
    threshold: float  # the lowest score at which a record is called virus
    frame_rule: FrameRule  # log-odds of a chunk: the maximum over its frames, or their mean
    exponent: float  # log-odds of a record: the sum over its n chunks, divided by n ** exponent
    training: str  # training data and method, in a sentence
    classes: str = CLASSES
    join: EnsembleWeights | None = None  # with the scorer. None: the head calls nucleotides alone

    def __post_init__(self) -> None:
        check_counts(self.chunk_size)
        shares = (self.threshold, self.exponent)
        max_chunk_bases = 1_000_000_000  # bases
        is_head = (
            bool(self.encoders)
            and self.classes == CLASSES
            and 30 <= self.chunk_size <= max_chunk_bases
            and self.frame_rule in ("max", "mean")
            and all(type(share) in (int, float) and 0 <= share <= 1 for share in shares)
            and isinstance(self.training, str)
        )
        if not is_head:
            raise ValueError("its facts do not describe a head")

    @property
    def description(self) -> str:
        """Describe the head by its encoder names."""
        return f"the head of {' and '.join(printable(one.name) for one in self.encoders)}"

    def score(self, chunks: Iterable[Sequence[float]]) -> float:
        """Return a record's score, with 6 decimals, from the frame scores in its chunks.

        There is at least one chunk. The log-odds for n chunks are added and divided by
        ``n ** exponent``.
        """
        odds = self.chunk_log_odds(chunks)
        return probability(fsum(odds) / len(odds) ** self.exponent)

    def score_chunks(self, predictions: Sequence[Prediction]) -> dict[str, float]:
        """Return each scored chunk's score, by id, as if it were a record."""
        return {chunk_id: self.score([scores]) for chunk_id, scores in chunk_scores(predictions)}

    def chunk_log_odds(self, chunks: Iterable[Sequence[float]]) -> list[float]:
        """Return each chunk's log-odds: the maximum over its frames, or their mean."""
        pick = max if self.frame_rule == "max" else fmean
        return [pick([log_odds(score) for score in scores]) for scores in chunks]

    def check_compatible(self, models: Sequence[Model]) -> None:
        """Check that the head was trained with these models.

        Raises:
            UnavailableError: the head was trained with other models.
        """
        are_these = len(models) == len(self.encoders) and all(
            (encoder.encoder_id, encoder.dim) == (model.encoder_id, model.dim)
            and 1 <= encoder.layer <= model.n_layers
            for encoder, model in zip(self.encoders, models, strict=True)
        )
        if not are_these:
            trained_with = " and ".join(
                f"{encoder.name} ({encoder.encoder_id})" for encoder in self.encoders
            )
            given = " and ".join(f"{model.name} ({model.encoder_id})" for model in models)
            raise UnavailableError(
                f"the head was made for the encoder {printable(trained_with)}, not for "
                f"{printable(given)}",
                hint=with_options("set {model} to the encoder that the head was made for"),
            )

    @property
    def dim(self) -> int:
        """Return the length of a frame's vector."""
        return sum(encoder.dim for encoder in self.encoders)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Fully connected layers, and the temperature that calibrates them.

    Logits are divided by the temperature before the softmax (Guo et al. 2017, arXiv:1706.04599).
    """

    layers: tuple[Layer, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a network has no layers")
        n_inputs = self.n_inputs
        for weight, bias in self.layers:
            is_layer = weight.ndim == 2 and weight.size and bias.shape == weight.shape[:1]
            if not is_layer or weight.shape[1] != n_inputs:
                raise ValueError(f"a layer has the shape {weight.shape}, for {n_inputs} inputs")
            n_inputs = len(weight)
        if n_inputs != 2:
            raise ValueError(f"a network has {n_inputs} outputs for the classes {CLASSES!a}")
        each = list(chain.from_iterable(self.layers))
        if not all(values.dtype == np.float32 and np.isfinite(values).all() for values in each):
            raise ValueError("a weight is not a finite float32")
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"the temperature is {self.temperature}")
        if not isfinite(self._largest_logit):
            raise ValueError("weights are so large that scores would not be finite")

    @property
    def _largest_logit(self) -> float:
        """Return an upper bound for the logits that ``classify`` can compute from float32 input."""
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
        """Return the probability that each row is viral, with 6 decimals. (n, n_inputs) -> (n,)

        The computation uses float64, so that a result does not depend on the other rows.
        """
        x = inputs
        for i, (weight, bias) in enumerate(self.layers):
            x = (np.maximum(x, 0) if i else x) @ weight.T.astype(np.float64) + bias
        logit = (x[:, 0] - x[:, 1]) / self.temperature
        scores: NDArray[np.float64] = np.round(0.5 * (1 - np.tanh(logit / 2)), DECIMALS)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A frame classifier: description, and a network for proteins, for nucleotides, or for both.

    The sorted digests identify the records, and their groups, on which the head and its encoder
    were trained and tuned. The sketches cover all sequences in these records.
    """

    facts: HeadInfo
    protein: Network | None  # None if vectors are empty
    nucleotide: Network | None = None
    trained_records: NDArray[np.uint64] = field(default_factory=_no_digests)
    trained_groups: NDArray[np.uint64] = field(default_factory=_no_digests)
    encoder_records: NDArray[np.uint64] = field(default_factory=_no_digests)
    encoder_groups: NDArray[np.uint64] = field(default_factory=_no_digests)
    trained_kmers: Sketch = field(default_factory=Sketch)
    encoder_kmers: Sketch = field(default_factory=Sketch)
    sha256: str = ""

    def __post_init__(self) -> None:
        dim = self.facts.dim
        if self.protein is None and (dim or self.nucleotide is None):
            raise ValueError("the head has no network")
        if self.protein is not None and self.protein.n_inputs != dim:
            raise ValueError(f"a layer has {self.protein.n_inputs} inputs for {dim} values")
        if self.nucleotide is not None and self.nucleotide.n_inputs != dim + N_FEATURES:
            raise ValueError(
                f"a layer has {self.nucleotide.n_inputs} inputs for {dim} + {N_FEATURES} values"
            )
        for digests in (getattr(self, name) for name in _DIGESTS):
            is_row = digests.dtype == np.uint64 and digests.ndim == 1
            if not is_row or (digests[1:] <= digests[:-1]).any():
                raise ValueError("digests are not a rising row of uint64")

    def classify(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the probability that each protein is viral, with 6 decimals. (n, dim) -> (n,)"""
        assert self.protein is not None, "an encoder of empty vectors reads no proteins"
        return self.protein.classify(vectors.astype(np.float64))

    def classify_frames(
        self, vectors: NDArray[np.float32], frames: Sequence[str]
    ) -> NDArray[np.float64]:
        """Return the probability that each frame is viral, with 6 decimals.

        The inputs are vectors and coding strands, as returned by ``Orf.coding_sequence``.
        (n, dim), n strings -> (n,)
        """
        if self.nucleotide is None:
            return self.classify(vectors)
        dim = vectors.shape[1]
        inputs = np.empty((len(frames), dim + N_FEATURES))
        inputs[:, :dim] = vectors
        inputs[:, dim:] = frame_composition(frames)
        return self.nucleotide.classify(inputs)

    @staticmethod
    def load(path: Path) -> Head:
        """Read a head from its file.

        Raises:
            UnavailableError: the file is missing, damaged, or not a head in this version's format.
        """
        try:
            facts, tensors = read_tensors(path, HEAD_ENTRY, "np")
            temperatures = facts.pop("temperatures")
            encoders = tuple(map(_encoder_facts, facts.pop("encoders")))
            join = facts.pop("join", None)  # a head without an ensemble calls alone
            networks = {
                name: _network(name, tensors, temperatures)
                for name in _NETWORKS
                if any(tensor.startswith(f"{name}.") for tensor in tensors)
            }
            stored = {name: tensors[name] for name in _DIGESTS if name in tensors}
            stored |= {name: Sketch.unpack(tensors[name]) for name in _SKETCHES if name in tensors}
            return Head(
                facts=HeadInfo(
                    encoders=encoders,
                    join=None if join is None else EnsembleWeights.from_knots(join),
                    **facts,
                ),
                protein=networks.get("protein"),
                nucleotide=networks.get("nucleotide"),
                **stored,
                sha256=hash_file(path),
            )
        except (
            OSError,
            SafetensorError,
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            raise UnavailableError(
                f"{printable(path)} is not a VirNucPro head file: {printable(error)}",
                hint="a head is a safetensors file that `virnucpro train` writes",
            ) from error

    def save(self, path: Path) -> None:
        """Write the head. The same head always gives the same bytes."""
        optional = {name: getattr(self, name) for name in _NETWORKS}
        networks: dict[str, Network] = {
            name: network for name, network in optional.items() if network
        }
        temperatures = {name: network.temperature for name, network in networks.items()}
        facts = {**asdict(self.facts), "temperatures": temperatures}
        tensors: dict[str, _Array] = {
            f"{name}.layers.{i}.{kind}": values
            for name, network in networks.items()
            for i, layer in enumerate(network.layers)
            for kind, values in zip(("weight", "bias"), layer, strict=True)
        }
        tensors |= {name: getattr(self, name) for name in _DIGESTS}
        tensors |= {name: getattr(self, name).pack() for name in _SKETCHES}
        content = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
        # several entries would have no fixed order
        metadata = {HEAD_ENTRY: json.dumps(facts, sort_keys=True)}
        SafeDir(path.parent).write_file(path, save(content, metadata=metadata))


def _encoder_facts(stored: Mapping[str, Any]) -> EncoderInfo:
    """Read an encoder's description, and replace a name from an earlier version."""
    facts = EncoderInfo(**stored)
    return replace(facts, name=current_name(facts.name))


def _network(
    name: str, tensors: Mapping[str, _Array], temperatures: Mapping[str, float]
) -> Network:
    n_tensors = sum(tensor.startswith(f"{name}.") for tensor in tensors)
    layers = tuple(
        (tensors[f"{name}.layers.{i}.weight"], tensors[f"{name}.layers.{i}.bias"])
        for i in range(-(-n_tensors // 2))
    )
    return Network(layers, float(temperatures[name]))


def combine_log_odds(
    knots: Sequence[EnsembleKnot], base: FloatArray, head: FloatArray, lengths: IntArray
) -> FloatArray:
    """Combine log-odds by record. (n,) each -> (n,)

    ``base`` contains the scorer's calibrated log-odds, and ``head`` the means over the chunks in a
    record. The result is NaN where either input is NaN. Weights and offset are interpolated
    linearly between the knots, over log(length).
    """
    base_log_odds, head_log_odds, offset = (
        interpolate_lengths(lengths, knots, [getattr(knot, name) for knot in knots])
        for name in ("base", "head", "offset")
    )
    return np.asarray(base_log_odds * base + head_log_odds * head + offset)


def chunk_scores(predictions: Sequence[Prediction]) -> list[tuple[str, list[float]]]:
    """Return each scored chunk's id and frame scores.

    Frames in a chunk are neighbours, ordered as in ``translate_six_frames``.
    """
    frames = [
        (frame.orf.chunk_id, frame.virus_score)
        for frame in predictions
        if frame.virus_score is not None
    ]
    return [
        (chunk_id, [score for _, score in group])
        for chunk_id, group in groupby(frames, key=lambda frame: frame[0])
    ]
