"""The settings of a training loop. They are written beside its results, and a resume must agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from virnucpro.callers.head import Head, load_head
from virnucpro.ground.errors import UnavailableError
from virnucpro.learning.options import LoopOptions, Mode

HEAD_FILE = "head.safetensors"  # beside the encoder, if that was trained too


@dataclass(frozen=True, kw_only=True)
class Settings(LoopOptions):
    """The options of the loop, and what was chosen for it."""

    mode: Mode
    precision: Literal["bf16", "fp32"]

    def scaled_lr(self, world_size: int) -> float:
        """The rate for the effective batch (Goyal et al. 2017; Krizhevsky 2014 for the root)."""
        ratio = world_size * self.grad_accum_steps
        factor = {"none": 1.0, "linear": float(ratio), "sqrt": math.sqrt(ratio)}[self.scale_lr]
        return self.lr * factor


def head_beside(encoder: Path | None) -> Head | None:
    """The head beside an encoder, as ``train`` leaves one: it knows what both were trained on.

    Raises:
        UnavailableError: it is damaged, or of an older version.
    """
    if encoder is None or not (path := encoder.with_name(HEAD_FILE)).is_file():
        return None
    try:
        return load_head(path)
    except UnavailableError as error:
        raise UnavailableError(
            f"{error}; it lies beside the encoder, and would say what that was trained on",
            hint="move it away if it is none, or start from a copy of the encoder elsewhere",
        ) from error
