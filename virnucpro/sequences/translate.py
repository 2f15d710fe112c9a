"""Cut nucleotides into chunks, and translate them to the ORFs that encoders read.

Chunks, the frames that are kept, and their names follow the original VirNucPro
(github.com/Li-Jing-1997/VirNucPro). Golden files test them byte by byte. The only difference is
that U is read as T, while the original drops the codon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.types import FastaRecord, Orf, Records
from virnucpro.sequences.base_digits import BASE_DIGITS
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.orfs import FRAMES, Orfs, Texts


@cache
def _translation_tables(code: GeneticCode) -> NDArray[np.uint8]:
    """Return the tables by which the library translates. (5, 256)

    Base to digit, base to upper case with T for U, base to its complement, and codon to residue on
    either strand. A codon with the digits a, b, c has the number 25a + 5b + c. Any letter but ACGTU
    has the digit 4. A codon with such a letter has the residue 0.
    """
    letters = bytes(range(256))
    upper = letters.upper().replace(b"U", b"T")
    complement = upper.translate(bytes.maketrans(b"ACGT", b"TGCA"))
    residues = np.zeros((2, 256), dtype=np.uint8)  # codons have numbers below 125
    for codon, letter in code.meanings.items():
        a, b, c = (int(BASE_DIGITS[ord(base)]) for base in codon)
        residues[0, 25 * a + 5 * b + c] = ord(letter)
        residues[1, 25 * (3 - c) + 5 * (3 - b) + (3 - a)] = ord(letter)
    by_letter = (BASE_DIGITS, np.frombuffer(upper, np.uint8), np.frombuffer(complement, np.uint8))
    return np.vstack([*by_letter, residues])


class Chunk(NamedTuple):
    """A piece of one record."""

    id: str
    record_id: str
    start: int
    sequence: str

    @property
    def end(self) -> int:
        return self.start + len(self.sequence)

    @classmethod
    def from_record(cls, record: FastaRecord, size: int) -> Iterator[Chunk]:
        """Cut a record as ``Chunks.from_records`` does."""
        for chunks in Chunks.from_records(Records.from_records([record]), size):
            yield from map(cls, *chunks)


class Chunks(NamedTuple):
    """Neighbouring chunks as parallel columns, with the fields of ``Chunk`` in its order."""

    ids: list[str]
    record_ids: list[str]
    starts: list[int]
    sequences: list[str]

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk]) -> Chunks:
        columns = list(zip(*chunks, strict=True)) or [()] * len(cls._fields)
        return cls._make(map(list, columns))

    @classmethod
    def from_records(cls, records: Records, size: int) -> Iterator[Chunks]:
        """Cut records into chunks, and yield neighbouring chunks with a bounded number of bases.

        Each record gives the fewest chunks of at most ``size`` bases, overlapping evenly. All its
        chunks but the last have ``size`` bases. If the overlaps cannot be equal, the first ones are
        one base longer.
        """
        bases_at_once = 500_000
        lengths = records.lengths
        n_chunks = -(-lengths // size)
        overlaps, spares = np.divmod(n_chunks * size - lengths, np.maximum(n_chunks, 1))
        n_wider = spares + overlaps  # k = R - q(n - 1), with R = qn + spare
        rows = np.repeat(np.arange(len(lengths)), n_chunks)
        numbers = np.arange(len(rows)) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)
        starts = numbers * (size - overlaps[rows]) - np.minimum(numbers, n_wider[rows])
        groups = np.cumsum(np.minimum(lengths[rows] - starts, size)) // bases_at_once
        bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]
        for first, end in pairwise(bounds):
            group = slice(first, end)
            yield cls._cut(records, rows[group], numbers[group], starts[group], size)

    @classmethod
    def _cut(
        cls,
        records: Records,
        rows: NDArray[np.int64],
        numbers: NDArray[np.int64],
        starts: NDArray[np.int64],
        size: int,
    ) -> Chunks:
        """Cut the chunks with these record indices, numbers in their record and starts."""
        row_list = rows.tolist()
        start_list = starts.tolist()
        record_ids = [records.ids[row] for row in row_list]
        ids = [
            f"{record_id}_chunk_{number}"
            for record_id, number in zip(record_ids, (numbers + 1).tolist(), strict=True)
        ]
        sequences = [
            records.sequences[row][start : start + size]
            for row, start in zip(row_list, start_list, strict=True)
        ]
        return cls(ids, record_ids, start_list, sequences)


def translate_chunks(chunks: Chunks, code: GeneticCode = STANDARD) -> Orfs:
    """Translate the six frames of each chunk. Keep those without a stop, in chunk order.

    Codons with a letter other than ACGTU are skipped, and frames without residues are dropped. The
    bases are those that the original VirNucPro writes: three per residue, and one more.
    """
    n_chunks = len(chunks.ids)
    text = "".join(chunks.sequences).encode("ascii", "replace")
    lengths = np.array(list(map(len, chunks.sequences)), dtype=np.int64)
    columns = np.empty((6, len(FRAMES) * n_chunks), dtype=np.int64)
    proteins = np.empty(2 * len(text), dtype=np.uint8)
    bases = np.empty(len(FRAMES) * len(text), dtype=np.uint8)
    n_frames = np.zeros(1, dtype=np.int64)
    tables = _translation_tables(code)
    letters = np.frombuffer(text, dtype=np.uint8)
    call(
        "translate_frames",
        *(letters, lengths, n_chunks, tables),
        *(columns, proteins, bases, n_frames),
    )
    n = int(n_frames[0])
    rows, frames, starts, ends, protein_ends, base_ends = columns[:, :n]
    chunk_starts = np.array(chunks.starts, dtype=np.int64)[rows]
    return Orfs(
        chunk_ids=Texts.from_strings(chunks.ids),
        record_ids=Texts.from_strings(chunks.record_ids),
        chunks=rows,
        frames=frames.astype(np.uint8),
        starts=chunk_starts + starts,
        ends=chunk_starts + ends,
        proteins=Texts(proteins, np.append(0, protein_ends)),
        bases=Texts(bases, np.append(0, base_ends)),
    )


def translate_six_frames(chunks: Sequence[Chunk], code: GeneticCode = STANDARD) -> list[Orf]:
    """Return the open frames of chunks as objects. See ``translate_chunks``.

    >>> [orf.id for orf in translate_six_frames([Chunk("c1", "r", 0, "ATGTAA")])]
    ['c1F2', 'c1F3', 'c1R1', 'c1R2', 'c1R3']
    """
    return translate_chunks(Chunks.from_chunks(chunks), code).to_list()
