"""Keep the checksum of each output of a finished run in ``run.json``, and find changed outputs.

It is SHA-256, except for the files of shards, which have that of ``file_checksum``: they may take
terabytes. Feature files are hashed only once, when their vectors are read for the tables. While a
file is rewritten, its hash is removed, so that a kill between writing the file and ``run.json``
does not look like damage.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from virnucpro.core.atomic_io import disk_error, open_regular_file
from virnucpro.core.errors import InputError, VirnucproError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.store.feature_file import verify
from virnucpro.store.feature_store import (
    FeatureStore,
    index_path,
    is_export,
    is_feature_file,
)
from virnucpro.store.file_checksum import Checksum
from virnucpro.store.frame_scores import FRAME_SCORES
from virnucpro.store.run_dir import FEATURES, RunDir


@dataclass(frozen=True, slots=True, eq=False)
class _HashingDir(SafeDir):
    """A run folder that hashes files while they are written, so that none is read again."""

    hashes: dict[Path, str]  # of complete files
    thread: ThreadPoolExecutor

    @contextmanager
    def atomic_write(self, path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
        """Write and hash a file, as ``SafeDir.atomic_write``."""
        with SafeDir.atomic_write(self, path, is_synced=is_synced) as out:
            hashed = _HashedFile(out, self.thread)
            yield cast("BinaryIO", hashed)
        self.hashes[path] = hashed.hexdigest()


class _HashedFile(io.BufferedIOBase):
    """A file that is written sequentially and hashed by a thread at the same time."""

    def __init__(self, out: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._out = out
        self._thread = thread
        self._digest = hashlib.sha256()
        self._pending: deque[Future[None]] = deque()

    def write(self, text: Any, /) -> int:  # noqa: ANN401 - any buffer
        writes_ahead = 8  # writes per file that may wait to be hashed
        self._pending.append(self._thread.submit(self._digest.update, text))
        if len(self._pending) > writes_ahead:
            self._pending.popleft().result()
        return self._out.write(text)

    def hexdigest(self) -> str:
        for future in self._pending:
            future.result()
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The outputs in a run folder."""

    rundir: RunDir
    written: dict[Path, str] = field(default_factory=dict)  # path -> hash taken while writing
    field: ClassVar = "outputs"  # key in ``run.json``: path in the run folder -> checksum

    @contextmanager
    def writing(self) -> Iterator[SafeDir]:
        """Yield the run folder for writing outputs that ``hash`` need not read again."""
        with ThreadPoolExecutor(1, "hashes") as thread:
            yield _HashingDir(self.rundir.root, self.written, thread)

    def hash(self, names: Collection[str] = ()) -> dict[str, str]:
        """Hash the existing outputs: all, or only these file names.

        Raises:
            FeatureFileError: a feature file is corrupt.
            OutputError, StorageError: an output cannot be read now.
        """
        paths = [path for path in self.paths() if not names or path.name in names]
        with ThreadPoolExecutor() as pool:  # hashing a block releases the GIL
            digests = pool.map(lambda path: self.written.get(path) or _checksum(path), paths)
            return {
                self._output_path(path): digest for path, digest in zip(paths, digests, strict=True)
            }

    def paths(self) -> list[Path]:
        """List the existing outputs of the run and of each sample."""
        names = self.rundir.owned_names
        paths = [self.rundir.report, *map(self.rundir.output, names.run)]
        for folder in self.rundir.feature_folders():
            names_here = (
                FeatureStore.parts_name,
                FeatureStore.vector_index_name,
                FeatureStore.lookup_name,
            )
            paths += [index_path(folder), *(folder / name for name in names_here)]
            for path in sorted(folder.glob("*.*")):
                if is_feature_file(path.name) or is_export(path):
                    paths.append(path)
        for suffix in (RunDir.scores_suffix, FRAME_SCORES):
            paths += sorted(self.rundir.scores.glob(f"*{suffix}"))
        for folder in self.rundir.sample_folders():
            paths += [folder / name for name in names.sample]
        return [path for path in paths if path.is_file()]

    def read_kept(self, names: Collection[str] = ()) -> dict[str, str]:
        """Read the hashes of the run's score files, and of intact outputs with these names.

        If a score file is corrupt, no hash is returned.

        Raises:
            ResumeError: ``run.json`` is corrupt.
        """
        hashes = self.read_hashes() or {}
        scores = {
            name: digest
            for name, digest in hashes.items()
            if Path(name).suffix == RunDir.scores_suffix
        }
        named = {name: digest for name, digest in hashes.items() if name in names}
        if any(self.find_damaged(scores)):
            return {}
        damaged = {self._output_path(path) for path, _ in self.find_damaged(named)}
        return scores | {name: digest for name, digest in named.items() if name not in damaged}

    def count_unhashed(self, hashes: Mapping[str, str]) -> int:
        """Count the existing outputs without a hash in ``hashes``."""
        return sum(self._output_path(path) not in hashes for path in self.paths())

    def read_hashes(self) -> dict[str, str] | None:
        """Read the hashes in ``run.json``. An unfinished run or an older version has None.

        Raises:
            ResumeError: ``run.json`` is corrupt.
        """
        hashes = self.rundir.read_facts().get(self.field)
        return dict(hashes) if isinstance(hashes, Mapping) else None

    def find_damaged(self, hashes: Mapping[str, str]) -> Iterator[tuple[Path, VirnucproError]]:
        """Yield each corrupt or missing output with its error.

        Raises:
            OutputError, StorageError: an output cannot be read now.
        """
        remedy = with_options(
            "check the disk, then repeat the command of the run with {resume} to rewrite it"
        )
        # never read a path outside the folder
        names = [
            name for name in hashes if not Path(name).is_absolute() and ".." not in Path(name).parts
        ]
        paths = [self.rundir.root / name for name in names]
        with ThreadPoolExecutor() as pool:
            recorded = [str(hashes[name]) for name in names]
            digests = pool.map(
                lambda path, digest: _hash(path, digest) if path.is_file() else "", paths, recorded
            )
            for name, path, digest in zip(names, paths, digests, strict=True):
                if digest != hashes[name]:
                    problem = "was changed: run.json has another checksum"
                    if not path.exists():
                        problem = "is missing"
                    yield path, InputError(f"{printable(path)} {problem}", remedy)

    def check(self, but: Collection[str] = ()) -> None:
        """Check that the existing outputs, except vectors, are unchanged since the run finished.

        Vectors may take hours to read, and their readers verify them.

        Args:
            but: file names to skip, because they will be rewritten.

        Raises:
            InputError: an output was changed.
            ResumeError: ``run.json`` is corrupt.
            OutputError, StorageError: an output cannot be read now.
        """
        hashes = {
            name: digest
            for name, digest in (self.read_hashes() or {}).items()
            if Path(name).name not in but and not has_vectors(name)
        }
        for path, error in self.find_damaged(hashes):
            if path.exists():
                raise error

    @contextmanager
    def rewriting(self, names: Collection[str]) -> Iterator[None]:
        """Wrap the writing of outputs with these file names.

        First, their hashes are removed from ``run.json``, so that a kill does not look like damage.
        Afterwards, ``run.json`` gets the hashes of the new files. After an error, it gets the
        hashes of unchanged files. A run without hashes gets none.
        """
        hashes = self.read_hashes()
        if hashes is None:
            yield
            return
        old_hashes = {name: digest for name, digest in hashes.items() if Path(name).name in names}
        self._update(names, {})
        try:
            yield
        except VirnucproError:
            new_hashes = self.hash(names).items()
            unchanged = {
                name: digest for name, digest in new_hashes if old_hashes.get(name) == digest
            }
            self._update(names, unchanged)
            raise
        self._update(names, self.hash(names))

    def _update(self, names: Collection[str], now: Mapping[str, str]) -> None:
        """Replace the hashes of outputs with these file names."""
        stored = self.rundir.read_facts()
        old_hashes = dict(stored[self.field])
        remaining = {
            name: digest for name, digest in old_hashes.items() if Path(name).name not in names
        }
        new_hashes = {**remaining, **now}
        if new_hashes != old_hashes:
            self.rundir.write_facts({**stored, self.field: new_hashes})

    def _output_path(self, path: Path) -> str:
        return path.relative_to(self.rundir.root).as_posix()


def has_vectors(name: str) -> bool:
    """Return True if an output is a vector file or lists such files, given its relative path.

    >>> has_vectors("features/000000.h5"), has_vectors("features.h5"), has_vectors("viral.fasta")
    (True, True, False)
    """
    return Path(name).parts[0] in (FEATURES, index_path(Path(FEATURES)).name)


def _checksum(path: Path) -> str:
    """Return the checksum of an output. That of a shard's file has the algorithm of its label."""
    has_label = is_feature_file(path.name) or path.suffix == FRAME_SCORES
    return verify(path, {}).file if has_label else _hash(path)


def _hash(path: Path, like: str = "") -> str:
    """Hash a file with SHA-256, or with the algorithm of the checksum ``like``.

    Raises:
        InputError: the algorithm is unknown.
        OutputError, StorageError: the file cannot be read now.
    """
    block_bytes = 1 << 20
    try:
        checksum = Checksum(like)
        with open_regular_file(path) as handle:
            while block := handle.read(block_bytes):
                checksum.update(block)
    except ValueError as error:
        hint = "use the version of VirNucPro that wrote run.json"
        raise InputError(f"{printable(path)}: {error}", hint) from error
    except OSError as error:
        raise disk_error(error, path) from error
    return checksum.text
