"""The weights of an ESM-2: fair-esm's ``.pt``, a Hugging Face folder, or our converted copy.

Checkpoints are recognised by their content, not by file names. No code in them is ever run: ``.pt``
files are read with ``weights_only=True``, and safetensors hold only tensors.

A large checkpoint is converted once, to our names and the run's precision. The folder of converted
copies has, for each content and precision, the copy and a JSON with its hash; and for each path of
a checkpoint a note with the checkpoint's hash, so that it need not be read again. The parent
verifies the copy once per run. Every worker then maps it, so all share one copy of the weights in
the machine's page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from virnucpro.core.atomic_io import atomic_path, hash_file, parse_json, read_json
from virnucpro.core.errors import OutputError, StorageError, UnavailableError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.recipe import Precision
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.base import DAMAGE, Model, progress_of
from virnucpro.models.esm2.attention import choose_kernel
from virnucpro.models.esm2.config import (
    HUGGING_FACE,
    KIND,
    LAYER_NORM_EPS,
    MASK,
    N_TOKENS,
    PAD,
    ESM2Shape,
    Tensors,
    check_numbers,
    hash_weights,
    infer_shape,
    not_esm2_error,
    open_folder,
    weight_files,
)
from virnucpro.models.esm2.model import DTYPES, ESM2, rotary_frequencies
from virnucpro.models.safe_pickle import check_plain, read_pt

_FAIRSEQ_PREFIX = re.compile(r"^(encoder\.sentence_encoder\.|encoder\.)")
ROTARY = "layers.0.self_attn.rot_emb.inv_freq"  # in fair-esm; the same in every layer
# our name of a module -> fair-esm's; {} is the number of the layer
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
_FORMAT = "2"  # copies of format 1 may hold numbers that are not finite
_SHA256 = re.compile("[0-9a-f]{64}")
_SUFFIX = ".virnucpro.safetensors"
_STALE_SECONDS = 86_400  # older unfinished files have no writer any more


def load_esm2(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    """Load the first ``layer`` layers of a checkpoint or of its converted copy onto ``device``.

    Matrix products are in ``dtype``.

    Raises:
        UnavailableError: it cannot be used.
    """
    if is_converted(path):
        return _load_converted(path, layer, dtype, device)
    tensors = open_tensors(path)
    return create_esm2(infer_shape(tensors), tensors, layer, dtype, device)


def create_esm2(
    shape: ESM2Shape, tensors: Tensors, layer: int, dtype: torch.dtype, device: torch.device
) -> ESM2:
    """Make the first ``layer`` layers from tensors, read one by one. As ``load_esm2``."""
    model = empty_model(shape, layer, dtype)
    # ``to_empty``, and ``empty_like`` of what is on "meta", import sympy: half a second
    memory = {
        name: torch.empty(stub.shape, dtype=stub.dtype, device=device)
        for name, stub in model.state_dict().items()
    }
    model.load_state_dict(memory, assign=True)
    model.attend = choose_kernel(device, dtype, shape.head_dim)
    model.eval().requires_grad_(False)
    for name, part in split_tensors(model, tensors.scheme):
        if name == tensors.scheme["inv_freq"] and name not in tensors.names:
            content = rotary_frequencies(shape.head_dim)
        else:
            content = tensors.get(name)
        if part.shape != content.shape:
            raise not_esm2_error(tensors.path, f"a tensor of shape {tuple(content.shape)}")
        part.copy_(content)
    return model


def empty_model(shape: ESM2Shape, layer: int, dtype: torch.dtype = torch.float32) -> ESM2:
    """Make the first ``layer`` layers without their weights."""
    with torch.device("meta"):
        return ESM2(shape, layer, dtype)


def split_tensors(model: ESM2, scheme: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by their names in a checkpoint with this naming scheme.

    Queries, keys and values are three tensors there, and views of one here.
    """
    yield scheme["inv_freq"], model.inv_freq
    modules = [(0, *each) for each in model.named_children() if each[1] is not model.layers]
    for number, layer in enumerate(model.layers):
        modules += [(number, *each) for each in layer.named_children()]
    for number, name, module in modules:
        names = tuple(name) if name == "qkv" else (name,)
        for kind, tensor in module.named_parameters():
            for each, part in zip(names, tensor.chunk(len(names)), strict=True):
                yield f"{scheme[each].format(number)}.{kind}", part


