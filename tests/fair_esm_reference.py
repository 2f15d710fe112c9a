"""Reference vectors from fair-esm 2.0.0, for small models with seeded weights.

fair-esm's own code embeds every protein alone, in float32. ``tolerance`` is derived from the scale
of these weights. It bounds the distance of another computation.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import esm
import numpy as np
import torch
from torch import Tensor

from virnucpro.models.eight_bits import EIGHT_BITS
from virnucpro.models.esm2.config import ESM2Shape

AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWC"
LONGEST = 1100  # residues; more than 4 x dim of every model here
SCORE_SPREAD = 1.5  # standard deviation of the attention scores: some keys matter, most do not
ATTENTION_SHARE = 1 / 3  # of the squared length of the stream that the branch joins
MLP_SHARE = 2 / 3


def make_fair_esm(shape: ESM2Shape, seed: int = 0) -> esm.ESM2:
    """Make an ESM-2 with random weights, in which each part changes the result.

    Linear layers keep the length of a vector, except the last one in attention, which halves it,
    and those of queries and keys, which spread the attention scores. Biases are not 0 and norms not
    1.
    """
    model = esm.ESM2(shape.n_layers, shape.dim, shape.n_heads, token_dropout=shape.token_dropout)
    generator = torch.Generator().manual_seed(seed)
    gains = {"q_proj": SCORE_SPREAD**0.5, "k_proj": SCORE_SPREAD**0.5, "out_proj": 0.5}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "embed_tokens.weight":
                parameter.copy_(noise)
            elif parameter.ndim == 2:
                gain = gains.get(name.split(".")[-2], 1.0)
                parameter.copy_(gain * parameter.shape[1] ** -0.5 * noise)
            else:
                scales_a_norm = "norm" in name and name.endswith("weight")
                parameter.copy_(0.1 * noise + scales_a_norm)
    return model.eval().requires_grad_(False)


def stored_state(model: esm.ESM2) -> dict[str, Tensor]:
    """Return the tensors under fairseq's names, without the contact head."""
    return {
        ("encoder." if name.startswith("lm_head.") else "encoder.sentence_encoder.") + name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("contact_head.")
    }


def stored_config(model: esm.ESM2) -> argparse.Namespace:
    return argparse.Namespace(
        encoder_layers=model.num_layers,
        encoder_embed_dim=model.embed_dim,
        encoder_attention_heads=model.attention_heads,
        token_dropout=model.token_dropout,
    )


def save_fair_esm(model: esm.ESM2, path: Path) -> Path:
    """Write a ``.pt`` file as fair-esm publishes them."""
    torch.save({"cfg": {"model": stored_config(model)}, "model": stored_state(model)}, path)
    return path


def save_contact_head(model: esm.ESM2, path: Path) -> None:
    """Write the contact head to its own file, as fair-esm publishes it."""
    state = model.state_dict()
    contacts = {name: state[name] for name in state if name.startswith("contact_head.")}
    torch.save({"model": contacts}, path)


def random_protein(length: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng([length, seed]).choice(list(AMINO_ACIDS), length))


def fair_esm_tokens(model: esm.ESM2, protein: str) -> Tensor:
    """Return tokens, (1, n_residues + 2), by letter. fair-esm's ``encode`` fails on ``*``."""
    letters = [model.alphabet.get_idx(letter) for letter in protein.upper()]
    return torch.tensor([[model.cls_idx, *letters, model.eos_idx]])


@torch.inference_mode()
def fair_esm_hidden(model: esm.ESM2, proteins: Sequence[str], layer: int) -> list[Tensor]:
    """Return one (n_residues + 2, dim) array per protein, from ``<cls>`` to ``<eos>``."""
    return [
        model(fair_esm_tokens(model, protein), [layer])["representations"][layer][0]
        for protein in proteins
    ]


def worst_row(vectors: Tensor, reference: Tensor) -> float:
    """Return the largest relative L2 distance of a row from the reference."""
    a = vectors.cpu().double()
    b = reference.cpu().double()
    assert a.shape == b.shape
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def tolerance(n_layers: int, dtype: torch.dtype, reference: torch.dtype = torch.float32) -> float:
    """Return the relative L2 distance of two computations that rounding explains."""
    return math.hypot(_error(n_layers, dtype), _error(n_layers, reference))


def _error(n_layers: int, dtype: torch.dtype) -> float:
    """Return the relative L2 distance from the exact vector, for matrix products in ``dtype``.

    One rounding: the error is uniform in half a spacing to either side. For a significand in [1, 2)
    that is at most 2u. Significands are log-uniform, so the root mean square is 2u sqrt(1/12 * 3 /
    (8 ln 2)) = 0.42 u of the number, where u = 2^-8 for bf16 (8 bits), 2^-11 for fp16, and 2^-24
    for float32. Errors of different roundings are independent, so their squares add. A sum of
    products with random signs has the relative error of one of its terms.

    In e4m3 (u = 2^-4: 3 bits after the first), only the factors of products with weights are
    rounded. All else is in bf16, where 256 roundings weigh as much as one of e4m3. Between the
    largest number of a row and the smallest one with all its bits there are 15 powers of two, so
    other numbers do not count.

    In int8, the same factors are rounded to 1/127 of the largest number in a row: by 1 / (127
    sqrt(12)) of it in the root mean square. It is some four times the root mean square of the row
    (of 64 to 512 normal numbers 2.6 to 3.3 times, after GELU 4 to 5 times).
    """
    if dtype == torch.int8:
        one_rounding = 4 / (127 * math.sqrt(12))
    else:
        one_rounding = 0.42 * torch.finfo(dtype).eps / 2
    bf16 = 0.42 * 2**-8
    in_8_bits = dtype in EIGHT_BITS.values()
    other = (bf16 / one_rounding) ** 2 if in_8_bits else 1.0  # of a rounding
    # A sum of n terms in float32 is rounded at each step, on average at 1 / sqrt(2) of its final
    # size: n / 2 roundings. bf16 and fp16 are summed in float32, which adds nothing to theirs.
    a_sum = (LONGEST + 2) / 2 if dtype == torch.float32 else 0.0
    error = 0.0  # of the residual stream: squared, relative, counted in roundings
    for _ in range(n_layers):
        # the normed stream, W_v, the sum over the keys, W_out; v, the weights of the keys, and the
        # product with W_out
        value = 4 + 3 * other + 3 * a_sum + error
        # the normed stream and W_q; q and q turned; the same for k. A score is off by this part of
        # its spread, and the weight of its key by as much as the score.
        score = 4 + 4 * other + 3 * a_sum + 2 * error
        branch = value + SCORE_SPREAD**2 * score
        error = (error + ATTENTION_SHARE * branch) / (1 + ATTENTION_SHARE)
        # the normed stream, W_up, GELU, W_down; both products. GELU of a normal number multiplies
        # a relative error by sqrt(E[gelu'^2] / E[gelu^2]) = sqrt(1.07)
        branch = 4 + 2 * other + 2 * a_sum + 1.07 * error
        error = (error + MLP_SHARE * branch) / (1 + MLP_SHARE)
    # the worst of some thousand vectors, of 64 numbers and more, is within twice the mean
    return 2 * one_rounding * math.sqrt(error)
