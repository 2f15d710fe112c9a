"""The syntax trees of the package's modules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import virnucpro

ROOT = Path(virnucpro.__file__).parent


def path_of(name: str) -> Path:
    return ROOT / f"{name.replace('.', '/')}.py"


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(path_of(name).read_text(encoding="utf-8"))
