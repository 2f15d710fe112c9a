"""ORFs as columns, as the C library writes and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.types import Orf

FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Texts in one buffer. Text i is ``letters[bounds[i] : bounds[i + 1]]``."""

    letters: NDArray[np.uint8]
    bounds: NDArray[np.int64]  # (n + 1,)

    @classmethod
    def from_strings(cls, texts: Iterable[str]) -> Texts:
        encoded = [text.encode() for text in texts]
        bounds = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=bounds[1:])
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each text in bytes. (n,)"""
        return np.diff(self.bounds)

    def to_strings(self) -> list[str]:
        content = self.letters.tobytes()
        bounds = self.bounds.tolist()
        return [content[start:end].decode() for start, end in pairwise(bounds)]

    def join(self, first: int, end: int) -> bytes:
        """Return the bytes of texts ``first`` to ``end``, without separators."""
        return self.letters[self.bounds[first] : self.bounds[end]].tobytes()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Orfs:
    """Neighbouring ORFs as columns, with the fields of ``Orf``."""

    chunk_ids: Texts  # one per chunk
    record_ids: Texts  # one per chunk
    chunks: NDArray[np.int64]  # (n,), index of each ORF's chunk
    frames: NDArray[np.uint8]  # (n,), index in ``FRAMES``, or one more for a protein
    starts: NDArray[np.int64]  # (n,)
    ends: NDArray[np.int64]  # (n,)
    proteins: Texts
    bases: Texts

    @classmethod
    def from_proteins(cls, ids: Sequence[str], proteins: Sequence[str]) -> Orfs:
        """Return input proteins, each its own chunk and record."""
        protein_frame = len(FRAMES)
        n = len(ids)
        names = Texts.from_strings(ids)
        texts = Texts.from_strings(proteins)
        return cls(
            chunk_ids=names,
            record_ids=names,
            chunks=np.arange(n),
            frames=np.full(n, protein_frame, dtype=np.uint8),
            starts=np.zeros(n, dtype=np.int64),
            ends=texts.lengths,
            proteins=texts,
            bases=Texts.from_strings([""] * n),
        )

    def __len__(self) -> int:
        return len(self.chunks)

    def to_list(self) -> list[Orf]:
        endings = (*FRAMES, "")  # of ORF ids, by frame; a protein has the last one
        strands = "+++---."  # by frame
        chunk_ids = self.chunk_ids.to_strings()
        record_ids = self.record_ids.to_strings()
        columns = zip(
            self.chunks.tolist(),
            self.frames.tolist(),
            self.starts.tolist(),
            self.ends.tolist(),
            self.proteins.to_strings(),
            self.bases.to_strings(),
            strict=True,
        )
        return [
            Orf(
                chunk_ids[chunk] + endings[frame],
                chunk_ids[chunk],
                record_ids[chunk],
                start,
                end,
                strands[frame],
                protein,
                bases,
            )
            for chunk, frame, start, end, protein, bases in columns
        ]
