"""Define the values that the packages exchange: records, ORFs, shards and embeddings.

FastaRecord > Chunk > Orf > Shard > (PackedBatch) > Embeddings

A child names its parent in a field, and ids are never parsed. Coordinates are 0-based, half-open,
in bases, on the forward strand of the record. Objects are immutable and validate themselves once,
on construction. High-volume types are NamedTuples, which are three times faster to construct.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.recipe import Alphabet

MASK_TEXT = "<mask>"  # a masked residue in a protein
FRAMES_FAILED = "frames failed"  # in the note of a record that may be run again
PROTEIN = "."  # the strand of an ORF that came as a protein


# how assemblers (Unicycler, metaMDBG) and NCBI mark a circular sequence after the id
_CIRCULAR = re.compile(
    r"[\s\[;,|](circular\s*=\s*(true|yes|y|1)|topology\s*=\s*circular)\b", re.IGNORECASE
)
_NO_DIGESTS = np.empty((0, 32), dtype=np.uint8)
_NO_POSITIONS = np.empty(0, dtype=np.int32)
_COMPLEMENT = str.maketrans("ACGTU", "TGCAA")


class FastaRecord(NamedTuple):
    """One sequence of an input file."""

    id: str  # unique in the run
    header: str  # complete line after '>' or '@'; only the id may differ from the file
    sequence: str  # original case, without white space and gaps
    line: int = 0  # 1-based line number of the header
    n_gaps: int = 0  # alignment gaps removed from the sequence
    sample: str = ""  # sample name in the tables
    own_id: str = ""  # id in the file, if it differs

    @property
    def name(self) -> str:
        """Return the record's id in its file."""
        return self.own_id or self.id

    @property
    def protein(self) -> str:
        """Return the sequence in upper case, without the final stop that gene callers write."""
        return self.sequence.upper().removesuffix("*")

    @property
    def is_circular(self) -> bool:
        """Return True if the header marks the sequence as circular.

        >>> FastaRecord("1", "1 length=5000 circular=true", "").is_circular
        True
        """
        return _CIRCULAR.search(self.header) is not None


class Records(NamedTuple):
    """Neighbouring records as parallel columns, with the fields of ``FastaRecord`` in its order."""

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
    def concatenate(cls, batches: Sequence[Records]) -> Records:
        if not batches:
            return cls.from_records(())
        if len(batches) == 1:
            return batches[0]
        return cls._make(concatenate_columns(batches))

    def iter_records(self) -> Iterator[FastaRecord]:
        return map(FastaRecord, *self)

    def record_at(self, index: int) -> FastaRecord:
        return FastaRecord._make(column[index] for column in self)

    def slice_rows(self, rows: slice) -> Records:
        return Records._make(column[rows] for column in self)

    def select(self, mask: Sequence[bool]) -> Records:
        return Records._make(list(compress(column, mask)) for column in self)

    @property
    def names(self) -> list[str]:
        """Return the ids of the records in their files."""
        return [own or name for own, name in zip(self.own_ids, self.ids, strict=True)]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    @property
    def n_letters(self) -> int:
        return sum(map(len, self.sequences))

    def with_ids(self, ids: list[str]) -> Records:
        """Return the same records with new ids, also in their headers."""
        headers = [
            header if new == old else new + header.lstrip()[len(old) :]
            for header, old, new in zip(self.headers, self.ids, ids, strict=True)
        ]
        return self._replace(ids=ids, headers=headers)

    def with_mate(self, mate: int) -> Records:
        """Add ``/1`` or ``/2`` to ids that do not end with one."""
        return self.with_ids(
            [name if name.endswith(("/1", "/2")) else f"{name}/{mate}" for name in self.ids]
        )

    def with_prefix(self, prefix: str, unprefixed: Container[str]) -> Records:
        """Prefix all ids except those in ``unprefixed``. ``own_id`` keeps the original id."""
        ids = [name if name in unprefixed else prefix + name for name in self.ids]
        own = ["" if new == old else old for new, old in zip(ids, self.ids, strict=True)]
        return self.with_ids(ids)._replace(own_ids=own)


def reverse_complement(bases: str) -> str:
    """Return the reverse complement in upper case. Only A, C, G, T and U are complemented.

    A long sequence is converted in parts, so that memory contains no further copy of it.
    """
    bases_at_once = 2**20
    if len(bases) <= bases_at_once:
        return bases.upper().translate(_COMPLEMENT)[::-1]
    reverse = ""
    for end in range(len(bases), 0, -bases_at_once):
        # CPython extends this string in place, where joining a list of parts would copy all
        reverse += reverse_complement(bases[max(0, end - bases_at_once) : end])
    return reverse


class Orf(NamedTuple):
    """A translated reading frame of a chunk, without stop codons.

    An input protein is also an Orf: it is its own chunk and record, on strand ``.``. If the encoder
    reads chunks, a complete chunk is an Orf, and its bases replace the protein.
    """

    id: str
    chunk_id: str
    record_id: str
    start: int
    end: int
    strand: str
    protein: str
    bases: str = ""  # bases on its strand in upper case, plus the next base, if any
    copy_of: int | None = None  # ordinal of the embedded ORF; see ``store.shard_files``

    def text(self, reads: Alphabet) -> str:
        """Return the sequence that an encoder reads."""
        return self.bases if reads is Alphabet.DNA else self.protein

    def coding_sequence(self, sequence: str) -> str:
        """Return the complete codons on the ORF's strand, cut from the record's ``sequence``."""
        bases = sequence[self.start : self.end]
        return reverse_complement(bases) if self.strand == "-" else bases


