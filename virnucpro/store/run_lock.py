"""Lock a folder for one run, or share it between any number of ``work`` processes.

The kernel's lock (``flock``) ends with its process, however that ends. On a file system without it,
a file is the lock, and filelock checks whether the process that made it still runs. Neither works
reliably between hosts: some file systems restrict ``flock`` to one host, and no host sees the
processes of another. So an owner renews its file's modification time every few seconds (a beat).
Other hosts watch the file. Without a beat for a minute, its process counts as dead, and the lock is
taken over. With a beat, the process is alive, whatever ``flock`` reports. Only the file system's
clock counts.

A run locks exclusively and writes its name into the lock. ``work`` processes share the lock. Each
also locks its own tag, which is its log, so that any process can see who is working.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO

from virnucpro.core.atomic_io import open_regular_file, storage_errors
from virnucpro.core.errors import OutputError, VirnucproError
from virnucpro.core.logging import LOGGER, announce, printable
from virnucpro.core.option_text import join_texts, with_options
from virnucpro.core.safe_dir import SafeDir

LOCK = ".lock"
LOCK_FILES = (LOCK, f"{LOCK}.held")  # the second is the lock on a file system without flock
_TAG = re.compile(r"work-(?P<host>[\w.-]+)-(?P<pid>\d+)\.log", re.ASCII)
_NAME = re.compile(r"process (\d+) on (.+) since .+\n")
_BEGINNING = b"process "  # starts a run's name in its lock


class Timing:
    """How long a lock waits. Tests change these values."""

    owner_name_seconds = 2.0  # for the owner's name
    stale_seconds = 0.2  # for filelock to take over the lock of a dead process
    queue_seconds = 10.0  # for processes that start together and take turns, without flock
    beat_seconds = 2.0  # between two beats
    dead_seconds = 60.0  # without a beat, by file times, until a process counts as dead
    n_watched_beats = 10  # to watch a file for if its time is inconclusive


@contextmanager
def locked(
    folder: Path, tags: Path, name_process: Callable[[], bytes] | None = None
) -> Iterator[None]:
    """Lock all others out of a folder within the block.

    Args:
        tags: the folder with tags.
        name_process: names the owner for other processes. None: by process id, host and time.

    Raises:
        OutputError: another process has locked the folder, or it cannot be written, or was removed
            in the meantime.
        StorageError: its disk is full.
    """
    path = folder / LOCK
    with ExitStack() as stack, _detect_moves(folder):
        with storage_errors(path):
            handle = stack.enter_context(_open(SafeDir(folder), path, _BEGINNING))
            match _flock(handle, fcntl.LOCK_EX):
                case False:
                    raise _in_use_error(handle, folder, tags)
                case None:
                    stack.enter_context(
                        _lock_softly(handle, _lock_marker(path), tags, Timing.stale_seconds)
                    )
                    for mark in filter(Path.exists, map(_lock_marker, tags_in(tags))):
                        with _lock_softly(handle, mark, tags, Timing.stale_seconds):
                            pass  # left by a killed process
            _reject_if_active(handle, folder, tags_in(tags))
            handle.truncate(0)
            handle.write((name_process or _process_name)())
            stack.callback(_remove_marker, handle)
            stack.enter_context(_heartbeat(handle.fileno()))
        yield


@contextmanager
def shared(folder: Path, tag: Path) -> Iterator[None]:
    """Share a folder with other ``work`` processes. ``tag`` is this process's file.

    Raises:
        OutputError, StorageError: as ``locked``.
    """
    path = folder / LOCK
    tags = tag.parent
    with ExitStack() as stack, _detect_moves(folder):
        with storage_errors(path):
            handle = stack.enter_context(_open(SafeDir(folder), path, _BEGINNING))
            own = stack.enter_context(_open(SafeDir(folder), tag))
            match _flock(handle, fcntl.LOCK_SH):
                case False:
                    raise _in_use_error(handle, folder, tags)
                case None:  # while this process owns the mark, no run can lock the folder
                    with _lock_softly(handle, _lock_marker(path), tags, Timing.queue_seconds):
                        stack.enter_context(
                            _lock_softly(handle, _lock_marker(tag), tags, Timing.stale_seconds)
                        )
                case True:
                    _reject_if_active(handle, folder, {})
                    _remove_marker(handle)  # left by a killed process
                    if not _flock(own, fcntl.LOCK_EX):
                        raise _in_use_error(own, folder, tags)
            stack.enter_context(_parse_tag(own))
        yield


@contextmanager
def tagged(tag: Path) -> Iterator[None]:
    """Lock a tag in a folder for the run that has locked the folder.

    Raises:
        OutputError, StorageError: as ``locked``.
    """
    with ExitStack() as stack:
        with storage_errors(tag):
            own = stack.enter_context(_open(SafeDir(tag.parents[1]), tag))
            if _flock(own, fcntl.LOCK_EX) is None:
                stack.enter_context(
                    _lock_softly(own, _lock_marker(tag), tag.parent, Timing.stale_seconds)
                )
            stack.enter_context(_parse_tag(own))
        yield


def process_tag() -> str:
    """Return this process's unique name among all machines, for file names."""
    return f"{_quote_tag(_host())}-{os.getpid()}"


