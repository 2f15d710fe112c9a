"""Test HDF5 with the connector named in ``HDF5_VOL_CONNECTOR``.

HDF5 stores its objects through a connector. If it cannot load the named one, it prints some fifty
lines and crashes at the first file, in every process. So it is tested once, in a separate process,
before a run begins.
"""

from __future__ import annotations

import os

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.store.hdf5_layout import SparseFile, new_hdf5_in


def check_connector(name: str | None) -> None:
    """Check that HDF5 works with a connector. Without a name, HDF5's own connector always works.

    Raises:
        UnavailableError: the connector does not work.
    """
    if not name:
        return
    with defer_interrupts():
        child = start_process(try_hdf5)
    try:
        outcome = child.pipe.recv()
        reason = outcome.reason if isinstance(outcome, ChildError) else ""
    except (EOFError, OSError):
        reason = child.exit_reason()
    finally:
        ChildProcess.kill_all([child])
    if reason:
        raise UnavailableError(
            f"HDF5 does not work with the connector of HDF5_VOL_CONNECTOR={printable(name)}: "
            f"{printable(reason)}",
            hint="run `unset HDF5_VOL_CONNECTOR`, or name the folder of the connector in "
            "HDF5_PLUGIN_PATH",
        )


def try_hdf5(pipe: Pipe) -> None:
    """Lay out a file in memory, as feature files are. HDF5's own messages are dropped."""
    stderr = 2
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), stderr)
    with new_hdf5_in(SparseFile()) as h5:
        h5.create_dataset("numbers", data=[1.0])
    pipe.send(None)