SHARD_NAME = r"\d{6,}"  # regular expression for shard names


def shard_name(index: int) -> str:
    return f"{index:06d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A FASTA file of ORFs. Work is assigned, retried and resumed by shard."""

    index: int
    path: Path = field(compare=False)  # differs while a plan is being built elsewhere
    n_orfs: int
    n_embedded: int  # ORFs that are not copies
    n_residues: int  # residues of the embedded ORFs
    sha256: str  # file hash

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
    """Check that all values are non-negative integers that fit into 64 bits.

    Raises:
        TypeError: a value is not an int.
        ValueError: a value is out of range.
    """
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
class OutputArray:
    """The rows of one output, ORF after ORF: (n_rows, width) float32."""

    spec: OutputSpec
    values: NDArray[np.float32]

    def check_shape(self, lengths: NDArray[np.int32]) -> None:
        """Check the rows for ORFs with these lengths.

        Raises:
            ValueError: the array has another shape or type, or a number that is not finite.
        """
        shape = (int(self.spec.count_rows(lengths).sum()), self.spec.width)
        if self.values.dtype != np.float32 or self.values.shape != shape:
            actual = f"{self.values.dtype} of shape {self.values.shape}"
            raise ValueError(f"{self.spec.name} has {actual}, not {shape}")
        if not np.isfinite(self.values).all():
            raise ValueError(f"{self.spec.name} has a number that is not finite")

    def select(self, lengths: NDArray[np.int32], mask: NDArray[np.bool_]) -> OutputArray:
        """Return the rows of the ORFs in ``mask``."""
        row_mask = np.repeat(mask, self.spec.count_rows(lengths))
        return OutputArray(self.spec, self.values[row_mask])


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of a shard's ORFs, with their ids.

    ``vectors`` is (n_orfs, dim). With ``per_residue``, it is (sum of lengths, dim), ORF after ORF.
    ``failures`` lists the ORFs without vectors. ``extra`` has the rows of further outputs. Two
    arrays serve the index of a run: ``sequence_sha256`` identifies what the encoder read, and
    ``n_before`` gives the number of the shard's original vectors before each copy in input order.
    Both are empty where they are unknown.
    """

    ids: tuple[str, ...]
    lengths: NDArray[np.int32]  # (n_orfs,), residues
    vectors: NDArray[np.float32]
    per_residue: bool = False
    failures: tuple[Failure, ...] = field(default=())
    extra: tuple[OutputArray, ...] = ()
    sequence_sha256: NDArray[np.uint8] = field(default_factory=lambda: _NO_DIGESTS)  # (n_orfs, 32)
    n_before: NDArray[np.int32] = field(default_factory=lambda: _NO_POSITIONS)  # (n_orfs,)

    def __post_init__(self) -> None:
        if self.lengths.dtype != np.int32 or self.vectors.dtype != np.float32:
            raise ValueError(f"{self.lengths.dtype} lengths, {self.vectors.dtype} vectors")
        n_rows = int(self.lengths.sum()) if self.per_residue else len(self.ids)
        if self.vectors.ndim != 2 or len(self.vectors) != n_rows:
            raise ValueError(f"{n_rows} rows expected for vectors of shape {self.vectors.shape}")
        if self.lengths.shape != (len(self.ids),):
            raise ValueError(f"{len(self.ids)} ids for lengths of shape {self.lengths.shape}")
        if {len(self.sequence_sha256), len(self.n_before)} - {0, len(self.ids)}:
            raise ValueError(f"digests or positions for other than {len(self.ids)} ids")
        if len({*self.ids, *(f.orf_id for f in self.failures)}) != self.n_orfs:
            raise ValueError("an ORF id occurs twice")
        if not np.isfinite(self.vectors).all():
            raise ValueError("a vector is not finite")
        for array in self.extra:
            array.check_shape(self.lengths)

    @property
    def n_orfs(self) -> int:
        """Return the number of ORFs, including failed ones."""
        return len(self.ids) + len(self.failures)

    def select_vectors(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of ORFs that have one vector each. n -> (n, dim)"""
        assert not self.per_residue, "one row each"
        if tuple(ids) == self.ids:
            return self.vectors
        positions = {orf_id: i for i, orf_id in enumerate(self.ids)}
        return self.vectors[[positions[orf_id] for orf_id in ids]]

    def without_ids(self, hidden: Collection[str]) -> Embeddings:
        """Return the embeddings without the ORFs in ``hidden``."""
        if not hidden:
            return self
        mask = np.array([orf_id not in hidden for orf_id in self.ids], dtype=np.bool_)
        row_mask = np.repeat(mask, self.lengths) if self.per_residue else mask
        return replace(
            self,
            ids=tuple(compress(self.ids, mask)),
            lengths=self.lengths[mask],
            vectors=self.vectors[row_mask],
            sequence_sha256=_NO_DIGESTS,
            n_before=_NO_POSITIONS,
            extra=tuple(array.select(self.lengths, mask) for array in self.extra),
        )


def hash_texts(texts: Iterable[str]) -> NDArray[np.uint8]:
    """Return the SHA-256 of each text. n -> (n, 32)"""
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32)


def concatenate_columns(tables: Iterable[Sequence[list[Any]]]) -> list[list[Any]]:
    """Concatenate tables column by column."""
    return [list(chain.from_iterable(columns)) for columns in zip(*tables, strict=True)]
