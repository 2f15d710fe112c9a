"""The vectors that a head is trained on: made once, by the engine, as ``extract`` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import FeatureFileError
from virnucpro.fasta import write_record
from virnucpro.files import atomic
from virnucpro.log import printable
from virnucpro.rundir import RunDir
from virnucpro.store import open_features
from virnucpro.training.labelled import read_manifest, read_sequences

_ROWS_AT_ONCE = 65_536


def write_fasta(path: Path, data: Path) -> None:
    """All records of a manifest in one file, with their ids; the same bytes every time."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        for _, record in read_sequences(read_manifest(data)):
            write_record(out, record.id, record.sequence)


def read_vectors(folder: Path, ids: Sequence[str]) -> NDArray[np.float32]:
    """The vectors of these frames, in their order, from a run folder of ``extract``. (n, dim)

    Memory holds these, and a block of the others.

    Raises:
        FeatureFileError: one is not there.
    """
    place = {name: row for row, name in enumerate(ids)}
    with open_features(RunDir(folder).feature_index) as h5:
        stored, embeddings = h5["ids"].asstr(), h5["embeddings"]
        vectors = np.full((len(ids), embeddings.shape[1]), np.nan, dtype=np.float32)
        for first in range(0, len(embeddings), _ROWS_AT_ONCE):
            names = stored[first : first + _ROWS_AT_ONCE]
            rows = [row for row, name in enumerate(names) if name in place]
            block = embeddings[first : first + _ROWS_AT_ONCE]
            vectors[[place[names[row]] for row in rows]] = block[rows]
    if (missing := np.isnan(vectors).any(axis=1)).any():
        raise FeatureFileError(
            f"{printable(folder)} holds no vector of {printable(ids[int(missing.argmax())])}",
            hint="delete the folder: its vectors are made again",
        )
    return vectors
