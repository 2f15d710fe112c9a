"""The scorer's networks: from window features to log-odds of being viral.

A network has an output for each kind of sequence, such as phages, bacteria and transposable
elements. The log-odds compare all kinds of viruses together with all kinds of cells.

One safetensors file contains all networks and the k-mer table. Each window size has the centre and
scale of the features, and networks with three layers. A network reads one of two views of the
features. Networks with the same view are stacked: ``500.shares.0.weight`` is (n_nets, out, in),
with ``.start`` and ``.worth`` of shape (n_nets, out). Windows that are read in one go also have a
network trained on prokaryotes alone (``500.prokaryotic.0.weight``). Networks for sliding windows
along a record read no k-mers (``windows.shares.0.weight``). Networks for proteins read all residue
features and log ratios of patterns (``proteins.0.weight``, ``proteins.patterns.0``). The metadata
describes the scorer in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, open_regular_file, parse_json
from virnucpro.core.builtin_hashes import hash_weights
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import InputType
from virnucpro.viral.features import (
    NO_KMERS,
    Features,
    KmerClassTable,
    WindowFeatures,
)
from virnucpro.viral.proteins import PATTERNS, SHORTEST, Proteins, Ratios, protein_features

FORMAT = 13
ALL = ""  # the view for networks that read all features
VIEWS = {
    "shares": WindowFeatures.SHARES_VIEW,
    "ratios": WindowFeatures.RATIOS_VIEW,
    ALL: slice(None),
}
PROKARYOTIC = "prokaryotic"  # the network trained on prokaryotes and their viruses alone
WINDOWS = "windows"  # tensor prefix of these networks
PROTEINS = "proteins"  # tensor prefix of these networks
_OUTPUTS = 32  # outputs of a layer that the library computes together

BUILTIN_SCORER = EMBEDDED_FOLDER / "scorer.safetensors"
DIGESTS = ("trained_records", "trained_groups")

Digests = NDArray[np.uint64]
Weights = NDArray[np.float32]


class QuantizedLayer(NamedTuple):
    """A layer of several networks in integers."""

    weight: NDArray[np.int8]  # (n_nets, out, in)
    # (n_nets, out): the bias, minus the contribution of level 0 for each input. In files: start
    bias: NDArray[np.int32]
    # (n_nets, out): the value of 1 in a sum, in steps of GELU inputs or in logits. In files: worth
    scale: Weights


# networks with the same view, layer by layer, with a GELU between layers, and the number of viral
# kinds: the last layer returns logits of kinds, first viral, then cellular
Stack = tuple[tuple[QuantizedLayer, ...], int]


@dataclass(frozen=True, eq=False)
class NetworkStack:
    """Networks that read views of the same features, standardised once for all networks.

    A view contains the features from one column on. Features, GELUs and weights are 8-bit
    integers. Their sums are fast and, unlike float32 sums, do not depend on the other records in a
    block. A feature of 0, the most common value in a short window, is represented exactly.
    """

    centre: Weights  # (n_features,), near the mean
    scale: Weights  # (n_features,): levels for 1
    stacks: Mapping[int, Stack]  # by their first feature column
    prokaryotic: Stack | None = None  # reads ratios, where prokaryotes are likely

    @cached_property
    def arguments(self) -> tuple[NDArray[Any] | int, ...]:
        """Return the arguments for library functions."""
        views = [(column, stack, False) for column, stack in self.stacks.items()]
        if self.prokaryotic is not None:
            views.append((WindowFeatures.RATIOS_VIEW.start, self.prokaryotic, True))
        sizes = list[tuple[int, ...]]()
        layers = list[QuantizedLayer]()
        for column, (stack, n_viral), is_special in views:
            n_nets, _, n_inputs = stack[0].weight.shape
            n_outputs = (layer.bias.shape[1] for layer in stack)
            sizes += n_nets * [(column, n_inputs, *n_outputs, n_viral, is_special)]
            for net in range(n_nets):
                layers += [QuantizedLayer._make(array[net] for array in layer) for layer in stack]
        n = len(self.centre), len(sizes)
        return self.centre, self.scale, *n, np.array(sizes, dtype=np.int64), *_in_blocks(layers)

    @property
    def n_kinds(self) -> int:
        """Return the number of kinds of which the networks give probabilities, or 0."""
        labels = 2  # outputs of a network that knows no kinds
        sizes: list[int] = [layers[-1].bias.shape[1] for layers, _ in self.stacks.values()]
        return max([0, *(size for size in sizes if size > labels)])

    def log_odds(self, features: Features) -> FloatArray:
        """Compute log-odds with ``write_log_odds`` in ``networks.c``. (n, n_features) -> (n,)"""
        log_odds = np.empty(len(features))
        kinds = np.empty((len(features), self.n_kinds))
        call("net_log_odds", features, len(features), *self.arguments, log_odds, kinds)
        return log_odds


@dataclass(frozen=True, eq=False)
class PieceNetworks:
    """The networks for one window size, in records of ``shortest`` to below ``longest`` bases."""

    size: int
    shortest: int
    longest: int | None
    part: int | None  # bases in each part of a window. None: the window is read in one go
    kmers: KmerClassTable  # for their features
    nets: NetworkStack

    def reads(self, lengths: IntArray) -> BoolArray:
        """Return whether the networks read records with these lengths. (n,) -> (n,)"""
        longest = np.inf if self.longest is None else self.longest
        return (lengths >= self.shortest) & (lengths < longest)


def _in_blocks(layers: Iterable[QuantizedLayer]) -> QuantizedLayer:
    """Concatenate layers, padded with zeros to output blocks.

    See ``NetworkStack`` in ``networks.c``. The weights are aligned to cache lines, so that no read
    spans two of them.
    """
    line = 64  # bytes in a cache line
    padded = [_pad(*layer) for layer in layers]
    n_bytes = sum(layer.weight.size for layer in padded)
    buffer = np.empty(n_bytes + line, dtype=np.int8)
    weights = buffer[-buffer.ctypes.data % line :][:n_bytes]
    first = 0
    for weight, _, _ in padded:
        # Four weights are moved as one integer.
        fours = weight.view(np.int32)
        blocks = fours.reshape(-1, _OUTPUTS, fours.shape[1]).swapaxes(1, 2)
        target = weights[first : first + weight.size].view(np.int32)
        target.reshape(blocks.shape)[:] = blocks
        first += weight.size
    biases = np.concatenate([layer.bias for layer in padded])
    scales = np.concatenate([layer.scale for layer in padded])
    return QuantizedLayer(weights, biases, scales)


def _pad(weight: NDArray[np.int8], bias: NDArray[np.int32], scale: Weights) -> QuantizedLayer:
    """Pad a layer with zeros, to complete output blocks and groups of inputs."""
    n_outputs = -len(bias) % _OUTPUTS
    inputs_together = 4
    n_inputs = -weight.shape[1] % inputs_together
    if n_outputs:
        bias = np.pad(bias, (0, n_outputs))
        scale = np.pad(scale, (0, n_outputs))
    if n_outputs or n_inputs:
        weight = np.pad(weight, ((0, n_outputs), (0, n_inputs)))
    return QuantizedLayer(weight, bias, scale)


@dataclass(frozen=True, slots=True)
class Knot:
    """A calibration at one length: probability is the logistic function of slope * x + offset.

    For proteins, the length counts residues, here and in ``ErrorRates``.
    """

    n_bases: int
    slope: float
    offset: float

    def calibrated(self, log_odds: FloatArray) -> FloatArray:
        """Return the calibrated log-odds. (n,) -> (n,)"""
        return self.slope * log_odds + self.offset


@dataclass(frozen=True, slots=True)
class ErrorRates:
    """Error rates at one length: shares of cellular and viral records at or above some log-odds.

    The log-odds are calibrated and increase, so the shares decrease. A threshold is at the log-odds
    for its share, or higher, to cover the kinds of hosts with the most false positives. True
    positives may be lower than measured, so that false discovery rates are valid for other groups.
    """

    n_bases: int
    log_odds: tuple[float, ...]
    false_positives: tuple[float, ...]
    true_positives: tuple[float, ...]
    cuts: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.n_bases < 1 or not self.log_odds:
            raise ValueError(f"there are {len(self.log_odds)} error rates at {self.n_bases} bases")
        columns = (self.log_odds, self.false_positives, self.true_positives, self.cuts)
        if len({len(column) for column in columns}) > 1 or not np.isfinite(columns).all():
            raise ValueError(f"invalid error rates: {self}")
        if (np.diff(self.log_odds) < 0).any() or (np.diff(self.false_positives) >= 0).any():
            raise ValueError("error rates are not in the order of their log-odds")
        if (np.diff(self.cuts) < 0).any() or (np.array(self.cuts) < self.log_odds).any():
            raise ValueError("cuts fall, or are below the log-odds of their share")
        shares = (*self.false_positives, *self.true_positives)
        if not (min(shares) > 0 and max(shares) <= 1):
            raise ValueError("error rates must lie above 0 and not above 1")

    @classmethod
    def from_scores(cls, metadata: Mapping[str, Any]) -> ErrorRates:
        """Read error rates from metadata.

        Raises:
            LookupError, TypeError, ValueError: the metadata does not describe error rates.
        """
        names = ("log_odds", "false_positives", "true_positives", "cuts")
        return cls(metadata["n_bases"], *(tuple(metadata[name]) for name in names))

    def threshold_at(self, false_positives: float) -> float:
        """Return the log-odds that at most this share of cellular records reaches."""
        shares = np.array(self.false_positives)
        return float(np.interp(-np.log(false_positives), -np.log(shares), self.cuts))

    def false_per_true(self, log_odds: FloatArray) -> FloatArray:
        """Return the ratio of false to true positives at or above these log-odds. (n,) -> (n,)

        The ratio never increases, and is constant beyond the last rates.
        """
        ratios = np.array(self.false_positives) / np.array(self.true_positives)
        falling = np.minimum.accumulate(ratios)
        return np.exp(np.interp(log_odds, self.log_odds, np.log(falling)))


@dataclass(frozen=True, slots=True)
class Kingdom:
    """Records whose kind is probably one of some kinds, and their error rates by length.

    These are the viruses and cells that resemble each other most. Each kingdom has its own
    thresholds, so that the cells of one do not decide about the viruses of another.
    """

    name: str
    kinds: tuple[int, ...]  # outputs of the networks
    error_rates: tuple[ErrorRates, ...]


@dataclass(frozen=True, eq=False)
class ProteinNetworks:
    """The networks for proteins. Knots and error rates are sorted by length, in residues."""

    kmers: KmerClassTable
    ratios: tuple[Ratios, ...]  # per pattern: log ratio of its frequency in viruses over cells
    nets: NetworkStack
    knots: tuple[Knot, ...]
    error_rates: tuple[ErrorRates, ...]
    training: str  # training data and method, in a sentence

    def log_odds(self, proteins: Proteins) -> FloatArray:
        """Return each protein's log-odds, before calibration. n -> (n,)"""
        return self.nets.log_odds(protein_features(proteins, self.kmers, self.ratios))


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """All data for scoring. Networks are sorted by window size, knots and error rates by length.

    The digests identify the training records and their groups.
    """

    pieces: tuple[PieceNetworks, ...]
    windows: PieceNetworks  # for sliding windows along a record, without k-mers
    windows_knot: Knot  # calibration for sliding windows
    knots: tuple[Knot, ...]
    training: str  # training data and method, in a sentence
    error_rates: tuple[ErrorRates, ...]  # of all kingdoms together
    kingdoms: tuple[Kingdom, ...]
    proteins: ProteinNetworks | None = None  # None: it scores nucleotides only
    sha256: str = ""
    trained_records: Digests = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    trained_groups: Digests = field(default_factory=lambda: np.empty(0, dtype=np.uint64))

    def __reduce__(self) -> tuple[Callable[..., Scorer], tuple[Any, ...]]:
        """Pickle the built-in scorer by its hash, so that each process maps the same file."""
        if self is Scorer.load_builtin():
            return Scorer.load_builtin_with, (self.sha256,)
        return Scorer, tuple(getattr(self, field.name) for field in fields(self))

    def min_length(self, input_type: InputType) -> int:
        """Return the minimum record length for a score, in bases or residues."""
        if input_type == "protein":
            return SHORTEST
        return min(nets.shortest for nets in self.pieces)

    def select_error_rates(self, input_type: InputType) -> tuple[tuple[ErrorRates, ...], ...]:
        """Return the error rates for this record type, by kingdom. All proteins are of one."""
        if input_type == "nucleotide":
            return tuple(kingdom.error_rates for kingdom in self.kingdoms)
        assert self.proteins is not None, "a scorer without nets for proteins calls none"
        return (self.proteins.error_rates,)

    def sum_by_kingdom(self, kinds: FloatArray) -> FloatArray:
        """Sum the probabilities of the kinds of each kingdom. (n, n_kinds) -> (n, n_kingdoms)"""
        sums = [kinds[:, list(kingdom.kinds)].sum(axis=1) for kingdom in self.kingdoms]
        return np.stack(sums, axis=1)

    @staticmethod
    @cache
    def load_builtin() -> Scorer:
        """Return the built-in scorer, which each process reads once.

        Raises:
            UnavailableError: as ``load_scorer``.
        """
        return load_scorer(BUILTIN_SCORER)

    @staticmethod
    def load_builtin_with(sha256: str) -> Scorer:
        """Return the built-in scorer, as another process has read it.

        Raises:
            UnavailableError: the file was replaced since then, or as ``load_scorer``.
        """
        if (scorer := Scorer.load_builtin()).sha256 != sha256:
            raise UnavailableError(
                f"the scorer of VirNucPro was replaced during the run: {printable(BUILTIN_SCORER)}",
                hint=with_options(
                    "run the command again, with {force}: scores of two scorers do not mix"
                ),
            )
        return scorer


