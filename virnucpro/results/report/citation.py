"""The works to cite: for the program, or for what a run used."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from virnucpro._version import __version__

_WORKS = Path(__file__).with_name("assets") / "works.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A paper or a program."""

    role: str  # what it contributes to a result
    text: str  # one line for a list of references
    bibtex: str
    families: Sequence[str] = ()  # encoder families that require it; empty: every result


@cache
def all_works(version: str = __version__) -> tuple[Work, ...]:
    """Return all works: first this program, in this version, and last those of model families."""
    from virnucpro.models.registry import FAMILIES

    files = [family.works for family in FAMILIES.values() if family.works]
    return tuple(_read_works([_WORKS, *files], version))


def select_works(families: Collection[str], version: str = __version__) -> list[Work]:
    """Return the works to cite for a result from these encoder families, or the scorer alone."""
    works = all_works(version) if families else _read_works([_WORKS], version)
    return [work for work in works if not work.families or {*families} & {*work.families}]


def _read_works(files: Sequence[Path], version: str) -> list[Work]:
    works: list[Work] = []
    for file in files:
        text = file.read_text(encoding="utf-8").replace("{version}", version)
        for facts in json.loads(text):
            works.append(Work(**{**facts, "bibtex": "\n".join(facts["bibtex"])}))
    return works
