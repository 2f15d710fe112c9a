"""Keep the SHA-256 of each output of a finished run in ``run.json``, and find changed outputs.

Feature files are outputs too. They are hashed when their vectors are read for the tables, and not
again: there may be terabytes of them. While a file is rewritten, its hash is removed, so that a
kill between the file and ``run.json`` does not look like damage.
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

from virnucpro.core.atomic_io import disk_error, hash_file
from virnucpro.core.errors import InputError, VirnucproError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.store.feature_store import PARTS, index_path, is_export, is_feature_file
from virnucpro.store.run_dir import FEATURES, SCORES, RunDir

_REMEDY = with_options(
    "check the disk, then repeat the command of the run with {resume} to rewrite it"
)
_WRITES_AHEAD = 8  # writes of a file that may wait for their hashing


@dataclass(frozen=True, slots=True)
class _HashingDir(SafeDir):
    """A run folder that hashes files while they are written, so that none is read again."""

    hashes: dict[Path, str]  # of whole files
    thread: ThreadPoolExecutor

    @contextmanager
    def atomic_write(self, path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
        """As ``SafeDir.atomic_write``."""
        with SafeDir.atomic_write(self, path, is_synced=is_synced) as out:
            hashed = _HashedFile(out, self.thread)
            yield cast("BinaryIO", hashed)
        self.hashes[path] = hashed.hexdigest()


class _HashedFile(io.BufferedIOBase):
    """A file that is written sequentially and hashed by a thread meanwhile."""

    def __init__(self, out: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._out, self._thread = out, thread
        self._digest = hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()

    def write(self, text: Any, /) -> int:  # noqa: ANN401 - all that has bytes
        self._waiting.append(self._thread.submit(self._digest.update, text))
        if len(self._waiting) > _WRITES_AHEAD:
            self._waiting.popleft().result()
        return self._out.write(text)

    def hexdigest(self) -> str:
        for future in self._waiting:
            future.result()
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a run folder."""

    rundir: RunDir
    written: dict[Path, str] = field(default_factory=dict)  # hashes that are known already
    field: ClassVar = "outputs"  # of ``run.json``: place in the run folder -> SHA-256

    @contextmanager
    def writing(self) -> Iterator[SafeDir]:
        """Yield the run folder for writing outputs that ``hash`` need not read again."""
        with ThreadPoolExecutor(1, "hashes") as thread:
            yield _HashingDir(self.rundir.root, self.written, thread)

    def hash(self, names: Collection[str] = ()) -> dict[str, str]:
        """The hashes of the existing outputs: all, or only these file names.

        Raises:
            OutputError, StorageError: one cannot be read now.
        """
        paths = [path for path in self.paths() if not names or path.name in names]
        with ThreadPoolExecutor() as pool:  # Python's lock is free while a block is hashed
            digests = pool.map(lambda path: self.written.get(path) or _hash(path), paths)
            return {
                self._output_path(path): digest for path, digest in zip(paths, digests, strict=True)
            }

    def paths(self) -> list[Path]:
        """The existing outputs of the run and of each of its files."""
        names = self.rundir.owned_names
        paths = [self.rundir.report, *map(self.rundir.output, names.run)]
        for folder in self.rundir.feature_folders():
            paths += [index_path(folder), folder / PARTS]
            paths += [
                path
                for path in sorted(folder.glob("*.*"))
                if is_feature_file(path.name) or is_export(path)
            ]
        paths += self.rundir.scores.glob(f"*{SCORES}")
        paths += [folder / name for folder in self.rundir.sample_folders() for name in names.sample]
        return [path for path in paths if path.is_file()]

    def read_kept(self, names: Collection[str] = ()) -> dict[str, str]:
        """The hashes of the score files of a run, and of intact outputs with these names.

        No hash at all if a score file is damaged.

        Raises:
            ResumeError: ``run.json`` is damaged.
        """
        hashes = self.read_hashes() or {}
        scores = {place: one for place, one in hashes.items() if Path(place).suffix == SCORES}
        named = {place: one for place, one in hashes.items() if place in names}
        if any(self.find_damaged(scores)):
            return {}
        damaged = {self._output_path(path) for path, _ in self.find_damaged(named)}
        return scores | {place: one for place, one in named.items() if place not in damaged}

    def count_unhashed(self, hashes: Mapping[str, str]) -> int:
        """The number of existing outputs without a hash here."""
        return sum(self._output_path(path) not in hashes for path in self.paths())

    def read_hashes(self) -> dict[str, str] | None:
        """The hashes in ``run.json``; None for an unfinished run or one of an older version.

        Raises:
            ResumeError: ``run.json`` is damaged.
        """
        hashes = self.rundir.read_facts().get(self.field)
        return dict(hashes) if isinstance(hashes, Mapping) else None

    def find_damaged(self, hashes: Mapping[str, str]) -> Iterator[tuple[Path, VirnucproError]]:
        """Yield the outputs that are damaged or missing, each with its error.

        Raises:
            OutputError, StorageError: one cannot be read now.
        """
        # a path that leads out of the folder is not read
        places = [p for p in hashes if not Path(p).is_absolute() and ".." not in Path(p).parts]
        paths = [self.rundir.root / place for place in places]
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda path: _hash(path) if path.is_file() else "", paths)
            for place, path, digest in zip(places, paths, digests, strict=True):
                if digest != hashes[place]:
                    what = "was changed: run.json has another SHA-256"
                    if not path.exists():
                        what = "is missing"
                    yield path, InputError(f"{printable(path)} {what}", _REMEDY)

    def check(self, but: Collection[str] = ()) -> None:
        """Check that the existing outputs are as a finished run wrote them, except vectors.

        Vectors may take hours to read, and whoever reads them verifies them.
        ``but``: file names to skip, because they are written anew.

        Raises:
            InputError: an output was changed.
            ResumeError: ``run.json`` is damaged.
            OutputError, StorageError: one cannot be read now.
        """
        hashes = {
            place: digest
            for place, digest in (self.read_hashes() or {}).items()
            if Path(place).name not in but and not has_vectors(place)
        }
        for path, error in self.find_damaged(hashes):
            if path.exists():
                raise error

    @contextmanager
    def rewriting(self, names: Collection[str]) -> Iterator[None]:
        """Wrap the writing of outputs with these file names.

        Their hashes are removed from ``run.json`` first, so that a kill does not look like damage;
        afterwards it gets the hashes of the new files. After an error it gets the hashes of
        unchanged files. A run without hashes gets none.
        """
        hashes = self.read_hashes()
        if hashes is None:
            yield
            return
        before = {place: one for place, one in hashes.items() if Path(place).name in names}
        self._update(names, {})
        try:
            yield
        except VirnucproError:
            now = self.hash(names).items()
            self._update(names, {place: one for place, one in now if before.get(place) == one})
            raise
        self._update(names, self.hash(names))

    def _update(self, names: Collection[str], now: Mapping[str, str]) -> None:
        """Replace the hashes of outputs with these file names."""
        stored = self.rundir.read_facts()
        before = dict(stored[self.field])
        others = {
            place: digest for place, digest in before.items() if Path(place).name not in names
        }
        if {**others, **now} != before:
            self.rundir.write_facts({**stored, self.field: {**others, **now}})

    def _output_path(self, path: Path) -> str:
        return path.relative_to(self.rundir.root).as_posix()


def has_vectors(place: str) -> bool:
    """Whether an output, by its place in the run folder, is a file of vectors or lists such files.

    >>> has_vectors("features/000000.h5"), has_vectors("features.h5"), has_vectors("viral.fasta")
    (True, True, False)
    """
    return Path(place).parts[0] in (FEATURES, index_path(Path(FEATURES)).name)


def _hash(path: Path) -> str:
    """
    Raises:
        OutputError, StorageError: it cannot be read now.
    """
    try:
        return hash_file(path)
    except OSError as error:
        raise disk_error(error, path) from error
