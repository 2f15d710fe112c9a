"""Run fair-esm's own ESM-2 as an encoder: the reference for ours, on the same weights.

Its model, alphabet and forward pass are used as published (fair-esm 2.0.0). At lower precisions,
the rotary frequencies stay float32: with 8 significant bits the angles are wrong, and vectors are
wrong beyond some 256 residues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from virnucpro.core.model_outputs import MASK_LETTER, HeadOutput, parse_vector_name
from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.core.types import MASK_TEXT
from virnucpro.models.esm2.config import HEADS_FAIR_ESM, ESM2Shape
from virnucpro.models.esm2.loading import ROTARY, fair_esm_state_dict, read_heads
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.packing import PackedEncoder, to_device
from virnucpro.models.protein_tokens import EXTRA_TOKENS
from virnucpro.models.smoothing import NormedProducts
from virnucpro.models.transformer import DTYPES, rotary_frequencies
from virnucpro.models.validation.fair_esm import load_fair_esm
from virnucpro.models.validation.roundings import (
    Reference,
    add_roundings,
    add_smoothing,
    pool_alone,
)


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> _FairESMEncoder:
    """Load fair-esm's model with the weights from a checkpoint.

    Raises:
        UnavailableError: the checkpoint or fair-esm cannot be used.
    """
    shape = inspect_esm2(weights).shape
    model = load_model(weights, shape, DTYPES[spec.precision], device)
    # our names of the heads' tensors -> fair-esm's; its decoder is always the embedding
    stored_names = {
        name: stored
        for part in (HEADS_FAIR_ESM.lm, HEADS_FAIR_ESM.contacts)
        for name, (stored, *_) in part.items()
        if name != "lm.decoder.weight"
    }
    if spec.needs_head:
        heads = read_heads(weights)
        own_names = {name: stored_names[name] for name in heads.keys() & stored_names.keys()}
        state = {own: heads[name] for name, own in own_names.items()}
        model.load_state_dict(state, strict=False)
    return _FairESMEncoder(spec, model, shape, device)


def load_reference(spec: EncoderSpec, weights: Path, device: torch.device) -> Reference:
    """Load fair-esm, for ``models check``. Raises as ``load``."""
    encoder = load(replace(spec, family="fair-esm"), weights, device)
    layers: nn.Module = encoder.model.layers
    # rotated queries and keys are the factors in the scores
    rotations = [each for each in layers.modules() if type(each).__name__ == "RotaryEmbedding"]

    def round_off(precision: Precision, n_tokens: int) -> None:
        if precision == "int8":
            add_smoothing(_normed_products(layers), lambda protein: encoder.embed([protein]))
        lose = add_roundings(layers, precision, n_tokens)
        if precision == "fp32":  # in others, our head is more exact than our layers
            add_roundings(encoder.model.lm_head, precision, n_tokens)
        for module in rotations:
            module.register_forward_hook(lambda *call: tuple(map(lose, call[-1])))

    return Reference("fair-esm", encoder, round_off)


def _normed_products(layers: Any) -> list[NormedProducts]:  # noqa: ANN401 - of fair-esm
    products = []
    for layer in layers:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        products += [
            NormedProducts(layer.self_attn_layer_norm, projections),
            NormedProducts(layer.final_layer_norm, (layer.fc1,)),
        ]
    return products


def load_model(weights: Path, shape: ESM2Shape, dtype: torch.dtype, device: torch.device) -> Any:  # noqa: ANN401 - an ``ESM2`` of fair-esm
    """Load fair-esm's module in ``dtype``, with rotary frequencies from the file, or ours."""
    fair_esm = load_fair_esm()
    with torch.device(device):  # initial random weights are slow on a CPU
        model = fair_esm.esm2(
            shape.n_layers, shape.dim, shape.n_heads, token_dropout=shape.token_dropout
        ).eval()
    state = fair_esm_state_dict(weights)
    frequencies = state.pop(ROTARY, rotary_frequencies(shape.head_dim)).float().to(device)
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert all("head" in name or "inv_freq" in name for name in report.missing_keys)
    model.to(dtype).requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.rot_emb.inv_freq = frequencies
        if dtype != torch.float32:
            layer.self_attn.rot_emb.register_forward_hook(_cast_like)
    return model


