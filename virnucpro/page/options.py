"""The options of ``report`` and ``cite``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from virnucpro.ground.options import folder, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    folder: Annotated[Path, folder("Folder of a run, a training or an evaluation.")]


@dataclass(frozen=True, kw_only=True)
class CiteOptions:
    bibtex: Annotated[bool, option("Print BibTeX entries only.")] = False
