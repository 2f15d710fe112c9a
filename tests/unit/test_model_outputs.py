"""Every output of a model equals that of fair-esm or transformers, by id and from one pass."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import esm
import numpy as np
import pytest
import torch
from fair_esm_reference import (
    fair_esm_tokens,
    make_fair_esm,
    random_protein,
    save_contact_head,
    save_fair_esm,
    tolerance,
)
from safetensors.torch import load_file, save_file

from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.model_outputs import MASK_LETTER, Include, Pooling
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Orf, Shard
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.shard_embedding import ShardEmbedding
from virnucpro.models.base import Encoder, load_encoder
from virnucpro.models.checkpoint_model import CheckpointModel
from virnucpro.models.converted import heads_path, prepare
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model_files import ESM2Model, inspect_esm2
from virnucpro.models.esmc.config import ESMCShape
from virnucpro.models.esmc.loading import random_esmc, save_esmc
from virnucpro.models.esmc.model_files import inspect_esmc
from virnucpro.models.esmc.reference import load_lm_head, load_module
from virnucpro.models.lookup import imported_names
from virnucpro.models.manage import describe_model, import_model
from virnucpro.models.output_choice import OutputChoice, choose_outputs
from virnucpro.models.protein_tokens import tokenize
from virnucpro.store.feature_store import FeatureStore

SHAPE = ESM2Shape(n_layers=3, dim=32, n_heads=2)
CPU = torch.device("cpu")
PROTEINS = {
    "one": "M",
    "lower": "acdxbzuo",
    "odd": "MKJ*-.XZ",
    "a": random_protein(30),
    "b": random_protein(30, 2),
    "masks": MASK_LETTER + random_protein(12) + 3 * MASK_LETTER,
}
COMPLETE = OutputChoice(("all",), get_args(Pooling), get_args(Include))
Arrays = dict[str, dict[str, np.ndarray]]  # output -> protein -> rows


@pytest.fixture(scope="module")
def fair_esm() -> esm.ESM2:
    return make_fair_esm(SHAPE)


@pytest.fixture(scope="module")
def checkpoint(fair_esm, tmp_path_factory) -> Path:
    """A ``.pt`` file with its contact head next to it, as fair-esm publishes them."""
    folder = tmp_path_factory.mktemp("fair_esm")
    path = save_fair_esm(fair_esm, folder / "tiny.pt")
    save_contact_head(fair_esm, folder / "tiny-contact-regression.pt")
    return path


def specify(model: CheckpointModel, choice: OutputChoice, **changes) -> EncoderSpec:
    outputs = choose_outputs(choice, model, "float32")._asdict()
    return model.spec(**({"sha256": "", "precision": "fp32"} | outputs | changes))


def load(model: CheckpointModel, spec: EncoderSpec, weights: Path | None = None) -> Encoder:
    weights = weights or model.path
    if spec.needs_head:
        weights, digest = model.prepare_heads(spec, weights)
        spec = replace(spec, heads_sha256=digest)
    return load_encoder(spec, weights, CPU)


def compute(encoder: Encoder, n_tokens: int = 200) -> Arrays:
    """Return the rows of each output by protein, from several batches."""
    ids = list(PROTEINS)
    lengths = np.array([len(text) for text in PROTEINS.values()])
    arrays: Arrays = {spec.name: {} for spec in encoder.spec.outputs}
    for batch in encoder.plan(lengths.tolist(), n_tokens):
        outputs = encoder.start([PROTEINS[ids[i]] for i in batch]).outputs()
        for spec, rows in zip(encoder.spec.outputs, outputs, strict=True):
            parts = np.split(rows, np.cumsum(spec.count_rows(lengths[batch]))[:-1])
            arrays[spec.name] |= {ids[i]: part for i, part in zip(batch, parts, strict=True)}
    return arrays


def pooled(hidden: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """Return all vectors of a layer. ``hidden``: (n_residues + 2, dim)"""
    residues = hidden[1:-1]
    return {
        f"mean_layer{layer}": residues.mean(0, keepdim=True),
        f"max_layer{layer}": residues.max(0, keepdim=True).values,
        f"std_layer{layer}": residues.std(0, keepdim=True, correction=0),
        f"bos_layer{layer}": hidden[:1],
        f"residues_layer{layer}": residues,
    }


@torch.inference_mode()
def expected_outputs(model: esm.ESM2, protein: str) -> dict[str, np.ndarray]:
    """Return fair-esm's outputs for a protein. Perplexities are the logarithm of losses."""
    tokens = fair_esm_tokens(model, protein.replace(MASK_LETTER, "X"))
    tokens[0, 1:-1][[letter == MASK_LETTER for letter in protein]] = model.mask_idx
    results = model(tokens, list(range(1, SHAPE.n_layers + 1)), return_contacts=True)
    found: dict[str, torch.Tensor] = {}
    for layer, hidden in results["representations"].items():
        found |= pooled(hidden[0], layer)
    found["logits"] = results["logits"][0, 1:-1]
    found["contacts"] = results["contacts"].reshape(-1, 1)
    places = [i for i, letter in enumerate(protein, 1) if letter != MASK_LETTER]
    single = []
    masked = []
    for i in places:
        single.append(loss(results["logits"][0, i], tokens[0, i]))
        rows = tokens.clone()
        rows[0, i] = model.mask_idx
        masked.append(loss(model(rows)["logits"][0, i], tokens[0, i]))
    found["perplexity_single_pass"] = torch.tensor([[np.exp(np.mean(single))]])
    found["perplexity"] = torch.tensor([[np.exp(np.mean(masked))]])
    return {name: rows.numpy() for name, rows in found.items()}


