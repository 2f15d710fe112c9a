"""Find, inspect, load and save an ESM-2: fair-esm's ``.pt`` or a Hugging Face folder.

The content of a checkpoint says what it is; file names are not trusted. Nothing in it is ever run:
``.pt`` files are read with ``weights_only=True``, and safetensors hold only tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from virnucpro.encoders.esm2.alphabet import MASK, N_TOKENS, PAD
from virnucpro.encoders.esm2.attention import choose_kernel
from virnucpro.encoders.esm2.model import (
    ESM2,
    LAYER_NORM_EPS,
    ROPE_THETA,
    ESM2Shape,
    rotary_frequencies,
)
from virnucpro.errors import UnavailableError
from virnucpro.files import atomic, sha256
from virnucpro.log import printable
from virnucpro.tensors import check_stored, read_pt

_KIND = "an ESM-2 checkpoint"
_FAIRSEQ_PREFIX = re.compile(r"^(encoder\.sentence_encoder\.|encoder\.)")
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")

ROTARY = "layers.0.self_attn.rot_emb.inv_freq"  # in fair-esm; the same in every layer
# our module's name -> what the two formats call it; {} is the number of the layer
_FAIR_ESM = {
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
_HUGGING_FACE = {
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
# errors where tensors and figures fit no model
_NONSENSE = (TypeError, ValueError, IndexError, ArithmeticError, RuntimeError, SafetensorError)
_MATRICES = ("q", "k", "v", "attention_out", "up", "down")
_SAME_NAME = ("attention_norm", "attention_out", "mlp_norm", "up", "down")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An ESM-2 on disk, inspected but not loaded."""

    path: Path
    shape: ESM2Shape
    encoder_id: str  # the same for the same weights in either format
    family: ClassVar[str] = "esm2"
    reads: ClassVar[Literal["protein"]] = "protein"

    @property
    def dim(self) -> int:
        return self.shape.dim

    @property
    def n_layers(self) -> int:
        return self.shape.n_layers

    @property
    def name(self) -> str:
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def files(self) -> list[Path]:
        """The files that hold weights."""
        return _weight_files(self.path)

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def sha256(self, on_bytes: Callable[[int], None] = lambda _: None) -> str:
        """The SHA-256 of the file, or of the hashes of a folder's weight files in order."""
        files = self.files
        if len(files) == 1:
            return sha256(files[0], on_bytes)
        before, digests = 0, []
        for file in files:
            digests.append(sha256(file, lambda n, before=before: on_bytes(before + n)))  # type: ignore[misc]
            before += file.stat().st_size
        return hashlib.sha256("".join(digests).encode()).hexdigest()


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
    try:
        return _inspect(path)
    except _NONSENSE as error:
        raise _not_esm2(path, printable(error)) from error


def _inspect(path: Path) -> Checkpoint:
    tensors = _Tensors.open(path)
    numbers = {int(match[1]) for name in tensors.names if (match := _LAYER_NUMBER.search(name))}
    embedding = tensors.get("embedding", "weight")
    if len(embedding) != N_TOKENS or numbers != set(range(len(numbers))) or not numbers:
        raise _not_esm2(path, f"{len(embedding)} tokens and {len(numbers)} layers")
    dim = embedding.shape[1]
    n_heads = tensors.n_heads or dim // (2 * len(tensors.get("inv_freq")))
    if n_heads < 1 or not dim or dim % (2 * n_heads):
        raise _not_esm2(path, f"{n_heads} heads in {dim} dimensions")
    shape = ESM2Shape(len(numbers), dim, n_heads, tensors.token_dropout)
    checkpoint = Checkpoint(path, shape, _encoder_id(shape, tensors))
    if shape.n_parameters > checkpoint.n_bytes:
        raise _not_esm2(
            path, f"{checkpoint.n_bytes} bytes cannot hold {shape.n_parameters} parameters"
        )
    return checkpoint


