"""ESM C gives the vectors of transformers from each layout, and refuses other files."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faulty_encoders as faults
import numpy as np
import pytest
import torch
from fair_esm_reference import random_protein
from run_helpers import PROTEINS, invoke
from safetensors.torch import load_file, save_file
from torch import Tensor

from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import UnavailableError
from virnucpro.core.native import multiplies_bf16
from virnucpro.core.recipe import Precision
from virnucpro.models import checkpoint_model
from virnucpro.models.attention import (
    Kernel,
    attend_compiled,
    attend_compiled_bf16,
    attend_runs,
)
from virnucpro.models.base import identify_model, load_encoder
from virnucpro.models.esm2.model_files import require_esm2
from virnucpro.models.esmc.config import ESMCShape, inner_of
from virnucpro.models.esmc.loading import load_esmc, random_esmc, save_esmc
from virnucpro.models.esmc.model_files import inspect_esmc, read_shape
from virnucpro.models.esmc.reference import load_reference
from virnucpro.models.family import ModelFile, Published, RemoteFile
from virnucpro.models.hugging_face import find_snapshot
from virnucpro.models.lookup import find_published, open_model
from virnucpro.models.packing import PackedBatch
from virnucpro.models.registry import FAMILIES
from virnucpro.models.transformer import DTYPES
from virnucpro.models.transformer_encoder import TransformerEncoder
from virnucpro.models.validation.compare_reference import MARGIN, check, make_panel
from virnucpro.models.validation.roundings import largest_distance

SHAPE = ESMCShape(n_layers=3, dim=128, n_heads=2, inner=inner_of(128))
CPU = torch.device("cpu")
SEQUENCES = {
    f"p{length}": random_protein(length, seed)
    for seed, length in enumerate((50, 1, 333, 50, 7, 700, 2, 166))
} | {"odd": "MKXBUZO-J*.AXX**W", "lower": "mkxbuzo-acdw", "twin": random_protein(50, 99)}


def ignore(_: object) -> None:
    """Ignore an event."""


@pytest.fixture(scope="module")
def transformers() -> types.ModuleType:
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small ESM C with random weights, in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("esmc") / "tiny_esmc"
    save_esmc(path, random_esmc(SHAPE, seed=1))
    return path


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied_esmc"))


def embed(
    path: Path,
    precision: Precision = "fp32",
    layer: int = SHAPE.n_layers,
    kernel: Kernel | None = None,
) -> dict[str, np.ndarray]:
    """Return the vectors of residues by id, for sequences packed into two batches."""
    model = inspect_esmc(path)
    spec = model.spec(sha256="", layer=layer, pooling="none", precision=precision)
    encoder = load_encoder(spec, path, CPU)
    assert isinstance(encoder, TransformerEncoder)
    encoder.model.attend = kernel or encoder.model.attend
    ids = list(SEQUENCES)
    lengths = [len(sequence) for sequence in SEQUENCES.values()]
    batches = encoder.plan(lengths, 800)
    assert len(batches) == 2
    vectors = {}
    for batch in batches:
        rows = encoder.start([SEQUENCES[ids[i]] for i in batch]).rows()
        parts = np.split(rows, np.cumsum([lengths[i] for i in batch])[:-1])
        vectors |= {ids[i]: part for i, part in zip(batch, parts, strict=True)}
    return vectors


def reference_vectors(
    path: Path, layer: int = SHAPE.n_layers, rounded: Precision | None = None
) -> dict[str, np.ndarray]:
    """Return the vectors of transformers by id, one sequence at a time, exact or rounded."""
    spec = inspect_esmc(path).spec(sha256="", layer=layer, pooling="none", precision="fp32")
    reference = load_reference(spec, path, CPU)
    if rounded:
        reference.add_roundings(rounded, 2 + max(map(len, SEQUENCES.values())))
    return {
        name: reference.encoder.start([sequence]).rows() for name, sequence in SEQUENCES.items()
    }


def largest_error(vectors: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    assert vectors.keys() == exact.keys()
    return max(largest_distance(vectors[name], exact[name]) for name in exact)


# Vectors


@pytest.mark.parametrize("layer", [1, SHAPE.n_layers])
@pytest.mark.parametrize(
    ("precision", "kernel"),
    [
        ("fp32", attend_runs),
        ("fp32", attend_compiled),
        ("bf16", attend_runs),
        ("bf16", attend_compiled),
        pytest.param(
            "bf16",
            attend_compiled_bf16,
            marks=pytest.mark.skipif(not multiplies_bf16(), reason="needs AVX512_BF16"),
        ),
    ],
)
def test_vectors_are_those_of_transformers(folder, precision, kernel, layer):
    """They agree as far as rounding in this precision allows with these weights."""
    exact = reference_vectors(folder, layer)
    explained = largest_error(reference_vectors(folder, layer, precision), exact)
    found = largest_error(embed(folder, precision, layer, kernel), exact)
    assert 0 < found <= MARGIN * explained
    assert explained < (1e-4 if precision == "fp32" else 0.1)


def test_pooled_vectors_are_means_and_starts(folder):
    rows = embed(folder)
    encoders = [
        load_encoder(
            inspect_esmc(folder).spec(sha256="", pooling=pooling, precision="fp32"), folder, CPU
        )
        for pooling in ("mean", "bos")
    ]
    means, starts = (each.start(list(SEQUENCES.values())).rows() for each in encoders)
    network = load_esmc(folder, SHAPE.n_layers, torch.float32, CPU)
    with torch.inference_mode():
        for name, mean, start in zip(SEQUENCES, means, starts, strict=True):
            np.testing.assert_allclose(mean, rows[name].mean(axis=0), rtol=1e-5, atol=1e-6)
            hidden = network(PackedBatch.from_sequences([SEQUENCES[name]]))
            np.testing.assert_allclose(start, hidden[0], rtol=1e-4, atol=1e-5)


def test_vector_does_not_depend_on_the_batch(folder):
    """Attention and the norms of queries and keys stay within a protein."""
    spec = inspect_esmc(folder).spec(sha256="", precision="fp32")
    encoder = load_encoder(spec, folder, CPU)
    together = encoder.start(list(SEQUENCES.values())).rows()
    for row, sequence in zip(together, SEQUENCES.values(), strict=True):
        alone = encoder.start([sequence]).rows()[0]
        np.testing.assert_allclose(row, alone, rtol=1e-4, atol=1e-5)


def test_fp16_overflow_is_embedded_in_float32(folder):
    """As on GPUs without bf16: the same weights, with products in float32."""
    network = load_esmc(folder, SHAPE.n_layers, torch.float16, CPU)
    batch = PackedBatch.from_sequences([SEQUENCES["p50"]])
    with torch.inference_mode():
        half = network(batch)
        with network.in_float32():
            exact = network(batch)
    in_float32 = embed(folder)["p50"]
    assert largest_distance(exact[1:-1].numpy(), in_float32) < 0.01
    assert not torch.equal(half, exact)


# models check


@pytest.fixture
def short_panel(monkeypatch) -> set[str]:
    panel = {name: protein for name, protein in make_panel().items() if len(protein) < 200}
    monkeypatch.setattr("virnucpro.models.validation.compare_reference.make_panel", lambda _: panel)
    return set(panel)


def run_check(path: Path, precision: Precision = "fp32"):
    (outcome,) = check(str(path), ComputeOptions(device="cpu", precision=precision), ignore)
    return outcome


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "int8"])
def test_check_passes(folder, short_panel, precision):
    outcome = run_check(folder, precision)
    assert not outcome.failures, outcome.report_lines()
    assert {one.sequence for one in outcome.deviations} == short_panel
    assert any("oracle: transformers" in line for line in outcome.report_lines())


def scale_queries(encoder: TransformerEncoder) -> None:
    encoder.model.layers[1].q_norm.weight.mul_(1.001)


def scale_branches(encoder: TransformerEncoder) -> None:
    encoder.model.branch_scale *= 1.0001


def exchange_gate(encoder: TransformerEncoder) -> None:
    layer = encoder.model.layers[0]
    weight = layer.gate_up.weight
    weight = weight.to_dense() if weight.is_mkldnn else weight
    layer.gate_up.weight = torch.nn.Parameter(weight.roll(SHAPE.inner, 0), requires_grad=False)


def forget_last_norm(encoder: TransformerEncoder) -> None:
    encoder.model.final_norm = torch.nn.Identity()


@pytest.mark.usefixtures("short_panel")
@pytest.mark.parametrize("fault", [scale_queries, scale_branches, exchange_gate, forget_last_norm])
def test_check_fails_for_a_fault(folder, fault):
    with faults.crooked(fault, "esmc"):
        outcome = run_check(folder)
    assert outcome.failures


def test_check_names_missing_transformers(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnavailableError, match=r"transformers 5\.23 or newer") as caught:
        run_check(folder)
    assert caught.value.hint == "pip install 'transformers>=5.23'"


def test_check_with_old_transformers_says_so(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(EsmConfig=object))
    with pytest.raises(UnavailableError, match=r"has no esmc$"):
        run_check(folder)


# Layouts


def to_published_layout(path: Path) -> None:
    """Join and rename tensors as on the Hub, and write the configuration."""
    tensors = load_file(path / "model.safetensors")
    layers = [f"layers.{number}." for number in range(SHAPE.n_layers)]
    new = {
        "esmc.embed.weight": tensors["embed_tokens.weight"],
        "esmc.transformer.norm.weight": tensors["norm.weight"],
        "lm_head.0.weight": torch.zeros(4, 4),
    }
    for number, layer in enumerate(layers):
        one = {
            name.removeprefix(layer): tensor
            for name, tensor in tensors.items()
            if name.startswith(layer)
        }
        attention = [one[f"self_attn.{name}_proj.weight"] for name in "qkv"]
        block = {
            "attn.layernorm_qkv.layer_norm_weight": one["input_layernorm.weight"],
            "attn.layernorm_qkv.layer_norm_bias": one["input_layernorm.bias"],
            "attn.layernorm_qkv.weight": torch.cat(attention),
            "attn.layernorm_qkv._extra_state": torch.zeros(0, dtype=torch.uint8),
            "attn.q_ln.weight": one["self_attn.q_norm.weight"],
            "attn.k_ln.weight": one["self_attn.k_norm.weight"],
            "attn.out_proj.weight": one["self_attn.o_proj.weight"],
            "ffn.layer_norm_weight": one["post_attention_layernorm.weight"],
            "ffn.layer_norm_bias": one["post_attention_layernorm.bias"],
            "ffn.fc1_weight": torch.cat([one["mlp.gate_proj.weight"], one["mlp.up_proj.weight"]]),
            "ffn.fc2_weight": one["mlp.down_proj.weight"],
        }
        new |= {f"esmc.transformer.blocks.{number}.{name}": one for name, one in block.items()}
    save_file(new, path / "model.safetensors")
    config = {"model_type": "esmc", "d_model": SHAPE.dim, "n_heads": 2, "n_layers": 3}
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 64, "dtype": "float32"}))


def shard(path: Path) -> None:
    """Split the weights into two files with an index. Another file is next to them."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "stray.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (path / ModelFile.INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("change", [to_published_layout, shard])
def test_layout_gives_the_same_bits(folder, copied, change):
    change(copied)
    expected = embed(folder)
    found = embed(copied)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert inspect_esmc(copied).encoder_id == inspect_esmc(folder).encoder_id
    assert inspect_esmc(copied).shape == SHAPE


@pytest.mark.parametrize("has_config", [True, False])
def test_single_file_gives_the_same_bits(folder, copied, tmp_path, has_config):
    """Without a configuration, heads have 64 dimensions, as in published models."""
    file = copied / "model.safetensors"
    if not has_config:
        file = file.rename(tmp_path / "alone.safetensors")
    model = identify_model(file, ignore)
    assert (model.family, model.name) == ("esmc", file.stem)
    expected = embed(folder)
    found = embed(file)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("max_shard_size", ["1GB", "500KB"])
@pytest.mark.parametrize("kind", ["EsmcModel", "EsmcForMaskedLM"])
def test_model_saved_by_transformers_is_read(transformers, tmp_path, kind, max_shard_size):
    torch.manual_seed(5)
    config = transformers.EsmcConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=6, intermediate_size=200
    )
    module = getattr(transformers, kind)(config).eval()
    for parameter in module.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    saved = tmp_path / "saved"
    module.save_pretrained(saved, max_shard_size=max_shard_size)
    assert (saved / ModelFile.INDEX).exists() == (max_shard_size == "500KB")
    assert inspect_esmc(saved).shape == ESMCShape(n_layers=2, dim=96, n_heads=6, inner=200)
    tokenizer = transformers.EsmcTokenizer()
    encoder = getattr(module, "esmc", module)
    exact = {}
    for name in ("p50", "p1", "p333", "p700"):
        tokens = tokenizer(SEQUENCES[name], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            exact[name] = encoder(tokens).last_hidden_state[0, 1:-1].numpy()
    rounded = reference_vectors(saved, 2, "fp32")
    found = embed(saved, layer=2)
    explained = largest_error({name: rounded[name] for name in exact}, exact)
    assert largest_error({name: found[name] for name in exact}, exact) <= MARGIN * explained


def test_folder_in_bf16_is_read(copied):
    file = copied / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    exact = reference_vectors(copied)
    explained = largest_error(reference_vectors(copied, rounded="fp32"), exact)
    assert largest_error(embed(copied), exact) <= MARGIN * explained
    assert inspect_esmc(copied).prepare("bf16", ignore)[0] == copied


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_converted_copy_gives_the_same_bits(folder, tmp_path, monkeypatch, precision):
    monkeypatch.setattr(checkpoint_model, "WORTH_CONVERTING", 0)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights, digest = inspect_esmc(folder).prepare(precision, ignore)
    assert weights != folder and digest == inspect_esmc(folder).sha256()
    batch = PackedBatch.from_sequences(list(SEQUENCES.values()))
    for layer in (1, SHAPE.n_layers):
        networks = [load_esmc(path, layer, DTYPES[precision], CPU) for path in (folder, weights)]
        with torch.inference_mode():
            assert torch.equal(*(network(batch) for network in networks))


# Bad input


def change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def change_tensor(path: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[name] = change(tensors[name])
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def cut_off(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lose_shard(path: Path) -> None:
    shard(path)
    (path / "model-2.safetensors").unlink()


def point_outside(path: Path) -> None:
    shard(path)
    (path / ModelFile.INDEX).write_text(
        json.dumps({"weight_map": {"norm.weight": "../x.safetensors"}})
    )


BAD = {
    "heads": (partial(change_config, num_attention_heads=7), "7 heads in 128 dimensions"),
    "no count": (partial(change_config, num_attention_heads="2"), "its num_attention_heads is '2'"),
    "layers": (partial(change_config, num_hidden_layers=4), "says n_layers 4, and the tensors 3"),
    "activation": (partial(change_config, hidden_act="gelu"), "its hidden_act is 'gelu'"),
    "rotary": (
        partial(change_config, rope_parameters={"rope_theta": 500.0}),
        "its rope_theta is 500.0, not 10000.0",
    ),
    "grouped": (partial(change_config, num_key_value_heads=1), "its num_key_value_heads is 1"),
    "other model": (partial(change_config, model_type="llama"), "config.json of another kind"),
    "damaged config": (lambda path: (path / "config.json").write_text("{"), "cannot be read"),
    "no tensor": (
        partial(change_tensor, name="layers.1.mlp.up_proj.weight", change=lambda _: None),
        "no tensor layers.1.mlp.up_proj.weight",
    ),
    "no embedding": (
        partial(change_tensor, name="embed_tokens.weight", change=lambda _: None),
        "no tensor embed_tokens.weight",
    ),
    "tokens": (
        partial(change_tensor, name="embed_tokens.weight", change=lambda x: x[:33].clone()),
        "33 tokens and 3 layers",
    ),
    "no matrix": (
        partial(change_tensor, name="embed_tokens.weight", change=lambda x: x[:, 0].clone()),
        "has not two dimensions",
    ),
    "whole numbers": (
        partial(change_tensor, name="norm.weight", change=lambda x: x.to(torch.int8)),
        "a tensor of I8",
    ),
    "truncated": (cut_off, "cannot be read"),
    "lost shard": (lose_shard, "model-2.safetensors: no such file, but model.safetensors.index"),
    "outside": (point_outside, "it names no files of this folder"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_folder_is_refused(copied, fault):
    spoil, said = BAD[fault]
    spoil(copied)
    with pytest.raises(UnavailableError) as caught:
        identify_model(copied, ignore)
    assert said in str(caught.value)
    assert caught.value.hint


def test_tensor_of_another_shape_is_refused(copied):
    change_tensor(copied, "layers.2.self_attn.o_proj.weight", lambda x: x[:, :64].clone())
    with pytest.raises(UnavailableError, match=r"a tensor of shape \(128, 64\)"):
        load_esmc(copied, SHAPE.n_layers, torch.float32, CPU)


def test_file_of_another_model_is_refused(tmp_path):
    file = tmp_path / "llama.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(8, 8)}, file)
    with pytest.raises(UnavailableError, match="is not an ESM C checkpoint: no tensor embed"):
        identify_model(file, ignore)


def test_truncated_file_is_refused(copied):
    cut_off(copied)
    with pytest.raises(UnavailableError, match="cannot be read") as caught:
        identify_model(copied / "model.safetensors", ignore)
    assert caught.value.hint == "the file is damaged: get it again"


def test_file_with_other_heads_needs_a_configuration(tmp_path):
    shape = ESMCShape(n_layers=1, dim=96, n_heads=6, inner=64)
    save_esmc(tmp_path / "narrow", random_esmc(shape, seed=2))
    file = tmp_path / "narrow" / "model.safetensors"
    assert inspect_esmc(file).shape == shape
    (tmp_path / "narrow" / "config.json").unlink()
    with pytest.raises(UnavailableError, match=r"put its config\.json next to the file"):
        inspect_esmc(file)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(copied, number):
    def spoil(tensor: Tensor) -> Tensor:
        tensor.view(-1)[5] = number
        return tensor

    change_tensor(copied, "layers.1.mlp.down_proj.weight", spoil)
    model = inspect_esmc(copied)
    with pytest.raises(UnavailableError, match=r"down_proj\.weight .* not finite"):
        model.prepare("fp32", ignore)
    with pytest.raises(UnavailableError, match="not finite"):
        model.verify()


def test_training_of_esmc_is_refused(folder):
    with pytest.raises(UnavailableError, match="is not an ESM-2, but a model of the family esmc"):
        require_esm2(inspect_esmc(folder))


# Published models


@pytest.mark.parametrize("name", ["esmc-300m", "esmc-600m", "esmc-6b"])
def test_published_figures_fit_the_shape(name):
    """Files contain the encoder and its language-model head in float32."""
    published = FAMILIES["esmc"].published[name]
    shape = read_shape(published)
    assert shape.head_dim == 64
    rounded = {"esmc-300m": 0.33e9, "esmc-600m": 0.57e9, "esmc-6b": 6.35e9}[name]
    assert shape.n_parameters == pytest.approx(rounded, rel=0.01)
    weights = [file for file in published.files if file.name.endswith(".safetensors")]
    assert all(len(file.sha256) == 64 for file in weights) and len(published.digests) == 1
    assert all(f"/biohub/ESMC-{name[5:].upper()}/resolve/" in file.url for file in published.files)
    if name == "esmc-6b":
        head = shape.dim**2 + 3 * shape.dim + 64 * shape.dim + 64
        n_bytes = sum(file.n_bytes for file in weights)
        header = n_bytes - 4 * (shape.n_parameters + head)
        assert 0 < header < 1 << 20


def publish(folder: Path, monkeypatch, sha256: str = "") -> str:
    """Publish a folder as a model called esmc-tiny, which cannot be downloaded."""
    digest = sha256 or inspect_esmc(folder).sha256()
    url = "http://127.0.0.1:1"
    published = Published(
        n_layers=SHAPE.n_layers,
        dim=SHAPE.dim,
        n_heads=SHAPE.n_heads,
        files=(
            RemoteFile(url=f"{url}/model.safetensors", sha256=digest),
            RemoteFile(url=f"{url}/config.json"),
        ),
        repository="biohub/ESMC-tiny",
    )
    monkeypatch.setitem(FAMILIES["esmc"].published, "esmc-tiny", published)
    return digest


def put_into_cache(folder: Path, cache: Path, digest: str) -> Path:
    """Make links to files named by their hash, as huggingface_hub does."""
    repository = cache / "models--biohub--ESMC-tiny"
    snapshot = repository / "snapshots" / "a59b"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, blob in (("model.safetensors", digest), ("config.json", "0123")):
        shutil.copy(folder / name, repository / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_published_model_is_found_in_the_cache(folder, tmp_path, monkeypatch):
    digest = publish(folder, monkeypatch)
    snapshot = put_into_cache(folder, tmp_path, digest)
    model = open_model("esmc-tiny", ignore, tmp_path)
    assert (model.path, model.name, model.family) == (snapshot, "esmc-tiny", "esmc")
    assert model.prepare("fp32", ignore) == (snapshot, digest)
    found = find_published("esmc-tiny", tmp_path)
    assert found is not None and found.verify(model) == digest


def test_other_revision_in_the_cache_is_passed_over(folder, tmp_path, monkeypatch):
    publish(folder, monkeypatch)
    put_into_cache(folder, tmp_path, "f" * 64)
    files = FAMILIES["esmc"].published["esmc-tiny"].hub_files
    assert find_snapshot(tmp_path, "biohub/ESMC-tiny", files) is None


def test_other_weights_under_a_published_name(folder, tmp_path, monkeypatch):
    publish(folder, monkeypatch, sha256="e" * 64)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    home = find_published("esmc-tiny").home
    home.parent.mkdir(parents=True)
    shutil.copytree(folder, home)
    with pytest.raises(UnavailableError, match="is not the published esmc-tiny: its SHA-256 is"):
        open_model("esmc-tiny", ignore).prepare("fp32", ignore)


def test_wrong_shape_under_a_published_name(folder, tmp_path, monkeypatch):
    publish(folder, monkeypatch)
    tiny = FAMILIES["esmc"].published["esmc-tiny"]
    monkeypatch.setitem(FAMILIES["esmc"].published, "esmc-tiny", replace(tiny, n_layers=9))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    home = find_published("esmc-tiny").home
    home.parent.mkdir(parents=True)
    shutil.copytree(folder, home)
    with pytest.raises(UnavailableError, match="it has 3 layers, 128 dimensions"):
        open_model("esmc-tiny", ignore)


def test_imported_file_has_its_name(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    code, said = invoke("models", "import", folder / "model.safetensors", "--name", "one_file")
    assert code == 0, said
    model = open_model("one_file", ignore)
    assert (model.family, model.encoder_id) == ("esmc", inspect_esmc(folder).encoder_id)


def test_imported_folder_has_its_name(copied, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    shard(copied)
    code, said = invoke("models", "import", copied, "--name", "my_esmc")
    assert code == 0, said
    assert not list((tmp_path / "torch").rglob("stray*"))
    code, said = invoke("models", "info", "my_esmc")
    assert code == 0 and inspect_esmc(copied).encoder_id in said
    assert embed(open_model("my_esmc", ignore).path).keys() == SEQUENCES.keys()


# A run


def extract(folder: Path, output: Path, *words: object) -> str:
    code, said = invoke(
        *("extract", "-q", "-i", PROTEINS, "-o", output, "--model", folder),
        *("--device", "cpu", "--precision", "fp32", *words),
    )
    assert code == 0, said
    return said


def files_of(output: Path) -> dict[str, bytes]:
    """Return the feature files of a run, by name."""
    files = [*output.rglob("*.h5"), output / "records.tsv"]
    return {str(file.relative_to(output)): file.read_bytes() for file in files}


def test_extract_resumes_to_the_same_bytes(folder, tmp_path, quick_starts):
    extract(folder, tmp_path / "complete")
    extract(folder, tmp_path / "resumed")
    complete = files_of(tmp_path / "complete")
    features = [name for name in complete if name.endswith(".h5")]
    assert features
    for name in features:
        (tmp_path / "resumed" / name).unlink()
    extract(folder, tmp_path / "resumed", "--resume")
    assert files_of(tmp_path / "resumed") == complete


def test_run_records_the_model(folder, tmp_path, quick_starts):
    extract(folder, tmp_path / "run", "--pooling", "none", "--layer", "2")
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]
    (encoder,) = recipe["encoders"]
    assert encoder["family"] == "esmc" and encoder["model"] == "tiny_esmc"
    assert (encoder["layer"], encoder["pooling"], encoder["dim"]) == (2, "none", SHAPE.dim)
    assert encoder["sha256"] == inspect_esmc(folder).sha256()
    code, said = invoke("cite", tmp_path / "run")
    assert code == 0 and "model tiny_esmc: layer 2, none pooling, fp32" in said
    assert "candido2026esmc" in said and "lin2023esm2" not in said


def test_commands_describe_the_models(folder):
    code, said = invoke("models", "list")
    assert code == 0
    lines = {line.split()[0]: line for line in said.splitlines() if line}
    assert "332.0 M" in lines["esmc-300m"] and "2,560" in lines["esmc-6b"]
    code, said = invoke("models", "info", "esmc-6b")
    assert code == 0 and "model-00006-of-00006.safetensors" in said and "layers      80" in said
    code, said = invoke("models", "info", folder)
    assert code == 0 and f"encoder id  {inspect_esmc(folder).encoder_id}" in said
    code, said = invoke("models", "info", folder / "model.safetensors")
    assert code == 0 and "dimensions  128" in said
    code, said = invoke("models", "verify", folder)
    assert code == 0, said
