"""Recognise ESM-2 checkpoints by the names, shapes and first rows of their tensors.

Reading a folder needs torch only for number types that numpy lacks (bf16).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from virnucpro.core.atomic_io import read_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.models.checkpoint import (
    INVALID_CONTENT,
    LAYER_NORM_EPS,
    ROPE_THETA,
    Tensors,
    count_bytes,
    identify,
    open_slices,
    read_slice,
    unreadable_error,
)
from virnucpro.models.family import ModelFile
from virnucpro.models.head_tensors import HeadScheme

N_TOKENS = 33
CONTACTS_SUFFIX = "-contact-regression"  # in the name of a file with a contact head
KIND = "an ESM-2 checkpoint"
# our module name -> Hugging Face's; {} is the layer number
HUGGING_FACE = {
    "embedding": "embeddings.word_embeddings",
    "final_norm": "encoder.emb_layer_norm_after",
    "inv_freq": "encoder.layer.0.attention.self.rotary_embeddings.inv_freq",
    "attention_norm": "encoder.layer.{}.attention.LayerNorm",
    "q": "encoder.layer.{}.attention.self.query",
    "k": "encoder.layer.{}.attention.self.key",
    "v": "encoder.layer.{}.attention.self.value",
    "attention_out": "encoder.layer.{}.attention.output.dense",
    "mlp_norm": "encoder.layer.{}.LayerNorm",
    "up": "encoder.layer.{}.intermediate.dense",
    "down": "encoder.layer.{}.output.dense",
}
# the contact head in transformers and in fair-esm
CONTACTS = {
    "contacts.weight": ("contact_head.regression.weight",),
    "contacts.bias": ("contact_head.regression.bias",),
}


def _make_head_scheme(decoder: str, embedding: str) -> HeadScheme:
    """List the names of the heads' tensors.

    Args:
        decoder: the decoder's name.
        embedding: the embedding's name. The decoder is tied to it, and then often not stored.
    """
    lm = {
        "lm.dense.weight": ("lm_head.dense.weight",),
        "lm.dense.bias": ("lm_head.dense.bias",),
        "lm.norm.weight": ("lm_head.layer_norm.weight",),
        "lm.norm.bias": ("lm_head.layer_norm.bias",),
        "lm.decoder.bias": ("lm_head.bias",),
        "lm.decoder.weight": (f"{decoder}.weight", f"{embedding}.weight"),
    }
    return HeadScheme(lm=lm, contacts=CONTACTS)


HEADS_FAIR_ESM = _make_head_scheme("lm_head", "embed_tokens")
_MATRICES = ("q", "k", "v", "attention_out", "up", "down")


@dataclass(frozen=True, slots=True)
class ESM2Shape:
    """The dimensions of an ESM-2."""

    n_layers: int
    dim: int
    n_heads: int
    token_dropout: bool = True

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def n_parameters(self) -> int:
        """Count the encoder's parameters, without LM and contact heads."""
        per_layer = 12 * self.dim**2 + 13 * self.dim
        return self.n_layers * per_layer + (N_TOKENS + 2) * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ESM2Tensors(Tensors):
    """The tensors in an ESM-2 checkpoint, with the values in its configuration."""

    kind: str = KIND
    scheme: Mapping[str, str]  # our module name -> its name in the checkpoint
    heads: HeadScheme
    n_heads: Any  # from the configuration, if it has the number
    token_dropout: bool


def infer_shape(tensors: ESM2Tensors) -> ESM2Shape:
    """Infer the dimensions of the ESM-2 with these tensors.

    Raises:
        UnavailableError: the checkpoint is not an ESM-2, or is damaged.
    """
    path = tensors.path
    scheme = tensors.scheme
    try:
        layer_number = re.compile(r"(?:^|\.)layers?\.(\d+)\.")
        numbers = {int(match[1]) for name in tensors.names if (match := layer_number.search(name))}
        embedding = tensors.get(f"{scheme['embedding']}.weight")
        if len(embedding) != N_TOKENS or numbers != set(range(len(numbers))) or not numbers:
            raise not_esm2_error(path, f"{len(embedding)} tokens and {len(numbers)} layers")
        dim = embedding.shape[1]
        n_heads = int(tensors.n_heads or 0) or dim // (2 * len(tensors.get(scheme["inv_freq"])))
        if n_heads < 1 or not dim or dim % (2 * n_heads):
            raise not_esm2_error(path, f"{n_heads} heads in {dim} dimensions")
    except INVALID_CONTENT as error:
        raise not_esm2_error(path, error) from error
    shape = ESM2Shape(len(numbers), dim, n_heads, tensors.token_dropout)
    n_bytes = count_bytes(path)
    if shape.n_parameters > n_bytes:
        raise not_esm2_error(path, f"{n_bytes} bytes cannot hold {shape.n_parameters} parameters")
    return shape


