"""The nets of the scorer: from the features of a piece to its log-odds of being viral.

A net has an output for each kind of sequence, such as phages, bacteria and transposable elements.
The log-odds are those of all kinds of viruses together against all kinds of cells.

One safetensors file holds all nets and the table of words that they read. For each piece size
there are the mean and the deviation that features are standardised by, and nets of three layers,
each of which reads one of two views of the features. Nets of the same view are stacked:
``500.shares.0.weight`` is (n_nets, out, in). The nets of windows along a record read no words;
theirs is ``windows.shares.0.weight``. Those of proteins read features of residues, and log ratios
of patterns (``proteins.0.weight``, ``proteins.patterns.0``). The facts are JSON in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from math import isfinite, prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from virnucpro.ground.config import InputType
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.files import EMBEDDED_FOLDER, atomic, open_plain, parse_json
from virnucpro.ground.log import printable
from virnucpro.ground.numeric import Counts, Mask, Values, sigmoid
from virnucpro.scorer.features import N_FEATURES, N_LAYOUT, RATIOS, SHARES, Features
from virnucpro.scorer.library import call
from virnucpro.scorer.proteins import N_FEATURES as N_PROTEIN_FEATURES
from virnucpro.scorer.proteins import PATTERNS, Proteins, Ratios, n_numbers, protein_features
from virnucpro.scorer.words import NO_WORDS, WordTable

FORMAT = 11
VIEWS = {"shares": SHARES, "ratios": RATIOS}
WINDOWS, PROTEINS = "windows", "proteins"  # what tensors of these nets are called by
N_LAYERS = 3
FARTHEST = 6.0  # deviations from the mean; what is farther is taken for this
N_LEVELS = 255  # from the mean to the farthest
_EXACT = 2**24  # no sum of a first layer is larger
_LARGEST = 2**15 - 1  # weight of a first layer
_ROWS_AT_ONCE = 512  # of a layer: they stay in the cache of the processor
_OUTPUTS, _REALS = 32, 16  # of it, and of a later one, that are computed at once

_LINE = 64  # bytes that a processor reads at once

_DIGESTS = ("trained_records", "trained_groups")
_KINDS = {"U8": "u1", "I8": "i1", "U16": "<u2", "F32": "<f4", "U64": "<u8"}  # of safetensors

Digests = NDArray[np.uint64]
Weights = NDArray[np.float32]
_Number = TypeVar("_Number", np.int16, np.float64)
Layer = tuple[Weights, Weights]  # weights (n_nets, out, in), biases (n_nets, out)


@dataclass(frozen=True, eq=False)
class Nets:
    """Nets that read the same view of the features, layer by layer. Between two stands a GELU.

    What the last gives are the logits of kinds, those of viruses first.
    """

    layers: tuple[Layer, ...]
    n_viral: int  # kinds of viruses; the others are of cells

    def __post_init__(self) -> None:
        n_nets, _, n_inputs = self.layers[0][0].shape
        for weight, bias in self.layers:
            if weight.shape != (n_nets, bias.shape[-1], n_inputs) or bias.shape[0] != n_nets:
                raise ValueError(f"a layer of shape {weight.shape} for {n_inputs} inputs")
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise ValueError("a weight that is not finite")
            n_inputs = bias.shape[-1]
        if not 0 < self.n_viral < n_inputs or len(self.layers) != N_LAYERS:
            raise ValueError(
                f"{len(self.layers)} layers, and {self.n_viral} of {n_inputs} kinds viral"
            )

    def __len__(self) -> int:
        return len(self.layers[0][0])

    @property
    def n_inputs(self) -> int:
        return int(self.layers[0][0].shape[2])

    @property
    def n_outputs(self) -> int:
        """Outputs of the first layers of all nets."""
        return int(self.layers[0][1].size)

    @cached_property
    def first(self) -> tuple[NDArray[np.int16], Values, Values]:
        """Weights in whole numbers, what a level times one of them is worth, and the biases.

        In blocks of outputs and pairs of inputs, filled up by zeros: (n_blocks, n_pairs, 32, 2),
        (n_outputs,), (n_outputs,). No row's numbers have a sum above ``_EXACT`` over
        ``N_LEVELS``, so that no sum of products overflows.
        """
        weight, bias = self.layers[0]
        rows = weight.reshape(-1, self.n_inputs).astype(np.float64)
        largest = _EXACT / N_LEVELS - self.n_inputs / 2  # before each is rounded
        sizes = abs(rows)
        total = np.maximum(np.finfo(np.float32).tiny, sizes.sum(axis=1, keepdims=True))
        worth = np.maximum(total / largest, sizes.max(axis=1, keepdims=True) / _LARGEST)
        n_rows, n_inputs = rows.shape
        numbers = np.zeros((-(-n_rows // _OUTPUTS) * _OUTPUTS, n_inputs + n_inputs % 2), np.int16)
        numbers[:n_rows, :n_inputs] = np.rint(rows / worth)
        blocks = numbers.reshape(-1, _OUTPUTS, numbers.shape[1] // 2, 2).swapaxes(1, 2)
        steps = (worth * FARTHEST / N_LEVELS).reshape(-1)
        return np.ascontiguousarray(blocks), steps, bias.reshape(-1).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Views:
    """Nets that read views of the same features, which are standardised once for all of them.

    A view has the features from a column on. A record's score must not depend on the records
    beside it, and a sum in float32 does. One of whole numbers does not, and is faster: features
    are read in steps of ``FARTHEST / N_LEVELS``. Between two layers stands a GELU with the
    hyperbolic tangent, in float32 (Hendrycks and Gimpel 2016, arXiv:1606.08415).
    """

    mean: Weights  # (n_features,)
    deviation: Weights  # (n_features,)
    nets: Mapping[int, Nets]  # by the first column that they read

    def __post_init__(self) -> None:
        if len({nets.n_inputs for nets in self.nets.values()}) != 1:
            raise ValueError("views of several sizes, or none")

    @cached_property
    def arguments(self) -> tuple[NDArray[Any] | int, ...]:
        """What functions of the library take."""
        scale = np.float32(N_LEVELS / FARTHEST) / self.deviation
        n_inputs = next(iter(self.nets.values())).n_inputs
        columns = np.array([*self.nets], dtype=np.int64)
        n_outputs = np.array([nets.n_outputs for nets in self.nets.values()], dtype=np.int64)
        firsts = zip(*(nets.first for nets in self.nets.values()), strict=True)
        weights, worth, bias = map(np.concatenate, firsts)
        weights = _aligned(weights)
        sizes = len(self.mean), len(columns), n_inputs
        return self.mean, scale, *sizes, columns, n_outputs, weights, worth, bias

    def outputs(self, n: int) -> Weights:
        """Room for what the first layers give for n pieces. (n, n_outputs)"""
        return np.empty((n, sum(nets.n_outputs for nets in self.nets.values())), np.float32)

    def log_odds(self, features: Features) -> Values:
        """The mean over all nets. (n, n_features) -> (n,)"""
        outputs = self.outputs(len(features))
        call("first_layers", features, len(features), *self.arguments, outputs)
        return self.of_outputs(outputs)

    def of_outputs(self, outputs: Weights) -> Values:
        """The mean over all nets, by outputs before the first GELU. (n, n_outputs) -> (n,)"""
        log_odds = np.empty(len(outputs))
        for low in range(0, len(outputs), _ROWS_AT_ONCE):
            rows = slice(low, low + _ROWS_AT_ONCE)
            second = self._next(1, outputs[rows]).astype(np.float32)
            logits = self._next(2, second)
            numbers = len(logits), len(self._n_viral), self._later[1][1], self._n_viral
            call("mean_log_odds", logits, *numbers, log_odds[rows])
        return log_odds

    def _next(self, layer: int, values: Weights) -> Values:
        """What a layer gives for outputs of the one before it. (n, n_inputs) -> (n, n_outputs)"""
        tangents = np.empty_like(values)
        call("gelu_inner", values, values.size, tangents)
        np.tanh(tangents, out=tangents)
        n_inputs, n_outputs, weights, bias = self._later[layer - 1]
        sizes = len(values), len(n_inputs), n_inputs, n_outputs
        out = np.empty((len(values), int(n_outputs.sum())))
        call("next_layer", values, tangents, *sizes, weights, bias, out)
        return out

    @cached_property
    def _later(self) -> list[tuple[Counts, Counts, Values, Values]]:
        """Of each later layer: inputs and outputs of each net, and its weights and biases."""
        each = []
        for layer in range(1, N_LAYERS):
            shapes = [nets.layers[layer][0].shape for nets in self.nets.values()]
            n_nets = [n for n, _, _ in shapes]
            weights = [
                blocks_of(net) for nets in self.nets.values() for net in nets.layers[layer][0]
            ]
            biases = [nets.layers[layer][1].reshape(-1) for nets in self.nets.values()]
            each.append(
                (
                    np.repeat([n for _, _, n in shapes], n_nets),
                    np.repeat([n for _, n, _ in shapes], n_nets),
                    _aligned(np.concatenate(weights)),
                    np.concatenate(biases).astype(np.float64),
                )
            )
        return each

    @cached_property
    def _n_viral(self) -> Counts:
        """Kinds of viruses of each net."""
        return np.repeat(
            [nets.n_viral for nets in self.nets.values()], list(map(len, self.nets.values()))
        )


@dataclass(frozen=True, eq=False)
class PieceNets:
    """The nets for pieces of one size, of records from ``shortest`` to below ``longest`` bases."""

    size: int
    shortest: int
    longest: int | None
    part: int | None  # bases of the parts that a piece is read as; None: it is read at once
    words: WordTable  # that their features are made with
    mean: Weights  # (n_features,)
    deviation: Weights  # (n_features,)
    views: Mapping[str, Nets]

    def __post_init__(self) -> None:
        if self.mean.shape != (self.n_features,) or self.deviation.shape != (self.n_features,):
            raise ValueError(f"means of shape {self.mean.shape} for {self.n_features} features")
        if not (np.isfinite(self.mean).all() and (self.deviation > 0).all()):
            raise ValueError("a mean that is not finite, or a deviation that is not above 0")
        for view, nets in self.views.items():
            n_inputs = len(range(self.n_features)[VIEWS[view]])
            if nets.n_inputs != n_inputs:
                raise ValueError(f"nets of {nets.n_inputs} inputs for {n_inputs} features")
        if self.size < 1 or not self.views:
            raise ValueError(f"nets for pieces of {self.size} bases, of {len(self.views)} views")
        if self.part is not None and (self.part < 1 or self.size % self.part):
            raise ValueError(f"pieces of {self.size} bases in parts of {self.part}")

    @property
    def n_features(self) -> int:
        return N_FEATURES + (N_LAYOUT if self.part else 0)

    def reads(self, lengths: Counts) -> Mask:
        """Whether they read records of these lengths. (n,) -> (n,)"""
        longest = np.inf if self.longest is None else self.longest
        return (lengths >= self.shortest) & (lengths < longest)

    @cached_property
    def stacked(self) -> _Views:
        """All nets by the columns that they read."""
        columns = {VIEWS[view].start or 0: nets for view, nets in self.views.items()}
        return _Views(self.mean, self.deviation, columns)

    def log_odds(self, features: Features) -> Values:
        """The mean over all nets. (n, n_features) -> (n,)"""
        return self.stacked.log_odds(features)


def blocks_of(weight: Weights) -> Values:
    """Weights of a later layer of a net, as the library reads them, flat.

    In blocks of outputs, filled up by zeros: (n_outputs, n_inputs) -> (n_blocks, n_inputs, 16).
    """
    n_outputs, n_inputs = weight.shape
    filled = np.zeros((-(-n_outputs // _REALS) * _REALS, n_inputs))
    filled[:n_outputs] = weight
    blocks = filled.reshape(-1, _REALS, n_inputs).swapaxes(1, 2)
    return np.asarray(blocks.reshape(-1))


def _aligned(values: NDArray[_Number]) -> NDArray[_Number]:
    """The same values from the start of a line of the cache on: no read crosses two lines."""
    room = np.empty(values.nbytes + _LINE, dtype=np.uint8)
    first = -room.ctypes.data % _LINE
    there = room[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    there[...] = values
    return there


def log_odds_of(features: Features, mean: Weights, deviation: Weights, nets: Nets) -> Values:
    """The mean over nets that read all features, standardised by these. (n, n_features) -> (n,)"""
    return _Views(mean, deviation, {0: nets}).log_odds(features)


@dataclass(frozen=True, slots=True)
class Knot:
    """A calibration at one length: probability is the logistic function of slope * x + offset.

    Of proteins the length is one of residues, here and in ``ErrorRates``.
    """

    n_bases: int
    slope: float
    offset: float

    def __post_init__(self) -> None:
        if not (self.n_bases > 0 and self.slope > 0 and isfinite(self.slope + self.offset)):
            raise ValueError(f"a calibration of {self}")

    def calibrated(self, log_odds: Values) -> Values:
        """The log-odds, scaled and moved. (n,) -> (n,)"""
        return self.slope * log_odds + self.offset


@dataclass(frozen=True, slots=True)
class ErrorRates:
    """Error rates at one length: shares of cellular and viral records from some log-odds on.

    The calibrated log-odds rise, so the shares fall. A cut lies at the log-odds of its share, or
    above, for the kinds of hosts that are called most often. A scorer may have fewer true positives
    here than were measured, so that false discovery rates hold for other groups.
    """

    n_bases: int
    log_odds: tuple[float, ...]
    false_positives: tuple[float, ...]
    true_positives: tuple[float, ...]
    cuts: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.n_bases < 1 or not self.log_odds:
            raise ValueError(f"error rates at {self.n_bases} bases, {len(self.log_odds)} of them")
        columns = (self.log_odds, self.false_positives, self.true_positives, self.cuts)
        if len({len(column) for column in columns}) > 1 or not np.isfinite(columns).all():
            raise ValueError(f"error rates {self}")
        if (np.diff(self.log_odds) < 0).any() or (np.diff(self.false_positives) >= 0).any():
            raise ValueError("error rates that are not in the order of their log-odds")
        if (np.diff(self.cuts) < 0).any() or (np.array(self.cuts) < self.log_odds).any():
            raise ValueError("cuts that fall, or lie below their share of all cells")
        shares = (*self.false_positives, *self.true_positives)
        if not (min(shares) > 0 and max(shares) <= 1):
            raise ValueError("error rates that are no shares above 0")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ErrorRates:
        """
        Raises:
            LookupError, TypeError, ValueError: these are not the facts of error rates.
        """
        names = ("log_odds", "false_positives", "true_positives", "cuts")
        return cls(facts["n_bases"], *(tuple(facts[name]) for name in names))

    def cut_at(self, false_positives: float) -> float:
        """The log-odds from which on at most this share of cellular records lies."""
        shares = np.array(self.false_positives)
        return float(np.interp(-np.log(false_positives), -np.log(shares), self.cuts))

    def cut_score(self, false_positives: float) -> float:
        """The score from which on at most this share of cellular records lies."""
        return round(sigmoid(np.array(self.cut_at(false_positives))).item(), 6)

    def false_per_true(self, log_odds: Values) -> Values:
        """False positives over true positives from each of these log-odds on. (n,) -> (n,)

        It never rises; beyond the last of the rates it is theirs.
        """
        ratios = np.array(self.false_positives) / np.array(self.true_positives)
        falling = np.minimum.accumulate(ratios)
        return np.exp(np.interp(log_odds, self.log_odds, np.log(falling)))


@dataclass(frozen=True, eq=False)
class ProteinNets:
    """The nets for proteins. Lengths of knots and error rates are residues, and rise."""

    words: WordTable
    ratios: tuple[Ratios, ...]  # of each pattern: log of how much more often viruses have it
    mean: Weights  # (n_features,)
    deviation: Weights  # (n_features,)
    nets: Nets
    knots: tuple[Knot, ...]
    error_rates: tuple[ErrorRates, ...]
    training: str  # how they were trained, in a sentence

    def __post_init__(self) -> None:
        if self.mean.shape != (N_PROTEIN_FEATURES,) or self.deviation.shape != self.mean.shape:
            raise ValueError(f"means of shape {self.mean.shape} for proteins")
        if not (np.isfinite(self.mean).all() and (self.deviation > 0).all()):
            raise ValueError("a mean that is not finite, or a deviation that is not above 0")
        if self.nets.n_inputs != N_PROTEIN_FEATURES:
            raise ValueError(f"nets of {self.nets.n_inputs} inputs for features of proteins")
        if [ratios.shape for ratios in self.ratios] != [(n_numbers(of),) for of in PATTERNS]:
            raise ValueError("log ratios that are not those of the patterns")
        _check_lengths(self.knots, self.error_rates)

    def log_odds(self, proteins: Proteins) -> Values:
        """The log-odds of each protein, before calibration. n -> (n,)"""
        return self.stacked.log_odds(protein_features(proteins, self.words, self.ratios))

    @cached_property
    def stacked(self) -> _Views:
        """The nets, which read all features."""
        return _Views(self.mean, self.deviation, {0: self.nets})

    def calibrated(self, log_odds: Values, lengths: Counts) -> Values:
        """Calibrated log-odds, where half of all proteins are viral. (n,), (n,) -> (n,)"""
        return calibrate(self.knots, log_odds, lengths)


def _check_sizes(pieces: Sequence[PieceNets]) -> None:
    """Raise ValueError unless sizes rise, and parts are read by nets of their own."""
    if not pieces:
        raise ValueError("no nets for pieces")
    of_size = {nets.size: nets for nets in pieces}
    if len(of_size) < len(pieces):
        raise ValueError("several nets for pieces of one size")
    if list(of_size) != sorted(of_size):
        raise ValueError(f"nets for pieces of {list(of_size)} bases, which do not rise")
    _check_parts([nets for nets in pieces if nets.part], of_size)


def _check_parts(wholes: Sequence[PieceNets], of_size: Mapping[int, PieceNets]) -> None:
    """Raise ValueError unless parts are read by themselves, and a record by one of the nets."""
    for whole in wholes:
        parts = of_size.get(whole.part or 0)
        if parts is None or parts.part or parts.longest or parts.shortest > whole.shortest:
            raise ValueError(f"parts of {whole.part} bases, which no nets read by themselves")
    ends = [whole.longest or np.inf for whole in wholes[:-1]]
    if any(end > whole.shortest for end, whole in zip(ends, wholes[1:], strict=True)):
        raise ValueError("records that several nets read as parts")


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Everything that a score is made with. Pieces rise in size, knots and error rates in length.

    The digests are of the sequences and the groups of the records that it was trained on.
    """

    pieces: tuple[PieceNets, ...]
    windows: PieceNets  # along a record, without words
    windows_knot: Knot  # their calibration, which regions are learned with
    knots: tuple[Knot, ...]
    training: str  # how it was trained, in a sentence
    error_rates: tuple[ErrorRates, ...]
    proteins: ProteinNets | None = None  # None: it reads nucleotides alone
    sha256: str = ""
    trained_records: Digests = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    trained_groups: Digests = field(default_factory=lambda: np.empty(0, dtype=np.uint64))

    def __post_init__(self) -> None:
        _check_lengths(self.knots, self.error_rates)
        _check_sizes(self.pieces)
        if any(nets.words is not self.pieces[0].words for nets in self.pieces):
            raise ValueError("nets that read several tables of words")
        if len(self.windows.words):
            raise ValueError("nets of windows that read words")
        if self.proteins and self.proteins.words is not self.pieces[0].words:
            raise ValueError("nets of proteins that read other words than those of pieces")

    @property
    def shortest(self) -> int:
        """Bases of the shortest record that gets a score."""
        return min(nets.shortest for nets in self.pieces)

    def error_rates_of(self, input_type: InputType) -> tuple[ErrorRates, ...]:
        """The error rates for records of this type."""
        if input_type == "nucleotide":
            return self.error_rates
        assert self.proteins is not None, "a scorer without nets for proteins calls none"
        return self.proteins.error_rates

    def calibrated(self, log_odds: Values, lengths: Counts) -> Values:
        """Calibrated log-odds, where half of all records are viral. (n,), (n,) -> (n,)"""
        return calibrate(self.knots, log_odds, lengths)


