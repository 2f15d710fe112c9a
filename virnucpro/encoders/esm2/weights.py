"""Find, inspect, load and save an ESM-2: fair-esm's ``.pt`` or a Hugging Face folder.

The content of a checkpoint says what it is; file names are not trusted. Nothing in it is ever run:
``.pt`` files are read with ``weights_only=True``, and safetensors hold only tensors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from virnucpro.encoders.esm2.attention import choose_kernel
from virnucpro.encoders.esm2.checkpoint import (
    HUGGING_FACE,
    KIND,
    LAYER_NORM_EPS,
    MASK,
    N_TOKENS,
    PAD,
    Checkpoint,
    ESM2Shape,
    Tensors,
    inspect_tensors,
    not_esm2,
    open_folder,
)
from virnucpro.encoders.esm2.model import ESM2, rotary_frequencies
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.files import write_json, write_whole
from virnucpro.ground.log import printable
from virnucpro.ground.tensors import check_plain, read_pt

_FAIRSEQ_PREFIX = re.compile(r"^(encoder\.sentence_encoder\.|encoder\.)")
ROTARY = "layers.0.self_attn.rot_emb.inv_freq"  # in fair-esm; the same in every layer
# our module's name -> what fair-esm calls it; {} is the number of the layer
FAIR_ESM = {
    "embedding": "embed_tokens",
    "final_norm": "emb_layer_norm_after",
    "inv_freq": ROTARY,
    "attention_norm": "layers.{}.self_attn_layer_norm",
    "q": "layers.{}.self_attn.q_proj",
    "k": "layers.{}.self_attn.k_proj",
    "v": "layers.{}.self_attn.v_proj",
    "attention_out": "layers.{}.self_attn.out_proj",
    "mlp_norm": "layers.{}.final_layer_norm",
    "up": "layers.{}.fc1",
    "down": "layers.{}.fc2",
}
_SAME_NAME = ("attention_norm", "attention_out", "mlp_norm", "up", "down")


def inspect_checkpoint(path: Path) -> Checkpoint:
    """
    Raises:
        UnavailableError: it is not an ESM-2, is damaged, or holds more than tensors.
    """
    if not path.exists():
        raise UnavailableError(
            f"{printable(path)}: no such file or folder",
            hint="`virnucpro models list` shows what is here, `models download` fetches",
        )
    return inspect_tensors(_open(path))


def load_esm2(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    """Load the first ``layer`` layers onto ``device``, matrix products in ``dtype``.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    return make_esm2(inspect_checkpoint(path).shape, _open(path), layer, dtype, device)


def make_esm2(
    shape: ESM2Shape, tensors: Tensors, layer: int, dtype: torch.dtype, device: torch.device
) -> ESM2:
    """The first ``layer`` layers of these tensors, which are read one by one. As ``load_esm2``."""
    path = tensors.path
    with torch.device("meta"):
        model = ESM2(shape, layer, dtype, choose_kernel(device, dtype, shape.head_dim))
    # ``to_empty``, and ``empty_like`` of what is on "meta", import sympy: half a second
    memory = {
        name: torch.empty(stub.shape, dtype=stub.dtype, device=device)
        for name, stub in model.state_dict().items()
    }
    model.load_state_dict(memory, assign=True)
    model.eval().requires_grad_(False)
    _fill(model.embedding, tensors, "embedding", ("weight",))
    for number, module in enumerate(model.layers):
        for name in _SAME_NAME:
            _fill(getattr(module, name), tensors, name, ("weight", "bias"), number)
        for kind in ("weight", "bias"):
            parts = [tensors.get(name, kind, number) for name in "qkv"]
            _copy(getattr(module.qkv, kind), torch.cat(parts), path)
    if isinstance(model.final_norm, nn.LayerNorm):
        _fill(model.final_norm, tensors, "final_norm", ("weight", "bias"))
    if tensors.has("inv_freq"):
        _copy(model.inv_freq, tensors.get("inv_freq"), path)
    else:
        _copy(model.inv_freq, rotary_frequencies(shape.head_dim), path)
    return model


