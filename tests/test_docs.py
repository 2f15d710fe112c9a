"""What the documents name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROMISES = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/RELIABILITY.md").read_text())


@pytest.mark.parametrize(("file", "test"), PROMISES)
def test_every_promise_of_reliability_names_a_test_that_is_there(file: str, test: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