class _LengthCurve(Protocol):
    """A measurement at one length, in bases or in residues."""

    @property
    def n_bases(self) -> int: ...


def calibrate(knots: Sequence[Knot], log_odds: FloatArray, lengths: IntArray) -> FloatArray:
    """Return the calibrated log-odds, for samples that are half viral. (n,), (n,) -> (n,)

    Slope and offset are interpolated between the knots: see ``interpolate_lengths``.
    """
    slopes = interpolate_lengths(lengths, knots, [knot.slope for knot in knots])
    offsets = interpolate_lengths(lengths, knots, [knot.offset for knot in knots])
    return np.asarray(slopes * log_odds + offsets)


def interpolate_lengths(
    lengths: IntArray, curves: Sequence[_LengthCurve], values: Sequence[float]
) -> FloatArray:
    """Interpolate values linearly over log(length). (n,) -> (n,)"""
    log_lengths = np.log([curve.n_bases for curve in curves])
    return np.interp(np.log(np.maximum(1, lengths)), log_lengths, values)


def thresholds(
    error_rates: Sequence[ErrorRates], lengths: IntArray, false_positives: float
) -> FloatArray:
    """Return, for each length, the log-odds that at most this share of cellular records reaches.

    Thresholds are interpolated linearly over log(length). (n,) -> (n,)
    """
    cuts = [rates.threshold_at(false_positives) for rates in error_rates]
    return interpolate_lengths(lengths, error_rates, cuts)


