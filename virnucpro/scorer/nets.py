"""The nets of the scorer: from the features of a piece to its log-odds of being viral.

One safetensors file holds all nets. For each piece size there are the mean and the deviation that
features are standardised by, and nets of three layers, each of which reads one of two views of
the features. Nets of the same view are stacked: ``500.shares.0.weight`` is (n_nets, out, in).
The facts, JSON, lie beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from virnucpro.errors import UnavailableError
from virnucpro.files import atomic, sha256
from virnucpro.log import printable
from virnucpro.scorer.features import N_FEATURES, RATIOS, SHARES, Features

FORMAT = 1
VIEWS = {"shares": SHARES, "ratios": RATIOS}
N_LAYERS = 3
FARTHEST = 6.0  # deviations from the mean; what is farther is taken for this

Values = NDArray[np.float64]
Weights = NDArray[np.float32]
Layer = tuple[Weights, Weights]  # weights (n_nets, out, in), biases (n_nets, out)
Threshold = tuple[int, float]  # bases, calibrated log-odds


@dataclass(frozen=True, slots=True, eq=False)
class Nets:
    """Nets that read the same view of the features, layer by layer. Between two stands a GELU."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        n_nets, _, n_inputs = self.layers[0][0].shape
        for weight, bias in self.layers:
            if weight.shape != (n_nets, bias.shape[-1], n_inputs) or bias.shape[0] != n_nets:
                raise ValueError(f"a layer of shape {weight.shape} behind {n_inputs} values")
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise ValueError("a weight that is not finite")
            n_inputs = bias.shape[-1]
        if n_inputs != 1 or len(self.layers) != N_LAYERS:
            raise ValueError(f"{len(self.layers)} layers, and {n_inputs} values at the end")

    @property
    def n_inputs(self) -> int:
        return int(self.layers[0][0].shape[2])

    def log_odds(self, inputs: Values) -> Values:
        """The mean over the nets. (n, n_inputs) -> (n,)"""
        x = inputs
        for i, (weight, bias) in enumerate(self.layers):
            x = np.matmul(gelu(x) if i else x, weight.swapaxes(1, 2)) + bias[:, None, :]
        mean: Values = x[:, :, 0].mean(axis=0)
        return mean


@dataclass(frozen=True, slots=True, eq=False)
class PieceNets:
    """All nets for pieces of one size, of records from ``shortest`` to below ``longest`` bases."""

    size: int
    shortest: int
    longest: int | None
    mean: Weights  # (692,)
    deviation: Weights  # (692,)
    views: Mapping[str, Nets]

    def __post_init__(self) -> None:
        if self.mean.shape != (N_FEATURES,) or self.deviation.shape != (N_FEATURES,):
            raise ValueError(f"means of shape {self.mean.shape} for {N_FEATURES} features")
        if not (np.isfinite(self.mean).all() and (self.deviation > 0).all()):
            raise ValueError("a mean that is not finite, or a deviation that is not above 0")
        for view, nets in self.views.items():
            n_inputs = len(range(N_FEATURES)[VIEWS[view]])
            if nets.n_inputs != n_inputs:
                raise ValueError(f"nets of {nets.n_inputs} inputs behind {n_inputs} features")
        if self.size < 1 or not self.views:
            raise ValueError(f"nets for pieces of {self.size} bases, of {len(self.views)} views")

    def log_odds(self, features: Features) -> Values:
        """The mean over all nets. (n, 692) -> (n,)

        In float64: a score does not depend on the pieces beside it.
        """
        standard = ((features - self.mean) / self.deviation).clip(-FARTHEST, FARTHEST)
        inputs = standard.astype(np.float64)
        n_nets = sum(len(nets.layers[0][0]) for nets in self.views.values())
        total = np.zeros(len(features))
        for view, nets in self.views.items():
            total += nets.log_odds(inputs[:, VIEWS[view]]) * len(nets.layers[0][0])
        return total / n_nets


