"""A tiny DNABERT-S in the layout of the Hub, and its vectors computed from the formulas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
N_LAYERS = 2
DIM = 24
N_HEADS = 6
INNER = 40
N_MERGES = 80
EPS = 1e-12

State = dict[str, Tensor]


def make_words(seed: int = 0) -> tuple[list[str], list[tuple[str, str]]]:
    """Make words and merges. "AA" and "AAAA" are among them, which overlap themselves."""
    rng = np.random.default_rng(seed)
    words = [*SPECIAL, *"ACGT"]
    merges = [("A", "A"), ("AA", "AA")]
    words += ["AA", "AAAA"]
    while len(merges) < N_MERGES:
        left, right = (words[i] for i in rng.integers(len(SPECIAL), len(words), 2))
        if left + right not in words and len(left + right) < 10:
            words.append(left + right)
            merges.append((left, right))
    return words, merges


def merge_by_rank(text: str, words: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[int]:
    """Return the ids of a text by the definition: apply one merge after the other, everywhere."""
    row = [letter if letter in "ACGT" else "[UNK]" for letter in text]
    for left, right in merges:
        merged = []
        i = 0
        while i < len(row):
            is_pair = row[i : i + 2] == [left, right]
            merged.append(left + right if is_pair else row[i])
            i += 1 + is_pair
        row = merged
    return [1, *map(list(words).index, row), 2]


def make_state(n_words: int, seed: int = 0) -> State:
    """Make random weights under the Hub's names. All are large enough to change the result."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        scale = 1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        return scale * torch.randn(shape, generator=generator) + around

    state = {
        "embeddings.word_embeddings.weight": 0.2 * draw(n_words, DIM),
        "embeddings.token_type_embeddings.weight": 0.2 * draw(2, DIM),
        "pooler.dense.weight": draw(DIM, DIM),
        "pooler.dense.bias": draw(DIM),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(N_LAYERS):
        layer = f"encoder.layer.{i}"
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.mlp.layernorm"]
        state[f"{layer}.attention.self.Wqkv.weight"] = draw(3 * DIM, DIM)
        state[f"{layer}.attention.self.Wqkv.bias"] = draw(3 * DIM)
        state[f"{layer}.attention.output.dense.weight"] = draw(DIM, DIM)
        state[f"{layer}.attention.output.dense.bias"] = draw(DIM)
        state[f"{layer}.mlp.gated_layers.weight"] = draw(2 * INNER, DIM)
        state[f"{layer}.mlp.wo.weight"] = draw(DIM, INNER)
        state[f"{layer}.mlp.wo.bias"] = draw(DIM)
    for norm in norms:
        state |= {f"{norm}.weight": draw(DIM, around=1.0), f"{norm}.bias": draw(DIM)}
    return state


def write_dnabert(
    folder: Path, form: str = "pytorch_model.bin", state: State | None = None
) -> Path:
    """Write a model folder with its weights in a file with this name."""
    words, merges = make_words()
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "alibi_starting_size": 512,
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "layer_norm_eps": EPS,
        "model_type": "bert",
        "num_attention_heads": N_HEADS,
        "num_hidden_layers": N_LAYERS,
        "type_vocab_size": 2,
        "vocab_size": len(words),
    }
    tokenizer = {
        "truncation": {"max_length": 20},  # the result must not depend on it, as on padding
        "padding": {"strategy": {"Fixed": 20}, "pad_id": 3},
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "[UNK]",
            "fuse_unk": False,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [" ".join(merge) for merge in merges],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    state = make_state(len(words)) if state is None else state
    if form.endswith(".safetensors"):
        save_file(state, folder / form)
    else:
        torch.save(state, folder / form)
    return folder


def slopes(n_heads: int) -> list[float]:
    """Return the ALiBi slopes.

    For a power of two they are 2^(-8/n), its square, its cube and so on. Otherwise they are those
    of the next lower power, and then values in between.
    """
    power = 1
    while 2 * power <= n_heads:
        power *= 2
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(n_heads - power)]
    return first + between


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def forward(
    ids: Sequence[int],
    state: Mapping[str, Tensor],
    *,
    eps: float = EPS,
    gelu: Callable[[Tensor], Tensor] = gelu,
    slopes: Callable[[int], list[float]] = slopes,
    token_type: float = 1.0,
    gate_first: bool = True,
) -> Tensor:
    """Embed one text, (n_tokens, DIM) float64, with explicit scores, or with a mistake."""
    state = {name: tensor.double() for name, tensor in state.items()}
    place = torch.arange(len(ids), dtype=torch.float64)
    distance = (place[:, None] - place).abs()

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(dim=-1, keepdim=True)
        scale = torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
        return x / scale * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    x = state["embeddings.word_embeddings.weight"][list(ids)]
    type_embedding = token_type * state["embeddings.token_type_embeddings.weight"][0]
    x = norm(x + type_embedding, "embeddings.LayerNorm")
    for i in range(N_LAYERS):
        layer = f"encoder.layer.{i}"
        heads = []
        q, k, v = linear(x, f"{layer}.attention.self.Wqkv").chunk(3, dim=1)
        width = DIM // N_HEADS
        for head, slope in enumerate(slopes(N_HEADS)):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / width**0.5 - slope * distance
            heads.append(torch.softmax(scores, dim=1) @ v[:, part])
        attended = linear(torch.cat(heads, dim=1), f"{layer}.attention.output.dense")
        x = norm(x + attended, f"{layer}.attention.output.LayerNorm")
        halves = (x @ state[f"{layer}.mlp.gated_layers.weight"].T).chunk(2, dim=1)
        gate, up = halves if gate_first else halves[::-1]
        x = norm(x + linear(gelu(gate) * up, f"{layer}.mlp.wo"), f"{layer}.mlp.layernorm")
    return x
