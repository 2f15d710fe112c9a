"""The published model: two encoders, the head of the original VirNucPro, and their files.

The networks are tiny and have random weights under the published names. File formats are the
published ones. The real head is compared where its file exists.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import dnabert_reference
import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import TINY
from fair_esm_reference import make_fair_esm, save_fair_esm
from http_server import serving, whole
from malformed_inputs import Payload
from run_helpers import (
    assert_same_run,
    execute,
    our_processes,
    resolve,
    run,
    run_inline,
    vectors_of_each,
)
from torch import Tensor, nn

from virnucpro.cli.main import app
from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import InputMissingError, UnavailableError, UsageError
from virnucpro.core.events import BatchDone, ShardDone
from virnucpro.core.recipe import Footprint, join_footprints
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.models.base import Model
from virnucpro.models.dnabert_s.model import DNABERTShape
from virnucpro.models.download import check_file
from virnucpro.models.lookup import find_model, model_names, open_model, published_folder
from virnucpro.models.manage import import_files, import_model
from virnucpro.models.registry import BUNDLES, FAMILIES, Published, RemoteFile, _Bundle
from virnucpro.viral.head import EncoderInfo, Head
from virnucpro.viral.legacy_head import find_head, load_legacy_head
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.predict_options import PredictOptions

HEADS = Path(__file__).parents[3] / "shared" / "golden" / "heads"
golden = pytest.mark.skipif(not HEADS.exists(), reason="the golden heads are not here")
REAL_HEAD = os.environ.get("VIRNUCPRO_500_MODEL", "")
DIM = dnabert_reference.DIM + TINY.dim
DNABERT_S = FAMILIES["dnabert-s"].published
NOWHERE = "http://127.0.0.1:1"


class Classifier(nn.Module):
    """The original's classifier, which pickles name as in the original program."""

    __module__ = "__main__"
    __qualname__ = "MLPClassifier"

    def __init__(self, n_inputs: int, n_hidden: int) -> None:
        super().__init__()
        self.hidden_layer = nn.Linear(n_inputs, n_hidden)
        self.bn1 = nn.BatchNorm1d(n_hidden)
        self.output_layer = nn.Linear(n_hidden, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.bn1(self.hidden_layer(x)).relu()
        return torch.softmax(self.output_layer(self.dropout(hidden)), dim=1)


@pytest.fixture
def classifier(monkeypatch) -> Classifier:
    """A classifier in training mode. Each weight and statistic changes the result."""
    monkeypatch.setattr(sys.modules["__main__"], "MLPClassifier", Classifier, raising=False)
    module = Classifier(DIM, 8)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), module.bn1.running_mean):
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        module.bn1.running_var.copy_(torch.rand(8, generator=generator) + 0.5)
    return module


def encoder_facts(*dims: int) -> tuple[EncoderInfo, ...]:
    return tuple(
        EncoderInfo(family="f", name="n", encoder_id=str(i) * 16, layer=1, pooling="mean", dim=dim)
        for i, dim in enumerate(dims)
    )


FACTS = encoder_facts(dnabert_reference.DIM, TINY.dim)


# The head


def test_published_head_equals_its_module(classifier, tmp_path):
    """Its batch norm is folded. float32 differs by 1e-7 from float64, six decimals by 5e-7."""
    torch.save(classifier, tmp_path / "500_model.pth")
    vectors = np.random.default_rng(0).normal(size=(50, DIM)).astype(np.float32)
    with torch.no_grad():
        expected = classifier.eval()(torch.from_numpy(vectors)).numpy()[:, 1]
    head = load_legacy_head(tmp_path / "500_model.pth", FACTS, 500)
    assert np.abs(head.classify(vectors) - expected).max() < 1e-6
    assert len(set(expected.tolist())) == 50 and expected.std() > 0.02
    assert head.facts.chunk_size == 500 and head.facts.encoders == FACTS
    assert "the call of a record is ours" in head.facts.training


@golden
def test_published_size_gives_64_scores():
    stored = np.load(HEADS / "standin_golden.npz")
    head = load_legacy_head(HEADS / "standin_model.pth", encoder_facts(768, 2560), 500)
    scores = head.classify(stored["vectors"])
    assert len(scores) == 64
    assert np.abs(scores - stored["scores"][:, 1]).max() < 1e-6
    assert np.array_equal(scores > 0.5, stored["labels"] == 1)


@golden
@pytest.mark.skipif(not REAL_HEAD, reason="VIRNUCPRO_500_MODEL names no file of the true head")
def test_published_head_gives_published_scores():
    stored = np.load(HEADS / "published_vectors.npz")
    head = load_legacy_head(Path(REAL_HEAD), encoder_facts(768, 2560), 500)
    scores = head.classify(np.concatenate([stored["dnabert_s"], stored["esm2_3b"]], axis=1))
    assert np.abs(scores - stored["score2_500"].astype(float)).max() < 1e-6
    assert np.array_equal(scores > 0.5, stored["label_500"] == "virus")


