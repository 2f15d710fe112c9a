"""Cache vectors by content, in a folder that runs, users and machines may share.

Each file, a pack, holds vectors that one encoder made on one kind of device: a table of sequence
digests, a table of checksums, and the vectors. A pack appears, whole, under the hash of its content
and never changes. A process that finds the folder too large deletes the least recently read packs.
So any number of processes and hosts may write, read and delete without waiting or locks. A pack
that is deleted while it is read stays open.

A vector is used only if its checksum matches encoder, sequence and vector. Anyone who can write to
the folder can forge a vector and its checksum: share it only with people you trust. A disk error
costs vectors of the cache, never the run.
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

_HEAD = struct.Struct("<16sQ")  # file type, number of vectors
_MAGIC = b"VirNucPro pack 1"
_N_DIGEST = 16  # bytes: among 10^12 sequences two share a digest with probability 10^-15
_PACK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{32}\.pack")
_LEFT = re.compile(rf"\.{_PACK.pattern}\.[0-9a-f]+{re.escape(TEMPORARY)}")  # of a killed writer
_LEAST_BYTES = 1 << 16  # least size that a pack counts with, to limit the number of packs
_USED_SECONDS = 600.0  # between two updates of the time at which a pack was read
_OLD_SECONDS = 86_400.0  # age from which a temporary file is abandoned

Vectors = Mapping[int, NDArray[np.float32]]  # position of a sequence -> (dim,)


@dataclass(frozen=True, slots=True)
class CacheDir:
    """The folder of a cache and its size limit."""

    path: Path
    most_bytes: int

    @classmethod
    def open(cls, path: Path, n_gigabytes: float) -> CacheDir | None:
        """Create the folder if it is missing, and announce it; warn and return None on failure."""
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
        sizes = " of ".join(f"{n / 1e9:,.2f}" for n in (n_bytes, folder.most_bytes))
        announce(f"cache of vectors {printable(folder.path)}: {sizes} GB are used")
        return folder

    def files(self, names: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
        """The files with such names: packs of all encoders, or what writers left of packs."""
        with os.scandir(self.path) as entries:
            yield from (entry for entry in entries if names.fullmatch(entry.name))

    def shrink(self) -> None:
        """Delete the least recently read packs until the rest fits."""
        packs, tree = sorted(self._sizes()), SafeDir(self.path)
        surplus = sum(n_bytes for _, n_bytes, _ in packs) - self.most_bytes
        for _, n_bytes, name in packs:
            if surplus <= 0:
                break
            with suppress(OSError):  # another user's pack without permission: delete the next
                tree.delete(self.path / name)
                surplus -= n_bytes
        self._sweep()

    def _sizes(self) -> Iterator[tuple[float, int, str]]:
        """For each pack: the time it was last read, the bytes it counts with, and its name."""
        for entry in self.files(_PACK):
            with suppress(FileNotFoundError):  # somebody deleted it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime, max(status.st_size, _LEAST_BYTES), entry.name

    def _sweep(self) -> None:
        """Delete unfinished files of killed writers that are a day old."""
        for entry in list(self.files(_LEFT)):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_SECONDS:
                    SafeDir(self.path).delete(self.path / entry.name)


# parallel arrays of an index: first 8 bytes of digests (n,), ascending; pack and its row (n, 2)
_Entries: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.int32]]


@dataclass(slots=True, eq=False)
class VectorCache:
    """The vectors of one encoder in a cache folder, as one process sees them."""

    folder: CacheDir
    encoder: EncoderSpec
    device: str  # kind of device: other kinds round differently
    is_refused: bool = False  # writing a pack failed: do not try again
    _key: str = field(init=False)
    _packs: list[str] = field(default_factory=list)  # names; "" for a deleted pack
    _index: list[_Entries] = field(default_factory=list)  # each at least twice as long as the next

    def __post_init__(self) -> None:
        text = json.dumps([self.encoder.facts, self.device, SHARD_FORMAT], sort_keys=True)
        self._key = sha256(text.encode()).hexdigest()

    def read(self, sequences: Sequence[str]) -> Vectors:
        """Read the intact vectors of the sequences that the cache has, by position."""
        try:
            self._look_up()
        except OSError:
            return {}
        digests = [self._digest(sequence.encode()) for sequence in sequences]
        by_pack: dict[int, list[tuple[int, int]]] = {}
        for place, pack, row in self._find(digests):
            by_pack.setdefault(pack, []).append((place, row))
        vectors: dict[int, NDArray[np.float32]] = {}
        for pack, wanted in by_pack.items():
            missing = [(place, row) for place, row in wanted if place not in vectors]
            with suppress(OSError, ValueError):
                vectors |= self._read_pack(self._packs[pack], missing, digests)
        return vectors

    def write(self, sequences: Sequence[str], vectors: NDArray[np.float32]) -> str:
        """Add vectors, (n, dim), and keep the folder in bounds. -> reason of a failure, or "" """
        if self.is_refused or not sequences:
            return ""
        digests = [self._digest(sequence.encode()) for sequence in sequences]
        rows = [row.tobytes() for row in vectors.astype("<f4")]
        sums = [self._digest(digest + row) for digest, row in zip(digests, rows, strict=True)]
        content = b"".join([_HEAD.pack(_MAGIC, len(rows)), *digests, *sums, *rows])
        name = f"{self._key[:16]}-{sha256(content).hexdigest()[:32]}.pack"
        try:
            SafeDir(self.folder.path).write_bytes(self.folder.path / name, content)
            self.folder.shrink()
        except (OSError, OutputError, StorageError) as error:
            self.is_refused = True
            return printable(error)
        return ""

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=_N_DIGEST, key=self._key.encode()).digest()

    def _look_up(self) -> None:
        """Update the index for packs that appeared or vanished since the last look."""
        names = {entry.name for entry in self.folder.files(_PACK)}
        names = {name for name in names if name.startswith(self._key[:16])}
        self._packs = [name if name in names else "" for name in self._packs]
        for name in sorted(names.difference(self._packs)):
            tags = self._read_tags(name)
            rows = np.arange(len(tags), dtype=np.int32)
            places = np.stack([np.full_like(rows, len(self._packs)), rows], axis=1)
            self._packs.append(name)
            self._add(tags, places)

    def _add(self, tags: NDArray[np.uint64], places: NDArray[np.int32]) -> None:
        """Add entries to the index; parts of similar length are merged, so there are few."""
        while self._index and len(self._index[-1][0]) < 2 * len(tags):
            tags_before, places_before = self._index.pop()
            tags = np.concatenate([tags_before, tags])
            places = np.concatenate([places_before, places])
        order = np.argsort(tags, kind="stable")
        self._index.append((tags[order], places[order]))

    def _find(self, digests: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Yield each entry that may match a digest: position of the digest, pack, and row."""
        tags = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)[:, 0]
        for known, places in self._index:
            firsts, ends = (np.searchsorted(known, tags, side) for side in ("left", "right"))
            for place in np.flatnonzero(ends > firsts).tolist():
                for pack, row in places[firsts[place] : ends[place]].tolist():
                    yield place, pack, row

    def _read_tags(self, name: str) -> NDArray[np.uint64]:
        """First bytes of the digests of a pack; none if it is invalid or unreadable."""
        with suppress(OSError, ValueError), open_regular_file(self.folder.path / name) as handle:
            n = self._count(handle)
            digests = np.frombuffer(handle.read(n * _N_DIGEST), dtype="<u8")
            return digests.reshape(n, 2)[:, 0].astype(np.uint64)
        return np.empty(0, dtype=np.uint64)

    def _count(self, handle: BinaryIO) -> int:
        """The number of vectors in a pack, by its header and its size.

        Raises:
            ValueError: it is not a pack of this encoder.
        """
        magic, n = _HEAD.unpack(handle.read(_HEAD.size).ljust(_HEAD.size, b"\0"))
        n_bytes = os.fstat(handle.fileno()).st_size
        if magic != _MAGIC or n_bytes != _HEAD.size + n * (2 * _N_DIGEST + 4 * self.encoder.dim):
            raise ValueError("not a pack of this encoder")
        return int(n)

    def _read_pack(
        self, name: str, wanted: Sequence[tuple[int, int]], digests: Sequence[bytes]
    ) -> Vectors:
        """Read some rows of a pack, by position, without those with a wrong checksum.

        Raises:
            OSError, ValueError: the pack was deleted or is invalid.
        """
        vectors = {}
        with open_regular_file(self.folder.path / name) as handle:
            n, n_row = self._count(handle), 4 * self.encoder.dim
            begin = _HEAD.size + n * _N_DIGEST
            for place, row in wanted:
                total = os.pread(handle.fileno(), _N_DIGEST, begin + row * _N_DIGEST)
                start = begin + n * _N_DIGEST + row * n_row
                content = os.pread(handle.fileno(), n_row, start)
                vector = np.frombuffer(content, dtype="<f4").astype(np.float32)
                checksum = self._digest(digests[place] + content)
                if total == checksum and np.isfinite(vector).all():
                    vectors[place] = vector
            if vectors and time.time() - os.fstat(handle.fileno()).st_mtime > _USED_SECONDS:
                with suppress(OSError):  # another user's file
                    os.utime(handle.fileno())
        return vectors
