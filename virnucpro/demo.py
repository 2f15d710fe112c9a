"""A small ESM-2 and a head with random weights: to try the pipeline, not to find viruses.

The model is a Hugging Face folder, so that any program that reads ESM-2 reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from virnucpro.esm2.alphabet import N_TOKENS
from virnucpro.esm2.model import ESM2Shape
from virnucpro.esm2.weights import inspect_checkpoint
from virnucpro.files import atomic
from virnucpro.head import Head, HeadFacts, save_head

DEMO_SHAPE = ESM2Shape(n_layers=3, dim=64, n_heads=4)


def write_demo(folder: Path, shape: ESM2Shape = DEMO_SHAPE, seed: int = 0) -> tuple[Path, Path]:
    """Write ``esm2_demo/`` and ``head.safetensors`` into ``folder``; the same bytes for a seed."""
    model = folder / "esm2_demo"
    model.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with atomic(model / "model.safetensors") as temporary:
        save_file(_random_weights(shape, rng), temporary, metadata={"format": "pt"})
    with atomic(model / "config.json") as temporary:
        temporary.write_text(json.dumps(_config(shape), indent=2) + "\n")
    scale = shape.dim**-0.5
    layers = (
        (_normal(rng, (16, shape.dim), scale), np.zeros(16, dtype=np.float32)),
        (_normal(rng, (2, 16), 0.5), np.zeros(2, dtype=np.float32)),
    )
    facts = HeadFacts(
        encoder="demo",
        encoder_id=inspect_checkpoint(model).encoder_id,
        layer=shape.n_layers,
        pooling="mean",
        dim=shape.dim,
        chunk_size=500,
        threshold=0.5,
        training="not trained: random weights, the calls mean nothing",
    )
    head = folder / "head.safetensors"
    save_head(head, Head(facts, layers))
    return model, head


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def _random_weights(
    shape: ESM2Shape, rng: np.random.Generator
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    dim, weights = shape.dim, {}

    def linear(name: str, n_out: int, n_in: int) -> None:
        weights[f"{name}.weight"] = _normal(rng, (n_out, n_in), n_in**-0.5)
        weights[f"{name}.bias"] = _normal(rng, (n_out,), 0.02)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = 1 + _normal(rng, (dim,), 0.02)
        weights[f"{name}.bias"] = _normal(rng, (dim,), 0.02)

    weights["embeddings.word_embeddings.weight"] = _normal(rng, (N_TOKENS, dim), 1.0)
    for i in range(shape.n_layers):
        layer = f"encoder.layer.{i}"
        norm(f"{layer}.attention.LayerNorm")
        for name in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{name}", dim, dim)
        linear(f"{layer}.attention.output.dense", dim, dim)
        norm(f"{layer}.LayerNorm")
        linear(f"{layer}.intermediate.dense", 4 * dim, dim)
        linear(f"{layer}.output.dense", dim, 4 * dim)
    norm("encoder.emb_layer_norm_after")
    return weights


def _config(shape: ESM2Shape) -> dict[str, object]:
    return {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        "vocab_size": N_TOKENS,
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.dim,
        "num_attention_heads": shape.n_heads,
        "intermediate_size": 4 * shape.dim,
        "hidden_act": "gelu",
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "token_dropout": shape.token_dropout,
        "layer_norm_eps": 1e-05,
        "mask_token_id": 32,
        "pad_token_id": 1,
        "max_position_embeddings": 1026,
    }