def test_head_with_code_is_refused(classifier, tmp_path):
    classifier.extra = Payload(tmp_path / "done")
    torch.save(classifier, tmp_path / "500_model.pth")
    with pytest.raises(UnavailableError, match="contains more than tensors"):
        load_legacy_head(tmp_path / "500_model.pth", FACTS, 500)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda module: delattr(module, "bn1"), "it has no bn1"),
        (lambda module: setattr(module.hidden_layer, "weight", None), "is not a tensor"),
        (lambda module: module.output_layer.bias.fill_(torch.nan), "a weight is not a finite"),
        (
            lambda module: setattr(module, "hidden_layer", nn.Linear(DIM + 1, 8)),
            f"a layer has {DIM + 1} inputs for {DIM} values",
        ),
        (lambda module: module.bn1.running_var.fill_(-1), "the batch norm has no valid variance"),
        (lambda module: module.state_dict(), "it has no hidden_layer"),  # which is what is stored
    ],
)
def test_file_of_another_module_is_refused(classifier, tmp_path, spoil, why):
    with torch.no_grad():
        spoilt = spoil(classifier)
    content = spoilt if isinstance(spoilt, dict) else classifier
    torch.save(content, tmp_path / "500_model.pth")
    with pytest.raises(UnavailableError, match=f"is not a head of VirNucPro: .*{why}") as caught:
        load_legacy_head(tmp_path / "500_model.pth", FACTS, 500)
    assert "500_model.pth" in str(caught.value) and caught.value.hint


# Its files


def published_as(file: Path) -> RemoteFile:
    url = f"{NOWHERE}/{file.name}"
    return RemoteFile(url=url, n_bytes=file.stat().st_size, sha256=hash_file(file))


@pytest.fixture
def brought(classifier, tmp_path, monkeypatch) -> Path:
    """A folder with the files of a bundle of tiny models, under the published names."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = dnabert_reference.write_dnabert(tmp_path / "brought")
    name = BUNDLES["virnucpro-500"].encoders[1]
    checkpoint = save_fair_esm(make_fair_esm(TINY), folder / f"{name}.pt")
    torch.save(classifier, folder / "500_model.pth")
    files = tuple(published_as(folder / file.name) for file in DNABERT_S["dnabert-s"].files)
    published = Published(
        n_layers=TINY.n_layers,
        dim=TINY.dim,
        n_heads=TINY.n_heads,
        files=(published_as(checkpoint),),
    )
    content = (folder / "500_model.pth").read_bytes()
    blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
    head = RemoteFile(url=f"{NOWHERE}/500_model.pth", git_blob=blob)
    bundle = _Bundle(encoders=("dnabert-s", name), head=head, chunk_size=500)
    monkeypatch.setitem(DNABERT_S, "dnabert-s", replace(DNABERT_S["dnabert-s"], files=files))
    monkeypatch.setitem(FAMILIES["esm2"].published, name, published)
    monkeypatch.setitem(BUNDLES, "virnucpro-500", bundle)
    return folder


def open_bundle() -> tuple[Model, ...]:
    return tuple(open_model(name, lambda _: None) for name in model_names("virnucpro-500"))


def test_dnabert_s_figures_follow_its_shape():
    published = DNABERT_S["dnabert-s"]
    dimensions = published.n_layers, published.dim, published.n_heads
    shape = DNABERTShape(*dimensions, inner=3072, n_words=4096)
    # 590,592 parameters of the pooler are in the file, and not used
    assert published.n_parameters == shape.n_parameters == 117_068_544 - 590_592


def test_git_id_equals_that_of_git(tmp_path):
    (tmp_path / "hello").write_bytes(b"hello\n")  # printf 'hello\n' | git hash-object --stdin
    blob = "ce013625030ba8dba906f756967f9e9ca394464a"
    check_file(RemoteFile(url=NOWHERE, git_blob=blob), tmp_path / "hello")
    (tmp_path / "hello").write_bytes(b"hallo\n")
    with pytest.raises(UnavailableError, match="its id in git is"):
        check_file(RemoteFile(url=NOWHERE, git_blob=blob), tmp_path / "hello")


def test_bundle_is_imported_without_network(brought, tmp_path):
    result = CliRunner().invoke(app, ["models", "import", "virnucpro-500", "--from", str(brought)])
    assert "use it with --model virnucpro-500" in result.output, result.output
    lines = CliRunner().invoke(app, ["models", "list"]).output.splitlines()
    (line,) = (line for line in lines if line.startswith("virnucpro-500"))
    assert line.endswith("500_model.pth")
    verified = CliRunner().invoke(app, ["models", "verify", "dnabert-s"])
    assert "is complete" in verified.output, verified.output
    alone = CliRunner().invoke(app, ["models", "download", "dnabert-s"])
    assert "dnabert-s is at" in alone.output and "head" not in alone.output
    models = open_bundle()
    assert [model.name for model in models] == list(BUNDLES["virnucpro-500"].encoders)
    head = find_head("virnucpro-500", models, lambda _: None)
    ids = [one.encoder_id for one in Head.load(head).facts.encoders]
    assert ids == [model.encoder_id for model in models]
    made = head.stat().st_mtime_ns
    assert find_head("virnucpro-500", models, lambda _: None) == head
    assert head.stat().st_mtime_ns == made, "it is converted once"
    assert import_files("virnucpro-500", tmp_path) == [], "all of it is there"


def test_bundle_is_downloaded_by_one_command(brought, monkeypatch):
    """Except for ESM-2, which has its own server and is already here."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    encoder = BUNDLES["virnucpro-500"].encoders[1]
    import_model(brought / f"{encoder}.pt", encoder)

    def answer(request: BaseHTTPRequestHandler) -> None:
        whole((brought / Path(request.path).name).read_bytes())(request)

    with serving(answer) as (address, _):
        folder = DNABERT_S["dnabert-s"]
        bundle = BUNDLES["virnucpro-500"]
        files = tuple(replace(file, url=f"{address}/{file.name}") for file in folder.files)
        monkeypatch.setitem(DNABERT_S, "dnabert-s", replace(folder, files=files))
        head = replace(bundle.head, url=f"{address}/500_model.pth")
        monkeypatch.setitem(BUNDLES, "virnucpro-500", replace(bundle, head=head))
        result = CliRunner().invoke(app, ["models", "download", "virnucpro-500"])
    assert f"dnabert-s is at {find_model('dnabert-s')}" in result.output, result.output
    assert "its head is at" in result.output
    for file in files:
        assert (find_model("dnabert-s") / file.name).read_bytes() == (
            brought / file.name
        ).read_bytes()
    assert not list(published_folder().rglob(".*"))


