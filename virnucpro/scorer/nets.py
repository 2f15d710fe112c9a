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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from hashlib import sha256
from math import prod
from mmap import ACCESS_READ, mmap
from operator import mul
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import InputType
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.files import EMBEDDED_FOLDER, open_plain, parse_json
from virnucpro.ground.library import call
from virnucpro.ground.log import printable
from virnucpro.ground.records import Counts, Mask, Values, sigmoid
from virnucpro.scorer.features import NO_WORDS, RATIOS, SHARES, Features, WordTable
from virnucpro.scorer.proteins import PATTERNS, SHORTEST, Proteins, Ratios, protein_features

FORMAT = 11
ALL = ""  # the view of nets that read all features
VIEWS = {"shares": SHARES, "ratios": RATIOS, ALL: slice(None)}
WINDOWS, PROTEINS = "windows", "proteins"  # what tensors of these nets are called by
N_LAYERS = 3
FARTHEST = 6.0  # deviations from the mean; what is farther is taken for this
N_LEVELS = 127  # from the mean to the farthest
MEAN_LEVEL = 128
GELU_STEPS, GELU_ZERO = 20, 4  # levels that 1 has, and that of 0
INNER_STEPS = 64  # of 1, in what a GELU is made of
# of each layer: the step of its inputs, their level of 0, and how many units its sums are worth
_STEPS = (
    (FARTHEST / N_LEVELS, MEAN_LEVEL, INNER_STEPS),
    (1 / GELU_STEPS, GELU_ZERO, INNER_STEPS),
    (1 / GELU_STEPS, GELU_ZERO, 1),
)
_OUTPUTS, _INPUTS = 32, 4  # of a layer that are computed at once
_LINE = 64  # bytes that a processor reads at once

OWN_SCORER = EMBEDDED_FOLDER / "scorer.safetensors"
DIGESTS = ("trained_records", "trained_groups")
_KINDS = {"U8": "u1", "I8": "i1", "U16": "<u2", "F32": "<f4", "U64": "<u8"}  # of safetensors

Digests = NDArray[np.uint64]
Weights = NDArray[np.float32]
Layer = tuple[Weights, Weights]  # weights (n_nets, out, in), biases (n_nets, out)
# nets that read the same view of the features, layer by layer, between two of which stands a GELU.
# What the last gives are the logits of kinds, so many of viruses first; the others are of cells
Stack = tuple[tuple[Layer, ...], int]


@dataclass(frozen=True, eq=False)
class Nets:
    """Nets that read views of the same features, which are standardised once for all of them.

    A view has the features from a column on. A record's score must not depend on the records
    beside it, and a sum in float32 does. One of whole numbers does not, and is faster: features,
    and the GELUs between two layers, are levels of 8 bits, and so are weights. A feature of 0, as
    most of a short piece are, has a level without an error.
    """

    mean: Weights  # (n_features,)
    deviation: Weights  # (n_features,)
    stacks: Mapping[int, Stack]  # by the first column that they read

    @cached_property
    def arguments(self) -> tuple[NDArray[Any] | int, ...]:
        """What functions of the library take."""
        scale = np.float32(N_LEVELS / FARTHEST) / self.deviation
        centre = (np.rint(self.mean.astype(np.float64) * scale) / scale).astype(np.float32)
        moved = (centre.astype(np.float64) - self.mean) / self.deviation
        layers, sizes = list[tuple[Any, ...]](), list[tuple[int, ...]]()
        for column, (stack, n_viral) in self.stacks.items():
            n_nets, _, n_inputs = stack[0][0].shape
            n_outputs = [bias.shape[1] for _, bias in stack]
            still = (np.zeros(n) for n in n_outputs)
            moves = [moved[column : column + n_inputs], *still][:N_LAYERS]
            columns = list(zip(stack, moves, _STEPS, strict=True))
            for number in range(n_nets):
                layers += [(w[number], b[number], move, *steps) for (w, b), move, steps in columns]
                sizes.append((column, n_inputs, *n_outputs, n_viral))
        n = len(self.mean), len(sizes)
        return centre, scale, *n, np.array(sizes, dtype=np.int64), *_whole_numbers(layers)

    def log_odds(self, features: Features) -> Values:
        """The mean over all nets. (n, n_features) -> (n,)"""
        log_odds = np.empty(len(features))
        call("net_log_odds", features, len(features), *self.arguments, log_odds)
        return log_odds


@dataclass(frozen=True, eq=False)
class PieceNets:
    """The nets for pieces of one size, of records from ``shortest`` to below ``longest`` bases."""

    size: int
    shortest: int
    longest: int | None
    part: int | None  # bases of the parts that a piece is read as; None: it is read at once
    words: WordTable  # that their features are made with
    nets: Nets

    def reads(self, lengths: Counts) -> Mask:
        """Whether they read records of these lengths. (n,) -> (n,)"""
        longest = np.inf if self.longest is None else self.longest
        return (lengths >= self.shortest) & (lengths < longest)


