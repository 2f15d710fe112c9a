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
from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.models.esmc.config import MODEL_TYPE, infer_shape, open_tensors
from virnucpro.models.esmc.loading import config_of
from virnucpro.models.packing import PackedEncoder
from virnucpro.models.protein_tokens import tokenize
from virnucpro.models.validation.roundings import Loss, Reference, add_roundings

_OLDEST = "5.23"  # the oldest compared version of transformers
_ATTENTION = "virnucpro_reference"  # name of our attention function in transformers


class _EsmcParts(NamedTuple):
    """The parts of transformers that the reference uses."""

    config: Any  # the class ``EsmcConfig``
    model: Any  # the class ``EsmcModel``
    attention: Any  # the class ``AttentionInterface``
    sdpa: Any  # the function that computes attention with PyTorch's SDPA


def load_reference(spec: EncoderSpec, weights: Path, device: torch.device) -> Reference:
    """Load transformers' ESM C, for ``models check``.

    Raises:
        UnavailableError: transformers is missing or too old, or the checkpoint cannot be used.
    """
    encoder = _ReferenceEncoder(spec, load_module(weights, device), device)
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


def _import_esmc() -> _EsmcParts:
    """Import the parts of transformers that the reference uses.

    Raises:
        UnavailableError: transformers is missing or too old.
    """
    try:
        from transformers import AttentionInterface, EsmcConfig, EsmcModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as error:
        try:
            found = f"version {version('transformers')} has no {MODEL_TYPE}"
        except PackageNotFoundError:
            found = "it is not installed"
        raise UnavailableError(
            f"the reference for ESM C is transformers {_OLDEST} or newer: {found}",
            hint=f"pip install 'transformers>={_OLDEST}'",
        ) from error
    return _EsmcParts(EsmcConfig, EsmcModel, AttentionInterface, sdpa_attention_forward)


class _ReferenceEncoder(PackedEncoder):
    """ESM C in transformers, one protein at a time."""

    kernel = "transformers"

    def __init__(
        self,
        spec: EncoderSpec,
        module: Any,  # noqa: ANN401 - an ``EsmcModel``
        device: torch.device,
    ) -> None:
        super().__init__(spec, device)
        self.module = module

    def count_flop(self, lengths: Sequence[int]) -> float:
        """Count the operations in the linear layers' matrix products, which dominate."""
        n_parameters = sum(each.numel() for each in self.module.layers.parameters())
        return 2.0 * float(n_parameters) * self.count_tokens(lengths)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Compute a batch's rows, on the device."""
        hidden = [self._embed_alone(sequence) for sequence in sequences]
        if self.spec.per_residue:
            return torch.cat(hidden)
        return torch.stack([rows.mean(dim=0) for rows in hidden])

    def _embed_alone(self, sequence: str) -> Tensor:
        """Embed one protein. -> (n_residues, dim) float32"""
        tokens = torch.from_numpy(tokenize([sequence]))[None].to(self.device)
        if self.spec.layer == len(self.module.layers):
            hidden: Tensor = self.module(tokens).last_hidden_state[0]
        else:
            out = self.module(tokens, output_hidden_states=True)
            hidden = out.hidden_states[self.spec.layer][0]
        return hidden[1:-1]

    def add_roundings(self, precision: Precision, n_tokens: int) -> None:
        """Make the module as inexact as our encoder in a precision.

        Besides the roundings in linear layers, our encoder rounds the normed queries and keys and
        the gate in 16 bits. Rotated queries and keys are the factors of the attention scores in any
        precision.
        """
        lose = add_roundings(self.module.layers, precision, n_tokens)
        self._round_scores(lose)
        if precision == "fp32":
            return
        for layer in self.module.layers:
            attention = layer.self_attn
            for module in (attention.q_norm, attention.k_norm, layer.mlp.act_fn):
                module.register_forward_hook(lambda *call: lose(call[-1]))

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

        parts.attention.register(_ATTENTION, attend)
        self.module.set_attn_implementation(_ATTENTION)
