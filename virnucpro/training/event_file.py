"""Write figures for TensorBoard into a training folder.

TensorBoard's own writer has a thread, which prints a traceback if the disk is full or the folder
was moved, and recreates a moved folder. Here each figure is written at once, in the calling thread,
and never through a link.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, pr_curve

from virnucpro.core.safe_dir import SafeDir
from virnucpro.training.evaluation.metrics import Samples


class EventFile:
    """A new file of figures. Steps from ``first_step`` on replace those of earlier files.

    Raises:
        OutputError: from any method, if a folder on the path is a link.
        OSError: from any method, with the path, if the file cannot be written.
    """

    def __init__(self, tree: SafeDir, folder: Path, first_step: int) -> None:
        now = time.time()
        # Files are read in name order.
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        tree.make_folder(folder)
        self._out = tree.open(folder / name, "x")
        self._records = RecordWriter(self._out)
        self._write(Event(step=first_step, file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, summary: Summary, step: int | None = None) -> None:
        """Write a summary."""
        self._write(Event(summary=summary, step=step))

    def add_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Write a number."""
        self.add(Summary(value=[Summary.Value(tag=name, simple_value=float(value))]), step)

    def add_options(
        self, options: Mapping[str, bool | float | str], figures: Mapping[str, float]
    ) -> None:
        """Write hyper-parameters with the resulting figures."""
        for summary in hparams(dict(options), dict(figures)):  # type: ignore[no-untyped-call]
            self.add(summary)
        for name, value in figures.items():
            self.add_scalar(name, value)

    def add_precision(self, name: str, samples: Samples) -> None:
        """Write the precision-recall curve."""
        labels = samples.is_virus
        scores = samples.scores
        weights = samples.weights
        self.add(pr_curve(name, labels, scores, weights=weights), 0)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        self._out.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
