"""Screen records, and translate nucleotides to the ORFs that encoders read. Pure functions.

Chunks, the frames that are kept, and their names follow the original VirNucPro
(github.com/Li-Jing-1997/VirNucPro). Golden files test them byte by byte. The only difference is
that U is read as T, while the original drops the codon.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import UsageError
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Alphabet, Recipe, Status
from virnucpro.core.types import FastaRecord, Orf, Records, reverse_complement
from virnucpro.sequences.base_digits import BASE_DIGITS
from virnucpro.sequences.fasta import find_invalid, matches_type

# Genetic codes by NCBI's numbers, from ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi. Codes 27, 28
# and 31 are excluded, because context decides whether one of their codons is a residue or a stop.

STOP = "*"
_CODONS = tuple(a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT")
_LETTERS = (
    "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF"  # one letter per codon
)
_DIFFERENCES = {  # NCBI's number -> codons that differ from the standard code
    1: "",
    2: "AGA* AGG* ATAM TGAW",
    3: "ATAM CTAT CTCT CTGT CTTT TGAW",
    4: "TGAW",
    5: "AGAS AGGS ATAM TGAW",
    6: "TAAQ TAGQ",
    9: "AAAN AGAS AGGS TGAW",
    10: "TGAC",
    11: "",
    12: "CTGS",
    13: "AGAG AGGG ATAM TGAW",
    14: "AAAN AGAS AGGS TAAY TGAW",
    15: "TAGQ",
    16: "TAGL",
    21: "AAAN AGAS AGGS ATAM TGAW",
    22: "TAGL TCA*",
    23: "TTA*",
    24: "AGAS AGGK TGAW",
    25: "TGAG",
    26: "CTGA",
    29: "TAAY TAGY",
    30: "TAAE TAGE",
    32: "TAGW",
    33: "AGAS AGGK TAAY TGAW",
}
GENETIC_CODES = tuple(_DIFFERENCES)


@dataclass(frozen=True, slots=True)
class GeneticCode:
    """A genetic code with one letter per codon, in the order AAA, AAC, AAG, AAT ..."""

    number: int
    codons: tuple[str, ...]
    letters: tuple[str, ...]  # * is a stop

    @property
    def meanings(self) -> dict[str, str]:
        """Return the letter of each codon."""
        return dict(zip(self.codons, self.letters, strict=True))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(codon for codon, letter in self.meanings.items() if letter == STOP)

    @staticmethod
    @cache
    def from_number(number: int) -> GeneticCode:
        """Return the code with an NCBI number.

        Raises:
            UsageError: there is no such code, or one of its codons has two meanings.
        """
        if number not in GENETIC_CODES:
            raise UsageError(
                with_options(
                    "{genetic_code} is {number}, which is not an NCBI code with one meaning per "
                    "codon",
                    number=number,
                ),
                hint=f"choose one of {', '.join(map(str, GENETIC_CODES))}",
                option="genetic_code",
            )
        meanings = dict(zip(_CODONS, _LETTERS, strict=True))
        meanings |= {change[:3]: change[3] for change in _DIFFERENCES[number].split()}
        return GeneticCode(number, tuple(meanings), tuple(meanings.values()))

    @property
    def standard_synonyms(self) -> dict[str, str]:
        """Map each codon with a non-standard residue to the most similar standard codon for it.

        Stops have no synonym.

        >>> GeneticCode.from_number(6).standard_synonyms
        {'TAA': 'CAA', 'TAG': 'CAG'}
        """
        synonyms = {}
        usual = STANDARD.meanings
        for codon, letter in self.meanings.items():
            if letter not in (usual[codon], STOP):
                same = [synonym for synonym in usual if usual[synonym] == letter]
                synonyms[codon] = min(same, key=lambda synonym: _n_changes(codon, synonym))
        return synonyms


def _n_changes(codon: str, synonym: str) -> int:
    return sum(a != b for a, b in zip(codon, synonym, strict=True))


STANDARD = GeneticCode.from_number(1)  # the bacterial code, 11, differs only in its start codons


# Records to ORFs

FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")
_MAX_RESIDUES = 50_000  # longer than any known protein; the cost of attention is quadratic
_STOP = ord(STOP)
_KNOWN = frozenset("ACGT")


def reject_reason(record: FastaRecord, recipe: Recipe) -> tuple[Status | None, str]:
    """Return the status and note of a record that is rejected, or None and ""."""
    if invalid := find_invalid(record, recipe.input_type):
        return "invalid", invalid
    if recipe.input_type == "protein" and not record.protein:
        return "invalid", "the record holds nothing but a stop"
    return _screen_length(len(record.sequence), recipe)


def _screen_length(length: int, recipe: Recipe) -> tuple[Status | None, str]:
    if recipe.input_type == "protein" and length > _MAX_RESIDUES:
        return "invalid", f"{length} residues; at most {_MAX_RESIDUES} are embedded"
    if length < recipe.min_length:
        return "too_short", f"{length} of at least {recipe.min_length}"
    return None, ""


def reject_reasons(records: Records, recipe: Recipe) -> dict[int, tuple[Status, str]]:
    """Return the status and note of each rejected record, by index."""
    indices: Iterable[int] = range(len(records.ids))
    if recipe.input_type == "nucleotide" and matches_type(
        "".join(records.sequences), recipe.input_type
    ):
        lengths = records.lengths.tolist()
        rejected = {n for n in set(lengths) if not n or _screen_length(n, recipe)[0]}
        indices = [index for index, n in enumerate(lengths) if n in rejected]
    screened = ((index, *reject_reason(records.record_at(index), recipe)) for index in indices)
    return {index: (status, note) for index, status, note in screened if status is not None}


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

    @classmethod
    def cut_evenly(cls, record: FastaRecord, size: int) -> Iterator[Chunk]:
        """Cut a record into the fewest chunks of at most ``size`` bases, spread evenly.

        A record and its reverse complement have the same chunks. Rounding is symmetric, and a
        middle chunk is one base shorter where it could not be centred otherwise. Positions are
        rounded towards the middle, so that chunks cover all bases.
        """
        length = len(record.sequence)
        last = max(0, length - size)
        n_chunks = -(-length // size)
        for n_before in range(n_chunks):
            n_behind = n_chunks - 1 - n_before
            n_bases = min(size, length)
            if n_before == n_behind:
                start = (last + 1) // 2
                n_bases -= last % 2
            elif n_before < n_behind:
                start = -(-n_before * last // (n_chunks - 1))
            else:
                start = last + -n_behind * last // (n_chunks - 1)
            bases = record.sequence[start : start + n_bases]
            yield cls(f"{record.id}_chunk_{n_before + 1}", record.id, start, bases)

    @classmethod
    def of(cls, record: FastaRecord, recipe: Recipe) -> Iterator[Chunk]:
        """Cut a record into chunks. Frames need the chunks of the original VirNucPro."""
        if Alphabet.CHUNK in recipe.alphabets:
            return cls.cut_evenly(record, recipe.chunk_size)
        return cls.from_record(record, recipe.chunk_size)

    @staticmethod
    def orfs(chunks: Sequence[Chunk], recipe: Recipe) -> list[Orf]:
        """Return what the recipe's encoders read: the chunks, or their frames."""
        if Alphabet.CHUNK in recipe.alphabets:
            return Chunk.as_orfs(chunks)
        return translate_six_frames(chunks, GeneticCode.from_number(recipe.genetic_code))

    @staticmethod
    def as_orfs(chunks: Iterable[Chunk]) -> list[Orf]:
        """Convert each chunk with a known base to an ORF, with its bases as text.

        >>> chunks = [Chunk("1", "", 0, "aug"), Chunk("2", "", 3, "N")]
        >>> [orf.protein for orf in Chunk.as_orfs(chunks)]
        ['ATG']
        """
        orfs = []
        for name, record_id, start, sequence in chunks:
            bases = sequence.upper().replace("U", "T")
            if not _KNOWN.isdisjoint(bases):
                orfs.append(Orf(name, name, record_id, start, start + len(bases), "+", bases))
        return orfs


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
