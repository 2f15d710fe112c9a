"""Feed the vectors of a run to torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from virnucpro.core.model_outputs import OutputSpec

_Vectors = NDArray[np.float32] | list[NDArray[np.float32]]


class StoredVectors(Protocol):
    """The vectors of a run: see ``store.vectors.Vectors``."""

    spec: OutputSpec

    def __len__(self) -> int: ...

    @property
    def dim(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int32]: ...

    @property
    def ids(self) -> Sequence[str]: ...

    def read_verified(self, positions: NDArray[np.int64]) -> _Vectors: ...

    def parts_in_order(self) -> Sequence[NDArray[np.int64]]: ...


class VectorDataset(IterableDataset[tuple[str, torch.Tensor]]):
    """Pairs of an id and its vector: (dim,) float32, or (residues, dim) per residue.

    Each rank, and each loader worker in it, reads its own share.
    """

    def __init__(
        self, vectors: StoredVectors, *, shuffle: bool, seed: int, rank: int, world_size: int
    ) -> None:
        self.vectors = vectors
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next iteration. Call it before each epoch, on each rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of vectors of this rank."""
        first, end = self._share(0, 1)
        return end - first

    def _share(self, worker: int, n_workers: int) -> tuple[int, int]:
        """Return the first place and the end of a worker's share in the order of the epoch."""
        n = len(self.vectors)
        first = n * self.rank // self.world_size
        n_rank = n * (self.rank + 1) // self.world_size - first
        return first + n_rank * worker // n_workers, first + n_rank * (worker + 1) // n_workers

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        info = get_worker_info()
        first, end = self._share(info.id, info.num_workers) if info else self._share(0, 1)
        for window in self._windows(first, end):
            rows = self.vectors.read_verified(window)
            for position, row in zip(window.tolist(), rows, strict=True):
                yield self.vectors.ids[position], torch.as_tensor(row)

    def _windows(self, first: int, end: int) -> Iterator[NDArray[np.int64]]:
        """Yield the positions of this share in order, as many at once as are shuffled together."""
        window_bytes = 1 << 26  # of vectors that are shuffled together
        if not len(self.vectors):
            return
        rows_per_vector = float(self.vectors.spec.count_rows(self.vectors.lengths).mean())
        n_rows = max(1, int(window_bytes / (4 * self.vectors.dim * max(1.0, rows_per_vector))))
        rng = np.random.default_rng((self.seed, self.epoch))
        order = self._epoch_order(rng)[first:end]
        window_rng = np.random.default_rng((self.seed, self.epoch, first))
        for begin in range(0, len(order), n_rows):
            window = order[begin : begin + n_rows]
            yield window_rng.permutation(window) if self.shuffle else window

    def _epoch_order(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return all positions, file by file. All ranks compute the same order."""
        if not self.shuffle:
            return np.arange(len(self.vectors))
        parts = self.vectors.parts_in_order()
        if not parts:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([parts[number] for number in rng.permutation(len(parts))])
