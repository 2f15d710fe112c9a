"""Write a scorer as the file that VirNucPro reads: ``virnucpro.scorer.nets`` says what it has."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from virnucpro.ground.files import atomic
from virnucpro.scorer.nets import (
    DIGESTS,
    FORMAT,
    PROTEINS,
    WINDOWS,
    Nets,
    PieceNets,
    ProteinNets,
    Scorer,
)


def save_scorer(path: Path, scorer: Scorer) -> None:
    """Write a scorer, but for the hash of its file; the same bytes for the same scorer."""
    tensors: dict[str, NDArray[Any]] = {
        "words.buckets": scorer.pieces[0].words.n_of_bucket,
        "words.entries": scorer.pieces[0].words.entries,
    }
    for nets in scorer.pieces:
        tensors |= _tensors(str(nets.size), nets)
    tensors |= _tensors(WINDOWS, scorer.windows)
    if scorer.proteins:
        tensors |= _protein_tensors(scorer.proteins)
    tensors |= {name: getattr(scorer, name) for name in DIGESTS}
    facts = {
        "format": FORMAT,
        "pieces": [_facts(nets) for nets in scorer.pieces],
        WINDOWS: _facts(scorer.windows),
        "windows_knot": asdict(scorer.windows_knot),
        **_by_length(scorer),
        PROTEINS: scorer.proteins
        and {"n_viral": scorer.proteins.nets.n_viral, **_by_length(scorer.proteins)},
    }
    content = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    with atomic(path) as temporary:
        temporary.write_bytes(save(content, metadata={"facts": json.dumps(facts)}))


def _by_length(of: Scorer | ProteinNets) -> dict[str, Any]:
    return {
        "knots": [asdict(knot) for knot in of.knots],
        "error_rates": [asdict(rates) for rates in of.error_rates],
        "training": of.training,
    }


def _tensors(name: str, nets: PieceNets) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        f"{name}.mean": nets.mean,
        f"{name}.deviation": nets.deviation,
    }
    for view, of_view in nets.views.items():
        tensors |= _layers(f"{name}.{view}", of_view)
    return tensors


def _protein_tensors(proteins: ProteinNets) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        f"{PROTEINS}.mean": proteins.mean,
        f"{PROTEINS}.deviation": proteins.deviation,
    }
    tensors |= {f"{PROTEINS}.patterns.{i}": ratios for i, ratios in enumerate(proteins.ratios)}
    return tensors | _layers(PROTEINS, proteins.nets)


def _layers(name: str, nets: Nets) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {}
    for i, (weight, bias) in enumerate(nets.layers):
        tensors |= {f"{name}.{i}.weight": weight, f"{name}.{i}.bias": bias}
    return tensors


def _facts(nets: PieceNets) -> dict[str, Any]:
    return {
        "size": nets.size,
        "shortest": nets.shortest,
        "longest": nets.longest,
        "part": nets.part,
        "views": {view: of_view.n_viral for view, of_view in nets.views.items()},
    }
