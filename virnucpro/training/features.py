"""The vectors that a head is trained on: made once, by the engine, as ``extract`` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import FeatureFileError
from virnucpro.files import atomic
from virnucpro.labelled.records import read_manifest, read_sequences
from virnucpro.log import printable
from virnucpro.records import Embeddings
from virnucpro.run.folder import RunDir, stores_of
from virnucpro.sequences.fasta import write_record


def write_fasta(path: Path, data: Path) -> None:
    """All records of a manifest in one file, with their ids; the same bytes every time."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        for _, record in read_sequences(read_manifest(data)):
            write_record(out, record.id, record.sequence)


def read_vectors(folder: Path, ids: Sequence[str]) -> NDArray[np.float32]:
    """The vectors of these frames, in their order, from a run folder of ``extract``. (n, dim)

    Memory holds these, and one feature file.

    Raises:
        FeatureFileError: one is not there, or a file is damaged.
    """
    place = {name: row for row, name in enumerate(ids)}
    known = np.zeros(len(ids), dtype=np.bool_)
    vectors = np.empty((len(ids), 0), dtype=np.float32)
    for found in _read_files(folder):
        if not found.ids:
            continue
        if not vectors.shape[1]:
            vectors = np.empty((len(ids), found.vectors.shape[1]), dtype=np.float32)
        rows = [row for row, name in enumerate(found.ids) if name in place]
        places = [place[found.ids[row]] for row in rows]
        vectors[places], known[places] = found.vectors[rows], True
    if not known.all():
        raise FeatureFileError(
            f"{printable(folder)} holds no vector of {printable(ids[int(known.argmin())])}",
            hint="delete the folder: its vectors are made again",
        )
    return vectors


def _read_files(folder: Path) -> Iterator[Embeddings]:
    rundir = RunDir(folder)
    manifest = rundir.read_manifest()
    for store in stores_of(rundir, manifest) if manifest else ():
        yield from store.read_files()
