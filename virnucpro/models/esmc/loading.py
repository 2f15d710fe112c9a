"""Load ESM C weights from a checkpoint or our converted copy, or make random ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.converted import is_converted, load_converted
from virnucpro.models.esmc.config import (
    HEADS,
    MODEL_TYPE,
    N_TOKENS,
    TRANSFORMERS,
    ESMCShape,
    infer_shape,
    open_tensors,
)
from virnucpro.models.esmc.model import ESMC
from virnucpro.models.family import ModelFile
from virnucpro.models.transformer import allocate, copy_tensors, iter_tensors

# our modules -> the modules in transformers that they concatenate


def load_esmc(path: Path, layer: int | None, dtype: torch.dtype, device: torch.device) -> ESMC:
    """Load the first ``layer`` layers of a checkpoint or its converted copy onto ``device``.

    None stands for all layers. Matrix products use ``dtype``.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    if is_converted(path):
        return load_converted(
            path, dtype, device, lambda shape: empty_esmc(ESMCShape(**shape), layer, dtype)
        )
    tensors = open_tensors(path, "pt")
    model = empty_esmc(infer_shape(tensors), layer, dtype)
    allocate(model, dtype, device)
    copy_tensors(split_esmc(model), tensors)
    return model


def load_complete(path: Path, dtype: torch.dtype) -> ESMC:
    """Load all layers of a checkpoint on the CPU. Raises as ``load_esmc``."""
    return load_esmc(path, None, dtype, torch.device("cpu"))


def read_heads(path: Path) -> dict[str, Tensor]:
    """Read the heads of a checkpoint, by the names in ``HeadScheme``.

    Raises:
        UnavailableError: the checkpoint cannot be used.
    """
    return HEADS.read(open_tensors(path, "pt"))


def empty_esmc(shape: ESMCShape, layer: int | None, dtype: torch.dtype = torch.float32) -> ESMC:
    """Make the first ``layer`` layers, or all, without weights."""
    with torch.device("meta"):
        return ESMC(shape, shape.n_layers if layer is None else layer, dtype)


def split_esmc(model: ESMC) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model by their names in transformers, as views."""
    joined = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
    return iter_tensors(model, TRANSFORMERS, joined)


def random_esmc(shape: ESMCShape, seed: int) -> ESMC:
    """Make an ESM C with random weights, in which every part affects the result.

    Matrices preserve vector length, and norms scale each number slightly differently. Numbers stay
    small for any number of layers.
    """
    model = ESMC(shape, shape.n_layers, torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name == "embedding.weight":
            nn.init.normal_(parameter, generator=generator)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            mean = 1.0 if name.endswith("weight") else 0.0
            nn.init.normal_(parameter, mean=mean, std=0.1, generator=generator)
    return model


def save_esmc(folder: Path, model: ESMC) -> None:
    """Write a complete model as a Hugging Face folder, as transformers does.

    ``load_esmc`` reads it back bit for bit.
    """
    assert len(model.layers) == model.shape.n_layers, "a model up to an earlier layer is incomplete"
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in split_esmc(model)}
    folder.mkdir(exist_ok=True)
    SafeDir(folder).write_file(folder / ModelFile.WEIGHTS, save(content, metadata={"format": "pt"}))
    SafeDir(folder).write_json(folder / ModelFile.CONFIG, config_of(model.shape))


def config_of(shape: ESMCShape) -> dict[str, object]:
    """Make the content of ``config.json``, for transformers."""
    sizes = asdict(shape)
    return {
        "architectures": ["EsmcModel"],
        "model_type": MODEL_TYPE,
        "vocab_size": N_TOKENS,
        "num_hidden_layers": sizes["n_layers"],
        "hidden_size": sizes["dim"],
        "num_attention_heads": sizes["n_heads"],
        "intermediate_size": sizes["inner"],
        "hidden_act": "silu",
    }