def loss(logits: torch.Tensor, token: torch.Tensor) -> float:
    return -float(torch.log_softmax(logits.double(), 0)[token])


def distance(rows: np.ndarray, exact: np.ndarray) -> float:
    """Return the relative L2 distance. For vectors it is that of the worst row."""
    assert rows.shape == exact.shape
    if rows.shape[1] == 1:
        rows, exact = rows.T, exact.T
    lengths = np.maximum(np.linalg.norm(exact, axis=1), 1.0)  # a standard deviation may be 0
    return float((np.linalg.norm(rows - exact, axis=1) / lengths).max())


# ESM-2


def test_outputs_equal_fair_esm_in_float32(fair_esm, checkpoint):
    """The logarithm of a perplexity has at most the error of two logits, the worst in a row."""
    model = inspect_esm2(checkpoint)
    spec = specify(model, COMPLETE)
    ours = compute(load(model, spec))
    names = {name for layer in (1, 2, 3) for name in pooled(torch.zeros(3, 1), layer)}
    assert ours.keys() == names | {
        "contacts", "logits", "perplexity", "perplexity_single_pass",
    }  # fmt: skip
    limit = tolerance(SHAPE.n_layers + 1, torch.float32)
    for protein, text in PROTEINS.items():
        exact = expected_outputs(fair_esm, text)
        largest = float(np.linalg.norm(exact["logits"], axis=1).max())
        for name, rows in exact.items():
            if name.startswith("perplexity"):
                error = abs(math.log(ours[name][protein][0, 0] / rows[0, 0]))
                assert error < 2 * limit * largest, (name, protein)
            else:
                assert distance(ours[name][protein], rows) < limit, (name, protein)


def test_first_output_keeps_its_bytes(checkpoint):
    model = inspect_esm2(checkpoint)
    plain = compute(load(model, specify(model, OutputChoice())))
    complete = compute(load(model, specify(model, OutputChoice(("1", "-1"), ("none", "mean")))))
    assert list(plain) == ["mean_layer3"] and next(iter(complete)) == "mean_layer3"
    for protein, rows in plain["mean_layer3"].items():
        assert complete["mean_layer3"][protein].tobytes() == rows.tobytes()


def test_perplexity_keeps_to_the_token_budget(checkpoint):
    """No row has more than 32 tokens."""
    model = inspect_esm2(checkpoint)
    encoder = load(model, specify(model, OutputChoice(includes=("perplexity",))))
    assert encoder.count_tokens([30, 1]) == 31 * 32 + 2 * 3
    assert encoder.count_flop([30]) > 30 * encoder.count_flop([1])
    seen = []
    forward = encoder.model.forward
    encoder.model.forward = lambda batch: (seen.append(len(batch.tokens)), forward(batch))[1]
    small = compute(encoder, n_tokens=70)["perplexity"]
    assert 32 < max(seen) <= 70
    large = compute(encoder, n_tokens=10_000)["perplexity"]
    for protein, rows in small.items():
        assert np.allclose(rows, large[protein], rtol=1e-4)