@dataclass(frozen=True, slots=True)
class Knot:
    """At this length a record's probability is the logistic function of slope * x + offset."""

    n_bases: int
    slope: float
    offset: float

    def __post_init__(self) -> None:
        if not (self.n_bases > 0 and self.slope > 0 and isfinite(self.slope + self.offset)):
            raise ValueError(f"a calibration of {self}")


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Everything that a score is made with. Knots and thresholds rise in length."""

    pieces: tuple[PieceNets, ...]
    knots: tuple[Knot, ...]
    training: str  # how it was trained, in a sentence
    thresholds: tuple[Threshold, ...] = ((1000, 0.0),)
    sha256: str = ""

    def __post_init__(self) -> None:
        for lengths in (
            [knot.n_bases for knot in self.knots],
            [n_bases for n_bases, _ in self.thresholds],
        ):
            if not lengths or lengths != sorted(set(lengths)) or not self.pieces:
                raise ValueError(f"values at {lengths} bases, nets for {len(self.pieces)} sizes")
        if not all(n_bases > 0 and isfinite(log_odds) for n_bases, log_odds in self.thresholds):
            raise ValueError(f"thresholds {self.thresholds}")

    @property
    def shortest(self) -> int:
        """Bases of the shortest record that gets a score."""
        return min(nets.shortest for nets in self.pieces)

    @property
    def piece_size(self) -> int:
        """Bases of the pieces that are told of a long record."""
        return min(nets.size for nets in self.pieces if nets.longest is None)

    def calibrated(self, log_odds: Values, lengths: NDArray[np.int64]) -> Values:
        """Log-odds that mean what they say, half of all records being viral. (n,), (n,) -> (n,)

        Slope and offset lie on lines between the knots, over the logarithm of the length.
        """
        places = np.log([knot.n_bases for knot in self.knots])
        at = np.log(np.maximum(1, lengths))
        slopes = np.interp(at, places, [knot.slope for knot in self.knots])
        offsets = np.interp(at, places, [knot.offset for knot in self.knots])
        return np.asarray(slopes * log_odds + offsets)

    def threshold(self, lengths: NDArray[np.int64]) -> Values:
        """The calibrated log-odds from which on a record is called a virus. (n,) -> (n,)

        It lies on lines between ``thresholds``, over the logarithm of the length.
        """
        places = np.log([n_bases for n_bases, _ in self.thresholds])
        values = [log_odds for _, log_odds in self.thresholds]
        return np.interp(np.log(np.maximum(1, lengths)), places, values)


def gelu(x: Values) -> Values:
    """Hendrycks and Gimpel 2016, arXiv:1606.08415, with the hyperbolic tangent, in float32."""
    single = x.astype(np.float32)
    inner = single * single
    inner *= 0.044715
    inner += 1
    inner *= single
    inner *= 0.7978845608028654
    np.tanh(inner, out=inner)
    inner += 1
    inner *= single
    inner *= 0.5
    return inner.astype(np.float64)


def load_scorer(path: Path) -> Scorer:
    """
    Raises:
        UnavailableError: the file is missing, damaged, or no scorer.
    """
    try:
        with safe_open(path, framework="np") as handle:
            facts = json.loads((handle.metadata() or {})["facts"])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        if facts["format"] != FORMAT:
            raise ValueError(f"the format {facts['format']}")
        return Scorer(
            pieces=tuple(_piece_nets(of_size, tensors) for of_size in facts["pieces"]),
            knots=tuple(Knot(**knot) for knot in facts["knots"]),
            training=str(facts["training"]),
            thresholds=tuple((int(n), float(value)) for n, value in facts["thresholds"]),
            sha256=sha256(path),
        )
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not a scorer of VirNucPro: {printable(error)}",
            hint="reinstall VirNucPro, whose own scorer is a safetensors file",
        ) from error


def _piece_nets(facts: Mapping[str, Any], tensors: Mapping[str, Weights]) -> PieceNets:
    size = facts["size"]
    return PieceNets(
        size=size,
        shortest=facts["shortest"],
        longest=facts["longest"],
        mean=tensors[f"{size}.mean"],
        deviation=tensors[f"{size}.deviation"],
        views={
            view: Nets(
                tuple(
                    (
                        tensors[f"{size}.{view}.{i}.weight"],
                        tensors[f"{size}.{view}.{i}.bias"],
                    )
                    for i in range(N_LAYERS)
                )
            )
            for view in facts["views"]
        },
    )


def save_scorer(path: Path, scorer: Scorer) -> None:
    """Write a scorer, but for the hash of its file; the same bytes for the same scorer."""
    tensors: dict[str, Weights] = {}
    for nets in scorer.pieces:
        tensors[f"{nets.size}.mean"] = nets.mean
        tensors[f"{nets.size}.deviation"] = nets.deviation
        for view, of_view in nets.views.items():
            for i, (weight, bias) in enumerate(of_view.layers):
                tensors[f"{nets.size}.{view}.{i}.weight"] = weight
                tensors[f"{nets.size}.{view}.{i}.bias"] = bias
    facts = {
        "format": FORMAT,
        "pieces": [
            {
                "size": nets.size,
                "shortest": nets.shortest,
                "longest": nets.longest,
                "views": list(nets.views),
            }
            for nets in scorer.pieces
        ],
        "knots": [asdict(knot) for knot in scorer.knots],
        "thresholds": scorer.thresholds,
        "training": scorer.training,
    }
    content = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    with atomic(path) as temporary:
        temporary.write_bytes(save(content, metadata={"facts": json.dumps(facts)}))
