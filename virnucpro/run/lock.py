"""One run at a time in a folder, and the name of the one that is there.

The kernel's lock (``flock``) ends with its process, however that ends. On a file system without
it, a file that exists is the lock, and filelock looks whether the process that made it still runs.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

import psutil
from filelock import SoftFileLock, Timeout, lock_descriptor

from virnucpro.errors import OutputError, VirnucproError
from virnucpro.files import writing
from virnucpro.log import printable

LOCK = ".lock"
_MARK = f"{LOCK}.held"  # the lock of a file system without flock
OF_A_LOCK = (LOCK, _MARK)
_PATIENCE, _MOMENT = 2.0, 0.02  # seconds for others to write their name, and between two looks
_STALE_SECONDS = 0.2  # for filelock to take over what a dead process left
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
            descriptor = os.open(folder, os.O_RDONLY)  # so that nothing else gets its number
            stack.callback(os.close, descriptor)
            if not _flock(handle, folder):
                stack.enter_context(_marked(handle, folder / _MARK))
            handle.truncate(0)
            handle.write(_name())
            stack.callback(_forget, handle)
        try:
            yield
        except (OSError, VirnucproError) as error:
            if _is_at(descriptor, folder):
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
        f"{printable(path)} is not the lock of a run: it is not a plain file, or has a second name",
        hint="look at it, and move it away",
    )


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _flock(handle: FileIO, folder: Path) -> bool:
    """Take the kernel's lock; False if the file system has none."""
    try:
        is_ours = lock_descriptor(handle.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    if not is_ours:
        raise _in_use(handle, folder)
    return True


@contextmanager
def _marked(handle: FileIO, mark: Path) -> Iterator[None]:
    """Hold a folder by a file that only one process can make."""
    lock = SoftFileLock(mark, timeout=_STALE_SECONDS, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        hint = f"if it is over (which cannot be seen from here), delete {printable(mark)}"
        raise _in_use(handle, mark.parent, hint) from error
    try:
        yield
    finally:
        lock.release()


def _forget(handle: FileIO) -> None:
    with suppress(OSError):
        handle.truncate(0)


def _in_use(handle: FileIO, folder: Path, *hints: str) -> OutputError:
    holder = _await_name(handle) or "a process that did not say its name"
    return OutputError(
        f"another run is using {printable(folder)}: {printable(holder)}",
        hint="; ".join(("wait for it, or choose another --output-dir", *hints)),
    )


def _name() -> bytes:
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {start}\n".encode()


def _await_name(handle: FileIO) -> str:
    """The name of a process that has the folder, and may have got it just now."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        handle.seek(0)
        name = handle.read().decode(errors="replace")
        if (name.endswith("\n") and not _is_gone(name)) or time.monotonic() > deadline:
            return name.strip()
        time.sleep(_MOMENT)


def _is_gone(name: str) -> bool:
    """True for the name of an earlier process of this machine that was killed."""
    words = re.fullmatch(r"process (\d+) on (.+) since .+\n", name)
    return (
        words is not None
        and words[2] == socket.gethostname()
        and not psutil.pid_exists(int(words[1]))
    )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
