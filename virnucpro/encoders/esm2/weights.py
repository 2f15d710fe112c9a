"""The weights of an ESM-2: fair-esm's ``.pt``, a Hugging Face folder, or what those became.

The content of a checkpoint says what it is; file names are not trusted. Nothing in it is ever run:
``.pt`` files are read with ``weights_only=True``, and safetensors hold only tensors.

A large checkpoint is converted once: our names, the run's precision, mapped and not read. In the
folder stand, for each checkpoint's content and precision, the converted file and a JSON with its
hash; and for each place that a checkpoint was seen at, a note with the checkpoint's hash, so that
it need not be read again. The parent verifies the file once for a run; then every worker maps it,
so that all of them share one copy of the weights in the machine's page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from virnucpro.encoders.base import progress_of
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
    weight_files,
)
from virnucpro.encoders.esm2.model import DTYPES, ESM2, rotary_frequencies
from virnucpro.encoders.tensors import check_plain, read_pt
from virnucpro.ground.config import Precision
from virnucpro.ground.errors import OutputError, StorageError, UnavailableError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import (
    atomic,
    parse_json,
    read_json,
    sha256,
    write_json,
    write_whole,
)
from virnucpro.ground.log import LOGGER, printable

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
_FORMAT = "1"
_SUFFIX = ".virnucpro.safetensors"
_STALE_SECONDS = 86_400  # age after which a half written file has no writer any more
_DAMAGE = (OSError, ValueError, LookupError, TypeError, SafetensorError)

OnBytes = Callable[[int], None]


def load_esm2(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    """Load the first ``layer`` layers of a checkpoint or of its converted form onto ``device``.

    Matrix products are in ``dtype``.

    Raises:
        UnavailableError: it cannot be used.
    """
    if is_converted(path):
        return _load_converted(path, layer, dtype, device)
    tensors = open_tensors(path)
    return make_esm2(inspect_tensors(tensors).shape, tensors, layer, dtype, device)


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
    tensors = open_tensors(path)
    n_layers = inspect_tensors(tensors).n_layers
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


def verify_weights(path: Path) -> None:
    """Load all of a checkpoint in float32 and look at every number.

    Raises:
        UnavailableError: a tensor is missing, of another shape, or not finite.
    """
    tensors = open_tensors(path)
    shape = inspect_tensors(tensors).shape
    model = make_esm2(shape, tensors, shape.n_layers, torch.float32, torch.device("cpu"))
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UnavailableError(
                f"{printable(path)}: {name} holds a number that is not finite",
                hint="the file is damaged: download it again",
            )


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


def open_tensors(path: Path) -> Tensors:
    """The tensors of a checkpoint. Raises as ``inspect_esm2``."""
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


# Converted checkpoints


def converted_folder() -> Path:
    """The folder of converted large checkpoints; it may be deleted at any time."""
    return Path(torch.hub.get_dir()) / "virnucpro"


def prepare(
    checkpoint: Checkpoint, precision: Precision, folder: Path | None, on_event: OnEvent
) -> tuple[Path, str]:
    """The file that workers map, made if need be, and the checkpoint's SHA-256.

    If it cannot be kept, that is the checkpoint itself. ``folder`` None is the default one.
    """
    n_bytes, dtype, folder = checkpoint.n_bytes, DTYPES[precision], folder or converted_folder()
    checking = progress_of("checking the model", n_bytes, on_event)
    if converted := find_converted(checkpoint, dtype, folder, checking):
        return converted
    digest = checkpoint.sha256(progress_of("hashing the model", n_bytes, on_event))
    on_event(Progress("converting the model, this once", 0, 0, "bytes"))
    try:
        path = convert(checkpoint, digest, dtype, folder)
    except (OSError, OutputError, StorageError) as error:
        LOGGER.warning(
            "the converted model cannot be kept in %s (%s): every worker reads all of %s",
            printable(folder),
            printable(error),
            printable(checkpoint.path),
        )
        return checkpoint.path, digest
    LOGGER.info("converted model: %s", printable(path))
    return path, digest


def find_converted(
    checkpoint: Checkpoint, dtype: torch.dtype, folder: Path, on_bytes: OnBytes = lambda _: None
) -> tuple[Path, str] | None:
    """The converted form of a checkpoint, if it was made and is whole to the last bit.

    The checkpoint is known by place, size and times: it is not read again.
    -> the path, and the checkpoint's SHA-256
    """
    try:
        source_sha256 = str(read_json(_note(checkpoint, folder))["source_sha256"])
    except _DAMAGE:
        return None
    path = _find(checkpoint, source_sha256, dtype, folder, on_bytes)
    return (path, source_sha256) if path else None


def convert(checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype, folder: Path) -> Path:
    """The converted form of a checkpoint: written, or found to be that of another place.

    Raises:
        UnavailableError: the checkpoint cannot be used.
        OSError, OutputError, StorageError: the folder cannot be written.
    """
    path = _path(source_sha256, dtype, folder)
    is_made = _find(checkpoint, source_sha256, dtype, folder) is not None
    folder.mkdir(parents=True, exist_ok=True)
    if not is_made:
        _sweep(folder)
        _write(checkpoint, source_sha256, dtype, path)
    write_json(_note(checkpoint, folder), {"source_sha256": source_sha256})
    return path


def is_converted(path: Path) -> bool:
    return path.name.endswith(_SUFFIX) and path.is_file()


def _load_converted(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    try:
        with safe_open(path, framework="pt") as handle:
            facts = handle.metadata()
            if facts["dtype"] != str(dtype):
                raise ValueError(f"it holds {facts['dtype']}")
            shape = ESM2Shape(**parse_json(facts["shape"]))
            with torch.device("meta"):
                model = ESM2(shape, layer, dtype)
            tensors = {name: handle.get_tensor(name) for name in model.state_dict()}
        model.load_state_dict(tensors, assign=True)
    except (*_DAMAGE, RuntimeError) as error:
        raise UnavailableError(
            f"{printable(path)} cannot be used: {printable(error)}",
            hint="delete it: it is made again from the model",
        ) from error
    model.attend = choose_kernel(device, dtype, shape.head_dim)
    return model.to(device).eval().requires_grad_(False)


def _find(
    checkpoint: Checkpoint,
    source_sha256: str,
    dtype: torch.dtype,
    folder: Path,
    on_bytes: OnBytes = lambda _: None,
) -> Path | None:
    if not re.fullmatch("[0-9a-f]{64}", source_sha256):
        return None
    path = _path(source_sha256, dtype, folder)
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata()
        if metadata != _metadata(checkpoint, source_sha256, dtype):
            return None
        if read_json(path.with_suffix(".json"))["sha256"] != sha256(path, on_bytes):
            return None
    except _DAMAGE:
        return None
    return path


def _write(checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype, path: Path) -> None:
    model = load_esm2(checkpoint.path, checkpoint.shape.n_layers, dtype, torch.device("cpu"))
    with atomic(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # others may read it if they may read other files
        try:
            metadata = _metadata(checkpoint, source_sha256, dtype)
            save_file(model.state_dict(), temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{printable(path)}: {printable(error)}") from error
        temporary.chmod(mode)
        digest = sha256(temporary)
    write_json(path.with_suffix(".json"), {"sha256": digest, "made of": str(checkpoint.path)})


def _metadata(checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype) -> dict[str, str]:
    return {
        "format": _FORMAT,
        "shape": json.dumps(asdict(checkpoint.shape)),
        "dtype": str(dtype),
        "encoder_id": checkpoint.encoder_id,
        "source_sha256": source_sha256,
    }


def _path(source_sha256: str, dtype: torch.dtype, folder: Path) -> Path:
    precision = str(dtype).removeprefix("torch.")
    return folder / f"{source_sha256[:16]}_{precision}{_SUFFIX}"


def _note(checkpoint: Checkpoint, folder: Path) -> Path:
    """The note of a checkpoint; another place, size or time of it has another note."""
    digest = hashlib.sha256()
    for file in weight_files(checkpoint.path):
        stat = file.stat()
        where = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        digest.update(repr(where).encode())
    return folder / f"seen_{digest.hexdigest()[:16]}.json"


def _sweep(folder: Path) -> None:
    """Delete temporary files of killed conversions, ours and those of safetensors."""
    for leftover in folder.glob(".*"):
        if leftover.is_file() and leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
            leftover.unlink(missing_ok=True)
