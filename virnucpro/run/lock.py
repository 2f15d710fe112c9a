"""One run at a time in a folder, and the name of the one that is there.

The kernel's lock (``flock``) ends with its process, however that ends. On a file system without
it, a file that exists is the lock. That file names its process, so that the next one can tell
whether it still runs: by host, boot, name space, number and start, for numbers are given again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

import psutil

from virnucpro.errors import OutputError, VirnucproError
from virnucpro.files import open_plain, writing
from virnucpro.log import printable

LOCK = ".lock"
_MARK, _BREAKING = f"{LOCK}.held", f"{LOCK}.breaking"  # where there is no flock
OF_A_LOCK = (LOCK, _MARK, _BREAKING)
_PATIENCE, _MOMENT = 2.0, 0.02  # seconds for others to write their name, and between two looks
_UNKNOWN = "-"
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others out of a folder for the time of the block.

    Raises:
        OutputError: another process has it; or it cannot be written, or was taken away since.
        StorageError: its disk is full.
    """
    path = folder / LOCK
    with ExitStack() as stack:
        with writing(path):
            handle = stack.enter_context(_open(path))
            opened = os.open(folder, os.O_RDONLY)  # so that nothing else gets its number
            stack.callback(os.close, opened)
            if _flock(handle, folder):
                handle.truncate(0)
                _write(handle)
                stack.callback(_forget, handle)
            else:
                stack.enter_context(_marked(folder))
        try:
            yield
        except (OSError, VirnucproError) as error:
            if _is_at(opened, folder):
                raise
            raise OutputError(
                f"{printable(folder)} was moved or deleted while it was in use",
                hint="if it was moved, go on there with --resume; leave it alone until the end",
            ) from error


def _open(path: Path) -> FileIO:
    """Make or open the lock, which is emptied: so it must be no other file by another name.

    Raises:
        OSError: it is a link, or cannot be opened.
        OutputError: it is not a plain file, or has content and a second name.
    """
    handle = FileIO(path, "a+", opener=_open_itself)
    about = os.fstat(handle.fileno())
    if stat.S_ISREG(about.st_mode) and (about.st_nlink == 1 or not about.st_size):
        return handle
    handle.close()
    raise OutputError(
        f"{printable(path)} is not the lock of a run: it is no plain file, or has another name too",
        hint="look at it, and move it away",
    )


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _flock(handle: FileIO, folder: Path) -> bool:
    """Whether the kernel gave its lock; False if the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise _in_use(folder, _await(folder / LOCK)) from error
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        record = _read(folder / LOCK)  # of one for whom the kernel had a lock
        if record and not _is_gone(record):
            raise _in_use(folder, record, folder / LOCK) from error
        return False
    return True


def _forget(handle: FileIO) -> None:
    with suppress(OSError):
        handle.truncate(0)


@contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Hold a folder by a file that only one process can make."""
    mark, breaking = folder / _MARK, folder / _BREAKING
    deadline = time.monotonic() + _PATIENCE
    while not _make(mark):
        record = _read(mark)
        if record and not _is_gone(record):
            raise _in_use(folder, record, mark)
        if record and _broken(mark, breaking):
            continue
        if time.monotonic() > deadline:
            stuck = breaking if breaking.exists() else mark
            raise _in_use(folder, _read(stuck), stuck)
        time.sleep(_MOMENT)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _broken(mark: Path, breaking: Path) -> bool:
    """Remove what a dead process left; False while another process is at it.

    One at a time: a slow one would remove what a quick one has made in its place.
    """
    if not _make(breaking):
        return False
    try:
        if _is_gone(_read(mark)):
            mark.unlink()
    finally:
        breaking.unlink()
    return True


def _make(path: Path) -> bool:
    """Make a file with the name of this process in it, unless it is there."""
    with writing(path):
        try:
            out = path.open("xb", buffering=0)
        except FileExistsError:
            return False
        with out:
            try:
                _write(out)
            except BaseException:
                path.unlink()
                raise
    return True


def _write(out: FileIO) -> None:
    """The whole record of this process: a part of it would be taken for that of another."""
    record = _record()
    while record:
        record = record[out.write(record) :]


def _read(path: Path) -> str:
    """The record of a holder; empty if it is not written yet, or gone by now."""
    try:
        with open_plain(path) as lines:
            record = lines.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return record if record.endswith("\n") else ""


def _await(path: Path) -> str:
    """The record of a process that has just got the lock."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        record = _read(path)
        if (record and not _is_gone(record)) or time.monotonic() > deadline:
            return record
        time.sleep(_MOMENT)


def _in_use(folder: Path, record: str, mark: Path | None = None) -> OutputError:
    holder = record.partition("\n")[0] or "of a process that did not say its name"
    hint = "wait for it, or choose another --output-dir"
    if mark is not None:
        hint += f"; if it is over (which cannot be seen from here), delete {printable(mark)}"
    return OutputError(f"another run is using {printable(folder)}: {printable(holder)}", hint)


def _record() -> bytes:
    """One line for people, one for ``_is_gone``."""
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    shown = f"process {os.getpid()} on {socket.gethostname()} since {started}"
    return f"{shown}\n{' '.join(_identity())}\n".encode()


def _identity() -> tuple[str, str, str, str, str]:
    """Of this process: host, boot, name space, number, start."""
    return socket.gethostname(), _boot(), _name_space(), str(os.getpid()), _start_of(os.getpid())


def _is_gone(record: str) -> bool:
    """Whether the process that wrote it has certainly ended."""
    words = record.partition("\n")[2].split()
    if len(words) != len(_identity()) or not words[3].isdigit():
        return False
    host, boot, name_space, *_ = _identity()
    if words[0] != host:
        return False
    if words[1] != boot:
        return True
    if words[2] != name_space:
        return False
    process = int(words[3])
    return not psutil.pid_exists(process) or _start_of(process) not in (words[4], _UNKNOWN)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _UNKNOWN


def _name_space() -> str:
    """In which process numbers mean something: containers may share a host's name."""
    try:
        return Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return _UNKNOWN


def _start_of(process: int) -> str:
    """When a process was started, in ticks since boot; other words for one that only lingers."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return "ended" if fields[0] in "ZX" else fields[19]


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
