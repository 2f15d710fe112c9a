"""Synthetic data: proteins and ESM-2 weights from a seed.

A seed gives the same sequences everywhere, and the same weights on all devices of one kind.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import FAIR_ESM, ROTARY, empty_model, split_tensors
from virnucpro.models.esm2.model_files import read_shape
from virnucpro.models.protein_tokens import EXTRA_TOKENS
from virnucpro.models.registry import FAMILIES

MODELS: Mapping[str, ESM2Shape] = {
    name.split("_")[2]: read_shape(published)
    for name, published in FAMILIES["esm2"].published.items()
}
BLOCK = 4096  # lengths drawn together
_CPU = torch.device("cpu")

Lengths = NDArray[np.int64]


def six_frame_500(rng: np.random.Generator) -> Lengths:
    """Draw stop-free frames from 500-base chunks. One in ten comes from a shorter last chunk."""
    bases = np.where(rng.random(BLOCK) < 0.9, 500, rng.integers(100, 500, BLOCK))
    return (bases - rng.integers(0, 3, BLOCK)) // 3


def make_proteins(
    n_tokens: int, seed: int, draw: Callable[[np.random.Generator], Lengths] = six_frame_500
) -> list[str]:
    """Generate proteins with random lengths: as many as fit into ``n_tokens``, and at least one."""
    rng = np.random.default_rng(seed)
    blocks = []
    total = 0
    while total < n_tokens:
        blocks.append(draw(rng))
        total += int((blocks[-1] + EXTRA_TOKENS).sum())
    lengths = np.concatenate(blocks)
    n_proteins = int(np.searchsorted(np.cumsum(lengths + EXTRA_TOKENS), n_tokens, side="right"))
    lengths = lengths[: max(1, n_proteins)]
    residues = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", dtype=np.uint8)
    text = residues[rng.integers(0, len(residues), int(lengths.sum()))].tobytes().decode()
    ends = np.cumsum(lengths).tolist()
    return [text[end - n : end] for end, n in zip(ends, lengths.tolist(), strict=True)]


def write_checkpoint(path: Path, shape: ESM2Shape, seed: int, device: torch.device = _CPU) -> None:
    """Write a random ESM-2 as a fair-esm ``.pt``, in 16 bits if large, like published ones.

    Every part affects the result. Linear layers preserve a vector's length, except the last one in
    attention, which halves it. So numbers stay small with any number of layers.
    """
    large = 2e9  # parameters
    number = torch.float16 if shape.n_parameters > large else torch.float32
    parts = dict(split_tensors(empty_model(shape, shape.n_layers), FAIR_ESM))
    state = {
        name: random_numbers(name, parts[name].shape, seed, device).to("cpu", number)
        for name in sorted(parts.keys() - {ROTARY})
    }
    config = argparse.Namespace(
        encoder_attention_heads=shape.n_heads, token_dropout=shape.token_dropout
    )
    torch.save({"cfg": {"model": config}, "model": state}, path)


def random_numbers(name: str, size: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Draw the numbers in a tensor in float32, on a device."""
    module = name.split(".")[-2]
    scale = 0.1  # of a bias
    offset = 0.0
    # All others: 1. Larger queries and keys make attention prefer some keys.
    gains = {"q_proj": 1.5**0.5, "k_proj": 1.5**0.5, "out_proj": 0.5}
    if module == "embed_tokens":
        scale = 1.0
    elif len(size) == 2:
        scale = gains.get(module, 1.0) * size[1] ** -0.5
    elif name.endswith("norm.weight") or name.endswith("norm_after.weight"):
        offset = 1.0
    generator = torch.Generator(device).manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.randn(size, generator=generator, device=device).mul_(scale).add_(offset)
