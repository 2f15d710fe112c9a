"""Read the published heads of the original VirNucPro, and convert them once.

``500_model.pth`` and ``300_model.pth`` are pickles of a torch module with a hidden layer, a batch
norm and an output layer (github.com/Li-Jing-1997/VirNucPro @ 0f93f27). Only the tensors are read.
The batch norm is folded into the hidden layer, so the head has two layers.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.models.base import Model
from virnucpro.models.lookup import fetch_head
from virnucpro.models.safe_pickle import check_plain, read_pt
from virnucpro.viral.head import EncoderInfo, Head, HeadInfo, Network


class _Module(nn.Module):
    """An empty substitute for the original class: a pickle can only put data into it."""


def find_head(bundle: str, models: tuple[Model, ...], on_event: EventHandler) -> Path:
    """Return the bundled head for these encoders. Download it if needed, and convert it once.

    Raises:
        UnavailableError: the download fails, or the path contains a different file.
    """
    source, chunk_size = fetch_head(bundle, on_event)
    encoders = tuple(map(EncoderInfo.from_spec, models))
    converted = source.with_name("head.safetensors")
    with suppress(UnavailableError):  # it does not exist yet, or is damaged
        if Head.load(converted).facts.encoders == encoders:
            return converted
    load_legacy_head(source, encoders, chunk_size).save(converted)
    return converted


def load_legacy_head(path: Path, encoders: tuple[EncoderInfo, ...], chunk_size: int) -> Head:
    """Read the head in a ``.pth`` file, for the concatenated vectors of these encoders.

    Raises:
        UnavailableError: the file does not contain such a head, is damaged, or contains code, which
            is never run.
    """
    kind = "a head of VirNucPro"
    allowed_classes = (
        (_Module, "__main__.MLPClassifier"),
        nn.Linear,
        nn.BatchNorm1d,
        nn.Dropout,
        set,
    )
    module = read_pt(path, kind, allowed_classes)
    facts = HeadInfo(
        encoders=encoders,
        chunk_size=chunk_size,
        threshold=0.5,
        frame_rule="max",
        exponent=1.0,
        training=(
            "published by the authors of VirNucPro; frames and chunks are called as they call "
            "them; the call of a record is ours: the mean of its chunks' log-odds"
        ),
    )
    try:
        weight, bias = (_to_array(module, "hidden_layer", name) for name in ("weight", "bias"))
        scale, shift, mean, variance = (
            _to_array(module, "bn1", name)
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        epsilon = _tensor_part(module, "bn1").eps
        if not isinstance(epsilon, float) or not epsilon > 0 or (variance < 0).any():
            raise ValueError("the batch norm has no valid variance")
        scale = scale / np.sqrt(variance + epsilon)
        hidden = (scale[:, None] * weight, scale * (bias - mean) + shift)
        out = tuple(_to_array(module, "output_layer", name) for name in ("weight", "bias"))
        layers = tuple((w.astype(np.float32), b.astype(np.float32)) for w, b in (hidden, out))
        return Head(facts, Network(layers))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not {kind}: {printable(error)}",
            hint="get the published head with `virnucpro models download virnucpro-500`",
        ) from error


def _tensor_part(module: object, layer: str) -> nn.Module:
    part = module._modules.get(layer) if isinstance(module, _Module) else None
    if not isinstance(part, nn.Module):
        raise TypeError(f"it has no {layer}")
    return part


def _to_array(module: object, layer: str, name: str) -> NDArray[np.float64]:
    """Return a layer's tensor, in float64."""
    part = _tensor_part(module, layer)
    tensor = (part._parameters | part._buffers).get(name)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{layer}.{name} is not a tensor")
    check_plain(tensor)
    numbers: NDArray[np.float64] = tensor.detach().double().numpy()
    return numbers
