"""Recognise ESM C checkpoints by their configuration and tensor names.

Two layouts are in use. ``transformers`` 5.23 and newer writes one tensor per matrix. The published
files (``biohub/ESMC-*``) concatenate queries, keys and values, and the MLP's gate and projection.
Both layouts are read by the names in ``transformers``. A concatenated tensor is read part by part.

Reading a folder needs torch only for number types that numpy lacks (bf16).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from virnucpro.models.checkpoint import (
    ROPE_THETA,
    Tensors,
    count_bytes,
    identify,
    is_safetensors,
    open_slices,
    read_config,
    read_slice,
)
from virnucpro.models.family import ModelFile
from virnucpro.models.head_tensors import HeadScheme

MODEL_TYPE = "esmc"  # in config.json
N_TOKENS = 64  # rows in the embedding; the last 31 have no token
_LAYER = re.compile(r"(?:layers|transformer\.blocks)\.(\d+)\.(.+)")
# our module name -> transformers' name; {} is the layer number
TRANSFORMERS = {
    "embedding": "embed_tokens",
    "final_norm": "norm",
    "attention_norm": "layers.{}.input_layernorm",
    "q": "layers.{}.self_attn.q_proj",
    "k": "layers.{}.self_attn.k_proj",
    "v": "layers.{}.self_attn.v_proj",
    "q_norm": "layers.{}.self_attn.q_norm",
    "k_norm": "layers.{}.self_attn.k_norm",
    "attention_out": "layers.{}.self_attn.o_proj",
    "mlp_norm": "layers.{}.post_attention_layernorm",
    "gate": "layers.{}.mlp.gate_proj",
    "up": "layers.{}.mlp.up_proj",
    "down": "layers.{}.mlp.down_proj",
}
# our module name -> its names in transformers, in the published files, and in earlier ones
HEADS = HeadScheme(
    lm={
        f"lm.{module}.{kind}": tuple(f"{stored}.{kind}" for stored in stored_modules)
        for module, stored_modules in {
            "dense": ("lm_head.dense", "lm_head.0", "sequence_head.0"),
            "norm": ("lm_head.layer_norm", "lm_head.2", "sequence_head.2"),
            "decoder": ("lm_head.decoder", "lm_head.3", "sequence_head.3"),
        }.items()
        for kind in ("weight", "bias")
    }
)
# config.json keys: in transformers, on the Hub
_SIZES = {
    "n_layers": ("num_hidden_layers", "n_layers"),
    "dim": ("hidden_size", "d_model"),
    "n_heads": ("num_attention_heads", "n_heads"),
    "inner": ("intermediate_size",),
}


@dataclass(frozen=True, slots=True)
class ESMCShape:
    """The dimensions of an ESM C."""

    n_layers: int
    dim: int
    n_heads: int
    inner: int  # MLP width

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def n_parameters(self) -> int:
        """Count the encoder's parameters, without the language-model head."""
        per_layer = 4 * self.dim**2 + 3 * self.dim * self.inner + 6 * self.dim
        return self.n_layers * per_layer + (N_TOKENS + 1) * self.dim

    @property
    def branch_scale(self) -> float:
        """Return the factor for each branch where it joins the residual stream.

        The published factor is 1 / sqrt(layers / 36). Without it, the stream would grow in deep
        models.
        """
        scaled_layers = 36  # layers of the model whose branches are added without a scale
        return float((scaled_layers / self.n_layers) ** 0.5)


