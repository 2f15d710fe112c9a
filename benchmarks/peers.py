"""Run the other programs that ours is compared with: transformers, FastPLMs, OpenVINO, esm-cpp.

transformers is optional (``pip install '.[oracle]'``); without it, loading raises an error with the
command. On CPUs, OpenVINO (``'.[oracle,openvino]'``) is compared if it is installed, also in int8
with ``pip install nncf``. So is esm-cpp in float32 and int8 (``pip install --no-deps esm-cpp``,
which asks for an older NumPy, but runs with ours). It gives vectors of one protein at a time, and
uses all cores that it may run on.

FastPLMs is on GitHub alone (Synthyra/FastPLMs). It is compared if its folder ``src`` is in
``PYTHONPATH`` and einops is installed, with SDPA: its other attention needs kernels from the
network.

In bf16, all of them keep the rotary frequencies in float32: with 8 significant bits the angles are
wrong, and vectors are wrong beyond some 256 residues.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from timing import (
    Setting,
    TimedEncoder,
    Way,
    fair_esm_ways,
    padded_tokens,
)
from torch import Tensor, nn

from virnucpro.core.errors import UnavailableError
from virnucpro.core.recipe import Precision
from virnucpro.models.esm2.config import N_TOKENS
from virnucpro.models.esm2.loading import fair_esm_state_dict
from virnucpro.models.packing import to_device
from virnucpro.models.protein_tokens import EXTRA_TOKENS, SpecialToken, tokenize
from virnucpro.models.transformer import rotary_frequencies
from virnucpro.models.validation.random_weights import make_proteins
from virnucpro.models.validation.reference import plan_padded

_N_CALIBRATION = 8  # batches of proteins

# a part of a layer in fair-esm -> in transformers
_LAYER_PARTS = {
    "self_attn_layer_norm": "attention.LayerNorm",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "final_layer_norm": "LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}


def peer_ways(setting: Setting, *, has_bf16: bool) -> list[Way]:
    """The ways to compare: fair-esm as published, then the others with their fastest settings."""
    ways = fair_esm_ways(setting, has_bf16=has_bf16)
    tokens = f"{padded_tokens(setting)} tokens"
    if has_bf16:
        ways.append(Way("transformers", "bf16", f"SDPA, {tokens}", transformers_bf16))
        if find_spec("fastplms"):
            ways.append(Way("FastPLMs", "bf16", f"SDPA, {tokens}", fastplms_bf16))
    if setting.device == "cpu" and find_spec("openvino"):
        precision: Precision = "bf16" if has_bf16 else "fp32"
        load = partial(openvino_model, precision=precision)
        ways.append(Way("openvino", precision, tokens, load))
        if find_spec("nncf"):
            ways.append(Way("openvino", "int8", tokens, openvino_int8))
    if setting.device == "cpu" and find_spec("esm_cpp"):
        ways.append(Way("esm-cpp", "fp32", "one by one", esm_cpp_fp32))
        ways.append(Way("esm-cpp", "int8", "one by one", esm_cpp_int8))
    return ways


def plan_of(setting: Setting, proteins: Sequence[str]) -> list[list[int]]:
    """Plan padded batches that fill the device, sorted by length."""
    return plan_padded([len(protein) for protein in proteins], padded_tokens(setting))


def transformers_bf16(setting: Setting) -> TimedEncoder:
    """``EsmModel`` with SDPA in bf16, sorted and padded, fed from our own quick tokenizer."""
    return _in_bf16(setting, _esm_model(setting))


def fastplms_bf16(setting: Setting) -> TimedEncoder:
    """``FastEsmModel`` with SDPA in bf16, on the same batches."""
    fast_esm = _import("fastplms.models.esm2.modeling_fastesm", "oracle")
    with torch.device(setting.device):
        model = fast_esm.FastEsmModel(fast_esm.FastEsmConfig(**_esm_config(setting))).eval()
    _load_weights(model.esm, setting)
    return _in_bf16(setting, model.requires_grad_(False))


def _in_bf16(setting: Setting, model: nn.Module) -> TimedEncoder:
    _set_precision(model, setting, torch.bfloat16)

    @torch.inference_mode()
    def embed(proteins: list[str]) -> Tensor:
        tokens = to_device(_pad(proteins).numpy(), torch.device(setting.device))
        hidden = model(
            input_ids=tokens, attention_mask=tokens.ne(SpecialToken.PAD)
        ).last_hidden_state
        return _mean_of_residues(hidden, proteins)

    return TimedEncoder(model, setting, partial(plan_of, setting), embed)


def openvino_model(setting: Setting, precision: Precision) -> TimedEncoder:
    """transformers' ``EsmModel``, converted by OpenVINO, with as many threads as torch has."""
    converted = _convert_to_openvino(setting)
    return _compile_by_openvino(setting, converted, precision)


