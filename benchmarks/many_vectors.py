"""Measure a store of many small vectors: open it, read rows at random, and iterate.

    python benchmarks/many_vectors.py [FOLDER] [--vectors 10000000] [--dim 16]

The store is written as a run writes its own: feature files, their list, and the index. Vectors are
random, and shared by all files. FOLDER decides which disk is measured, and needs 2.5 GB for 10^7
vectors. Files are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Embeddings, Shard
from virnucpro.store.feature_index import IndexPart, read_parts, write_parts
from virnucpro.store.feature_store import FeatureStore, open_stores
from virnucpro.store.vector_index import write_index
from virnucpro.store.vectors import open_vectors

VECTORS_PER_FILE = 50_000
RESIDUES = 270  # per protein
N_SAMPLED = 20_000


def open_store(folder: Path, dim: int) -> FeatureStore:
    encoder = EncoderSpec(
        model="random", sha256="", layer=1, pooling="mean", precision="fp32", dim=dim
    )
    (store,) = open_stores(folder / "features", [encoder], "random")
    return store


def write_file(store: FeatureStore, number: int, n_vectors: int) -> IndexPart:
    """Write a feature file, and describe it for the list."""
    first = number * VECTORS_PER_FILE
    vectors = np.random.default_rng(0).standard_normal((n_vectors, store.encoder.dim))
    embeddings = Embeddings(
        ids=tuple(f"protein_{first + i}" for i in range(n_vectors)),
        lengths=np.full(n_vectors, RESIDUES, dtype=np.int32),
        vectors=vectors.astype(np.float32),
        sequence_sha256=np.zeros((n_vectors, 32), dtype=np.uint8),
    )
    name = f"{number:06}"
    shard = Shard(
        number,
        store.folder / f"{name}.faa",
        n_orfs=n_vectors,
        n_embedded=n_vectors,
        n_residues=n_vectors * RESIDUES,
        sha256=name,
    )
    checksums = store.write(shard, embeddings)
    return IndexPart.from_file(store.path(shard).name, embeddings, checksums)


def write_store(store: FeatureStore, n_vectors: int) -> None:
    store.make_folder()
    sizes = [
        min(VECTORS_PER_FILE, n_vectors - first) for first in range(0, n_vectors, VECTORS_PER_FILE)
    ]
    parts = [write_file(store, number, size) for number, size in enumerate(sizes)]
    write_parts(store, parts)
    write_index(store, parts)


def measure(name: str, unit: str, work: Callable[[], float]) -> None:
    """Print what work takes. Work returns the factor from its seconds to the unit."""
    wall = time.perf_counter()
    cpu = time.process_time()
    factor = work()
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - wall
    sys.stdout.write(f"{name}\t{wall * factor:.3g}\t{cpu * factor:.3g}\t{unit}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> None:
    """Print a table, tab-separated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--vectors", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args(words)
    n_vectors: int = options.vectors
    with TemporaryDirectory(dir=options.folder) as name:
        store = open_store(Path(name), options.dim)
        sys.stdout.write("step\twall\tCPU\tunit\n")
        per_million = 1e6 / n_vectors

        def write() -> float:
            write_store(store, n_vectors)
            return per_million

        measure("write, with the index", "s per 10^6 vectors", write)
        parts = read_parts(store)

        def index() -> float:
            write_index(store, parts)
            return per_million

        measure("index", "s per 10^6 vectors", index)
        n_bytes = sum(path.stat().st_size for path in store.folder.iterdir())
        sys.stdout.write(f"disk\t{n_bytes * per_million / 1e6:.0f}\t\tMB per 10^6 vectors\n")
        run = open_vectors([store])

        def reopen() -> float:
            return 1.0 * (len(open_vectors([store])) == n_vectors)

        measure("open", "s", reopen)
        rng = np.random.default_rng(1)
        positions = rng.integers(0, n_vectors, N_SAMPLED).tolist()
        names = [f"protein_{position}" for position in positions]

        def read_positions() -> float:
            for position in positions:
                run[position]
            return 1e6 / N_SAMPLED

        def read_names() -> float:
            for orf_id in names:
                run[orf_id]
            return 1e6 / N_SAMPLED

        measure("random row by position, files not open yet", "us", read_positions)
        measure("random row by position", "us", read_positions)
        measure("random row by id, first time", "us", read_names)
        measure("random row by id", "us", read_names)

        def iterate() -> float:
            n_read = sum(1 for _ in run)
            assert n_read == n_vectors, "every vector once"
            return per_million

        measure("iterate, verified", "s per 10^6 vectors", iterate)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        sys.stdout.write(f"peak memory\t{peak:.2f}\t\tGB\n")


if __name__ == "__main__":
    main()