def most_probable(kingdom_shares: FloatArray) -> IntArray:
    """Return the most probable kingdom. (n, n_kingdoms) -> (n,)

    The first one without a probability, as records without a known base have none.
    """
    if not kingdom_shares.shape[1]:  # no record was read
        return np.zeros(len(kingdom_shares), dtype=np.int64)
    return np.asarray(np.nan_to_num(kingdom_shares).argmax(axis=1))


def thresholds_of(
    error_rates: Sequence[Sequence[ErrorRates]],
    kingdoms: IntArray,
    lengths: IntArray,
    false_positives: float,
) -> FloatArray:
    """Return ``thresholds`` for records of several kingdoms. Error rates are by kingdom. (n,)"""
    by_kingdom = np.stack([thresholds(rates, lengths, false_positives) for rates in error_rates])
    return np.asarray(by_kingdom[kingdoms, np.arange(len(lengths))])


def false_discovery_rates_of(
    error_rates: Sequence[Sequence[ErrorRates]],
    kingdoms: IntArray,
    log_odds: FloatArray,
    lengths: IntArray,
    prevalence: float,
) -> FloatArray:
    """Return ``false_discovery_rates`` for records of several kingdoms. (n,)"""
    by_kingdom = np.stack(
        [false_discovery_rates(rates, log_odds, lengths, prevalence) for rates in error_rates]
    )
    return np.asarray(by_kingdom[kingdoms, np.arange(len(lengths))])


