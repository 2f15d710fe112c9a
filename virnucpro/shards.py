"""Shards on disk: FASTA files of ORFs, cut by content alone.

The first word of a header is the ORF's id; what follows names chunk, record, start, end and
strand. No id holds white space, so the words can be told apart.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from virnucpro.errors import StorageError
from virnucpro.log import printable
from virnucpro.records import Orf, Shard

_FIELDS = ("chunk=", "record=", "start=", "end=", "strand=")


class ShardWriter:
    """Collects ORFs, in order, and writes a shard whenever it is full."""

    def __init__(self, folder: Path, residues_per_shard: int, first_index: int = 0) -> None:
        self.folder = folder
        self.residues_per_shard = residues_per_shard
        self.first_index = first_index
        self.shards: list[Shard] = []
        self._entries: list[str] = []
        self._nucleotides: list[str] = []
        self._n_residues = 0

    def add(self, orf: Orf, nucleotides: str = "") -> None:
        """Add an ORF, and the bases to be written beside it, if any."""
        if nucleotides:
            self._nucleotides.append(f">{orf.id}\n{nucleotides}\n")
        self._entries.append(
            f">{orf.id} chunk={orf.chunk_id} record={orf.record_id} "
            f"start={orf.start} end={orf.end} strand={orf.strand}\n{orf.protein}\n"
        )
        self._n_residues += len(orf.protein)
        if self._n_residues >= self.residues_per_shard:
            self.flush()

    def flush(self) -> None:
        """Close the shard that is open, full or not."""
        if not self._entries:
            return
        index = self.first_index + len(self.shards)
        path = self.folder / f"{index:06d}.faa"
        content = "".join(self._entries).encode()
        path.write_bytes(content)
        if self._nucleotides:
            path.with_suffix(".fna").write_text("".join(self._nucleotides), encoding="utf-8")
            self._nucleotides = []
        digest = hashlib.sha256(content).hexdigest()
        self.shards.append(Shard(index, path, len(self._entries), self._n_residues, digest))
        self._entries, self._n_residues = [], 0


def read_shard(shard: Shard) -> list[Orf]:
    """
    Raises:
        StorageError: the file is not the one that was written.
    """
    content = shard.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise StorageError(
            f"{printable(shard.path)} changed during the run",
            hint="run the same command with --resume: shards are written anew",
        )
    lines = content.decode().split("\n")
    return [
        _parse(header, protein) for header, protein in zip(lines[:-1:2], lines[1::2], strict=True)
    ]


def _parse(header: str, protein: str) -> Orf:
    orf_id, *words = header[1:].split(" ")
    chunk, record, start, end, strand = (
        word.removeprefix(name) for word, name in zip(words, _FIELDS, strict=True)
    )
    return Orf(orf_id, chunk, record, int(start), int(end), strand, protein)
