"""Compute the features of labelled fragments, to fit networks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import Digits
from virnucpro.viral.features import (
    Features,
    KmerClassTable,
    WindowFeatures,
    layout_features,
    library_input,
)
from virnucpro.viral.windows import Windows

_BATCH_PIECES = 512


def piece_features(
    pieces: Windows, kmers: KmerClassTable, code: GeneticCode = STANDARD
) -> Features:
    """Return the features of each piece. n -> (n, 1229)

    A codon with a non-standard residue counts as a standard codon for that residue.
    """
    return featurize_pieces(pieces, kmers, code)[0]


def featurize_pieces(
    pieces: Windows, kmers: KmerClassTable, code: GeneticCode = STANDARD
) -> tuple[Features, BoolArray]:
    """Return the features of each piece, and whether all its bases are unknown.

    n -> (n, 1229), (n,)
    """
    features = np.empty((len(pieces), WindowFeatures.N_FEATURES), dtype=np.float32)
    is_blank = np.empty(len(pieces), dtype=np.uint8)
    call("piece_features", *library_input(pieces, kmers, code), features, is_blank)
    return features, is_blank.astype(np.bool_)


def fragment_features(digits: Digits, kmers: KmerClassTable) -> Features:
    """Return the features of fragments as single pieces. (n, n_bases) -> (n, 1229)"""
    return np.concatenate(list(_feature_batches(digits, kmers)))


def pooled_fragment_features(digits: Digits, kmers: KmerClassTable, part: int) -> Features:
    """Return the mean features of parts of ``part`` bases, with the layout of the fragment.

    All bases must be known, and ``part`` must divide the length. Otherwise ``score`` cuts other
    parts. (n, n_bases) -> (n, 1241)
    """
    n, n_bases = digits.shape
    parts = digits[:, : n_bases // part * part].reshape(-1, part)
    part_features = fragment_features(parts, kmers).reshape(n, -1, WindowFeatures.N_FEATURES)
    blocks = np.split(digits, range(_BATCH_PIECES, n, _BATCH_PIECES))
    layouts = [layout_features(_to_windows(block)) for block in blocks]
    return insert_layout(part_features.mean(axis=1, dtype=np.float64), np.concatenate(layouts))


def _feature_batches(digits: Digits, kmers: KmerClassTable) -> Iterator[Features]:
    for first in range(0, len(digits), _BATCH_PIECES):
        yield piece_features(_to_windows(digits[first : first + _BATCH_PIECES]), kmers)


def _to_windows(digits: Digits) -> Windows:
    lengths = np.full(len(digits), digits.shape[1])
    return Windows.concatenate(digits.reshape(-1), lengths)


def insert_layout(part_features: FloatArray, layout: FloatArray) -> Features:
    """Insert the layout of a fragment into its mean features. (n, 1229), (n, 12) -> (n, 1241)"""
    before, after = np.split(part_features, [WindowFeatures.CODON_RATIOS.start], axis=1)
    return np.hstack([before, layout, after]).astype(np.float32)