class _FairESMEncoder(PackedEncoder):
    """fair-esm's ESM-2, on padded batches."""

    kernel = "fair-esm"

    def __init__(
        self,
        spec: EncoderSpec,
        model: Any,  # noqa: ANN401 - an ``ESM2`` of fair-esm
        shape: ESM2Shape,
        device: torch.device,
    ) -> None:
        super().__init__(spec, device)
        self.model = model
        self.shape = shape

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """Count the tokens, including padding, because the model computes it as well."""
        return len(lengths) * (max(lengths) + EXTRA_TOKENS)

    def count_flop(self, lengths: Sequence[int]) -> float:
        n_tokens = self.count_tokens(lengths)
        longest = max(lengths) + EXTRA_TOKENS
        score_roundings = 4.0 * longest * self.shape.dim * self.shape.n_layers
        return n_tokens * (2.0 * self.shape.n_parameters + score_roundings)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_padded(lengths, tokens_per_batch)

    def embed(self, sequences: Sequence[str]) -> Tensor:
        return self.embed_all(sequences)[0]

    @torch.inference_mode()
    def embed_all(self, sequences: Sequence[str]) -> Sequence[Tensor]:
        tokens = to_device(tokenize_proteins(self.model, sequences).numpy(), self.device)
        names = [output.name for output in self.spec.outputs]
        layers = [vectors.layer for name in names if (vectors := parse_vector_name(name))]
        has_contacts = HeadOutput.CONTACTS in names
        results = self.model(tokens, repr_layers=layers, return_contacts=has_contacts)
        return [
            torch.cat(
                [_select_rows(results, name, row, len(text)) for row, text in enumerate(sequences)]
            )
            for name in names
        ]


def _select_rows(results: Any, name: str, row: int, length: int) -> Tensor:  # noqa: ANN401 - of fair-esm
    """Return the rows of an output for one protein in fair-esm's results. float32"""
    residues = slice(1, length + 1)
    if name == HeadOutput.CONTACTS:
        contacts: Tensor = results["contacts"][row, :length, :length]
        return contacts.reshape(-1, 1).float()
    if (vectors := parse_vector_name(name)) is None:
        logits: Tensor = results["logits"][row, residues]
        return logits.float()
    hidden: Tensor = results["representations"][vectors.layer][row].float()
    return pool_alone(hidden[: length + 2], vectors.pooling)


def plan_padded(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Plan batches of at most ``tokens_per_batch``, padding included, longest sequences first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    while order:
        n = max(1, tokens_per_batch // (lengths[order[0]] + EXTRA_TOKENS))
        batches.append(order[:n])
        order = order[n:]
    return batches


def tokenize_proteins(model: Any, sequences: Sequence[str]) -> Tensor:  # noqa: ANN401 - an ``ESM2``
    """Tokenize the sequences, padded at the end. -> (n, longest + 2)"""
    longest = max(map(len, sequences)) + EXTRA_TOKENS
    tokens = torch.full((len(sequences), longest), model.padding_idx)
    for row, sequence in zip(tokens, sequences, strict=True):
        texts = [MASK_TEXT if letter == MASK_LETTER else letter for letter in sequence.upper()]
        letters = [model.alphabet.get_idx(text) for text in texts]
        row[: len(letters) + EXTRA_TOKENS] = torch.tensor([model.cls_idx, *letters, model.eos_idx])
    return tokens


def _cast_like(_: object, before: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> object:
    """Return the rotated tensors in the precision of the input."""
    return tuple(turned.to(old.dtype) for old, turned in zip(before, out, strict=True))
