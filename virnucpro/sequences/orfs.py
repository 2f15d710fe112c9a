"""ORFs as columns, as the C library writes and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
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
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls.from_lengths(np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths)

    @classmethod
    def from_lengths(cls, letters: NDArray[np.uint8], lengths: NDArray[np.integer[Any]]) -> Texts:
        """Return texts of these lengths, one after the other.

        Raises:
            ValueError: together, they do not have the length of the letters.
        """
        bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        if (np.diff(bounds) < 0).any() or bounds[-1] != len(letters):
            raise ValueError(f"{len(letters)} letters are not texts of these lengths")
        return cls(letters, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each text in bytes. (n,)"""
        return np.diff(self.bounds)

    def to_bytes(self) -> list[bytes]:
        content = self.letters.tobytes()
        return [content[start:end] for start, end in pairwise(self.bounds.tolist())]

    def to_strings(self) -> list[str]:
        return [text.decode() for text in self.to_bytes()]

    def join(self, first: int, end: int) -> bytes:
        """Return the bytes of texts ``first`` to ``end``, without separators."""
        return self.letters[self.bounds[first] : self.bounds[end]].tobytes()


def digest_texts(*columns: Texts) -> NDArray[np.uint64]:
    """Return a 128-bit BLAKE2s digest of each text, or of the texts at the same place in columns.

    It is the first half of a digest of 256 bits. Texts of two columns are joined by a blank. Among
    10^12 texts, a collision has a probability of 10^-15. (n, 2)
    """
    first = columns[0]
    last = columns[-1]
    digests = np.empty((len(first), 2), dtype=np.uint64)
    buffers = (first.letters, first.bounds, last.letters, last.bounds)
    call("digest_texts", *buffers, len(columns), len(first), digests)
    return digests


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