def false_discovery_rates(
    error_rates: Sequence[ErrorRates],
    log_odds: FloatArray,
    lengths: IntArray,
    prevalence: float,
) -> FloatArray:
    """Return the cellular share among records with this length at or above these log-odds.

    It is (1 - P) F / ((1 - P) F + P T), where P is the ``prevalence``, the share of viral records
    in the sample. F and T are the shares of cellular and viral records at or above the log-odds.
    log(F / T) is interpolated linearly over log(length). (n,), (n,) -> (n,)
    """
    position = interpolate_lengths(lengths, error_rates, range(len(error_rates)))
    left = np.floor(position).astype(np.int64)
    right = np.ceil(position).astype(np.int64)
    logs = np.log([rates.false_per_true(log_odds) for rates in error_rates])
    rows = np.arange(len(log_odds))
    ratio = np.exp(logs[left, rows] + (position - left) * (logs[right, rows] - logs[left, rows]))
    odds = ratio * (1 - prevalence) / prevalence
    return np.asarray(odds / (1 + odds))


def load_scorer(path: Path) -> Scorer:
    """Read a scorer from its safetensors file. Network shapes are not checked.

    Raises:
        UnavailableError: the file is missing, damaged, or not a scorer.
        OSError: the file cannot be read now.
    """
    try:
        content, metadata, tensors = load_tensors(path)
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']}")
        kmers = KmerClassTable(tensors["words.buckets"], tensors["words.entries"])
        return Scorer(
            pieces=tuple(
                _piece_nets(str(size_metadata["size"]), size_metadata, kmers, tensors)
                for size_metadata in metadata["pieces"]
            ),
            windows=_piece_nets(WINDOWS, metadata[WINDOWS], NO_KMERS, tensors),
            windows_knot=Knot(**metadata["windows_knot"]),
            knots=tuple(Knot(**knot) for knot in metadata["knots"]),
            training=str(metadata["training"]),
            error_rates=_error_rates(metadata),
            kingdoms=tuple(
                Kingdom(str(kingdom["name"]), tuple(kingdom["kinds"]), _error_rates(kingdom))
                for kingdom in metadata["kingdoms"]
            ),
            proteins=_protein_nets(metadata[PROTEINS], kmers, tensors),
            sha256=hash_weights(path.name, content),
            **{name: tensors[name] for name in DIGESTS if name in tensors},
        )
    except (FileNotFoundError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not a scorer of VirNucPro: {printable(error)}",
            hint="reinstall VirNucPro: its scorer is part of it",
        ) from error


