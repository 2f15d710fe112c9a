"""Functions that test processes run. They import no other test module."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import virnucpro
from virnucpro.core.child_process import Pipe


def tell_environment(pipe: Pipe) -> None:
    pipe.send([os.environ[name] for name in ("CUDA_DEVICE_ORDER", "OPENBLAS_NUM_THREADS")])


def tell_package(pipe: Pipe) -> None:
    pipe.send(str(Path(virnucpro.__file__).parent))


def stay(pipe: Pipe) -> None:
    pipe.send("here")
    signal.pause()


def spin(pipe: Pipe) -> None:
    while True:
        pass