def test_protein_of_masks_has_no_perplexity(checkpoint):
    model = inspect_esm2(checkpoint)
    encoder = load(model, specify(model, OutputChoice(includes=("perplexity",))))
    _, rows = encoder.start([3 * MASK_LETTER, "MKV"]).outputs()
    assert np.isnan(rows).ravel().tolist() == [True, False]


def test_fp16_overflow_recomputes_every_output(checkpoint, tmp_path):
    """The first MLP gives numbers beyond fp16."""
    content = torch.load(checkpoint, weights_only=False)
    name = "encoder.sentence_encoder.layers.0.fc2.weight"
    content["model"][name] = content["model"][name] * 1e5
    torch.save(content, tmp_path / "large.pt")
    model = inspect_esm2(tmp_path / "large.pt")
    choice = OutputChoice(("1", "3"), ("mean", "none"), ("logits",))
    rows = compute(load(model, specify(model, choice, precision="fp16")))
    exact = compute(load(model, specify(model, choice)))
    for output, by_protein in rows.items():
        for protein, values in by_protein.items():
            assert distance(values, exact[output][protein]) < 1e-2, (output, protein)


def test_converted_copy_has_its_heads(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    model = inspect_esm2(checkpoint)
    spec = specify(model, OutputChoice(includes=("contacts", "logits")))
    copy, _ = prepare(model, "fp32", lambda _: None)
    ours = compute(load(model, spec, copy))
    direct = compute(load(model, spec))
    for output, by_protein in ours.items():
        for protein, rows in by_protein.items():
            assert distance(rows, direct[output][protein]) < 1e-5, (output, protein)
    _, digest = model.prepare_heads(spec, copy)
    tensors = load_file(heads_path(copy))
    tensors["contacts.bias"] += 1
    save_file(tensors, heads_path(copy))
    with pytest.raises(UnavailableError, match="was replaced since the run began"):
        load_encoder(replace(spec, heads_sha256=digest), copy, CPU)


def test_partial_files_keep_every_output(checkpoint, tmp_path):
    """A worker is killed after one of three batches. The next one embeds the others."""
    model = inspect_esm2(checkpoint)
    choice = OutputChoice((), ("mean", "none"), ("contacts", "perplexity"))
    encoder = load(model, specify(model, choice))
    store = FeatureStore(SafeDir(tmp_path), tmp_path / "features", encoder.spec, "f")
    store.make_folder()
    texts = ["MKVLE", "MA", "MST"]
    orfs = [Orf(text, text, text, 0, len(text), ".", text) for text in texts]
    shard = Shard(0, tmp_path / "s", n_orfs=3, n_embedded=3, n_residues=10, sha256="")
    first = ShardEmbedding(encoder, store, None, Attempt(shard), orfs)
    first.store_rows([1], encoder.start([texts[1]]).outputs())
    first.save_partial([1], "owner")
    second = ShardEmbedding(encoder, store, None, Attempt(shard, n_failures=1), orfs)
    second.load_partial("owner")
    assert second.done.tolist() == [False, True, False]
    for output, rows in zip(first.outputs, second.outputs, strict=True):
        assert rows.select([1]).tobytes() == output.select([1]).tobytes()
    second.store_rows([0, 2], encoder.start([texts[0], texts[2]]).outputs())
    store.write(shard, second.to_embeddings())
    second.delete_partials("owner")
    assert not list(store.folder.glob(".*"))
    stored, _ = store.read(store.path(shard), store.expected(shard))
    assert stored.ids == tuple(texts)
    expected = encoder.start(texts).outputs()
    for array, rows in zip(stored.extra, expected[1:], strict=True):
        assert np.allclose(array.values, rows, rtol=1e-4, atol=1e-5), array.spec.name


# Choices


@pytest.fixture
def bare(checkpoint, tmp_path) -> ESM2Model:
    """The model without its contact head."""
    return inspect_esm2(Path(shutil.copy(checkpoint, tmp_path / "bare.pt")))


def test_import_copies_the_contact_head(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    model, _ = import_model(checkpoint, "mine")
    assert model.includes == get_args(Include) and "mine" in imported_names()
    assert not [name for name in imported_names() if "regression" in name]
    lines, _ = describe_model("mine")
    assert "includes    contacts, logits, perplexity, perplexity-single-pass" in lines


def test_order_of_choices_does_not_matter(checkpoint):
    model = inspect_esm2(checkpoint)
    one = choose_outputs(OutputChoice(("-1", "1"), ("none", "mean")), model, "float32")
    other = choose_outputs(OutputChoice(("1", "3", "3"), ("mean", "none")), model, "float32")
    assert one == other
    assert (one.layer, one.pooling) == (3, "mean")
    names = [output.name for output in one.extra]
    assert names == ["mean_layer1", "residues_layer1", "residues_layer3"]


@pytest.mark.parametrize("text", ["0", "4", "-4", "last", ""])
def test_layer_out_of_range_is_refused(checkpoint, text):
    with pytest.raises(UsageError, match="layer") as refusal:
        choose_outputs(OutputChoice(("1", text)), inspect_esm2(checkpoint), "float32")
    assert refusal.value.hint and refusal.value.option == "layers"


def test_missing_contact_head_is_named(bare):
    with pytest.raises(UsageError, match="--include contacts: bare has no contact head") as refusal:
        choose_outputs(OutputChoice(includes=("contacts",)), bare, "float32")
    assert f"bare-contact-regression.pt, as {bare.path.parent}" in refusal.value.hint


def test_folder_without_heads_is_named(tiny):
    model = inspect_esm2(tiny.model)
    for include in get_args(Include):
        with pytest.raises(UsageError, match=f"{include}: esm2_tiny has no") as refusal:
            choose_outputs(OutputChoice(includes=(include,)), model, "float32")
        assert refusal.value.hint


def test_fingerprint_depends_on_outputs(checkpoint):
    model = inspect_esm2(checkpoint)
    specs = [
        specify(model, choice)
        for choice in (
            OutputChoice(),
            OutputChoice(("1", "3")),
            OutputChoice((), ("mean", "max")),
            OutputChoice(includes=("logits",)),
        )
    ]
    assert "extra" not in specs[0].facts
    assert len({str(spec.facts) for spec in specs}) == len(specs)


# ESM C

ESMC_SHAPE = ESMCShape(n_layers=3, dim=64, n_heads=2, inner=128)


@pytest.fixture(scope="module")
def esmc(tmp_path_factory) -> Path:
    """A random ESM C with a language-model head, named as in the published files."""
    folder = tmp_path_factory.mktemp("esmc") / "tiny_esmc"
    save_esmc(folder, random_esmc(ESMC_SHAPE, seed=1))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    dim = ESMC_SHAPE.dim
    for name, size in (("0", (dim, dim)), ("2", (dim,)), ("3", (64, dim))):
        weight = torch.randn(size, generator=generator) * size[-1] ** -0.5
        tensors[f"lm_head.{name}.weight"] = weight
        tensors[f"lm_head.{name}.bias"] = 0.1 * torch.randn(size[0], generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_esmc_outputs_equal_transformers(esmc):
    pytest.importorskip("transformers", minversion="5.23")
    model = inspect_esmc(esmc)
    assert model.includes == ("logits", "perplexity", "perplexity-single-pass")
    choice = OutputChoice(("all",), get_args(Pooling), ("logits", "perplexity-single-pass"))
    ours = compute(load(model, specify(model, choice)))
    module = load_module(esmc, CPU)
    head = load_lm_head(esmc, CPU)
    limit = tolerance(ESMC_SHAPE.n_layers + 1, torch.float32)

    for protein, text in PROTEINS.items():
        tokens = torch.from_numpy(tokenize([text]))[None]
        with torch.inference_mode():
            out = module(tokens, output_hidden_states=True)
            states = [*out.hidden_states[:-1], out.last_hidden_state]
            expected = {"logits": head(out.last_hidden_state[0])[1:-1]}
        for layer in range(1, ESMC_SHAPE.n_layers + 1):
            expected |= pooled(states[layer][0], layer)
        for name, rows in expected.items():
            assert distance(ours[name][protein], rows.numpy()) < limit, (name, protein)


def test_esmc_has_no_contact_head(esmc):
    with pytest.raises(UsageError, match="tiny_esmc has no contact head") as refusal:
        choose_outputs(OutputChoice(includes=("contacts",)), inspect_esmc(esmc), "float32")
    assert "no ESM C has a contact head" in refusal.value.hint
