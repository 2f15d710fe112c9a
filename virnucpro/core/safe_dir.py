"""Write into a folder, never through a symbolic link inside it.

The folder itself may be a link, because that is the user's choice. Each folder below it is opened
relative to its open parent. Each file is written or deleted relative to its open folder. Links are
rejected, even those that appear during the run.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from virnucpro.core.atomic_io import (
    Opener,
    is_temporary,
    storage_errors,
    temporary_path,
)
from virnucpro.core.errors import OutputError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options

_DELETED_AT_ONCE = 8  # files


class _NamedFile(io.FileIO):
    """A file that names itself in errors from ``write``, as Python does in errors from ``open``."""

    def write(self, content: Any) -> int:  # noqa: ANN401 - any buffer
        with _errors_with_path(self.name):
            return super().write(content)


@dataclass(frozen=True, slots=True, eq=False)
class SafeDir:
    """An output folder. Every path passed to it must be below ``root``.

    Each method raises OutputError if a folder on the path is a link, and OSError with the path for
    disk errors.
    """

    _MISSING_FOLDER = (FileNotFoundError, NotADirectoryError)

    root: Path

    @contextmanager
    def open_folder(self, path: Path) -> Iterator[int]:
        """Open the root or a folder below it and yield its descriptor."""
        as_folder = os.O_RDONLY | os.O_DIRECTORY
        descriptor = os.open(self.root, as_folder)
        folder = self.root
        try:
            for name in _path_parts(path, self.root):
                folder = folder / name
                inner = _open_at(descriptor, folder, as_folder)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def make_opener(self, path: Path) -> Opener:
        """Return an opener for Python's ``open`` that does not wait for the other end of a pipe."""

        def open_here(_: str, flags: int) -> int:
            with self.open_folder(path.parent) as folder:
                return _open_at(folder, path, flags)

        return open_here

    def open(self, path: Path, mode: str) -> BinaryIO:
        """Open a file, never through a link. Its errors name the file."""
        raw = _NamedFile(str(path), mode, opener=self.make_opener(path))
        return io.BufferedRandom(raw) if raw.readable() else io.BufferedWriter(raw)

    @contextmanager
    def atomic_write(self, path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
        """Yield a new file that replaces ``path``, synced to disk, if the block succeeds.

        The folder must exist: a deleted folder is not recreated. If ``path`` is a link, the link is
        replaced and its target stays unchanged.

        Raises:
            OutputError, StorageError: as ``atomic_io.storage_errors``.
        """
        temporary = temporary_path(path)
        with storage_errors(path, temporary, path.parent), self.open_folder(path.parent) as folder:
            raw = _NamedFile(
                str(temporary), "x+", opener=lambda _, flags: _open_at(folder, temporary, flags)
            )
            out = io.BufferedRandom(raw)
            try:
                yield out
                out.flush()
                if is_synced:
                    os.fsync(out.fileno())
                out.close()
                with _errors_with_path(temporary):
                    os.replace(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                if is_synced:
                    os.fsync(folder)
            finally:
                with suppress(OSError):  # report the first error
                    out.close()
                with suppress(OSError):  # a later start removes it
                    os.unlink(temporary.name, dir_fd=folder)

    def write_file(self, path: Path, content: bytes | memoryview | str) -> None:
        """Write a file atomically, with text encoded in UTF-8."""
        with self.atomic_write(path) as out:
            out.write(content.encode() if isinstance(content, str) else content)

    def write_json(self, path: Path, content: object) -> None:
        """Write an indented JSON file atomically."""
        self.write_file(path, json.dumps(content, indent=2) + "\n")

    @contextmanager
    def scratch_file(self, folder: Path) -> Iterator[BinaryIO]:
        """Yield an unnamed file on the disk of ``folder``. It is gone after the block."""
        path = temporary_path(folder / "scratch")
        with storage_errors(folder, path):
            out = self.open(path, "x+")
        with out:
            self.delete(path)
            yield out

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents below the root."""
        parent = self.root
        for name in _path_parts(path, self.root):
            with self.open_folder(parent) as descriptor:
                _mkdir_at(descriptor, parent / name)
            parent = parent / name

    def move(self, source: Path, target: Path) -> None:
        """Move a file, replacing an existing target."""
        with (
            self.open_folder(source.parent) as source_folder,
            self.open_folder(target.parent) as target_folder,
            _errors_with_path(target),
        ):
            os.replace(source.name, target.name, src_dir_fd=source_folder, dst_dir_fd=target_folder)

    def refuse_links(self, names: Iterable[str]) -> None:
        """Reject links with these names in the root, before a command writes or deletes.

        Raises:
            OutputError: one of these names is a symbolic link.
        """
        for name in names:
            _refuse_link(self.root / name)

    def delete(self, path: Path) -> None:
        """Delete a file if it exists. For a link, delete only the link."""
        with (
            suppress(*self._MISSING_FOLDER),
            self.open_folder(path.parent) as folder,
            _errors_with_path(path),
        ):
            os.unlink(path.name, dir_fd=folder)

    def delete_files(self, path: Path, is_own_file: Callable[[str], object]) -> None:
        """Delete the files in a folder whose names satisfy ``is_own_file``."""
        with suppress(*self._MISSING_FOLDER), self.open_folder(path) as folder:

            def delete(name: str) -> None:
                with suppress(FileNotFoundError), _errors_with_path(path / name):
                    os.unlink(name, dir_fd=folder)

            names = list(filter(is_own_file, os.listdir(folder)))  # noqa: PTH208 - of a descriptor
            if len(names) <= _DELETED_AT_ONCE:
                for name in names:
                    delete(name)
                return
            with ThreadPoolExecutor(_DELETED_AT_ONCE, "deletion") as pool:
                for _ in pool.map(delete, names):
                    pass

    def delete_folder(self, path: Path) -> None:
        """Delete a folder if it is empty."""
        with suppress(OSError), self.open_folder(path.parent) as folder:
            os.rmdir(path.name, dir_fd=folder)

    def remove_temp_files(
        self, path: Path, is_left: Callable[[str], object] = lambda _: False
    ) -> None:
        """Delete the temporary files that a killed command left in a folder.

        ``is_left`` selects further files to delete.
        """
        with suppress(OSError, OutputError), self.open_folder(path) as folder:
            for name in os.listdir(folder):  # noqa: PTH208 - of a descriptor
                if is_temporary(name) or is_left(name):
                    with suppress(OSError):  # a remaining file does no harm
                        os.unlink(name, dir_fd=folder)


def _path_parts(path: Path, root: Path) -> tuple[str, ...]:
    names = path.relative_to(root).parts
    assert ".." not in names, "no way leads out of a tree"
    return names


def _open_at(folder: int, path: Path, flags: int) -> int:
    """Open the file or folder ``path.name`` in an open folder."""
    try:
        with _errors_with_path(path):
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            return os.open(path.name, flags, 0o666, dir_fd=folder)
    except OSError:
        _refuse_link(path, folder)
        raise


def _mkdir_at(folder: int, path: Path) -> None:
    try:
        with _errors_with_path(path):
            os.mkdir(path.name, dir_fd=folder)
    except OSError:
        _refuse_link(path, folder)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                return
        raise


def _refuse_link(path: Path, folder: int | None = None) -> None:
    """Reject a link. ``folder`` is the open folder that contains ``path``, if any.

    Raises:
        OutputError: the path is a symbolic link.
    """
    name = path if folder is None else path.name
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:  # not a link, or it does not exist
        return
    raise OutputError(
        f"{printable(path)} is a link to {printable(target)}: nothing is written "
        "or deleted through a link inside the output folder",
        hint=with_options(
            "put what it leads to in its place, or delete the link; to use another disk, "
            "name a folder there with {output_dir}, or make the folder itself a link"
        ),
    )


@contextmanager
def _errors_with_path(path: object) -> Iterator[None]:
    """Make system errors report the full path, although only its last part was opened."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        error.filename2 = None
        raise
