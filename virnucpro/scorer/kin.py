"""What a viral sequence is: its kind of virus, and the family whose words it shares most.

A word is nine residues of an open stretch. The table has words of one family alone: all that
several of its genera have, and one in ``RARITY`` of the others, by hash. Words of viruses without
a family have the owner 0. A family is named where it owns enough of the words that the table
has; the sequence has the kind of this family then. Elsewhere a net gives the kind, by the features
that the scorer reads, except the words of its training.

``embedded/kin.safetensors`` has the table, the net and their facts; ``making/train_kin.py`` makes
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.files import EMBEDDED_FOLDER, parse_json
from virnucpro.ground.log import printable
from virnucpro.ground.numeric import Counts, Mask, Values
from virnucpro.ground.records import Identity
from virnucpro.scorer.features import FIGURES, read_pieces
from virnucpro.scorer.pieces import (
    Digits,
    Pieces,
    Stretches,
    codon_codes,
    cut,
    encode,
    find_stretches,
    opposite_strand,
)
from virnucpro.scorer.topology import topology_of
from virnucpro.scorer.words import NO_WORDS, RESIDUE_OF_CODE, Numbers, words_in
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

FORMAT = 1
RARITY = 16  # a power of two: one in so many words of a single genus is in the table
FEWEST_WORDS = 2  # of a family that is named
BASES_PER_WORD = 3_000  # a long sequence needs more words: at least one in so many bases
LEAST_SHARE = 0.7  # of all words of the sequence that the table knows
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
KIND_FEATURES = slice(0, FIGURES.stop)  # of a piece: all but words and ratios
KIND_PIECE = 1000  # bases
STRANGE = -1  # the owner of a word that the table does not know
FARTHEST = 6.0  # deviations from the mean; what is farther is taken for this
_WORD_PIECE = 10_000  # bases that stretches are looked for in
_SHORTEST_STRETCH = 30  # codons
_BUCKET_BITS, _REST_BITS = 20, 16
_SEED = np.uint64(0xD1B54A32D192ED03)  # odd; other hashes of the house have other factors

Owners = NDArray[np.uint8]
Weights = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class KinWords:
    """Words and the family of each, as 36 bits of a hash: the bucket, and the rest.

    By chance one word in 3e4 is taken for one of two million words of the table.
    """

    n_of_bucket: NDArray[np.uint8]  # (2**20,)
    rests: NDArray[np.uint16]  # (n_words,) by bucket, rising
    owners: Owners  # (n_words,) places among the families; 0: a virus without one

    def __post_init__(self) -> None:
        if self.n_of_bucket.shape != (1 << _BUCKET_BITS,):
            raise ValueError(f"words of kin in {self.n_of_bucket.shape} buckets")
        if not self.n_of_bucket.sum() == len(self.rests) == len(self.owners):
            raise ValueError(f"{len(self.rests)} words of kin, {len(self.owners)} owners")

    @classmethod
    def of(cls, numbers: Numbers, owners: Owners) -> KinWords:
        """A table of words, each once, and of their owners. (n,), (n,)

        Raises:
            ValueError: too many of them are in one bucket.
        """
        keys = _keys(numbers)
        order = np.argsort(keys)
        keys = keys[order]
        n_of_bucket = np.bincount(keys >> _REST_BITS, minlength=1 << _BUCKET_BITS)
        if n_of_bucket.max(initial=0) > np.iinfo(np.uint8).max:
            raise ValueError(f"{n_of_bucket.max()} words in one bucket")
        return cls(n_of_bucket.astype(np.uint8), keys.astype(np.uint16), owners[order])

    @cached_property
    def _first(self) -> Counts:
        """The place of the first word of each bucket, and of the end. (2**20 + 1,)"""
        first = np.zeros(len(self.n_of_bucket) + 1, dtype=np.int64)
        np.cumsum(self.n_of_bucket, out=first[1:])
        return first

    def owners_of(self, numbers: Numbers) -> Counts:
        """The owner of each word; ``STRANGE`` for one that the table does not know. (n,) -> (n,)"""
        keys = _keys(numbers)
        buckets, rests = keys >> _REST_BITS, (keys & ((1 << _REST_BITS) - 1)).astype(np.uint16)
        place, end = self._first[buckets], self._first[buckets + 1]
        owners = np.full(len(keys), STRANGE, dtype=np.int64)
        while len(rows := np.flatnonzero((place < end) & (owners == STRANGE))):
            known = rows[self.rests[place[rows]] == rests[rows]]
            owners[known] = self.owners[place[known]]
            place[rows] += 1
        return owners


def _keys(numbers: Numbers) -> Counts:
    """The bucket of each word, before the bits that distinguish it from others. (n,) -> (n,)"""
    keys: Counts = (_hashes(numbers) >> np.uint64(64 - _BUCKET_BITS - _REST_BITS)).astype(np.int64)
    return keys


def is_in_kin_sample(numbers: Numbers) -> Mask:
    """Whether each word is kept though one genus alone has it. (n,) -> (n,)"""
    is_inside: Mask = _hashes(numbers) & np.uint64(RARITY - 1) == 0
    return is_inside


def _hashes(numbers: Numbers) -> NDArray[np.uint64]:
    """Mixed as by SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), once."""
    hashes: NDArray[np.uint64] = numbers.astype(np.uint64) * _SEED
    hashes ^= hashes >> np.uint64(31)
    hashes *= _SEED
    hashes ^= hashes >> np.uint64(29)
    return hashes


def kin_words_of(sequences: Sequence[Digits], code: GeneticCode = STANDARD) -> list[Numbers]:
    """The words of each sequence, each once, rising."""
    lengths = np.array(list(map(len, sequences)), dtype=np.int64)
    n_pieces = -(-lengths // _WORD_PIECE)
    owner = np.repeat(np.arange(len(lengths)), n_pieces)
    start = _WORD_PIECE * (np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner])
    places = start + (np.cumsum(lengths) - lengths)[owner]
    digits = np.concatenate(sequences)
    pieces = Pieces(digits, places, np.minimum(_WORD_PIECE, lengths[owner] - start))
    stretches = find_stretches(pieces, code, _SHORTEST_STRETCH)
    residues, stretch = _residues(pieces, stretches)
    at, numbers = words_in(residues, stretch)
    of_word = owner[stretches.piece][stretch[at]]
    order = np.lexsort((numbers, of_word))
    of_word, numbers = of_word[order], numbers[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (of_word[1:] != of_word[:-1]) | (numbers[1:] != numbers[:-1])
    bounds = np.searchsorted(of_word[is_new], np.arange(1, len(lengths)))
    return np.split(numbers[is_new], bounds)


def _residues(pieces: Pieces, stretches: Stretches) -> tuple[Digits, Counts]:
    """The residues of stretches, one after the other, and the stretch of each. (n,), (n,)"""
    digits = pieces.digits
    strands = np.stack(
        [RESIDUE_OF_CODE[codon_codes(strand)] for strand in (digits, opposite_strand(digits))]
    )
    on_reverse = len(digits) - pieces.starts - pieces.lengths
    on_strand = np.stack([pieces.starts, on_reverse])
    start = on_strand[stretches.strand, stretches.piece] + stretches.start
    stretch = np.repeat(np.arange(len(stretches)), stretches.n_codons)
    codon = np.arange(len(stretch)) - (np.cumsum(stretches.n_codons) - stretches.n_codons)[stretch]
    return strands[stretches.strand[stretch], start[stretch] + 3 * codon], stretch


def is_named(n_words: Counts, share: Values, n_bases: Counts) -> Mask:
    """Whether sequences are named after the family that owns most of their words.

    The words of the family, their share of all words that the table knows, and the bases of the
    sequence. (n,), (n,), (n,) -> (n,)
    """
    fewest = np.maximum(FEWEST_WORDS, n_bases / BASES_PER_WORD)
    has_name: Mask = (n_words >= fewest) & (share >= LEAST_SHARE)
    return has_name


def most_words(
    each: Sequence[Numbers], table: KinWords, n_families: int
) -> tuple[Counts, Counts, Values]:
    """The family that owns most words of each sequence, the number of its words, and their share.

    A share is that of the words which the table knows. n -> (n,), (n,), (n,)
    """
    sequence = np.repeat(np.arange(len(each)), list(map(len, each)))
    owners = table.owners_of(np.concatenate(each))
    is_known = owners != STRANGE
    places = sequence[is_known] * n_families + owners[is_known]
    counts = np.bincount(places, minlength=len(each) * n_families).reshape(len(each), n_families)
    best = counts[:, 1:].argmax(axis=1) + 1
    n_words = counts[np.arange(len(each)), best]
    return best, n_words, n_words / np.maximum(1, counts.sum(axis=1))


def kind_features(sequences: Sequence[Digits], code: GeneticCode = STANDARD) -> Values:
    """The mean features of the pieces of each sequence; NaN without a known base. n -> (n, 1095)"""
    owner, starts, lengths = cut(np.array(list(map(len, sequences))), KIND_PIECE)
    pieces = Pieces(np.concatenate(sequences), starts, lengths)
    features, is_blank = read_pieces(pieces, NO_WORDS, code)
    means = np.full((len(sequences), KIND_FEATURES.stop), np.nan)
    bounds = np.searchsorted(owner, np.arange(len(sequences) + 1)).tolist()
    for row, (first, end) in enumerate(pairwise(bounds)):
        some = features[first:end][~is_blank[first:end], KIND_FEATURES]
        if len(some):
            some.mean(axis=0, dtype=np.float64, out=means[row])
    return means


@dataclass(frozen=True, eq=False)
class KindNet:
    """Gives the kind of a virus from the mean features of its pieces; between layers a GELU."""

    mean: Weights  # (n_features,)
    deviation: Weights  # (n_features,)
    hidden: tuple[Weights, Weights]  # (n_hidden, n_features), (n_hidden,)
    output: tuple[Weights, Weights]  # (n_kinds, n_hidden), (n_kinds,)
    slopes: tuple[tuple[int, float], ...]  # at a length, what logits are multiplied by

    def __post_init__(self) -> None:
        if self.mean.shape != (KIND_FEATURES.stop,) or self.deviation.shape != self.mean.shape:
            raise ValueError(f"means of shape {self.mean.shape} for kinds")

    def logits(self, features: Values) -> Values:
        """Before calibration. (n_features,) -> (n_kinds,)"""
        x = ((features - self.mean) / self.deviation).clip(-FARTHEST, FARTHEST)
        weight, bias = self._layers[0]
        x = weight @ x + bias
        # Hendrycks and Gimpel 2016, arXiv:1606.08415, with the hyperbolic tangent
        x = 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
        weight, bias = self._layers[1]
        logits: Values = weight @ x + bias
        return logits

    @cached_property
    def _layers(self) -> list[tuple[Values, Weights]]:
        """Weights in float64, and biases."""
        return [(weight.astype(np.float64), bias) for weight, bias in (self.hidden, self.output)]

    def probabilities(self, features: Values, n_bases: int) -> Values:
        """The probability of each kind in a sequence of this length. (n_features,) -> (n_kinds,)

        The slope lies on lines between the known ones, over the logarithm of the length.
        """
        lengths, slopes = zip(*self.slopes, strict=True)
        scaled = np.interp(np.log(n_bases), np.log(lengths), slopes) * self.logits(features)
        odds = np.exp(scaled - scaled.max())
        shares: Values = odds / odds.sum()
        return shares


@dataclass(frozen=True, slots=True, eq=False)
class Kinship:
    """The words and the net that identify viruses."""

    words: KinWords
    families: tuple[str, ...]  # by owner; that of 0 has no name
    kind_of_family: tuple[str, ...]  # in step; empty for 0
    net: KindNet
    # from so many words of a family on, the share of named sequences whose kind is right
    certainties: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        n = len(self.families)
        if len(self.kind_of_family) != n or self.words.owners.max(initial=0) >= n:
            raise ValueError(f"words of other families than these {n}")

    def identify(
        self,
        viruses: Sequence[str],
        are_circles: Sequence[bool | None] | None = None,
        code: GeneticCode = STANDARD,
    ) -> Iterator[Identity]:
        """What each viral sequence is; nothing without a known base.

        ``are_circles`` is None for a part of a record, which has no topology.
        """
        circles = are_circles or [None] * len(viruses)
        each = zip(viruses, circles, self._identities(viruses, code), strict=True)
        for bases, is_circle, identity in each:
            if is_circle is None or not identity.virus_kind:
                yield identity
            else:
                topology, repeat_length = topology_of(bases, is_circle=is_circle)
                yield identity._replace(topology=topology, repeat_length=repeat_length)

    def _identities(self, sequences: Sequence[str], code: GeneticCode) -> Iterator[Identity]:
        """Kind and kin of each."""
        some = list(map(encode, filter(None, sequences)))
        if not some:
            yield from (Identity() for _ in sequences)
            return
        features, lengths = kind_features(some, code), list(map(len, some))
        best, n_words, share = most_words(kin_words_of(some, code), self.words, len(self.families))
        has_name = is_named(n_words, share, np.array(lengths)).tolist()
        columns = zip(has_name, best.tolist(), n_words.tolist(), share.tolist(), strict=True)
        each = zip(columns, features, lengths, strict=True)
        for sequence in sequences:
            yield self._identity(*next(each)) if sequence else Identity()

    def _identity(
        self, kin: tuple[bool, int, int, float], features: Values, n_bases: int
    ) -> Identity:
        """The identity of one sequence, by whether it has a name, and by ``most_words``."""
        has_name, best, n_words, share = kin
        if np.isnan(features[0]):
            return Identity()
        if has_name:
            certainty = [value for fewest, value in self.certainties if n_words >= fewest][-1]
            kind, name = self.kind_of_family[best], self.families[best]
            return Identity(kind, certainty, name, n_words, round(share, 3))
        chances = self.net.probabilities(features, n_bases)
        kind = KINDS[int(chances.argmax())]
        return Identity(kind, round(float(chances.max()), 3))


@cache
def own_kinship() -> Kinship:
    """The words and the net of the package, which a process reads once.

    Raises:
        UnavailableError: as ``load_kinship``.
    """
    return load_kinship(EMBEDDED_FOLDER / "kin.safetensors")


def load_kinship(path: Path) -> Kinship:
    """Read words and net from their safetensors file.

    Raises:
        UnavailableError: the file is missing, damaged, or of another format.
    """
    try:
        with safe_open(path, framework="np") as handle:
            facts = parse_json((handle.metadata() or {})["facts"])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        if facts["format"] != FORMAT or facts["kinds"] != list(KINDS):
            raise ValueError(f"the format {facts['format']} of kinds {facts['kinds']}")
        return Kinship(
            KinWords(*(tensors[f"words.{name}"] for name in ("buckets", "rests", "owners"))),
            tuple(facts["families"]),
            tuple(facts["kind_of_family"]),
            _kind_net(tensors, facts["slopes"]),
            tuple((fewest, value) for fewest, value in facts["certainties"]),
        )
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not the table of viral families: {printable(error)}",
            hint="reinstall VirNucPro: this file is part of it",
        ) from error


def _kind_net(tensors: Mapping[str, Weights], slopes: list[tuple[int, float]]) -> KindNet:
    layers = [(tensors[f"kind.{i}.weight"], tensors[f"kind.{i}.bias"]) for i in range(2)]
    knots = tuple((n_bases, slope) for n_bases, slope in slopes)
    return KindNet(tensors["kind.mean"], tensors["kind.deviation"], layers[0], layers[1], knots)
