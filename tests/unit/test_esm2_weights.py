"""Checkpoints are recognised by content, give equal vectors in either format, and run no code."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import esm
import pytest
import torch
from fair_esm_reference import (
    LONGEST,
    fair_esm_hidden,
    fair_esm_tokens,
    make_fair_esm,
    random_protein,
    save_fair_esm,
    stored_config,
    stored_state,
    tolerance,
    worst_row,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from virnucpro.core.errors import UnavailableError
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import load_esm2, save_esm2
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.packing import PackedBatch

SHAPE = ESM2Shape(n_layers=2, dim=64, n_heads=2)
PROTEINS = ["M", "MKXBUZO-J*.A", random_protein(60), random_protein(LONGEST)]
HUGGING_FACE = {  # fair-esm's name of a module -> its name on the Hugging Face hub
    "embed_tokens": "embeddings.word_embeddings",
    "emb_layer_norm_after": "encoder.emb_layer_norm_after",
    "layers": "encoder.layer",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.rot_emb": "attention.self.rotary_embeddings",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "final_layer_norm": "LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}


@pytest.fixture(scope="module")
def fair_esm() -> esm.ESM2:
    return make_fair_esm(SHAPE)


@pytest.fixture(scope="module")
def reference(fair_esm) -> Tensor:
    return torch.cat(fair_esm_hidden(fair_esm, PROTEINS, SHAPE.n_layers))


def embed(path: Path) -> Tensor:
    """Return (n_tokens, dim) for all proteins after the last layer, in float32."""
    n_layers = inspect_esm2(path).shape.n_layers
    model = load_esm2(path, n_layers, torch.float32, torch.device("cpu"))
    return model(PackedBatch.from_sequences(PROTEINS))


def hub_config(model: esm.ESM2) -> dict[str, object]:
    return {
        "model_type": "esm",
        "architectures": ["EsmForMaskedLM"],
        "vocab_size": 33,
        "mask_token_id": 32,
        "pad_token_id": 1,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention_heads,
        "intermediate_size": 4 * model.embed_dim,
        "position_embedding_type": "rotary",
        "token_dropout": model.token_dropout,
        "emb_layer_norm_before": False,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 1200,
    }


def hub_state(model: esm.ESM2, prefix: str = "esm.") -> dict[str, Tensor]:
    """Return the encoder's tensors under the names on the Hugging Face Hub."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(("lm_head.", "contact_head.")):
            continue
        first, *rest = name.split(".")
        module = ".".join(rest[1:-1])
        kind = rest[-1]
        words = (
            [HUGGING_FACE[first], rest[0], HUGGING_FACE[module]]
            if module
            else [HUGGING_FACE[first]]
        )
        state[prefix + ".".join([*words, kind])] = tensor
    return state