class _AtLength(Protocol):
    """A value that is known at one length, in bases, or residues of a protein."""

    @property
    def n_bases(self) -> int: ...


def _check_lengths(*columns: Sequence[_AtLength]) -> None:
    for column in columns:
        lengths = [one.n_bases for one in column]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"values at the lengths {lengths}")


def calibrate(knots: Sequence[Knot], log_odds: Values, lengths: Counts) -> Values:
    """Scale and move log-odds. Slope and offset lie on lines between the knots, as below."""
    slopes = at_lengths(lengths, knots, [knot.slope for knot in knots])
    offsets = at_lengths(lengths, knots, [knot.offset for knot in knots])
    return np.asarray(slopes * log_odds + offsets)


def at_lengths(lengths: Counts, known: Sequence[_AtLength], values: Sequence[float]) -> Values:
    """Values on lines between the known ones, over the logarithm of the length. (n,) -> (n,)"""
    places = np.log([one.n_bases for one in known])
    return np.interp(np.log(np.maximum(1, lengths)), places, values)


def thresholds(
    error_rates: Sequence[ErrorRates], lengths: Counts, false_positives: float
) -> Values:
    """The log-odds from which on at most this share of cellular records of each length lies.

    They lie on lines between the cuts, over the logarithm of the length. (n,) -> (n,)
    """
    cuts = [rates.cut_at(false_positives) for rates in error_rates]
    return at_lengths(lengths, error_rates, cuts)


