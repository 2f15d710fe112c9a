"""``EsmcModel`` from transformers as an encoder: the reference for our ESM C, on the same weights.

We read the weights and pass them to the module, so that both programs have the same numbers in
either layout, and nothing is downloaded. Each protein is embedded alone, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virnucpro.core.errors import UnavailableError
from virnucpro.core.model_outputs import parse_vector_name
from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.models.esmc.config import MODEL_TYPE, infer_shape, open_tensors
from virnucpro.models.esmc.loading import config_of, read_heads
from virnucpro.models.packing import PackedEncoder
from virnucpro.models.protein_tokens import tokenize
from virnucpro.models.smoothing import NormedProducts
from virnucpro.models.validation.roundings import (
    Loss,
    Reference,
    add_roundings,
    add_smoothing,
    pool_alone,
)


class _EsmcParts(NamedTuple):
    """The parts of transformers that the reference uses."""

    config: Any  # the class ``EsmcConfig``
    model: Any  # the class ``EsmcModel``
    lm_head: Any  # the class ``EsmcMaskedLMHead``
    attention: Any  # the class ``AttentionInterface``
    sdpa: Any  # the function that computes attention with PyTorch's SDPA


def load_reference(spec: EncoderSpec, weights: Path, device: torch.device) -> Reference:
    """Load transformers' ESM C, for ``models check``.

    Raises:
        UnavailableError: transformers is missing or too old, or the checkpoint cannot be used.
    """
    lm_head = load_lm_head(weights, device) if spec.needs_head else None
    encoder = _ReferenceEncoder(spec, load_module(weights, device), lm_head, device)
    return Reference("transformers", encoder, encoder.add_roundings)


def load_module(weights: Path, device: torch.device) -> Any:  # noqa: ANN401 - an ``EsmcModel``
    """Load transformers' module in float32 with the weights of a checkpoint.

    Raises:
        UnavailableError: transformers is missing or too old, or the checkpoint cannot be used.
    """
    parts = _import_esmc()
    tensors = open_tensors(weights, "pt")
    shape = infer_shape(tensors)
    with torch.device(device):
        module = parts.model(parts.config(**config_of(shape))).eval().requires_grad_(False)
    state = {name: tensors.get(name) for name in module.state_dict()}
    module.load_state_dict(state)
    return module


def load_lm_head(weights: Path, device: torch.device) -> Any:  # noqa: ANN401 - of transformers
    """Load transformers' language-model head in float32. Raises as ``load_module``."""
    parts = _import_esmc()
    heads = read_heads(weights)
    state = {}
    their_names = {"dense": "dense", "norm": "layer_norm", "decoder": "decoder"}  # ours -> theirs
    for name, tensor in heads.items():
        _, part, kind = name.split(".")
        state[f"{their_names[part]}.{kind}"] = tensor
    n_tokens, dim = heads["lm.decoder.weight"].shape
    with torch.device(device):
        lm_head = parts.lm_head(dim, n_tokens).eval().requires_grad_(False)
    lm_head.load_state_dict(state)
    return lm_head


def _import_esmc() -> _EsmcParts:
    """Import the parts of transformers that the reference uses.

    Raises:
        UnavailableError: transformers is missing or too old.
    """
    oldest = "5.23"  # the oldest compared version of transformers
    try:
        from transformers import AttentionInterface, EsmcConfig, EsmcModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.esmc.modeling_esmc import EsmcMaskedLMHead
    except ImportError as error:
        try:
            found = f"version {version('transformers')} has no {MODEL_TYPE}"
        except PackageNotFoundError:
            found = "it is not installed"
        raise UnavailableError(
            f"the reference for ESM C is transformers {oldest} or newer: {found}",
            hint=f"pip install 'transformers>={oldest}'",
        ) from error
    return _EsmcParts(
        EsmcConfig, EsmcModel, EsmcMaskedLMHead, AttentionInterface, sdpa_attention_forward
    )


class _ReferenceEncoder(PackedEncoder):
    """ESM C in transformers, one protein at a time."""

    kernel = "transformers"

    def __init__(
        self,
        spec: EncoderSpec,
        module: Any,  # noqa: ANN401 - an ``EsmcModel``
        lm_head: Any,  # noqa: ANN401 - of transformers, or None
        device: torch.device,
    ) -> None:
        super().__init__(spec, device)
        self.module = module
        self.lm_head = lm_head

    def count_flop(self, lengths: Sequence[int]) -> float:
        """Count the operations in the linear layers' matrix products, which dominate."""
        n_parameters = sum(each.numel() for each in self.module.layers.parameters())
        return 2.0 * float(n_parameters) * self.count_tokens(lengths)

    def embed(self, sequences: Sequence[str]) -> Tensor:
        return self.embed_all(sequences)[0]

    @torch.inference_mode()
    def embed_all(self, sequences: Sequence[str]) -> Sequence[Tensor]:
        by_sequence = [self._embed_alone(sequence) for sequence in sequences]
        return [torch.cat(parts) for parts in zip(*by_sequence, strict=True)]

    def _embed_alone(self, sequence: str) -> list[Tensor]:
        """Compute the rows of each output for one protein. float32"""
        tokens = torch.from_numpy(tokenize([sequence]))[None].to(self.device)
        out = self.module(tokens, output_hidden_states=True)
        rows: list[Tensor] = []
        for output in self.spec.outputs:
            vectors = parse_vector_name(output.name)
            if vectors is None:
                rows.append(self.lm_head(out.last_hidden_state[0])[1:-1])
                continue
            is_last = vectors.layer == len(self.module.layers)
            hidden = out.last_hidden_state if is_last else out.hidden_states[vectors.layer]
            rows.append(pool_alone(hidden[0], vectors.pooling))
        return rows

    def add_roundings(self, precision: Precision, n_tokens: int) -> None:
        """Make the module as inexact as our encoder in a precision.

        Besides the roundings in linear layers, our encoder rounds the normed queries and keys and
        the gate in 16 bits. Rotated queries and keys are the factors of the attention scores in any
        precision.
        """
        if precision == "int8":
            add_smoothing(self._normed_products(), lambda protein: self.embed([protein]))
        lose = add_roundings(self.module.layers, precision, n_tokens)
        if precision == "fp32" and self.lm_head is not None:
            add_roundings(self.lm_head, precision, n_tokens)
        self._round_scores(lose)
        if precision == "fp32":
            return
        for layer in self.module.layers:
            attention = layer.self_attn
            for module in (attention.q_norm, attention.k_norm, layer.mlp.act_fn):
                module.register_forward_hook(lambda *call: lose(call[-1]))

    def _normed_products(self) -> list[NormedProducts]:
        products = []
        for layer in self.module.layers:
            attention = layer.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            products += [
                NormedProducts(layer.input_layernorm, projections),
                NormedProducts(
                    layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)
                ),
            ]
        return products

    def _round_scores(self, lose: Loss) -> None:
        """Round the rotated queries and keys, where transformers calls its attention function."""
        parts = _import_esmc()

        def attend(
            module: Any,  # noqa: ANN401 - its attention
            query: Tensor,
            key: Tensor,
            *arguments: object,
            **settings: object,
        ) -> object:
            return parts.sdpa(module, lose(query), lose(key), *arguments, **settings)

        attention_name = "virnucpro_reference"  # name of our attention function in transformers
        parts.attention.register(attention_name, attend)
        self.module.set_attn_implementation(attention_name)
