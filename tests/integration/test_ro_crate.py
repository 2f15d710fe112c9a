"""A finished run is described as an RO-Crate."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from run_helpers import invoke

CONTIGS = Path(__file__).parents[2] / "examples/contigs.fa"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "results"
    assert invoke("predict", "-i", CONTIGS, "-o", folder, "-q")[0] == 0
    assert invoke("report", folder, "--ro-crate")[0] == 0
    return folder


def test_crate_names_each_output_by_its_hash(run):
    graph = json.loads((run / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    outputs = json.loads((run / "run.json").read_text())["outputs"]
    files = {name: one for name, one in entities.items() if one["@type"] == "File"}
    assert files.keys() == {*outputs, "run.json"}
    for name, digest in outputs.items():
        assert files[name]["sha256"] == digest
    assert [part["@id"] for part in entities["./"]["hasPart"]] == [*files]
    action = entities["#run"]
    (source,) = action["object"]
    digest = hashlib.sha256(CONTIGS.read_bytes()).hexdigest()
    assert entities[source["@id"]]["sha256"] == digest
    assert action["result"] == entities["./"]["hasPart"]
    assert action["name"] == "virnucpro predict"


def test_crate_states_that_the_license_is_open(run):
    graph = json.loads((run / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    license_id = entities["./"]["license"]["@id"]  # RO-Crate 1.1 requires it
    assert entities[license_id]["name"] == "not stated"


def test_crate_is_read_by_rocrate(run):
    rocrate = pytest.importorskip("rocrate.rocrate", reason="part of the dev extra")
    crate = rocrate.ROCrate(run)
    assert crate.get("viruses.tsv").type == "File"
    assert crate.get("#run")["instrument"].id == "#virnucpro"
    assert crate.datePublished.year >= 2024


def test_changed_output_gets_no_crate(run, tmp_path):
    (run / "viruses.tsv").write_text((run / "viruses.tsv").read_text() + "\n")
    code, told = invoke("report", run, "--ro-crate")
    assert code == 65 and "viruses.tsv was changed" in " ".join(told.split())
