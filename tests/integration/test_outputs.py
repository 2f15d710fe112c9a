"""``extract`` with several outputs: its files, resume, cache, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import TINY
from fair_esm_reference import make_fair_esm, random_protein, save_contact_head, save_fair_esm
from pyarrow import parquet
from run_helpers import invoke, write_fasta

import virnucpro
from virnucpro.core.errors import ResumeError, UsageError
from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.base import load_encoder
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.output_choice import OutputChoice, choose_outputs

PROTEINS = {f"p{i}": random_protein(20 + i, i) for i in range(6)} | {"copy": random_protein(20, 0)}
PROTEINS |= {"masked": "MKV<mask>LEF<mask>"}
CHOSEN: dict[str, Any] = {
    "layers": [1, -1],
    "pooling": ["mean", "std", "none"],
    "include": "contacts,logits,perplexity",
}
ON_CPU: dict[str, Any] = {"device": "cpu", "workers": 1, "precision": "fp32", "report": False}
Arrays = dict[str, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    module = make_fair_esm(TINY)
    save_contact_head(module, folder / "tiny-contact-regression.pt")
    return save_fair_esm(module, folder / "tiny.pt")


def extract(model: Path, folder: Path, **options: Any) -> virnucpro.Extraction:
    return virnucpro.extract(
        PROTEINS, output_dir=folder, model=str(model), **ON_CPU, **({**CHOSEN, **options})
    )


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    return extract(model, tmp_path_factory.mktemp("run") / "run").folder


def specification(model: Path) -> EncoderSpec:
    choice = OutputChoice(
        ("1", "-1"), ("mean", "std", "none"), ("contacts", "logits", "perplexity")
    )
    opened = inspect_esm2(model)
    outputs = choose_outputs(choice, opened, "float32")._asdict()
    return opened.spec(sha256="", precision="fp32", **outputs)


def stored(folder: Path, spec: EncoderSpec) -> Arrays:
    """Return the rows in the feature files, by output and protein."""
    arrays: Arrays = {output.name: {} for output in spec.outputs}
    for path in sorted((folder / "features").glob("*.h5")):
        with h5py.File(path) as h5:
            ids = h5["ids"].asstr()[:]
            lengths = h5["lengths"][:]
            for output in spec.outputs:
                values = h5[output.name][:]
                assert values.shape == output.shape(lengths)
                parts = np.split(values, np.cumsum(output.count_rows(lengths))[:-1])
                arrays[output.name] |= dict(zip(ids, parts, strict=True))
            assert np.array_equal(h5["embeddings"][:], h5["mean_layer2"][:])
    return arrays


def assert_same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for output, by_protein in one.items():
        assert by_protein.keys() == other[output].keys()
        for protein, rows in by_protein.items():
            assert rows.tobytes() == other[output][protein].tobytes(), (output, protein)


def test_files_have_every_output_by_id(model, finished):
    """Vectors equal those of the encoder, and a copy has the rows of its original."""
    spec = specification(model)
    arrays = stored(finished, spec)
    encoder = load_encoder(spec, model, torch.device("cpu"))
    for output in spec.outputs:
        assert arrays[output.name].keys() == PROTEINS.keys()
        assert np.array_equal(arrays[output.name]["copy"], arrays[output.name]["p0"])
    for protein in ("p3", "masked"):
        text = PROTEINS[protein].replace("<mask>", "\x01")
        expected = encoder.start([text]).outputs()
        for output, rows in zip(spec.outputs, expected, strict=True):
            found = arrays[output.name][protein].reshape(rows.shape)
            assert np.allclose(found, rows, rtol=1e-4, atol=1e-5), (output.name, protein)


def test_readers_give_any_output(finished, model):
    arrays = stored(finished, specification(model))
    assert dict(virnucpro.read_features(finished)).keys() == PROTEINS.keys()
    for output in ("mean_layer2", "std_layer1", "residues_layer1", "contacts", "perplexity"):
        for protein, rows in virnucpro.read_features(finished, output=output):
            assert np.array_equal(rows.ravel(), arrays[output][protein].ravel())
            if output == "contacts":
                assert rows.shape == 2 * (len(PROTEINS[protein].replace("<mask>", "X")),)
    with pytest.raises(UsageError, match="has no output max_layer1") as refusal:
        list(virnucpro.read_features(finished, output="max_layer1"))
    assert "mean_layer1, " in refusal.value.hint


def test_one_output_has_the_usual_files(model, tmp_path):
    """Only the requested rows, under their usual name."""
    folder = extract(model, tmp_path / "run", layers=(), pooling=(), include=()).folder
    with h5py.File(folder / "features/000000.h5") as h5:
        assert set(h5) == {"ids", "lengths", "embeddings", "failed"}
        assert "output" not in h5.attrs


def test_resume_after_an_interrupt_keeps_every_output(model, finished, tmp_path):
    class InterruptError(Exception):
        pass

    def interrupt(progress: object) -> None:
        if getattr(progress, "stage", "") == "embedding" and getattr(progress, "done", 0) >= 1:
            raise InterruptError

    with pytest.raises(InterruptError):
        extract(model, tmp_path / "run", on_progress=interrupt)
    folder = extract(model, tmp_path / "run", resume=True).folder
    spec = specification(model)
    assert_same(stored(folder, spec), stored(finished, spec))


@pytest.mark.parametrize(
    ("changes", "now"),
    [
        ({"layers": "-1"}, "now mean_layer2, std_layer2, residues_layer2, contacts"),
        ({"pooling": "mean"}, "now mean_layer2, mean_layer1, contacts"),
        ({"include": ()}, "residues_layer2$"),
    ],
)
def test_run_with_other_outputs_is_refused(model, finished, changes, now):
    with pytest.raises(ResumeError, match=f"the outputs were mean_layer2, .*{now}"):
        extract(model, finished, resume=True, **changes)


def test_cache_has_outputs_with_one_row(model, tmp_path):
    options = {"pooling": ["mean", "max"], "include": "perplexity", "cache": tmp_path / "cache"}
    folders = [extract(model, tmp_path / name, **options).folder for name in ("one", "other")]
    packs = list((tmp_path / "cache").glob("*.pack"))
    counts = json.loads((folders[1] / "run.json").read_text())["counts"]
    assert packs and counts["n_cached"] == len(PROTEINS) - 1  # without the copy
    with (
        h5py.File(folders[0] / "features/000000.h5") as one,
        h5py.File(folders[1] / "features/000000.h5") as other,
    ):
        for name in ("mean_layer1", "max_layer2", "perplexity"):
            assert one[name][:].tobytes() == other[name][:].tobytes()


@pytest.mark.parametrize("include", ["contacts", "logits"])
def test_cache_refuses_more_rows(model, tmp_path, include):
    with pytest.raises(UsageError, match="a cache has one row per sequence"):
        extract(model, tmp_path / "run", pooling="mean", include=include, cache=tmp_path)


def test_exports_have_every_output(model, tmp_path):
    folder = extract(model, tmp_path / "npz", format="npz").folder
    with np.load(folder / "features/000000.npz") as arrays:
        assert {"mean_layer1", "residues_layer2", "contacts", "perplexity"} <= set(arrays)
    folder = extract(model, tmp_path / "parquet", format="parquet").folder
    table = parquet.read_table(folder / "features/000000.parquet")
    row = table.slice(0, 1).to_pylist()[0]
    assert len(row["contacts"]) == row["length"] ** 2
    assert np.shape(row["residues_layer1"]) == (row["length"], TINY.dim)
    assert isinstance(row["perplexity"], float)
    with pytest.raises(UsageError, match="format"):
        extract(model, tmp_path / "pt", format="pt")


def test_repeated_layer_option_keeps_both(model, tmp_path):
    """--layer 2 --layer 1 once silently kept the last one."""
    fasta = write_fasta(tmp_path / "p.faa", {"p": PROTEINS["p1"]})
    words = ["extract", "-i", fasta, "-o", tmp_path / "run", "--model", model, "--plan-only"]
    words += ["--precision", "fp32", "--layer", "2", "--layer", "1"]
    exit_code, text = invoke(*words)
    assert exit_code == 0, text
    text = (tmp_path / "run/run.json").read_text()
    assert "mean_layer1" in text


@pytest.mark.parametrize("several", [{"pooling": ["mean", "max"]}, {"layer": "1,2"}])
def test_embed_refuses_several_outputs(model, several):
    with pytest.raises(UsageError, match="embed gives one vector per protein") as refusal:
        virnucpro.embed(["MKV"], str(model), **several)
    assert "use extract" in refusal.value.hint


def test_mask_in_predict_is_invalid(tmp_path):
    protein = random_protein(80)
    (call,) = virnucpro.predict({"p": f"{protein}<mask>{protein}"})
    assert call.status == "invalid" and "<mask>" in call.note


def test_every_output_is_opened_by_name(finished):
    run = virnucpro.open(finished)
    assert run.outputs == virnucpro.Extraction(finished).outputs
    for name in run.outputs:
        output = run.output(name)
        expected = dict(virnucpro.read_features(finished, output=name))
        assert list(output.ids) == list(PROTEINS)
        for orf_id, rows in output.items():
            assert rows.shape == expected[orf_id].shape and np.array_equal(rows, expected[orf_id])
            assert np.array_equal(output[orf_id], rows)
