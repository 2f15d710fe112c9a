"""The vectors that a head is trained on: made once, by the engine, as ``extract`` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from virnucpro.ground.errors import FeatureFileError
from virnucpro.ground.log import printable
from virnucpro.ground.records import Embeddings
from virnucpro.ground.tree import Tree
from virnucpro.run.folder import RunDir, stores_of


def write_vectors(path: Path, folder: Path, ids: Sequence[str]) -> None:
    """The vectors of these frames as one array, in their order, from a run folder of ``extract``.

    Memory holds the ids, and the vectors of one feature file.

    Raises:
        FeatureFileError: one is not there, or a file is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    place = {name: row for row, name in enumerate(ids)}
    is_there = np.zeros(len(ids), dtype=np.bool_)
    begin = 0
    with Tree(path.parents[1]).replacing(path) as out:
        for embeddings in _read_files(folder):
            if embeddings.ids and not begin:
                shape = (len(ids), embeddings.vectors.shape[1])
                facts = {"descr": "<f4", "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(out, facts)
                begin = out.tell()
            for name, vector in zip(embeddings.ids, embeddings.vectors, strict=True):
                if (row := place.get(name)) is not None:
                    out.seek(begin + row * vector.nbytes)
                    out.write(vector.tobytes())
                    is_there[row] = True
        if not is_there.all():
            raise FeatureFileError(
                f"{printable(folder)} holds no vector of {printable(ids[int(is_there.argmin())])}",
                hint="delete the folder: its vectors are made again",
            )


def _read_files(folder: Path) -> Iterator[Embeddings]:
    rundir = RunDir(folder)
    manifest = rundir.read_manifest()
    for store in stores_of(rundir, manifest) if manifest else ():
        yield from store.read_files()
