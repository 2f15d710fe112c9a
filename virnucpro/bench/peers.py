"""The programs that ours is held against, with the same weights: fair-esm and transformers.

transformers is optional (``pip install '.[oracle]'``); where it is missing, loading it says so.

In bf16 the frequencies of the rotary tables stay float32 in both: rounded to 8 bits they give
wrong angles, and vectors that are wrong beyond some 256 residues.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import esm
import numpy as np
import torch
from torch import Tensor, nn

from virnucpro.bench.encoder import Encoder, Setting, Way
from virnucpro.encoders import fair_esm
from virnucpro.encoders.esm2.alphabet import N_TOKENS, PAD, tokenize
from virnucpro.encoders.esm2.model import rotary_frequencies
from virnucpro.encoders.esm2.packing import EXTRA_TOKENS
from virnucpro.errors import UnavailableError

PUBLISHED_TOKENS = 4096  # per batch, in fair-esm's scripts/extract.py
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
    """fair-esm as published first; the others as fast as they honestly get."""
    ways = [Way("fair-esm", "fp32", f"as published, {PUBLISHED_TOKENS} tokens", fair_esm_published)]
    if has_bf16:
        ways += [
            Way("fair-esm", "bf16", f"{_tokens(setting)} tokens", fair_esm_bf16),
            Way("transformers", "bf16", f"SDPA, {_tokens(setting)} tokens", transformers_bf16),
        ]
    return ways


def fair_esm_published(setting: Setting) -> Encoder:
    """The loop of scripts/extract.py, but for the file per protein and the cut at 1,022 residues.

    Logits and whole representations are copied to the CPU and averaged there, as it does.
    """
    device = torch.device(setting.device)
    model = fair_esm.load_model(setting.checkpoint, setting.shape, torch.float32, device)
    convert = model.alphabet.get_batch_converter()
    layer = setting.shape.n_layers

    def plan(proteins: Sequence[str]) -> list[list[int]]:
        data = esm.FastaBatchedDataset([str(i) for i in range(len(proteins))], proteins)
        batches: list[list[int]] = data.get_batch_indices(PUBLISHED_TOKENS, extra_toks_per_seq=1)
        return batches

    @torch.no_grad()
    def embed(proteins: list[str]) -> Tensor:
        _, texts, tokens = convert([("", protein) for protein in proteins])
        out = model(tokens.to(setting.device), repr_layers=[layer], return_contacts=False)
        out["logits"].cpu()
        hidden = out["representations"][layer].cpu()
        return torch.stack(
            [hidden[row, 1 : len(text) + 1].mean(0).clone() for row, text in enumerate(texts)]
        )

    return Encoder(model, setting, plan, embed)


def fair_esm_bf16(setting: Setting) -> Encoder:
    """fair-esm's model in bf16, in batches that fill the device, pooled there."""
    spec = setting.spec("bf16", family="fair-esm")
    encoder = fair_esm.load(spec, setting.checkpoint, torch.device(setting.device))
    return Encoder(encoder.model, setting, partial(_plan, setting), encoder.embed)


def transformers_bf16(setting: Setting) -> Encoder:
    """``EsmModel`` with SDPA in bf16, sorted and padded, fed from our own quick tokenizer."""
    hub, shape = _import("transformers", "transformers"), setting.shape
    config = hub.EsmConfig(
        vocab_size=N_TOKENS,
        hidden_size=shape.dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        intermediate_size=4 * shape.dim,
        position_embedding_type="rotary",
        token_dropout=shape.token_dropout,
        layer_norm_eps=1e-5,
        pad_token_id=PAD,
        mask_token_id=32,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    with torch.device(setting.device):
        model = hub.EsmModel(config, add_pooling_layer=False).eval()
    state = {_name_in_transformers(name): value for name, value in _weights(setting).items()}
    assert model.config._attn_implementation == "sdpa"
    lacking = model.load_state_dict(state, strict=False)
    assert not lacking.unexpected_keys
    assert all("inv_freq" in k or "contact" in k or "position" in k for k in lacking.missing_keys)
    _set_precision(model, setting, torch.bfloat16)

    @torch.inference_mode()
    def embed(proteins: list[str]) -> Tensor:
        tokens = _pad(proteins).to(setting.device, non_blocking=True)
        hidden = model(input_ids=tokens, attention_mask=tokens.ne(PAD)).last_hidden_state
        return _mean_of_residues(hidden, proteins)

    return Encoder(model, setting, partial(_plan, setting), embed)


def _import(module: str, package: str) -> Any:  # noqa: ANN401 - packages without types
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"{package} is not installed; in the folder of the source: "
            f"pip install -c constraints.txt '.[oracle]' ({error})"
        ) from error


def _weights(setting: Setting) -> Mapping[str, Tensor]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(setting.checkpoint, map_location="cpu", weights_only=True, mmap=True)
    weights: Mapping[str, Tensor] = content["model"]
    return weights


def _set_precision(model: nn.Module, setting: Setting, dtype: torch.dtype) -> None:
    """Convert all but the rotary frequencies: they are float32, and the same as ours to the bit."""
    model.to(dtype)
    frequencies = rotary_frequencies(setting.shape.head_dim).to(setting.device)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = frequencies


def _tokens(setting: Setting) -> int:
    return max(PUBLISHED_TOKENS, setting.tokens_per_batch)


def _plan(setting: Setting, proteins: Sequence[str]) -> list[list[int]]:
    """Sorted, in padded batches that fill the device."""
    return fair_esm.plan_padded([len(protein) for protein in proteins], _tokens(setting))


def _pad(proteins: list[str]) -> Tensor:
    """(n_proteins, longest + 2), ``<pad>`` behind each."""
    seqlens = np.array([len(protein) + EXTRA_TOKENS for protein in proteins])
    rows = np.full((len(proteins), seqlens.max()), PAD, dtype=np.int64)
    rows[np.arange(seqlens.max()) < seqlens[:, None]] = tokenize(proteins)
    return torch.from_numpy(rows)


def _mean_of_residues(hidden: Tensor, proteins: list[str]) -> Tensor:
    """Without ``<cls>``, ``<eos>`` and padding. (n, longest + 2, dim) -> (n, dim) float32"""
    lengths = torch.tensor([len(protein) for protein in proteins], device=hidden.device)
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