def save_hub_folder(model: esm.ESM2, folder: Path, prefix: str = "esm.") -> Path:
    """Write a folder as on the Hub: config.json and model.safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hub_config(model)))
    state = {name: tensor.clone() for name, tensor in hub_state(model, prefix).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    """Rename tensors by the start of their name. An empty new name drops the tensor."""
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        start = next((start for start in names if name.startswith(start)), None)
        if start is None:
            state[name] = tensor
        elif names[start]:
            state[names[start] + name.removeprefix(start)] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


# fair-esm's .pt


def test_oracle_file_loads_in_fair_esm(fair_esm, tmp_path):
    path = save_fair_esm(fair_esm, tmp_path / "model.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path)
    with pytest.warns(UserWarning, match="Regression weights not found"):
        loaded, _ = esm.pretrained.load_model_and_alphabet_core("esm2_t2", content)
    for name, tensor in fair_esm.state_dict().items():
        assert name.startswith("contact_head.") or torch.equal(tensor, loaded.state_dict()[name])


@pytest.mark.parametrize("kind", [Tensor.detach, torch.nn.Parameter], ids=["tensors", "parameters"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_pt_file_gives_the_vectors_of_fair_esm(fair_esm, reference, tmp_path, zipped, kind):
    state = {name: kind(tensor) for name, tensor in stored_state(fair_esm).items()}
    path = tmp_path / "esm2_t33_650M_UR50D.pt"  # whose content says what it is
    content = {"cfg": {"model": stored_config(fair_esm)}, "model": state}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    checkpoint = inspect_esm2(path)
    assert (checkpoint.shape, checkpoint.name) == (SHAPE, "esm2_t33_650M_UR50D")
    assert worst_row(embed(path), reference) < tolerance(SHAPE.n_layers, torch.float32)


@pytest.mark.parametrize("n_heads", [1, 2, 4])
def test_rotary_buffer_gives_the_heads(tmp_path, n_heads):
    shape = replace(SHAPE, n_heads=n_heads)
    model = make_fair_esm(shape)
    path = tmp_path / "model.pt"
    torch.save({"model": stored_state(model)}, path)
    assert inspect_esm2(path).shape == shape
    expected = torch.cat(fair_esm_hidden(model, PROTEINS, shape.n_layers))
    assert worst_row(embed(path), expected) < tolerance(shape.n_layers, torch.float32)


# a Hugging Face folder


@pytest.fixture(scope="module")
def transformers() -> types.ModuleType:
    """Import transformers here, because collecting tests would take a second longer."""
    return importlib.import_module("transformers")


@torch.inference_mode()
def last_hidden_state(model: torch.nn.Module, fair_esm: esm.ESM2) -> Tensor:
    model = model.eval()
    tokens = [fair_esm_tokens(fair_esm, protein) for protein in PROTEINS]
    return torch.cat([model(input_ids=one).last_hidden_state[0] for one in tokens])


@pytest.mark.parametrize("prefix", ["", "esm."], ids=["EsmModel", "EsmForMaskedLM"])
def test_hub_folder_equals_transformers(transformers, fair_esm, tmp_path, prefix):
    folder = save_hub_folder(fair_esm, tmp_path / "model", prefix)
    expected = last_hidden_state(transformers.EsmModel.from_pretrained(folder), fair_esm)
    assert worst_row(embed(folder), expected) < tolerance(SHAPE.n_layers, torch.float32)
    pt = save_fair_esm(fair_esm, tmp_path / "model.pt")
    assert inspect_esm2(pt).shape == inspect_esm2(folder).shape == SHAPE
    assert inspect_esm2(pt).encoder_id == inspect_esm2(folder).encoder_id
    assert torch.equal(embed(pt), embed(folder))


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("kind", ["EsmModel", "EsmForMaskedLM"])
@pytest.mark.parametrize("is_new", [False, True], ids=["of the hub", "new"])
def test_model_saved_by_transformers_agrees(
    transformers, fair_esm, tmp_path, is_new, kind, max_shard_size
):
    family = getattr(transformers, kind)
    if is_new:
        model = family(transformers.EsmConfig(**hub_config(fair_esm)))
    else:
        model = family.from_pretrained(save_hub_folder(fair_esm, tmp_path / "hub"))
    model.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)
    n_files = len(list((tmp_path / "saved").glob("*.safetensors")))
    assert (n_files > 1) == (max_shard_size == "100KB")
    expected = last_hidden_state(getattr(model, "esm", model), fair_esm)
    limit = tolerance(SHAPE.n_layers, torch.float32)
    assert worst_row(embed(tmp_path / "saved"), expected) < limit


# what we write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_model_is_loaded_to_the_last_bit(fair_esm, tmp_path, dtype):
    cpu = torch.device("cpu")
    pt = save_fair_esm(fair_esm, tmp_path / "model.pt")
    saved = load_esm2(pt, SHAPE.n_layers, dtype, cpu)
    saved.inv_freq[1] += 0.01  # kept unchanged, not recomputed
    save_esm2(tmp_path / "saved", saved)
    assert inspect_esm2(tmp_path / "saved").shape == SHAPE
    loaded = load_esm2(tmp_path / "saved", SHAPE.n_layers, dtype, cpu)
    expected = saved.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_saved_model_loads_in_transformers(transformers, fair_esm, reference, tmp_path):
    pt = save_fair_esm(fair_esm, tmp_path / "model.pt")
    model = load_esm2(pt, SHAPE.n_layers, torch.float32, torch.device("cpu"))
    parameters = fair_esm.lm_head.named_parameters()  # "weight" is that of the embedding
    lm_head = {f"lm_head.{name}": tensor for name, tensor in parameters if name != "weight"}
    assert len(lm_head) == 5
    save_esm2(tmp_path / "plain", model)
    save_esm2(tmp_path / "masked", model, lm_head)
    limit = tolerance(SHAPE.n_layers, torch.float32)
    for name in ("plain", "masked"):
        found = transformers.EsmModel.from_pretrained(tmp_path / name)
        assert worst_row(last_hidden_state(found, fair_esm), reference) < limit
    assert inspect_esm2(tmp_path / "plain").encoder_id == inspect_esm2(pt).encoder_id
    assert inspect_esm2(tmp_path / "masked").encoder_id == inspect_esm2(pt).encoder_id
    masked = transformers.EsmForMaskedLM
    found, report = masked.from_pretrained(tmp_path / "masked", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not [name for name in report["missing_keys"] if "contact_head" not in name]
    tokens = fair_esm_tokens(fair_esm, PROTEINS[2])
    logits = found.eval()(tokens).logits[0].detach()
    # the head has no more roundings than a layer
    limit = tolerance(SHAPE.n_layers + 1, torch.float32)
    assert worst_row(logits, fair_esm(tokens)["logits"][0]) < limit


# either format


def test_encoder_id_follows_weights_and_shape(fair_esm, tmp_path):
    models = [fair_esm, make_fair_esm(replace(SHAPE, n_heads=4))]
    models.append(make_fair_esm(replace(SHAPE, token_dropout=False)))
    for name in (
        "embed_tokens.weight",
        "emb_layer_norm_after.weight",
        "layers.0.self_attn.v_proj.weight",  # fine-tuned in its layers only
    ):
        models.append(make_fair_esm(SHAPE))
        models[-1].state_dict()[name].mul_(1.01)
    paths = [save_fair_esm(model, tmp_path / f"{i}.pt") for i, model in enumerate(models)]
    assert len({inspect_esm2(path).encoder_id for path in paths}) == len(models)


def test_token_dropout_follows_the_configuration(tmp_path):
    shape = replace(SHAPE, token_dropout=False)
    model = make_fair_esm(shape)
    expected = torch.cat(fair_esm_hidden(model, PROTEINS, shape.n_layers))
    pt = save_fair_esm(model, tmp_path / "model.pt")
    folder = save_hub_folder(model, tmp_path / "model")
    for path in (pt, folder):
        assert not inspect_esm2(path).shape.token_dropout
        assert worst_row(embed(path), expected) < tolerance(shape.n_layers, torch.float32)


ROTARY = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
NO_FREQUENCIES = {ROTARY.format(0): "", ROTARY.format(1): ""}
WRITTEN_BY = {  # where a Hugging Face folder has the frequencies
    "transformers 4": {},
    "transformers 5": NO_FREQUENCIES | {ROTARY.format(0): ROTARY.format("*")},
    "transformers 5 from no frequencies": NO_FREQUENCIES
    | {ROTARY.format(0): "esm.rotary_embeddings.inv_freq"},
}


@pytest.mark.parametrize("writer", [None, *WRITTEN_BY])
def test_rotary_frequencies_are_those_of_the_file(tmp_path, writer):
    """In fp16, as in the published 3B, they are rounded, which shows."""
    limit = tolerance(SHAPE.n_layers, torch.float32)
    model = make_fair_esm(SHAPE)
    exact = torch.cat(fair_esm_hidden(model, PROTEINS[-1:], SHAPE.n_layers))
    path = save_fair_esm(model.half(), tmp_path / "half.pt")
    expected = fair_esm_hidden(model.float(), PROTEINS, SHAPE.n_layers)
    assert worst_row(expected[-1], exact) > limit
    if writer is not None:
        path = save_hub_folder(model, tmp_path / "model")
        rename_tensors(path, WRITTEN_BY[writer])
    assert worst_row(embed(path), torch.cat(expected)) < limit


def test_folder_without_rotary_gets_defaults(fair_esm, reference, tmp_path):
    folder = save_hub_folder(fair_esm, tmp_path / "model")
    rename_tensors(folder, NO_FREQUENCIES)
    assert worst_row(embed(folder), reference) < tolerance(SHAPE.n_layers, torch.float32)


def test_checkpoint_hash_covers_all_files(transformers, fair_esm, tmp_path):
    pt = save_fair_esm(fair_esm, tmp_path / "model.pt")
    assert inspect_esm2(pt).sha256() == hashlib.sha256(pt.read_bytes()).hexdigest()
    saved = tmp_path / "saved"
    model = transformers.EsmModel.from_pretrained(save_hub_folder(fair_esm, tmp_path / "hub"))
    model.save_pretrained(saved, max_shard_size="100KB")
    files = sorted(saved.glob("*.safetensors"))
    checkpoint = inspect_esm2(saved)
    heard = []
    before = checkpoint.sha256(heard.append)
    assert heard == sorted(heard)
    assert (
        heard[-1] == checkpoint.footprint.file_bytes == sum(file.stat().st_size for file in files)
    )
    save_file(load_file(files[-1]), files[-1], metadata={"format": "pt", "changed": "yes"})
    assert inspect_esm2(saved).sha256() != before


# refusals


def refusal(path: Path) -> UnavailableError:
    """Return the error, which names the path and has a hint."""
    with pytest.raises(UnavailableError) as caught:
        load_esm2(path, SHAPE.n_layers, torch.float32, torch.device("cpu"))
    assert str(path) in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "model.pt"
    for content in (b"", b"P", b"hello, this is text\n" * 9, b"<!DOCTYPE html>", b'{"a": 1}'):
        path.write_bytes(content)
        error = refusal(path)
        assert "is not an ESM-2 checkpoint" in str(error), content
        assert "copy or download it again" in str(error.hint)
    path.unlink()
    os.mkfifo(path)
    assert "it is not a plain file" in str(refusal(path))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("n_bytes", [18, 20, 1500, 100_000, -1])
def test_truncated_checkpoint_is_refused_as_damaged(fair_esm, tmp_path, zipped, n_bytes):
    path = tmp_path / "model.pt"
    content = {"cfg": {"model": stored_config(fair_esm)}, "model": stored_state(fair_esm)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:n_bytes])
    error = refusal(path)
    assert "damaged" in f"{error} {error.hint}"


def test_only_a_namespace_is_unpickled(fair_esm, tmp_path):
    path = tmp_path / "model.pt"
    before = set(torch.serialization.get_safe_globals())
    inspect_esm2(save_fair_esm(fair_esm, path))
    assert set(torch.serialization.get_safe_globals()) == before
    other = types.SimpleNamespace(**vars(stored_config(fair_esm)))
    torch.save({"cfg": {"model": other}, "model": stored_state(fair_esm)}, path)
    assert "more than tensors" in str(refusal(path))


@pytest.mark.parametrize("content", [[1, 2], {"weights": {}}, {"model": [1]}])
def test_pt_file_without_a_model_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "model.pt")
    assert "no state dict" in str(refusal(tmp_path / "model.pt"))


LACKING = {
    "another vocabulary": ({"embed_tokens.weight": torch.zeros(25, SHAPE.dim)}, "25 tokens"),
    "no bias": ({"layers.1.self_attn.v_proj.bias": None}, "layers.1.self_attn.v_proj.bias"),
    "no last norm": ({"emb_layer_norm_after.weight": None}, "emb_layer_norm_after.weight"),
    "a bias of another shape": ({"layers.1.fc1.bias": torch.zeros(3)}, "(3,)"),
    "ESM-1": (
        {
            **{f"layers.{i}.self_attn.rot_emb.inv_freq": None for i in range(SHAPE.n_layers)},
            "embed_positions.weight": torch.zeros(1026, SHAPE.dim),
        },
        "rot_emb.inv_freq",
    ),
}


@pytest.mark.parametrize("fault", LACKING)
def test_pt_file_with_other_tensors_is_refused(fair_esm, tmp_path, fault):
    changes, said = LACKING[fault]
    changed = {f"encoder.sentence_encoder.{name}": tensor for name, tensor in changes.items()}
    state = {**stored_state(fair_esm), **changed}
    content = {"model": {name: value for name, value in state.items() if value is not None}}
    if fault != "ESM-1":
        content["cfg"] = {"model": stored_config(fair_esm)}
    torch.save(content, tmp_path / "model.pt")
    assert said in str(refusal(tmp_path / "model.pt"))


def promise_columns(folder: Path, n_columns: int) -> None:
    """Let the header of the weights claim more than the file contains."""
    name = "esm.embeddings.word_embeddings.weight"
    promised = {"dtype": "F32", "shape": [33, n_columns], "data_offsets": [0, 4]}
    header = json.dumps({name: promised}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(content)


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def put_a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def config(**changes: object) -> Callable[[Path], None]:
    return partial(change_config, **changes)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (config(position_embedding_type="absolute"), "of an ESM-1 model"),
        (config(emb_layer_norm_before=True), "of an ESM-1 model"),
        (config(model_type="bert"), "config.json of another kind of model"),
        (config(layer_norm_eps=1e-12), "layer_norm_eps is 1e-12"),
        (config(rope_theta=5000.0), "rope_theta is 5000.0"),
        *(
            (config(num_attention_heads=number), "is not an ESM-2 checkpoint")
            for number in (float("inf"), float("nan"), 1e300, 10**400)
        ),
        (
            partial(rename_tensors, names={"esm.encoder.layer.0.": ""}),
            "no tensor encoder.layer.0.attention",
        ),
        *((partial(promise_columns, n_columns=n), "cannot be read: ") for n in (10**9, 1 << 62)),
        (cut_off, "cannot be read: "),
        (put_a_pipe, "it is not a plain file"),
        (lambda folder: (folder / "config.json").unlink(), "is not a model: it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read: Expecting"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "no *.safetensors file",
        ),
    ],
)
def test_folder_without_a_complete_esm2_is_refused(fair_esm, tmp_path, spoil, said):
    folder = save_hub_folder(fair_esm, tmp_path / "model")
    spoil(folder)
    assert said in str(refusal(folder))


# verification


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("stored", "ours"),
    [("layers.1.fc2.weight", "layers.1.down.weight"), ("layers.0.self_attn.k_proj.bias", "qkv")],
)
def test_verify_finds_numbers_that_are_not_finite(tmp_path, stored, ours, number):
    model = make_fair_esm(SHAPE)
    model.state_dict()[stored].view(-1)[-1] = number
    path = save_fair_esm(model, tmp_path / "model.pt")
    with pytest.raises(UnavailableError, match=rf"{ours}.* not finite"):
        inspect_esm2(path).verify()


def test_verify_finds_a_missing_tensor(fair_esm, tmp_path):
    folder = save_hub_folder(fair_esm, tmp_path / "model")
    inspect_esm2(folder).verify()
    rename_tensors(folder, {"esm.encoder.layer.1.output.dense.bias": ""})
    with pytest.raises(UnavailableError, match=r"layer\.1\.output\.dense\.bias"):
        inspect_esm2(folder).verify()


ROTARY_OF_PT = "layers.0.self_attn.rot_emb.inv_freq"
ABSURD = {
    "a number for a name": {5: torch.zeros(3)},
    "a flat embedding": {"embed_tokens.weight": torch.zeros(33)},
    "a single number": {"embed_tokens.weight": torch.tensor(1.0)},
    "no dimension": {"embed_tokens.weight": torch.zeros(33, 0), ROTARY_OF_PT: torch.zeros(2)},
    "no frequency": {"embed_tokens.weight": torch.zeros(33, 8), ROTARY_OF_PT: torch.zeros(0)},
    "a layer of 5000 digits": {
        "embed_tokens.weight": torch.zeros(33, 8),
        f"layers.{'9' * 5000}.x": torch.zeros(1),
    },
}


@pytest.mark.parametrize("n_heads", [0, -2, "abc", [1]])
@pytest.mark.parametrize("name", ABSURD)
def test_absurd_checkpoint_is_refused(tmp_path, name, n_heads):
    path = tmp_path / "model.pt"
    cfg = {"model": argparse.Namespace(encoder_attention_heads=n_heads)}
    torch.save({"model": ABSURD[name], "cfg": cfg}, path)
    with pytest.raises(UnavailableError, match="is not an ESM-2 checkpoint"):
        inspect_esm2(path)


# Files that claim more than they contain


def repeated(*shape: int) -> Tensor:
    """Store one number in the file, whatever the shape."""
    return torch.zeros(1).expand(*shape)


def one_layer(dim: int, embedding: Tensor, matrix: Tensor) -> dict[str, Tensor]:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    return {
        "embed_tokens.weight": embedding,
        "emb_layer_norm_after.weight": torch.zeros(dim),
        ROTARY_OF_PT: torch.zeros(2),
        **{f"layers.0.{name}.weight": matrix for name in (*names, "fc1", "fc2")},
    }


LARGE = 10**9  # dimensions: an embedding of 132 GB
BOMBS = {
    "a number repeated": {**one_layer(8, repeated(33, LARGE), repeated(8, 8))},
    "a sparse tensor": one_layer(
        8,
        torch.sparse_coo_tensor([[0], [0]], [1.0], (33, LARGE), check_invariants=True),
        repeated(8, 8),
    ),
    "matrices of one number": one_layer(4096, torch.zeros(33, 4096), torch.zeros(1, 1)),
    "whole numbers": one_layer(
        8, torch.zeros(33, 8, dtype=torch.int64), torch.zeros(8, 8, dtype=torch.int64)
    ),
}


# torch 2.15 says that it looks at a sparse tensor, which we refuse
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", BOMBS)
def test_oversized_claim_is_refused_early(tmp_path, name, zipped):
    path = tmp_path / "model.pt"
    torch.save({"model": BOMBS[name]}, path, _use_new_zipfile_serialization=zipped)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnavailableError, match="is not an ESM-2 checkpoint"):
        inspect_esm2(path)
    with pytest.raises(UnavailableError, match="is not an ESM-2 checkpoint"):
        load_esm2(path, 1, torch.float32, torch.device("cpu"))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < 100_000, "kB on Linux"


def test_layers_that_share_one_storage_are_refused(fair_esm, tmp_path):
    """Each tensor is complete by itself, but the file contains a fraction of the model."""
    state = stored_state(make_fair_esm(replace(SHAPE, n_layers=12, dim=64)))
    one = torch.zeros(max(tensor.numel() for tensor in state.values()))
    shared = {name: one[: tensor.numel()].view(tensor.shape) for name, tensor in state.items()}
    path = tmp_path / "model.pt"
    torch.save({"cfg": {"model": stored_config(fair_esm)}, "model": shared}, path)
    assert "cannot hold" in str(refusal(path))


def test_compressed_archive_is_refused(fair_esm, tmp_path):
    """Its decompressed size is not bounded."""
    path = save_fair_esm(fair_esm, tmp_path / "model.pt")
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for name in whole.namelist():
            out.writestr(name, whole.read(name))
    assert "it is compressed" in str(refusal(packed))