def fair_esm_state(path: Path) -> dict[str, Tensor]:
    """The encoder's tensors by the names that fair-esm gives them, whatever the format.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    n_layers, tensors = inspect_checkpoint(path).shape.n_layers, _open(path)
    state = {}
    if tensors.has("inv_freq"):
        state[ROTARY] = tensors.get("inv_freq")
    for name, theirs in FAIR_ESM.items():
        kinds = {"inv_freq": (), "embedding": ("weight",)}.get(name, ("weight", "bias"))
        for layer in range(n_layers if "{}" in theirs else 1):
            for kind in kinds:
                state[f"{theirs.format(layer)}.{kind}"] = tensors.get(name, kind, layer)
    return state


def save_esm2(folder: Path, model: ESM2, extra: Mapping[str, Tensor] = {}) -> None:
    """Write a whole model as a Hugging Face folder, from which ``load_esm2`` has every bit again.

    ``extra`` holds tensors beside the encoder, by their names in transformers, for example
    ``lm_head.dense.weight``: with them the folder is an ``EsmForMaskedLM``, else an ``EsmModel``.
    """
    assert len(model.layers) == model.shape.n_layers, "an earlier layer's model is not whole"
    tensors = {f"esm.{HUGGING_FACE['embedding']}.weight": model.embedding.weight}
    for kind in ("weight", "bias"):
        tensors[f"esm.{HUGGING_FACE['final_norm']}.{kind}"] = getattr(model.final_norm, kind)
    tensors[f"esm.{HUGGING_FACE['inv_freq']}"] = model.inv_freq
    for number, module in enumerate(model.layers):
        for kind in ("weight", "bias"):
            parts = {name: getattr(getattr(module, name), kind) for name in _SAME_NAME}
            qkv: Tensor = getattr(module.qkv, kind)
            parts |= zip("qkv", qkv.chunk(3), strict=True)
            for name, tensor in parts.items():
                tensors[f"esm.{HUGGING_FACE[name].format(number)}.{kind}"] = tensor
    tensors |= extra
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    architecture = "EsmForMaskedLM" if extra else "EsmModel"
    folder.mkdir(exist_ok=True)
    write_whole(folder / "model.safetensors", save(content, metadata={"format": "pt"}))
    write_json(folder / "config.json", _config(model.shape, architecture))


def _config(shape: ESM2Shape, architecture: str) -> dict[str, object]:
    """The content of ``config.json``, for transformers."""
    return {
        "architectures": [architecture],
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
        "layer_norm_eps": LAYER_NORM_EPS,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "max_position_embeddings": 1026,
    }


def verify_checkpoint(path: Path) -> Checkpoint:
    """Load all of a checkpoint in float32 and look at every number.

    Raises:
        UnavailableError: a tensor is missing, of another shape, or not finite.
    """
    checkpoint = inspect_checkpoint(path)
    model = load_esm2(path, checkpoint.shape.n_layers, torch.float32, torch.device("cpu"))
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UnavailableError(
                f"{printable(path)}: {name} holds a number that is not finite",
                hint="the file is damaged: download it again",
            )
    return checkpoint


def _fill(
    module: object, tensors: Tensors, name: str, kinds: tuple[str, ...], layer: int = 0
) -> None:
    for kind in kinds:
        _copy(getattr(module, kind), tensors.get(name, kind, layer), tensors.path)


@torch.no_grad()
def _copy(target: Tensor, source: Tensor, path: Path) -> None:
    if target.shape != source.shape:
        raise not_esm2(path, f"a tensor of shape {tuple(source.shape)}")
    target.copy_(source)


def _open(path: Path) -> Tensors:
    return open_folder(path, "pt") if path.is_dir() else _open_pt(path)


def _open_pt(path: Path) -> Tensors:
    content = read_pt(path, KIND, [argparse.Namespace])
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise not_esm2(path, "no state dict under 'model'")
    tensors = {
        _FAIRSEQ_PREFIX.sub("", name): value
        for name, value in content["model"].items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    section = content.get("cfg", {})
    namespace = section.get("model") if isinstance(section, dict) else None

    def read(name: str, n_rows: int | None) -> Tensor:
        check_plain(tensors[name])
        return tensors[name][:n_rows]

    return Tensors(
        path=path,
        names=frozenset(tensors),
        scheme=FAIR_ESM,
        n_heads=getattr(namespace, "encoder_attention_heads", None),
        token_dropout=bool(getattr(namespace, "token_dropout", True)),
        read=read,
    )
