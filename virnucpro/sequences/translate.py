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

from virnucpro.core.types import FastaRecord, Orf, reverse_complement
from virnucpro.sequences.base_digits import BASE_DIGITS
from virnucpro.sequences.genetic_code import STANDARD, STOP, GeneticCode

FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")
_STOP = ord(STOP)


@cache
def _codon_tables(code: GeneticCode) -> tuple[bytes, bytes, bytes]:
    """Return three 256-byte tables: base to digit, and codon to residue on either strand.

    A codon with the digits a, b, c has the number 25a + 5b + c. Any letter but ACGTU has the digit
    4. A codon with such a letter has the residue 0.
    """
    digits = np.minimum(BASE_DIGITS, 4).astype(np.uint8)
    forward = np.zeros(256, dtype=np.uint8)  # 125 are used; bytes.translate needs 256
    reverse = np.zeros(256, dtype=np.uint8)
    for codon, letter in code.meanings.items():
        a, b, c = (int(digits[ord(base)]) for base in codon)
        forward[25 * a + 5 * b + c] = ord(letter)
        reverse[25 * (3 - c) + 5 * (3 - b) + (3 - a)] = ord(letter)
    return digits.tobytes(), forward.tobytes(), reverse.tobytes()


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


def translate_six_frames(chunks: Sequence[Chunk], code: GeneticCode = STANDARD) -> list[Orf]:
    """Translate the six frames of each chunk. Keep those without a stop, in chunk order.

    Codons with a letter other than ACGTU are skipped, and frames without residues are dropped.
    Translating many chunks at once costs little more than one.

    >>> [orf.id for orf in translate_six_frames([Chunk("c1", "r", 0, "ATGTAA")])]
    ['c1F2', 'c1F3', 'c1R1', 'c1R2', 'c1R3']
    """
    if not chunks:
        return []
    text = "".join([chunk.sequence for chunk in chunks]).encode("ascii", "replace")
    strands = _letters_by_strand(text, code)
    lengths = np.array([len(chunk.sequence) for chunk in chunks])
    ends = np.cumsum(lengths)
    offsets = np.arange(3)
    n_codons = np.maximum(0, lengths[:, None] - offsets) // 3  # (n_chunks, 3)
    first_forward = (ends - lengths)[:, None] + offsets  # first base of the first codon
    first_reverse = ends[:, None] - offsets - 3 * n_codons  # first base of the last codon
    mask = np.hstack(
        [
            (n_codons > 0) & ~_has_stop(letters, first, n_codons)
            for letters, first in zip(strands, (first_forward, first_reverse), strict=True)
        ]
    )
    rows, frames = np.nonzero(mask)
    firsts = np.hstack([first_forward, first_reverse])[rows, frames]
    counts = np.hstack([n_codons, n_codons])[rows, frames]
    starts = np.array([chunk.start for chunk in chunks])[rows] + firsts - (ends - lengths)[rows]
    # frame start and chunk end in the joined chunks, on the frame's strand
    is_forward = frames < 3
    first_base = np.where(is_forward, (ends - lengths)[rows], len(text) - ends[rows]) + frames % 3
    last_base = np.where(is_forward, ends[rows], len(text) - (ends - lengths)[rows])
    bases = text.decode("ascii").upper().replace("U", "T")
    coding = (bases, reverse_complement(bases))
    columns = (rows, frames, firsts, counts, starts, first_base, last_base)

    orfs = []
    for i, frame, first, n, start, begin, end in zip(*(c.tolist() for c in columns), strict=True):
        letters = strands[frame // 3][first : first + 3 * n : 3].replace(b"\0", b"")
        if letters:
            chunk = chunks[i]
            strand = "+-"[frame // 3]
            protein = (letters if frame < 3 else letters[::-1]).decode("ascii")
            # the bases that the original VirNucPro writes
            frame_bases = coding[frame // 3][begin : min(end, begin + 1 + 3 * len(protein))]
            orf = Orf(
                chunk.id + FRAMES[frame],
                chunk.id,
                chunk.record_id,
                start,
                start + 3 * n,
                strand,
                protein,
                frame_bases,
            )
            orfs.append(orf)
    return orfs


def _letters_by_strand(text: bytes, code: GeneticCode) -> tuple[bytes, bytes]:
    """Return the residue of the codon at each base but the last two, on both strands."""
    base_digits, forward, reverse = _codon_tables(code)
    digits = np.frombuffer(text.translate(base_digits), dtype=np.uint8)
    codons = digits[:-2] * 25
    codons += digits[1:-1] * 5
    codons += digits[2:]
    numbers = codons.tobytes()
    return numbers.translate(forward), numbers.translate(reverse)


def _has_stop(
    letters: bytes, first: NDArray[np.int64], n_codons: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return a mask of frames with a stop among ``n_codons`` codons from ``first`` on.

    Args:
        letters: (n_bases,) residues as bytes.
        first: (n_chunks, 3) positions.
        n_codons: (n_chunks, 3) counts.

    Returns:
        (n_chunks, 3) bool.
    """
    stops = np.flatnonzero(np.frombuffer(letters, dtype=np.uint8) == _STOP)
    stride = len(letters) + 3  # keeps the stops of each phase contiguous and ordered
    keys = np.sort((stops % 3) * stride + stops)
    lowest = (first % 3) * stride + first
    position = np.searchsorted(keys, lowest)
    has_stop: NDArray[np.bool_] = position != np.searchsorted(keys, lowest + 3 * n_codons - 2)
    return has_stop