def tensor_names(tensors: ESM2Tensors, n_layers: int) -> Iterator[tuple[str, bool]]:
    """Yield the names of all tensors, and whether they are matrices in a layer.

    Matrices in layers are converted to the dtype of the precision. Everything else stays in
    float32.
    """
    norms = ("attention_norm", "mlp_norm")
    scheme = tensors.scheme
    yield f"{scheme['embedding']}.weight", False
    for kind in ("weight", "bias"):
        yield f"{scheme['final_norm']}.{kind}", False
    if scheme["inv_freq"] in tensors.names:
        yield scheme["inv_freq"], False
    for layer in range(n_layers):
        for module in (*_MATRICES, *norms):
            for kind in ("weight", "bias"):
                yield f"{scheme[module].format(layer)}.{kind}", module in _MATRICES


def identify_esm2(shape: ESM2Shape, tensors: ESM2Tensors) -> str:
    """Hash the embedding, the last norm, and the first row of every matrix."""
    scheme = tensors.scheme
    matrices = [
        f"{scheme[name].format(layer)}.weight"
        for layer in range(shape.n_layers)
        for name in _MATRICES
    ]
    complete = [f"{scheme[name]}.weight" for name in ("embedding", "final_norm")]
    return identify(shape, tensors, complete, matrices)


def open_folder(path: Path, framework: Literal["np", "pt"]) -> ESM2Tensors:
    """Open the tensors in a Hugging Face folder. torch reads the types that numpy lacks.

    Raises:
        UnavailableError: the folder is not an ESM-2, or is damaged.
    """
    try:
        settings = read_json(path / ModelFile.CONFIG)
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from error
    parts = {_published_name(name): part for name, part in open_slices(path, framework).items()}
    if not isinstance(settings, dict) or settings.get("model_type") != "esm":
        raise not_esm2_error(path, "config.json of another kind of model")
    if settings.get("position_embedding_type") != "rotary" or settings.get("emb_layer_norm_before"):
        raise not_esm2_error(path, "config.json of an ESM-1 model")
    if settings.get("rope_theta", ROPE_THETA) != ROPE_THETA:
        raise not_esm2_error(path, f"rope_theta is {settings['rope_theta']}")
    if settings.get("layer_norm_eps", LAYER_NORM_EPS) != LAYER_NORM_EPS:
        raise not_esm2_error(path, f"layer_norm_eps is {settings['layer_norm_eps']}")
    return ESM2Tensors(
        path=path,
        names=frozenset(parts),
        scheme=HUGGING_FACE,
        heads=_make_head_scheme("lm_head.decoder", HUGGING_FACE["embedding"]),
        n_heads=settings.get("num_attention_heads"),
        token_dropout=bool(settings.get("token_dropout", True)),
        read=lambda name, n_rows: read_slice(parts[name], 0, n_rows),
    )


def _published_name(stored_name: str) -> str:
    """Return the usual name of a tensor, because versions of transformers differ."""
    name = stored_name.removeprefix("esm.")
    if name.endswith("rotary_embeddings.inv_freq"):  # in each layer, in "*", or in the model
        return HUGGING_FACE["inv_freq"]
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def contacts_path(path: Path) -> Path:
    """Return the file next to a ``.pt`` with its contact head, as fair-esm names it."""
    return path.with_name(f"{path.stem}{CONTACTS_SUFFIX}.pt")


def not_esm2_error(path: Path, why: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not {KIND}: {printable(why)}", hint="see `virnucpro models list`"
    )
