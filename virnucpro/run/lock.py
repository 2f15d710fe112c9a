"""One run at a time in a folder, or any number of ``work``, and the names of those that are there.

The kernel's lock (``flock``) ends with its process, however that ends. On a file system without
it, a file that exists is the lock, and filelock looks whether the process that made it still runs.

A run has the lock alone, and writes its name into it. Each ``work`` shares it, and has a tag of its
own, its log, locked as well: so whoever asks can tell which of them are there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path

from virnucpro.ground.errors import OutputError, VirnucproError
from virnucpro.ground.files import open_plain, writing
from virnucpro.ground.log import printable
from virnucpro.ground.tree import Tree

LOCK = ".lock"
_MARK = f"{LOCK}.held"  # the lock of a file system without flock
OF_A_LOCK = (LOCK, _MARK)
_PATIENCE, _MOMENT = 2.0, 0.02  # seconds for others to write their name, and between two looks
_STALE_SECONDS = 0.2  # for filelock to take over what a dead process left
_QUEUE_SECONDS = 10.0  # for all that begin to work at once, without flock, one after the other
_TAG = re.compile(r"work-(?P<host>[\w.-]+)-(?P<pid>\d+)\.log", re.ASCII)
_NAMED = 3  # holders in a message
_BEGINNING = b"process "  # of the name of a run in its lock
_OF_MACHINE = "4026531836"  # the machine's own namespace of processes: PROC_PID_INIT_INO of Linux
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


# takes an open lock, and yields when it is held
_Take = Callable[[FileIO, Path], AbstractContextManager[None]]


@contextmanager
def locked(folder: Path, tags: Path) -> Iterator[None]:
    """Keep all others out of a folder for the time of the block; ``tags`` is the folder of tags.

    Raises:
        OutputError: another process has it; or it cannot be written, or was taken away since.
        StorageError: its disk is full.
    """
    with _holding(folder, partial(_alone, tags=tags)):
        yield


@contextmanager
def shared(folder: Path, tag: Path) -> Iterator[None]:
    """Work in a folder beside others that do so; ``tag`` is the file that stands for this process.

    Raises:
        OutputError, StorageError: as ``locked``.
    """
    with _holding(folder, partial(_beside_others, tag=tag)):
        yield


@contextmanager
def tagged(tag: Path) -> Iterator[None]:
    """Have a tag in a folder, for the run that has that.

    Raises:
        OutputError, StorageError: as ``locked``.
    """
    with ExitStack() as stack:
        with writing(tag):
            own = stack.enter_context(_open(Tree(tag.parents[1]), tag))
            if _flock(own, fcntl.LOCK_EX) is None:
                stack.enter_context(_soft(own, _mark_of(tag), tag.parent, _STALE_SECONDS))
        yield


def own_name() -> str:
    """The name of this process among those of all machines, as part of a file name."""
    host = re.sub(r"[^\w.-]", "_", _host(), flags=re.ASCII)
    return f"{host}-{os.getpid()}"


def _host() -> str:
    """The name of this machine or, in a container that numbers its own processes, of both.

    Containers often share the name of their machine, and each has a process 1.
    """
    name, number = socket.gethostname(), _OF_MACHINE
    with suppress(OSError):  # no Linux, or no /proc
        number = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return name if number == _OF_MACHINE else f"{name}-{number}"


def holder_of(tag: Path) -> tuple[str, int] | None:
    """The host and process that a tag is named after; None for any other file."""
    words = _TAG.fullmatch(tag.name)
    return (words["host"], int(words["pid"])) if words else None


def is_held(path: Path) -> bool:
    """Whether a process has this tag, or the lock of a run, now."""
    try:
        with open_plain(path) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return _mark_of(path).exists()


def run_at(folder: Path) -> str:
    """The name of the run that has a folder now, as it wrote it into the lock; else nothing."""
    path = folder / LOCK
    try:
        with open_plain(path) as handle:
            name = handle.read().decode(errors="replace").strip()
        return name if name and is_held(path) else ""
    except OSError:  # no lock, or one that is not ours to read
        return ""


def _mark_of(path: Path) -> Path:
    return path.with_name(f"{path.name if path.name == LOCK else f'.{path.name}'}.held")


@contextmanager
def _holding(folder: Path, take: _Take) -> Iterator[None]:
    path = folder / LOCK
    with ExitStack() as stack:
        with writing(path):
            handle = stack.enter_context(_open(Tree(folder), path, _BEGINNING))
            descriptor = os.open(folder, os.O_RDONLY)  # so that nothing else gets its number
            stack.callback(os.close, descriptor)
            stack.enter_context(take(handle, folder))
        try:
            yield
        except (OSError, VirnucproError) as error:
            if _is_at(descriptor, folder):
                raise
            raise OutputError(
                f"{printable(folder)} was moved or deleted while it was in use",
                hint="if it was moved, go on there with --resume; leave it alone until the end",
            ) from error


@contextmanager
def _alone(handle: FileIO, folder: Path, tags: Path) -> Iterator[None]:
    """Have the lock of a folder, and one's name in it."""
    with ExitStack() as stack:
        match _flock(handle, fcntl.LOCK_EX):
            case False:
                raise _in_use(handle, folder, tags)
            case None:
                stack.enter_context(_marked(handle, folder, tags))
        handle.truncate(0)
        handle.write(_name())
        stack.callback(_forget, handle)
        yield


