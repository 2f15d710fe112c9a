"""Cut nucleotides into chunks, and translate them to the ORFs that encoders read.

Chunks, the frames that are kept, and their names follow the original VirNucPro
(github.com/Li-Jing-1997/VirNucPro). Golden files test them byte by byte. The only difference is
that U is read as T, while the original drops the codon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.types import FastaRecord, Orf
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
    digits = np.minimum(BASE_DIGITS, 4).astype(np.uint8)
    letters = bytes(range(256))
    upper = letters.upper().replace(b"U", b"T")
    complement = upper.translate(bytes.maketrans(b"ACGT", b"TGCA"))
    residues = np.zeros((2, 256), dtype=np.uint8)  # codons have numbers below 125
    for codon, letter in code.meanings.items():
        a, b, c = (int(digits[ord(base)]) for base in codon)
        residues[0, 25 * a + 5 * b + c] = ord(letter)
        residues[1, 25 * (3 - c) + 5 * (3 - b) + (3 - a)] = ord(letter)
    by_letter = (digits, np.frombuffer(upper, np.uint8), np.frombuffer(complement, np.uint8))
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
        """Cut a record into the fewest chunks of at most ``size`` bases, overlapping evenly.

        All chunks but the last have ``size`` bases. If the overlaps cannot be equal, the first ones
        are one base longer.
        """
        length = len(record.sequence)
        if 0 < length <= size:  # as most reads are
            yield cls(f"{record.id}_chunk_1", record.id, 0, record.sequence)
            return
        n_chunks = -(-length // size)
        overlap, spare = divmod(n_chunks * size - length, n_chunks) if n_chunks else (0, 0)
        n_wider = spare + overlap  # k = R - q(n - 1), with R = qn + spare
        start = 0
        for i in range(n_chunks):
            sequence = record.sequence[start : start + size]
            yield cls(f"{record.id}_chunk_{i + 1}", record.id, start, sequence)
            start += size - overlap - (1 if i < n_wider else 0)


def translate_chunks(chunks: Sequence[Chunk], code: GeneticCode = STANDARD) -> Orfs:
    """Translate the six frames of each chunk. Keep those without a stop, in chunk order.

    Codons with a letter other than ACGTU are skipped, and frames without residues are dropped. The
    bases are those that the original VirNucPro writes: three per residue, and one more.
    """
    text = "".join([chunk.sequence for chunk in chunks]).encode("ascii", "replace")
    lengths = np.array([len(chunk.sequence) for chunk in chunks], dtype=np.int64)
    columns = np.empty((6, len(FRAMES) * len(chunks)), dtype=np.int64)
    proteins = np.empty(2 * len(text), dtype=np.uint8)
    bases = np.empty(len(FRAMES) * len(text), dtype=np.uint8)
    n_frames = np.zeros(1, dtype=np.int64)
    tables = _translation_tables(code)
    letters = np.frombuffer(text, dtype=np.uint8)
    call(
        "translate_frames",
        *(letters, lengths, len(chunks), tables),
        *(columns, proteins, bases, n_frames),
    )
    n = int(n_frames[0])
    rows, frames, starts, ends, protein_ends, base_ends = columns[:, :n]
    chunk_starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)[rows]
    return Orfs(
        chunk_ids=Texts.from_strings([chunk.id for chunk in chunks]),
        record_ids=Texts.from_strings([chunk.record_id for chunk in chunks]),
        chunks=rows,
        frames=frames.astype(np.uint8),
        starts=chunk_starts + starts,
        ends=chunk_starts + ends,
        proteins=Texts(proteins, np.append(0, protein_ends)),
        bases=Texts(bases, np.append(0, base_ends)),
    )


def translate_six_frames(chunks: Sequence[Chunk], code: GeneticCode = STANDARD) -> list[Orf]:
    """Return the ORFs of ``translate_chunks`` as objects.

    >>> [orf.id for orf in translate_six_frames([Chunk("c1", "r", 0, "ATGTAA")])]
    ['c1F2', 'c1F3', 'c1R1', 'c1R2', 'c1R3']
    """
    return translate_chunks(chunks, code).to_list()
