"""Records, ORFs, shards and embeddings: the values that the packages exchange.

FastaRecord > Chunk > Orf > Shard > (PackedBatch) > Embeddings

A child names its parent in a field, and an id is never parsed. Coordinates are bases, 0-based and
half-open, on the forward strand of the record. Each object is immutable and checks itself once,
when it is constructed. High-volume types are NamedTuples, which are three times faster to
construct.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.recipe import Alphabet

FRAMES_FAILED = "frames failed"  # in the note of a record that may be run again
PROTEIN = "."  # the strand of an ORF that came as a protein


# how assemblers (Unicycler, metaMDBG) and NCBI mark a circular sequence after the id
_CIRCULAR = re.compile(
    r"[\s\[;,|](circular\s*=\s*(true|yes|y|1)|topology\s*=\s*circular)\b", re.IGNORECASE
)
_COMPLEMENT = str.maketrans("ACGTU", "TGCAA")


class FastaRecord(NamedTuple):
    """One sequence of an input file."""

    id: str  # id in the run: no other record has it
    header: str  # the whole line after '>' or '@', as in the file but for the id
    sequence: str  # no white space and no gaps; the case is kept
    line: int = 0  # line of the header, counted from 1
    n_gaps: int = 0  # gaps of an alignment, left out
    sample: str = ""  # name of the file in the tables
    own_id: str = ""  # id in the file, where that differs

    @property
    def name(self) -> str:
        """The id of the record in its file."""
        return self.own_id or self.id

    @property
    def protein(self) -> str:
        """The sequence in upper case, without the final stop that gene callers write."""
        return self.sequence.upper().removesuffix("*")

    @property
    def is_circular(self) -> bool:
        """True if the header says that the sequence is circular.

        >>> FastaRecord("1", "1 length=5000 circular=true", "").is_circular
        True
        """
        return _CIRCULAR.search(self.header) is not None


class Records(NamedTuple):
    """Neighbouring records in columns, in step: the fields of ``FastaRecord``, in its order."""

    ids: list[str]
    headers: list[str]
    sequences: list[str]
    lines: list[int]
    n_gaps: list[int]
    samples: list[str]
    own_ids: list[str]

    @classmethod
    def from_records(cls, records: Iterable[FastaRecord]) -> Records:
        columns = list(zip(*records, strict=True)) or [()] * len(cls._fields)
        return cls._make(map(list, columns))

    @classmethod
    def concatenate(cls, each: Sequence[Records]) -> Records:
        return (
            each[0]
            if len(each) == 1
            else cls._make(concatenate_columns(each or [cls.from_records(())]))
        )

    def iter_records(self) -> Iterator[FastaRecord]:
        return map(FastaRecord, *self)

    def record_at(self, place: int) -> FastaRecord:
        return FastaRecord._make(column[place] for column in self)

    def slice_rows(self, rows: slice) -> Records:
        return Records._make(column[rows] for column in self)

    def select(self, mask: Sequence[bool]) -> Records:
        return Records._make(list(compress(column, mask)) for column in self)

    @property
    def names(self) -> list[str]:
        """The ids of the records in their files."""
        return [own or name for own, name in zip(self.own_ids, self.ids, strict=True)]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    @property
    def n_letters(self) -> int:
        return sum(map(len, self.sequences))

    def with_ids(self, ids: list[str]) -> Records:
        """The same records with other ids, in their headers too."""
        headers = [
            header if new == old else new + header.lstrip()[len(old) :]
            for header, old, new in zip(self.headers, self.ids, ids, strict=True)
        ]
        return self._replace(ids=ids, headers=headers)

    def with_mate(self, mate: int) -> Records:
        """Add ``/1`` or ``/2`` to the ids, unless they end so."""
        return self.with_ids(
            [name if name.endswith(("/1", "/2")) else f"{name}/{mate}" for name in self.ids]
        )

    def with_prefix(self, prefix: str, unprefixed: Container[str]) -> Records:
        """Prefix the ids, except those in ``unprefixed``; ``own_id`` keeps the original."""
        ids = [name if name in unprefixed else prefix + name for name in self.ids]
        own = ["" if new == old else old for new, old in zip(ids, self.ids, strict=True)]
        return self.with_ids(ids)._replace(own_ids=own)


def reverse_complement(bases: str) -> str:
    """The reverse complement in upper case; only A, C, G, T and U are complemented."""
    return bases.upper().translate(_COMPLEMENT)[::-1]


class Orf(NamedTuple):
    """A translated reading frame of a chunk without a stop codon.

    A protein of the input is an Orf too: its own chunk and its own record, with strand ``.``. So is
    a whole chunk, if the encoder reads chunks: its bases take the place of the protein.
    """

    id: str
    chunk_id: str
    record_id: str
    start: int
    end: int
    strand: str
    protein: str
    bases: str = ""  # bases of its strand in upper case, and the next one, if any
    copy_of: int | None = None  # ordinal of the embedded ORF of this sequence; see ``run.shards``

    def text(self, reads: Alphabet) -> str:
        """The sequence that an encoder reads."""
        return self.bases if reads is Alphabet.DNA else self.protein

    def coding_sequence(self, sequence: str) -> str:
        """Its complete codons, on its own strand; ``sequence`` is that of the record."""
        bases = sequence[self.start : self.end]
        return reverse_complement(bases) if self.strand == "-" else bases


SHARD_NAME = r"\d{6,}"  # names of shards, as a pattern


def shard_name(index: int) -> str:
    return f"{index:06d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A FASTA file of ORFs: the unit of work, failure and resume."""

    index: int
    path: Path = field(compare=False)  # a plan is made elsewhere, then moved here
    n_orfs: int
    n_embedded: int  # ORFs that are not copies
    n_residues: int  # residues of these
    sha256: str  # hash of the file

    def __post_init__(self) -> None:
        check_counts(self.index, self.n_orfs, self.n_embedded, self.n_residues)
        if self.n_embedded > min(self.n_orfs, self.n_residues):
            raise ValueError(f"{self.n_embedded} of {self.n_orfs} ORFs, {self.n_residues} residues")
        if not isinstance(self.sha256, str):
            raise TypeError("a shard is known by its hash")

    @property
    def name(self) -> str:
        return shard_name(self.index)


