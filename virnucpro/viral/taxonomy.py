"""Identify a viral sequence: its kind, its family or cluster, and its topology.

A k-mer is nine residues in an open reading frame. The table contains k-mers that occur in only one
family: all k-mers that several genera in the family have, and one in 16 of the others, selected by
hash. A k-mer from viruses without a family belongs to the only cluster of related genomes that has
it, or has no taxon (0). A sequence gets a family if enough known k-mers belong to it, and
the kind of that family. Otherwise it may get a cluster by the same rule, and a network predicts the
kind from the scorer's features, except k-mers.

``scripts/weights/train_kin.py`` writes ``embedded/kin.safetensors``, which contains the table, the
network and their metadata.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
    FIGURES,
    NO_WORDS,
    RESIDUE_OF_CODE,
    Numbers,
    library_input,
)
from virnucpro.viral.networks import load_tensors
from virnucpro.viral.types import Identity
from virnucpro.viral.windows import Windows, split_windows

FORMAT = 2
MIN_KMERS = 2  # minimum number to name a family
BASES_PER_KMER = 3_000  # a long sequence needs more k-mers: one per this many bases
# the same for a cluster, stricter because most viruses without a family belong to no known cluster
_MIN_CLUSTER_KMERS = 3
_BASES_PER_CLUSTER_KMER = 300
CLUSTER = "cluster:"  # cluster name prefix
MIN_KMER_SHARE = 0.7  # minimum share among the known k-mers in a sequence, to name their taxon
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
GROUP_FEATURES = slice(0, FIGURES.stop)  # all but k-mers and ratios
GROUP_PIECE_BASES = 1000  # bases
UNKNOWN = -1  # instead of a taxon: the table does not contain the k-mer
_OUTPUTS = 16  # layer outputs that the library computes together
_KMER_PIECE = 10_000  # bases searched for open reading frames in one go
_SEQUENCES_AT_ONCE = 128  # read by the network together: they fit into the processor's cache
_PIECES_AT_ONCE, _BASES_AT_ONCE = 10_000, 1_000_000  # for looking up k-mers
_MIN_STRETCH_CODONS = 30  # codons
_KMER_BITS = 39  # enough for a k-mer number: there are 20**9

Topology: TypeAlias = Literal["linear", "DTR", "ITR", "circular"]
Taxa = NDArray[np.uint16]
Weights = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class KmerTable:
    """K-mers and their taxa.

    A k-mer is stored as 36 bits of its hash: a bucket, and the remainder. With two million k-mers
    in the table, one k-mer in 3e4 matches by chance.
    """

    n_of_bucket: NDArray[np.uint8]  # (2**20,)
    rests: NDArray[np.uint16]  # (n_words,) by bucket, ascending
    taxa: Taxa  # (n_words,) index of the family or cluster, or 0

    def __post_init__(self) -> None:
        if not self.n_of_bucket.sum() == len(self.rests) == len(self.taxa):
            raise ValueError(f"{len(self.rests)} words, but {len(self.taxa)} owners")

    @cached_property
    def _first(self) -> NDArray[np.int32]:
        """Return the index of each bucket's first k-mer, and of the end. (2**20 + 1,)"""
        first = np.zeros(len(self.n_of_bucket) + 1, dtype=np.int32)
        np.cumsum(self.n_of_bucket, out=first[1:])
        return first

    def find_taxa(self, numbers: Numbers) -> NDArray[np.int32]:
        """Return the taxon of each k-mer, or ``UNKNOWN`` if it is not in the table. (n,) -> (n,)"""
        owners = np.empty(len(numbers), dtype=np.int32)
        call("families_of", numbers, len(numbers), self._first, self.rests, self.taxa, owners)
        return owners


