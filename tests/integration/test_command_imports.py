"""What the processes of a command import, and above all what they do not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import listing_worker
import pytest
from run_helpers import CONTIGS, execute, write_fasta

from virnucpro.engine.local import ProcessExecutor
from virnucpro.workflows.extract_options import ExtractOptions

# without these, the test would not have looked into all processes
IN_PARENT = "virnucpro.workflows.extract"
IN_WORKER = "virnucpro.engine.worker"
IN_PARENT_AND_HELPER = "virnucpro.store.plan"


@pytest.fixture(scope="module")
def imports(tmp_path_factory) -> Counter[str]:
    """How many processes of an extraction import each module of ours.

    Python lists the imports of every process in standard error, because ours pass on ``-X``. The
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
    # pyarrow imports it for arrays from Python objects, if it is installed
    assert "pyarrow" in finished.stderr
    assert "pandas" not in re.findall(r"\|\s+(\w+)$", finished.stderr, re.MULTILINE)


# Modules, and with a full stop packages, that a prediction without a model does not import.
NOT_TO_SCORE = (
    *("torch.", "h5py.", "triton.", "rich.", "Bio.", "pynvml."),
    *("virnucpro.training.", "virnucpro.api", "virnucpro.models.esm2."),
    *("virnucpro.core.helper_processes", "virnucpro.core.child_process", "multiprocessing."),
    *(f"virnucpro.engine.{name}" for name in ("local", "worker", "retry_policy", "event_log")),
    *(f"virnucpro.engine.{name}" for name in ("device_faults", "vector_cache", "resident")),
    *(f"virnucpro.models.{name}" for name in ("base", "checkpoint", "device_choice", "devices")),
    *(f"virnucpro.models.{name}" for name in ("lookup", "nvidia", "output_choice", "registry")),
    *(f"virnucpro.store.{name}" for name in ("merged_features", "vector_index", "hdf5_check")),
    *(f"virnucpro.store.{name}" for name in ("recipe_changes", "manifest_reader", "plan_reader")),
    *(f"virnucpro.viral.{name}" for name in ("head", "head_classifiers", "legacy_head")),
    *(f"virnucpro.workflows.{name}" for name in ("model_config", "predict_model_config")),
    *(f"virnucpro.workflows.{name}" for name in ("frame_predictions", "rethreshold", "extract")),
    *(f"virnucpro.workflows.{name}" for name in ("extend_inputs", "extract_options")),
    *("virnucpro.cli.help_page", "virnucpro.cli.usage_errors", "virnucpro.results.report.cite"),
)
# What only other processes need than a worker.
NOT_TO_EMBED = (
    *("virnucpro.cli.", "virnucpro.workflows.", "virnucpro.results.", "virnucpro.viral."),
    *("virnucpro.training.", "virnucpro.api", "click.", "jinja2.", "rich."),
)


def unwanted(modules: Iterable[str], names: Sequence[str]) -> list[str]:
    """Modules with one of these names, or in one of these packages."""
    return [
        module
        for module in modules
        if module in names or f"{module}.".startswith(tuple(n for n in names if n.endswith(".")))
    ]


def test_unwanted_modules_are_found():
    modules = ["torch", "torch.nn", "torchvision", "virnucpro.viral.head", "virnucpro.viral.types"]
    assert unwanted(modules, NOT_TO_SCORE) == ["torch", "torch.nn", "virnucpro.viral.head"]


def test_scorer_run_imports_no_engine(tmp_path: Path):
    """Nor models, devices, heads, or what resumed runs need."""
    listing = tmp_path / "modules.txt"
    code = (
        "import sys; from virnucpro.cli.main import app; app(sys.argv[2:], standalone_mode=False)"
    )
    at_exit = "import atexit, sys; "
    at_exit += "atexit.register(lambda: open(sys.argv[1], 'w').write('\\n'.join(sys.modules)))"
    words = ["predict", "-i", str(CONTIGS), "-o", str(tmp_path / "run"), "-q"]
    finished = subprocess.run(
        [sys.executable, "-c", f"{at_exit}; {code}", str(listing), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (tmp_path / "run/report.html").exists(), finished.stderr[-2000:]
    modules = listing.read_text().split()
    assert {"virnucpro.workflows.predict", "virnucpro.viral.scoring", "jinja2"} <= {*modules}
    assert not unwanted(modules, NOT_TO_SCORE)


def test_worker_imports_only_the_engine(tmp_path: Path):
    proteins = write_fasta(tmp_path / "proteins.faa", {"one": "MKVLEFPQIA" * 9})
    options = ExtractOptions(
        input=(proteins,),
        output_dir=tmp_path / "run",
        model="virnucpro-tiny",
        device="cpu",
        workers=1,
        report=False,
    )
    execute(
        options,
        lambda _: None,
        lambda devices: ProcessExecutor(devices, listing_worker.ListingWorker),
    )
    modules = (tmp_path / "run" / listing_worker.FILE).read_text().split()
    assert {"virnucpro.engine.worker", "torch"} <= {*modules}
    assert not unwanted(modules, NOT_TO_EMBED)
