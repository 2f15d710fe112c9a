"""The example notebooks run from top to bottom, on a CPU and without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = {  # what each notebook prints
    "embeddings": ("16 proteins, 128 numbers each", "NP_290619.1"),
    "viruses": ("8 viruses in 16 records", "Coronaviridae"),
}


@pytest.mark.parametrize("name", sorted(WORDS))
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("contigs.fa", "proteins.faa"):
        shutil.copy(EXAMPLES / file, tmp_path)
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    for words in WORDS[name]:
        assert words in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_notebook_has_no_outputs(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
