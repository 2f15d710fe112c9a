"""The command that makes a missing file of a run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from virnucpro.store.resume_hint import describe_remedy


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "old"], "-o {root} --resume"),
        (["--output-dir", "old", "--resume"], "--output-dir {root} --resume"),
        (["--output-dir=old"], "--output-dir={root} --resume"),
        (["--force", "-o", "old"], "-o {root} --resume"),
    ],
)
def test_command_names_the_present_folder_and_deletes_nothing(
    tmp_path: Path, words: list[str], expected: str
) -> None:
    argv = ["/usr/bin/virnucpro", "extract", "-i", "a b.faa", *words]
    (tmp_path / "run.json").write_text(json.dumps({"argv": argv}))
    command = f"virnucpro extract -i 'a b.faa' {expected.format(root=tmp_path)}"
    assert describe_remedy(tmp_path).endswith(f"started: {command}")


def test_run_from_python_gets_the_python_call(tmp_path: Path) -> None:
    assert "resume=True" in describe_remedy(tmp_path)
