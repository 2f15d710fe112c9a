"""What is kept of a training after every epoch, so that it can go on after a kill.

A checkpoint is written by the first rank and read by all. The best epoch is stored a second
time, before its checkpoint: whatever moment a kill comes, the best is at least as new as what
the last checkpoint says of it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from virnucpro.errors import ResumeError
from virnucpro.files import atomic, open_plain, sweep
from virnucpro.log import printable
from virnucpro.training.settings import MAY_DIFFER, Settings

_BEST = "best.pt"
_OTHER = "give the settings that it was started with, or another --output-dir"


@dataclass(slots=True)
class Progressed:
    """How far a training is."""

    epoch: int = 0  # done
    step: int = 0
    best: float = -math.inf
    best_epoch: int = 0  # 0: none was measured
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one training, in a folder of their own."""

    folder: Path
    settings: Settings
    effective_batch: int

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Progressed,
    ) -> None:
        """Atomically, with the settings, and once more if this epoch is the best."""
        content = {
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": asdict(state),
            "settings": {**asdict(self.settings), "effective_batch": self.effective_batch},
        }
        best = [_BEST] if state.best_epoch == state.epoch else []
        self.folder.mkdir(exist_ok=True)
        for name in (*best, f"epoch_{state.epoch:04d}.pt"):
            with atomic(self.folder / name) as temporary:
                try:
                    torch.save(content, temporary)
                except RuntimeError as error:  # so torch says that the disk is full
                    raise OSError(f"{printable(self.folder / name)}: {printable(error)}") from error

    def load_last(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Progressed:
        """How far the training is, with the weights of there; nothing changes if there is none.

        Raises:
            ResumeError: the last checkpoint is damaged, or of another training.
        """
        found = sorted(self.folder.glob("epoch_*.pt"))
        if not found:
            return Progressed()
        content = _read(found[-1])
        now = {**asdict(self.settings), "effective_batch": self.effective_batch}
        if differences := _differences(now, content["settings"]):
            raise ResumeError(
                f"{printable(found[-1])} was trained with other settings: {', '.join(differences)}",
                hint=_OTHER,
            )
        _load_weights(module, content, found[-1])
        optimizer.load_state_dict(content["optimizer"])
        return Progressed(**content["state"])

    def load_best(self, module: nn.Module) -> None:
        """
        Raises:
            ResumeError: the file is missing or damaged.
        """
        path = self.folder / _BEST
        _load_weights(module, _read(path), path)

    def sweep(self) -> None:
        """Delete what a kill left half-written."""
        sweep(self.folder)


def _read(path: Path) -> dict[str, Any]:
    """
    Raises:
        ResumeError: the file is missing, damaged, or no checkpoint.
    """
    try:
        with open_plain(path) as stored:
            content = torch.load(stored, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ResumeError(
            f"{printable(path)} cannot be read: it is damaged, or holds more than tensors",
            hint="delete it: the training goes on from the epoch before",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ResumeError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint="delete it: the training goes on from the epoch before",
        ) from error
    parts = ("module", "optimizer", "state", "settings")
    if not isinstance(content, dict) or not all(part in content for part in parts):
        raise ResumeError(f"{printable(path)} is no checkpoint of a training", hint=_OTHER)
    return content


def _differences(now: Mapping[str, object], stored: Mapping[str, object]) -> list[str]:
    """The settings with which a training could not go on as it began, with both values."""
    return [
        f"{name} ({printable(stored.get(name))}, now {printable(value)})"
        for name, value in now.items()
        if name not in MAY_DIFFER and stored.get(name) != value
    ]


def _load_weights(module: nn.Module, content: dict[str, Any], path: Path) -> None:
    """
    Raises:
        ResumeError: they are those of another network.
    """
    theirs = {name: tensor.shape for name, tensor in content["module"].items()}
    ours = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if differ := sorted(name for name, _ in theirs.items() ^ ours.items()):
        raise ResumeError(
            f"{printable(path)} holds another network: {printable(differ[0])} differs", hint=_OTHER
        )
    module.load_state_dict(content["module"])
