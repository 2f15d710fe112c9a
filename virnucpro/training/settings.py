"""What a training was asked for. It is written beside its results, and a resume must agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from virnucpro.errors import UsageError

Mode = Literal["head", "finetune", "pretrain"]
ScaleLr = Literal["none", "linear", "sqrt"]
ClassWeights = Literal["auto", "none"]

# may differ on resume: no weight of any epoch depends on them
MAY_DIFFER = ("num_workers", "early_stopping", "keep_checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the training loop. Sizes are of one step on one device unless they say more."""

    mode: Mode
    epochs: int = 10
    batch_size: int = 128  # frames on one device
    lr: float = 5e-4
    scale_lr: ScaleLr = "none"
    warmup_epochs: float = 0.1
    grad_accum_steps: int = 1
    weight_decay: float = 0.01
    precision: Literal["bf16", "fp32"] = "fp32"
    num_workers: int = 0
    eval_every: int = 1  # epochs
    early_stopping: int = 0  # evaluations without a better one; 0: never
    keep_checkpoints: int = 1  # of the last epochs, beside the best
    class_weights: ClassWeights = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "grad_accum_steps", "eval_every", "keep_checkpoints"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("num_workers", "early_stopping", "warmup_epochs", "weight_decay", "seed"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        self._check("lr", 0 < self.lr <= 1, "a rate above 0 and at most 1")
        self._check("warmup_epochs", self.warmup_epochs < self.epochs, "fewer than --epochs")

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        """
        Raises:
            UsageError: it is not right; names the option.
        """
        if not is_right:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is {getattr(self, name)}", hint=f"give {allowed}")

    def scaled_lr(self, world_size: int) -> float:
        """The rate for the effective batch (Goyal et al. 2017; Krizhevsky 2014 for the root)."""
        ratio = world_size * self.grad_accum_steps
        factor = {"none": 1.0, "linear": float(ratio), "sqrt": math.sqrt(ratio)}[self.scale_lr]
        return self.lr * factor
