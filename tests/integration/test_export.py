"""``virnucpro export``: the library of each layout reads it back."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import polars
import pytest
import torch
from numpy.typing import NDArray
from run_helpers import flip_bit, invoke, leftovers
from safetensors import safe_open

import virnucpro
from virnucpro.core.safe_dir import SafeDir
from virnucpro.store.export_formats import FORMATS, ExportSource, write_safetensors

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

SEQUENCES = {
    "P12345": "MKVLAAGITGDEFWY",
    "sp|Q9|X": "MSTNPKPQR",
    "../a/b%2F": "MKVLAAGITGDEFWY",  # a copy, whose id would be a path
    ".": "MEEPQSDPSVEPPLSQETF",
    "caf\u00e9": "MGGGWWWHHHCCC",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "mean": {},
        "short": {"store": "bfloat16"},
        "residues": {"pooling": "none", "store": "bfloat16"},
    }
    for name, options in settings.items():
        output = folder / name
        virnucpro.extract(
            SEQUENCES,
            output_dir=output,
            model="virnucpro-tiny",
            device="cpu",
            report=False,
            **options,
        )
    return {name: folder / name for name in settings}


@pytest.fixture(params=["mean", "short", "residues"])
def run(runs, request) -> Path:
    return runs[request.param]


def export(run: Path, layout: str, path: Path) -> Path:
    code, shown = invoke("export", run, "--format", layout, "-o", path)
    assert code == 0, shown
    assert f"{path} has 5 vectors" in shown
    assert not leftovers(path.parent)
    return path


def check(found: dict[str, NDArray[np.float32]], run: Path) -> None:
    """Check that each id has the vector of the run, to the last bit."""
    expected = dict(virnucpro.open(run).items())
    assert list(found) == list(expected) == list(SEQUENCES)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_uniprot_h5_has_a_dataset_per_protein(run, tmp_path):
    with h5py.File(export(run, "uniprot-h5", tmp_path / "x.h5")) as h5:
        assert h5.attrs["model_name"] == "virnucpro-tiny"
        assert {"P12345", "sp|Q9|X", "..%2Fa%2Fb%252F", "%2E"} < set(h5)
        found = {item.attrs["original_id"]: item[:] for item in h5.values()}
    check({name: found[name] for name in SEQUENCES}, run)


def test_biotrainer_reads_uniprot_h5(run, tmp_path):
    service = pytest.importorskip(
        "biotrainer.embedders.services.embedding_service", reason="biotrainer is not installed"
    )
    found = service.EmbeddingService.load_embeddings(
        str(export(run, "uniprot-h5", tmp_path / "x.h5"))
    )
    assert np.array_equal(found["P12345"].numpy(), virnucpro.open(run)["P12345"])


def test_protspace_reads_uniprot_h5(runs, tmp_path):
    loader = pytest.importorskip("protspace.data.loaders.h5", reason="protspace is not installed")
    found = loader.load_h5([export(runs["mean"], "uniprot-h5", tmp_path / "x.h5")])
    row = list(found.headers).index("P12345")
    assert np.array_equal(found.data[row], virnucpro.open(runs["mean"])["P12345"])


def export_parts(run: Path, folder: Path, part_bytes: int) -> Path:
    source = ExportSource(
        vectors=virnucpro.open(run), read_sequences=lambda: iter(()), on_vectors=lambda _: None
    )
    write_safetensors(source, SafeDir(folder.parent), folder, part_bytes)
    return folder


@pytest.mark.parametrize("part_bytes", [1, 3000, 1 << 28])
def test_safetensors_parts_are_found_by_the_index(run, tmp_path, part_bytes):
    folder = export_parts(run, tmp_path / "parts", part_bytes)
    found: dict[str, NDArray[np.float32]] = {}
    is_whole = run.name != "residues"
    for row in polars.read_parquet(folder / "index.parquet").iter_rows(named=True):
        with safe_open(folder / row["part"], "pt") as part:
            rows = part.get_tensor("embeddings")
        assert (rows.dtype == torch.bfloat16) == (run.name != "mean")
        n_rows = 1 if is_whole else row["length"]
        block = rows[row["row"] : row["row"] + n_rows].float().numpy()
        found[row["id"]] = block[0] if is_whole else block
    check(found, run)


def test_safetensors_parts_have_equal_size(runs, tmp_path):
    folder = export_parts(runs["mean"], tmp_path / "x", part_bytes=2 * 4 * 128)
    sizes = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as part:
            sizes.append(len(part.get_tensor("embeddings")))
    assert sizes == [2, 2, 1]


def test_parquet_is_read_by_polars(run, tmp_path):
    table = polars.read_parquet(export(run, "parquet", tmp_path / "x.parquet"))
    rows = [np.array(row, np.float32) for row in table["embedding"].to_list()]
    check(dict(zip(table["id"].to_list(), rows, strict=True)), run)
    assert table["length"].to_list() == list(map(len, SEQUENCES.values()))


def test_parquet_is_read_by_datasets(runs, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    path = export(runs["mean"], "parquet", tmp_path / "x.parquet")
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    rows = rows.with_format("numpy")
    check(dict(zip(rows["id"], rows["embedding"], strict=True)), runs["mean"])


def test_anndata_is_read_by_anndata(runs, tmp_path):
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    found = anndata.read_h5ad(export(runs["short"], "anndata", tmp_path / "x.h5ad"))
    check(dict(zip(found.obs_names, found.X, strict=True)), runs["short"])
    assert found.obs["length"].tolist() == list(map(len, SEQUENCES.values()))
    assert found.uns["model_name"] == "virnucpro-tiny" and found.n_vars == 128


@pytest.mark.parametrize("name", ["mean", "residues"])
def test_skbio_is_read_by_scikit_bio(runs, tmp_path, name):
    skbio = pytest.importorskip("skbio", reason="scikit-bio is not installed")
    embedding = pytest.importorskip("skbio.embedding")
    path = export(runs[name], "skbio", tmp_path / "x.h5")
    kind = embedding.ProteinVector if name == "mean" else embedding.ProteinEmbedding
    found = list(skbio.read(str(path), format="embed", constructor=kind))
    expected = virnucpro.open(runs[name])
    assert [str(item) for item in found] == list(SEQUENCES.values())
    for item, vector in zip(found, expected, strict=True):
        assert np.array_equal(np.squeeze(item.embedding), vector)


def test_npz_is_read_by_numpy(runs, tmp_path):
    with np.load(export(runs["short"], "npz", tmp_path / "x.npz")) as found:
        assert found["lengths"].tolist() == list(map(len, SEQUENCES.values()))
        check(dict(zip(found["ids"].tolist(), found["embeddings"], strict=True)), runs["short"])


def test_pt_is_read_by_torch(run, tmp_path):
    found = torch.load(export(run, "pt", tmp_path / "x.pt"), weights_only=True)
    rows = [tensor.numpy() for tensor in found["data"]]
    check(dict(zip(found["proteins"], rows, strict=True)), run)


@pytest.mark.parametrize("layout", list(FORMATS))
def test_same_run_gives_the_same_bytes(runs, tmp_path, layout):
    paths = [export(runs["mean"], layout, tmp_path / name) for name in ("one", "two")]
    files = [
        {path.name: path.read_bytes() for path in sorted(root.iterdir())}
        if root.is_dir()
        else {"": root.read_bytes()}
        for root in paths
    ]
    assert files[0] == files[1]


# Refusals


@pytest.mark.parametrize("layout", ["anndata", "npz"])
def test_layout_without_residues_refuses_them(runs, tmp_path, layout):
    code, shown = invoke("export", runs["residues"], "--format", layout, "-o", tmp_path / "x")
    assert code == 64 and "which is per residue" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["npz", "safetensors"])
def test_existing_output_is_replaced_only_by_force(runs, tmp_path, layout):
    path = export(runs["mean"], layout, tmp_path / "x")
    code, shown = invoke("export", runs["mean"], "--format", layout, "-o", path)
    assert code == 73 and "--force" in shown
    assert invoke("export", runs["mean"], "--format", layout, "-o", path, "--force")[0] == 0


def test_force_keeps_a_folder_with_other_files(runs, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/thesis.txt").write_text("mine")
    words = ("export", runs["mean"], "--format", "safetensors", "-o", tmp_path / "x", "--force")
    code, shown = invoke(*words)
    assert code == 73 and "not from an export" in shown
    assert (tmp_path / "x/thesis.txt").read_text() == "mine"


def test_output_in_the_run_folder_is_refused(runs):
    path = runs["mean"] / "features/x.npz"
    code, shown = invoke("export", runs["mean"], "--format", "npz", "-o", path)
    assert code == 64 and "in the run folder" in shown and not path.exists()


def test_default_output_is_next_to_the_run(runs):
    code, shown = invoke("export", runs["mean"], "--format", "npz")
    path = runs["mean"].with_name("mean.npz")
    assert code == 0 and str(path) in shown and path.is_file()


def test_damaged_part_ends_the_export(tmp_path):
    folder = tmp_path / "run"
    virnucpro.extract(SEQUENCES, output_dir=folder, model="virnucpro-tiny", device="cpu")
    flip_bit(folder / "features/000000.h5")
    code, shown = invoke("export", folder, "--format", "parquet", "-o", tmp_path / "x.parquet")
    assert code == 1 and "000000.h5 is damaged or truncated" in shown and "--resume" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_skbio_refuses_another_input(tmp_path):
    fasta = tmp_path / "in.faa"
    fasta.write_text(">a\nMKVLAAGIT\n")
    virnucpro.extract(fasta, output_dir=tmp_path / "run", model="virnucpro-tiny", device="cpu")
    fasta.write_text(">a\nMKVLAAGIA\n")
    code, shown = invoke("export", tmp_path / "run", "--format", "skbio", "-o", tmp_path / "x.h5")
    assert code == 65 and "in.faa changed" in shown and "put the input of the run back" in shown
    assert not (tmp_path / "x.h5").exists()