def fair_esm_state_dict(path: Path) -> dict[str, Tensor]:
    """The encoder's tensors by fair-esm's names, from any format.

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
    """Write a whole model as a Hugging Face folder, which ``load_esm2`` reads back bit for bit.

    ``extra`` holds tensors in addition to the encoder, by their names in transformers, for example
    ``lm_head.dense.weight``: with them the folder is an ``EsmForMaskedLM``, else an ``EsmModel``.
    """
    assert len(model.layers) == model.shape.n_layers, "a model up to an earlier layer is not whole"
    tensors = {f"esm.{name}": tensor for name, tensor in split_tensors(model, HUGGING_FACE)}
    tensors |= extra
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    architecture = "EsmForMaskedLM" if extra else "EsmModel"
    folder.mkdir(exist_ok=True)
    SafeDir(folder).write_bytes(
        folder / "model.safetensors", save(content, metadata={"format": "pt"})
    )
    SafeDir(folder).write_json(folder / "config.json", _config(model.shape, architecture))


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
    """Load a whole checkpoint in float32 and check every number.

    Raises:
        UnavailableError: a tensor is missing, of another shape, or not finite.
    """
    tensors = open_tensors(path)
    shape = infer_shape(tensors)
    model = create_esm2(shape, tensors, shape.n_layers, torch.float32, torch.device("cpu"))
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UnavailableError(
                f"{printable(path)}: {name} holds a number that is not finite",
                hint="the file is damaged: download it again",
            )


def open_tensors(path: Path) -> Tensors:
    """The tensors of a checkpoint. Raises as ``inspect_esm2``."""
    return open_folder(path, "pt") if path.is_dir() else _open_pt(path)


def _open_pt(path: Path) -> Tensors:
    content = read_pt(path, KIND, [argparse.Namespace])
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise not_esm2_error(path, "no state dict under 'model'")
    tensors = {
        _FAIRSEQ_PREFIX.sub("", name): value
        for name, value in content["model"].items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    section = content.get("cfg", {})
    namespace = section.get("model") if isinstance(section, dict) else None

    def read(name: str, n_rows: int | None) -> Tensor:
        check_plain(tensors[name])
        return tensors[name].detach()[:n_rows]  # a parameter would require gradients

    return Tensors(
        path=path,
        names=frozenset(tensors),
        scheme=FAIR_ESM,
        n_heads=getattr(namespace, "encoder_attention_heads", None),
        token_dropout=bool(getattr(namespace, "token_dropout", True)),
        read=read,
    )


# Converted checkpoints


def prepare(
    model: Model, shape: ESM2Shape, precision: Precision, on_event: EventHandler
) -> tuple[Path, str]:
    """The file that workers map, converted if necessary, and the checkpoint's SHA-256.

    Path, size and times identify a checkpoint that was read before. If the converted file cannot
    be written, workers map the checkpoint itself.
    """
    n_bytes, dtype = model.footprint.file_bytes, DTYPES[precision]
    folder = Path(torch.hub.get_dir()) / "virnucpro"  # users may delete it at any time
    note = _write_note(model, folder)
    noted = _note_conversion(note, "source_sha256")
    hashing, checking = (
        progress_of(f"{stage} the model", n_bytes, on_event) for stage in ("hashing", "checking")
    )
    digest = noted or hash_weights(model.path, hashing)
    copy = folder / f"{digest[:16]}_{str(dtype).removeprefix('torch.')}{_SUFFIX}"
    metadata = {
        "format": _FORMAT,
        "shape": json.dumps(asdict(shape)),
        "dtype": str(dtype),
        "encoder_id": model.encoder_id,
        "source_sha256": digest,
    }
    try:
        if not _is_complete(copy, metadata, checking):
            check_numbers(model.name, shape, open_tensors(model.path), precision)
            on_event(Progress("converting the model, this once", 0, 0, "bytes"))
            _convert(model, metadata, dtype, copy)
            LOGGER.info("converted model: %s", printable(copy))
        if digest != noted:
            SafeDir(folder).write_json(note, {"source_sha256": digest})
    except (OSError, OutputError, StorageError) as error:
        LOGGER.warning(
            "the converted model cannot be kept in %s (%s): every worker reads all of %s",
            printable(folder),
            printable(error),
            printable(model.path),
        )
        return model.path, digest
    return copy, digest


def _note_conversion(path: Path, name: str) -> str:
    """The hash in a file of ours; empty if the file is missing or damaged."""
    try:
        digest = str(read_json(path)[name])
    except DAMAGE:
        return ""
    return digest if _SHA256.fullmatch(digest) else ""


def _convert(model: Model, metadata: dict[str, str], dtype: torch.dtype, copy: Path) -> None:
    """Write the converted copy of a checkpoint, and its hash next to it.

    Raises:
        UnavailableError: the checkpoint cannot be used.
        OSError, OutputError, StorageError: the folder cannot be written.
    """
    folder = copy.parent
    folder.mkdir(parents=True, exist_ok=True)
    # files of killed conversions, ours and safetensors' own
    for leftover in folder.glob(".*"):
        if leftover.is_file() and leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
            leftover.unlink(missing_ok=True)
    whole = load_esm2(model.path, model.n_layers, dtype, torch.device("cpu"))
    with atomic_path(copy) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # others may read it if they may read other files
        try:
            save_file(whole.state_dict(), temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{printable(copy)}: {printable(error)}") from error
        temporary.chmod(mode)
        digest = hash_file(temporary)
    facts = {"sha256": digest, "made of": str(model.path)}
    SafeDir(folder).write_json(copy.with_suffix(".json"), facts)


def is_converted(path: Path) -> bool:
    return path.name.endswith(_SUFFIX) and path.is_file()


def _load_converted(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    try:
        with safe_open(path, framework="pt") as handle:
            facts = handle.metadata()
            if facts["dtype"] != str(dtype):
                raise ValueError(f"it holds {facts['dtype']}")
            shape = ESM2Shape(**parse_json(facts["shape"]))
            model = empty_model(shape, layer, dtype)
            tensors = {name: handle.get_tensor(name) for name in model.state_dict()}
        model.load_state_dict(tensors, assign=True)
    except DAMAGE as error:
        raise UnavailableError(
            f"{printable(path)} cannot be used: {printable(error)}",
            hint="delete it: it is made again from the model",
        ) from error
    model.attend = choose_kernel(device, dtype, shape.head_dim)
    return model.to(device).eval().requires_grad_(False)


def _is_complete(path: Path, metadata: object, on_bytes: Callable[[int], None]) -> bool:
    """True if a converted copy has these facts and its recorded hash."""
    try:
        with safe_open(path, framework="pt") as handle:
            if handle.metadata() != metadata:
                return False
        return hash_file(path, on_bytes) == _note_conversion(path.with_suffix(".json"), "sha256")
    except DAMAGE:
        return False


def _write_note(model: Model, folder: Path) -> Path:
    """The path of the note for a checkpoint at this path, with this size and these times."""
    digest = hashlib.sha256()
    for file in weight_files(model.path):
        stat = file.stat()
        where = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        digest.update(repr(where).encode())
    return folder / f"seen_{digest.hexdigest()[:16]}.json"