def inner_of(dim: int) -> int:
    """Return the MLP width of a published model: 8/3 of ``dim``, in multiples of 256.

    >>> inner_of(960), inner_of(1152), inner_of(2560)
    (2560, 3072, 6912)
    """
    return -(-8 * dim // (3 * 256)) * 256


class _Part(NamedTuple):
    """A tensor within a stored tensor: one of ``n_parts`` equal blocks of rows."""

    stored: Any  # a safetensors slice, read on demand
    position: int
    n_parts: int

    def read(self, n_rows: int | None) -> Any:  # noqa: ANN401 - of numpy or torch
        """Read the first ``n_rows`` rows, or all.

        Raises:
            ValueError: the tensor does not contain floats, or cannot be split equally.
        """
        n_stored = self.stored.get_shape()[0]
        size, rest = divmod(n_stored, self.n_parts)
        if rest:
            raise ValueError(f"{n_stored} rows are not {self.n_parts} equal parts")
        return read_slice(self.stored, self.position * size, min(size, n_rows or size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ESMCTensors(Tensors):
    """The tensors of an ESM C by their names in transformers, and its configuration."""

    kind: str = "an ESM C checkpoint"
    config: Mapping[str, Any]  # empty: a file without a configuration


def is_esmc(path: Path) -> bool:
    """Return True for a folder with an ESM C configuration, and for any safetensors file.

    No other family reads a file that is not an ESM C, so this family's error says what it lacks.
    """
    if path.is_dir():
        return read_config(path).get("model_type") == MODEL_TYPE
    return is_safetensors(path)


def open_tensors(path: Path, framework: Literal["np", "pt"]) -> ESMCTensors:
    """Open a folder or a file. torch reads the number types that numpy lacks.

    The configuration for a file is ``config.json`` next to it, if that describes an ESM C.

    Raises:
        UnavailableError: the path contains another model, or is damaged.
    """
    parts = dict(_find_parts(open_slices(path, framework)))
    config = read_config(path if path.is_dir() else path.parent)
    if path.is_file() and config.get("model_type") != MODEL_TYPE:
        config = {}
    return ESMCTensors(
        path=path,
        names=frozenset(parts),
        read=lambda name, n_rows: parts[name].read(n_rows),
        config=config,
    )


def _find_parts(slices: Mapping[str, Any]) -> Iterator[tuple[str, _Part]]:
    """Yield the tensors with their names in transformers, from either layout."""
    outside_layers = {
        "embed.weight": "embed_tokens.weight",
        "transformer.norm.weight": "norm.weight",
    }
    prefix = "esmc."  # in a model with a head
    # concatenated tensors in a layer on the Hub -> their parts in transformers
    joined = {
        "attn.layernorm_qkv.layer_norm_weight": ("input_layernorm.weight",),
        "attn.layernorm_qkv.layer_norm_bias": ("input_layernorm.bias",),
        "attn.layernorm_qkv.weight": (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
        ),
        "attn.q_ln.weight": ("self_attn.q_norm.weight",),
        "attn.k_ln.weight": ("self_attn.k_norm.weight",),
        "attn.out_proj.weight": ("self_attn.o_proj.weight",),
        "ffn.layer_norm_weight": ("post_attention_layernorm.weight",),
        "ffn.layer_norm_bias": ("post_attention_layernorm.bias",),
        "ffn.fc1_weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "ffn.fc2_weight": ("mlp.down_proj.weight",),
    }
    for stored_name, stored in slices.items():
        name = stored_name.removeprefix(prefix)
        if not (match := _LAYER.fullmatch(name)):
            yield outside_layers.get(name, name), _Part(stored, 0, 1)
            continue
        layer, rest = match.groups()
        names = joined.get(rest, (rest,))
        for position, part_name in enumerate(names):
            yield f"layers.{layer}.{part_name}", _Part(stored, position, len(names))


def infer_shape(tensors: ESMCTensors) -> ESMCShape:
    """Infer the dimensions of the ESM C with these tensors.

    Only the configuration has the number of heads. Without one, each head has 64 dimensions, as in
    every published model.

    Raises:
        UnavailableError: the tensors are not an ESM C, or are damaged.
    """
    head_dim = 64  # in every published model
    matches = [match for name in tensors.names if (match := _LAYER.fullmatch(name))]
    numbers = {int(match[1]) for match in matches}
    embedding = tensors.get(f"{TRANSFORMERS['embedding']}.weight")
    down = tensors.get(f"{TRANSFORMERS['down'].format(0)}.weight", n_rows=1)
    if embedding.ndim != 2 or down.ndim != 2:
        raise tensors.error("its embedding or a matrix of its MLP has not two dimensions")
    if len(embedding) != N_TOKENS or numbers != set(range(len(numbers))):
        raise tensors.error(f"{len(embedding)} tokens and {len(numbers)} layers")
    dim = embedding.shape[1]
    inner = down.shape[1]
    n_heads = _read_size(tensors, "n_heads") or dim // head_dim
    shape = ESMCShape(n_layers=len(numbers), dim=dim, n_heads=n_heads, inner=inner)
    if not tensors.config and dim % head_dim:
        raise tensors.error(
            f"{dim} dimensions are no heads of {head_dim}; "
            f"put its {ModelFile.CONFIG} next to the file"
        )
    if n_heads < 1 or dim % (2 * n_heads):
        raise tensors.error(f"{n_heads} heads in {dim} dimensions")
    _check_config(tensors, shape)
    n_bytes = count_bytes(tensors.path)
    if shape.n_parameters > n_bytes:
        raise tensors.error(f"{n_bytes} bytes cannot hold {shape.n_parameters} parameters")
    return shape


def _read_size(tensors: ESMCTensors, name: str) -> int | None:
    """Read a size from the configuration. Return None if it is absent.

    Raises:
        UnavailableError: the value is not a count.
    """
    for key in _SIZES[name]:
        if (value := tensors.config.get(key)) is None:
            continue
        if type(value) is not int or value < 1:
            raise tensors.error(f"its {key} is {value!a}")
        return value
    return None


def _check_config(tensors: ESMCTensors, shape: ESMCShape) -> None:
    """Compare the configuration with the tensors' shape.

    Raises:
        UnavailableError: the configuration describes another model than the tensors.
    """
    config = tensors.config
    for name in _SIZES:
        stated = _read_size(tensors, name)
        actual = getattr(shape, name)
        if stated not in (None, actual):
            raise tensors.error(
                f"{ModelFile.CONFIG} says {name} {stated}, and the tensors {actual}"
            )
    rotary = config.get("rope_parameters") or {}
    if not isinstance(rotary, dict):
        raise tensors.error(f"its rope_parameters are {rotary!a}")
    fixed = {  # other values of these keys would mean another architecture
        "vocab_size": N_TOKENS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    expected = {
        **fixed,
        "num_key_value_heads": shape.n_heads,
        "head_dim": shape.head_dim,
        "rope_theta": ROPE_THETA,
        "rope_type": "default",
    }
    settings = {**config, **rotary}
    for name, value in expected.items():
        if settings.get(name) not in (None, value):
            raise tensors.error(f"its {name} is {settings[name]!a}, not {value!a}")


def tensor_names(n_layers: int) -> Iterator[tuple[str, bool]]:
    """Yield the names of all tensors, and whether they are matrices in a layer.

    Matrices in layers are converted to the dtype of the precision. Everything else stays in
    float32.
    """
    with_bias = ("attention_norm", "mlp_norm")
    norms = ("attention_norm", "q_norm", "k_norm", "mlp_norm")
    matrices = ("q", "k", "v", "attention_out", "gate", "up", "down")
    yield f"{TRANSFORMERS['embedding']}.weight", False
    yield f"{TRANSFORMERS['final_norm']}.weight", False
    for layer in range(n_layers):
        for module in (*matrices, *norms):
            stored = TRANSFORMERS[module].format(layer)
            yield f"{stored}.weight", module in matrices
            if module in with_bias:
                yield f"{stored}.bias", False


def identify_esmc(shape: ESMCShape, tensors: ESMCTensors) -> str:
    """Hash the embedding, the last norm, and the first row of every matrix."""
    complete = [f"{TRANSFORMERS[name]}.weight" for name in ("embedding", "final_norm")]
    matrices = [name for name, is_matrix in tensor_names(shape.n_layers) if is_matrix]
    return identify(shape, tensors, complete, matrices)