def _encoder_id(shape: ESM2Shape, tensors: _Tensors) -> str:
    """A hash of the embedding, the last norm, and the first row of every matrix.

    Enough to tell a fine-tuned model from its original without reading gigabytes.
    """
    digest = hashlib.sha256(repr(shape).encode())
    parts = [tensors.get("embedding", "weight"), tensors.get("final_norm", "weight")]
    for layer in range(shape.n_layers):
        parts += [tensors.get(name, "weight", layer)[0] for name in _MATRICES]
    for part in parts:
        digest.update(part.float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def load_esm2(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    """Load the first ``layer`` layers onto ``device``, matrix products in ``dtype``.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    shape = inspect_checkpoint(path).shape
    tensors = _Tensors.open(path)
    with torch.device("meta"):
        model = ESM2(shape, layer, dtype, choose_kernel(device, dtype))
    model = model.to_empty(device=device).eval().requires_grad_(False)
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
    n_layers, tensors = inspect_checkpoint(path).shape.n_layers, _Tensors.open(path)
    state = {}
    if tensors.has("inv_freq"):
        state[ROTARY] = tensors.get("inv_freq")
    for name, theirs in _FAIR_ESM.items():
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
    tensors = {f"esm.{_HUGGING_FACE['embedding']}.weight": model.embedding.weight}
    for kind in ("weight", "bias"):
        tensors[f"esm.{_HUGGING_FACE['final_norm']}.{kind}"] = getattr(model.final_norm, kind)
    tensors[f"esm.{_HUGGING_FACE['inv_freq']}"] = model.inv_freq
    for number, module in enumerate(model.layers):
        for kind in ("weight", "bias"):
            parts = {name: getattr(getattr(module, name), kind) for name in _SAME_NAME}
            qkv: Tensor = getattr(module.qkv, kind)
            parts |= zip("qkv", qkv.chunk(3), strict=True)
            for name, tensor in parts.items():
                tensors[f"esm.{_HUGGING_FACE[name].format(number)}.{kind}"] = tensor
    tensors |= extra
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    architecture = "EsmForMaskedLM" if extra else "EsmModel"
    folder.mkdir(exist_ok=True)
    with atomic(folder / "model.safetensors") as temporary:
        temporary.write_bytes(save(content, metadata={"format": "pt"}))
    with atomic(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(_config(model.shape, architecture), indent=2) + "\n")


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
    module: object, tensors: _Tensors, name: str, kinds: tuple[str, ...], layer: int = 0
) -> None:
    for kind in kinds:
        _copy(getattr(module, kind), tensors.get(name, kind, layer), tensors.path)


@torch.no_grad()
def _copy(target: Tensor, source: Tensor, path: Path) -> None:
    if target.shape != source.shape:
        raise _not_esm2(path, f"a tensor of shape {tuple(source.shape)}")
    target.copy_(source)


class _Tensors:
    """The tensors of a checkpoint by our names, read when they are asked for."""

    def __init__(
        self,
        path: Path,
        read: Callable[[str], Tensor],
        names: tuple[str, ...],
        scheme: Mapping[str, str],
        config: Mapping[str, Any],
    ) -> None:
        self.path, self.names = path, frozenset(names)
        self.n_heads = int(config.get("n_heads") or 0)
        self.token_dropout = bool(config.get("token_dropout", True))
        self._read, self._scheme = read, scheme

    @classmethod
    def open(cls, path: Path) -> _Tensors:
        return _open_folder(path) if path.is_dir() else _open_pt(path)

    def has(self, name: str) -> bool:
        return self._scheme[name] in self.names

    def get(self, name: str, kind: str = "", layer: int = 0) -> Tensor:
        stored_name = self._scheme[name].format(layer) + (f".{kind}" if kind else "")
        if stored_name not in self.names:
            raise _not_esm2(self.path, f"no tensor {stored_name}")
        tensor = self._read(stored_name)
        try:
            check_stored(tensor)
        except ValueError as error:
            raise _not_esm2(self.path, printable(error)) from error
        return tensor


def _open_pt(path: Path) -> _Tensors:
    content = read_pt(path, _KIND, [argparse.Namespace])
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise _not_esm2(path, "no state dict under 'model'")
    tensors = {
        _FAIRSEQ_PREFIX.sub("", name): value
        for name, value in content["model"].items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    section = content.get("cfg", {})
    namespace = section.get("model") if isinstance(section, dict) else None
    config = {
        "n_heads": getattr(namespace, "encoder_attention_heads", 0),
        "token_dropout": getattr(namespace, "token_dropout", True),
    }
    return _Tensors(path, tensors.__getitem__, tuple(tensors), _FAIR_ESM, config)


def _open_folder(path: Path) -> _Tensors:
    try:
        settings = json.loads((path / "config.json").read_text())
        places = {}  # our name of a tensor -> its file and its name there
        for file in _weight_files(path):
            handle = safe_open(file, framework="pt")
            for name in handle.keys():  # type: ignore[no-untyped-call] # noqa: SIM118
                places[_usual_name(name)] = (handle, name)
    except (OSError, ValueError, SafetensorError) as error:
        raise UnavailableError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint="a model folder holds config.json and *.safetensors files",
        ) from error
    if not isinstance(settings, dict) or settings.get("model_type") != "esm":
        raise _not_esm2(path, "config.json of another kind of model")
    if settings.get("position_embedding_type") != "rotary" or settings.get("emb_layer_norm_before"):
        raise _not_esm2(path, "config.json of an ESM-1 model")
    if settings.get("rope_theta", ROPE_THETA) != ROPE_THETA:
        raise _not_esm2(path, f"rope_theta is {settings['rope_theta']}")
    if settings.get("layer_norm_eps", LAYER_NORM_EPS) != LAYER_NORM_EPS:
        raise _not_esm2(path, f"layer_norm_eps is {settings['layer_norm_eps']}")
    config = {
        "n_heads": settings.get("num_attention_heads", 0),
        "token_dropout": settings.get("token_dropout", True),
    }

    def read(name: str) -> Tensor:
        handle, stored_name = places[name]
        tensor: Tensor = handle.get_tensor(stored_name)  # type: ignore[no-untyped-call]
        return tensor

    return _Tensors(path, read, tuple(places), _HUGGING_FACE, config)


def _usual_name(stored_name: str) -> str:
    """The usual name of a tensor, whatever the version of transformers."""
    name = stored_name.removeprefix("esm.")
    if name.endswith("rotary_embeddings.inv_freq"):  # of each layer, of "*", or of the model
        return _HUGGING_FACE["inv_freq"]
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UnavailableError(
            f"{printable(path)}: no *.safetensors file in this folder",
            hint="save the model with safetensors: model.save_pretrained(folder)",
        )
    return files


def _not_esm2(path: Path, why: str) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not {_KIND}: {why}", hint="see `virnucpro models list`"
    )
