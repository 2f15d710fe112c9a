"""Write and read shards: FASTA files with ORFs, cut by content alone.

Shards grow with their position in the input. The first are small, so that a small input is spread
over all devices. Later ones are large, so that a large input makes few files.

The first word of a header is the ORF's id. Chunk, record, start, end and strand follow in this
order, then the bases of a frame, and for a copy, the ordinal of its original. Ids contain no white
space, so the words can be separated.

Identical ORFs are embedded once. Two ORFs are identical if everything that the run's encoders read
is equal (the protein, the bases, or both). ``SequenceIndex`` checks a digest of every ORF before it
is added to a shard. An ORF that occurred before becomes a copy. It names its original by ordinal,
the position among the embedded ORFs in its slice. Workers skip copies. The feature store gives each
copy exactly its original's rows, or the reason why they are missing. Which copies are detected
depends only on the ORFs and their order. An ORF that was forgotten is embedded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hashlib import blake2s
from pathlib import Path

from virnucpro.core.atomic_io import disk_error, open_regular_file
from virnucpro.core.errors import StorageError
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Alphabet, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Orf, Shard, shard_name

# (number of shards, residues per shard) before the largest; 17.5 million residues make 208 shards
_SMALL_SHARDS = ((32, 16_000), (32, 32_000), (32, 64_000), (128, 125_000))
N_SMALL_SHARDS = sum(n for n, _ in _SMALL_SHARDS)
MOST_SEEN = 2**18  # ORFs; older ones are forgotten together, so memory contains up to twice as many


def shard_size(position: int, largest: int) -> int:
    """Return the residues that fill the shard at this 0-based position in its series."""
    for n_shards, n_residues in _SMALL_SHARDS:
        if position < n_shards:
            return min(n_residues, largest)
        position -= n_shards
    return largest


class SequenceIndex:
    """The ordinals of a slice's latest ORFs, by digest, in bounded memory."""

    def __init__(self, most: int = MOST_SEEN) -> None:
        self.n_embedded = 0
        self._most = most
        self._newer: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def find_original(self, digest: bytes) -> int | None:
        """Return the ordinal of an ORF's original, or None if its digest is new or forgotten."""
        ordinal = self._newer.get(digest, self._older.get(digest))
        if ordinal is None:
            if len(self._newer) == self._most:
                self._older = self._newer
                self._newer = {}
            self._newer[digest] = self.n_embedded
            self.n_embedded += 1
        return ordinal


def digests_of(orfs: Sequence[Orf], reads: Sequence[Alphabet]) -> list[bytes]:
    """Return a 128-bit digest of the text that is read from each ORF.

    Among 10^12 ORFs, a collision has a probability of 10^-15.
    """
    texts = (" ".join([orf.text(alphabet) for alphabet in reads]) for orf in orfs)
    return [blake2s(text.encode()).digest()[:16] for text in texts]


class ShardWriter:
    """Collect the ORFs of a slice, in order, and write a shard whenever it is full.

    A shard is full when its ORFs to embed, or its copies, reach ``shard_size`` residues, because
    each group fills a feature file. The first slice in a series begins with small shards. With
    ``keep_bases``, the bases of a shard's frames are also written to a FASTA file next to it.
    """

    def __init__(
        self,
        tree: SafeDir,
        folder: Path,
        recipe: Recipe,
        first_index: int = 0,
        *,
        keep_bases: bool = False,
        is_first: bool = True,
    ) -> None:
        self._tree = tree
        self._folder = folder
        self._recipe = recipe
        self._first_index = first_index
        self._keep_bases = keep_bases
        self._n_before = 0 if is_first else N_SMALL_SHARDS
        self.shards: list[Shard] = []
        self.n_copies = self.n_copied_residues = 0
        self._seen = SequenceIndex()
        self._n_copied_before = 0  # residues in closed shards
        self._open_next()

    def _open_next(self) -> None:
        self._entries: list[str] = []
        self._bases: list[str] = []
        self._n_embedded = self._n_residues = 0
        self._full = shard_size(self._n_before + len(self.shards), self._recipe.largest_shard)

    def add_orfs(self, orfs: Sequence[Orf]) -> None:
        """Add ORFs. An ORF that occurred before becomes a copy."""
        for orf, digest in zip(orfs, digests_of(orfs, self._recipe.alphabets), strict=True):
            original = self._seen.find_original(digest)
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
        """Return the index of the shard for the next ORF."""
        return self._first_index + len(self.shards)

    @property
    def end_index(self) -> int:
        """Return one after the index of the last shard with an ORF."""
        return self.next_index + bool(self._entries)

    def flush(self) -> None:
        """Close the open shard, full or not."""
        if not self._entries:
            return
        index = self.next_index
        content = "".join(self._entries).encode()
        path = self._folder / f"{shard_name(index)}.faa"
        self._write(path, content)
        if self._bases:
            self._write(path.with_suffix(".fna"), "".join(self._bases).encode())
        shard = Shard(
            index,
            path,
            n_orfs=len(self._entries),
            n_embedded=self._n_embedded,
            n_residues=self._n_residues,
            sha256=hashlib.sha256(content).hexdigest(),
        )
        self.shards.append(shard)
        self._n_copied_before = self.n_copied_residues
        self._open_next()

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file atomically, because another process may embed the same shard.

        The file is not synced. After a power loss, its hash shows whether it is complete.
        """
        with self._tree.atomic_write(path, is_synced=False) as out:
            out.write(content)


def read_shard(shard: Shard) -> list[Orf]:
    """Read the ORFs of a shard, copies included.

    Raises:
        StorageError: the file is missing or was changed.
        OutputError, StorageError: the file cannot be read now.
    """
    again = "the next start rewrites shards"
    try:
        with open_regular_file(shard.path) as handle:
            content = handle.read()
    except FileNotFoundError as error:
        raise StorageError(f"{printable(shard.path)}: {error.strerror}", hint=again) from error
    except OSError as error:
        raise disk_error(error, shard.path) from error
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise StorageError(f"{printable(shard.path)} changed during the run", hint=again)
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