def test_incomplete_folder_is_reported(brought):
    (brought / "tokenizer.json").unlink()
    (brought / "500_model.pth").unlink()
    with pytest.raises(InputMissingError, match=r"lacks tokenizer\.json, 500_model\.pth") as caught:
        import_files("virnucpro-500", brought)
    assert "models info virnucpro-500" in caught.value.hint
    assert not published_folder().exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tokenizer.json", "500_model.pth"])
def test_other_file_with_published_name_is_refused(brought, name):
    import_files("virnucpro-500", brought)
    content = bytearray((brought / name).read_bytes())
    content[-1] ^= 1
    (brought / name).write_bytes(content)
    with pytest.raises(UnavailableError, match=rf"is not the published {name}: its (SHA|id)"):
        import_files("virnucpro-500", brought)
    place = next(published_folder().rglob(name))
    place.write_bytes(content)
    with pytest.raises(UnavailableError, match=r"is not (that of )?the published .* its (SHA|id)"):
        models = open_bundle()
        find_head("virnucpro-500", models, lambda _: None)


def test_error_without_network_names_the_files(brought, tmp_path):
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\n" + "GATTACAGC" * 60 + "\n")
    words = ["predict", "-i", fasta, "-o", tmp_path / "run", "--model", "virnucpro-500", "-q"]
    result = CliRunner().invoke(app, list(map(str, words)))
    shown = result.output.replace("\n", " ")
    assert f"cannot fetch {NOWHERE}/pytorch_model.bin" in shown
    assert "models import" in shown and result.exception.exit_code == 69
    assert not (tmp_path / "run").exists()


def test_bundle_is_not_one_model(brought):
    with pytest.raises(UsageError, match="virnucpro-500 is not one model, but dnabert-s and"):
        find_model("virnucpro-500")
    with pytest.raises(UsageError, match=r"--from is for esmc-300m, .*, dnabert-s, virnucpro"):
        import_files("esm2_t6_8M_UR50D", brought)


# A run


@pytest.fixture
def options(brought, contigs, tmp_path) -> PredictOptions:
    import_files("virnucpro-500", brought)
    return PredictOptions(
        input=(contigs,),
        output_dir=tmp_path / "one",
        model="virnucpro-500",
        device="cpu",
        workers=1,
        precision="fp32",
        input_type="nucleotide",
    )


def test_resume_keeps_each_encoder_precision(options):
    """DNABERT-S has its own precision, independent of that of ESM-2."""
    first = replace(options, precision="bf16")
    config = resolve(first, lambda _: None)
    assert [one.precision for one in config.recipe.encoders] == ["fp32", "bf16"]
    assert "layer 2, mean pooling of bases, fp32" in config.announcements[0]
    run_inline(config, config.classifier.frame_head)
    again = resolve(replace(first, precision="auto", resume=True), lambda _: None)
    assert again.recipe == config.recipe