def _quote_tag(host: str) -> str:
    return re.sub(r"[^\w.-]", "_", host, flags=re.ASCII)


def _host() -> str:
    """Return this machine's name. In a container with its own process numbers, add its number.

    Containers often share their machine's name, and each has a process 1.
    """
    machine_namespace = "4026531836"  # the machine's own PID namespace: PROC_PID_INIT_INO in Linux
    name = os.uname().nodename
    number = machine_namespace
    with suppress(OSError):  # not Linux, or without /proc
        number = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return name if number == machine_namespace else f"{name}-{number}"


def tags_in(folder: Path) -> dict[Path, tuple[str, int]]:
    """List the tags in a folder, also of ended processes, each with its host and process."""
    named = ((path, _TAG.fullmatch(path.name)) for path in sorted(folder.glob("work-*.log")))
    return {path: (words["host"], int(words["pid"])) for path, words in named if words}


def is_held(path: Path) -> bool:
    """Return True if a process now owns this tag or lock."""
    with suppress(FileNotFoundError), open_regular_file(path) as handle:
        is_free = _flock(handle, fcntl.LOCK_SH)
        return _lock_marker(path).exists() if is_free is None else not is_free
    return False


def find_run_lock(folder: Path) -> str:
    """Return the name that a folder's current run wrote into the lock, or "" without a run."""
    path = folder / LOCK
    try:
        with open_regular_file(path) as handle:
            name = handle.read().decode(errors="replace").strip()
        return name if name and is_held(path) else ""
    except OSError:  # missing or unreadable lock
        return ""


def _lock_marker(path: Path) -> Path:
    return path.with_name(f"{path.name if path.name == LOCK else f'.{path.name}'}.held")


@contextmanager
def _detect_moves(folder: Path) -> Iterator[None]:
    """Explain errors in a folder that was moved or deleted while in use."""
    descriptor = os.open(folder, os.O_RDONLY)  # keeps its inode number from being reused
    try:
        yield
    except (OSError, VirnucproError) as error:
        if _is_lock_at(descriptor, folder):
            raise
        raise OutputError(
            f"{printable(folder)} was moved or deleted while it was in use",
            hint=with_options(
                "if it was moved, continue there with {resume}; do not move it during a run"
            ),
        ) from error
    finally:
        os.close(descriptor)


@contextmanager
def _heartbeat(file: int | Path) -> Iterator[None]:
    """Renew a file's modification time within the block, to show that its owner is alive."""
    end = Event()

    def beat() -> None:
        while not end.wait(Timing.beat_seconds):
            with suppress(OSError):  # a removed file is reported elsewhere
                os.utime(file)

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _reject_if_active(handle: FileIO, folder: Path, tags: Mapping[Path, tuple[str, int]]) -> None:
    """Reject a folder that another host uses although the lock does not show it here.

    Raises:
        OutputError: a run or ``work`` process on another host is alive.
    """
    handle.seek(0)
    words = _NAME.fullmatch(handle.read().decode(errors="replace"))
    patience: dict[Path, float] = {}
    if words and words[2] != _host():
        patience[folder / LOCK] = Timing.n_watched_beats * Timing.beat_seconds
    for tag, (host, _) in tags.items():
        if host != _quote_tag(_host()):
            patience[tag] = Timing.dead_seconds - _lock_age(tag, handle)
    if living := _find_living(patience):
        holder = tags.get(living)
        owner = f"process {holder[1]} on {holder[0]}" if holder else str(words and words[0].strip())
        raise OutputError(
            f"{printable(owner)} is using {printable(folder)}, and this host cannot see its lock: "
            "on this file system `flock` works only within a host",
            hint="wait until it ends, or stop it; let one host at a time use the folder, or mount "
            "the file system with locks between hosts (Lustre: -o flock; NFS: without local_lock)",
        )


def _find_living(patience: Mapping[Path, float]) -> Path | None:
    """Return the first file that gets a beat within its seconds of patience, if any."""
    if (most := max(patience.values(), default=0.0)) > 0:
        LOGGER.info("waiting up to %.0f s to see if another host still uses this folder", most)
    first_beats = {path: _last_beat(path) for path in patience}
    start = time.monotonic()
    while watched := [p for p, most in patience.items() if time.monotonic() - start < most]:
        for path in watched:
            if _last_beat(path) != first_beats[path]:
                return path
        time.sleep(Timing.beat_seconds / 4)
    return None