@contextmanager
def _beside_others(handle: FileIO, folder: Path, tag: Path) -> Iterator[None]:
    """Share the lock of a folder, and have a tag."""
    with ExitStack() as stack:
        own = stack.enter_context(_open(Tree(folder), tag))
        match _flock(handle, fcntl.LOCK_SH):
            case False:
                raise _in_use(handle, folder, tag.parent)
            case None:
                stack.enter_context(_tagged(handle, folder, tag))
            case True:
                _forget(handle)  # whoever left a name there was killed
                if not _flock(own, fcntl.LOCK_EX):
                    raise _in_use(own, folder, tag.parent)
        yield


def _open(tree: Tree, path: Path, beginning: bytes = b"") -> FileIO:
    """Make or open a lock; one that is emptied must begin so, if it has any content.

    Raises:
        OSError: it cannot be opened.
        OutputError: it is a link, not a plain file, or has other content.
    """
    handle = FileIO(path, "a+", opener=tree.opener(path))
    if stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.seek(0)
        if handle.read(len(beginning)) in (b"", beginning):
            return handle
    handle.close()
    raise OutputError(
        f"{printable(path)} is not the lock of a run: it is not a plain file, or holds other text",
        hint="look at it, and move it away",
    )


def _flock(handle: FileIO, kind: int) -> bool | None:
    """Take the kernel's lock; False if others are in the way, None if the file system has none."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return None
    return True


@contextmanager
def _marked(handle: FileIO, folder: Path, tags: Path) -> Iterator[None]:
    """Hold a folder by a file that only one process can make, when no tag is marked."""
    mark = folder / _MARK
    with _soft(handle, mark, tags, _STALE_SECONDS):
        for tag in _tags(tags):
            if _mark_of(tag).exists():
                with _soft(handle, _mark_of(tag), tags, _STALE_SECONDS):
                    pass  # it was left by a process that was killed
        yield


@contextmanager
def _tagged(handle: FileIO, folder: Path, tag: Path) -> Iterator[None]:
    """Mark a tag while no run has the folder, whose own mark is held for that moment."""
    with ExitStack() as stack:
        with _soft(handle, folder / _MARK, tag.parent, _QUEUE_SECONDS):
            stack.enter_context(_soft(handle, _mark_of(tag), tag.parent, _STALE_SECONDS))
        yield


@contextmanager
def _soft(handle: FileIO, mark: Path, tags: Path, seconds: float) -> Iterator[None]:
    """Hold a file that only one process can make."""
    from filelock import SoftFileLock, Timeout

    lock = SoftFileLock(mark, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        hint = f"if it is over (which cannot be seen from here), delete {printable(mark)}"
        raise _in_use(handle, tags.parent, tags, hint) from error
    try:
        yield
    finally:
        lock.release()


def _forget(handle: FileIO) -> None:
    with suppress(OSError):
        handle.truncate(0)


def _in_use(handle: FileIO, folder: Path, tags: Path, *hints: str) -> OutputError:
    name, working = _await_name(handle, tags)
    if working:
        names = [f"process {pid} on {host}" for host, pid in working[:_NAMED]]
        more = f" and {len(working) - _NAMED} more" if len(working) > _NAMED else ""
        return OutputError(
            f"`virnucpro work` is using {printable(folder)}: {', '.join(names)}{more}",
            hint="; ".join(("wait for its end, or stop it: finished shards are kept", *hints)),
        )
    return OutputError(
        f"another run is using {printable(folder)}: "
        f"{printable(name or 'a process that did not say its name')}",
        hint="; ".join(("wait for it, or choose another --output-dir", *hints)),
    )


def _name() -> bytes:
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    return _BEGINNING + f"{os.getpid()} on {_host()} since {start}\n".encode()


def _await_name(handle: FileIO, tags: Path) -> tuple[str, Sequence[tuple[str, int]]]:
    """The name of the run that has the folder, and may have got it just now; or those who work."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        handle.seek(0)
        name = handle.read().decode(errors="replace")
        if name.endswith("\n") and not _is_gone(name):
            return name.strip(), ()
        working = [holder for tag in _tags(tags) if (holder := holder_of(tag)) and is_held(tag)]
        if working or time.monotonic() > deadline:
            return name.strip(), working
        time.sleep(_MOMENT)


def _tags(folder: Path) -> list[Path]:
    """The tags in a folder, also of processes that have ended."""
    return sorted(folder.glob("work-*.log"))


def _is_gone(name: str) -> bool:
    """True for the name of an earlier process of this machine that was killed."""
    import psutil

    words = re.fullmatch(r"process (\d+) on (.+) since .+\n", name)
    return words is not None and words[2] == _host() and not psutil.pid_exists(int(words[1]))


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
