"""Write a scorer as the file that VirNucPro reads; ``virnucpro.viral.networks`` describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from virnucpro.core.atomic_io import atomic_path
from virnucpro.viral.networks import (
    ALL,
    DIGESTS,
    FORMAT,
    PROKARYOTIC,
    PROTEINS,
    VIEWS,
    WINDOWS,
    NetworkStack,
    PieceNetworks,
    ProteinNetworks,
    Scorer,
    Stack,
)


def save_scorer(path: Path, scorer: Scorer) -> None:
    """Write a scorer without the hash of its file. The same scorer gives the same bytes."""
    tensors: dict[str, NDArray[Any]] = {
        "words.buckets": scorer.pieces[0].kmers.bucket_sizes,
        "words.entries": scorer.pieces[0].kmers.entries,
    }
    for nets in scorer.pieces:
        tensors |= _tensors(str(nets.size), nets.nets, _views(nets))
    tensors |= _tensors(WINDOWS, scorer.windows.nets, _views(scorer.windows))
    if scorer.proteins:
        tensors |= _protein_tensors(scorer.proteins)
    tensors |= {name: getattr(scorer, name) for name in DIGESTS}
    metadata = {
        "format": FORMAT,
        "pieces": [_network_metadata(nets) for nets in scorer.pieces],
        WINDOWS: _network_metadata(scorer.windows),
        "windows_knot": asdict(scorer.windows_knot),
        **_calibration(scorer),
        "kingdoms": [asdict(kingdom) for kingdom in scorer.kingdoms],
        PROTEINS: scorer.proteins
        and {"n_viral": scorer.proteins.nets.stacks[0][1], **_calibration(scorer.proteins)},
    }
    content = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(content, metadata={"facts": json.dumps(metadata)}))


def _calibration(model: Scorer | ProteinNetworks) -> dict[str, Any]:
    return {
        "knots": [asdict(knot) for knot in model.knots],
        "error_rates": [asdict(rates) for rates in model.error_rates],
        "training": model.training,
    }


def _views(nets: PieceNetworks) -> dict[int, str]:
    """Return the name of each view that the networks read, by its first column."""
    names = {columns.start or 0: view for view, columns in VIEWS.items() if view != ALL}
    return {column: names[column] for column in nets.nets.stacks}


def _by_view(nets: NetworkStack, views: Mapping[int, str]) -> dict[str, Stack]:
    stacks = {views[column]: stack for column, stack in nets.stacks.items()}
    return stacks if nets.prokaryotic is None else stacks | {PROKARYOTIC: nets.prokaryotic}


def _tensors(name: str, nets: NetworkStack, views: Mapping[int, str]) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        f"{name}.centre": nets.centre,
        f"{name}.scale": nets.scale,
    }
    for view, (layers, _) in _by_view(nets, views).items():
        view_name = f"{name}.{view}" if view else name
        for i, layer in enumerate(layers):
            names = (f"{view_name}.{i}.{field}" for field in ("weight", "start", "worth"))
            tensors |= zip(names, layer, strict=True)
    return tensors


def _protein_tensors(proteins: ProteinNetworks) -> dict[str, NDArray[Any]]:
    ratios = {f"{PROTEINS}.patterns.{i}": ratios for i, ratios in enumerate(proteins.ratios)}
    return ratios | _tensors(PROTEINS, proteins.nets, {0: ALL})


def _network_metadata(nets: PieceNetworks) -> dict[str, Any]:
    stacks = _by_view(nets.nets, _views(nets))
    return {
        "size": nets.size,
        "shortest": nets.shortest,
        "longest": nets.longest,
        "part": nets.part,
        "views": {view: n_viral for view, (_, n_viral) in stacks.items()},
    }
