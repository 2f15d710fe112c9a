"""fair-esm's own ESM-2 as an encoder: the reference for ours, on the same weights.

Its model, alphabet and forward pass are used as published (fair-esm 2.0.0). At lower precisions,
the rotary frequencies stay float32: with 8 significant bits the angles are wrong, and vectors are
wrong beyond some 256 residues.

``add_roundings`` measures what the roundings of a precision do to a vector, with given weights. The
model rounds its products as that precision does; all else stays float32. So errors grow from layer
to layer as these weights make them grow, and nothing is assumed about the weights.

One rounding: the error is uniform in half a spacing to either side. The spacing is 2u for
significands in [1, 2), and significands are log-uniform. Relative to the number, the root mean
square error is therefore 2u sqrt(1/12 * 3 / (8 ln 2)) = 0.42 u, where u = 2^-8 for bf16, 2^-11 for
fp16, and 2^-24 for float32.

bf16, fp16: weights, factors and results of products are rounded to the precision. Sums are float32,
which adds no notable error. fp8: weights and the factors multiplied by them are rounded row by row,
as in ``esm2.model``, and the rest as in bf16.

float32: a sum of n terms of random sign is rounded at each step, on average at 1 / sqrt(2) of its
final size. Its relative error is 0.42 u sqrt(n / 2), as if each term had this error. Both programs
make such errors, independently: together 0.42 u sqrt(n). n is the number of terms of the longest
sum, over the wider layer or over the keys; libraries sum in blocks, with smaller errors. The
factors and results of products get normal noise of this size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.models.base import Rows
from virnucpro.models.esm2.config import EXTRA_TOKENS, ESM2Shape
from virnucpro.models.esm2.loading import ROTARY, fair_esm_state_dict
from virnucpro.models.esm2.model import DTYPES, quantise, restore, rotary_frequencies
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.packing import PackedEncoder, to_device
from virnucpro.models.validation.fair_esm import load_fair_esm

Loss = Callable[[Tensor], Tensor]
_ONE_ROUNDING = 0.42  # u, in the root mean square


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> _FairESMEncoder:
    """fair-esm's model with the weights of a checkpoint.

    Raises:
        UnavailableError: the checkpoint or fair-esm cannot be used.
    """
    shape = inspect_esm2(weights).shape
    model = load_model(weights, shape, DTYPES[spec.precision], device)
    return _FairESMEncoder(spec, model, shape, device)


def load_model(weights: Path, shape: ESM2Shape, dtype: torch.dtype, device: torch.device) -> Any:  # noqa: ANN401 - an ``ESM2`` of fair-esm
    """Load fair-esm's module in ``dtype``, with the rotary frequencies of the file, or ours."""
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
        self.model, self.shape = model, shape

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """The number of tokens, padding included, because the model computes it as well."""
        return len(lengths) * (max(lengths) + EXTRA_TOKENS)

    def count_flop(self, lengths: Sequence[int]) -> float:
        n_tokens, longest = self.count_tokens(lengths), max(lengths) + EXTRA_TOKENS
        of_scores = 4.0 * longest * self.shape.dim * self.shape.n_layers
        return n_tokens * (2.0 * self.shape.n_parameters + of_scores)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_padded(lengths, tokens_per_batch)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Compute the rows of a batch, on the device."""
        tokens = to_device(tokenize_proteins(self.model, sequences).numpy(), self.device)
        layer = self.spec.layer
        hidden: Tensor = self.model(tokens, repr_layers=[layer])["representations"][layer].float()
        residues = [hidden[i, 1 : len(text) + 1] for i, text in enumerate(sequences)]
        if self.spec.per_residue:
            return torch.cat(residues)
        return torch.stack([rows.mean(dim=0) for rows in residues])


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
    """The tokens of the sequences, padded at the end. -> (n, longest + 2)"""
    longest = max(map(len, sequences)) + EXTRA_TOKENS
    tokens = torch.full((len(sequences), longest), model.padding_idx)
    for row, sequence in zip(tokens, sequences, strict=True):
        letters = [model.alphabet.get_idx(letter) for letter in sequence.upper()]
        row[: len(letters) + EXTRA_TOKENS] = torch.tensor([model.cls_idx, *letters, model.eos_idx])
    return tokens


def largest_distance(vectors: Rows, exact: Rows) -> float:
    """The largest relative L2 distance between a row and the exact one; infinite if it is NaN."""
    a, b = vectors.astype(np.float64), exact.astype(np.float64)
    largest = float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())
    return largest if math.isfinite(largest) else math.inf


def _cast_like(_: object, before: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> object:
    """Return the rotated tensors in the precision of the input."""
    return tuple(turned.to(old.dtype) for old, turned in zip(before, out, strict=True))


# Roundings


def add_roundings(layers: nn.Module, precision: Precision, n_tokens: int) -> None:
    """Make the matrix products of float32 layers as inexact as in ``precision``.

    ``n_tokens`` is the number of tokens of the longest sequence to embed.
    """
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    if precision == "fp32":
        n_terms = max(n_tokens, *(linear.in_features for linear in linears))
        lose = _noise(linears[0].weight.device, n_terms)
    else:
        lose = _rounding(DTYPES[precision])
    lose_of_factors = _round_to_8_bits if precision == "fp8" else lose
    for linear in linears:
        if precision != "fp32":
            linear.weight.copy_(lose_of_factors(lose(linear.weight)))
            linear.bias.copy_(lose(linear.bias))
        linear.register_forward_pre_hook(lambda _, inputs: tuple(map(lose_of_factors, inputs)))
        linear.register_forward_hook(lambda *call: lose(call[-1]))
    for module in layers.modules():  # rotated queries and keys are the factors of the scores
        if type(module).__name__ == "RotaryEmbedding":  # of fair-esm, which other networks lack
            module.register_forward_hook(lambda *call: tuple(map(lose, call[-1])))


def _rounding(dtype: torch.dtype) -> Loss:
    return lambda exact: exact.to(dtype).to(exact.dtype)


def _round_to_8_bits(exact: Tensor) -> Tensor:
    return restore(quantise(exact))


def _noise(device: torch.device, n_terms: int) -> Loss:
    """Noise that is the same in every check on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    size = _ONE_ROUNDING * torch.finfo(torch.float32).eps / 2 * math.sqrt(n_terms)

    def lose(exact: Tensor) -> Tensor:
        noise = torch.randn(exact.shape, generator=generator, device=device)
        return torch.addcmul(exact, exact, noise, value=size)

    return lose
