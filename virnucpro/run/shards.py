"""Write and read shards: FASTA files of ORFs, cut by content alone.

Shards grow with their position in the input: the first are small, so that a small input is spread
over all devices; later ones are large, so that a large input makes few files.

The first word of a header is the ORF's id. Chunk, record, start, end and strand follow in this
order, then the bases of a frame, and for a copy the ordinal of its original. No id has white space,
so the words can be separated.

Identical ORFs are embedded once. Two ORFs are identical if everything that the encoders of the run
read is equal (the protein, the bases, or both). ``SeenOrfs`` checks a digest of every ORF before it
goes into a shard. An ORF that occurred before becomes a copy. It names its original by ordinal: the
position among the embedded ORFs of its slice. Workers skip copies; the feature store gives each
copy exactly the rows of its original, or the reason why it has none. Which copies are found depends
only on the ORFs and their order. A full table forgets, and then an ORF is embedded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import Reads, Recipe
from virnucpro.ground.errors import StorageError, VirnucproError
from virnucpro.ground.files import disk_error, open_plain, temporary_beside, writing
from virnucpro.ground.log import printable
from virnucpro.ground.records import Orf, Shard, shard_name
from virnucpro.ground.tree import Tree

_AGAIN = "the next start writes shards anew"
# (shards, residues of each) before the largest: 17.5 million residues are 208 shards
_SMALL_SHARDS = ((32, 16_000), (32, 32_000), (32, 64_000), (128, 125_000))
N_SMALL_SHARDS = sum(n for n, _ in _SMALL_SHARDS)
N_SLOTS = 2**18  # initial: 6 MB
MAX_SLOTS = 2**22  # 100 MB
_SLOTS_PER_PROTEIN = 16  # 3 of 100 proteins then lose their slot to another


def shard_size(place: int, largest: int) -> int:
    """The residues that fill the shard at this position of its series, from 0."""
    for n_shards, n_residues in _SMALL_SHARDS:
        if place < n_shards:
            return min(n_residues, largest)
        place -= n_shards
    return largest


class SeenOrfs:
    """The latest ORFs of a slice, in bounded memory.

    The digest of an ORF chooses its slot, which has two words of the digest and the ordinal. A
    newer ORF replaces an older one in the same slot.
    """

    def __init__(
        self,
        n_slots: int = N_SLOTS,
        max_slots: int = MAX_SLOTS,
    ) -> None:
        self.n_embedded = 0
        self._max_slots = max_slots
        self._table = np.zeros((n_slots, 3), dtype=np.uint64)  # no digest is 0

    def originals(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ordinal of each ORF's original, in order; None if its digest is new."""
        distinct = list(dict.fromkeys(digests))
        tags = np.frombuffer(b"".join(distinct), dtype="<u8").reshape(-1, 2)
        ordinals = dict(zip(distinct, self._find_or_add(tags), strict=True))
        originals: list[int | None] = []
        for digest in digests:
            ordinal = ordinals[digest]
            if ordinal == self.n_embedded:  # ordinals count first occurrences
                self.n_embedded += 1
                originals.append(None)
            else:
                originals.append(ordinal)
        return originals

    def _find_or_add(self, tags: NDArray[np.uint64]) -> list[int]:
        """The ordinal of each digest; new digests get the next ordinals. (n, 2) -> n"""
        entries = self._table.take(self._slots_of(tags), axis=0)
        is_new = (entries[:, :2] != tags).any(axis=1)
        n_new = int(is_new.sum())
        entries[:, :2] = tags
        entries[is_new, 2] = np.arange(self.n_embedded, self.n_embedded + n_new)
        self._grow(self.n_embedded + n_new)
        self._put(entries[is_new])
        ordinals: list[int] = entries[:, 2].tolist()
        return ordinals

    def _grow(self, n_proteins: int) -> None:
        while len(self._table) < min(self._max_slots, _SLOTS_PER_PROTEIN * n_proteins):
            entries = self._table[self._table[:, :2].any(axis=1)]
            self._table = np.zeros((2 * len(self._table), 3), dtype=np.uint64)
            self._put(entries)

    def _put(self, entries: NDArray[np.uint64]) -> None:
        self._table[self._slots_of(entries)] = entries  # of two in one slot, the last stays

    def _slots_of(self, tags: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of slots is a power of two, so entries that differed still differ."""
        slots: NDArray[np.int64] = (tags[:, 0] & np.uint64(len(self._table) - 1)).astype(np.int64)
        return slots


def digests_of(orfs: Sequence[Orf], reads: frozenset[Reads]) -> list[bytes]:
    """128-bit digest of what is read of each ORF: 10^12 ORFs collide with probability 10^-15."""
    columns = [[orf.text(what) for orf in orfs] for what in sorted(reads)]
    texts = columns[0] if len(columns) == 1 else map(" ".join, zip(*columns, strict=True))
    return [blake2s(text.encode()).digest()[:16] for text in texts]


class ShardWriter:
    """Collect ORFs of a slice, in order, and write a shard whenever it is full.

    A shard is full when its ORFs to embed, or its copies, reach ``shard_size`` residues: each
    fills a feature file. The first slice of a series begins with small shards. With
    ``keep_bases``, the bases of its frames are also written to a FASTA file next to it.
    """

    def __init__(
        self,
        tree: Tree,
        folder: Path,
        recipe: Recipe,
        first_index: int = 0,
        *,
        keep_bases: bool = False,
        is_first: bool = True,
    ) -> None:
        self._tree, self._folder, self._recipe = tree, folder, recipe
        self._first_index, self._keep_bases = first_index, keep_bases
        self._n_before = 0 if is_first else N_SMALL_SHARDS
        self.shards: list[Shard] = []
        self.n_copies = self.n_copied_residues = 0
        self._seen = SeenOrfs()
        self._n_copied_before = 0  # residues, in shards that are closed
        self._open_next()

    def _open_next(self) -> None:
        self._entries: list[str] = []
        self._bases: list[str] = []
        self._n_embedded = self._n_residues = 0
        self._full = shard_size(self._n_before + len(self.shards), self._recipe.largest_shard)

    def extend(self, orfs: Sequence[Orf]) -> None:
        """Add ORFs. An ORF that occurred before becomes a copy."""
        originals = self._seen.originals(digests_of(orfs, self._recipe.reads))
        for orf, original in zip(orfs, originals, strict=True):
            bases = f" bases={orf.bases}" if orf.bases else ""
            copy = "" if original is None else f" copy={original}"
            self._entries.append(
                f">{orf.id} chunk={orf.chunk_id} record={orf.record_id} start={orf.start} "
                f"end={orf.end} strand={orf.strand}{bases}{copy}\n{orf.protein}\n"
            )
            if bases and self._keep_bases:
                self._bases.append(f">{orf.id}\n{orf.bases}\n")
            if original is None:
                self._n_embedded += 1
                self._n_residues += len(orf.protein)
            else:
                self.n_copies += 1
                self.n_copied_residues += len(orf.protein)
            n_copied = self.n_copied_residues - self._n_copied_before
            if max(self._n_residues, n_copied) >= self._full:
                self.flush()

    @property
    def next_index(self) -> int:
        """The index of the shard of the next ORF."""
        return self._first_index + len(self.shards)

    @property
    def end_index(self) -> int:
        """One after the index of the last shard with an ORF."""
        return self.next_index + bool(self._entries)

    def flush(self) -> None:
        """Close the open shard, full or not."""
        if not self._entries:
            return
        index, content = self.next_index, "".join(self._entries).encode()
        path = self._folder / f"{shard_name(index)}.faa"
        self._write(path, content)
        if self._bases:
            self._write(path.with_suffix(".fna"), "".join(self._bases).encode())
        digest, counts = hashlib.sha256(content).hexdigest(), (self._n_embedded, self._n_residues)
        self.shards.append(Shard(index, path, len(self._entries), *counts, digest))
        self._n_copied_before = self.n_copied_residues
        self._open_next()

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file that appears when it is whole: another process may embed the same shard.

        It is not synced: after a power loss its hash shows whether it is whole.
        """
        temporary = temporary_beside(path)
        try:
            with writing(path, temporary):
                with self._tree.open(temporary, "x") as out:
                    out.write(content)
                self._tree.move(temporary, path)
        except VirnucproError:
            with suppress(OSError):  # it is swept away later
                self._tree.delete(temporary)
            raise


def read_shard(shard: Shard) -> list[Orf]:
    """
    Raises:
        StorageError: the file is missing or was changed.
        OutputError, StorageError: it cannot be read now.
    """
    try:
        with open_plain(shard.path) as handle:
            content = handle.read()
    except FileNotFoundError as error:
        raise StorageError(f"{printable(shard.path)}: {error.strerror}", hint=_AGAIN) from error
    except OSError as error:
        raise disk_error(error, shard.path) from error
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise StorageError(f"{printable(shard.path)} changed during the run", hint=_AGAIN)
    lines = content.decode().split("\n")
    return [
        _parse(header, protein) for header, protein in zip(lines[:-1:2], lines[1::2], strict=True)
    ]


def _parse(header: str, protein: str) -> Orf:
    orf_id, *words = header[1:].split(" ")
    values = dict(word.split("=", 1) for word in words)
    return Orf(
        orf_id,
        values["chunk"],
        values["record"],
        int(values["start"]),
        int(values["end"]),
        values["strand"],
        protein,
        values.get("bases", ""),
        int(values["copy"]) if "copy" in values else None,
    )