def false_discovery_rates(
    error_rates: Sequence[ErrorRates],
    log_odds: Values,
    lengths: Counts,
    prevalence: float,
) -> Values:
    """The share of cellular records among those of this length from these log-odds on.

    ``prevalence`` is the share of viral records in the sample. With P for it, F and T for the
    shares of cellular and of viral records that are called, it is (1 - P) F / ((1 - P) F + P T).
    The logarithm of F / T lies on lines between the error rates, over the logarithm of the
    length. (n,), (n,) -> (n,)
    """
    place = at_lengths(lengths, error_rates, range(len(error_rates)))
    left, right = np.floor(place).astype(np.int64), np.ceil(place).astype(np.int64)
    logs = np.log([rates.false_per_true(log_odds) for rates in error_rates])
    rows = np.arange(len(log_odds))
    ratio = np.exp(logs[left, rows] + (place - left) * (logs[right, rows] - logs[left, rows]))
    odds = ratio * (1 - prevalence) / prevalence
    return np.asarray(odds / (1 + odds))


def embedded_scorer() -> Path:
    """The scorer of nucleotides, used where no model is named."""
    return EMBEDDED_FOLDER / "scorer.safetensors"


def own_scorer() -> Scorer:
    """The scorer of VirNucPro itself, which a process reads once.

    Raises:
        UnavailableError: as ``load_scorer``.
    """
    return _load_once(embedded_scorer())


