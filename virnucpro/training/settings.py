"""What a training was asked for. It is written beside its results, and a resume must agree."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from virnucpro.errors import UsageError

Mode = Literal["head", "finetune", "pretrain"]
ScaleLr = Literal["none", "linear", "sqrt"]

# may differ on resume: they change how fast the same weights come
ONLY_SPEED = ("num_workers", "epochs", "early_stopping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the training loop. Sizes are of one step on one device unless they say more."""

    mode: Mode
    epochs: int = 10
    batch_size: int = 128  # frames on one device
    lr: float = 5e-4
    scale_lr: ScaleLr = "none"
    warmup_epochs: float = 0.5
    grad_accum_steps: int = 1
    weight_decay: float = 0.01
    precision: Literal["bf16", "fp32"] = "fp32"
    num_workers: int = 0
    eval_every: int = 1  # epochs
    early_stopping: int = 0  # evaluations without a better one; 0: never
    balance: Literal["auto", "none"] = "auto"  # of classes and groups
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "grad_accum_steps", "eval_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, under 1")
        for name in ("num_workers", "early_stopping", "warmup_epochs", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, under 0")
        if not 0 < self.lr <= 1:
            raise UsageError(f"--lr is {self.lr}; it must be over 0 and at most 1")

    def scaled_lr(self, world_size: int) -> float:
        """The rate for the effective batch (Goyal et al. 2017; Krizhevsky 2014 for the root)."""
        ratio = world_size * self.grad_accum_steps
        factor = {"none": 1.0, "linear": float(ratio), "sqrt": math.sqrt(ratio)}[self.scale_lr]
        return self.lr * factor

    def agrees_with(self, stored: dict[str, object]) -> list[str]:
        """The names of the settings in which a stored training differs."""
        mine = {k: v for k, v in asdict(self).items() if k not in ONLY_SPEED}
        return [name for name, value in mine.items() if stored.get(name) != value]
