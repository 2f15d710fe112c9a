"""The data that a scorer, a head and its encoder were trained on, as they store it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.sequences.kmers import Sketch
from virnucpro.viral.head import Head
from virnucpro.viral.networks import Scorer

# digests of training records and their groups, and a sketch of all sequences
Trained: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.uint64], Sketch]


def read_trained(head: Head | None, scorer: Scorer | None) -> Mapping[str, Trained]:
    """Return the training data of a head and a scorer, by their names in messages."""
    trained: dict[str, Trained] = {}
    if head is not None:
        trained = {
            "the head": (head.trained_records, head.trained_groups, head.trained_kmers),
            "its encoder": (head.encoder_records, head.encoder_groups, head.encoder_kmers),
        }
    if scorer is not None:
        kmers = _kmers_of(scorer)
        trained["the scorer"] = (scorer.trained_records, scorer.trained_groups, kmers)
    return trained


def _kmers_of(scorer: Scorer) -> Sketch:
    """Return the sketch of the training data stored with the scorer, or an empty one."""
    with safe_open(EMBEDDED_FOLDER / "trained.safetensors", framework="np") as handle:
        is_same_scorer = handle.metadata()["scorer_sha256"] == scorer.sha256
        return Sketch.unpack(handle.get_tensor("trained_kmers")) if is_same_scorer else Sketch()
