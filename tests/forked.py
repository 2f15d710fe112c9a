"""Processes of ours that start quickly: forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from multiprocessing.connection import Connection

from virnucpro.ground.processes import Pipe, begin

NEEDED = ["torch", "h5py", "virnucpro.engine.local", "workers", "forked"]


class Forked:
    """What a test takes of ``subprocess.Popen``. Not a child of this process, but of the other."""

    def __init__(self, pipe: Pipe) -> None:
        multiprocessing.set_forkserver_preload(NEEDED)
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb")
        context = multiprocessing.get_context("forkserver")
        with Connection(theirs, writable=False) as parents_end:
            self.process = context.Process(target=_begin, args=(pipe, parents_end), daemon=True)
            self.process.start()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float | None = None) -> None:
        self.process.join(seconds)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("forked", seconds or 0.0)

    def kill(self) -> None:
        self.process.kill()


def _begin(pipe: Pipe, parents_end: Connection) -> None:
    os.dup2(parents_end.fileno(), 0)
    parents_end.close()
    begin(os.dup(pipe.fileno()))
