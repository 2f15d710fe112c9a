"""Checkpoints of a training after every epoch, so that it can go on after a kill.

A checkpoint is written by the first rank and read by all; it holds whole tensors, also of weights
that are cut over the ranks, so that another number of them can read it. The best epoch is stored a
second time, before its checkpoint: whatever moment a kill comes, the best is at least as new as
what the last checkpoint says of it. Those of older epochs are deleted when the new one is there.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from virnucpro.ground.errors import ResumeError
from virnucpro.ground.files import open_plain
from virnucpro.ground.log import printable
from virnucpro.ground.tree import Tree

_BEST = "best.pt"
_EPOCH = re.compile(r"epoch_(\d{4,})\.pt")
_OTHER = "give the settings that it was started with, or another --output-dir"


@dataclass(slots=True)
class Progressed:
    """The progress of a training."""

    epoch: int = 0  # done
    step: int = 0
    best: float = -math.inf
    best_epoch: int = 0  # 0: none was measured
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one training, in a folder of their own."""

    folder: Path
    n_kept: int  # of the last epochs, beside the best

    def save(self, content: Mapping[str, object], state: Progressed) -> None:
        """Write a ``snapshot`` atomically, and once more if this epoch is the best.

        Raises:
            OutputError, StorageError: as ``files.writing``.
        """
        best = [_BEST] if state.best_epoch == state.epoch else []
        tree = Tree(self.folder.parent)
        tree.make_folder(self.folder)
        for name in (*best, f"epoch_{state.epoch:04d}.pt"):
            with tree.replacing(self.folder / name) as out:
                _write(content, out)
        for outdated in self._epochs()[: -self.n_kept]:
            tree.delete(outdated)

    def load_last(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
    ) -> Progressed:
        """Load the last checkpoint, if any, and return its state.

        Raises:
            ResumeError: the last checkpoint is damaged, or of another training.
        """
        last = next(reversed(self._epochs()), self.folder / _BEST)
        if not last.exists():
            return Progressed()
        content = _read(last)
        _load_weights(module, content, last)
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for number, moments in content["optimizer"]["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = _cut_as(weights[number], moments[name])
        optimizer.load_state_dict(content["optimizer"])
        if "scaler" in content:
            scaler.load_state_dict(content["scaler"])
        return Progressed(**content["state"])

    def load_best(self, module: nn.Module) -> None:
        """
        Raises:
            ResumeError: the file is missing or damaged.
        """
        path = self.folder / _BEST
        _load_weights(module, _read(path), path)

    def _epochs(self) -> list[Path]:
        """The checkpoints of epochs, in their order; a file with another name is not ours."""
        numbers = {path: _EPOCH.fullmatch(path.name) for path in self.folder.glob("epoch_*.pt")}
        epochs = {path: int(match[1]) for path, match in numbers.items() if match}
        return sorted(epochs, key=lambda path: epochs[path])

    def sweep(self) -> None:
        """Delete what a kill left half-written."""
        Tree(self.folder.parent).sweep_folder(self.folder)


def snapshot(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    state: Progressed,
) -> dict[str, object]:
    """The content of a checkpoint. All ranks ask for it together."""
    content = {
        "module": _learned(module),
        "optimizer": optimizer.state_dict(),
        "state": asdict(state),
    }
    if scaler.is_enabled():
        content["scaler"] = scaler.state_dict()
    return tree_map(_on_the_host, content)  # type: ignore[no-any-return]


def _on_the_host(value: object) -> object:
    """A part of a tensor becomes the whole, in the memory of the host; all else stays."""
    return whole(value).cpu() if isinstance(value, DTensor) else value


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be cut over the ranks, which all ask for it."""
    if not isinstance(tensor, DTensor):
        return tensor
    joined: Tensor = tensor.full_tensor()
    return joined


def _cut_as(like: Tensor, tensor: Tensor) -> Tensor:
    """The rank's part of a whole tensor, if such weights are cut."""
    if not isinstance(like, DTensor):
        return tensor
    there = tensor.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


def _learned(module: nn.Module) -> dict[str, Tensor]:
    """The state without the weights that are not trained: they are those of ``--model``."""
    frozen = {name for name, weight in module.named_parameters() if not weight.requires_grad}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def _write(content: Mapping[str, object], out: BinaryIO) -> None:
    """Write into a file of Python, whose errors say what the disk refuses.

    torch does not say it of a file of its own, and its error at the end hides that of Python's.
    """
    try:
        torch.save(content, out)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _read(path: Path) -> dict[str, Any]:
    """
    Raises:
        ResumeError: the file is missing, damaged, or no checkpoint.
    """
    hint = "delete it: the training goes on from the checkpoint before, or else from the best"
    if path.name == _BEST:
        hint = "nothing else holds these weights: train again, in another --output-dir"
    try:
        with open_plain(path) as stored:
            content = torch.load(stored, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ResumeError(
            f"{printable(path)} cannot be read: it is damaged, or holds more than tensors",
            hint=hint,
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ResumeError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint=hint,
        ) from error
    parts = ("module", "optimizer", "state")
    if not isinstance(content, dict) or not all(part in content for part in parts):
        raise ResumeError(f"{printable(path)} is not a checkpoint of a training", hint=_OTHER)
    return content


def _load_weights(module: nn.Module, content: dict[str, Any], path: Path) -> None:
    """
    Raises:
        ResumeError: they are those of another network.
    """
    theirs = {name: tensor.shape for name, tensor in content["module"].items()}
    own = _learned(module)
    ours = {name: tensor.shape for name, tensor in own.items()}
    if differ := sorted(name for name, _ in theirs.items() ^ ours.items()):
        raise ResumeError(
            f"{printable(path)} holds another network: {printable(differ[0])} differs", hint=_OTHER
        )
    loaded = {name: _cut_as(own[name], tensor) for name, tensor in content["module"].items()}
    module.load_state_dict(loaded, strict=False)  # what is frozen is there