def iter_kmers(
    sequences: Windows, code: GeneticCode = STANDARD
) -> Iterator[tuple[IntArray, Numbers]]:
    """Yield k-mers from some sequences at a time: sequence index and k-mer number. (n,), (n,)

    A k-mer may occur several times in a sequence.
    """
    owner, places, lengths = _word_pieces(sequences)
    first = 0
    while first < len(places):
        end = int(np.searchsorted(places, places[first] + _BASES_AT_ONCE))
        some = slice(first, min(end, first + _PIECES_AT_ONCE))
        pieces = sequences.select(places[some], lengths[some])
        n_words = np.empty(len(pieces), dtype=np.int64)
        numbers = np.empty(int((pieces.lengths // 2 + 1).sum()), dtype=np.int64)
        sizes = RESIDUE_OF_CODE, _MIN_STRETCH_CODONS, n_words, numbers
        call("stretch_words", *pieces.arguments(code), *sizes)
        yield np.repeat(owner[some], n_words), numbers[: int(n_words.sum())]
        first = some.stop


def _word_pieces(sequences: Windows) -> tuple[IntArray, IntArray, IntArray]:
    """Return sequence, start and length for each window that is searched for k-mers.

    Windows in a sequence are equally long and share at most one base, if the rounding of their ends
    assigns it to both. So the reverse complement has the same windows.
    """
    n_pieces = -(-sequences.lengths // _KMER_PIECE)
    owner = np.repeat(np.arange(len(sequences)), n_pieces)
    number = np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner]
    n_bases = sequences.lengths[owner]
    n_parts = n_pieces[owner]
    start = number * n_bases // n_parts
    end = -(-(number + 1) * n_bases // n_parts)
    return owner, sequences.starts[owner] + start, end - start


def assign_taxa(
    sequences: Windows, table: KmerTable, n_families: int, code: GeneticCode = STANDARD
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return each sequence's family or cluster, the number of its k-mers, and their share.

    The taxon owns enough known k-mers, or is 0. Each k-mer counts once. The share is among
    the k-mers in the table.
    n -> (n,), (n,), (n,)
    """
    pairs, counts = np.unique(_taxa_of_kmers(sequences, table, code), return_counts=True)
    sequence = pairs >> 16
    owner = pairs & 0xFFFF
    n = len(sequences)
    total = np.bincount(sequence, counts, minlength=n)
    named, n_words = np.zeros((2, n), dtype=np.int64)
    is_family = owner < n_families
    fewest = np.where(is_family, MIN_KMERS, _MIN_CLUSTER_KMERS)
    bases_per_word = np.where(is_family, BASES_PER_KMER, _BASES_PER_CLUSTER_KMER)
    is_enough = counts >= np.maximum(fewest, sequences.lengths[sequence] / bases_per_word)
    is_enough &= counts / total[sequence] >= MIN_KMER_SHARE  # at most one taxon has this share
    named[sequence[is_enough]], n_words[sequence[is_enough]] = owner[is_enough], counts[is_enough]
    return named, n_words, n_words / np.maximum(1, total)


def _taxa_of_kmers(sequences: Windows, table: KmerTable, code: GeneticCode) -> IntArray:
    """Return, for each known k-mer, its sequence, and its taxon in the lowest 16 bits."""
    each = [np.empty((3, 0), dtype=np.int64)]
    for of_words, of_numbers in iter_kmers(sequences, code):
        of_owners = table.find_taxa(of_numbers)
        known = np.flatnonzero(of_owners != UNKNOWN)
        each.append(np.stack([of_words[known], of_numbers[known], of_owners[known]]))
    whose, numbers, owners = np.concatenate(each, axis=1)
    assert len(sequences) < 1 << 63 - _KMER_BITS, "a block of records has fewer"
    words = whose << _KMER_BITS | numbers
    order = np.argsort(words)  # equal k-mers in a sequence become neighbours
    is_new = np.diff(words[order], prepend=-1) != 0
    return np.asarray(whose[order[is_new]] << 16 | owners[order[is_new]])


def group_features(sequences: Windows, code: GeneticCode = STANDARD) -> FloatArray:
    """Return the mean window features of each sequence, NaN without a known base. n -> (n, 1095)"""
    owner, places, n_bases = split_windows(sequences.starts, sequences.lengths, GROUP_PIECE_BASES)
    n_pieces = np.bincount(owner, minlength=len(sequences))
    means = np.empty((len(sequences), GROUP_FEATURES.stop))
    pieces = sequences.select(places, n_bases)
    sizes = (n_pieces, *means.shape, means)
    call("mean_features", *library_input(pieces, NO_WORDS, code), *sizes)
    return means


@dataclass(frozen=True, eq=False)
class GroupNetwork:
    """Predict the kind of a virus from mean window features: two layers and a GELU."""

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
        slope = np.interp(np.log(n_bases), np.log(lengths), slopes)
        scaled = slope[:, None] * self.logits(features)
        odds = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def _split_blocks(weight: Weights) -> FloatArray:
    """Arrange a layer's weights in the library's layout, flat.

    Output blocks, padded with zeros: (n_outputs, n_inputs) -> (n_blocks, n_inputs, 16).
    """
    n_outputs, n_inputs = weight.shape
    filled = np.zeros((-(-n_outputs // _OUTPUTS) * _OUTPUTS, n_inputs))
    filled[:n_outputs] = weight
    return np.asarray(filled.reshape(-1, _OUTPUTS, n_inputs).swapaxes(1, 2).reshape(-1))


def _product(values: FloatArray, weights: FloatArray, bias: FloatArray) -> FloatArray:
    """Compute a layer. A row does not depend on the other rows. (n, in) -> (n, out)"""
    out = np.empty((len(values), len(bias)))
    sizes = len(values), values.shape[1], len(bias)
    call("linear_layer", np.ascontiguousarray(values), *sizes, weights, bias, out)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class TaxonAssigner:
    """The k-mer table and the network that identify viruses."""

    kmers: KmerTable
    families: tuple[str, ...]  # by taxon index. Taxon 0 has no name
    kind_of_family: tuple[str, ...]  # parallel to families, empty for 0
    clusters: tuple[str, ...]  # by taxon index, after the families
    net: GroupNetwork
    # (n k-mers from the family, share of sequences with n or more that get the right kind)
    certainties: tuple[tuple[int, float], ...]

    def assign(
        self,
        viruses: Sequence[str],
        are_circles: Sequence[bool | None] | None = None,
        code: GeneticCode = STANDARD,
    ) -> list[Identity]:
        """Identify each viral sequence. Without a known base, its identity is empty.

        In ``are_circles``, None marks a region, which has no topology.
        """
        sequences = Windows.from_sequences(viruses)
        ends = topologies(sequences, are_circles or [None] * len(viruses))
        rows = zip(self._assign_taxa(sequences, code), ends, strict=True)
        return [Identity(*kin, *end) if kin[0] else Identity() for kin, end in rows]

    def _assign_taxa(
        self, sequences: Windows, code: GeneticCode
    ) -> Iterator[tuple[str, float, str, int, float | None]]:
        """Yield the kind, its probability, the family or cluster, and its k-mers: number, share."""
        n = len(sequences)
        n_families = len(self.families)
        owner, n_words, shares = assign_taxa(sequences, self.kmers, n_families, code)
        has_family = (owner > 0) & (owner < n_families)
        kinds = np.full(n, len(KINDS))
        chances = np.empty(n)
        others = np.flatnonzero(~has_family & (sequences.lengths > 0))
        kinds[others], chances[others] = self._predict_groups(sequences, others, code)
        fewest, values = zip(*self.certainties, strict=True)
        certainties = np.array(values)[np.searchsorted(fewest, n_words, side="right") - 1]
        chances[has_family] = certainties[has_family]
        kinds[has_family] += owner[has_family]
        names = [*self.families, *(CLUSTER + name for name in self.clusters)]
        words = [*KINDS, *self.kind_of_family]
        columns = (column.tolist() for column in (kinds, chances, owner, n_words, shares))
        for kind, chance, number, n_of_kin, share in zip(*columns, strict=True):
            kin = (names[number], n_of_kin, round(share, 3)) if number else ("", 0, None)
            yield words[kind], chance, *kin

    def _predict_groups(
        self, sequences: Windows, chosen: IntArray, code: GeneticCode
    ) -> tuple[IntArray, FloatArray]:
        """Return the chosen sequences' most probable kind, and its probability.

        Without a known base, the kind is ``len(KINDS)``.
        """
        each = [np.empty((0, len(KINDS)))]
        for first in range(0, len(chosen), _SEQUENCES_AT_ONCE):
            some = chosen[first : first + _SEQUENCES_AT_ONCE]
            few = sequences.select(sequences.starts[some], sequences.lengths[some])
            each.append(self.net.probabilities(group_features(few, code), few.lengths))
        chances = np.concatenate(each)
        best = chances.max(axis=1)
        kinds = np.where(np.isnan(best), len(KINDS), chances.argmax(axis=1))
        return kinds, np.array([round(chance, 3) for chance in best.tolist()])


def topologies(
    sequences: Windows, are_circles: Sequence[bool | None]
) -> list[tuple[Topology | Literal[""], int]]:
    """Return each complete record's topology, and its terminal repeat length, or 0.

    A record is circular if its header says so. A region (None) has no topology.
    """
    chosen = [place for place, is_circle in enumerate(are_circles) if is_circle is not None]
    starts = sequences.starts[chosen]
    lengths = sequences.lengths[chosen]
    direct, inverted = np.empty((2, len(chosen)), dtype=np.int64)
    call("terminal_repeats", sequences.digits, starts, lengths, len(chosen), direct, inverted)
    found: list[tuple[Topology | Literal[""], int]] = [("", 0)] * len(sequences)
    for place, n_direct, n_inverted in zip(chosen, direct.tolist(), inverted.tolist(), strict=True):
        if are_circles[place]:
            found[place] = "circular", n_direct
        elif n_direct:
            found[place] = "DTR", n_direct
        else:
            found[place] = ("ITR", n_inverted) if n_inverted else ("linear", 0)
    return found


@cache
def load_builtin_taxonomy() -> TaxonAssigner:
    """Return the built-in k-mer table and network, which each process reads once.

    Raises:
        UnavailableError: as ``load_taxonomy``.
    """
    return load_taxonomy(EMBEDDED_FOLDER / "kin.safetensors")


def load_taxonomy(path: Path) -> TaxonAssigner:
    """Read the k-mer table and the network from their safetensors file.

    Raises:
        UnavailableError: the file is missing, damaged, or in another format.
    """
    try:
        _, facts, tensors = load_tensors(path)
        if facts["format"] != FORMAT or facts["kinds"] != list(KINDS):
            raise ValueError(f"its format is {facts['format']}, with the kinds {facts['kinds']}")
        hidden, output = (
            (tensors[f"kind.{i}.weight"], tensors[f"kind.{i}.bias"]) for i in range(2)
        )
        slopes = tuple((n_bases, slope) for n_bases, slope in facts["slopes"])
        return TaxonAssigner(
            KmerTable(*(tensors[f"words.{name}"] for name in ("buckets", "rests", "owners"))),
            tuple(facts["families"]),
            tuple(facts["kind_of_family"]),
            tuple(facts["clusters"]),
            GroupNetwork(tensors["kind.mean"], tensors["kind.deviation"], hidden, output, slopes),
            tuple((fewest, value) for fewest, value in facts["certainties"]),
        )
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not the table of viral families: {printable(error)}",
            hint="reinstall VirNucPro: this file is part of it",
        ) from error