@cache
def _load_once(path: Path) -> Scorer:
    return load_scorer(path)


def load_scorer(path: Path) -> Scorer:
    """Read a scorer from its safetensors file.

    Raises:
        UnavailableError: the file is missing, damaged, or no scorer.
    """
    try:
        with open_plain(path) as handle:
            content = mmap(handle.fileno(), 0, access=ACCESS_READ)
        facts, tensors = _mapped(content)
        if facts["format"] != FORMAT:
            raise ValueError(f"the format {facts['format']}")
        words = WordTable(tensors["words.buckets"], tensors["words.entries"])
        return Scorer(
            pieces=tuple(
                _piece_nets(str(of_size["size"]), of_size, words, tensors)
                for of_size in facts["pieces"]
            ),
            windows=_piece_nets(WINDOWS, facts[WINDOWS], NO_WORDS, tensors),
            windows_knot=Knot(**facts["windows_knot"]),
            knots=tuple(Knot(**knot) for knot in facts["knots"]),
            training=str(facts["training"]),
            error_rates=tuple(ErrorRates.of(rates) for rates in facts["error_rates"]),
            proteins=_protein_nets(facts[PROTEINS], words, tensors),
            sha256=sha256(content).hexdigest(),
            **{name: tensors[name] for name in _DIGESTS if name in tensors},
        )
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not a scorer of VirNucPro: {printable(error)}",
            hint="reinstall VirNucPro: its scorer is part of it",
        ) from error


