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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import disk_error, open_regular_file
from virnucpro.core.errors import StorageError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.recipe import Alphabet, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Orf, Shard, shard_name
from virnucpro.sequences.orfs import Orfs, Texts, digest_texts

# (number of shards, residues per shard) before the largest; 17.5 million residues make 208 shards
_SMALL_SHARDS = ((32, 16_000), (32, 32_000), (32, 64_000), (128, 125_000))
N_SMALL_SHARDS = sum(n for n, _ in _SMALL_SHARDS)


def shard_size(position: int, largest: int) -> int:
    """Return the residues that fill the shard at this 0-based position in its series."""
    for n_shards, n_residues in _SMALL_SHARDS:
        if position < n_shards:
            return min(n_residues, largest)
        position -= n_shards
    return largest


class SequenceIndex:
    """The ordinals of a slice's latest ORFs, by digest, in bounded memory."""

    def __init__(self, max_remembered: int = 2**18) -> None:
        """Make an empty index.

        Args:
            max_remembered: the number of ORFs to remember. Older ones are forgotten together, so
                memory contains up to twice as many.
        """
        self._max_remembered = max_remembered
        self._n_slots = 2 << max_remembered.bit_length()
        # two hash tables: for each slot a digest, and an ordinal + 1, or 0
        self._slots = np.zeros((2, self._n_slots, 3), dtype=np.uint64)
        # originals, digests in the newer table, and its index
        self._state = np.zeros(3, dtype=np.int64)

    @property
    def n_embedded(self) -> int:
        return int(self._state[0])

    def find_originals(self, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the ordinal of each ORF's original, or -1 if its digest is new or forgotten.

        (n, 2) -> (n,)
        """
        originals = np.empty(len(digests), dtype=np.int64)
        tables = (self._slots, self._n_slots, self._max_remembered)
        call("find_originals", digests, len(digests), *tables, self._state, originals)
        return originals


def digests_of(orfs: Orfs, reads: Sequence[Alphabet]) -> NDArray[np.uint64]:
    """Return a digest of the text, or pair of texts, that is read from each ORF. (n, 2)"""
    texts = [orfs.bases if alphabet is Alphabet.DNA else orfs.proteins for alphabet in reads]
    return digest_texts(*texts)


def _include_lengths(digests: NDArray[np.uint64], orfs: Orfs) -> None:
    """Change digests in place, so that equal ones also mean frames of equal length.

    A frame with ambiguous codons is longer than its protein, and the shard may lack its last bases.
    """
    n_missing = orfs.ends - orfs.starts - 3 * orfs.proteins.lengths
    digests[:, 0] ^= n_missing.astype(np.uint64)


def write_entries(orfs: Orfs, originals: NDArray[np.int64]) -> Texts:
    """Return the shard entry of each ORF. A copy names its original."""
    constant_bytes = 130  # at most: words, endings and numbers
    n_id_bytes = 2 * orfs.chunk_ids.lengths + orfs.record_ids.lengths
    n_bytes = int(n_id_bytes[orfs.chunks].sum()) + constant_bytes * len(orfs)
    n_bytes += int(orfs.proteins.lengths.sum() + orfs.bases.lengths.sum())
    entries = np.empty(n_bytes, dtype=np.uint8)
    bounds = np.zeros(len(orfs) + 1, dtype=np.int64)
    call(
        "write_entries",
        *(orfs.chunk_ids.letters, orfs.chunk_ids.bounds),
        *(orfs.record_ids.letters, orfs.record_ids.bounds),
        *(orfs.chunks, orfs.frames, orfs.starts, orfs.ends),
        *(orfs.proteins.letters, orfs.proteins.bounds),
        *(orfs.bases.letters, orfs.bases.bounds),
        *(originals, len(orfs), entries, bounds[1:]),
    )
    return Texts(entries, bounds)


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
        self._entries: list[bytes] = []
        self._bases: list[str] = []
        self._n_orfs = self._n_embedded = self._n_residues = 0
        self._full = shard_size(self._n_before + len(self.shards), self._recipe.largest_shard)

    def add_orfs(self, orfs: Orfs) -> None:
        """Add ORFs. An ORF that occurred before becomes a copy."""
        digests = digests_of(orfs, self._recipe.alphabets)
        if not self._recipe.keep_vectors:
            _include_lengths(digests, orfs)
        originals = self._seen.find_originals(digests)
        entries = write_entries(orfs, originals)
        fna = self._frame_entries(orfs)
        is_copy = originals >= 0
        n_residues = orfs.proteins.lengths
        # totals before each ORF, and at the end
        n_embedded = _running_totals(~is_copy)
        embedded = _running_totals(np.where(is_copy, 0, n_residues))
        copied = _running_totals(np.where(is_copy, n_residues, 0))
        first = 0
        while first < len(orfs):
            n_copied = self.n_copied_residues - self._n_copied_before
            last = min(
                _find_total(embedded, embedded[first] + self._full - self._n_residues),
                _find_total(copied, copied[first] + self._full - n_copied),
            )
            end = min(last, len(orfs))
            self._entries.append(entries.join(first, end))
            self._bases += fna[first:end]
            self._n_orfs += end - first
            self._n_embedded += int(n_embedded[end] - n_embedded[first])
            self._n_residues += int(embedded[end] - embedded[first])
            self.n_copies += int(is_copy[first:end].sum())
            self.n_copied_residues += int(copied[end] - copied[first])
            if last <= len(orfs):
                self.flush()
            first = end

    def _frame_entries(self, orfs: Orfs) -> list[str]:
        """Return a FASTA entry with the bases of each frame, if they are kept."""
        if not (self._keep_bases and orfs.bases.lengths.any()):
            return []
        return [f">{orf.id}\n{orf.bases}\n" for orf in orfs.to_list()]

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
        content = b"".join(self._entries)
        path = self._folder / f"{shard_name(index)}.faa"
        self._write(path, content)
        if self._bases:
            self._write(path.with_suffix(".fna"), "".join(self._bases).encode())
        shard = Shard(
            index,
            path,
            n_orfs=self._n_orfs,
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


def _running_totals(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the total before each value, and that of all. (n,) -> (n + 1,)"""
    totals = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=totals[1:])
    return totals


def _find_total(totals: NDArray[np.int64], least: int) -> int:
    """Return the index of the first total that reaches ``least``, or one after the last."""
    return int(np.searchsorted(totals, least))


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
    # in the order of ``write_entries``, as a dictionary would take half of the time
    orf_id, chunk, record, start, end, strand, *words = header.split(" ")
    bases = ""
    copy_of = None
    for word in words:
        if word.startswith("bases="):
            bases = word[6:]
        else:
            copy_of = int(word.removeprefix("copy="))
    return Orf(
        orf_id[1:],
        chunk[6:],
        record[7:],
        int(start[6:]),
        int(end[4:]),
        strand[7:],
        protein,
        bases,
        copy_of,
    )
