"""The figures of every epoch as TensorBoard reads them. Needs the package ``tensorboard``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from virnucpro.ground.files import writing


@dataclass(slots=True)
class Board:
    """A callback for ``Trainer.on_epoch``, which the first rank alone calls.

    The first epoch that is told after a start takes the place of what an earlier start wrote from
    there on, so that a training that goes on has every point once.

    Raises:
        OutputError, StorageError: as ``files.writing``.
    """

    folder: Path
    writer: SummaryWriter | None = None

    def __call__(self, row: dict[str, float]) -> None:
        epoch = int(row["epoch"])
        with writing(self.folder):
            if self.writer is None:
                self.writer = SummaryWriter(str(self.folder), purge_step=epoch)
            for name, value in row.items():
                if name != "epoch":
                    self.writer.add_scalar(name, value, epoch)
            self.writer.flush()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            with writing(self.folder):
                self.writer.close()