def _mapped(content: mmap) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The facts and the arrays of a safetensors file in memory; nothing is copied.

    It begins with the size of a header in JSON, which has type, shape and place of each array.

    Raises:
        LookupError, ValueError, TypeError, AttributeError: it is damaged.
    """
    first = 8 + int.from_bytes(content[:8], "little")
    header = parse_json(content[8:first])
    facts: dict[str, Any] = parse_json(header.pop("__metadata__")["facts"])
    tensors = {}
    for name, of in header.items():
        start, end = of["data_offsets"]
        kind, n = np.dtype(_KINDS[of["dtype"]]), prod(of["shape"])
        if end - start != n * kind.itemsize:
            raise ValueError(f"{name} has {end - start} bytes")
        tensors[name] = np.frombuffer(content, kind, n, first + start).reshape(of["shape"])
    return facts, tensors


def _piece_nets(
    name: str, facts: Mapping[str, Any], words: WordTable, tensors: Mapping[str, Any]
) -> PieceNets:
    return PieceNets(
        size=facts["size"],
        shortest=facts["shortest"],
        longest=facts["longest"],
        part=facts["part"],
        words=words,
        mean=tensors[f"{name}.mean"],
        deviation=tensors[f"{name}.deviation"],
        views={
            view: _nets(f"{name}.{view}", n_viral, tensors)
            for view, n_viral in facts["views"].items()
        },
    )


def _nets(name: str, n_viral: int, tensors: Mapping[str, Any]) -> Nets:
    layers = ((tensors[f"{name}.{i}.weight"], tensors[f"{name}.{i}.bias"]) for i in range(N_LAYERS))
    return Nets(tuple(layers), n_viral)


def _protein_nets(
    facts: Mapping[str, Any] | None, words: WordTable, tensors: Mapping[str, Any]
) -> ProteinNets | None:
    if facts is None:
        return None
    return ProteinNets(
        words=words,
        ratios=tuple(tensors[f"{PROTEINS}.patterns.{i}"] for i in range(len(PATTERNS))),
        mean=tensors[f"{PROTEINS}.mean"],
        deviation=tensors[f"{PROTEINS}.deviation"],
        nets=_nets(PROTEINS, facts["n_viral"], tensors),
        knots=tuple(Knot(**knot) for knot in facts["knots"]),
        error_rates=tuple(ErrorRates.of(rates) for rates in facts["error_rates"]),
        training=str(facts["training"]),
    )


def save_scorer(path: Path, scorer: Scorer) -> None:
    """Write a scorer, but for the hash of its file; the same bytes for the same scorer."""
    tensors: dict[str, NDArray[Any]] = {
        "words.buckets": scorer.pieces[0].words.n_of_bucket,
        "words.entries": scorer.pieces[0].words.entries,
    }
    for nets in scorer.pieces:
        tensors |= _tensors(str(nets.size), nets)
    tensors |= _tensors(WINDOWS, scorer.windows)
    if scorer.proteins:
        tensors |= _protein_tensors(scorer.proteins)
    tensors |= {name: getattr(scorer, name) for name in _DIGESTS}
    facts = {
        "format": FORMAT,
        "pieces": [_facts(nets) for nets in scorer.pieces],
        WINDOWS: _facts(scorer.windows),
        "windows_knot": asdict(scorer.windows_knot),
        **_by_length(scorer),
        PROTEINS: scorer.proteins
        and {"n_viral": scorer.proteins.nets.n_viral, **_by_length(scorer.proteins)},
    }
    content = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    with atomic(path) as temporary:
        temporary.write_bytes(save(content, metadata={"facts": json.dumps(facts)}))


def _by_length(of: Scorer | ProteinNets) -> dict[str, Any]:
    return {
        "knots": [asdict(knot) for knot in of.knots],
        "error_rates": [asdict(rates) for rates in of.error_rates],
        "training": of.training,
    }


def _tensors(name: str, nets: PieceNets) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        f"{name}.mean": nets.mean,
        f"{name}.deviation": nets.deviation,
    }
    for view, of_view in nets.views.items():
        tensors |= _layers(f"{name}.{view}", of_view)
    return tensors


def _protein_tensors(proteins: ProteinNets) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        f"{PROTEINS}.mean": proteins.mean,
        f"{PROTEINS}.deviation": proteins.deviation,
    }
    tensors |= {f"{PROTEINS}.patterns.{i}": ratios for i, ratios in enumerate(proteins.ratios)}
    return tensors | _layers(PROTEINS, proteins.nets)


def _layers(name: str, nets: Nets) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {}
    for i, (weight, bias) in enumerate(nets.layers):
        tensors |= {f"{name}.{i}.weight": weight, f"{name}.{i}.bias": bias}
    return tensors


def _facts(nets: PieceNets) -> dict[str, Any]:
    return {
        "size": nets.size,
        "shortest": nets.shortest,
        "longest": nets.longest,
        "part": nets.part,
        "views": {view: of_view.n_viral for view, of_view in nets.views.items()},
    }
