"""Cache vectors by content, in a folder that runs, users and machines may share.

Each file, a pack, contains vectors that one encoder made on one kind of device: a table of sequence
digests, a table of checksums, and the vectors. A pack appears atomically under its content's hash
and never changes. A process that finds the folder too large deletes the least recently read packs.
So any number of processes and hosts may write, read and delete without waiting or locks. A pack
that is deleted while it is read stays open.

A vector is used only if its checksum matches encoder, sequence and vector. Anyone who can write to
the folder can forge a vector and its checksum, so share it only with people you trust. A disk error
costs cached vectors, never the run.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import TEMPORARY, disk_error, open_regular_file
from virnucpro.core.errors import OutputError, StorageError
from virnucpro.core.logging import LOGGER, announce, printable
from virnucpro.core.recipe import SHARD_FORMAT, EncoderSpec
from virnucpro.core.safe_dir import SafeDir

_PACK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{32}\.pack")

Vectors = Mapping[int, NDArray[np.float32]]  # position of a sequence -> (dim,)


@dataclass(frozen=True, slots=True)
class CacheDir:
    """A cache folder and its size limit."""

    path: Path
    max_bytes: int

    @classmethod
    def open(cls, path: Path, n_gigabytes: float) -> CacheDir | None:
        """Create the folder if it is missing, and announce it. On failure, warn and return None."""
        folder = cls(path.absolute(), round(n_gigabytes * 1e9))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            n_bytes = sum(n_bytes for _, n_bytes, _ in folder._sizes())
        except OSError as error:
            refusal = disk_error(error, folder.path)
            LOGGER.warning(
                "%s (hint: %s); the run continues without the cache", refusal, refusal.hint
            )
            return None
        sizes = " of ".join(f"{n / 1e9:,.2f}" for n in (n_bytes, folder.max_bytes))
        announce(f"cache of vectors {printable(folder.path)}: {sizes} GB are used")
        return folder

    def files(self, names: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
        """Yield the files with matching names: packs of all encoders, or temporary files."""
        with os.scandir(self.path) as entries:
            yield from (entry for entry in entries if names.fullmatch(entry.name))

    def shrink(self) -> None:
        """Delete the least recently read packs until the folder is small enough."""
        packs = sorted(self._sizes())
        tree = SafeDir(self.path)
        surplus = sum(n_bytes for _, n_bytes, _ in packs) - self.max_bytes
        for _, n_bytes, name in packs:
            if surplus <= 0:
                break
            with suppress(OSError):  # no permission for another user's pack: delete the next
                tree.delete(self.path / name)
                surplus -= n_bytes
        self._sweep()

    def _sizes(self) -> Iterator[tuple[float, int, str]]:
        """Yield for each pack the time it was last read, its counted bytes, and its name."""
        min_pack_bytes = 1 << 16  # minimum size counted per pack, to limit the number of packs
        for entry in self.files(_PACK):
            with suppress(FileNotFoundError):  # another process deleted it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime, max(status.st_size, min_pack_bytes), entry.name

    def _sweep(self) -> None:
        """Delete unfinished files of killed writers that are a day old."""
        old_seconds = 86_400.0  # age at which a temporary file counts as abandoned
        left_by_killed_writers = re.compile(rf"\.{_PACK.pattern}\.[0-9a-f]+{re.escape(TEMPORARY)}")
        for entry in list(self.files(left_by_killed_writers)):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > old_seconds:
                    SafeDir(self.path).delete(self.path / entry.name)


# parallel index arrays: first 8 bytes of digests (n,), ascending; pack and its row (n, 2)
_Entries: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.int32]]


@dataclass(slots=True, eq=False)
class VectorCache:
    """One encoder's vectors in a cache folder, as seen by one process."""

    _HEAD = struct.Struct("<16sQ")  # file type, number of vectors
    _MAGIC = b"VirNucPro pack 1"
    _N_DIGEST = 16  # bytes; among 10^12 sequences, two share a digest with probability 10^-15

    folder: CacheDir
    encoder: EncoderSpec
    device: str  # kind of device, since other kinds round differently
    is_refused: bool = False  # writing a pack failed, so do not retry
    _key: str = field(init=False)
    _packs: list[str] = field(default_factory=list)  # names; "" for a deleted pack
    _index: list[_Entries] = field(default_factory=list)  # each at least twice as long as the next

    @property
    def _row_bytes(self) -> int:
        """Return the bytes of a sequence's rows in all outputs, one after the other."""
        return 4 * sum(output.width for output in self.encoder.outputs)

    def __post_init__(self) -> None:
        assert all(output.has_one_row for output in self.encoder.outputs), "checked as options"
        text = json.dumps([self.encoder.facts, self.device, SHARD_FORMAT], sort_keys=True)
        self._key = sha256(text.encode()).hexdigest()

    def read(self, sequences: Sequence[str]) -> Vectors:
        """Read the intact cached vectors of these sequences, by position."""
        try:
            self._look_up()
        except OSError:
            return {}
        digests = [self._digest(sequence.encode()) for sequence in sequences]
        pack_entries: dict[int, list[tuple[int, int]]] = {}
        for position, pack, row in self._find(digests):
            pack_entries.setdefault(pack, []).append((position, row))
        vectors: dict[int, NDArray[np.float32]] = {}
        for pack, entries in pack_entries.items():
            missing = [(position, row) for position, row in entries if position not in vectors]
            with suppress(OSError, ValueError):
                vectors |= self._read_pack(self._packs[pack], missing, digests)
        return vectors

    def write(self, sequences: Sequence[str], vectors: NDArray[np.float32]) -> str:
        """Add rows, and limit the folder's size. Return "" or a failure reason.

        ``vectors`` is (n, width), with the outputs of a sequence one after the other.
        """
        if self.is_refused or not sequences:
            return ""
        digests = [self._digest(sequence.encode()) for sequence in sequences]
        rows = [row.tobytes() for row in vectors.astype("<f4")]
        sums = [self._digest(digest + row) for digest, row in zip(digests, rows, strict=True)]
        content = b"".join([self._HEAD.pack(self._MAGIC, len(rows)), *digests, *sums, *rows])
        name = f"{self._key[:16]}-{sha256(content).hexdigest()[:32]}.pack"
        try:
            SafeDir(self.folder.path).write_file(self.folder.path / name, content)
            self.folder.shrink()
        except (OSError, OutputError, StorageError) as error:
            self.is_refused = True
            return printable(error)
        return ""

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=self._N_DIGEST, key=self._key.encode()).digest()

    def _look_up(self) -> None:
        """Update the index for packs that appeared or vanished since the last call."""
        names = {entry.name for entry in self.folder.files(_PACK)}
        names = {name for name in names if name.startswith(self._key[:16])}
        self._packs = [name if name in names else "" for name in self._packs]
        for name in sorted(names.difference(self._packs)):
            tags = self._read_tags(name)
            rows = np.arange(len(tags), dtype=np.int32)
            locations = np.stack([np.full_like(rows, len(self._packs)), rows], axis=1)
            self._packs.append(name)
            self._add(tags, locations)

    def _add(self, tags: NDArray[np.uint64], locations: NDArray[np.int32]) -> None:
        """Add entries to the index. Arrays of similar length are merged, so there are few."""
        while self._index and len(self._index[-1][0]) < 2 * len(tags):
            earlier_tags, earlier_locations = self._index.pop()
            tags = np.concatenate([earlier_tags, tags])
            locations = np.concatenate([earlier_locations, locations])
        order = np.argsort(tags, kind="stable")
        self._index.append((tags[order], locations[order]))

    def _find(self, digests: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Yield each entry that may match a digest: digest position, pack, and row."""
        tags = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)[:, 0]
        for indexed_tags, locations in self._index:
            firsts = np.searchsorted(indexed_tags, tags, "left")
            ends = np.searchsorted(indexed_tags, tags, "right")
            for position in np.flatnonzero(ends > firsts).tolist():
                for pack, row in locations[firsts[position] : ends[position]].tolist():
                    yield position, pack, row

    def _read_tags(self, name: str) -> NDArray[np.uint64]:
        """Read the first bytes of a pack's digests. An invalid or unreadable pack has none."""
        with suppress(OSError, ValueError), open_regular_file(self.folder.path / name) as handle:
            n = self._count(handle)
            digests = np.frombuffer(handle.read(n * self._N_DIGEST), dtype="<u8")
            return digests.reshape(n, 2)[:, 0].astype(np.uint64)
        return np.empty(0, dtype=np.uint64)

    def _count(self, handle: BinaryIO) -> int:
        """Return the number of vectors in a pack, by its header and its size.

        Raises:
            ValueError: it is not a pack of this encoder.
        """
        magic, n = self._HEAD.unpack(handle.read(self._HEAD.size).ljust(self._HEAD.size, b"\0"))
        n_bytes = os.fstat(handle.fileno()).st_size
        if magic != self._MAGIC or n_bytes != self._HEAD.size + n * (
            2 * self._N_DIGEST + self._row_bytes
        ):
            raise ValueError("not a pack of this encoder")
        return int(n)

    def _read_pack(
        self, name: str, entries: Sequence[tuple[int, int]], digests: Sequence[bytes]
    ) -> Vectors:
        """Read rows of a pack, by position, without those with a wrong checksum.

        Raises:
            OSError, ValueError: the pack was deleted or is invalid.
        """
        used_seconds = 600.0  # between two updates of a pack's read time
        vectors = {}
        with open_regular_file(self.folder.path / name) as handle:
            n = self._count(handle)
            n_row = self._row_bytes
            begin = self._HEAD.size + n * self._N_DIGEST
            for position, row in entries:
                stored_checksum = os.pread(
                    handle.fileno(), self._N_DIGEST, begin + row * self._N_DIGEST
                )
                start = begin + n * self._N_DIGEST + row * n_row
                content = os.pread(handle.fileno(), n_row, start)
                vector = np.frombuffer(content, dtype="<f4").astype(np.float32)
                checksum = self._digest(digests[position] + content)
                if stored_checksum == checksum and np.isfinite(vector).all():
                    vectors[position] = vector
            if vectors and time.time() - os.fstat(handle.fileno()).st_mtime > used_seconds:
                with suppress(OSError):  # another user's file
                    os.utime(handle.fileno())
        return vectors