def _last_beat(path: Path) -> int:
    """Return when a file was renewed, or 0 if it is missing.

    Opening the file makes NFS ask the server.
    """
    try:
        with open_regular_file(path) as handle:
            return os.fstat(handle.fileno()).st_mtime_ns
    except OSError:
        return 0


def _lock_age(path: Path, handle: FileIO) -> float:
    """Return the seconds since a file was renewed, by its file system's clock.

    Renewing ``handle`` reads that clock.
    """
    os.utime(handle.fileno())
    return (os.fstat(handle.fileno()).st_mtime_ns - _last_beat(path)) / 1e9


@contextmanager
def _parse_tag(own: FileIO) -> Iterator[None]:
    """Keep a tag alive. After an orderly end, it looks dead at once."""
    with _heartbeat(own.fileno()):
        yield
    with suppress(OSError):
        then = os.fstat(own.fileno()).st_mtime - Timing.dead_seconds
        os.utime(own.fileno(), (then, then))


def _open(tree: SafeDir, path: Path, beginning: bytes = b"") -> FileIO:
    """Create or open a lock file. Any content must begin with ``beginning``.

    Raises:
        OSError: the file cannot be opened.
        OutputError: it is a link, not a plain file, or has other content.
    """
    handle = FileIO(path, "a+", opener=tree.make_opener(path))
    if stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.seek(0)
        if handle.read(len(beginning)) in (b"", beginning):
            return handle
    handle.close()
    raise OutputError(
        f"{printable(path)} is not the lock of a run: it is not a plain file, or has other text",
        hint="inspect it, then move it away",
    )


def _flock(handle: FileIO | BinaryIO, kind: int) -> bool | None:
    """Take the kernel's lock.

    Returns:
        False if another process has it, None if the file system has no locks.
    """
    no_flock = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in no_flock:
            raise
        return None
    return True


@contextmanager
def _lock_softly(handle: FileIO, mark: Path, tags: Path, seconds: float) -> Iterator[None]:
    """Own a lock file, which only one process can create, within the block."""
    from filelock import SoftFileLock, Timeout

    lock = SoftFileLock(mark, timeout=seconds, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        if not _is_dead(handle, mark):
            hint = f"if that run is over (this machine cannot see that), delete {printable(mark)}"
            raise _in_use_error(handle, tags.parent, tags, hint) from error
        announce(f"took over {printable(mark)}: its process showed no sign of life")
        SafeDir(mark.parent).delete(mark)
        lock.acquire()
    try:
        with _heartbeat(mark):
            yield
    finally:
        lock.release()


def _is_dead(handle: FileIO, mark: Path) -> bool:
    """Return True if the process on another host that made a mark is dead."""
    if _tag_host(mark) in ("", os.uname().nodename):
        return False  # filelock has checked it, or it is just being created
    shortest = Timing.n_watched_beats * Timing.beat_seconds / 2
    patience = max(Timing.dead_seconds - _lock_age(mark, handle), shortest)
    return _find_living({mark: patience}) is None


def _tag_host(mark: Path) -> str:
    """Return the host that made a mark, which filelock writes into the second line."""
    with suppress(OSError), open_regular_file(mark) as content:
        return content.read().decode(errors="replace").partition("\n")[2].partition("\n")[0]
    return ""


def _remove_marker(handle: FileIO) -> None:
    with suppress(OSError):
        handle.truncate(0)


def _in_use_error(handle: FileIO, folder: Path, tags: Path, *hints: str) -> OutputError:
    named = 3  # maximum number of owners in a message
    moment = 0.02  # seconds between two checks for it
    deadline = time.monotonic() + Timing.owner_name_seconds
    name = ""
    working: list[tuple[str, int]] = []
    while not (name or working) and time.monotonic() < deadline:
        time.sleep(moment)
        handle.seek(0)
        name = handle.read().decode(errors="replace").strip()
        working = [holder for tag, holder in tags_in(tags).items() if is_held(tag)]
    if working:
        names = [f"process {pid} on {host}" for host, pid in working[:named]]
        more = f" and {len(working) - named} more" if len(working) > named else ""
        return OutputError(
            f"`virnucpro work` is using {printable(folder)}: {', '.join(names)}{more}",
            hint=join_texts(
                "; ", ("wait until it ends, or stop it: finished shards are kept", *hints)
            ),
        )
    return OutputError(
        f"another run is using {printable(folder)}: {printable(name or 'an unnamed process')}",
        hint=join_texts(
            "; ", (with_options("wait for it, or choose another {output_dir}"), *hints)
        ),
    )


def _process_name() -> bytes:
    start = time.strftime("%Y-%m-%d %H:%M:%S")
    return _BEGINNING + f"{os.getpid()} on {_host()} since {start}\n".encode()


def _is_lock_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