def openvino_int8(setting: Setting) -> TimedEncoder:
    """The same with products of 8-bit weights and activations, by NNCF. The rest is float32.

    Activations are calibrated on random proteins.
    """
    nncf = importlib.import_module("nncf")
    batches = [make_proteins(1_000, seed) for seed in range(_N_CALIBRATION)]
    inputs = [
        (tokens, tokens != SpecialToken.PAD)
        for tokens in (_pad(batch).numpy() for batch in batches)
    ]
    logging.getLogger("nncf").setLevel(logging.ERROR)
    converted = _convert_to_openvino(setting)
    with redirect_stdout(io.StringIO()):  # its progress bars, among our rows
        quantised = nncf.quantize(
            converted,
            nncf.Dataset(inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=_N_CALIBRATION,
        )
    return _compile_by_openvino(setting, quantised, "fp32")


def _convert_to_openvino(setting: Setting) -> Any:  # noqa: ANN401 - packages without types
    openvino = _import("openvino", "oracle,openvino")
    example = _pad(["MKVLA", "MKV"])
    model = LastHiddenState(_esm_model(setting))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the converter's use of torch, and about tracing
        return openvino.convert_model(model, example_input=(example, example.ne(SpecialToken.PAD)))


def _compile_by_openvino(
    setting: Setting,
    converted: Any,  # noqa: ANN401 - packages without types
    precision: Precision,
) -> TimedEncoder:
    openvino = _import("openvino", "oracle,openvino")
    settings = {
        "INFERENCE_PRECISION_HINT": {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}[precision],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = OpenVinoModel(openvino.Core().compile_model(converted, "CPU", settings))

    @torch.inference_mode()
    def embed(proteins: list[str]) -> Tensor:
        return _mean_of_residues(compiled(_pad(proteins)), proteins)

    return TimedEncoder(compiled, setting, partial(plan_of, setting), embed)


def esm_cpp_fp32(setting: Setting) -> TimedEncoder:
    return _esm_cpp(setting, EsmCppModel(_load_esm_cpp(setting)))


def esm_cpp_int8(setting: Setting) -> TimedEncoder:
    """Products of 8-bit weights and activations, without its smoothing of activations."""
    model = _load_esm_cpp(setting)
    model.quantize_weights()
    return _esm_cpp(setting, EsmCppModel(model))


def _esm_cpp(setting: Setting, model: EsmCppModel) -> TimedEncoder:
    @torch.inference_mode()
    def embed(proteins: list[str]) -> Tensor:
        return torch.stack([model(protein)[1:-1].mean(dim=0) for protein in proteins])

    return TimedEncoder(model, setting, partial(plan_of, setting), embed)


def _load_esm_cpp(setting: Setting) -> Any:  # noqa: ANN401 - packages without types
    """Load a model into esm-cpp, which reads the files of an earlier transformers."""
    encoder = _esm_model(setting)
    hub = _import("transformers", "oracle")
    complete = hub.EsmForMaskedLM(encoder.config)
    complete.esm.load_state_dict(encoder.state_dict(), strict=False)
    state = {name: value.contiguous() for name, value in complete.state_dict().items()}
    frequencies = state.pop("esm.rotary_embeddings.inv_freq")
    for i in range(setting.shape.n_layers):
        name = f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq"
        state[name] = frequencies.clone()
    state["lm_head.decoder.weight"] = state["lm_head.decoder.weight"].clone()  # shared
    with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
        path = Path(folder) / "model.safetensors"
        save_file(state, path)
        return importlib.import_module("esm_cpp").Model.load_from_safetensors(str(path))


class EsmCppModel(nn.Module):
    """A model in esm-cpp. A protein -> (length + 2, dim) float32"""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - packages without types
        super().__init__()
        self.model = model

    def forward(self, protein: str) -> Tensor:
        tokens = tokenize([protein]).astype(np.int32)
        _, hidden_states = self.model.forward_with_hidden_states(tokens)
        return torch.from_numpy(hidden_states[-1])


class LastHiddenState(nn.Module):
    """An ``EsmModel`` that returns only its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=tokens, attention_mask=is_token).last_hidden_state
        return hidden


class OpenVinoModel(nn.Module):
    """A model compiled by OpenVINO. (n, longest + 2) -> (n, longest + 2, dim) float32"""

    def __init__(self, compiled: Any) -> None:  # noqa: ANN401 - packages without types
        super().__init__()
        self.compiled = compiled

    def forward(self, tokens: Tensor) -> Tensor:
        answer = self.compiled([tokens.numpy(), tokens.ne(SpecialToken.PAD).numpy()])
        return torch.from_numpy(answer[0])


def _esm_model(setting: Setting) -> nn.Module:
    """``EsmModel`` with SDPA, in float32."""
    hub = _import("transformers", "oracle")
    with torch.device(setting.device):
        model = hub.EsmModel(hub.EsmConfig(**_esm_config(setting)), add_pooling_layer=False).eval()
    _load_weights(model, setting)
    module: nn.Module = model.requires_grad_(False)
    return module


def _esm_config(setting: Setting) -> dict[str, Any]:
    shape = setting.shape
    return {
        "vocab_size": N_TOKENS,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "intermediate_size": 4 * shape.dim,
        "position_embedding_type": "rotary",
        "token_dropout": shape.token_dropout,
        "layer_norm_eps": 1e-5,
        "pad_token_id": SpecialToken.PAD,
        "mask_token_id": 32,
        "max_position_embeddings": 4096,
        "attn_implementation": "sdpa",
    }


def _load_weights(model: Any, setting: Setting) -> None:  # noqa: ANN401 - packages without types
    """Load the checkpoint into an ``EsmModel`` or an encoder with the same names."""
    assert model.config._attn_implementation == "sdpa"
    weights = fair_esm_state_dict(setting.checkpoint)
    state = {_name_in_transformers(name): value for name, value in weights.items()}
    lacking = model.load_state_dict(state, strict=False)
    assert not lacking.unexpected_keys
    assert all("inv_freq" in k or "contact" in k or "position" in k for k in lacking.missing_keys)


def _import(module: str, extras: str) -> Any:  # noqa: ANN401 - packages without types
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"{module} is not installed; run in the source folder: "
            f"pip install -c constraints.txt -e '.[{extras}]' ({error})"
        ) from error


def _set_precision(model: nn.Module, setting: Setting, dtype: torch.dtype) -> None:
    """Convert all but the rotary frequencies, which stay float32 and have the same bits as ours."""
    model.to(dtype)
    frequencies = rotary_frequencies(setting.shape.head_dim).to(setting.device)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = frequencies


def _pad(proteins: list[str]) -> Tensor:
    """The tokens of proteins, padded at the end. -> (n_proteins, longest + 2)"""
    seqlens = np.array([len(protein) + EXTRA_TOKENS for protein in proteins])
    rows = np.full((len(proteins), seqlens.max()), SpecialToken.PAD, dtype=np.int64)
    rows[np.arange(seqlens.max()) < seqlens[:, None]] = tokenize(proteins)
    return torch.from_numpy(rows)


def _mean_of_residues(hidden: Tensor, proteins: list[str]) -> Tensor:
    """Average residues, without other tokens. (n, longest + 2, dim) -> (n, dim) float32"""
    lengths = to_device(np.array([len(protein) for protein in proteins]), hidden.device)
    place = torch.arange(hidden.shape[1], device=hidden.device)
    is_residue = (place >= 1) & (place <= lengths[:, None])
    total = hidden.float().masked_fill(~is_residue[:, :, None], 0.0).sum(dim=1)
    return total / lengths[:, None]


def _name_in_transformers(name: str) -> str:
    if name.startswith("embed_tokens"):
        return "embeddings.word_embeddings.weight"
    if name.startswith("emb_layer_norm_after"):
        return f"encoder.{name}"
    _, number, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"encoder.layer.{number}.{_LAYER_PARTS[part]}.{kind}"
