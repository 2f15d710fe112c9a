"""An extraction imports nothing from the classifier, in any of its processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from run_helpers import write_fasta

# without these, the test would not have looked into all processes
IN_PARENT = "virnucpro.workflows.extract"
IN_WORKER = "virnucpro.engine.worker"
IN_PARENT_AND_HELPER = "virnucpro.store.plan"


@pytest.fixture(scope="module")
def imports(tmp_path_factory) -> Counter[str]:
    """Count the processes of an extraction that import each of our modules.

    Python lists the imports of every process in stderr, because our processes pass on ``-X``. The
    input is large enough for a helper (six workers on a CPU have one), and all but one of its
    proteins are too short to embed.
    """
    folder = tmp_path_factory.mktemp("imports")
    records = {f"short{number}": "MKVLEFPQIA" * 100 for number in range(2_100)}
    proteins = write_fasta(folder / "proteins.faa", {**records, "long": "MKVLEFPQIA" * 110})
    words = ("-X", "importtime", "-m", "virnucpro", "extract", "-i", str(proteins))
    words += ("-o", str(folder / "run"), "--min-length", "1050")
    words += ("--model", "esm2_virnucpro", "--device", "cpu", "--workers", "6")
    finished = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 0, finished.stdout
    assert len((folder / "run/records.tsv").read_text().splitlines()) == 2_102
    assert (folder / "run/report.html").exists()
    names = re.findall(r"^import time:.*\|\s+(virnucpro[\w.]*)$", finished.stderr, re.MULTILINE)
    return Counter(names)


def test_extract_imports_no_classifier(imports):
    assert imports[IN_PARENT] == 1
    assert imports[IN_WORKER] >= 1
    assert imports[IN_PARENT_AND_HELPER] == 2
    assert not [name for name in imports if name.startswith("virnucpro.viral")]


def test_page_is_imported_only_if_written(tmp_path: Path):
    proteins = write_fasta(tmp_path / "proteins.faa", {"one": "MKVLEFPQIA" * 9})
    code = (
        "import sys; from virnucpro.cli.main import app; app(sys.argv[1:], standalone_mode=False)"
    )
    words = ["extract", "-i", str(proteins), "-o", str(tmp_path / "run"), "--no-report", "-q"]
    words += ["--model", "esm2_virnucpro", "--device", "cpu", "--workers", "1"]
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (tmp_path / "run/records.tsv").exists(), finished.stderr[-2000:]
    assert IN_PARENT in finished.stderr
    assert "virnucpro.results.report" not in finished.stderr
    assert "jinja2" not in finished.stderr
