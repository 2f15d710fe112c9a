"""Load ESM-2 weights from fair-esm's ``.pt``, a Hugging Face folder, or our converted copy.

Checkpoints are recognised by their content, not by file names. No code in them is ever run: ``.pt``
files are read with ``weights_only=True``, and safetensors contain only tensors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.checkpoint import LAYER_NORM_EPS
from virnucpro.models.converted import is_converted, load_converted
from virnucpro.models.esm2.config import (
    HEADS_FAIR_ESM,
    HUGGING_FACE,
    KIND,
    N_TOKENS,
    ESM2Shape,
    ESM2Tensors,
    contacts_path,
    infer_shape,
    not_esm2_error,
    open_folder,
)
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.family import ModelFile
from virnucpro.models.protein_tokens import SpecialToken
from virnucpro.models.safe_pickle import check_plain, read_pt
from virnucpro.models.transformer import allocate, copy_tensors, iter_tensors

ROTARY = "layers.0.self_attn.rot_emb.inv_freq"  # in fair-esm; the same in every layer
# our module name -> fair-esm's; {} is the layer number
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


def load_esm2(path: Path, layer: int | None, dtype: torch.dtype, device: torch.device) -> ESM2:
    """Load the first ``layer`` layers of a checkpoint or its converted copy onto ``device``.

    None stands for all layers. Matrix products use ``dtype``.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    if is_converted(path):
        return load_converted(
            path, dtype, device, lambda shape: empty_model(ESM2Shape(**shape), layer, dtype)
        )
    tensors = open_tensors(path)
    return create_esm2(infer_shape(tensors), tensors, layer, dtype, device)


def read_heads(path: Path) -> dict[str, Tensor]:
    """Read the heads of a checkpoint, by the names in ``HeadScheme``.

    The contact head of a ``.pt`` may be in a file next to it.

    Raises:
        UnavailableError: the checkpoint or the file next to it cannot be used.
    """
    tensors = open_tensors(path)
    heads = tensors.heads.read(tensors)
    contacts = contacts_path(path)
    if "contacts.weight" not in heads and path.is_file() and contacts.is_file():
        contact_file = _open_pt(contacts)
        heads |= replace(contact_file.heads, lm={}).read(contact_file)
    return heads


def create_esm2(
    shape: ESM2Shape,
    tensors: ESM2Tensors,
    layer: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> ESM2:
    """Make the first ``layer`` layers from tensors, read one by one. Raises as ``load_esm2``."""
    model = empty_model(shape, layer, dtype)
    allocate(model, dtype, device)
    rotary = tensors.scheme["inv_freq"]
    has_rotary = rotary in tensors.names  # otherwise it is computed
    parts = split_tensors(model, tensors.scheme)
    copy_tensors((each for each in parts if each[0] != rotary or has_rotary), tensors)
    return model


def empty_model(shape: ESM2Shape, layer: int | None, dtype: torch.dtype = torch.float32) -> ESM2:
    """Make the first ``layer`` layers, or all, without weights."""
    with torch.device("meta"):
        return ESM2(shape, shape.n_layers if layer is None else layer, dtype)


def split_tensors(model: ESM2, scheme: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by their names in a checkpoint with this naming scheme.

    Queries, keys and values are three tensors in the checkpoint, and views of one tensor here.
    """
    return iter_tensors(model, scheme, {"qkv": ("q", "k", "v")})


def fair_esm_state_dict(path: Path) -> dict[str, Tensor]:
    """Load the encoder's tensors with fair-esm's names, from any format.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    tensors = open_tensors(path)
    shape = infer_shape(tensors)
    stub = empty_model(shape, shape.n_layers)
    names = zip(split_tensors(stub, FAIR_ESM), split_tensors(stub, tensors.scheme), strict=True)
    return {
        name: tensors.get(stored_name)
        for (name, _), (stored_name, _) in names
        if name != ROTARY or stored_name in tensors.names
    }


def save_esm2(folder: Path, model: ESM2, extra: Mapping[str, Tensor] = {}) -> None:
    """Write a complete model as a Hugging Face folder, which ``load_esm2`` reads back bit for bit.

    Args:
        folder: the folder to write.
        model: the model, with all layers.
        extra: tensors in addition to the encoder, by their names in transformers, for example
            ``lm_head.dense.weight``. With them the folder is an ``EsmForMaskedLM``, otherwise an
            ``EsmModel``.
    """
    assert len(model.layers) == model.shape.n_layers, "a model up to an earlier layer is not whole"
    tensors = {f"esm.{name}": tensor for name, tensor in split_tensors(model, HUGGING_FACE)}
    tensors |= extra
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    architecture = "EsmForMaskedLM" if extra else "EsmModel"
    folder.mkdir(exist_ok=True)
    SafeDir(folder).write_file(folder / ModelFile.WEIGHTS, save(content, metadata={"format": "pt"}))
    SafeDir(folder).write_json(folder / ModelFile.CONFIG, _config(model.shape, architecture))


def _config(shape: ESM2Shape, architecture: str) -> dict[str, object]:
    """Make the content of ``config.json``, for transformers."""
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
        "mask_token_id": SpecialToken.MASK,
        "pad_token_id": SpecialToken.PAD,
        "max_position_embeddings": 1026,
    }


def load_complete(path: Path, dtype: torch.dtype) -> ESM2:
    """Load all layers of a checkpoint on the CPU. Raises as ``load_esm2``."""
    tensors = open_tensors(path)
    shape = infer_shape(tensors)
    return create_esm2(shape, tensors, shape.n_layers, dtype, torch.device("cpu"))


def open_tensors(path: Path) -> ESM2Tensors:
    """Open the tensors of a checkpoint. Raises as ``inspect_esm2``."""
    return open_folder(path, "pt") if path.is_dir() else _open_pt(path)


def _open_pt(path: Path) -> ESM2Tensors:
    content = read_pt(path, KIND, [argparse.Namespace])
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise not_esm2_error(path, "no state dict under 'model'")
    fairseq_prefix = re.compile(r"^(encoder\.sentence_encoder\.|encoder\.)")
    tensors = {
        fairseq_prefix.sub("", name): value
        for name, value in content["model"].items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    section = content.get("cfg", {})
    namespace = section.get("model") if isinstance(section, dict) else None

    def read(name: str, n_rows: int | None) -> Tensor:
        check_plain(tensors[name])
        return tensors[name].detach()[:n_rows]  # a parameter would require gradients

    return ESM2Tensors(
        path=path,
        names=frozenset(tensors),
        scheme=FAIR_ESM,
        heads=HEADS_FAIR_ESM,
        n_heads=getattr(namespace, "encoder_attention_heads", None),
        token_dropout=bool(getattr(namespace, "token_dropout", True)),
        read=read,
    )
