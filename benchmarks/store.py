"""Measure how fast feature files are written and read, compared with ``tofile`` and checksums.

    python benchmarks/store.py [FOLDER]

Vectors are random, with the 1,280 dimensions of ESM-2 650M. A write includes the checksum and the
sync to disk, a read the check of every bit. Figures are medians of five, in CPU seconds of all
threads. FOLDER decides which disk is measured.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import xxhash

from virnucpro.core.model_outputs import Store
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings
from virnucpro.store.feature_file import read_embeddings, write_embeddings

N_ROWS = 40_000  # 205 MB in float32
DIM = 1280
RESIDUES = 270  # per protein
REPEATS = 5
STORES: tuple[Store, ...] = ("float32", "bfloat16")
COLUMNS = (
    *("rows", "store", "GB per 10^6 proteins", "CPU s to write", "CPU s to read"),
    *("MB per CPU s, write", "MB per CPU s, read"),
)


def make_embeddings(*, per_residue: bool) -> Embeddings:
    """Make random vectors of as many proteins as give ``N_ROWS`` rows."""
    n_proteins = N_ROWS // RESIDUES if per_residue else N_ROWS
    n_rows = n_proteins * RESIDUES if per_residue else n_proteins
    return Embeddings(
        ids=tuple(f"protein_{i}" for i in range(n_proteins)),
        lengths=np.full(n_proteins, RESIDUES, dtype=np.int32),
        vectors=np.random.default_rng(0).standard_normal((n_rows, DIM), dtype=np.float32),
        per_residue=per_residue,
        sequence_sha256=np.zeros((n_proteins, 32), dtype=np.uint8),
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def measure_store(folder: Path, *, per_residue: bool, store: Store) -> str:
    """Return a row of the table."""
    embeddings = make_embeddings(per_residue=per_residue)
    attributes = {"pooling": "none" if per_residue else "mean"}
    tree = SafeDir(folder)
    written: list[float] = []
    read: list[float] = []
    for repeat in range(REPEATS):
        path = folder / f"{repeat}.h5"
        write = partial(write_embeddings, path, embeddings, attributes, tree, store)
        written.append(cpu_seconds(write))
        read.append(cpu_seconds(partial(read_embeddings, path, attributes)))
        n_bytes = path.stat().st_size
        path.unlink()
    rows = "per residue" if per_residue else "per protein"
    per_million = 1e6 / len(embeddings.ids)
    return "\t".join(
        [
            rows,
            store,
            f"{n_bytes * per_million / 1e9:.2f}",
            f"{median(written) * per_million:.1f}",
            f"{median(read) * per_million:.1f}",
            f"{n_bytes / 1e6 / median(written):.0f}",
            f"{n_bytes / 1e6 / median(read):.0f}",
        ]
    )


def measure_limits(folder: Path) -> str:
    """Return a line with the MB per CPU second of numpy's own writing, synced, and of checksums."""
    vectors = np.random.default_rng(0).standard_normal((N_ROWS, DIM), dtype=np.float32)
    path = folder / "vectors"

    def write() -> None:
        with path.open("wb") as out:
            vectors.tofile(out)
            os.fsync(out.fileno())

    written = median(cpu_seconds(write) for _ in range(REPEATS))
    sha256 = median(cpu_seconds(partial(hashlib.sha256, vectors.data)) for _ in range(REPEATS))
    xxh3 = median(cpu_seconds(partial(xxhash.xxh3_128, vectors.data)) for _ in range(REPEATS))
    path.unlink()
    n_megabytes = vectors.nbytes / 1e6
    return (
        f"numpy's tofile writes {n_megabytes / written:.0f} MB per CPU second, "
        f"SHA-256 reads {n_megabytes / sha256:.0f}, XXH3-128 {n_megabytes / xxh3:.0f}."
    )


def main(folder: str | None) -> None:
    """Print a table, tab-separated."""
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    with TemporaryDirectory(dir=folder) as name:
        for per_residue, store in product((False, True), STORES):
            row = measure_store(Path(name), per_residue=per_residue, store=store)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
        sys.stdout.write(f"{measure_limits(Path(name))}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
