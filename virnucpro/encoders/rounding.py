"""The effect of a precision's roundings on a vector, with the weights at hand: fair-esm is made to
round as that precision does, and stays float32 else. So the growth of an error from layer to layer
is that of these very weights, and nothing is assumed of them.

One rounding: the error is uniform in half a spacing to either side, 2u of a significand in [1, 2)
at most, and significands are log-uniform, so in the root mean square it is 2u sqrt(1/12 * 3 / (8 ln
2)) = 0.42 u of the number, where u = 2^-8 for bf16, 2^-11 for fp16, 2^-24 for float32.

bf16, fp16: weights, what goes into a product and what comes out are rounded to the precision. Sums
are float32, which adds nothing to that.

float32: a sum of n terms of random sign is rounded at each step, on average at 1 / sqrt(2) of its
final size, so it is off by 0.42 u sqrt(n / 2) of it, as if each term were off by as much. Both
programs sum so, independently: 0.42 u sqrt(n). n is that of the longest sum, over the wider layer
or over the keys; libraries sum in blocks, which is better. The products' factors and results get
normal noise of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import esm
import torch
from torch import Tensor, nn

from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.ground.config import Precision

Loss = Callable[[Tensor], Tensor]
_ONE_ROUNDING = 0.42  # u, in the root mean square


def add_roundings(model: esm.ESM2, precision: Precision, n_tokens: int) -> None:
    """Have the matrix products of a float32 fair-esm lose what they lose in ``precision``.

    ``n_tokens`` are those of the longest sequence to come.
    """
    if precision == "fp32":
        lose = _noise(model, max(4 * model.embed_dim, n_tokens))
    else:
        lose = _rounding(DTYPES[precision])
        for linear in _products(model):
            linear.weight.copy_(lose(linear.weight))
            linear.bias.copy_(lose(linear.bias))
    for linear in _products(model):
        linear.register_forward_pre_hook(lambda _, inputs: tuple(map(lose, inputs)))
        linear.register_forward_hook(lambda *call: lose(call[-1]))
    for layer in model.layers:  # queries and keys, turned, are what the scores are made of
        layer.self_attn.rot_emb.register_forward_hook(lambda *call: tuple(map(lose, call[-1])))


def _products(model: esm.ESM2) -> list[nn.Linear]:
    modules = (module for layer in model.layers for module in layer.modules())
    return [module for module in modules if isinstance(module, nn.Linear)]


def _rounding(dtype: torch.dtype) -> Loss:
    return lambda exact: exact.to(dtype).to(exact.dtype)


def _noise(model: esm.ESM2, n_terms: int) -> Loss:
    """The same noise in every check, on one kind of device."""
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(0)
    size = _ONE_ROUNDING * torch.finfo(torch.float32).eps / 2 * math.sqrt(n_terms)

    def lose(exact: Tensor) -> Tensor:
        noise = torch.randn(exact.shape, generator=generator, device=device)
        return torch.addcmul(exact, exact, noise, value=size)

    return lose