def check_counts(*counts: object) -> None:
    """Raise TypeError or ValueError for anything but counts that fit into 64 bits."""
    for count in counts:
        if type(count) is not int:  # a bool is not a count
            raise TypeError(f"{count!r} is not a count")
        if not 0 <= count < 2**63:
            raise ValueError(f"{count} is not a count")


class Failure(NamedTuple):
    """An ORF without an embedding, and the reason."""

    orf_id: str
    record_id: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of a shard's ORFs. Ids and rows travel together or not at all.

    ``vectors`` is (n_orfs, dim), or, ``per_residue``, (sum of lengths, dim), ORF after ORF.
    ``failures`` names the ORFs without vectors.
    """

    ids: tuple[str, ...]
    lengths: NDArray[np.int32]  # (n_orfs,), residues
    vectors: NDArray[np.float32]
    per_residue: bool = False
    failures: tuple[Failure, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.lengths.dtype != np.int32 or self.vectors.dtype != np.float32:
            raise ValueError(f"{self.lengths.dtype} lengths, {self.vectors.dtype} vectors")
        n_rows = int(self.lengths.sum()) if self.per_residue else len(self.ids)
        if self.vectors.ndim != 2 or len(self.vectors) != n_rows:
            raise ValueError(f"{n_rows} rows expected for vectors of shape {self.vectors.shape}")
        if self.lengths.shape != (len(self.ids),):
            raise ValueError(f"{len(self.ids)} ids for lengths of shape {self.lengths.shape}")
        if len({*self.ids, *(f.orf_id for f in self.failures)}) != self.n_orfs:
            raise ValueError("an ORF id occurs twice")
        if not np.isfinite(self.vectors).all():
            raise ValueError("a vector is not finite")

    @property
    def n_orfs(self) -> int:
        """Number of ORFs, failed ones included."""
        return len(self.ids) + len(self.failures)

    def without_ids(self, hidden: Collection[str]) -> Embeddings:
        """The embeddings without the ORFs of these ids."""
        if not hidden:
            return self
        mask = np.array([orf_id not in hidden for orf_id in self.ids], dtype=np.bool_)
        of_rows = np.repeat(mask, self.lengths) if self.per_residue else mask
        ids = tuple(compress(self.ids, mask))
        return replace(self, ids=ids, lengths=self.lengths[mask], vectors=self.vectors[of_rows])


def concatenate_columns(tables: Iterable[Sequence[list[Any]]]) -> list[list[Any]]:
    """Concatenate tables, column by column."""
    return [list(chain.from_iterable(columns)) for columns in zip(*tables, strict=True)]
