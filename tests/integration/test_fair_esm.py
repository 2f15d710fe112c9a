"""fair-esm is found by its distribution, even if another package is called ``esm``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from pathlib import Path

import esm
import pytest
import torch
from fair_esm_reference import fair_esm_hidden, make_fair_esm

from virnucpro.core.errors import UnavailableError
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.validation.fair_esm import (
    find_distribution,
    find_modules,
    load_fair_esm,
    load_modules,
)

PROGRAM = Path(sysconfig.get_path("scripts")) / "virnucpro"
SHAPE = ESM2Shape(n_layers=2, dim=32, n_heads=2)
OTHER_ESM = "__version__ = '3.2.1'\n"  # as the distribution `esm` has it


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with fair-esm, over which the distribution ``esm`` was installed."""
    installed = distribution("fair-esm")
    for file in installed.files or ():
        if file.suffix in (".py", "") and ".." not in file.parts:
            copy = tmp_path / "site" / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed.locate_file(file), copy)
    for name in ("__init__", "pretrained"):
        (tmp_path / "site" / "esm" / f"{name}.py").write_text(OTHER_ESM)
    return tmp_path / "site"


def found_in(site: Path) -> Distribution:
    return find_distribution([str(site)])


def test_model_beside_another_esm_is_the_published(site):
    before = {name: module for name, module in sys.modules.items() if name.startswith("esm")}
    loaded = load_modules(find_modules(found_in(site)))
    assert loaded.esm2 is not esm.ESM2
    expected = make_fair_esm(SHAPE)
    model = loaded.esm2(SHAPE.n_layers, SHAPE.dim, SHAPE.n_heads).eval()
    model.load_state_dict(expected.state_dict())
    proteins = ["MKTAYIAK", "MXJ"]
    for layer in (0, SHAPE.n_layers):
        ours, theirs = (fair_esm_hidden(one, proteins, layer) for one in (model, expected))
        assert all(map(torch.equal, ours, theirs))
    after = {name: module for name, module in sys.modules.items() if name.startswith("esm")}
    assert after == before and sys.modules["esm"] is esm


def test_fair_esm_is_loaded_once():
    assert load_fair_esm() is load_fair_esm()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("data.py", "", "another package has replaced esm/data.py"),
        ("model/esm2.py", None, "esm/model/esm2.py is missing"),
    ],
)
def test_changed_or_missing_file_is_named(site, name, content, reason):
    if content is None:
        (site / "esm" / name).unlink()
    else:
        (site / "esm" / name).write_text(content)
    with pytest.raises(UnavailableError, match=reason) as caught:
        find_modules(found_in(site))
    assert "pip install --force-reinstall --no-deps fair-esm==2.0.0" in caught.value.hint


def test_missing_fair_esm_is_named(tmp_path):
    with pytest.raises(UnavailableError, match="is not installed") as caught:
        found_in(tmp_path)
    assert caught.value.hint == "pip install fair-esm==2.0.0"


def test_module_that_fails_is_named(site):
    paths = find_modules(found_in(site))
    paths["modules"].write_text("import no_such_module\n")
    with pytest.raises(UnavailableError, match=r"modules\.py cannot be imported: No module"):
        load_modules(paths)
    assert sys.modules["esm"] is esm


def test_check_passes_beside_another_esm(site, tiny):
    answer = subprocess.run(
        [PROGRAM, "models", "check", tiny.model, "--device", "cpu", "--precision", "fp32"],
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert "passed" in answer.stdout
