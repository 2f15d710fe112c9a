"""Predict the group of a virus, and find its topology.

A virus has the group of its named taxon (``lineage``). Without one, a network predicts the group
from the features of the scorer, except k-mers. ``scripts/weights/train_virus_groups.py`` writes the
network, ``embedded/virus_groups.safetensors``.

The topology comes from terminal repeats, direct or inverted, or from a header that says circular.
Assemblers leave a direct repeat where they cut a circle, and many linear genomes end in one: the
sequence alone cannot distinguish them. CheckV and geNomad require more than 20 identical bases
(Nayfach et al. 2021, doi:10.1038/s41587-020-00774-7; Camargo et al. 2024,
doi:10.1038/s41587-023-01953-y), and so does this module. Among further bases, one in fifty may
differ. Repeats with low complexity do not count, by CheckV's limits: a fifth unknown bases, three
quarters the same base, eight occurrences in the sequence. Tandem repeats with short units do not
count either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import isnan
from operator import itemgetter
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.viral.features import (
    CLIP,
    NO_KMERS,
    WindowFeatures,
    library_input,
)
from virnucpro.viral.lineage import Taxon
from virnucpro.viral.networks import load_tensors
from virnucpro.viral.windows import Windows, split_windows

FORMAT = 3
KINDS = (
    "phage",
    "archaeal virus",
    "RNA+",
    "RNA-",
    "dsRNA",
    "ssDNA",
    "dsDNA",
    "reverse-transcribing",
)
GROUP_FEATURES = slice(0, WindowFeatures.STATISTICS.stop)  # all but k-mers and ratios
GROUP_PIECE_BASES = 1000  # bases
# ICTV lists soil and water as the source of most Leviviricetes. The others have several genome
# types there, such as one for each sense
_GROUP_BY_TAXON = {
    "Leviviricetes": "phage",
    "Negarnaviricota": "RNA-",
    "Alphasatellitidae": "ssDNA",
    "Anelloviridae": "ssDNA",
    "Naryaviridae": "ssDNA",
    "Parvoviridae": "ssDNA",
    "Tolecusatellitidae": "ssDNA",
    "Vilyaviridae": "ssDNA",
}
_GROUP_BY_GENOME = {
    "ssRNA(+)": "RNA+",
    "ssRNA(-)": "RNA-",
    "ssRNA(+/-)": "RNA-",
    "ssRNA(-); ssRNA(+/-)": "RNA-",
    "dsRNA": "dsRNA",
    "dsDNA": "dsDNA",
}

Topology: TypeAlias = Literal["linear", "DTR", "ITR", "circular"]
Weights = NDArray[np.float32]


def group_features(sequences: Windows, code: GeneticCode = STANDARD) -> FloatArray:
    """Return the mean window features of each sequence, NaN without a known base. n -> (n, 1095)"""
    owner, starts, n_bases = split_windows(sequences.starts, sequences.lengths, GROUP_PIECE_BASES)
    n_pieces = np.bincount(owner, minlength=len(sequences))
    means = np.empty((len(sequences), GROUP_FEATURES.stop))
    pieces = sequences.select(starts, n_bases)
    sizes = (n_pieces, *means.shape, means)
    call("mean_features", *library_input(pieces, NO_KMERS, code), *sizes)
    return means


@dataclass(frozen=True, eq=False)
class GroupNetwork:
    """Predict the group of a virus from mean window features: two layers and a GELU."""

    mean: Weights  # (n_features,)
    deviation: Weights  # (n_features,)
    hidden: tuple[Weights, Weights]  # (n_hidden, n_features), (n_hidden,)
    output: tuple[Weights, Weights]  # (n_kinds, n_hidden), (n_kinds,)
    slopes: tuple[tuple[int, float], ...]  # (bases, factor of the logits at this length)

    def logits(self, features: FloatArray) -> FloatArray:
        """Return the logits before calibration. (n, n_features) -> (n, n_kinds)"""
        x = features - self._standards[0]
        x /= self._standards[1]
        x = _product(np.clip(x, -CLIP, CLIP, out=x), *self._layers[0])
        # GELU by its tanh formula (Hendrycks and Gimpel 2016, arXiv:1606.08415)
        x = 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
        return _product(x, *self._layers[1])

    @cached_property
    def _standards(self) -> tuple[FloatArray, FloatArray]:
        """Convert mean and deviation to float64, once."""
        return self.mean.astype(np.float64), self.deviation.astype(np.float64)

    @cached_property
    def _layers(self) -> list[tuple[FloatArray, FloatArray]]:
        """Return the weights in the library's layout, and the biases."""
        layers = self.hidden, self.output
        return [(_split_blocks(weight), bias.astype(np.float64)) for weight, bias in layers]

    def probabilities(self, features: FloatArray, n_bases: IntArray) -> FloatArray:
        """Return each kind's probability, calibrated for these sequence lengths.

        The slope is interpolated linearly over log(length).
        (n, n_features), (n,) -> (n, n_kinds)
        """
        lengths, slopes = zip(*self.slopes, strict=True)
        slope = np.interp(np.log(np.maximum(1, n_bases)), np.log(lengths), slopes)
        scaled = slope[:, None] * self.logits(features)
        odds = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def _split_blocks(weight: Weights) -> FloatArray:
    """Arrange a layer's weights in the library's layout, flat.

    Output blocks, padded with zeros: (n_outputs, n_inputs) -> (n_blocks, n_inputs, 16).
    """
    n_outputs, n_inputs = weight.shape
    block = 16  # outputs that the library computes together
    filled = np.zeros((-(-n_outputs // block) * block, n_inputs))
    filled[:n_outputs] = weight
    return np.asarray(filled.reshape(-1, block, n_inputs).swapaxes(1, 2).reshape(-1))


def _product(values: FloatArray, weights: FloatArray, bias: FloatArray) -> FloatArray:
    """Compute a layer. A row does not depend on the other rows. (n, in) -> (n, out)"""
    out = np.empty((len(values), len(bias)))
    sizes = len(values), values.shape[1], len(bias)
    call("linear_layer", np.ascontiguousarray(values), *sizes, weights, bias, out)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class GroupPredictor:
    """Predict the group of viruses, from their named taxon or from their features."""

    network: GroupNetwork
    # (k-mers from the named taxon, share of viruses with so many or more whose group is right)
    certainties: tuple[tuple[int, float], ...]

    def certainty(self, n_kmers: int) -> float:
        """Return how often the group of a named taxon is right, given its k-mers in the virus."""
        index = bisect_right(self.certainties, n_kmers, key=itemgetter(0))
        return self.certainties[max(0, index - 1)][1]

    def predict(
        self, sequences: Windows, code: GeneticCode = STANDARD
    ) -> list[tuple[str, float | None]]:
        """Return each sequence's most probable group by its features, and the probability.

        Without a known base, the group is empty.
        """
        sequences_at_once = 128  # read by the network together: they fit into the processor's cache
        blocks = [np.empty((0, len(KINDS)))]
        for first in range(0, len(sequences), sequences_at_once):
            block = slice(first, first + sequences_at_once)
            batch = sequences.select(sequences.starts[block], sequences.lengths[block])
            blocks.append(self.network.probabilities(group_features(batch, code), batch.lengths))
        probabilities = np.concatenate(blocks)
        best = probabilities.max(axis=1).tolist()
        kinds = probabilities.argmax(axis=1).tolist()
        return [
            ("", None) if isnan(probability) else (KINDS[kind], round(probability, 3))
            for kind, probability in zip(kinds, best, strict=True)
        ]


def group_of_taxon(taxon: Taxon) -> str:
    """Return the group of the viruses in a taxon, or an empty string if they differ.

    Viruses with the same genome type may infect eukaryotes or prokaryotes. So a taxon above the
    family has a group only if its host source is known.
    """
    for name in taxon.lineage:
        if name in _GROUP_BY_TAXON:
            return _GROUP_BY_TAXON[name]
    if taxon.host_source == "bacteria":
        return "phage"
    if taxon.host_source == "archaea":
        return "archaeal virus"
    if not taxon.host_source and not taxon.family:
        return ""
    if taxon.genome_type.endswith("-RT"):
        return "reverse-transcribing"
    if taxon.genome_type.startswith("ssDNA"):
        return "ssDNA"
    return _GROUP_BY_GENOME.get(taxon.genome_type, "")


def topologies(
    sequences: Windows, are_circles: Sequence[bool | None]
) -> list[tuple[Topology | Literal[""], int]]:
    """Return each complete record's topology, and its terminal repeat length, or 0.

    A record is circular if its header says so. A region (None) has no topology.
    """
    chosen = [index for index, is_circle in enumerate(are_circles) if is_circle is not None]
    starts = sequences.starts[chosen]
    lengths = sequences.lengths[chosen]
    direct, inverted = np.empty((2, len(chosen)), dtype=np.int64)
    call("terminal_repeats", sequences.digits, starts, lengths, len(chosen), direct, inverted)
    topologies: list[tuple[Topology | Literal[""], int]] = [("", 0)] * len(sequences)
    for index, n_direct, n_inverted in zip(chosen, direct.tolist(), inverted.tolist(), strict=True):
        if are_circles[index]:
            topologies[index] = "circular", n_direct
        elif n_direct:
            topologies[index] = "DTR", n_direct
        else:
            topologies[index] = ("ITR", n_inverted) if n_inverted else ("linear", 0)
    return topologies


@cache
def load_builtin_groups() -> GroupPredictor:
    """Return the built-in predictor, which each process reads once.

    Raises:
        UnavailableError: as ``load_groups``.
    """
    return load_groups(EMBEDDED_FOLDER / "virus_groups.safetensors")


def load_groups(path: Path) -> GroupPredictor:
    """Read the network and its certainties from their safetensors file.

    Raises:
        UnavailableError: the file is missing, damaged, or in another format.
    """
    try:
        _, metadata, tensors = load_tensors(path)
        if metadata["format"] != FORMAT or metadata["kinds"] != list(KINDS):
            raise ValueError(
                f"its format is {metadata['format']}, with the kinds {metadata['kinds']}"
            )
        hidden, output = (
            (tensors[f"kind.{i}.weight"], tensors[f"kind.{i}.bias"]) for i in range(2)
        )
        slopes = tuple((n_bases, slope) for n_bases, slope in metadata["slopes"])
        return GroupPredictor(
            GroupNetwork(tensors["kind.mean"], tensors["kind.deviation"], hidden, output, slopes),
            tuple((min_kmers, value) for min_kmers, value in metadata["certainties"]),
        )
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not the network for groups of viruses: {printable(error)}",
            hint="reinstall VirNucPro: this file is part of it",
        ) from error