def _whole_numbers(
    layers: Sequence[tuple[Any, ...]],
) -> tuple[NDArray[np.int8], NDArray[np.int32], Weights]:
    """Weights, starts and worths of layers one behind the other: see ``round_layer``.

    The first weights begin a line of the cache, so that no read crosses two lines.
    """
    n_outputs = [-(-len(bias) // _OUTPUTS) * _OUTPUTS for _, bias, *_ in layers]
    widths = [-(-weight.shape[1] // _INPUTS) * _INPUTS for weight, *_ in layers]
    room = np.zeros(sum(map(mul, n_outputs, widths)) + _LINE, dtype=np.int8)
    weights = room[-room.ctypes.data % _LINE :][: len(room) - _LINE]
    start, worth = np.zeros(sum(n_outputs), np.int32), np.zeros(sum(n_outputs), np.float32)
    first = weight_first = 0
    for (weight, bias, *more), n, width in zip(layers, n_outputs, widths, strict=True):
        of_layer = weights[weight_first:], start[first:], worth[first:]
        call("round_layer", weight, bias, *weight.shape, *more, *of_layer)
        first, weight_first = first + n, weight_first + n * width
    return weights, start, worth


@dataclass(frozen=True, slots=True)
class Knot:
    """A calibration at one length: probability is the logistic function of slope * x + offset.

    Of proteins the length is one of residues, here and in ``ErrorRates``.
    """

    n_bases: int
    slope: float
    offset: float

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
    nets: Nets
    knots: tuple[Knot, ...]
    error_rates: tuple[ErrorRates, ...]
    training: str  # how they were trained, in a sentence

    def log_odds(self, proteins: Proteins) -> Values:
        """The log-odds of each protein, before calibration. n -> (n,)"""
        return self.nets.log_odds(protein_features(proteins, self.words, self.ratios))


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

    def __reduce__(self) -> tuple[Callable[..., Scorer], tuple[Any, ...]]:
        """Another process reads VirNucPro's own from its file, and shares that in memory."""
        if self is Scorer.own():
            return Scorer.own, ()
        return Scorer, tuple(getattr(self, one.name) for one in fields(self))

    def shortest(self, input_type: InputType) -> int:
        """Letters of the shortest record that gets a score."""
        if input_type == "protein":
            return SHORTEST
        return min(nets.shortest for nets in self.pieces)

    def error_rates_of(self, input_type: InputType) -> tuple[ErrorRates, ...]:
        """The error rates for records of this type."""
        if input_type == "nucleotide":
            return self.error_rates
        assert self.proteins is not None, "a scorer without nets for proteins calls none"
        return self.proteins.error_rates

    @staticmethod
    @cache
    def own() -> Scorer:
        """The scorer of VirNucPro itself, which a process reads once.

        Raises:
            UnavailableError: as ``load_scorer``.
        """
        return load_scorer(OWN_SCORER)


class _AtLength(Protocol):
    """A value that is known at one length, in bases, or residues of a protein."""

    @property
    def n_bases(self) -> int: ...


def calibrate(knots: Sequence[Knot], log_odds: Values, lengths: Counts) -> Values:
    """The log-odds where half of all sequences are viral: scaled and moved. (n,), (n,) -> (n,)

    Slope and offset lie on lines between the knots, as below.
    """
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


def load_scorer(path: Path) -> Scorer:
    """Read a scorer from its safetensors file. That its nets fit is for whoever makes it to see.

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
            **{name: tensors[name] for name in DIGESTS if name in tensors},
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
        nets=_nets(name, facts["views"], tensors),
    )


def _nets(name: str, views: Mapping[str, int], tensors: Mapping[str, Any]) -> Nets:
    """The nets of this name, from how many kinds of viruses those of each view know."""
    stacks = {}
    for view, n_viral in views.items():
        each = [".".join(filter(None, (name, view, str(i)))) for i in range(N_LAYERS)]
        layers = tuple((tensors[f"{one}.weight"], tensors[f"{one}.bias"]) for one in each)
        stacks[VIEWS[view].start or 0] = layers, n_viral
    return Nets(tensors[f"{name}.mean"], tensors[f"{name}.deviation"], stacks)


def _protein_nets(
    facts: Mapping[str, Any] | None, words: WordTable, tensors: Mapping[str, Any]
) -> ProteinNets | None:
    if facts is None:
        return None
    return ProteinNets(
        words=words,
        ratios=tuple(tensors[f"{PROTEINS}.patterns.{i}"] for i in range(len(PATTERNS))),
        nets=_nets(PROTEINS, {ALL: facts["n_viral"]}, tensors),
        knots=tuple(Knot(**knot) for knot in facts["knots"]),
        error_rates=tuple(ErrorRates.of(rates) for rates in facts["error_rates"]),
        training=str(facts["training"]),
    )