def test_two_models_need_the_memory_of_both():
    esm2 = Footprint(n_parameters=100, file_bytes=7, bytes_per_token=9, filling_tokens=50)
    bases = Footprint(
        n_parameters=10, file_bytes=3, bytes_per_parameter=6, bytes_per_token=4, filling_tokens=80
    )
    both = join_footprints([bases, esm2])
    assert both.weight_bytes("bf16") == 100 * 2 + 10 * 6
    assert (both.file_bytes, both.bytes_per_token, both.filling_tokens) == (10, 9, 50)


def test_scores_match_head_on_both_vectors(options, brought, classifier):
    config = resolve(options, lambda _: None)
    assert [one.precision for one in config.recipe.encoders] == ["fp32", "fp32"]
    assert run_inline(config, config.classifier.frame_head).exit_code == 0
    bases, proteins = vectors_of_each(options.output_dir, config.recipe)
    assert bases.keys() == proteins.keys() and len(bases) > 50
    table = (options.output_dir / "prediction_results.txt").read_text().splitlines()[1:]
    scores = {line.split("\t")[0]: float(line.split("\t")[3]) for line in table}
    assert scores.keys() == bases.keys()
    joined = np.stack([np.concatenate([bases[name], proteins[name]]) for name in scores])
    with torch.no_grad():
        expected = classifier.eval()(torch.from_numpy(joined)).numpy()[:, 1]
    assert np.abs(expected - np.array(list(scores.values()))).max() < 1e-6
    with pytest.raises(UsageError, match="made for chunks of 500 bases; --chunk-size 300"):
        resolve(replace(options, chunk_size=300, output_dir=brought / "x"), lambda _: None)


def test_killed_run_resumes_with_other_workers(options, quick_starts):
    def small(chosen: PredictOptions):
        config = resolve(chosen, lambda _: None)
        return replace(config, recipe=replace(config.recipe, residues_per_shard=600))

    (fasta,) = options.input
    fasta.write_text("".join(fasta.read_text().splitlines(keepends=True)[:30]))
    config = small(options)
    run_inline(config, config.classifier.frame_head)
    broken = replace(options, output_dir=options.output_dir.with_name("other"), workers=3)
    config = small(broken)
    events: list[object] = []

    def disturb(event: object) -> None:
        events.append(event)
        if isinstance(event, BatchDone) and not any(isinstance(e, BatchDone) for e in events[:-1]):
            our_processes()[0].kill()
        if sum(isinstance(e, ShardDone) for e in events) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, ProcessExecutor(config.resources.devices), disturb)
    config = small(replace(broken, resume=True, workers=1))
    run_inline(config, config.classifier.frame_head)
    assert_same_run(options.output_dir, broken.output_dir)
    names = {path.relative_to(options.output_dir) for path in options.output_dir.rglob("*.h5")}
    assert len(names) > 6
    for name in names:
        assert (options.output_dir / name).read_bytes() == (broken.output_dir / name).read_bytes()


def test_resume_keeps_the_bundle(options, quick_starts):
    """Its two models are also in another bundle, so they do not identify it."""
    (fasta,) = options.input
    fasta.write_text("".join(fasta.read_text().splitlines(keepends=True)[:10]))
    config = resolve(options, lambda _: None)
    run_inline(config, config.classifier.frame_head)
    again = resolve(replace(options, model=None, resume=True), lambda _: None)
    assert again.options.model == options.model == "virnucpro-500"
    assert again.recipe == config.recipe


def test_base_vectors_in_the_original_layout(brought, contigs, tmp_path):
    """As ``merge_data`` of the original reads it: the vectors of the h5 file, bit by bit."""
    import_files("virnucpro-500", brought)
    options = ExtractOptions(
        input=(contigs,),
        output_dir=tmp_path / "out",
        model="dnabert-s",
        format="pt",
        device="cpu",
        workers=1,
    )
    execute(options, lambda _: None, lambda _: InlineExecutor())
    stored = torch.load(tmp_path / "out" / "features" / "000000.pt", weights_only=True)
    rows = {
        name: torch.tensor(entry["mean_representation"])
        for name, entry in zip(stored["nucleotide"], stored["data"], strict=True)
    }
    assert [entry["label"] for entry in stored["data"]] == stored["nucleotide"]
    assert len(rows) > 50
    with h5py.File(tmp_path / "out" / "features" / "000000.h5") as h5:
        for name, row in zip(h5["ids"].asstr()[:], h5["embeddings"][:], strict=True):
            assert np.array_equal(rows[name].numpy(), row)
