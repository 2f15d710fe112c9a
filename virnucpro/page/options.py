"""The options of ``report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from virnucpro.ground.options import folder


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    folder: Annotated[Path, folder("Folder of a run, a training or an evaluation.")]