def _error_rates(metadata: Mapping[str, Any]) -> tuple[ErrorRates, ...]:
    return tuple(ErrorRates.from_scores(rates) for rates in metadata["error_rates"])


def load_tensors(path: Path) -> tuple[mmap, dict[str, Any], dict[str, NDArray[Any]]]:
    """Map a safetensors file without copying. -> its content, metadata and arrays

    The file begins with a JSON header's size. The header contains type, shape and offsets for
    each array.

    Raises:
        OSError: the file cannot be read.
        LookupError, ValueError, TypeError, AttributeError: it is damaged.
    """
    with open_regular_file(path) as handle:
        content = mmap(handle.fileno(), 0, access=ACCESS_READ)
    first = 8 + int.from_bytes(content[:8], "little")
    header = parse_json(content[8:first])
    metadata: dict[str, Any] = parse_json(header.pop("__metadata__")["facts"])
    dtypes = {"U8": "u1", "I8": "i1", "U16": "<u2", "I32": "<i4", "F32": "<f4", "U64": "<u8"}
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        dtype = np.dtype(dtypes[entry["dtype"]])
        n = prod(entry["shape"])
        if end - start != n * dtype.itemsize:
            raise ValueError(f"{name} has {end - start} bytes")
        tensors[name] = np.frombuffer(content, dtype, n, first + start).reshape(entry["shape"])
    return content, metadata, tensors


def _piece_nets(
    name: str, metadata: Mapping[str, Any], kmers: KmerClassTable, tensors: Mapping[str, Any]
) -> PieceNetworks:
    nets = _nets(name, metadata["views"], tensors)
    lengths = metadata["size"], metadata["shortest"], metadata["longest"], metadata["part"]
    return PieceNetworks(*lengths, kmers, nets)


def _nets(name: str, views: Mapping[str, int], tensors: Mapping[str, Any]) -> NetworkStack:
    """Return the networks with this name. ``views`` gives the number of viral kinds per view."""
    stacks = {}
    for view, n_viral in views.items():
        prefix = f"{name}.{view}" if view else name
        layers = tuple(
            QuantizedLayer(
                tensors[f"{prefix}.{layer}.weight"],
                bias=tensors[f"{prefix}.{layer}.start"],
                scale=tensors[f"{prefix}.{layer}.worth"],
            )
            for layer in range(3)
        )
        stacks[view] = layers, n_viral
    prokaryotic = stacks.pop(PROKARYOTIC, None)
    by_column = {VIEWS[view].start or 0: stack for view, stack in stacks.items()}
    return NetworkStack(tensors[f"{name}.centre"], tensors[f"{name}.scale"], by_column, prokaryotic)


def _protein_nets(
    metadata: Mapping[str, Any] | None, kmers: KmerClassTable, tensors: Mapping[str, Any]
) -> ProteinNetworks | None:
    if metadata is None:
        return None
    return ProteinNetworks(
        kmers=kmers,
        ratios=tuple(tensors[f"{PROTEINS}.patterns.{i}"] for i in range(len(PATTERNS))),
        nets=_nets(PROTEINS, {ALL: metadata["n_viral"]}, tensors),
        knots=tuple(Knot(**knot) for knot in metadata["knots"]),
        error_rates=_error_rates(metadata),
        training=str(metadata["training"]),
    )
