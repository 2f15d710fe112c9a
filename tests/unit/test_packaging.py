"""The recipes for other package managers agree with the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from importlib.metadata import metadata, requires
from pathlib import Path

import click
import make_man
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import virnucpro
from virnucpro.cli.main import app

ROOT = Path(__file__).parents[2]
GALAXY = ROOT / "packaging/galaxy/virnucpro_predict.xml"
CONDA = (ROOT / "packaging/conda/meta.yaml").read_text(encoding="utf-8")
OTHER_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}  # of packages, in conda-forge
VERSIONS = {
    "CITATION.cff": r"^version: (\S+)$",
    "packaging/conda/meta.yaml": r'set version = "(\S+)"',
    "packaging/galaxy/virnucpro_predict.xml": r">(\S+)</token>",
    "examples/nextflow/modules/virnucpro/predict/environment.yml": r"bioconda::virnucpro=(\S+)$",
}


@pytest.mark.parametrize("file", VERSIONS)
def test_every_recipe_has_this_version(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.findall(VERSIONS[file], text, re.MULTILINE) == [virnucpro.__version__]


def test_conda_recipe_has_the_package_requirements() -> None:
    wanted = {
        OTHER_NAMES.get(one.name, one.name): str(one.specifier)
        for one in map(Requirement, requires("virnucpro") or ())
        if "extra" not in str(one.marker)
    }
    wanted["python"] = metadata("virnucpro")["Requires-Python"]
    run = CONDA.partition("  run:\n")[2].partition("\n\n")[0]
    given = dict(re.findall(r"^ +- ([\w.-]+) (\S+)", run, re.MULTILINE))
    assert {canonicalize_name(name): text for name, text in given.items()} == {
        canonicalize_name(name): text for name, text in wanted.items()
    }


def test_conda_recipe_starts_the_same_program() -> None:
    assert "virnucpro = virnucpro.cli.launch:main" in CONDA
    plain = re.sub(r"\{\{.*?\}\}", "x", re.sub(r"\{%.*?%\}", "", CONDA))
    assert yaml.safe_load(plain)["about"]["license"] == "MIT"


def test_galaxy_tool_uses_real_options() -> None:
    tool = ElementTree.parse(GALAXY).getroot()
    command = tool.findtext("command") or ""
    predict = app.get_command(click.Context(app), "predict")
    assert predict is not None
    options = {name for parameter in predict.params for name in parameter.opts}
    options |= {name for parameter in predict.params for name in parameter.secondary_opts}
    named = set(re.findall(r"--[a-z-]+", command)) | {"--regions", "--no-regions"}
    assert named <= options
    made = {data.get("from_work_dir") for data in tool.iter("data")}
    assert {
        "run/viruses.tsv",
        "run/viruses.fasta",
        "run/predictions.tsv",
        "run/report.html",
    } == made


def test_every_command_has_a_manual_page(tmp_path):
    make_man.main(tmp_path)
    pages = {path.name: path for path in tmp_path.iterdir()}
    assert {"virnucpro.1", "virnucpro-predict.1", "virnucpro-models-check.1"} < pages.keys()
    for name, command in make_man.walk("virnucpro", app):
        page = pages[f"{name.replace(' ', '-')}.1"]
        text = page.read_text(encoding="utf-8").replace("\\-", "-")
        options = [name for one in command.params for name in one.opts if name.startswith("-")]
        assert all(option in text for option in options)
    if shutil.which("groff"):
        command = ["groff", "-ww", "-man", "-z", *map(str, pages.values())]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
