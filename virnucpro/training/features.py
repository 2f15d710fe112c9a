"""The vectors that a head is trained on: made once, by the engine, as ``extract`` makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import FeatureFileError
from virnucpro.fasta import write_record
from virnucpro.files import atomic
from virnucpro.log import printable
from virnucpro.rundir import RunDir
from virnucpro.training.labelled import read_manifest, read_sequences


def write_fasta(path: Path, data: Path) -> None:
    """All records of a manifest in one file, with their ids; the same bytes every time."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        for _, record in read_sequences(read_manifest(data)):
            write_record(out, record.id, record.sequence)


def read_vectors(folder: Path, ids: Iterable[str]) -> NDArray[np.float32]:
    """The vectors of these frames, in their order, from a run folder of ``extract``. (n, dim)

    Raises:
        FeatureFileError: one is not there.
    """
    with h5py.File(RunDir(folder).feature_index) as h5:
        rows: Mapping[str, int] = {name: row for row, name in enumerate(h5["ids"].asstr()[:])}
        vectors: NDArray[np.float32] = h5["embeddings"][:]
    try:
        return vectors[[rows[name] for name in ids]]
    except KeyError as error:
        raise FeatureFileError(
            f"{printable(folder)} holds no vector of {printable(error.args[0])}",
            hint="delete the folder: its vectors are made again",
        ) from error
