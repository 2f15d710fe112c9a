"""What a viral sequence is: its kind of virus, and the family whose words it shares most.

A word is nine residues of an open stretch. The table has words of one family alone: all that
several of its genera have, and one in ``RARITY`` of the others, by hash. Words of viruses without
a family have the owner 0. A family is named where it owns enough of the words that the table
knows; its kind is that of the sequence then. Elsewhere a net tells the kind by the features that
the scorer reads, but for words of its training.

``embedded/kin.safetensors`` has the table, the net and their facts; ``making/train_kin.py`` makes
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
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
    UNKNOWN,
    Digits,
    Pieces,
    codon_codes,
    cut,
    encode,
    find_stretches,
    opposite_strand,
)
from virnucpro.scorer.words import NO_RESIDUE, NO_WORDS, RESIDUE_OF_CODE, Numbers, words_in
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

    def owners_of(self, numbers: Numbers) -> Owners:
        """The owners of the words that the table knows, in order. (n,) -> (n_known,)"""
        keys = _keys(numbers)
        buckets, rests = keys >> _REST_BITS, (keys & ((1 << _REST_BITS) - 1)).astype(np.uint16)
        place, end = self._first[buckets], self._first[buckets + 1]
        found = np.full(len(keys), -1, dtype=np.int64)
        while len(rows := np.flatnonzero((place < end) & (found < 0))):
            is_same = self.rests[place[rows]] == rests[rows]
            found[rows[is_same]] = place[rows[is_same]]
            place[rows] += 1
        known: Owners = self.owners[found[found >= 0]]
        return known


def _keys(numbers: Numbers) -> Counts:
    """The bucket of each word, before the rest that tells it from others there. (n,) -> (n,)"""
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


def kin_words_of(digits: Digits, code: GeneticCode = STANDARD) -> Numbers:
    """The words of a sequence, each once, rising. (n_bases,) -> (n_words,)"""
    starts = np.arange(0, len(digits), _WORD_PIECE)
    pieces = Pieces(digits, starts, np.minimum(_WORD_PIECE, len(digits) - starts))
    stretches = find_stretches(pieces, code, _SHORTEST_STRETCH)
    if not len(stretches):
        return np.empty(0, dtype=np.int64)
    strands = [RESIDUE_OF_CODE[codon_codes(strand)] for strand in (digits, opposite_strand(digits))]
    on_reverse = len(digits) - pieces.starts - pieces.lengths
    origin = np.where(
        stretches.strand == 0, pieces.starts[stretches.piece], on_reverse[stretches.piece]
    )
    gap = np.array([NO_RESIDUE], dtype=np.uint8)
    parts = []
    for strand, start, n_codons in zip(
        stretches.strand.tolist(),
        (origin + stretches.start).tolist(),
        stretches.n_codons.tolist(),
        strict=True,
    ):
        parts += [strands[strand][start : start + 3 * n_codons : 3], gap]
    residues = np.concatenate(parts)
    return np.unique(words_in(residues, np.zeros(len(residues), dtype=np.int64))[1])


def is_named(n_words: Counts, share: Values, n_bases: Counts) -> Mask:
    """Whether sequences are named after the family that owns most of their words.

    The words of the family, their share of all words that the table knows, and the bases of the
    sequence. (n,), (n,), (n,) -> (n,)
    """
    fewest = np.maximum(FEWEST_WORDS, n_bases / BASES_PER_WORD)
    has_name: Mask = (n_words >= fewest) & (share >= LEAST_SHARE)
    return has_name


def most_words(owners: Owners, n_families: int) -> tuple[int, int, float]:
    """The family that owns most of these words, how many it owns, and their share. (n_words,)"""
    counts = np.bincount(owners, minlength=n_families)
    best = int(counts[1:].argmax()) + 1
    return best, int(counts[best]), float(counts[best] / max(1, counts.sum()))


def kind_features(digits: Digits, code: GeneticCode = STANDARD) -> Values | None:
    """The mean features of the pieces of a sequence; None without a known base. -> (1095,)"""
    _, starts, lengths = cut(np.array([len(digits)]), KIND_PIECE)
    features, is_blank = read_pieces(Pieces(digits, starts, lengths), NO_WORDS, code)
    if is_blank.all():
        return None
    mean: Values = features[~is_blank, KIND_FEATURES].mean(axis=0, dtype=np.float64)
    return mean


@dataclass(frozen=True, slots=True, eq=False)
class KindNet:
    """Tells the kind of a virus from the mean features of its pieces; between layers a GELU."""

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
        weight, bias = self.hidden
        x = weight.astype(np.float64) @ x + bias
        # Hendrycks and Gimpel 2016, arXiv:1606.08415, with the hyperbolic tangent
        x = 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
        weight, bias = self.output
        logits: Values = weight.astype(np.float64) @ x + bias
        return logits

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
    """All that identities are told by."""

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

    def identify(self, sequence: str, code: GeneticCode = STANDARD) -> Identity:
        """What a viral sequence is, but for its topology; nothing without a known base."""
        digits = encode(sequence)
        features = kind_features(digits, code) if (digits != UNKNOWN).any() else None
        if features is None:
            return Identity()
        owners = self.words.owners_of(kin_words_of(digits, code))
        best, n_words, share = most_words(owners, len(self.families))
        if is_named(np.int64(n_words), np.float64(share), np.int64(len(digits))):
            certainty = [value for fewest, value in self.certainties if n_words >= fewest][-1]
            kind, name = self.kind_of_family[best], self.families[best]
            return Identity(kind, certainty, name, n_words, round(share, 3))
        chances = self.net.probabilities(features, len(digits))
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
            f"{printable(path)} holds no kin of viruses: {printable(error)}",
            hint="reinstall VirNucPro, whose own file of kin is a safetensors file",
        ) from error


def _kind_net(tensors: Mapping[str, Weights], slopes: list[tuple[int, float]]) -> KindNet:
    layers = [(tensors[f"kind.{i}.weight"], tensors[f"kind.{i}.bias"]) for i in range(2)]
    knots = tuple((n_bases, slope) for n_bases, slope in slopes)
    return KindNet(tensors["kind.mean"], tensors["kind.deviation"], layers[0], layers[1], knots)


def kinship_tensors(kinship: Kinship) -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    """The tensors and the metadata of a file that ``load_kinship`` reads."""
    net, words = kinship.net, kinship.words
    tensors: dict[str, NDArray[np.generic]] = {
        "words.buckets": words.n_of_bucket,
        "words.rests": words.rests,
        "words.owners": words.owners,
        "kind.mean": net.mean,
        "kind.deviation": net.deviation,
    }
    for i, (weight, bias) in enumerate((net.hidden, net.output)):
        tensors |= {f"kind.{i}.weight": weight, f"kind.{i}.bias": bias}
    facts = {
        "format": FORMAT,
        "kinds": KINDS,
        "families": kinship.families,
        "kind_of_family": kinship.kind_of_family,
        "slopes": net.slopes,
        "certainties": kinship.certainties,
    }
    return tensors, {"facts": json.dumps(facts)}
